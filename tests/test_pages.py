"""The pages of the docs: their code runs, their lists are complete, and the site's map is whole."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lit_resinit
from lit_resinit import History
from lit_resinit.errors import ResInitError
from lit_resinit.watch.logs import metrics

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def sections(page: Path) -> dict[str, str]:
    """The text of a page below each of its headings of the second level."""
    head, *rest = re.split(r"^## (.+)$", page.read_text(), flags=re.MULTILINE)
    return {"": head, **dict(zip(rest[::2], rest[1::2], strict=True))}


RECIPES = {name: text for name, text in sections(DOCS / "recipes.md").items() if name}
WHOLE = [page for page in PAGES if page.name != "recipes.md" and blocks(page.read_text())]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


def test_recipes_of_every_kind_are_there() -> None:
    wanted = "ResNet, ViT, GPT-like, DiT with adaLN, Adapters on a frozen network, Zero convolutions, Diffusion U-Net"
    assert set(RECIPES) >= {*wanted.split(", "), "Fabric", "A plain loop", "Several processes", "YAML"}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # of the parser that LightningCLI uses
def test_every_recipe_runs(name: str) -> None:
    code = blocks(RECIPES[name])
    assert code
    for text in blocks(RECIPES[name], "yaml"):
        Path("config.yaml").write_text(text)
    for source in code:
        exec(compile(source, f"recipe {name}", "exec"), {"__name__": "recipe"})


@pytest.mark.ranks
def test_the_recipe_for_several_processes_runs_on_two() -> None:
    (source,) = blocks(RECIPES["Several processes"])
    Path("train.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("3 records of 2 branches") == 1


@pytest.mark.parametrize("page", WHOLE, ids=lambda page: page.stem)
def test_the_code_of_every_page_runs_in_order(page: Path) -> None:
    names = {"__name__": "page"} | {name: getattr(lit_resinit, name) for name in lit_resinit.__all__}
    for source in blocks(page.read_text()):
        exec(compile(source, str(page), "exec"), names)


# -------------------------------------------------------------------- lists that are complete


def test_every_public_name_has_its_place() -> None:
    shown = re.findall(r"^::: lit_resinit\.[\w.]*?(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(shown) == dir(lit_resinit)


def test_every_metric_is_explained() -> None:
    text = (DOCS / "metrics.md").read_text()
    history = History(["a"])
    history.append(0, torch.zeros(4, 1), torch.ones(1), torch.zeros(1))
    names = {key if key.count("/") == 1 else key.split("/")[1] for key in metrics(history)}
    assert len(names) > 8
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def test_every_code_has_a_page_in_the_list() -> None:
    text = (DOCS / "codes" / "index.md").read_text()
    errors = [e for e in vars(lit_resinit).values() if isinstance(e, type) and issubclass(e, ResInitError)]
    assert len(errors) > 8
    for error in errors:
        assert re.search(rf"\[{error.code}\]\({error.code}\.md\) \| `{error.__name__}`", text), error
        assert (DOCS / "codes" / f"{error.code}.md").exists()


def test_every_option_of_the_callback_is_in_the_table() -> None:
    import inspect

    text = (DOCS / "schemes.md").read_text()
    options = list(inspect.signature(lit_resinit.ResidualInit.__init__).parameters)[1:]
    assert [name for name in options if f"`{name}`" not in text] == []


def test_every_flag_is_on_the_page_of_the_command_line() -> None:
    text = (DOCS / "command_line.md").read_text()
    source = (ROOT / "lit_resinit" / "cli.py").read_text()
    flags = set(re.findall(r'"(--[a-z-]+)"', source)) - {"--version", "--out"}
    assert len(flags) > 5
    assert [flag for flag in sorted(flags) if flag not in text] == []


# -------------------------------------------------------------------- the site


def test_the_map_of_the_site_names_every_page_and_no_other() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r": ([\w/]+\.md)$", text, re.MULTILINE))
    there = {str(page.relative_to(DOCS)) for page in PAGES}
    below = {page for page in there if re.fullmatch(r"codes/RI\d+\.md", page)}  # reached from their list
    assert named == there - below


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)\s]+)\)", page.read_text())
    for target in targets:
        file, _, anchor = target.partition("#")
        found = page.parent / file
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}, target


def test_nothing_is_fetched_from_elsewhere() -> None:
    assert "font: false" in (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        assert not re.search(r"!\[[^\]]*\]\(https?:|<script|<img", page.read_text()), page
