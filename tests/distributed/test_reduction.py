"""Sums of gradients over ranks: the same collectives in the same order on all of them, whatever each one used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetseq.comm.group import Group
from hetseq.parallel.gradient_sync import GradientReducer
from tests.support.ranks import run_ranks

PARAMETERS = 6
SIZE = 5


def reduce_steps(group: Group, uses: list[list[list[int]]], bucket_bytes: int) -> dict[str, Any]:
    """A rank's life: for each step the parameters that it uses, in the order in which their gradients come."""
    parameters = [torch.nn.Parameter(torch.full((SIZE,), float(index + 1))) for index in range(PARAMETERS)]
    reducer = GradientReducer(parameters, group, bucket_bytes=bucket_bytes)
    facts: dict[str, Any] = {"gradients": [], "used": [], "bytes": []}
    for used_by_rank in uses:
        before = group.bytes_reduced
        reducer.begin()
        used = used_by_rank[group.rank]
        if used:
            reducer.expect_last()
            # a chain: the gradient of the first one named comes first
            total = torch.zeros(SIZE)
            for index in reversed(used):
                total = (total + parameters[index] * (group.rank + 1)) * 1.0
            total.sum().backward()
        reducer.finish()
        facts["gradients"].append([p.grad.clone().tolist() for p in parameters if p.grad is not None])
        facts["used"].append(reducer.used.tolist())
        facts["bytes"].append(group.bytes_reduced - before)
    reducer.close()
    return facts


def expected(used_by_rank: list[list[int]]) -> list[list[float]]:
    """Each parameter's gradient: the sum of (rank + 1) over the ranks that use it."""
    sums = [sum(rank + 1 for rank, used in enumerate(used_by_rank) if index in used) for index in range(PARAMETERS)]
    return [[float(total)] * SIZE for total in sums]


STEPS = [
    [[5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [3, 0, 5, 1, 4, 2]],  # all of them, in three orders
    [[5, 4, 3], [2, 1, 0], [5, 0]],  # different ones unused on different ranks
    [[0], [], [5]],
    [[], [], []],
    [[], [1, 4], []],
    [[5, 4, 3, 2, 1, 0], [], [3]],
]


@pytest.mark.parametrize("bucket_bytes", [1, 2 * SIZE * 4, 1 << 20])
def test_buckets_that_fill_in_different_orders_on_three_ranks_still_match(bucket_bytes: int) -> None:
    ranks = run_ranks(reduce_steps, 3, STEPS, bucket_bytes, timeout_s=20)
    for step, used_by_rank in enumerate(STEPS):
        for rank, facts in enumerate(ranks):
            assert facts["gradients"][step] == expected(used_by_rank)
            assert facts["used"][step] == [index in used_by_rank[rank] for index in range(PARAMETERS)]
    # the twin: another rank in its place would have been noticed
    assert expected(STEPS[1]) != expected([STEPS[1][1], STEPS[1][0], STEPS[1][2]])


def test_a_rank_that_is_idle_for_a_step_sends_as_much_as_the_others() -> None:
    ranks = run_ranks(reduce_steps, 3, STEPS, 1, timeout_s=20)
    assert [facts["bytes"] for facts in ranks] == [[PARAMETERS * SIZE * 4] * len(STEPS)] * 3


def reduce_random(group: Group, seed: int) -> list[bytes]:
    """Floats whose sum depends on the order of adding; gives the bits that each step left."""
    generator = torch.Generator().manual_seed(seed + group.rank)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 1000, 1, 77)]
    reducer = GradientReducer(parameters, group, bucket_bytes=256)
    left = []
    for _ in range(3):
        reducer.begin()
        reducer.expect_last()
        factors = [torch.randn(p.shape, generator=generator) for p in parameters]
        torch.stack([(p * factor).sum() for p, factor in zip(parameters, factors)]).sum().backward()
        reducer.finish()
        left.append(b"".join(p.grad.numpy().tobytes() for p in parameters if p.grad is not None))
    reducer.close()
    return left


def test_every_rank_holds_the_same_bits() -> None:
    zero, one, two = run_ranks(reduce_random, 3, 1)
    assert zero == one == two
    assert len(set(zero)) == 3
