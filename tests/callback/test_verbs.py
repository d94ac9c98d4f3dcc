"""Weights are closed once, at the start of a fresh training; every other verb leaves them alone."""

import copy
import io
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from networks import WIDTH, Classifier, Plain, PreNorm, Scaled, data, stack, trainer
from torch import Tensor, nn

from lit_resinit import ResidualInit, apply_, make_plan


class Everything(Classifier):
    """A module for every verb."""

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])


def values(module: nn.Module) -> dict[str, Tensor]:
    return {n: v.detach().clone() for n, v in (*module.named_parameters(), *module.named_buffers())}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.parametrize("block", [Plain, Scaled], ids=["insert", "zero"])
@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_other_verbs_change_nothing(verb: str, block: Any, tmp_path: Path) -> None:
    module, ours = Everything(stack(block)), ResidualInit()
    before = values(module)
    plain = trainer(tmp_path).predict(module, data(WIDTH))
    getattr(trainer(tmp_path, ours), verb)(module, data(WIDTH))
    assert same(before, values(module))
    assert all(
        torch.equal(a, b) for a, b in zip(plain, trainer(tmp_path, ours).predict(module, data(WIDTH)), strict=True)
    )
    assert (ours.plan, len(ours.history), ours.identity_report) == (None, 0, None)
    assert not any(m._forward_hooks or m._load_state_dict_pre_hooks for m in module.modules())


@pytest.mark.parametrize("block", [Plain, Scaled], ids=["insert", "zero"])
@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_a_checkpoint_loads_into_a_new_module_in_other_verbs(verb: str, block: Any, tmp_path: Path) -> None:
    trained, path = Everything(stack(block)), tmp_path / "run.ckpt"
    runner = trainer(tmp_path, ResidualInit())
    runner.fit(trained, data(WIDTH))
    runner.save_checkpoint(path)
    module = Everything(stack(block))
    getattr(trainer(tmp_path, ResidualInit()), verb)(module, data(WIDTH), ckpt_path=path)
    assert same(torch.load(path, weights_only=True)["state_dict"], values(module))
    assert list(module.state_dict()) == list(Everything(stack(block)).state_dict())
    wanted = trainer(tmp_path).predict(trained, data(WIDTH))
    found = trainer(tmp_path).predict(module, data(WIDTH))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(wanted, found, strict=True))


class Start(pl.Callback):
    """Notes the weights that the first step sees."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.values = values(pl_module)


def again_by(way: str, runner: pl.Trainer, module: Everything, root: Path, block: Any) -> tuple[pl.Trainer, Everything]:
    """A trainer and a module that go on with what was trained."""
    if way == "same trainer":
        runner.fit_loop.epoch_loop.max_steps = 6
        return runner, module
    if way == "deepcopy":
        module = copy.deepcopy(module)
    elif way == "pickle":
        buffer = io.BytesIO()
        module.trainer = None
        torch.save(module, buffer)
        buffer.seek(0)
        module = torch.load(buffer, weights_only=False)
    return trainer(root, ResidualInit(), Start()), module


WAYS = ["same trainer", "new trainer", "deepcopy", "pickle"]


@pytest.mark.parametrize("block", [Plain, Scaled], ids=["insert", "zero"])
@pytest.mark.parametrize("way", WAYS)
def test_a_second_fit_closes_nothing(way: str, block: Any, tmp_path: Path) -> None:
    module = Everything(stack(block), lr=0.1)
    runner = trainer(tmp_path, ResidualInit(), Start(), max_epochs=-1)
    runner.fit(module, data(WIDTH))
    trained = values(module)
    runner, module = again_by(way, runner, module, tmp_path, block)
    runner.fit(module, data(WIDTH))
    ours, start = runner.callbacks[:2]
    assert same(trained, start.values)
    assert len(ours.plan) == 2
    assert ours.gradient_report.ok


class Self(Everything):
    """Closes its own gates when it is built, so that Lightning's own loading finds them."""

    def __init__(self) -> None:
        super().__init__(stack(Plain))
        apply_(self.net, make_plan(self.net, torch.randn(2, WIDTH)))


def test_a_module_that_closes_itself_goes_through_load_from_checkpoint(tmp_path: Path) -> None:
    module, path = Self(), tmp_path / "self.ckpt"
    runner = trainer(tmp_path, ResidualInit())
    runner.fit(module, data(WIDTH))
    runner.save_checkpoint(path)
    loaded, ours, start = Self.load_from_checkpoint(path), ResidualInit(), Start()
    assert same(values(module), values(loaded))
    trainer(tmp_path, ours, start).fit(loaded, data(WIDTH))
    assert same(values(module), start.values)
    assert ours.identity_report is None
    assert ours.gradient_report.ok
    assert [m for m in Self().net.modules() if m._forward_hooks]


def test_existing_scales_after_load_from_checkpoint_are_not_closed_again(tmp_path: Path) -> None:
    class Own(Everything):
        def __init__(self) -> None:
            super().__init__(stack(lambda: Scaled(size=WIDTH)), lr=0.1)

    module, path = Own(), tmp_path / "own.ckpt"
    runner = trainer(tmp_path, ResidualInit())
    runner.fit(module, data(WIDTH))
    runner.save_checkpoint(path)
    loaded, start = Own.load_from_checkpoint(path), Start()
    with pytest.raises(RuntimeError, match="looks trained"):
        trainer(tmp_path, ResidualInit(), start).fit(loaded, data(WIDTH))
    assert same(values(module), values(loaded))
    trainer(tmp_path, ResidualInit(scheme="observe", identity="ignore"), start).fit(loaded, data(WIDTH))
    assert same(values(module), start.values)


def test_a_second_fit_proves_no_identity_any_more(tmp_path: Path) -> None:
    callback, module = ResidualInit(), Classifier(stack(PreNorm))
    trainer(tmp_path, callback).fit(module, data(WIDTH))
    assert callback.identity_report.ok
    again = ResidualInit()
    trainer(tmp_path, again).fit(module, data(WIDTH))
    assert again.identity_report is None
    assert again.gradient_report.ok
