"""Several networks: adversaries with an optimizer each, a teacher without gradients, one after the other."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from networks import WIDTH, Classifier, Plain, Scaled, data, stack, trainer
from torch import Tensor, nn
from torch.nn.functional import softplus

from lit_resinit import ResidualInit

BLOCKS = pytest.mark.parametrize("block", [Plain, Scaled], ids=["insert", "zero"])


class Adversaries(pl.LightningModule):
    """The discriminator steps first, on samples without gradients; the generator in every ``rest``-th batch."""

    def __init__(self, block: Any, rest: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.g, self.d, self.rest = stack(block, outputs=WIDTH), stack(block, outputs=1), rest
        nn.init.zeros_(self.d[-1].weight)  # the generator's gates sleep until the discriminator has stepped

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, (of_g, of_d) = batch[0], self.optimizers()
        loss = softplus(self.d(self.g(x.roll(1)).detach())).mean() + softplus(-self.d(x)).mean()
        of_d.zero_grad()
        self.manual_backward(loss)
        of_d.step()
        if batch_idx % self.rest == 0:
            loss = softplus(-self.d(self.g(x.roll(1)))).mean()
            of_g.zero_grad()
            self.manual_backward(loss)
            of_g.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(n.parameters(), lr=1e-2) for n in (self.g, self.d)]


@BLOCKS
@pytest.mark.filterwarnings("ignore:the stream from")
@pytest.mark.parametrize("rest", [1, 5])
def test_a_gate_is_judged_by_the_steps_of_its_own_optimizer(block: Any, rest: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, ours = Adversaries(block, rest), ResidualInit()
    trainer(tmp_path, ours, max_steps=-1, max_epochs=1).fit(module, data(WIDTH, rows=48))
    assert len(ours.plan.gates) == 4
    assert {g.status for g in ours.gradient_report.gates.values()} == {"alive"}
    assert all(module.get_parameter(g.parameter).detach().any() for g in ours.plan.gates)


class Taught(Classifier):
    """A frozen copy of the network shows what to aim at."""

    def __init__(self, block: Any) -> None:
        super().__init__(stack(block))
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            aim = self.teacher(batch[0])
        return (self.net(batch[0]) - aim - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.01)


@BLOCKS
def test_a_teacher_without_gradients_rests(block: Any, tmp_path: Path) -> None:
    module, ours = Taught(block), ResidualInit()
    trainer(tmp_path, ours, max_steps=60, max_epochs=-1).fit(module, data(WIDTH))
    verdicts = {n.split(".")[0]: g.status for n, g in ours.gradient_report.gates.items()}
    assert verdicts == {"net": "alive", "teacher": "asleep"}
    assert not any(p.requires_grad for p in module.teacher.parameters())


def test_another_network_has_a_history_of_its_own(tmp_path: Path) -> None:
    ours = ResidualInit()
    for _ in range(2):
        trainer(tmp_path, ours).fit(Classifier(stack(Plain)), data(WIDTH))
    assert ours.history.steps.tolist() == [0, 1, 2]


class Skipping(Classifier):
    """Gives no loss for the batches that would be recorded."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


def test_no_mode_stays_on_after_a_batch_without_a_loss(tmp_path: Path) -> None:
    class Spy(pl.Callback):
        modes: tuple[int, ...] = ()

        def on_train_batch_end(self, *args: Any) -> None:
            self.modes += (torch._C._len_torch_dispatch_stack(),)

        def on_validation_batch_start(self, *args: Any) -> None:
            self.modes += (torch._C._len_torch_dispatch_stack(),)

    spy, ours = Spy(), ResidualInit(log_every_n_steps=2)
    fit = trainer(tmp_path, ours, spy, max_steps=6, max_epochs=-1, limit_val_batches=1)
    fit.fit(Skipping(stack(Scaled)), data(WIDTH, rows=24), data(WIDTH))
    assert len(spy.modes) > 6
    assert not any(spy.modes)
    assert ours.gradient_report.ok


class Dropping(Scaled):
    """Stochastic depth, for the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x.new_empty(1).bernoulli_(0.2)
        return x + self.scale * self.f(x) * kept


def test_a_branch_that_lots_drop_again_and_again_is_waited_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, ours = Classifier(stack(Dropping, 6)), ResidualInit(patience=2)
    trainer(tmp_path, ours, max_steps=40, max_epochs=-1).fit(module, data(WIDTH))
    assert {g.status for g in ours.gradient_report.gates.values()} == {"alive"}
