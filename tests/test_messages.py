"""The wording of errors and reports: what was checked, expected, found, where, and what to do next."""

import re
from collections.abc import Callable

import pytest
import torch
from networks import WIDTH, NormLast, Plain, Scaled, mlp, stack
from torch import Tensor, nn

import lit_resinit
from lit_resinit import ResInitError, apply_, check_identity, make_plan, observe

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def message(action: Callable[[], object]) -> str:
    """Text of the error, with paths, lines and sizes cut down to what does not change."""
    with pytest.raises(ResInitError) as caught:
        action()
    text = re.sub(r"\S*/(\w+\.py):\d+", r"\1:#", str(caught.value))
    return re.sub(r"deviation [\d.e+-]+", "deviation #", text)


def test_no_branch() -> None:
    assert message(lambda: make_plan(mlp(), X)) == (
        "RI101: looked for residual additions `x + f(x)` in one forward of Sequential (5 operations); expected at "
        "least one, found none. Zeroing a layer of a network without a skip would cut its signal for good, so nothing "
        "was changed. If the network does have residual blocks, the inputs did not reach them: pass other "
        "`example_inputs`."
    )


def test_trace() -> None:
    text = message(lambda: make_plan(stack(Plain), torch.ones(4, 3)))
    assert text.startswith(
        "RI102: tried to run one forward of Sequential with inputs of shapes (4, 3); expected it to run, but it raised "
        "RuntimeError: "
    )
    assert text.endswith(
        "Pass inputs that fit the forward: `make_plan(model, args, kwargs)`, or `ResidualInit(example_inputs=...)`."
    )


def test_trained_weights() -> None:
    model = stack(NormLast)
    with torch.no_grad():
        model[0].norm.weight.copy_(torch.linspace(0.5, 1.5, WIDTH))
    assert message(lambda: apply_(model, make_plan(model, X))) == (
        "RI103: closing 0: expected weights at their initialisation, where norms and scales are constant; found "
        "0.norm.weight with mean 1 and spread 0.35, which looks trained. Closing the branch would destroy what it "
        "learned, whichever way. Pass `include` to pick the new branches of a pretrained network, scheme='observe' to "
        "only watch, or `overwrite_trained=True`. Nothing was changed."
    )


def test_identity() -> None:
    model = stack(lambda: Scaled(value=0.0), 3)
    nn.init.ones_(model[1].scale)
    plan = make_plan(model, X, scheme="observe")
    assert message(check_identity(model, plan, X).raise_if_open) == (
        "RI201: compared 3 residual additions with their skip; expected each branch to contribute exactly nothing, "
        "found 1 of 3 open:\n"
        "- 1: unzeroed scale, culprit 1.scale, deviation #, at networks.py:#. Next: set it to its closing value after "
        "the last initialisation, or let scheme='auto' do so.\n"
        "To watch an open network as it is, pass identity='ignore' or exclude those branches."
    )


class Shut(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.scale * self.f(x))


def test_gradient() -> None:
    model = nn.Sequential(Shut(value=0.0), nn.Linear(WIDTH, 2))
    plan = make_plan(model, X, scheme="observe")
    with observe(model, plan, X) as seen:
        model(X).square().mean().backward()
    assert message(seen.gradients.raise_if_dead) == (
        "RI301: judged the gradients of 1 gates, biases and zero layers; expected each to learn, found 1 that cannot:\n"
        "- 0.scale (branch 0): dead: an operation between the gate and the end of the branch turns the error into "
        "zero: `relu` has slope zero at zero, at test_messages.py:#. Next: multiply by 0.scale behind "
        "that operation, as the last factor of what is added to the stream."
    )


def test_good_reports_say_what_was_checked() -> None:
    model = stack(Scaled)
    plan = make_plan(model, X)
    apply_(model, plan)
    assert str(check_identity(model, plan, X)) == "checked 2 branches: each contributes exactly nothing."
    with observe(model, plan, X) as seen:
        model(X).square().mean().backward()
    assert str(seen.gradients) == "judged the gradients of 2 gates, biases and zero layers: 2 alive."


def test_plan() -> None:
    assert str(make_plan(stack(Scaled, 200), X)) == (
        "200 residual branches, scheme auto\n"
        "branch    count  skip      action  gate kind  gate\n"
        "0 .. 199  200    identity  zero    scale      #.scale"
    )


def test_error_codes_are_unique_and_stable() -> None:
    errors = [e for e in vars(lit_resinit).values() if isinstance(e, type) and issubclass(e, ResInitError)]
    codes = {e.__name__: e.code for e in errors}
    assert codes == {
        "ResInitError": "RI100",
        "CheckpointError": "RI106",
        "NoBranchError": "RI101",
        "TraceError": "RI102",
        "TrainedWeightsError": "RI103",
        "GateError": "RI104",
        "FoldError": "RI105",
        "IdentityError": "RI201",
        "GradientError": "RI301",
        "GateOptimizerError": "RI302",
    }


def test_layer_that_cannot_be_zeroed_is_named() -> None:
    class Spectral(Plain):
        def __init__(self) -> None:
            super().__init__()
            nn.utils.parametrizations.spectral_norm(self.f[2])

    assert "0.f.2" in message(lambda: make_plan(nn.Sequential(Spectral()), X, scheme="last_layer"))
