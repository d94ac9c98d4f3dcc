"""What a random network may be made of: a tree of plain dictionaries, drawn from a table of choices.

Every choice has its simplest value first, which is what shrinking goes back to. ``OPEN`` are the choices on which the
package is not right yet; they are drawn only when asked for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

Spec = dict[str, Any]

DOMAINS = ("vectors", "sequences", "images", "graphs")
BODIES = ("mlp", "linear", "deep", "unit", "normed", "in place", "experts")
BODIES_OF = {"sequences": ("attention",), "images": ("depthwise",), "graphs": ("messages",), "vectors": ()}

CHOICES: dict[str, tuple[Any, ...]] = {
    "domain": DOMAINS,
    "stem": ("none", "layer", "layer and norm"),
    "head": ("layer", "norm and layer", "pooled layer", "none", "pooled"),
    "result": ("tensor", "tuple", "dict", "object", "hidden states"),
    "body": (*BODIES, "attention", "depthwise", "messages", "nested"),
    "end": (
        "layer",
        "no bias",
        "norm",
        "scale",
        "vector",
        "one plus",
        "gelu",
        "dropout",
        "drop path",
        "half",
        "squeeze",
    ),
    "first": ("none", "norm"),
    "after": ("none", "norm", "relu"),
    "skip": ("identity", "projection", "pooled"),
    "factor": ("none", "number", "learned"),
    "sum": (
        "x + f",
        "f + x",
        "x - (-f)",
        "alpha",
        "half alpha",
        "in place",
        "addcmul",
        "sum of a list",
        "stack",
        "blend",
    ),
    "wrapping": ("inline", "block", "method", "submodule", "wrapper", "checkpoint", "function"),
    "steps": (1, 2, 3),
    "value": (1.0, 0.7),
    "no-op": ("none", "clone", "view", "cast", "transposed", "unsqueezed", "contiguous"),
    "skip no-op": ("none", "clone", "view", "cast", "transposed", "unsqueezed", "contiguous"),
    "layer": ("layer", "norm", "layer and gelu"),
    "brackets": ("left", "right", "front"),
}
_DEPTH = 2  # of stacks in branches
ITEMS = ("block", "layer", "loop", "halves", "two streams", "parallel", "earlier", "memory", "shared", "joined skip")

# What the package does not get right yet: (name of the choice, value); drawn only with ``everything``.
OPEN: frozenset[tuple[str, Any]] = frozenset()


class Grammar:
    """Draws networks.

    Args:
        draw: Source of chance.
        everything: Whether the choices of ``OPEN`` are drawn too.
    """

    def __init__(self, draw: random.Random, *, everything: bool = False) -> None:
        self._draw, self._everything = draw, everything

    def network(self) -> Spec:
        """A whole network."""
        self._domain = self._choose("domain")
        return {
            **{name: self._choose(name) for name in ("stem", "head", "result")},
            "domain": self._domain,
            "items": self._items(_DEPTH, self._draw.randint(1, 4)),
        }

    def _choose(self, name: str, *without: Any) -> Any:
        allowed = [v for v in CHOICES[name] if v not in without and (self._everything or (name, v) not in OPEN)]
        return allowed[0] if self._draw.random() < 0.35 else self._draw.choice(allowed)

    def _items(self, depth: int, count: int) -> list[Spec]:
        return [self._item(depth) for _ in range(count)]

    def _item(self, depth: int) -> Spec:
        kinds = [k for k in ITEMS if self._everything or ("item", k) not in OPEN]
        kind = "block" if self._draw.random() < 0.6 else self._draw.choice(kinds)
        if kind == "layer":
            return {"item": kind, "layer": self._choose("layer")}
        if kind == "loop":
            return {"item": kind, "steps": self._draw.choice((2, 3)), "block": self._block(0)}
        if kind in ("halves", "two streams"):
            return {"item": kind, "steps": self._choose("steps") if kind == "two streams" else 1}
        if kind == "parallel":
            return {"item": kind, "brackets": self._choose("brackets")}
        if kind in ("earlier", "memory", "shared"):
            return {"item": kind}
        if kind == "joined skip":
            return {"item": kind, "block": self._block(0)}
        return self._block(depth)

    def _block(self, depth: int) -> Spec:
        wrapping = self._choose("wrapping")
        own = BODIES_OF[self._domain]
        others = [b for b in ("attention", "depthwise", "messages") if b not in own]
        skip = self._choose("skip", *(() if self._domain == "images" and depth == _DEPTH else ("pooled",)))
        skip = "identity" if wrapping == "wrapper" else skip
        block: Spec = {
            "item": "block",
            "body": self._choose("body", *others, *(() if depth else ("nested",)), *self._too_plain(skip)),
            "wrapping": wrapping,
            "skip": skip,
            **{name: self._choose(name) for name in ("end", "first", "after", "value", "no-op", "skip no-op")},
            "factor": self._factor(skip, depth),
            "sum": self._choose("sum", *(() if skip == "identity" else ("blend", "addcmul"))),
        }
        if block["body"] == "nested":
            block["items"] = self._items(depth - 1, self._draw.randint(1, 2))
        if block["sum"] in ("addcmul", "blend"):  # which bring a learned factor of their own
            block["end"], block["factor"] = "layer", "none"
        return block

    def _factor(self, skip: str, depth: int) -> str:
        """A learned factor on the skip inside another branch is that branch's arithmetic, by the finder's own rule."""
        return self._choose("factor", *(() if depth == _DEPTH else ("learned",))) if skip == "identity" else "none"

    def _too_plain(self, skip: str) -> tuple[str, ...]:
        """Two parallel linear paths could be one kernel: beside a projection there has to be a function."""
        return () if skip == "identity" else ("linear", "depthwise", "messages", "attention", "nested")


def additions(spec: Spec) -> int:
    """How many residual additions one forward runs."""
    return sum(_additions_of(item) for item in spec["items"])


def _additions_of(item: Spec) -> int:
    kind = item["item"]
    if kind == "layer":
        return 0
    if kind == "loop":
        return item["steps"] * _additions_of(item["block"])
    if kind in ("halves", "two streams"):
        return 2 * item["steps"]
    if kind == "parallel":  # ``(x + f) + g`` are two, ``x + (f + g)`` is one branch with two summands
        return 2 if item["brackets"] == "left" else 1
    if kind in ("earlier", "shared"):
        return 2
    if kind == "joined skip":  # the skip of a U-Net is joined, and not added
        return _additions_of(item["block"])
    return 1 + sum(_additions_of(i) for i in item.get("items", ()))


def simpler(spec: Spec) -> Iterator[Spec]:
    """Every network that is one step simpler: an item less, or one choice at its simplest value."""
    for position in range(len(spec.get("items", ()))):
        items = spec["items"]
        if len(items) > 1:
            yield {**spec, "items": [*items[:position], *items[position + 1 :]]}
        for item in _simpler_item(items[position]):
            yield {**spec, "items": [*items[:position], item, *items[position + 1 :]]}
    yield from _simpler_choices(spec)


def _simpler_item(item: Spec) -> Iterator[Spec]:
    if "block" in item:
        yield item["block"]
        for block in _simpler_item(item["block"]):
            yield {**item, "block": block}
    if item.get("body") == "nested":
        yield {**{k: v for k, v in item.items() if k != "items"}, "body": "mlp"}
    if "items" in item:
        yield from simpler(item)
    else:
        yield from _simpler_choices(item)


def _simpler_choices(spec: Spec) -> Iterator[Spec]:
    for name, value in spec.items():
        if name in CHOICES and value != CHOICES[name][0] and value != "nested" and name != "domain":
            yield {**spec, name: CHOICES[name][0]}


def without_no_ops(spec: Spec) -> Spec:
    """The same network without views, casts and clones."""
    plain = {k: "none" if k in ("no-op", "skip no-op") else v for k, v in spec.items()}
    if "items" in spec:
        plain["items"] = [without_no_ops(i) for i in spec["items"]]
    if "block" in spec:
        plain["block"] = without_no_ops(spec["block"])
    return plain


def spelled_otherwise(spec: Spec) -> Iterator[Spec]:
    """The same network with the first sum ``x + f`` of a block in other words that mean the same."""
    for position, item in enumerate(spec["items"]):
        if item["item"] == "block" and item["sum"] == "x + f" and item["wrapping"] != "function":
            for other in ("f + x", "x - (-f)"):
                items = [*spec["items"][:position], {**item, "sum": other}, *spec["items"][position + 1 :]]
                yield {**spec, "items": items}
            return


def has_no_ops(spec: Spec) -> bool:
    return without_no_ops(spec) != spec


def scales_its_stream(spec: Spec) -> bool:
    """Whether a number multiplies a skip, which the identity check reports and does not forgive."""
    return spec.get("factor") == "number" or any(
        scales_its_stream(i) for i in (*spec.get("items", ()), *([spec["block"]] if "block" in spec else ()))
    )
