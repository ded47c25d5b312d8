"""What a worker is told of its place in the run; no torch, because launchers, which tell it, have none."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Placement:
    """Which rank a worker is, where it computes, and how it meets its peers."""

    rank: int
    world_size: int
    device: str
    threads: int
    host: str = "127.0.0.1"  # the address of this node's interface
    sources: tuple[str, ...] = ()  # addresses from which the other nodes connect
    name: str = ""  # of the run's first group
    key: bytes = field(default=b"", repr=False)  # that only ranks of this run hold
    nodes: tuple[str, ...] = ()  # host name of each rank
    is_only_node: bool = False  # one launcher has started all ranks
    parts: tuple[tuple[int, ...], ...] = ()  # the ranks that share a run directory; empty: all share one

    @property
    def writer(self) -> int:
        """The rank that writes into the run directory that this one uses."""
        return next((part[0] for part in self.parts if self.rank in part), 0)
