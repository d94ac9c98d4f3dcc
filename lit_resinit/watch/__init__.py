"""Moments per branch, history, switching on, usefulness."""

from lit_resinit.watch.history import History
from lit_resinit.watch.logs import metrics
from lit_resinit.watch.moments import Moments, Watcher

__all__ = ["History", "Moments", "Watcher", "metrics"]
