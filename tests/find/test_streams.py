"""Several streams at once: couplings that update each other, graph layers, positions, parts written in place."""

from collections.abc import Callable

import pytest
import torch
from networks import WIDTH, Plain, PreNorm, mlp
from torch import Tensor, nn

from lit_resinit import NoBranchError, apply_, check_identity, make_plan
from lit_resinit.find.branches import find_additions
from lit_resinit.graph.trace import trace

DEPTH = 3


class Coupling(nn.Module):
    """RevNet's block: two streams, each reads the other."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = mlp(), mlp()

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, b = pair
        a = a + self.f(b)
        return a, b + self.g(a)


class Joined(Coupling):
    """The same on one tensor, cut and put together again in every block."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        a, b = super().forward(x.chunk(2, dim=-1))  # type: ignore[arg-type]
        return torch.cat([a, b], dim=-1)


class Stacked(Coupling):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.stack(super().forward(x.unbind(1)), dim=1)  # type: ignore[arg-type]


class Pairs(nn.Module):
    """Both streams start as the halves of the input, or both as the input itself (Reformer)."""

    def __init__(self, doubled: bool) -> None:
        super().__init__()
        self.doubled = doubled
        self.blocks = nn.ModuleList(Coupling() for _ in range(DEPTH))
        self.head = nn.Linear(2 * WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        pair = (x, x) if self.doubled else x.chunk(2, dim=-1)
        for block in self.blocks:
            pair = block(pair)
        return self.head(torch.cat(pair, dim=-1))


class Additive(nn.Module):
    """NICE's coupling: one half changes in each block."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned, self.f = turned, mlp()

    def forward(self, x: Tensor) -> Tensor:
        fixed, moved = reversed(x.chunk(2, dim=-1)) if self.turned else x.chunk(2, dim=-1)
        moved = moved + self.f(fixed)
        return torch.cat([moved, fixed] if self.turned else [fixed, moved], dim=-1)


COUPLED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "pair": (lambda: Pairs(False), (4, 2 * WIDTH), 2 * DEPTH),
    "one start": (lambda: Pairs(True), (4, WIDTH), 2 * DEPTH),
    "concatenated": (lambda: nn.Sequential(*(Joined() for _ in range(DEPTH))), (4, 2 * WIDTH), 2 * DEPTH),
    "stacked": (lambda: nn.Sequential(*(Stacked() for _ in range(DEPTH))), (4, 2, WIDTH), 2 * DEPTH),
    "additive": (lambda: nn.Sequential(*(Additive(i % 2 == 1) for i in range(DEPTH))), (4, 2 * WIDTH), DEPTH),
}


@pytest.mark.parametrize("name", COUPLED)
def test_streams_that_update_each_other_are_closed_as_a_whole(name: str) -> None:
    build, shape, count = COUPLED[name]
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(build(), nn.Linear(2 if name in ("pair", "one start") else shape[-1], 2)),
        torch.randn(shape),
    )
    plan = make_plan(model, x)
    assert len(plan) == count
    assert all(b.skip == "identity" for b in plan.branches)
    apply_(model, plan)
    check_identity(model, plan, x).raise_if_open()


class Mixed(nn.Module):
    """A sum that ends in a layer is no stream (Res2Net): nothing goes on from the part itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        a = self.first(a)
        return torch.cat([a, self.second(a + b)], dim=-1)


def test_sum_of_two_parts_inside_a_branch_is_none() -> None:
    assert not find_additions(trace(nn.Sequential(Mixed(), Mixed()), (torch.randn(4, 2 * WIDTH),)))


def test_parts_of_a_concatenation_are_told_apart() -> None:
    class Towers(nn.Module):
        """Two inputs through one layer norm as one batch: neither is computed from the other."""

        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = mlp(), mlp()

        def forward(self, x: Tensor) -> Tensor:
            a, b = torch.cat([self.left(x), self.right(x)]).chunk(2)
            return a + b.tanh()

    assert [a.projection for a in find_additions(trace(Towers(), (torch.randn(4, WIDTH),)))] == []


class Aggregating(nn.Module):
    """A layer on graphs: every node sums what a linear layer makes of its neighbours."""

    def __init__(self, own: bool, curved: bool = False) -> None:
        super().__init__()
        self.neighbours = nn.Linear(WIDTH, WIDTH)
        self.own = nn.Linear(WIDTH, WIDTH) if own else nn.Identity()
        self.curved = curved

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.arange(len(x)).roll(1)
        messages = self.neighbours(x)[ends]
        messages = messages.tanh() if self.curved else messages
        return self.own(x) + torch.zeros_like(x).index_add(0, ends.flip(0), messages)


class GraphNet(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def test_two_linear_maps_of_a_node_and_its_neighbours_are_one_layer() -> None:
    with pytest.raises(NoBranchError):
        make_plan(GraphNet(Aggregating(own=True), Aggregating(own=True)), torch.randn(5, WIDTH))


@pytest.mark.parametrize(("own", "skip"), [(True, "projection"), (False, "identity")])
def test_messages_through_a_function_are_a_branch(own: bool, skip: str) -> None:
    plan = make_plan(GraphNet(*(Aggregating(own, curved=True) for _ in range(2))), torch.randn(5, WIDTH))
    assert [b.skip for b in plan.branches] == [skip, skip]


class Logits(nn.Module):
    """Attention on a graph: what two ends of an edge score is added, and the largest score subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(WIDTH, WIDTH)
        self.source, self.target = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h, ends = self.value(x), torch.arange(len(x)).roll(1)
        score = (h * self.source).sum(-1)[ends] + (h * self.target).sum(-1)
        score = nn.functional.leaky_relu(score, 0.2)
        largest = torch.full_like(score, -1e9).scatter_reduce(0, ends, score.detach(), "amax")
        weight = (score - largest[ends]).exp()
        return h[ends] * weight[:, None]


def test_scores_of_graph_attention_are_no_branches() -> None:
    with pytest.raises(NoBranchError):
        make_plan(GraphNet(Logits(), Logits()), torch.randn(5, WIDTH))


def test_scaled_views_of_one_value_are_no_branch() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.a * x + self.b * x.mean(0)

    with pytest.raises(NoBranchError):
        make_plan(nn.Sequential(Views(), nn.Linear(WIDTH, 2)), torch.randn(4, WIDTH))


class SharedActivation(nn.Module):
    """A layer whose activation is one object in every layer, as a default argument is."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.f, self.g, self.own, self.activation = *(nn.Linear(WIDTH, WIDTH) for _ in range(3)), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) + self.g(self.activation(self.f(x)))


def test_shared_module_counts_as_inside_every_block() -> None:
    shared = nn.Tanh()
    model = nn.Sequential(*(m for _ in range(3) for m in (SharedActivation(shared), nn.ReLU())), nn.Linear(WIDTH, 2))
    plan = make_plan(model, torch.randn(4, WIDTH))
    assert [(b.name, b.skip) for b in plan.branches] == [(n, "projection") for n in ("0", "2", "4")]


class TwoWay(nn.Module):
    """Two streams that attend to each other; the start of each is added again for one reader (a position)."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = mlp(), mlp()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, q: Tensor, k: Tensor, place_q: Tensor, place_k: Tensor) -> tuple[Tensor, Tensor]:
        q = self.norms[0](q + self.queries((q + place_q) * (k + place_k)))
        return q, self.norms[1](k + self.keys((k + place_k) * (q + place_q)))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last, self.head = nn.ModuleList(TwoWay() for _ in range(2)), mlp(), nn.Linear(WIDTH, 2)

    def forward(self, points: Tensor, image: Tensor) -> Tensor:
        q, k = points, image
        for layer in self.layers:
            q, k = layer(q, k, points, image)
        return self.head(q + self.last((q + points) * (k + image)))


def test_positions_added_for_one_reader_are_no_branches() -> None:
    plan = make_plan(Decoder(), (torch.randn(4, WIDTH), torch.randn(4, WIDTH)))
    names = [f"layers.{i}.{n}" for i in range(2) for n in ("queries", "keys")]
    assert [b.name for b in plan.branches] == [*names, "(root)"]


class Written(Plain):
    """Only some rows are updated, in place."""

    def forward(self, x: Tensor) -> Tensor:
        rows, y = torch.tensor([0, 2]), x.clone()
        y[rows] += self.f(x[rows])
        return y


@pytest.mark.parametrize("head", [True, False])
def test_rows_written_in_place_are_found_with_and_without_a_head(head: bool) -> None:
    model = nn.Sequential(Written(), Written(), *([nn.Linear(WIDTH, 2)] if head else []))
    assert [b.name for b in make_plan(model, torch.randn(4, WIDTH)).branches] == ["0", "1"]


class Biased(Plain):
    """A learned factor and bias on the skip, at one and zero."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.bias) * self.factor + self.f(x)


def test_bias_on_the_skip_is_part_of_the_stream() -> None:
    model, x = nn.Sequential(Biased(), Biased(), nn.Linear(WIDTH, 2)), torch.randn(4, WIDTH)
    plan = make_plan(model, x)
    assert [(b.name, b.skip, b.factor) for b in plan.branches] == [(n, "identity", (f"{n}.factor",)) for n in "01"]
    apply_(model, plan)
    assert check_identity(model, plan, x).ok


class Slices(nn.Module):
    """Two parts of one tensor are updated in place, each by what the whole was."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f, self.g = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        h, y = self.norm(x), x.clone()
        y[:, : WIDTH // 2] += self.f(h).tanh()
        y[:, WIDTH // 2 :] += self.g(h).tanh()
        return y


class Halves(Slices):
    """Two halves update each other in place."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(WIDTH // 2, WIDTH // 2), nn.Linear(WIDTH // 2, WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, : WIDTH // 2] += self.f(x[:, WIDTH // 2 :].clone()).tanh()
        x[:, WIDTH // 2 :] += self.g(x[:, : WIDTH // 2].clone()).tanh()
        return x


@pytest.mark.parametrize("block", [Slices, Halves])
def test_two_parts_written_in_place_are_two_branches(block: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(block(), block(), nn.Linear(WIDTH, 2)), torch.randn(4, WIDTH)
    plan = make_plan(model, x)
    assert [b.name for b in plan.branches] == ["0.f", "0.g", "1.f", "1.g"]
    apply_(model, plan)
    assert check_identity(model, plan, x).ok


class Masked(Plain):
    """Numbers are written into a part of the branch or of the stream."""

    def __init__(self, stream: bool) -> None:
        super().__init__()
        self.stream = stream

    def forward(self, x: Tensor) -> Tensor:
        if self.stream:
            x = x.clone()
            x[:, 0] = 0.0
            return x + self.f(x)
        y = self.f(x)
        y[:, 0] = 0.0
        return x + y


@pytest.mark.parametrize("stream", [True, False])
def test_numbers_written_into_a_part_leave_the_rest_what_it_was(stream: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Masked(stream), Masked(stream), nn.Linear(WIDTH, 2)), torch.randn(4, WIDTH)
    plan = make_plan(model, x)
    assert [b.name for b in plan.branches] == ["0", "1"]
    apply_(model, plan)
    assert check_identity(model, plan, x).ok


class Shifted(nn.Module):
    """Tokens are shifted to the right, as the input of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(9, WIDTH), nn.Sequential(PreNorm(), PreNorm())

    def forward(self, tokens: Tensor) -> Tensor:
        shifted = torch.zeros_like(tokens)
        shifted[:, 1:] = tokens[:, :-1].clone()
        shifted[:, 0] = 1
        return self.blocks(self.embedding(shifted))


def test_shifted_tokens_are_no_sign_of_training() -> None:
    model, tokens = Shifted(), torch.randint(9, (2, 5))
    plan = make_plan(model, tokens)
    assert [b.norms for b in plan.branches] == [(f"blocks.{i}.norm.weight",) for i in range(2)]
    apply_(model, plan)


class Queries(nn.Module):
    """Learned queries read the data: their stream is no data until they did (DETR, Perceiver)."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(0.02 * torch.randn(3, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.own, self.cross = (nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
        self.f, self.head = mlp(), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        places = self.queries.expand(len(x), -1, -1)
        y = torch.zeros_like(places)
        y = self.norms[0](y + self.own(y + places, y + places, y)[0])
        y = self.norms[1](y + self.cross(y + places, x, x)[0])
        return self.head(self.norms[2](y + self.f(y)))


def test_stream_of_learned_queries_is_a_stream() -> None:
    torch.manual_seed(0)
    model, x = Queries(), torch.randn(2, 5, WIDTH)
    plan = make_plan(model, x)
    assert [g.module for b in plan.branches for g in b.gates] == ["own", "cross", "f"]
    assert {n for b in plan.branches for n in b.norms} <= {f"norms.{i}.weight" for i in range(3)}
    apply_(model, plan)
    assert check_identity(model, plan, x).ok


class Mixing(nn.Module):
    """Every block reads a learned mix of the stream and its start."""

    def __init__(self, kept: float) -> None:
        super().__init__()
        self.norm, self.blocks, self.head = nn.LayerNorm(WIDTH), nn.ModuleList(), nn.Linear(WIDTH, 2)
        self.stream, self.start = nn.ParameterList(), nn.ParameterList()
        for _ in range(DEPTH):
            self.blocks.append(Plain())
            self.stream.append(nn.Parameter(torch.ones(())))
            self.start.append(nn.Parameter(torch.full((), kept)))

    def forward(self, x: Tensor) -> Tensor:
        x = start = self.norm(x)
        for block, a, b in zip(self.blocks, self.stream, self.start, strict=True):
            x = block(a * x + b * start)
        return self.head(x)


@pytest.mark.parametrize("kept", [0.0, 0.1])
def test_mix_of_the_stream_and_its_start_is_no_branch(kept: float) -> None:
    assert [b.name for b in make_plan(Mixing(kept), torch.randn(4, WIDTH)).branches] == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]


class Exits(nn.Module):
    """What heads on every layer say is added up."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(DEPTH))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = layer(x)
            total = total + head(x)
        return total


def test_sum_of_heads_is_no_stream() -> None:
    with pytest.raises(NoBranchError):
        make_plan(Exits(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())), torch.randn(4, WIDTH))
    assert [b.name for b in make_plan(Exits(Plain), torch.randn(4, WIDTH)).branches] == [
        f"layers.{i}" for i in range(3)
    ]


def test_two_streams_that_read_each_other_inside_a_parent_are_named_and_closed() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            return u + self.f(torch.cat([u, v], -1))

    class Streams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.ModuleList([Cross(), Cross()])
            self.b = nn.ModuleList([Cross(), Cross()])
            self.head = nn.Linear(2 * WIDTH, 2)

        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            for p, q in zip(self.a, self.b, strict=True):
                u, v = p(u, v), q(v, u)
            return self.head(torch.cat([u, v], -1))

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Streams()

        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            return self.net(u, v)

    model, inputs = Parent(), (torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    plan = make_plan(model, inputs)
    assert sorted(b.name for b in plan.branches) == ["net.a.0", "net.a.1", "net.b.0", "net.b.1"]
    assert check_identity(apply_(model, plan), plan, inputs).ok
