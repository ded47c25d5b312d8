"""The benchmark of the memory planner without its processes: its clusters, the pace of nodes, what counts as missed."""

from __future__ import annotations

import argparse
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq.balance.memory_plan import Layout, Misfit, candidates, choose
from hetseq.balance.shares import Cost
from hetseq.parallel.model_layers import find_layers, groups_of

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture
def shard_plan(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, which finds the others as it does when Python runs it."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("shard_plan")


@pytest.fixture
def slow_layers(shard_plan: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The task of its nodes, without sleep."""
    monkeypatch.setenv(shard_plan.slow_layers.VARIABLE, "1e9")
    return shard_plan.slow_layers


@pytest.fixture
def task(slow_layers: Any) -> Any:
    """The task itself, without a configuration, of which it uses nothing."""
    return slow_layers.SlowTokens.__new__(slow_layers.SlowTokens)


def planned(shard_plan: Any, name: str) -> tuple[Layout | Misfit, ...]:
    """The candidates of a cluster whose nodes cost what they play, and a little for each micro-batch."""
    cluster = shard_plan.CLUSTERS[name]
    costs = [
        Cost(0.0, 1 / machine.rows_per_s, per_batch_s=0.01, batch=cluster.samples)
        if machine.rows_per_s
        else Cost(0.0, 1.0, limit=0)
        for machine in cluster.machines
    ]
    return candidates(shard_plan.ranks_of(cluster, costs), shard_plan.model_memory(), cluster.samples)


@pytest.mark.parametrize(
    ("name", "shares", "kinds"),
    [
        ("equal", (8, 8), ("none", "state", "all")),
        ("3:1", (12, 4), ("none", "state", "all")),
        ("server", (8, 8, 0), ("state", "all")),
        ("4:2:1", (16, 8, 4), ("none", "state", "all")),
        ("small", (8, 8), ("state", "all")),
        ("tight", (8, 8), ("none", "state", "all")),
        ("least", (8, 8, 0), ("all",)),
    ],
)
def test_each_cluster_has_the_layouts_that_it_is_for(
    shard_plan: Any, name: str, shares: tuple[int, ...], kinds: tuple[str, ...]
) -> None:
    layouts = [one for one in planned(shard_plan, name) if isinstance(one, Layout)]
    assert tuple(one.shard_model for one in layouts) == kinds
    assert {one.shares for one in layouts} == {shares}
    chosen = choose(layouts)
    assert chosen.shard_model == ("none" if "none" in kinds and name != "tight" else "all")
    if name in ("server", "least"):
        assert {one.fractions for one in layouts} == {(0, 0, 1)}
    if name == "tight":
        assert [one.micro_batch for one in layouts] == [1, 8, 8]
    if name == "least":
        assert (chosen.micro_batch, chosen.rounds) == (4, 2)


def test_the_planner_is_told_the_layers_that_a_run_finds(shard_plan: Any, slow_layers: Any) -> None:
    model, network = shard_plan.model_memory(), slow_layers.SlowTokens.network()
    parameters = list(network.parameters())
    groups = groups_of(network, find_layers(network, ["auto"], flag=""), parameters)
    root, *layers = [sum(parameters[place].numel() for of_type in group for place in of_type) for group in groups]
    assert (model.root, {model.layer}, model.layers) == (root, set(layers), len(layers))
    assert model.parameters == root + sum(layers)


def test_a_cost_has_the_seconds_of_its_three_trainings_and_none_below_zero(shard_plan: Any) -> None:
    cost = shard_plan.cost_of(8, 16, half_s=1.0, whole_s=1.8, in_two_s=1.85)
    assert [cost.seconds(units) for units in (4, 8, 16)] == pytest.approx([1.0, 1.8, 3.4])
    assert replace(cost, batch=4).seconds(8) == pytest.approx(1.85)
    assert [cost.fixed_s, cost.per_batch_s, cost.per_unit_s] == pytest.approx([0.15, 0.05, 0.2])
    # noise: half as many samples took less than half as long, two micro-batches less than one
    steep = shard_plan.cost_of(8, 16, half_s=1.0, whole_s=2.4, in_two_s=2.3)
    assert [steep.fixed_s, steep.per_batch_s, steep.per_unit_s] == pytest.approx([0, 0, 0.3])
    # and more than all that a step costs besides its samples
    slow = shard_plan.cost_of(8, 16, half_s=1.0, whole_s=1.8, in_two_s=2.8)
    assert [slow.fixed_s, slow.per_batch_s] == pytest.approx([0, 0.2])


def test_a_run_is_told_the_shares_and_owners_of_its_layout(shard_plan: Any) -> None:
    none, state, all_ = planned(shard_plan, "4:2:1")
    assert shard_plan.division(none) == ["--shard-model", "none", "--balance", "16,8,4"]
    words = shard_plan.division(state)
    assert words[:5] == ["--shard-model", "state", "--balance", "16,8,4", "--own"]
    assert [float(word) for word in words[5].split(",")] == pytest.approx(state.fractions, abs=1e-6)
    assert shard_plan.division(all_)[:2] == ["--shard-model", "all"]
    assert shard_plan.division(all_)[4] == "--own"


def rows(shard_plan: Any, *, times: tuple[float, float], above: float, others: float) -> Any:
    """The rows of two layouts: steps take `times` their prediction, bytes are `above` the plan by that fraction."""
    layouts = planned(shard_plan, "4:2:1")[:2]
    step_s = [layout.step_s * factor for layout, factor in zip(layouts, times)]
    found = []
    for layout, lasts_s in zip(layouts, step_s):
        moved = tuple(
            (received + above * max(received, sent), sent + above * max(received, sent))
            for received, sent in zip(layout.received_bytes, layout.sent_bytes)
        )
        measured = shard_plan.Measured(lasts_s, moved, (1.0,) * 3, (0.0,) * 3, others)
        found.append(
            shard_plan.row_of(
                "4:2:1", layout, measured, least_s=min(step_s), is_chosen=layout is choose(layouts), costs=[]
            )
        )
    return found


@pytest.mark.parametrize(
    ("times", "above", "others", "words"),
    [
        ((1.0, 1.0), 0.05, 0.0, None),
        ((1.1, 1.1), 0.05, 0.0, None),
        ((1.1, 0.9), 0.05, 0.0, "of the fastest: NO, 4:2:1, none"),  # the chosen one is slower than the other
        ((1.0, 1.2), 0.05, 0.0, "of the measured one: NO, 4:2:1, state"),
        ((0.85, 0.85), 0.05, 0.0, "of the measured one: NO, 4:2:1, none; 4:2:1, state"),
        ((1.0, 1.0), 0.11, 0.0, "above it: NO, 4:2:1, none; 4:2:1, state"),
        ((1.0, 1.0), -0.02, 0.0, "above it: NO, 4:2:1, none; 4:2:1, state"),
        ((1.0, 1.0), 0.05, 0.2, "of the cores: NO, 4:2:1, none; 4:2:1, state"),
    ],
)
def test_a_bar_is_missed_by_the_choice_by_seconds_by_bytes_or_by_other_programs(
    shard_plan: Any,
    capsys: pytest.CaptureFixture[str],
    times: tuple[float, float],
    above: float,
    others: float,
    words: str | None,
) -> None:
    found = rows(shard_plan, times=times, above=above, others=others)
    code = shard_plan.report(found, argparse.Namespace(steps=6))
    printed = capsys.readouterr().out
    assert code == (0 if words is None else 1)
    assert (printed.count(": NO, "), words is None or words in printed) == (code, True)
    assert len(json.loads(printed.splitlines()[-1])["rows"]) == 2
    assert "none*" in printed


def test_a_piece_lasts_as_long_whatever_the_thread_did_and_what_is_late_is_made_up_for(
    slow_layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, busy, slept = [0.0], [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds + 0.001  # it always oversleeps

    monkeypatch.setattr(slow_layers.Pace, "_busy", lambda _: busy[0])
    monkeypatch.setattr(slow_layers.time, "sleep", sleep)
    monkeypatch.setattr(slow_layers.time, "perf_counter", lambda: now[0])
    pace = slow_layers.Pace(0.3, pieces=2)
    pace.begin(2)  # a micro-batch of 0.6 s: pieces of 0.1 s forward and 0.2 s backward
    for part, worked_s in ((1 / 3, 0.02), (1 / 3, 0.13), (2 / 3, 0.0), (2 / 3, 0.05)):
        busy[0] += worked_s
        pace.mark(part)
    # the second piece took 0.131 s of 0.1 s and needs no sleep; the third makes up for it
    assert slept == pytest.approx([0.08, 0.2 - 0.031, 0.15 - 0.001])


def test_slow_layers_compute_what_the_same_layers_compute(task: Any) -> None:
    found = []
    for build in (task.network, task.build_model):
        torch.manual_seed(0)
        model = build()
        loss = task.loss(model, task.rows().rows[:2])["loss"]
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_each_half_of_a_layer_ends_a_piece_forward_and_backward(
    slow_layers: Any, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[float] = []
    monkeypatch.setattr(slow_layers.Pace, "mark", lambda _, part: parts.append(part))
    task.loss(task.build_model(), task.rows().rows[:1])["loss"].backward()
    assert parts == [1 / 3] * 2 * task.layers + [2 / 3] * 2 * task.layers
