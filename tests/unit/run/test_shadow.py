"""Which messages of several ranks a shadow uses together, and which ones it drops; what it tells a rank that comes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hetseq.cluster.membership.step_commit import Lineage
from hetseq.config.sections import DistributedConfig
from hetseq.run.regroup import PendingWork
from hetseq.run.shadow import Shadow, of_one_replica

Told = list[dict[str, Any]]


class Link:
    """A reader with messages that have arrived."""

    def __init__(self, *frames: dict[str, Any]) -> None:
        self.frames, self.content = list(frames), memoryview(b"")
        self.read()

    def read(self) -> None:
        self.header = self.frames[0] if self.frames else None

    def clear(self) -> None:
        del self.frames[0]
        self.header = None

    @property
    def is_whole(self) -> bool:
        return self.header is not None


class Following(Shadow):
    """A shadow that only notes what it would do; its state is that of step `at`."""

    def __init__(self, at: int | None, ranks: int = 2) -> None:
        self.at, self.done, self._world_size, self._loading = at, list[str](), ranks, None
        self._has_state = at is not None
        self._parameters, self._pieces, self._due, self._begins = {}, {}, None, None

    @property
    def lineage(self) -> Lineage | None:
        return None if self.at is None or not self._has_state else Lineage(self.at, 10 * self.at)

    def _take_step(self, readers: Any, headers: Any) -> None:
        self.at = headers[0]["step"]
        self.done.append(f"step {self.at}")

    def _take_what_followed(self, header: Any, content: Any) -> None:
        self.done.append(f"after {header['step']}")

    def _begin_state(self, step: int) -> None:
        self._has_state, self._loading = False, (step, set())

    def _load(self, header: Any, memory: Any) -> None:
        self.at = header["step"]
        self.done.append(f"part {header['part']}")

    def _end_state(self) -> None:
        self._has_state = True
        self.done.append(f"state {self.at}")

    def follow_all(self, *links: Link) -> list[str]:
        readers: Any = dict(enumerate(links))
        while self._advance(readers):
            pass
        return self.done


def step(number: int) -> dict[str, Any]:
    return {"kind": "step", "step": number, "before": [number - 1, 10 * (number - 1)]}


def after(number: int) -> dict[str, Any]:
    return {"kind": "after", "step": number}


def state(number: int, parts: int = 1) -> Told:
    return [{"kind": "state", "step": number, "part": at, "is_last": at == parts - 1} for at in range(parts)]


def test_a_step_is_taken_when_the_portions_of_all_ranks_are_there() -> None:
    shadow, late = Following(4), Link(step(5))
    assert shadow.follow_all(Link(step(5), after(5), step(6)), late) == ["step 5", "after 5"]
    late.frames.append(step(6))
    late.read()
    readers: Any = {0: Link(step(6)), 1: late}
    assert shadow._advance(readers)
    assert shadow.done[-1] == "step 6"


def test_nothing_is_taken_while_a_rank_has_not_connected() -> None:
    assert Following(4).follow_all(Link(step(5))) == []


def test_the_state_is_taken_from_all_ranks_however_they_cut_it() -> None:
    links = Link(*state(9, 3), step(10)), Link(*state(9), step(10))
    assert Following(None).follow_all(*links) == ["part 0", "part 0", "part 1", "part 2", "state 9", "step 10"]


def test_a_rank_that_sent_steps_for_longer_than_another_has_them_dropped() -> None:
    links = Link(step(5), *state(8), step(9)), Link(step(5), step(6), step(7), *state(8), step(9))
    assert Following(4).follow_all(*links) == ["step 5", "part 0", "part 0", "state 8", "step 9"]


def test_a_state_that_one_rank_could_not_send_is_dropped_for_a_later_one() -> None:
    links = Link(*state(8, 2), step(9), *state(11), step(12)), Link(step(8), step(9), *state(11), step(12))
    assert Following(6).follow_all(*links) == ["part 0", "part 0", "state 11", "step 12"]


def test_steps_that_do_not_follow_the_state_are_dropped() -> None:
    shadow = Following(4)
    assert shadow.follow_all(Link(step(6), step(7)), Link(step(6), step(7))) == []
    assert shadow.at == 4
    assert Following(None).follow_all(Link(step(6)), Link(step(6))) == []


def test_the_rest_of_a_state_whose_beginning_was_dropped_is_no_state() -> None:
    rest = state(8, 3)[1:]
    assert Following(4).follow_all(Link(*rest, *state(9)), Link(*rest, *state(9))) == ["part 0", "part 0", "state 9"]


@pytest.mark.parametrize("left", [0, 1])
def test_a_rank_that_is_lost_while_the_state_arrives_leaves_no_state(left: int) -> None:
    shadow = Following(4)
    readers: Any = {0: Link(*state(8, 2)[:1]), 1: Link(*state(8, 2)[:1])}
    while shadow._advance(readers):
        pass
    del readers[1 - left]
    assert not shadow._advance(readers)
    assert shadow.lineage is None
    assert shadow._loading is None


# what it tells a rank that has connected


def hello(begins: int, now: int | None = None, *, watches_task: bool = False) -> dict[str, Any]:
    """The greeting of a rank: the step whose state it began with, and the step whose state it has now."""
    at, now = [begins, 10 * begins], begins if now is None else now
    return {
        "rank": 1, "has_owners": False, "has_layers": False, "trained": [], "pieces": [], "begins": at,
        "lineage": [now, 10 * now],
        "watches_task": watches_task,
    }  # fmt: skip


def told(shadow: Shadow, hello: dict[str, Any]) -> int | None:
    """The step of the state that the shadow says it has."""
    lineage = shadow._answer(hello)["lineage"]
    return None if lineage is None else int(lineage[0])


def test_a_rank_is_told_which_state_the_shadow_has() -> None:
    assert told(Following(None), hello(4)) is None
    assert told(Following(4), hello(4)) == 4
    assert told(Following(4), hello(4, 6)) == 4


def test_a_state_of_a_course_that_the_ranks_gave_up_is_given_up() -> None:
    shadow = Following(6)
    assert told(shadow, hello(4)) is None
    assert shadow.lineage is None


def test_steps_that_are_made_again_in_one_generation_do_not_hide_that_the_ranks_went_back() -> None:
    shadow = Following(4)
    assert told(shadow, hello(4)) == 4
    shadow.at = 9
    assert told(shadow, hello(4, 9)) == 9, "a connection that was lost"
    assert told(shadow, hello(7, 9)) is None, "a checkpoint of step 7, and two steps again, with the lineages they had"
    assert shadow.lineage is None


def test_a_shadow_that_has_not_heard_what_a_hook_did_needs_the_state_and_keeps_its_own() -> None:
    shadow = Following(4)
    shadow._due = PendingWork(4, 1, False, False, 0, None)
    assert told(shadow, hello(4)) == 4
    assert told(shadow, hello(4, watches_task=True)) is None
    assert shadow.lineage == Lineage(4, 40), "its work after the step is made up for, if it takes over"


def test_a_shadow_asks_for_the_time_that_its_work_has_taken_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a round would give the only state up while the shadow makes a long update of a large model."""

    class Links:
        readers: Any = {}
        allowed: list[float] = []
        rounds = 2

        def wait(self, answer: Any) -> bool:
            self.rounds -= 1
            return self.rounds >= 0

        allow_for = allowed.append

    class Slow(Following):
        now_s = 0.0

        def _advance(self, readers: Any) -> bool:
            self.now_s += 50.0 if not self.now_s else 1.0
            return False

    shadow, links = Slow(None), Links()
    monkeypatch.setattr("hetseq.run.shadow.time", SimpleNamespace(monotonic=lambda: shadow.now_s))
    shadow.follow(links, generation=1, world_size=2, is_leaving=lambda: False)  # type: ignore[arg-type]
    assert links.allowed == [50.0, 1.0]


def test_a_shadow_holds_everything_whoever_owns_it_in_the_run() -> None:
    for words in ({"own": "3,1"}, {"shard_groups": "node"}, {"shard_groups": "2+1"}, {"own_memory": "gpu:8G,host:40G"}):
        alone = of_one_replica(DistributedConfig(shard_model="all", shard_modules=("a", "b"), **words))
        assert (alone.shard_model, alone.shard_groups, alone.own) == ("none", "all", "auto")
