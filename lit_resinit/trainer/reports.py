"""The report of a Trainer's run: checked before it, rewritten while it goes on, complete at its end."""

from __future__ import annotations

from typing import Any

from lit_resinit.errors import ResInitError, warn
from lit_resinit.report.figures import activation_figure
from lit_resinit.report.files import check_report, is_page, replace_file
from lit_resinit.report.page import LivePage, clock
from lit_resinit.trainer.steps import agreement
from lit_resinit.watch.history import History


class RunReport:
    """A page that follows the run, or a picture that is drawn at its end; rank 0 writes.

    Args:
        path: ``.html`` for the page, ``.png``, ``.pdf``, ``.svg`` for the picture.
        trainer: The Trainer of the run.

    Raises:
        ResInitError: On every rank, if rank 0 cannot write there: a run does not learn that after a night.
    """

    def __init__(self, path: str, trainer: Any) -> None:
        problem: ResInitError | None = None
        if trainer.is_global_zero:
            try:
                check_report(path)
            except ResInitError as error:
                problem = error
        if agreement(trainer)(problem is not None):
            raise problem or ResInitError(f"checking the report's path: rank 0 cannot write {path!r}.")
        self.path = path
        self._page = LivePage(path) if is_page(path) else None

    def follow(self, trainer: Any, history: History, about: Any, state: str, *, last: bool = False) -> None:
        """Rewrite the page; a full disk is a reason to say so, and none to stop the training.

        Args:
            trainer: The Trainer.
            history: What was recorded.
            about: What else is known, as a function, for most calls write nothing.
            state: What the run does, and at which step.
            last: Whether to write in any case, and for the last time.
        """
        if self._page is None or not trainer.is_global_zero or not (last or self._page.due):
            return
        try:
            self._page.write(history, about(), f"{state}, written {clock()}", last)
        except OSError as error:
            warn(f"the page {self.path} could not be rewritten ({error}); the training goes on.")

    def draw(self, history: History) -> None:
        """Draw the picture, where that was asked for; the training is done, so what keeps it away is only told."""
        if self._page is not None:
            return
        try:
            replace_file(self.path, activation_figure(history).savefig)
        except OSError as error:
            warn(
                f"the picture {self.path} could not be written ({error}); the training is kept. Draw it from a "
                "checkpoint (`lit-resinit report`), or from `callback.history`."
            )
