"""Checkpoints: written in parts by all ranks, committed by one rename, verified to the last byte when read.

`engine` is what callers see; `saving` and `loading` say in which order things happen; `layout`, `parts` and `records`
what the files hold; `directory`, `reader`, `recovery`, `retention` and `choice` what becomes of them; `files` how the
disk is touched; `rows` what ranks tell each other; `history` the line in `checkpointHistories.csv`. The files of a
checkpoint are known to this package only.
"""

from __future__ import annotations

from hetseq.checkpoint.engine import CheckpointManager
from hetseq.checkpoint.history import read_history
from hetseq.checkpoint.loading import Loaded
from hetseq.checkpoint.records import Commit, Identity, TooNewError
from hetseq.checkpoint.retention import Retention
from hetseq.checkpoint.saving import SaveResult

__all__ = [
    "CheckpointManager",
    "Commit",
    "Identity",
    "Loaded",
    "Retention",
    "SaveResult",
    "TooNewError",
    "read_history",
]
