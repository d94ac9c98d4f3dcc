"""The theory behind the package, measured: how the stream grows, which gradients flow, and what a soft bound does.

Run as ``python -m benchmarks.source_documents [--blocks N] [--width N] [--steps N] [--out FILE]``. Three tables:

- growth: Var(out)/Var(in) of the residual stream of L blocks, by hand in float64 and as ``check_identity`` reports it,
  mean and standard deviation over seeds. A branch of order one adds one each time, 1 + L; a branch as large as its
  input doubles the stream, 2^L; a factor of 1/sqrt(L) gives 2 and (1 + 1/L)^L < e; a closed gate gives exactly 1.
- gradients: with ``y = x + g * u(x)`` and ``g = 0`` the gradient of g is the error times u(x), that of the weights in
  u is a multiple of g: zero at the first step, nonzero at the second. Where u is zero too, nothing ever moves.
- soft bound: ``B tanh(|v|/B)/|v| * v`` behind a layer of zeros, its 0/0 guarded in three ways; after A. Pradeep
  (2026), "A zero-initialised layer learns only through a nonzero path".
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import lit_resinit
from benchmarks.report import RESULTS, Row, publish, table
from lit_resinit import apply_, check_identity, make_plan, observe
from lit_resinit.plan.values import Scheme

RESULT = RESULTS / "source_documents.txt"
BOUND = 2.0
BATCH = 256
SEEDS = range(5)
DIGITS = 6


# -------------------------------------------------------------------- growth of the stream


class Block(nn.Module):
    """``x + W2 relu(W1 x)``: the branch's variance is the mean square of what enters W1, with a norm first it is 1."""

    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        up, down = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        nn.init.normal_(up.weight, std=(2 / width) ** 0.5)
        nn.init.normal_(down.weight, std=(1 / width) ** 0.5)
        first = nn.LayerNorm(width, elementwise_affine=False) if norm else nn.Identity()
        self.branch = nn.Sequential(first, up, nn.ReLU(), down)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def measure_growth(blocks: int, width: int, norm: bool, scheme: Scheme) -> tuple[list[float], list[float]]:
    """Var(out)/Var(in) of new stacks, one for each seed: computed here, and by :func:`check_identity`."""
    by_hand, reported = [], []
    plan = None
    for seed in SEEDS:
        torch.manual_seed(seed)
        stack = nn.Sequential(*(Block(width, norm) for _ in range(blocks))).double()
        x = torch.randn(BATCH, width, dtype=torch.float64)
        plan = plan or make_plan(stack, x, scheme=scheme)
        apply_(stack, plan)
        with torch.no_grad():
            by_hand.append((stack(x).var(correction=0) / x.var(correction=0)).item())
        reported.append(check_identity(stack, plan, x).stacks[0].growth)
    return by_hand, reported


def growth_rows(blocks: int, width: int) -> list[Row]:
    """Both kinds of branch under every way of scaling it."""
    scaled = (1 + 1 / blocks) ** blocks
    theory: dict[tuple[bool, Scheme], tuple[str, float]] = {
        (True, "observe"): ("1 + L", 1.0 + blocks),
        (False, "observe"): ("2^L", 2.0**blocks),
        (True, "sqrt_depth"): ("2", 2.0),
        (False, "sqrt_depth"): ("(1+1/L)^L", scaled),
        (True, "downscale"): ("2", 2.0),
        (False, "downscale"): ("(1+1/L)^L", scaled),
        (True, "auto"): ("1", 1.0),
        (False, "auto"): ("1", 1.0),
    }
    branch = {True: "order one (a norm first)", False: "as large as its input"}
    scaling = {"observe": "none", "sqrt_depth": "1/sqrt(L)", "downscale": "weight/sqrt(L)", "auto": "closed gate"}
    rows: list[Row] = []
    for (norm, scheme), (formula, expected) in theory.items():
        by_hand, reported = measure_growth(blocks, width, norm, scheme)
        mean = statistics.mean(by_hand)
        rows.append(
            {
                "branch": branch[norm],
                "scaling": scaling[scheme],
                "theory": formula,
                "expected": expected,
                "measured": mean,
                "spread": statistics.stdev(by_hand),
                "per block": mean ** (1 / blocks),
                "check_identity": statistics.mean(reported),
            }
        )
    return rows


# -------------------------------------------------------------------- gradients of gates and inner weights


class GatedBlock(nn.Module):
    """``x + g * f(x)`` with one scalar gate, which starts at zero; with ``all_zero`` the last weight does too."""

    def __init__(self, width: int, all_zero: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.gate = nn.Parameter(torch.zeros(1))
        if all_zero:
            nn.init.zeros_(self.down.weight)
            nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.down(self.up(x).relu())


def gradient_rows(blocks: int, width: int) -> list[Row]:
    """Sizes of the gradients at the first two steps, and the verdict on the gates."""
    rows: list[Row] = []
    for all_zero in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(*(GatedBlock(width, all_zero) for _ in range(blocks)), nn.Linear(width, 1))
        x, target = torch.randn(BATCH, width), torch.randn(BATCH, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        plan = make_plan(net, x, scheme="observe")
        for step in (0, 1):
            optimizer.zero_grad()
            with observe(net, plan, x) as seen:
                mse_loss(net(x), target).backward()
            verdicts = Counter(seen.gradients.gates[f"{i}.gate"].status for i in range(blocks))
            verdict = ", ".join(f"{n} {status}" for status, n in verdicts.items())
            kind = "zero" if all_zero else "random"
            gates = _sizes(net, "gate")
            rows.append(_gradient_row(kind, step, "gates", gates, "0" if all_zero else "nonzero", verdict))
            inner = "nonzero" if step and not all_zero else "0"
            rows.append(_gradient_row(kind, step, "inner weights", _sizes(net, "up.weight"), inner, ""))
            optimizer.step()
    return rows


def _sizes(net: nn.Module, ending: str) -> Tensor:
    """Largest absolute gradient of every parameter with this ending."""
    grads = [p.grad for n, p in net.named_parameters() if n.endswith(f".{ending}")]
    return torch.stack([g.abs().amax() for g in grads if g is not None])


def _gradient_row(kind: str, step: int, what: str, sizes: Tensor, theory: str, verdict: str) -> Row:
    return {
        "last weight": kind,
        "step": step,
        "gradient of": what,
        "theory": theory,
        "nonzero": f"{int((sizes != 0).sum())} of {len(sizes)}",
        "smallest": sizes.min().item(),
        "median": sizes.median().item(),
        "largest": sizes.max().item(),
        "verdict": verdict,
    }


# -------------------------------------------------------------------- a soft bound behind a layer of zeros


def guarded_to_zero(v: Tensor) -> Tensor:
    """The wrong limit: a scale of 0 where the norm is 0."""
    norm = v.norm(dim=-1, keepdim=True)
    safe = torch.where(norm > 0, norm, 1.0)
    return torch.where(norm > 0, BOUND * torch.tanh(safe / BOUND) / safe, 0.0) * v


def guarded_too_late(v: Tensor) -> Tensor:
    """The right limit, chosen after 0/0 was computed."""
    norm = v.norm(dim=-1, keepdim=True)
    return torch.where(norm > 0, BOUND * torch.tanh(norm / BOUND) / norm, 1.0) * v


def guarded_before(v: Tensor) -> Tensor:
    """The right limit, and no 0/0 anywhere."""
    norm = v.norm(dim=-1, keepdim=True)
    safe = torch.where(norm > 0, norm, 1.0)
    return torch.where(norm > 0, BOUND * torch.tanh(safe / BOUND) / safe, 1.0) * v


class Bounded(nn.Module):
    """Two hidden layers, an output layer of zeros, a bound; ``residual`` adds it to the input."""

    def __init__(self, bound: Callable[[Tensor], Tensor], residual: bool) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.out = nn.Linear(64, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.bound, self.residual = bound, residual

    def forward(self, x: Tensor) -> Tensor:
        correction = self.bound(self.out(self.hidden(x)))
        return x + correction if self.residual else correction


def bound_rows(steps: int) -> list[Row]:
    """Three guards, without and with a skip: verdict, gradient and loss."""
    guards = {"to 0": guarded_to_zero, "to 1, after": guarded_too_late, "to 1, before": guarded_before}
    return [_bound_row(name, guard, residual, steps) for residual in (False, True) for name, guard in guards.items()]


def _bound_row(name: str, bound: Callable[[Tensor], Tensor], residual: bool, steps: int) -> Row:
    torch.manual_seed(0)
    net = Bounded(bound, residual)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    x, _ = _task(residual)
    plan = make_plan(net, x, scheme="observe")
    losses: list[float] = []
    verdict, gradient = None, float("nan")
    for step in range(steps):
        x, target = _task(residual)
        optimizer.zero_grad()
        if step == 0:
            with observe(net, plan, x) as seen:
                loss = mse_loss(net(x), target)
                loss.backward()
            verdict = seen.gradients.gates["out.weight"]
            gradient = net.out.weight.grad.norm().item()
        else:
            loss = mse_loss(net(x), target)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {
        "guard": name,
        "skip": "yes" if residual else "no",
        "verdict": verdict.status,
        "line": Path(verdict.source).name,
        "gradient, step 0": gradient,
        "loss, step 0": losses[0],
        f"loss, step {steps - 1}": losses[-1],
    }


def _task(residual: bool) -> tuple[Tensor, Tensor]:
    """A smooth vector field of length below the bound; with a skip, a shift by it."""
    x = torch.rand(BATCH, 2) * 2 - 1
    field = torch.stack([torch.sin(2 * x[:, 0]) * x[:, 1], 0.8 * torch.cos(x[:, 1]) * x[:, 0]], dim=1)
    return x, x + field if residual else field


# -------------------------------------------------------------------- text


def measure(blocks: int, width: int, steps: int) -> dict[str, list[Row]]:
    """All three tables."""
    return {
        "growth": growth_rows(blocks, width),
        "gradients": gradient_rows(blocks, width),
        "bound": bound_rows(steps),
    }


def text(tables: dict[str, list[Row]], blocks: int, width: int, steps: int) -> str:
    """The tables with what is needed to repeat them."""
    own = "of a checkout" if lit_resinit.__version__ == "0" else lit_resinit.__version__
    versions = f"lit_resinit {own}, torch {torch.__version__}, Python {platform.python_version()}"
    return "\n".join(
        [
            f"{datetime.date.today().isoformat()}; {versions}, CPU",
            "",
            f"1. Var(out)/Var(in) of the residual stream, L = {blocks} blocks of width {width}, batch {BATCH}, "
            f"float64, {len(SEEDS)} seeds",
            "",
            table(tables["growth"], DIGITS),
            "",
            f"2. Largest absolute gradient, {blocks} blocks `x + g * u(x)` of width {width} with g = 0, SGD",
            "",
            table(tables["gradients"], DIGITS),
            "",
            f"3. Soft bound B = {BOUND:g} behind an output layer of zeros, Adam, {steps} steps, batch {BATCH}",
            "",
            table(tables["bound"], DIGITS),
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> dict[str, list[Row]]:
    """Measure, print, write the file, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=200, help="residual blocks (default: 200)")
    parser.add_argument("--width", type=int, default=256, help="width of the stream (default: 256)")
    parser.add_argument("--steps", type=int, default=400, help="steps of the soft-bound trainings (default: 400)")
    parser.add_argument("--out", type=Path, default=RESULT, help=f"where to write (default: {RESULT.name} in results)")
    options = parser.parse_args(argv)
    tables = measure(options.blocks, options.width, options.steps)
    publish(text(tables, options.blocks, options.width, options.steps), options.out)
    return tables


if __name__ == "__main__":
    main()
