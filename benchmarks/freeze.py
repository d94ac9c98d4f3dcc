"""Freeze what the package says about some 1,000 networks, so that a rewrite of the finder cannot lose a verdict.

Run as ``python -m benchmarks.freeze [--only KIND ...]`` to trace the networks anew (needs the libraries of the extra
``zoo``), ``--diff`` to show what changed since the answers were frozen, ``--accept`` to freeze those of today. The
last two read the stored graphs and need no model library. Kinds: the networks of the tests, the zoo, torchvision, timm,
transformers, and random stacks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib
import json
import logging
import pkgutil
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lit_resinit
from benchmarks import public
from lit_resinit.graph.trace import trace
from lit_resinit.graph.values import Graph

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import frozen_graphs
from frozen_graphs import Freezer

TESTS = Path(__file__).parent.parent / "tests"
PART = 20_000  # nodes in one file
LARGEST = 6_000  # nodes of one network
LARGEST_PUBLIC = 1_500  # nodes of one network that stands for a family
LIMIT = 20  # seconds for one network

PYTEST = ("-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")

Subject = tuple[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]]


# -------------------------------------------------------------------- collecting


class Collector:
    """Writes the graphs of one kind into parts, each network once."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.count = self.parts = 0
        self._known: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        self._freezer, self._answers, self._nodes = Freezer(), dict[str, Any](), 0

    def add(self, name: str, graph: Graph, model: nn.Module) -> str:
        """Freeze one graph; returns why it was left out, or nothing."""
        if len(graph.nodes) > LARGEST:
            return f"{len(graph.nodes)} nodes"
        if not frozen_graphs.is_portable(graph):
            return "operations that plain torch does not have"
        graph = frozen_graphs.with_short_lines(graph)
        key = _fingerprint(graph, model)
        if key in self._known:
            return "known"
        self._known.add(key)
        name = f"{self.kind}/{name}"
        name = name if name not in self._answers else f"{name}#{self.count}"
        answer = frozen_graphs.judge(graph, model)
        expect_same(name, graph, model, answer)
        self._freezer.add(name, graph, model)
        self._answers[name] = answer
        self.count += 1
        self._nodes += len(graph.nodes)
        if self._nodes > PART:
            self.close()
        return ""

    def close(self) -> None:
        """Write what is not written yet."""
        if self._answers:
            name = f"{self.kind}_{self.parts:02}"
            frozen_graphs.write_graphs(name, self._freezer.content())
            frozen_graphs.write_answers(name, self._answers)
            self.parts += 1
        self._begin()


def expect_same(name: str, graph: Graph, model: nn.Module, answer: dict[str, Any]) -> None:
    """The frozen graph and skeleton give the answer that graph and model give."""
    freezer = Freezer()
    freezer.add(name, graph, model)
    (frozen,) = frozen_graphs.thaw(json.loads(json.dumps(freezer.content())))
    different = list(frozen_graphs.differences(answer, frozen_graphs.judge(frozen.graph, frozen.model)))
    if different:
        raise AssertionError(f"{name}: frozen and read back it gives another answer: {different[:3]}")


def _fingerprint(graph: Graph, model: nn.Module) -> str:
    nodes = [(n.op, n.inputs, n.shape, n.name, n.number, n.region, n.data, n.learned) for n in graph.nodes]
    calls = [(str(c.func), repr(c.args), repr(c.kwargs), c.owner, c.graded) for c in graph.calls]
    names = [
        (n, frozen_graphs._constants(p), p.requires_grad) for n, p in model.named_parameters(remove_duplicate=False)
    ]
    return hashlib.sha256(repr((nodes, calls, names, graph.outputs)).encode()).hexdigest()


# -------------------------------------------------------------------- networks of the tests


@contextlib.contextmanager
def every_trace(seen: Callable[[Graph, nn.Module], None]) -> Iterator[None]:
    """Have every trace that the package makes shown."""
    modules = [
        importlib.import_module(m.name)
        for m in pkgutil.walk_packages(lit_resinit.__path__, "lit_resinit.")
        if not m.name.endswith("__main__")
    ]

    def traced(model: nn.Module, *args: Any, **kwargs: Any) -> Graph:
        graph = trace(model, *args, **kwargs)
        seen(graph, model)
        return graph

    users = [m for m in modules if getattr(m, "trace", None) is trace]
    for module in users:
        vars(module)["trace"] = traced
    try:
        yield
    finally:
        for module in users:
            vars(module)["trace"] = trace


class _Watching:
    """Plugin of pytest: freezes what a test traces, under the test's name."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.name = "while collecting"

    def pytest_runtest_call(self, item: Any) -> None:
        self.name = item.nodeid.removeprefix("tests/")

    def seen(self, graph: Graph, model: nn.Module) -> None:
        if len(graph.nodes) <= LARGEST:
            self.collector.add(self.name, graph, model)


def freeze_tests(collector: Collector) -> None:
    """Run the tests that plan, and freeze what they trace."""
    import pytest

    watching = _Watching(collector)
    files = [p for p in sorted(TESTS.rglob("test_*.py")) if "make_plan" in p.read_text() or "apply_" in p.read_text()]
    slow = ("test_benchmarks", "test_examples", "test_elsewhere", "test_frozen", "test_imports")
    chosen = [str(p) for p in files if not p.name.startswith(slow) and p.parent.name != "callback"]
    with every_trace(watching.seen):
        pytest.main([*PYTEST, *chosen], plugins=[watching])


# -------------------------------------------------------------------- public networks


def zoo() -> Iterator[Subject]:
    """The models of ``benchmarks/zoo.json``."""
    from benchmarks.zoo import MODELS, build

    for entry in json.loads(MODELS.read_text()):

        def made(entry: dict[str, Any] = entry) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
            subject = build(entry)
            return subject.model, subject.args, subject.kwargs

        yield entry["id"], made


def torchvision_models() -> Iterator[Subject]:
    """Classifiers of torchvision, the smallest of every family."""
    import torchvision

    names = torchvision.models.list_models(module=torchvision.models)
    for name in public.smallest_first({n: torchvision.models.get_model_builder(n).__module__ for n in names}, 1):
        yield name, functools.partial(public.torchvision_model, name)


def timm_models() -> Iterator[Subject]:
    """Two of every family of timm, at the smallest input that they take."""
    for name in public.smallest_first(public.timm_families(), 2):
        yield name, functools.partial(public.timm_model, name)


def transformers_models() -> Iterator[Subject]:
    """Every configuration of transformers that becomes small, and runs, by the names that most of them share."""
    for kind in public.transformers_kinds():
        yield kind, functools.partial(public.transformers_model, kind)


def random_stacks() -> Iterator[Subject]:
    """Blocks of the tests' networks, stacked at random."""
    import networks

    def norm_and_layer() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(networks.WIDTH), nn.Linear(networks.WIDTH, networks.WIDTH))

    blocks: list[Callable[[], nn.Module]] = [
        *(networks.Plain, networks.InPlace, networks.Scaled, networks.PreNorm, networks.PostNorm, networks.NormLast),
        *(networks.mlp, norm_and_layer, nn.ReLU, networks.RootMeanSquare, lambda: networks.Scaled(value=0.0)),
        lambda: networks.Scaled(value=0.5, size=networks.WIDTH),
    ]

    def made(seed: int) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        draw = random.Random(seed)

        def stack(depth: int) -> nn.Sequential:
            chosen = [draw.choice(blocks)() for _ in range(draw.randint(1, 5))]
            for block in chosen:
                if depth and isinstance(getattr(block, "f", None), nn.Sequential) and draw.random() < 0.4:
                    block.f = stack(depth - 1).append(nn.Linear(networks.WIDTH, networks.WIDTH))
            return nn.Sequential(*chosen)

        model = stack(2).append(nn.Linear(networks.WIDTH, 3))
        return model, (torch.randn(2, networks.WIDTH),), {}

    for seed in range(120):
        yield str(seed), lambda seed=seed: made(seed)


KINDS: dict[str, Callable[[], Iterator[Subject]]] = {
    "zoo": zoo,
    "torchvision": torchvision_models,
    "timm": timm_models,
    "transformers": transformers_models,
    "random": random_stacks,
}


def freeze_subjects(collector: Collector, subjects: Iterator[Subject]) -> None:
    """Build, trace and freeze one network after the other; what does not run is named and left out."""
    for name, build in subjects:
        torch.manual_seed(0)
        try:
            with _time_limit():
                model, args, kwargs = build()
                graph = trace(model, args, kwargs)
                small = collector.kind == "zoo" or len(graph.nodes) <= LARGEST_PUBLIC
                left_out = collector.add(name, graph, model) if small else f"{len(graph.nodes)} nodes"
        except (Exception, TimeoutError) as error:
            if isinstance(error, AssertionError):
                raise
            left_out = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        if left_out:
            print(f"{collector.kind}/{name} left out: {left_out}", flush=True)


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"no end after {LIMIT} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def freeze(kind: str) -> None:
    """Trace all networks of one kind anew."""
    collector = Collector(kind)
    if kind == "tests":
        freeze_tests(collector)
    else:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        freeze_subjects(collector, KINDS[kind]())
    collector.close()
    for path in frozen_graphs.FOLDER.glob(f"{kind}_*.xz"):
        if int(path.name.partition(".")[0].rpartition("_")[2]) >= collector.parts > 0:
            path.unlink()
    print(f"{kind}: {collector.count} networks in {collector.parts} files")


# -------------------------------------------------------------------- what changed


def changes(accept: bool) -> int:
    """Print what differs from the frozen answers, with ``accept`` freeze those of today; returns how many differ."""
    changed = 0
    for part in frozen_graphs.parts():
        frozen, expected = frozen_graphs.read_part(part)
        found = {f.name: frozen_graphs.judge(f.graph, f.model) for f in frozen}
        for name, answer in found.items():
            different = list(frozen_graphs.differences(expected.get(name, {}), answer))
            changed += bool(different)
            for line in different[:8]:
                print(f"{name}: {line}")
            if len(different) > 8:
                print(f"{name}: and {len(different) - 8} more")
        if accept:
            frozen_graphs.write_answers(part, found)
    print(f"{changed} networks {'accepted' if accept else 'differ'}")
    return changed


def main() -> int:
    """Run from the command line; with ``--diff``, 1 where something differs."""
    parser = argparse.ArgumentParser(description="Freeze what the package says about many networks.")
    parser.add_argument("--only", nargs="+", choices=["tests", *KINDS], metavar="KIND", help="kinds to trace anew")
    parser.add_argument("--diff", action="store_true", help="show what differs from the frozen answers")
    parser.add_argument("--accept", action="store_true", help="freeze the answers of today for the stored graphs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.diff or options.accept:
        return int(changes(options.accept) > 0 and not options.accept)
    for kind in options.only or ["tests", *KINDS]:
        freeze(kind)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
