"""Learning-rate schedules by name: pure functions from (updates made, epoch) to the rate of the next update.

Responsible for warm-up and decay; knows no optimizer and keeps no state, so there is nothing to checkpoint and a
resumed run continues on the same curve by construction. The one idea: the `--lr` list gives each epoch a base rate,
warm-up climbs to it from 0, and each schedule defines the rate afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hetseq.config.sections import OptimizationConfig
from hetseq.training.optim import learning_rates

#: (number of updates made so far, epoch from 1) -> learning rate of the next update
Schedule = Callable[[int, int], float]


def polynomial(config: OptimizationConfig, options: Any = None) -> Schedule:
    """From the base rate down to `end_learning_rate` at update `total_num_update`, as remaining ** power."""
    return _warmed_up(config, _until_total(config, _power_of(config), begin=config.warmup_steps()))


def polynomial_from_zero(config: OptimizationConfig, options: Any = None) -> Schedule:
    """The decay of `polynomial`, but counted from update 0 as if there were no warm-up, which only hides its beginning.

    So the rate drops when the warm-up ends, from nearly the base rate to the value of the decay at that update:

        warm-up of W updates, total T:  lr n / W  for n < W,  else  (lr - end) (1 - n / T) ** power + end

    for n updates made so far. It is the schedule of Google's BERT (optimization.py of google-research/bert, power 1)
    and of NVIDIA's LAMB (PolyWarmUpScheduler of DeepLearningExamples, power 0.5; there n is 1 at the first update).
    """
    warmup, decay = config.warmup_steps(), _until_total(config, _power_of(config), begin=0)
    return _warmed_up(config, decay, last=math.ceil(warmup) - 1)


def cosine(config: OptimizationConfig, options: Any = None) -> Schedule:
    """From the base rate down to `end_learning_rate` at update `total_num_update`, along half a cosine."""

    def decay(base: float, remaining: float) -> float:
        end = config.end_learning_rate
        return end + (base - end) * (1 - math.cos(math.pi * remaining)) / 2

    return _warmed_up(config, _until_total(config, decay, begin=config.warmup_steps()))


def constant(config: OptimizationConfig, options: Any = None) -> Schedule:
    """The base rate of the epoch; `total_num_update` has no effect."""
    return _warmed_up(config, lambda base, num_updates: base)


def _warmed_up(
    config: OptimizationConfig, after: Callable[[float, int], float], *, last: int | None = None
) -> Schedule:
    """Linear from 0 (the first update has rate 0, as in 2020) up to update `last`, then `after(base, updates)`.

    The base rate is reached, or would be, at `warmup_steps`; by default the warm-up ends there.
    """
    rates, warmup, frozen_epoch = learning_rates(config), config.warmup_steps(), config.force_anneal
    end = warmup if last is None else last

    def schedule(num_updates: int, epoch: int) -> float:
        base = _base_rate(rates, epoch, frozen_epoch)
        if warmup > 0 and num_updates <= end:
            return base * (num_updates / warmup)
        return after(base, num_updates)

    return schedule


def _power_of(config: OptimizationConfig) -> Callable[[float, float], float]:
    def decay(base: float, remaining: float) -> float:
        return float((base - config.end_learning_rate) * remaining**config.power + config.end_learning_rate)

    return decay


def _until_total(
    config: OptimizationConfig, decay: Callable[[float, float], float], *, begin: float
) -> Callable[[float, int], float]:
    """`decay(base, remaining)` with remaining from 1 at update `begin` to 0; `end_learning_rate` from then on."""
    total = config.decay_steps()

    def after(base: float, num_updates: int) -> float:
        if num_updates >= total:
            return config.end_learning_rate
        return decay(base, 1 - (num_updates - begin) / (total - begin))

    return after


def _base_rate(rates: tuple[float, ...], epoch: int, frozen_epoch: int | None) -> float:
    """Entry `epoch - 1` of the list, then the last one.

    With `--force-anneal N` no rate is read from the list once epoch N has begun: the rate of epoch N stays,
    as in 2020, where the list was read at the end of epochs 1 to N - 1. N = 0 keeps the first rate, like N = 1.
    """
    if frozen_epoch is not None:
        epoch = min(epoch, max(frozen_epoch, 1))
    return rates[min(epoch, len(rates)) - 1]
