"""What inserted gates survive, and the gate for code that none can be inserted into."""

import copy
import io
import pickle
from collections.abc import Callable

import torch
from networks import (
    WIDTH,
    Plain,
    stack,
)
from torch import Tensor, nn

from lit_resinit import (
    ScalarGate,
    apply_,
    check_identity,
    make_plan,
)
from lit_resinit.plan.values import ResidualPlan

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def closed(build: Callable[[], nn.Module], x: Tensor = X, scheme: str = "auto") -> tuple[nn.Module, ResidualPlan]:
    torch.manual_seed(0)
    model = build()
    plan = make_plan(model, x, scheme=scheme)
    apply_(model, plan)
    return model, plan


def opened(model: nn.Module, plan: ResidualPlan) -> nn.Module:
    """The same model after its gates have moved."""
    with torch.no_grad():
        for number, gate in enumerate(plan.gates):
            model.get_parameter(gate.parameter).fill_(0.3 + 0.2 * number)
    return model


# -------------------------------------------------------------------- what inserted gates survive


def test_deepcopy_uses_its_own_gate() -> None:
    model, plan = closed(lambda: stack(Plain), scheme="insert")
    twin = opened(copy.deepcopy(model), plan)
    assert not torch.equal(twin(X), model(X))
    assert check_identity(model, plan, X).ok


def test_pickle_and_torch_save_keep_the_gates() -> None:
    model, plan = closed(lambda: stack(Plain), scheme="insert")
    opened(model, plan)
    for twin in (pickle.loads(pickle.dumps(model)), saved_and_loaded(model)):
        assert torch.equal(twin(X), model(X))
        opened(twin, plan).get_parameter(plan.gates[0].parameter).data.fill_(7.0)
        assert not torch.equal(twin(X), model(X))


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_state_dict_goes_round() -> None:
    model, plan = closed(lambda: stack(Plain), scheme="insert")
    opened(model, plan)
    other, _ = closed(lambda: stack(Plain), scheme="insert")
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(other(X), model(X))


def test_functional_call_uses_the_given_gates() -> None:
    model, plan = closed(lambda: stack(Plain), scheme="insert")
    values = {n: p.detach() for n, p in model.named_parameters()}
    values |= {g.parameter: torch.ones(1) for g in plan.gates}
    called = torch.func.functional_call(model, values, (X,))
    torch.manual_seed(0)
    torch.testing.assert_close(called, stack(Plain)(X), rtol=0.0, atol=0.0)


def test_inserted_gate_is_one_float_and_keeps_the_dtype() -> None:
    model, plan = closed(lambda: stack(Plain).bfloat16(), X.bfloat16(), scheme="insert")
    gates = [model.get_parameter(g.parameter) for g in plan.gates]
    assert all(g.shape == (1,) for g in gates)
    assert model(X.bfloat16()).dtype == torch.bfloat16


def test_inserted_gate_compiles_without_a_graph_break() -> None:
    torch._dynamo.reset()
    model, plan = closed(lambda: stack(Plain), scheme="insert")
    fast = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(fast(X), model(X))
    opened(model, plan)
    torch.testing.assert_close(fast(X), model(X))


# -------------------------------------------------------------------- ScalarGate


def test_scalar_gate_starts_closed_and_keeps_the_dtype() -> None:
    gate = ScalarGate()
    branch = torch.randn(2, 3, dtype=torch.bfloat16)
    assert gate(branch).dtype == torch.bfloat16
    assert not gate(branch).any()
    nn.init.ones_(gate.gate)
    assert torch.equal(gate(branch), branch)
    gate.reset_parameters()
    assert float(gate.gate.detach()) == 0.0
