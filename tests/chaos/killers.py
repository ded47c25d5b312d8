"""Killers of the workers in a chaos run: at random instants, occasionally two at once, or one by one.

The run calls a killer repeatedly while it lasts. The killer finds its victims in the status files and logs each
victim and time. Its random choices are a pure function of its seed; the victims' progress is not.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Kill(NamedTuple):
    """A victim and the time."""

    time_s: float  # since 1970
    slot: int


class Killer:
    """Kills workers at random instants, `most` times; never the last one that trains.

    `double`: the part of the kills that hit two, together or so soon after each other that the second one falls into
    the recovery from the first.
    """

    def __init__(self, seed: int, most: int, *, double: float = 0.25, pause_s: float = 0.25) -> None:
        self._random, self._most, self._double, self._pause_s = random.Random(seed), most, double, pause_s
        self._next_s: float | None = None
        self._killed: set[int] = set()  # a killed process may take a while to end
        self.log: list[Kill] = []
        self.pairs = 0

    @property
    def kills(self) -> int:
        """The number of kills."""
        return len(self.log)

    def act(self, save_dir: Path) -> None:
        """Called again and again while the run lasts."""
        if self.kills >= self._most:
            return
        if self._next_s is None:
            if (save_dir / "metrics.jsonl").exists():
                self._plan()
            return
        if time.monotonic() < self._next_s:
            return
        living = {slot: pid for slot, pid in training(save_dir).items() if pid not in self._killed}
        if len(living) >= 2:
            self._kill(living)
            self._plan()

    def _plan(self) -> None:
        self._next_s = time.monotonic() + self._random.uniform(0.0, self._pause_s)

    def _kill(self, living: Mapping[int, int]) -> None:
        slots = list(living)
        victims = [self._random.choice(slots)]
        if len(slots) > 2 and self._random.random() < self._double:
            victims.append(self._random.choice([slot for slot in slots if slot not in victims]))
        for number, slot in enumerate(victims):
            if number:
                time.sleep(self._random.choice([0.0, 0.0, 0.01, 0.03, 0.06]))
            with suppress(ProcessLookupError):
                now_s = time.time()
                os.kill(living[slot], signal.SIGKILL)
                self._killed.add(living[slot])
                self.log.append(Kill(now_s, slot))
                self.pairs += number


class OneByOne:
    """Kills ranks in turn, each some time after all of them train together."""

    pairs = 0

    def __init__(self, seed: int, most: int, *, ranks: int) -> None:
        self._random, self._most, self._ranks = random.Random(seed), most, ranks
        self._next_s: float | None = None
        self.log: list[Kill] = []

    @property
    def kills(self) -> int:
        """The number of kills."""
        return len(self.log)

    def act(self, save_dir: Path) -> None:
        """Called again and again while the run lasts."""
        living = training(save_dir) if self.kills < self._most else {}
        if len(living) < self._ranks:
            self._next_s = None
        elif self._next_s is None:
            self._next_s = time.monotonic() + self._random.uniform(0.15, 0.4)
        elif time.monotonic() >= self._next_s:
            slot, self._next_s = self.kills % self._ranks, None
            self.log.append(Kill(time.time(), slot))
            with suppress(ProcessLookupError):
                os.kill(living[slot], signal.SIGKILL)


def training(save_dir: Path) -> dict[int, int]:
    """The processes that live and have trained, by slot."""
    found = {}
    for path in sorted((save_dir / "status").glob("rank-*.json")):
        with suppress(OSError, ValueError, KeyError):
            told = json.loads(path.read_text())
            if told["pid"] and told["state"] == "train" and _is_alive(told["pid"]):
                found[int(path.stem.partition("-")[2])] = told["pid"]
    return found


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
