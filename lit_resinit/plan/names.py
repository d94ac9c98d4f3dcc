"""Names of branches: the block, or the sub-module that computes the branch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from lit_resinit.find.streams import Addition
from lit_resinit.graph import ops
from lit_resinit.graph.ops import Does
from lit_resinit.graph.values import Graph
from lit_resinit.graph.where import child_of, is_below


def branch_names(graph: Graph, additions: Sequence[Addition], ends: Mapping[int, Sequence[int]]) -> dict[int, str]:
    """A unique, stable name for every addition.

    Args:
        graph: The traced forward.
        additions: Its residual additions.
        ends: For every addition the values at the end of its branch, last first.
    """
    return _Naming(graph, additions, ends).names()


class _Naming:
    def __init__(self, graph: Graph, additions: Sequence[Addition], ends: Mapping[int, Sequence[int]]) -> None:
        self.graph, self.additions, self.ends = graph, additions, ends
        self.calls = Counter(output.module for output in graph.outputs)
        self.returned_by: dict[int, set[str]] = {}
        for output in graph.outputs:
            for node in output.nodes:
                self.returned_by.setdefault(node, set()).add(output.module)
        self.children = {a.node: self._children(a) for a in additions}
        self.singles = {self._single(a) for a in additions}

    def names(self) -> dict[int, str]:
        per_block = Counter(a.block for a in self.additions)
        used: Counter[str] = Counter()
        names: dict[int, str] = {}
        for addition in self.additions:
            block = addition.block
            several = per_block[block] > max(1, self.calls[block])
            name = self._submodule(addition) if several or not block else block
            used[name] += 1
            names[addition.node] = name if used[name] == 1 else f"{name}:{used[name]}"
        return names

    def _submodule(self, addition: Addition) -> str:
        """The one sub-module that computes the branch, else the last with a layer and no branch of its own."""
        single = self._single(addition)
        if single or not addition.block:
            return single or "(root)"
        own = [c for c in self.children[addition.node] if c and c not in self.singles]
        return own[-1] if own else addition.block

    def _single(self, addition: Addition) -> str:
        children = self.children[addition.node]
        single = children[0] if len(children) == 1 else ""
        returned = any(single in self.returned_by.get(node, ()) for node in self.ends[addition.node])
        return single if addition.block or returned else ""

    def _children(self, addition: Addition) -> list[str]:
        """The called modules below the block that run the layers of a branch, "" for the block's own layers."""
        owners = []
        for index in sorted(addition.interior or self.ends[addition.node]):
            node, owner = self.graph.nodes[index], self.graph.owner(index)
            learned = ops.does(node.op, Does.APPLIES_WEIGHT) and any(self.graph.nodes[i].learned for i in node.inputs)
            if learned and is_below(owner, addition.block):
                owners.append(self._called_child(owner, addition.block))
        return list(dict.fromkeys(owners))

    def _called_child(self, owner: str, block: str) -> str:
        """The first module below ``block`` on the way to ``owner`` that is called, not only a container."""
        name = child_of(owner, block)
        if not name:
            return ""
        full = f"{block}.{name}" if block else name
        while full != owner and full not in self.calls:
            full += "." + child_of(owner, full)
        return full
