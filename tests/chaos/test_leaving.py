"""A rank that is asked to leave in the middle of a save: the save is complete, and the curve is unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetseq.testing import Faults
from tests.chaos.runs import Chaos, Outcome, verdict
from tests.support.nightly import nightly

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

STEPS, SAVED, ASKED = 60, 30, 28  # the one save before the end, and the step in which a rank is asked to leave
#: a quarter of a second a step: the 5 s in which a launcher waits for other wishes end between the two saves
SLOW: dict[str, Any] = {
    "steps": STEPS, "ranks": 3, "balance": "equal", "throttle": "0:250",
    "no_epoch_checkpoints": True, "save_interval_updates": SAVED,
}  # fmt: skip
WRITES_S = 9.0


@pytest.mark.fault("FT-18")
@pytest.mark.parametrize("leaver", [0, *nightly(1)])
def test_a_rank_that_leaves_while_a_part_is_written_spoils_no_save(
    chaos: Chaos, calm: Outcome, leaver: int, tmp_path: Path
) -> None:
    diary = tmp_path / "diary"
    wish = Faults().term(rank=leaver).at(step=ASKED, phase="count")
    faults = wish.sleep(rank=1, seconds=WRITES_S).at(phase="persist").diary(diary)
    found = chaos.run(faults=faults.text(), **SLOW)
    assert verdict(found, calm) == ""
    asked, written = map(json.loads, diary.read_text().splitlines())
    assert (asked["kind"], written["kind"]) == ("term", "sleep")
    (left,) = [event for event in found.events if event["event"] == "generation"]
    assert left["ranks"] == [slot for slot in range(3) if slot != leaver]
    assert SAVED < left["step"] < STEPS, "it left while the part was written"
    # the remaining ranks repeat that save, with their current step
    saves = [event["step"] for event in found.events if event["event"] == "save"]
    assert saves == [left["step"] + 1, STEPS]
    run = chaos.newest / "checkpoints"
    assert [path.name for path in run.iterdir() if path.is_dir() and not (path / "COMMIT.json").exists()] == []
