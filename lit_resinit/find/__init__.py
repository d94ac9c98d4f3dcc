"""Which sums are residual, and what closes them; knows no scheme."""
