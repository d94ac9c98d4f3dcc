"""The callback's own state in a checkpoint, read whatever version wrote it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lit_resinit.errors import ResInitError, warn
from lit_resinit.report.about import about_run
from lit_resinit.watch.history import History

_WORDS = {
    "slept": "steps that gates have slept",
    "history": "history",
    "about": "plan and verdicts",
    "steps": "offset of the steps",
    "fits": "beginnings of the fits",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """What is known of the run that wrote a checkpoint.

    Args:
        closed: Whether its gates were closed: a resume closes none.
        slept: Gate parameter to the number of steps it had slept.
        history: Its records; None where there are none to read.
        about: Plan and verdicts, as the page shows them; None where there are none to read.
        steps: What the steps of its Trainer were moved by, after another fit with the same callback.
        fits: The first step of every fit after the first.
    """

    closed: bool
    slept: dict[str, int]
    history: History | None
    about: dict[str, Any] | None
    steps: int = 0
    fits: tuple[int, ...] = ()


def read_state(state: Any) -> Saved:
    """The state that :class:`~lit_resinit.ResidualInit` saved; what is missing or damaged is told, and starts anew.

    Raises:
        ResInitError: For something that is no state at all.
    """
    if not isinstance(state, Mapping):
        raise ResInitError(
            "reading the state of ResidualInit in a checkpoint: expected a dictionary, found "
            f"{type(state).__name__}. Take another checkpoint, or resume without the callback's state: "
            "`del checkpoint['callbacks']['ResidualInit']`."
        )
    lost: list[str] = []
    saved = Saved(
        closed=bool(state.get("closed", True)),
        slept=_read(state, "slept", _slept, {}, lost),
        history=_read(state, "history", History.from_dict, None, lost),
        about=_read(state, "about", _about, None, lost),
        steps=_read(state, "steps", int, 0, lost, needed=False),
        fits=_read(state, "fits", lambda fits: tuple(int(f) for f in fits), (), lost, needed=False),
    )
    if lost:
        warn(
            f"reading the state of ResidualInit in a checkpoint: found no {'; no '.join(lost)}. It was written by "
            "another version, or is damaged. The training goes on from the checkpoint, and what is missing starts anew."
        )
    return saved


def _read(state: Mapping[str, Any], key: str, read: Any, empty: Any, lost: list[str], *, needed: bool = True) -> Any:
    if key not in state:
        lost += [_WORDS[key]] if needed else []
        return empty
    try:
        return read(state[key])
    except Exception as error:  # a damaged state may hold anything
        lost.append(f"{_WORDS[key]} that can be read ({type(error).__name__}: {error})")
        return empty


def _slept(value: Any) -> dict[str, int]:
    return {str(name): int(steps) for name, steps in value.items()}


def _about(value: Any) -> dict[str, Any]:
    """With every key that the page reads, and what stands there of the kind that it expects."""
    empty = about_run(None)
    read = {key: value.get(key, kind) for key, kind in empty.items()}
    wrong = [k for k, kind in empty.items() if kind is not None and not isinstance(read[k], type(kind))]
    if wrong:
        raise TypeError(f"{wrong[0]} is {type(read[wrong[0]]).__name__}")
    return read
