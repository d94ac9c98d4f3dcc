"""All of torchvision, timm and transformers: how many branches are found, and do answers of other origin agree?

Run as ``python -m benchmarks.everything [--library NAME ...] [--only TEXT] [--limit N] [--seconds S] [--rows FILE]``.
Rows are appended to FILE as they are measured, and what is there already is not run again: a run can be stopped at any
time and gone on with later. ``--report FILE`` writes the text from all rows. The libraries take turns, and the smallest
network of every family comes first, then the second smallest, so that the beginning of a run already has every family.

Of every network that builds: the sums of two tensors that see the data, how many are branches, and why the others are
none. Then, where they exist, answers that this package has no part in:

- timm's ``zero_init_last()`` of every block, and torchvision's ``zero_init_residual=True``: the authors' own gates.
- growth: a network of transformers with 2, 4 and 6 layers gains the same number of branches each time.
- siblings: of three or more alike modules in one list, all after the first hold the same number of branches.
- closed: after ``apply_`` every branch contributes exactly nothing, in one real forward (up to 30 million parameters).

A network of torchvision or timm whose class was run before, and all of whose modules are of kinds that were run in
networks of that class (see ``kinds_of_modules.py``), is not run but listed as alike, with their names. ``--all`` runs
it too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import logging
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import public
from benchmarks.kinds_of_modules import kinds_of, meta
from benchmarks.public import Made
from benchmarks.zoo import OutOfTimeError, time_limit
from lit_resinit import NoBranchError, ResidualPlan, apply_, check_identity
from lit_resinit.errors import GateError
from lit_resinit.find.branches import find
from lit_resinit.find.sums import visible_sums
from lit_resinit.graph.trace import trace
from lit_resinit.graph.where import is_below
from lit_resinit.plan.make import make_plan, plan_graph

ROWS = Path("everything.jsonl")
REPORT = Path(__file__).with_name("results") / "everything.txt"
CLOSED = 30_000_000  # parameters up to which a real forward is run
LAYERS = (2, 4, 6)


@dataclasses.dataclass
class Row:
    """What was measured on one network.

    ``status`` is planned, no branch, refused, not traced, not built or alike; ``reason`` says why, where it is not
    planned. ``root`` and ``kinds`` say what it is made of.
    ``differs`` holds what an answer of other origin says otherwise, by its name, ``agrees`` those that say the same.
    """

    id: str
    family: str
    status: str = "not built"
    reason: str = ""
    sums: int = 0
    branches: int = 0
    none: dict[str, int] = dataclasses.field(default_factory=dict)
    agrees: list[str] = dataclasses.field(default_factory=list)
    differs: dict[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    root: str = ""
    kinds: list[str] = dataclasses.field(default_factory=list)

    def compare(self, name: str, difference: str) -> None:
        """Note one comparison: what differs, or nothing."""
        if difference:
            self.differs[name] = difference
        else:
            self.agrees.append(name)


# -------------------------------------------------------------------- the networks


@dataclasses.dataclass(frozen=True)
class Subject:
    """A network by its name, and how it is built."""

    id: str
    family: str
    build: Callable[..., Made]


def torchvision_subjects() -> Iterator[Subject]:
    """Every network of torchvision."""
    import torchvision

    names = torchvision.models.list_models()
    families = {n: torchvision.models.get_model_builder(n).__module__ for n in names}
    for name in public.by_rank(families):
        yield Subject(f"torchvision/{name}", families[name], functools.partial(public.torchvision_model, name))


def timm_subjects() -> Iterator[Subject]:
    """Every network of timm that fits."""
    families = public.timm_families()
    for name in public.by_rank(families):
        yield Subject(f"timm/{name}", families[name], functools.partial(public.timm_model, name, public.LARGEST))


def transformers_subjects() -> Iterator[Subject]:
    """Every configuration of transformers."""
    for kind in public.transformers_kinds():
        yield Subject(f"transformers/{kind}", kind, functools.partial(public.transformers_model, kind))


LIBRARIES: dict[str, Callable[[], Iterator[Subject]]] = {
    "torchvision": torchvision_subjects,
    "transformers": transformers_subjects,
    "timm": timm_subjects,
}


# -------------------------------------------------------------------- one network


_RUN = ("planned", "no branch")


def alike(subject: Subject, rows: Iterable[Row]) -> Row | None:
    """The row of a network that need not be run: networks of its class that were have all kinds of its modules."""
    row = Row(subject.id, subject.family, "alike")
    try:
        row.root, row.kinds = kinds_of(meta(subject.build))
    except public.TooLargeError:
        return None
    except Exception:  # not every network builds without memory
        return None
    missing, siblings = set(row.kinds), list[str]()
    for other in rows:
        if other.root == row.root and other.status in _RUN and missing.intersection(other.kinds):
            missing.difference_update(other.kinds)
            siblings.append(other.id.partition("/")[2])
    row.reason = ", ".join(siblings)
    return None if missing else row


def measure(subject: Subject) -> Row:
    """Everything about one network; it never raises."""
    row, start = Row(subject.id, subject.family), time.perf_counter()
    try:
        with time_limit():
            torch.manual_seed(0)
            made = subject.build()
            row.status = "not traced"
            row.root, row.kinds = kinds_of(made[0])
            plan = _planned(row, made)
            if plan is not None:
                _compare(row, subject, made, plan)
    except (Exception, OutOfTimeError) as error:
        text = f"{type(error).__name__}: {_words(error)}"
        if row.status == "planned":
            row.differs["an error"] = text
        else:
            row.reason = text
    row.seconds = round(time.perf_counter() - start, 2)
    return row


def _words(error: BaseException) -> str:
    """A message without line breaks, and without the place where packages are installed."""
    return re.sub(r"[^ ]*/site-packages/", "", " ".join(str(error).split()))[:600]


def _planned(row: Row, made: Made) -> ResidualPlan | None:
    model, args, kwargs = made
    model.train()
    graph = trace(model, args, kwargs)
    found = find(graph)
    sums = [n for n in visible_sums(graph) if all(graph.nodes[i].data for i in n.inputs)]
    row.sums = len(sums)
    others = [found.refused.get(n.index, ()) for n in sums if n.index not in found.streams]
    row.none = dict(Counter(names[0] if names else "no summand is computed from the other" for names in others))
    try:
        plan = plan_graph(model, graph, "auto")
    except (NoBranchError, GateError) as error:
        row.status = "no branch" if isinstance(error, NoBranchError) else "refused"
        row.reason = _words(error)
        return None
    row.status, row.branches = "planned", len(plan)
    return plan


def _compare(row: Row, subject: Subject, made: Made, plan: ResidualPlan) -> None:
    model, args, kwargs = made
    row.compare("siblings", _uneven_siblings(model, plan))
    library = row.id.partition("/")[0]
    if library == "torchvision":
        with contextlib.suppress(TypeError):  # of a network without that argument
            zeroed, *_ = subject.build(zero_init_residual=True)
            wanted = _zero_weights(zeroed)
            if wanted:
                row.compare("zero_init_residual", _other_gates(wanted, plan.branches))
    if library == "timm":
        own = dict(_zeroed_by_their_authors(model))
        if any(own.values()):
            blocks = [b for b in plan.branches if b.block in own]
            row.compare("zero_init_last", _other_gates(set().union(*own.values()), blocks))
    if library == "transformers":
        with contextlib.suppress(Exception):  # of a configuration that is not consistent at another depth
            row.compare("growth", _uneven_growth(subject, len(plan)))
    if sum(p.numel() for p in model.parameters()) <= CLOSED:
        report = check_identity(apply_(model, plan), plan, args, kwargs)
        row.compare("closed", "" if report.ok else str(report)[:400])


def _zero_weights(model: nn.Module) -> set[str]:
    return {n for n, p in model.named_parameters() if n.endswith("weight") and not p.any()}


def _zeroed_by_their_authors(model: nn.Module) -> Iterator[tuple[str, set[str]]]:
    """What ``zero_init_last()`` of every block sets to zero; put back afterwards."""
    for name, module in model.named_modules():
        method = getattr(module, "zero_init_last", None)
        if callable(method):
            kept = {n: p.detach().clone() for n, p in module.named_parameters()}
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.fill_(1.0)
                method()
                yield name, {f"{name}.{n}" for n in _zero_weights(module)}
                for n, parameter in module.named_parameters():
                    parameter.copy_(kept[n])


def _other_gates(wanted: set[str], branches: Iterable[Any]) -> str:
    found = {g.parameter for b in branches for g in b.gates}
    missing, more = sorted(wanted - found), sorted(found - wanted)
    words = [
        f"{what} {', '.join(names[:4])} ({len(names)})" for what, names in (("lacks", missing), ("has", more)) if names
    ]
    return "; ".join(words)


def _uneven_siblings(model: nn.Module, plan: ResidualPlan) -> str:
    """The first list of equal modules that hold unequal numbers of branches."""
    for name, module in model.named_modules():
        children = list(module.named_children())
        if not isinstance(module, nn.Sequential | nn.ModuleList) or len(children) < 3:
            continue
        if len({(type(child), sum(1 for _ in child.modules())) for _, child in children[1:]}) == 1:
            places = [f"{name}.{n}" if name else n for n, _ in children]
            counts = [sum(is_below(b.block, place) for b in plan.branches) for place in places]
            if len(set(counts[1:])) > 1:
                return f"{name}: {counts}"
    return ""


def _uneven_growth(subject: Subject, first: int) -> str:
    counts = [first]
    for layers in LAYERS[1:]:
        model, args, kwargs = subject.build(layers=layers)
        counts.append(len(make_plan(model.train(), args, kwargs)))
    return "" if counts[2] - counts[1] == counts[1] - counts[0] > 0 else f"{counts} branches with {LAYERS} layers"


# -------------------------------------------------------------------- the report


def report_of(rows: list[Row]) -> str:
    """All rows as a text: totals by library, then every network that differs or is refused, by name."""
    lines = [_versions(), ""]
    for library in dict.fromkeys(r.id.partition("/")[0] for r in rows):
        lines += [*_of_library(library, [r for r in rows if r.id.startswith(f"{library}/")]), ""]
    return "\n".join(lines)


def _versions() -> str:
    import timm
    import torchvision
    import transformers

    versions = [f"{m.__name__} {m.__version__}" for m in (torch, torchvision, timm, transformers)]
    return f"{time.strftime('%Y-%m-%d')}; {', '.join(versions)}; inputs and sizes: benchmarks/public.py"


def _of_library(library: str, rows: list[Row]) -> Iterator[str]:
    count = Counter(r.status for r in rows)
    planned = [r for r in rows if r.status == "planned"]
    yield f"{library}: {len(rows)} networks run ({', '.join(f'{n} {status}' for status, n in count.most_common())})"
    sums, branches = sum(r.sums for r in planned), sum(r.branches for r in planned)
    yield f"  {branches} branches among {sums} sums of two tensors, in those that are planned"
    for name in dict.fromkeys(n for r in planned for n in (*r.agrees, *r.differs)):
        agreed, differ = sum(name in r.agrees for r in planned), sum(name in r.differs for r in planned)
        yield f"  {name}: {agreed} agree, {differ} differ"
    none = Counter[str]()
    for r in planned:
        none.update(r.none)
    yield f"  sums that are none: {', '.join(f'{why} {n}' for why, n in none.most_common())}"
    names = [f"{r.id.partition('/')[2]} {r.branches}" for r in planned]
    yield f"  planned, with branches: {', '.join(names)}"
    for r in planned:
        for name, text in r.differs.items():
            yield f"  differs: {r.id}, {name}: {text}"
    for status in ("refused", "no branch", "not traced", "not built", "alike"):
        reasons: dict[str, list[str]] = {}
        for r in rows:
            if r.status == status:
                reasons.setdefault(r.reason if status != "no branch" else "", []).append(r.id.partition("/")[2])
        for reason, names in reasons.items():
            to = " to" if status == "alike" else ":" if reason else ""
            yield f"  {status}{': ' if status != 'alike' else ' '}{', '.join(names)}{to}{' ' if reason else ''}{reason}"


# -------------------------------------------------------------------- command line


def read(path: Path) -> list[Row]:
    """The rows that were measured before."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def in_turns(libraries: Iterable[str], only: str, limit: int | None, known: set[str]) -> Iterator[Subject]:
    """The networks that were not measured yet, one of each library after the other."""
    lists = [[s for s in LIBRARIES[n]() if only in s.id and s.id not in known][:limit] for n in libraries]
    for row in itertools.zip_longest(*lists):
        yield from (s for s in row if s is not None)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="Plan every network of three libraries.")
    parser.add_argument("--library", nargs="+", choices=list(LIBRARIES), default=list(LIBRARIES))
    parser.add_argument("--only", default="", metavar="TEXT", help="networks whose name contains TEXT")
    parser.add_argument("--limit", type=int, metavar="N", help="stop after N networks of each library")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="S", help="stop after S seconds in all")
    parser.add_argument("--all", action="store_true", help="also networks that are alike to others")
    parser.add_argument("--rows", type=Path, default=ROWS, metavar="FILE")
    parser.add_argument("--report", type=Path, default=REPORT, metavar="FILE")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = read(options.rows)
    end = time.monotonic() + options.seconds
    for subject in in_turns(options.library, options.only, options.limit, {r.id for r in rows}):
        if time.monotonic() > end:
            break
        skipped = None if options.all or subject.id.startswith("transformers/") else alike(subject, rows)
        row = skipped or measure(subject)
        rows.append(row)
        print(row, flush=True)
        with options.rows.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        gc.collect()
    options.report.write_text(report_of(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
