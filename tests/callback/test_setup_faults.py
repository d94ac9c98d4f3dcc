"""Set-up touches nothing but the network, whatever the user's code does."""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from networks import WIDTH, Classifier, Plain, data, stack, trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from lit_resinit import ResidualInit


class OneCycle(Classifier):
    """Sizes its schedule by the documented way."""

    configured = 0

    def configure_optimizers(self) -> Any:
        OneCycle.configured += 1
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_configure_optimizers_is_called_once_and_by_the_trainer(tmp_path: Path) -> None:
    OneCycle.configured = 0
    trainer(tmp_path, ResidualInit(), max_steps=-1, max_epochs=2).fit(OneCycle(stack(Plain)), data(WIDTH))
    assert OneCycle.configured == 1


class Reads(Classifier):
    """Reads in its step whatever there is to read of the Trainer."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        run = self.trainer
        share = (self.global_step + 1) / run.estimated_stepping_batches + self.current_epoch / max(run.max_epochs, 1)
        rows = self.all_gather(batch[0].mean()).mean() * run.world_size / run.num_training_batches
        rate = run.optimizers[0].param_groups[0]["lr"] + self.lr_schedulers().get_last_lr()[0]
        assert run.training
        assert isinstance(run, pl.Trainer)
        assert len(run.train_dataloader.dataset) == 12
        run.datamodule.counts.append(share)
        return super().training_step(batch, batch_idx) * (1.0 + 0.0 * rows + share + rate)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10)]


class Module(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.counts: list[float] = []

    def train_dataloader(self) -> DataLoader:
        return data(WIDTH)


def test_a_step_may_read_the_trainer(tmp_path: Path) -> None:
    datamodule, ours = Module(), ResidualInit()
    trainer(tmp_path, ours, max_epochs=1).fit(Reads(stack(Plain)), datamodule=datamodule)
    assert len(ours.plan or ()) == 2
    assert len(datamodule.counts) == 3, "the trace counted on a copy"


class Adversaries(Classifier):
    """Several optimizers, unpacked or in a loop."""

    def __init__(self, way: str) -> None:
        super().__init__(stack(Plain))
        self.other, self.way, self.automatic_optimization = stack(Plain), way, False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        nets = (self.net, self.other)
        if self.way == "unpacked":
            first, second = self.optimizers()
            pairs = [(first, self.net), (second, self.other)]
        elif self.way == "indexed":
            pairs = [(self.optimizers()[i], net) for i, net in enumerate(nets)]
        else:
            pairs = list(zip(self.optimizers(), nets, strict=True))
        for optimizer, net in pairs:

            def closure(net: nn.Module = net, optimizer: Any = optimizer) -> Tensor:
                loss = functional.cross_entropy(net(x), y)
                optimizer.zero_grad()
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.01), torch.optim.SGD(self.other.parameters(), 0.01)


@pytest.mark.parametrize("way", ["unpacked", "indexed", "in a loop"])
def test_several_optimizers_are_met_before_they_are_built(way: str, tmp_path: Path) -> None:
    ours = ResidualInit(scheme="observe", identity="ignore", gradient="ignore")
    trainer(tmp_path, ours).fit(Adversaries(way), data(WIDTH))
    assert [b.name for b in ours.plan.branches] == ["net.0", "net.1", "other.0", "other.1"]


# -------------------------------------------------------------------- bit for bit


class Bootstrap(Classifier):
    """Averages its own target network in the step, and looks at a value."""

    def __init__(self) -> None:
        super().__init__(stack(Plain))
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.past: deque[float] = deque(maxlen=5)
        self.table: dict[str, list[Tensor]] = {"means": []}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.target.parameters(), self.net.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs + 0.01, alpha=0.1)
            self.net[0].f[0].weight.data.clamp_(-0.2, 0.2)
        loss = functional.mse_loss(self.net(batch[0]), self.target(batch[0]))
        self.past.append(loss.item())
        self.table["means"].append(loss.detach())
        return loss * (1.0 + len(self.past) + len(self.table["means"]))


class Source(IterableDataset):
    """A shared source that is read once."""

    def __init__(self) -> None:
        loader = data(WIDTH, rows=40, batch=1)
        self.rows: Iterator[Any] = ((x[0], y[0]) for x, y in loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self.rows


class Streaming(Classifier):
    """Builds its loader itself, of a source that it holds."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(Plain(), nn.Dropout(0.5), Plain(), nn.Linear(WIDTH, 2)))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Source(), batch_size=4)


def pairs() -> Iterator[Any]:
    return (batch for batch in list(data(WIDTH, rows=40)))


RUNS: dict[str, Callable[[], tuple[pl.LightningModule, Any]]] = {
    "target network": lambda: (Bootstrap(), data(WIDTH)),
    "one-pass stream": lambda: (Streaming(), None),
    "one-pass stream given": lambda: (Classifier(stack(Plain)), DataLoader(Source(), batch_size=4)),
    "generator": lambda: (Classifier(stack(Plain)), pairs()),
    "dict with a generator": lambda: (Keyed(stack(Plain)), {"a": pairs(), "b": data(WIDTH)}),
}


class Keyed(Classifier):
    def training_step(self, batch: dict[str, list[Tensor]], batch_idx: int) -> Tensor:
        return super().training_step(batch["a"], batch_idx) + super().training_step(batch["b"], batch_idx)


@pytest.mark.parametrize("kind", RUNS)
def test_observing_changes_no_bit(kind: str, tmp_path: Path) -> None:
    found = []
    for ours in ([], [ResidualInit(scheme="observe", identity="ignore", gradient="ignore")]):
        torch.manual_seed(0)
        module, loader = RUNS[kind]()
        trainer(tmp_path, *ours).fit(module, loader)
        found.append(module.state_dict() | {"random": torch.get_rng_state()})
    assert all(torch.equal(v, found[1][n]) for n, v in found[0].items())


# -------------------------------------------------------------------- copies made before


class OwnAverage(Classifier):
    """A moving average by name, set up before there is any scalar."""

    def __init__(self) -> None:
        super().__init__(stack(Plain))
        self.average = {n: p.detach().clone() for n, p in self.net.named_parameters()}

    def on_train_batch_end(self, *args: Any) -> None:
        for name, parameter in self.net.named_parameters():
            self.average[name].lerp_(parameter.detach(), 0.1)


def test_an_average_of_the_modules_own_goes_on(tmp_path: Path) -> None:
    ours, module = ResidualInit(), OwnAverage()
    trainer(tmp_path, ours).fit(module, data(WIDTH))
    assert [b.action for b in ours.plan.branches] == ["last_layer", "last_layer"]
    assert ours.identity_report.ok
    assert list(module.average) == [n for n, _ in module.net.named_parameters()]
