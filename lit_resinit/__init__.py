"""Start a residual network as the identity, prove it, judge the gates' gradients, and watch the blocks switch on."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from lit_resinit.decisions import Branch, ResidualPlan
from lit_resinit.errors import (
    CheckpointError,
    FoldError,
    GateError,
    GateOptimizerError,
    GradientError,
    IdentityError,
    NoBranchError,
    ResInitError,
    ResInitWarning,
    TraceError,
    TrainedWeightsError,
)
from lit_resinit.gates import Gate
from lit_resinit.gradients import GradientReport, check_gradients
from lit_resinit.identity import IdentityReport, check_identity
from lit_resinit.observation import observe
from lit_resinit.plan import make_plan
from lit_resinit.schemes import ScalarGate, apply_, fold_, param_groups
from lit_resinit.usefulness import measure_usefulness
from lit_resinit.watch import History

if TYPE_CHECKING:
    from lit_resinit.callback import ResidualInit

__all__ = [
    "Branch",
    "CheckpointError",
    "FoldError",
    "Gate",
    "GateError",
    "GateOptimizerError",
    "GradientError",
    "GradientReport",
    "History",
    "IdentityError",
    "IdentityReport",
    "NoBranchError",
    "ResInitError",
    "ResInitWarning",
    "ResidualInit",
    "ResidualPlan",
    "ScalarGate",
    "TraceError",
    "TrainedWeightsError",
    "apply_",
    "check_gradients",
    "check_identity",
    "fold_",
    "make_plan",
    "measure_usefulness",
    "observe",
    "param_groups",
]

try:
    __version__ = version("lit-resinit")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0"


def __getattr__(name: str) -> Any:
    """Import Lightning only when the callback is asked for."""
    if name == "ResidualInit":
        from lit_resinit.callback import ResidualInit

        return ResidualInit
    raise AttributeError(f"module 'lit_resinit' has no attribute {name!r}")
