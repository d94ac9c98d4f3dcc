"""Everything that objects hold is put back, however deep it lies."""

import collections
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from networks import WIDTH, Plain, stack
from torch import Tensor, nn

from lit_resinit import apply_, check_identity, make_plan
from lit_resinit.graph.keep import Kept, keep_state
from lit_resinit.graph.record import Recorder

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Holder:
    """A plain object, with everything a state can be made of."""

    def __init__(self) -> None:
        self.number, self.nested = 0, {"a": [1, {"b": [2]}]}
        self.queue, self.ordered = collections.deque([1, 2], maxlen=2), collections.OrderedDict(a=1)
        self.tensor, self.array, self.names = torch.zeros(3), numpy.zeros(3), {"x"}
        self.generator, self.random = torch.Generator().manual_seed(1), random.Random(1)
        self.numpy, self.slotted = numpy.random.default_rng(1), Slotted()
        self.counts: collections.defaultdict[str, list[int]] = collections.defaultdict(list)

    def change(self) -> None:
        self.number += 1
        self.nested["a"][1]["b"].append(3)  # type: ignore[index]
        self.queue.append(3)
        self.ordered["z"] = self.ordered.pop("a")
        self.tensor.add_(1.0)
        self.array += 1.0
        self.names.add("y")
        self.counts["new"].append(1)
        self.slotted.count += 1
        self.extra = 1

    def seen(self) -> Any:
        draws = torch.rand(1, generator=self.generator).item(), self.random.random(), self.numpy.random()
        state = self.number, self.nested, list(self.queue), list(self.ordered), self.tensor.tolist(), sorted(self.names)
        return repr((state, self.array.tolist(), dict(self.counts), self.slotted.count, hasattr(self, "extra"), draws))


@pytest.mark.parametrize("data", [True, False])
def test_every_kind_of_state_is_put_back(data: bool) -> None:
    holder, untouched = Holder(), Holder()
    kept = Kept({"deep": [(holder,)]}, data=data)
    holder.change()
    holder.seen()
    kept.put_back()
    assert holder.seen() == untouched.seen()
    assert not kept.streams


def test_what_a_function_remembers_is_put_back_below_data() -> None:
    count = 0

    def counting() -> int:
        nonlocal count
        count += 1
        return count

    kept = Kept(functools.partial(counting), data=True)
    counting()
    kept.put_back()
    assert counting() == 1


@pytest.mark.parametrize(
    ("build", "moves"),
    [
        (lambda: iter([1]), True),
        (lambda: (i for i in range(3)), True),
        (lambda: open(__file__), True),  # noqa: SIM115 - closed below
        (lambda: [1, (2, "x")], False),
        (Holder, False),
    ],
    ids=["iterator", "generator", "file", "containers", "object"],
)
def test_what_moves_on_is_told(build: Callable[[], Any], moves: bool) -> None:
    value = build()
    assert bool(Kept({"below": value}, data=True).streams) == moves
    if hasattr(value, "close"):
        value.close()


def test_large_data_are_not_copied() -> None:
    large = torch.zeros(2000)
    kept = Kept([large], data=True)
    large.add_(1.0)
    kept.put_back()
    assert float(large[0]) == 1.0


class Writes(nn.Module):
    """A forward that writes what it likes, in one of the ways there are."""

    def __init__(self, write: Callable[["Writes"], object]) -> None:
        super().__init__()
        self.net, self.write = stack(Plain), write
        self.past: collections.deque[Tensor] = collections.deque(maxlen=3)
        self.table: dict[str, dict[str, list[int]]] = {"a": {"b": []}}
        self.total = torch.zeros(2)
        self.first = self.net[0].f[0]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self)
        y: Tensor = self.net(x)
        return y if y.sum().item() < 1e9 else x  # looks at a value, so that the forward has to be a real one


WAYS: dict[str, Callable[[Writes], object]] = {
    "in place": lambda m: m.first.weight.mul_(0.5),
    "through data": lambda m: m.first.weight.data.clamp_(-0.01, 0.01),
    "other memory": lambda m: setattr(m.first.weight, "data", torch.ones_like(m.first.weight)),
    "a view": lambda m: m.first.weight[0].zero_(),
    "frozen": lambda m: m.first.weight.requires_grad_(False),
    "another parameter": lambda m: setattr(m.first, "weight", nn.Parameter(torch.ones_like(m.first.weight))),
    "deque": lambda m: m.past.append(torch.ones(1)),
    "nested": lambda m: m.table["a"]["b"].append(1),
    "tensor attribute": lambda m: m.total.add_(1.0),
    "several": lambda m: torch._foreach_mul_(list(m.net.parameters()), 0.5),
}


def state_of(model: Writes) -> Any:
    values = {n: v.clone() for n, v in model.state_dict().items()}, model.total.clone()
    return values, repr((model.past, model.table, [p.requires_grad for p in model.parameters()]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("copies", [True, False], ids=["copied", "in place"])
def test_planning_undoes_what_a_forward_writes(way: str, copies: bool) -> None:
    model = Writes(WAYS[way])
    if not copies:  # a function that remembers the model makes the original run
        model.net.register_forward_hook(lambda module, args, out, first=model.first: out + 0.0 * first.weight.sum())
    ids = [id(p) for p in model.parameters()]
    before, written = state_of(model), state_of(model)
    assert len(make_plan(model, X)) == 2
    written = state_of(model)
    assert written[1] == before[1]
    assert all(torch.equal(v, before[0][0][n]) for n, v in written[0][0].items())
    assert torch.equal(written[0][1], before[0][1])
    assert [id(p) for p in model.parameters()] == ids
    model(X)
    assert repr(state_of(model)) != repr(before), "the forward does write"


@pytest.mark.parametrize("way", WAYS)
def test_the_identity_check_undoes_what_its_forward_writes(way: str) -> None:
    model = Writes(lambda _: None)
    plan = make_plan(model, X)
    apply_(model, plan)
    model.write = WAYS[way]
    before = state_of(model)
    check_identity(model, plan, X)
    after = state_of(model)
    assert after[1] == before[1]
    assert all(torch.equal(v, before[0][0][n]) for n, v in after[0][0].items())
    assert torch.equal(after[0][1], before[0][1])


def test_parameters_are_copied_when_an_operation_is_to_write_them() -> None:
    layer, other = nn.Linear(3, 3), nn.Linear(3, 3)
    before = [p.clone() for p in layer.parameters()]
    kept = Kept(layer, other, later=[*layer.parameters(), *other.parameters()])
    other.weight.data.add_(1.0)  # which nobody announced: it is the announced ones that are copied
    moved = other.weight.clone()
    with Recorder(layer, before_write=kept.before_write), torch.no_grad():
        layer.weight[1:].mul_(2.0)
        torch.add(torch.ones(3), 1.0, out=layer.bias)
    assert not torch.equal(layer.weight, before[0])
    kept.put_back()
    assert all(torch.equal(p, b) for p, b in zip(layer.parameters(), before, strict=True))
    assert torch.equal(other.weight, moved)


def test_gradients_in_place_are_put_back() -> None:
    model = stack(Plain)
    model(X).sum().backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with keep_state(model):
        model(X).sum().backward()
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(b, a) for b, a in zip(before, after, strict=True))


class ActNorm(nn.Module):
    """Sets its scale and shift from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("done", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.done:
            with torch.no_grad():
                scale = 1.0 / (x.std(0) + 1e-6)
                self.scale.copy_(scale)
                self.shift.copy_(-x.mean(0) * scale)
                self.done.fill_(True)
        return x * self.scale + self.shift


def test_initialisation_from_data_does_not_happen_in_planning() -> None:
    class Block(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.f(x))

        norm = property(lambda self: self._modules["norm_"])

    block = Block()
    block.add_module("norm_", ActNorm())
    make_plan(nn.Sequential(block, Plain()), X)
    assert not block.norm.done
    assert torch.equal(block.norm.scale.detach(), torch.ones(WIDTH))


def test_dictionaries_with_tensors_as_keys_are_compared_by_identity() -> None:
    module = nn.Linear(2, 2)
    module.state = {module.weight: torch.ones(2), module.bias: torch.ones(2)}  # as the state of an optimizer
    with keep_state(module):
        module.state[torch.ones(3)] = torch.ones(1)
    assert list(map(id, module.state)) == [id(module.weight), id(module.bias)]
