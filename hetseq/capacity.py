"""From what ranks can do to how many samples each one takes: pure, exact, integer.

The shares of a step minimise the time of its slowest rank. With a cost proportional to the samples, which is what
fixed weights say, the exact answer is the highest-averages method of D'Hondt: whole quotas first, each remaining sample
to the rank that would finish it first. All ranks call this with the same numbers and so get the same shares.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def assign_shares(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Integer shares of `total` samples in proportion to `weights`: the ones with the smallest max(share / weight).

    A rank of weight 0 gets nothing. Ties go to the lowest rank. Raises ValueError unless all weights are finite and
    some weight is above 0.
    """
    whole = sum(weights)
    if not 0 < whole < math.inf or min(weights) < 0:
        raise ValueError(f"weights {tuple(weights)}: expected finite weights of 0 or more, at least one above 0")
    shares = [int(total * weight / whole) for weight in weights]  # highest averages never gives less than the quota
    while sum(shares) > total:  # a quota that rounding lifted over an integer
        shares[max(range(len(shares)), key=lambda rank: (shares[rank] > 0, rank))] -= 1
    finish = [((share + 1) / weight, rank) for rank, (share, weight) in enumerate(zip(shares, weights)) if weight > 0]
    heapq.heapify(finish)
    for _ in range(total - sum(shares)):
        _, rank = finish[0]
        shares[rank] += 1
        heapq.heapreplace(finish, ((shares[rank] + 1) / weights[rank], rank))
    return tuple(shares)
