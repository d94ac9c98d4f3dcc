"""A record as numbers under names that every logger takes."""

import torch

from lit_resinit import History
from lit_resinit.watch.history import QUANTITIES
from lit_resinit.watch.logs import log_name, log_names, metrics

# -------------------------------------------------------------------- history


def filled(records: int, branches: int = 2, limit: int = 2000) -> History:
    history = History([f"b{i}" for i in range(branches)], limit=limit)
    for step in range(records):
        gates = torch.full((4, branches), float(step))
        history.append(10 * step, gates, torch.ones(branches), torch.full((branches,), 1e-6 * step))
    return history


# -------------------------------------------------------------------- logged keys


def test_few_branches_have_their_own_keys_and_many_are_quantiles() -> None:
    few, many = metrics(filled(2, 3)), metrics(filled(2, 100))
    assert set(few) >= {f"resinit/{q}/b{i}" for q in QUANTITIES for i in range(3)}
    assert set(many) >= {f"resinit/{q}/q{p}" for q in QUANTITIES for p in (10, 50, 90)}
    assert len(many) == len(QUANTITIES) * 3 + 4


def test_keys_are_the_same_at_every_record() -> None:
    assert set(metrics(filled(1))) == set(metrics(filled(5)))


def test_log_names_have_plain_characters() -> None:
    assert log_name("(root):2") == "root.2"
    assert log_name("layer1.0/attn-b_c") == "layer1.0/attn-b_c"
    assert log_name("β.0") == "_.0"


def test_log_names_of_different_branches_differ() -> None:
    named = {"a:2": "a.2-2", "a.2": "a.2", "β": "_", "δ": "_-2", "(root)": "root-3", "root-2": "root-2", "root": "root"}
    assert log_names(list(named)) == list(named.values())
    history = History(["a:2", "a.2"])
    history.append(0, torch.zeros(4, 2), torch.ones(2), torch.tensor([0.25, 0.5]))
    found = metrics(history)
    assert found["resinit/variance_ratio/a.2"] == 0.5
    assert found["resinit/variance_ratio/a.2-2"] == 0.25
