"""Results of calls between two steps, when a peer is lost in one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hetseq.comm.group import Group
from hetseq.errors import DisagreementError, PeerLostError
from hetseq.loop.between import Results, together
from hetseq.run.task_hooks import Call
from tests.support.ranks import run_ranks


def lost_once() -> Callable[[], int]:
    """Work in which a peer is lost the first time."""
    tries = []

    def work() -> int:
        tries.append(0)
        if len(tries) == 1:
            raise PeerLostError("rank 1")
        return 7

    return work


def test_work_is_done_again_after_a_loss() -> None:
    results, recovered = Results(), list[str]()
    results.begin(3)
    assert results.next(Call.EVALUATE, lost_once(), recovered.append) == 7
    assert recovered == ["rank 1"]
    assert results.next(Call.ONLY_FIRST, lambda: 8, recovered.append) == 8


def after_a_loss(group: Group) -> tuple[Any, int]:
    """Rank 0 has the result of the second call and is further on; the others lost their peer in that call."""
    results, done = Results(), list[int]()
    results.begin(5)
    results.next(Call.EVALUATE, lambda: 1, lambda _: None)

    def work() -> int:
        done.append(0)
        if group.rank:
            raise PeerLostError("rank 3")
        return 2

    if group.rank == 0:
        results.next(Call.EVALUATE, work, lambda _: None)
        results.share(group)
        return 2, len(done)
    return results.next(Call.EVALUATE, work, lambda _: results.share(group)), len(done)


def test_a_rank_that_lacks_a_result_takes_it_from_one_that_has_it() -> None:
    assert run_ranks(after_a_loss, 3) == [(2, 1)] * 3


def different_calls(group: Group) -> str:
    try:
        together(group, Call.EVALUATE if group.rank else Call.ONLY_FIRST, 4, {"rank": group.rank})
    except DisagreementError as error:
        return str(error)
    return ""


def values(group: Group) -> list[Any]:
    return together(group, Call.EVALUATE, 4, ["ä" * group.rank, group.rank])


def test_ranks_in_different_calls_are_told_so() -> None:
    for told in run_ranks(different_calls, 2):
        assert told.startswith(
            "rank 0 is in run.only_first after step 4, rank 1 in run.evaluate after step 4: the script"
        )


def test_values_of_any_length_arrive_in_rank_order() -> None:
    assert run_ranks(values, 3) == [[["", 0], ["ä", 1], ["ää", 2]]] * 3


def test_the_result_of_another_call_is_not_taken() -> None:
    results = Results()
    results.begin(1)
    results._results.append([int(Call.ONLY_FIRST), 3])
    with pytest.raises(
        DisagreementError, match=r"this rank is in run.evaluate after step 1, another was in run.only_first"
    ):
        results.next(Call.EVALUATE, lambda: 1, lambda _: None)
