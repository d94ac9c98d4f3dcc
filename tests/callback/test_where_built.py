"""The network may be built in ``__init__``, in ``setup`` or in ``configure_model``."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from networks import WIDTH, Classifier, Plain, Scaled, data, stack, trainer
from torch import nn

from lit_resinit import IdentityError, ResidualInit, ResInitError, apply_, make_plan


class BuiltIn(Classifier):
    """Builds its network in the hook it is told, and may close it there itself."""

    def __init__(self, hook: str, block: Any, by_hand: bool = False) -> None:
        super().__init__(nn.Identity())
        self.hook, self.block, self.by_hand = hook, block, by_hand
        if hook == "__init__":
            self._build()

    def _build(self) -> None:
        if isinstance(self.net, nn.Identity):
            self.net = stack(self.block)
            if self.by_hand:
                apply_(self.net, make_plan(self.net, torch.randn(2, WIDTH)))

    def setup(self, stage: str) -> None:
        if self.hook == "setup":
            self._build()

    def configure_model(self) -> None:
        if self.hook == "configure_model":
            self._build()


HOOKS = ["__init__", "setup", "configure_model"]


@pytest.mark.parametrize("hook", HOOKS)
def test_existing_scales_are_closed_wherever_they_are_built(hook: str, tmp_path: Path) -> None:
    ours = ResidualInit()
    trainer(tmp_path, ours).fit(BuiltIn(hook, Scaled), data(WIDTH))
    assert [g.parameter for g in ours.plan.gates] == ["net.0.scale", "net.1.scale"]
    assert ours.identity_report.ok
    assert ours.gradient_report.ok
    assert ours.history.gate[0].tolist() == [0.0, 0.0]
    assert ours.history.steps.tolist() == [0, 1, 2]


@pytest.mark.parametrize("hook", ["setup", "configure_model"])
def test_inserting_late_is_an_error_that_shows_the_edit(hook: str, tmp_path: Path) -> None:
    module = BuiltIn(hook, Plain)
    with pytest.raises(ResInitError) as caught:
        trainer(tmp_path, ResidualInit()).fit(module, data(WIDTH))
    assert "apply_(self.net, make_plan(self.net, ...))" in str(caught.value)
    assert f"`{hook}`" in str(caught.value)
    assert not any("residual_gate" in n for n, _ in module.named_parameters())


class Reopened(pl.Callback):
    """Opens a gate after the callback closed it."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with torch.no_grad():
            next(p for n, p in pl_module.named_parameters() if "residual_gate" in n).fill_(0.5)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_plan_applied_by_hand_is_recognised_with_every_check(hook: str, tmp_path: Path) -> None:
    ours = ResidualInit()
    trainer(tmp_path, ours).fit(BuiltIn(hook, Plain, by_hand=True), data(WIDTH))
    assert [g.parameter for g in ours.plan.gates] == ["net.0.f.residual_gate", "net.1.f.residual_gate"]
    assert len(ours.identity_report.branches) == len(ours.gradient_report.gates) == 2
    assert ours.history.branches == ["net.0", "net.1"]
    with pytest.raises(IdentityError, match=r"unzeroed scale, culprit net\.0\.f\.residual_gate"):
        trainer(tmp_path, Reopened(), ResidualInit()).fit(BuiltIn(hook, Plain, by_hand=True), data(WIDTH))


def test_a_resumed_late_network_keeps_its_trained_scales(tmp_path: Path) -> None:
    module = BuiltIn("configure_model", Scaled)
    runner = trainer(tmp_path, ResidualInit())
    runner.fit(module, data(WIDTH))
    runner.save_checkpoint(tmp_path / "late.ckpt")
    again, ours = BuiltIn("configure_model", Scaled), ResidualInit()
    trainer(tmp_path, ours, max_steps=4, max_epochs=-1).fit(again, data(WIDTH), ckpt_path=tmp_path / "late.ckpt")
    assert ours.identity_report is None
    assert ours.history.steps.tolist() == [0, 1, 2, 3]
    assert bool(ours.history.gate[3].all())
