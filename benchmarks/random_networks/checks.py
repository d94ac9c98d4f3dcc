"""What has to be true of a random network: the plan, the closed network, its gates, and equal networks' plans."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import itertools
import pickle
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.random_networks.grammar import (
    Spec,
    has_no_ops,
    scales_its_stream,
    simpler,
    spelled_otherwise,
    without_no_ops,
)
from benchmarks.random_networks.source import Writer
from benchmarks.zoo import loss_of, tensors_of
from lit_resinit import NoBranchError, ResidualPlan, apply_, check_identity, fold_, make_plan, observe

LIMIT = 20  # seconds for one network
OPENED, ROUNDING = -0.7, 1e-3  # of scalars before they are folded; what may differ then, relative to the largest value
DRAWS = 4  # of random numbers, before a gate that nothing explains counts as cut off
_modules = itertools.count()


@dataclasses.dataclass(frozen=True)
class Failure:
    """A statement that does not hold: which, and what was found instead."""

    check: str
    found: str


class _Failed(Exception):  # noqa: N818 - caught here
    def __init__(self, check: str, found: str) -> None:
        self.failure = Failure(check, " ".join(found.split()))


def failure_of(spec: Spec, *, properties: bool = False) -> Failure | None:
    """The first statement that does not hold for a network, or None.

    Args:
        spec: The network.
        properties: Whether the plans of networks that are the same in other words are compared too.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            with _time_limit():
                _check(spec, Path(folder), properties)
        except _Failed as failed:
            return failed.failure
        except Exception as error:
            return Failure(type(error).__name__, " ".join(str(error).split()))
    return None


def shrunk(spec: Spec, failure: Failure) -> Spec:
    """The smallest network in which the same statement does not hold."""
    smaller = True
    while smaller:
        smaller = False
        for other in simpler(spec):
            found = failure_of(other, properties=failure.check.startswith("same plan"))
            if found is not None and found.check == failure.check:
                spec, smaller = other, True
                break
    return spec


# -------------------------------------------------------------------- one network


def _check(spec: Spec, folder: Path, properties: bool) -> None:
    module = load(Writer(spec).text(), folder)
    model, args = _built(module), _inputs(module)
    plan = _plan(model, args, module.ADDITIONS)
    if properties:
        _expect_same_plans(spec, folder, model, args, plan)
    if plan is None:
        return
    identity = _built(load(Writer(spec, closed=True).text(), folder))
    identity.load_state_dict(model.state_dict())
    varied = _varying(model, args)
    apply_(model, plan)
    report = check_identity(model, plan, args)
    _expect("identity check", report.ok or scales_its_stream(spec), str(report))
    for position, (found, wanted) in enumerate(zip(_outputs(model, args), _outputs(identity, args), strict=True)):
        _expect(
            "identity form",
            torch.equal(found, wanted),
            f"output {position} of the closed network is not what the skips alone make of the input; the largest "
            f"difference is {(found - wanted).abs().max():g}",
        )
    lost = [i for i, (before, now) in enumerate(zip(varied, _varying(model, args), strict=True)) if before and not now]
    _expect("constant output", not lost, f"outputs {lost} do not depend on the input any more")
    _expect_folds(copy.deepcopy(model), plan, args)
    _expect_gates(model, plan, args)


def load(text: str, folder: Path) -> ModuleType:
    """A source text, written to a file and imported, so that its lines exist."""
    name = f"random_network_{next(_modules)}"
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for pickle
    spec.loader.exec_module(module)
    return module


def _built(module: ModuleType) -> nn.Module:
    torch.manual_seed(0)
    return module.Network().train()


def _inputs(module: ModuleType, seed: int = 1) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    return module.inputs()


def _expect(check: str, holds: bool, found: str) -> None:
    if not holds:
        raise _Failed(check, found)


def _plan(model: nn.Module, args: tuple[Any, ...], count: int) -> ResidualPlan | None:
    try:
        plan = make_plan(model, args)
    except NoBranchError:
        _expect("count", count == 0, f"expected {count} branches, found none")
        return None
    lines = ", ".join(f"{b.name} at line {b.source.rpartition(':')[2]}" for b in plan.branches)
    _expect("count", len(plan) == count, f"expected {count} branches, found {len(plan)}: {lines}")
    return plan


def _outputs(model: nn.Module, args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors of one training-mode forward, whose running statistics are put back."""
    torch.manual_seed(2)
    before = [b.clone() for b in model.buffers()]
    with torch.no_grad():
        found = list(tensors_of(model(*args)))
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
    return found


def _varying(model: nn.Module, args: tuple[Any, ...]) -> list[bool]:
    """Which outputs change with the input."""
    other = (args[0] + torch.linspace(-1, 1, args[0].numel()).view(args[0].shape), *args[1:])
    return [not torch.equal(a, b) for a, b in zip(_outputs(model, args), _outputs(model, other), strict=True)]


def _expect_gates(model: nn.Module, plan: ResidualPlan, args: tuple[Any, ...]) -> None:
    """Every gate is alive, or asleep for a parameter that wakes it; chance may drop a branch once."""
    unexplained: set[str] = set()
    for draw in range(DRAWS):
        model.zero_grad()
        torch.manual_seed(3 + draw)
        with observe(model, plan, (args, {})) as seen:
            loss_of(model(*args)).backward()
        gates = seen.gradients.gates
        for name, gate in gates.items():
            _expect("gates", gate.status in ("alive", "asleep"), f"{name} is {gate.status}: {gate.cause}")
        asleep = {n for n, g in gates.items() if g.status == "asleep" and not g.waits_for}
        unexplained = asleep if not draw else unexplained & asleep
        if not unexplained:
            return
    _expect("gates", False, f"{', '.join(unexplained)}: asleep, and nothing is said to wake them")


def _expect_folds(model: nn.Module, plan: ResidualPlan, args: tuple[Any, ...]) -> None:
    """Open scalars that are folded into the weights leave a network that computes the same."""
    own, parameters = [g for g in plan.gates if g.module], dict(model.named_parameters())
    if not own or not all(g.folds_into for g in own):
        return
    with torch.no_grad():
        for gate in own:
            parameters[gate.parameter].fill_(OPENED)
    opened = _outputs(model, args)
    fold_(model)
    for scalar, folded in zip(opened, _outputs(model, args), strict=True):
        far = (scalar - folded).abs().max() / scalar.abs().max().clamp(min=1e-6)
        _expect("folded", bool(far <= ROUNDING), f"scalars of {OPENED} folded into the weights change it by {far:.1e}")


# -------------------------------------------------------------------- the same network in other words


def _expect_same_plans(
    spec: Spec, folder: Path, model: nn.Module, args: tuple[Any, ...], plan: ResidualPlan | None
) -> None:
    wanted = _words(plan)
    _expect_plan("deepcopy", wanted, copy.deepcopy(model), args)
    _expect_plan("pickle", wanted, pickle.loads(pickle.dumps(model)), args)
    below = [] if plan is None else _words(plan.below("net"), names=False)
    _expect_plan("wrapped", below, _Wrapper(model), args, names=False)  # sums of the root have other names
    if has_no_ops(spec):
        plain = load(Writer(without_no_ops(spec)).text(), folder)
        _expect_plan("without views, casts and clones", wanted, _built(plain), args)
    for other in spelled_otherwise(spec):
        _expect_plan("x + f, f + x, x - (-f)", wanted, _built(load(Writer(other).text(), folder)), args)
    for position, item in enumerate(spec["items"]):
        if item["item"] == "block":
            longer = {**spec, "items": [*spec["items"][: position + 1], item, *spec["items"][position + 1 :]]}
            deeper = load(Writer(longer).text(), folder)
            _plan(_built(deeper), args, deeper.ADDITIONS)
            return


def _expect_plan(how: str, wanted: list[Any], model: nn.Module, args: tuple[Any, ...], *, names: bool = True) -> None:
    try:
        found = _words(make_plan(model, args), names=names)
    except NoBranchError:
        found = []
    _expect(f"same plan: {how}", found == wanted, f"expected {wanted}, found {found}")


def _words(plan: ResidualPlan | None, *, names: bool = True) -> list[Any]:
    """A plan without lines: two writings of one network differ in those."""
    branches = plan.branches if plan is not None else ()
    return [(b.name if names else "", b.action, b.skip, [g.parameter for g in b.gates]) for b in branches]


class _Wrapper(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: Any) -> Any:
        return self.net(*args)


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"no end after {LIMIT} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
