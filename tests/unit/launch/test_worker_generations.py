"""What becomes of a session when its generation is over."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from hetseq.cluster.membership.assignment import GenerationRanks
from hetseq.cluster.membership.decide import Record
from hetseq.cluster.membership.step_commit import Lineage
from hetseq.comm.group import LocalGroup
from hetseq.errors import EXIT_FAILED, PeerLostError
from hetseq.launch import generation as generations
from hetseq.launch import rank_life
from hetseq.launch.generation import Generation, after
from hetseq.training.controller import Halt
from hetseq.training.step_engine import Between, Engine, Settled, drive


class FakeSession:
    """One that trains until somebody wishes for something, and keeps a diary of how it ends."""

    last_step = 7

    def __init__(self, halt: Halt) -> None:
        self.halt, self.diary = halt, list[str]()
        self.controller = SimpleNamespace(has_ended=lambda: False, state=SimpleNamespace(updates=7))
        self.saver = SimpleNamespace(last_error=None, failures=[], writes_here=True, last_step=6)

    def steps(self) -> Engine[Halt]:
        return self.halt
        yield  # a session that trains is an engine

    def suspend(self, *, is_leaving: bool = False) -> None:
        self.diary.append("suspend")

    def close(self, *, has_failed: bool = False) -> None:
        self.diary.append("close")


def trained(session: FakeSession) -> dict[str, Any] | str:
    """How one rank's only generation ends."""
    life: Any = object.__new__(rank_life.RankLife)
    life.__dict__.update(_config=None, _line=mock.Mock(), is_ready=True, _has_built=False, _tell_versions=mock.Mock())
    life.__dict__.update(_placement=SimpleNamespace(begun_s=0.0), _sum_up=mock.Mock())
    life._build = lambda config, generation: session
    return drive(life._train(Generation(GenerationRanks(0, (0,), ("a",)), None)))


def test_a_session_that_others_go_on_from_is_left_for_the_succession_which_waits_for_no_writer() -> None:
    """Its save under way may hang on a peer that has just died: to wait for the writer would be to wait for that."""
    session = FakeSession(Halt.CHANGING)
    assert isinstance(trained(session), str)
    assert session.diary == []


def test_who_leaves_waits_for_no_writer_either_since_those_who_go_on_save_anew() -> None:
    session = FakeSession(Halt.LEAVING)
    assert isinstance(trained(session), dict)
    assert session.diary == ["suspend", "close"]


@pytest.mark.parametrize("halt", [Halt.ENDED, Halt.STOPPED])
def test_a_session_that_nobody_goes_on_from_lets_its_writers_finish(halt: Halt) -> None:
    session = FakeSession(halt)
    assert isinstance(trained(session), dict)
    assert session.diary == ["close"]


@pytest.mark.parametrize(("fresh", "is_told"), [(None, True), (frozenset(), False), (frozenset({"2.1"}), True)])
def test_versions_are_written_at_a_start_and_when_somebody_has_come(
    fresh: frozenset[str] | None, is_told: bool
) -> None:  # fmt: skip
    life: Any = object.__new__(rank_life.RankLife)
    life.__dict__.update(_metrics=mock.Mock(), _material=SimpleNamespace(device=torch.device("cpu")))
    succession = None if fresh is None else mock.Mock(record=Record(1, ("0.0", "2.1"), fresh=fresh))
    session: Any = SimpleNamespace(controller=SimpleNamespace(group=LocalGroup()), last_step=7)
    life._tell_versions(Generation(GenerationRanks(1, (2,), ("a",)), succession), session)
    told = life._metrics.event.call_args_list
    assert len(told) == is_told
    assert all(
        (call.args[0], call.kwargs["step"], call.kwargs["nodes"][0]["ranks"]) == ("versions", 7, [2]) for call in told
    )


def test_too_few_without_a_state_do_not_begin_anew() -> None:
    """They would train below --min-ranks, on a part of the data, or beside the run that others go on with."""
    life: Any = object.__new__(rank_life.RankLife)
    crew = GenerationRanks(3, (2,), ("a",)).to_record()

    def told(**facts: Any) -> dict[str, Any]:
        return {"record": Record(3, ("2.1",), **facts).to_record(), "crew": crew, "story": ""}

    assert life._read(told(), None).succession is None
    assert life._read(told(base=Lineage(7, 9), is_last=True), None).succession is not None
    with pytest.raises(PeerLostError, match="cannot continue: the state is lost, and too few ranks"):
        life._read(told(is_last=True), None)


def test_a_loss_that_falls_into_a_recovery_is_told_with_the_next_one() -> None:
    """The generation that was to follow the first loss never began, so it has no event of its own."""

    def generation(number: int, story: str) -> Generation:
        return Generation(GenerationRanks(number, (2,), ("a",)), None, story)

    told = replace(generation(0, ""), is_told=True)
    first = after(told, generation(1, "rank 1 on a was killed"), 5.0)
    second = after(first, generation(2, "rank 0 on a was killed"), 7.0)
    assert (second.story, second.lost_s) == ("rank 1 on a was killed; rank 0 on a was killed", 5.0)
    third = after(replace(second, is_told=True), generation(3, "rank 0 on a is back"), 9.0)
    assert (third.story, third.lost_s) == ("rank 0 on a is back", 9.0)


def test_a_run_whose_steps_were_all_skipped_has_failed() -> None:
    session = FakeSession(Halt.ENDED)
    session.controller.state.updates = 0
    report = trained(session)
    assert isinstance(report, dict)
    assert report["code"] == EXIT_FAILED
    assert report["message"].startswith("none of 7 steps was applied: no gradient was finite; lower --lr")


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([], []),
        ([14], ["1 save of this run failed, after step 14: full at 14"]),
        ([14, 20], ["2 saves of this run failed, after steps 14, 20; the last of them: full at 20"]),
    ],
)
def test_saves_that_failed_are_counted_at_the_end(
    steps: list[int], told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    failures = [(step, f"full at {step}") for step in steps]
    saver: Any = SimpleNamespace(last_error=None, failures=failures, writes_here=True)
    rank_life._repeat_failures(saver, has_ended=True)
    assert caplog.messages == told


def test_a_driver_hears_of_each_step_once_though_generations_end_around_it() -> None:
    """Caught up after the loss: the step is news. Lost in what follows a step: the driver ends that first."""

    def unsettled(*, caught_up: object = None, is_settling: bool = False) -> object:
        session: Any = SimpleNamespace(caught_up=caught_up, controller=SimpleNamespace(is_settling=is_settling))
        return generations.unsettled(replace(generation, session=session))

    generation = Generation(GenerationRanks(0, (0,), ("a",)), None)
    result: Any = object()
    assert unsettled() is None
    assert unsettled(caught_up=result) == Settled(result)
    assert unsettled(is_settling=True) == Between()

    following = replace(generation, unsettled=Settled(result))
    asked = generations.settle(following)
    assert next(asked) == Settled(result)
    with pytest.raises(PeerLostError):  # again, while the driver is at work after that step
        asked.throw(PeerLostError("rank 1"))
    assert generations.unsettled(following) == Between()
    drive(generations.settle(following))
    assert generations.unsettled(following) is None
