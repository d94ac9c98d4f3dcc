"""The core, without extras: it works, and what is missing is named with the command that installs it."""

import importlib.util
import sys
import tempfile
from pathlib import Path

import torch

import lit_resinit
from lit_resinit import History, ResidualInit, ResInitError, apply_, check_identity, make_plan

here = Path(lit_resinit.__file__)
assert "site-packages" in here.parts, here
assert (here.parent / "py.typed").exists()
for name in ("matplotlib", "plotly", "pandas", "sklearn", "torchvision"):
    assert importlib.util.find_spec(name) is None, f"{name} is here, so that nothing is tried"

layer, x = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True), torch.randn(2, 3, 8)
plan = make_plan(layer, x)
apply_(layer, plan)
assert check_identity(layer, plan, x).ok
assert ResidualInit().plan is None

history = History(["a"])
history.append(0, torch.zeros(4, 1), torch.ones(1), torch.ones(1))
folder = Path(tempfile.mkdtemp())
history.save(folder / "run.npz")


def command_for(action: object) -> str:
    """What the message says to run."""
    try:
        action()  # type: ignore[operator]
    except ResInitError as error:
        return str(error)
    sys.exit(f"{action} raised nothing")


from lit_resinit.report.files import check_report  # noqa: E402

for action, extra in (
    (history.to_pandas, "pandas"),
    (history.plot, "report"),
    (lambda: check_report(folder / "run.html"), "report"),
    (lambda: check_report(folder / "run.png"), "report"),
):
    told = command_for(action)
    assert f"pip install lit-resinit[{extra}]" in told, told
print(f"lit-resinit {lit_resinit.__version__} works without extras, and names the four things that need one")
