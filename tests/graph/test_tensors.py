"""How tensors are measured."""

import pytest
import torch

from lit_resinit.graph import tensors
from lit_resinit.graph.tensors import in_parts, mean_and_variance


@pytest.mark.parametrize("shape", [(7, 3, 5), (1, 40), (97,), (), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64])
def test_moments_in_parts_are_those_of_the_whole(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    values = (3.0 + torch.randn(shape)).to(dtype)
    whole = mean_and_variance(values)
    monkeypatch.setattr(tensors, "_PART", 10)
    parts = in_parts(values)
    assert sum(p.numel() for p in parts) == values.numel()
    for found, expected in zip(mean_and_variance(values), whole, strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_large_tensor_is_cut_and_a_small_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_PART", 10)
    assert [len(p) for p in in_parts(torch.zeros(7, 4))] == [2, 2, 2, 1]
    assert len(in_parts(torch.zeros(10))) == 1


def test_what_is_not_finite_stays_so_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_PART", 4)
    values = torch.ones(4, 4)
    values[2, 1] = torch.nan
    assert all(x.isnan() for x in mean_and_variance(values))
