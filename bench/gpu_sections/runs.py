"""Runs of `hetseq train` for the sections: how they are started, waited for and killed, and what they left.

A run goes into a folder of the section, named by what it shows; its terminal output lies beside it. Every wait ends at
the time limit of the section, which the script keeps.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import largest_gap

from gpu_sections.section import BENCH, Check, Place, holds, one_line, read_lines

PICTURES = f"{Path(__file__).parent / 'tasks.py'}:Pictures"
#: of every run: nothing is written or measured that the section does not ask for
PLAIN = (
    "--no-save", "--disable-validation", "--memory-interval-updates", "0", "--noise-scale-every", "0",
    "--no-progress-bar", "--lr-scheduler", "constant",
)  # fmt: skip
CORES_OF_A_RUN = 4  # where there are twice as many, two runs run at once
#: of runs that are compared; plain SGD, because adaptive optimizers hide wrong factors
SGD = ("--optimizer", "sgd", "--lr", "0.3", "--clip-norm", "0")


class RunFailed(Exception):
    """A run that did not end as it should; the message is one line, with the last words of the run."""


@dataclass(frozen=True)
class Run:
    """A run that has ended, or the state in which it was when it was looked at."""

    name: str
    folder: Path
    code: int | None
    seconds: float
    output: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row per step, in order; of two rows of a step the later one."""
        rows = {row["step"]: row for row in read_lines(self.folder / "metrics.jsonl") if "loss" in row}
        return [rows[step] for step in sorted(rows)]

    @property
    def validations(self) -> list[dict[str, Any]]:
        """A row per validation, in order."""
        return [row for row in read_lines(self.folder / "metrics.jsonl") if "valid_loss" in row]

    @property
    def losses(self) -> list[float]:
        """The loss of each step, in nats; NaN for a step that was skipped."""
        return [float("nan") if row["loss"] is None else row["loss"] for row in self.rows]

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [event for event in read_lines(self.folder / "events.jsonl") if event.get("event") == name]

    @property
    def stories(self) -> str:
        """What happened to ranks, in the run's own words; one line."""
        return "; ".join(str(event["story"]) for event in self.events("generation"))

    @property
    def logs(self) -> str:
        """All that the ranks logged."""
        paths = sorted((self.folder / "log").glob("rank-*.txt"))
        return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)

    @property
    def last_words(self) -> str:
        """The line of the output that says why a run ended, as well as can be told."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        telling = [line for line in lines if "rror" in line or "[" in line] or lines or ["it printed nothing"]
        return one_line(telling[-1], most=200)


class Running:
    """A run whose process has been started."""

    def __init__(self, place: Place, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name, self.folder = name, place.folder / name
        self._printed, self._began_s = place.folder / f"{name}.txt", time.monotonic()
        with self._printed.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=place.folder,
                env={**os.environ, **environment},
            )  # fmt: skip

    def now(self) -> Run:
        """The state of the run at this moment."""
        return Run(
            self.name, self.folder, self.process.poll(), time.monotonic() - self._began_s,
            self._printed.read_text(encoding="utf-8", errors="replace"),
        )  # fmt: skip

    def end(self, *, code: int = 0) -> Run:
        """Wait for its end. Raises RunFailed where it ends with another exit code than `code`."""
        self.process.wait()
        run = self.now()
        if run.code != code:
            raise RunFailed(f"{run.name} ended with {run.code}, expected {code}: {run.last_words}")
        return run

    def await_step(self, step: int) -> dict[str, Any]:
        """Wait until the run has done `step`; the newest row. Raises RunFailed where it ends before."""
        while True:
            has_ended = self.process.poll() is not None
            rows = self.now().rows
            if rows and rows[-1]["step"] >= step:
                return rows[-1]
            if has_ended:
                run = self.now()
                raise RunFailed(f"{run.name} ended with {run.code} before step {step}: {run.last_words}")
            time.sleep(0.01)

    def await_return(self, world_size: int, *, times: int = 1) -> None:
        """Wait until so many ranks train again, the `times`-th time. Raises RunFailed where the run ends before."""
        while True:
            has_ended = self.process.poll() is not None
            # a rank may be back in the generation that is formed without it, so sizes alone do not tell
            formed = [event for event in self.now().events("generation") if "is back" in event["story"]]
            returns = sum(len(event["ranks"]) == world_size for event in formed)
            if returns >= times:
                return
            if has_ended:
                run = self.now()
                raise RunFailed(f"{run.name} ended with {run.code} before a rank came back: {run.last_words}")
            time.sleep(0.05)

    def hurry(self) -> None:
        """End the pauses that the run was told to make between steps."""
        self.folder.with_name(f"{self.name}.hurry").touch()

    def kill_rank(self, slot: int) -> None:
        """SIGKILL to the process of a rank, as its status file names it."""
        pid = json.loads((self.folder / "status" / f"rank-{slot}.json").read_text(encoding="utf-8"))["pid"]
        os.kill(pid, signal.SIGKILL)

    def kill(self) -> None:
        """SIGKILL to the launcher; its workers end by themselves."""
        self.process.kill()
        self.process.wait()


def start(
    place: Place, name: str, *words: object, devices: str, environment: Mapping[str, str] | None = None
) -> Running:
    """Start `hetseq train` in the folder `name` of the section."""
    place.begin(f"{name} on {devices}")
    command = [
        sys.executable, "-m", "hetseq", "train", "--devices", devices, "--save-dir", str(place.folder / name),
        *map(str, words),
    ]  # fmt: skip
    return Running(place, name, command, environment or {})


def train(
    place: Place, name: str, *words: object, devices: str, code: int = 0, environment: Mapping[str, str] | None = None
) -> Run:
    """A run from beginning to end. Raises RunFailed where it ends with another exit code than `code`."""
    return start(place, name, *words, devices=devices, environment=environment).end(code=code)


@dataclass(frozen=True)
class Wanted:
    """A run to be made: its name, its words and its devices."""

    name: str
    words: tuple[object, ...]
    devices: str


def train_all(place: Place, wanted: Sequence[Wanted]) -> dict[str, Run]:
    """Runs that all must end with 0, by name; some at a time where the machine has cores for it."""
    at_once = max(1, len(os.sched_getaffinity(0)) // CORES_OF_A_RUN)
    done: dict[str, Run] = {}
    for first in range(0, len(wanted), at_once):
        running = [start(place, one.name, *one.words, devices=one.devices) for one in wanted[first : first + at_once]]
        done.update((one.name, one.end()) for one in running)
    return done


def gap(one: Run, other: Run, *, first: int | None = None) -> float:
    """The largest difference of the loss at the same step, of all or the first ones, in nats; NaN if not finite.

    Raises RunFailed where they have not done the same steps.
    """
    if len(one.losses) != len(other.losses) or not one.losses:
        raise RunFailed(f"{one.name} has {len(one.losses)} steps and {other.name} {len(other.losses)}")
    return largest_gap([one.losses[:first], other.losses[:first]])


def told(name: str, text: str, words: str) -> Check:
    """Whether a run has said something: the first line that holds `words` is the figure."""
    lines = [line for line in text.splitlines() if words in line]
    seen = one_line(lines[0]) if lines else "no such line"
    return holds(name, bool(lines), seen=seen, expected=f"a line with {words!r}")


def measured(place: Place, script: str, *words: str) -> dict[str, Any]:
    """The first row of the line of JSON with which a script of bench/ ends. Raises RunFailed where there is none."""
    return all_measured(place, script, *words)[0]


def all_measured(place: Place, script: str, *words: str) -> list[dict[str, Any]]:
    """As `measured`, with all rows, at least one."""
    place.begin(" ".join([f"bench/{script}", *words]))
    command = [sys.executable, str(BENCH / script), "--device", place.device, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["rows"]
        rows[0]
    except (IndexError, KeyError, TypeError, ValueError):
        said = one_line((done.stderr or done.stdout).strip().rpartition("\n")[2])
        raise RunFailed(f"bench/{script} {' '.join(words)} ended with {done.returncode}: {said}") from None
    return rows
