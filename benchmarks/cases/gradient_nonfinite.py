"""Gradients that are NaN, absurdly large, or zero because of a kink at zero."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from .base import (
    case,
    default_truth,
    fixed,
    squared_error,
    train_log,
    zero_,
)

WIDTH = 6


class Tail(nn.Module):
    """A branch: features, zeroed projection, then ``shape_it`` on the projected vector."""

    def __init__(self, shape_it):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU())
        self.project = nn.Linear(WIDTH, WIDTH)
        self.shape_it = shape_it
        zero_(*self.project.parameters())

    def forward(self, x):
        return x + self.shape_it(self.project(self.features(x)))


class Tower(nn.Module):
    """Three residual blocks; only the middle one uses the suspicious function."""

    def __init__(self, shape_it):
        super().__init__()
        self.blocks = nn.ModuleList([Tail(nn.Identity()), Tail(shape_it), Tail(nn.Identity())])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


GATES = [f"blocks.{i}.project.weight" for i in range(3)]


def _tower(shape_it) -> dict:
    return {
        "model": Tower(shape_it),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 3),
        "branches": {
            f"blocks.{i}": {
                "block": f"blocks.{i}",
                "gate": [f"blocks.{i}.project.weight", f"blocks.{i}.project.bias"],
            }
            for i in range(3)
        },
    }


def _expect(middle, hint: str, outer="alive") -> dict:
    facts = {
        "identity": {f"blocks.{i}": ("closed",) for i in range(3)},
        "gradient": {GATES[0]: outer, GATES[1]: middle, GATES[2]: "alive"},
        "hint": hint,
    }
    if middle == "nonfinite":  # the block before it only inherits the NaN
        facts["blame"] = [GATES[1]]
        facts["do_not_blame"] = [GATES[0]]
    return facts


# --------------------------------------------------------------------------- functions at zero


def _length_along(vector):
    """Row length times a fixed direction: zero at zero, kinked there."""

    def apply(o):
        return torch.linalg.vector_norm(o, dim=-1, keepdim=True) * vector

    return apply


@case(
    "row_norm_of_zeroed_projection",
    "gradient",
    _expect(("dead", "nonfinite"), "norm of an all-zero vector"),
    summary="Branch is the row norm of a zeroed projection: zero subgradient now, NaN on old torch.",
)
def row_norm():
    return _tower(_length_along(fixed(WIDTH, seed=3)))


@case(
    "hand_written_root_of_squares",
    "gradient",
    _expect("nonfinite", "square root at zero", outer="nonfinite"),
    summary="Branch is sqrt(sum of squares) of a zeroed projection: NaN, and upstream gates get it too.",
)
def root_of_squares():
    direction = fixed(WIDTH, seed=3)
    return _tower(lambda o: o.square().sum(-1, keepdim=True).sqrt() * direction)


@case(
    "root_of_zero_loss",
    "gradient",
    {
        "identity": {f"blocks.{i}": ("closed",) for i in range(3)},
        "gradient": {name: "nonfinite" for name in GATES},
        "loss_at_first_step": 0.0,
        "hint": "loss not differentiable at the identity",
    },
    summary="Denoiser whose target is its input, loss = sqrt(mse): loss is a finite 0, gradients NaN.",
)
def root_of_zero_loss():
    class Restore(Tower):
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    def truth(fresh):
        default_truth(fresh)
        assert train_log(fresh(), 1)[0].loss == 0.0

    bundle = _tower(nn.Identity())
    model = Restore(nn.Identity())
    del model.head
    args = bundle["args"]
    bundle.update(
        model=model,
        loss_fn=lambda output: functional.mse_loss(output, args[0]).sqrt(),
        truth=truth,
    )
    return bundle


@case(
    "where_guards_the_result_only",
    "gradient",
    _expect("nonfinite", "guard the argument, not the result", outer="nonfinite"),
    summary="where(length > 0, o / length, 0): the unselected 0/0 still reaches the backward pass.",
)
def where_guard():
    def unit_or_zero(o):
        length = torch.linalg.vector_norm(o, dim=-1, keepdim=True)
        return torch.where(length > 0, o / length, torch.zeros_like(o))

    return _tower(unit_or_zero)


@case(
    "normalize_zeroed_projection",
    "gradient",
    _expect("exploding", "normalisation of a zero vector"),
    summary="F.normalize after a zeroed projection: finite gradients some 1e11 times the others.",
)
def normalize_projection():
    return _tower(lambda o: functional.normalize(o, dim=-1))


@case(
    "division_by_norm_plus_tiny",
    "gradient",
    _expect("exploding", "normalisation of a zero vector"),
    summary="o / (|o| + 1e-10) after a zeroed projection: finite gradients about 1e10 times the others.",
)
def divide_by_norm():
    return _tower(lambda o: o / (torch.linalg.vector_norm(o, dim=-1, keepdim=True) + 1e-10))


# --------------------------------------------------------------------------- soft bounds


def _soft_bound(guard: str, limit: float = 2.0):
    """v -> limit * tanh(|v| / limit) / |v| * v, which behaves like v near zero."""

    def bound(o):
        length = torch.linalg.vector_norm(o, dim=-1, keepdim=True)
        if guard == "one, division still evaluated":
            factor = torch.where(length > 0, limit * torch.tanh(length / limit) / length, torch.ones_like(length))
        elif guard == "one, safe division":
            usable = torch.where(length > 0, length, torch.ones_like(length))
            factor = torch.where(length > 0, limit * torch.tanh(usable / limit) / usable, torch.ones_like(length))
        else:
            raise ValueError(guard)
        return factor * o

    return bound


@case(
    "soft_bound_guard_one_division_evaluated",
    "gradient",
    _expect("nonfinite", "guard the argument, not the result", outer="nonfinite"),
    summary="Soft length bound, factor 1 at zero by where(), 0/0 still evaluated: NaN.",
)
def soft_bound_unsafe():
    return _tower(_soft_bound("one, division still evaluated"))


@case(
    "soft_bound_guard_one_safe_division",
    "gradient",
    _expect("alive", ""),
    summary="The same bound with a safe divisor and factor 1 at zero: alive, a clean pass.",
)
def soft_bound_safe():
    return _tower(_soft_bound("one, safe division"))


@case(
    "soft_bound_with_floor_under_the_root",
    "gradient",
    _expect("alive", ""),
    summary="Length taken as sqrt(sum of squares + 1e-6): smooth at zero, a clean pass.",
)
def soft_bound_floor():
    def bound(o):
        length = (o.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return 2.0 * torch.tanh(length / 2.0) / length * o

    return _tower(bound)


# --------------------------------------------------------------------------- parametrised weights


@case(
    "spectral_norm_over_zeroed_weight",
    "identity",
    {
        "identity": {"block": ("open", "nonfinite branch", "block.last")},
        "apply": {"refuse": ["block.last"]},
        "hint": "parametrised weight",
    },
    summary="Zeroed weight under spectral normalisation is 0/0: the branch output is NaN.",
)
def spectral_norm_zero():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.last = spectral_norm(nn.Linear(WIDTH, WIDTH))
            zero_(self.last.parametrizations.weight.original, self.last.bias)

        def forward(self, x):
            return x + self.last(torch.relu(self.first(x)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.head(self.block(x))

    return {
        "model": Net(),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 2),
        "branches": {"block": {"block": "block", "gate": []}},
    }


# --------------------------------------------------------------------------- NaN in the forward


@case(
    "zero_gate_times_overflowing_branch",
    "identity",
    {
        "identity": {
            "blocks.0": ("closed",),
            "blocks.1": ("open", "nonfinite branch", "blocks.1.inner"),
        },
        "first_nonfinite_module": "blocks.1.inner",
        "do_not_blame": ["blocks.2"],
    },
    summary="One branch overflows to inf and 0 * inf is NaN; the block after it is only a victim.",
)
def zero_times_infinity():
    class Grow(nn.Module):
        def forward(self, x):
            return torch.exp(100.0 + x.square())

    class Block(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.gate = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return x + self.gate * self.inner(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(nn.Linear(WIDTH, WIDTH)), Block(Grow()), Block(nn.Linear(WIDTH, WIDTH))])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    def truth(fresh):
        default_truth(fresh)
        bundle = fresh()
        bad = []
        for name, module in bundle["model"].named_modules():
            if not list(module.children()):
                module.register_forward_hook(lambda m, i, o, n=name: None if torch.isfinite(o).all() else bad.append(n))
        bundle["model"](*bundle["args"])
        assert bad[0] == bundle["expect"]["first_nonfinite_module"], bad

    return {
        "model": Net(),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, WIDTH),
        "branches": {f"blocks.{i}": {"block": f"blocks.{i}", "gate": [f"blocks.{i}.gate"]} for i in range(3)},
        "truth": truth,
    }


# --------------------------------------------------------------------------- after the step


class UnitGradientStep(torch.optim.Optimizer):
    """Normalises each gradient by its own length, without a floor."""

    def __init__(self, params, lr: float = 0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(group["lr"] * weight.grad / weight.grad.norm())


@case(
    "optimizer_divides_by_zero_gradient_norm",
    "update",
    {
        "identity": {f"blocks.{i}": ("closed",) for i in range(3)},
        "gradient": {name: "alive" for name in GATES},
        "after_step": {
            "step": 1,
            "nonfinite_parameters": [f"blocks.{i}.features.0.weight" for i in range(3)],
            "finite_parameters": GATES,
        },
        "names_in_text": ["UnitGradientStep", "blocks.0.features.0.weight"],
    },
    summary="Gate check passes; the optimiser turns the silent inner weights into NaN on step 1.",
)
def optimizer_zero_over_zero():
    def truth(fresh):
        default_truth(fresh)
        bundle = fresh()
        train_log(bundle, 1)
        state = dict(bundle["model"].named_parameters())
        after = bundle["expect"]["after_step"]
        for name in after["nonfinite_parameters"]:
            assert torch.isnan(state[name]).any(), name
        for name in after["finite_parameters"]:
            assert torch.isfinite(state[name]).all(), name

    bundle = _tower(nn.Identity())
    bundle.update(optimizer=lambda params: UnitGradientStep(params), truth=truth)
    return bundle
