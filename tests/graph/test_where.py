"""The names of modules, and the module and line of a running operation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from graphs import X
from marks import line_of
from networks import NormLast, Plain, PreNorm, Scaled, stack
from torch import Tensor, nn

import lit_resinit
from lit_resinit import apply_, make_plan, observe
from lit_resinit.graph.trace import trace
from lit_resinit.graph.where import clean_name, locate, user_line


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


# -------------------------------------------------------------------- whose line it is


PACKAGE = Path(lit_resinit.__file__).parent
ASKING = """
def user():
    return user_line(1)

def place():
    return locate({}, 1)[1]
"""


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_a_line_of_the_package_is_never_the_users(file: Path) -> None:
    asking: dict[str, Any] = {"user_line": user_line, "locate": locate}
    exec(compile(ASKING, str(file), "exec"), asking)
    for ask in (asking["user"], asking["place"]):
        assert ask().startswith(f"{__file__}:")


@pytest.mark.parametrize("build", [Plain, Scaled, NormLast, PreNorm], ids=lambda b: b.__name__)
def test_no_line_of_the_package_is_in_a_graph_or_a_verdict(build: Callable[[], nn.Module]) -> None:
    model = stack(build)
    plan = make_plan(model, X)
    apply_(model, plan)
    graph = trace(model, (X,))
    told = [graph.source(node.index) for node in graph.nodes]
    with observe(model, plan, X) as seen:
        model(X).square().mean().backward()
    told += [verdict.source or "" for verdict in seen.gradients.gates.values()]
    assert any(networks.__file__ in line for line in told)
    assert [line for line in told if str(PACKAGE) in line] == []


class Asking(nn.Module):
    def forward(self, depth: int) -> tuple[tuple[str, str], tuple[str, str]]:
        return asked({id(self): "asking"}, depth)  # asked


def asked(names: dict[int, str], depth: int) -> tuple[tuple[str, str], tuple[str, str]]:
    return locate(names, depth), locate({}, depth)  # asking


def test_places_are_counted_in_frames_from_who_asks() -> None:
    here = f"{Path(__file__).parent}/{line_of(__file__, 'asked')}"
    assert Asking().forward(2) == (("asking", here), ("", here))
    assert Asking().forward(1) == (("asking", here), ("", here.rpartition("/")[0] + "/" + line_of(__file__, "asking")))
