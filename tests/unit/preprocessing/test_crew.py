"""Jobs in several processes: in order, and every end of one of them is an end that is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path

import pytest

from hetseq import DataError
from hetseq.preprocessing.corpus.process_pool import Crew, LostProcess

ROOT = Path(__file__).resolve().parents[3]


def squared(job: int) -> tuple[int, int]:
    return job * job, os.getpid()


def fatal(job: int) -> int:
    if job == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return job


class FatalOnceOpen:
    """Job 3 kills its process, but not before a file is there: another process may be slow to do job 0."""

    def __init__(self, door: Path) -> None:
        self.door = door

    def __call__(self, job: int) -> int:
        while job == 3 and not self.door.exists():
            time.sleep(0.001)
        return fatal(job)


def failing(job: int) -> int:
    if job == 3:
        raise DataError("book.txt, line 7: no text")
    return job


def test_results_come_in_the_order_of_the_jobs_from_other_processes() -> None:
    with Crew(2) as crew:
        found = [*crew.map(squared, range(20)), *crew.map(squared, range(5))]
    assert [number for number, _ in found] == [*(n * n for n in range(20)), *(n * n for n in range(5))]
    assert os.getpid() not in {process for _, process in found}


def test_one_process_or_one_job_starts_no_other() -> None:
    with Crew(1) as crew:
        assert {process for _, process in crew.map(squared, range(3))} == {os.getpid()}
    with Crew(2) as crew:
        assert list(crew.map(squared, [3])) == [(9, os.getpid())]


def test_an_error_in_a_job_is_raised_as_it_is_after_the_results_before_it() -> None:
    with Crew(2) as crew:
        found = crew.map(failing, range(9))
        assert [next(found) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(DataError, match=r"book\.txt, line 7: no text"):
            next(found)


def test_a_process_that_is_killed_is_told_with_a_job_and_a_remedy() -> None:
    with Crew(2) as crew, pytest.raises(LostProcess, match=r"before [0-3] was done: .* give fewer --processes"):
        list(crew.map(fatal, range(9)))


def test_the_job_that_is_named_is_the_first_without_a_result_and_not_the_next_to_be_given_out(tmp_path: Path) -> None:
    before = set(active_children())
    with Crew(2) as crew:
        found = crew.map(FatalOnceOpen(tmp_path / "open"), range(9))
        next(found)  # five jobs are given out, the one that kills among them
        (tmp_path / "open").touch()
        until = time.monotonic() + 20
        while set(active_children()) - before:
            assert time.monotonic() < until, "the processes of a broken crew are ended"
            time.sleep(0.01)
        with pytest.raises(LostProcess, match=r"before [1-3] was done"):
            list(found)


LEFT_ALONE = """
import os, signal
from hetseq.preprocessing.corpus.process_pool import Crew
from tests.unit.preprocessing.test_crew import squared
if __name__ == "__main__":
    with Crew(2) as crew:
        found = crew.map(squared, range(100))
        print({next(found)[1] for _ in range(20)}, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    # what is left of them would be found by the fixture that looks for leaks
    (tmp_path / "script.py").write_text(LEFT_ALONE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, env=environment, text=True)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.startswith("{"), done.stderr
