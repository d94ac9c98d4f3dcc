"""Networks drawn from a grammar, written out as Python source, whose residual additions are known by construction."""
