"""One reason out of the ends of all workers: the whole story, with a rank only where it is one rank's own."""

from __future__ import annotations

from hetseq.cluster.membership.exit_status import Ending, WorkerEnd, judge, of_errand


def test_a_refusal_that_all_ranks_share_is_told_without_a_rank() -> None:
    ends = [WorkerEnd(rank, 2, code=2, message="--data /x does not exist") for rank in (1, 0)]
    assert judge(ends, has_commit=False) == Ending(2, "--data /x does not exist")


def test_a_copy_that_was_cut_short_on_its_way_is_not_told_although_it_came_first() -> None:
    whole = "--resume c.pt: it is a pickle: go on from a folder checkpoints/step-..."
    ends = [WorkerEnd(1, 2, code=2, message=whole[:50]), WorkerEnd(0, 2, code=2, message=whole)]
    assert judge(ends, has_commit=False) == Ending(2, whole)


def test_what_one_rank_found_alone_is_told_with_its_rank() -> None:
    lost = WorkerEnd(0, 75, code=75, message="lost a peer", is_secondary=True)
    ends = [lost, WorkerEnd(1, 1, code=1, message="sample 7 is rotten"), WorkerEnd(2, 1, code=1, message="sample 9")]
    assert judge(ends, has_commit=True) == Ending(1, "rank 1: sample 7 is rotten")


def test_the_only_rank_needs_no_name_and_no_words() -> None:
    assert judge([WorkerEnd(0, 1, code=1, message="broken")], has_commit=True) == Ending(1, "broken")
    assert judge([WorkerEnd(0, 1, code=1)], has_commit=True) == Ending(1, "")


def test_where_nothing_was_to_be_saved_an_interruption_says_that_the_command_can_be_given_again() -> None:
    killed = judge(
        [WorkerEnd(1, -9), WorkerEnd(0, 75, code=75, message="lost a peer", is_secondary=True)], has_commit=False
    )
    assert of_errand(killed) == Ending(
        1, "rank 1 was killed (SIGKILL, as the kernel does when memory runs out) [worker-died]; run the command again"
    )
    stopped = judge([], has_commit=False, cut_short="stopped by SIGTERM before the first step")
    assert of_errand(stopped) == Ending(130, "stopped by SIGTERM; run the command again")
    assert of_errand(judge([WorkerEnd(12, -11)], has_commit=False)) == Ending(
        1, "rank 12 crashed (SIGSEGV) [worker-died]"
    )
    assert of_errand(Ending(0, "step 3 valid loss 0.5")) == Ending(0, "step 3 valid loss 0.5")
