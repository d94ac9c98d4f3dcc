"""What several ranks say together: a finding of one is a finding of all, so that all of them raise, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Agree = Callable[[bool], bool]  # whether any rank found something, given whether this one did


def alone(found: bool) -> bool:
    """The agreement of a single process."""
    return found


def any_rank(found: bool) -> bool:
    """Whether any rank found something; every rank has to call it."""
    return any(_of_every_rank(found))


def of_any_rank(message: str, agree: Agree) -> str:
    """One rank's finding is every rank's; "" when none found anything."""
    if not agree(bool(message)) or agree is alone:
        return message
    texts = enumerate(_of_every_rank(message))
    found = next((f"on rank {rank}: {text}" for rank, text in texts if text), "on another rank, which says more.")
    return message or found


def _of_every_rank(value: Any) -> list[Any]:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
