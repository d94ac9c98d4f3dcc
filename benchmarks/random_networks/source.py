"""A random network as Python source, and its identity form: the same with every sum replaced by its skip."""

from __future__ import annotations

import textwrap

from benchmarks.random_networks.grammar import Spec, additions

_SHAPES = {"vectors": "4, 8", "sequences": "4, 5, 8", "images": "4, 8, 8, 8", "graphs": "6, 8"}
_HEADER = '''"""{words}"""

import dataclasses

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ADDITIONS = {count}


def inputs():
    return ({inputs},)


'''
_NO_OPS = {
    "clone": "{0}.clone()",
    "view": "{0}.view({0}.shape)",
    "cast": "{0}.double().float()",
    "transposed": "{0}.transpose(0, 1).transpose(0, 1)",
    "unsqueezed": "{0}.unsqueeze(0).squeeze(0)",
    "contiguous": "{0}.contiguous()",
}


class _Code:
    """Lines of ``__init__`` and ``forward`` of one module."""

    def __init__(self) -> None:
        self.init: list[str] = []
        self.forward: list[str] = []

    def __iadd__(self, other: _Code) -> _Code:
        self.init += other.init
        self.forward += other.forward
        return self


class Writer:
    """Writes one network.

    Args:
        spec: The network.
        closed: Whether every sum is replaced by its skip.
    """

    def __init__(self, spec: Spec, *, closed: bool = False) -> None:
        self.spec, self.closed = spec, closed
        self.images, self.graphs = spec["domain"] == "images", spec["domain"] == "graphs"
        self.axis = 1 if self.images else -1
        self.more = ", edges" if self.graphs else ""
        self.classes: list[str] = []
        self._numbers: dict[str, int] = {}

    def text(self) -> str:
        """The whole file."""
        code = _Code()
        spec = self.spec
        if spec["stem"] != "none":
            code += self._layer("stem", "x")
        if spec["stem"] == "layer and norm":
            code += self._norm("stem_norm", "x")
        if spec["result"] == "hidden states":
            code.forward.append("states = []")
        for position, item in enumerate(spec["items"]):
            code += self._item(item, f"b{position}", "x")
            if spec["result"] == "hidden states":
                code.forward.append("states.append(x)")
        code += self._head()
        network = self._class("Network", code, returns=self._result())
        count = additions(spec)
        edges = ", torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]])" if self.graphs else ""
        words = f"{count} residual additions" + (", all of them left out" if self.closed else "") + "."
        shape = f"torch.randn({_SHAPES[spec['domain']]}){edges}"
        return _HEADER.format(words=words, count=count, inputs=shape) + "\n\n".join([*self.classes, network])

    # ---------------------------------------------------------------- modules

    def _class(self, name: str, code: _Code, returns: str, methods: str = "") -> str:
        init = textwrap.indent("\n".join(["super().__init__()", *code.init]), " " * 8)
        forward = textwrap.indent("\n".join([*code.forward, f"return {returns}"]), " " * 8)
        return (
            f"class {name}(nn.Module):\n    def __init__(self):\n{init}\n\n{methods}"
            f"    def forward(self, x{self.more}):\n{forward}\n"
        )

    def _new(self, kind: str) -> str:
        self._numbers[kind] = self._numbers.get(kind, 0) + 1
        return f"{kind}{self._numbers[kind]}"

    def _module(self, name: str, inner: _Code, returns: str, methods: str = "", kind: str = "Block") -> str:
        """Write a class; the line that makes one of it."""
        own = self._new(kind)
        self.classes.append(self._class(own, inner, returns, methods))
        return f"self.{name} = {own}()"

    # ---------------------------------------------------------------- parts

    def _one(self, *init: str, forward: str) -> _Code:
        code = _Code()
        code.init += init
        code.forward.append(forward)
        return code

    def _linear(self, into: int = 8, out: int = 8, *, bias: bool = True) -> str:
        more = "" if bias else ", bias=False"
        return f"nn.Conv2d({into}, {out}, 3, padding=1{more})" if self.images else f"nn.Linear({into}, {out}{more})"

    def _layer(self, name: str, value: str, into: int = 8, out: int = 8, *, bias: bool = True) -> _Code:
        made = self._linear(into, out, bias=bias)
        return self._one(f"self.{name} = {made}", forward=f"{value} = self.{name}({value})")

    def _norm(self, name: str, value: str) -> _Code:
        made = "nn.BatchNorm2d(8)" if self.images else "nn.LayerNorm(8)"
        return self._one(f"self.{name} = {made}", forward=f"{value} = self.{name}({value})")

    def _item(self, item: Spec, name: str, value: str) -> _Code:
        kind = item["item"]
        if kind == "layer":
            code = self._norm(name, value) if item["layer"] == "norm" else self._layer(name, value)
            if item["layer"] == "layer and gelu":
                code.forward.append(f"{value} = functional.gelu({value})")
            return code
        if kind == "loop":
            return self._loop(item, name, value)
        if kind == "halves":
            return self._halves(name, value)
        if kind == "two streams":
            return self._two_streams(item, name, value)
        if kind == "joined skip":
            return self._joined_skip(item, name, value)
        if kind in ("parallel", "earlier", "memory", "shared"):
            return getattr(self, f"_{kind}")(item, name, value)
        return self._block(item, name, value)

    def _function(self, name: str, into: int = 8) -> str:
        """The line that makes a small branch."""
        return f"self.{name} = nn.Sequential({self._linear(into, 8)}, nn.GELU(), {self._linear()})"

    def _parallel(self, item: Spec, name: str, value: str) -> _Code:
        code = _Code()
        code.init += [self._function(f"{name}_f"), self._function(f"{name}_g")]
        f, g = (f"self.{name}_{own}(n)" for own in "fg")
        code.forward.append(f"n = {value}")
        code += self._norm(f"{name}_norm", "n")
        total = {
            "left": f"{value} + {f} + {g}",
            "right": f"{value} + ({f} + {g})",
            "front": f"({f} + {g}) + {value}",
        }[item["brackets"]]
        code.forward.append(f"{value} = {value if self.closed else total}")
        return code

    def _earlier(self, item: Spec, name: str, value: str) -> _Code:
        """A second branch that reads what the first one read."""
        code = _Code()
        code.init += [self._function(f"{name}_f"), self._function(f"{name}_g")]
        code.forward += [
            f"before = {value}",
            self._sum(value, value, f"self.{name}_f({value})"),
            self._sum(value, value, f"self.{name}_g(before)"),
        ]
        return code

    def _shared(self, item: Spec, name: str, value: str) -> _Code:
        """Two branches that read one normalised value."""
        code = _Code()
        code.init += [self._function(f"{name}_f"), self._function(f"{name}_g")]
        code.forward.append(f"n = {value}")
        code += self._norm(f"{name}_norm", "n")
        code.forward += [self._sum(value, value, f"self.{name}_{own}(n)") for own in "fg"]
        return code

    def _joined_skip(self, item: Spec, name: str, value: str) -> _Code:
        """Down, a block, and up again, where what was there before is joined, as in a U-Net."""
        code, low = _Code(), f"{name}_low"
        code.init.append(f"self.{name}_merge = {self._linear(16, 8)}")
        code.forward.append(
            f"{low} = functional.avg_pool2d({value}, 2, ceil_mode=True)" if self.images else f"{low} = {value}"
        )
        code += self._layer(f"{name}_down", low)
        code.forward.append(f"{low} = functional.gelu({low})")
        code += self._block(item["block"], f"{name}_b", low)
        if self.images:
            code.forward.append(f"{low} = functional.interpolate({low}, size={value}.shape[2:])")
        code.forward.append(f"{value} = self.{name}_merge(torch.cat(({value}, {low}), {self.axis}))")
        return code

    def _memory(self, item: Spec, name: str, value: str) -> _Code:
        """A branch that also reads something that is no stream."""
        code = _Code()
        code.init += [f"self.{name}_memory = {self._linear()}", self._function(f"{name}_f", 16)]
        code.forward += [
            f"memory = self.{name}_memory({value})",
            self._sum(value, value, f"self.{name}_f(torch.cat(({value}, memory), {self.axis}))"),
        ]
        return code

    def _loop(self, item: Spec, name: str, value: str) -> _Code:
        inner = self._block({**item["block"], "wrapping": "inline"}, "f", "x")
        code = _Code()
        code.init.append(self._module(name, inner, "x"))
        code.forward += [f"for _ in range({item['steps']}):", f"    {value} = self.{name}({value}{self.more})"]
        return code

    def _halves(self, name: str, value: str) -> _Code:
        code = _Code()
        for own in ("f", "g"):
            code.init.append(
                f"self.{name}_{own} = nn.Sequential({self._linear(4, 8)}, nn.GELU(), {self._linear(8, 4)})"
            )
        code.forward += [
            f"a, b = {value}.chunk(2, {self.axis})",
            self._sum("a", "a", f"self.{name}_f(b)"),
            self._sum("b", "b", f"self.{name}_g(a)"),
            f"{value} = torch.cat((a, b), {self.axis})",
        ]
        return code

    def _two_streams(self, item: Spec, name: str, value: str) -> _Code:
        code = _Code()
        code.init += [f"self.{name}_in = {self._linear()}", f"self.{name}_out = {self._linear(16, 8)}"]
        code.forward.append(f"y = self.{name}_in({value})")
        for step in range(item["steps"]):
            for own, into, source in (("f", value, "y"), ("g", "y", value)):
                part = f"{name}_{own}{step}"
                code.init.append(self._function(part))
                code.forward.append(self._sum(into, into, f"self.{part}({source})"))
        code.forward.append(f"{value} = self.{name}_out(torch.cat(({value}, y), {self.axis}))")
        return code

    def _sum(self, out: str, skip: str, branch: str) -> str:
        return f"{out} = {skip}" if self.closed else f"{out} = {skip} + {branch}"

    # ---------------------------------------------------------------- one block

    def _block(self, item: Spec, name: str, value: str) -> _Code:
        wrapping = item["wrapping"]
        if wrapping in ("inline", "function"):
            h = "h" if value == "x" else f"{value}h"
            code = self._branch(item, name, value, h)
            code += self._addition(item, name, value, h)
            return code
        inner, methods = _Code(), ""
        if wrapping == "block":
            inner += self._branch(item, "f", "x", "h")
        elif wrapping in ("method", "checkpoint"):
            branch = self._branch(item, "f", "x", "h")
            inner.init += branch.init
            body = textwrap.indent("\n".join([*branch.forward, "return h"]), " " * 8)
            methods = f"    def branch(self, x{self.more}):\n{body}\n\n"
            call = f"self.branch(x{self.more})"
            if wrapping == "checkpoint":
                call = f"checkpoint(self.branch, x{self.more}, use_reentrant=False)"
            inner.forward.append(f"h = {call}")
        else:  # submodule, wrapper
            inner.init.append(self._module("inner", self._branch(item, "f", "x", "h"), "h", kind="Branch"))
            inner.forward.append(f"h = self.inner(x{self.more})")
        inner += self._addition(item, "f", "x", "h")
        kind = "Residual" if wrapping == "wrapper" else "Block"
        code = _Code()
        code.init.append(self._module(name, inner, "x", methods, kind))
        code.forward.append(f"{value} = self.{name}({value}{self.more})")
        return code

    def _branch(self, item: Spec, name: str, value: str, h: str) -> _Code:
        code = _Code()
        code.forward.append(f"{h} = {value}")
        if item["first"] == "norm":
            code += self._norm(f"{name}_first", h)
        code += self._body(item, name, h)
        if item["skip"] == "pooled":
            code.forward.append(f"{h} = functional.avg_pool2d({h}, 2, ceil_mode=True)")
        code += self._end(item, name, h)
        if item["no-op"] != "none":
            code.forward.append(f"{h} = {_NO_OPS[item['no-op']].format(h)}")
        return code

    def _body(self, item: Spec, name: str, h: str) -> _Code:
        body, bias = item["body"], item["end"] != "no bias"
        if body == "linear":
            return self._layer(f"{name}_1", h, bias=bias)
        code = _Code()
        if body == "nested":
            code += self._layer(f"{name}_into", h)
            for position, inner in enumerate(item["items"]):
                code += self._item(inner, f"{name}_n{position}", h)
        elif body == "attention":
            code.init.append(f"self.{name}_qkv = nn.Linear(8, 24)")
            code.forward += [
                f"q, k, v = self.{name}_qkv({h}).chunk(3, -1)",
                f"{h} = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1) @ v",
            ]
        elif body == "depthwise":
            code.init.append(f"self.{name}_1 = nn.Conv2d(8, 8, 3, padding=1, groups=8)")
            code.forward += [f"{h} = functional.gelu(self.{name}_1({h}))"]
        elif body == "messages":
            code.init.append(f"self.{name}_1 = nn.Linear(8, 8)")
            code.forward += [
                f"sent = functional.gelu(self.{name}_1({h}))[edges[0]]",
                f"{h} = torch.zeros_like({h}).index_add(0, edges[1], sent)",
            ]
        elif body == "experts":
            code.init += [f"self.{name}_{own} = {self._linear()}" for own in ("1", "2", "route")]
            code.forward += [
                f"share = torch.sigmoid(self.{name}_route({h}))",
                f"one, other = functional.gelu(self.{name}_1({h})), functional.gelu(self.{name}_2({h}))",
                f"{h} = share * one + (1 - share) * other",
            ]
        elif body == "unit":
            code.init += [f"self.{name}_1 = {self._linear()}", f"self.{name}_2 = {self._linear()}"]
            code.forward.append(f"{h} = self.{name}_1({h}) * torch.sigmoid(self.{name}_2({h}))")
        else:
            code += self._layer(f"{name}_1", h)
            if body == "normed":
                code += self._norm(f"{name}_norm", h)
            code.forward.append(
                f"{h} = functional.{'silu({}, inplace=True)' if body == 'in place' else 'gelu({})'}".format(h)
            )
            if body == "deep":
                code += self._layer(f"{name}_2", h)
                code.forward.append(f"{h} = torch.tanh({h})")
        code += self._layer(f"{name}_out", h, bias=bias)
        return code

    def _end(self, item: Spec, name: str, h: str) -> _Code:
        end = item["end"]
        size = "8, 1, 1" if self.images else "8"
        made = {"scale": f"torch.full((1,), {item['value']})", "vector": f"torch.full(({size},), {item['value']})"}
        if end == "norm":
            return self._norm(f"{name}_last", h)
        if end in made:
            return self._one(f"self.{name}_scale = nn.Parameter({made[end]})", forward=f"{h} = self.{name}_scale * {h}")
        if end == "one plus":
            return self._one(
                f"self.{name}_scale = nn.Parameter(torch.zeros({size}))", forward=f"{h} = {h} * (1 + self.{name}_scale)"
            )
        if end == "dropout":
            return self._one(f"self.{name}_drop = nn.Dropout(0.1)", forward=f"{h} = self.{name}_drop({h})")
        if end == "squeeze":
            layer = "nn.Conv2d(8, 8, 1)" if self.images else "nn.Linear(8, 8)"
            pooled = f"{h}.mean((2, 3), keepdim=True)" if self.images else h
            return self._one(
                f"self.{name}_squeeze = {layer}", forward=f"{h} = {h} * torch.sigmoid(self.{name}_squeeze({pooled}))"
            )
        lines = {
            "gelu": f"{h} = functional.gelu({h})",
            "half": f"{h} = 0.5 * {h}",
            "drop path": f"{h} = {h} * torch.rand(len({h}), *[1] * ({h}.dim() - 1)).lt(0.9).float() / 0.9",
        }
        return self._one(forward=lines[end]) if end in lines else _Code()

    def _addition(self, item: Spec, name: str, value: str, h: str) -> _Code:
        """The sum, and what follows it on the stream."""
        code, skip = _Code(), value
        if item["skip"] == "projection":
            code.init.append(f"self.{name}_skip = {'nn.Conv2d(8, 8, 1)' if self.images else 'nn.Linear(8, 8)'}")
            skip = f"self.{name}_skip({value})"
        elif item["skip"] == "pooled":
            code.init.append(f"self.{name}_skip = nn.Conv2d(8, 8, 1)")
            skip = f"self.{name}_skip(functional.avg_pool2d({value}, 2, ceil_mode=True))"
        if item["skip no-op"] != "none":
            code.forward += [f"r = {skip}", f"r = {_NO_OPS[item['skip no-op']].format('r')}"]
            skip = "r"
        if item["factor"] == "number":
            skip = f"0.9 * {skip}"
        elif item["factor"] == "learned":
            code.init.append(f"self.{name}_keep = nn.Parameter(torch.ones(1))")
            skip = f"self.{name}_keep * {skip}"
        code += self._spelled(item, name, value, skip, h)
        if item["after"] == "norm":
            code += self._norm(f"{name}_after", value)
        elif item["after"] == "relu":
            code.forward.append(f"{value} = functional.relu({value})")
        return code

    def _spelled(self, item: Spec, name: str, value: str, skip: str, h: str) -> _Code:
        code = _Code()
        spelling = item["sum"]
        if spelling in ("addcmul", "blend"):
            code.init.append(f"self.{name}_gate = nn.Parameter(torch.full((1,), {item['value']}))")
        if self.closed:
            code.forward.append(f"{value} = {skip}")
            return code
        if item["wrapping"] == "function" and spelling == "x + f":
            if "def add(" not in "".join(self.classes):
                self.classes.append("def add(x, h):\n    return x + h\n")
            code.forward.append(f"{value} = add({skip}, {h})")
            return code
        code.forward += {
            "x + f": [f"{value} = {skip} + {h}"],
            "f + x": [f"{value} = {h} + {skip}"],
            "x - (-f)": [f"{value} = {skip} - (-{h})"],
            "alpha": [f"{value} = torch.add({skip}, {h}, alpha=1)"],
            "half alpha": [f"{value} = torch.add({skip}, {h}, alpha=0.5)"],
            "in place": [f"{value} = ({skip}).clone()", f"{value} += {h}"],
            "addcmul": [f"{value} = torch.addcmul({skip}, {h}, self.{name}_gate)"],
            "sum of a list": [f"{value} = sum([{skip}, {h}])"],
            "stack": [f"{value} = torch.stack([{skip}, {h}]).sum(0)"],
            "blend": [f"{value} = torch.lerp({skip}, {h}, self.{name}_gate)"],
        }[spelling]
        return code

    # ---------------------------------------------------------------- the end of the network

    def _head(self) -> _Code:
        head, code = self.spec["head"], _Code()
        code.forward.append("out = x")
        if head == "norm and layer":
            code += self._norm("head_norm", "out")
        if head.startswith("pooled"):
            axes = {"sequences": "1", "images": "(2, 3)"}.get(self.spec["domain"], "0")
            code.forward.append(f"out = out.mean({axes})")
        if head == "pooled layer":
            code += self._one("self.head = nn.Linear(8, 3)", forward="out = self.head(out)")
        elif head.endswith("layer"):
            code += self._one(f"self.head = {self._linear(8, 3)}", forward="out = self.head(out)")
        return code

    def _result(self) -> str:
        result = self.spec["result"]
        if result == "object":
            self.classes.insert(
                0, "@dataclasses.dataclass\nclass Result:\n    out: torch.Tensor\n    features: torch.Tensor\n"
            )
        return {
            "tensor": "out",
            "tuple": "out, x",
            "dict": '{"out": out, "features": x}',
            "object": "Result(out, x)",
            "hidden states": "out, states",
        }[result]
