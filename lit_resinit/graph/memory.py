"""Which value lies in which piece of memory: the same memory is the same value, whatever Python object shows it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_iter

from lit_resinit.graph import ops
from lit_resinit.graph.tensors import covers_memory, geometry
from lit_resinit.graph.values import Graph


class _Storage:
    """What is known about one piece of memory: the newest value, and the values of its views."""

    __slots__ = ("keep", "latest", "views")

    def __init__(self, keep: Any, latest: int) -> None:
        self.keep, self.latest = keep, latest
        self.views: dict[tuple[Any, ...], int] = {}


class Memory:
    """The nodes of a graph by the memory that their values lie in.

    Args:
        graph: The graph; an operation that writes into a part of a value adds a node to it.
        keep_storage: Whether to keep the memory of every value alive, which is free for fake tensors only.
    """

    def __init__(self, graph: Graph, *, keep_storage: bool) -> None:
        self._graph, self._keep_storage = graph, keep_storage
        self._storages: dict[int, _Storage] = {}
        self._objects: dict[int, tuple[Any, int]] = {}  # tensors without storage

    def clear(self) -> None:
        """Let go of every tensor."""
        self._storages.clear()
        self._objects.clear()

    def find(self, tensor: Tensor) -> int | None:
        """Index of the node behind a tensor, if it is known."""
        try:
            record = self._storages.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:  # sparse and nested tensors have no storage
            found = self._objects.get(id(tensor))
            return None if found is None else found[1]
        if record is None:
            return None
        return record.views.get(geometry(tensor), record.latest)

    def remember(self, tensor: Tensor, index: int, *, fresh: bool) -> None:
        """Note that a tensor shows a node's value; ``fresh`` memory holds nothing else any more."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            self._objects[id(tensor)] = (tensor, index)
            return
        key = storage._cdata
        record = self._storages.get(key)
        if record is None or fresh:
            keep = storage if self._keep_storage else torch.multiprocessing.reductions.StorageWeakRef(storage)
            record = self._storages[key] = _Storage(keep, index)
        record.views[geometry(tensor)] = index

    def place(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: list[Tensor],
        nodes: Sequence[int],
    ) -> None:
        """Note in which memory the results of an operation lie, and what in-place ones overwrite."""
        targets = ops.written(func, args, kwargs)
        for position, (tensor, node) in enumerate(zip(results, nodes, strict=True)):
            if position < len(targets) and targets[position] is tensor:
                self._overwrite(tensor, node)
            else:
                known = any(tensor is t for t in targets) or _shares_memory(tensor, args)
                self.remember(tensor, node, fresh=not known)

    def _overwrite(self, tensor: Tensor, node: int) -> None:
        """After an in-place operation every view of that memory shows the new value, in the part that was written."""
        try:
            record = self._storages[tensor.untyped_storage()._cdata]
        except (NotImplementedError, KeyError):
            self.remember(tensor, node, fresh=True)
            return
        before = self._graph.nodes[record.latest]
        if not covers_memory(tensor) and before.shape != tuple(tensor.shape):
            call, region = self._graph.nodes[node].call, geometry(tensor)
            record.latest = self._graph.add("copy_into", (before.index, node), call, before.shape, region=region)
        else:
            record.latest = node
        record.views = {geometry(tensor): node}


def _shares_memory(tensor: Tensor, args: tuple[Any, ...]) -> bool:
    try:
        key = tensor.untyped_storage()._cdata
    except NotImplementedError:
        return False
    for value in tree_iter(args):
        if isinstance(value, Tensor):
            with contextlib.suppress(NotImplementedError):
                if value.untyped_storage()._cdata == key:
                    return True
    return False
