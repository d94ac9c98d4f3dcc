"""A golden log of Trainer runs of many kinds: what every hook of the callback says, warns, raises and records.

``python tests/judge/test_golden_log.py`` writes it anew, which is right only where a verdict was meant to change.
"""

import contextlib
import json
import linecache
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.plugins import MixedPrecision
from networks import WIDTH, Classifier, Plain, PostNorm, Scaled, data, stack, trainer

from lit_resinit import ResidualInit, ResInitWarning
from lit_resinit.watch.history import QUANTITIES

GOLDEN = Path(__file__).with_name("golden_log.json")
HOOKS = (
    "setup",
    "on_fit_start",
    "on_train_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_exception",
    "teardown",
)

LINE = re.compile(r"[^\s(\"']*?([\w.]+\.py):(\d+)")
NUMBER = re.compile(r"(\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+)")


# -------------------------------------------------------------------- what is run


class Shut(Scaled):
    """A zero scale before a ReLU: dead."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.scale * self.f(x))


class Rooted(Scaled):
    """An operation that is infinitely steep at zero, for both signs."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * self.f(x)
        return x + y.sign() * y.abs().sqrt()


class Masked(Scaled):
    """The branch is multiplied by the last feature."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.f(x) * x[..., -1:]


class Rows(Masked):
    """A masked branch for the rows whose first feature is positive."""

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero()[:, 0]
        return x.index_add(0, rows, super().forward(x[rows]) - x[rows])


class Dropping(Scaled):
    """Stochastic depth, for the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.f(x) * x.new_empty(1).bernoulli_(0.2)


class Faint(Scaled):
    """Hardly any of the error reaches the gate."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.f(x) * 1e-5


class Loud(Scaled):
    """The error at the gate is far larger than elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.f(x) * 1e8


class Using(Classifier):
    """Steps with the optimizer that it is given."""

    def __init__(self, net: nn.Module, build: Callable[[nn.Module], Any]) -> None:
        super().__init__(net)
        self.build = build

    def configure_optimizers(self) -> Any:
        return self.build(self)


class Layerwise(torch.optim.SGD):
    """The step is scaled by the norm of the parameter, so that a zero never moves."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.data -= 0.1 * p.grad * p.data.norm() / (p.grad.norm() + 1e-12)
        return loss


class Sometimes(Classifier):
    """No loss in the batches of a list."""

    def __init__(self, net: nn.Module, without: tuple[int, ...]) -> None:
        super().__init__(net)
        self.without = without

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return None if batch_idx in self.without else super().training_step(batch, batch_idx)


class Manual(Classifier):
    """Two optimizers by hand: the head's first, then the blocks'."""

    def __init__(self, net: nn.Module, raw: bool = False) -> None:
        super().__init__(net)
        self.automatic_optimization, self.raw = False, raw

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            loss = cross_entropy(self(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward() if self.raw else self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[-1], self.net[:-1])]


class Adversaries(pl.LightningModule):
    """The discriminator steps first, on samples without gradients; the generator in every ``rest``-th batch."""

    def __init__(self, rest: int, block: Any = Scaled) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.g, self.d, self.rest = stack(block, outputs=WIDTH), stack(Scaled, outputs=1), rest
        nn.init.zeros_(self.d[-1].weight)

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


class Tuned(Classifier):
    """A backbone and a head."""

    def __init__(self, block: Any) -> None:
        super().__init__(nn.Identity())
        self.backbone, self.head = nn.Sequential(block(), block()), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Breaks(Classifier):
    """A mistake of the user's in the second real step."""

    real = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.real += not isinstance(loss, torch._subclasses.FakeTensor)
        if self.real > 1:
            raise KeyError("my own mistake")
        return loss


class Overflowing(torch.amp.GradScaler):
    """Starts so high that its first steps overflow, or all of them."""

    def __init__(self, backoff: float) -> None:
        super().__init__("cpu", init_scale=2.0**100, backoff_factor=backoff)


def scaler(backoff: float) -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", Overflowing(backoff))]}


def closed(block: type[Scaled], head: float = 1.0, depth: int = 2) -> nn.Sequential:
    """Blocks that arrive closed, and a head that is scaled."""
    net = stack(lambda: block(value=0.0), depth)
    net[-1].weight.data *= head
    return net


def masked(rows: int = 12) -> Any:
    loader = data(WIDTH, rows=rows)
    loader.dataset.tensors[0][:, -1] = 0.0
    return loader


def positive_late(rows: int = 40) -> Any:
    loader = data(WIDTH, rows=rows)
    loader.dataset.tensors[0].abs_()
    loader.dataset.tensors[0][:-8, 0] *= -1.0
    return loader


class Unfreezing(pl.Callback):
    """Unfreezes everything at one batch, as ``BaseFinetuning`` does at an epoch."""

    def __init__(self, at: int) -> None:
        self.at = at

    def unfreeze_and_add_param_group(self) -> None: ...

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, *rest: Any) -> None:
        if trainer.global_step >= self.at:
            pl_module.requires_grad_(True)


def frozen(module: Classifier) -> Classifier:
    module.net[0].scale.requires_grad_(False)
    return module


def slow(module: nn.Module) -> torch.optim.Optimizer:
    """The first gate has a learning rate of its own."""
    groups = [[p for n, p in module.named_parameters() if (n == "net.0.scale") is own] for own in (True, False)]
    return torch.optim.SGD([{"params": groups[0], "lr": 1e-9}, {"params": groups[1], "lr": 0.1}])


OBSERVE: dict[str, Any] = {"scheme": "observe"}
# name: module, options of the callback, options of the Trainer (``loader`` and ``others`` among them)
RUNS: dict[str, tuple[Callable[[], pl.LightningModule], dict[str, Any], dict[str, Any]]] = {
    "plain": (lambda: Classifier(stack(Plain)), {}, {"steps": 4}),
    "scales": (lambda: Classifier(stack(Scaled)), {}, {"steps": 4}),
    "logs every second step": (lambda: Classifier(stack(Scaled)), {"log_every_n_steps": 2}, {"steps": 5}),
    "logs never": (lambda: Classifier(stack(Scaled)), {"log_every_n_steps": 0}, {"steps": 5}),
    "the Trainer logs every third step": (lambda: Classifier(stack(Scaled)), {}, {"log_every_n_steps": 3, "steps": 5}),
    "with validation": (lambda: Classifier(stack(Plain)), {}, {"steps": 4, "validation": True}),
    "a constant scale": (lambda: Classifier(stack(Scaled)), {"scheme": "downscale"}, {}),
    "a constant scale that grows": (lambda: Classifier(stack(Plain, 40)), {"scheme": "sqrt_depth"}, {}),
    "norms on the stream": (lambda: Classifier(stack(PostNorm)), {}, {}),
    "open: raise": (lambda: Classifier(stack(Scaled)), OBSERVE, {}),
    "open: warn": (lambda: Classifier(stack(Scaled)), OBSERVE | {"identity": "warn"}, {}),
    "open: ignore": (lambda: Classifier(stack(Scaled)), OBSERVE | {"identity": "ignore"}, {}),
    "dead: raise": (lambda: Classifier(closed(Shut)), OBSERVE, {}),
    "dead: warn": (lambda: Classifier(closed(Shut)), OBSERVE | {"gradient": "warn"}, {"steps": 5}),
    "dead: ignore": (lambda: Classifier(closed(Shut)), OBSERVE | {"gradient": "ignore"}, {}),
    "NaN: raise": (lambda: Classifier(closed(Rooted)), OBSERVE, {}),
    "NaN: warn": (lambda: Classifier(closed(Rooted)), OBSERVE | {"gradient": "warn"}, {}),
    "asleep, then awake": (lambda: Classifier(closed(Scaled, head=0.0)), {}, {"steps": 5}),
    "asleep for good": (lambda: Classifier(closed(Masked)), OBSERVE | {"patience": 2}, {"loader": masked, "steps": 9}),
    "asleep for good: warn": (
        lambda: Classifier(closed(Masked)),
        OBSERVE | {"patience": 2, "gradient": "warn"},
        {"loader": masked, "steps": 9},
    ),
    "an expert without rows": (
        lambda: Classifier(closed(Rows)),
        OBSERVE | {"patience": 2},
        {"loader": positive_late, "steps": 10},
    ),
    "dropped by lot": (lambda: Classifier(closed(Dropping, depth=4)), {"patience": 2}, {"steps": 20}),
    "slow start": (lambda: Classifier(closed(Faint)), OBSERVE, {}),
    "exploding": (lambda: Classifier(nn.Sequential(Loud(value=0.0), *closed(Scaled, depth=4))), OBSERVE, {}),
    "accumulation": (
        lambda: Classifier(closed(Scaled, head=0.0)),
        {},
        {"accumulate_grad_batches": 3, "steps": 4},
    ),
    "a scaler that overflows at first": (lambda: Classifier(closed(Scaled)), {}, scaler(2.0**-20) | {"steps": 8}),
    "a scaler that always overflows": (lambda: Classifier(closed(Scaled)), {}, scaler(1.0 - 1e-9) | {"steps": 100}),
    "a scaler and a dead gate": (lambda: Classifier(closed(Shut)), OBSERVE, scaler(2.0**-20) | {"steps": 8}),
    "a scaler and accumulation": (
        lambda: Classifier(closed(Scaled)),
        {},
        scaler(2.0**-20) | {"accumulate_grad_batches": 2, "steps": 8},
    ),
    "a scaler and sleepers": (
        lambda: Classifier(closed(Scaled, head=0.0)),
        {},
        scaler(2.0**-20) | {"steps": 12},
    ),
    "by hand": (lambda: Manual(stack(Scaled)), {}, {"steps": 8}),
    "by hand, raw": (lambda: Manual(stack(Plain), raw=True), {}, {"steps": 8}),
    "by hand, dead": (lambda: Manual(closed(Shut)), OBSERVE, {}),
    "by hand, open": (lambda: Manual(stack(Scaled)), OBSERVE | {"identity": "warn"}, {"steps": 6}),
    "adversaries": (lambda: Adversaries(1), {}, {"steps": -1, "max_epochs": 2}),
    "adversaries that step apart": (lambda: Adversaries(2), {}, {"steps": -1, "max_epochs": 4}),
    "a dead generator": (
        lambda: Adversaries(2, lambda: Shut(value=0.0)),
        {"gradient": "warn"},
        {"steps": -1, "max_epochs": 4},
    ),
    "no loss at first": (
        lambda: Sometimes(stack(Scaled), (0, 1)),
        {"example_inputs": torch.ones(2, WIDTH)},
        {"steps": 4},
    ),
    "no loss in between": (
        lambda: Sometimes(closed(Scaled, head=0.0), (1,)),
        {"log_every_n_steps": 1},
        {"steps": -1, "max_epochs": 2},
    ),
    "warm-up from zero": (
        lambda: Using(closed(Scaled, head=0.0), lambda m: torch.optim.SGD(m.parameters(), lr=0.0)),
        {"patience": 1},
        {"steps": 4},
    ),
    "an optimizer that cannot leave zero": (
        lambda: Using(stack(Scaled), lambda m: Layerwise(m.parameters(), lr=0.1)),
        {},
        {"steps": 7},
    ),
    "a closure run again": (
        lambda: Using(stack(Scaled), lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3)),
        {},
        {},
    ),
    "decay on scalars": (
        lambda: Using(stack(Plain), lambda m: torch.optim.AdamW(m.parameters(), lr=0.01)),
        {},
        {"steps": 7},
    ),
    "a gate that hardly moves": (
        lambda: Using(closed(Scaled, depth=3), slow),
        {},
        {"steps": 7},
    ),
    "frozen gates": (lambda: frozen(Classifier(closed(Scaled))), OBSERVE | {"gradient": "warn"}, {"steps": 4}),
    "frozen gates that a callback unfreezes": (
        lambda: frozen(Classifier(closed(Scaled))),
        OBSERVE | {"patience": 1},
        {"others": [Unfreezing(3)], "steps": 5},
    ),
    "frozen gates that a callback never unfreezes": (
        lambda: frozen(Classifier(closed(Scaled))),
        OBSERVE | {"patience": 1},
        {"others": [Unfreezing(9)], "steps": 4},
    ),
    "unfrozen later": (
        lambda: Tuned(lambda: Scaled(value=0.0)),
        {"patience": 2},
        {"tuning": 2, "steps": -1, "max_epochs": 4},
    ),
    "never unfrozen": (
        lambda: Tuned(lambda: Scaled(value=0.0)),
        {"patience": 2},
        {"tuning": 9, "steps": -1, "max_epochs": 2},
    ),
    "dead when unfrozen": (
        lambda: Tuned(lambda: Shut(value=0.0)),
        OBSERVE | {"patience": 2},
        {"tuning": 1, "steps": -1, "max_epochs": 6},
    ),
    "a mistake of the user's": (lambda: Breaks(stack(Plain)), {}, {}),
    "resumed": (lambda: Classifier(stack(Plain)), {}, {"steps": 3, "again": 6}),
    "fitted twice": (lambda: Classifier(closed(Scaled, head=0.0)), {}, {"steps": 3, "twice": True}),
    "resumed asleep": (
        lambda: Classifier(closed(Masked)),
        OBSERVE | {"patience": 5},
        {"loader": masked, "steps": 3, "again": 20},
    ),
}


# -------------------------------------------------------------------- the log


def texts(caught: list[warnings.WarningMessage], error: BaseException | None) -> list[str]:
    """What was warned of by us, and raised by anybody, without paths and line numbers."""
    found = [f"warns: {w.message}" for w in caught if issubclass(w.category, ResInitWarning)]
    found += [f"raises {type(error).__name__}: {error}"] if error is not None else []
    return [LINE.sub(_spoken, text) for text in found]


def _spoken(match: re.Match[str]) -> str:
    """A line of this file by its text, any other only by its file."""
    path = match.group(0).rpartition(":")[0]
    ours = Path(path).name == Path(__file__).name
    return f"<{linecache.getline(__file__, int(match.group(2))).strip()}>" if ours else f"<{match.group(1)}>"


def phase(ours: ResidualInit) -> list[str]:
    """What is known of the run, and whether anything looks on now."""
    identity, gradient = ours.identity_report, ours.gradient_report
    verdicts = [] if identity is None else [str(identity.ok), *dict.fromkeys(b.cause or "" for b in identity.branches)]
    gates = [] if gradient is None else [f"{g.parameter}: {g.status}: {g.cause}" for g in gradient.gates.values()]
    slept = [f"{n} slept {s}" for n, s in ours.state_dict()["slept"].items()]
    looks = ["looks on"] if torch._C._len_torch_dispatch_stack() else []
    records = [f"{len(ours.history)} records"] if len(ours.history) else []
    return [LINE.sub(_spoken, text) for text in (*looks, *verdicts, *gates, *slept, *records)]


def logged(log: list[Any]) -> type[ResidualInit]:
    """The callback, each of whose hooks writes into the log where something is new."""

    def wrapped(name: str) -> Callable[..., None]:
        def hook(self: Any, *args: Any, **kwargs: Any) -> None:
            error: BaseException | None = None
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    getattr(ResidualInit, name)(self, *args, **kwargs)
                except BaseException as e:
                    error = e
            step, found, now = self.steps_begun, texts(caught, error), phase(self)
            self.steps_begun += name == "on_train_batch_start"
            if found or now != self.last:
                changed = [text for text in now if text not in self.last]
                gone = [f"no more: {text}" for text in self.last if text not in now]
                log.append([step, name, found, changed + gone])
            self.last = now
            if error is not None:
                raise error

        return hook

    return type("Logged", (ResidualInit,), {"last": [], "steps_begun": 0, **{n: wrapped(n) for n in HOOKS}})


def fit(module: pl.LightningModule, ours: ResidualInit, root: Path, options: dict[str, Any], **fitting: Any) -> Any:
    options = dict(options)
    loader, tuning = options.pop("loader", lambda: data(WIDTH))(), options.pop("tuning", None)
    others = list(options.pop("others", []))
    others += [] if tuning is None else [BackboneFinetuning(unfreeze_backbone_at_epoch=tuning, verbose=False)]
    validation = [data(WIDTH)] if options.pop("validation", False) else []
    options.setdefault("max_epochs", -1)
    run = trainer(root, ours, *others, max_steps=options.pop("steps", 3), **options)
    with contextlib.suppress(RuntimeError, KeyError):  # they are in the log
        run.fit(module, loader, *validation, **fitting)
    return run


def play(name: str, root: Path) -> dict[str, Any]:
    """One run: its log, and what it recorded."""
    build, given, options = RUNS[name]
    log: list[Any] = []
    pl.seed_everything(0, verbose=False)
    kind, options = logged(log), dict(options)
    again, twice = options.pop("again", None), options.pop("twice", False)
    module, ours = build(), kind(**given)
    run = fit(module, ours, root, options)
    if again is not None:
        run.save_checkpoint(root / "run.ckpt")
        log.append([0, "resumed", [], []])
        ours = kind(**given)
        fit(build(), ours, root, options | {"steps": again}, ckpt_path=root / "run.ckpt")
    if twice:
        log.append([0, "fitted again", [], []])
        fit(module, ours, root, options)
    history = ours.history
    rows = {q: [[_plain(v) for v in row] for row in getattr(history, q).tolist()] for q in QUANTITIES}
    return {"log": log, "steps": history.steps.tolist(), "on": history.switched_on(), "rows": rows}


def _plain(value: float) -> float | None:
    return float(f"{value:.4g}") if value == value else None


def assert_alike(found: Any, golden: Any) -> None:
    """Equal, but for the last digits of numbers: other processors round otherwise."""
    if isinstance(golden, dict):
        assert list(found) == list(golden)
        for key in golden:
            assert_alike(found[key], golden[key])
    elif isinstance(golden, list):
        assert len(found) == len(golden), (found, golden)
        for one, other in zip(found, golden, strict=True):
            assert_alike(one, other)
    elif isinstance(golden, str):
        parts, others = NUMBER.split(found), NUMBER.split(golden)
        assert parts[::2] == others[::2]
        assert [float(p) for p in parts[1::2]] == pytest.approx([float(p) for p in others[1::2]], rel=0.02)
    elif isinstance(golden, float):
        assert found == pytest.approx(golden, rel=0.01, abs=1e-9)
    else:
        assert found == golden


@pytest.mark.filterwarnings("ignore:The provided params to be frozen:UserWarning")
@pytest.mark.parametrize("name", RUNS)
def test_every_hook_says_what_it_said(name: str, tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text())[name]
    found = json.loads(json.dumps(play(name, tmp_path)))
    for one, other in zip(found["log"], golden["log"], strict=False):
        assert_alike(one, other)
    assert_alike(found, golden)


def test_the_log_has_every_kind_of_word() -> None:
    text = GOLDEN.read_text()
    for word in ("RI201", "RI301", "asleep", "nonfinite", "missing", "exploding", "slow start", "slept", "looks on"):
        assert word in text
    for word in ("the stream from", "still frozen", "has not moved", "weight_decay pulls", "moved less"):
        assert word in text


if __name__ == "__main__":
    import tempfile

    warnings.simplefilter("ignore")
    found = {}
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = play(name, Path(folder))
            print(name, len(found[name]["log"]), found[name]["steps"], flush=True)
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
