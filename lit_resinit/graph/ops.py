"""The vocabulary of ATen operations: what an operation does to a stream, and what it does at zero."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

# Moves, copies, pools or drops values: zero stays zero, the slope does not vanish, and a stream stays a stream.
MOVES = frozenset(
    [
        "alias",
        "clone",
        "contiguous",
        "detach",
        "lift",
        "lift_fresh",
        "lift_fresh_copy",
        "_to_copy",
        "to",
        "copy",
        "_unsafe_view",
        "_reshape_alias",
        "reshape",
        "view",
        "expand_copy",
        "repeat",
        "repeat_interleave",
        "tile",
        "roll",
        "flip",
        "rot90",
        "permute_copy",
        "t_copy",
        "transpose_copy",
        "constant_pad_nd",
        "pad",
        "reflection_pad1d",
        "reflection_pad2d",
        "reflection_pad3d",
        "replication_pad1d",
        "replication_pad2d",
        "replication_pad3d",
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "_adaptive_avg_pool2d",
        "_adaptive_avg_pool3d",
        "adaptive_avg_pool1d",
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
        "adaptive_max_pool2d",
        "adaptive_max_pool3d",
        "max_pool1d",
        "mkldnn_max_pool2d",
        "fractional_max_pool2d",
        "max",
        "amax",
        "mean",
        "sum",
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
        "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d",
        "upsample_linear1d",
        "upsample_bilinear2d",
        "upsample_bicubic2d",
        "upsample_trilinear3d",
        "_upsample_bilinear2d_aa",
        "index",
        "index_select",
        "gather",
        "take",
        "take_along_dim",
        "masked_select",
        "pixel_shuffle",
        "pixel_unshuffle",
        "native_channel_shuffle",
        "channel_shuffle",
        "im2col",
        "col2im",
        "unfold",
        "grid_sampler_2d",
        "native_dropout",
        "dropout",
        "feature_dropout",
        "_fused_dropout",
    ]
)
PARTIAL_VIEWS = frozenset(
    ["slice", "select", "split", "split_with_sizes", "unbind", "narrow", "chunk", "tensor_split", "diagonal"]
)
DOWNSAMPLES = frozenset(
    ["avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices", "pixel_unshuffle"]
)
# Writes its source into a tensor; zero in, zero out as long as every source is zero.
MERGES = frozenset(
    [
        "cat",
        "stack",
        "where",
        "masked_fill",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "index_add",
        "index_put",
        "index_copy",
        "masked_scatter",
        "slice_scatter",
        "select_scatter",
        "slice_backward",
        "copy_into",
    ]
)
# Those of them that add or place values by index, which is linear: the aggregation of a graph network, say.
PLACEMENTS = frozenset(
    ["scatter", "scatter_add", "scatter_reduce", "index_add", "index_put", "index_copy", "slice_scatter", "copy_into"]
)
# Linear in a learned weight.
LAYERS = frozenset(["mm", "conv", "embedding"])
# Products of two tensors; the output is zero when one factor is, and the slope is the other factor.
PRODUCTS = frozenset(["mul", "mm", "bmm", "conv", "dot", "mv", "matmul", "linear"])
NORMS = frozenset(
    [
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_batch_norm_with_update",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "_fused_rms_norm",
        "rms_norm",
        "mkldnn_batch_norm",
        "batch_norm",
        "layer_norm",
        "group_norm",
        "instance_norm",
    ]
)
ATTENTION = frozenset(
    [
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "scaled_dot_product_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ]
)
REDUCTIONS = frozenset(
    ["mean", "sum", "var", "var_mean", "std", "std_mean", "norm", "linalg_vector_norm", "amax", "amin", "logsumexp"]
)
# Produce values that do not depend on the values of the tensor they are given.
FACTORIES = frozenset(
    [
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty_strided",
        "zero",
        "fill",
        "uniform",
        "normal",
        "exponential",
        "geometric",
        "log_normal",
        "cauchy",
        "bernoulli",
        "random",
    ]
)
NORMAL_NOISE = frozenset(["randn", "normal", "randn_like", "normal_functional"])


def merged_values(op: str, inputs: tuple[int, ...]) -> tuple[int, ...]:
    """Which inputs of a merging operation are values, not conditions, masks or indices."""
    if op == "where":
        return inputs[1:]
    if op == "masked_fill":
        return inputs[:1]
    if op in ("cat", "stack", "copy_into", "slice_scatter", "select_scatter"):
        return inputs
    return (inputs[0], inputs[-1])


@functools.cache
def base_name(func: OpOverload) -> str:
    """Name of an operation without namespace, overload and in-place mark: ``aten::add_.Tensor`` is ``add``."""
    name = func._schema.name.split("::")[-1]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


@functools.cache
def written_arguments(func: OpOverload) -> tuple[int | str, ...]:
    """Positions (or keyword names) of the arguments that the operation writes into."""
    written: list[int | str] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(argument.name if argument.kwarg_only else position)
    return tuple(written)


@functools.cache
def is_random(func: OpOverload) -> bool:
    """Whether the operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def at_zero(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, float] | None:
    """Value and slope at zero of a function that acts on each element alone, measured by calling it.

    Args:
        func: The operation.
        args: Its arguments, every tensor replaced by None.
        kwargs: Its keyword arguments, without tensors.

    Returns:
        Value and slope at zero, or None when the operation mixes elements or cannot be called so.
    """
    with _disable_current_modes(), torch.enable_grad():
        x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        try:
            y = func(*(x if a is None else a for a in args), **kwargs)
            if y.shape != x.shape:
                return None
            rows = [torch.autograd.grad(y[i], x, retain_graph=True)[0] for i in range(3)]
        except Exception:  # an operation outside autograd or float64 has no measurable slope
            return None
    if any(bool(row[j] != 0) for i, row in enumerate(rows) for j in range(3) if i != j):
        return None
    return float(y.detach()[0]), float(rows[0][0])
