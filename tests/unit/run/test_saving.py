"""When a state is kept in memory, and what a start that goes on from memory does first."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetseq import config as options
from hetseq.checkpoint import Identity, SaveResult
from hetseq.comm.directory_groups import everything_shared
from hetseq.comm.group import LocalGroup
from hetseq.data.plan import Position
from hetseq.run.checkpointing import Saved, Saver, Underway
from hetseq.training.controller import TrainingState
from tests.support.replicas import HERE, trained


class Clock:
    """Seconds that pass when the test says so."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def saver_of(run: Path, words: str, *, clock: Clock | None = None, **manager: Any) -> Saver:
    """A saver whose manager is only facts."""
    facts: Any = SimpleNamespace(
        **{"keeps_states": True, "is_sealed": True, "keeping_s": 0.0, "has_failed": False, **manager}
    )
    config = options.parse(["--save-dir", str(run), *words.split()]).checkpoint
    return Saver(facts, config, HERE, trained(), sharing=everything_shared(LocalGroup()), now=clock or Clock())


def has_kept(saver: Saver) -> Saver:
    """As if it had just kept a state."""
    facts = saver._manager.__dict__
    has_room, facts["keeps_states"] = facts["keeps_states"], False
    after_the_first_step: Any = SimpleNamespace(position=SimpleNamespace(step=2))
    saver.keep(after_the_first_step, nonce=1)
    facts["keeps_states"] = has_room
    return saver


@pytest.mark.parametrize(
    ("generation", "told"), [(0, ["async checkpoints: 8.3 MB of /dev/shm, kept for crash recovery"]), (1, [])]
)
def test_the_memory_of_checkpoints_is_told_at_a_start_and_not_after_a_recovery(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, generation: int, told: list[str]
) -> None:
    caplog.set_level(logging.INFO)
    facts = {"keeps_states": True, "node_memory_bytes": 8_300_000, "prepare": lambda tensors: None}
    config = options.parse(["--save-dir", str(tmp_path)]).checkpoint
    sharing = everything_shared(LocalGroup(generation=generation))
    manager: Any = SimpleNamespace(**facts)
    Saver(manager, config, HERE, trained(), sharing=sharing)._prepare({})
    assert caplog.messages == told


@pytest.mark.parametrize("words", ["", "--memory-interval-updates 100"])
def test_the_first_state_is_kept_at_once_since_what_an_earlier_start_left_is_gone(tmp_path: Path, words: str) -> None:
    saver = saver_of(tmp_path, words)
    assert saver.is_keep_due(1)
    assert not has_kept(saver).is_keep_due(1)


@pytest.mark.parametrize(("every", "due"), [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (7, [])])
def test_a_state_is_kept_every_so_many_steps_where_that_was_said(tmp_path: Path, every: int, due: list[int]) -> None:
    clock = Clock()
    saver = has_kept(saver_of(tmp_path, f"--memory-interval-updates {every}", clock=clock))
    clock.now_s += 1e6  # the clock has nothing to do with it
    assert [step for step in range(1, 7) if saver.is_keep_due(step)] == due


@pytest.mark.parametrize(("keeping_s", "wait_s"), [(0.0, 1.0), (0.005, 1.0), (0.3, 30.0)])
def test_else_as_often_as_it_takes_a_hundredth_of_the_time(tmp_path: Path, keeping_s: float, wait_s: float) -> None:
    clock = Clock()
    saver = has_kept(saver_of(tmp_path, "", clock=clock, keeping_s=keeping_s))
    clock.now_s += wait_s - 0.01
    assert not saver.is_keep_due(1)
    clock.now_s += 0.02
    assert saver.is_keep_due(2)
    assert saver.is_keep_due(2)  # until it was kept


@pytest.mark.parametrize("words", ["", "--memory-interval-updates 1"])
def test_no_state_is_kept_where_there_is_no_room(tmp_path: Path, words: str) -> None:
    clock = Clock()
    with_room, without = (saver_of(tmp_path, words, clock=clock, keeps_states=has_room) for has_room in (True, False))
    clock.now_s += 100
    assert with_room.is_keep_due(1)
    assert not without.is_keep_due(1)


def test_the_wait_begins_anew_when_a_state_is_kept_or_cannot_be(tmp_path: Path) -> None:
    """Else a directory group that lost its memory would be asked after each step."""
    clock = Clock()
    saver = saver_of(tmp_path, "", clock=clock)
    clock.now_s += 100
    assert saver.is_keep_due(1)
    assert not has_kept(saver).is_keep_due(2)
    clock.now_s += 1
    assert saver.is_keep_due(3)


@pytest.mark.parametrize("is_ok", [False, True])
def test_what_was_found_in_memory_is_written_after_the_next_step_if_it_could_not_be_before(
    tmp_path: Path, is_ok: bool
) -> None:
    result = SimpleNamespace(ok=is_ok, path=tmp_path)
    saver = saver_of(tmp_path, "", save=lambda *_, **__: result, list=list)
    found: Any = SimpleNamespace(tensors={}, state={}, identity=None, nonce=4, kinds=("time",))
    assert not saver.is_overdue()
    saver.adopt(found, step=7)
    assert saver.is_overdue() is not is_ok
    assert saver.last_step == (7 if is_ok else 0)


@pytest.mark.parametrize("damage", [[], ["part-00000: a byte is another one"]])
def test_what_was_found_in_memory_and_is_on_the_disk_is_written_once_more_only_if_it_is_damaged(
    tmp_path: Path, damage: list[str]
) -> None:
    """All ranks of a run were killed between a commit and the next copy to memory."""
    saved: list[object] = []

    def save(*_: object, **__: object) -> Any:
        saved.append(1)
        return SimpleNamespace(ok=True, path=tmp_path)

    here, elsewhere = (SimpleNamespace(identity=Identity(step, 0, "0" * 16)) for step in (7, 3))
    found: Any = SimpleNamespace(tensors={}, state={}, identity=here.identity, nonce=4, kinds=("time",))
    saver = saver_of(tmp_path, "", save=save, list=lambda: [here, elsewhere], verify=lambda commit: damage)
    saver.adopt(found, step=7)
    assert len(saved) == bool(damage)
    assert saver.last_step == 7
    assert not saver.is_overdue()


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("has_failed", [False, True])
def test_a_rank_says_how_far_its_last_state_and_its_part_of_a_save_are(
    tmp_path: Path, is_sealed: bool, is_busy: bool, has_failed: bool
) -> None:
    status = saver_of(tmp_path, "", is_sealed=is_sealed, is_busy=is_busy, has_failed=has_failed).status(1)
    assert (status.sealed, status.writing, status.failed) == (is_sealed, is_busy, has_failed)


@pytest.mark.parametrize(
    ("is_underway", "failed", "cancelled"),
    [(True, [], 0), (True, [1], 1), (True, [0, 1], 1), (True, [2, 3], 0), (False, [1], 0)],
)
def test_a_part_is_given_up_where_a_rank_of_the_same_run_directory_has_failed(
    tmp_path: Path, is_underway: bool, failed: list[int], cancelled: int
) -> None:
    """Ranks 2 and 3 save into a directory of another node, and their disk is none of ours."""
    calls: list[int] = []
    saver = saver_of(tmp_path, "", cancel=lambda: calls.append(1))
    saver._sharing = replace(saver._sharing, parts=((0, 1), (2, 3)))
    saver._underway = Underway(1, ["time"], None, 7) if is_underway else None
    assert saver.go_on(TrainingState(), is_anyone_writing=True, failed=failed) == []
    assert len(calls) == cancelled


@pytest.mark.parametrize("keeps_states", [False, True])
@pytest.mark.parametrize("passed_s", [0.0, 60.0])
def test_a_rank_says_what_is_due_and_gives_each_attempt_a_name_of_its_own(
    tmp_path: Path, keeps_states: bool, passed_s: float
) -> None:
    clock = Clock()
    words = "--persistent-time-interval 60"
    saver = saver_of(tmp_path, words, clock=clock, keeps_states=keeps_states, is_busy=False)
    clock.now_s += passed_s
    first, second = saver.status(1), saver.status(1)
    assert (first.save, first.keep) == (passed_s == 60.0, keeps_states)
    assert first.nonce != second.nonce


def given_up(saver: Saver, owed: Underway, *, step: int, best: float | None) -> tuple[TrainingState, list[Saved]]:
    """The state after `step` in the next generation, and the saves that it reports."""
    state = TrainingState(position=Position(step + 1, 1, 0), best=best)
    return state, saver.take_over(owed, state, is_repeated=False)


def manager_with(nonces: list[int], rows: list[object]) -> dict[str, Any]:
    def give_up(step: int, *, nonce: int, kinds: list[str], error: str) -> SaveResult:
        rows.append((step, nonce, kinds, error))
        return SaveResult(Path(), False, error, 0, 0.0, 0.0)

    return {
        "list": lambda: [SimpleNamespace(attempt=SimpleNamespace(nonce=nonce)) for nonce in nonces],
        "give_up": give_up,
    }


BEST = Underway(10, ["interval", "best"], 1.2, 77)


@pytest.mark.parametrize(
    ("before", "told"),
    [(1.5, "--resume best means the one before, and the next validation better than 1.5 is saved"),
     (None, "the next validation is saved as the best")],
)  # fmt: skip
def test_a_best_checkpoint_that_was_given_up_is_not_the_best_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: float | None, told: str
) -> None:
    rows: list[object] = []
    saver = saver_of(tmp_path, "", is_busy=False, **manager_with([5], rows))
    saver.best = before
    state, saves = given_up(saver, BEST, step=11, best=1.2)
    error = "given up: a rank was lost while it was written"
    assert state.best == before
    assert [(saved.step, saved.kinds, saved.result.error) for saved in saves] == [(10, ["interval", "best"], error)]
    assert rows == [(10, 77, ["interval", "best"], error)]
    assert caplog.messages == [f"the best checkpoint, of step 10, is lost ({error}): {told}"]
    assert saver.is_overdue()
    assert saver.kinds_owed(state) == []
    # another rank is lost before the next save
    assert saver.owes is not None
    assert given_up(saver, saver.owes, step=12, best=before)[1] == []
    assert len(rows) == 1


def test_a_save_that_was_given_up_is_begun_again_while_its_state_is_there(tmp_path: Path) -> None:
    rows: list[object] = []
    saver = saver_of(tmp_path, "", **manager_with([], rows))
    state, saves = given_up(saver, BEST, step=10, best=1.2)
    assert (state.best, saves, rows) == (1.2, [], [])
    assert saver.kinds_owed(state) == ["interval", "best"]


def test_a_save_that_no_living_rank_knew_to_be_done_is_not_lost(tmp_path: Path) -> None:
    rows: list[object] = []
    saver = saver_of(tmp_path, "", **manager_with([5, 77], rows))
    saver.best = 1.5
    state, saves = given_up(saver, BEST, step=11, best=1.2)
    assert (state.best, saver.best, saves, rows) == (1.2, 1.2, [], [])


def test_what_follows_from_the_step_is_done_again_and_nothing_is_lost(tmp_path: Path) -> None:
    rows: list[object] = []
    saver = saver_of(tmp_path, "", **manager_with([], rows))
    state = TrainingState(position=Position(11, 1, 0), best=1.5)
    assert saver.take_over(BEST, state, is_repeated=True) == []
    assert rows == []


@pytest.mark.parametrize(("is_ok", "best", "known"), [(True, 1.2, 1.2), (False, 1.5, 1.5)])
def test_a_best_checkpoint_that_the_disk_refused_is_not_the_best(
    tmp_path: Path, is_ok: bool, best: float, known: float
) -> None:
    saver = saver_of(tmp_path, "")
    saver.best, saver._underway = 1.5, BEST
    result = SaveResult(tmp_path, is_ok, None if is_ok else "No space left on device", 0, 0.0, 0.0)
    state = TrainingState(best=1.2)
    assert [saved.step for saved in saver._take(result, state)] == [10]
    assert (state.best, saver.best) == (best, known)


def test_a_still_better_state_that_is_being_saved_stays_the_best(tmp_path: Path) -> None:
    saver = saver_of(tmp_path, "")
    saver.best, saver._underway = 1.5, BEST
    state = TrainingState(best=1.1)
    saver._take(SaveResult(tmp_path, False, "Input/output error", 0, 0.0, 0.0), state)
    assert (state.best, saver.best) == (1.1, 1.5)
