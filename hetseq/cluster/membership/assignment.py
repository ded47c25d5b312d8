"""What a launcher tells a worker: its place in the run, the ranks of a generation, and a job other than training.

No torch, because launchers have none. `run.inference` does the jobs of `hetseq evaluate` and `hetseq predict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class GenerationRanks:
    """The ranks of one generation. A slot is a place that a worker is given once: its files and options go by it.

    A worker that takes the place of another has its slot; a rank is the position among the slots that are taken.
    """

    generation: int
    slots: tuple[int, ...]  # by rank
    nodes: tuple[str, ...]  # host name of each rank
    parts: tuple[tuple[int, ...], ...] = ()  # the ranks that share a run directory; empty: all share one
    is_only_node: bool = False  # one launcher has started all ranks
    addresses: tuple[str, ...] = ()  # of the nodes; empty: those that the placement names

    @property
    def world_size(self) -> int:
        return len(self.slots)

    def rank_of(self, slot: int) -> int:
        """The rank of a slot in this generation."""
        return self.slots.index(slot)

    def writer_of(self, rank: int) -> int:
        """The rank that writes into the run directory which `rank` uses."""
        return next((part[0] for part in self.parts if rank in part), 0)

    def to_record(self) -> dict[str, Any]:
        """As JSON has it."""
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
    """The crew of a run with one rank."""
    return GenerationRanks(0, (0,), ("",), is_only_node=True)


@dataclass(frozen=True)
class Assignment:
    """Where a worker computes, and how it meets its peers."""

    slot: int
    device: str
    threads: int
    crew: GenerationRanks = field(
        default_factory=lonely_crew
    )  # the first one; with `is_replacement` the run has another one now
    host: str = "127.0.0.1"  # the address of this node's interface
    sources: tuple[str, ...] = ()  # addresses from which the other nodes connect
    name: str = ""  # of the run's groups
    key: bytes = field(default=b"", repr=False)  # that only ranks of this run hold
    incarnation: str = ""  # of this process: no other one is ever called so
    starts: int = 0  # how often a process of this slot was started before
    is_replacement: bool = False  # the run has begun without it
    faults: str = ""  # that happen to it on purpose (`faults`)


@dataclass(frozen=True)
class InferenceJob:
    """Take a checkpoint of the run in `run`, an absolute path; the configuration says which one and which splits."""

    run: str
    output: str | None = None  # a file that is not there yet, for rank zero to write predictions into; None: evaluate
    wants_json: bool = False
