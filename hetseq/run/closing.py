"""Closing summary of a run: what was trained, the best validation, and the commands that use and continue it. Pure.

Decides the lines that rank zero writes after the last step; the launcher adds where the report is.
"""

from __future__ import annotations

import enum
import shlex
from collections.abc import Mapping
from typing import Any

from hetseq.config.sections import Config, flag
from hetseq.monitor.progress import validation_text
from hetseq.monitor.report.page import duration
from hetseq.run.horizon import decays
from hetseq.training.controller import TrainingState


class Kind(enum.Enum):
    """Whose run it was."""

    TASK = "hetseq train"
    SCRIPT = "hetseq run"
    ALONE = "python script.py"
    DEMO = "hetseq demo"


def closing_lines(
    config: Config,
    state: TrainingState,
    *,
    step: int,
    start_s: float | None,
    best: Mapping[str, Any] | None,
    has_saved: bool,
    kind: Kind = Kind.TASK,
) -> list[str]:
    """At most four lines about a run that ended with `step`, one fact each.

    `start_s`: how long this start took; None if there was nothing left to do. `best`: the row of the validation after
    which the best checkpoint was saved, or, with --no-save, of the best one. `has_saved`: the run has a checkpoint.
    `kind`: of the run; only one of a task has commands that continue it.
    """
    plural = "" if step == 1 else "s"
    lines = [f"nothing left to do: step {step} was the last one"]
    if start_s is not None:
        trained = f"{step} step{plural} in {duration(state.train_seconds)} of training"
        lines = [f"done: {trained}; this start took {duration(start_s)}"]
    is_best = best is not None and best.get(f"valid_{config.validation.best_checkpoint_metric}") == state.best
    if best is not None and is_best:
        lines.append(f"best: {validation_text({key: value for key, value in best.items() if key != 'best'})}")
    if config.checkpoint.no_save and kind is Kind.ALONE:
        return [*lines, "nothing was saved: hetseq.start(save_dir=...) gives the run a directory"]
    if config.checkpoint.no_save:
        return [*lines, "nothing was saved, because of --no-save"]
    if not has_saved:
        return [*lines, f"nothing was saved{_why_nothing_was_saved(config)}"]
    kind = Kind.SCRIPT if kind is Kind.ALONE else kind
    if kind is Kind.SCRIPT and state.ended_by_task:
        how = "its loop was left: a changed script continues, and so does --reset-meters"
        return [*lines, f"saved: {config.checkpoint.save_dir}; {how}"]
    if kind is Kind.SCRIPT:
        return [*lines, f"saved: {config.checkpoint.save_dir}; the same command resumes if its loop asks for more"]
    if kind is Kind.DEMO:
        return lines
    run = shlex.quote(config.checkpoint.save_dir)
    lines.append(f"evaluate: hetseq evaluate {run}{' --resume best' if is_best else ''}")
    return [*lines, f"continue: the same command with {_what_to_change(config, state)}"]


def _why_nothing_was_saved(config: Config) -> str:
    checkpoint = config.checkpoint
    options = {
        "no_epoch_checkpoints": checkpoint.no_epoch_checkpoints,
        "no_last_checkpoints": checkpoint.no_last_checkpoints,
        "disable_validation": config.validation.disable_validation,
    }
    given = [flag(name) for name, is_given in options.items() if is_given]
    return f": {', '.join(given)}, and no other checkpoint was due" if given else ", or it was deleted since"


def _what_to_change(config: Config, state: TrainingState) -> str:
    """The options that ended the run, and the one that ended the decay of the learning rate."""
    optimization = config.optimization
    if state.ended_by_task:
        return "--reset-meters, as the task's after_step ended the run"
    reached = []
    if optimization.max_update and state.updates >= optimization.max_update:
        reached.append("--max-update")
    if optimization.max_epoch and state.position.epoch > optimization.max_epoch:
        reached.append("--max-epoch")
    if not reached:
        return "a smaller --min-lr"
    option = f"a larger {' and '.join(reached)}"
    has_decayed = decays(optimization) and state.decay_steps is not None and state.updates >= state.decay_steps
    return f"{option}, and with --total-num-update as the learning rate has decayed" if has_decayed else option
