"""The length of the learning-rate decay: until the end of the run, as its first start asks for it.

Responsible for the number of updates that schedules are given when --total-num-update is absent. It is decided once
and kept in the state, so a run that is extended later keeps the curve that it began with.
"""

from __future__ import annotations

from dataclasses import replace

from hetseq.config.sections import WITHOUT_END, OptimizationConfig
from hetseq.training.controller import TrainingState

_DECAYING = ("polynomial", "PolynomialDecayScheduler", "polynomial_from_zero", "cosine")


def settled(config: OptimizationConfig, state: TrainingState, last_step: int | None) -> OptimizationConfig:
    """The options as schedules receive them; from now on `state` keeps the step at which the decay ends.

    `last_step` is the last step of the run as far as it is known, None for a run without an end. If a decay that no
    option sets is no longer than the warm-up, the warm-up ends in the middle of it.
    """
    if config.total_num_update is not None:
        state.decay_steps = config.total_num_update
    elif state.decay_steps is None:
        left = None if last_step is None else last_step - (state.position.step - 1)
        state.decay_steps = WITHOUT_END if left is None else max(1, state.updates + left)
    warmup = config.warmup_updates
    if config.total_num_update is None and decays(config) and warmup >= state.decay_steps:
        warmup = state.decay_steps // 2
    return replace(config, warmup_updates=warmup, total_num_update=state.decay_steps)


def in_words(config: OptimizationConfig, state: TrainingState, last_step: int | None, *, is_resumed: bool) -> list[str]:
    """The lines that a start logs about its end, and about the decay if --total-num-update is not given."""
    said = []
    if last_step is None and not has_end(config):
        said.append(
            "this run has no end, as none of --max-update, --max-epoch and --min-lr is given: Ctrl-C or SIGTERM ends it"
            " with a checkpoint"
        )
    if config.total_num_update is not None or not decays(config) or last_step is None or state.decay_steps is None:
        return said
    if config.warmup_updates >= state.decay_steps:
        said.append(
            f"--warmup-updates {config.warmup_updates:g} leaves nothing of {state.decay_steps} steps: the warm-up ends"
            f" after {state.decay_steps // 2}"
        )
    if not is_resumed:
        said.append(
            f"the learning rate decays to {config.end_learning_rate:g} over the {state.decay_steps} steps of this run;"
            " --total-num-update N asks for others"
        )
    elif state.updates + last_step - (state.position.step - 1) > state.decay_steps:
        said.append(
            f"the learning rate is {config.end_learning_rate:g} from step {state.decay_steps} on, which was the end of"
            f" this run at its first start: --total-num-update {last_step} stretches the decay"
        )
    return said


def has_end(config: OptimizationConfig) -> bool:
    """Whether an option ends the run; a rate of --lr-scheduler may end it too."""
    return config.max_update > 0 or config.max_epoch > 0 or config.min_lr >= 0


def decays(config: OptimizationConfig) -> bool:
    """Whether the learning rate falls to its end over a number of updates."""
    return config.lr_scheduler in _DECAYING
