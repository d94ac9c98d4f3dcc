"""Small trainings whose branches are ranked: networks, data, and what is measured of each on the way.

The data are real and ship with packages: scikit-learn's digits, and the text of Python's own language reference
(``pydoc_data.topics``), learned character by character.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.data import digits
from lit_resinit import Attribution, History, ResidualPlan, apply_, attribute, make_plan, watch
from lit_resinit.watch.losses import evaluating, parameters_of
from lit_resinit.watch.usefulness import ablate

BATCH, HELD, TRUTH = 64, 240, 240  # samples: of a step, for the methods, for the truth
WIDTH, CONTEXT = 32, 16
Batch = tuple[Tensor, Tensor]


# -------------------------------------------------------------------- networks


class Block(nn.Module):
    """``x + f(norm(x))``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class ConvBlock(nn.Module):
    """Two convolutions with batch norm, and a projection where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        same = inputs == outputs and stride == 1
        projection = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.skip = nn.Identity() if same else projection

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.skip(x) + self.body(x))


def mlp(blocks: int) -> nn.Module:
    """A residual MLP on 64 pixels."""
    head = (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10))
    return nn.Sequential(nn.Linear(64, WIDTH), *(Block() for _ in range(blocks)), *head)


def resnet(blocks: int) -> nn.Module:
    """A ResNet on 8 by 8 pixels; half of the blocks at 8 by 8 with 8 channels, half at 4 by 4 with 16."""
    first, second = blocks - blocks // 2, blocks // 2
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        *(ConvBlock(8, 8, 1) for _ in range(first)), ConvBlock(8, 16, 2),
        *(ConvBlock(16, 16, 1) for _ in range(second - 1)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


class Language(nn.Module):
    """A pre-norm transformer that predicts the next character."""

    def __init__(self, layers: int, characters: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(characters, WIDTH), nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        for own in self.body.layers:  # copies of one layer start equal
            for module in own.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
                elif hasattr(module, "_reset_parameters"):
                    module._reset_parameters()
        self.head = nn.Linear(WIDTH, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.token(x) + self.place, mask=self.mask, is_causal=True)).transpose(1, 2)


# -------------------------------------------------------------------- data


@dataclasses.dataclass(frozen=True)
class Data:
    """Inputs and targets to train on, for the methods, and for the truth, each sample in one of them."""

    train: Batch
    held: Batch
    truth: Batch
    kinds: int

    def step(self, generator: torch.Generator) -> Batch:
        chosen = torch.randint(len(self.train[0]), (BATCH,), generator=generator)
        return self.train[0][chosen], self.train[1][chosen]


@functools.cache
def images() -> Data:
    x, y, truth_x, truth_y = digits()
    return Data((x[HELD:], y[HELD:]), (x[:HELD], y[:HELD]), (truth_x[:TRUTH], truth_y[:TRUTH]), 10)


@functools.cache
def text() -> Data:
    """Windows of the reference's first 200,000 characters; nine tenths to train on, the rest never seen."""
    from pydoc_data.topics import topics

    whole = "\n".join(topics[name] for name in sorted(topics))[:200_000]
    known = sorted(set(whole))
    place = {c: i for i, c in enumerate(known)}
    codes = torch.tensor([place[c] for c in whole])

    def windows(part: Tensor, step: int) -> Batch:
        rows = part.unfold(0, CONTEXT + 1, step)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    cut = 9 * len(codes) // 10
    x, y = windows(codes[cut:], CONTEXT)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held, truth = order[:HELD], order[HELD : HELD + TRUTH]
    return Data(windows(codes[:cut], 7), (x[held], y[held]), (x[truth], y[truth]), len(known))


# -------------------------------------------------------------------- settings


@dataclasses.dataclass(frozen=True)
class Setting:
    """A network, its gates, an optimizer, and how long it trains."""

    network: str
    optimizer: str
    rate: float
    steps: int
    warm_up: int = 0
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.network}, {self.optimizer}{self.note}"

    def build(self) -> tuple[nn.Module, Data]:
        if self.network.startswith("MLP"):
            return mlp(int(self.network.split()[1])), images()
        if self.network.startswith("ResNet"):
            return resnet(int(self.network.split()[1])), images()
        return Language(int(self.network.split()[1]) // 2, text().kinds), text()

    def trainer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "AdamW":
            return torch.optim.AdamW(model.parameters(), lr=self.rate, weight_decay=0.0)
        return torch.optim.SGD(model.parameters(), lr=self.rate, momentum=0.9 if self.optimizer == "momentum" else 0.0)


SETTINGS = (
    *(Setting("MLP 12", o, r, 400) for o, r in (("SGD", 0.1), ("momentum", 0.02), ("AdamW", 1e-3))),
    *(Setting("MLP 24", o, r, 400) for o, r in (("SGD", 0.05), ("momentum", 0.01), ("AdamW", 1e-3))),
    *(Setting("ResNet 8", o, r, 300) for o, r in (("SGD", 0.1), ("momentum", 0.02), ("AdamW", 2e-3))),
    *(Setting("Language 8", o, r, 400) for o, r in (("SGD", 0.3), ("momentum", 0.05), ("AdamW", 2e-3))),
    Setting("MLP 12", "SGD", 0.01, 1000, note=", a tenth of the rate"),
    Setting("MLP 12", "AdamW", 1e-3, 400, warm_up=200, note=", warm-up"),
)
STAGES = {"early": 0.1, "mid": 0.4, "end": 1.0}  # parts of the training done


# -------------------------------------------------------------------- what is measured


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


@dataclasses.dataclass
class Stage:
    """What was measured at one moment of a training: a ranking of the branches by each quantity."""

    name: str
    rankings: dict[str, Tensor]
    by_closing: Tensor  # truth: ablation
    by_order: Tensor  # truth: Shapley values
    shares: dict[str, float]  # sum over the joint effect
    costs: dict[str, float]  # in forward and backward passes on the same samples
    closing_half: dict[str, float]  # part of the joint effect that closing the lower half costs
    loss: float


def train(setting: Setting, seed: int, permutations: int, steps: int | None = None) -> tuple[list[Stage], History]:
    """Train with the gates closed at the start, and stop at each stage to measure."""
    torch.manual_seed(seed)
    model, data = setting.build()
    plan = make_plan(model, data.train[0][:4])
    apply_(model, plan)
    history, optimizer = History([b.name for b in plan.branches]), setting.trainer(model)
    steps = steps or setting.steps
    every = max(1, steps // 60)
    stops = {max(1, round(part * steps)): name for name, part in STAGES.items()}
    generator, stages = torch.Generator().manual_seed(seed), []
    for step in range(steps):
        batch = data.step(generator)
        for group in optimizer.param_groups:
            group["lr"] = setting.rate * min(1.0, (step + 1) / max(1, setting.warm_up))
        optimizer.zero_grad()
        if step % every == 0:
            with watch(model, plan, history, step):
                loss_of(model, batch).backward()
        else:
            loss_of(model, batch).backward()
        optimizer.step()
        if step + 1 in stops:
            stages.append(measured(stops[step + 1], model, plan, data, history, permutations))
    return stages, history


def measured(name: str, model: nn.Module, plan: ResidualPlan, data: Data, history: History, permutations: int) -> Stage:
    """Every ranking at this moment, and the two truths on data that no ranking saw."""
    plain = seconds(lambda: loss_of(model, data.held).backward(), 3)
    model.zero_grad()
    held, found, costs = [data.held], {}, {}
    for points in (3, 5):
        start = time.perf_counter()
        found[points] = attribute(model, plan, held, loss_of, points=points)
        costs[f"gate path, {points} points"] = (time.perf_counter() - start) / plain
    start = time.perf_counter()
    other = ablate(model, plan, held, loss_of, joined=False).means
    costs["ablation on 240 other samples"] = (time.perf_counter() - start) / plain
    rankings = rankings_of(history, found, other)
    closed = Closing(model, plan, data.truth)
    by_closing = torch.tensor(list(ablate(model, plan, [data.truth], loss_of, joined=False).means.values()))
    return Stage(
        name,
        rankings,
        by_closing,
        closed.shapley(permutations),
        shares_of(found, other, history),
        costs,
        {key: closed.lower_half(values) for key, values in rankings.items()},
        closed.open,
    )


def seconds(work: Callable[[], Any], times: int) -> float:
    """The quickest of several runs."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def rankings_of(history: History, path: dict[int, Attribution], other: dict[str, float]) -> dict[str, Tensor]:
    """Larger is more useful."""
    order = {name: place for place, name in enumerate(history.order())}
    last = history.variance_ratio[-1].nan_to_num()
    half = [int((ratio >= 0.5 * ratio[-1]).nonzero()[0]) for ratio in history.variance_ratio.nan_to_num().T]
    values = {
        "ablation on 240 other samples": list(other.values()),
        "order of switching on at 1e-3": [-float(order.get(n, len(order))) for n in history.branches],
        "order of reaching half of the own end": [-float(place) for place in half],
        "|saliency|, one batch": history.newest("saliency").abs().tolist(),
        "-saliency, one batch": (-history.newest("saliency")).tolist(),
        "|saliency|, mean of ten": history.mean_saliency().tolist(),
        "variance ratio now": last.tolist(),
        "gate path, 3 points": list(path[3].values()),
        "gate path, 5 points": list(path[5].values()),
    }
    return {key: torch.tensor(row) for key, row in values.items()}


def shares_of(path: dict[int, Attribution], other: dict[str, float], history: History) -> dict[str, float]:
    joint = path[3].joint
    sums = {
        "ablation on 240 other samples": sum(other.values()),
        "-saliency, one batch": -float(history.newest("saliency").sum()),
        **{f"gate path, {points} points": found.total for points, found in path.items()},
    }
    return {key: total / joint for key, total in sums.items()}


class Closing:
    """The loss on data of its own with some of the branches closed."""

    def __init__(self, model: nn.Module, plan: ResidualPlan, batch: Batch) -> None:
        self._model, self._batch, self._branches = model, batch, plan.active
        self._parameters = parameters_of(model)
        moving = {n for b in plan.active for g in b.gates for n in (g.parameter, *g.biases)}
        self._values = {n: self._parameters[n].detach().clone() for n in moving}
        self.open = self.loss(range(len(plan)))
        self.joint = self.loss(()) - self.open

    def loss(self, kept: Any) -> float:
        """The loss with only these branches open."""
        with evaluating(self._model), torch.no_grad():
            return self._loss({*kept})

    def _loss(self, kept: set[int]) -> float:
        for name, value in self._values.items():
            self._parameters[name].copy_(value)
        for index, branch in enumerate(self._branches):
            if index not in kept:
                for gate in branch.gates:
                    gate.close_(self._parameters)
        return float(loss_of(self._model, self._batch))

    def shapley(self, permutations: int) -> Tensor:
        """Mean fall of the loss as a branch is opened, over random orders and their reverses."""
        count, generator = len(self._branches), torch.Generator().manual_seed(0)
        total = torch.zeros(count)
        orders = [torch.randperm(count, generator=generator).tolist() for _ in range(-(-permutations // 2))]
        with evaluating(self._model), torch.no_grad():
            ends = (self._loss(set()), self._loss(set(range(count))))
            for order in [one for o in orders for one in (o, o[::-1])]:
                losses = [ends[0], *(self._loss({*order[:n]}) for n in range(1, count)), ends[1]]
                total[order] += torch.tensor(losses[:-1]) - torch.tensor(losses[1:])
        return total / (2 * len(orders))

    def lower_half(self, values: Tensor) -> float:
        """Rise of the loss when the lower half is closed, as a part of the change by closing everything."""
        order = values.argsort(descending=True, stable=True).tolist()
        return (self.loss(order[: len(order) - len(order) // 2]) - self.open) / abs(self.joint)
