"""One self-contained HTML page of a run: figures that answer to the mouse, a table that sorts, plan and verdicts."""

from __future__ import annotations

import base64
import datetime
import gzip
import html
import json
import math
import os
import time
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from lit_resinit.errors import ResInitError
from lit_resinit.plan.values import CONSTANT_SCHEMES
from lit_resinit.report.about import about_run
from lit_resinit.report.attribution import attribution_data
from lit_resinit.report.files import replace_file
from lit_resinit.report.numbers import decades, digits, evenly, plain
from lit_resinit.report.tables import told_fits
from lit_resinit.watch.history import History
from lit_resinit.watch.lapses import Lapse, in_words
from lit_resinit.words import together

_CELLS = 60_000  # of each quantity in the heat map; more than a screen can show
_ROWS = 1_000  # of the heat map; the table has every branch
_CURVES = 60  # lines in one figure, beyond which none can be told from its neighbour
_SHARE, _PAUSE = 0.01, 5.0  # writing takes at most this part of a run, and happens at most every so many seconds
_FOLLOW = 15  # seconds until a browser looks again
_CALM = ("alive", "asleep", "exploding")  # statuses that are no trouble
_COLUMNS = (  # key, heading, whether it is text
    ("depth", "depth", False),
    ("name", "branch", True),
    ("on", "on at step", False),
    ("now", "now", True),
    ("order", "order", False),
    ("ratio", "variance ratio", False),
    ("g", "largest |g|", False),
    ("use", "usefulness", False),
    ("error", "± standard error", False),
    ("path", "attribution", False),
    ("status", "gradient", True),
    ("woke", "woke after", False),
    ("kind", "kind", True),
    ("gate", "gate", True),
    ("skip", "skip", True),
    ("action", "action", True),
)

# -------------------------------------------------------------------- the page


def page(history: History, about: dict[str, Any] | None = None, state: str = "", refresh: int | None = None) -> str:
    """The page as text: styles, script, plotly.js (packed) and data inside, nothing fetched.

    Args:
        history: The history; it may be empty.
        about: What :func:`about_run` returned.
        state: One sentence on the run, under the title.
        refresh: Seconds after which the browser loads the page again, while the run goes on.

    Returns:
        HTML; at most 1,000 rows and 60,000 cells of each quantity are drawn, evenly spaced, the first and the last
        record among them; the table has every branch. Numbers have four digits.

    Raises:
        ResInitError: If plotly is missing.

    Example:
        >>> history = History(["a", "b"])
        >>> history.append(0, torch.zeros(4, 2), torch.ones(2), torch.tensor([0.1, 0.5]))
        >>> page(history)[:15]
        '<!DOCTYPE html>'
    """
    licence, packed = packed_plotly()
    data = json.dumps(page_data(history, about or about_run(None), state), allow_nan=False, separators=(",", ":"))
    parts = {
        "REFRESH": "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh}">\n',
        "TITLE": html.escape(_title(history, about or about_run(None))),
        "STYLE": _part("page.css"),
        "SCRIPT": _part("page.js"),
        "DATA": data.replace("<", "\\u003c"),
        "LICENCE": licence,
        "PLOTLY": packed,
    }
    pieces = _part("page.html").split("@@")  # text, name, text, name, ...
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _title(history: History, about: dict[str, Any]) -> str:
    lost = len(_lapses(history, about))
    return f"{len(history.branches)} residual branches switching on{f', {lost} in trouble' if lost else ''}"


def write_page(
    path: str | os.PathLike[str], history: History, about: dict[str, Any] | None = None, state: str = ""
) -> None:
    """Write :func:`page` to a file that is complete at every moment.

    Args:
        path: Where to; an existing file is replaced at once.
        history: The history.
        about: What :func:`about_run` returned.
        state: One sentence on the run.
    """
    text = page(history, about, state)
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


class LivePage:
    """A page that is rewritten while a run goes on, so seldom that it costs at most one per cent of the time.

    Args:
        path: Where the page is.

    Example:
        >>> import pathlib, tempfile
        >>> live = LivePage(pathlib.Path(tempfile.mkdtemp()) / "run.html")
        >>> live.due
        True
        >>> live.write(History(["a"]), about_run(None), "running")
        >>> live.due
        False
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._next = -math.inf

    @property
    def due(self) -> bool:
        """Whether enough time has passed since the last writing."""
        return time.monotonic() >= self._next

    def write(self, history: History, about: dict[str, Any], state: str, last: bool = False) -> None:
        """Write the page; while the run goes on (not ``last``), the browser that shows it follows."""
        started = time.monotonic()
        text = page(history, about, state, refresh=None if last else _FOLLOW)
        replace_file(self.path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        ended = time.monotonic()
        self._next = ended + max(_PAUSE, (ended - started) / _SHARE)


_plotly: tuple[str, str] | None = None


def packed_plotly() -> tuple[str, str]:
    """(licence, plotly.js as base64 of gzip), packed once in a process.

    Raises:
        ResInitError: If plotly is missing, naming the extra.
    """
    global _plotly
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ResInitError(
            "writing the HTML page of the run: expected plotly, found none. Run `pip install lit-resinit[report]`. "
            "Nothing was changed."
        ) from error
    if _plotly is None:
        source = get_plotlyjs()
        licence = source[: source.index("*/")].strip("/* \n")
        packed = base64.b64encode(gzip.compress(source.encode(), mtime=0)).decode("ascii")
        _plotly = licence.replace("--", "- -"), packed
    return _plotly


def _part(name: str) -> str:
    return resources.files("lit_resinit.report").joinpath(name).read_text(encoding="utf-8")


# -------------------------------------------------------------------- the data in it


def page_data(history: History, about: dict[str, Any], state: str = "") -> dict[str, Any]:
    """Everything the page shows, as plain types without NaN or infinity.

    Args:
        history: The history.
        about: What :func:`about_run` returned.
        state: One sentence on the run.

    Returns:
        ``ratio``, ``g`` and ``grad`` are lists ``(rows, steps)``; ``rows`` says which branch a row is; ``attribution``
        has steps of its own, and is None where it was not measured.
    """
    lapses = _lapses(history, about)
    branches = _branches(history, about, lapses)
    rows = evenly(len(branches), _ROWS)
    records = evenly(len(history), max(2, min(600, _CELLS // max(1, len(rows)))))
    steps = history.steps
    on = sum(b["on"] is not None for b in branches)
    floor = max(history.on_ratio / 100, 1e-8)
    first, last = (history.var_stream[i] if len(history) else torch.zeros(0) for i in (0, -1))
    return {
        "state": _state(history, about, state),
        "verdict": _verdict(about, branches, state),
        "setting": list(about.get("setting", {}).items()),
        "tiles": _tiles(history, branches, about["start"], on),
        "notes": _notes(history, about, on, len(rows), len(records)),
        "verdicts": [*about["verdicts"].items(), *_later(lapses, len(branches))],
        "plan": about["plan"],
        "columns": [list(c) for c in _COLUMNS],
        "branches": branches,
        "rows": rows,
        "curves": _CURVES,
        "steps": [int(steps[i]) for i in records],
        "lowest": floor,
        **{
            key: [plain(row) for row in getattr(history, name)[records][:, rows].T]
            for key, name in (("ratio", "variance_ratio"), ("g", "gate_max"), ("grad", "gate_grad"))
        },
        "attribution": attribution_data(history, rows, max(2, _CELLS // max(1, len(rows)))),
        "stream": {
            "first": plain(first),
            "last": plain(last),
            "from": int(steps[0]) if len(history) else None,
            "to": int(steps[-1]) if len(history) else None,
            "decades": decades(torch.cat([first, last])),
        },
    }


def _lapses(history: History, about: dict[str, Any]) -> dict[str, Lapse]:
    apart = ("excluded", *CONSTANT_SCHEMES)
    return history.lapses.found({n for n, b in about["branches"].items() if b["gate"] and b["action"] not in apart})


def _later(lapses: dict[str, Lapse], total: int) -> list[tuple[str, str]]:
    return [("Gates during the training", in_words(lapses.values(), total))] if lapses else []


def _branches(history: History, about: dict[str, Any], lapses: dict[str, Lapse]) -> list[dict[str, Any]]:
    order, opened = {name: i + 1 for i, name in enumerate(history.order())}, {*history.open_from_start()}
    on, use, errors = history.switched_on(), about["usefulness"] or {}, about.get("errors") or {}
    path = about.get("path") or _newest_attribution(history)
    unknown = torch.full((len(history.branches),), math.nan)
    g, ratio = (plain(history.newest(q) if len(history) else unknown) for q in ("gate_max", "variance_ratio"))
    empty = {"skip": "", "action": "", "kind": "", "gate": "", "status": "", "woke": None}
    return [
        {
            "depth": depth,
            "name": name,
            **about["branches"].get(name, empty),
            **({"status": str(lapses[name])} if name in lapses else {}),
            "g": g[depth],
            "ratio": ratio[depth],
            "on": on[name],
            "now": _now(ratio[depth], history.on_ratio, known=on[name] is not None or name in opened),
            "order": order.get(name),
            "use": digits(use[name]) if name in use else None,
            "error": digits(errors[name]) if name in errors else None,
            "path": digits(path[name]) if name in path else None,
        }
        for depth, name in enumerate(history.branches)
    ]


def _state(history: History, about: dict[str, Any], state: str) -> str:
    fits = told_fits(about["fits"]) if about.get("fits") else ""
    return ". ".join(filter(None, (state, fits, "" if len(history) else "No record yet")))


def _now(ratio: float | None, on_ratio: float, *, known: bool) -> str:
    """Whether a branch is on by its newest record, and whether it was before."""
    if ratio is None:
        return ""
    return "on" if ratio >= on_ratio else "off again" if known else "off"


def _verdict(about: dict[str, Any], branches: list[dict[str, Any]], state: str) -> list[str]:
    """What a reader wants to know first: (good, wait or bad, one sentence)."""
    bad = [b["name"] for b in branches if b["status"] and b["status"] not in _CALM]
    asleep = sum(b["status"] == "asleep" for b in branches)
    if about["start"] in ("broken", "variance not kept"):
        return ["bad", "The network does not start as it should: the verdicts name the live path."]
    if bad:
        return ["bad", f"{len(bad)} of {len(branches)} branches in trouble: {together(bad)}. The verdicts say why."]
    if state.startswith("stopped"):
        return ["bad", f"The run was {state.split(',')[0]}."]
    if asleep:
        return ["wait", f"{asleep} of {len(branches)} gates asleep: each waits for something that is to learn first."]
    if any(b["status"] for b in branches):
        begins = "It starts as the identity, and every gate learns." if about["start"] == "proven" else ""
        return ["good", begins or "Every gate learns."]
    return ["wait", "No gate was judged."]


def _newest_attribution(history: History) -> dict[str, float]:
    found = history.attributions
    return dict(zip(history.branches, found.values[-1].tolist(), strict=True)) if len(found) else {}


def _tiles(history: History, branches: list[dict[str, Any]], start: str, on: int) -> list[list[str]]:
    statuses = [b["status"] for b in branches if b["status"]]
    troubled = sum(s not in _CALM for s in statuses)
    asleep = sum(s == "asleep" for s in statuses)
    tiles = [
        ["blocks on", f"{on} / {len(history.branches) - len(history.open_from_start())}"],
        ["last record, step", str(int(history.steps[-1])) if len(history) else "-"],
        ["identity at the start", start or "not judged"],
    ]
    if statuses:
        verdict = f"{troubled} in trouble" if troubled else f"{asleep} asleep" if asleep else "all learn"
        tiles.append(["gates", f"{verdict}, of {len(statuses)}"])
    return tiles


def _notes(history: History, about: dict[str, Any], on: int, rows: int, records: int) -> dict[str, str]:
    total = len(history.branches)
    drawn = "" if rows == total else f"{rows:,} of {total:,} branches drawn, evenly by depth. "
    seen = "" if records == len(history) else f"{records:,} of {len(history):,} records drawn. "
    curves = len(range(0, rows, max(1, math.ceil(rows / _CURVES))))
    lines = "" if curves == total else f"{curves} of {total:,} branches, evenly by depth; "
    opened = history.open_from_start()
    never = [name for name, step in history.switched_on().items() if step is None and name not in {*opened}]
    missed = (
        f" Never: {', '.join(never[:6])}{f' and {len(never) - 6:,} more' if len(never) > 6 else ''}." if never else ""
    )
    started = f" {len(opened):,} were not closed, and on from the start: no place in the order." if opened else ""
    return {
        "map": f"Colour: variance of the branch over that of the stream entering its addition. Dots: the first record "
        f"at which it reached {history.on_ratio:g}. {drawn}{seen}".strip(),
        "gates": f"Largest |g| of each branch, measured from its closing value; {lines}from the "
        "first (dark) to the last (light).",
        "order": f"{on} of {total - len(opened):,} branches switched on.{missed}{started}",
        "stream": "The residual stream as it enters each addition, at the first and at the last record.",
        "path": "Colour: what a branch takes off the loss on data held out, by the gate path; red where it adds to "
        f"it. Dots: the first record at which the variance ratio reached {history.on_ratio:g}. {drawn}".strip(),
        "stack": "The same, stacked by depth; the line is the sum over all branches, the dots what closing all of "
        "them does to the loss. Ticks below: branches switching on.",
        "loss": "The loss on the same data as it is, and with all gates closed.",
        "use": about["agreement"] or "Loss with the gate closed minus loss, by the order of switching on.",
    }


def clock() -> str:
    """The time of writing, for people."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
