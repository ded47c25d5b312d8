"""What a rank costs, learned from times that are not to be trusted, and when other shares are worth it."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence

import pytest

from hetseq.balance.cost_meter import AtOnce, Balancer, CostMeter, complete_costs
from hetseq.balance.shares import Cost

RAMP = [1, 2, 4, 8, 16, 32, 1]  # the micro-batches of a first step of 64 samples


def feed(meter: CostMeter, sizes: Sequence[int], *, fixed_s: float = 0.0, per_unit_s: float = 1.0) -> None:
    """A step in which each micro-batch took what it should."""
    meter.observe(sizes, [fixed_s + per_unit_s * size for size in sizes], overhead_s=0.0)


def step_time(meter: CostMeter, units: int) -> float:
    cost = meter.cost()
    assert cost is not None
    return cost.seconds(units)


def meter_after(steps: int, sizes: Sequence[int] = (64,), *, per_unit_s: float = 1.0) -> CostMeter:
    meter = CostMeter()
    for _ in range(steps):
        feed(meter, sizes, per_unit_s=per_unit_s)
    return meter


# One rank's own cost


def test_growing_micro_batches_of_one_step_tell_both_parts_of_the_cost() -> None:
    meter = CostMeter()
    assert meter.cost() is None
    meter.observe(RAMP, [5 + 0.5 * size for size in RAMP], overhead_s=3.0)
    cost = meter.cost()
    assert cost is not None
    assert cost.fixed_s == pytest.approx(3 + 5, rel=0.02)
    assert cost.per_unit_s == pytest.approx(0.5, rel=0.02)


def test_without_sizes_that_differ_the_cost_is_proportional() -> None:
    meter = CostMeter()
    for _ in range(50):
        meter.observe([10, 10, 9], [10.0, 10.0, 9.0], overhead_s=2.0)
    cost = meter.cost()
    assert cost is not None
    assert cost.fixed_s == pytest.approx(2.0, abs=0.05)
    assert cost.per_unit_s == pytest.approx(1.0, rel=0.01)


def test_the_first_three_micro_batches_of_a_start_are_not_believed_if_there_are_others() -> None:
    meter = CostMeter()
    meter.observe([1, 2], [900.0, 1800.0], overhead_s=0.0)
    assert step_time(meter, 64) > 20_000  # there are no others yet
    meter.observe([4], [3600.0], overhead_s=0.0)
    feed(meter, [4])
    assert step_time(meter, 64) == pytest.approx(64)
    ramped = CostMeter()
    ramped.observe([1, 2, 4, 8], [900.0, 1800.0, 3600.0, 8.0], overhead_s=0.0)
    assert step_time(ramped, 64) == pytest.approx(64)
    tepid = meter_after(3, per_unit_s=1.2)
    feed(tepid, [64])
    assert step_time(tepid, 64) == pytest.approx(64)  # not some of each


def test_one_slow_step_is_ignored() -> None:
    meter = meter_after(20)
    calm = meter.cost()
    feed(meter, [64], per_unit_s=4)
    assert meter.cost() == calm
    feed(meter, [64])
    feed(meter, [64], per_unit_s=4)
    assert step_time(meter, 64) == pytest.approx(64)


def test_a_slow_first_step_is_corrected_by_the_second() -> None:
    meter = CostMeter()
    meter.observe(RAMP, [4.0 * size for size in RAMP], overhead_s=8.0)
    assert step_time(meter, 64) == pytest.approx(4 * 64 + 8, rel=0.01)
    meter.observe([64], [64.0], overhead_s=2.0)
    assert step_time(meter, 64) == pytest.approx(64 + 2)


@pytest.mark.parametrize("factor", [1.5, 3.0, 10.0])
def test_a_rank_that_has_slowed_down_is_believed_with_the_second_slow_step(factor: float) -> None:
    meter = meter_after(20)
    feed(meter, [64], per_unit_s=factor)
    assert step_time(meter, 64) == pytest.approx(64)
    feed(meter, [64], per_unit_s=factor)
    assert step_time(meter, 64) == pytest.approx(factor * 64, rel=0.01)


def test_a_rank_is_slower_only_when_that_has_lasted_longer_than_a_burst() -> None:
    meter = meter_after(20, per_unit_s=1 / 64)
    for _ in range(2):
        feed(meter, [64], per_unit_s=2 / 64)  # 4 s
    assert step_time(meter, 64) == pytest.approx(1)
    feed(meter, [64], per_unit_s=1 / 64)
    for _ in range(2):
        feed(meter, [64], per_unit_s=2 / 64)
    assert step_time(meter, 64) == pytest.approx(1)  # another one
    feed(meter, [64], per_unit_s=2 / 64)  # 6 s
    assert step_time(meter, 64) == pytest.approx(2, rel=0.01)
    feed(meter, [64], per_unit_s=1 / 64)
    assert step_time(meter, 64) == pytest.approx(1, rel=0.01)  # a faster one is believed at once


@pytest.mark.parametrize(("factor", "steps"), [(2.0, 20), (0.5, 30)])
def test_on_a_noisy_machine_another_speed_is_believed_by_the_mean_of_many_steps(factor: float, steps: int) -> None:
    for seed in range(10):
        generator, meter = random.Random(seed), CostMeter()
        for _ in range(200):
            meter.observe([64], [generator.lognormvariate(0, 0.3)], overhead_s=0.0)
        assert step_time(meter, 64) == pytest.approx(1.05, rel=0.1)
        meter.observe([64], [factor], overhead_s=0.0)
        meter.observe([64], [factor], overhead_s=0.0)
        assert step_time(meter, 64) == pytest.approx(1.05, rel=0.1)  # two steps prove nothing
        for _ in range(steps):
            meter.observe([64], [factor * generator.lognormvariate(0, 0.3)], overhead_s=0.0)
        assert step_time(meter, 64) == pytest.approx(factor * 1.05, rel=0.25)


@pytest.mark.parametrize("noise", [0.2, 0.3])
def test_a_noisy_machine_that_is_ten_times_slower_is_believed_within_ten_steps(noise: float) -> None:
    for seed in range(10):
        generator, meter = random.Random(seed), CostMeter()
        for _ in range(100):
            meter.observe([64], [0.2 * generator.lognormvariate(0, noise)], overhead_s=0.0)
        for _ in range(10):
            meter.observe([64], [2 * generator.lognormvariate(0, noise)], overhead_s=0.0)
        assert step_time(meter, 64) == pytest.approx(2, rel=0.4)


def test_a_stall_on_a_noisy_machine_is_not_believed() -> None:
    for seed in range(10):
        generator, meter = random.Random(seed), CostMeter()
        for _ in range(12):
            meter.observe([64], [0.2 * generator.lognormvariate(0, 0.3)], overhead_s=0.0)
        before_s = step_time(meter, 64)
        meter.observe([64], [4.0], overhead_s=0.0)
        assert step_time(meter, 64) < 1.5 * before_s


@pytest.mark.parametrize("noise", [0.0, 0.25])
def test_a_moment_without_other_programs_is_no_new_speed(noise: float) -> None:
    """The steps that end it are no burst: they count at once, and not after 6 s."""
    chance, meter = random.Random(4), CostMeter()

    def steps(count: int, per_unit_s: float) -> None:
        for _ in range(count):
            feed(meter, [64], per_unit_s=per_unit_s * chance.lognormvariate(0, noise))

    steps(100, 0.0005)
    assert step_time(meter, 64) == pytest.approx(0.032, rel=0.15)
    steps(30, 0.0002)  # a second
    assert step_time(meter, 64) == pytest.approx(0.0128, rel=0.25)
    steps(3 if noise == 0 else 40, 0.0005)
    assert step_time(meter, 64) == pytest.approx(0.032, rel=0.25)


def test_two_slow_steps_that_agree_count_alike() -> None:
    meter = meter_after(20)
    feed(meter, [64], per_unit_s=2.8)
    feed(meter, [64], per_unit_s=3.2)
    assert step_time(meter, 64) == pytest.approx(3 * 64, rel=0.02)


def test_a_rank_that_slows_down_in_the_middle_of_a_step_is_known_one_step_later() -> None:
    meter = meter_after(20)
    feed(meter, [64], per_unit_s=2)
    feed(meter, [64], per_unit_s=3)
    assert step_time(meter, 64) == pytest.approx(3 * 64, rel=0.05)


def test_of_two_slow_steps_that_disagree_the_milder_is_believed() -> None:
    meter = meter_after(20)
    feed(meter, [64], per_unit_s=12)
    feed(meter, [64], per_unit_s=3)
    assert step_time(meter, 64) == pytest.approx(3 * 64, rel=0.01)


def test_a_stall_after_a_slow_step_is_not_believed_although_the_speed_is_a_new_one() -> None:
    """As a collection of garbage, of as many seconds as several steps, soon after the start of a run."""
    meter = meter_after(4, per_unit_s=0.3 / 64)
    feed(meter, [64], per_unit_s=0.2 / 64)  # faster, so that slow steps are believed for the next 6 s
    feed(meter, [64], per_unit_s=0.28 / 64)
    feed(meter, [64], per_unit_s=4 / 64)
    assert step_time(meter, 64) == pytest.approx(0.28, rel=0.02)


@pytest.mark.parametrize("factor", [0.6, 1 / 3, 0.1])
def test_a_rank_that_has_become_faster_is_believed_at_once(factor: float) -> None:
    meter = meter_after(20)
    feed(meter, [64], per_unit_s=factor)
    assert step_time(meter, 64) == pytest.approx(factor * 64, rel=0.01)


def test_after_two_slow_steps_that_were_none_of_the_machines_all_that_was_known_is_known_again() -> None:
    generator = random.Random(1)
    meter = CostMeter()
    feed(meter, RAMP, fixed_s=5)
    for _ in range(100):
        meter.observe([64], [69 * generator.gauss(1, 0.05)], overhead_s=0.0)
    known = step_time(meter, 64)
    for slow in (4, 4):
        meter.observe([64], [69.0 * slow], overhead_s=0.0)
    assert step_time(meter, 64) == pytest.approx(4 * 69, rel=0.05)
    meter.observe([64], [69 * 1.15], overhead_s=0.0)  # one noisy step is no reason to believe 1.15
    assert step_time(meter, 64) == pytest.approx(known, rel=0.01)


def test_a_shift_too_small_for_a_jump_is_followed_within_ten_steps() -> None:
    generator = random.Random(2)
    meter = CostMeter()
    for _ in range(100):
        meter.observe([64], [64 * generator.gauss(1, 0.05)], overhead_s=0.0)
    for _ in range(10):
        meter.observe([64], [1.15 * 64 * generator.gauss(1, 0.05)], overhead_s=0.0)
    assert step_time(meter, 64) == pytest.approx(1.15 * 64, rel=0.04)


def test_a_machine_that_wanders_is_followed() -> None:
    estimates = []
    for seed in range(8):
        generator, meter = random.Random(seed), CostMeter()
        for per_unit_s, steps in ((1.0, 1000), (1.02, 200)):
            for _ in range(steps):
                meter.observe([64], [per_unit_s * 64 * generator.gauss(1, 0.05)], overhead_s=0.0)
        estimates.append(step_time(meter, 64) / 64)
    assert statistics.mean(estimates) == pytest.approx(1.02, abs=0.005)


def test_noise_is_averaged_away() -> None:
    errors = []
    for seed in range(20):
        generator, meter = random.Random(seed), CostMeter()
        for _ in range(100):
            spike = 4 if generator.random() < 0.03 else 1
            meter.observe([64], [64 * spike * generator.gauss(1, 0.05)], overhead_s=0.0)
        errors.append(step_time(meter, 64) / 64 - 1)
    assert statistics.pstdev(errors) < 0.01  # of 0.05 a step
    assert abs(statistics.mean(errors)) < 0.005  # and not to one side


def test_equal_sizes_move_the_speed_and_keep_the_shape() -> None:
    meter = CostMeter()
    feed(meter, RAMP, fixed_s=16)
    for _ in range(200):
        feed(meter, [64], fixed_s=16 * 3, per_unit_s=3)
    cost = meter.cost()
    assert cost is not None
    assert cost.fixed_s / cost.per_unit_s == pytest.approx(16, rel=0.05)
    assert cost.seconds(64) == pytest.approx(3 * 80, rel=0.001)
    assert cost.seconds(32) == pytest.approx(3 * 48, rel=0.02)


def test_shares_that_change_later_tell_the_fixed_part_too() -> None:
    meter = CostMeter()
    for _ in range(4):
        feed(meter, [40], fixed_s=20)  # no ramp: 1.5 seconds a sample, says the first size alone
    assert step_time(meter, 80) == pytest.approx(120, rel=0.01)
    for size in (80, 30, 60, 40, 80, 30, 60):
        feed(meter, [size], fixed_s=20)
    cost = meter.cost()
    assert cost is not None
    assert cost.fixed_s == pytest.approx(20, rel=0.1)
    assert cost.per_unit_s == pytest.approx(1, rel=0.05)


def test_a_smaller_last_micro_batch_tells_the_fixed_part_in_time() -> None:
    meter = CostMeter()
    for _ in range(4):
        feed(meter, [16, 16, 16, 4], fixed_s=8)
    cost = meter.cost()
    assert cost is not None
    assert cost.fixed_s == pytest.approx(8, rel=0.05)


def test_a_disturbed_micro_batch_does_not_make_a_rank_all_fixed_part() -> None:
    meter = CostMeter()
    times = [5.0 + size for size in RAMP]
    times[3] *= 10  # 8 samples took longer than 32
    meter.observe(RAMP, times, overhead_s=0.0)
    feed(meter, [64], fixed_s=5)
    assert step_time(meter, 128) == pytest.approx(133, rel=0.25)


def test_sizes_that_hardly_differ_tell_nothing() -> None:
    meter = CostMeter()
    feed(meter, [1, 1, 1])
    for _ in range(50):
        meter.observe([10, 9], [10.0, 10.0], overhead_s=0.0)  # padded to ten, say
    cost = meter.cost()
    assert cost is not None
    assert cost.fixed_s < 1
    assert cost.per_unit_s > 0.9


def test_once_the_shape_is_known_a_disturbed_micro_batch_does_not_bend_it() -> None:
    meter = CostMeter()
    for _ in range(20):
        feed(meter, [16, 16, 16, 4], fixed_s=8)
    meter.observe([16, 16, 16, 4], [24.0, 24.0, 24.0, 18.0], overhead_s=0.0)
    cost = meter.cost()
    assert cost is not None
    assert cost.fixed_s == pytest.approx(8, rel=0.02)


def test_a_rank_whose_time_does_not_go_with_the_size_is_not_given_all_work() -> None:
    meter = CostMeter()
    meter.observe(RAMP, [5.0] * len(RAMP), overhead_s=0.0)
    assert step_time(meter, 10 * 64) > 3 * 5


def test_a_step_without_units_leaves_the_cost_standing() -> None:
    meter = meter_after(5)
    before = meter.cost()
    for _ in range(100):
        meter.observe([], [], overhead_s=0.0)
    assert meter.cost() == before
    assert before is not None
    unmeasured = CostMeter()
    unmeasured.observe([], [], overhead_s=1.0)
    unmeasured.observe([4], [0.0], overhead_s=1.0)  # a clock too coarse to see it
    assert unmeasured.cost() is None


def test_a_slow_step_before_one_without_units_still_counts() -> None:
    meter = meter_after(20)
    feed(meter, [64], per_unit_s=3)
    meter.observe([], [], overhead_s=0.0)
    feed(meter, [64], per_unit_s=3)
    assert step_time(meter, 64) == pytest.approx(3 * 64, rel=0.01)


def test_what_a_rank_does_besides_is_the_median_until_two_steps_say_otherwise() -> None:
    meter = CostMeter()
    assert meter.overhead_s == 0
    for overhead_s, believed_s in [(1, 1), (9, 1), (1, 1), (1, 1), (8, 1), (1, 1), (5, 1), (6, 5), (8, 5), (8, 8),
                                   (1, 5), (2, 2), (9, 6)]:  # fmt: skip
        meter.observe([64], [64.0], overhead_s=overhead_s)
        assert meter.overhead_s == believed_s
    assert step_time(meter, 64) == pytest.approx(64 + 6)


def test_micro_batches_smaller_than_the_share_pay_the_fixed_part_more_often() -> None:
    meter = CostMeter()
    feed(meter, RAMP, fixed_s=8)
    for _ in range(3):
        feed(meter, [16, 16, 16, 2], fixed_s=8)
    cost = meter.cost(AtOnce(16))
    assert cost is not None
    assert cost.seconds(50) == pytest.approx(4 * 8 + 50, rel=0.01)  # as it is
    assert cost.seconds(48) == pytest.approx(3 * 8 + 48, rel=0.01)  # two samples less are a micro-batch less
    assert cost.seconds(16) == pytest.approx(8 + 16, rel=0.01)
    whole = meter.cost()
    assert whole is not None
    assert whole.seconds(50) == pytest.approx(8 + 50, rel=0.01)
    meter.observe([], [], overhead_s=0.0)
    assert meter.cost(AtOnce(16)) == cost


def test_micro_batches_that_are_not_filled_are_paid_for_by_the_unit() -> None:
    meter = CostMeter()
    feed(meter, RAMP, fixed_s=8)
    for _ in range(3):
        feed(meter, [16, 16, 16, 2], fixed_s=8)
    tokens = meter.cost(AtOnce(16, is_filled=False))
    assert tokens is not None
    assert tokens.batch is None  # nobody knows where a micro-batch of tokens ends
    assert tokens.seconds(50) == pytest.approx(4 * 8 + 50, rel=0.01)  # as it is
    assert tokens.per_unit_s == pytest.approx(1 + 8 / 16, rel=0.01)  # sixteen more are a micro-batch more
    meter.observe([], [], overhead_s=0.0)
    assert meter.cost(AtOnce(16, is_filled=False)) == tokens
    feed(meter, [10], fixed_s=8)
    assert meter.cost(AtOnce(16, is_filled=False)) == meter.cost()  # a share that is one micro-batch


def test_whatever_the_times_the_cost_is_one_that_a_machine_can_have() -> None:
    generator = random.Random(3)
    for _ in range(100):
        meter = CostMeter()
        for _ in range(30):
            sizes = [generator.randint(1, 10 ** generator.randint(0, 6)) for _ in range(generator.randint(0, 4))]
            seconds = [generator.choice([0, 1, 1, size]) * 10 ** generator.uniform(-5, 3) for size in sizes]
            meter.observe(sizes, seconds, overhead_s=generator.choice([0, generator.random()]))
            # Cost refuses what no machine has
            meter.cost(generator.choice([None, AtOnce(1), AtOnce(7), AtOnce(7, is_filled=False)]))


@pytest.mark.parametrize(
    ("sizes", "seconds", "overhead_s"),
    [([1, 2], [1.0], 0.0), ([0], [1.0], 0.0), ([1], [-1.0], 0.0), ([1], [float("nan")], 0.0), ([1], [1.0], -1.0),
     ([1], [float("inf")], 0.0), ([], [], float("nan"))],
)  # fmt: skip
def test_times_that_cannot_be_are_refused(sizes: list[int], seconds: list[float], overhead_s: float) -> None:
    meter = CostMeter()
    with pytest.raises(ValueError, match="expected"):
        meter.observe(sizes, seconds, overhead_s=overhead_s)


# When other shares are worth it


def two_ranks(ratio: float) -> list[Cost | None]:
    """Equal shares of 1000 take so many times as long as the best, or nearly, if the first rank is that much faster."""
    return [Cost(0, 1 / ratio), Cost(0, 1)]


def adopted_after(balancer: Balancer, costs: Sequence[Cost | None], *, at_most: int = 60) -> int | None:
    """How often the same costs must be seen until they are adopted."""
    for times in range(1, at_most + 1):
        if balancer.observe(1000, costs) is not None:
            return times
    return None


def settled(costs: Sequence[Cost | None], *, steps: int = 300) -> Balancer:
    """A balancer that has seen nothing else for long."""
    balancer = Balancer(len(costs))
    for _ in range(steps):
        balancer.observe(1000, costs)
    return balancer


def test_shares_are_equal_until_something_is_known_and_that_is_adopted_at_once() -> None:
    assert Balancer(3).costs is None
    balancer = Balancer(3)
    assert balancer.shares(8) == (3, 3, 2)
    assert balancer.observe(8, [None, None, None]) is None
    costs = [Cost(0, 1), Cost(0, 2), Cost(0, 4)]
    assert balancer.observe(7, costs) == tuple(costs) == balancer.costs
    assert balancer.shares(7) == (4, 2, 1)


@pytest.mark.parametrize(
    ("ratio", "steps"),
    [(3.0, 1), (1.3, 1), (1.13, 2), (1.06, 3), (1.03, 10), (1.01, None)],  # gains of 50, 13, 6, 3, 1.5 and 0.5 %
)
def test_the_smaller_the_gain_the_more_often_it_must_be_seen(ratio: float, steps: int | None) -> None:
    assert adopted_after(settled(two_ranks(1)), two_ranks(ratio)) == steps


def test_what_was_adopted_is_compared_under_the_newest_costs() -> None:
    balancer = settled(two_ranks(1))
    assert adopted_after(balancer, [Cost(0, 7), Cost(0, 7)]) is None  # both slower: nothing to be gained by shares
    assert balancer.observe(1000, [Cost(0, 7), Cost(0, 1)]) is not None


def test_the_second_table_is_adopted_for_less_than_the_hundredth() -> None:
    young = Balancer(2)
    young.observe(1000, two_ranks(1))
    assert adopted_after(young, two_ranks(1.06)) == 1
    assert adopted_after(settled(two_ranks(1)), two_ranks(1.06)) == 3


def test_shares_that_have_just_changed_need_more_to_change_again() -> None:
    balancer = settled(two_ranks(1))
    waits = [adopted_after(balancer, two_ranks(ratio)) for ratio in (1.06, 1, 1.06, 1, 1.06)]
    assert waits == [3, 6, 8, 9, 11]
    assert adopted_after(balancer, two_ranks(1.3)) == 1  # but never a gain of a tenth


def test_a_limit_that_no_longer_holds_the_share_is_obeyed_at_once() -> None:
    balancer = settled(two_ranks(1))
    assert balancer.observe(1000, [Cost(0, 1, 500), Cost(0, 1)]) is None
    assert balancer.observe(1000, [Cost(0, 1, 499), Cost(0, 1)]) is not None
    assert balancer.shares(1000) == (499, 501)
    with pytest.raises(ValueError, match="1000 units to share"):
        balancer.observe(1000, [Cost(0, 1, 499), Cost(0, 1, 500)])


def test_a_rank_that_is_not_known_yet_counts_as_the_mean_of_the_others() -> None:
    balancer = Balancer(3)
    assert balancer.observe(90, [Cost(2, 1), None, Cost(4, 3)]) == (Cost(2, 1), Cost(3, 2), Cost(4, 3))


def heard(balancer: Balancer, noises: Sequence[float], *, in_common: float = 0.0, steps: int = 200) -> None:
    """Ranks whose steps are log-normal about what they cost, each with its own deviation, and with one for all."""
    generator = random.Random(1)
    for _ in range(steps):
        together = generator.lognormvariate(0, in_common)
        ratios = [together * generator.lognormvariate(0, noise) for noise in noises]
        balancer.observe(1000, [Cost(0, 1), *(Cost(0, 4) for _ in noises[1:])], ratios=ratios)


def test_shares_of_noisy_ranks_give_the_slow_ones_less() -> None:
    calm, noisy, alike = Balancer(3), Balancer(3), Balancer(3)
    heard(calm, [0.05] * 3)
    heard(noisy, [0.3] * 3)
    heard(alike, [0.05] * 3, in_common=0.3)
    assert calm.noise < 0.1
    assert noisy.noise == pytest.approx(0.3, abs=0.03)
    assert alike.noise == pytest.approx(calm.noise)  # as when all samples of a step are long
    assert calm.shares(96) == alike.shares(96) == (64, 16, 16)
    assert 71 <= noisy.shares(96)[0] <= 73


def test_noise_makes_another_table_dearer() -> None:
    calm, noisy = Balancer(3), Balancer(3)
    heard(calm, [0.05] * 3)
    heard(noisy, [0.3] * 3)
    assert adopted_after(calm, [Cost(0, 1), Cost(0, 4), Cost(0, 5)]) == 1
    assert adopted_after(noisy, [Cost(0, 1), Cost(0, 4), Cost(0, 5)], at_most=30) is None
    assert adopted_after(noisy, [Cost(0, 1), Cost(0, 4), Cost(0, 12)], at_most=30) is not None


def test_ranks_that_did_nothing_say_nothing_of_noise() -> None:
    balancer = Balancer(2)
    for ratios in ([1.0, None], [3.0, 0.0], [None, 0.2], []) * 20:
        balancer.observe(1000, [Cost(0, 1), Cost(0, 1)], ratios=ratios)
    assert balancer.noise == 0.0


def test_a_rank_with_nothing_is_tried_among_noisy_ones_too() -> None:
    balancer = Balancer(3)
    heard(balancer, [0.3] * 3)
    costs = [Cost(0, 1), Cost(0, 1), Cost(500, 4)]
    balancer.observe(1000, costs)
    assert balancer.shares(1000) == (500, 500, 0)
    assert adopted_after(balancer, costs) == 50
    assert balancer.shares(1000)[2] == 20
    assert adopted_after(balancer, costs) == 1
    assert balancer.shares(1000)[2] == 0


def test_all_ranks_adopt_the_same_tables_from_the_same_rows() -> None:
    generator = random.Random(4)
    balancers = [Balancer(4) for _ in range(3)]
    adopted = 0
    for _ in range(200):
        total = generator.randint(0, 500)
        rows = [generator.choice([None, Cost(generator.random(), 0.1 + generator.random())]) for _ in range(4)]
        ratios = [generator.choice([None, generator.lognormvariate(0, 0.3)]) for _ in range(4)]
        tables = [balancer.observe(total, rows, ratios=ratios) for balancer in balancers]
        assert len({balancer.shares(total) for balancer in balancers}) == 1
        assert tables[0] == tables[1] == tables[2]
        adopted += tables[0] is not None
    assert adopted > 10


def test_a_rank_with_nothing_is_tried_with_a_little_for_one_step_and_ever_more_rarely() -> None:
    costs = [Cost(0, 1), Cost(0, 1), Cost(520, 1)]
    balancer = Balancer(3)
    shares = []
    for _ in range(1000):
        balancer.observe(1000, costs)
        shares.append(balancer.shares(1000))
    tried = [step for step, share in enumerate(shares) if share[2] > 0]
    assert shares[0] == (500, 500, 0)
    assert {shares[step] for step in tried} == {(490, 490, 20)}
    assert [after - before for before, after in itertools.pairwise(tried)] == [101, 201, 401]
    assert tried[0] == 50


def test_a_rank_with_nothing_that_has_become_faster_comes_back() -> None:
    balancer = settled([Cost(0, 1), Cost(520, 1)], steps=40)
    assert balancer.shares(500) == (500, 0)
    assert adopted_after(balancer, [Cost(0, 1), Cost(20, 1)]) == 1
    assert balancer.shares(500) == (260, 240)


def test_a_trial_is_smaller_where_the_rank_is_slow_or_holds_little() -> None:
    stairs = Cost(490, 1, None, 50, 1)  # 51 s a sample
    for third, little in ((Cost(520, 1), 20), (Cost(0, 600), 1), (Cost(520, 1, 5), 5), (stairs, 4)):
        balancer = settled([Cost(0, 1), Cost(0, 1), third], steps=50)
        assert balancer.shares(1000) == (500, 500, 0)
        assert adopted_after(balancer, [Cost(0, 1), Cost(0, 1), third]) == 1
        assert balancer.shares(1000)[2] == little


def test_a_rank_of_unknown_cost_counts_as_the_mean_of_the_others_with_their_micro_batches() -> None:
    known = [Cost(2, 1, None, 8, 8), Cost(4, 3)]
    assert complete_costs([known[0], None, known[1]]) == (known[0], Cost(3, 2.5), known[1])
    assert complete_costs([None, None]) is None


def test_a_rank_that_was_back_for_a_while_is_tried_as_soon_as_the_first_time() -> None:
    idle, busy = [Cost(0, 1), Cost(520, 1)], [Cost(0, 1), Cost(20, 1)]
    balancer = Balancer(2)
    waits = []
    for costs in (idle, busy, idle):
        for _ in range(80):
            if balancer.observe(500, costs) is not None:
                waits.append(balancer.shares(500)[1])
    assert waits == [0, 15, 0, 240, 0, 15, 0]  # each trial is over after a step


def test_a_trial_that_would_cost_much_is_put_off() -> None:
    hopeless = [Cost(0, 1), Cost(20_000, 1)]
    balancer = settled(hopeless, steps=1500)
    assert balancer.shares(1000) == (1000, 0)
    assert balancer.costs == tuple(hopeless)
    assert adopted_after(balancer, hopeless, at_most=1000) == 405  # it costs 19 steps, so one in 1,900
    assert adopted_after(settled([Cost(0, 1), Cost(520, 1, 0)], steps=2000), [Cost(0, 1), Cost(520, 1, 0)]) is None


def test_nobody_is_tried_while_all_have_something_to_do() -> None:
    balancer = settled([Cost(0, 1), Cost(900, 1)], steps=1)
    assert min(balancer.shares(1000)) > 0
    assert adopted_after(balancer, [Cost(0, 1), Cost(900, 1)], at_most=1000) is None
