"""A pickled network names no file of this package but the package itself, so that files may move between versions."""

import pickle
import pickletools
from collections.abc import Callable

import pytest
import torch
from networks import WIDTH, NormLast, Plain, Scaled, encoder, stack
from torch import nn

import lit_resinit
from lit_resinit import Branch, Gate, apply_, make_plan

X = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0))
NETWORKS: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: stack(NormLast), "zero"),
    (lambda: stack(Scaled), "zero"),
    *((lambda: stack(Plain), scheme) for scheme in ("insert", "last_layer", "sqrt_depth")),
    (lambda: encoder(2), "auto"),  # two branches in a block
]


def modules_named(pickled: bytes) -> set[str]:
    """Every string of a pickle that may be the path of a module of this package."""
    texts = {text for _, text, _ in pickletools.genops(pickled) if isinstance(text, str)}
    return {text.split()[0] for text in texts if text.startswith("lit_resinit")}


@pytest.mark.parametrize(("build", "scheme"), NETWORKS)
def test_a_closed_network_names_the_package_alone(build: Callable[[], nn.Module], scheme: str) -> None:
    model = build()
    plan = make_plan(model, X, scheme=scheme)
    apply_(model, plan)
    pickled = pickle.dumps((model, plan))
    assert modules_named(pickled) == {"lit_resinit"}
    twin, same = pickle.loads(pickled)
    assert same == plan
    assert torch.equal(twin(X), model(X))


def test_a_room_in_a_pickle_would_be_noticed() -> None:
    assert modules_named(pickle.dumps(make_plan, protocol=2)) == {make_plan.__module__} != {"lit_resinit"}
    assert modules_named(pickle.dumps(make_plan)) == {make_plan.__module__}


def test_public_values_say_that_they_are_of_the_package() -> None:
    assert Branch.__module__ == Gate.__module__ == "lit_resinit"
    for kind in (Branch, Gate):
        assert getattr(lit_resinit, kind.__qualname__) is kind
