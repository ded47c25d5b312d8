"""Weights & Biases as a tracker, online and offline (`WANDB_MODE=offline`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hetseq.monitor.curves import numbers_of
from hetseq.monitor.trackers.protocol import Adapter


class WandbTracker(Adapter):
    """One W&B run with the id of the run; a row is one call of `log`, with `step` as the axis.

    W&B drops rows whose own step goes back, so `step` is a number beside the others. A killed process loses what W&B
    has not yet sent, or written to its file: so `begin` counts.
    """

    def begin(self, run_id: str, config: dict[str, Any], is_resumed: bool) -> int:
        import wandb

        settings = wandb.Settings(console="off", reinit="create_new")
        self._run: Any = wandb.init(
            id=run_id, resume="allow", config=config, settings=settings, allow_val_change=True, **self.keys
        )
        self._run.define_metric("*", step_metric="step")
        if not self._run.offline:
            return int(self._run.step)
        own = Path(self._run.dir).parent
        files = own.parent.glob(f"offline-run-*-{run_id}/*.wandb")
        return sum(_rows_in(file) for file in files if file.parent != own)

    def row(self, row: dict[str, Any]) -> None:
        self._run.log({"step": row["step"], "epoch": row.get("epoch"), **numbers_of(row)})

    def end(self, code: int) -> None:
        self._run.finish(exit_code=code)


def _rows_in(file: Path) -> int:
    """The rows in a file of an offline run, read by W&B's own tool."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.splitlines()
    return sum(json.loads(line)["type"] == "history" for line in lines)
