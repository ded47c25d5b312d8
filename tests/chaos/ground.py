"""Runner of the table's runs, one after the other, which keeps the files of failed ones.

Responsible for a warm process, the undisturbed reference runs, and the figures of each run.
Refuses to know which runs there are and which bars apply. The one idea: nothing is retried. The files of a
failed run are copied to a folder of its own, with the command that repeats it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetseq.checkpoint.arena import SHARED_MEMORY, Arena
from hetseq.run_directory import RunDirectory
from hetseq.system.faults import read_schedule
from hetseq.testing import Faults
from tests.chaos import table
from tests.chaos.killers import Kill, Killer, OneByOne
from tests.chaos.runs import STEPS, Chaos, Outcome, ledger, parameter_distance, verdict
from tests.chaos.table import STALL_S, Growth, Run
from tests.support.commands import _size
from tests.support.nodes import living_under


class Visible(Chaos):
    """Says where its runs are, which process they run in, and what the newest one has said, however it ended."""

    _seen = (0, 0)

    def run(self, killer: Killer | OneByOne | None = None, *, faults: str = "", **options: Any) -> Outcome:
        self._seen = (_size(self._process.out), _size(self._process.err))
        return super().run(killer, faults=faults, **options)

    @property
    def said(self) -> str:
        return self._said(self._seen)

    @property
    def pid(self) -> int:
        return self._process.pid


class Ground:
    """The place of the runs: a warm process, the undisturbed runs, and the files of failed ones."""

    def __init__(self, folder: Path, keep: Path) -> None:
        self._folder, self._keep, self._chaos_count = folder, keep, 0
        self._calm: dict[int, Outcome] = {}
        self._open: Visible | None = None
        self._shared_files = 0  # left in /dev/shm by all runs
        self.samples: list[Growth] = []  # of the process that there is now
        self._chaos = self._begin()

    def _begin(self) -> Visible:
        self._chaos_count += 1
        folder = self._folder / str(self._chaos_count)
        folder.mkdir()
        self.samples.clear()
        chaos = self._open = Visible(folder)
        try:
            chaos.run(ranks=1, steps=1)  # its fork server is there from now on
        except BaseException:
            self.close()
            raise
        return chaos

    def close(self) -> None:
        """End the warm process; may be called twice."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def run(
        self, run: Run, *, killer: Killer | OneByOne | None = None, faults: Faults | None = None, **options: Any
    ) -> Run:  # fmt: skip
        """Do it, compare it, keep it if it failed."""
        reference = self._undisturbed(options.get("steps", STEPS))
        diary, began_s = self._folder / "diary", time.monotonic()
        diary.unlink(missing_ok=True)
        text = faults.diary(diary).text() if faults is not None else ""
        try:
            self._judge(run, self._chaos.run(killer, faults=text, **options), reference)
        except (AssertionError, OSError, ValueError, KeyError) as error:
            run.has_hung, run.wrong = isinstance(error, AssertionError), f"{type(error).__name__}: {error}"
        if faults is not None:
            self._look_at(run, diary, faults)
        elif killer is not None:
            run.kills, run.pairs = killer.log, killer.pairs
        self._look_for_stalls(run)
        if run.wrong:
            self._keep_it(run, diary)
        if run.has_hung:
            self.close()
            take_shared_files(RunDirectory(self._chaos.newest))  # it was killed, so they are its own
            self._chaos = self._begin()
        else:
            shutil.rmtree(self._chaos.newest, ignore_errors=True)
            self._shared_files += run.shared_files
            self.samples.append(held_by(self._chaos.pid, self._shared_files))
        told = run.wrong.partition("\n")[0] or "as if nothing had happened"
        print(f"{run.section}, {run.name}: {time.monotonic() - began_s:.1f} s, {told}", file=sys.stderr, flush=True)
        return run

    def _undisturbed(self, steps: int) -> Outcome:
        if steps not in self._calm:
            calm = self._chaos.run(ranks=1, steps=steps)
            if calm.code:
                raise SystemExit(f"a run without faults ended with {calm.code}: {calm.said}")
            self._calm[steps] = calm
        return self._calm[steps]

    def _judge(self, run: Run, outcome: Outcome, reference: Outcome) -> None:
        """Its figures and faults."""
        directory = RunDirectory(self._chaos.newest)
        run.passages = table.passages(outcome.events, run.ranks)
        rows = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
        run.steps_lost = table.steps_lost([row for row in rows if "loss" in row], run.passages, run.kills, run.ranks)
        run.loss_difference = table.worst_loss_difference(outcome.rows, reference.rows)
        run.distance = parameter_distance(outcome, reference)
        run.is_ledger_right = list(map(ledger, outcome.rows)) == list(map(ledger, reference.rows))
        run.processes_left = len(outcome.left)
        run.shared_files = take_shared_files(directory)
        run.wrong = verdict(outcome, reference)
        run.is_right = not run.wrong
        if run.steps_lost and not run.wrong:
            run.wrong = f"{run.steps_lost} committed steps were lost"
        if run.shared_files and not run.wrong:
            run.wrong = f"{run.shared_files} files were left in {SHARED_MEMORY}"

    def _look_at(self, run: Run, diary: Path, faults: Faults) -> None:
        """All of these faults have happened."""
        entries = [json.loads(line) for line in diary.read_text().splitlines()] if diary.exists() else []
        run.kills = [Kill(entry["time"], entry["slot"]) for entry in entries]
        expected = sorted((fault.slot, fault.phase) for fault in read_schedule(faults.text())[0])
        if not run.wrong and sorted((entry["slot"], entry["phase"]) for entry in entries) != expected:
            run.wrong = f"of the faults {expected} there happened {entries}"

    def _look_for_stalls(self, run: Run) -> None:
        """A run that continues as expected, but only after a deadline, has failed too."""
        if (wait_s := max(run.waits_s, default=0.0)) > STALL_S and not run.wrong:
            run.wrong = f"no rank trained for {wait_s:.1f} s after a kill, or after a deadline"

    def _keep_it(self, run: Run, diary: Path) -> None:
        kept = self._keep / f"{time.strftime('%m%d-%H%M%S')}-{run.section}-{run.name.replace(' ', '-')}"
        kept.mkdir(parents=True)
        alive = "\n".join(map(describe, sorted(living_under(self._chaos.pid))))
        (kept / "story.txt").write_text(f"{run.again}\n\n{run.wrong}\n\n{run.kills}\n\n{alive}\n\n{self._chaos.said}\n")
        with suppress(OSError, shutil.Error):
            shutil.copytree(self._chaos.newest, kept / "run")
        if diary.exists():
            shutil.copy(diary, kept)
        print(f"kept in {kept}", file=sys.stderr, flush=True)


def take_shared_files(directory: RunDirectory) -> int:
    """Remove what a run has left in /dev/shm; returns the number of files."""
    if not directory.config_file.exists():
        return 0
    paths = list(SHARED_MEMORY.glob(f"{Arena.prefix(directory.run_id)}*"))
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def describe(pid: int) -> str:
    """A process and where its threads wait, for the story of a run that failed."""
    told = []
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        told.append(f"{pid}: {command[:200]}")
        for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            told.append(f"  {(task / 'comm').read_text().strip()} {state} {(task / 'wchan').read_text()}")
    return "\n".join(told)


def held_by(pid: int, shared_files: int) -> Growth:
    """What a launcher's process and its fork server hold between two runs."""
    memory_bytes = descriptors = threads = 0
    for each in (pid, *living_under(pid)):
        with suppress(OSError):
            status = dict(line.split(":", 1) for line in Path(f"/proc/{each}/status").read_text().splitlines())
            memory_bytes += int(status["VmRSS"].split()[0]) * 1024
            threads += int(status["Threads"])
            descriptors += len(os.listdir(f"/proc/{each}/fd"))
    return Growth(memory_bytes, descriptors, threads, shared_files)
