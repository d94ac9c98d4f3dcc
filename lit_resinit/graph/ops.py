"""What is known of operations: one table says what each does to a stream, whether it bends it, and when it is zero.

An operation is named as in the graph (see :mod:`lit_resinit.graph.values`): a base name of ATen, or a part that the
graph writes. What is not in the table is a function: no stream passes it, and it is called to see whether it is zero.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes


class Does(enum.Flag):
    """What an operation does with its inputs."""

    COPIES = enum.auto()  # shows its first input as it is, in all its elements
    MOVES = enum.auto()  # copies, moves, pools or drops elements of its first input: a stream is still the same stream
    TRANSFORMS = enum.auto()  # mixes the elements of its first input linearly, by numbers that are the same always
    STRAIGHT = enum.auto()  # linear, or picks elements: nothing that a layer before and one after it could not do
    MERGES = enum.auto()  # puts several values side by side, into one another, or picks among them
    SELECTS = enum.auto()  # takes a parameter in as a value: no layer works on what passes
    PICKS = enum.auto()  # by indices or a condition, through which no error flows back
    LARGEST = enum.auto()  # takes the largest of several elements: of negative multiples that is another one
    SHRINKS = enum.auto()  # lowers the resolution
    MULTIPLIES = enum.auto()  # of two inputs; zero when one is, and the slope is the other
    APPLIES_WEIGHT = enum.auto()  # linear in the weight of a layer
    NORMALISES = enum.auto()
    ATTENDS = enum.auto()
    REDUCES = enum.auto()
    CUTS = enum.auto()  # a view of a part
    CREATES = enum.auto()  # values that do not depend on those of the tensor it is given
    DRAWS = enum.auto()  # normal noise, which may feed a network
    SHARES = enum.auto()  # weights that sum to one, never zero


class Zero(enum.Enum):
    """When a value is zero, given which of its inputs are."""

    VALUES = "the inputs that carry its values are (see `values_of`)"
    ALL = "all inputs that move or learn are"
    ANY = "one input is"
    NEVER = "never for that reason"
    ALWAYS = "always"
    SHIFT = "its input is, and the number added is zero too"
    ASK = "all inputs that move or learn are, and the function is zero at zero when called"


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """One row of the table."""

    does: Does
    zero: Zero = Zero.ASK


_PROBED = 1_000_000  # elements of a tensor that a function is tried with at most
_NOTHING = Does(0)
_FUNCTION = Kind(_NOTHING)
_MOVES = Does.MOVES | Does.STRAIGHT
_COPIES = _MOVES | Does.COPIES
_PLACES = Does.MERGES | Does.STRAIGHT

_TABLE: tuple[tuple[Kind, str], ...] = (
    # parts that the graph writes
    (Kind(_COPIES, Zero.VALUES), "view"),
    (Kind(_MOVES, Zero.VALUES), "part"),
    (Kind(_MOVES, Zero.VALUES), "scale"),
    (Kind(Does.STRAIGHT, Zero.SHIFT), "shift"),
    (Kind(Does.STRAIGHT | Does.SELECTS, Zero.ALL), "add"),
    (Kind(Does.STRAIGHT, Zero.VALUES), "norm"),
    (Kind(Does.STRAIGHT, Zero.NEVER), "statistic"),
    (Kind(_NOTHING, Zero.NEVER), "reciprocal parameter buffer input constant"),
    (Kind(Does.MULTIPLIES, Zero.ANY), "mul bmm dot vdot mv matmul linear linalg_cross"),
    (Kind(Does.MULTIPLIES | Does.APPLIES_WEIGHT | Does.STRAIGHT, Zero.ANY), "mm conv"),
    (Kind(Does.APPLIES_WEIGHT | Does.PICKS, Zero.VALUES), "embedding"),
    # copies: zero stays zero, the slope is one
    (
        Kind(_COPIES, Zero.VALUES),
        "alias clone contiguous detach lift lift_fresh lift_fresh_copy _to_copy to copy _unsafe_view _reshape_alias "
        "reshape expand_copy permute_copy t_copy transpose_copy "
        "squeeze unsqueeze t transpose swapaxes swapdims",  # these in place, else they are views
    ),
    # moves, pools, drops: zero stays zero, the slope does not vanish
    (
        Kind(_MOVES, Zero.VALUES),
        "repeat tile roll flip rot90 constant_pad_nd pad reflection_pad1d reflection_pad2d "
        "reflection_pad3d replication_pad1d replication_pad2d replication_pad3d _adaptive_avg_pool2d "
        "_adaptive_avg_pool3d adaptive_avg_pool1d upsample_nearest1d upsample_nearest2d upsample_nearest3d "
        "_upsample_nearest_exact1d _upsample_nearest_exact2d upsample_linear1d upsample_bilinear2d "
        "upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa pixel_shuffle native_channel_shuffle "
        "channel_shuffle im2col col2im unfold grid_sampler_2d native_dropout dropout feature_dropout _fused_dropout",
    ),
    (
        Kind(_MOVES | Does.PICKS, Zero.VALUES),
        "index index_select gather take take_along_dim masked_select repeat_interleave",
    ),
    (
        Kind(_MOVES | Does.LARGEST, Zero.VALUES),
        "adaptive_max_pool2d adaptive_max_pool3d max_pool1d mkldnn_max_pool2d fractional_max_pool2d max",
    ),
    (Kind(_MOVES | Does.REDUCES, Zero.VALUES), "mean sum"),
    (Kind(_MOVES | Does.REDUCES | Does.LARGEST, Zero.VALUES), "amax"),
    (
        Kind(Does.TRANSFORMS | Does.STRAIGHT, Zero.VALUES),
        "_fft_r2c _fft_c2r _fft_c2c _conj_physical conj_physical resolve_conj resolve_neg cumsum tril triu",
    ),
    (
        Kind(_MOVES | Does.SHRINKS, Zero.VALUES),
        "avg_pool1d avg_pool2d avg_pool3d pixel_unshuffle",
    ),
    (Kind(_MOVES | Does.SHRINKS | Does.LARGEST, Zero.VALUES), "max_pool2d_with_indices max_pool3d_with_indices"),
    (Kind(Does.CUTS), "slice select split split_with_sizes unbind narrow chunk tensor_split diagonal"),
    # several values in one
    (Kind(_PLACES | Does.SELECTS, Zero.VALUES), "cat stack copy_into"),
    (
        Kind(_PLACES | Does.PICKS, Zero.VALUES),
        "placed scatter scatter_add scatter_reduce index_add index_put index_copy slice_scatter",
    ),
    (Kind(Does.MERGES | Does.SELECTS | Does.PICKS, Zero.VALUES), "where"),
    (Kind(Does.MERGES | Does.PICKS, Zero.VALUES), "masked_fill masked_scatter"),
    (Kind(Does.MERGES, Zero.VALUES), "select_scatter slice_backward"),
    (Kind(Does.SELECTS), "maximum minimum"),
    # what ATen fuses, and what divides by a size
    (
        Kind(Does.NORMALISES),
        "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit _batch_norm_with_update "
        "cudnn_batch_norm miopen_batch_norm _fused_rms_norm rms_norm mkldnn_batch_norm batch_norm layer_norm "
        "group_norm instance_norm",
    ),
    (
        Kind(Does.ATTENDS, Zero.VALUES),
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention scaled_dot_product_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    (Kind(Does.REDUCES), "var var_mean std std_mean linalg_vector_norm amin"),
    (Kind(Does.REDUCES, Zero.NEVER), "logsumexp"),
    (Kind(_NOTHING, Zero.NEVER), "sigmoid"),
    (Kind(Does.SHARES, Zero.NEVER), "_softmax _log_softmax _safe_softmax"),
    # made, not computed
    (
        Kind(Does.CREATES),
        "empty_like ones_like full_like rand_like randint_like new_empty new_ones new_full new_empty_strided fill "
        "uniform exponential geometric log_normal cauchy bernoulli random",
    ),
    (Kind(Does.CREATES, Zero.ALWAYS), "zeros zeros_like new_zeros zero"),
    (Kind(Does.CREATES | Does.DRAWS), "randn_like normal"),
    (Kind(Does.DRAWS), "randn normal_functional"),
)
KINDS: dict[str, Kind] = {name: kind for kind, names in _TABLE for name in names.split()}


_FLAGS = {name: known.does.value for name, known in KINDS.items()}  # plain numbers: it is asked at every step of a walk


def kind(op: str) -> Kind:
    """The row of an operation; that of a function for one that is not in the table."""
    return KINDS.get(op, _FUNCTION)


def does(op: str, what: Does) -> bool:
    """Whether an operation does (one of) these."""
    return bool(_FLAGS.get(op, 0) & what._value_)


@functools.cache
def named(what: Does) -> frozenset[str]:
    """The operations that do (one of) these."""
    return frozenset(name for name, known in KINDS.items() if known.does & what)


def values_of(op: str, inputs: tuple[int, ...]) -> tuple[int, ...]:
    """The inputs that carry an operation's values, not its conditions, masks, indices, queries or keys."""
    if op == "where":
        return inputs[1:]
    if op in ("cat", "stack", "copy_into", "slice_scatter", "select_scatter"):
        return inputs
    known = kind(op).does
    if known & Does.ATTENDS:
        return inputs[2:3]
    if known & Does.MERGES and op != "masked_fill":
        return (inputs[0], inputs[-1])
    return inputs[:1]


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


def written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that the operation writes into; None for one that was left out."""
    return [
        kwargs.get(w) if isinstance(w, str) else args[w] if w < len(args) else None for w in written_arguments(func)
    ]


@functools.cache
def is_random(func: OpOverload) -> bool:
    """Whether the operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def at_zero(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, float] | None:
    """Value and slope at zero of a function that acts on each element alone, measured by calling it once.

    Args:
        func: The operation.
        args: Its arguments, every tensor replaced by None.
        kwargs: Its keyword arguments, without tensors.

    Returns:
        Value and slope at zero, or None when the operation mixes elements or cannot be called so.
    """
    return _measured(_Spelled(func, repr(args), repr(kwargs), args, kwargs))


def is_idempotent(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function of one tensor, called as written, changes nothing of what it returned (a ReLU)."""
    call = _Spelled(func, repr(args), repr(kwargs), args, kwargs)
    with _disable_current_modes(), torch.no_grad():
        try:
            once = call(torch.linspace(-8.0, 8.0, 65)).clone()
            return torch.equal(call(once.clone()), once)
        except Exception:  # an operation that cannot be called so
            return False


def is_always_zero(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]) -> bool:
    """Whether a function of one tensor is zero whatever it gets, as a clamp to nothing or an empty triangle is.

    Args:
        func: The operation.
        args: Its arguments, every tensor replaced by None.
        kwargs: Its keyword arguments, without tensors.
        shape: The tensor's shape.
    """
    call, size = _Spelled(func, repr(args), repr(kwargs), args, kwargs), math.prod(shape)
    if size > _PROBED:
        return False
    with _disable_current_modes(), torch.no_grad():
        x = torch.linspace(-1e3, 1e3, max(1, size), dtype=torch.float64)[:size].view(shape)
        try:
            return size > 0 and not call(x).any()
        except Exception:  # it wants other arguments
            return False


def has_no_slope(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function that acts on each element alone has slope zero everywhere, as rounding has.

    Args:
        func: The operation.
        args: Its arguments, every tensor replaced by None.
        kwargs: Its keyword arguments, without tensors.
    """
    return _is_flat(_Spelled(func, repr(args), repr(kwargs), args, kwargs))


@functools.lru_cache(maxsize=1024)
def _is_flat(call: _Spelled) -> bool:
    with _disable_current_modes(), torch.enable_grad():
        near, far = torch.linspace(-3.0, 3.0, 61), torch.logspace(-6, 6, 25)
        x = torch.cat([near, far, -far]).double().requires_grad_()
        try:
            y = call(x)
            return y.shape == x.shape and y.requires_grad and not torch.autograd.grad(y.sum(), x)[0].any()
        except Exception:  # it wants other arguments, or knows no gradient
            return False


@dataclasses.dataclass(frozen=True, slots=True)
class _Spelled:
    """A call by how it is written, for its arguments need not be hashable."""

    func: OpOverload
    args: str
    kwargs: str
    _args: tuple[Any, ...] = dataclasses.field(compare=False)
    _kwargs: dict[str, Any] = dataclasses.field(compare=False)

    def __call__(self, x: Tensor) -> Any:
        return self.func(*(x if a is None else a for a in self._args), **self._kwargs)


@functools.lru_cache(maxsize=1024)  # the functions of a few networks; measuring one anew costs under a millisecond
def _measured(call: _Spelled) -> tuple[float, float] | None:
    with _disable_current_modes(), torch.enable_grad():
        x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        try:
            y = call(x)
            if y.shape != x.shape:
                return None
            rows = [torch.autograd.grad(y[i], x, retain_graph=True)[0] for i in range(3)]
        except Exception:  # an operation outside autograd or float64 has no measurable slope
            return None
    if any(bool(row[j] != 0) for i, row in enumerate(rows) for j in range(3) if i != j):
        return None
    return float(y.detach()[0]), float(rows[0][0])
