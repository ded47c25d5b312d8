"""Table of ranks: chooses the ranks and columns that fit into the given lines and characters.

Makes the text below the live line of a terminal and at the end of a batch job's output, and defines the speed of a
rank. Pure: rows of steps go in (see `metrics`), lines come out; it knows no terminal, no clock and no file.

The one idea: a row describes one step, and single steps flicker, so the table shows the medians of the last few.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hetseq.monitor.block_chart import Line, Piece, stacked_bar, text_of

Row = Mapping[str, Any]
Numbers = npt.NDArray[np.float64]  # (world_size,), NaN where a number is not known

MEDIAN_STEPS = 5  # steady to the eye, and only half a second behind a change if steps take 0.2 s

_GIB = 2**30
_GAP = 2  # characters between columns
_LEAST_NAME = 8  # fewest characters of a shortened name that is still useful
_BAR, _LEAST_BAR, _USUAL_BAR, _MOST_BAR = "step", 10, 20, 40
_NARROW = 70  # characters of a terminal, below which the bars are short
_NARROW_FOR_OWNERS = 130
#: of columns beside a bar
_DRAWN_IMPORTANCE = (
    ("where", 2.0), ("wait", 3.0), ("memory GiB", 3.1), ("plan", 3.2), ("seen", 3.4), ("samples/s", 3.6),
    ("sent", 3.7), ("received", 3.8), ("compute", 4.0),
)  # fmt: skip
_OF_OWNERS = ("memory GiB", "plan")  # less important while every rank holds everything
#: a bar's parts in its order: the character, and the kind
_BAR_PARTS = (("█", "compute"), ("▓", "data"), ("▒", "rest"), ("░", "wait"))
_STATE_KINDS = {
    "train": "good", "done": "good", "slow": "slow", "stopped": "slow", "silent": "slow", "gone": "bad", "dead": "bad",
}  # fmt: skip
_HELD_UP = 0.2  # of a step


@dataclass(frozen=True)
class RankSummary:
    """The work of the ranks in the last steps, for people to read: medians; memory is the newest."""

    steps: int
    names: tuple[str, ...]
    slots: tuple[int, ...]  # by rank: the number shown for it
    share: Numbers
    samples_per_s: Numbers
    compute_s: Numbers
    wait_s: Numbers
    data_s: Numbers
    busy_s: Numbers
    memory_bytes: Numbers
    memory_limit_bytes: Numbers
    efficiency: float | None  # global speed / sum of the speeds of each rank alone
    communication_s: float | None
    pace: int | None  # the rank that the others waited for in most of these steps; None if there is no such rank
    step_s: float | None
    step_spread: float  # interquartile range of the seconds of these steps / their median
    overhead_s: Numbers
    fixed_s: Numbers  # the cost that the shares are computed from: of a step
    per_sample_s: Numbers  # of each of its samples
    per_micro_batch_s: Numbers  # and of each micro-batch
    micro_batch: Numbers  # the most samples of one
    owned_bytes: Numbers  # of the state; known only where ranks own parts of it, as the three below
    sent_bytes: Numbers  # in a step, to owners and to ranks that compute
    received_bytes: Numbers
    planned_bytes: Numbers  # the memory that the plan expects a rank to use

    @property
    def has_owners(self) -> bool:
        """Whether ranks own parts of the state."""
        return bool(np.isfinite(self.owned_bytes).any())


@dataclass(frozen=True)
class Signs:
    """Signs of life that a table made from status files adds: the state of each rank, and the age of that report."""

    states: tuple[str, ...]
    age_s: Numbers


def busy_seconds(row: Row) -> Numbers:
    """Seconds of a step in which each rank did not wait for peers: data, computing and overhead."""
    size = len(row["shares"])
    kinds = ("compute_s", "data_s", "overhead_s")
    busy_s: Numbers = np.sum([_numbers(row["ranks"].get(kind), size) for kind in kinds], axis=0)
    return busy_s


def rank_speeds(row: Row) -> Numbers:
    """Samples per second of each rank alone in one step: its share / its busy seconds, without waiting for peers."""
    busy_s = busy_seconds(row)
    speeds = np.full(len(busy_s), np.nan)
    np.divide(row["shares"], busy_s, out=speeds, where=busy_s > 0)
    return speeds


def summarise(rows: Iterable[Row]) -> RankSummary | None:
    """Summarise the ranks from `rows` (oldest first); None if the newest row has no `ranks`, as in a world of 1."""
    rows = _of_one_world(list(rows))
    if not rows:
        return None
    newest, size = rows[-1], len(rows[-1]["shares"])

    def median(name: str, of: Sequence[Row] = rows) -> Numbers:
        return _medians([_numbers(row["ranks"].get(name), size) for row in of])

    with_costs = with_present_micro_batches(rows)
    return RankSummary(
        steps=len(rows),
        names=_names(newest),
        slots=_slots(newest),
        share=_medians([np.asarray(row["shares"], float) for row in rows]),
        samples_per_s=_medians([rank_speeds(row) for row in rows]),
        compute_s=median("compute_s"),
        wait_s=median("wait_s"),
        data_s=median("data_s"),
        busy_s=_medians([busy_seconds(row) for row in rows]),
        memory_bytes=_numbers(newest["ranks"].get("memory_bytes"), size),
        memory_limit_bytes=_numbers(newest["ranks"].get("memory_limit_bytes"), size),
        efficiency=_median_of_one(rows, "efficiency"),
        communication_s=_median_of_one(rows, "communication_s"),
        pace=_usual_pace(rows),
        step_s=_median_of_one(rows, "seconds"),
        step_spread=_spread(rows),
        overhead_s=median("overhead_s"),
        fixed_s=median("fixed_s", of=with_costs),
        per_sample_s=median("per_sample_s", of=with_costs),
        per_micro_batch_s=median("per_micro_batch_s", of=with_costs),
        micro_batch=_numbers(newest["ranks"].get("micro_batch"), size),
        owned_bytes=_numbers(newest["ranks"].get("owned_bytes"), size),
        sent_bytes=median("sent_bytes"),
        received_bytes=median("received_bytes"),
        planned_bytes=_known(_numbers(newest["ranks"].get("planned_bytes"), size)),
    )


def _spread(rows: Sequence[Row]) -> float:
    seconds = [row["seconds"] for row in rows if row.get("seconds")]
    if len(seconds) < 2:
        return 0.0
    low, middle, high = np.quantile(seconds, [0.25, 0.5, 0.75])
    return float((high - low) / middle)


def with_present_micro_batches(rows: Sequence[Row]) -> list[Row]:
    """The rows (with `ranks`, oldest first) that have the micro-batches of the newest: others have other costs."""
    newest = rows[-1]["ranks"].get("micro_batch")
    return [row for row in rows if row["ranks"].get("micro_batch") == newest]


def ranks_that_matter(summary: RankSummary, count: int) -> list[int]:
    """At most `count` ranks, ascending: the one that sets the pace, then in turn the busiest and longest waiting."""
    size = len(summary.share)
    busiest = np.argsort(-np.nan_to_num(summary.busy_s), kind="stable").tolist()
    waiting = np.argsort(-np.nan_to_num(summary.wait_s), kind="stable").tolist()
    in_turn = [rank for pair in zip(busiest, waiting) for rank in pair]
    first = [] if summary.pace is None else [summary.pace]
    return sorted(list(dict.fromkeys(first + in_turn))[: min(max(count, 0), size)])


def with_slots(summary: RankSummary, names: Mapping[int, str]) -> RankSummary:
    """`summary` in the order of the slots, plus the slots of `names` that it lacks, whose numbers are NaN."""
    slots = sorted({*summary.slots, *names})
    place = {slot: slots.index(slot) for slot in summary.slots}
    changes: dict[str, Any] = {}
    for field in fields(summary):
        if field.type == "Numbers":
            spread = np.full(len(slots), np.nan)
            spread[[place[slot] for slot in summary.slots]] = getattr(summary, field.name)
            changes[field.name] = spread
    known = {**names, **dict(zip(summary.slots, summary.names))}
    pace = None if summary.pace is None else place[summary.slots[summary.pace]]
    return replace(summary, slots=tuple(slots), names=tuple(known[slot] for slot in slots), pace=pace, **changes)


def table_lines(summary: RankSummary, chosen: Sequence[int], *, width: int, signs: Signs | None = None) -> list[str]:
    """The table of the `chosen` ranks: a title, the column names, a line for each rank, and a line about all.

    With `signs` of life it also has each share in per cent, the state and the age.

    A line counts the ranks that were not chosen. Columns that do not fit into `width` characters are left out, the
    least important first. `OVERHEAD_LINES` is the number of lines besides the ranks' own.
    """
    columns = _columns_that_fit(_columns(summary, chosen, signs), width)
    lines = [_title(summary)]
    lines += [_line(cells, columns) for cells in zip(*([column.head, *column.cells] for column in columns))]
    left_out = len(summary.share) - len(chosen)
    if left_out:
        lines.append(f"... and {left_out} more")
    about_all = _about_all(summary) if signs is None else ""  # `hetseq top` shows it beside the step
    return [line[:width] for line in (*lines, about_all) if line]


def drawn_table(summary: RankSummary, chosen: Sequence[int], *, width: int, signs: Signs) -> list[Line]:
    """The table of `hetseq top` on a terminal: colours by state, and for each rank a bar of its step."""
    columns = _columns(summary, chosen, signs)
    places = {column.head: place for place, column in enumerate(columns)}
    columns[places["state"]] = replace(
        columns[places["state"]], cells=[_state_word(summary, rank, signs) for rank in chosen]
    )
    for head, importance in _DRAWN_IMPORTANCE:
        if head in places and (summary.has_owners or head not in _OF_OWNERS):
            columns[places[head]] = replace(columns[places[head]], importance=importance)
    is_narrow = width < (_NARROW_FOR_OWNERS if summary.has_owners else _NARROW)
    columns.insert(places["share"] + 1, _Column(_BAR, [], _LEAST_BAR if is_narrow else _USUAL_BAR, 1.5))
    columns = _columns_that_fit(columns, width)
    rest = sum(_GAP + column.width for column in columns if column.head != _BAR)
    bar_width = min(_MOST_BAR, width - rest)
    title = _title(summary)
    lines: list[Line] = [
        ((title if len(title) <= width else title.partition(";")[0], "dim"),),
        _drawn_line(columns, [((c.head, "dim"),) for c in columns], bar_width),
    ]
    bars = _bars(summary, chosen, bar_width)
    for place, rank in enumerate(chosen):
        kind = _STATE_KINDS.get(_state_word(summary, rank, signs), "")
        plain = "dim" if kind == "bad" else "pace" if rank == summary.pace else ""
        cells: list[Line] = [
            bars[place] if column.head == _BAR else ((column.cells[place], kind if column.head == "state" else plain),)
            for column in columns
        ]
        lines.append(_drawn_line(columns, cells, bar_width))
    left_out = len(summary.share) - len(chosen)
    return [*lines, (((f"... and {left_out} more"), "dim"),)] if left_out else lines


#: lines of a table besides the ranks' own: title, columns, how many more, about all
OVERHEAD_LINES = 4


def is_held_up(summary: RankSummary) -> bool:
    """Whether the rank that sets the pace makes the others wait for a notable part of a step."""
    if summary.pace is None or not summary.step_s:
        return False
    others = np.delete(np.where(summary.share > 0, summary.wait_s, np.nan), summary.pace)  # those with work
    others = others[~np.isnan(others)]
    return bool(len(others)) and float(np.median(others)) > _HELD_UP * summary.step_s


# from rows to numbers


def _numbers(values: Any, size: int) -> Numbers:
    """One kind of number by rank, as floats; NaN if it is null or missing."""
    found = np.full(size, np.nan)
    if values is not None:
        given = np.asarray(values, float)[:size]  # None becomes NaN
        found[: len(given)] = given
    return found


def _known(numbers: Numbers) -> Numbers:
    """The same, with NaN in place of 0."""
    return np.where(numbers > 0, numbers, np.nan)


def _of_one_world(rows: Sequence[Row]) -> list[Row]:
    """The newest rows that have the same ranks as the newest one."""
    same: list[Row] = []
    for row in reversed(rows):
        if not row.get("ranks") or not row.get("shares") or (same and _who(row) != _who(same[0])):
            break
        same.append(row)
    return same[::-1]


def _who(row: Row) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return _names(row), _slots(row)


def _slots(row: Row) -> tuple[int, ...]:
    return tuple(row.get("slots") or range(len(row["shares"])))


def _names(row: Row) -> tuple[str, ...]:
    names = [str(name) for name in row["ranks"].get("names") or ()]
    return tuple(names[: len(row["shares"])] + [""] * (len(row["shares"]) - len(names)))


def _medians(by_step: Sequence[Numbers]) -> Numbers:
    """Medians of the known numbers by rank; of an even count the lower, so that it is a measured number."""
    ordered = np.sort(np.stack(by_step), axis=0)  # (steps, world_size), NaN last
    known = np.sum(~np.isnan(ordered), axis=0)
    return np.asarray(np.take_along_axis(ordered, np.maximum(known - 1, 0)[None] // 2, axis=0)[0])


def _median_of_one(rows: Sequence[Row], key: str) -> float | None:
    known = [float(row[key]) for row in rows if row.get(key) is not None]
    return float(_medians([np.array([value]) for value in known])[0]) if known else None


def _usual_pace(rows: Sequence[Row]) -> int | None:
    """The rank that set the pace in more than half of the steps."""
    pace, times = collections.Counter(row.get("pace") for row in rows).most_common(1)[0]
    return pace if times * 2 > len(rows) and pace is not None and 0 <= pace < len(rows[-1]["shares"]) else None


# from numbers to words


@dataclass(frozen=True)
class _Column:
    head: str
    cells: list[str]
    least_width: int  # of usual cells: a column whose width follows its numbers flickers
    importance: float  # 0 is kept longest
    is_name: bool = False

    @property
    def width(self) -> int:
        return max(self.least_width, len(self.head), *(len(cell) for cell in self.cells), 0)


def _columns(summary: RankSummary, chosen: Sequence[int], signs: Signs | None) -> list[_Column]:
    def column(head: str, numbers: Numbers, text: Callable[[float], str], width: int, importance: float) -> _Column:
        return _Column(head, [_cell(numbers[rank], text) for rank in chosen], width, importance)

    columns = [
        _Column(" rank", [f"{'>' if rank == summary.pace else ' '}{summary.slots[rank]:>4}" for rank in chosen], 5, 0),
        _Column("where", [summary.names[rank] for rank in chosen], 0, 4, is_name=True),
        column("share", summary.share, "{:.0f}".format, 6, 1),
        column("samples/s", summary.samples_per_s, _speed, 9, 5),
        column("compute", summary.compute_s, _seconds, 7, 2),
        column("wait", summary.wait_s, _seconds, 7, 3),
        column("data", summary.data_s, _seconds, 7, 6),
        _Column("memory GiB", [_memory(summary, rank) for rank in chosen], 10, 4.5 if summary.has_owners else 7),
    ]
    if summary.has_owners:
        columns += [
            column("plan", summary.planned_bytes / _GIB, "{:.1f}".format, 4, 4.6),
            column("state GiB", summary.owned_bytes / _GIB, "{:.2f}".format, 9, 7),
            column("sent", summary.sent_bytes, _mib, 8, 8),
            column("received", summary.received_bytes, _mib, 8, 9),
        ]
        columns.insert(3, _Column("owns", [_owned_part(summary, rank) for rank in chosen], 4, 2.5))
    columns = [column for column in columns if column.head != "plan" or np.isfinite(summary.planned_bytes).any()]
    if signs is not None:
        columns[2] = _Column("share", [_part(summary, rank) for rank in chosen], 8, 1)
        columns.append(_Column("state", [signs.states[rank] for rank in chosen], 5, 1.4))
        columns.append(column("seen", signs.age_s, _age, 5, 1.6))
    return [column for column in columns if not column.is_name or any(summary.names)]


def _part(summary: RankSummary, rank: int) -> str:
    share, total = summary.share[rank], np.nansum(summary.share)
    return "-" if np.isnan(share) else f"{share:.0f} {share / total if total else 0:4.0%}"


def _owned_part(summary: RankSummary, rank: int) -> str:
    owned, total = summary.owned_bytes[rank], np.nansum(summary.owned_bytes)
    if np.isnan(owned):
        return "-"
    part = owned / total if total else 0.0
    return "<1%" if 0 < part < 0.005 else f"{part:.0%}"


def _mib(bytes_: float) -> str:
    """Of a step: `0.5 MiB`, `12 MiB`, `1234 MiB`."""
    mib = bytes_ / 2**20
    return f"{mib:.1f} MiB" if mib < 9.95 else f"{mib:.0f} MiB"


def _age(age_s: float) -> str:
    """In at most five characters: `now`, `12 s`, `5 min`, `3 h`."""
    for most, size, unit in ((100, 1, "s"), (6000, 60, "min"), (math.inf, 3600, "h")):
        if age_s < most:
            return "now" if age_s < 2 else f"{age_s / size:.0f} {unit}"
    return "-"


def _columns_that_fit(columns: Sequence[_Column], width: int) -> list[_Column]:
    """The columns that fit, in their order; the name is shortened to the room that the others leave."""
    kept: list[_Column] = []
    left = width + _GAP
    for column in sorted(columns, key=lambda column: column.importance):
        needs = _GAP + (min(column.width, _LEAST_NAME) if column.is_name else column.width)
        if needs > left and kept:
            break  # a less important column that is narrower would surprise
        left -= needs
        kept.append(column)
    return [_shortened(column, left) if column.is_name else column for column in columns if column in kept]


def _shortened(column: _Column, left: int) -> _Column:
    width = min(column.width, min(column.width, _LEAST_NAME) + left)
    return _Column(column.head, [_shorten(cell, width) for cell in column.cells], 0, column.importance, is_name=True)


def _shorten(name: str, width: int) -> str:
    """`node/device` in `width` characters: drops the domain first, then the front, because a node's number is last."""
    if len(name) <= width:
        return name
    node, slash, device = name.rpartition("/")
    node, rest = (node, slash + device) if slash else (device, "")
    short, dot, _ = node.partition(".")
    if dot and not short.isdigit():  # an IP address is kept
        node = short
    if len(node + rest) <= width:
        return node + rest
    room = width - len(rest) - len("..")
    return f"..{node[-room:]}{rest}" if room > 0 else (node + rest)[-width:]


def _state_word(summary: RankSummary, rank: int, signs: Signs) -> str:
    state = signs.states[rank]
    return "slow" if state == "train" and rank == summary.pace and is_held_up(summary) else state


def _bars(summary: RankSummary, chosen: Sequence[int], width: int) -> list[Line]:
    """For each rank the parts of its step; the longest step of all fills the width."""
    travel_s = np.full(len(summary.share), summary.communication_s or 0.0)
    rest_s = np.nan_to_num(summary.overhead_s) + np.where(np.isnan(summary.compute_s), 0.0, travel_s)
    parts = [np.nan_to_num(part) for part in (summary.compute_s, summary.data_s, rest_s, summary.wait_s)]
    longest = float(np.sum(parts, axis=0).max(initial=0.0))
    return [
        stacked_bar([(float(part[rank]), *look) for part, look in zip(parts, _BAR_PARTS)], longest, width)
        for rank in chosen
    ]


def _bar_head(width: int) -> Line:
    """The meaning of the parts of a bar, as far as there is room."""
    compute, data, rest, wait = _BAR_PARTS
    for shown in ((compute, data, rest, wait), (compute, data, wait), (compute, wait)):
        words = [f"{character} {kind}" for character, kind in shown]
        if len(" ".join(words)) <= width:
            pieces = [piece for word, (_, kind) in zip(words, shown) for piece in ((" ", ""), (word, kind))][1:]
            return (*pieces, (" " * (width - len(" ".join(words))), ""))
    return ((_BAR.ljust(width)[:width], "dim"),)


def _drawn_line(columns: Sequence[_Column], cells: Sequence[Line], bar_width: int) -> Line:
    pieces = list[Piece]()
    for column, cell in zip(columns, cells):
        gap = " " * _GAP if pieces else ""
        if column.head == _BAR:
            pieces += [(gap, ""), *(_bar_head(bar_width) if text_of(cell) == _BAR else cell)]
            continue
        room = " " * (column.width - len(text_of(cell)))
        pieces += [(gap, ""), *cell, (room, "")] if column.is_name else [(gap + room, ""), *cell]
    return tuple(piece for piece in pieces if piece[0])


def _line(cells: Sequence[str], columns: Sequence[_Column]) -> str:
    padded = [
        cell.ljust(column.width) if column.is_name else cell.rjust(column.width) for cell, column in zip(cells, columns)
    ]
    return (" " * _GAP).join(padded)


def _title(summary: RankSummary) -> str:
    steps = f"medians of {summary.steps} steps" if summary.steps > 1 else "one step"
    return f"ranks: {steps}" + ("" if summary.pace is None else "; > sets the pace")


def _about_all(summary: RankSummary) -> str:
    known = "not known yet" if summary.efficiency is None else f"{summary.efficiency:.2f}"
    travel = summary.communication_s
    return f"efficiency {known}" + ("" if travel is None else f"  communication {_seconds(travel)}")


def _cell(number: float, text: Callable[[float], str]) -> str:
    return "-" if np.isnan(number) else text(number)


def _speed(samples_per_s: float) -> str:
    return f"{samples_per_s:.0f}" if samples_per_s >= 100 or samples_per_s == 0 else f"{samples_per_s:.3g}"


def _seconds(seconds: float) -> str:
    """A duration in at most seven characters: `0.04 ms`, `12.3 ms`, `310 ms`, `1.31 s`, `128 s`."""
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds)} s"


def _three_digits(number: float) -> str:
    """Three digits, but at most two decimals: the rest is noise."""
    decimals = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{decimals}f}"


def _memory(summary: RankSummary, rank: int) -> str:
    used, limit = summary.memory_bytes[rank], summary.memory_limit_bytes[rank]
    if np.isnan(used) or (used == 0 and not limit > 0):
        return "-"
    return f"{used / _GIB:.1f}" + (f"/{limit / _GIB:.1f}" if limit > 0 else "")
