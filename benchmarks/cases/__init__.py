"""Small models with a known answer; see :mod:`cases.base`."""
