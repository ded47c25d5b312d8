"""Checkpoints: written in parts by all ranks, committed by one rename, verified to the last byte when read.

`engine` is what callers see; `saving` and `loading` say in which order things happen; `layout`, `parts` and `records`
what the files hold; `directory`, `reader`, `recovery`, `retention` and `choice` what becomes of them; `files` how the
disk is touched; `rows` what ranks tell each other; `history` the line in `checkpointHistories.csv`. For others there
are `spans` (any part of any tensor), `dcp` and `exporting`. The files of a checkpoint are known to this package only.
"""

from __future__ import annotations

from hetseq.checkpoint.choice import choose
from hetseq.checkpoint.directory import Scan, attempts, is_committed, scan, step_of
from hetseq.checkpoint.engine import CheckpointManager
from hetseq.checkpoint.history import read_history
from hetseq.checkpoint.loading import Loaded
from hetseq.checkpoint.reader import Inspected, inspect, verify
from hetseq.checkpoint.records import Commit, Identity, TooNewError
from hetseq.checkpoint.recovery import remove_all
from hetseq.checkpoint.retention import Retention
from hetseq.checkpoint.saving import SaveResult

__all__ = [
    "CheckpointManager",
    "Commit",
    "Identity",
    "Inspected",
    "Loaded",
    "Retention",
    "SaveResult",
    "Scan",
    "TooNewError",
    "attempts",
    "choose",
    "inspect",
    "is_committed",
    "read_history",
    "remove_all",
    "scan",
    "step_of",
    "verify",
]
