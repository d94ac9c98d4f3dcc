"""What observing leaves behind: nothing."""

import pytest
import torch
from judging import X, square, zeros

from lit_resinit import make_plan, observe


def test_observing_changes_no_value() -> None:
    torch.manual_seed(0)
    plain, watched = zeros(), zeros()
    loss = square(plain(X))
    loss.backward()
    plan = make_plan(watched, X, scheme="observe")
    with observe(watched, plan, X) as seen:
        same = square(watched(X))
        same.backward()
    assert torch.equal(loss, same)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    assert seen.identity.ok


def test_observing_leaves_nothing_behind_after_an_error() -> None:
    model = zeros()
    plan = make_plan(model, X, scheme="observe")

    def step() -> None:
        with observe(model, plan, X):
            model(X)
            raise KeyError("user error")

    with pytest.raises(KeyError, match="user error"):
        step()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.nn.modules.module._global_forward_hooks


def test_reports_are_not_there_before_the_end() -> None:
    model = zeros()
    plan = make_plan(model, X, scheme="observe")
    with observe(model, plan, X) as seen:
        square(model(X)).backward()
        with pytest.raises(RuntimeError, match="observe"):
            _ = seen.gradients
    assert seen.gradients.ok
