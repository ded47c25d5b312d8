"""Which ranks compute a share together: a share belongs to a data-parallel group, and a group has one or several ranks.

Responsible for the numbers of ranks and groups, and for nothing else: it knows neither tensors nor collectives. Today
every group has one rank, and then the number of a group is that of its rank. Ranks that hold one model together, as
with tensor parallelism, will be one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """The ranks of each data-parallel group, in ascending order. The first one leads: it stands for the group.

    Raises ValueError unless each rank from 0 on is in one group, and the groups are in the order of their leaders.
    """

    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = sorted(rank for group in self.groups for rank in group)
        if not ranks or ranks != list(range(len(ranks))) or not all(self.groups):
            raise ValueError(f"groups {self.groups}: expected each rank from 0 on in one group, and no empty group")
        if self.groups != tuple(sorted(tuple(sorted(group)) for group in self.groups)):
            raise ValueError(
                f"groups {self.groups}: expected ranks, and groups by their first rank, in ascending order"
            )

    @property
    def world_size(self) -> int:
        """How many ranks all groups have together."""
        return len(self._group_of)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each group. Shape (groups,)."""
        return tuple(group[0] for group in self.groups)

    def group_of(self, rank: int) -> int:
        """The number of the group whose share this rank computes."""
        return self._group_of[rank]

    def leader_of(self, group: int) -> int:
        """The rank that stands for a group."""
        return self.groups[group][0]

    def of_leaders(self, values: Sequence[T]) -> tuple[T, ...]:
        """From one value of each rank, (world_size,), to one of each group, (groups,): that of its leader."""
        assert len(values) == self.world_size, "one value for each rank"
        return tuple(values[rank] for rank in self.leaders)

    @cached_property
    def _group_of(self) -> dict[int, int]:
        return {rank: number for number, group in enumerate(self.groups) for rank in group}


def one_rank_each(world_size: int) -> Layout:
    """The layout in which every rank has a share of its own."""
    return Layout(tuple((rank,) for rank in range(world_size)))
