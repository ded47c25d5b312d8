"""Signals to a launcher and to its workers: five seconds after the end of whom they hit, nothing of it is left.

Loader processes, fork server and resource tracker are among what is counted, and so are processes whose parents have
ended. A writer with a checkpoint to finish may take longer; there is none here. What is no process, a lock that a task
leaves in its workers, is looked for after an orderly end.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.commands import TRAIN
from tests.support.nightly import nightly
from tests.support.nodes import living_under
from tests.support.refusals import BASE, TWO, write_task
from tests.support.trials import Trial, start_trial, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# slowed down, so that signals find a step under way and not the end of the run
WORDS = shlex.split(
    "--cpu --task mnist --global-batch-size 96 --max-epoch 400 --optimizer adam --no-save --num-workers 2"
    " --max-restarts 0 --throttle 0:8"
)
LEFT_S = 5.0
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGUSR1]


@pytest.fixture(scope="module", autouse=True)
def no_imports() -> None:
    """Commands begin after their imports."""
    forked.warm_up()


def orphans(trial: Trial, *, launcher_lives: bool) -> list[int]:
    """Processes that nobody is responsible for, once they have had `LEFT_S` to go."""

    def look() -> list[int]:
        kept = {trial.launcher, *living_under(trial.launcher)} if launcher_lives else set()
        return sorted(set(trial.processes()) - kept)

    deadline = time.monotonic() + LEFT_S
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.01)  # between two looks
    return found


@pytest.mark.figure("orphans")
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGKILL, *nightly(signal.SIGINT, signal.SIGUSR1)], ids=lambda number: number.name
)
def test_a_signal_to_the_launcher_leaves_nobody(
    tmp_path: Path, number: signal.Signals, record_property: Callable[[str, object], None]
) -> None:
    with start_trial([*WORDS, "--distributed-world-size", 2], tmp_path / "run") as trial:
        trial.wait_for_step(3)
        assert len(trial.processes()) >= 1 + 2 * 3  # the launcher, and workers with two loaders each
        trial.signal(number, trial.launcher)
        trial.finish()
        left = orphans(trial, launcher_lives=False)
    record_property("orphans", len(left))
    assert left == []


@pytest.mark.figure("orphans")
def test_signals_to_workers_leave_nobody_of_theirs(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with start_trial([*WORDS, "--distributed-world-size", 5], tmp_path / "run") as trial:
        trial.wait_for_step(3)
        workers = until(lambda: found if len(found := trial.workers()) == 5 else {}, "all workers")
        hit = {rank: [workers[rank], *trial.children_of(workers[rank])] for rank in range(1, 5)}
        assert {len(family) for family in hit.values()} == {3}
        for rank, number in enumerate(SIGNALS, start=1):
            trial.signal(number, workers[rank])
        until(lambda: not {workers[rank] for rank in hit} & set(trial.processes()), "the end of four workers")
        left = orphans(trial, launcher_lives=True)
        assert left == []
        assert set(trial.workers()) == {0}, "one trains on"
        trial.signal(signal.SIGTERM, trial.launcher)
        trial.finish()
        left += orphans(trial, launcher_lives=False)
    record_property("orphans", len(left))
    assert left == []


def test_a_process_without_a_parent_would_be_seen(tmp_path: Path) -> None:
    """The twin: while the launcher runs, nobody is an orphan; counted as if it had gone, all are."""
    with start_trial([*WORDS, "--distributed-world-size", 1], tmp_path / "run") as trial:
        trial.wait_for_step(1)
        assert orphans(trial, launcher_lives=True) == []
        assert len(orphans(trial, launcher_lives=False)) >= 4
        trial.signal(signal.SIGTERM, trial.launcher)
        trial.finish()


def test_what_a_task_leaves_in_its_workers_is_tidied_up_without_a_word(tmp_path: Path) -> None:
    lock = "import multiprocessing; Toy.lock = multiprocessing.RLock()  # as a progress bar of tqdm does"
    path = write_task(tmp_path, build_model=f"{lock}\n        return torch.nn.Linear(3, 1)")
    before = set(Path("/dev/shm").glob("sem.mp-*"))
    words = [*TRAIN, *BASE, *TWO, "--task", str(path), "--save-dir", str(tmp_path / "run")]
    finished = subprocess.run(words, capture_output=True, text=True)  # to the end of the tracker, which holds stderr
    assert finished.returncode == 0, finished.stderr
    assert "resource_tracker" not in finished.stderr
    assert set(Path("/dev/shm").glob("sem.mp-*")) == before
