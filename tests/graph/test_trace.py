import copy
import random
from collections.abc import Callable
from pathlib import Path

import networks
import numpy
import pytest
import torch
from networks import WIDTH, ConvBlock, Plain, PreNorm, stack
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lit_resinit import NoBranchError, TraceError, make_plan
from lit_resinit.graph.keep import keep_rng, keep_state
from lit_resinit.graph.trace import trace
from lit_resinit.graph.values import Graph, Node
from lit_resinit.graph.where import clean_name

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def graph_of(function: Callable[[Tensor, nn.Parameter], Tensor]) -> Graph:
    """The graph of a module that runs one function of its input and of its weight."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return function(x, self.weight)

    return trace(Net(), (X,))


def result(graph: Graph) -> Node:
    """The node that the top module returned."""
    return graph.nodes[graph.outputs[-1].nodes[0]]


def leaves(graph: Graph, node: Node) -> set[str]:
    """Names (or kinds) of the leaves behind a node."""
    stack_, found = [node], set()
    while stack_:
        current = stack_.pop()
        if not current.inputs:
            found.add(current.name or current.op)
        stack_ += [graph.nodes[i] for i in current.inputs]
    return found


# -------------------------------------------------------------------- what is recorded


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x, w: x + w, "add"),
        (lambda x, w: x - w, "add"),
        (lambda x, w: torch.addcmul(x, x, w), "add"),
        (lambda x, w: torch.lerp(x, x * w, 0.5), "add"),
        (lambda x, w: x * w, "mul"),
        (lambda x, w: x / w, "mul"),
        (lambda x, w: 3.0 * x, "scale"),
        (lambda x, w: -x, "scale"),
        (lambda x, w: x + 1.0, "shift"),
        (lambda x, w: 1.0 - x, "shift"),
        (lambda x, w: x.view(-1), "view"),
        (lambda x, w: x[:, :2], "part"),
        (lambda x, w: torch.nn.functional.layer_norm(x, (WIDTH,)), "norm"),
        (lambda x, w: torch.nn.functional.layer_norm(x, (WIDTH,), w), "mul"),
        (lambda x, w: torch.relu(x), "relu"),
    ],
)
def test_operations_are_spelled_in_their_parts(function: Callable, op: str) -> None:
    assert result(graph_of(function)).op == op


def test_subtraction_is_an_addition_of_the_negative() -> None:
    graph = graph_of(lambda x, w: x - 2.0 * w)
    left, right = (graph.nodes[i] for i in result(graph).inputs)
    assert (left.op, right.op, right.number) == ("input", "scale", -1.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (x * w).detach() + 0.0,
        lambda x, w: (x * w).view(-1).view(4, WIDTH) + 0.0,
        lambda x, w: (x * w).t().t() + 0.0,
        lambda x, w: torch.utils.checkpoint.checkpoint(lambda y: y * w, x, use_reentrant=False) + 0.0,
    ],
    ids=["detach", "view", "transpose", "checkpoint"],
)
def test_values_are_followed_through_aliases(function: Callable) -> None:
    graph = graph_of(function)
    assert leaves(graph, result(graph)) == {"input", "weight"}


def test_in_place_operations_show_in_every_view() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        view = out.view(-1)
        out.add_(x * w)
        return view * 2.0

    graph = graph_of(function)
    assert leaves(graph, result(graph)) >= {"input", "weight"}


def test_writing_into_a_part_keeps_the_rest() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        out = x.clone()
        out[:, :1] = w[:1]
        return out * 1.5

    graph = graph_of(function)
    assert leaves(graph, result(graph)) == {"input", "weight"}


def test_data_and_learned_are_told_apart() -> None:
    graph = graph_of(lambda x, w: x * torch.tanh(w))
    moving, fixed = (graph.nodes[i] for i in result(graph).inputs)
    assert (moving.data, moving.learned) == (True, False)
    assert (fixed.data, fixed.learned) == (False, True)


def test_noise_is_marked() -> None:
    graph = graph_of(lambda x, w: x + torch.randn_like(x))
    assert result(graph).noise


def test_operations_know_their_module_and_line() -> None:
    graph = trace(stack(Plain), (X,))
    sums = [n.index for n in graph.nodes if n.op == "add" and graph.owner(n.index) in ("0", "1")]
    assert [graph.owner(n) for n in sums] == ["0", "1"]
    lines = Path(networks.__file__).read_text().splitlines()
    for node in sums:
        file, _, line = graph.source(node).rpartition(":")
        assert file == networks.__file__
        assert lines[int(line) - 1].strip() == "return x + self.f(x)"


def test_a_forward_called_directly_still_has_its_owner() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Plain()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner.forward(x)

    graph = trace(Direct(), (X,))
    assert graph.executed["inner"] == 1


def test_a_backward_inside_the_forward_is_left_out() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = (x * w).exp().sum()
        y.backward()
        return x * w

    assert [n.op for n in graph_of(function).nodes if n.op == "exp"] == ["exp"]


def test_names_of_compiled_modules_are_those_of_the_state_dict() -> None:
    graph = trace(torch.compile(stack(Plain), backend="eager"), (X,))
    assert {n.name for n in graph.nodes if n.op == "parameter"} == set(stack(Plain).state_dict())
    assert clean_name("_orig_mod.a._orig_mod.b") == "a.b"
    assert clean_name("a._orig_mod") == "a"


# -------------------------------------------------------------------- no trace


class Everything(nn.Module):
    """All that a forward can change: buffers, a metric, a counter, flags, random numbers."""

    def __init__(self, look: bool = False) -> None:
        super().__init__()
        self.conv, self.drop = ConvBlock(3, 3), nn.Dropout(0.5)
        self.metric, self.calls, self.cache, self.look = MeanMetric(), 0, [], look
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        self.cache = [*self.cache, 1]
        random.random()
        numpy.random.rand()
        x = self.drop(self.conv(x))
        self.metric.update(x.detach().mean())
        if self.look and x.mean() > 1e9:
            return x
        return x


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


def test_keep_rng_covers_torch_python_and_numpy() -> None:
    before = torch.rand(1), random.random(), numpy.random.rand()
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    with keep_rng():
        first = torch.rand(1), random.random(), numpy.random.rand()
    assert (torch.rand(1), random.random(), numpy.random.rand()) == first != before


def test_keep_state_survives_an_exception() -> None:
    model = Everything()

    def change() -> None:
        model.seen += 1
        model.calls = 7
        model.eval()
        model.conv.bn1.weight.grad = torch.ones(3)
        raise KeyError

    with pytest.raises(KeyError), keep_state(model):
        change()
    assert (float(model.seen), model.calls, model.training, model.conv.training) == (0.0, 0, True, True)
    assert model.conv.bn1.weight.grad is None


@pytest.mark.parametrize(
    ("function", "steps"),
    [
        (lambda z: z + 1j, ["shift"]),
        (lambda z: z - 1j, ["shift"]),
        (lambda z: 2 - z, ["scale", "shift"]),
        (lambda z: z.sub(z.conj().resolve_conj(), alpha=1j), ["scale", "add"]),
        (lambda z: z.add(z.roll(1), alpha=2), ["scale", "add"]),
    ],
)
def test_numbers_added_are_shifts_whatever_their_kind(function: Callable[[Tensor], Tensor], steps: list[str]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, z: Tensor) -> Tensor:
            return function(z * self.weight)

    graph = trace(Net(), (torch.randn(2, 3, dtype=torch.complex64),))
    assert [n.op for n in graph.nodes if n.op in ("shift", "scale", "add")] == steps
    with pytest.raises(NoBranchError):
        make_plan(Net(), torch.randn(2, 3, dtype=torch.complex64))


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
