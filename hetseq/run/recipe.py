"""The options that shape the curve of a run and may change between starts: learning rate, schedule, clipping, ...

A checkpoint keeps them, so that a resume can log which ones changed. Options that may not change are checked elsewhere
(`resume.check_provenance`); options that change no number, such as the end of a run, are left out. Pure.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any

from hetseq.config.sections import OptimizationConfig, flag
from hetseq.training.optim import learning_rates

#: of OptimizationConfig: they end a run, choose what it measures, or are compared as part of the provenance
_LEFT_OUT = (
    "max_epoch", "max_update", "min_lr", "compile", "noise_scale_every", "max_skipped_steps", "precision", "optimizer",
)  # fmt: skip


_TASK_FILE = "task_file"  # no option, and compared like one: another file may have a task of the same name


def recipe_of(
    config: OptimizationConfig, task: object = None, *, delayed_init: bool | None = None
) -> dict[str, Any]:  # fmt: skip
    """The options by their names, as JSON has them; the learning rate as used; and where the class of `task` is."""
    values = {name: value for name, value in dataclasses.asdict(config).items() if name not in _LEFT_OUT}
    values["lr"] = learning_rates(config)
    if delayed_init is not None:
        values["delayed_init"] = delayed_init
    if task is not None:
        values[_TASK_FILE] = _file_of(type(task).__module__)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The options that changed, in words; an option that only one side knows is left out."""
    return [
        f"{'task file' if name == _TASK_FILE else flag(name)} {_text(before[name])} -> {_text(value)}"
        for name, value in now.items()
        if name in before and before[name] != value
    ]


def _file_of(module: str) -> str:
    """The path of a user's module; the name of one of HetSeq's own, which another installation has elsewhere."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module if file is None or module.partition(".")[0] == "hetseq" else os.path.abspath(file)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)
