"""The options that shape the curve of a run and may change between starts: learning rate, schedule, clipping, ...

A checkpoint keeps them, so that a resume can log which ones changed. Options that may not change are checked elsewhere
(`resume.check_provenance`); options that change no number, such as the end of a run, are left out. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hetseq.config.sections import OptimizationConfig, flag
from hetseq.training.optim import learning_rates

#: of OptimizationConfig: they end a run, choose what it measures, or are compared as part of the provenance
_LEFT_OUT = (
    "max_epoch", "max_update", "min_lr", "compile", "noise_scale_every", "max_skipped_steps", "precision", "optimizer",
)  # fmt: skip


def recipe_of(config: OptimizationConfig) -> dict[str, Any]:
    """The options by their names, as JSON has them; the learning rate as used."""
    values = {name: value for name, value in dataclasses.asdict(config).items() if name not in _LEFT_OUT}
    values["lr"] = learning_rates(config)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The options that changed, in words; an option that only one side knows is left out."""
    return [
        f"{flag(name)} {_text(before[name])} -> {_text(value)}"
        for name, value in now.items()
        if name in before and before[name] != value
    ]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)
