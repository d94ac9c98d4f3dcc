"""Without a trainer: inserted scalars, counting calls, half precision, harm."""

from __future__ import annotations

import copy
import statistics

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .base import (
    block_calls,
    case,
    check_gradient,
    check_identity,
    default_truth,
    fixed,
    named_tensor,
    prepared,
    squared_error,
    train_log,
    zero_,
)

WIDTH = 8


class ScaledBlock(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.scale * self.body(x)


# --------------------------------------------------------------------------- inserted scalars


class Squash(nn.Module):
    """Branch that ends in a function which is not zero at zero, so it needs a new scalar."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.sigmoid(self.lin(x))


class NeedsScalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.mix = Squash()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + self.mix(x))


def insert_scalar_by_hand(model: nn.Module, path: str, cast: bool = True, shape=(1,)) -> str:
    """What an inserted gate has to amount to; returns the new parameter's name."""
    module = model.get_submodule(path)
    module.register_parameter("extra_gate", nn.Parameter(torch.zeros(shape)))

    def scale(mod, inputs, output):
        gate = mod.extra_gate
        return (gate.to(output.dtype) if cast else gate) * output

    module.register_forward_hook(scale)
    return f"{path}.extra_gate"


@case(
    "inserted_scalar_keeps_bfloat16_stream",
    "apply",
    {
        "plan": {"mix": []},
        "apply": {"insert": {"mix": {"shape": (1,), "stream_dtype": torch.bfloat16}}},
        "identity": {"mix": ("closed",)},
        "gradient": {"mix.extra_gate": "alive"},
    },
    summary="An inserted (1,)-shaped float32 scalar must not turn a bfloat16 stream into float32.",
)
def bf16_insert():
    def truth(fresh):
        check_gradient(fresh)
        check_identity(fresh)
        for cast, shape, dtype in (
            (True, (1,), torch.bfloat16),
            (False, (1,), torch.float32),
            (False, (), torch.bfloat16),
        ):
            model = fresh()["model"]
            insert_scalar_by_hand(model, "mix", cast, shape)
            with torch.no_grad():
                stream = model.stem(fixed(4, WIDTH).bfloat16())
                assert (stream + model.mix(stream)).dtype == dtype, (cast, shape)

    return {
        "model": NeedsScalar().bfloat16(),
        "args": (fixed(16, WIDTH).bfloat16(),),
        "loss_fn": squared_error(16, 2),
        "prepare": "apply",
        "reference_apply": lambda m: insert_scalar_by_hand(m, "mix"),
        "branches": {"mix": {"block": "", "output_of": "mix", "gate": []}},
        "new_parameter": {"mix": "mix.extra_gate"},
        "truth": truth,
    }


@case(
    "deepcopy_after_inserting_a_scalar",
    "apply",
    {
        "apply": {"insert": {"mix": {"shape": (1,)}}, "deepcopy_is_independent": True},
        "identity": {"mix": ("closed",)},
    },
    summary="A copy of the prepared model must use its own scalar, not the original's.",
)
def deepcopy_insert():
    def insert_by_closure(model):
        module = model.mix
        module.extra_gate = nn.Parameter(torch.zeros(1))
        original = module.forward
        module.forward = lambda x: module.extra_gate * original(x)

    def copy_follows_own_scalar(model):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.mix.extra_gate.fill_(2.0)
            x = fixed(3, WIDTH)
            return not torch.equal(twin.mix(x), model.mix(x))

    def truth(fresh):
        check_identity(fresh)
        good = fresh()["model"]
        insert_scalar_by_hand(good, "mix")
        assert copy_follows_own_scalar(good)
        bad = fresh()["model"]
        insert_by_closure(bad)
        assert not copy_follows_own_scalar(bad), "a closure was expected to keep the original"

    return {
        "model": NeedsScalar(),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 2),
        "prepare": "apply",
        "reference_apply": lambda m: insert_scalar_by_hand(m, "mix"),
        "branches": {"mix": {"block": "", "output_of": "mix", "gate": []}},
        "new_parameter": {"mix": "mix.extra_gate"},
        "truth": truth,
    }


# --------------------------------------------------------------------------- counting calls


def _count_calls(bundle: dict, names: list[str]) -> dict[str, int]:
    """Raw forward-hook calls during one forward plus one backward."""
    model = prepared(bundle)
    count = dict.fromkeys(names, 0)
    for name in names:
        model.get_submodule(name).register_forward_hook(lambda m, i, o, n=name: count.__setitem__(n, count[n] + 1))
    bundle["loss_fn"](model(*bundle["args"])).backward()
    return count


@case(
    "reentrant_checkpoint_runs_hooks_twice",
    "observe",
    {
        "identity": {"block": ("closed",)},
        "gradient": {"block.scale": "alive"},
        "observe": {"raw_calls_per_step": {"block": 2}, "records_per_step": {"block": 1}},
    },
    summary="Reentrant checkpointing after a trainable stem: two raw calls, one record per step.",
)
def reentrant_twice():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(WIDTH, WIDTH)
            self.block = ScaledBlock()
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.head(checkpoint(self.block, self.stem(x), use_reentrant=True))

    def truth(fresh):
        default_truth(fresh)
        raw = fresh()["expect"]["observe"]["raw_calls_per_step"]
        assert _count_calls(fresh(), list(raw)) == raw

    return {
        "model": Net(),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 2),
        "branches": {"block": {"block": "block", "gate": ["block.scale"]}},
        "truth": truth,
    }


@case(
    "one_block_applied_three_times",
    "observe",
    {
        "plan": {"cell": ["cell.scale"]},
        "identity": {"cell": ("closed",)},
        "gradient": {"cell.scale": "alive"},
        "observe": {"calls_per_step": {"cell": 3}},
    },
    summary="Weight-shared block called three times: one gate, one verdict, three calls.",
)
def shared_block():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = ScaledBlock()
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            for _ in range(3):
                x = self.cell(x)
            return self.head(x)

    def truth(fresh):
        default_truth(fresh)
        assert _count_calls(fresh(), ["cell"]) == {"cell": 3}

    return {
        "model": Recurrent(),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 2),
        "branches": {"cell": {"block": "cell", "gate": ["cell.scale"]}},
        "truth": truth,
    }


@case(
    "parent_calls_forward_directly",
    "observe",
    {
        "identity_must_not_say": {"block": ["closed"]},
        "observe": {"calls_per_step": {"block": 0}},
        "hint": ".forward",
    },
    summary="block.forward(x) skips hooks; the block is open, so 'nothing seen' must not read closed.",
)
def forward_directly():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = ScaledBlock()
            self.head = nn.Linear(WIDTH, 2)
            nn.init.constant_(self.block.scale, 0.5)

        def forward(self, x):
            return self.head(self.block.forward(x))

    def truth(fresh):
        assert _count_calls(fresh(), ["block"]) == {"block": 0}
        model, x = fresh()["model"], fixed(16, WIDTH)
        with torch.no_grad():
            assert not torch.equal(model.block(x), x)

    return {
        "model": Net(),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 2),
        "branches": {"block": {"block": "block", "gate": ["block.scale"]}},
        "truth": truth,
    }


# --------------------------------------------------------------------------- half precision


@case(
    "half_precision_stream_variance",
    "observe",
    {
        "identity": {"block": ("closed",)},
        "observe": {"stream_variance": {"block": 9.0e4}, "relative_tolerance": 0.05},
    },
    summary="float16 stream of +-300: its variance 9e4 fits float32 but not float16.",
)
def half_variance():
    class Loud(nn.Module):
        def forward(self, x):
            return 300.0 * torch.sign(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.loud = Loud()
            self.block = ScaledBlock(64)

        def forward(self, x):
            return self.block(self.loud(x))

    def truth(fresh):
        check_identity(fresh)
        bundle = fresh()
        ((stream, _),) = block_calls(bundle["model"], bundle["args"], "block")
        assert stream.dtype == torch.float16
        assert torch.isinf(stream.var(unbiased=False))
        wide = float(stream.float().var(unbiased=False))
        assert abs(wide / bundle["expect"]["observe"]["stream_variance"]["block"] - 1) < 0.05

    return {
        "model": Net().half(),
        "args": (fixed(32, 64).half(),),
        "loss_fn": lambda output: output.float().square().mean() * 1e-6,
        "branches": {"block": {"block": "block", "gate": ["block.scale"]}},
        "truth": truth,
    }


@case(
    "autocast_branch_on_a_float32_stream",
    "identity",
    {
        "identity": {f"blocks.{i}": ("closed",) for i in range(2)},
        "gradient": {f"blocks.{i}.scale": "alive" for i in range(2)},
        "observe": {"stream_dtype": torch.float32},
    },
    summary="CPU autocast to bfloat16: the branch is computed in bfloat16, the stream stays float32.",
)
def autocast_branch():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([ScaledBlock(), ScaledBlock()])
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for block in self.blocks:
                    x = block(x)
                return self.head(x).float()

    def truth(fresh):
        default_truth(fresh)
        bundle = fresh()
        ((x, out),) = block_calls(bundle["model"], bundle["args"], "blocks.1")
        assert x.dtype == out.dtype == bundle["expect"]["observe"]["stream_dtype"]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert bundle["model"].blocks[0].body(x).dtype == torch.bfloat16

    return {
        "model": Net(),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 2),
        "branches": {f"blocks.{i}": {"block": f"blocks.{i}", "gate": [f"blocks.{i}.scale"]} for i in range(2)},
        "truth": truth,
    }


# --------------------------------------------------------------------------- harm


@case(
    "two_of_eight_gates_stay_near_zero",
    "fit",
    {
        "identity": {f"blocks.{i}": ("closed",) for i in range(8)},
        "gradient": {f"blocks.{i}.scale": "alive" for i in range(8)},
        "after_steps": {"steps": 30, "stuck": ["blocks.3.scale", "blocks.7.scale"], "share_of_median": 0.01},
    },
    summary="Two branches are 1e-4 times quieter than the rest: their gates hardly move in 30 steps.",
)
def stuck_gates():
    class Quiet(ScaledBlock):
        def forward(self, x):
            return x + self.scale * (1e-4 * self.body(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Quiet() if i in (3, 7) else ScaledBlock() for i in range(8))
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def truth(fresh):
        default_truth(fresh)
        bundle = fresh()
        rule = bundle["expect"]["after_steps"]
        train_log(bundle, rule["steps"])
        final = {n: float(p.detach().abs()) for n, p in bundle["model"].named_parameters() if n.endswith(".scale")}
        limit = rule["share_of_median"] * statistics.median(final.values())
        assert [n for n, v in final.items() if v < limit] == rule["stuck"], final

    return {
        "model": Net(),
        "args": (fixed(32, WIDTH),),
        "loss_fn": squared_error(32, 2),
        "branches": {f"blocks.{i}": {"block": f"blocks.{i}", "gate": [f"blocks.{i}.scale"]} for i in range(8)},
        "truth": truth,
    }


@case(
    "zeroing_would_wipe_a_trained_norm_scale",
    "apply",
    {
        "plan": {"block": ["block.post.weight", "block.post.bias"]},
        "apply": {"refuse": ["block.post.weight"], "unless": "overwrite"},
        "hint": "looks trained",
    },
    summary="The branch's last norm has mean 0.8 and spread 0.3: refuse to zero without consent.",
)
def trained_scale():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(32, 32)
            self.post = nn.LayerNorm(32)

        def forward(self, x):
            return x + self.post(torch.relu(self.lin(x)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()
            self.head = nn.Linear(32, 2)

        def forward(self, x):
            return self.head(self.block(x))

    model = Net()
    with torch.no_grad():
        model.block.post.weight.copy_(0.8 + fixed(32, seed=4, scale=0.3))
        model.block.post.bias.copy_(fixed(32, seed=5, scale=0.1))

    def truth(fresh):
        bundle = fresh()
        scale = bundle["model"].block.post.weight.detach()
        assert 0.6 < float(scale.mean()) < 1.0
        assert 0.15 < float(scale.std()) < 0.45
        before = bundle["model"](*bundle["args"])
        zero_(bundle["model"].block.post.weight, bundle["model"].block.post.bias)
        after = bundle["model"](*bundle["args"])
        assert float((before - after).detach().abs().max()) > 0.1

    return {
        "model": model,
        "args": (fixed(16, 32),),
        "loss_fn": squared_error(16, 2),
        "prepare": "apply",
        "reference_apply": lambda m: None,
        "branches": {"block": {"block": "block", "gate": ["block.post.weight", "block.post.bias"]}},
        "truth": truth,
    }


@case(
    "near_zero_channel_scale_is_not_zero",
    "identity",
    {
        "identity": {f"blocks.{i}": ("open", "unzeroed scale", f"blocks.{i}.gamma") for i in range(2)},
        "gradient": {f"blocks.{i}.gamma": "alive" for i in range(2)},
        "found_value": {"blocks.0.gamma": 1e-6, "blocks.1.gamma": 1e-2},
        "closed_after_apply": True,
    },
    summary="Per-channel scales of 1e-6 and 1e-2: open in strict mode, values reported, apply closes them.",
)
def near_zero_scale():
    class Block(nn.Module):
        def __init__(self, value: float):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            self.gamma = nn.Parameter(torch.full((WIDTH,), value))

        def forward(self, x):
            return x + self.body(x) * self.gamma

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(1e-6), Block(1e-2)])
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def truth(fresh):
        default_truth(fresh)
        bundle = fresh()
        for name, value in bundle["expect"]["found_value"].items():
            assert torch.allclose(named_tensor(bundle["model"], name), torch.tensor(value))

    return {
        "model": Net(),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 2),
        "branches": {f"blocks.{i}": {"block": f"blocks.{i}", "gate": [f"blocks.{i}.gamma"]} for i in range(2)},
        "truth": truth,
    }


class ChannelScaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.layer_scale = nn.Parameter(torch.full((WIDTH,), 1e-4))

    def forward(self, x):
        return x + self.layer_scale * self.body(x)


class ChannelScaledNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(ChannelScaled(), ChannelScaled())
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.head(self.blocks(x))


@case(
    "renamed_scale_lost_on_loading",
    "identity",
    {
        "identity": {f"blocks.{i}": ("open", "unzeroed scale", f"blocks.{i}.layer_scale") for i in range(2)},
        "found_value": {f"blocks.{i}.layer_scale": 1e-4 for i in range(2)},
        "hint": "equals its start value after loading",
    },
    summary="Checkpoint stores the scales under another name; a non-strict load leaves the start value.",
)
def renamed_scale():
    stored = {}
    for key, value in ChannelScaledNet().state_dict().items():
        scale = key.endswith("layer_scale")
        stored[key.replace("layer_scale", "gamma")] = torch.zeros_like(value) if scale else value
    model = ChannelScaledNet()
    report = model.load_state_dict(stored, strict=False)

    def truth(fresh):
        check_identity(fresh)
        names = [f"blocks.{i}.layer_scale" for i in range(2)]
        assert report.missing_keys == names, report
        assert report.unexpected_keys == [f"blocks.{i}.gamma" for i in range(2)], report
        assert all(torch.all(named_tensor(fresh()["model"], n) == 1e-4) for n in names)

    return {
        "model": model,
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 2),
        "branches": {f"blocks.{i}": {"block": f"blocks.{i}", "gate": [f"blocks.{i}.layer_scale"]} for i in range(2)},
        "truth": truth,
    }
