"""Worker assignments, sent by the launcher: slot and device, ranks of a generation, or an inference job.

Launchers do not import torch, so neither does this module. `run.inference` runs the jobs of `hetseq evaluate` and
`hetseq predict`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hetseq.system.started_by import started_by


@dataclass(frozen=True)
class GenerationRanks:
    """The ranks of one generation, and the slot of each.

    A slot is a worker's permanent place: its files and options are named after it, and a replacement inherits it. A
    rank is the position among the occupied slots.
    """

    generation: int
    slots: tuple[int, ...]  # by rank
    nodes: tuple[str, ...]  # host name of each rank
    parts: tuple[tuple[int, ...], ...] = ()  # the ranks that share a run directory; empty: all share one
    is_only_node: bool = False  # one launcher started all ranks
    addresses: tuple[str, ...] = ()  # of the nodes; empty: the ones in the placement

    @property
    def world_size(self) -> int:
        return len(self.slots)

    def rank_of(self, slot: int) -> int:
        """The rank of a slot in this generation."""
        return self.slots.index(slot)

    def writer_of(self, rank: int) -> int:
        """The rank that writes into the run directory used by `rank`."""
        return next((part[0] for part in self.parts if rank in part), 0)

    def to_record(self) -> dict[str, Any]:
        """The ranks as a JSON object."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> GenerationRanks:
        """The inverse of `to_record`."""
        parts = tuple(tuple(part) for part in record["parts"])
        return cls(
            record["generation"], tuple(record["slots"]), tuple(record["nodes"]), parts, record["is_only_node"],
            tuple(record["addresses"]),
        )  # fmt: skip


def lonely_crew() -> GenerationRanks:
    """The ranks of a single-rank run."""
    return GenerationRanks(0, (0,), ("",), is_only_node=True)


@dataclass(frozen=True)
class Assignment:
    """Where a worker computes, and how it connects to its peers."""

    slot: int
    device: str
    threads: int
    crew: GenerationRanks = field(
        default_factory=lonely_crew
    )  # of the first generation; with `is_replacement` the run has moved on to a later one
    host: str = "127.0.0.1"  # the address of this node's interface
    sources: tuple[str, ...] = ()  # addresses from which the other nodes connect
    name: str = ""  # of the run's process groups
    key: bytes = field(default=b"", repr=False)  # shared by the ranks of this run only
    incarnation: str = ""  # name of this process, never reused
    starts: int = 0  # number of earlier processes in this slot
    is_replacement: bool = False  # the run began without this process
    is_shadow: bool = False  # it follows the run until it is needed as a rank
    faults: str = ""  # faults to inject on purpose (`faults`)
    begun_s: float = field(default_factory=time.monotonic)  # when the command began, on the clock of its machine
    started_by: str = field(default_factory=started_by)  # the command of HetSeq that started this one, "" for a user


@dataclass(frozen=True)
class ScriptJob:
    """Run a script with a training loop of its own on each rank: a file, or a module by its dotted name."""

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False


@dataclass(frozen=True)
class InferenceJob:
    """Run inference on a checkpoint of the run in `run`, an absolute path; the config selects checkpoint and splits."""

    run: str
    output: str | None = None  # a new file into which rank zero writes predictions; None: evaluate
    wants_json: bool = False


#: what the ranks of a run do in place of training a task
Errand = ScriptJob | InferenceJob
