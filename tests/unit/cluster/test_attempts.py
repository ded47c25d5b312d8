"""Launchers that share only a directory: one of them leads, the dead are replaced, and nothing is left at the end."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetseq.cluster.rendezvous import file_rendezvous as attempts
from hetseq.cluster.rendezvous import file_store as shared_directory
from hetseq.cluster.rendezvous import heartbeat as heart
from hetseq.cluster.rendezvous.file_rendezvous import MeetingAttempt, Patience, find_attempt, find_place
from hetseq.cluster.rendezvous.file_store import SharedDirectory
from hetseq.cluster.rendezvous.heartbeat import Heart, read_pulse
from hetseq.cluster.rendezvous.leader_election import SILENCE_S, Kind, LeaderRecord, Standing
from hetseq.cluster.rendezvous.process_identity import Process, this_machine, this_process
from tests.support.crashes import Crash, refuse_links
from tests.support.refusals import refusal

ROOT = Path(__file__).resolve().parents[3]
KEY = b"k" * 32
DEAD = Process(this_machine(), 2**22 + 1, 1)  # a process id above what the kernel hands out
FOREIGN = Process("feedfeedfeedfeed", 1, 1)

NEWCOMER = """
import sys, time
from pathlib import Path
from hetseq.cluster.rendezvous.file_rendezvous import find_attempt

sys.stdout.write("ready\\n")
sys.stdout.flush()
sys.stdin.readline()
attempt = find_attempt(Path(sys.argv[1]), b"k" * 32, listen=lambda: ("here", int(sys.argv[2])), name=sys.argv[3])
sys.stdout.write(f"{attempt.is_head} {attempt.number} {attempt.head.port} {attempt.head.nonce}\\n")
sys.stdout.flush()
sys.stdin.readline()
attempt.close()
"""


class Clock:
    """A clock that only sleeping moves; `every` is called whenever it does."""

    def __init__(self, every: Callable[[float], object] = lambda passed_s: None) -> None:
        self.passed_s = 0.0
        self.every = every

    def now(self) -> float:
        return 1000.0 + self.passed_s

    def sleep(self, seconds: float) -> None:
        self.passed_s += seconds
        self.every(self.passed_s)


def find(path: Path, clock: Clock | None = None, *, port: int = 1, **options: Any) -> MeetingAttempt:
    clock = clock or Clock()
    return find_attempt(path, KEY, listen=lambda: ("here", port), now=clock.now, sleep=clock.sleep, **options)


def entries(path: Path) -> list[str]:
    return sorted(os.listdir(path))


@pytest.fixture(params=["link", "mkdir"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of one's own, on a file system with hard links and on one without."""
    if request.param == "mkdir":
        refuse_links(monkeypatch, errno.EPERM)
    path = tmp_path / "meet"
    path.mkdir(mode=0o700)
    return path


def as_process(patch: pytest.MonkeyPatch, process: Process) -> None:
    """What is done now is done by that process."""
    patch.setattr(attempts, "this_process", lambda: process)
    patch.setattr(shared_directory, "this_process", lambda: process)


def begun_by(process: Process, path: Path) -> MeetingAttempt:
    """An attempt whose head is that process."""
    with pytest.MonkeyPatch.context() as patch:
        as_process(patch, process)
        return find(path, port=99)


# The ordinary course.


def test_the_first_leads_the_second_follows_and_nothing_is_left(place: Path) -> None:
    first = find(place, port=4711)
    second = find(place, port=4712)
    assert (first.is_head, second.is_head) == (True, False)
    assert second.head == first.head
    assert (second.head.address, second.head.port) == ("here", 4711)
    assert second.head.process == this_process()
    assert first.directory.publish("generation", b"0")
    assert second.directory.read("generation") == b"0"
    second.close()
    assert entries(place) != []
    first.close()
    first.close()
    assert entries(place) == []


def test_a_follower_never_opens_a_port(place: Path) -> None:
    def listen() -> tuple[str, int]:
        raise AssertionError("opened")

    head = find(place)
    assert not find_attempt(place, KEY, listen=listen).is_head
    head.close()
    with pytest.raises(AssertionError, match="opened"):
        find_attempt(place, KEY, listen=listen)
    assert entries(place) == []


@pytest.mark.parametrize("cycles", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_cycles_of_start_and_stop_leave_nothing(tmp_path: Path, cycles: int) -> None:
    path = tmp_path / "sync_file"
    for cycle in range(cycles):
        head = find(path)
        assert head.is_head
        if cycle % 5 == 0:
            follower = find(path)
            assert not follower.is_head
            follower.close()
        head.close()
        assert entries(tmp_path) == []


def test_a_directory_of_the_user_stays_and_one_that_was_made_goes(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "own" / "notes.txt").touch()
    for name in ("own", "made"):
        find(tmp_path / name).close()
    assert entries(tmp_path) == ["own"]
    assert entries(tmp_path / "own") == ["notes.txt"]


def test_two_runs_in_one_directory_do_not_see_each_other(place: Path) -> None:
    one, other = find(place, name="one"), find(place, name="other")
    assert [one.is_head, other.is_head] == [True, True]
    assert [find(place, name="one").head, find(place, name="other").head] == [one.head, other.head]
    one.close()
    assert find(place, name="other").head == other.head
    assert find(place, name="one").is_head
    other.close()


def test_files_of_one_attempt_do_not_verify_in_the_next(place: Path) -> None:
    first = find(place)
    first.directory.publish("roster", b"of the first")
    raw = first.directory.file("roster", 1).read_bytes()
    first.close()
    second = find(place)
    second.directory.file("roster", 1).write_bytes(raw)
    refusal(lambda: second.directory.read("roster"), "roster.1", "secret")
    second.close()
    assert entries(place) == []


@pytest.mark.slow
@pytest.mark.parametrize("stale", [False, True])
def test_of_eight_newcomers_at_once_one_leads_and_seven_follow(tmp_path: Path, stale: bool) -> None:
    path = tmp_path / "meet"
    if stale:
        begun_by(DEAD, path)
    newcomers = [
        subprocess.Popen(
            [sys.executable, "-c", NEWCOMER, str(path), str(port), ("one", "two")[port % 2] if port > 8 else "run"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for port in range(1, 13)  # the last four belong to two other runs in the same directory
    ]

    def say(word: str) -> None:
        for newcomer in newcomers:
            assert newcomer.stdin is not None
            newcomer.stdin.write(word + "\n")
            newcomer.stdin.flush()

    def hear() -> list[str]:
        return [newcomer.stdout.readline().strip() for newcomer in newcomers if newcomer.stdout is not None]

    assert hear() == ["ready"] * 12
    say("go")
    found = [line.split() for line in hear()]
    for members in (found[:8], found[8::2], found[9::2]):
        assert [line[0] for line in members].count("True") == 1
        assert len({tuple(line[1:]) for line in members}) == 1
        (head,) = [line for line in members if line[0] == "True"]
        assert found[int(head[2]) - 1] is head
    assert len({line[3] for line in found}) == 3
    say("end")
    for newcomer in newcomers:
        newcomer.communicate()
        assert newcomer.returncode == 0
    left = entries(path) if path.exists() else []
    assert [entry for entry in left if "-one" in entry or "-two" in entry] == []
    # the dead attempt's name was the default one, and went with its successor
    assert left == []


# Heads that died.


@pytest.mark.parametrize("process", [DEAD, replace(this_process(), start=this_process().start - 1)])
def test_a_head_that_died_on_this_host_is_replaced_at_once(place: Path, process: Process) -> None:
    """The second process id lives, but was handed out again to somebody else."""
    dead = begun_by(process, place)
    clock = Clock()
    new = find(place, clock)
    assert (new.is_head, new.number, clock.passed_s) == (True, 2, 0.0)
    assert new.head.nonce != dead.head.nonce
    assert find(place).head == new.head
    new.close()
    assert entries(place) == []


def test_a_silent_head_on_another_host_is_replaced_after_fifteen_seconds(place: Path) -> None:
    begun_by(FOREIGN, place)
    clock = Clock()
    new = find(place, clock)
    assert (new.is_head, new.number) == (True, 2)
    assert SILENCE_S <= clock.passed_s < SILENCE_S + 1
    new.close()
    assert entries(place) == []


def test_a_head_on_another_host_whose_heart_beats_is_followed(place: Path) -> None:
    theirs = Clock()
    with pytest.MonkeyPatch.context() as patch:
        as_process(patch, FOREIGN)
        head = find(place, theirs)
    assert head.heart is not None

    def beat(passed_s: float) -> None:
        theirs.passed_s = passed_s * 1.5 + 500  # their clock is another, and fast
        if passed_s > 12:
            assert head.heart is not None
            head.heart.beat()

    clock = Clock(beat)
    follower = find(place, clock)
    assert not follower.is_head
    assert follower.head == head.head
    assert 12 < clock.passed_s < 14


def test_a_head_on_another_host_that_answers_is_followed_at_once(place: Path) -> None:
    begun_by(FOREIGN, place)
    asked: list[LeaderRecord] = []

    def answers(record: LeaderRecord) -> bool:
        asked.append(record)
        return len(asked) == 3

    clock = Clock()
    assert not find(place, clock, answers=answers).is_head
    assert len(asked) == 3
    assert 10 <= clock.passed_s < 11
    assert not find(place, clock := Clock(), answers=lambda record: True).is_head
    assert clock.passed_s == 0.0


def test_a_head_that_was_taken_for_dead_learns_it_and_clears_only_its_own(place: Path) -> None:
    zombie = begun_by(FOREIGN, place)
    assert not zombie.is_superseded()
    new = find(place)
    assert [zombie.is_superseded(), new.is_superseded()] == [True, False]
    zombie.close()
    assert zombie.directory.path.exists() is False
    assert find(place).head == new.head
    new.close()
    assert entries(place) == []


def test_a_head_is_sure_of_its_place_as_long_as_it_can_show_life(place: Path) -> None:
    clock = Clock()
    head = find(place, clock)
    assert head.heart is not None
    for _ in range(5):
        clock.sleep(4)
        head.show_life()
        assert head.standing() is Standing.SURE
    kept = head.heart.path.rename(place.parent / "heart")
    seen = []
    for _ in range(3):
        clock.sleep(4)
        head.show_life()
        seen.append(head.standing())
    assert seen == [Standing.UNSURE, Standing.UNSURE, Standing.OVERDUE]
    kept.rename(head.heart.path)
    clock.sleep(1)
    head.show_life()
    assert head.standing() is Standing.SURE
    head.close()


def test_a_head_that_was_replaced_while_it_slept_knows_when_it_wakes(place: Path) -> None:
    sleeper = begun_by(FOREIGN, place)
    sleeper.show_life()
    assert sleeper.standing() is Standing.SURE
    new = find(place)
    for head, standing in ((sleeper, Standing.REPLACED), (new, Standing.SURE)):
        head.show_life()
        assert head.standing() is standing
    for head in (sleeper, new):
        head.close()
    assert entries(place) == []


def test_a_number_claimed_by_mistake_neither_leads_nor_keeps_a_head_from_ending(place: Path) -> None:
    """A launcher judged a dead attempt that was cleared away meanwhile: it stands above a living one, for a moment."""
    head = find(place)
    mistaken = replace(head.head, nonce="mistaken", after="an attempt long gone", process=this_process())
    store = SharedDirectory(place, KEY)
    assert store.publish("attempt-run", mistaken.encode(), version=2)
    assert not head.is_superseded()

    def take_back(passed_s: float) -> None:
        if passed_s > 0.5:
            store.remove("attempt-run", 2)

    follower = find(place, clock := Clock(take_back))
    assert follower.head == head.head
    assert 0.5 < clock.passed_s < 1
    store.publish("attempt-run", mistaken.encode(), version=2)
    head._sleep = lambda seconds: store.remove("attempt-run", 2)
    head.close()
    assert entries(place) == []


def test_a_head_that_dies_while_it_tidies_up_is_not_awaited(place: Path) -> None:
    """Its last word stands: on this host the process tells, from another one it stands still."""
    for process, wait_s in ((DEAD, 0.0), (FOREIGN, SILENCE_S)):
        with pytest.MonkeyPatch.context() as patch:
            dead = begun_by(process, place)
            patch.setattr(SharedDirectory, "remove", lambda *_: None)
            dead.close()
        clock = Clock()
        new = find(place, clock)
        assert new.is_head
        assert wait_s <= clock.passed_s < wait_s + 1
        new.close()
        assert entries(place) == []


def test_newcomers_wait_while_a_head_tidies_up(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending = find(place)
    store = SharedDirectory(place, KEY)
    store.publish("attempt-run", replace(ending.head, kind=Kind.ENDED).encode(), version=2)

    def tidy_up(passed_s: float) -> None:
        if passed_s > 3:
            store.remove("attempt-run", 1)
        if passed_s > 4:
            store.remove("attempt-run", 2)

    clock = Clock(tidy_up)
    new = find(place, clock)
    assert new.is_head
    assert (new.number, 4 < clock.passed_s < 5) == (1, True)


def test_a_head_that_is_slow_to_tidy_up_stops_before_others_go_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    head = find(place, clock)
    real = SharedDirectory.versions

    def slowly(*args: Any) -> Any:
        clock.passed_s += 8
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(SharedDirectory, "versions", slowly)
        head.close()
    assert [entry for entry in entries(place) if not entry.endswith(".d")] == ["attempt-run.1", "attempt-run.2"]


# Killed at any call.


@pytest.mark.fault("FT-16")
@pytest.mark.slow
@pytest.mark.parametrize("process", [DEAD, FOREIGN])
def test_a_launcher_killed_at_any_call_never_keeps_the_next_from_leading(place: Path, process: Process) -> None:
    for at in itertools.count(1):
        with Crash(at=at, half=True).installed() as crash, pytest.MonkeyPatch.context() as patch:
            as_process(patch, process)
            find(place).close()
        new = find(place)
        assert new.is_head
        assert find(place).head == new.head
        new.close()
        second = find(place)  # clears what lay beyond a gap
        assert second.is_head
        second.close()
        left = [entry for entry in entries(place) if not (process is FOREIGN and entry.startswith(".draft-"))]
        assert left == [], f"killed at call {at}"
        if crash.calls < at:
            break
    assert at > 30


@pytest.mark.slow
def test_a_launcher_killed_after_a_dead_one_leaves_no_gap_that_lets_two_lead(place: Path) -> None:
    """Its chain has three links, so that a gap can open below what is left of it."""
    for at in itertools.count(1):
        begun_by(DEAD, place)
        with Crash(at=at).installed() as crash, pytest.MonkeyPatch.context() as patch:
            as_process(patch, DEAD)
            find(place).close()
        heads = [find(place), find(place)]
        assert [head.is_head for head in heads] == [True, False], f"killed at call {at}"
        heads[0].close()
        find(place).close()
        assert entries(place) == [], f"killed at call {at}"
        if crash.calls < at:
            break


def test_an_error_while_it_waits_takes_back_what_it_has_begun(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(attempts._DirectorySearch, "_attempt", interrupt)
    with pytest.raises(KeyboardInterrupt):
        find(place)
    assert entries(place) == []


# What stands in the way.


def test_another_secret_is_refused_by_name(place: Path) -> None:
    head = find(place)
    refusal(
        lambda: find_attempt(place, b"x" * 32, listen=lambda: ("here", 2)), str(place / "attempt-run.1"), "secret file"
    )
    head.close()
    assert entries(place) == []


def test_a_record_of_another_version_is_refused_by_name(place: Path) -> None:
    SharedDirectory(place, KEY).publish("attempt-run", json.dumps({"record": 2}).encode())
    refusal(lambda: find(place), str(place / "attempt-run.1"), "another version of HetSeq")


@pytest.mark.fault("FT-16")
@pytest.mark.parametrize("plant", [os.mkfifo, lambda file: file.symlink_to("/dev/zero"), lambda file: file.touch()])
def test_what_was_planted_in_place_of_an_attempt_is_refused(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    (tmp_path / "meet").mkdir(mode=0o700)
    plant(tmp_path / "meet" / "attempt-run.1")
    refusal(lambda: find(tmp_path / "meet"), str(tmp_path / "meet" / "attempt-run.1"))


def test_a_search_that_comes_to_nothing_ends_in_words(place: Path) -> None:
    begun_by(FOREIGN, place)
    clock = Clock()
    refusal(lambda: find(place, clock, patience=Patience(10)), "attempt 1", "pid 1", "neither continued nor ended")
    assert 10 <= clock.passed_s < 11


# Places.


def test_a_fresh_name_becomes_a_private_directory(tmp_path: Path) -> None:
    assert find_place(tmp_path / "sync") == find_place(tmp_path / "sync") == tmp_path / "sync"
    assert (tmp_path / "sync").stat().st_mode & 0o777 == 0o700
    assert [(file.name, file.stat().st_mode & 0o777) for file in (tmp_path / "sync").iterdir()] == [
        ("made-by-hetseq", 0o600)
    ]


def test_a_directory_that_a_follower_made_goes_with_its_head(tmp_path: Path) -> None:
    find_place(tmp_path / "sync")  # by a launcher that will follow
    head = find(tmp_path / "sync")
    follower = find(tmp_path / "sync")
    follower.close()
    assert head.is_head
    head.close()
    assert entries(tmp_path) == []


def test_a_directory_that_somebody_else_uses_still_stays_and_goes_with_him(tmp_path: Path) -> None:
    one, other = find(tmp_path / "sync", name="one"), find(tmp_path / "sync", name="other")
    one.close()
    assert (tmp_path / "sync").is_dir()
    other.close()
    assert entries(tmp_path) == []


def test_a_file_of_2020_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sync").write_bytes(b"torch's FileStore")
    head = find(tmp_path / "sync")
    assert head.directory.path.parent == tmp_path / "sync.hetseq"
    assert not find(tmp_path / "sync").is_head
    head.close()
    assert entries(tmp_path) == ["sync"]
    assert (tmp_path / "sync").read_bytes() == b"torch's FileStore"
    (tmp_path / "sync.hetseq").touch()
    refusal(lambda: find(tmp_path / "sync"), "sync.hetseq are files")


def test_a_missing_parent_is_named_at_once(tmp_path: Path) -> None:
    clock = Clock()
    refusal(lambda: find(tmp_path / "a" / "b" / "sync", clock), f"{tmp_path / 'a'} does not exist", "not shared")
    assert clock.passed_s == 0.0
    (tmp_path / "file").touch()
    refusal(lambda: find(tmp_path / "file" / "sync"), "is a file")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_parent_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "mkdir", fail)
    refusal(lambda: find(tmp_path / "sync"), str(tmp_path / "sync"), "name another shared directory")


def test_links_are_followed_only_if_their_maker_owns_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    find(tmp_path / "link").close()
    real = os.stat
    if os.getuid() == 0:  # a link of root is trusted
        os.lchown(tmp_path / "link", 4711, -1)
    else:
        monkeypatch.setattr(os, "stat", lambda path, **options: Owned(real(path, **options)))
    refusal(lambda: find_place(tmp_path / "link"), "is a link of user id")
    monkeypatch.undo()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    refusal(lambda: find_place(tmp_path / "broken"), "link to nothing")
    os.mkfifo(tmp_path / "pipe")
    refusal(lambda: find_place(tmp_path / "pipe"), "neither a directory nor a file")


class Owned:
    """What stat says of something that belongs to somebody else."""

    def __init__(self, found: os.stat_result) -> None:
        self.st_mode = found.st_mode
        self.st_uid = found.st_uid + 1


def test_a_directory_that_vanishes_under_a_newcomer_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the run that made it ends in that moment."""
    real, chances = attempts.find_place, [True]

    def vanishing(path: Path) -> Path:
        place = real(path)
        if chances:
            chances.pop()
            attempts.remove_place(place)
        return place

    monkeypatch.setattr(attempts, "find_place", vanishing)
    head = find(tmp_path / "sync")
    assert head.is_head
    head.close()
    assert entries(tmp_path) == []


# Hearts.


def test_a_heart_counts_once_a_second_and_only_its_key_reads_it(tmp_path: Path) -> None:
    clock = Clock()
    beating = Heart(tmp_path / "heart", KEY, now=clock.now)
    counts = []
    for _ in range(6):
        beating.beat()
        counts.append(read_pulse(tmp_path / "heart", KEY))
        clock.sleep(0.5)
    assert counts == [1, 1, 2, 2, 3, 3]
    assert read_pulse(tmp_path / "heart", b"x" * 32) is None
    raw = (tmp_path / "heart").read_bytes()
    (tmp_path / "heart").write_bytes(raw[:20])  # a reader in the middle of a write
    assert read_pulse(tmp_path / "heart", KEY) is None
    assert read_pulse(tmp_path / "none", KEY) is None


def test_a_heart_that_cannot_beat_says_so_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    beating = Heart(tmp_path / "heart", KEY, now=clock.now)
    beating.beat()
    (tmp_path / "heart").unlink()
    with caplog.at_level(logging.WARNING, logger=heart.__name__):
        for _ in range(3):
            clock.sleep(2)
            beating.beat()
    assert len(caplog.records) == 1
    assert entries(tmp_path) == []  # it made no new one
