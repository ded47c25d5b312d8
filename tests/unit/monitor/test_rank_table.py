"""What a person is told of each rank: steady numbers, the ranks that matter, in the room there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hetseq.monitor.block_chart import text_of
from hetseq.monitor.rank_table import (
    OVERHEAD_LINES,
    Row,
    Signs,
    drawn_table,
    is_held_up,
    rank_speeds,
    ranks_that_matter,
    summarise,
    table_lines,
)

GIB = 2**30


def row(compute_s: list[Any], **changes: Any) -> dict[str, Any]:
    """A step of as many ranks as have computed; the others waited for the slowest."""
    size = len(compute_s)
    longest_s = max(seconds or 0.0 for seconds in compute_s)
    ranks = {
        "names": [f"lab{rank}/cpu" for rank in range(size)],
        "compute_s": compute_s,
        "data_s": [0.0] * size,
        "wait_s": [longest_s - (seconds or 0.0) for seconds in compute_s],
        "overhead_s": [0.0] * size,
        "memory_bytes": [GIB] * size,
        "memory_limit_bytes": [0] * size,
    }
    own = {key: changes.pop(key) for key in list(changes) if key in ranks}
    return {"step": 1, "shares": [100] * size, "ranks": ranks | own, "efficiency": 0.9, "pace": None} | changes


def lines(*rows: Row, width: int = 80, count: int = 1000) -> list[str]:
    summary = summarise(rows)
    assert summary is not None
    return table_lines(summary, ranks_that_matter(summary, count), width=width)


def test_the_speed_of_a_rank_is_that_of_its_own_work() -> None:
    one = row([0.2, 0.1, 0.0, None], shares=[30, 40, 0, 50], data_s=[0.05, 0, 0, 0], overhead_s=[0.05, 0, 0.01, 0])
    one["ranks"]["wait_s"] = [9.0, 9.0, 9.0, 9.0]  # and nobody else's
    np.testing.assert_allclose(rank_speeds(one), [100.0, 400.0, 0.0, np.nan], rtol=1e-12)
    assert np.isnan(rank_speeds(row([0.0]))[0])


def test_one_odd_step_does_not_move_the_numbers() -> None:
    calm, odd = row([0.1, 0.2]), row([0.7, 0.2], data_s=[0.5, 0.0])
    assert lines(calm, odd, calm, odd, calm) == lines(calm, calm, calm, calm, calm)
    assert lines(calm, odd, odd, odd, calm) != lines(calm, calm, calm, calm, calm)


def test_the_short_last_step_of_an_epoch_does_not_move_the_shares() -> None:
    full, short = row([0.1, 0.1], shares=[150, 50]), row([0.1, 0.1], shares=[3, 1])
    assert lines(full, full, short) == lines(full, full, full)
    assert lines(full, short, short) != lines(full, full, full)


def test_a_cost_is_that_of_the_micro_batches_of_now() -> None:
    before, now = row([0.2, 0.1]), row([0.4, 0.1])
    before["ranks"] |= {"fixed_s": [0.5, 0.5], "per_micro_batch_s": [0.2, 0.0], "micro_batch": [8, None]}
    now["ranks"] |= {"fixed_s": [0.1, 0.1], "per_micro_batch_s": [0.3, 0.0], "micro_batch": [4, None]}
    found = summarise([before, before, before, now])
    assert found is not None
    assert found.fixed_s.tolist() == [0.1, 0.1]
    assert found.per_micro_batch_s.tolist() == [0.3, 0.0]
    assert found.micro_batch[0] == 4
    assert np.isnan(found.micro_batch[1])
    assert (found.steps, found.compute_s[0]) == (4, 0.2)  # what is seen is not


def test_memory_is_the_newest() -> None:
    old, new = row([0.1, 0.1]), row([0.1, 0.1], memory_bytes=[2 * GIB, GIB])
    assert lines(old, old, new) == lines(new, new, new) != lines(new, new, old)


def test_numbers_of_another_world_are_not_mixed_in() -> None:
    three, two = row([0.1, 0.1, 0.1]), row([0.1, 0.1])
    other = row([0.1, 0.1], names=["labX/cpu", "labY/cpu"])
    for rows, steps in (([three, two], 1), ([other, two], 1), ([two, two], 2), ([two, {"step": 2}, two], 1)):
        summary = summarise(rows)
        assert summary is not None
        assert summary.steps == steps


@pytest.mark.parametrize("rows", [[], [{"step": 1}], [row([0.1, 0.1]), {"step": 2, "shares": [8]}]])
def test_a_rank_alone_has_no_table(rows: list[Row]) -> None:
    assert summarise(rows) is None


@pytest.mark.parametrize(
    ("paces", "marked"),
    [([1, 0, 1, 2, 1], ["1"]), ([1, 0, 1, 2, 0], []), ([None, None, 1], []), ([1], ["1"]), ([7], []), ([1, 0], [])],
)
def test_who_sets_the_pace_is_marked_if_it_does_so_in_most_steps(paces: list[int | None], marked: list[str]) -> None:
    shown = lines(*(row([0.1, 0.1, 0.1], pace=pace) for pace in paces))
    assert [line.split()[1] for line in shown if line.startswith(">")] == marked
    assert ("sets the pace" in shown[0]) == bool(marked)


def test_of_many_ranks_those_that_matter_are_shown() -> None:
    compute_s = [1.0] * 100
    compute_s[40], compute_s[41], compute_s[70], compute_s[71] = 1.3, 1.2, 0.5, 0.6
    summary = summarise([row(compute_s, pace=55)])
    assert summary is not None
    assert ranks_that_matter(summary, 5) == [40, 41, 55, 70, 71]
    assert ranks_that_matter(summary, 2) == [40, 55]
    assert ranks_that_matter(summary, 0) == []
    assert ranks_that_matter(summary, 100) == ranks_that_matter(summary, 1000) == list(range(100))
    shown = lines(row(compute_s, pace=55), count=5)
    assert shown[-2] == "... and 95 more"
    assert len(shown) == 5 + OVERHEAD_LINES
    assert len(lines(row(compute_s))) == 100 + OVERHEAD_LINES - 1


def test_the_table_in_full() -> None:
    one = row(
        [0.3103, 0.3],
        names=["labA/cuda:0", "labB/cpu"],
        shares=[384, 128],
        data_s=[0.002, 0.00124],
        memory_bytes=[3.12 * GIB, 2.9 * GIB],
        memory_limit_bytes=[80 * GIB, 0],
        pace=0,
        communication_s=0.012,
    )
    assert lines(one, one) == [
        "ranks: medians of 2 steps; > sets the pace",
        " rank  where         share  samples/s  compute     wait     data  memory GiB",
        ">   0  labA/cuda:0     384       1230   310 ms  0.00 ms  2.00 ms    3.1/80.0",
        "    1  labB/cpu        128        425   300 ms  10.3 ms  1.24 ms         2.9",
        "efficiency 0.90  communication 12.0 ms",
    ]


def test_what_is_not_known_is_a_dash() -> None:
    bare = {"step": 1, "shares": [5, 3], "ranks": {"compute_s": [None, 0.1]}, "efficiency": None}
    shown = lines(bare)
    assert shown[0] == "ranks: one step"
    assert "where" not in shown[1]
    assert [line.split() for line in shown[2:4]] == [
        ["0", "5", "-", "-", "-", "-", "-"],
        ["1", "3", "-", "100", "ms", "-", "-", "-"],  # no speed: what else it did is not known
    ]
    assert shown[-1] == "efficiency not known yet"
    memory = row([0.1, 0.1, 0.1], memory_bytes=[0, 0, GIB], memory_limit_bytes=[0, 80 * GIB, None])
    assert [line.split()[-1] for line in lines(memory)[2:5]] == ["-", "0.0/80.0", "1.0"]


@pytest.mark.parametrize(
    ("width", "heads"),
    [
        (80, "rank where share samples/s compute wait data memory GiB"),
        (70, "rank where share samples/s compute wait data"),
        (60, "rank where share samples/s compute wait"),
        (50, "rank where share compute wait"),
        (36, "rank share compute wait"),
        (15, "rank share"),
        (3, "ra"),
    ],
)
def test_a_narrow_terminal_has_fewer_columns(width: int, heads: str) -> None:
    shown = lines(row([0.1] * 30, names=["node17.cluster.example/cuda:0"] * 30, pace=3), width=width, count=8)
    assert " ".join(shown[1].split()) == heads
    assert max(map(len, shown)) <= width
    assert [line[:5] for line in shown if line.startswith(">")] == [">   3"[:width]]


@pytest.mark.parametrize(
    ("width", "name", "short"),
    [
        (70, "node17.cluster.example/cuda:0", "node17/cuda:0"),
        (46, "gpu-node17.cluster.example/cuda:0", "..de17/cuda:0"),
        (46, "10.20.30.40/cuda:0", "..0.40/cuda:0"),
        (46, "a-node/an-uncommon-device", "common-device"),
        (46, "a-machine-of-many-letters", "..any-letters"),
        (120, "gpu-node17.cluster.example/cuda:0", "gpu-node17.cluster.example/cuda:0"),
    ],
)
def test_a_long_name_keeps_its_end(width: int, name: str, short: str) -> None:
    assert lines(row([0.1, 0.1], names=[name, "b/cpu"]), width=width)[2].split()[1] == short


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.00 ms"), (0.00123, "1.23 ms"), (0.0123, "12.3 ms"), (0.0999, "99.9 ms"), (0.09996, "100 ms"),
     (0.9994, "999 ms"), (0.9996, "1.00 s"), (1.314, "1.31 s"), (128.4, "128 s")],
)  # fmt: skip
def test_a_duration_has_three_digits(seconds: float, text: str) -> None:
    assert text in lines(row([seconds, 300.0]))[2]


def test_columns_stay_where_they_are_while_numbers_change() -> None:
    heads: Callable[[float], str] = lambda seconds: lines(row([seconds, seconds]))[1]  # noqa: E731
    assert heads(0.001) == heads(0.3104) == heads(70.0)


@pytest.mark.parametrize(
    ("compute_s", "shares", "pace", "is_slow"),
    [
        ([0.5, 1.0, 0.6], [100, 100, 100], 1, True),
        ([0.9, 1.0, 0.95], [100, 100, 100], 1, False),  # they wait, but not for long
        ([0.5, 1.0, 0.6], [100, 100, 100], None, False),
        ([0.9, 1.0, 0.0], [100, 100, 0], 1, False),  # a rank without work waits all the time
        ([1.0], [100], 0, False),
    ],
)
def test_a_rank_is_slow_if_the_others_wait_for_it(
    compute_s: list[float], shares: list[int], pace: int | None, *, is_slow: bool
) -> None:
    summary = summarise([row(compute_s, shares=shares, pace=pace, seconds=1.0)])
    assert summary is not None
    assert is_held_up(summary) == is_slow
    told = Signs(("train",) * len(shares), np.zeros(len(shares)))
    words = [text_of(line).split()[-2] for line in drawn_table(summary, range(len(shares)), width=80, signs=told)[2:]]
    assert words == ["slow" if is_slow and rank == pace else "train" for rank in range(len(shares))]


def test_the_bars_of_ranks_are_on_one_scale() -> None:
    """The first computes for half of its step and waits for the rest; the second does not wait."""
    summary = summarise([row([0.5, 1.0], pace=1, seconds=1.0)])
    assert summary is not None
    lines = drawn_table(summary, [0, 1], width=200, signs=Signs(("train", "train"), np.zeros(2)))
    pieces = [{kind: text for text, kind in line if kind in ("compute", "wait")} for line in lines[2:]]
    assert pieces == [{"compute": "█" * 20, "wait": "░" * 20}, {"compute": "█" * 40}]
    assert [text_of(line).split("█")[0] for line in lines[2:]] == [
        "    0  lab0/cpu  100  50%  ",
        ">   1  lab1/cpu  100  50%  ",
    ]
    assert [text_of(line).split()[-2] for line in lines[2:]] == ["train", "slow"]


def owned(*, planned: bool = True, **changes: Any) -> dict[str, Any]:
    """A step of two ranks that compute and a third one that owns most of the state."""
    one = row([0.2, 0.1, 0.0], shares=[30, 10, 0], memory_bytes=[3 * GIB, 2 * GIB, 40 * GIB], pace=0, **changes)
    one["ranks"] |= {"owned_bytes": [GIB, 0, 3 * GIB], "sent_bytes": [9 << 20, 9 << 20, 600 << 20]}
    one["ranks"] |= {"received_bytes": [1 << 19, 9 << 20, 0]}
    one["ranks"] |= {"planned_bytes": [4 * GIB, 2 * GIB, 0]} if planned else {}
    return one


def drawn(one: Row, width: int) -> list[str]:
    summary = summarise([one] * 3)
    assert summary is not None
    signs = Signs(("train",) * 3, np.zeros(3))
    return [text_of(line) for line in drawn_table(summary, [0, 1, 2], width=width, signs=signs)]


def test_what_ranks_own_their_memory_against_the_plan_and_what_they_exchange() -> None:
    wide = lines(owned(), width=140)
    assert " ".join(wide[1].split()) == (
        "rank where share owns samples/s compute wait data memory GiB plan state GiB sent received"
    )
    assert [" ".join(line.split()[-9:]) for line in (wide[2], wide[4])] == [
        "0.00 ms 3.0 4.0 1.00 9.0 MiB 0.5 MiB",
        "0.00 ms 40.0 - 3.00 600 MiB 0.0 MiB",
    ]
    assert [line.split()[-15] for line in wide[2:5]] == ["25%", "0%", "75%"]
    assert " plan " not in lines(owned(planned=False), width=140)[1]


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_on_a_terminal_of_80_columns_parts_and_memory_are_there(width: int) -> None:
    shown = drawn(owned(), width)
    assert max(map(len, shown)) <= width
    heads = shown[1].split()
    assert {"share", "state", "wait", "owns", "memory", "plan"} <= set(heads)
    assert ("received" in heads) == (width >= 120)
    plain = lines(owned(), width=80)
    assert {"owns", "memory", "plan"} <= set(plain[1].split())
    assert max(map(len, plain)) <= 80


def test_replicas_have_no_columns_of_owners() -> None:
    heads = [drawn(row([0.2, 0.1, 0.1]), 200)[1].split(), lines(row([0.2, 0.1, 0.1]), width=200)[1].split()]
    assert not {"owns", "plan", "sent", "received"} & {word for head in heads for word in head}


def test_an_owner_of_very_little_is_not_one_of_nothing() -> None:
    one = owned()
    one["ranks"]["owned_bytes"] = [1, 0, 999]
    assert ["<1%" in line for line in lines(one, width=140)[2:5]] == [True, False, False]
