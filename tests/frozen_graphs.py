"""Frozen graphs: what a trace wrote down, and the bare bones of its model, read back without any model library.

A part is two files below ``tests/frozen``: ``NAME.graphs.json.xz`` (graphs and skeletons) and ``NAME.answers.json.xz``
(which sums are residual, and the plan for some schemes). ``python -m benchmarks.freeze`` writes them.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_resinit.errors import ResInitError
from lit_resinit.find.streams import Addition, Link
from lit_resinit.graph.values import Call, Graph, ModuleOutput, Node
from lit_resinit.plan.make import plan_graph
from lit_resinit.plan.survey import Survey, survey

FOLDER = Path(__file__).with_name("frozen")
SCHEMES = ("auto", "observe", "insert", "last_layer")
_SMALL = 600  # nodes up to which every scheme is tried; a larger network gets the first two, which takes half the time
_ELEMENTS = 1000  # of a parameter; trailing axes of a larger one are cut to 1, for nothing but its values is asked
_ADDITION = ("node", "skip", "branch", "stream", "projection", "scales", "block")
_NAMESPACES = ("aten", "prims")  # what every build of torch has


@dataclasses.dataclass(slots=True)
class Frozen:
    """One traced network: its name, the graph, and a module with the same names and constant values."""

    name: str
    graph: Graph
    model: nn.Module


# -------------------------------------------------------------------- what the package says today (the only place)


def judge(graph: Graph, model: nn.Module) -> dict[str, Any]:
    """Every addition and the plan of every scheme, in plain types."""
    known = survey(model, graph)
    answer = {"additions": [_addition(a, known.streams.link(a.node)) for a in known.streams]}
    schemes = SCHEMES if len(graph.nodes) <= _SMALL else SCHEMES[:2]
    answer |= {scheme: _plan(known, model, scheme) for scheme in schemes}
    return json.loads(json.dumps(answer))


def _addition(addition: Addition, link: Link) -> dict[str, Any]:
    plain = {name: getattr(addition, name) for name in _ADDITION}
    return plain | {"address": dataclasses.asdict(addition.address)} | dataclasses.asdict(link)


def _plan(known: Survey, model: nn.Module, scheme: Any) -> dict[str, Any]:
    try:
        return plan_graph(model, known.graph, scheme, known=known).to_dict()
    except ResInitError as error:
        return {"error": type(error).__name__, "text": str(error)}


# -------------------------------------------------------------------- comparing


def differences(expected: Any, found: Any, path: str = "") -> Iterator[str]:
    """Every place at which two answers differ; what the frozen one does not have is no difference."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in expected:
            if key in found:
                yield from differences(expected[key], found[key], f"{path}.{key}" if path else key)
            else:
                yield f"{path}: expected {key}, which is missing"
    elif isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            yield f"{path}: expected {len(expected)} of them, found {len(found)}: {_lines(expected, found)}"
        for position, (left, right) in enumerate(zip(expected, found, strict=False)):
            yield from differences(left, right, f"{path}[{position}]")
    elif expected != found:
        yield f"{path}: expected {expected!r}, found {found!r}"


def _lines(expected: list[Any], found: list[Any]) -> str:
    """What only one of two lists holds, by node or name where the elements have one."""
    left, right = ([_label(e) for e in elements] for elements in (expected, found))
    lost, new = [e for e in left if e not in right], [e for e in right if e not in left]
    return f"lost {', '.join(lost) or 'none'}; new {', '.join(new) or 'none'}"


def _label(element: Any) -> str:
    if isinstance(element, dict) and "node" in element:
        return f"node {element['node']} at {element['address']['line']}"
    return str(element.get("name", element)) if isinstance(element, dict) else str(element)


# -------------------------------------------------------------------- files


def parts() -> list[str]:
    """Names of all parts."""
    return sorted(path.name.partition(".")[0] for path in FOLDER.glob("*.graphs.json.xz"))


def read_part(name: str) -> tuple[list[Frozen], dict[str, Any]]:
    """The graphs of a part, and the frozen answers by graph."""
    return thaw(_read(FOLDER / f"{name}.graphs.json.xz")), read_answers(name)


def read_answers(name: str) -> dict[str, Any]:
    """The frozen answers of a part by graph."""
    return _read(FOLDER / f"{name}.answers.json.xz")


def write_graphs(name: str, content: dict[str, Any]) -> None:
    _write(FOLDER / f"{name}.graphs.json.xz", content)


def write_answers(name: str, answers: dict[str, Any]) -> None:
    _write(FOLDER / f"{name}.answers.json.xz", answers)


def _read(path: Path) -> Any:
    return json.loads(lzma.decompress(path.read_bytes()))


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(content, separators=(",", ":"), sort_keys=True)
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


# -------------------------------------------------------------------- freezing


def is_portable(graph: Graph) -> bool:
    """Whether plain torch has every operation of the graph."""
    return all(call.func.namespace in _NAMESPACES for call in graph.calls)


def with_short_lines(graph: Graph) -> Graph:
    """The same graph with source lines that say nothing of this machine."""
    calls = [dataclasses.replace(c, line=_short(c.line), source=_short(c.source)) for c in graph.calls]
    return dataclasses.replace(graph, calls=calls)


_ROOTS = [str(Path(p).resolve()) for p in sys.path if p and Path(p).is_dir()] + [str(Path(__file__).parents[1])]
_ROOTS = sorted(set(_ROOTS), key=lambda root: -len(root))


def _short(line: str) -> str:
    line = re.sub(r"^.*/site-packages/", "", line)
    for root in (str(Path(__file__).parents[1]), *_ROOTS):
        line = line.removeprefix(root + "/")
    return Path(line).name if line.startswith("/") else line


class Freezer:
    """Collects graphs as plain types; strings, shapes and other repeated values are written once."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}
        self._graphs: list[dict[str, Any]] = []

    def add(self, name: str, graph: Graph, model: nn.Module) -> None:
        """Freeze one network."""
        self._graphs.append(
            {
                "name": name,
                "nodes": self._nodes(graph),
                "calls": self._calls(graph),
                "outputs": [[self._of(o.module), *o.nodes] for o in graph.outputs],
                "executed": graph.executed,
                "aliases": graph.aliases,
                "lots": graph.lots,
                "model": self._model(model),
            }
        )

    def content(self) -> dict[str, Any]:
        """What :func:`thaw` reads."""
        return {"values": [json.loads(v) for v in self._values], "graphs": self._graphs}

    def _of(self, value: Any) -> int:
        return self._values.setdefault(json.dumps(_encode(value)), len(self._values))

    def _nodes(self, graph: Graph) -> dict[str, Any]:
        nodes = graph.nodes
        rest = {}
        for node in nodes:
            extra = {
                k: getattr(node, k) for k in ("name", "region", "number", "shown") if getattr(node, k) not in ("", None)
            }
            extra |= {"flags": _flags(node)} if _flags(node) != _inherited(nodes, node) else {}
            if extra:
                rest[node.index] = {k: self._of(v) for k, v in extra.items()}
        return {
            "op": [self._of(n.op) for n in nodes],
            "inputs": [[n.index - i for i in n.inputs] for n in nodes],
            "call": _steps([n.call for n in nodes]),
            "shape": [self._of(tuple(n.shape)) for n in nodes],
            "rest": rest,
        }

    def _calls(self, graph: Graph) -> dict[str, Any]:
        first = _first_nodes(graph)
        return {
            "func": [self._of(str(c.func)) for c in graph.calls],
            "args": [self._of(tuple(c.args)) for c in graph.calls],
            "kwargs": [self._of({**c.kwargs}) for c in graph.calls],
            "owner": [self._of(c.owner) for c in graph.calls],
            "line": [self._of(c.line) for c in graph.calls],
            "source": [self._of(c.source) for c in graph.calls],
            "inputs": [[f - i for i in c.inputs] for f, c in zip(first, graph.calls, strict=True)],
            "outputs": [[i - f for i in c.outputs] for f, c in zip(first, graph.calls, strict=True)],
            "ungraded": [i for i, c in enumerate(graph.calls) if not c.graded],
        }

    def _model(self, model: nn.Module) -> dict[str, Any]:
        modules: list[Any] = []
        known: dict[int, int] = {}
        parameters: list[Any] = []
        for name, module in model.named_modules(remove_duplicate=False):
            position = known.setdefault(id(module), len(modules))
            first = position == len(modules)
            modules.append([name, self._of(type(module).__name__)] if first else [name, -1, position])
            for own, parameter in module._parameters.items() if first else ():
                if parameter is not None:
                    parameters.append([position, self._of(own), *self._parameter(parameter, parameters, known)])
        return {"modules": modules, "parameters": parameters}

    def _parameter(self, parameter: Tensor, parameters: list[Any], known: dict[int, int]) -> list[int]:
        position = known.setdefault(id(parameter), len(parameters))
        if position != len(parameters):
            return [position]
        what = (tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad, _constants(parameter))
        return [-1, self._of(what)]


def _constants(parameter: Tensor) -> Any:
    """The one value of a parameter; else the round values along its first axis, as (position, value); else None."""
    values = parameter.detach()
    if values.is_meta or values.numel() == 0:
        return None
    values = values.full_tensor() if hasattr(values, "full_tensor") else values
    if bool((values == values.flatten()[0]).all()):
        return values.flatten()[0].item()
    if values.dim() == 0 or values.dtype.is_complex:
        return None
    rows = values.reshape(len(values), -1).double()
    equal = (rows == rows[:, :1]).all(1) & (rows[:, 0] * 8 == (rows[:, 0] * 8).round())
    return [(i, rows[i, 0].item()) for i in equal.nonzero().flatten().tolist()] or None


def _first_nodes(graph: Graph) -> list[int]:
    """For every call the first node that it made, or that of the call before it."""
    first, position = [0] * len(graph.calls), -1
    for node in graph.nodes:
        while position < node.call:
            position += 1
            first[position] = node.index
    return first


def _flags(node: Node) -> tuple[bool, bool, bool]:
    return node.data, node.learned, node.noise


def _inherited(nodes: list[Node], node: Node) -> tuple[bool, bool, bool]:
    sources = [_flags(nodes[i]) for i in node.inputs]
    return any(s[0] for s in sources), any(s[1] for s in sources), any(s[2] for s in sources)


def _steps(numbers: list[int]) -> list[int]:
    return [n - before for n, before in zip(numbers, [0, *numbers], strict=False)]


_TYPES: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "complex": (complex, lambda v: [v.real, v.imag], lambda v: complex(*v)),
    "dtype": (torch.dtype, lambda v: str(v)[6:], lambda v: getattr(torch, v)),
    "layout": (torch.layout, lambda v: str(v)[6:], lambda v: getattr(torch, v)),
    "memory_format": (torch.memory_format, lambda v: str(v)[6:], lambda v: getattr(torch, v)),
    "device": (torch.device, str, torch.device),
}


def _encode(value: Any) -> Any:
    """A value as JSON has it; what is no plain type is None."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {"tuple": [_encode(v) for v in value]}
    if isinstance(value, list):
        return [_encode(v) for v in value]
    if isinstance(value, dict):
        return {"dict": {k: _encode(v) for k, v in value.items()}}
    if isinstance(value, torch.SymInt):
        return int(value)
    return next(({name: to(value)} for name, (kind, to, _) in _TYPES.items() if isinstance(value, kind)), None)


# -------------------------------------------------------------------- thawing


def thaw(content: dict[str, Any]) -> list[Frozen]:
    """The graphs and skeletons that a :class:`Freezer` wrote."""
    values = [_decode(v) for v in content["values"]]
    return [Frozen(g["name"], _graph(g, values), _skeleton(g["model"], values)) for g in content["graphs"]]


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tuple":
        return tuple(_decode(v) for v in inner)
    if kind == "dict":
        return {k: _decode(v) for k, v in inner.items()}
    return _TYPES[kind][2](inner)


def _graph(frozen: dict[str, Any], values: list[Any]) -> Graph:
    graph = Graph(
        executed=frozen["executed"],
        aliases=frozen["aliases"],
        lots=frozen["lots"],
        outputs=[ModuleOutput(values[module], tuple(nodes)) for module, *nodes in frozen["outputs"]],
    )
    _thaw_nodes(graph, frozen["nodes"], values)
    graph.calls = [_call(fields, values) for fields in _rows(frozen["calls"])]
    for first, call in zip(_first_nodes(graph), graph.calls, strict=True):
        call.inputs = tuple(first - i for i in call.inputs)
        call.outputs = tuple(first + i for i in call.outputs)
    for index in frozen["calls"]["ungraded"]:
        graph.calls[index].graded = False
    return graph


def _rows(columns: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    names = ("func", "args", "kwargs", "owner", "line", "source", "inputs", "outputs")
    return zip(*(columns[name] for name in names), strict=True)


def _call(fields: tuple[Any, ...], values: list[Any]) -> Call:
    func, args, kwargs, owner, line, source = (values[f] for f in fields[:6])
    return Call(_function(func), args, dict(kwargs), owner, line, source, fields[6], fields[7])


def _function(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _thaw_nodes(graph: Graph, columns: dict[str, Any], values: list[Any]) -> None:
    call = 0
    for index, (op, inputs, step, shape) in enumerate(
        zip(columns["op"], columns["inputs"], columns["call"], columns["shape"], strict=True)
    ):
        call += step
        rest = {k: values[v] for k, v in columns["rest"].get(str(index), {}).items()}
        flags = rest.pop("flags", None)
        node = Node(index, values[op], tuple(index - i for i in inputs), call, values[shape], **rest)
        node.data, node.learned, node.noise = flags or _inherited(graph.nodes, node)
        graph.nodes.append(node)


def _skeleton(frozen: dict[str, Any], values: list[Any]) -> nn.Module:
    modules: list[nn.Module] = []
    by_name: dict[str, nn.Module] = {}
    for name, kind, *same in frozen["modules"]:
        module = modules[same[0]] if same else type(values[kind], (nn.Module,), {})()
        modules.append(module)
        by_name[name] = module
        parent, _, own = name.rpartition(".")
        if name:
            by_name[parent]._modules[own] = module
    parameters: list[nn.Parameter] = []
    for owner, own, first, *what in frozen["parameters"]:
        parameters.append(_thaw_parameter(*values[what[0]]) if what else parameters[first])
        modules[owner].register_parameter(values[own], parameters[-1])
    return by_name[""]


def _thaw_parameter(shape: tuple[int, ...], dtype: str, graded: bool, constants: Any) -> nn.Parameter:
    """A parameter without memory of its own; what is not constant becomes uneven numbers."""
    shape = _cut(shape)
    kind = getattr(torch, dtype.removeprefix("torch."))
    if constants is not None and not isinstance(constants, list):
        return nn.Parameter(torch.full((), constants, dtype=kind).expand(shape), graded)
    uneven = torch.arange(max([1, *shape]), dtype=torch.float32).mul(0.37).add(0.1234)
    axis = max(range(len(shape)), key=lambda i: shape[i]) if shape else 0
    pattern = uneven[: shape[axis] if shape else 1].view([-1 if i == axis else 1 for i in range(len(shape))])
    pattern = pattern.expand(shape)
    if constants is not None:
        pattern = pattern.clone()
        for position, value in constants:
            pattern[position] = value
    return nn.Parameter(pattern.to(kind), graded)


def _cut(shape: tuple[int, ...]) -> tuple[int, ...]:
    for axis in range(len(shape) - 1, 0, -1):
        if math.prod(shape) > _ELEMENTS:
            shape = (*shape[:axis], 1, *shape[axis + 1 :])
    return shape
