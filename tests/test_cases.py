"""The whole core, from plan to gradients, on every torch case: what it reports is the case's known answer."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.cases.base import Case, as_tuple, load
from lit_resinit import ResInitError, apply_, check_identity, make_plan, observe
from lit_resinit.judge.identity_report import BranchIdentity, IdentityReport
from lit_resinit.judge.verdicts import GradientReport
from lit_resinit.judge.waking import Waking
from lit_resinit.plan.values import Branch, ResidualPlan
from lit_resinit.watch.measure import Watcher
from lit_resinit.watch.moments import Moments

CASES = {name: item for name, item in load().items() if not item.lightning}
REFUSED = {n: c for n, c in CASES.items() if "refuse" in c.expect.get("apply", {})}
SERVED = {n: c for n, c in CASES.items() if n not in REFUSED or "identity" in c.expect}

over = pytest.mark.parametrize


def with_key(*keys: str) -> list[Case]:
    return [item for item in SERVED.values() if any(k in item.expect for k in keys)]


def ids(item: Case) -> str:
    return item.name


def scheme_of(bundle: dict) -> str:
    """What the case asks for: judge as it is, insert a scalar, or zero the last layer."""
    expect = bundle["expect"]
    if bundle["prepare"] == "check":
        return "observe"
    inserts = "insert" in expect.get("apply", {}) or [] in expect.get("plan", {}).values()
    return "insert" if inserts else "last_layer"


def planned(bundle: dict) -> ResidualPlan:
    plan = make_plan(bundle["model"], bundle["args"], scheme=scheme_of(bundle))
    apply_(bundle["model"], plan)
    return plan


def branches_of(plan: ResidualPlan, bundle: dict, name: str) -> list[Branch]:
    """The plan's branches behind a case's branch, by name, else by gate, else by block."""
    spec, gates = bundle["branches"][name], set(bundle["branches"][name]["gate"])
    found = [b for b in plan.branches if b.name == name]
    found = found or [b for b in plan.branches if gates & {n for g in b.gates for n in (g.parameter, *g.biases)}]
    found = found or [b for b in plan.branches if b.block == spec.get("block")]
    assert found, f"no branch {name} among {[b.name for b in plan.branches]}"
    return found


def backward(bundle: dict, step: int) -> None:
    loss = bundle["loss_fn"](bundle["model"](*bundle["batch"](step)))
    if loss.requires_grad:
        loss.backward()


def first_step(bundle: dict, plan: ResidualPlan) -> GradientReport:
    with observe(bundle["model"], plan, bundle["batch"](1)) as seen:
        backward(bundle, 1)
    return seen.gradients


def optimizer_steps(bundle: dict) -> Callable[[], None]:
    """An optimizer, and its scheduler, as one function."""
    optimizer = bundle["optimizer"]([p for p in bundle["model"].parameters() if p.requires_grad])
    scheduler = bundle["scheduler"](optimizer) if "scheduler" in bundle else None

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()

    return step


def our_name(plan: ResidualPlan, bundle: dict, parameter: str) -> str:
    """An inserted scalar has the package's own name."""
    return plan.gates[0].parameter if parameter in bundle.get("new_parameter", {}).values() else parameter


# -------------------------------------------------------------------- plan


@over("item", REFUSED.values(), ids=ids)
def test_refusal_names_the_reason_and_writes_nothing(item: Case) -> None:
    bundle = item.build()
    before = copy.deepcopy(bundle["model"].state_dict())
    with pytest.raises(ResInitError) as caught:
        apply_(bundle["model"], make_plan(bundle["model"], bundle["args"], scheme="last_layer"))
    for name in as_tuple(item.expect["apply"]["refuse"]):
        assert name is True or name in str(caught.value)
    after = bundle["model"].state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[k].nan_to_num(), after[k].nan_to_num()) for k in before)


@over("item", with_key("plan"), ids=ids)
def test_plan_closes_exactly_the_stated_tensors(item: Case) -> None:
    bundle = item.build()
    plan = planned(bundle)
    for name, wanted in item.expect["plan"].items():
        gates = [g for b in branches_of(plan, bundle, name) for g in b.gates]
        if wanted:
            assert {n for g in gates for n in (g.parameter, *g.biases)} == set(wanted)
        else:
            assert [g.kind for g in gates] == ["inserted"]


@over("item", with_key("not_gates", "must_not_insert"), ids=ids)
def test_plan_leaves_everything_else_alone(item: Case) -> None:
    bundle = item.build()
    gates = planned(bundle).gates
    touched = {n for g in gates for n in (g.parameter, *g.biases)}
    assert not touched & set(item.expect.get("not_gates", ()))
    assert not {g.module for g in gates} & set(item.expect.get("must_not_insert", ()))


@over("item", [c for c in SERVED.values() if "insert" in c.expect.get("apply", {})], ids=ids)
def test_inserted_scalar_keeps_shape_dtype_and_copies(item: Case) -> None:
    bundle = item.build()
    plan, model = planned(bundle), bundle["model"]
    (gate,) = plan.gates
    for wanted in item.expect["apply"]["insert"].values():
        assert model.get_parameter(gate.parameter).shape == wanted["shape"]
        branch = model.get_submodule(gate.module)(model.stem(bundle["args"][0]))
        assert branch.dtype == wanted.get("stream_dtype", torch.float32)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_parameter(gate.parameter).fill_(2.0)
    assert not torch.equal(twin(*bundle["args"]), model(*bundle["args"]))


@over("item", with_key("closed_after_apply"), ids=ids)
def test_open_scales_are_closed_by_applying(item: Case) -> None:
    bundle = item.build()
    plan = make_plan(bundle["model"], bundle["args"], scheme="zero")
    apply_(bundle["model"], plan)
    assert check_identity(bundle["model"], plan, bundle["args"]).ok


# -------------------------------------------------------------------- identity


@over("item", with_key("identity", "identity_must_not_say"), ids=ids)
def test_identity_verdict_cause_and_culprit(item: Case) -> None:
    bundle = item.build()
    plan = planned(bundle)
    report = check_identity(bundle["model"], plan, bundle["args"])
    rows = {row.name: row for row in report.branches}
    for name, verdict in item.expect.get("identity", {}).items():
        found = [rows[b.name] for b in branches_of(plan, bundle, name)]
        if verdict[0] == "closed":
            assert [r.status for r in found] == ["closed"] * len(found)
        elif "stream changed" in as_tuple(verdict[1]) and all(r.status == "closed" for r in found):
            assert stack_is_changed_by(report, set(as_tuple(verdict[2])))
        else:
            assert_open(found, verdict)
    for name, forbidden in item.expect.get("identity_must_not_say", {}).items():
        assert not {rows[b.name].status for b in branches_of(plan, bundle, name)} & set(forbidden)


def stack_is_changed_by(report: IdentityReport, names: set[str]) -> bool:
    return any(not stack.exact and names <= set(stack.changed_by) for stack in report.stacks)


def assert_open(rows: list[BranchIdentity], verdict: tuple) -> None:
    first = next(r for r in rows if r.status == "open")
    assert first.cause in as_tuple(verdict[1])
    assert first.culprit in as_tuple(verdict[2])


@over("item", with_key("grouped_text"), ids=ids)
def test_equal_findings_are_one_line(item: Case) -> None:
    bundle = item.build()
    text = str(check_identity(bundle["model"], planned(bundle), bundle["args"]))
    assert item.expect["grouped_text"] in text
    assert text.count("\n- ") == 1


# -------------------------------------------------------------------- gradients


@over("item", with_key("gradient"), ids=ids)
def test_gradient_status_of_every_gate(item: Case) -> None:
    bundle, expect = item.build(), item.expect
    plan = planned(bundle)
    gates = first_step(bundle, plan).gates
    for name, accepted in bundle["expect"]["gradient"].items():
        early = expect.get("decided_at_step", {}).get(name, 1) > 1
        verdict = gates[our_name(plan, bundle, name)]
        assert verdict.status in (("asleep",) if early else as_tuple(accepted)), verdict
        assert verdict.status not in as_tuple(expect.get("must_not_say", {}).get(1, {}).get(name, ())), verdict


@over("item", with_key("blocked_by"), ids=ids)
def test_sleeping_gates_name_what_they_wait_for(item: Case) -> None:
    bundle = item.build()
    gates = first_step(bundle, planned(bundle)).gates
    for name, blockers in item.expect["blocked_by"].items():
        assert gates[name].waits_for in as_tuple(blockers)


@over("item", with_key("wakes_at_step", "decided_at_step"), ids=ids)
def test_sleeping_gates_wake_at_the_stated_step(item: Case) -> None:
    bundle = item.build()
    plan = planned(bundle)
    step = optimizer_steps(bundle)
    waking = Waking(first_step(bundle, plan), patience=3)
    step()
    for number in (2, 3, 4):
        backward(bundle, number)
        report = waking.step(bundle["model"])
        step()
    for name, when in (item.expect.get("wakes_at_step", {}) | item.expect.get("decided_at_step", {})).items():
        if name in report.gates:
            assert waking.woke[name] == when - 1
            assert report.gates[name].status == "alive"
    assert not waking.waiting


@over("item", with_key("blame"), ids=ids)
def test_origin_of_a_nan_comes_first(item: Case) -> None:
    bundle = item.build()
    report = first_step(bundle, planned(bundle))
    assert report.alarms[0].parameter in item.expect["blame"]
    assert not report.alarms[0].cause.startswith("inherits")
    for name in item.expect["do_not_blame"]:
        assert report.gates[name].cause.startswith("inherits")


@over("item", [c for c in with_key("names_in_text") if c.stage == "gradient"], ids=ids)
def test_message_names_what_is_involved(item: Case) -> None:
    bundle = item.build()
    text = str(first_step(bundle, planned(bundle)))
    assert [n for n in item.expect["names_in_text"] if n not in text] == []


@over("item", with_key("interior_zero"), ids=ids)
def test_silent_interior_is_no_finding(item: Case) -> None:
    bundle = item.build()
    report = first_step(bundle, planned(bundle))
    assert report.ok
    assert not set(report.gates) & set(item.expect["interior_zero"])


@over("item", with_key("zero_channels"), ids=ids)
def test_silent_channels_of_a_live_gate_are_counted(item: Case) -> None:
    bundle = item.build()
    gates = first_step(bundle, planned(bundle)).gates
    for name, channels in item.expect["zero_channels"].items():
        size = bundle["model"].get_parameter(name).numel()
        assert gates[name].cause.startswith(f"{len(channels)} of {size} elements")


# -------------------------------------------------------------------- watching


@over("item", [c for c in SERVED.values() if c.stage == "observe"], ids=ids)
def test_each_addition_is_measured_once_in_a_step(item: Case) -> None:
    bundle = item.build()
    plan = planned(bundle)
    moments = Moments(2 * len(plan))
    count = stream_counts(bundle, plan, moments)
    assert count.unique().numel() == 1
    assert float(count[0]) == float(streams(bundle["model"], bundle["args"]))
    for wanted in bundle["expect"]["observe"].get("stream_variance", {}).values():
        within = bundle["expect"]["observe"]["relative_tolerance"]
        assert float(moments.compute()[0]) == pytest.approx(wanted, rel=within)


def stream_counts(bundle: dict, plan: ResidualPlan, moments: Moments) -> torch.Tensor:
    with Watcher(bundle["model"], plan) as watcher:
        backward(bundle, 1)
    found = watcher.moments()
    assert found is not None
    moments.update(*found)
    return moments.count


def streams(model: nn.Module, args: tuple) -> int:
    """Elements of the residual stream: in these cases as many as of the input."""
    return args[0].numel()
