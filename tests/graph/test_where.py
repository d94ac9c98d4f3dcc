"""The names of modules, and the module and line of a running operation."""

from pathlib import Path

import networks
import torch
from graphs import X
from networks import Plain, stack
from torch import Tensor, nn

from lit_resinit.graph.trace import trace
from lit_resinit.graph.where import clean_name


def test_operations_know_their_module_and_line() -> None:
    graph = trace(stack(Plain), (X,))
    sums = [n.index for n in graph.nodes if n.op == "add" and graph.owner(n.index) in ("0", "1")]
    assert [graph.owner(n) for n in sums] == ["0", "1"]
    lines = Path(networks.__file__).read_text().splitlines()
    for node in sums:
        file, _, line = graph.source(node).rpartition(":")
        assert file == networks.__file__
        assert lines[int(line) - 1].strip() == "return x + self.f(x)"


def test_a_forward_called_directly_still_has_its_owner() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Plain()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner.forward(x)

    graph = trace(Direct(), (X,))
    assert graph.executed["inner"] == 1


def test_names_of_compiled_modules_are_those_of_the_state_dict() -> None:
    graph = trace(torch.compile(stack(Plain), backend="eager"), (X,))
    assert {n.name for n in graph.nodes if n.op == "parameter"} == set(stack(Plain).state_dict())
    assert clean_name("_orig_mod.a._orig_mod.b") == "a.b"
    assert clean_name("a._orig_mod") == "a"
