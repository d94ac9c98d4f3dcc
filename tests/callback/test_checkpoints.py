"""Checkpoints: resuming, loading with and without the callback, with and without inserted gates."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from networks import WIDTH, Classifier, Plain, Scaled, data, stack, trainer
from torch import Tensor, nn

from lit_resinit import ResidualInit, apply_, fold_, make_plan

GATES = ("net.0.f.residual_gate", "net.1.f.residual_gate")


def asleep() -> Classifier:
    """A network with a zero head, whose blocks sleep until the head has moved."""
    net = stack(Plain)
    nn.init.zeros_(net[-1].weight)
    return Classifier(net)


def checkpoint(module: pl.LightningModule, root: Path, *callbacks: pl.Callback, weights_only: bool = False) -> Path:
    runner = trainer(root, *callbacks, enable_checkpointing=True)
    runner.fit(module, data(WIDTH))
    runner.save_checkpoint(root / "run.ckpt", weights_only=weights_only)
    return root / "run.ckpt"


def resume(module: pl.LightningModule, path: Path, *callbacks: pl.Callback, steps: int = 6) -> None:
    trainer(path.parent, *callbacks, max_steps=steps, max_epochs=-1).fit(module, data(WIDTH), ckpt_path=path)


def test_a_resumed_run_continues_curve_for_curve(tmp_path: Path) -> None:
    pl.seed_everything(1, verbose=False)
    start = Classifier(stack(Plain)).state_dict()

    def run(ours: ResidualInit, *others: pl.Callback, path: Path | None = None) -> None:
        module = Classifier(stack(Plain))
        module.load_state_dict(start)
        options = {"max_steps": -1, "max_epochs": 2, "enable_checkpointing": bool(others)}
        trainer(tmp_path, ours, *others, **options).fit(module, data(WIDTH), ckpt_path=path)

    whole, second = ResidualInit(), ResidualInit()
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    run(whole, saving)
    run(second, path=tmp_path / "epoch=0.ckpt")
    assert second.identity_report is None
    assert second.history.steps.tolist() == whole.history.steps.tolist() == list(range(6))
    assert torch.equal(second.history.gate, whole.history.gate)
    assert torch.equal(second.history.variance_ratio, whole.history.variance_ratio)
    assert second.history.switched_on() == whole.history.switched_on()


def test_a_gate_asleep_at_the_checkpoint_is_still_waited_for(tmp_path: Path) -> None:
    class Never(Classifier):
        """Multiplies its branches by a feature that is zero in the data."""

        def forward(self, x: Tensor) -> Tensor:
            for block in self.net[:-1]:
                x = x + block.scale * block.f(x) * x[..., -1:]
            return self.net[-1](x)

    loader = data(WIDTH)
    loader.dataset.tensors[0][:, -1] = 0.0
    first = ResidualInit(patience=5)
    runner = trainer(tmp_path, first)
    runner.fit(Never(stack(Scaled)), loader)
    assert {g.status for g in first.gradient_report.gates.values()} == {"asleep"}
    runner.save_checkpoint(tmp_path / "run.ckpt")
    second = ResidualInit(patience=5)
    go_on = trainer(tmp_path, second, max_steps=20, max_epochs=-1)
    with pytest.raises(RuntimeError, match="slept through 5 optimizer steps"):
        go_on.fit(Never(stack(Scaled)), loader, ckpt_path=tmp_path / "run.ckpt")
    # two steps of patience were used before the checkpoint, three after it
    assert go_on.global_step == 5


def test_the_callback_may_join_at_a_resume(tmp_path: Path) -> None:
    path, ours = checkpoint(Classifier(stack(Scaled)), tmp_path), ResidualInit()
    stored = torch.load(path, weights_only=True)["state_dict"]

    class Start(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.equal = all(torch.equal(v, stored[n]) for n, v in pl_module.state_dict().items())

    start = Start()
    resume(Classifier(stack(Scaled)), path, ours, start)
    assert start.equal
    assert ours.identity_report is None
    assert ours.gradient_report.ok
    assert ours.history.steps.tolist() == [3, 4, 5]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_the_callback_may_leave_at_a_resume(tmp_path: Path) -> None:
    path = checkpoint(Classifier(stack(Scaled)), tmp_path, ResidualInit())
    module = Classifier(stack(Scaled))
    resume(module, path)
    assert float(module.net[0].scale.detach()) != 0.0


def test_plain_checkpoint_into_inserted_gates_names_them_and_the_way_out(tmp_path: Path) -> None:
    path = checkpoint(Classifier(stack(Plain)), tmp_path)
    with pytest.raises(RuntimeError, match="RI106") as caught:
        resume(Classifier(stack(Plain)), path, ResidualInit())
    for text in (*GATES, "torch.ones(1)", "without ResidualInit"):
        assert text in str(caught.value)


def test_gates_filled_with_one_make_a_plain_checkpoint_load(tmp_path: Path) -> None:
    plain = Classifier(stack(Plain))
    module = Classifier(stack(Plain))
    apply_(module, make_plan(module, torch.randn(2, WIDTH)))
    module.load_state_dict(plain.state_dict() | {name: torch.ones(1) for name in GATES})
    x = torch.randn(3, WIDTH)
    assert torch.equal(plain(x), module(x))


def test_gated_checkpoint_into_another_scheme_names_the_gates_and_the_way_out(tmp_path: Path) -> None:
    path = checkpoint(Classifier(stack(Plain)), tmp_path, ResidualInit())
    with pytest.raises(RuntimeError, match="RI106") as caught:
        resume(Classifier(stack(Plain)), path, ResidualInit(scheme="last_layer"))
    for text in (*GATES, "fold_"):
        assert text in str(caught.value)


def test_folded_gates_make_a_gated_checkpoint_plain(tmp_path: Path) -> None:
    module = Classifier(stack(Plain))
    path = checkpoint(module, tmp_path, ResidualInit())
    loaded = Classifier(stack(Plain))
    trainer(tmp_path, ResidualInit()).validate(loaded, data(WIDTH), ckpt_path=path, verbose=False)
    x = torch.randn(3, WIDTH)
    wanted = module(x)
    assert torch.equal(loaded(x), wanted)
    assert tuple(fold_(loaded)) == GATES
    plain = Classifier(stack(Plain))
    plain.load_state_dict(loaded.state_dict())
    assert torch.allclose(plain(x), wanted, atol=1e-6)


def test_weights_only_loading_of_a_module_with_gates(tmp_path: Path) -> None:
    module = Classifier(stack(Plain))
    path = checkpoint(module, tmp_path, ResidualInit(), weights_only=True)
    assert "callbacks" not in torch.load(path, weights_only=True)
    loaded = Classifier(stack(Plain))
    trainer(tmp_path, ResidualInit()).validate(loaded, data(WIDTH), ckpt_path=path, verbose=False)
    x = torch.randn(3, WIDTH)
    assert torch.equal(loaded(x), module(x))


def test_state_of_the_callback_is_plain(tmp_path: Path) -> None:
    path = checkpoint(asleep(), tmp_path, ResidualInit())
    state = torch.load(path, weights_only=True)["callbacks"]["ResidualInit"]

    def kinds(value: object) -> set[type]:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return {type(value)}.union(*(kinds(k) | kinds(v) for k, v in inner))

    assert kinds(state) <= {dict, list, str, int, float, bool, type(None), Tensor}
