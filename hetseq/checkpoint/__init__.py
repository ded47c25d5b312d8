"""Checkpoints: written in parts by all ranks, committed by one rename, verified to the last byte when read.

Callers use `manager`. `sync_save`, `async_save` and `load` order the steps of a save or a load; `snapshot`, `arena`,
`writer` and `writer_client` save in the background. `tensor_slices` and `holdings` describe what each rank holds.
`layout`, `part_format`, `part_io`, `part_writer` and `records` define the files; `directory`, `publish`,
`verification`, `recovery`, `retention` and `selection` manage them on disk; `leftover_memory` and `memory_recovery`
recover states that killed processes left in memory. `images`, `image_plan` and `image_copy` keep the parts of a state
in the memory of two nodes. `read_plan`, `shared_read` and `target_memory` read what each rank wants. `rank_messages`
defines the rows that ranks exchange, `history` the lines of `checkpointHistories.csv`. For other
programs there are `tensor_reader` (any part of any tensor), `dcp` and `export`. No other package knows the files of a
checkpoint.

The names below are imported on first use, so that a process that only writes does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetseq.checkpoint.directory import Scan, attempts, is_committed, scan, step_of
    from hetseq.checkpoint.history import read_history
    from hetseq.checkpoint.load import Loaded
    from hetseq.checkpoint.manager import CheckpointManager, CheckpointOptions
    from hetseq.checkpoint.records import Commit, Identity, TooNewError
    from hetseq.checkpoint.recovery import remove_all
    from hetseq.checkpoint.retention import Retention
    from hetseq.checkpoint.selection import Skipped, choose, used_instead
    from hetseq.checkpoint.sync_save import SaveResult
    from hetseq.checkpoint.tensor_slices import Held, TensorSlice
    from hetseq.checkpoint.verification import Inspected, inspect, verify

_HOMES = {
    "CheckpointManager": "manager",
    "CheckpointOptions": "manager",
    "Commit": "records",
    "Held": "tensor_slices",
    "Identity": "records",
    "Inspected": "verification",
    "Loaded": "load",
    "Retention": "retention",
    "SaveResult": "sync_save",
    "Scan": "directory",
    "Skipped": "selection",
    "TensorSlice": "tensor_slices",
    "TooNewError": "records",
    "attempts": "directory",
    "choose": "selection",
    "inspect": "verification",
    "is_committed": "directory",
    "read_history": "history",
    "remove_all": "recovery",
    "scan": "directory",
    "step_of": "directory",
    "used_instead": "selection",
    "verify": "verification",
}

__all__ = [
    "CheckpointManager",
    "CheckpointOptions",
    "Commit",
    "Held",
    "Identity",
    "Inspected",
    "Loaded",
    "Retention",
    "SaveResult",
    "Scan",
    "Skipped",
    "TensorSlice",
    "TooNewError",
    "attempts",
    "choose",
    "inspect",
    "is_committed",
    "read_history",
    "remove_all",
    "scan",
    "step_of",
    "used_instead",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
