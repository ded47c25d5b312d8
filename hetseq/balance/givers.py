"""Givers: which rank sends which elements to the ranks that will own them and lack them. Pure.

Responsible for choosing one giver for each element that a rank lacks, where several ranks may hold it. Sends nothing,
and does not know what an element is.

The one idea: a rank keeps what it holds already, and every rank computes the same list of gifts from the same tables.
A giver on the host of the taker comes first, then the one that has given least so far, then the lowest rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetseq.errors import DisagreementError


@dataclass(frozen=True)
class Gift:
    """Elements `begin` to `end` of one tensor that a rank sends to another one."""

    tensor: int
    giver: int
    taker: int
    begin: int
    end: int


def gifts(held: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64], *, hosts: Sequence[int] = ()) -> list[Gift]:
    """What travels, by tensor, then by taker, then by element.

    `held` and `wanted` have the first element and the end of what each rank holds and will own of each tensor; shape
    (world_size, tensors, 2), with an end that is not above the first element if that is nothing. `hosts` has a number
    for the host of each rank; empty: all ranks are on one. Raises DisagreementError if no rank holds an element that
    some rank lacks.
    """
    given = [0] * len(held)  # elements, by giver
    found: list[Gift] = []
    # (tensors, world_size): whether the rank lacks some element
    lacks = ((wanted[:, :, 0] < held[:, :, 0]) | (wanted[:, :, 1] > held[:, :, 1])) & (
        wanted[:, :, 0] < wanted[:, :, 1]
    )
    for tensor, taker in np.argwhere(lacks.T).tolist():
        spans = held[:, tensor].tolist()
        for begin, end in _lacking(wanted[taker, tensor].tolist(), spans[taker]):
            for gift in _cover(begin, end, spans, tensor, taker, given, hosts):
                if found and _continues(found[-1], gift):
                    gift = Gift(tensor, gift.giver, taker, found.pop().begin, gift.end)
                found.append(gift)
    return found


def _lacking(wanted: Sequence[int], held: Sequence[int]) -> list[tuple[int, int]]:
    """The wanted spans that are not held."""
    (first, last), (begin, end) = wanted, held
    begin, end = max(first, begin), min(last, end)
    if begin >= end:
        return [(first, last)]
    return [span for span in ((first, begin), (end, last)) if span[0] < span[1]]


def _cover(
    first: int,
    last: int,
    spans: Sequence[Sequence[int]],
    tensor: int,
    taker: int,
    given: list[int],
    hosts: Sequence[int],
) -> list[Gift]:
    """The elements `first` to `last` from their givers; `given` counts them."""
    points = sorted({first, last, *(point for span in spans for point in span if first < point < last)})
    found = []
    for begin, end in itertools.pairwise(points):
        holders = [rank for rank, span in enumerate(spans) if span[0] <= begin and end <= span[1]]
        if not holders:
            raise DisagreementError(
                f"no rank holds the elements {begin} to {end} of parameter {tensor}, which rank {taker} is to own:"
                " restart from the newest checkpoint, and report this"
            )
        giver = min(holders, key=lambda rank: (bool(hosts) and hosts[rank] != hosts[taker], given[rank], rank))
        given[giver] += end - begin
        found.append(Gift(tensor, giver, taker, begin, end))
    return found


def _continues(before: Gift, after: Gift) -> bool:
    return (before.tensor, before.giver, before.taker, before.end) == (
        after.tensor, after.giver, after.taker, after.begin,
    )  # fmt: skip
