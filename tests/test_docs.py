"""The page for those who take the package over shows the rooms as they are; the tools are the same everywhere."""

import re
import textwrap
from pathlib import Path

from test_imports import FILES, PACKAGE, ROOMS, imports, part

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "how_it_works.md"


def imported(room: str) -> list[str]:
    """Rooms that the files of a room import from, in the order of the rooms."""
    found = {m.split(".")[1] for f in FILES if part(f) == room for m in imports(f.read_text()) if m.count(".")}
    return [other for other in ROOMS if other in found and other != room]


def drawing() -> str:
    """Each room with its files, and the rooms that it imports from."""
    rows = [f"{'room':<12}{'files':<52}imports from", ""]
    for room in ROOMS:
        folder = (PACKAGE / room).is_dir()
        files = " ".join(sorted(f.stem for f in FILES if part(f) == room and f.stem != "__init__")) if folder else ""
        left, right = (
            textwrap.wrap(text, width) or [""] for text, width in ((files, 50), (" ".join(imported(room)), 48))
        )
        name = f"{room}/" if folder else f"{room}.py"
        for line in range(max(len(left), len(right))):
            cells = [
                name if line == 0 else "",
                *(column[line] if line < len(column) else "" for column in (left, right)),
            ]
            rows.append(f"{cells[0]:<12}{cells[1]:<52}{cells[2]}".rstrip())
    return "\n".join(rows)


def test_the_drawing_of_the_rooms_is_that_of_the_imports() -> None:
    (shown,) = re.findall(r"^```text\n(room .*?)\n```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert shown == drawing(), f"\n{drawing()}"


def test_links_and_files_that_the_page_names_are_there() -> None:
    text = PAGE.read_text()
    named = [ROOT / "docs" / target for target in re.findall(r"\]\(([^)#]+)\)", text)]
    named += [ROOT / folder / name for name in re.findall(r"`(\w+/\w+\.py)", text) for folder in (where(name),)]
    assert named
    assert [str(f) for f in named if not f.exists()] == []


def where(name: str) -> str:
    return "lit_resinit" if name.partition("/")[0] in ROOMS else "."


def test_pre_commit_runs_the_versions_of_the_extra() -> None:
    pins = dict(re.findall(r'"(ruff|mypy)==([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    hooks = re.findall(r'"(ruff|mypy)==([\d.]+)"', (ROOT / ".pre-commit-config.yaml").read_text())
    assert set(pins) == {"ruff", "mypy"}
    assert [hook for hook in hooks if pins[hook[0]] != hook[1]] == []
    assert {name for name, _ in hooks} == set(pins)


def test_ci_finds_the_command_of_the_readme() -> None:
    (pattern,) = re.findall(r"sed -n 's/(.*?)/\\1/p' README\.md", (ROOT / ".ci" / "run").read_text())
    basic = pattern.replace(r"\(", "(").replace(r"\)", ")")
    found = [m[1] for line in (ROOT / "README.md").read_text().splitlines() if (m := re.match(basic, line))]
    assert found == ['pip install ".[test]" && pytest -n 2']


if __name__ == "__main__":
    print(drawing())
