"""Errors and warnings: a stable code, and what was checked, expected, found, where, and what to do."""

from __future__ import annotations

import warnings


class ResInitError(RuntimeError):
    """Root of every error of this package.

    Args:
        message: What was checked, expected and found, where, and what to do next.
        report: The report behind the error (a plan, an identity report or a gradient report), when there is one.

    Example:
        >>> raise ResInitError("the check failed")
        Traceback (most recent call last):
        lit_resinit.errors.ResInitError: RI100: the check failed
    """

    code = "RI100"

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(f"{self.code}: {message}")
        self.report = report


class NoBranchError(ResInitError):
    """The network has no residual branch, so closing a layer would cut the signal for good."""

    code = "RI101"


class TraceError(ResInitError):
    """The forward could not be traced with the inputs at hand."""

    code = "RI102"


class TrainedWeightsError(ResInitError):
    """Closing the branch would destroy what a trained block has learned."""

    code = "RI103"


class GateError(ResInitError):
    """A branch has nothing that the chosen scheme could close."""

    code = "RI104"


class FoldError(ResInitError):
    """An inserted gate cannot be folded exactly into the weights before it."""

    code = "RI105"


class CheckpointError(ResInitError):
    """A state dict and a model do not have the same inserted gates."""

    code = "RI106"


class IdentityError(ResInitError):
    """A branch contributes something before the first step."""

    code = "RI201"


class GradientError(ResInitError):
    """A gate can never learn, or its gradient is not finite."""

    code = "RI301"


class GateOptimizerError(ResInitError):
    """A gate is in no optimizer, so nothing would ever move it."""

    code = "RI302"


class ResInitWarning(UserWarning):
    """Everything this package warns about."""


def warn(message: str) -> None:
    """Warn, as of the line that called the function that calls this."""
    warnings.warn(message, ResInitWarning, stacklevel=3)
