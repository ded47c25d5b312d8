"""Synthetic run directories, for tests of their readers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
CONFIG = (
    "# HetSeq run configuration, run id 0123456789abcdef; repeat the run with --config\ntask: mnist\nsave_dir: there\n"
)
HISTORY = (
    "time_utc,run,step,tier,kinds,bytes,parts,world_size,stall_s,write_s,commit_s,duration_s,throughput_MBps,result,error\n"
    "2026-01-31T12:00:00Z,01,4,persistent,epoch+best,648620,2,2,0.013,0.175,0.003,0.179,3.621,ok,\n"
    "2026-01-31T12:00:09Z,01,8,persistent,interval,,2,2,,,,,,failed,disk full\n"
)


def step_row(step: int, loss: float | None = 1.0, *, slots: Sequence[int] = (0, 1), **more: Any) -> Row:
    """The row of a step on these slots; a rank takes 30 samples, and as many ms as its slot is large."""
    size = len(slots)
    row: Row = {"step": step, "epoch": 1, "loss": loss, "terms": {"loss": loss}, "samples": 30 * size, "lr": 0.5}
    row |= {"grad_norm": 2.0, "seconds": 0.5, "generation": 0, "shares": [30] * size}
    if size > 1:
        kinds = {"compute_s": 0.3, "wait_s": 0.1, "data_s": 0.05, "overhead_s": 0.01}
        ranks = {kind: [seconds + slot / 1000 for slot in slots] for kind, seconds in kinds.items()}
        names = [f"lab{slot}/cpu" for slot in slots]
        row |= {"communication_s": 0.04, "efficiency": 0.9, "ranks": {"names": names, **ranks}}
    if tuple(slots) != tuple(range(size)):
        row["slots"] = list(slots)
    return row | more


def validation_row(step: int, loss: float, **more: Any) -> Row:
    return {"step": step, "epoch": 1, "subset": "valid", "valid_loss": loss, "best": False, **more}


def write_run(
    path: Path, rows: Sequence[Row], *, events: Sequence[Row] = (), history: str = "", config: str = CONFIG,
    states: Mapping[int, str] | None = None,
) -> Path:  # fmt: skip
    """A run directory with these rows."""
    (path / "status").mkdir(parents=True)
    (path / "config.yaml").write_text(config)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if events:
        (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if history:
        (path / "checkpointHistories.csv").write_text(history)
    for slot, state in (states or {}).items():
        (path / "status" / f"rank-{slot}.json").write_text(json.dumps({"state": state, "pid": 1}))
    return path
