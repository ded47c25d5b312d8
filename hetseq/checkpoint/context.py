"""Settings shared by saving and loading: the place, the run, the group of ranks, and the time to wait for files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetseq.checkpoint.publish import Place
from hetseq.checkpoint.rank_messages import RowGroup


@dataclass(frozen=True)
class CheckpointContext:
    """The place of a run's checkpoints as one rank sees it; `weights` has one number for each rank."""

    place: Place
    run_id: str
    group: RowGroup
    weights: tuple[float, ...]
    clock: Callable[[], float]

    @property
    def run_directory(self) -> Path:
        return self.place.run_directory

    @property
    def root(self) -> Path:
        return self.place.root

    @property
    def patience_s(self) -> float:
        return self.place.patience_s

    @property
    def is_rank_zero(self) -> bool:
        return self.group.rank == 0
