"""Gates whose first gradient is zero or absent - for good and for bad reasons."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .base import (
    case,
    check_identity,
    default_truth,
    fixed,
    prepared,
    squared_error,
    train_log,
    zero_,
)

WIDTH = 8


class ScalarGated(nn.Module):
    """x + gate * mlp(x) with one learnable number."""

    def __init__(self, width: int = WIDTH, act: type = nn.GELU):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.act = act()
        self.down = nn.Linear(2 * width, width)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.gate * self.down(self.act(self.up(x)))


class GatedStack(nn.Module):
    def __init__(self, depth: int = 3, head: bool = True):
        super().__init__()
        self.blocks = nn.ModuleList(ScalarGated() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 4) if head else nn.Identity()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _stack_branches(depth: int) -> dict:
    return {f"blocks.{i}": {"block": f"blocks.{i}", "gate": [f"blocks.{i}.gate"]} for i in range(depth)}


# --------------------------------------------------------------------------- healthy baselines


@case(
    "scalar_gates_ordinary_head",
    "gradient",
    {
        "plan": {f"blocks.{i}": [f"blocks.{i}.gate"] for i in range(3)},
        "identity": {f"blocks.{i}": ("closed",) for i in range(3)},
        "gradient": {f"blocks.{i}.gate": "alive" for i in range(3)},
        "interior_zero": ["blocks.0.up.weight", "blocks.1.down.weight", "blocks.2.down.bias"],
    },
    summary="Zero scalars on three branches move at once; the silent interior is no error.",
)
def scalar_gates():
    return {
        "model": GatedStack(),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 4),
        "branches": _stack_branches(3),
    }


@case(
    "last_linear_zeroed_interior_silent",
    "apply",
    {
        "plan": {"block": ["block.last.weight", "block.last.bias"]},
        "identity": {"block": ("closed",)},
        "gradient": {"block.last.weight": "alive", "block.last.bias": "alive"},
        "interior_zero": ["block.first.weight", "block.first.bias"],
    },
    summary="A last linear is zeroed; the layer before it has zero gradient for one step.",
)
def last_linear_zeroed():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.last = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.last(torch.tanh(self.first(x))) + x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(5, WIDTH)
            self.block = Block()
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, x):
            return self.head(self.block(self.stem(x)))

    return {
        "model": Net(),
        "args": (fixed(12, 5),),
        "loss_fn": squared_error(12, 3),
        "prepare": "apply",
        "reference_apply": lambda m: zero_(m.block.last.weight, m.block.last.bias),
        "branches": {"block": {"block": "block", "gate": ["block.last.weight", "block.last.bias"]}},
    }


# --------------------------------------------------------------------------- products of zeros


def _feature_gate(both_zero: bool) -> dict:
    class FeatureGate(nn.Module):
        """Stream plus stream times a small network of the stream."""

        def __init__(self):
            super().__init__()
            self.gate = nn.Sequential(
                nn.Linear(WIDTH, WIDTH, bias=False),
                nn.ReLU(),
                nn.Linear(WIDTH, WIDTH, bias=False),
                nn.Tanh(),
            )

        def forward(self, x):
            return x + self.gate(x) * x

    model = FeatureGate()
    zero_(model.gate[2].weight)
    if both_zero:
        zero_(model.gate[0].weight)
    return {
        "model": model,
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, WIDTH),
        "branches": {"(root)": {"block": "", "gate": ["gate.2.weight"]}},
    }


@case(
    "tanh_gate_network_both_linears_zero",
    "gradient",
    {
        "identity": {"(root)": ("closed",)},
        "gradient": {"gate.2.weight": "dead"},
        "also_zero": ["gate.0.weight"],
        "dead_with": {"gate.2.weight": ["gate.0.weight"]},
        "names_in_text": ["gate.0.weight", "gate.2.weight"],
    },
    summary="Both linears of a gate network are zero: two zeros multiply, nothing ever moves.",
)
def tanh_gate_both_zero():
    return _feature_gate(both_zero=True)


@case(
    "tanh_gate_network_last_linear_zero",
    "gradient",
    {
        "identity": {"(root)": ("closed",)},
        "gradient": {"gate.2.weight": "alive"},
        "interior_zero": ["gate.0.weight"],
    },
    summary="Only the last linear of the gate network is zero: alive, its inner linear wakes later.",
)
def tanh_gate_last_zero():
    return _feature_gate(both_zero=False)


class LowRankOnFrozen(nn.Module):
    """Frozen linear plus trainable low-rank product, used on a residual path."""

    def __init__(self, width: int = WIDTH, rank: int = 2):
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        self.base.requires_grad_(False)
        zero_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class LowRankNet(nn.Module):
    def __init__(self, depth: int = 2):
        super().__init__()
        self.layers = nn.ModuleList(LowRankOnFrozen() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


@case(
    "low_rank_pair_both_zero",
    "gradient",
    {
        "identity": {f"layers.{i}": ("closed",) for i in range(2)},
        "gradient": {f"layers.{i}.up.weight": "dead" for i in range(2)},
        "also_zero": [f"layers.{i}.down.weight" for i in range(2)],
        "dead_with": {f"layers.{i}.up.weight": [f"layers.{i}.down.weight"] for i in range(2)},
    },
    summary="A generic init routine ran after adapters were added and zeroed both factors.",
)
def low_rank_both_zero():
    model = LowRankNet()
    for name, parameter in model.named_parameters():
        if ".down." in name:
            zero_(parameter)
    return {
        "model": model,
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 3),
        "branches": {
            f"layers.{i}": {
                "contribution": lambda m, a, i=i: m.layers[i].up(m.layers[i].down(a[0])),
                "gate": [f"layers.{i}.up.weight"],
            }
            for i in range(2)
        },
    }


@case(
    "low_rank_pair_in_its_usual_start",
    "gradient",
    {
        "identity": {f"layers.{i}": ("closed",) for i in range(2)},
        "gradient": {f"layers.{i}.up.weight": "alive" for i in range(2)},
        "interior_zero": [f"layers.{i}.down.weight" for i in range(2)],
        "not_gates": ["layers.0.base.weight", "layers.0.base.bias"],
    },
    summary="Random down factor, zero up factor, frozen base: alive; a silent down factor is normal.",
)
def low_rank_usual():
    return {
        "model": LowRankNet(),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 3),
        "branches": {
            "layers.0": {
                "contribution": lambda m, a: m.layers[0].up(m.layers[0].down(a[0])),
                "gate": ["layers.0.up.weight"],
            },
            "layers.1": {"output_of": "layers.1.up", "gate": ["layers.1.up.weight"]},
        },
    }


# --------------------------------------------------------------------------- activation after gate


def _activation_after_gate(label: str, act: type, status: str | None) -> None:
    if status is None:  # not zero at zero: no gate closes this branch
        expect = {"identity": {"block": ("open", ("ungated branch", "unzeroed scale"), "block.act")}}
        text = f"Zeroed linear followed by {label}: the branch is not zero at zero."
    else:
        expect = {
            "identity": {"block": ("closed",)},
            "gradient": {"block.lin.weight": status},
        }
        text = f"Zeroed bias-free linear followed by {label} inside the branch: {status}."

    @case(f"activation_after_zeroed_linear[{label}]", "gradient", expect, summary=text)
    def build():
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.LayerNorm(WIDTH)
                self.lin = nn.Linear(WIDTH, WIDTH, bias=False)
                self.act = act()

            def forward(self, x):
                return x + self.act(self.lin(self.norm(x)))

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.block = Block()
                self.head = nn.Linear(WIDTH, 2)

            def forward(self, x):
                return self.head(self.block(x))

        model = Net()
        zero_(model.block.lin.weight)

        def silence(m):
            m.block.act.register_forward_hook(lambda mod, i, o: torch.zeros_like(o))

        return {
            "model": model,
            "args": (fixed(16, WIDTH),),
            "loss_fn": squared_error(16, 2),
            "branches": {"block": {"block": "block", "gate": ["block.lin.weight"]}},
            "repair": {"block": silence},
        }


for _label, _act, _status in (
    ("relu", nn.ReLU, "dead"),
    ("gelu", nn.GELU, "alive"),
    ("tanh", nn.Tanh, "alive"),
    ("leaky_relu", nn.LeakyReLU, "alive"),
    ("elu", nn.ELU, "alive"),
    ("hardswish", nn.Hardswish, "alive"),
    ("sigmoid", nn.Sigmoid, None),
):
    _activation_after_gate(_label, _act, _status)


def _norm_then_relu(shift: float) -> dict:
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
            self.bn = nn.BatchNorm2d(3)
            nn.init.zeros_(self.bn.weight)
            nn.init.constant_(self.bn.bias, shift)

        def forward(self, image):
            return image + torch.relu(self.bn(self.conv(image)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()
            self.out = nn.Conv2d(3, 2, 1)

        def forward(self, image):
            return self.out(self.block(image))

    return {
        "model": Net(),
        "args": (fixed(4, 3, 6, 6),),
        "loss_fn": squared_error(4, 2, 6, 6),
        "branches": {"block": {"block": "block", "gate": ["block.bn.weight", "block.bn.bias"]}},
    }


@case(
    "batch_norm_zero_then_relu_in_branch",
    "gradient",
    {
        "identity": {"block": ("closed",)},
        "gradient": {"block.bn.weight": "dead", "block.bn.bias": "dead"},
        "hint": "activation after the zeroed scale",
    },
    summary="Scale and shift of the last BN are zero but a ReLU follows inside the branch: dead.",
)
def norm_then_relu_zero():
    return _norm_then_relu(0.0)


@case(
    "batch_norm_zero_scale_shifted_then_relu",
    "identity",
    {
        "identity": {"block": ("open", "bias after scale", "block.bn.bias")},
        "gradient": {"block.bn.weight": "alive", "block.bn.bias": "alive"},
    },
    summary="Same block with shift 0.1: the gradient lives, but the branch adds a constant 0.1.",
)
def norm_then_relu_shifted():
    return _norm_then_relu(0.1)


# --------------------------------------------------------------------------- zero heads, chains


def _zero_head(frozen: bool) -> dict:
    model = GatedStack(3)
    zero_(model.head.weight, model.head.bias)
    if frozen:
        model.head.requires_grad_(False)
    return {
        "model": model,
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 4),
        "branches": _stack_branches(3),
    }


@case(
    "zero_head_sends_gates_to_sleep",
    "gradient",
    {
        "identity": {f"blocks.{i}": ("closed",) for i in range(3)},
        "gradient": {f"blocks.{i}.gate": "asleep" for i in range(3)},
        "wakes_at_step": {f"blocks.{i}.gate": 2 for i in range(3)},
        "blocked_by": {f"blocks.{i}.gate": "head.weight" for i in range(3)},
    },
    summary="A zero classification head blocks every gate on the first backward only.",
)
def zero_head():
    return _zero_head(frozen=False)


@case(
    "zero_head_frozen_kills_gates",
    "gradient",
    {
        "identity": {f"blocks.{i}": ("closed",) for i in range(3)},
        "gradient": {f"blocks.{i}.gate": "dead" for i in range(3)},
        "dead_with": {f"blocks.{i}.gate": ["head.weight"] for i in range(3)},
        "names_in_text": ["head.weight"],
    },
    summary="The zero head is frozen as well, so it can never open: all gates are dead.",
)
def zero_head_frozen():
    return _zero_head(frozen=True)


@case(
    "zero_conv_feeding_zero_conv",
    "gradient",
    {
        "gradient": {
            "outer.weight": "alive",
            "outer.bias": "alive",
            "inner.weight": "asleep",
            "inner.bias": "asleep",
        },
        "wakes_at_step": {"inner.weight": 2, "inner.bias": 2},
        "blocked_by": {"inner.weight": "outer.weight", "inner.bias": "outer.weight"},
        "identity": {"outer": ("closed",), "inner": ("closed",)},
    },
    summary="Control branch with a zero 1x1 conv before and after: the inner one wakes at step 2.",
)
def zero_conv_chain():
    class Controlled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Conv2d(3, 4, 1)
            self.mid = nn.Conv2d(4, 4, 3, padding=1)
            self.outer = nn.Conv2d(4, 4, 1)
            zero_(*self.inner.parameters(), *self.outer.parameters())

        def forward(self, image, hint):
            steered = image + self.inner(hint)
            return image + self.outer(functional.silu(self.mid(steered)))

    return {
        "model": Controlled(),
        "args": (fixed(2, 4, 6, 6), fixed(2, 3, 6, 6, seed=1)),
        "loss_fn": squared_error(2, 4, 6, 6),
        "branches": {
            "outer": {"output_of": "outer", "gate": ["outer.weight", "outer.bias"]},
            "inner": {"output_of": "inner", "gate": ["inner.weight", "inner.bias"]},
        },
    }


@case(
    "adaptive_norm_gates_behind_zero_final_layer",
    "gradient",
    {
        "gradient": {f"blocks.{i}.modulate.weight": "asleep" for i in range(2)} | {"final.weight": "alive"},
        "wakes_at_step": {f"blocks.{i}.modulate.weight": 2 for i in range(2)},
        "blocked_by": {f"blocks.{i}.modulate.weight": "final.weight" for i in range(2)},
        "identity": {f"blocks.{i}": ("closed",) for i in range(2)},
        "interior_wakes_at_step": {"blocks.0.mlp.0.weight": 3, "blocks.1.mlp.2.weight": 3},
    },
    summary="Conditioned shift/scale/gate from a zero linear plus a zero output layer: two waves.",
)
def adaptive_norm_zero():
    class Conditioned(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
            self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            self.modulate = nn.Linear(WIDTH, 3 * WIDTH)
            zero_(*self.modulate.parameters())

        def forward(self, x, c):
            shift, scale, gate = self.modulate(functional.silu(c)).chunk(3, dim=-1)
            return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Conditioned() for _ in range(2))
            self.final = nn.Linear(WIDTH, WIDTH)
            zero_(*self.final.parameters())

        def forward(self, x, c):
            for block in self.blocks:
                x = block(x, c)
            return self.final(x)

    def truth(fresh):
        default_truth(fresh)
        log = train_log(fresh(), 4)
        for name, when in fresh()["expect"]["interior_wakes_at_step"].items():
            seen = [record.kind[name] for record in log]
            assert seen.index("live") == when - 1, (name, seen)

    return {
        "model": Denoiser(),
        "args": (fixed(16, WIDTH), fixed(16, WIDTH, seed=1)),
        "loss_fn": squared_error(16, WIDTH),
        "branches": {
            f"blocks.{i}": {"block": f"blocks.{i}", "gate": [f"blocks.{i}.modulate.weight"]} for i in range(2)
        },
        "truth": truth,
    }


@case(
    "encoder_asleep_behind_closed_cross_attention",
    "apply",
    {
        "gradient": {
            "net.decoder.layers.0.self_attn.out_proj.weight": "alive",
            "net.decoder.layers.0.multihead_attn.out_proj.weight": "alive",
            "net.decoder.layers.0.linear2.weight": "alive",
            "net.encoder.layers.0.self_attn.out_proj.weight": "asleep",
            "net.encoder.layers.0.linear2.weight": "asleep",
            "net.encoder.layers.1.linear2.bias": "asleep",
        },
        "wakes_at_step": {
            "net.encoder.layers.0.self_attn.out_proj.weight": 2,
            "net.encoder.layers.0.linear2.weight": 2,
            "net.encoder.layers.1.linear2.bias": 2,
        },
        "blocked_by": {
            "net.encoder.layers.0.linear2.weight": (
                "net.decoder.layers.0.multihead_attn.out_proj.weight",
                "net.decoder.layers.1.multihead_attn.out_proj.weight",
            )
        },
        "identity": {
            "net.encoder.layers.0": ("closed",),
            "net.encoder.layers.1": ("closed",),
            "net.decoder.layers.0": ("closed",),
            "net.decoder.layers.1": ("closed",),
        },
    },
    summary="torch.nn.Transformer (norm first): encoder gates wait for the closed cross-attention.",
)
def encoder_behind_cross_attention():
    class Translate(nn.Module):
        def __init__(self):
            super().__init__()
            same = {"dropout": 0.0, "batch_first": True, "norm_first": True}
            encoder = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(WIDTH, 2, 16, **same),
                2,
                nn.LayerNorm(WIDTH),
                enable_nested_tensor=False,
            )
            self.net = nn.Transformer(WIDTH, 2, 2, 2, 16, custom_encoder=encoder, **same)
            self.head = nn.Linear(WIDTH, 5)

        def forward(self, source, target):
            return self.head(self.net(source, target))

    def close(model):
        for name, parameter in model.named_parameters():
            if "out_proj" in name or "linear2" in name:
                zero_(parameter)

    def gates(stack, i):
        parts = ["self_attn.out_proj", "linear2"]
        parts += ["multihead_attn.out_proj"] if stack == "decoder" else []
        return [f"net.{stack}.layers.{i}.{p}.{t}" for p in parts for t in ("weight", "bias")]

    stacks = ("encoder", "decoder")
    return {
        "model": Translate(),
        "args": (fixed(3, 5, WIDTH), fixed(3, 4, WIDTH, seed=1)),
        "loss_fn": squared_error(3, 4, 5),
        "prepare": "apply",
        "reference_apply": close,
        "branches": {
            f"net.{s}.layers.{i}": {"block": f"net.{s}.layers.{i}", "gate": gates(s, i)}
            for s in stacks
            for i in range(2)
        },
    }


# --------------------------------------------------------------------------- no gradient at all


@case(
    "gate_frozen_at_zero",
    "gradient",
    {
        "identity": {f"blocks.{i}": ("closed",) for i in range(2)},
        "gradient": {"blocks.0.gate": "alive", "blocks.1.gate": "missing"},
        "names_in_text": ["blocks.1.gate"],
        "hint": "frozen",
    },
    summary="One of two gates was created without requires_grad: its branch stays off.",
)
def gate_frozen():
    model = GatedStack(2)
    model.blocks[1].gate.requires_grad_(False)
    return {
        "model": model,
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 4),
        "branches": _stack_branches(2),
    }


@case(
    "reentrant_checkpoint_on_plain_batch",
    "gradient",
    {
        "identity": {"first": ("closed",), "second": ("closed",)},
        "gradient": {"first.gate": "missing", "second.gate": "alive"},
        "hint": "use_reentrant",
    },
    summary="First block under reentrant checkpointing, input needs no gradient: gradient is None.",
)
def reentrant_checkpoint():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = ScalarGated()
            self.second = ScalarGated()
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            x = checkpoint(self.first, x, use_reentrant=True)
            return self.head(self.second(x))

    return {
        "model": Net(),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 2),
        "branches": {n: {"block": n, "gate": [f"{n}.gate"]} for n in ("first", "second")},
    }


@case(
    "nonreentrant_checkpoint_on_plain_batch",
    "gradient",
    {
        "identity": {f"blocks.{i}": ("closed",) for i in range(2)},
        "gradient": {f"blocks.{i}.gate": "alive" for i in range(2)},
    },
    summary="Non-reentrant checkpointing on a plain batch is healthy: must pass.",
)
def nonreentrant_checkpoint():
    class Net(GatedStack):
        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    return {
        "model": Net(2),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 4),
        "branches": _stack_branches(2),
    }


@case(
    "fused_path_reads_the_weight_directly",
    "apply",
    {
        "plan": {"mix": ["mix.out.weight", "mix.out.bias"]},
        "identity": {"mix": ("closed",)},
        "gradient": {"mix.out.weight": "alive", "mix.out.bias": "alive"},
        "observe": {"calls_per_step": {"mix.out": 0}},
        "must_not_insert": ["mix.out"],
    },
    summary="The parent hands out.weight to a function and never calls out: zero the value, no hook.",
)
def fused_path():
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp = nn.Linear(WIDTH, WIDTH)
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return x + functional.linear(functional.silu(self.inp(x)), self.out.weight, self.out.bias)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = Mixer()
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.head(self.mix(x))

    def truth(fresh):
        default_truth(fresh)
        bundle = fresh()
        model = prepared(bundle)
        calls = []
        model.mix.out.register_forward_hook(lambda *a: calls.append(1))
        model(*bundle["args"])
        assert not calls, "the inner layer was called after all"

    return {
        "model": Net(),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 2),
        "prepare": "apply",
        "reference_apply": lambda m: zero_(m.mix.out.weight, m.mix.out.bias),
        "branches": {"mix": {"block": "mix", "gate": ["mix.out.weight", "mix.out.bias"]}},
        "truth": truth,
    }


# --------------------------------------------------------------------------- data and rounding


@case(
    "first_batch_fully_masked",
    "gradient",
    {
        "identity": {f"blocks.{i}": ("closed",) for i in range(2)},
        "gradient": {f"blocks.{i}.gate": "alive" for i in range(2)},
        "decided_at_step": {f"blocks.{i}.gate": 2 for i in range(2)},
        "must_not_say": {1: {f"blocks.{i}.gate": ["dead", "alive"] for i in range(2)}},
    },
    summary="The first batch carries no unmasked token: zero gradient that says nothing yet.",
)
def first_batch_masked():
    target = fixed(6, 5, WIDTH, seed=9)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(ScalarGated() for _ in range(2))

        def forward(self, x, mask):
            for block in self.blocks:
                x = block(x)
            return (x - target) * mask

    def batch(step):
        mask = torch.zeros(6, 5, 1) if step == 1 else torch.ones(6, 5, 1)
        return fixed(6, 5, WIDTH, seed=step), mask

    return {
        "model": Net(),
        "args": batch(1),
        "batch": batch,
        "loss_fn": lambda error: error.square().mean(),
        "branches": _stack_branches(2),
    }


@case(
    "layer_norm_then_sum_gives_rounding_noise",
    "gradient",
    {
        "identity": {"block": ("closed",)},
        "gradient": {"block.gate": "dead"},
        "noise": ["block.gate"],
        "must_not_say": {1: {"block.gate": ["alive"]}},
    },
    summary="Loss is the sum of a LayerNorm output: the true gradient is 0, computed about 1e-7.",
)
def layer_norm_sum():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = ScalarGated()
            self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)

        def forward(self, x):
            return self.norm(self.block(x))

    def truth(fresh):
        check_identity(fresh)
        single = fresh()
        out = single["loss_fn"](single["model"](*single["args"]))
        out.backward()
        noisy = single["model"].block.gate.grad
        exact = fresh()
        exact["model"].double()
        exact["loss_fn"](exact["model"](*(a.double() for a in exact["args"]))).backward()
        cleaner = exact["model"].block.gate.grad
        assert 0.0 < float(noisy.abs()) < 1e-5, noisy
        # noise shrinks with the precision, a real gradient would not
        assert float(cleaner.abs()) < 1e-6 * max(float(noisy.abs()), 1e-30) or cleaner == 0
        # the loss does not depend on the gate
        moved = fresh()
        with torch.no_grad():
            moved["model"].block.gate.fill_(0.7)
            shifted = moved["loss_fn"](moved["model"](*moved["args"]))
        assert abs(float(shifted - out.detach())) < 1e-4, (shifted, out)

    return {
        "model": Net(),
        "args": (fixed(32, WIDTH),),
        "loss_fn": lambda output: output.sum(),
        "branches": {"block": {"block": "block", "gate": ["block.gate"]}},
        "truth": truth,
    }


@case(
    "per_channel_gate_with_unused_channels",
    "gradient",
    {
        "identity": {"block": ("closed",)},
        "gradient": {"block.scale": "alive"},
        "zero_channels": {"block.scale": [1, 4]},
    },
    summary="Per-channel scale where two of six channels are cut off by a pruned head.",
)
def per_channel_gate():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 12), nn.SiLU(), nn.Linear(12, 6))
            self.scale = nn.Parameter(torch.zeros(6))

        def forward(self, x):
            return x + self.body(x) * self.scale

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()
            self.head = nn.Linear(6, 3)
            self.register_buffer("keep", torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]))

        def forward(self, x):
            return self.head(self.block(x) * self.keep)

    return {
        "model": Net(),
        "args": (fixed(16, 6),),
        "loss_fn": squared_error(16, 3),
        "branches": {"block": {"block": "block", "gate": ["block.scale"]}},
    }


@case(
    "plain_stack_has_no_branch_to_close",
    "plan",
    {
        "plan": {},
        "apply": {"refuse": True},
        "if_zeroed_anyway": {"dead": ["0.weight", "2.weight", "2.bias", "4.weight"]},
    },
    summary="Sequential stack without any skip: nothing to plan; zeroing layers would kill training.",
)
def plain_stack():
    def truth(fresh):
        bundle = fresh()
        model = bundle["model"]
        zero_(model[2].weight, model[2].bias, model[4].weight, model[4].bias)
        bundle["model"] = model
        for record in train_log(bundle, 6):
            for name in bundle["expect"]["if_zeroed_anyway"]["dead"]:
                assert record.kind[name] == "zero", (name, record.kind[name])

    return {
        "model": nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
        ),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, WIDTH),
        "truth": truth,
    }


# --------------------------------------------------------------------------- after the step


class NormRatioStep(torch.optim.Optimizer):
    """Step size proportional to |weight| / |gradient|, as in layer-wise scaled optimisers."""

    def __init__(self, params, lr: float = 0.1, keep_going_at_zero: bool = False):
        super().__init__(params, {"lr": lr, "keep_going_at_zero": keep_going_at_zero})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                size, slope = weight.norm(), weight.grad.norm()
                ratio = size / (slope + 1e-12)
                if group["keep_going_at_zero"] and (size == 0 or slope == 0):
                    ratio = torch.ones(())
                weight.sub_(group["lr"] * ratio * weight.grad)


@case(
    "norm_ratio_optimizer_never_moves_a_zero_gate",
    "update",
    {
        "identity": {f"blocks.{i}": ("closed",) for i in range(2)},
        "gradient": {f"blocks.{i}.gate": "alive" for i in range(2)},
        "moved": {f"blocks.{i}.gate": False for i in range(2)},
        "names_in_text": ["NormRatioStep"],
    },
    summary="The optimiser multiplies each step by the weight's norm, which is 0 for a zero gate.",
)
def norm_ratio_optimizer():
    def truth(fresh):
        default_truth(fresh)
        bundle = fresh()
        log = train_log(bundle, 10)
        for name, moved in bundle["expect"]["moved"].items():
            assert all(r.kind[name] == "live" for r in log)
            assert (log[-1].value[name] != 0.0) == moved
        assert log[-1].loss != log[0].loss, "the rest of the net does train"

    return {
        "model": GatedStack(2),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 4),
        "optimizer": lambda params: NormRatioStep(params, lr=0.1),
        "branches": _stack_branches(2),
        "truth": truth,
    }


@case(
    "norm_ratio_optimizer_with_fallback",
    "update",
    {
        "identity": {f"blocks.{i}": ("closed",) for i in range(2)},
        "gradient": {f"blocks.{i}.gate": "alive" for i in range(2)},
        "moved": {f"blocks.{i}.gate": True for i in range(2)},
    },
    summary="The same optimiser with ratio 1 for zero weights: gates move, no warning.",
)
def norm_ratio_with_fallback():
    def truth(fresh):
        default_truth(fresh)
        bundle = fresh()
        log = train_log(bundle, 3)
        for name, moved in bundle["expect"]["moved"].items():
            assert (log[1].value[name] != 0.0) == moved

    return {
        "model": GatedStack(2),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 4),
        "optimizer": lambda params: NormRatioStep(params, lr=0.1, keep_going_at_zero=True),
        "branches": _stack_branches(2),
        "truth": truth,
    }


@case(
    "weight_decay_pulls_on_the_gate",
    "update",
    {
        "identity": {"(root)": ("closed",)},
        "gradient": {"gate": "alive"},
        "warn": {"gate": "weight_decay"},
    },
    summary="AdamW decays the gate too: a warning, never an error; the gate settles below its target 1.",
)
def weight_decay():
    reference = ScalarGated()
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(name == "gate")
    x = fixed(64, WIDTH)
    with torch.no_grad():
        reference.gate.fill_(1.0)
        wanted = reference(x)
        reference.gate.fill_(0.0)

    def settle(fresh, decay):
        bundle = fresh()
        train_log(bundle, 400, lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=decay))
        return float(bundle["model"].gate.detach())

    def truth(fresh):
        default_truth(fresh)
        none, strong = settle(fresh, 0.0), settle(fresh, 1.0)
        assert abs(none - 1.0) < 0.02, none
        assert strong < 0.95, strong

    return {
        "model": reference,
        "args": (x,),
        "loss_fn": lambda out: (out - wanted).square().mean(),
        "optimizer": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=1.0),
        "branches": {"(root)": {"block": "", "gate": ["gate"]}},
        "truth": truth,
    }
