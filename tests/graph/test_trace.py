"""One forward as a graph: fake where that goes, and nothing left behind."""

import copy
import random
from collections.abc import Callable

import numpy
import pytest
import torch
from graphs import Everything, X
from networks import WIDTH, Plain, PreNorm
from torch import Tensor, nn

from lit_resinit import TraceError, make_plan
from lit_resinit.graph.trace import trace

# -------------------------------------------------------------------- no trace


@pytest.mark.parametrize("look", [False, True], ids=["fake", "real"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.filterwarnings("ignore:The ``compute`` method:UserWarning")  # a metric that nothing updated
def test_tracing_leaves_nothing_behind(look: bool, training: bool) -> None:
    model, x = Everything(look).train(training), torch.randn(2, 3, 5, 5)
    model.drop.train(not training)
    before = copy.deepcopy(model)
    states = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    graph = trace(model, (x,))
    assert any(n.op == "conv" for n in graph.nodes)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), str(numpy.random.get_state()))
    assert all(torch.equal(v, before.state_dict()[n]) for n, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert (model.calls, model.cache) == (0, [])
    assert torch.equal(model.metric.mean_value, before.metric.mean_value)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_fake_trace_computes_nothing() -> None:
    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x.expand(2**20, 2**20).clone().sum()

    assert any(n.op == "sum" for n in trace(Huge(), (torch.ones(1),)).nodes)


def test_control_flow_on_values_takes_the_real_path() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(self.weight * x) if bool((x > 0).all()) else torch.cos(self.weight * x)

    assert "exp" in {n.op for n in trace(Looks(), (torch.ones(2),)).nodes}
    assert "cos" in {n.op for n in trace(Looks(), (-torch.ones(2),)).nodes}


def test_inputs_are_not_changed() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            x.add_(1.0)
            return self.weight * x if bool(x.sum() > 0) else x

    x = torch.zeros(3)
    trace(Writes(), (x,))
    assert not x.any()


def test_evaluation_mode_is_traced_as_training() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True).eval()
    graph = trace(layer, (torch.randn(2, 3, WIDTH),))
    assert not layer.training
    assert not [n for n in graph.nodes if n.op == "_transformer_encoder_layer_fwd"]
    assert any(n.noise for n in graph.nodes), "dropout draws"


# -------------------------------------------------------------------- errors


def test_failing_forward_keeps_the_model_and_its_own_error() -> None:
    class Breaks(Everything):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise KeyError("of the forward")

    model = Breaks()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TraceError, match="of the forward") as caught:
        trace(model, (torch.randn(2, 3, 5, 5),))
    assert isinstance(caught.value.__cause__, KeyError)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert (model.calls, model.cache) == (0, [])
    assert not torch.nn.modules.module._global_forward_hooks
    assert torch._C._len_torch_dispatch_stack() == 0


def test_wrong_shape_is_told_with_the_shapes() -> None:
    with pytest.raises(TraceError, match=r"\(4, 3\)"):
        trace(nn.Linear(2, 2), (torch.ones(4, 3),))


# -------------------------------------------------------------------- guards


class Skipped(nn.Module):
    """Layers are skipped at random, one lot each."""

    def __init__(self, draw: Callable[[], float], depth: int, keeps: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Plain() for _ in range(depth))
        self.draw, self.keeps = draw, keeps

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if (self.draw() < 0.5) == self.keeps:
                x = layer(x)
        return x


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(
    "draw", [lambda: torch.rand([]), lambda: torch.rand(1).item(), random.random, lambda: numpy.random.uniform(0, 1)]
)
def test_layers_that_lots_decide_upon_are_all_seen(draw: Callable[[], float], keeps: bool) -> None:
    model = Skipped(draw, 40, keeps)
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert len(make_plan(model, X)) == 40
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())


def test_a_loop_that_waits_for_a_lot_comes_to_its_end() -> None:
    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Plain()

        def forward(self, x: Tensor) -> Tensor:
            while random.random() > 0.5 or torch.rand(()) > 0.5:
                pass
            while random.random() < 0.5 or torch.rand(()) < 0.5:
                pass
            return self.block(x)

    assert len(make_plan(Waiting(), X)) == 1


class Remembering(nn.Module):
    """A function kept as an attribute, which a copy of the module shares with it."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.f, self.scale = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), nn.Parameter(torch.ones(1))
        self.runs = 0
        self.op = lambda x: x + self.f(x) * self.scale if not looks or x.sum() < 1e9 else x

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.op(x)


def replaced() -> nn.Module:
    block = Plain()
    block.forward = lambda x, old=block.forward: old(old(x))  # type: ignore[method-assign]
    return block


@pytest.mark.parametrize(
    ("build", "count"),
    [(lambda: Remembering(False), 1), (lambda: Remembering(True), 1), (replaced, 2)],
    ids=["attribute", "attribute that looks at values", "replaced forward"],
)
def test_code_that_remembers_the_original_is_traced_there(build: Callable[[], nn.Module], count: int) -> None:
    model = nn.Sequential(Plain(), build(), nn.Linear(WIDTH, 2))
    before, runs = copy.deepcopy(model.state_dict()), getattr(model[1], "runs", 0)
    plan = make_plan(model, X)
    assert len(plan) == 1 + count
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert getattr(model[1], "runs", 0) == runs


@pytest.mark.parametrize("draw", [lambda: __import__("random").random(), lambda: torch.rand(()).item()])
def test_layers_that_are_skipped_at_random_are_all_planned(draw: Callable[[], float]) -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([PreNorm() for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                if draw() > 0.3:
                    x = block(x)
            return x

    assert len(make_plan(Dropped(), torch.randn(4, WIDTH))) == 3
