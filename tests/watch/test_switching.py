"""The step at which a branch switched on."""

import math

import torch

from lit_resinit.watch.switching import Switching


def test_the_first_step_at_which_a_branch_is_on_stays() -> None:
    switching = Switching(3)
    for step, ratios in enumerate(([0.0, 0.5, 0.0], [0.0, 0.0, 0.5], [0.0, 0.5, 0.5])):
        switching.see(step, torch.tensor(ratios), 0.1)
    assert switching.steps == [None, 0, 1]
    assert switching.open_from_start == [False] * 3


def test_what_may_have_been_open_is_decided_by_its_first_record() -> None:
    switching = Switching(4)
    switching.begin([True, False, False, False])
    switching.see(0, torch.tensor([0.5, 0.5, 0.0, math.nan]), 0.1)
    switching.see(5, torch.tensor([0.5, 0.5, 0.5, 0.5]), 0.1)
    assert switching.steps == [0, None, 5, None]
    assert switching.open_from_start == [False, True, False, True]
