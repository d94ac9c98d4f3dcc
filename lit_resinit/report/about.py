"""What is known of a run besides its history: plan, verdicts, usefulness, in plain types."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from lit_resinit.judge.identity_report import IdentityReport
from lit_resinit.judge.verdicts import ALARMS, GradientReport
from lit_resinit.plan.values import ResidualPlan
from lit_resinit.watch.conclusion import Conclusion


def about_run(
    plan: ResidualPlan | None,
    identity: IdentityReport | None = None,
    gradients: GradientReport | None = None,
    woke: dict[str, int] | None = None,
    usefulness: dict[str, float] | None = None,
    agreement: str = "",
    fits: Sequence[int] = (),
    conclusion: Conclusion | None = None,
    setting: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Plan, verdicts, waking steps and usefulness in plain types, as the page shows and a checkpoint keeps them.

    Args:
        plan: The plan of the run.
        identity: Verdict of the first step.
        gradients: Verdict of the last judged step.
        woke: Gate parameter to the number of optimizer steps it slept.
        usefulness: What :func:`lit_resinit.measure_usefulness` found.
        agreement: A sentence on how usefulness agrees with the order of switching on.
        fits: The first steps of later fits that the history holds.
        conclusion: What was found at the end of the run, in place of both.
        setting: What else a reader needs to repeat the run: options, seed, versions.

    Returns:
        A dictionary that goes through JSON.
    """
    if conclusion is not None:
        usefulness, agreement = conclusion.ablation.means, " ".join(str(conclusion).splitlines())
    gates = gradients.gates if gradients is not None else {}
    about: dict[str, Any] = {
        "plan": "" if plan is None else str(plan),
        "branches": {},
        "verdicts": {},
        "start": _start(identity),
        "usefulness": usefulness,
        "errors": None if conclusion is None else conclusion.ablation.errors,
        "path": None if conclusion is None or conclusion.path is None else dict(conclusion.path),
        "agreement": agreement,
        "fits": list(fits),
        "setting": dict(setting or {}),
    }
    for branch in () if plan is None else plan.branches:
        names = [g.parameter for g in branch.gates]
        slept = [woke[n] for n in names if woke and n in woke]
        about["branches"][branch.name] = {
            "skip": branch.skip,
            "action": branch.action,
            "kind": "+".join(g.kind for g in branch.gates),
            "gate": ", ".join(
                n if g.index is None else f"{n}[{g.index}]" for n, g in zip(names, branch.gates, strict=True)
            ),
            "status": _worst([gates[n].status for n in names if n in gates]),
            "woke": max(slept) if slept else None,
        }
    if identity is not None:
        about["verdicts"]["Identity before the first step"] = str(identity)
    if gradients is not None:
        about["verdicts"]["Gradients of the gates"] = str(gradients)
    if woke:
        steps = ", ".join(f"{name} after {n}" for name, n in list(woke.items())[:200])
        about["verdicts"]["Woke up (optimizer steps after the first)"] = steps
    return about


def versions() -> dict[str, str]:
    """What the numbers of a run depend on, and its version, where it is installed."""
    found = {"Python": platform.python_version()}
    for name in ("lit-resinit", "torch", "lightning", "pytorch-lightning"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def later(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What is known of a resumed run: the verdicts of its beginning, unless there are newer ones.

    Args:
        before: What :func:`about_run` returned before the interruption.
        now: What it returns now.

    Returns:
        A dictionary like both.

    Example:
        >>> later(about_run(None) | {"start": "proven"}, about_run(None))["start"]
        'proven'
    """
    merged = {key: value if value else before.get(key, value) for key, value in now.items()}
    merged["verdicts"] = {**before.get("verdicts", {}), **now["verdicts"]}
    for name, branch in now["branches"].items():
        old = before.get("branches", {}).get(name, {})
        merged["branches"][name] = {key: value if value else old.get(key, value) for key, value in branch.items()}
    return merged


def _start(identity: IdentityReport | None) -> str:
    if identity is None:
        return ""
    if identity.constant:
        return "variance kept" if identity.ok else "variance not kept"
    return "proven" if identity.ok else "broken"


def _worst(statuses: list[str]) -> str:
    ranked = (*ALARMS, "exploding", "asleep", "alive")
    return min(statuses, key=ranked.index) if statuses else ""
