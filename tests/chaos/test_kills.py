"""Ranks that are killed, stopped and crashed while they train together: the result equals an undisturbed run's.

`runs` defines a run and the comparison; `python -m tests.chaos` does more runs and prints the figures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hetseq.system.faults import read_schedule
from hetseq.testing import Faults
from tests.chaos.killers import Killer
from tests.chaos.runs import Chaos, Outcome, options_of, verdict
from tests.support.nightly import nightly

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.fault("FT-1", "FT-2", "FT-21")
@pytest.mark.parametrize("seed", [0, *nightly(1, 2, 3, 4, 5)])
def test_kills_at_random_instants_change_nothing(chaos: Chaos, calm: Outcome, seed: int) -> None:
    killer = Killer(seed, 10)
    found = chaos.run(killer, **options_of(seed))
    assert verdict(found, calm) == ""
    assert killer.kills >= 10


def cases(schedules: Mapping[str, Faults], shows: Mapping[str, Sequence[str]], often: Sequence[str]) -> list[Any]:
    """Each schedule with the kinds of fault that it shows; those that are not in `often` are nightly."""
    shown = {name: [pytest.mark.fault(*shows[name])] if name in shows else [] for name in schedules}
    marks = {name: [*shown[name], *([] if name in often else [pytest.mark.nightly])] for name in schedules}
    return [pytest.param(faults, id=name, marks=marks[name]) for name, faults in schedules.items()]


ONE = Faults()
#: every phase of a step, and the phases of a recovery, each with a rank killed in it; the fifth rank outlives them
PHASES = {
    "before the commit is seen": ONE.kill(rank=0).at(step=5, phase="count")
    .kill(rank=1).at(step=10, phase="forward_backward")
    .kill(rank=2).at(step=15, phase="reduce")
    .kill(rank=3).at(step=20, phase="commit"),
    "after it was seen": ONE.kill(rank=0).at(step=5, phase="clip")
    .kill(rank=1).at(step=10, phase="optimizer")
    .kill(rank=2).at(step=15, phase="boundary")
    .kill(rank=3).at(step=22, phase="snapshot"),
    "while the others recover": ONE.kill(rank=0).at(step=5, phase="reduce")
    .kill(rank=1).at(phase="regroup")
    .kill(rank=2).at(phase="form", nth=3)
    .kill(rank=3).at(phase="transfer"),
    "while it comes back": ONE.kill(rank=0).at(step=5, phase="reduce")
    .kill(rank=0).at(phase="join", incarnation=1)
    .kill(rank=0).at(phase="form", incarnation=2)
    .kill(rank=0).at(phase="transfer", incarnation=3)
    .kill(rank=0).at(phase="loading", incarnation=4),
    "two in the same instant": ONE.kill(rank=0).at(step=7, phase="commit")
    .kill(rank=3).at(step=7, phase="commit")
    .kill(rank=1).at(step=30, phase="optimizer")
    .kill(rank=2).at(step=30, phase="reduce"),
}  # fmt: skip


PHASES_SHOW = {
    "before the commit is seen": ["FT-1", "FT-2"],
    "after it was seen": ["FT-1", "FT-2"],
    "while the others recover": ["FT-2", "FT-21"],
    "while it comes back": ["FT-21"],
    "two in the same instant": ["FT-1", "FT-21"],
}
PHASES_OFTEN = ("before the commit is seen", "after it was seen", "while the others recover", "while it comes back")


@pytest.mark.parametrize("faults", cases(PHASES, PHASES_SHOW, PHASES_OFTEN))
def test_a_kill_in_any_phase_changes_nothing(chaos: Chaos, calm: Outcome, faults: Faults, tmp_path: Path) -> None:
    check(chaos, calm, faults, tmp_path, ranks=5)


#: what else may happen to a process, in a run that waits 2 s for a silent rank
KINDS = {
    "stopped for good": ONE.stop(rank=1, seconds=math.inf).at(step=8, phase="reduce"),
    "stopped, and woken when the others have gone on": ONE.stop(rank=2, seconds=6).at(step=8, phase="commit"),
    "stopped for a moment": ONE.stop(rank=0, seconds=1).at(step=8, phase="reduce"),
    "busy for a moment": ONE.sleep(rank=1, seconds=1).at(step=8, phase="count"),
    "busy for longer than the others wait": ONE.sleep(rank=1, seconds=4).at(step=8, phase="forward_backward"),
    "holding the interpreter": ONE.hog(rank=2, seconds=6).at(step=8, phase="reduce"),
    "crashing": ONE.segv(rank=0).at(step=8, phase="forward_backward"),
    "aborting": ONE.abort(rank=1).at(step=8, phase="reduce"),
    "a writer killed before its part is written": ONE.kill(rank=1).at(phase="persist"),
    "a writer killed before it commits": ONE.kill(rank=0).at(phase="rename"),
    "leaving without a word": ONE.exit(rank=2).at(step=8, phase="commit"),
}


KINDS_SHOW = {
    "stopped for good": ["FT-3"],
    "stopped, and woken when the others have gone on": ["FT-4"],
    "busy for longer than the others wait": ["FT-3"],
    "holding the interpreter": ["FT-3"],
    "a writer killed before its part is written": ["FT-11"],
    "a writer killed before it commits": ["FT-11"],
}
KINDS_OFTEN = (
    "stopped for good",
    "stopped, and woken when the others have gone on",
    "crashing",
    "a writer killed before it commits",
)


@pytest.mark.parametrize("faults", cases(KINDS, KINDS_SHOW, KINDS_OFTEN))
def test_whatever_happens_to_a_process_changes_nothing(
    chaos: Chaos, calm: Outcome, faults: Faults, tmp_path: Path
) -> None:
    check(chaos, calm, faults, tmp_path, ranks=3, step_deadline=2)


def check(chaos: Chaos, calm: Outcome, faults: Faults, folder: Path, **options: Any) -> None:
    """All of these faults have happened, without a trace in the result."""
    diary = folder / "diary"
    found = chaos.run(faults=faults.diary(diary).text(), **options)
    happened = [json.loads(line) for line in diary.read_text().splitlines()] if diary.exists() else []
    assert verdict(found, calm) == "", faults
    expected = sorted((fault.slot, fault.phase) for fault in read_schedule(faults.text())[0])
    assert sorted((each["slot"], each["phase"]) for each in happened) == expected


def test_a_run_without_its_faults_would_be_noticed(chaos: Chaos, calm: Outcome) -> None:
    """The twin: another seed is another curve, and a step that is missing, doubled or of other samples is seen."""
    assert "loss" in verdict(chaos.run(ranks=2, seed=5), calm)
    rows = calm.rows
    for spoilt in (rows[:-1], [*rows[:5], *rows[6:]], [*rows[:5], {**rows[5], "loss": rows[5]["loss"] * (1 + 1e-10)}]):
        assert verdict(Outcome(0, "", spoilt, [], calm.tensors, 0.0), calm) != ""
    other = {**rows[3], "terms": {**rows[3]["terms"], "ledger": rows[4]["terms"]["ledger"]}}
    assert "other samples" in verdict(Outcome(0, "", [*rows[:3], other, *rows[4:]], [], calm.tensors, 0.0), calm)
    tensors = {name: tensor * (1 + 1e-11) for name, tensor in calm.tensors.items()}
    assert "apart" in verdict(Outcome(0, "", rows, [], tensors, 0.0), calm)
