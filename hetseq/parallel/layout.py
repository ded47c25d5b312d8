"""Data-parallel groups: the ranks that compute one share together, one or more per group.

Responsible only for the numbers of ranks and groups; it knows neither tensors nor collectives. Today every group has
exactly one rank, so group and rank numbers are equal. Ranks that hold one model together, as with tensor parallelism,
will form one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """The ranks of each data-parallel group, in ascending order. The first rank leads and represents its group.

    Raises ValueError unless each rank from 0 on is in exactly one group and the groups are sorted by leader.
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
        """The number of ranks in all groups."""
        return len(self._group_of)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each group. Shape (groups,)."""
        return tuple(group[0] for group in self.groups)

    def group_of(self, rank: int) -> int:
        """The number of the group whose share this rank computes."""
        return self._group_of[rank]

    def leader_of(self, group: int) -> int:
        """The first rank of a group, which represents it."""
        return self.groups[group][0]

    def of_leaders(self, values: Sequence[T]) -> tuple[T, ...]:
        """Reduce one value per rank, (world_size,), to one per group, (groups,): the leader's value."""
        assert len(values) == self.world_size, "one value for each rank"
        return tuple(values[rank] for rank in self.leaders)

    @cached_property
    def _group_of(self) -> dict[int, int]:
        return {rank: number for number, group in enumerate(self.groups) for rank in group}


def one_rank_each(world_size: int) -> Layout:
    """The layout in which every rank is a group of its own."""
    return Layout(tuple((rank,) for rank in range(world_size)))
