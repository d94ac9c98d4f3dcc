"""Public models, untrained: are their residual branches found, closed and awake, and is nothing else touched?

Run as ``python -m benchmarks.zoo [--only TEXT] [--quick] [--json FILE]``. ``zoo.json`` lists the models: how to build
them, and how many residual additions one forward runs, counted by hand in their source. Four points are measured:

- count: ``make_plan`` finds every addition, with the right kind of skip; a model without one raises ``NoBranchError``.
- closed: after ``apply_`` every branch contributes exactly nothing.
- awake: at the first backward every gate has a gradient, or waits for a named parameter and wakes within three steps.
- unchanged: nothing but the gates changes: parameters, buffers, random state, training flags.

A model marked ambiguous can be counted in more than one way; it is measured, but is no failure.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lit_resinit import NoBranchError, ResidualPlan, apply_, check_identity, make_plan, observe
from lit_resinit.judge.verdicts import GateGradient, GradientReport
from lit_resinit.judge.waking import Waking

MODELS = Path(__file__).with_name("zoo.json")
POINTS = ("count", "closed", "awake", "unchanged")
STEPS = 3
DRAWS = 8  # of random numbers, before a gate that nothing explains counts as cut off
LIMIT = 120  # seconds for one point of one model


@dataclasses.dataclass
class Row:
    """What was measured on one model.

    ``problems`` holds None for a point that passed, else the first problem; a point that was not run is absent.
    """

    id: str
    ambiguous: bool
    problems: dict[str, str | None] = dataclasses.field(default_factory=dict)
    installed: bool = True
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not any(self.problems.values())

    @contextlib.contextmanager
    def point(self, name: str) -> Iterator[None]:
        """Measure one point; a point fails with the first exception, and only that point."""
        try:
            with time_limit():
                yield
        except ProblemError as problem:
            self.note(name, str(problem))
        except (Exception, OutOfTimeError) as error:
            self.note(name, f"{type(error).__name__}: {error}")
        else:
            self.problems.setdefault(name, None)

    def note(self, name: str, text: str) -> None:
        if self.problems.get(name) is None:
            self.problems[name] = " ".join(text.split())

    def __str__(self) -> str:
        if not self.installed:
            return f"{self.id:34}not installed"
        cells = [f"{p} {'-' if p not in self.problems else 'FAIL' if self.problems[p] else 'ok'}" for p in POINTS]
        words = [f"{p}: {text}" for p, text in self.problems.items() if text]
        mark = ["ambiguous"] if self.ambiguous else []
        return "  ".join([f"{self.id:34}{'  '.join(f'{c:14}' for c in cells)}{self.seconds:6.1f} s", *mark, *words])


class ProblemError(Exception):
    """A point that failed, in words."""


class OutOfTimeError(BaseException):
    """A point that did not end; no ``except Exception`` on the way catches it."""


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Stop what takes longer than the limit, where the system has an alarm clock."""
    if not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(*_: Any) -> None:
        raise OutOfTimeError(f"no end after {LIMIT} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def expect(condition: bool, problem: str) -> None:
    if not condition:
        raise ProblemError(problem)


# -------------------------------------------------------------------- one model


@dataclasses.dataclass
class Subject:
    """A model, and the inputs of one forward."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def plan(self) -> ResidualPlan:
        return make_plan(self.model, self.args, self.kwargs)

    def loss(self) -> Tensor:
        return loss_of(self.model(*self.args, **self.kwargs))


def measure(entry: dict[str, Any], *, quick: bool = False) -> Row:
    """All points of one model of the list, or only the count."""
    row, start = Row(entry["id"], entry["ambiguous"]), time.perf_counter()
    try:
        subject = build(entry)
    except ImportError:
        row.installed = False
        return row
    except Exception as error:
        row.problems["count"] = f"building failed: {type(error).__name__}: {error}"
        return row
    before = Snapshot(subject.model)
    plan = measure_count(row, entry, subject, before)
    if not quick:
        with row.point("unchanged"):
            before.expect_same(subject.model, "make_plan")
        if plan is not None:
            measure_start(row, subject, plan, before)
    row.seconds = time.perf_counter() - start
    return row


def build(entry: dict[str, Any], seed: int = 0) -> Subject:
    """The model, with every second module in eval mode, and its inputs."""
    names: dict[str, Any] = {}
    exec(entry["imports"], names)
    torch.manual_seed(2 * seed)
    model = eval(entry["build"], names)
    torch.manual_seed(2 * seed + 1)
    args, kwargs = eval(entry["inputs"], names), eval(entry.get("kwargs", "{}"), names)
    for position, module in enumerate(model.modules()):
        module.training = position % 2 == 0
    return Subject(model, args, kwargs)


def measure_count(row: Row, entry: dict[str, Any], subject: Subject, before: Snapshot) -> ResidualPlan | None:
    """The plan, also where it is not the expected one; None where there is none."""
    plan = None
    with row.point("count"):
        try:
            plan = subject.plan()
        except NoBranchError as error:
            expect(entry["additions"] == 0, f"expected {entry['additions']} additions, found none: {error}")
            before.expect_same(subject.model, "make_plan")
        else:
            expect_counts(plan, entry)
    return plan


def measure_start(row: Row, subject: Subject, plan: ResidualPlan, before: Snapshot) -> None:
    """Close the branches, check them, and train a few steps."""
    try:
        apply_(subject.model, plan)
    except Exception as error:
        row.note("closed", f"{type(error).__name__}: {error}")
        return
    with row.point("unchanged"):
        before.expect_same(subject.model, "apply_", plan)
    applied = Snapshot(subject.model)
    with row.point("closed"):
        report = check_identity(subject.model, plan, subject.args, subject.kwargs)
        expect(report.ok and all(b.status == "closed" for b in report.branches), str(report))
    with row.point("unchanged"):
        applied.expect_same(subject.model, "check_identity")
    with row.point("awake"):
        expect_awake(subject, plan)


def expect_counts(plan: ResidualPlan, entry: dict[str, Any]) -> None:
    """The number of additions and, where it is known, of each kind of skip."""
    names = ", ".join(b.name for b in plan.branches)
    expect(len(plan) == entry["additions"], f"expected {entry['additions']} additions, found {len(plan)}: {names}")
    for kind in ("identity", "projection"):
        found, wanted = [b.name for b in plan.branches if b.skip == kind], entry.get(f"{kind}_skips")
        expect(
            wanted is None or len(found) == wanted,
            f"expected {wanted} {kind} skips, found {len(found)}: {', '.join(found)}",
        )


# -------------------------------------------------------------------- three steps of training


def expect_awake(subject: Subject, plan: ResidualPlan) -> None:
    """Every gate has a gradient at once, or names what it waits for and has one by the third step."""
    model = subject.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    waking = Waking(first_report(subject, plan), patience=STEPS - 1)
    for _ in range(STEPS - 1):
        optimizer.step()
        optimizer.zero_grad()
        subject.loss().backward()
        waking.step(model)
    late = [f"{n} is {g.status}: {g.cause}" for n, g in waking.report.gates.items() if g.status != "alive"]
    expect(not late, f"after {STEPS} steps {_first_of(late)}")


def first_report(subject: Subject, plan: ResidualPlan) -> GradientReport:
    """The verdicts at the first backward: alive, or asleep for a named parameter.

    A gate that nothing wakes by name may have been dropped by chance (dropout, drop path): it gets other draws.
    """
    unexplained: dict[str, str] | None = None
    for draw in range(DRAWS):
        subject.model.zero_grad()
        torch.manual_seed(2 + draw)
        with observe(subject.model, plan, (subject.args, subject.kwargs)) as seen:
            subject.loss().backward()
        gates = seen.gradients.gates
        bad = [_describe(n, g) for n, g in gates.items() if g.status not in ("alive", "asleep")]
        expect(not bad, f"at the first backward {_first_of(bad)} (of {len(gates)} judged)")
        asleep = {n: _describe(n, g) for n, g in gates.items() if g.status == "asleep" and not g.waits_for}
        unexplained = asleep if unexplained is None else {n: t for n, t in unexplained.items() if n in asleep}
        if not unexplained:
            return seen.gradients
    raise ProblemError(f"at the first backward {_first_of(list(unexplained.values()))} (of {len(gates)} judged)")


def _describe(name: str, gate: GateGradient) -> str:
    return f"{name} is {gate.status}: {gate.cause}{f', at {gate.source}' if gate.source else ''}"


def _first_of(found: list[str]) -> str:
    return f"{found[0]}{f', and {len(found) - 1} more' if len(found) > 1 else ''}" if found else ""


def loss_of(output: Any) -> Tensor:
    """Mean square of every floating point tensor of an output minus a fixed random target of its shape."""
    generator = torch.Generator().manual_seed(3)
    tensors = [t for t in tensors_of(output) if t.is_floating_point() and t.requires_grad]
    losses = [(t - torch.randn(t.shape, generator=generator)).square().mean() for t in tensors]
    return torch.stack(losses).sum()


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Every tensor of an output: a tensor, tuple, dict, dataclass or anything with ``to_tuple``."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "to_tuple"):
            yield from tensors_of(leaf.to_tuple())
        elif dataclasses.is_dataclass(leaf):
            yield from tensors_of([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])


# -------------------------------------------------------------------- what must not change


class Snapshot:
    """Bits of every parameter and buffer, the random state, and the training flag of every module."""

    def __init__(self, model: nn.Module) -> None:
        self._values = {n: bits_of(t) for n, t in (*model.named_parameters(), *model.named_buffers())}
        self._flags = {n: m.training for n, m in model.named_modules()}
        self._random = torch.get_rng_state()

    def expect_same(self, model: nn.Module, after: str, plan: ResidualPlan | None = None) -> None:
        """Nothing has changed but the gates of the plan, if one is given."""
        now = Snapshot(model)
        gates = written_by(model, plan)
        for name in dict.fromkeys((*self._values, *now._values)):
            expect(name in now._values, f"{name} is gone after {after}")
            expect(name in self._values or name in gates, f"{name} is new after {after}")
            expect(name in gates or torch.equal(self._values[name], now._values[name]), f"{name} differs after {after}")
        flags = [n or "(root)" for n, flag in self._flags.items() if now._flags.get(n) != flag]
        expect(not flags, f"training flag of {', '.join(flags[:3])} differs after {after} ({len(flags)} in all)")
        expect(torch.equal(self._random, now._random), f"random state differs after {after}")


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().contiguous().flatten().view(torch.uint8)


def written_by(model: nn.Module, plan: ResidualPlan | None) -> set[str]:
    """Names of the parameters that a plan may write, the first one where several share the memory."""
    wanted = {name for g in plan.gates for name in (g.parameter, *g.biases)} if plan is not None else set()
    memory = {id(p) for n, p in model.named_parameters(remove_duplicate=False) if n in wanted}
    return {n for n, p in model.named_parameters() if id(p) in memory}


# -------------------------------------------------------------------- the whole list


def run(entries: list[dict[str, Any]], *, quick: bool = False, show: Callable[..., None] = print) -> list[Row]:
    """Measure one model after the other, a line for each."""
    rows = []
    for entry in entries:
        rows.append(measure(entry, quick=quick))
        show(rows[-1], flush=True)
    return rows


def summary(rows: list[Row]) -> str:
    """One line for all rows."""
    measured = [r for r in rows if r.installed]
    clear, unclear = [r for r in measured if not r.ambiguous], [r for r in measured if r.ambiguous]
    points = []
    for point in POINTS:
        judged = [r for r in clear if point in r.problems]
        points.append(f"{point} {sum(r.problems[point] is None for r in judged)}/{len(judged)}")
    parts = [
        f"{len(rows)} models: {sum(r.passed for r in clear)} of {len(clear)} pass ({', '.join(points)})",
        f"{sum(r.passed for r in unclear)} of {len(unclear)} ambiguous pass",
        f"{len(rows) - len(measured)} not installed",
        f"{sum(r.seconds for r in rows):.0f} s",
    ]
    return "; ".join(parts)


def main() -> int:
    """Run from the command line; 1 if a model that is not ambiguous fails."""
    parser = argparse.ArgumentParser(description="Measure lit_resinit on public models.")
    parser.add_argument("--only", default="", metavar="TEXT", help="models whose id contains TEXT")
    parser.add_argument("--quick", action="store_true", help="count the branches, nothing else")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    entries = [e for e in json.loads(MODELS.read_text()) if options.only in e["id"]]
    rows = run(entries, quick=options.quick)
    print(summary(rows))
    if options.json is not None:
        options.json.write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1) + "\n")
    return int(any(not r.passed and not r.ambiguous for r in rows))


if __name__ == "__main__":
    raise SystemExit(main())
