"""One thread, the benchmarks' folder, and the warnings of other packages that no code of ours causes."""

import sys
from pathlib import Path

import pytest
import torch

import lit_resinit  # noqa: F401 - as it is installed: loaded before this checkout comes into view

# for the benchmarks and the cases, which are not installed
sys.path.insert(0, str(Path(__file__).parent.parent))

# Later lines win over earlier ones, so these stand after "error" of pyproject.toml.
_IGNORED = (
    # Lightning 2.6 asks torch's tree utilities for a class that torch 2.14 renamed
    "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning",
    # torch on a reentrant checkpoint whose input needs no gradient: the very network that some cases are about
    "ignore:None of the inputs have requires_grad=True:UserWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    for line in _IGNORED:
        config.addinivalue_line("filterwarnings", line)
