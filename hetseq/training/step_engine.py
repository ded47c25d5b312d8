"""The questions that a training loop asks its driver, and the driver of `hetseq train`.

The loop of a rank, from `launch.worker` down to `Controller.step`, is one chain of generators (PEP 380). It decides
which step comes next, reduces, commits, updates and regroups; it never computes a gradient. For that it yields a
question. `drive` answers for a task. A script with a loop of its own answers from the body of that loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from hetseq.balance.layout import Layout
from hetseq.cluster.membership.step_commit import Outcome
from hetseq.data.loader import StepData
from hetseq.data.plan import MicroBatchCap, StepPlan
from hetseq.errors import PeerLostError
from hetseq.training.share import Part, ShareComputer
from hetseq.training.share_policy import Shift

T = TypeVar("T")


@dataclass(frozen=True)
class StepResult:
    """The result of one committed step; equal on every rank except for `seconds`."""

    plan: StepPlan
    outcome: Outcome
    counts: tuple[float, ...]
    loss: float | None  # sum over terms of weight * sum / count, in nats, before the update; None if skipped
    lr: float
    grad_norm: float
    seconds: float
    work: int  # the work of all its samples, in the unit by which they were divided among the ranks
    shift: Shift | None  # new shares decided after it
    layout: Layout  # which ranks compute a share together
    loss_scale: float | None = None  # of the next step, if the precision has one
    best_before: float | None = None  # `best` of the training state, before a validation after this step

    @property
    def shares(self) -> tuple[int, ...]:
        """The samples of each rank; ranks that compute a share together have all of it."""
        return self.layout.by_rank(self.plan.shares)

    @property
    def counted_shares(self) -> tuple[int, ...]:
        """The samples of each rank, where a share that several ranks compute counts for the first of them."""
        return self.layout.at_leaders(self.plan.shares)


@dataclass(frozen=True)
class Compute:
    """Add this rank's part of the gradient of a step to the buckets. The answer is its `Part`, or `PeerLost`.

    Asked again for the same step if memory ran out on a rank or a peer was lost, and to find values that are not
    finite.
    """

    computer: ShareComputer
    data: StepData
    counts: tuple[float, ...]  # of all ranks, by term
    fetch_again: Callable[[StepData, MicroBatchCap], StepData]

    def part(self) -> Part:
        """The part of a task, computed here and now. Raises PeerLostError, and the errors of the task."""
        return self.computer.compute(self.data, self.counts, self.fetch_again)


@dataclass(frozen=True)
class Settled:
    """A step is resolved on this rank: asked once per step and process, before anything is saved.

    No answer, or `PeerLost` if a collective of the driver has lost a peer: then `Between` follows.
    """

    result: StepResult


@dataclass(frozen=True)
class Between:
    """A generation has begun whose state is that of the last `Settled`, which a lost peer interrupted. No answer.

    The driver now ends what it does after that step. Ranks that join wait for it: they receive the state after it.
    Answers as for `Settled`.
    """


@dataclass(frozen=True)
class PeerLost:
    """The answer to `Compute` on a rank that noticed the loss of a peer. It holds no frames, hence no tensors."""

    reason: str


Question: TypeAlias = Compute | Settled | Between
Engine: TypeAlias = Generator[Question, Part | PeerLost | None, T]


def computed(question: Compute) -> Engine[Part]:
    """The part that the driver answers with. Raises PeerLostError in the engine."""
    answer = yield question
    if isinstance(answer, PeerLost):
        raise PeerLostError(answer.reason)
    assert isinstance(answer, Part), "the driver answered a step without its part"
    return answer


def ended(question: Settled | Between) -> Engine[None]:
    """Wait for the driver to end what it does after a step. Raises PeerLostError in the engine."""
    answer = yield question
    if isinstance(answer, PeerLost):
        raise PeerLostError(answer.reason)


def drive(engine: Engine[T]) -> T:
    """Run an engine to its end for a task; returns what the engine returns. Every rank calls it.

    An error of the task is raised inside the engine, which cleans up, and from there in the caller. The loss of a peer
    is sent as an answer: an exception would keep the frames of the failed step alive through the generations after it.
    """
    try:
        question: Question | None = next(engine)
        while True:
            answer = _answer(engine, question) if isinstance(question, Compute) else None
            question = None  # it knows the buckets of a generation that may be over
            question = engine.send(answer)
    except StopIteration as end:
        ending: T = end.value
        return ending


def _answer(engine: Engine[T], question: Compute) -> Part | PeerLost:
    try:
        return question.part()
    except PeerLostError as error:
        return PeerLost(str(error))
    except BaseException as error:
        engine.throw(error)
        raise AssertionError("the engine continued after an error of its task") from error
