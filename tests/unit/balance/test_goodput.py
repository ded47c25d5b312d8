"""Goodput of runs whose nodes fail: simulated events against the closed form, and against timelines made by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from hetseq.balance import goodput as module
from hetseq.balance.goodput import (
    Absence,
    Disk,
    FailureLaw,
    Goodput,
    NodeGroup,
    StepTime,
    Way,
    best_interval_s,
    draw,
    expected_fraction,
    images,
    live,
    restart,
    retry,
    step_time,
)
from hetseq.balance.simulation import Cluster, Link, RankGroup, best_shares, best_step_s, predict

STEP_S = 2.0
DISK = Disk(steps=50, save_s=1.0, restart_s=30.0)
WAYS = [
    restart(DISK, detect_s=5.0),
    retry(DISK, regroup_s=3.0, detect_s=5.0),
    images(DISK, regroup_s=3.0, detect_s=5.0, every=10, image_s=0.2),
]
LINK = Link(bytes_per_s=1e9, latency_s=1e-5)
each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)


def same_step(left: tuple[int, ...]) -> float:
    """A step that takes as long with fewer nodes."""
    return STEP_S if sum(left) else math.inf


def shared_step(left: tuple[int, ...]) -> float:
    """A step whose samples are shared by up to four equal nodes."""
    return STEP_S * 4 / sum(left) if sum(left) else math.inf


def simulated(
    way: Way, *, nodes: int, mtbf_s: float, events: int = 20_000, seed: int = 0, repair_s: float = 0.0,
    step_s: StepTime = same_step,
) -> Goodput:  # fmt: skip
    """`mtbf_s`: of the whole cluster."""
    law, wall_s = FailureLaw(1 / mtbf_s / nodes, repair_s), events * mtbf_s
    absences = draw([NodeGroup(nodes)], law, horizon_s=wall_s, generator=np.random.default_rng(seed))
    return live(way, absences, nodes=[nodes], step_s=step_s, wall_s=wall_s)


def made(way: Way, *absences: Absence, wall_s: float, nodes: int = 4, step_s: StepTime = shared_step) -> Goodput:
    return live(way, absences, nodes=[nodes], step_s=step_s, wall_s=wall_s)


# against the closed form


@each_way
@pytest.mark.parametrize("mtbf_s", [100.0, 1000.0, 20_000.0])
def test_events_lead_to_the_fraction_of_the_closed_form(way: Way, mtbf_s: float) -> None:
    found = simulated(way, nodes=5000, mtbf_s=mtbf_s)
    expected = expected_fraction(way, step_s=STEP_S, mtbf_s=mtbf_s)
    # 20,000 events: the standard error of the lost time is 0.7 % of it, where failures meet 1 %
    assert 1 - found.fraction == pytest.approx(1 - expected, rel=0.03)
    assert abs(found.fraction - expected) < 0.015


def test_the_closed_form_of_restarts_is_that_of_daly() -> None:
    work_s, save_s, halt_s, mtbf_s = 100.0, 1.0, 35.0, 600.0
    wall_s = mtbf_s * math.exp(halt_s / mtbf_s) * (math.exp((work_s + save_s) / mtbf_s) - 1)
    assert expected_fraction(WAYS[0], step_s=STEP_S, mtbf_s=mtbf_s) == pytest.approx(work_s / wall_s)
    assert expected_fraction(WAYS[0], step_s=STEP_S, mtbf_s=0.1) == 0.0, "e to the 1,360 is no number"


def test_the_best_interval_has_the_most_goodput() -> None:
    def fraction(interval_s: float, save_s: float, mtbf_s: float) -> float:
        way = restart(Disk(steps=1, save_s=save_s, restart_s=30.0))
        return expected_fraction(way, step_s=interval_s, mtbf_s=mtbf_s)

    for save_s, mtbf_s in [(1.0, 100_000.0), (1.0, 500.0), (30.0, 300.0)]:
        best_s = best_interval_s(save_s, mtbf_s)
        # flat at its top: the formula's best is within a thousandth of the best of all
        most = max(fraction(best_s * factor, save_s, mtbf_s) for factor in np.geomspace(0.2, 5, 200))
        assert fraction(best_s, save_s, mtbf_s) == pytest.approx(most, rel=1e-3)
        assert fraction(best_s / 2, save_s, mtbf_s) < 0.9999 * most
        assert fraction(best_s * 2, save_s, mtbf_s) < 0.9999 * most
    young = math.sqrt(2 * 1.0 * 1e8)
    assert best_interval_s(1.0, 1e8) == pytest.approx(young, rel=1e-3)
    assert best_interval_s(30.0, 10.0) == 10.0


# in general


@each_way
def test_without_failures_only_saves_and_images_cost(way: Way) -> None:
    free = replace(way, disk=replace(DISK, save_s=0.0), live_s=0.0)
    assert made(free, wall_s=1000.0).fraction == pytest.approx(1.0, abs=1e-12)
    assert made(free, wall_s=1000.0).steps == pytest.approx(500.0)
    found = made(way, wall_s=1000.0)
    assert found.fraction == pytest.approx(STEP_S / (STEP_S + way.keeping_s))
    assert (found.again_steps, found.halted_s, found.slower_s) == (0, 0.0, 0.0)
    assert way.keeping_s == {"restart": 0.02, "retry": 0.02, "images": 0.04}[way.name]


@each_way
def test_worse_numbers_make_the_goodput_worse(way: Way) -> None:
    fractions = [simulated(way, nodes=100, mtbf_s=mtbf_s, events=4000).fraction for mtbf_s in (50, 200, 800, 3200)]
    assert fractions == sorted(fractions)
    assert fractions[0] < 0.95 * fractions[-1]
    worse = [
        replace(way, disk=replace(DISK, restart_s=90.0), regroup_s=9.0),
        replace(way, detect_s=15.0),
        replace(way, disk=replace(DISK, save_s=3.0)),
    ]
    before = simulated(way, nodes=100, mtbf_s=800, events=4000).fraction
    assert all(simulated(one, nodes=100, mtbf_s=800, events=4000).fraction < 0.999 * before for one in worse)


@each_way
def test_repairs_cost_the_speed_of_the_nodes_that_are_away(way: Way) -> None:
    longer = [
        simulated(way, nodes=4, mtbf_s=2000, events=4000, repair_s=repair_s, step_s=shared_step)
        for repair_s in (0.0, 500.0, 2000.0)
    ]
    assert longer[0].slower_s == 0.0
    assert longer[0].fraction > longer[1].fraction > longer[2].fraction
    # three of four nodes take 4/3 of the time: a third more for the 500 s of every 2,000 s
    assert longer[1].slower_s / longer[1].wall_s == pytest.approx(0.25 * 0.25, abs=0.03)


@each_way
def test_a_seed_decides_and_seeds_agree(way: Way) -> None:
    one, again, other = (simulated(way, nodes=100, mtbf_s=800, events=8000, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one.again_steps != other.again_steps
    assert 1 - one.fraction == pytest.approx(1 - other.fraction, rel=0.06)


@each_way
def test_no_second_is_lost_from_the_books(way: Way) -> None:
    found = simulated(way, nodes=4, mtbf_s=300, events=3000, repair_s=200.0, step_s=shared_step)
    parts = found.halted_s + found.again_s + found.saving_s + found.slower_s
    assert min(found.halted_s, found.again_s, found.saving_s, found.slower_s) > 0
    assert found.steps * found.calm_step_s + parts == pytest.approx(found.wall_s, rel=1e-9)


def test_steps_of_thousands_of_nodes_are_computed_once_per_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster((RankGroup("new", 4000, 6.0, LINK), RankGroup("old", 6000, 3.0, LINK)), 1e9)
    computed: list[int] = []

    def counted(groups: Sequence[RankGroup], total: int) -> float:
        computed.append(sum(group.count for group in groups))
        return best_step_s(groups, total)

    monkeypatch.setattr(module, "best_step_s", counted)
    groups, law = [NodeGroup(4000), NodeGroup(6000)], FailureLaw(0.01 / module.DAY_S, 3600.0)
    absences = draw(groups, law, horizon_s=40 * module.DAY_S, generator=np.random.default_rng(0))
    assert 3800 < len(absences) < 4200
    step_s = step_time(cluster, 160_000, ranks_per_node=(1, 1))
    found = live(WAYS[1], absences, nodes=(4000, 6000), step_s=step_s, wall_s=40 * module.DAY_S)
    assert 0.95 < found.fraction < 1.0
    assert min(computed) > 9975
    assert len(computed) < 120  # of 8,000 events


# the law


def test_a_node_fails_at_its_rate_and_not_while_it_is_away() -> None:
    groups, law = [NodeGroup(3), NodeGroup(5, preemptions_per_s=2e-3, absence_s=50.0)], FailureLaw(1e-3, 200.0)
    absences = draw(groups, law, horizon_s=1e6, generator=np.random.default_rng(3))
    assert [absence.begin_s for absence in absences] == sorted(absence.begin_s for absence in absences)
    for node in range(8):
        own = [absence for absence in absences if absence.node == node]
        assert all(later.begin_s >= one.end_s for one, later in pairwise(own))
        there_s = 1e6 - sum(absence.end_s - absence.begin_s for absence in own)
        failed, preempted = ([one for one in own if one.is_announced is announced] for announced in (False, True))
        assert len(failed) / there_s == pytest.approx(1e-3, rel=0.15)  # some 800: five standard errors
        assert len(preempted) / there_s == pytest.approx(2e-3 if node > 2 else 0.0, rel=0.15)
        assert {round(one.end_s - one.begin_s, 6) for one in failed} == {200.0}
    assert law.interruptions_per_s(groups) == pytest.approx(8e-3 + 5 * 2e-3)


# timelines made by hand, of four nodes and steps of 2 s

CALM = Disk(steps=50, save_s=0.0, restart_s=30.0)
RETRY = retry(CALM, regroup_s=3.0, detect_s=5.0, join_s=4.0)
IMAGES = images(CALM, regroup_s=3.0, every=10, image_s=0.0)


def test_retry_does_one_step_again_with_fewer_nodes() -> None:
    # 10.5 steps; the step is computed to its end, 1 s; 8 s of halt; 18 s of steps of 8/3 s; 4 s until all train again
    found = made(RETRY, Absence(21.0, 48.0, node=1), wall_s=72.0)
    assert found.steps == pytest.approx(10 + 18 / (8 / 3) + 20 / 2)
    assert (found.again_steps, found.again_s, found.halted_s) == (1, 1.0, 13.0)
    assert found.slower_s == pytest.approx(18 * (1 - 3 / 4))


def test_a_restart_goes_back_to_the_newest_save() -> None:
    found = made(restart(CALM, detect_s=5.0), Absence(231.0, 240.0, node=1), wall_s=286.0)
    assert found.steps == pytest.approx(100 + 20 / 2), "the node was back before the start was over"
    assert (found.again_steps, found.again_s, found.halted_s) == (16, 31.0, 35.0)


def test_images_go_back_to_the_newest_image() -> None:
    found = made(IMAGES, Absence(233.0, 1e9, node=1), wall_s=234.0 + 3.0 + 8.0)
    assert found.steps == pytest.approx(110 + 8 / (8 / 3))
    assert (found.again_steps, found.again_s, found.halted_s) == (7, 13.0, 4.0)


@pytest.mark.parametrize(
    ("way", "second", "is_lost"),
    [
        (IMAGES, Absence(239.0, 1e9, node=2), True),  # it had the image of node 1
        (IMAGES, Absence(239.0, 1e9, node=0), True),  # node 1 had its image
        (IMAGES, Absence(239.0, 1e9, node=3), False),
        (IMAGES, Absence(235.0, 1e9, node=2), True),  # while the others regroup
        (IMAGES, Absence(266.0, 1e9, node=2), False),  # there is another image since 110 + 10 steps
        (RETRY, Absence(239.0, 1e9, node=2), False),
    ],
)
def test_two_nodes_with_each_others_images_send_the_run_back_to_the_disk(
    way: Way, second: Absence, is_lost: bool
) -> None:
    found = made(way, Absence(233.0, 1e9, node=1), second, wall_s=second.begin_s + 5.0, nodes=4)
    assert (found.steps < 101) == is_lost
    assert (found.steps > 109) != is_lost


def test_an_announced_absence_takes_no_step_back() -> None:
    leaving = Absence(231.0, 1e9, node=1, is_announced=True)
    for way in (RETRY, IMAGES):
        found = made(way, leaving, wall_s=242.0)
        assert found.steps == pytest.approx(115.5 + 8 / (8 / 3))
        assert (found.again_steps, found.halted_s) == (0, 3.0)
    found = made(restart(replace(CALM, save_s=2.0)), leaving, wall_s=263.0)
    assert (found.again_steps, found.halted_s) == (0, 32.0), "all save and start again"


def test_a_node_that_is_back_joins_a_restart_at_once_only_if_that_gains_time() -> None:
    back_soon = [Absence(100.0, 200.0, node=0), Absence(10_000.0, 10_001.0, node=1)]
    found = made(restart(CALM), *back_soon, wall_s=20_000.0)
    assert found.halted_s == 3 * 30.0, "at 200 s all start again: a quarter of 10,000 s is more than 30 s"
    often = [Absence(100.0 * at, 100.0 * at + 40.0, node=at % 4) for at in range(1, 100)]
    found = made(restart(CALM), *often, wall_s=10_000.0)
    assert found.halted_s == 99 * 30.0, "the next failure has all start again anyway"
    assert found.slower_s > 0


@each_way
def test_a_run_without_nodes_waits_and_goes_back_to_the_disk(way: Way) -> None:
    all_away = [Absence(231.0 + node / 100, 1231.0, node=node) for node in range(4)]
    found = made(replace(way, disk=CALM, live_s=0.0), *all_away, wall_s=1500.0)
    assert found.halted_s >= 1000.0
    first_s = 30.0 if way.name == "restart" else way.join_s
    assert found.steps == pytest.approx(100 + (1500 - 1231 - first_s) / 2, abs=1)


def test_a_node_that_waits_for_a_restart_can_be_lost_again() -> None:
    often = [Absence(100.0, 150.0, node=0), Absence(160.0, 500.0, node=0), Absence(200.0, 600.0, node=1)]
    found = made(replace(restart(CALM), disk=replace(CALM, restart_s=40.0)), *often, wall_s=240.0)
    assert (found.halted_s, found.again_steps) == (80.0, math.ceil(60 / (8 / 3)))


# steps of unequal nodes


def test_a_step_by_group_is_that_by_rank() -> None:
    chance = random.Random(5)
    for _ in range(60):
        groups = []
        for at in range(chance.randint(1, 4)):
            stairs = {"micro_batch": chance.randint(1, 9), "per_micro_batch_s": 0.05} if chance.random() < 0.5 else {}
            fixed_s, count = chance.choice([0.0, 0.1]), chance.randint(1, 12)
            groups.append(RankGroup(f"g{at}", count, chance.uniform(1, 50), LINK, fixed_s, **stairs))
        cluster, total = Cluster(tuple(groups), 0.0), chance.randint(1, 900)
        by_rank = predict(cluster.ranks, best_shares(cluster.ranks, total), communication_s=0.0)
        assert best_step_s(groups, total) == pytest.approx(by_rank.step_s, rel=1e-9)


def test_unequal_nodes_count_by_their_speed_and_all_their_ranks() -> None:
    cluster = Cluster((RankGroup("fast", 4, 8.0, LINK), RankGroup("slow", 4, 2.0, LINK)), 1e9)
    step_s = step_time(cluster, 4000, ranks_per_node=(2, 1))
    exchange_s = 2 * 7 * (1e9 / 8 / 1e9 + 1e-5)
    assert step_s((2, 4)) == pytest.approx(100 + exchange_s)
    without_slow, without_fast = (left_s - exchange_s for left_s in (step_s((2, 3)), step_s((1, 4))))
    assert without_slow == pytest.approx(4000 / 38, rel=0.01)
    assert without_fast == pytest.approx(4000 / 24, rel=0.01)
    assert step_s((0, 0)) == math.inf
    stretched = step_time(cluster, 4000, ranks_per_node=(2, 1), stretch=1.5)
    assert stretched((2, 4)) == pytest.approx(150 + exchange_s)
