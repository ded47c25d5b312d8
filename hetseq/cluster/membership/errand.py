"""What the ranks of a command do in place of training: evaluate a checkpoint, or write what it predicts.

Responsible for what such ranks have to know besides their configuration and their place. No torch, because launchers,
which pass it on, have none; how an errand is run is for `run.inference`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Errand:
    """Take a checkpoint of the run in `run`, an absolute path; the configuration says which one and which splits."""

    run: str
    output: str | None = None  # a file that is not there yet, for rank zero to write predictions into; None: evaluate
    wants_json: bool = False
