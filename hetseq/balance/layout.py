"""Data-parallel groups: the ranks that compute one share together, one or more per group.

Responsible only for the numbers of ranks and groups; it knows neither tensors nor collectives. Ranks that hold one
model together (`--tensor-parallel-degree`) form one group; otherwise every rank is a group of its own. Pure.

The one idea: the seat of a rank in a group follows from its slot alone, which it keeps for life. So no rank changes the
part of the model that it holds, whatever ranks come or go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """The ranks of each data-parallel group, in ascending order. The first rank leads and represents its group.

    The groups `idle`, by their numbers, lack ranks that hold a part of their model: they compute nothing.

    Raises ValueError unless each rank from 0 on is in exactly one group and the groups are sorted by leader.
    """

    groups: tuple[tuple[int, ...], ...]
    idle: frozenset[int] = frozenset()

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

    def is_idle(self, rank: int) -> bool:
        """Whether a rank is in a group that computes nothing."""
        return self._group_of[rank] in self.idle

    @property
    def busy(self) -> tuple[int, ...]:
        """The numbers of the groups that compute."""
        return tuple(number for number in range(len(self.groups)) if number not in self.idle)

    def leader_of(self, group: int) -> int:
        """The first rank of a group, which represents it."""
        return self.groups[group][0]

    def of_leaders(self, values: Sequence[T]) -> tuple[T, ...]:
        """Reduce one value per rank, (world_size,), to one per group, (groups,): the leader's value."""
        assert len(values) == self.world_size, "one value for each rank"
        return tuple(values[rank] for rank in self.leaders)

    def by_rank(self, values: Sequence[T]) -> tuple[T, ...]:
        """One value per group, (groups,), for each of its ranks: (world_size,)."""
        assert len(values) == len(self.groups), "one value for each group"
        return tuple(values[self._group_of[rank]] for rank in range(self.world_size))

    def at_leaders(self, values: Sequence[int]) -> tuple[int, ...]:
        """One number per group, (groups,), for the leader, and 0 for other ranks: (world_size,)."""
        leaders = set(self.leaders)
        return tuple(one if rank in leaders else 0 for rank, one in enumerate(self.by_rank(values)))

    @cached_property
    def _group_of(self) -> dict[int, int]:
        return {rank: number for number, group in enumerate(self.groups) for rank in group}


def layout_of(slots: Sequence[int], sizes: Sequence[int]) -> Layout:
    """The layout of ranks with these slots, ascending, by the sizes of groups that divide a model. Pure."""
    groups: dict[int, list[int]] = {}
    wanted: dict[int, int] = {}
    for rank, slot in enumerate(slots):
        seat = seat_of(slot, sizes)
        groups.setdefault(seat.group, []).append(rank)
        wanted[seat.group] = seat.size
    idle = [number for number, (group, ranks) in enumerate(groups.items()) if len(ranks) < wanted[group]]
    return Layout(tuple(map(tuple, groups.values())), frozenset(idle))


def one_rank_each(world_size: int) -> Layout:
    """The layout in which every rank is a group of its own."""
    return Layout(tuple((rank,) for rank in range(world_size)))


@dataclass(frozen=True)
class Seat:
    """Where a rank is among those that divide a model: its group, its place in it, and the ranks of the group."""

    group: int
    place: int
    size: int


def seat_of(slot: int, sizes: Sequence[int]) -> Seat:
    """The seat of a slot if groups of these sizes follow each other by slot, and later ones are as the last. Pure."""
    begin = 0
    for number, size in enumerate(sizes[:-1]):
        if slot < begin + size:
            return Seat(number, slot - begin, size)
        begin += size
    last = sizes[-1]
    return Seat(len(sizes) - 1 + (slot - begin) // last, (slot - begin) % last, last)


def has_whole_model(slots: Iterable[int], sizes: Sequence[int]) -> bool:
    """Whether all ranks of some group have one of these slots. Pure."""
    seats = [seat_of(slot, sizes) for slot in slots]
    here = Counter(seat.group for seat in seats)
    return any(here[seat.group] == seat.size for seat in seats)
