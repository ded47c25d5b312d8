"""The benchmark of owned parts without its processes: bytes by the formula, the bar of memory, missed bars."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
MIB = 2**20


@pytest.fixture
def shard(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, which finds the others as it does when Python runs it."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("shard")


def timing(shard: Any, *, step_s: float = 1.0, owned: int = 75, sent_bytes: int = 0) -> Any:
    """A rank's measurements of three steps, in each of which as many bytes travelled either way."""
    steps = [
        {"owned": owned, "elements": 100, "sent_bytes": 7 + number * sent_bytes, "received_bytes": number * sent_bytes}
        for number in range(3)
    ]
    return shard.Timing(wall_s=3 * step_s, cpu_s=3 * step_s, samples=3, steps=steps, settling=[])


@pytest.mark.parametrize(
    ("fraction", "computes", "computing", "gradients", "gathered"),
    [
        (0.5, True, 2, 0.5, 0.5),  # a half of the gradients to the other owner, a half of the parameters to the other
        (0.75, True, 2, 0.25, 0.75),
        (0.0, True, 2, 1.0, 0.0),
        (1.0, False, 1, 0.0, 1.0),  # a server of memory with one rank that computes
        (1.0, False, 3, 0.0, 3.0),
        (0.0, False, 3, 0.0, 0.0),
    ],
)
def test_bytes_by_the_formula(
    shard: Any, fraction: float, computes: bool, computing: int, gradients: float, gathered: float
) -> None:
    sent, received = shard.bytes_of(
        fraction, computes=computes, computing=computing, gradient_bytes=400, gathered_bytes=700
    )
    assert (sent, received) == (400 * gradients + 700 * gathered, 400 * gathered + 700 * gradients)


@pytest.mark.parametrize(("sent", "is_met"), [(400, True), (403, True), (405, False), (395, False)])
def test_bytes_within_a_hundredth_of_the_formula_are_right(shard: Any, sent: int, is_met: bool) -> None:
    timings = [timing(shard, owned=75, sent_bytes=400), timing(shard, owned=25, sent_bytes=sent)]
    row = shard.byte_row("state 3,1, gloo", "state 3,1", timings)
    assert (row["is_met"], row["sent_bytes"]) == (is_met, [400, sent])


@pytest.mark.parametrize(("own_s", "is_met"), [(1.2, True), (1.3, False), (0.9, True)])
def test_both_bars_of_time_count(shard: Any, own_s: float, is_met: bool) -> None:
    def pair(step_s: float) -> list[Any]:
        return [timing(shard, step_s=step_s), timing(shard, step_s=step_s / 2)]

    rounds = [{"state": pair(own_s), "replica": pair(1.0), "FSDP2": pair(2.0)}] * 3
    assert shard.time_row("state", "replica", rounds)["is_met"] == is_met
    slow = [{"state": pair(own_s), "replica": pair(1.0), "FSDP2": pair(1.1)}] * 3
    assert not shard.time_row("state", "replica", slow)["is_met"]


@pytest.mark.parametrize(("own_s", "is_met"), [(1.9, True), (2.1, False)])
def test_parameters_that_come_and_go_may_take_as_long_as_with_fsdp(shard: Any, own_s: float, is_met: bool) -> None:
    def pair(step_s: float) -> list[Any]:
        return [timing(shard, step_s=step_s), timing(shard, step_s=step_s / 2)]

    rounds = [{"all": pair(own_s), "replica": pair(1.0), "FSDP2": pair(2.0)}] * 3
    assert shard.time_row("all", "replica", rounds)["is_met"] == is_met


def test_a_rank_may_add_its_part_of_the_state_and_the_gradients_under_way(shard: Any) -> None:
    million = 1_000_000
    facts = {"owned": 250_000, "elements": million, "largest_unit": 200_000}
    assert shard.bound("state", 0.25, facts, has_several=True) == pytest.approx(1.05 * 11 * million + 100 * MIB)
    most = int(1.05 * (4 + 3 + 2.4) * million) + 100 * MIB
    assert shard.memory_row("a", 1, "state 3,1", 1, most, facts)["is_met"]
    assert not shard.memory_row("a", 1, "state 3,1", 1, most + 1000, facts)["is_met"]
    assert not shard.memory_row("a", 1, "state 3,1", 1, most, {**facts, "owned": 256_000})["is_met"]
    most = int(1.15 * (4 + 1.8 + 3.2) * million) + 100 * MIB  # 16 bytes of a quarter; two layers and root; gradients
    assert shard.memory_row("a", 1, "all 3,1", 4, most, {**facts, "root": 50_000})["is_met"]
    assert not shard.memory_row("a", 1, "all 3,1", 4, most + 1000, {**facts, "root": 50_000})["is_met"]
