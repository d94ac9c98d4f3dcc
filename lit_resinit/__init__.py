"""Start a residual network as the identity, prove it, judge the gates' gradients, and watch the blocks switch on."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

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
from lit_resinit.find.gates import Gate
from lit_resinit.graph.where import Address as Address  # not public: pickles of models and plans name it here
from lit_resinit.judge.gradients import check_gradients
from lit_resinit.judge.identity import check_identity
from lit_resinit.judge.identity_report import IdentityReport
from lit_resinit.judge.observe import observe
from lit_resinit.judge.trial import Trial
from lit_resinit.judge.verdicts import GradientReport
from lit_resinit.plan.apply import ScalarGate, apply_
from lit_resinit.plan.fold import fold_
from lit_resinit.plan.groups import param_groups
from lit_resinit.plan.hooks import ConstantHook as ConstantHook  # so here, and those below that are not in `__all__`
from lit_resinit.plan.hooks import GateHook as GateHook
from lit_resinit.plan.make import make_plan
from lit_resinit.plan.mark import Applied as Applied
from lit_resinit.plan.mark import LoadHook as LoadHook
from lit_resinit.plan.states import PlainStates as PlainStates
from lit_resinit.plan.values import Branch, ResidualPlan
from lit_resinit.plan.values import Stream as Stream
from lit_resinit.report import figures as _figures  # noqa: F401 - enters what `History.plot` draws
from lit_resinit.watch.history import History
from lit_resinit.watch.path import Attribution as Attribution
from lit_resinit.watch.path import attribute
from lit_resinit.watch.usefulness import measure_usefulness
from lit_resinit.watch.watching import watch  # takes the package's name here; `from lit_resinit.watch import ...` stays

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
    "Trial",
    "apply_",
    "attribute",
    "check_gradients",
    "check_identity",
    "fold_",
    "make_plan",
    "measure_usefulness",
    "observe",
    "param_groups",
    "watch",
]

try:
    __version__ = version("lit-resinit")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0"


def __dir__() -> list[str]:
    """The public names, and nothing else."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import Lightning only when the callback is asked for."""
    if name == "ResidualInit":
        from lit_resinit.callback import ResidualInit

        return ResidualInit
    raise AttributeError(f"module 'lit_resinit' has no attribute {name!r}")
