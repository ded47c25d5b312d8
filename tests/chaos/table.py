"""Results of chaos runs: figures from outcomes, and the table that compares them with their bars.

Pure: rows, events and times go in. The one idea: an event `generation` says when its ranks continued (`time_utc`), how
long they had not trained (`seconds`), after which step and who they are. So everything about a recovery follows from
these events and from the time of the kill, which the test itself records.
"""

from __future__ import annotations

import datetime
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.chaos.killers import Kill
from tests.chaos.runs import LOSS_BAR, PARAMETER_BAR

Row = Mapping[str, Any]

KNOWN_S, BEYOND_DEADLINE_S, REPLACED_S = 1.0, 2.0, 30.0
RECOVERY_MEDIAN_S, RECOVERY_S = 0.5, 5.0
STALL_S = KNOWN_S + RECOVERY_S


@dataclass(frozen=True)
class Passage:
    """Ranks continue training in a new generation."""

    generation: int
    step: int  # the last one of theirs
    at_s: float  # since 1970
    seconds: float | None  # since they had noticed that the generation before was over; None: not known
    ranks: frozenset[int]
    is_join: bool  # no rank had been lost

    @property
    def noticed_s(self) -> float:
        """Since 1970: when the ranks knew that the generation before was over."""
        return self.at_s - (self.seconds or 0.0)


@dataclass
class Run:
    """One run and its known facts."""

    section: str
    name: str
    again: str  # the words that repeat it
    ranks: int
    deadline_s: float = 0.0  # after which the others give a silent rank up; 0: ranks are killed
    wrong: str = ""
    is_right: bool = False  # it trained like an undisturbed run, whatever else is wrong
    has_hung: bool = False
    kills: list[Kill] = field(default_factory=list)
    pairs: int = 0
    passages: list[Passage] = field(default_factory=list)
    loss_difference: float = math.inf
    distance: float = math.inf  # of the parameters
    is_ledger_right: bool = False
    steps_lost: int = 0
    processes_left: int = 0
    shared_files: int = 0  # left in /dev/shm

    @property
    def waits_s(self) -> list[float]:
        """Seconds from each kill, or from the deadline after each stop, until others continued.

        Excludes kills that no rank noticed, such as the kill of a rank that had not joined yet.
        """
        waits_s = until_they_went_on(self.kills, self.passages)
        return [wait_s - self.deadline_s for wait_s in waits_s if self.deadline_s or wait_s < math.inf]


@dataclass(frozen=True)
class Growth:
    """The memory of the processes between two runs."""

    memory_bytes: int
    descriptors: int
    threads: int
    shared_files: int  # in /dev/shm


@dataclass(frozen=True)
class Line:
    """One line of the table; `holds` None: there is no bar."""

    what: str
    bar: str
    measured: str
    holds: bool | None = None


def passages(events: Iterable[Row], ranks: int) -> list[Passage]:
    """The new generations of a run that began with so many ranks."""
    before, found = frozenset(range(ranks)), []
    for event in events:
        if event["event"] == "generation":
            slots = frozenset(event["ranks"])
            at_s = datetime.datetime.fromisoformat(event["time_utc"].replace("Z", "+00:00")).timestamp()
            is_join = before < slots
            found.append(Passage(event["generation"], event["step"], at_s, event["seconds"], slots, is_join))
            before = slots
    return found


def worst_loss_difference(rows: Sequence[Row], reference: Sequence[Row]) -> float:
    """The largest difference of a step's loss, relative to the reference; infinite where the steps are others."""
    if [row["step"] for row in rows] != [row["step"] for row in reference]:
        return math.inf
    pairs = [(row["loss"], expected["loss"]) for row, expected in zip(rows, reference)]
    return max((abs(loss - expected) / abs(expected) for loss, expected in pairs), default=0.0)


def steps_lost(rows: Iterable[Row], seen: Sequence[Passage], kills: Sequence[Kill] = (), ranks: int = 0) -> int:
    """Committed steps that a later generation did not start from, or committed again.

    `rows` are all that were ever written, of a step perhaps several; `ranks` is how many the run began with. A step is
    committed if a survivor has seen that it was. The row of a step whose writer was killed before the next generation
    may be of a commit that no other rank saw: the survivors repeat that one step, from the same state.
    """
    by_step: dict[int, set[int]] = defaultdict(set)
    for row in rows:
        by_step[row["step"]].add(row["generation"])
    lost = {step for step, generations in by_step.items() if len(generations) > 1}
    for passage in seen:
        lost |= {step for step in by_step if step > passage.step and min(by_step[step]) < passage.generation}
    return len(lost - _seen_by_the_dead_alone(seen, kills, ranks))


def _seen_by_the_dead_alone(seen: Sequence[Passage], kills: Sequence[Kill], ranks: int) -> set[int]:
    """The step after each generation's last, if its writer, its lowest slot, was killed in it."""
    found, begun_s, slots = set(), -math.inf, frozenset(range(ranks))
    for passage in seen:
        if any(kill.slot == min(slots, default=None) and begun_s < kill.time_s <= passage.at_s for kill in kills):
            found.add(passage.step + 1)
        begun_s, slots = passage.at_s, passage.ranks
    return found


def detections(kills: Sequence[Kill], seen: Sequence[Passage]) -> list[float]:
    """The seconds until the survivors knew of a kill, for each kill that was the only one before they continued."""
    by_passage: dict[Passage, list[Kill]] = defaultdict(list)
    for kill in kills:
        if (passage := _next_after(kill.time_s, seen)) is not None:
            by_passage[passage].append(kill)
    return [
        passage.noticed_s - alone[0].time_s
        for passage, alone in by_passage.items()
        if len(alone) == 1 and passage.seconds is not None
    ]


def until_they_went_on(kills: Sequence[Kill], seen: Sequence[Passage]) -> list[float]:
    """For each of these the seconds until others continued without it; infinite where they never did."""
    passages_after = [_next_after(kill.time_s, seen) for kill in kills]
    return [math.inf if after is None else after.at_s - kill.time_s for kill, after in zip(kills, passages_after)]


def replacements(kills: Sequence[Kill], seen: Sequence[Passage]) -> list[float]:
    """For each kill the seconds until its slot took part again, where it did before the run was over."""
    found = []
    for kill in kills:
        times = [each.at_s for each in seen if each.noticed_s > kill.time_s and kill.slot in each.ranks]
        found += [min(times) - kill.time_s] if times else []
    return found


def _next_after(time_s: float, seen: Sequence[Passage]) -> Passage | None:
    return next((passage for passage in seen if passage.at_s > time_s), None)


def at_most(what: str, values: Sequence[float], bar: float, form: str = ".3f", unit: str = " s") -> Line:
    """The largest of some values against a bar; without any value it does not hold."""
    if not values:
        return Line(what, f"≤ {bar:g}{unit}", "nothing", False)
    shown = f"at most {max(values):{form}}{unit}, median {statistics.median(values):{form}} (n = {len(values)})"
    return Line(what, f"≤ {bar:g}{unit}", shown, max(values) <= bar)


def median_at_most(what: str, values: Sequence[float], bar: float) -> Line:
    """The median of some seconds against a bar."""
    shown = f"{statistics.median(values):.3f} s (n = {len(values)})" if values else "nothing"
    return Line(what, f"≤ {bar:g} s", shown, bool(values) and statistics.median(values) <= bar)


def spread(what: str, values: Sequence[float]) -> Line:
    """Maximum and median of some seconds that have no bar."""
    return replace(at_most(what, values, math.inf), bar="", holds=None)


def all_of(what: str, good: int, total: int, *, beside: str = "") -> Line:
    """So many of so many; none at all does not hold."""
    return Line(what, "all", f"{good} of {total}{beside}", 0 < total == good)


def none_of(what: str, count: int) -> Line:
    """There must not be any."""
    return Line(what, "0", str(count), count == 0)


def table_of(runs: Sequence[Run]) -> list[Line]:
    """The lines for the sections that ran."""
    of = {name: [run for run in runs if run.section == name] for name in ("kills", "phases", "kinds", "detection")}
    lines = _of_kills(of["kills"]) if of["kills"] else []
    for name, what in (("phases", "schedules with kills in every phase"), ("kinds", "schedules of other faults")):
        if some := of[name]:
            faults, good = sum(len(run.kills) for run in some), sum(run.is_right for run in some)
            lines.append(all_of(what, good, len(some), beside=f" ({faults} faults)"))
    lines += _of_detection(of["detection"]) + _of_recovery([*of["kills"], *of["phases"], *of["detection"]])
    return [
        *lines,
        none_of("committed steps lost", sum(run.steps_lost for run in runs)),
        none_of("hangs", sum(run.has_hung for run in runs)),
        none_of("processes left", sum(run.processes_left for run in runs)),
        none_of("files left in /dev/shm", sum(run.shared_files for run in runs)),
    ]


def _of_kills(runs: Sequence[Run]) -> list[Line]:
    """The kill loop: a kill is survived if its run is as if nothing had happened."""
    kills = [kill for run in runs for kill in run.kills]
    good = sum(len(run.kills) for run in runs if run.is_right)
    zero, pairs = sum(kill.slot == 0 for kill in kills), sum(run.pairs for run in runs)
    beside = f" ({len(runs)} runs, {zero} of rank zero, {pairs} times two at once)"
    differences, distances = ([getattr(run, name) for run in runs] for name in ("loss_difference", "distance"))
    return [
        all_of("kills survived", good, len(kills), beside=beside),
        at_most("losses, relative to a run without faults", differences, LOSS_BAR, ".1e", ""),
        at_most("parameters, relative distance", distances, PARAMETER_BAR, ".1e", ""),
        all_of("runs whose steps took their samples, once", sum(run.is_ledger_right for run in runs), len(runs)),
        at_most("from a kill until others train", [wait_s for run in runs for wait_s in run.waits_s], STALL_S),
    ]


def _of_detection(runs: Sequence[Run]) -> list[Line]:
    """Kills and stops one by one."""
    killed, stopped = ([run for run in runs if bool(run.deadline_s) is has_one] for has_one in (False, True))
    lines = []
    if killed:
        known, back = (
            [each for run in killed for each in f(run.kills, run.passages)] for f in (detections, replacements)
        )
        lines += [at_most("from a kill until the others know", known, KNOWN_S)]
        lines += [at_most("from a kill until it is replaced", back, REPLACED_S)]
    if stopped:
        waits_s = [wait_s for run in stopped for wait_s in run.waits_s]
        lines += [at_most("from the deadline after a stop until others train", waits_s, BEYOND_DEADLINE_S)]
    return lines


def _of_recovery(runs: Sequence[Run]) -> list[Line]:
    """From the moment on at which the survivors know; excluding recoveries that wait for a silent rank to answer."""
    seen = [passage for run in runs if not run.deadline_s for passage in run.passages]
    lost, joined = (
        [passage.seconds for passage in seen if passage.is_join is is_join and passage.seconds is not None]
        for is_join in (False, True)
    )
    lines = []
    if lost:
        lines = [median_at_most("recovery in process, median", lost, RECOVERY_MEDIAN_S)]
        lines += [at_most("recovery in process", lost, RECOVERY_S)]
    return [*lines, spread("a join: the others wait", joined)] if joined else lines


def grown(samples: Sequence[Growth]) -> list[Line]:
    """The memory of the processes after the first of some runs and after the last one."""
    first, last, over = samples[0], samples[-1], f"over {len(samples) - 1} runs"
    held = {"file descriptors": "descriptors", "threads": "threads", "files in /dev/shm": "shared_files"}
    lines = []
    for what, name in held.items():
        before, after = getattr(first, name), getattr(last, name)
        lines.append(Line(f"{what} {over}", "+ 0", f"{before} to {after}", after <= before))
    before_mb, after_mb = first.memory_bytes / 1e6, last.memory_bytes / 1e6
    each_mb = (after_mb - before_mb) / max(1, len(samples) - 1)
    return [*lines, Line(f"memory {over}", "", f"{before_mb:.1f} to {after_mb:.1f} MB, {each_mb:+.3f} a run")]


def text(lines: Sequence[Line]) -> str:
    """The table in Markdown, its columns aligned."""
    verdicts = {None: "", True: "yes", False: "NO"}
    cells = [("", "bar", "measured", "holds")]
    cells += [(line.what, line.bar, line.measured, verdicts[line.holds]) for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells)]
    cells.insert(1, tuple("-" * width for width in widths))
    return "\n".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in cells)
