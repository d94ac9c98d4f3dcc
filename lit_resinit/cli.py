"""The command line: ``inspect`` a model before anything is trained, ``report`` a run, ``fold`` a checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import pickle
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from lit_resinit.arguments import as_input, as_json_object, draw_inputs, in_flags, load_weights
from lit_resinit.errors import ResInitError
from lit_resinit.find.branches import Found, find
from lit_resinit.find.sums import visible_sums
from lit_resinit.graph.trace import trace
from lit_resinit.graph.values import Graph, Node
from lit_resinit.judge.observe import observe
from lit_resinit.plan.apply import apply_
from lit_resinit.plan.make import make_plan
from lit_resinit.plan.values import Scheme
from lit_resinit.report.files import check_report, is_page, replace_file
from lit_resinit.report.page import write_page
from lit_resinit.trainer.checkpoints import fold_checkpoint, state_of_ours
from lit_resinit.trainer.saved import read_state
from lit_resinit.watch.history import History
from lit_resinit.words import in_columns, together

GOOD, BAD, IMPOSSIBLE = 0, 1, 2  # exit codes: as it should be; a verdict against the model; could not be carried out


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments; those of the process when None.

    Returns:
        The exit code: 0 when all is well, 1 when a branch is open or a gate cannot learn, 2 when the command could not
        be carried out.

    Example:
        >>> main(["report", "missing.npz", "-o", "run.html", "--json"])
        {"error": "FileNotFoundError: missing.npz: no such file"}
        2
    """
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except Exception as error:  # whatever the user's model raises is told in one line, as ours is
        name = "" if isinstance(error, ResInitError) else f"{type(error).__name__}: "
        if options.json:
            print(json.dumps({"error": in_flags(f"{name}{error}")}))
        else:
            print(in_flags(f"{options.command}: {name}{error}"), file=sys.stderr)
        return IMPOSSIBLE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lit-resinit", description=__doc__)
    parser.add_argument("--version", action="version", version=f"lit-resinit {_version()}, torch {torch.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    inspect = commands.add_parser("inspect", help="plan and verdicts of a model; nothing is trained")
    inspect.add_argument("model", help="pkg.module:callable that returns the model, or the model itself")
    inspect.add_argument(
        "--input",
        action="append",
        required=True,
        type=as_input,
        metavar="[NAME=]SIZES[:KIND[:LOW-HIGH]]",
        help="a random input, one for each argument of the forward, such as 2,3,64,64 or input_ids=2,16:int:0-999; the "
        "kind is float (normal numbers), int (from 0 to 9), bool, mask (all true) or ones (integers)",
    )
    inspect.add_argument(
        "--arguments", type=as_json_object, default={}, help="keyword arguments of the callable, as JSON"
    )
    inspect.add_argument("--weights", type=Path, help="a state dict, or a checkpoint with one, to load before")
    inspect.add_argument("--scheme", choices=get_args(Scheme), default="auto")
    inspect.add_argument("--include", action="append", help="glob on branch names; may be repeated")
    inspect.add_argument("--exclude", action="append", help="glob on branch names; may be repeated")
    inspect.add_argument("--overwrite-trained", action="store_true", help="close branches of trained blocks too")
    inspect.add_argument("--sums", action="store_true", help="every sum of the network, and why it is a branch or none")
    inspect.set_defaults(run=_inspect)

    report = commands.add_parser("report", help="summary, page or picture of a run")
    report.add_argument("source", type=Path, help="a checkpoint of a run with ResidualInit, or what History.save wrote")
    report.add_argument(
        "-o", "--out", type=Path, help="run.html, or a picture: run.png, .pdf, .svg; without it, the summary is printed"
    )
    report.set_defaults(run=_report)

    fold = commands.add_parser("fold", help="a checkpoint with inserted scalars as one of the plain network")
    fold.add_argument("source", type=Path, help="a checkpoint of a run with ResidualInit")
    fold.add_argument("-o", "--out", type=Path, required=True, help="the file to write")
    fold.add_argument("--trusted", action="store_true", help="read pickled objects too; only for files of your own")
    fold.set_defaults(run=_fold)

    for command in (inspect, report, fold):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _version() -> str:
    try:
        return metadata.version("lit-resinit")
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return "0"


# -------------------------------------------------------------------- inspect


def _inspect(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    model = _model(options.model, options.arguments)
    if options.weights is not None:
        load_weights(model, options.weights)
    inputs, named = draw_inputs(options.input)
    if options.sums:
        return _print_sums(trace(model, inputs, named), options.json)
    plan = make_plan(model, inputs, named, scheme=options.scheme, include=options.include, exclude=options.exclude)
    apply_(model, plan, overwrite_trained=options.overwrite_trained)
    model.train()
    with observe(model, plan, (inputs, named)) as seen:
        _random_projection(model(*inputs, **named)).backward()
    identity, gradients = seen.identity, seen.gradients
    good = identity.ok and gradients.ok
    if options.json:
        verdicts = {
            "identity": {"ok": identity.ok, "text": in_flags(str(identity)), **_plain(identity, "branches", "stacks")},
            "gradients": {
                "ok": gradients.ok,
                "text": in_flags(str(gradients)),
                "gates": {name: dataclasses.asdict(gate) for name, gate in gradients.gates.items()},
            },
        }
        print(_json({"ok": good, "plan": plan.to_dict(), **verdicts}))
    else:
        print(plan, in_flags(str(identity)), in_flags(str(gradients)), sep="\n\n")
    return GOOD if good else BAD


def _print_sums(graph: Graph, as_json: bool) -> int:
    """Every sum of two values that see the batch, or that are residual, in the order of execution."""
    found = find(graph)
    sums = [n for n in visible_sums(graph) if n.index in found.streams or all(graph.nodes[i].data for i in n.inputs)]
    if as_json:
        print(_json({"sums": [_sum(graph, found, n) | {"skip": found.skip(n.index)} for n in sums]}))
        return GOOD
    table = [("line", "block", "shape", "is")]
    for node in sums:
        row, skip = _sum(graph, found, node), found.skip(node.index)
        why = "; ".join(row["rules"]) or "no summand is computed from the other"
        says = f"a branch, {skip} skip" if skip else f"no branch: {why}"
        table.append((row["line"], row["block"] or "(root)", "x".join(map(str, row["shape"])), says))
    print(f"{len(sums)} sums, {len(found.streams)} residual branches\n{in_columns(table)}")
    return GOOD


def _sum(graph: Graph, found: Found, node: Node) -> dict[str, Any]:
    index = node.index
    where = {"line": graph.source(index), "block": graph.owner(index), "shape": list(node.shape)}
    return where | {"rules": list(found.refused.get(index, ()))}


def _model(name: str, arguments: dict[str, Any]) -> nn.Module:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"expected pkg.module:callable but got {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    model = found if isinstance(found, nn.Module) else found(**arguments)
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected {name} to return a torch.nn.Module, found {type(model).__name__}")
    return model


def _random_projection(output: Any) -> Tensor:
    """A loss with a slope everywhere, also where the output is zero, as that of a zero head is."""
    values = [t for t in tree_iter(_opened(output)) if isinstance(t, Tensor) and t.requires_grad]
    if not values:
        raise ValueError("expected the model to return tensors that depend on its parameters, found none")
    terms = [(t * torch.randn_like(t)).sum() / t.numel() ** 0.5 for t in values]
    return torch.stack([term.real.float() for term in terms]).sum()


def _opened(output: Any) -> Any:
    """Output classes with named fields, opened to a dictionary."""
    return vars(output) if dataclasses.is_dataclass(output) else output


def _plain(report: Any, *fields: str) -> dict[str, Any]:
    return {field: [dataclasses.asdict(row) for row in getattr(report, field)] for field in fields}


def _json(value: Any) -> str:
    """JSON with null where a number is not finite."""

    def finite(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: finite(x) for key, x in item.items()}
        if isinstance(item, list | tuple):
            return [finite(x) for x in item]
        return None if isinstance(item, float) and not abs(item) < float("inf") else item

    return json.dumps(finite(value), allow_nan=False)


# -------------------------------------------------------------------- report


def _report(options: argparse.Namespace) -> int:
    history, about = _read(options.source)
    if options.out is None:
        return _print_summary(history, about, options.json)
    if not options.out.parent.is_dir():
        raise FileNotFoundError(f"{options.out.parent}: no such folder, so {options.out.name} cannot be written there")
    check_report(options.out)
    if is_page(options.out):
        write_page(options.out, history, about, f"from {options.source.name}")
    else:
        from lit_resinit.report.attribution import run_figure

        replace_file(options.out, run_figure(history).savefig)
    if options.json:
        print(_json({"written": str(options.out)} | _summary(history)))
    else:
        found = _summary(history)
        on = f"{len(found['order'])} of {len(found['switched_on'])} branches switched on"
        print(f"{options.out}: {on}, {len(history)} records")
    return GOOD


def _summary(history: History) -> dict[str, Any]:
    return {"records": len(history), "switched_on": history.switched_on(), "order": history.order()}


def _print_summary(history: History, about: dict[str, Any] | None, as_json: bool) -> int:
    """What is known of a run: its plan and verdicts, where the file has them, and how its blocks switched on."""
    about = about or {}
    verdicts = {str(k): in_flags(str(v)) for k, v in about.get("verdicts", {}).items()}
    if as_json:
        print(_json(_summary(history) | {"plan": about.get("plan", ""), "verdicts": verdicts}))
        return GOOD
    for part in filter(None, [about.get("plan"), *(f"{k}: {v}" for k, v in verdicts.items())]):
        print(f"{part}\n")
    Console().print(history)
    return GOOD


def _read(path: Path) -> tuple[History, dict[str, Any] | None]:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if path.suffix == ".npz":
        return History.load(path), None
    checkpoint = _load(path)
    state = state_of_ours(checkpoint)
    if state is None:
        callbacks = checkpoint.get("callbacks")
        raise ResInitError(
            f"reading {path}: expected the state of ResidualInit in the checkpoint, found callbacks "
            f"{sorted(callbacks) if isinstance(callbacks, dict) and callbacks else 'none'}. Save it in a run with that "
            "callback."
        )
    return History.from_dict(state["history"]), read_state(state).about


def _load(path: Path, trusted: bool = False) -> dict[str, Any]:
    if path.is_dir():
        raise ResInitError(
            f"reading {path}: expected a file, found a folder of shards. Join them first: "
            f"`python -m lightning.pytorch.utilities.consolidate_checkpoint {path}`."
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=not trusted)
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError) as error:
        raise ResInitError(
            f"reading {path}: expected a checkpoint of plain types and tensors, or the archive of `History.save`, "
            f"found another kind of file ({type(error).__name__})."
        ) from error
    return checkpoint if isinstance(checkpoint, dict) else {}


# -------------------------------------------------------------------- fold


def _fold(options: argparse.Namespace) -> int:
    checkpoint = _load(options.source, options.trusted)
    folded, kept = fold_checkpoint(checkpoint, options.source)
    replace_file(options.out, lambda temporary: torch.save(checkpoint, temporary))
    if options.json:
        print(_json({"written": str(options.out), "folded": folded, "kept": kept}))
    elif not folded and not kept:
        print(f"{options.out}: nothing to fold, the state dict has no inserted scalars; a copy was written")
    else:
        rest = f"; {len(kept)} do not fold and keep their keys: {together(kept)}" if kept else ""
        print(f"{options.out}: {len(folded)} scalars folded into the weights before them{rest}")
    return BAD if kept else GOOD
