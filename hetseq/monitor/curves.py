"""The curves of a run: tags and numbers of each row of `metrics.jsonl`, alike in TensorBoard and in other trackers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from hetseq.monitor.progress import samples_per_second, validation_numbers
from hetseq.monitor.rank_table import Row, rank_speeds

_MOST_RANKS = 8  # with more, only every tenth step has the numbers of each rank
_THINNING = 10
#: tag, key of `ranks`, and bytes of its unit; only where ranks own parts of the state
_OF_OWNERS = (
    ("owned_gib", "owned_bytes", 2**30), ("planned_gib", "planned_bytes", 2**30), ("sent_mib", "sent_bytes", 2**20),
    ("received_mib", "received_bytes", 2**20),
)  # fmt: skip


def is_validation(row: Row) -> bool:
    """Whether a row has the figures of a validation; else it is of a step."""
    return any(key.startswith("valid_") for key in row)


def numbers_of(row: Row, *, is_doubled: bool = False) -> dict[str, float]:
    """The numbers of a row by tag: `train/loss`, `valid/accuracy`, `ranks/0/share`, `log/NAME`; unknown ones left out.

    `is_doubled`: see `validation_tag`.
    """
    found = list(_validation_numbers(row, is_doubled=is_doubled)) if is_validation(row) else []
    if "loss" in row:
        found += _step_numbers(row)
    found += [(f"log/{name}", number) for name, number in (row.get("log") or {}).items()]
    return {tag: number for tag, number in found if isinstance(number, (int, float))}


def validation_tag(subset: str, name: str, *, is_doubled: bool = False) -> str:
    """`valid/loss`, of another split `valid/SPLIT/loss`; `is_doubled`: as in files that have `valid/valid/loss`."""
    return f"valid/{name}" if subset == "valid" and not is_doubled else f"valid/{subset}/{name}"


def _validation_numbers(row: Row, *, is_doubled: bool) -> Iterator[tuple[str, Any]]:
    subset = row.get("subset", "valid")
    for name, number in validation_numbers(row):
        yield validation_tag(subset, name, is_doubled=is_doubled), number


def _step_numbers(row: Row) -> Iterator[tuple[str, Any]]:
    """Tags and numbers of a step, without the terms that no sample had (count 0)."""
    for key in ("loss", "lr", "grad_norm", "loss_scale", "noise_scale"):
        yield f"train/{key}", row.get(key)
    yield "train/samples_per_s", samples_per_second(row)
    terms, counts = row.get("terms") or {}, row.get("counts") or {}
    for term, number in terms.items():
        if term != "loss" and counts.get(term) != 0:  # a term named loss is shown above
            yield f"train/{term}", number
    for key in ("efficiency", "communication_s"):
        yield f"train/{key}", row.get(key)
    if "ranks" in row and (len(row["shares"]) <= _MOST_RANKS or row["step"] % _THINNING == 0):
        yield from _rank_numbers(row)  # 0.03 ms of this thread for each rank


def _rank_numbers(row: Row) -> Iterator[tuple[str, Any]]:
    """Tags and numbers of each rank; None if a number is unknown."""
    ranks = row["ranks"]
    size = len(row["shares"])
    unknown = [None] * size
    speeds = [speed if math.isfinite(speed) else None for speed in rank_speeds(row).tolist()]
    memory_gib = [used and used / 2**30 for used in ranks.get("memory_bytes") or unknown]
    by_name = {"share": row["shares"], "samples_per_s": speeds, "memory_gib": memory_gib}
    by_name |= {name: ranks.get(name) or unknown for name in ("compute_s", "wait_s", "data_s")}
    for tag, kind, size_bytes in _OF_OWNERS:
        if kind in ranks:
            by_name[tag] = [bytes_ / size_bytes for bytes_ in ranks[kind]]
    for rank in range(size):
        for name, numbers in by_name.items():
            yield f"ranks/{rank}/{name}", numbers[rank]
