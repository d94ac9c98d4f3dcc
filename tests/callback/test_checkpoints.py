"""Checkpoints: resuming, loading with and without the callback, with and without inserted gates."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from networks import WIDTH, Classifier, Plain, Scaled, data, encoder, mlp, stack, trainer
from torch import Tensor, nn

from lit_resinit import ResidualInit, ResInitError, apply_, fold_, make_plan

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


def old_file(module: pl.LightningModule, path: Path) -> dict:
    """The checkpoint as versions before this one wrote it, with the gates in the state dict."""
    found = torch.load(path, weights_only=True)
    state = found["callbacks"]["ResidualInit"]
    found["state_dict"] = dict(found["state_dict"]) | state.pop("before_folding")
    torch.save(found, path)
    return found


def test_gated_checkpoint_into_another_scheme_names_the_gates_and_the_way_out(tmp_path: Path) -> None:
    module = Classifier(stack(Plain))
    path = checkpoint(module, tmp_path, ResidualInit())
    old_file(module, path)
    with pytest.raises(RuntimeError, match="RI106") as caught:
        resume(Classifier(stack(Plain)), path, ResidualInit(scheme="last_layer"))
    for text in (*GATES, "fold_"):
        assert text in str(caught.value)


def test_gates_of_an_older_file_are_inserted_in_other_verbs_and_fold(tmp_path: Path) -> None:
    module = Classifier(stack(Plain))
    path = checkpoint(module, tmp_path, ResidualInit())
    old_file(module, path)
    loaded = Classifier(stack(Plain))
    trainer(tmp_path, ResidualInit()).validate(loaded, data(WIDTH), ckpt_path=path, verbose=False)
    x = torch.randn(3, WIDTH)
    wanted = module(x)
    assert torch.equal(loaded(x), wanted)
    assert tuple(fold_(loaded)) == GATES
    plain = Classifier(stack(Plain))
    plain.load_state_dict(loaded.state_dict())
    assert torch.allclose(plain(x), wanted, atol=1e-6)


# -------------------------------------------------------------------- the state dict is the plain network's


class Squashed(Plain):
    """A branch that ends in a function that is not linear: no scalar after it folds."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(mlp(), nn.ReLU())


class Twice(Classifier):
    """One network under two names."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net, lr=0.1)
        self.alias = net


def end(module: nn.Module) -> dict[str, Tensor]:
    return {n: v.detach().clone() for n, v in (*module.named_parameters(), *module.named_buffers())}


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    return [n for n in {*left, *right} if n not in left or n not in right or not torch.equal(left[n], right[n])]


class Start(pl.Callback):
    """Notes the weights and the optimizer that the first step meets."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights = end(pl_module)
        self.optimizer = copy.deepcopy(trainer.optimizers[0].state_dict())


class Adam(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


BUILDS = {
    "plain": lambda: Classifier(stack(Plain), lr=0.1),
    "adam": lambda: Adam(stack(Plain)),
    "encoder": lambda: Classifier(nn.Sequential(encoder(), nn.Flatten(), nn.Linear(3 * WIDTH, 2)), lr=0.1),
    "two names": lambda: Twice(stack(Plain)),
    "compiled": lambda: Classifier(torch.compile(stack(Plain), backend="eager"), lr=0.1),
}


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("kind", BUILDS)
def test_whoever_loads_without_the_callback_gets_the_same_network(
    kind: str, weights_only: bool, tmp_path: Path
) -> None:
    shape = (3, WIDTH) if kind == "encoder" else (WIDTH,)
    module, x = BUILDS[kind](), torch.randn(5, *shape)
    runner = trainer(tmp_path, ResidualInit(), max_steps=6, max_epochs=-1)
    runner.fit(module, data(*shape))
    path = tmp_path / "run.ckpt"
    runner.save_checkpoint(path, weights_only=weights_only)
    plain = BUILDS[kind]()
    plain.load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=True)
    assert any(float(p.detach()) != 0 for n, p in module.named_parameters() if n.endswith("residual_gate"))
    torch.testing.assert_close(plain.eval()(x), module.eval()(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", BUILDS)
def test_a_resume_meets_weights_and_optimizer_bit_for_bit(kind: str, tmp_path: Path) -> None:
    shape = (3, WIDTH) if kind == "encoder" else (WIDTH,)
    module = BUILDS[kind]()
    runner = trainer(tmp_path, ResidualInit(), max_steps=6, max_epochs=-1)
    runner.fit(module, data(*shape))
    runner.save_checkpoint(tmp_path / "run.ckpt")
    start, again = Start(), BUILDS[kind]()
    resumed = trainer(tmp_path, ResidualInit(), start, max_steps=8, max_epochs=-1)
    resumed.fit(again, data(*shape), ckpt_path=tmp_path / "run.ckpt")
    assert not differing(start.weights, end(module))
    before, after = runner.optimizers[0].state_dict(), start.optimizer
    assert before["param_groups"] == after["param_groups"]
    for index, values in before["state"].items():
        assert not differing(
            {k: torch.as_tensor(v) for k, v in values.items() if v is not None},
            {k: torch.as_tensor(v) for k, v in after["state"][index].items() if v is not None},
        )


def test_what_does_not_fold_keeps_its_key_and_the_plan_says_so(tmp_path: Path) -> None:
    def build() -> Classifier:
        return Classifier(nn.Sequential(Plain(), Squashed(), nn.Linear(WIDTH, 2)), lr=0.1)

    module, ours = build(), ResidualInit()
    path = checkpoint(module, tmp_path, ours)
    stored = torch.load(path, weights_only=True)["state_dict"]
    assert [n for n in stored if n.endswith("residual_gate")] == ["net.1.f.residual_gate"]
    assert "keeps a key of its own: net.1.f.residual_gate" in str(ours.plan)
    loaded, x = build(), torch.randn(3, WIDTH)
    trainer(tmp_path, ResidualInit()).validate(loaded, data(WIDTH), ckpt_path=path, verbose=False)
    torch.testing.assert_close(loaded(x), module(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("average", [EMAWeightAveraging, lambda: StochasticWeightAveraging(1e-2, 1)])
def test_averaged_weights_are_the_plain_networks_too(average: Any, tmp_path: Path) -> None:
    def fit(module: Classifier, *more: pl.Callback, epochs: int, path: Path | None = None) -> pl.Trainer:
        options = {"max_steps": -1, "max_epochs": epochs, "enable_checkpointing": bool(more)}
        runner = trainer(tmp_path, ResidualInit(), average(), *more, **options)
        runner.fit(module, data(WIDTH), ckpt_path=path)
        return runner

    whole = Classifier(stack(Plain), lr=0.1)
    start = end(whole)
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fit(whole, saving, epochs=3)
    stored = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)
    assert list(stored["state_dict"]) == list(start)
    half = Classifier(stack(Plain), lr=0.1)
    fit(half, epochs=3, path=tmp_path / "epoch=1.ckpt")
    assert not differing(end(whole), end(half))


def test_the_best_checkpoint_loads_into_the_trained_module_and_every_verb(tmp_path: Path) -> None:
    module = Classifier(stack(Plain), lr=0.1)
    saving = ModelCheckpoint(tmp_path, monitor="loss", save_last=True)
    options = {"max_steps": 6, "max_epochs": -1, "enable_checkpointing": True}
    runner = trainer(tmp_path, ResidualInit(), saving, **options)
    runner.fit(module, data(WIDTH))
    wanted = end(module)
    runner.validate(module, data(WIDTH), ckpt_path=saving.last_model_path, verbose=False)
    assert not differing(end(module), wanted)
    module.load_state_dict(torch.load(saving.last_model_path, weights_only=True)["state_dict"])
    assert not differing(end(module), wanted)


def test_weights_that_were_changed_in_the_file_are_loaded_as_they_are(tmp_path: Path) -> None:
    """What was before folding is put back only where folding it gives what the file holds."""
    module, x = Classifier(stack(Plain), lr=0.1), torch.randn(3, WIDTH)
    path = checkpoint(module, tmp_path, ResidualInit())
    found = torch.load(path, weights_only=True)
    for name in ("net.0.f.2.weight", "net.1.f.2.bias"):
        found["state_dict"][name] += 1.0
    torch.save(found, path)
    plain = Classifier(stack(Plain))
    plain.load_state_dict(found["state_dict"])
    trainer(tmp_path, ResidualInit()).validate(module, data(WIDTH), ckpt_path=path, verbose=False)
    torch.testing.assert_close(module(x), plain(x), rtol=1e-5, atol=1e-6)


def test_hooks_of_the_users_meet_the_plain_network(tmp_path: Path) -> None:
    class Own(Classifier):
        """Keeps the trained blocks only, under names of its own."""

        def on_save_checkpoint(self, checkpoint: dict) -> None:
            self.saved = list(checkpoint["state_dict"])
            checkpoint["blocks"] = checkpoint.pop("state_dict")

        def on_load_checkpoint(self, checkpoint: dict) -> None:
            checkpoint["state_dict"] = checkpoint.pop("blocks")

    module = Own(stack(Plain), lr=0.1)
    path = checkpoint(module, tmp_path, ResidualInit())
    assert module.saved == list(Own(stack(Plain)).state_dict())
    start = Start()
    resume(Own(stack(Plain), lr=0.1), path, ResidualInit(), start)
    assert not differing(start.weights, end(module))


def test_a_copy_inside_the_module_folds_into_its_own_weights(tmp_path: Path) -> None:
    class Target(Classifier):
        def on_fit_start(self) -> None:
            if not hasattr(self, "target"):
                self.target = copy.deepcopy(self.net).requires_grad_(False)

        def on_train_batch_end(self, *rest: Any) -> None:
            for own, other in zip(self.target.parameters(), self.net.parameters(), strict=True):
                own.lerp_(other.detach(), 0.5)

    module, x = Target(stack(Plain), lr=0.1), torch.randn(3, WIDTH)
    path = checkpoint(module, tmp_path, ResidualInit())
    stored = torch.load(path, weights_only=True)["state_dict"]
    assert not [n for n in stored if "residual_gate" in n]
    for name in ("net", "target"):
        plain = stack(Plain)
        plain.load_state_dict({n.removeprefix(f"{name}."): v for n, v in stored.items() if n.startswith(f"{name}.")})
        torch.testing.assert_close(plain(x), getattr(module, name)(x), rtol=1e-5, atol=1e-6)
    assert len(fold_(module)) == 4


# -------------------------------------------------------------------- after a training


@pytest.mark.parametrize("stopped", [False, True])
def test_a_package_that_saves_the_state_dict_itself_saves_the_plain_network(stopped: bool, tmp_path: Path) -> None:
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
            self.inside = list(pl_module.state_dict())
            if stopped and trainer.global_step == 3:
                raise KeyError("stopped")

    module, x, stop = Classifier(stack(Plain), lr=0.1), torch.randn(3, WIDTH), Stop()
    try:
        trainer(tmp_path, ResidualInit(), stop).fit(module, data(WIDTH))
    except KeyError:
        assert stopped
    assert set(GATES) <= {*stop.inside}  # who copies weights during a training gets all of them
    torch.save(module.state_dict(), tmp_path / "own.pt")
    torch.save(module.net.state_dict(), tmp_path / "part.pt")
    plain = Classifier(stack(Plain))
    plain.load_state_dict(torch.load(tmp_path / "own.pt", weights_only=True), strict=True)
    torch.testing.assert_close(plain(x), module(x), rtol=1e-5, atol=1e-6)
    part = stack(Plain)
    part.load_state_dict(torch.load(tmp_path / "part.pt", weights_only=True), strict=True)
    torch.testing.assert_close(part(x), module(x), rtol=1e-5, atol=1e-6)
    before = end(module)
    module.load_state_dict(copy.deepcopy(module.state_dict()))
    assert not differing(end(module), before)
    module.net.load_state_dict(torch.load(tmp_path / "part.pt", weights_only=True))
    assert torch.allclose(module(x), plain(x), atol=1e-6)


def test_copies_and_pickles_of_a_trained_module_save_the_plain_network_too(tmp_path: Path) -> None:
    module = Classifier(stack(Plain), lr=0.1)
    trainer(tmp_path, ResidualInit()).fit(module, data(WIDTH))
    module.trainer = None
    names = list(Classifier(stack(Plain)).state_dict())
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert list(made.state_dict()) == names
        assert not differing(end(made), end(module))


def test_a_checkpoint_after_the_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    module = Classifier(stack(Plain), lr=0.1)
    runner = trainer(tmp_path, ResidualInit())
    runner.fit(module, data(WIDTH))
    runner.save_checkpoint(tmp_path / "run.ckpt")
    runner.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    found = torch.load(tmp_path / "weights.ckpt", weights_only=True)["state_dict"]
    assert list(found) == list(Classifier(stack(Plain)).state_dict())
    assert not any(note.get("before_folding") for note in found._metadata.values())  # half of the file
    start = Start()
    resume(Classifier(stack(Plain), lr=0.1), tmp_path / "run.ckpt", ResidualInit(), start)
    assert not differing(start.weights, end(module))


# -------------------------------------------------------------------- the callback's own state


@pytest.mark.parametrize("missing", ["closed", "history", "slept", "about", "folds", "everything"])
def test_a_state_of_another_version_is_read_as_far_as_it_goes(missing: str, tmp_path: Path) -> None:
    path = checkpoint(Classifier(stack(Scaled)), tmp_path, ResidualInit())
    found = torch.load(path, weights_only=True)
    state = found["callbacks"]["ResidualInit"]
    for key in list(state) if missing == "everything" else [missing]:
        del state[key]
    torch.save(found | {"callbacks": {"ResidualInit": state or {"future": 1}}}, path)
    ours, told = ResidualInit(), missing not in ("closed", "folds")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resume(Classifier(stack(Scaled)), path, ours)
    assert any("another version" in str(w.message) for w in caught) == told
    assert ours.identity_report is None
    assert ours.history.steps.tolist() == (list(range(6)) if missing not in ("history", "everything") else [3, 4, 5])


@pytest.mark.filterwarnings("ignore:reading the state of ResidualInit:lit_resinit.ResInitWarning")
@pytest.mark.parametrize(
    "damage",
    [
        {"history": {"steps": torch.zeros(3)}},
        {"history": 7},
        {"slept": ["a"]},
        {"slept": {"a": "b"}},
        {"about": "page"},
        {"about": {"branches": 1}},
        {"folds": 3},
        {"before_folding": 3},
    ],
)
def test_a_damaged_state_is_told_and_the_training_goes_on(damage: dict, tmp_path: Path) -> None:
    path = checkpoint(Classifier(stack(Scaled)), tmp_path, ResidualInit())
    found = torch.load(path, weights_only=True)
    found["callbacks"]["ResidualInit"] |= damage
    torch.save(found, path)
    ours = ResidualInit(report=str(tmp_path / "run.html"))
    resume(Classifier(stack(Scaled)), path, ours)
    assert ours.history.steps.tolist()[-1] == 5


def test_what_is_no_state_is_an_error_in_words() -> None:
    with pytest.raises(ResInitError, match="expected a dictionary, found int"):
        ResidualInit().load_state_dict(7)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_backward", "on_train_batch_end", "on_train_end"])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_callback_in_mid_run_is_copied_and_pickled(way: Any, hook: str, tmp_path: Path) -> None:
    ours, module = ResidualInit(patience=5), asleep()
    copies: list[ResidualInit] = []

    class Copying(pl.Callback):
        pass

    def act(self: Any, *rest: Any, **more: Any) -> None:
        copies.append(way(ours))

    setattr(Copying, hook, act)
    trainer(tmp_path, ours, Copying()).fit(module, data(WIDTH))
    assert copies
    for made in copies:
        assert made.plan == ours.plan
        assert made.state_dict()["closed"]
        assert len(made.history) <= len(ours.history)
    trainer(tmp_path, copies[-1]).fit(asleep(), data(WIDTH))
    assert copies[-1].identity_report.ok


def test_state_of_the_callback_is_plain(tmp_path: Path) -> None:
    path = checkpoint(asleep(), tmp_path, ResidualInit())
    state = torch.load(path, weights_only=True)["callbacks"]["ResidualInit"]

    def kinds(value: object) -> set[type]:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return {type(value)}.union(*(kinds(k) | kinds(v) for k, v in inner))

    assert kinds(state) <= {dict, list, str, int, float, bool, type(None), Tensor}
