"""Who leads: every sign that a newcomer may see, and what it does then, by its own clock alone."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from hetseq.cluster.rendezvous import process_identity as identity
from hetseq.cluster.rendezvous.leader_election import (
    HEAD_START_S,
    LEASE_S,
    SILENCE_S,
    UNKNOWN,
    Action,
    Kind,
    LeaderRecord,
    Sight,
    Standing,
    Watch,
    decide,
    standing_of,
)
from hetseq.cluster.rendezvous.process_identity import Process, is_alive, this_machine, this_process

HEAD = Sight(Kind.HEAD, number=3, nonce="n")
ENDED = Sight(Kind.ENDED, number=3, nonce="n")
EMPTY = Sight(Kind.EMPTY, number=3)


def seen(first: Sight, *later: tuple[float, Sight], head_start_s: float = 0.0) -> list[Action]:
    """What a newcomer does who sees `first` at second 100 and the others so many seconds later."""
    watch, actions = Watch(), []
    for after_s, sight in ((0.0, first), *later):
        watch, action = decide(watch, sight, 100.0 + after_s, head_start_s=head_start_s)
        actions.append(action)
    return actions


@pytest.mark.parametrize(
    ("sight", "action"),
    [
        (Sight(), Action.CLAIM),
        (Sight(Kind.HEAD, 1, "n", is_mine=True, life=True), Action.LEAD),
        (Sight(Kind.HEAD, 1, "n", is_mine=True), Action.LEAD),
        (Sight(Kind.HEAD, 1, "n", life=True), Action.FOLLOW),
        (Sight(Kind.HEAD, 1, "n", life=False), Action.CLAIM),
        (Sight(Kind.HEAD, 1, "n", life=False, pulse=7), Action.CLAIM),
        (Sight(Kind.HEAD, 1, "n"), Action.WAIT),
        (Sight(Kind.HEAD, 1, "n", pulse=7), Action.WAIT),
        (Sight(Kind.HEAD, 1, "n", pulse=7, has_answered=True), Action.FOLLOW),
        (Sight(Kind.ENDED, 2, "n", life=True), Action.WAIT),
        (Sight(Kind.ENDED, 2, "n", life=False), Action.CLAIM),
        (Sight(Kind.ENDED, 2, "n"), Action.WAIT),
        (Sight(Kind.ENDED, 2, "n", has_answered=True), Action.WAIT),
        (Sight(Kind.EMPTY, 1), Action.WAIT),
    ],
)
def test_the_first_look_decides_what_it_can(sight: Sight, action: Action) -> None:
    assert seen(sight) == [action]


@pytest.mark.parametrize("still", [HEAD, ENDED, EMPTY, Sight(Kind.ENDED, 3, "n", life=True)])
def test_what_stands_still_for_fifteen_seconds_is_replaced_and_not_before(still: Sight) -> None:
    assert seen(still, (SILENCE_S - 0.1, still)) == [Action.WAIT, Action.WAIT]
    assert seen(still, (SILENCE_S, still)) == [Action.WAIT, Action.CLAIM]


def test_a_newcomer_replaces_a_dead_head_later_than_the_launchers_of_its_run() -> None:
    """They hold the state of the run. What no head has left behind, an empty number or a last record, is no run."""
    dead = replace(HEAD, life=False)
    for sight, due_s in ((dead, 0.0), (HEAD, SILENCE_S)):
        assert seen(sight, (due_s + 1.9, sight), head_start_s=HEAD_START_S)[-1] is Action.WAIT
        assert seen(sight, (due_s + 1.9, sight))[-1] is Action.CLAIM  # a launcher of the run
        assert seen(sight, (due_s + 2.0, sight), head_start_s=HEAD_START_S)[-1] is Action.CLAIM
    assert seen(replace(ENDED, life=False), head_start_s=HEAD_START_S) == [Action.CLAIM]
    assert seen(EMPTY, (SILENCE_S, EMPTY), head_start_s=HEAD_START_S)[-1] is Action.CLAIM
    follows = replace(HEAD, number=4, nonce="m", life=True)  # one of them has taken its place meanwhile
    assert seen(dead, (1.0, follows), head_start_s=HEAD_START_S)[-1] is Action.FOLLOW


def test_a_heart_that_beats_once_is_followed_even_late() -> None:
    before, after = Sight(Kind.HEAD, 3, "n", pulse=7), Sight(Kind.HEAD, 3, "n", pulse=8)
    assert seen(before, (14.0, before), (14.9, after))[-1] is Action.FOLLOW
    assert seen(before, (14.0, before), (20.0, after))[-1] is Action.FOLLOW


def test_a_pulse_that_becomes_readable_late_is_no_beat() -> None:
    """A cached listing may show a dead head's last counter only after a while."""
    unread, dead = Sight(Kind.HEAD, 3, "n"), Sight(Kind.HEAD, 3, "n", pulse=7)
    assert seen(unread, (5.0, dead), (14.0, dead), (15.0, dead)) == [Action.WAIT] * 3 + [Action.CLAIM]
    assert seen(unread, (5.0, dead), (6.0, Sight(Kind.HEAD, 3, "n", pulse=8)))[-1] is Action.FOLLOW


def test_a_pulse_that_cannot_be_read_for_a_moment_is_no_beat() -> None:
    torn, dead = Sight(Kind.HEAD, 3, "n"), Sight(Kind.HEAD, 3, "n", pulse=7)
    assert seen(dead, (1.0, torn), (2.0, dead)) == [Action.WAIT] * 3


@pytest.mark.parametrize(
    "other",
    [
        Sight(Kind.HEAD, 4, "n"),
        Sight(Kind.HEAD, 3, "m"),
        Sight(Kind.ENDED, 3, "n"),
        Sight(Kind.EMPTY, 3),
    ],
)
def test_the_clock_starts_anew_when_something_else_is_seen(other: Sight) -> None:
    assert seen(HEAD, (14.0, other), (20.0, other), (28.9, other)) == [Action.WAIT] * 4
    assert seen(HEAD, (14.0, other), (29.0, other))[-1] is Action.CLAIM


@pytest.mark.parametrize(
    ("silence_s", "is_superseded", "standing"),
    [
        (0.0, False, Standing.SURE),
        (3.0, False, Standing.SURE),
        (3.1, False, Standing.UNSURE),
        (10.0, False, Standing.UNSURE),
        (10.1, False, Standing.OVERDUE),
        (0.0, True, Standing.REPLACED),
        (99.0, True, Standing.REPLACED),
    ],
)
def test_a_head_knows_how_sure_it_can_be(silence_s: float, is_superseded: bool, standing: Standing) -> None:
    assert standing_of(silence_s, is_superseded=is_superseded) is standing
    assert standing is not Standing.OVERDUE or SILENCE_S > LEASE_S, "it yields before others take its place"


def test_a_record_survives_the_directory_and_another_version_is_refused() -> None:
    record = LeaderRecord(Kind.HEAD, "n", "labA", "10.0.0.1", 4711, Process("abc", 12, 34))
    assert LeaderRecord.decode(record.encode()) == record
    row = json.loads(record.encode())
    for change in ({"record": 2}, {"port": "4711"}, {"port": True}, {"kind": "king"}, {"process": None}, {"host": 3}):
        with pytest.raises(ValueError, match=r"record"):
            LeaderRecord.decode(json.dumps({**row, **change}).encode())
    for junk in (b"", b"[]", b"\xff", b"null"):
        with pytest.raises(ValueError, match=r"no record"):
            LeaderRecord.decode(junk)


def test_a_record_is_void_above_another_attempt_than_the_one_it_replaces() -> None:
    dead = LeaderRecord(Kind.HEAD, "dead", "labA", "10.0.0.1", 1, Process("abc", 12, 34))
    new = replace(dead, nonce="new", after="dead")
    assert dead.stands_on(None)
    assert new.stands_on(dead)
    assert not new.stands_on(None)
    assert not new.stands_on(replace(dead, nonce="other"))
    assert replace(new, after=UNKNOWN).stands_on(None)
    assert not dead.stands_on(new)


# Processes.


def test_a_process_lives_until_it_ends_and_its_number_may_be_used_again() -> None:
    me = this_process()
    assert is_alive(me) is True
    assert is_alive(Process(me.machine, me.pid, me.start - 1)) is False  # the number was handed out again
    assert is_alive(Process(me.machine, 2**22 + 1, me.start)) is False  # above what the kernel hands out


def test_a_zombie_has_ended() -> None:
    reading, writing = os.pipe()
    child = os.posix_spawn("/bin/cat", ["cat"], {}, file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0)])
    try:
        found = identity.state_and_start(child)
        assert found is not None
        cat = Process(this_machine(), child, found[1])
        assert is_alive(cat) is True
        os.close(writing)
        os.close(reading)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
        assert is_alive(cat) is False
    finally:
        os.waitpid(child, 0)


def test_of_a_process_elsewhere_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    me = this_process()
    assert is_alive(Process("0123456789abcdef", me.pid, me.start)) is None
    assert is_alive(Process("", me.pid, me.start)) is None
    # a container of the same machine: other process ids, the same kernel
    real = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[1]" if str(path).endswith("/pid") else real(path))
    assert is_alive(me) is None
