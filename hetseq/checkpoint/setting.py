"""What saving and loading both need to know: where, which run, with whom, and how patiently."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetseq.checkpoint.retention import Retention
from hetseq.checkpoint.rows import RowGroup
from hetseq.errors import CheckpointError

logger = logging.getLogger(__name__)

CHECKPOINTS_NAME = "checkpoints"


@dataclass(frozen=True)
class Setting:
    """The place of a run's checkpoints as one rank sees it; `weights` has one number for each rank."""

    run_directory: Path
    run_id: str
    group: RowGroup
    retention: Retention
    weights: tuple[float, ...]
    patience_s: float
    clock: Callable[[], float]

    @property
    def root(self) -> Path:
        return self.run_directory / CHECKPOINTS_NAME

    @property
    def is_rank_zero(self) -> bool:
        return self.group.rank == 0

    def quietly(self, purpose: str, action: Callable[[], object]) -> None:
        """Do what no save or load depends on; what the disk refuses is a warning."""
        try:
            action()
        except (OSError, CheckpointError) as error:
            logger.warning("could not %s in %s: %s", purpose, self.run_directory, error)
