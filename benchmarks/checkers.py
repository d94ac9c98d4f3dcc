"""Checkers against networks whose true verdict is known: who finds the trouble, and who cries wolf.

Run as ``python -m benchmarks.checkers [--small] [--out FILE] [--each]``. The networks are the torch cases of
``benchmarks/cases``, each proven in the tests with plain torch. They fall into three groups: a gate whose gradient is
dead, missing, nonfinite or exploding; a branch that is not closed; and healthy networks, with those among them whose
gates only sleep for a step. An alarm on one of the first two is a hit, silence a miss; an alarm on one of the third is
a false alarm.

Other checkers see the network initialised by hand, ours the one it initialises itself. Whatever a checker prints as a
warning or failure about gradients, losses or values counts as an alarm; its other advice does not. Cases about the
optimizer, or about a network that has to be refused, have no verdict of this kind and are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases.base import Case, as_tuple, load
from benchmarks.report import RESULTS, Row, origin, publish, table, version
from lit_resinit import ResInitError, apply_, check_identity, make_plan, observe
from lit_resinit.judge.waking import Waking
from lit_resinit.plan.values import Scheme

Bundle = dict[str, Any]
Checker = Callable[[Bundle], list[str]]
GROUPS = ("gradient", "identity", "healthy")
STEPS = 3
SMALL = 12


def group_of(item: Case) -> str | None:
    """What is true of a case; None where it is about something else."""
    expect = item.expect
    if item.lightning or item.stage == "update" or not ("gradient" in expect or "identity" in expect):
        return None
    verdicts = {as_tuple(v)[0] for v in expect.get("gradient", {}).values()}
    if verdicts - {"alive", "asleep"}:
        return "gradient"
    if any(v[0] == "open" for v in expect.get("identity", {}).values()):
        return "identity"
    return "healthy"


# -------------------------------------------------------------------- the steps that a checker may look at


class Step(nn.Module):
    """A network with its loss, for checkers that trace one module."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__()
        self.net, self._loss_fn = bundle["model"], bundle["loss_fn"]

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._loss_fn(self.net(*inputs))


def initialised(bundle: Bundle) -> Bundle:
    """The network initialised by hand, where the case asks for it."""
    if bundle["prepare"] == "apply" and "reference_apply" in bundle:
        bundle["reference_apply"](bundle["model"])
    return bundle


def backward(bundle: Bundle, step: int = 1) -> None:
    loss = bundle["loss_fn"](bundle["model"](*bundle["batch"](step)))
    if loss.requires_grad:
        loss.backward()


def optimizer_of(bundle: Bundle) -> torch.optim.Optimizer:
    return bundle["optimizer"]([p for p in bundle["model"].parameters() if p.requires_grad])


def train(bundle: Bundle, steps: int) -> None:
    """Several steps, the last without its update, so that its gradients can be looked at."""
    optimizer = optimizer_of(bundle)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        backward(bundle, step)
        if step < steps:
            optimizer.step()


# -------------------------------------------------------------------- checkers


def ours(bundle: Bundle) -> list[str]:
    """Everything that the callback raises or warns about on the first steps."""
    model, expect = bundle["model"], bundle["expect"]
    inserts = "insert" in expect.get("apply", {}) or [] in expect.get("plan", {}).values()
    scheme: Scheme = "observe" if bundle["prepare"] == "check" else "insert" if inserts else "last_layer"
    try:
        plan = make_plan(model, bundle["args"], scheme=scheme)
        apply_(model, plan)
    except ResInitError as error:
        return [str(error)]
    identity = check_identity(model, plan, bundle["args"])
    alarms = [f"{b.name}: {b.cause}" for b in identity.branches if b.status == "open"]
    alarms += [f"{s.first}: stream changed" for s in identity.stacks if s.rescaled_by and s.deviation > 0]
    with observe(model, plan, bundle["batch"](1)) as seen:
        backward(bundle)
    report = seen.gradients
    alarms += [f"{g.parameter}: exploding" for g in report.gates.values() if g.status == "exploding"]
    waking, optimizer = Waking(report, STEPS), optimizer_of(bundle)
    for step in range(2, STEPS + 2):
        optimizer.step()
        optimizer.zero_grad()
        backward(bundle, step)
        report = waking.step(model)
    return alarms + [f"{g.parameter}: {g.status}" for g in report.alarms]


def gates_by_hand(bundle: Bundle) -> list[str]:
    """Is some gate's gradient missing, zero or not finite? For one who knows where the gates are."""
    backward(initialised(bundle))
    parameters = dict(bundle["model"].named_parameters())
    gates = {n for spec in bundle["branches"].values() for n in spec["gate"]} & set(parameters)
    return [n for n in gates if not _is_sound(parameters[n].grad)]


def _is_sound(grad: Tensor | None) -> bool:
    return grad is not None and math.isfinite(size := float(grad.abs().sum())) and size > 0


def detect_anomaly(bundle: Bundle) -> list[str]:
    try:
        with torch.autograd.detect_anomaly():
            backward(initialised(bundle))
    except RuntimeError as error:
        return [str(error)]
    return []


def torchtest2(bundle: Bundle) -> list[str]:
    import torchtest2 as peer

    initialised(bundle)
    ours_to_judge = {"loss", "output_finite", "gradient_flow", "gradient_magnitude", "params_change"}
    report = peer.check_model(
        bundle["model"],
        tuple(bundle["args"]),
        loss_fn=bundle["loss_fn"],
        optimizer=optimizer_of(bundle),
        skip=set(peer.CHECKS) - ours_to_judge - {"forward"},
        overfit_steps=0,
    )
    return [str(r) for r in (*report.failures, *report.warnings)]


def torchdiag(bundle: Bundle, steps: int = 1) -> list[str]:
    import torchdiag as peer

    train(initialised(bundle), steps)
    return [n for n, row in peer.check_gradients(bundle["model"]).items() if row["status"] != "OK"]


def traintools(bundle: Bundle, steps: int = 1) -> list[str]:
    from traintools import GradientHealthMonitor

    train(initialised(bundle), steps)
    return list(GradientHealthMonitor().inspect(bundle["model"]).warnings)


def torchlens(bundle: Bundle) -> list[str]:
    import torchlens as peer
    from torchlens.debug import gradient_flow_audit_rows
    from torchlens.options import CaptureOptions

    step = Step(initialised(bundle))
    trace = peer.trace(step, tuple(bundle["args"]), capture=CaptureOptions(backward_ready=True))
    trace.log_backward(trace[trace.output_layers[0]].out, save_grads=True)
    rows, _ = gradient_flow_audit_rows(trace)
    flags = ("dead", "vanishing", "exploding")
    return [str(r["op"]) for r in rows if r["verdict"] in (*flags, "nonfinite") or any(r[f] for f in flags)]


CHECKERS: dict[str, tuple[str, Checker]] = {
    "lit_resinit": ("", ours),
    "gate gradients by hand": ("", gates_by_hand),
    "torch detect_anomaly": ("", detect_anomaly),
    "torchtest2": ("torchtest2", torchtest2),
    "torchdiag, step 1": ("torchdiag", torchdiag),
    "torchdiag, step 3": ("torchdiag", lambda bundle: torchdiag(bundle, STEPS)),
    "traintools, step 1": ("traintools", traintools),
    "traintools, step 3": ("traintools", lambda bundle: traintools(bundle, STEPS)),
    "torchlens gradient audit": ("torchlens", torchlens),
}


# -------------------------------------------------------------------- counting


def alarms_of(checker: Checker, item: Case) -> list[str] | None:
    """What a checker says about a fresh network; None where it cannot run it."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            return checker(item.build())
        except Exception:  # the row counts it
            return None


def measure(items: Sequence[Case]) -> tuple[list[Row], dict[str, dict[str, list[str] | None]]]:
    """One row for each checker, and everything that was said."""
    rows: list[Row] = []
    said: dict[str, dict[str, list[str] | None]] = {}
    for name, (package, checker) in CHECKERS.items():
        if package and version(package) == "not installed":
            rows.append({"checker": name} | dict.fromkeys(_count({}, items), "not installed"))
            continue
        said[name] = {item.name: alarms_of(checker, item) for item in items}
        rows.append({"checker": name, **_count(said[name], items)})
    return rows, said


def _count(said: dict[str, list[str] | None], items: Sequence[Case]) -> dict[str, str]:
    def alarmed(group: str) -> str:
        names = [item.name for item in items if group_of(item) == group]
        return f"{sum(bool(said.get(n)) for n in names)} of {len(names)}"

    return {
        "hits: gradient": alarmed("gradient"),
        "hits: identity": alarmed("identity"),
        "false alarms": alarmed("healthy"),
        "could not run": str(sum(alarms is None for alarms in said.values())),
    }


def wrong(said: dict[str, list[str] | None], items: Sequence[Case]) -> list[str]:
    """The cases that a checker misses or cries wolf at."""
    return [i.name for i in items if bool(said[i.name]) != (group_of(i) != "healthy")]


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Measure, print, write the file, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="every fifth case, and no file")
    parser.add_argument("--each", action="store_true", help="list the cases that a checker gets wrong")
    parser.add_argument("--out", type=Path, default=RESULTS / "checkers.txt", help="where to write")
    options = parser.parse_args(argv)
    items = [item for item in load().values() if group_of(item) is not None]
    items = items[:: max(1, len(items) // SMALL)] if options.small else items
    rows, said = measure(items)
    counts = ", ".join(f"{sum(group_of(i) == g for i in items)} {g}" for g in GROUPS)
    lines = [
        origin("torchtest2", "torchdiag", "traintools", "torchlens"),
        "",
        f"{len(items)} networks with a known verdict: {counts}. A hit is an alarm on one of the first two groups.",
        "",
        table(rows),
        "",
        f"lit_resinit is wrong about: {', '.join(wrong(said['lit_resinit'], items)) or 'none'}",
    ]
    if options.each:
        lines += [f"{name} is wrong about: {', '.join(wrong(s, items)) or 'none'}" for name, s in said.items()]
    publish("\n".join(lines), None if options.small else options.out)
    return rows


if __name__ == "__main__":
    main()
