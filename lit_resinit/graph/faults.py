"""Faults of our own while somebody else's network runs: caught, kept, and the network's step goes on."""

from __future__ import annotations

import traceback


class Faults:
    """Around measuring of ours: the first exception inside is kept, and ends the measuring.

    Signals and exits pass. Who measures asks for :attr:`first` before it begins again.

    Args:
        strict: Whether exceptions pass on: there is nobody whose step has to go on.

    Attributes:
        first: The exception that ended it; None while all is well.

    Example:
        >>> faults = Faults()
        >>> with faults:
        ...     raise KeyError("ours")
        >>> faults.first
        KeyError('ours')
    """

    __slots__ = ("_strict", "first")

    def __init__(self, *, strict: bool = False) -> None:
        self.first: Exception | None = None
        self._strict = strict

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> bool:
        if self._strict or not isinstance(fault, Exception):
            return False
        self.note(fault)
        return True

    def note(self, fault: Exception | None) -> None:
        """Keep an exception, where there was none before it, without the values that its frames hold."""
        if fault is not None and self.first is None:
            traceback.clear_frames(fault.__traceback__)
            self.first = fault


def in_words(fault: Exception, what: str) -> str:
    """What is said of a fault of our own: what stopped, what goes on, and what to send to whom."""
    place = traceback.extract_tb(fault.__traceback__)[-1:]
    where = f" at {place[0].filename}:{place[0].lineno}" if place else ""
    return (
        f"{what} stopped at a fault of this package ({type(fault).__name__}: {fault},{where}). The training goes on as "
        "it would without it. Please report this text, with the versions of lit_resinit and torch, to the authors of "
        "lit_resinit."
    )
