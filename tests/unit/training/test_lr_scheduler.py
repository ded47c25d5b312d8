from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from hetseq.config.sections import OptimizationConfig
from hetseq.training.lr_scheduler import Schedule, constant, cosine, polynomial, polynomial_from_zero


def rates(schedule: Schedule, updates: range, epoch: int = 1) -> list[float]:
    return [schedule(update, epoch) for update in updates]


def test_the_first_update_of_a_warm_up_has_rate_zero_and_the_climb_is_linear() -> None:
    schedule = polynomial(OptimizationConfig(lr=(0.8,), warmup_updates=4, total_num_update=12))
    assert rates(schedule, range(5)) == [0.0, 0.2, 0.4, 0.8 * 0.75, 0.8]
    assert rates(schedule, range(5)) != [0.2, 0.4, 0.8 * 0.75, 0.8, 0.7]  # one update too early


def test_without_warm_up_the_first_update_has_the_whole_rate() -> None:
    config = OptimizationConfig(lr=(1.01,), total_num_update=50_000)
    assert polynomial(config)(0, 1) == cosine(config)(0, 1) == constant(config)(0, 1) == 1.01


def test_polynomial_of_power_one_is_a_straight_line_to_the_end_rate_and_stays_there() -> None:
    config = OptimizationConfig(lr=(1.0,), warmup_updates=2, total_num_update=10, end_learning_rate=0.5)
    schedule = polynomial(config)
    assert schedule(6, 1) == 0.75  # half of the way from update 2 to update 10
    assert [schedule(update, 1) for update in (10, 11, 10**9)] == [0.5, 0.5, 0.5]


def test_power_bends_the_polynomial() -> None:
    config = OptimizationConfig(lr=(1.0,), total_num_update=8, power=3.0)
    assert polynomial(config)(4, 1) == 0.125
    assert polynomial(config)(4, 1) != polynomial(OptimizationConfig(lr=(1.0,), total_num_update=8))(4, 1)


def test_the_schedule_of_google_counts_its_decay_from_step_0() -> None:
    config = OptimizationConfig(lr=(1e-4,), warmup_updates=10_000, total_num_update=1_000_000)
    schedule = polynomial_from_zero(config)
    assert rates(schedule, range(0, 10_000, 3_333)) == pytest.approx([0.0, 3.333e-5, 6.666e-5, 9.999e-5], rel=1e-12)
    # a hundredth of the way is over when the warm-up is, nine tenths after 900,000 steps
    assert rates(schedule, range(10_000, 900_001, 445_000)) == pytest.approx([9.9e-5, 5.45e-5, 1e-5], rel=1e-12)
    assert (schedule(1_000_000, 1), schedule(10**9, 1)) == (0.0, 0.0)
    assert polynomial(config)(10_000, 1) == 1e-4  # which the other one reaches


@pytest.mark.parametrize(("lr", "share", "total"), [(6e-3, 0.2843, 7038), (4e-3, 0.128, 1563)])
def test_the_schedule_of_nvidias_two_phases_is_that_of_every_one_of_their_steps(
    lr: float, share: float, total: int
) -> None:
    config = OptimizationConfig(lr=(lr,), warmup_updates=share, total_num_update=total, power=0.5)
    schedule = polynomial_from_zero(config)
    for update in range(total + 1):
        progress = update / total
        expected = lr * progress / share if progress < share else lr * (1 - progress) ** 0.5
        assert schedule(update, 1) == pytest.approx(expected, rel=1e-13)


def test_three_rates_of_nvidias_first_phase_by_hand() -> None:
    schedule = polynomial_from_zero(
        OptimizationConfig(lr=(6e-3,), warmup_updates=0.2843, total_num_update=7038, power=0.5)
    )
    # the warm-up has 0.2843 * 7038 = 2000.9 steps: 0.006 * 2000 / 2000.9, then 0.006 * sqrt(5037 / 7038)
    expected = [0.00599729102, 0.00507589459, 0.0000715198540]
    assert [schedule(update, 1) for update in (2000, 2001, 7037)] == pytest.approx(expected, rel=1e-8)


def test_without_warm_up_both_polynomials_are_one() -> None:
    config = OptimizationConfig(lr=(1.0,), total_num_update=8, power=3.0, end_learning_rate=0.1)
    assert rates(polynomial_from_zero(config), range(10)) == rates(polynomial(config), range(10))


@pytest.mark.parametrize("build", [polynomial, polynomial_from_zero, cosine, constant])
def test_a_warm_up_below_1_is_a_share_of_the_total(build: Callable[[OptimizationConfig], Schedule]) -> None:
    share, steps = (
        build(OptimizationConfig(lr=(0.8,), warmup_updates=warmup, total_num_update=12)) for warmup in (0.25, 3)
    )
    assert rates(share, range(14)) == rates(steps, range(14))


def test_cosine_falls_slowly_fast_slowly_to_the_end_rate() -> None:
    schedule = cosine(OptimizationConfig(lr=(1.0,), warmup_updates=10, total_num_update=110, end_learning_rate=0.2))
    assert schedule(10, 1) == 1.0
    assert schedule(60, 1) == pytest.approx(0.6, abs=1e-15)
    assert schedule(35, 1) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2, abs=1e-15)
    assert schedule(110, 1) == schedule(111, 1) == 0.2
    straight = polynomial(OptimizationConfig(lr=(1.0,), warmup_updates=10, total_num_update=110, end_learning_rate=0.2))
    assert schedule(35, 1) > straight(35, 1)
    assert schedule(85, 1) < straight(85, 1)


def test_constant_never_ends_and_warms_up_over_more_updates_than_the_total() -> None:
    schedule = constant(OptimizationConfig(lr=(0.4,), lr_scheduler="constant", warmup_updates=20, total_num_update=10))
    assert [schedule(update, 1) for update in (10, 20, 10**7)] == [0.2, 0.4, 0.4]


def test_the_list_gives_each_epoch_its_rate_and_the_last_one_stays() -> None:
    schedule = constant(OptimizationConfig(lr=(0.4, 0.2, 0.1)))
    assert [schedule(0, epoch) for epoch in range(1, 6)] == [0.4, 0.2, 0.1, 0.1, 0.1]


def test_warm_up_and_decay_use_the_rate_of_the_epoch_they_are_in() -> None:
    config = OptimizationConfig(lr=(0.8, 0.4), warmup_updates=4, total_num_update=12)
    assert (polynomial(config)(2, 1), polynomial(config)(2, 2)) == (0.4, 0.2)
    assert (polynomial(config)(8, 1), polynomial(config)(8, 2)) == (0.4, 0.2)


def test_force_anneal_reads_no_new_rate_once_its_epoch_has_begun() -> None:
    lr = (0.5, 0.4, 0.3, 0.2)

    def base_rates(force_anneal: int | None) -> list[float]:
        schedule = constant(OptimizationConfig(lr=lr, force_anneal=force_anneal))
        return [schedule(0, epoch) for epoch in range(1, 6)]

    assert base_rates(None) == [0.5, 0.4, 0.3, 0.2, 0.2]
    assert base_rates(2) == [0.5, 0.4, 0.4, 0.4, 0.4]
    assert base_rates(9) == base_rates(None)
    assert base_rates(0) == base_rates(1) == [0.5] * 5


def test_without_a_rate_the_optimizers_own_default_is_taken() -> None:
    assert constant(OptimizationConfig(optimizer="sgd"))(0, 1) == 0.1
    assert constant(OptimizationConfig(optimizer="adadelta"))(0, 1) == 1.0


def test_a_schedule_asked_in_any_order_gives_the_same_rates() -> None:
    config = OptimizationConfig(lr=(0.8, 0.4), warmup_updates=3, total_num_update=20, power=2.0)
    for build in (polynomial, cosine, constant):
        forwards = [build(config)(update, 1 + update // 7) for update in range(25)]
        schedule = build(config)
        backwards = [schedule(update, 1 + update // 7) for update in reversed(range(25))]
        assert forwards == backwards[::-1]
