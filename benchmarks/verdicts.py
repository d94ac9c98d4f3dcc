"""Are the verdicts true? Random networks with one operation that may be broken, against a truth that needs no rule.

Every network is a chain of residual blocks, one of which runs one operation out of a list, before or behind its gate;
around it stand zero heads, closed and open blocks. The truth: what has a gradient is moved at random, on new batches,
until nothing new gets a gradient; what has none then is dead. The package judges the first step, and then a training up
to the end of its patience. Counted are misses, false alarms and wrong lines, by operation.

    python -m benchmarks.verdicts --count 300 --seed 0 --jobs 2
    python -m benchmarks.verdicts --operation clamp_at_zero
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import math
import multiprocessing
import random
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

WIDTH, BATCH = 8, 6
ROUNDS, QUIET = 40, 8  # of random moves at most, and without anything new before the truth is believed
PATIENCE = 3
ROUNDING = 1e-12  # of the largest gradient, in double precision

Operation = Callable[[Tensor, Tensor, "Broken"], Tensor]


class _Write(torch.autograd.Function):
    """Forgets the error."""

    @staticmethod
    def forward(ctx, v):
        return v.clone()

    @staticmethod
    def backward(ctx, error):
        return torch.zeros(error.shape, dtype=error.dtype)


class _Pass(torch.autograd.Function):
    """Rounds, and passes the error on."""

    @staticmethod
    def forward(ctx, v):
        return (v * 4).round() / 4

    @staticmethod
    def backward(ctx, error):
        return error.clone()


def _hooked(v: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    v = v * 1.0
    if v.requires_grad:
        v.register_hook(hook)
    return v


# v: the value of the branch there; h: the stream that enters the block; m: the module, with buffers
OPERATIONS: dict[str, Operation] = {
    # masks
    "mask_of_data": lambda v, h, m: v * (h > 0),
    "mask_stream_is_zero": lambda v, h, m: v * (h == 0),
    "mask_stream_is_not_zero": lambda v, h, m: v * (h != 0),
    "masked_fill_where_zero": lambda v, h, m: v.masked_fill(v == 0, 0.0),
    "masked_fill_where_stream_is_zero": lambda v, h, m: v.masked_fill(h == 0, 0.0),
    "masked_fill_everything": lambda v, h, m: v.masked_fill(h == h, 0.0),
    "masked_fill_half": lambda v, h, m: v.masked_fill(h > 0, 0.0),
    "where_positive": lambda v, h, m: torch.where(v > 0, v, torch.zeros_like(v)),
    "where_nonzero": lambda v, h, m: torch.where(v != 0, v, torch.zeros_like(v)),
    "where_stream": lambda v, h, m: torch.where(h > 0, v, -v),
    "own_mask": lambda v, h, m: v * (v != 0),
    "own_sign": lambda v, h, m: v * v.sign(),
    "heaviside": lambda v, h, m: v * torch.heaviside(v.detach(), torch.zeros((), dtype=v.dtype)),
    "index_put_zero": lambda v, h, m: v.index_put((torch.arange(len(v)),), torch.zeros_like(v)),
    "tril": lambda v, h, m: v.tril(),
    "no_rows": lambda v, h, m: v.tril(-BATCH),
    # guards
    "guard_own_norm": lambda v, h, m: torch.where(v.norm(dim=-1, keepdim=True) > 0, v, torch.zeros_like(v)),
    "guard_to_zero": lambda v, h, m: torch.where(v.abs().sum(-1, keepdim=True) > 1e-6, v.tanh(), torch.zeros_like(v)),
    "guard_to_one_too_late": lambda v, h, m: (
        v
        * torch.where(
            v.norm(dim=-1, keepdim=True) > 0, v.tanh().norm(dim=-1, keepdim=True) / v.norm(dim=-1, keepdim=True), 1.0
        )
    ),
    "guard_safe": lambda v, h, m: v / v.norm(dim=-1, keepdim=True).clamp(min=1.0),
    "nan_to_num": lambda v, h, m: (v / v).nan_to_num(0.0),
    "nan_to_num_plain": lambda v, h, m: v.nan_to_num(0.0),
    # roots, logarithms, powers
    "sqrt": lambda v, h, m: v.abs().sqrt(),
    "sqrt_of_square": lambda v, h, m: v.square().sum(-1, keepdim=True).sqrt() * h,
    "sqrt_with_epsilon": lambda v, h, m: v / (v.square() + 1e-4).sqrt(),
    "signed_sqrt": lambda v, h, m: v.sign() * v.abs().sqrt(),
    "square": lambda v, h, m: v.square(),
    "cube": lambda v, h, m: v**3,
    "power_one": lambda v, h, m: v**1.0,
    "power_half": lambda v, h, m: v.abs() ** 0.5,
    "times_itself": lambda v, h, m: v * v,
    "times_itself_detached": lambda v, h, m: v * v.detach(),
    "times_itself_plus_one": lambda v, h, m: v * (1 + v),
    "log1p": lambda v, h, m: torch.log1p(v.abs()),
    "expm1": lambda v, h, m: torch.expm1(v.clamp(max=2.0)),
    "sinh": lambda v, h, m: v.clamp(-2, 2).sinh(),
    "one_minus_cos": lambda v, h, m: 1 - v.cos(),
    "reciprocal": lambda v, h, m: v / (1 + v.abs()),
    # activations, clamps, rounding
    "relu": lambda v, h, m: v.relu(),
    "relu6": lambda v, h, m: F.relu6(v),
    "leaky_relu": lambda v, h, m: F.leaky_relu(v),
    "gelu": lambda v, h, m: F.gelu(v),
    "silu": lambda v, h, m: F.silu(v),
    "softshrink": lambda v, h, m: F.softshrink(v, 0.1),
    "hardshrink": lambda v, h, m: F.hardshrink(v, 0.1),
    "tanhshrink": lambda v, h, m: F.tanhshrink(v),
    "hardtanh": lambda v, h, m: F.hardtanh(v),
    "threshold": lambda v, h, m: F.threshold(v, 0.0, 0.0),
    "absolute": lambda v, h, m: v.abs(),
    "clamp_at_zero": lambda v, h, m: v.clamp(min=0.0),
    "clamp_wide": lambda v, h, m: v.clamp(-3.0, 3.0),
    "clamp_unit": lambda v, h, m: v.clamp(0.0, 1.0),
    "clamp_shut": lambda v, h, m: v.clamp(0.0, 0.0),
    "minimum": lambda v, h, m: torch.minimum(v, h.abs()),
    "maximum_of_zero": lambda v, h, m: torch.maximum(v, torch.zeros_like(v)),
    "round": lambda v, h, m: v.round(),
    "floor": lambda v, h, m: v - v.floor(),
    "sign": lambda v, h, m: v.sign(),
    "straight_through": lambda v, h, m: v + (v.round() - v).detach(),
    "straight_through_function": lambda v, h, m: _Pass.apply(v),
    # norms
    "normalize": lambda v, h, m: F.normalize(v, dim=-1),
    "norm_times_stream": lambda v, h, m: v.norm(dim=-1, keepdim=True) * h,
    "layer_norm": lambda v, h, m: F.layer_norm(v, (WIDTH,)),
    "rms_norm": lambda v, h, m: v * (v.square().mean(-1, keepdim=True) + 1e-6).rsqrt(),
    "standard_deviation": lambda v, h, m: v.std(-1, keepdim=True) * h,
    "variance": lambda v, h, m: v.var(-1, keepdim=True) * h,
    "soft_bound": lambda v, h, m: v * (2.0 / v.norm(dim=-1, keepdim=True).clamp(min=2.0)),
    # sorting, picking
    "sort": lambda v, h, m: v.sort(-1).values,
    "topk": lambda v, h, m: F.pad(v.topk(3, -1).values, (0, WIDTH - 3)),
    "cumsum": lambda v, h, m: v.cumsum(-1),
    "cumprod": lambda v, h, m: v.cumprod(-1),
    "amax": lambda v, h, m: v.amax(-1, keepdim=True) * h,
    "argmax": lambda v, h, m: v * F.one_hot(v.argmax(-1), WIDTH),
    "product": lambda v, h, m: v.prod(-1, keepdim=True) * h,
    "gather": lambda v, h, m: v.gather(-1, h.argsort(-1)),
    "flip": lambda v, h, m: v.flip(-1),
    # softmax, division
    "softmax_minus_mean": lambda v, h, m: v.softmax(-1) - 1.0 / WIDTH,
    "softmax_gate": lambda v, h, m: v * v.softmax(-1),
    "softmax_summed": lambda v, h, m: (v.softmax(-1).sum(-1, keepdim=True) - 1.0) * h,
    "softplus": lambda v, h, m: F.softplus(v) - math.log(2.0),
    "sigmoid_gate": lambda v, h, m: v * h.sigmoid(),
    "divide_by_itself": lambda v, h, m: v * v / v,
    "divide_by_norm": lambda v, h, m: v / v.norm(dim=-1, keepdim=True),
    "divide_by_norm_epsilon": lambda v, h, m: v / (v.norm(dim=-1, keepdim=True) + 1.0),
    "divide_stream": lambda v, h, m: v / (1.0 + h.square()),
    "remainder": lambda v, h, m: v.remainder(1.0),
    "atan2": lambda v, h, m: torch.atan2(v, h.abs() + 1.0),
    # detach, buffers, casts, hooks
    "detach": lambda v, h, m: v.detach() + 0.0,
    "detach_half": lambda v, h, m: torch.where(h > 0, v, v.detach()),
    "detached_factor": lambda v, h, m: v * h.detach(),
    "zero_buffer": lambda v, h, m: v * m.nothing,
    "one_buffer": lambda v, h, m: v * m.one,
    "half_buffer": lambda v, h, m: v * m.odd,
    "ramp_buffer": lambda v, h, m: v * m.ramp(),
    "zero_constant": lambda v, h, m: v * 0.0,
    "cast_to_integer": lambda v, h, m: v.int().to(v.dtype),
    "cast_to_half": lambda v, h, m: v.half().to(v.dtype),
    "cast_to_double": lambda v, h, m: v.double().to(v.dtype),
    "cast_to_bool": lambda v, h, m: v * v.bool(),
    "hook_to_zero": lambda v, h, m: _hooked(v, lambda error: error * 0.0),
    "hook_to_nan": lambda v, h, m: _hooked(v, lambda error: error / 0.0),
    "hook_harmless": lambda v, h, m: _hooked(v, lambda error: error * 2.0),
    "function_forgets": lambda v, h, m: _Write.apply(v),
    "dropout": lambda v, h, m: F.dropout(v, 0.3),
    "no_operation": lambda v, h, m: v,
}


LATE = "late: a zero head, or data, decide"
REFUSED = "refused at set-up: no branch is left"  # said, so no miss
DECIDED_BY_DATA = (  # another batch might let something through, and a number in the code may be on a schedule
    "masked_fill_everything",
    "mask_stream_is_zero",
    "zero_constant",
    "cast_to_integer",  # where nothing reaches one
    "softmax_summed",  # what cancels here up to rounding
)


class Broken(nn.Module):
    """Runs one operation of the list."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("nothing", torch.zeros(WIDTH))
        self.register_buffer("one", torch.ones(WIDTH))
        self.register_buffer("odd", (torch.arange(WIDTH) % 2).float())
        self.register_buffer("steps", torch.zeros(()))

    def ramp(self) -> Tensor:
        """Zero in the first step, one from the fifth on."""
        factor = (self.steps / 4).clamp(max=1.0)
        self.steps.add_(1.0)
        return factor

    def forward(self, v: Tensor, h: Tensor) -> Tensor:
        return OPERATIONS[self.name](v, h, self)


class Block(nn.Module):
    """``x + f(x)``, closed by a layer, a scale or a norm, or open; with an operation before or behind the gate."""

    def __init__(self, gate: str, norm: bool, operation: Broken | None = None, behind: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.operation, self.behind, self.gate = operation, behind, gate
        if gate == "scale":
            self.scale = nn.Parameter(torch.zeros(WIDTH))
        elif gate == "trailing":
            self.last = nn.LayerNorm(WIDTH)
            nn.init.zeros_(self.last.weight)
        elif gate == "layer":
            nn.init.zeros_(self.down.weight)
            nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        v = torch.tanh(self.up(self.norm(x)))
        if self.operation is not None and not self.behind:
            v = self.operation(v, x)
        v = self.down(v)
        v = self.scale * v if self.gate == "scale" else self.last(v) if self.gate == "trailing" else v
        if self.operation is not None and self.behind:
            v = self.operation(v, x)
        return x + v


@dataclasses.dataclass(frozen=True)
class Spec:
    """One random network, made again from its seed."""

    seed: int
    operation: str
    gates: tuple[str, ...]
    norms: tuple[bool, ...]
    place: int
    behind: bool
    zero_head: bool
    dark: bool  # whether the first batch is zero

    @staticmethod
    def draw(seed: int, operation: str | None) -> Spec:
        """The network of a seed."""
        dice = random.Random(seed)
        name, depth = dice.choice(list(OPERATIONS)), dice.randint(1, 4)
        place = dice.randrange(depth)
        kinds = ("layer", "scale", "trailing")
        gates = [dice.choice((*kinds, "open")) for _ in range(depth)]
        gates[place] = dice.choice(kinds)
        norms = [dice.random() < 0.5 for _ in range(depth)]
        rest = dice.random() < 0.7, dice.random() < 0.3, dice.random() < 0.05
        return Spec(seed, operation or name, tuple(gates), tuple(norms), place, *rest)

    def network(self, operation: str | None = None) -> nn.Sequential:
        """The network, with its operation or another one."""
        torch.manual_seed(self.seed)
        stem, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        blocks = [
            Block(gate, norm, Broken(operation or self.operation) if i == self.place else None, self.behind)
            for i, (gate, norm) in enumerate(zip(self.gates, self.norms, strict=True))
        ]
        if self.zero_head:
            nn.init.zeros_(head.weight)
        return nn.Sequential(stem, *blocks, head)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches without end."""
        draws = torch.Generator().manual_seed(self.seed)
        for i in range(10**9):
            x = torch.randn(BATCH, WIDTH, generator=draws)
            yield x * 0.0 if self.dark and i == 0 else x, torch.randn(BATCH, 3, generator=draws)


# -------------------------------------------------------------------- the truth


@dataclasses.dataclass(frozen=True)
class Truth:
    """What is true of every parameter, found by moving what has a gradient."""

    first: dict[str, str]  # at the first step: gradient, zero, nonfinite
    ever: frozenset[str]  # what has, or gets, a gradient
    broken_off: bool  # by NaN, after which nothing more is known

    @property
    def unknown(self) -> frozenset[str]:
        """What would have to be known after the NaN."""
        return frozenset(self.first) if self.broken_off else frozenset()


def _gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, str]:
    model.zero_grad()
    (model(x) - y).square().mean().backward()
    largest = {n: p.grad.abs().max().item() for n, p in model.named_parameters() if p.grad is not None}
    limit = ROUNDING * max((s for s in largest.values() if math.isfinite(s)), default=0.0)
    return {n: "nonfinite" if not math.isfinite(s) else "gradient" if s > limit else "zero" for n, s in largest.items()}


def truth(spec: Spec, operation: str | None = None) -> Truth:
    """Move what has a gradient, on new batches, until nothing new gets one."""
    model, batches = spec.network(operation).double(), spec.batches()
    draws = torch.Generator().manual_seed(spec.seed)
    first: dict[str, str] | None = None
    ever: set[str] = set()
    quiet, broken_off = 0, False
    for _, (x, y) in zip(range(ROUNDS), batches, strict=False):
        found = _gradients(model, x.double(), y.double())
        first = found if first is None else first
        fresh = {n for n, s in found.items() if s == "gradient"} - ever
        broken_off = "nonfinite" in found.values()
        if broken_off:
            break
        ever, quiet = ever | fresh, 0 if fresh else quiet + 1
        if quiet > QUIET:
            break
        with torch.no_grad():
            for p in (p for n, p in model.named_parameters() if found.get(n) == "gradient"):
                p += 0.1 * torch.randn(p.shape, generator=draws, dtype=p.dtype) * (p.grad != 0)
    return Truth(first or {}, frozenset(ever), broken_off)


# -------------------------------------------------------------------- the package


def misjudged(spec: Spec) -> list[tuple[str, str]]:
    """What the package says wrongly of one network: kind, and the sentence."""
    from lit_resinit import make_plan, observe

    model, true = spec.network(), truth(spec)
    x, y = next(spec.batches())
    plan = make_plan(copy.deepcopy(model), x, scheme="observe")
    with observe(model, plan, x) as seen:
        (model(x) - y).square().mean().backward()
    report = seen.gradients
    wrong = []
    for name, gate in report.gates.items():
        first, alarm = true.first.get(name, "zero"), gate.status in ("dead", "missing", "nonfinite")
        said = f"{name} {gate.status}: {gate.cause} {gate.source}"
        if first == "nonfinite" and not alarm:
            wrong.append(("NaN missed at step 1", said))
        elif first == "gradient" and gate.status not in ("alive", "exploding"):
            wrong.append(("false alarm" if alarm else "called asleep, learns", said))
        elif first == "zero" and name in true.ever and alarm:
            wrong.append(("false alarm", said))
        elif first == "zero" and name not in true.ever and not true.broken_off and not alarm and not _harmless(gate):
            wrong.append((_late(spec) if gate.status == "asleep" else "missed at step 1", said))
    wrong += _wrong_line(spec, report, true, "wrong line")
    return wrong + _up_to_patience(spec, true, plan)


def _late(spec: Spec) -> str:
    """Where a zero head sends no error at all, or data decide, one step says nothing: the next ones do."""
    decided_later = spec.zero_head or spec.dark or spec.operation in DECIDED_BY_DATA
    return LATE if decided_later else "missed at step 1, called asleep"


def _harmless(gate) -> bool:
    """A bias without a gradient beside a gate that has one."""
    return gate.role == "bias" and gate.status == "alive"


def _wrong_line(spec: Spec, report, true: Truth, kind: str) -> list[tuple[str, str]]:
    """The first alarm has to stand at the operation, where without it there is none."""
    if report.ok:
        return []
    whole = truth(spec, "no_operation")
    broken = [n for n in report.gates if n in whole.ever and n not in true.ever]
    lines = {line for _, _, line in OPERATIONS[spec.operation].__code__.co_lines() if line}
    said = [report.gates[n] for n in broken if report.gates[n].status in ("dead", "missing", "nonfinite")]
    first = report.alarms[0]
    if not said or first.status == "missing":
        return []
    file, _, line = first.source.rpartition(":")
    good = file.endswith("verdicts.py") and line.isdigit() and int(line) in lines | _hook_lines()
    return [] if good else [(kind, f"{first.parameter} {first.status}: {first.cause} {first.source}")]


def _hook_lines() -> set[int]:
    code = _hooked.__code__
    return {line for _, _, line in code.co_lines() if line}


def _up_to_patience(spec: Spec, true: Truth, plan) -> list[tuple[str, str]]:
    """A training of some steps: what is dead has to have been said, and nothing else."""
    from lit_resinit.judge.trial import Trial

    model, batches = spec.network(), spec.batches()
    x, y = next(batches)
    optimizer, trial = torch.optim.Adam(model.parameters(), lr=0.01), Trial(model, plan, PATIENCE, fresh=False)
    alarms: dict[str, str] = {}
    wrong: list[tuple[str, str]] = []
    for _ in range(PATIENCE + 2):
        optimizer.zero_grad()
        trial.before_forward(x)
        loss = (model(x) - y).square().mean()
        trial.after_forward(loss)
        loss.backward()
        trial.before_step(optimizer)
        optimizer.step()
        trial.end_batch()
        if trial.gradients is not None and trial.gradients.alarms and not alarms:
            wrong += _wrong_line(spec, trial.gradients, true, "wrong line up to patience")
        for gate in trial.gradients.alarms if trial.gradients is not None else ():
            alarms.setdefault(gate.parameter, f"{gate.parameter} {gate.status}: {gate.cause} {gate.source}")
        wrong += _untrue_now(model, trial)
        x, y = next(batches)
    trial.close()
    names = set(trial.gradients.gates)
    bias = {n for n, g in trial.gradients.gates.items() if g.role == "bias"}
    bad = {n for n, s in true.first.items() if s == "nonfinite"}
    dead = bad if true.broken_off else names - bias - true.ever
    wrong += [("missed at patience", n) for n in sorted(dead & names) if n not in alarms]
    return wrong + [("false alarm at patience", said) for n, said in alarms.items() if n in true.ever - bad]


def _untrue_now(model: nn.Module, trial) -> list[tuple[str, str]]:
    """A gate that is asleep or dead has no gradient at the step at which it is said, beyond rounding."""
    from lit_resinit.judge.trial import Phase

    if trial.gradients is None or trial.phase not in (Phase.ASLEEP, Phase.LAST):
        return []
    sizes = {n: p.grad.abs().max().item() for n, p in model.named_parameters() if p.grad is not None}
    limit = 1e-5 * max((s for s in sizes.values() if math.isfinite(s)), default=0.0)
    asleep = (g for g in trial.gradients.gates.values() if g.status == "asleep")
    return [
        ("asleep, with a gradient", f"{g.parameter}: {g.cause}") for g in asleep if sizes.get(g.parameter, 0.0) > limit
    ]


def _judge(spec: Spec) -> tuple[Spec, list[tuple[str, str]]]:
    from lit_resinit import NoBranchError

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        return spec, misjudged(spec)
    except NoBranchError as problem:
        return spec, [(REFUSED, str(problem))]
    except Exception as problem:  # of the package, of whatever kind
        return spec, [("crash", f"{type(problem).__name__}: {problem}")]


def main() -> None:
    """Judge many networks, and print what is judged wrongly by operation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first network; the next ones count on")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--operation", choices=OPERATIONS, help="only networks with this one")
    parser.add_argument("--verbose", action="store_true", help="print every network that is misjudged")
    options = parser.parse_args()
    specs = [Spec.draw(options.seed + i, options.operation) for i in range(options.count)]
    kinds: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    networks = 0
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for spec, wrong in pool.imap_unordered(_judge, specs, chunksize=4):
            networks += bool({kind for kind, _ in wrong} - {LATE, REFUSED})
            for kind in {kind for kind, _ in wrong}:
                kinds[kind][spec.operation] += 1
            if options.verbose and wrong:
                print(spec, *(f"    {kind}: {said}" for kind, said in wrong), sep="\n", flush=True)
    print(f"{options.count} networks, {networks} misjudged (late verdicts, true at the end of patience, not counted)")
    for kind, operations in sorted(kinds.items()):
        listed = ", ".join(f"{name} {n}" for name, n in operations.most_common())
        print(f"{kind}: {operations.total()} networks: {listed}")


if __name__ == "__main__":
    main()
