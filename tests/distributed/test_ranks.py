"""`run_ranks` itself: what it returns, and that a raise, a death and a hang are told apart."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from hetseq.errors import PeerLostError
from hetseq.system.processes import die_with_parent
from tests.support.ranks import RankDied, RankFailure, RankHung, RankRaised, run_ranks


def gather_ranks(group: Any, offset: int) -> list[int]:
    return [int(n) for n in group.all_gather_rows(np.array([group.rank + offset]))[:, 0]]


def sum_of_ranks(group: Any) -> tuple[torch.Tensor, int]:
    tensor = torch.full((3,), float(group.rank + 1))
    group.all_reduce_sum(tensor).wait()
    return tensor, torch.get_num_threads()


def forked() -> None:
    """As a loader's process: it ends with the rank that it belongs to."""
    die_with_parent(os.getppid())
    signal.pause()


def rank_one(group: Any, deed: str) -> int:
    if group.rank == 1:
        if deed == "raise":
            raise KeyError("the culprit")
        if deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if deed == "exit":
            os._exit(3)
        if deed == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if deed == "warn":
            warnings.warn("careless", stacklevel=1)
        if deed == "wait":
            signal.pause()
        if deed == "wait for a child":
            child = os.fork()
            if not child:
                forked()
            os.waitpid(child, 0)
    group.all_gather_rows(np.array([group.rank]))
    return int(group.rank)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_rank_returns_its_facts(world_size: int) -> None:
    assert run_ranks(gather_ranks, world_size, 10) == [[10 + n for n in range(world_size)]] * world_size


def test_tensors_come_back_whole_from_ranks_with_one_thread() -> None:
    for tensor, threads in run_ranks(sum_of_ranks, 2):
        assert tensor.tolist() == [3.0, 3.0, 3.0]
        assert threads == 1


def test_a_rank_that_raises_is_named_with_its_own_traceback() -> None:
    with pytest.raises(RankRaised, match="rank 1 of 3 raised") as caught:
        run_ranks(rank_one, 3, "raise")
    assert "KeyError: 'the culprit'" in str(caught.value)
    assert "in rank_one" in str(caught.value)


def test_a_warning_in_a_rank_is_an_error() -> None:
    with pytest.raises(RankRaised, match="UserWarning: careless"):
        run_ranks(rank_one, 2, "warn")


@pytest.mark.parametrize(("deed", "cause"), [("kill", "killed by SIGKILL"), ("exit", "exit code 3")])
def test_a_rank_that_dies_is_named_before_those_who_lost_it(deed: str, cause: str) -> None:
    with pytest.raises(RankDied, match=f"rank 1 of 2 died: {cause}"):
        run_ranks(rank_one, 2, deed)


def test_a_rank_that_hangs_is_shown_with_the_line_it_hangs_in() -> None:
    with pytest.raises(RankHung, match=r"had not ended after 0\.3 s") as caught:
        run_ranks(rank_one, 2, "wait", timeout_s=0.3)
    assert "in rank_one" in str(caught.value)


def test_of_a_rank_that_hangs_its_loader_processes_are_shown_too() -> None:
    with pytest.raises(RankHung) as caught:
        run_ranks(rank_one, 2, "wait for a child", timeout_s=0.5)
    assert "in rank_one" in str(caught.value)
    assert "in forked" in str(caught.value)


def survive(group: Any, deed: str) -> str:
    try:
        rank_one(group, deed)
    except PeerLostError:
        return "lost its peer"
    return "nothing happened"


@pytest.mark.parametrize("deed", ["kill", "stop"])
def test_a_rank_that_dies_on_purpose_gives_none_and_the_others_their_facts(deed: str) -> None:
    assert run_ranks(survive, 2, deed, group_timeout_s=0.5, dies=[1]) == ["lost its peer", None]


def test_a_rank_that_was_to_die_and_returns_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="was to die and returned"):
        run_ranks(gather_ranks, 2, 0, dies=[1])
