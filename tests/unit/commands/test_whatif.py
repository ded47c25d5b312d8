"""`hetseq plan`: predictions for made-up worlds whose truth is known, and steps that may not be judged by."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from hetseq.cli import main
from hetseq.commands.plan.command import (
    Addition,
    ClusterPlan,
    PlanArguments,
    Scenario,
    make_plan,
    parse_plan,
    plan_json,
    plan_text,
)
from hetseq.errors import ConfigError


@dataclass(frozen=True)
class World:
    """A cluster whose truth is known: by rank, seconds of a step with any samples, per sample, and per micro-batch."""

    fixed_s: tuple[float, ...]
    per_sample_s: tuple[float, ...]
    overhead_s: float = 0.0
    exchanged_s: float = 0.0  # bytes of the gradient over the speed of a link
    friction: float = 1.0  # what everything takes longer than the costs say
    names: tuple[str, ...] = ()
    per_batch_s: tuple[float, ...] = ()
    batch: tuple[int | None, ...] = ()

    def busy_s(self, rank: int, share: int) -> float:
        if not share:
            return self.overhead_s
        line_s = self.fixed_s[rank] + self.per_sample_s[rank] * share
        most = self.batch[rank] if self.batch else None
        return line_s + (self.per_batch_s[rank] * math.ceil(share / most) if most else 0.0)

    def step_s(self, shares: Sequence[int]) -> float:
        size = len(self.fixed_s)
        assert len(shares) == size
        busy = (self.busy_s(rank, share) for rank, share in enumerate(shares))
        return self.friction * (max(busy) + self.communication_s(size))

    def communication_s(self, size: int) -> float:
        return self.exchanged_s * 2 * (size - 1) / size

    def best_s(self, total: int) -> float:
        """The shortest step there is: every division is tried."""
        size = len(self.fixed_s)
        divisions = (
            (*first, total - sum(first))
            for first in itertools.product(range(total + 1), repeat=size - 1)
            if sum(first) <= total
        )
        return min(map(self.step_s, divisions))

    def without(self, *gone: int) -> World:
        keep = [rank for rank in range(len(self.fixed_s)) if rank not in gone]
        return replace(
            self,
            fixed_s=tuple(self.fixed_s[rank] for rank in keep),
            per_sample_s=tuple(self.per_sample_s[rank] for rank in keep),
            per_batch_s=tuple(self.per_batch_s[rank] for rank in keep if self.batch),
            batch=tuple(self.batch[rank] for rank in keep if self.batch),
        )

    def with_rank(self, fixed_s: float, per_sample_s: float) -> World:
        return replace(
            self, fixed_s=(*self.fixed_s, fixed_s), per_sample_s=(*self.per_sample_s, per_sample_s)
        )  # fmt: skip

    def row(self, step: int, shares: Sequence[int], **other: Any) -> dict[str, Any]:
        """A row of `metrics.jsonl` as a run on this cluster writes it."""
        size = len(shares)
        names = self.names or tuple(f"node{rank}/cpu" for rank in range(size))
        busy = [self.busy_s(rank, share) if share else self.fixed_s[rank] for rank, share in enumerate(shares)]
        ranks = {
            "names": names, "compute_s": busy, "data_s": [0.0] * size, "wait_s": [max(busy) - one for one in busy],
            "fixed_s": self.fixed_s, "per_sample_s": self.per_sample_s, "overhead_s": [self.overhead_s] * size,
            "per_micro_batch_s": self.per_batch_s or [0.0] * size, "micro_batch": self.batch or [None] * size,
        }  # fmt: skip
        return {
            "step": step, "epoch": 1, "loss": 1.0, "samples": sum(shares), "seconds": self.step_s(shares),
            "generation": 0, "world_size": size, "shares": list(shares), "ranks": ranks,
            "communication_s": self.communication_s(size), **other,
        }  # fmt: skip

    def rows(self, shares: Sequence[int], *, begin: int = 1, count: int = 10) -> list[dict[str, Any]]:
        return [self.row(step, shares) for step in range(begin, begin + count)]


PAIR = World(fixed_s=(0.02, 0.05), per_sample_s=(0.01, 0.03), exchanged_s=0.04)
LAB = World((0.01, 0.02, 0.02), (0.004, 0.03, 0.05), overhead_s=0.01, names=("a/cuda:0", "b/cpu", "c/cpu"))


def plan_of(folder: Path, rows: Sequence[dict[str, Any]], *words: str) -> ClusterPlan:
    """What `hetseq plan FOLDER words...` finds for a run with these rows."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_plan(parse_plan([str(folder), *words]))


def step_s(scenario: Scenario) -> float:
    return scenario.step.step_s


# predictions


def predicts_the_best(folder: Path, world: World, draw: random.Random) -> tuple[int, int]:
    """Of some total and without some rank, which are given back: the plan's step is that of the best division."""
    size = len(world.fixed_s)
    gone, total = draw.randrange(size), draw.randint(size, 24)
    shares = (total - size + 1, *(1,) * (size - 1))
    plan = plan_of(folder, world.rows(shares), "--without", str(gone))
    assert step_s(plan.best) == pytest.approx(world.best_s(total))
    assert step_s(plan.others[0]) == pytest.approx(world.without(gone).best_s(total))
    return total, gone


def test_a_rank_that_leaves_leaves_the_best_step_of_the_others(tmp_path: Path) -> None:
    draw = random.Random(4)
    is_not_just_the_sum_of_speeds = 0
    for case in range(30):
        size = draw.choice((2, 3))
        world = World(
            tuple(draw.uniform(0, 0.2) for _ in range(size)), tuple(draw.uniform(0.005, 0.1) for _ in range(size)),
            overhead_s=draw.choice((0.0, 0.1)), exchanged_s=draw.uniform(0, 0.3), friction=draw.uniform(0.8, 1.3),
        )  # fmt: skip
        total, gone = predicts_the_best(tmp_path / str(case), world, draw)
        truth = world.without(gone).best_s(total)
        naive = world.best_s(total) * sum(1 / each for each in world.per_sample_s)
        naive /= sum(1 / each for each in world.without(gone).per_sample_s)
        is_not_just_the_sum_of_speeds += abs(naive / truth - 1) > 0.1
    assert is_not_just_the_sum_of_speeds > 15


def test_micro_batches_are_counted(tmp_path: Path) -> None:
    draw = random.Random(6)
    is_not_a_line = 0
    for case in range(30):
        size = draw.choice((2, 3))
        world = World(
            tuple(draw.uniform(0, 0.05) for _ in range(size)), tuple(draw.uniform(0.005, 0.02) for _ in range(size)),
            exchanged_s=draw.uniform(0, 0.05), per_batch_s=tuple(draw.uniform(0, 0.1) for _ in range(size)),
            batch=tuple(draw.choice((2, 4, 5, None)) for _ in range(size)),
        )  # fmt: skip
        total, _ = predicts_the_best(tmp_path / str(case), world, draw)
        straight = replace(world, batch=())
        is_not_a_line += straight.best_s(total) < 0.9 * world.best_s(total)
    assert is_not_a_line > 15


#: rank 1 has one micro-batch of its 8 samples
CROWDED = World((0.0, 0.001), (0.001, 0.001), per_batch_s=(0.0, 0.004), batch=(None, 8), names=("a/cpu", "b/cpu"))


def test_a_rank_alone_would_have_more_micro_batches_than_it_has_now(tmp_path: Path) -> None:
    text = plan_text(plan_of(tmp_path, CROWDED.rows((13, 8))))
    # 21 samples in three micro-batches: 1 ms + 21 ms + 3 * 4 ms
    head, first, second = [" ".join(line.split()) for line in text.splitlines()[2:5]]
    assert head == "rank where share best fixed per sample per micro-batch alone, samples/s"
    assert first == "0 a/cpu 13 13 0 s 1 ms - 1000"
    assert second == "1 b/cpu 8 8 1 ms 1 ms 4 ms of 8 617.6"


def test_one_that_is_like_a_rank_with_micro_batches_has_them_too(tmp_path: Path) -> None:
    alone = World((0.002,), (0.001,), per_batch_s=(0.004,), batch=(8,))
    plan = plan_of(tmp_path, alone.rows((24,)), "--add", "new:2")
    two = World((0.002, 0.001), (0.001, 0.0005), per_batch_s=(0.004, 0.002), batch=(8, 8))
    assert step_s(plan.others[0]) == pytest.approx(two.best_s(24))


def test_costs_of_other_micro_batches_than_those_of_now_do_not_count(tmp_path: Path) -> None:
    halved = replace(CROWDED, per_batch_s=(0.0, 0.003), batch=(None, 4))
    rows = CROWDED.rows((13, 8), count=20) + halved.rows((13, 8), begin=21, count=6)
    plan = plan_of(tmp_path, rows, "--without", "0")
    assert [rank.cost.seconds(8) for rank in plan.measured.ranks] == pytest.approx([0.008, 0.015])


def test_rows_that_know_no_micro_batches_have_straight_costs(tmp_path: Path) -> None:
    rows = PAIR.rows((20, 12))
    for one in rows:
        one["ranks"] = {key: of for key, of in one["ranks"].items() if "micro_batch" not in key}
    plan = plan_of(tmp_path, rows, "--without", "1")
    assert step_s(plan.others[0]) == pytest.approx(PAIR.without(1).best_s(32))
    assert "micro-batch" not in plan_text(plan)


def test_the_step_of_now_is_the_measured_one_even_where_the_costs_are_wrong(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, [PAIR.row(step, (20, 12), seconds=1.5) for step in range(1, 11)])
    assert step_s(plan.now) == pytest.approx(1.5)
    assert plan.measured.scale > 3
    assert plan.now.step.samples_per_s == pytest.approx(32 / 1.5)


def noisy_rows(world: World, shares: Sequence[int], draw: random.Random, *, count: int = 45) -> list[dict[str, Any]]:
    """Rows of a run whose ranks are each now and then slower, as `World.row` has them without that."""
    rows = []
    for step in range(1, count + 1):
        row = world.row(step, shares)
        busy = [one * draw.lognormvariate(0, 0.15) for one in row["ranks"]["compute_s"]]
        row["ranks"]["compute_s"] = busy
        rows.append({**row, "seconds": max(busy) + row["communication_s"]})
    return rows


@pytest.mark.parametrize("seed", range(5))
def test_fewer_ranks_wait_less_for_the_slowest_and_more_ranks_more(tmp_path: Path, seed: int) -> None:
    draw, pair = random.Random(seed), World((0.0, 0.0), (0.01, 0.01))
    plan = plan_of(tmp_path, noisy_rows(pair, (30, 30), draw), "--without", "1", "--add", "new:1")
    truths = []
    for size in (1, 2, 3):
        row = World((0.0,) * size, (0.01,) * size)
        truths.append(
            statistics.median(row["seconds"] for row in noisy_rows(row, (60 // size,) * size, draw, count=999))
        )
    alone, with_third, _ = plan.others
    assert step_s(plan.now) == pytest.approx(truths[1], rel=0.07)
    assert step_s(alone) == pytest.approx(truths[0], rel=0.07)
    assert step_s(with_third) == pytest.approx(truths[2], rel=0.07)
    assert step_s(alone) < 1.95 * step_s(plan.now)  # of two equal ones that were always as fast it would be twice


def test_a_rank_that_is_added_is_slow_at_other_times_than_the_one_it_is_like(tmp_path: Path) -> None:
    alone = World((0.0,), (0.01,))
    plan = plan_of(tmp_path, noisy_rows(alone, (60,), random.Random(1)), "--add", "new:1")
    two = World((0.0, 0.0), (0.01, 0.01))
    truth = statistics.median(row["seconds"] for row in noisy_rows(two, (30, 30), random.Random(2), count=999))
    assert step_s(plan.others[0]) == pytest.approx(truth, rel=0.07)
    assert step_s(plan.others[0]) > 1.02 * step_s(plan.now) / 2


def test_a_rank_twice_as_fast_is_the_fastest_at_half_the_cost(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, PAIR.rows((20, 12)), "--add", "new:2")
    assert step_s(plan.others[0]) == pytest.approx(PAIR.with_rank(0.01, 0.005).best_s(32))
    assert plan.others[0].ranks == (0, 1, None)
    assert plan.others[0].names == ("node0/cpu", "node1/cpu", "new")


def test_a_speed_per_second_is_the_speed_alone_with_the_whole_step(tmp_path: Path) -> None:
    world = replace(PAIR, friction=1.25)
    alone_per_s = 32 / (1.25 * (0.02 + 32 * 0.01))  # of rank 0
    plan = plan_of(tmp_path, world.rows((20, 12)), "--add", f"new:{2 * alone_per_s}/s", "--add", "new:2")
    assert step_s(plan.others[0]) == pytest.approx(step_s(plan.others[1]))
    assert step_s(plan.others[0]) < 0.95 * step_s(plan.best)


def test_a_rank_may_slow_the_others_by_its_mere_presence(tmp_path: Path) -> None:
    world = World((0.5, 2.5), (0.01, 9.0), overhead_s=2.0)
    plan = plan_of(tmp_path / "there", world.rows((32, 0)))
    assert plan.best.step.shares == (32, 0)
    assert step_s(plan.best) == pytest.approx(2.0)
    plan = plan_of(tmp_path / "added", LAB.rows((30, 4, 2)), "--add", "slow:0.01")
    assert plan.others[0].step.shares[-1] == 0
    assert step_s(plan.others[0]) == pytest.approx(1.0)  # a hundred times the overhead of the fastest
    assert step_s(plan.best) < 0.2


def test_several_changes_are_predicted_one_by_one_and_together(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, LAB.rows((30, 4, 2)), "--without", "1", "--without=2", "--add", "new:0.5")
    titles = ["without rank 1 (b/cpu)", "without rank 2 (c/cpu)", "with new:0.5", "with all these changes"]
    assert [scenario.title for scenario in plan.others] == titles
    assert step_s(plan.others[3]) == pytest.approx(LAB.without(1, 2).with_rank(0.02, 0.008).best_s(36))


def test_every_rank_may_leave_if_another_comes(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, PAIR.rows((20, 12)), "--without", "0", "--without", "1", "--add", "new:1")
    assert [scenario.ranks for scenario in plan.others][-1] == (None,)
    assert step_s(plan.others[-1]) == pytest.approx(0.02 + 32 * 0.01)  # alone: nothing is exchanged
    alone = plan_of(tmp_path / "alone", [{**row(1, [8]), "seconds": 0.4}], "--without", "0", "--add", "new:2")
    assert step_s(alone.others[-1]) == pytest.approx(0.2)


# which steps count


def test_the_first_steps_and_the_ragged_ends_of_epochs_do_not_count(tmp_path: Path) -> None:
    slow = replace(PAIR, friction=9.0)
    rows = slow.rows((20, 12), count=5)
    for epoch in range(8):  # short epochs: their last steps are many, and the last of all
        rows += PAIR.rows((20, 12), begin=6 + 4 * epoch, count=3)
        rows += slow.rows((3, 2), begin=9 + 4 * epoch, count=1)
    plan = plan_of(tmp_path, rows)
    assert plan.measured.shares == (20, 12)
    assert step_s(plan.now) == pytest.approx(PAIR.step_s((20, 12)))


def test_the_steps_of_another_cluster_do_not_count(tmp_path: Path) -> None:
    moved = replace(PAIR, friction=9.0, names=("x/cpu", "y/cpu"))
    for number, rows in enumerate((moved.rows((20, 12), count=90), LAB.rows((20, 6, 6), count=90))):
        plan = plan_of(tmp_path / str(number), [*rows, *PAIR.rows((20, 12), begin=91, count=12)])
        assert plan.measured.steps == 7  # the first five settle
        assert step_s(plan.now) == pytest.approx(PAIR.step_s((20, 12)))


def test_the_newest_shares_count_once_they_were_kept(tmp_path: Path) -> None:
    old = PAIR.rows((16, 16), count=60)
    kept = plan_of(tmp_path / "kept", old + PAIR.rows((20, 12), begin=61, count=5))
    assert (kept.measured.shares, kept.measured.steps) == ((20, 12), 5)
    tried = plan_of(tmp_path / "tried", old + PAIR.rows((20, 12), begin=61, count=4))
    assert (tried.measured.shares, tried.measured.steps) == ((16, 16), 46)


def test_of_a_new_cluster_few_steps_are_better_than_many_of_the_old_one(tmp_path: Path) -> None:
    old = [row(step, [11, 11, 10]) for step in range(1, 61)]
    plan = plan_of(tmp_path, old + PAIR.rows((20, 12), begin=61, count=3))
    assert (plan.measured.shares, plan.measured.steps) == ((20, 12), 1)


def test_a_single_slow_step_and_skipped_ones_change_nothing(tmp_path: Path) -> None:
    rows = PAIR.rows((20, 12), count=30)
    rows[12]["seconds"] = 50.0
    rows[13:] = [{**one, "skipped": True, "seconds": 50.0} for one in rows[13:]]
    rows.append({"step": 30, "epoch": 1, "valid_loss": 1.0})
    assert step_s(plan_of(tmp_path, rows).now) == pytest.approx(PAIR.step_s((20, 12)))


def test_of_many_ranks_a_few_rows_are_enough(tmp_path: Path) -> None:
    rows = PAIR.rows((20, 12), count=60)
    for one in rows:
        if one["step"] % 10:
            del one["ranks"], one["communication_s"]
    plan = plan_of(tmp_path, rows, "--without", "1")
    assert plan.measured.steps == 50
    assert step_s(plan.others[0]) == pytest.approx(PAIR.without(1).best_s(32))


def test_fixed_micro_batches_are_dealt_whole(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("unit_size: 8\n")
    plan = plan_of(tmp_path, PAIR.rows((16, 24)))
    assert plan.best.step.shares == (32, 8)
    (tmp_path / "config.yaml").write_text("unit_size: null\n")
    assert plan_of(tmp_path, PAIR.rows((16, 24))).best.step.shares == (31, 9)


# what is not known


def row(step: int, shares: Sequence[int]) -> dict[str, Any]:
    """A row of before ranks were measured, and of a run with one rank."""
    return {"step": step, "loss": 1.0, "seconds": 0.5, "world_size": len(shares), "generation": 0, "shares": shares}


def test_a_run_of_one_rank_can_be_given_another(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, [row(step, [10]) for step in range(1, 9)], "--add", "twin:1")
    assert step_s(plan.others[0]) == pytest.approx(0.25)
    assert "the exchange between several is unknown" in plan_text(plan)


def test_a_rank_that_never_had_samples_is_given_none(tmp_path: Path) -> None:
    rows = PAIR.rows((32, 0))
    for one in rows:
        one["ranks"] = {**one["ranks"], "fixed_s": [0.02, None], "per_sample_s": [0.01, None]}
    plan = plan_of(tmp_path, rows)
    assert plan.best.step.shares == (32, 0)
    assert "note: rank 1 (node1/cpu) has had no samples yet" in plan_text(plan)
    with pytest.raises(ConfigError, match="no rank with a known speed is left"):
        plan_of(tmp_path, rows, "--without", "0")


def test_a_cost_that_is_not_told_apart_yet_is_taken_by_the_sample(tmp_path: Path) -> None:
    world = World((0.0, 0.0), (0.01, 0.03))
    rows = world.rows((20, 12))
    for one in rows:
        one["ranks"] = {**one["ranks"], "fixed_s": [None, 0.0], "per_sample_s": [None, 0.03]}
    plan = plan_of(tmp_path, rows)
    assert step_s(plan.best) == pytest.approx(world.best_s(32))
    assert [note[:25] for note in plan.measured.notes] == ["rank 0 (node0/cpu): its f"]


# advice


def test_a_rank_that_costs_more_than_it_brings_is_named(tmp_path: Path) -> None:
    world = World((0.0, 0.0, 0.0), (0.01, 0.01, 1.0), exchanged_s=0.3)
    plan = plan_of(tmp_path, world.rows((16, 16, 0)))
    assert "rank 2 (node2/cpu) slows this run: without it a step takes 460 ms instead of 560 ms" in plan.advice
    assert not any(line.startswith(("rank 0 (node0/cpu) slow", "rank 1 (node1/cpu) slow")) for line in plan.advice)
    free = replace(world, exchanged_s=0.0)
    assert not any("slows" in line for line in plan_of(tmp_path, free.rows((16, 16, 0))).advice)


@pytest.mark.parametrize("size", [3, 12])
def test_a_rank_with_nothing_to_do_is_named_among_few_and_many(tmp_path: Path, size: int) -> None:
    world = World((0.0,) * (size - 1) + (0.5,), (0.01,) * (size - 1) + (9.0,))
    rows = world.rows((*(8,) * (size - 1), 0))
    for one in rows:
        one["ranks"]["overhead_s"] = [0.0] * (size - 1) + [0.4]
    slow = [line.partition(" slows")[0] for line in plan_of(tmp_path, rows).advice if " slows" in line]
    assert slow == [f"rank {size - 1} (node{size - 1}/cpu)"]


def test_a_rank_that_works_and_costs_more_exchange_is_named_too(tmp_path: Path) -> None:
    far = World((0.0, 0.0), (0.01, 0.01), exchanged_s=1.0)
    assert sum(" slows this run" in line for line in plan_of(tmp_path, far.rows((16, 16))).advice) == 2
    near = replace(far, exchanged_s=0.1)
    assert sum(" slows this run" in line for line in plan_of(tmp_path, near.rows((16, 16))).advice) == 0


def test_it_is_said_of_cpu_ranks_beside_a_gpu_whether_they_help(tmp_path: Path) -> None:
    def advice(world: World) -> list[str]:
        return [line for line in plan_of(tmp_path, world.rows((60, 2, 2))).advice if "without" in line]

    assert advice(LAB)[-1].startswith("ranks 1, 2 help: without them a step takes 266 ms instead of ")
    assert [line.split(":")[0] for line in advice(LAB)[:2]] == ["rank 1 (b/cpu) helps", "rank 2 (c/cpu) helps"]
    useless = replace(LAB, per_sample_s=(0.004, 9.0, 9.0))
    assert [line.split(":")[0] for line in advice(useless)] == [
        "rank 1 (b/cpu) makes no difference", "rank 2 (c/cpu) makes no difference", "ranks 1, 2 make no difference",
    ]  # fmt: skip
    assert advice(replace(LAB, names=())) == []  # all of them are CPUs


def test_ranks_without_a_name_go_by_their_number(tmp_path: Path) -> None:
    rows = PAIR.rows((16, 16))
    for one in rows:
        del one["ranks"]["names"]
    assert plan_of(tmp_path, rows).advice[0] == "rank 1 sets the pace"


def test_better_shares_are_pointed_out_and_good_ones_are_not(tmp_path: Path) -> None:
    poor = plan_of(tmp_path, PAIR.rows((16, 16)))
    assert poor.advice[0] == "rank 1 (node1/cpu) sets the pace"
    assert "(--balance auto finds them)" in poor.advice[1]
    good = plan_of(tmp_path, PAIR.rows(poor.best.step.shares))
    assert len(good.advice) == 1


def test_shares_that_only_the_costs_make_better_are_not_called_the_best(tmp_path: Path) -> None:
    pair = World((0.0, 0.0), (0.01, 0.01))
    rows = pair.rows((28, 32), count=50)
    for step, row in enumerate(rows):  # never both at once, and each of them in less than half of the steps
        late = ([1.0, 1.0], [1.2, 1.0], [1.0, 1.5])[(step % 9 + 3) // 4]
        busy = [factor * usual for factor, usual in zip(late, row["ranks"]["compute_s"])]
        row["ranks"]["compute_s"], row["seconds"] = busy, max(busy)
    plan = plan_of(tmp_path, rows)
    assert plan.best.step == plan.now.step
    assert len(plan.advice) == 1


# words


def test_the_text_shows_what_was_found(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "run", PAIR.rows((16, 16)), "--without", "1")
    text = plan_text(plan)
    assert "32 samples a step; medians of 5 steps up to step 10" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "0 node0/cpu 16 25 20 ms 10 ms 94.12" in lines
    assert "now, as measured 570 ms 40 ms 56.14 47% 16,16" in lines
    assert "without rank 1 (node1/cpu) 340 ms 0 s 94.12 100% 32" in lines
    columns = [line.index("node") for line in text.splitlines() if "node" in line][:2]
    assert columns[0] == columns[1]


def test_a_speed_alone_is_told_as_the_clock_would_measure_it(tmp_path: Path) -> None:
    text = plan_text(plan_of(tmp_path, replace(PAIR, friction=2.0).rows((16, 16))))
    assert " 47.06\n" in text  # half of 94.12


def test_the_line_for_scripts_holds_the_same_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(tmp_path, PAIR.rows((16, 16)), "--add", "new:2")
    facts = json.loads(plan_json(plan))
    assert [scenario["step_s"] for scenario in facts["scenarios"]] == [
        *map(step_s, (plan.now, plan.best, *plan.others))
    ]
    assert facts["scenarios"][2]["ranks"] == [0, 1, None]
    assert main(["plan", "--json", str(tmp_path), "--add=new:2"]) == 0
    assert json.loads(capsys.readouterr().out) == facts


def test_shares_of_many_ranks_are_summed_up(tmp_path: Path) -> None:
    many = World((0.0,) * 13, (0.01,) * 13)
    assert "2 to 3" in plan_text(plan_of(tmp_path, many.rows((3, *(2,) * 12))))


# bad input


def test_the_command_line_is_read_in_any_order() -> None:
    read = parse_plan(["--add", "lab/cuda:1:0.5", "--without=3", "--json", "runs/a", "--without", "3"])
    assert read == PlanArguments(Path("runs/a"), (3,), (Addition("lab/cuda:1", 0.5),), wants_json=True)
    assert parse_plan(["runs/a", "--add", "new:120/s"]).add == (Addition("new", 120.0, is_per_s=True),)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "expected one RUN, found none"),
        ("a b", "expected one RUN, found a b"),
        ("a --witout 1", "unknown option --witout: did you mean --without?"),
        ("a --without", "--without has no value"),
        ("a --without -1", "--without -1: expected a rank number"),
        ("a --without 1,2", "give the flag once per rank"),
        ("a --json=yes", "--json takes no value"),
        ("a --add gpu3", "--add gpu3: expected NAME:SPEED"),
        ("a --add :2", "--add :2: expected NAME:SPEED"),
        ("a --add gpu3:0", "with SPEED above 0"),
        ("a --add gpu3:nan", "with SPEED above 0"),
        ("a --add gpu3:inf/s", "with SPEED above 0"),
        ("a --add gpu3:fast", "with SPEED above 0"),
    ],
)
def test_a_wrong_command_is_refused_in_words(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_plan(words.split())
    assert message in str(refusal.value)


def test_a_run_that_cannot_be_judged_is_refused_in_words(tmp_path: Path) -> None:
    old = [row(step, [20, 12]) for step in range(1, 9)]
    unfinished = [{**one, "ranks": {"names": ["a", "b"]}, "communication_s": 0.0} for one in old]
    for rows, words, message in (
        ([], (), "has no step yet"),
        ([{"step": 1, "valid_loss": 1.0}], (), "has no step yet"),
        (old, (), "an older HetSeq wrote them; continue the run"),
        (unfinished, (), "lack compute_s of rank 0"),
        (PAIR.rows((20, 12)), ("--add", "x:1e-320"), "expected from 1e-06 to 1e+06 times"),
        (PAIR.rows((20, 12)), ("--add", "x:1e9/s"), "1.1e+07 times as fast as the fastest rank of"),
        (PAIR.rows((20, 12)), ("--without", "2"), "--without 2: expected a rank of"),
        (PAIR.rows((20, 12)), ("--without", "0", "--without", "1"), "no rank with a known speed is left"),
    ):
        with pytest.raises(ConfigError) as refusal:
            plan_of(tmp_path, rows, *words)
        assert message in str(refusal.value)
        assert str(tmp_path) in str(refusal.value)


def test_what_is_no_run_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path / "none")]) == 2
    assert "does not exist: expected the --save-dir of a run" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_help_shows_how_the_command_is_used(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "x", "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: hetseq {command} ")
    assert main(["--help"]) == 0
    assert f"\n  {command} " in capsys.readouterr().out


def test_a_run_whose_data_lie_in_parts_is_not_predicted(tmp_path: Path) -> None:
    rows = PAIR.rows((20, 12))
    plan_of(tmp_path, rows)
    (tmp_path / "config.yaml").write_text("data_by_host: false\n")
    plan_of(tmp_path, rows)
    (tmp_path / "config.yaml").write_text("data_by_host: true\n")
    with pytest.raises(ConfigError, match="trains with --data-by-host"):
        plan_of(tmp_path, rows)
