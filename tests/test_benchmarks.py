"""The small form of every benchmark runs, and what it states holds there too."""

import pytest

from benchmarks import checkers, depth, depth_training, device, overhead, peers, slow_start

pytestmark = pytest.mark.slow


def test_checkers_find_every_trouble_and_nothing_else() -> None:
    ours = next(row for row in checkers.main(["--small"]) if row["checker"] == "lit_resinit")
    hits = [str(ours[f"hits: {group}"]).split(" of ") for group in ("gradient", "identity")]
    assert all(found == total != "0" for found, total in hits)
    assert str(ours["false alarms"]).startswith("0 of ")


@pytest.mark.parametrize("kind", ["constant", "LayerScale"])
@pytest.mark.parametrize("slope", slow_start.SLOPES)
def test_measured_slope_is_the_one_built_in(kind: str, slope: float) -> None:
    assert slow_start.measured_slope(kind, slope) == pytest.approx(slope, rel=1e-4)


def test_a_closed_layer_scale_has_no_slow_start() -> None:
    assert slow_start.measured_slope("LayerScale closed", 1.0) == pytest.approx(1.0, rel=1e-4)


def test_a_smaller_slope_is_a_slower_start() -> None:
    rows = [r for r in slow_start.main(["--small"]) if (r["trained"], r["optimizer"]) == ("branches", "SGD")]
    losses = {(r["after the gate"], r["slope"]): float(r["final loss"]) for r in rows}
    assert losses["LayerScale", "1"] < losses["LayerScale", "0.0001"]
    assert [r["warns"] for r in rows] == ["no", "yes", "no", "yes", "no"]


def test_a_plain_step_of_a_run_carries_nothing() -> None:
    found = overhead.main(["--small"])
    assert found["runs"][0]["hooks and modes on a plain step"] == "0"
    assert {r["what"] for r in found["pieces"]} == {
        "setup: trace, plan, apply",
        "first step, observed",
        "logging step",
        "identity check",
    }


def test_history_takes_the_same_memory_for_every_block() -> None:
    (row,) = [r for r in depth.main(["--small"]) if r["part"] == "history, KiB per block"]
    assert row["10"] == row["40"] == pytest.approx(2000 * 7 * 4 / 1024)


def test_peers_are_measured_and_reading_is_bounded_from_below() -> None:
    found = peers.main(["--small"])
    assert {r["tool"] for r in found["tools"]} >= {"watch: lit_resinit", "watch: norms by hand"}
    (floor,) = found["floor"]
    assert float(floor["MiB to read"]) == pytest.approx(4 * 4 * (2 * 8 * 16 + 2) / 2**20)


def test_only_closed_gates_keep_the_variance_at_the_start() -> None:
    found = depth_training.main(["--small"])
    growth = {r["start"]: float(r["Var(out)/Var(in) at start"]) for r in found["training"]}
    assert growth["zeroed gates"] == 1.0
    assert growth["default"] > growth["1/sqrt(L)"] > 1.0
    (last,) = found["deepest"]
    assert last["branches closed"] == last["gates alive"] == last["blocks"]


def test_steps_on_a_device_have_the_same_bits_and_all_are_measured() -> None:
    found = device.main(["--small", "--device", "cpu"])
    assert {r["precision"]: r["bits"] for r in found["bits"]} == dict.fromkeys(device.PRECISIONS, "equal")
    assert [r["what"] for r in found["cost"]] == [
        "step without a record",
        "step that is recorded",
        "first step, observed",
        "identity check",
    ]
    assert all(float(r["plain steps"]) > 0 and r["transfers"] == "-" for r in found["cost"])
