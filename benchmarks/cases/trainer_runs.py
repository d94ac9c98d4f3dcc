"""Trainer cases: hook order, resuming, optimisers, precision, copies, traces."""

from __future__ import annotations

import gc
import hashlib
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from .base import case, fixed
from .lightning_base import (
    FEATURES,
    TARGETS,
    Ending,
    FirstIdentity,
    Gated,
    RawProbe,
    Regression,
    ZeroIn,
    in_temporary_folder,
    loader,
    make_trainer,
    none,
    table,
)

GATES = ["blocks.0.gate", "blocks.1.gate"]
TAILS = [f"blocks.{i}.f.2.{p}" for i in range(2) for p in ("weight", "bias")]
CLOSED = {f"blocks.{i}": ("closed",) for i in range(2)}


def simple_fit(make_module, **trainer_kwargs):
    """A run() that fits once and hands back the module, trainer and callbacks."""

    def run(make_callbacks=none, root="."):
        callbacks = make_callbacks()
        module = make_module()
        trainer = make_trainer(root, callbacks, **trainer_kwargs)
        trainer.fit(module, loader())
        return {"module": module, "trainer": trainer, "callbacks": callbacks}

    run.trainer_kwargs = trainer_kwargs
    return run


# --------------------------------------------------------------------------- when the model exists


@case(
    "blocks_built_in_the_constructor",
    "fit",
    {
        "initialised_in": "setup",
        "zeroed": TAILS,
        "identity": CLOSED,
        "gradient": {name: "alive" for name in TAILS},
    },
    summary="Ordinary module: Callback.setup sees the blocks, zeros survive to the first batch.",
    lightning=True,
)
def built_in_constructor():
    run = simple_fit(lambda: Regression(Ending))

    @in_temporary_folder
    def truth(fresh, root):
        seen = fresh()["run"](lambda: [ZeroIn("setup"), FirstIdentity(), RawProbe(TAILS)], root)
        zero, identity, probe = seen["callbacks"]
        assert zero.found == [4]
        assert identity.equal == {"blocks.0": True, "blocks.1": True}, identity.equal
        assert set(probe.after_backward[0].values()) == {"live"}
        untouched = fresh()["run"](lambda: [FirstIdentity()], root)["callbacks"][0]
        assert not any(untouched.equal.values())

    return {"run": run, "truth": truth, "module": Regression(Ending)}


class LateRegression(Regression):
    """Builds its blocks in ``configure_model``."""

    def __init__(self):
        super().__init__(Ending, depth=0)

    def configure_model(self):
        if len(self.blocks) == 0:
            self.blocks.extend([Ending(), Ending()])


@case(
    "blocks_built_in_configure_model",
    "fit",
    {
        "found_in_setup": 0,
        "initialised_in": "on_fit_start",
        "zeroed": TAILS,
        "identity": CLOSED,
        "gradient": {name: "alive" for name in TAILS},
        "insert_instead": {"raises_before": "first batch", "names_in_text": ["configure_model"]},
    },
    summary="Nothing exists in Callback.setup: zero values later, refuse to insert parameters.",
    lightning=True,
)
def built_in_configure_model():
    run = simple_fit(LateRegression)

    @in_temporary_folder
    def truth(fresh, root):
        early = fresh()["run"](lambda: [ZeroIn("setup"), FirstIdentity()], root)["callbacks"]
        assert early[0].found == [0]
        assert not any(early[1].equal.values())
        late = fresh()["run"](lambda: [ZeroIn("on_fit_start"), FirstIdentity(), RawProbe(TAILS)], root)["callbacks"]
        assert late[0].found == [4]
        assert all(late[1].equal.values())
        assert set(late[2].after_backward[0].values()) == {"live"}

    return {"run": run, "truth": truth, "module": LateRegression()}


# --------------------------------------------------------------------------- repeated verbs, resume


@case(
    "fit_then_validate_test_and_fit_again",
    "fit",
    {
        "initialised_times": 1,
        "unchanged_by": ["validate", "test", "start of second fit"],
        "hooks": ["setup:fit", "setup:validate", "setup:test", "setup:fit"],
    },
    summary="One Trainer: fit, validate, test, fit longer; only the very first setup may write zeros.",
    lightning=True,
)
def fit_test_fit():
    def run(make_callbacks=none, root="."):
        callbacks = make_callbacks()
        module, snapshots = Regression(Ending), {}
        trainer = make_trainer(root, callbacks, max_epochs=1)

        def note(label):
            snapshots[label] = {n: p.detach().clone() for n, p in module.named_parameters()}

        trainer.fit(module, loader())
        note("fit")
        trainer.validate(module, loader(), verbose=False)
        note("validate")
        trainer.test(module, loader(), verbose=False)
        note("test")
        trainer.fit_loop.max_epochs = 2
        at_start = RawProbe(TAILS)
        trainer.callbacks.append(at_start)
        trainer.fit(module, loader())
        snapshots["start of second fit"] = at_start.values[0]
        note("second fit")
        return {"module": module, "snapshots": snapshots, "callbacks": callbacks}

    @in_temporary_folder
    def truth(fresh, root):
        seen = fresh()["run"](lambda: [RawProbe(TAILS)], root)
        shots = seen["snapshots"]
        for name in TAILS:
            for label in fresh()["expect"]["unchanged_by"]:
                assert torch.equal(shots["fit"][name], shots[label][name]), (label, name)
        assert not torch.equal(shots["fit"][TAILS[0]], shots["second fit"][TAILS[0]])
        stages = [h for h in seen["callbacks"][0].hooks if h.startswith("setup")]
        assert stages == fresh()["expect"]["hooks"], stages
        careless = fresh()["run"](lambda: [ZeroIn("setup", only_fit=False)], root)["snapshots"]
        assert careless["test"][TAILS[0]].abs().max() == 0, "zeroing in every setup wipes the model"
        careless = fresh()["run"](lambda: [ZeroIn("setup")], root)["snapshots"]
        assert careless["start of second fit"][TAILS[0]].abs().max() == 0

    return {"run": run, "truth": truth, "module": Regression(Ending)}


@case(
    "resume_from_a_full_checkpoint",
    "fit",
    {
        "restored_exactly": TAILS,
        "identity_check": "skipped",
        "gradient": {name: "alive" for name in TAILS},
        "raises": None,
        "hint": "resumed",
    },
    summary="Second run with ckpt_path: trained last layers must be the restored ones at the first batch.",
    lightning=True,
)
def resume():
    def run(make_callbacks=none, root="."):
        first = Regression(Ending)
        trainer = make_trainer(root, make_callbacks(), max_steps=2, max_epochs=-1)
        trainer.fit(first, loader())
        path = f"{root}/resume.ckpt"
        trainer.save_checkpoint(path)
        stored = {n: p.detach().clone() for n, p in first.named_parameters()}
        second, probe, callbacks = Regression(Ending), RawProbe(TAILS), make_callbacks()
        trainer = make_trainer(root, [*callbacks, probe], max_steps=4, max_epochs=-1)
        trainer.fit(second, loader(), ckpt_path=path)
        return {"stored": stored, "probe": probe, "module": second, "callbacks": callbacks}

    @in_temporary_folder
    def truth(fresh, root):
        def restored(seen):
            return all(torch.equal(seen["stored"][n], seen["probe"].values[0][n]) for n in TAILS)

        plain = fresh()["run"](none, root)
        assert restored(plain)
        assert plain["stored"][TAILS[0]].abs().max() > 0
        assert set(plain["probe"].after_backward[0].values()) == {"live"}
        assert restored(fresh()["run"](lambda: [ZeroIn("setup")], root)), "setup zeros are overwritten"
        wiped = fresh()["run"](lambda: [ZeroIn("on_fit_start")], root)
        assert not restored(wiped), "zeroing in on_fit_start was expected to wipe the weights"

    return {"run": run, "truth": truth, "module": Regression(Ending)}


# --------------------------------------------------------------------------- optimisers


class ListedOptimizer(Regression):
    """Builds the optimiser from named sub-modules and so forgets the gates."""

    def configure_optimizers(self):
        listed = [p for block in self.blocks for p in block.f.parameters()]
        return torch.optim.SGD([*listed, *self.head.parameters()], lr=0.1)


@case(
    "optimizer_built_from_an_explicit_list",
    "fit",
    {
        "gradient": {name: "alive" for name in GATES},
        "optimizer": {name: "not held" for name in GATES},
        "moved": {name: False for name in GATES},
        "raises_before": "first batch",
        "names_in_text": GATES,
    },
    summary="Gates have gradients but sit in no parameter group: stop before the first batch.",
    lightning=True,
)
def explicit_list():
    run = simple_fit(ListedOptimizer)

    @in_temporary_folder
    def truth(fresh, root):
        seen = fresh()["run"](lambda: [RawProbe()], root)
        (probe,) = seen["callbacks"]
        assert set(probe.after_backward[0].values()) == {"live"}
        held = {id(p) for o in seen["trainer"].optimizers for g in o.param_groups for p in g["params"]}
        for name, parameter in seen["module"].named_parameters():
            assert (id(parameter) in held) == (name not in GATES), name
        assert all(float(v[n]) == 0.0 for v in probe.values for n in GATES)

    return {"run": run, "truth": truth, "module": ListedOptimizer()}


class Adversarial(pl.LightningModule):
    """Gated generator and a critic with their own optimisers; the critic goes first."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(Gated(), Gated())
        self.critic = nn.Linear(FEATURES, 1)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        critic_opt, generator_opt = self.optimizers()
        fake = self.generator(x)
        critic_opt.zero_grad()
        self.manual_backward(self.critic(fake.detach()).mean() - self.critic(x).mean())
        critic_opt.step()
        generator_opt.zero_grad()
        self.manual_backward((self.critic(self.generator(x)) - 1.0).square().mean())
        generator_opt.step()

    def configure_optimizers(self):
        return (
            torch.optim.SGD(self.critic.parameters(), lr=0.05),
            torch.optim.SGD(self.generator.parameters(), lr=0.05),
        )


@case(
    "two_optimizers_by_hand_critic_first",
    "fit",
    {
        "gradient": {f"generator.{i}.gate": "alive" for i in range(2)},
        "judged_at": "the generator's own optimiser step",
        "must_not_say": {1: {f"generator.{i}.gate": ["missing"] for i in range(2)}},
        "raises": None,
    },
    summary="Manual optimisation: in the critic's backward the gates have no gradient, which means nothing.",
    lightning=True,
)
def two_optimizers():
    run = simple_fit(Adversarial)

    @in_temporary_folder
    def truth(fresh, root):
        probe = fresh()["run"](lambda: [RawProbe()], root)["callbacks"][0]
        assert set(probe.after_backward[0].values()) == {"missing"}
        assert probe.before_step[0][0] == 0
        assert set(probe.before_step[0][1].values()) == {"missing"}
        assert probe.before_step[1][0] == 1
        assert set(probe.before_step[1][1].values()) == {"live"}
        assert (
            probe.hooks[3:7]
            == [
                "on_after_backward",
                "on_before_optimizer_step",
            ]
            * 2
        ), probe.hooks

    return {"run": run, "truth": truth, "module": Adversarial()}


@case(
    "accumulate_two_batches_and_clip_hard",
    "fit",
    {
        "gradient": {name: "alive" for name in GATES},
        "records": "one per optimiser step, before clipping",
        "optimizer_steps": 2,
        "raises": None,
    },
    summary="Accumulation of 2 with clipping at 1e-3: four backwards, two records, unclipped values.",
    lightning=True,
)
def accumulate_and_clip():
    kwargs = dict(accumulate_grad_batches=2, gradient_clip_val=1e-3)
    run = simple_fit(Regression, **kwargs)

    @in_temporary_folder
    def truth(fresh, root):
        seen = fresh()["run"](lambda: [RawProbe()], root)
        probe = seen["callbacks"][0]
        assert len(probe.after_backward) == 4
        assert len(probe.before_step) == 2
        assert all(max(s.values()) > 2e-3 for s in probe.sizes), probe.sizes
        clipped = [p.grad.abs().max() for n, p in seen["module"].named_parameters() if n in GATES]
        assert max(clipped) <= 1e-3

    return {"run": run, "truth": truth, "module": Regression(), "trainer_kwargs": kwargs}


class Loud(Regression):
    """Loss large enough that the scaled gradients overflow at first."""

    def training_step(self, batch, batch_idx):
        return 1e3 * self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


@case(
    "gradient_scaler_skips_the_first_steps",
    "fit",
    {
        "gradient": {name: "alive" for name in GATES},
        "must_not_say": {1: {name: ["nonfinite", "dead"] for name in GATES}},
        "judged_at": "the first step the scaler accepts",
        "raises": None,
    },
    summary="CPU GradScaler with a huge loss: gradients are inf while the scale comes down.",
    lightning=True,
)
def gradient_scaler():
    def run(make_callbacks=none, root="."):
        callbacks = make_callbacks()
        module = Loud()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        trainer = make_trainer(
            root,
            callbacks,
            max_epochs=20,
            plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        )
        trainer.fit(module, loader())
        return {"module": module, "callbacks": callbacks, "scaler": scaler}

    @in_temporary_folder
    def truth(fresh, root):
        seen = fresh()["run"](lambda: [RawProbe()], root)
        (probe,) = seen["callbacks"]
        kinds = [set(k.values()) for _, k in probe.before_step]
        assert kinds[0] == {"nonfinite"}, kinds
        finite = kinds.index({"live"})
        for name in GATES:
            still = [float(v[name]) == 0.0 for v in probe.values]
            accepted = still.index(False) - 1
            # finite gate gradients do not prove that the step is taken: the head overflows longer
            assert 0 < finite <= accepted < 40, (finite, accepted)
            assert kinds[accepted] == {"live"}
        assert seen["scaler"].get_scale() < 2.0**16

    return {"run": run, "truth": truth, "module": Loud()}


class SometimesNothing(Regression):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 0 else self.loss(batch)


@case(
    "training_step_returns_none_once",
    "fit",
    {
        "gradient": {name: "alive" for name in GATES},
        "decided_at_step": {name: 2 for name in GATES},
        "must_not_say": {1: {name: ["missing", "dead"] for name in GATES}},
        "raises": None,
    },
    summary="First training_step returns None: no backward, yet the optimiser hook fires with no gradients.",
    lightning=True,
)
def returns_none():
    run = simple_fit(SometimesNothing)

    @in_temporary_folder
    def truth(fresh, root):
        probe = fresh()["run"](lambda: [RawProbe()], root)["callbacks"][0]
        assert len(probe.before_step) == 4
        assert len(probe.after_backward) == 3
        assert set(probe.before_step[0][1].values()) == {"missing"}
        assert set(probe.before_step[1][1].values()) == {"live"}

    return {"run": run, "truth": truth, "module": SometimesNothing()}


class WarmUp(Regression):
    """Learning rate 0 for the first two steps."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step >= 2))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@case(
    "learning_rate_zero_for_two_steps",
    "fit",
    {
        "gradient": {name: "alive" for name in GATES},
        "moved_after_step": {name: 3 for name in GATES},
        "must_not_warn": "did not move",
        "raises": None,
    },
    summary="Warm-up that starts at 0: gates are alive but cannot move before step 3.",
    lightning=True,
)
def warm_up():
    run = simple_fit(WarmUp)

    @in_temporary_folder
    def truth(fresh, root):
        probe = fresh()["run"](lambda: [RawProbe()], root)["callbacks"][0]
        assert set(probe.after_backward[0].values()) == {"live"}
        for name, step in fresh()["expect"]["moved_after_step"].items():
            moved = [float(v[name]) != 0.0 for v in probe.values]
            assert moved.index(True) == step, moved

    return {"run": run, "truth": truth, "module": WarmUp()}


# --------------------------------------------------------------------------- logging, copies


@case(
    "no_logger_at_all",
    "fit",
    {
        "gradient": {name: "alive" for name in GATES},
        "history_in_memory": True,
        "trainer_loggers": 0,
        "raises": None,
    },
    summary="logger=False: nothing to log to, the callback still keeps its history.",
    lightning=True,
)
def no_logger():
    run = simple_fit(Regression, logger=False, log_every_n_steps=1)

    @in_temporary_folder
    def truth(fresh, root):
        seen = fresh()["run"](lambda: [RawProbe()], root)
        assert seen["trainer"].logger is None
        assert seen["trainer"].loggers == []
        assert set(seen["callbacks"][0].after_backward[0].values()) == {"live"}

    return {"run": run, "truth": truth, "module": Regression()}


class InsertLate(pl.Callback):
    """Stand-in that registers one new scalar on every block in ``setup``."""

    def setup(self, trainer, pl_module, stage):
        if stage == "fit":
            for block in pl_module.blocks:
                if not hasattr(block, "extra_gate"):
                    block.register_parameter("extra_gate", nn.Parameter(torch.zeros(1)))


@case(
    "weight_averaging_listed_before_the_inserter",
    "fit",
    {
        "order": {
            "ours first": {"raises": None},
            "averaging first": {"raises_before": "first batch", "names_in_text": ["WeightAveraging"]},
        },
        "applies_when": "parameters are inserted",
    },
    summary="EMA averaging copies the module in its setup: parameters inserted afterwards break it.",
    lightning=True,
)
def averaging_order():
    def run(make_callbacks=none, root=".", averaging_first=False):
        ours, average = make_callbacks(), [EMAWeightAveraging(decay=0.5)]
        module = Regression(Ending)
        ordered = [*average, *ours] if averaging_first else [*ours, *average]
        trainer = make_trainer(root, ordered)
        trainer.fit(module, loader())
        return {"module": module, "callbacks": ours}

    @in_temporary_folder
    def truth(fresh, root):
        fresh()["run"](none, root, averaging_first=True)
        fresh()["run"](lambda: [InsertLate()], root, averaging_first=False)
        try:
            fresh()["run"](lambda: [InsertLate()], root, averaging_first=True)
        except Exception:
            return
        raise AssertionError("averaging before inserting was expected to crash")

    return {"run": run, "truth": truth, "module": Regression(Ending)}


# --------------------------------------------------------------------------- two processes


class WriteRank(pl.Callback):
    """Saves raw facts of each process to a file, because spawned processes share no memory."""

    def __init__(self, root):
        self.root, self.kinds, self.start = str(root), None, None

    def on_train_start(self, trainer, pl_module):
        self.start = {n: p.detach().clone() for n, p in pl_module.named_parameters()}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if self.kinds is None:
            grads = {n: p.grad.clone() for n, p in pl_module.named_parameters() if n in TAILS}
            self.kinds = {n: bool((g != 0).any()) for n, g in grads.items()}
            torch.save(
                {"start": self.start, "alive": self.kinds, "grads": grads, "world": trainer.world_size},
                f"{self.root}/rank{trainer.global_rank}.pt",
            )


@case(
    "two_gloo_processes",
    "fit",
    {
        "zeroed": TAILS,
        "identity": CLOSED,
        "gradient": {name: "alive" for name in TAILS},
        "same_verdict_on_every_rank": True,
        "raises": None,
    },
    summary="ddp_spawn with two CPU processes: same zeros and same verdict on both ranks.",
    lightning=True,
    slow=True,
)
def two_processes():
    kwargs = dict(strategy="ddp_spawn", devices=2, max_epochs=1, limit_train_batches=2)

    def run(make_callbacks=none, root="."):
        recorder = WriteRank(root)
        trainer = make_trainer(root, [*make_callbacks(), recorder], **kwargs)
        trainer.fit(Regression(Ending), loader())
        return {"ranks": [torch.load(f"{root}/rank{r}.pt") for r in range(2)]}

    @in_temporary_folder
    def truth(fresh, root):
        ranks = fresh()["run"](lambda: [ZeroIn("setup")], root)["ranks"]
        for rank in ranks:
            assert rank["world"] == 2
            assert all(rank["start"][n].abs().max() == 0 for n in TAILS)
            assert all(rank["alive"].values())
        for name in TAILS:
            assert torch.equal(ranks[0]["grads"][name], ranks[1]["grads"][name])

    return {"run": run, "truth": truth, "module": Regression(Ending), "trainer_kwargs": kwargs}


# --------------------------------------------------------------------------- compile


class CompiledBlocks(Regression):
    def __init__(self):
        super().__init__(Ending)
        self.fast = torch.compile(self.blocks, backend="eager")

    def forward(self, x):
        return self.head(self.fast(x))


@case(
    "compiled_submodule_and_late_hooks",
    "fit",
    {
        "zeroed": TAILS,
        "identity": CLOSED,
        "gradient": {name: "alive" for name in TAILS},
        "names_without": "_orig_mod",
        "late_hooks": {"calls": 0, "warn": "0 calls"},
    },
    summary="Blocks run through torch.compile: zero values take effect, hooks added after it never fire.",
    lightning=True,
    slow=True,
)
def compiled_submodule():
    def run(make_callbacks=none, root="."):
        torch._dynamo.reset()
        callbacks = make_callbacks()
        module = CompiledBlocks()
        trainer = make_trainer(root, callbacks)
        trainer.fit(module, loader())
        return {"module": module, "callbacks": callbacks}

    class HookIn(pl.Callback):
        def __init__(self, where):
            self.where, self.calls = where, 0

        def _add(self, pl_module):
            pl_module.blocks[0].register_forward_hook(self._count)

        def _count(self, module, inputs, output):
            self.calls += 1

        def on_fit_start(self, trainer, pl_module):
            if self.where == "on_fit_start":
                self._add(pl_module)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if self.where == "after first batch" and batch_idx == 0:
                self._add(pl_module)

    @in_temporary_folder
    def truth(fresh, root):
        seen = fresh()["run"](lambda: [ZeroIn("setup"), RawProbe(TAILS)], root)
        assert set(seen["callbacks"][1].after_backward[0].values()) == {"live"}
        early = fresh()["run"](lambda: [HookIn("on_fit_start")], root)["callbacks"][0]
        late = fresh()["run"](lambda: [HookIn("after first batch")], root)["callbacks"][0]
        assert (early.calls, late.calls) == (4, 0)
        names = [n for n, _ in seen["module"].named_parameters(remove_duplicate=False)]
        assert any("_orig_mod" in n for n in names)
        # compiled forward does see the in-place zero
        torch._dynamo.reset()
        module, x = CompiledBlocks(), fixed(4, FEATURES)
        with torch.no_grad():
            module.fast(x)
            for name, parameter in module.named_parameters():
                if name in TAILS:
                    parameter.zero_()
            assert torch.equal(module.fast(x), x)

    return {"run": run, "truth": truth, "module": Regression(Ending)}


# --------------------------------------------------------------------------- traces


class Counting(Regression):
    """Updates a metric object inside training_step."""

    def __init__(self):
        super().__init__()
        from torchmetrics import SumMetric

        self.rows = SumMetric()

    def training_step(self, batch, batch_idx):
        self.rows.update(float(len(batch[0])))
        return self.loss(batch)


class ExtraStep(pl.Callback):
    """An intrusive stand-in: runs training_step once more before the first batch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            with torch.no_grad():
                pl_module.training_step(batch, batch_idx)


@case(
    "metric_in_training_step_is_not_polluted",
    "fit",
    {
        "metric": {"rows": 32.0},
        "gradient": {name: "alive" for name in GATES},
        "extra_training_steps": 0,
    },
    summary="A row-counting metric has to read 32 after one epoch; a probing extra step makes it 40.",
    lightning=True,
)
def metric_not_polluted():
    run = simple_fit(Counting)

    @in_temporary_folder
    def truth(fresh, root):
        plain = fresh()["run"](lambda: [RawProbe()], root)
        assert float(plain["module"].rows.compute()) == 32.0
        assert set(plain["callbacks"][0].after_backward[0].values()) == {"live"}
        intruded = fresh()["run"](lambda: [ExtraStep()], root)
        assert float(intruded["module"].rows.compute()) == 40.0

    return {"run": run, "truth": truth, "module": Counting()}


class NormDropout(pl.LightningModule):
    """BatchNorm and dropout, so that any extra forward leaves a trace."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES))
        self.blocks = nn.Sequential(Gated(), Gated())
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(FEATURES, TARGETS)
        self.losses: list[float] = []

    def forward(self, x):
        return self.head(self.drop(self.blocks(self.stem(x))))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fingerprint(module, trainer) -> str:
    """Hash of parameters, buffers, optimiser state, random state and the losses."""
    digest = hashlib.sha256()

    def add(value):
        if torch.is_tensor(value):
            digest.update(value.detach().contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            digest.update(repr(value).encode())

    add(module.state_dict())
    add([o.state_dict() for o in trainer.optimizers])
    add(module.losses)
    add(torch.get_rng_state())
    return digest.hexdigest()


class ExtraForward(pl.Callback):
    """An intrusive stand-in: one forward pass in training mode before the first batch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            with torch.no_grad():
                pl_module(batch[0])


@case(
    "no_trace_with_norm_dropout_and_workers",
    "fit",
    {
        "gradient": {name: "alive" for name in GATES},
        "identity": CLOSED,
        "same_fingerprint": True,
        "mode": "observe only",
    },
    summary="Five steps with BN, dropout and a shuffled two-worker loader: bit-identical with and without.",
    lightning=True,
    slow=True,
)
def no_trace():
    def run(make_callbacks=none, root="."):
        callbacks = make_callbacks()
        pl.seed_everything(11, verbose=False)
        module = NormDropout()
        trainer = make_trainer(root, callbacks, max_steps=5, max_epochs=-1)
        data = DataLoader(table(48), batch_size=8, shuffle=True, num_workers=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, data)
        return {"fingerprint": fingerprint(module, trainer), "losses": module.losses, "callbacks": callbacks}

    @in_temporary_folder
    def truth(fresh, root):
        plain = fresh()["run"](none, root)
        again = fresh()["run"](lambda: [RawProbe(), FirstIdentity()], root)
        assert plain["losses"] == again["losses"]
        assert len(plain["losses"]) == 5
        assert plain["fingerprint"] == again["fingerprint"]
        assert set(again["callbacks"][0].after_backward[0].values()) == {"live"}
        assert all(again["callbacks"][1].equal.values())
        intruded = fresh()["run"](lambda: [ExtraForward()], root)
        assert intruded["fingerprint"] != plain["fingerprint"]

    return {"run": run, "truth": truth, "module": NormDropout()}


# --------------------------------------------------------------------------- cost


class HostReads(TorchDispatchMode):
    """Counts operations that make the host wait for a tensor's value."""

    watched = ("_local_scalar_dense", "equal", "is_nonzero")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in self.watched:
            self.count += 1
        return function(*args, **(kwargs or {}))


class PerStep(pl.Callback):
    """Reads the counter at the end of every batch; has to be the last callback."""

    def __init__(self, counter):
        self.counter, self.marks = counter, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.marks.append(self.counter.count)


@case(
    "forty_eight_blocks_without_host_reads",
    "fit",
    {
        "identity": {f"blocks.{i}": ("closed",) for i in range(48)},
        "gradient": {f"blocks.{i}.gate": "alive" for i in range(48)},
        "host_syncs_added": {"silent steps after step 3": 0, "a logging step": "at most 2"},
    },
    summary="48 gates, logging every 10 steps: no .item() on the steps between, one transfer when logging.",
    lightning=True,
)
def host_reads():
    def run(make_callbacks=none, root="."):
        callbacks, counter = make_callbacks(), HostReads()
        marks = PerStep(counter)
        module = Regression(Gated, depth=48, lr=0.01)
        trainer = make_trainer(root, [*callbacks, marks], max_steps=20, max_epochs=-1, log_every_n_steps=10)
        with counter:
            trainer.fit(module, loader())
        steps = [b - a for a, b in zip([0, *marks.marks], marks.marks, strict=False)]
        return {"reads_per_step": steps, "module": module, "callbacks": callbacks}

    class ItemEveryStep(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            for name, parameter in pl_module.named_parameters():
                if name.endswith("gate"):
                    parameter.grad.abs().max().item()

    @in_temporary_folder
    def truth(fresh, root):
        plain = fresh()["run"](none, root)["reads_per_step"]
        assert len(plain) == 20
        assert max(plain[3:]) <= 1, plain  # one per epoch start
        costly = fresh()["run"](lambda: [ItemEveryStep()], root)["reads_per_step"]
        assert [c - p for c, p in zip(costly, plain, strict=False)][3:] == [48] * 17, costly
        probe, same = fresh()["run"](lambda: [RawProbe(), FirstIdentity()], root)["callbacks"]
        assert set(probe.after_backward[0].values()) == {"live"}
        assert all(same.equal.values())

    return {"run": run, "truth": truth, "module": Regression(Gated, depth=48, lr=0.01)}


class LiveTensors(pl.Callback):
    """Counts tensors with the batch's unusual row number that are alive at two steps."""

    rows = 13

    def __init__(self, steps):
        self.steps, self.seen = steps, {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step in self.steps:
            gc.collect()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                alive = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
            shaped = [t for t in alive if t.ndim == 2 and len(t) == self.rows]
            self.seen[trainer.global_step] = len(shaped)


@case(
    "no_activation_kept_alive_over_steps",
    "fit",
    {
        "gradient": {name: "alive" for name in GATES},
        "live_tensors_added": 0,
        "observe": {"steps": [10, 58]},
    },
    summary="Batch-sized tensors alive at step 58 must be as many as at step 10.",
    lightning=True,
)
def nothing_kept():
    def run(make_callbacks=none, root="."):
        callbacks, counter = make_callbacks(), LiveTensors((10, 58))
        trainer = make_trainer(root, [*callbacks, counter], max_steps=62, max_epochs=-1)
        trainer.fit(Regression(), loader(52, LiveTensors.rows))
        return {"alive": counter.seen, "callbacks": callbacks}

    class Hoarder(pl.Callback):
        def __init__(self):
            self.kept = []

        def on_fit_start(self, trainer, pl_module):
            pl_module.blocks[0].register_forward_hook(lambda m, i, o: self.kept.append(o))

    @in_temporary_folder
    def truth(fresh, root):
        plain = fresh()["run"](none, root)["alive"]
        assert plain[10] == plain[58] > 0, plain
        hoarded = fresh()["run"](lambda: [Hoarder()], root)["alive"]
        assert hoarded[58] - hoarded[10] >= 48, hoarded
        probe = fresh()["run"](lambda: [RawProbe()], root)["callbacks"][0]
        assert set(probe.after_backward[0].values()) == {"live"}

    return {"run": run, "truth": truth, "module": Regression()}
