"""Reads the files of a run again and again, for `hetseq top`: signs of life, the newest steps, incidents, the start.

Opens nothing for writing, takes no lock and asks no rank. It judges nothing but time: `run_view` says what the files
mean.

The one idea: clocks of machines differ, so the silence of a rank is measured here, from the moment at which a look
found its file changed. Only at the first look the file's own time must serve.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetseq.monitor.metrics import row_key
from hetseq.monitor.rank_table import MEDIAN_STEPS, Row
from hetseq.monitor.report.event_text import ROUTINE
from hetseq.monitor.status import RunFacts, facts_of_rows, read_facts

ENDED_S = 3.0  # age of the last sign of life after which a run without a launcher counts as over
_ROWS_BYTES, _EVENTS_BYTES = 1 << 18, 1 << 18  # read of the end of a file, at the first look
_MOST_STEPS, _MOST_EVENTS = 1000, 50
_HEAD_BYTES = 1 << 16  # of config.yaml


@dataclass(frozen=True)
class RankSign:
    """The content of one status file, and its age."""

    slot: int
    told: dict[str, Any]
    age_s: float

    @property
    def name(self) -> str:
        """`node/device`."""
        return f"{self.told.get('node', '?')}/{self.told.get('device', '?')}"

    @property
    def is_living(self) -> bool:
        """Whether the rank was still running according to its last report."""
        return self.told.get("pid") is not None and self.told.get("state") in ("start", "train")


@dataclass(frozen=True)
class Start:
    """A launcher that has started workers of which none has reported yet."""

    loaded: int  # ranks that have loaded torch and their data
    size: int | None  # of all; None if more may join
    age_s: float
    is_lost: bool  # the launcher has ended


@dataclass(frozen=True)
class Teller:
    """What is known of the whole run, and how old it is; not current while ranks regroup."""

    facts: RunFacts
    age_s: float
    is_current: bool


class Lookout:
    """Remembers when each file changed, and what the run told last."""

    def __init__(
        self,
        path: Path,
        *,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._now, self._wall = path, now, wall
        self._seen: dict[int, tuple[int, dict[str, Any], float]] = {}  # by slot: its time, content, when it changed
        self._rows, self._events = Tail(path / "metrics.jsonl", _ROWS_BYTES), Tail(path / "events.jsonl", _EVENTS_BYTES)
        self._newest: deque[Row] = deque(maxlen=MEDIAN_STEPS)
        self._told: tuple[RunFacts, float] | None = None  # the last facts of the run, and when they were new
        #: (step, loss, samples per second) of the newest steps, ascending; NaN where unknown
        self.steps: deque[tuple[int, float, float]] = deque(maxlen=_MOST_STEPS)
        #: the newest rows of `events.jsonl`, without routine ones
        self.events: deque[Row] = deque(maxlen=_MOST_EVENTS)

    def signs(self) -> list[RankSign]:
        """The reports of all ranks, by slot; a file that cannot be read keeps its last content."""
        now_s = self._now()
        for row in self._rows.rows():
            self._take(row)
        told = (row for row in self._events.rows() if isinstance(row.get("event"), str))
        self.events.extend(row for row in told if row["event"] not in ROUTINE)
        started_ns = self._started_ns()
        for path in self._path.glob("status/rank-*.json"):
            number = path.stem.partition("-")[2]
            with suppress(OSError, ValueError):
                slot, written_ns = int(number), path.stat().st_mtime_ns
                before = self._seen.get(slot)
                if written_ns < started_ns or (before is not None and before[0] == written_ns):
                    continue  # of an earlier start, or as before
                told = json.loads(path.read_text())
                if isinstance(told, dict):
                    age_s = 0.0 if before is not None else max(0.0, self._wall() - written_ns / 1e9)
                    self._seen[slot] = (written_ns, _sound(told), now_s - age_s)
        self._seen = {slot: seen for slot, seen in self._seen.items() if seen[0] >= started_ns}
        return [RankSign(slot, told, now_s - since_s) for slot, (_, told, since_s) in sorted(self._seen.items())]

    def teller(self, signs: list[RankSign]) -> Teller | None:
        """The report on the whole run; the newest if several ranks have one, as after a death.

        While ranks regroup none has: then it is the last one that was seen, or made from the newest steps.
        """
        now_s = self._now()
        found = [(sign, facts) for sign in signs if (facts := read_facts(sign.told.get("run"))) is not None]
        if found:
            sign, facts = max(
                found, key=lambda pair: (pair[1].row.get("generation") or 0, pair[1].row["step"], -pair[0].age_s)
            )
            self._told = (facts, now_s - sign.age_s)
            return Teller(facts, sign.age_s, True)
        if self._told is None and (facts_of_last := facts_of_rows(self._newest)) is not None:
            self._told = (facts_of_last, now_s)
        if self._told is None or all(sign.told.get("state") == "start" for sign in signs):
            return None
        facts, since_s = self._told
        return Teller(replace(facts, eta_s=None, advice=()), now_s - since_s, False)

    def start(self) -> Start | None:
        """The start of workers that have not reported yet; None if no launcher has started any."""
        started_ns = self._started_ns()
        if not started_ns:
            return None
        loaded = 0
        for path in self._path.glob("log/rank-*.txt"):
            with suppress(OSError):
                loaded += path.stat().st_mtime_ns >= started_ns
        return Start(loaded, self._size(), max(0.0, self._wall() - started_ns / 1e9), not self._is_launcher_alive())

    def has_launcher(self) -> bool:
        """Whether `.lock` names a launcher of this directory: it is emptied when a run ends."""
        try:
            return (self._path / ".lock").stat().st_size > 0
        except OSError:
            return True  # unknown

    def is_dead(self, sign: RankSign) -> bool:
        """Whether the process of a rank is gone, as far as this machine can tell."""
        if sign.age_s < ENDED_S or sign.told.get("node") != socket.gethostname()[:200]:
            return False
        return is_process_gone(sign.told.get("pid"))

    def since(self, event: Row) -> float:
        """Seconds since an event, by the clock of this machine; NaN if its time cannot be read."""
        try:
            at = datetime.datetime.fromisoformat(str(event["time_utc"]).replace("Z", "+00:00"))
            return max(0.0, self._wall() - at.timestamp())
        except (KeyError, ValueError, OverflowError, OSError):
            return math.nan

    def _take(self, row: Row) -> None:
        step = row.get("step")
        if type(step) is not int or row_key(row)[1]:
            return  # a validation
        while self.steps and self.steps[-1][0] >= step:
            self.steps.pop()  # of two rows of a step the later counts
        loss, samples, seconds = (_number(row.get(key)) for key in ("loss", "samples", "seconds"))
        self.steps.append((step, loss, samples / seconds if seconds > 0 else math.nan))
        self._newest.append(row)

    def _started_ns(self) -> int:
        """When the launcher that holds the lock took it; 0 if none holds it, or that is unknown."""
        try:
            status = (self._path / ".lock").stat()
        except OSError:
            return 0
        return status.st_mtime_ns if status.st_size else 0

    def _is_launcher_alive(self) -> bool:
        try:
            holder = json.loads((self._path / ".lock").read_text())
            is_here = holder["host"] == socket.gethostname()
            return not (is_here and is_process_gone(holder["pid"]))
        except (OSError, ValueError, KeyError, TypeError):
            return True  # unknown

    def _size(self) -> int | None:
        """The number of ranks in `config.yaml`; None if the run is open for more."""
        import yaml

        try:
            with (self._path / "config.yaml").open("rb") as file:
                options = yaml.safe_load(file.read(_HEAD_BYTES))
            size, is_open = options.get("distributed_world_size"), options.get("join") is not None
        except (OSError, AttributeError, yaml.YAMLError):
            return None
        return size if type(size) is int and size > 0 and not is_open else None


class Tail:
    """The rows of a file of JSON lines that grows: at first those at its end, then those that are new."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._at: int | None = None  # the byte after the last whole line that was read

    def rows(self) -> list[Row]:
        """The whole lines that are new, as far as they are rows; none if the file cannot be read."""
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                begin = self._at if self._at is not None and self._at <= size else max(0, size - self._most_bytes)
                begin = max(begin, size - self._most_bytes)
                file.seek(begin)
                data = file.read(size - begin)
        except OSError:
            return []
        is_torn = begin > 0 and begin != self._at
        whole = data[: data.rfind(b"\n") + 1]
        self._at = begin + len(whole)
        found = list[Row]()
        for line in whole.split(b"\n")[1 if is_torn else 0 :]:
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    found.append(row)
        return found


def is_process_gone(pid: object) -> bool:
    """Whether no process of this machine has this id."""
    if type(pid) is not int:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # the process of another user
        return False
    return False


def _sound(told: Mapping[str, Any]) -> dict[str, Any]:
    """A status file without values of the wrong type: another program or version may have written it."""
    kinds = {"pid": int, "step": int, "share": int, "state": str, "node": str, "device": str}
    return {key: value for key, value in told.items() if key not in kinds or type(value) is kinds[key] or value is None}


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
