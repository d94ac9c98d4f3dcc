"""Imports run one way through the rooms, and only the callback needs Lightning."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lit_resinit

PACKAGE = Path(lit_resinit.__file__).parent
# each room may import from those before it, and from itself
ROOMS = ["errors", "words", "graph", "find", "plan", "judge", "watch", "report", "trainer"]
ROOMS += ["arguments", "cli", "__main__", "callback"]


def part(file: Path) -> str:
    """The room that a file belongs to."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(source: str) -> set[str]:
    """Modules that a source imports, anywhere in it, except under ``if TYPE_CHECKING``."""
    found: set[str] = set()
    skipped: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):
        if node in skipped:
            skipped.update(ast.iter_child_nodes(node))
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            skipped.update(node.body)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def upward(name: str, source: str) -> set[str]:
    """Rooms that a source of room ``name`` imports although they come after it."""
    parts = {m.split(".")[1] for m in imports(source) if m.startswith("lit_resinit.")}
    later = set(ROOMS[ROOMS.index(name) + 1 :])
    return parts & later


def needs_lightning(source: str) -> bool:
    return any(m.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric") for m in imports(source))


FILES = [f for f in sorted(PACKAGE.rglob("*.py")) if f != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_run_downwards(file: Path) -> None:
    assert upward(part(file), file.read_text()) == set()


@pytest.mark.parametrize("file", [f for f in FILES if part(f) != "callback"], ids=lambda f: str(f.relative_to(PACKAGE)))
def test_only_the_callback_names_lightning(file: Path) -> None:
    assert not needs_lightning(file.read_text())


def test_every_room_is_in_the_list() -> None:
    assert {part(f) for f in FILES} == set(ROOMS)


@pytest.mark.parametrize(
    "source",
    [
        "from lit_resinit.callback import ResidualInit",
        "import lit_resinit.plan.make",
        "def f():\n    from lit_resinit.watch.history import History",
        "from lit_resinit import watch",
        "from lit_resinit.report.tables import history_table",
    ],
)
def test_the_check_would_notice_an_upward_import(source: str) -> None:
    assert upward("find", source)


def test_the_check_lets_downward_and_typing_imports_pass() -> None:
    assert not upward("plan", "from lit_resinit.find.gates import Gate\nimport lit_resinit.graph.trace")
    assert not upward("graph", "if TYPE_CHECKING:\n    from lit_resinit.plan.make import ResidualPlan")


@pytest.mark.parametrize("source", ["import lightning", "def f():\n    from lightning.pytorch import Callback"])
def test_the_check_would_notice_lightning(source: str) -> None:
    assert needs_lightning(source)


BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric"):
            raise ModuleNotFoundError(f"blocked: {name}")

sys.meta_path.insert(0, Block())
"""
CORE = """
import torch
import lit_resinit
from lit_resinit import apply_, check_identity, fold_, make_plan, observe
import lit_resinit.cli, lit_resinit.report.page
import lit_resinit.trainer.inputs, lit_resinit.trainer.setups, lit_resinit.watch.watching
import lit_resinit.report.tables, lit_resinit.report.figures
layer, x = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True), torch.randn(2, 3, 8)
plan = make_plan(layer, x)
apply_(layer, plan)
assert check_identity(layer, plan, x).ok
with observe(layer, plan, x) as seen:
    layer(x).square().mean().backward()
assert seen.gradients.ok
assert fold_(layer)
assert not any(name.split(".")[0] in ("lightning", "pytorch_lightning") for name in sys.modules)
"""


def run(source: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(PACKAGE.parent), "PATH": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
def test_everything_but_the_callback_works_without_lightning() -> None:
    done = run(BLOCKED + CORE)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_callback_without_lightning_says_what_is_missing() -> None:
    done = run(BLOCKED + "from lit_resinit import ResidualInit")
    assert done.returncode == 1
    assert "blocked: " in done.stderr


def test_public_names_are_all_there() -> None:
    wanted = """
        ResidualInit make_plan ResidualPlan Branch Gate apply_ fold_ check_identity IdentityReport observe
        check_gradients GradientReport measure_usefulness History ScalarGate param_groups ResInitError NoBranchError
        TraceError TrainedWeightsError IdentityError GradientError GateOptimizerError ResInitWarning
    """
    assert [name for name in wanted.split() if not hasattr(lit_resinit, name)] == []


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Residual"):
        _ = lit_resinit.Residual


@pytest.mark.slow
def test_torchmetrics_is_imported_when_it_is_needed() -> None:
    done = run("import sys, lit_resinit, lit_resinit.cli\nassert 'torchmetrics' not in sys.modules")
    assert done.returncode == 0, done.stderr
