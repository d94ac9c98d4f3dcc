"""Blocks that are, or are not, the identity before the first batch."""

from __future__ import annotations

import torch
from torch import nn

from .base import (
    block_calls,
    case,
    check_identity,
    default_truth,
    fixed,
    prepared,
    squared_error,
    zero_,
)

WIDTH = 8


# --------------------------------------------------------------------------- something left over


@case(
    "last_weight_zeroed_bias_forgotten",
    "identity",
    {
        "identity": {
            "block.0": ("closed",),
            "block.1": ("open", "bias after scale", "block.1.fc2.bias"),
            "block.2": ("closed",),
        },
        "gradient": {f"block.{i}.fc2.weight": "alive" for i in range(3)},
    },
    summary="In one of three blocks the last bias kept its default value.",
)
def bias_forgotten():
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(WIDTH, WIDTH)
            self.fc2 = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return x + self.fc2(torch.relu(self.fc1(x)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(Mlp(), Mlp(), Mlp())
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.head(self.block(x))

    model = Net()
    for layer in model.block:
        zero_(layer.fc2.weight, layer.fc2.bias)
    nn.init.constant_(model.block[1].fc2.bias, 0.05)
    return {
        "model": model,
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 2),
        "branches": {
            f"block.{i}": {
                "block": f"block.{i}",
                "gate": [f"block.{i}.fc2.weight", f"block.{i}.fc2.bias"],
            }
            for i in range(3)
        },
    }


@case(
    "attention_gated_feed_forward_not",
    "identity",
    {
        "identity": {
            f"layers.{i}.{part}": ("closed",)
            if part == "attend"
            else ("open", ("ungated branch", "unzeroed scale"), f"layers.{i}.feed")
            for i in range(4)
            for part in ("attend", "feed")
        },
        "gradient": {f"layers.{i}.attend_gate": "alive" for i in range(4)},
        "grouped_text": "4 of 4",
    },
    summary="Only the attention half of every layer carries a gate; the feed-forward half is open.",
)
def half_gated():
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            return self.out(nn.functional.scaled_dot_product_attention(q, k, v))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = Attend()
            self.attend_gate = nn.Parameter(torch.zeros(1))
            self.feed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

        def forward(self, x):
            x = x + self.attend_gate * self.attend(x)
            return x + self.feed(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.head(x.mean(1))

    def gated_part(i):
        def contribution(model, args):
            layer = model.layers[i]
            (stream, _), *_ = block_calls(model, args, f"layers.{i}")
            return layer.attend_gate * layer.attend(stream)

        return contribution

    def mute(i):
        return lambda m: m.layers[i].feed.register_forward_hook(lambda mod, inp, out: torch.zeros_like(out))

    branches, repair = {}, {}
    for i in range(4):
        branches[f"layers.{i}.attend"] = {
            "block": f"layers.{i}",
            "contribution": gated_part(i),
            "gate": [f"layers.{i}.attend_gate"],
        }
        branches[f"layers.{i}.feed"] = {
            "block": f"layers.{i}",
            "output_of": f"layers.{i}.feed",
            "gate": [f"layers.{i}.feed.2.weight", f"layers.{i}.feed.2.bias"],
        }
        repair[f"layers.{i}.feed"] = mute(i)
    return {
        "model": Net(),
        "args": (fixed(4, 5, WIDTH),),
        "loss_fn": squared_error(4, 2),
        "branches": branches,
        "repair": repair,
    }


@case(
    "zero_init_overwritten_by_generic_init",
    "identity",
    {
        "identity": {f"blocks.{i}": ("open", "unzeroed scale", f"blocks.{i}.expand.2.weight") for i in range(2)},
    },
    summary="The constructor zeroed the last linear; a later apply(init) redrew it with std 0.02.",
)
def overwritten():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.expand = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            zero_(*self.expand[2].parameters())

        def forward(self, x):
            return self.expand(x) + x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])
            self.head = nn.Linear(WIDTH, 2)
            self.apply(self._draw)

        @staticmethod
        def _draw(module):
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    return {
        "model": Net(),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 2),
        "branches": {
            f"blocks.{i}": {
                "block": f"blocks.{i}",
                "gate": [f"blocks.{i}.expand.2.weight", f"blocks.{i}.expand.2.bias"],
            }
            for i in range(2)
        },
    }


# --------------------------------------------------------------------------- the stream itself


@case(
    "learned_scale_sits_on_the_stream",
    "identity",
    {
        "identity": {f"blocks.{i}": ("open", "stream changed", f"blocks.{i}.alpha") for i in range(2)},
    },
    summary="alpha * x + f(x) with alpha = 0: the stream vanishes instead of the branch.",
)
def scale_on_stream():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.alpha = nn.Parameter(torch.zeros(1))
            self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

        def forward(self, x):
            return self.alpha * x + self.body(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def put_right(i):
        def repair(model):
            model.blocks[i].alpha.fill_(1.0)
            zero_(model.blocks[i].body[2].weight, model.blocks[i].body[2].bias)

        return repair

    def truth(fresh):
        check_identity(fresh)
        # silencing the branch alone leaves the block at zero: the stream is the problem
        bundle = fresh()
        model = bundle["model"]
        zero_(*model.blocks[0].body[2].parameters())
        for x, out in block_calls(model, bundle["args"], "blocks.0"):
            assert float(out.abs().max()) == 0.0
            assert float(x.abs().max()) > 0.0

    return {
        "model": Net(),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 2),
        "branches": {
            f"blocks.{i}": {
                "block": f"blocks.{i}",
                "gate": [f"blocks.{i}.body.2.weight", f"blocks.{i}.body.2.bias"],
            }
            for i in range(2)
        },
        "repair": {f"blocks.{i}": put_right(i) for i in range(2)},
        "truth": truth,
    }


@case(
    "norm_after_the_addition",
    "apply",
    {
        "identity": {"layer": ("open", "stream changed", ("layer.norm1", "layer.norm2"))},
        "gradient": {
            "layer.self_attn.out_proj.weight": "alive",
            "layer.linear2.weight": "alive",
        },
    },
    summary="Post-norm encoder layer with both branches zeroed: the norms still change the stream.",
)
def post_norm():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(5, WIDTH)
            self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True, norm_first=False)
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.head(self.layer(self.stem(x)))

    def close(model):
        layer = model.layer
        zero_(layer.self_attn.out_proj.weight, layer.self_attn.out_proj.bias)
        zero_(layer.linear2.weight, layer.linear2.bias)

    def without_norms(model):
        for norm in (model.layer.norm1, model.layer.norm2):
            norm.register_forward_hook(lambda m, inp, out: inp[0])

    return {
        "model": Net(),
        "args": (fixed(4, 6, 5),),
        "loss_fn": squared_error(4, 6, 2),
        "prepare": "apply",
        "reference_apply": close,
        "branches": {
            "layer": {
                "block": "layer",
                "gate": [f"layer.{p}.{t}" for p in ("self_attn.out_proj", "linear2") for t in ("weight", "bias")],
            }
        },
        "repair": {"layer": without_norms},
    }


@case(
    "relu_after_the_addition_right_form",
    "identity",
    {
        "identity": {f"blocks.{i}": ("closed",) for i in range(2)},
        "up_to": {f"blocks.{i}": "final activation" for i in range(2)},
        "gradient": {f"blocks.{i}.alpha": "alive" for i in range(2)},
    },
    summary="relu(x + alpha * f(x)): closed when compared with relu(x), not with x.",
)
def relu_after_add():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.alpha = nn.Parameter(torch.zeros(1))
            self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

        def forward(self, x):
            return torch.relu(x + self.alpha * self.body(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.head(self.blocks(x))

    def truth(fresh):
        default_truth(fresh)
        bundle = fresh()
        (x, out), *_ = block_calls(bundle["model"], bundle["args"], "blocks.0")
        assert not torch.equal(x, out), "the first block does change a stream with negatives"

    return {
        "model": Net(),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 2),
        "branches": {
            f"blocks.{i}": {
                "block": f"blocks.{i}",
                "skip": lambda block, x: torch.relu(x),
                "gate": [f"blocks.{i}.alpha"],
            }
            for i in range(2)
        },
        "truth": truth,
    }


@case(
    "norm_at_the_end_of_the_branch",
    "apply",
    {
        "plan": {f"blocks.{i}": [f"blocks.{i}.post.weight", f"blocks.{i}.post.bias"] for i in range(2)},
        "identity": {f"blocks.{i}": ("closed",) for i in range(2)},
        "gradient": {f"blocks.{i}.post.{p}": "alive" for i in range(2) for p in ("weight", "bias")},
        "not_gates": ["blocks.0.body.2.weight"],
    },
    summary="x + norm(f(x)): the norm's scale and shift are the gate, not the linear before it.",
)
def res_post_norm():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            self.post = nn.LayerNorm(WIDTH)
            nn.init.normal_(self.post.bias, std=1e-3)

        def forward(self, x):
            return x + self.post(self.body(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.head(self.blocks(x))

    def close(model):
        for block in model.blocks:
            zero_(block.post.weight, block.post.bias)

    return {
        "model": Net(),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 2),
        "prepare": "apply",
        "reference_apply": close,
        "branches": {
            f"blocks.{i}": {
                "block": f"blocks.{i}",
                "gate": [f"blocks.{i}.post.weight", f"blocks.{i}.post.bias"],
            }
            for i in range(2)
        },
    }


@case(
    "block_returns_a_tuple",
    "identity",
    {
        "identity": {"blocks.0": ("closed",), "blocks.1": ("open", "unzeroed scale", "blocks.1.gain")},
        "gradient": {"blocks.0.gain": "alive", "blocks.1.gain": "alive"},
    },
    summary="Blocks hand back (stream, extra): the check has to look at the first element.",
)
def tuple_output():
    class Block(nn.Module):
        def __init__(self, value: float):
            super().__init__()
            self.mix = nn.Linear(WIDTH, WIDTH)
            self.gain = nn.Parameter(torch.tensor([value]))

        def forward(self, x):
            extra = torch.softmax(self.mix(x), -1)
            return x + self.gain * extra, extra

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(0.0), Block(0.1)])
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            for block in self.blocks:
                x, _ = block(x)
            return self.head(x)

    return {
        "model": Net(),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 2),
        "branches": {f"blocks.{i}": {"block": f"blocks.{i}", "gate": [f"blocks.{i}.gain"]} for i in range(2)},
    }


# --------------------------------------------------------------------------- in place


@case(
    "in_place_add_hides_an_open_branch",
    "identity",
    {
        "identity": {
            "blocks.0": ("open", "unzeroed scale", "blocks.0.mix.weight"),
            "blocks.1": ("closed",),
        },
        "naive_deviation": 0.0,
    },
    summary="x += f(x): input and output share storage, so comparing them without a copy says 0.",
)
def in_place_add():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x):
            x += self.mix(torch.tanh(x))
            return x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.Sequential(Block(), Block())
            zero_(self.blocks[1].mix.weight)

        def forward(self, x):
            return self.blocks(self.stem(x))

    def truth(fresh):
        check_identity(fresh)
        bundle = fresh()
        seen = []
        bundle["model"].blocks[0].register_forward_hook(
            lambda m, inp, out: seen.append(float((out - inp[0]).abs().max()))
        )
        with torch.no_grad():
            bundle["model"](*bundle["args"])
        assert seen == [0.0], "a plain hook was expected to be fooled"

    return {
        "model": Net(),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, WIDTH),
        "branches": {f"blocks.{i}": {"block": f"blocks.{i}", "gate": [f"blocks.{i}.mix.weight"]} for i in range(2)},
        "truth": truth,
    }


@case(
    "in_place_relu_inside_the_branch",
    "apply",
    {
        "identity": {"block": ("closed",)},
        "gradient": {"block.b.weight": "alive", "block.b.bias": "alive"},
        "observe": {"full_backward_hooks": 0},
    },
    summary="Branch with ReLU(inplace=True) must train unchanged; module backward hooks break it.",
)
def in_place_relu():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)
            self.relu = nn.ReLU(inplace=True)
            self.b = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return x + self.b(self.relu(self.a(x)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.head(self.block(x))

    def truth(fresh):
        default_truth(fresh)
        bundle = fresh()
        bundle["model"].block.a.register_full_backward_hook(lambda *a: None)
        try:
            bundle["loss_fn"](bundle["model"](*bundle["args"])).backward()
        except RuntimeError:
            return
        raise AssertionError("a full backward hook did no harm here")

    return {
        "model": Net(),
        "args": (fixed(16, WIDTH),),
        "loss_fn": squared_error(16, 2),
        "prepare": "apply",
        "reference_apply": lambda m: zero_(m.block.b.weight, m.block.b.bias),
        "branches": {"block": {"block": "block", "gate": ["block.b.weight", "block.b.bias"]}},
        "truth": truth,
    }


# --------------------------------------------------------------------------- random depth, shortcuts


@case(
    "per_sample_drop_on_a_zeroed_branch",
    "identity",
    {
        "identity": {"block": ("closed",)},
        "gradient": {"block.last.weight": "alive", "block.last.bias": "alive"},
    },
    summary="Per-sample branch dropping with rescaling: zero divided by the keep rate is still zero.",
)
def drop_path():
    class DropSamples(nn.Module):
        def __init__(self, rate: float):
            super().__init__()
            self.keep = 1.0 - rate

        def forward(self, o):
            if not self.training:
                return o
            mask = torch.bernoulli(torch.full((len(o), 1), self.keep))
            return o * mask / self.keep

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.last = nn.Linear(WIDTH, WIDTH)
            self.drop = DropSamples(0.5)
            zero_(*self.last.parameters())

        def forward(self, x):
            return x + self.drop(self.last(torch.tanh(self.first(x))))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.head(self.block(x))

    return {
        "model": Net(),
        "args": (fixed(32, WIDTH),),
        "loss_fn": squared_error(32, 2),
        "branches": {"block": {"block": "block", "gate": ["block.last.weight", "block.last.bias"]}},
    }


@case(
    "projection_shortcut_is_the_skip",
    "apply",
    {
        "plan": {"down": ["down.bn2.weight", "down.bn2.bias"], "same": ["same.bn2.weight", "same.bn2.bias"]},
        "not_gates": ["down.shortcut.0.weight", "down.shortcut.1.weight", "down.conv2.weight"],
        "identity": {"down": ("closed",), "same": ("closed",)},
        "gradient": {
            "down.bn2.weight": "alive",
            "down.bn2.bias": "alive",
            "same.bn2.weight": "alive",
            "same.bn2.bias": "alive",
        },
    },
    summary="Strided conv block: compare with the projected input; the last BN is the gate.",
)
def projection_shortcut():
    class Residual2d(nn.Module):
        def __init__(self, c_in: int, c_out: int, stride: int):
            super().__init__()
            self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(c_out)
            self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(c_out)
            self.shortcut = nn.Sequential()
            if stride != 1 or c_in != c_out:
                self.shortcut = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))

        def forward(self, x):
            out = torch.relu(self.bn1(self.conv1(x)))
            return self.bn2(self.conv2(out)) + self.shortcut(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = Residual2d(3, 6, 2)
            self.same = Residual2d(6, 6, 1)
            self.head = nn.Linear(6, 2)

        def forward(self, x):
            return self.head(torch.relu(self.same(self.down(x))).mean((2, 3)))

    def close(model):
        for block in (model.down, model.same):
            zero_(block.bn2.weight, block.bn2.bias)

    def skip(block, x):
        return block.shortcut(x)

    return {
        "model": Net(),
        "args": (fixed(8, 3, 8, 8),),
        "loss_fn": squared_error(8, 2),
        "prepare": "apply",
        "reference_apply": close,
        "branches": {
            n: {"block": n, "skip": skip, "gate": [f"{n}.bn2.weight", f"{n}.bn2.bias"]} for n in ("down", "same")
        },
    }


# --------------------------------------------------------------------------- attention


@case(
    "attention_out_projection_never_called",
    "apply",
    {
        "plan": {"block": ["block.attn.out_proj.weight", "block.attn.out_proj.bias"]},
        "identity": {"block": ("closed",)},
        "gradient": {
            "block.attn.out_proj.weight": "alive",
            "block.attn.out_proj.bias": "alive",
        },
        "observe": {"calls_per_step": {"block.attn.out_proj": 0, "block.attn": 1}},
    },
    summary="nn.MultiheadAttention uses out_proj's tensors without calling it: zero works, hooks do not.",
)
def attention_out_proj():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            nn.init.constant_(self.attn.out_proj.bias, 0.03)

        def forward(self, x):
            y = self.norm(x)
            y, _ = self.attn(y, y, y, need_weights=False)
            return x + y

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, x):
            return self.head(self.block(x))

    def truth(fresh):
        default_truth(fresh)
        bundle = fresh()
        model = prepared(bundle)
        count = {"block.attn.out_proj": 0, "block.attn": 0}
        for name in count:
            model.get_submodule(name).register_forward_hook(lambda m, i, o, n=name: count.__setitem__(n, count[n] + 1))
        bundle["loss_fn"](model(*bundle["args"])).backward()
        assert count == bundle["expect"]["observe"]["calls_per_step"], count

    return {
        "model": Net(),
        "args": (fixed(3, 5, WIDTH),),
        "loss_fn": squared_error(3, 5, 3),
        "prepare": "apply",
        "reference_apply": lambda m: zero_(m.block.attn.out_proj.weight, m.block.attn.out_proj.bias),
        "branches": {
            "block": {
                "block": "block",
                "gate": ["block.attn.out_proj.weight", "block.attn.out_proj.bias"],
            }
        },
        "truth": truth,
    }
