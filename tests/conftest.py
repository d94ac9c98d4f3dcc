"""One thread, the benchmarks' folder, and the warnings of other packages that no code of ours causes."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lit_resinit  # noqa: F401 - as it is installed: loaded before this checkout comes into view
from lit_resinit.graph import trace
from lit_resinit.graph.values import Graph, check

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


@pytest.fixture(autouse=True)
def _every_traced_graph_is_written_in_the_language(monkeypatch: pytest.MonkeyPatch) -> None:
    fullest = trace._fullest

    def checked(attempt: Callable[[float | None], Graph]) -> Graph:
        graph = fullest(attempt)
        assert check(graph) == []
        return graph

    monkeypatch.setattr(trace, "_fullest", checked)
