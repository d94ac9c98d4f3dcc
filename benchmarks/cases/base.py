"""Small models with a known answer: what to report about each, and a proof that the answer is right.

A case is a function marked with ``@case``; calling it gives a *bundle*, a plain dict. Nothing here imports the package
under test: ``run_truth`` verifies with plain torch (or plain Lightning) that the facts written in ``expect`` hold on
this machine.

Bundle of a torch case:

* ``model``, ``args`` (inputs of the first step), ``batch(step)``, ``loss_fn(output)``, ``optimizer(params)``,
  ``scheduler(optimizer)`` where the learning rate matters.
* ``prepare``: ``check`` judges the model as it is, ``apply`` has it initialised first; ``reference_apply(model)`` is
  that initialisation by hand, ``new_parameter`` the name under which it registers an inserted scalar.
* ``branches``: name -> ``block`` (module that adds), ``gate`` (tensors whose zero closes the branch), and one of
  ``skip(block, x)`` (what a closed block returns, by default ``x``), ``output_of`` or ``contribution``.
* ``repair``: branch -> function that removes the stated culprit; ``truth(build)``: a proof of its own.

Bundle of a trainer case: ``run(make_callbacks, root)`` plays a scenario and returns raw observations.

``expect`` says what has to be reported: ``plan`` and ``not_gates`` (tensors to close, tensors to leave alone),
``identity`` (``("closed",)`` or ``("open", cause, culprit)``), ``gradient`` (parameter -> status at the first
backward; a tuple where it depends on the version of torch), ``wakes_at_step`` and ``decided_at_step`` (counted from 1),
``blocked_by`` (what an asleep gate waits for), ``must_not_say``, ``blame``, ``names_in_text`` and so on.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import statistics
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

# --------------------------------------------------------------------------- vocabulary

GRADIENT_STATUSES = ("alive", "asleep", "dead", "missing", "nonfinite", "exploding")
IDENTITY_CAUSES = (
    "unzeroed scale",
    "bias after scale",
    "ungated branch",
    "nonfinite branch",
    "stream changed",
)
EXPECT_KEYS = frozenset(
    {
        # planned and done before training
        *("plan", "not_gates", "apply", "must_not_insert", "closed_after_apply", "if_zeroed_anyway", "found_value"),
        # identity
        *("identity", "identity_must_not_say", "up_to", "naive_deviation", "first_nonfinite_module"),
        # gradients
        *("gradient", "wakes_at_step", "decided_at_step", "blocked_by", "dead_with", "also_zero", "interior_zero"),
        *("interior_wakes_at_step", "must_not_say", "noise", "zero_channels", "blame", "do_not_blame"),
        "loss_at_first_step",
        # after steps, observation, wording
        *("moved", "moved_after_step", "after_step", "after_steps", "observe", "warn", "must_not_warn", "hint"),
        *("names_in_text", "grouped_text"),
        # trainer scenarios
        *("initialised_in", "initialised_times", "zeroed", "found_in_setup", "insert_instead", "unchanged_by", "hooks"),
        *("restored_exactly", "identity_check", "raises", "raises_before", "optimizer", "judged_at", "records"),
        *("optimizer_steps", "order", "applies_when", "same_verdict_on_every_rank", "names_without", "late_hooks"),
        *("metric", "extra_training_steps", "same_fingerprint", "mode", "history_in_memory", "trainer_loggers"),
        *("host_syncs_added", "live_tensors_added"),
    }
)
STAGES = ("plan", "apply", "identity", "gradient", "update", "observe", "fit")
EXPLODING_RATIO = 1e6
DEAD_STEPS = 8  # how many optimiser steps a "dead" gate has to stay at exactly zero


# --------------------------------------------------------------------------- registry


@dataclasses.dataclass(frozen=True)
class Case:
    """One registered case; ``build()`` gives a fresh, reproducible bundle."""

    name: str
    stage: str
    expect: dict
    build: Callable[[], dict]
    summary: str
    lightning: bool
    slow: bool


REGISTRY: dict[str, Case] = {}


def case(
    name: str, stage: str, expect: dict, *, summary: str = "", lightning: bool = False, slow: bool = False
) -> Callable:
    """Register a bundle builder."""
    if stage not in STAGES:
        raise ValueError(f"{name}: unknown stage {stage!r}")
    unknown = set(expect) - EXPECT_KEYS
    if unknown:
        raise ValueError(f"{name}: unknown expectation keys {sorted(unknown)}")
    for accepted in expect.get("gradient", {}).values():
        for status in as_tuple(accepted):
            if status not in GRADIENT_STATUSES:
                raise ValueError(f"{name}: unknown gradient status {status!r}")
    for verdict in expect.get("identity", {}).values():
        if verdict[0] == "open":
            for cause in as_tuple(verdict[1]):
                if cause not in IDENTITY_CAUSES:
                    raise ValueError(f"{name}: unknown identity cause {cause!r}")

    def register(function: Callable[[], dict]) -> Callable[[], dict]:
        if name in REGISTRY:
            raise ValueError(f"case name used twice: {name}")

        def build() -> dict:
            torch.manual_seed(zlib.crc32(name.encode()))
            bundle = function()
            bundle.setdefault("expect", expect)
            if lightning:
                bundle.setdefault("trainer_kwargs", getattr(bundle["run"], "trainer_kwargs", {}))
            else:
                bundle.setdefault("prepare", "check")
                bundle.setdefault("optimizer", plain_sgd)
                bundle.setdefault("batch", _same_batch(bundle["args"]))
                bundle.setdefault("branches", {})
                bundle["model"].train(bundle.get("train_mode", True))
            return bundle

        doc = (function.__doc__ or "").strip().split("\n\n")[0]
        text = summary or " ".join(doc.split())
        REGISTRY[name] = Case(name, stage, expect, build, text, lightning, slow)
        return build

    return register


def _same_batch(args: tuple) -> Callable[[int], tuple]:
    return lambda step: args


def load() -> dict[str, Case]:
    """Every case, after importing the case files."""
    for info in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{info.name}")
    return dict(REGISTRY)


# --------------------------------------------------------------------------- small helpers


def plain_sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def as_tuple(value) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def fixed(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """A reproducible normal tensor that does not touch the global generator."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return scale * torch.randn(shape, generator=generator)


def squared_error(*shape: int, seed: int = 77) -> Callable:
    """Mean squared distance to a fixed random target of the given shape."""
    target = fixed(*shape, seed=seed)
    return lambda output: (output - target).square().mean()


def zero_(*tensors: torch.Tensor | None) -> None:
    with torch.no_grad():
        for tensor in tensors:
            if tensor is not None:
                tensor.zero_()


def named_tensor(model: nn.Module, name: str) -> torch.Tensor:
    """Parameter by dotted name (first name of a shared parameter also works)."""
    return dict(model.named_parameters(remove_duplicate=False))[name]


def classify(grad: torch.Tensor | None) -> str:
    """One of ``missing``, ``nonfinite``, ``zero``, ``live`` for a raw gradient."""
    if grad is None:
        return "missing"
    grad = grad.detach()
    if not bool(torch.isfinite(grad).all()):
        return "nonfinite"
    return "live" if bool((grad != 0).any()) else "zero"


def prepared(bundle: dict) -> nn.Module:
    """The model in the state to be judged: closed by hand where the package would close it."""
    if bundle["prepare"] == "apply":
        bundle["reference_apply"](bundle["model"])
    return bundle["model"]


# --------------------------------------------------------------------------- gradients


@dataclasses.dataclass
class StepRecord:
    loss: float
    kind: dict[str, str]  # parameter name -> classify(grad)
    size: dict[str, float]  # parameter name -> max |grad| (nan when missing)
    value: dict[str, float]  # parameter name -> max |parameter| before the step


def train_log(
    bundle: dict,
    steps: int,
    optimizer: Callable | None = None,
    change: Callable[[nn.Module], None] | None = None,
) -> list[StepRecord]:
    """Train with plain torch and note every parameter's gradient at each step."""
    model = prepared(bundle)
    if change is not None:
        with torch.no_grad():
            change(model)
    opt = (optimizer or bundle["optimizer"])([p for p in model.parameters() if p.requires_grad])
    scheduler = bundle["scheduler"](opt) if "scheduler" in bundle else None
    log = []
    for step in range(1, steps + 1):
        opt.zero_grad(set_to_none=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = bundle["loss_fn"](model(*bundle["batch"](step)))
            if loss.requires_grad:
                loss.backward()
        kind, size, value = {}, {}, {}
        for name, parameter in model.named_parameters():
            kind[name] = classify(parameter.grad)
            grad = parameter.grad
            size[name] = float("nan") if grad is None else float(grad.detach().abs().max())
            value[name] = float(parameter.detach().abs().max())
        log.append(StepRecord(float(loss.detach()), kind, size, value))
        opt.step()
        if scheduler is not None:
            scheduler.step()
    return log


def _adam(params) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def check_gradient(fresh: Callable[[], dict]) -> None:
    """Verify ``gradient``, ``wakes_at_step``, ``blocked_by``, ``dead_with``, ``must_not_say``."""
    expect = fresh()["expect"]
    wanted = expect["gradient"]
    wakes = expect.get("wakes_at_step", {})
    decided = expect.get("decided_at_step", {})
    horizon = max([3, *wakes.values(), *decided.values()])
    log = train_log(fresh(), horizon)
    sizes = [log[0].size[n] for n in wanted if log[0].kind[n] == "live"]
    median = statistics.median(sizes) if sizes else float("nan")
    for name, accepted in wanted.items():
        status = as_tuple(accepted)[0]
        first = decided.get(name, 1)
        seen = [record.kind[name] for record in log]
        here = f"{name}: expected {status}, raw gradients {seen}"
        if status == "alive":
            assert seen[first - 1] == "live", here
            assert first > 1 or log[0].size[name] <= EXPLODING_RATIO * median, here
        elif status == "exploding":
            assert seen[0] == "live", here
            assert log[0].size[name] > EXPLODING_RATIO * median, (here, log[0].size, median)
        elif status == "missing":
            assert set(seen) == {"missing"}, here
        elif status == "nonfinite":
            assert seen[0] == "nonfinite", here
        elif status == "asleep":
            when = wakes[name]
            assert all(s == "zero" for s in seen[: when - 1]), here
            assert seen[when - 1] == "live", here
        elif status == "dead":
            for factory in (None, _adam):
                long = [r.kind[name] for r in train_log(fresh(), DEAD_STEPS, factory)]
                assert set(long) == {"zero"}, f"{name}: expected dead, raw gradients {long}"
    for name, blockers in expect.get("blocked_by", {}).items():
        for blocker in as_tuple(blockers):
            assert log[0].value[blocker] == 0.0, f"{blocker} is not zero at the first step"
            own = log[0].kind[blocker]
            assert own == "live" or blocker in wakes, f"{blocker} itself never moves: {own}"
        opened = train_log(fresh(), 1, change=_opener(as_tuple(blockers)))
        assert opened[0].kind[name] == "live", f"opening {blockers} does not wake {name}"
    for name, partners in expect.get("dead_with", {}).items():
        for partner in as_tuple(partners):
            assert log[0].value[partner] == 0.0, f"{partner} is not zero"
        opened = train_log(fresh(), 1, change=_opener(as_tuple(partners)))
        assert opened[0].kind[name] == "live", f"opening {partners} does not revive {name}"
    _check_forbidden(expect, log)
    for name, channels in expect.get("zero_channels", {}).items():
        bundle = fresh()
        model = prepared(bundle)
        bundle["loss_fn"](model(*bundle["batch"](1))).backward()
        grad = named_tensor(model, name).grad.reshape(-1)
        assert torch.nonzero(grad == 0).reshape(-1).tolist() == list(channels), grad


def _opener(names: tuple) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        for i, name in enumerate(names):
            tensor = named_tensor(model, name)
            tensor.copy_(fixed(*tensor.shape, seed=500 + i, scale=0.3).to(tensor.dtype))

    return change


def _check_forbidden(expect: dict, log: list[StepRecord]) -> None:
    """A forbidden status must really be wrong: the raw facts must contradict it."""
    for step, per_name in expect.get("must_not_say", {}).items():
        for name, statuses in per_name.items():
            later = [record.kind[name] for record in log[step:]]
            for status in statuses:
                if status in ("dead", "missing"):
                    assert "live" in later, f"{name} never gets a gradient, {status} would be right"
                elif status == "alive":
                    assert log[step - 1].kind[name] != "live", f"{name} is alive at step {step}"


def check_interior_silent(fresh: Callable[[], dict]) -> None:
    """``interior_zero``: ordinary weights with zero gradient at step 1 that are no gates."""
    log = train_log(fresh(), 2)
    for name in fresh()["expect"]["interior_zero"]:
        assert log[0].kind[name] == "zero", (name, log[0].kind[name])
        assert log[1].kind[name] == "live", (name, log[1].kind[name])


# --------------------------------------------------------------------------- identity


def block_calls(model: nn.Module, args: tuple, block: str) -> list[tuple]:
    """(cloned first input, first output) of every call of the named module."""
    calls, pending = [], []

    def before(module, inputs):
        pending.append(inputs[0].detach().clone())

    def after(module, inputs, output):
        first = output[0] if isinstance(output, tuple) else output
        calls.append((pending.pop(), first.detach().clone()))

    module = model.get_submodule(block)
    handles = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(*args)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def deviation(model: nn.Module, bundle: dict, branch: str) -> tuple[bool, float]:
    """(contribution is exactly zero, largest deviation) for one branch."""
    spec = bundle["branches"][branch]
    args = bundle["batch"](1)
    if "contribution" in spec:
        with torch.no_grad():
            value = spec["contribution"](model, args)
        return bool((value == 0).all()), float(value.abs().max())
    if "output_of" in spec:
        worst, closed = 0.0, True
        calls = block_calls(model, args, spec["output_of"])
        assert calls, f"{spec['output_of']} was never called"
        for _, out in calls:
            closed &= bool((out == 0).all())
            worst = _larger(worst, out)
        return closed, worst
    skip = spec.get("skip") or (lambda block, x: x)
    worst, closed = 0.0, True
    calls = block_calls(model, args, spec["block"])
    assert calls, f"{spec['block']} was never called"
    block = model.get_submodule(spec["block"]) if spec["block"] else model
    for x, out in calls:
        with torch.no_grad():
            reference = skip(block, x)
        closed &= bool(torch.equal(out, reference))
        worst = _larger(worst, out - reference)
    return closed, worst


def _larger(worst: float, difference: torch.Tensor) -> float:
    """Largest absolute value so far; NaN wins over everything."""
    size = float(difference.abs().max())
    return size if size != size or size > worst else worst


def check_identity(fresh: Callable[[], dict]) -> None:
    """Verify every ``identity`` verdict and, for open branches, its stated cause."""
    for branch, verdict in fresh()["expect"]["identity"].items():
        bundle = fresh()
        closed, size = deviation(prepared(bundle), bundle, branch)
        if verdict[0] == "closed":
            assert closed, f"{branch}: expected closed, deviates by {size}"
            continue
        assert not closed, f"{branch}: expected open, but it is exactly the identity"
        cause, culprit = as_tuple(verdict[1])[0], verdict[2]
        if cause == "nonfinite branch":
            assert not torch.isfinite(torch.tensor(size)), f"{branch}: deviation {size} is finite"
            continue
        repaired = fresh()
        model = prepared(repaired)
        repair = repaired.get("repair", {}).get(branch)
        if repair is not None:
            with torch.no_grad():
                repair(model)
        elif cause in ("unzeroed scale", "bias after scale"):
            zero_(named_tensor(model, culprit))
        else:
            raise AssertionError(f"{branch}: no repair given for cause {cause!r}")
        closed, size = deviation(model, repaired, branch)
        assert closed, f"{branch}: removing {culprit} leaves a deviation of {size}"


# --------------------------------------------------------------------------- format


def check_format(item: Case) -> None:
    """Every name used in an expectation has to exist in the model; every key has to be known."""
    assert item.summary, f"{item.name}: no summary"
    bundle = item.build()
    if item.lightning:
        assert callable(bundle["run"]), item.name
        assert callable(bundle["truth"]), item.name
        return
    model, expect = bundle["model"], bundle["expect"]
    names = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    names |= set(bundle.get("new_parameter", {}).values())
    modules = {n for n, _ in model.named_modules(remove_duplicate=False)}
    used = set()
    for key in ("gradient", "wakes_at_step", "decided_at_step", "blocked_by", "dead_with", "moved"):
        used |= set(expect.get(key, {}))
    for key in ("also_zero", "interior_zero", "not_gates", "noise"):
        used |= set(expect.get(key, ()))
    for key in ("blocked_by", "dead_with"):
        for value in expect.get(key, {}).values():
            used |= set(as_tuple(value))
    for gates in expect.get("plan", {}).values():
        used |= set(gates)
    for spec in bundle["branches"].values():
        used |= set(spec["gate"])
        for key in ("block", "output_of"):
            assert spec.get(key, "") in modules, f"{item.name}: no module {spec.get(key)!r}"
    assert used <= names, f"{item.name}: unknown parameters {sorted(used - names)}"
    for key in ("identity", "plan"):
        strange = set(expect.get(key, {})) - set(bundle["branches"])
        assert not strange, f"{item.name}: {key} of unknown branches {sorted(strange)}"
    for verdict in expect.get("identity", {}).values():
        if verdict[0] == "open":
            strange = set(as_tuple(verdict[2])) - names - modules
            assert not strange, f"{item.name}: unknown culprit {sorted(strange)}"


def check_plan(item: Case) -> None:
    """Zeroing the planned tensors closes the branch, and each of them is needed for that."""
    for branch, gates in (item.expect.get("plan") or {}).items():
        for left_open in (None, *gates):
            bundle = item.build()
            model = bundle["model"]
            for gate in gates:
                tensor = named_tensor(model, gate)
                with torch.no_grad():
                    tensor.zero_()
                    if gate == left_open:
                        tensor.add_(0.1 + fixed(*tensor.shape).to(tensor.dtype))
            if gates:
                closed, size = deviation(model, bundle, branch)
                wrong = f"{item.name}: {branch} deviates by {size} with {left_open or 'no gate'} open"
                assert closed == (left_open is None), wrong


# --------------------------------------------------------------------------- truth


def default_truth(fresh: Callable[[], dict]) -> None:
    """Run every generic check that the bundle's ``expect`` asks for."""
    expect = fresh()["expect"]
    if "identity" in expect:
        check_identity(fresh)
    if "gradient" in expect:
        check_gradient(fresh)
    if "interior_zero" in expect:
        check_interior_silent(fresh)


def run_truth(item: Case) -> None:
    """Raise ``AssertionError`` when a stated fact is false on this machine."""
    check_format(item)
    if not item.lightning:
        check_plan(item)
    bundle = item.build()
    truth = bundle.get("truth")
    if truth is None:
        default_truth(item.build)
    else:
        truth(item.build)
