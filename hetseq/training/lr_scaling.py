"""How another global batch scales the learning rate: the linear and the square-root rule, and a warm-up. Pure.

Responsible for the factor of `--scale-lr`, and for the line that names both rules when a run resumes with another
global batch than its checkpoint had. It changes nothing without being asked: the factor is 1 without `--scale-lr`.

The one idea: with k times the samples a step, SGD makes k times fewer steps, so each may go k times as far while the
gradient hardly changes on the way (Goyal et al., "Accurate, Large Minibatch SGD", 2017). The noise of a step falls only
as sqrt(k); sqrt(k) times the rate keeps the variance of an update (Krizhevsky, "One weird trick for parallelizing
convolutional neural networks", 2014; Hoffer et al., "Train longer, generalize better", 2017). For Adam the same rule
follows from its continuous limit where noise outweighs the gradient (Malladi et al., "On the SDEs and Scaling Rules for
Adaptive Gradient Algorithms", 2022), and LAMB was used with it for BERT (You et al., "Large Batch Optimization for Deep
Learning", 2020). The factor multiplies the whole curve, so that its form stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetseq.config.sections import OptimizationConfig
from hetseq.data.plan import GlobalBatch, Position, steps_in_epoch
from hetseq.errors import ConfigError
from hetseq.training.lr_scheduler import Schedule
from hetseq.training.optim import learning_rates

_WARMUP_EPOCHS = 5  # Goyal et al. 2017, of 90 epochs
_WARMUP_SHARE = 5 / 90  # the same for a run counted in updates, or with fewer epochs


@dataclass(frozen=True)
class Course:
    """The point where a run begins or resumes."""

    samples: int  # of the training data
    position: Position
    updates: int  # that the schedule has counted so far
    last_step: int | None  # if known beforehand

    @property
    def epoch(self) -> int:
        return self.position.epoch


@dataclass(frozen=True)
class StepSize:
    """The size of one step over all ranks, in the only unit that it is counted in."""

    count: int
    unit: str  # samples or tokens


def step_size(batch: GlobalBatch, epoch: int) -> StepSize | None:
    """The size of a step of this epoch; None if it ends after samples or tokens, whichever comes first."""
    samples, tokens = batch.sample_limit(epoch), batch.token_limit(epoch)
    if samples is not None:
        return StepSize(samples, "samples") if tokens is None else None
    return None if tokens is None else StepSize(tokens, "tokens")


def factor(rule: str, *, before: int, now: int) -> float:
    """The factor of the rule (linear or sqrt) for a learning rate that was chosen for steps of `before` samples."""
    ratio = now / before
    return math.sqrt(ratio) if rule == "sqrt" else ratio


def scaled(schedule: Schedule, config: OptimizationConfig, batch: GlobalBatch) -> Schedule:
    """The schedule with each epoch's rates multiplied by --scale-lr: warm-up, decay and end alike.

    It depends only on options, the run's own global batch and the epoch, so a resumed run is on the same curve. Raises
    ConfigError if steps are counted in tokens.
    """
    if batch.tokens is not None:
        raise ConfigError(
            f"--scale-lr {config.scale_lr} needs a global batch in samples, but a step ends after {batch.tokens} tokens"
            " (--max-tokens): give --global-batch-size N, or leave --scale-lr out and give the rate itself with --lr"
        )
    return lambda num_updates, epoch: _factor_of(config, batch, epoch) * schedule(num_updates, epoch)


def warmup_updates(config: OptimizationConfig, batch: GlobalBatch, course: Course) -> int | None:
    """The updates over which a raised rate should be reached: 5 epochs, but no more than 5/90 of the rest of the run.

    Never fewer than `--warmup-updates`: You et al. 2020 used the same number of updates with every global batch. None
    if neither the epoch nor the end is known in steps.
    """
    epoch = steps_in_epoch(course.samples, batch, course.epoch)
    known = [] if epoch is None else [_WARMUP_EPOCHS * epoch]
    if course.last_step is not None:
        known.append(math.ceil(_WARMUP_SHARE * (course.last_step - course.position.step + 1)))
    return max(min(known), math.ceil(config.warmup_steps())) if known else None


def scale_in_words(config: OptimizationConfig, batch: GlobalBatch, epoch: int) -> str:
    """The effect of `--scale-lr` on `--lr` in this epoch, in words."""
    by = _factor_of(config, batch, epoch)
    return (
        f"--scale-lr {config.scale_lr}: a step has {batch.sample_limit(epoch)} samples and --lr was chosen for"
        f" {config.scale_lr_from}, so every learning rate is multiplied by {by:g}: --lr {_rates(config)} becomes"
        f" {_rates(config, by)}"
    )


def advice(
    config: OptimizationConfig, batch: GlobalBatch, course: Course, *, before: GlobalBatch, epoch_before: int
) -> str | None:
    """The `--lr` that both rules would give for a run that resumes with another global batch than it had `before`.

    None if the batch is the same, or the two cannot be compared. Only the user knows whether `--lr` was chosen for the
    former batch, and may have changed it with the batch.
    """
    was, now = step_size(before, epoch_before), step_size(batch, course.epoch)
    if before == batch or was is None or now is None or was.unit != now.unit or was.count == now.count:
        return None
    linear, root = (factor(rule, before=was.count, now=now.count) for rule in ("linear", "sqrt"))
    rule = "linear" if config.optimizer == "sgd" else "sqrt"
    remedy = f"--scale-lr {rule} --scale-lr-from {was.count}"
    if now.unit == "tokens":
        remedy = f"--lr {_rates(config, linear if rule == 'linear' else root)}"
    return (
        f"the global batch was {was.count} and is {now.count} {now.unit}; if --lr {_rates(config)} was chosen for"
        f" {was.count}, the linear rule would make it {_rates(config, linear)} (sgd), the square-root rule"
        f" {_rates(config, root)} (adam, lamb){_warmup_in_words(config, batch, course, linear)}. Nothing was changed:"
        f" ask for it with {remedy}"
    )


def _warmup_in_words(config: OptimizationConfig, batch: GlobalBatch, course: Course, ratio: float) -> str:
    updates = warmup_updates(config, batch, course)
    if ratio <= 1:
        return ""  # a lower rate needs none
    anew = " (and --reset-lr-scheduler, because updates were counted already)" if course.updates else ""
    length = "" if updates is None else f" of about {updates} update{'' if updates == 1 else 's'}"
    return f", with a warm-up{length}: --warmup-updates {'N' if updates is None else updates}{anew}"


def _factor_of(config: OptimizationConfig, batch: GlobalBatch, epoch: int) -> float:
    samples = batch.sample_limit(epoch)
    assert samples is not None, "`scaled` has refused tokens"
    assert config.scale_lr_from is not None, "the config has refused a rule without it"
    return factor(config.scale_lr, before=config.scale_lr_from, now=samples)


def _rates(config: OptimizationConfig, by: float = 1.0) -> str:
    return ",".join(f"{by * rate:g}" for rate in learning_rates(config))
