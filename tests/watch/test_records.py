"""Rows by step, bounded."""

import pytest
import torch

from lit_resinit.watch.records import Records


def test_both_ends_are_exact_and_the_others_at_equal_distances() -> None:
    records = Records(limit=4)
    for step in range(11):
        records.append(step, torch.tensor([float(step), -float(step)]))
    assert records.steps.tolist() == [0, 4, 8, 10]
    assert records.column(1).tolist() == [0.0, -4.0, -8.0, -10.0]
    assert records.newest.tolist() == [10.0, -10.0]
    assert (records.stride, records.count, len(records)) == (4, 11, 4)


def test_a_column_is_read_anew_after_each_record() -> None:
    records = Records(limit=4)
    records.append(0, torch.zeros(1))
    assert records.column(0).tolist() == [0.0]
    records.append(1, torch.ones(1))
    assert records.column(0).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("stride", "count"), [(0, 1), (1, 0)])
def test_what_cannot_be_is_refused(stride: int, count: int) -> None:
    with pytest.raises(ValueError, match="kept"):
        Records(4, [(0, torch.zeros(1))], stride, count)
