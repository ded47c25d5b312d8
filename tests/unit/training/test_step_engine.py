"""The driver of `hetseq train`: what it answers an engine, and what it must not keep alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import pytest

from hetseq.errors import PeerLostError
from hetseq.training.share import Part
from hetseq.training.step_engine import Between, Compute, Engine, Settled, computed, drive


class Buckets:
    """Stands for the memory of a generation."""


class FakeComputer:
    def __init__(self, error: BaseException | None = None) -> None:
        self.error, self.buckets = error, Buckets()

    def compute(self, data: object, counts: tuple[float, ...], fetch_again: object) -> Part:
        buckets = self.buckets  # as a forward holds tensors
        if self.error is not None:
            raise self.error
        assert buckets
        return Part(counts, (), ())


def question(computer: FakeComputer, count: float = 1.0) -> Compute:
    return Compute(cast(Any, computer), cast(Any, None), (count,), cast(Any, None))


def test_the_driver_computes_what_is_asked_for_and_gives_what_the_engine_returns() -> None:
    def engine() -> Engine[list[float]]:
        sums = []
        for count in (3.0, 4.0):
            sums += (yield from computed(question(FakeComputer(), count))).sums
            yield Settled(cast(Any, None))
        yield Between()
        return sums

    assert drive(engine()) == [3.0, 4.0]


def test_the_engine_continues_after_a_lost_peer_and_nothing_keeps_the_buckets_of_before() -> None:
    def engine() -> Engine[bool]:
        computer = FakeComputer(PeerLostError("rank 1 was lost"))
        buckets = weakref.ref(computer.buckets)
        asked = computed(question(computer))
        del computer
        lost = ""
        try:
            yield from asked
        except PeerLostError as error:
            lost = str(error)
        del asked
        assert lost == "rank 1 was lost"
        gc.collect()
        is_freed = buckets() is None
        yield from computed(question(FakeComputer()))
        return is_freed

    assert drive(engine())


def test_an_error_of_the_task_is_raised_inside_the_engine_and_to_the_caller() -> None:
    error, left = KeyError("label"), []

    def engine() -> Engine[None]:
        try:
            yield from computed(question(FakeComputer(error)))
        finally:
            left.append("cleaned up")

    with pytest.raises(KeyError) as raised:
        drive(engine())
    assert raised.value is error
    assert left == ["cleaned up"]


@pytest.mark.parametrize("error", [StopIteration(7), KeyboardInterrupt()])
def test_no_exception_of_the_task_is_taken_for_the_end_of_training(error: BaseException) -> None:
    def engine() -> Engine[str]:
        yield from computed(question(FakeComputer(error)))
        return "all is done"

    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        drive(engine())
