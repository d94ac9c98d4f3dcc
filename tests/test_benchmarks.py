"""The small form of every benchmark runs, and what it states holds there too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import checkers


def test_checkers_find_every_trouble_and_nothing_else() -> None:
    ours = next(row for row in checkers.main(["--small"]) if row["checker"] == "lit_resinit")
    hits = [str(ours[f"hits: {group}"]).split(" of ") for group in ("gradient", "identity")]
    assert all(found == total != "0" for found, total in hits)
    assert str(ours["false alarms"]).startswith("0 of ")
