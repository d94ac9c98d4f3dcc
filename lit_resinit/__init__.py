"""Start a residual network as the identity, prove it, judge the gates' gradients, and watch the blocks switch on."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from lit_resinit.errors import GateError as GateError
from lit_resinit.errors import GateOptimizerError as GateOptimizerError
from lit_resinit.errors import FoldError as FoldError
from lit_resinit.errors import GradientError as GradientError
from lit_resinit.errors import IdentityError as IdentityError
from lit_resinit.errors import NoBranchError as NoBranchError
from lit_resinit.errors import ResInitError as ResInitError
from lit_resinit.errors import ResInitWarning as ResInitWarning
from lit_resinit.errors import TraceError as TraceError
from lit_resinit.errors import TrainedWeightsError as TrainedWeightsError
from lit_resinit.gates import Gate as Gate
from lit_resinit.gradients import GradientReport as GradientReport
from lit_resinit.gradients import check_gradients as check_gradients
from lit_resinit.gradients import observe as observe
from lit_resinit.identity import IdentityReport as IdentityReport
from lit_resinit.identity import check_identity as check_identity
from lit_resinit.plan import Branch as Branch
from lit_resinit.plan import ResidualPlan as ResidualPlan
from lit_resinit.plan import make_plan as make_plan
from lit_resinit.schemes import ScalarGate as ScalarGate
from lit_resinit.schemes import apply_ as apply_
from lit_resinit.schemes import fold_ as fold_
from lit_resinit.schemes import param_groups as param_groups
from lit_resinit.usefulness import measure_usefulness as measure_usefulness
from lit_resinit.watch import History as History

if TYPE_CHECKING:
    from lit_resinit.callback import ResidualInit as ResidualInit

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
