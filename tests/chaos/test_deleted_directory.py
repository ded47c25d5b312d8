"""The run directory is deleted while ranks train: it is made anew, and neither training nor a later loss suffers."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from hetseq.checkpoint.leftover_memory import ABANDONED_S, sweep
from hetseq.monitor.metrics import read_rows
from hetseq.run_directory import RunDirectory
from tests.chaos.killers import Killer
from tests.chaos.runs import PARAMETER_BAR, Chaos, Outcome, parameter_distance

STEPS = 480  # so that there is time to delete it, and then to kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Deleter(Killer):
    """Deletes the run directory once there are rows, and kills once there are rows again."""

    run_id = ""

    def act(self, save_dir: Path) -> None:
        if not self.run_id:
            if has_rows(save_dir):
                self.run_id = RunDirectory(save_dir).run_id
                shutil.rmtree(save_dir, ignore_errors=True)  # the run writes into it meanwhile
        elif has_rows(save_dir) and (save_dir / "config.yaml").exists():
            super().act(save_dir)


def has_rows(save_dir: Path) -> bool:
    try:
        return len(read_rows(save_dir / "metrics.jsonl")) >= 3
    except OSError:
        return False


@pytest.mark.fault("FT-17")
@pytest.mark.nightly
def test_a_run_directory_that_is_deleted_under_the_run_is_made_anew(chaos: Chaos, calm: Outcome) -> None:
    deleter = Deleter(0, 2, double=0.0)
    found = chaos.run(deleter, ranks=3, steps=STEPS, save_interval_updates=50)
    # of the killed ones: no start uses it, since the directory is a different one now
    sweep("another run", now_s=time.time() + 2 * ABANDONED_S)
    assert found.code == 0, found.said
    assert deleter.kills == 2
    assert found.said.count("was deleted under this run: it was recreated and the run continues") == 1
    numbers = [row["step"] for row in found.rows]
    assert numbers == list(range(numbers[0], STEPS + 1))
    assert 1 < numbers[0] < STEPS - 50
    assert parameter_distance(found, calm) <= PARAMETER_BAR
    assert found.left == []
