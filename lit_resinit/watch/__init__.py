"""Moments per branch, history, switching on, usefulness."""

from typing import TYPE_CHECKING, Any

from lit_resinit.watch.history import History
from lit_resinit.watch.logs import metrics
from lit_resinit.watch.measure import Watcher

if TYPE_CHECKING:
    from lit_resinit.watch.moments import Moments

__all__ = ["History", "Moments", "Watcher", "metrics"]


def __getattr__(name: str) -> Any:
    """Import torchmetrics, which takes three times as long as torch itself, only when it is needed."""
    if name == "Moments":
        from lit_resinit.watch.moments import Moments

        return Moments
    raise AttributeError(f"module 'lit_resinit.watch' has no attribute {name!r}")
