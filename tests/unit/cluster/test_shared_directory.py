"""The store in a shared directory: one winner for every number, whole values or none, and nothing of a stranger."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetseq.cluster.rendezvous import file_store as shared_directory
from hetseq.cluster.rendezvous.file_store import CONTENT_LIMIT_BYTES, DirectoryGone, SharedDirectory, Version
from hetseq.cluster.rendezvous.process_identity import Process, this_machine
from tests.support.crashes import Crash, refuse_links
from tests.support.refusals import refusal

ROOT = Path(__file__).resolve().parents[3]
KEY = b"k" * 32
DEAD = Process(this_machine(), 2**22 + 1, 1)  # a process id above what the kernel hands out

APPENDER = """
import os, sys
from pathlib import Path
from hetseq.cluster.rendezvous.file_store import SharedDirectory

def refuse(*_):
    raise OSError(1, "no links here")

if sys.argv[2] == "mkdir":
    os.link = refuse
directory = SharedDirectory.open(Path(sys.argv[1]), b"k" * 32)
sys.stdin.readline()
for number in range(100):
    directory.append("count", f"{sys.argv[3]} {number}".encode())
"""


@pytest.fixture(params=["link", "mkdir"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedDirectory:
    if request.param == "mkdir":
        refuse_links(monkeypatch, errno.EPERM)
    return SharedDirectory.open(make(tmp_path / "shared"), KEY)


def make(path: Path) -> Path:
    path.mkdir(mode=0o700)
    return path


def entries(path: Path) -> list[str]:
    return sorted(os.listdir(path))


# Values.


def test_the_first_to_publish_wins_and_all_read_its_value(store: SharedDirectory) -> None:
    other = SharedDirectory.open(store.path, KEY)
    assert store.read("head") is None
    assert store.newest("head") is None
    assert [store.publish("head", b"one"), other.publish("head", b"two")] == [True, False]
    assert [store.read("head"), other.read("head")] == [b"one", b"one"]
    assert stat.S_IMODE((store.path / "head.1").stat().st_mode) == 0o600


def test_versions_are_numbered_and_the_newest_is_read(store: SharedDirectory) -> None:
    assert [store.append("log", b"a"), store.append("log", b""), store.append("log", b"c")] == [1, 2, 3]
    assert SharedDirectory.open(store.path, KEY).append("log", b"d") == 4
    assert list(store.versions("log")) == [Version(1, b"a"), Version(2, b""), Version(3, b"c"), Version(4, b"d")]
    assert store.read("log") == b"d"
    assert store.listed("log") == [1, 2, 3, 4]


def test_a_removed_number_leaves_nothing_and_can_be_won_again(store: SharedDirectory) -> None:
    store.append("log", b"a")
    store.remove("log", 1)
    store.remove("log", 1)
    assert entries(store.path) == []
    assert store.publish("log", b"b")


@pytest.mark.parametrize("name", ["", ".", "..", "a.1", "a/b", "../a", "-a", "a\0", "a\n", "x" * 101])
def test_a_name_that_could_mean_another_file_is_refused(store: SharedDirectory, name: str) -> None:
    with pytest.raises(ValueError, match="no name"):
        store.publish(name, b"")
    with pytest.raises(ValueError, match="no name"):
        store.read(name)


def test_waiting_ends_with_the_value_or_with_words(store: SharedDirectory) -> None:
    clock = Clock()
    clock.at(3.0, lambda: store.publish("head", b"here"))
    assert store.wait("head", deadline_s=clock.now() + 10, now=clock.now, sleep=clock.sleep) == b"here"
    assert 3.0 <= clock.passed_s < 3.2
    refusal(
        lambda: store.wait("never", deadline_s=clock.now() + 7, now=clock.now, sleep=clock.sleep),
        "never.1 did not appear",
        "within 7 s",
    )


class Clock:
    """A clock that only sleeping moves; `at` has something happen then."""

    def __init__(self) -> None:
        self.passed_s = 0.0
        self._events: list[tuple[float, Callable[[], object]]] = []

    def now(self) -> float:
        return 1000.0 + self.passed_s

    def sleep(self, seconds: float) -> None:
        self.passed_s += seconds
        while self._events and self._events[0][0] <= self.passed_s:
            self._events.pop(0)[1]()

    def at(self, seconds: float, event: Callable[[], object]) -> None:
        self._events.append((seconds, event))


# Contention.


@pytest.mark.slow
@pytest.mark.parametrize("step", ["link", "mkdir"])
def test_four_processes_append_a_hundred_values_each_and_none_is_lost(tmp_path: Path, step: str) -> None:
    path = make(tmp_path / "shared")
    command = [sys.executable, "-c", APPENDER, str(path), step]
    writers = [
        subprocess.Popen([*command, str(writer)], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        for writer in range(4)
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    # read while they write: whole values in one order, never a part
    store, seen = SharedDirectory.open(path, KEY), 0
    while any(writer.poll() is None for writer in writers):
        newest = store.read("count")
        assert newest is None or len(newest.split()) == 2
        now_seen = sum(1 for version in store.versions("count") if version.content)
        assert now_seen >= seen
        seen = now_seen
    assert [writer.communicate()[1] for writer in writers] == [""] * 4
    values = [version.content.decode() for version in store.versions("count") if version.content is not None]
    assert sorted(values) == sorted(f"{writer} {number}" for writer in range(4) for number in range(100))
    for writer_number in range(4):  # each writer's own in its order
        own = [value for value in values if value.startswith(f"{writer_number} ")]
        assert own == [f"{writer_number} {number}" for number in range(100)]
    assert not [entry for entry in entries(path) if entry.startswith(".")]


# Crashes.


def test_a_writer_killed_at_any_call_leaves_the_old_value_or_the_whole_new_one(
    store: SharedDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append("log", b"old")
    at, outcomes = 0, set()
    while True:
        at += 1
        with Crash(at=at, half=True).installed() as crash, monkeypatch.context() as patch:
            patch.setattr(shared_directory, "this_process", lambda: DEAD)
            SharedDirectory(store.path, KEY).append("log", b"new")
        outcomes.add(store.read("log"))
        number = SharedDirectory(store.path, KEY).append("log", b"next")
        assert store.read("log") == b"next"
        for left in range(2, number + 1):
            store.remove("log", left)
        store.sweep()
        assert [entry for entry in entries(store.path) if entry.startswith((".", "log.2", "log.3"))] == []
        if crash.calls < at:
            break
    assert outcomes == {b"old", b"new"}
    assert at >= 6


def test_a_writer_killed_between_mkdir_and_rename_is_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_links(monkeypatch, errno.EPERM)
    store = SharedDirectory.open(make(tmp_path / "shared"), KEY)
    os.mkdir(store.path / "log.1.d")
    assert store.newest("log") == Version(1, None)
    assert store.read("log") is None
    assert not store.publish("log", b"late")
    clock = Clock()
    refusal(lambda: store.wait("log", deadline_s=clock.now(), now=clock.now, sleep=clock.sleep), "log.1.d", "remove it")
    assert store.append("log", b"a") == 2
    assert store.read("log") == b"a"
    store.remove("log", 1)
    assert entries(store.path) == ["log.2", "log.2.d"]


def test_drafts_of_killed_writers_are_swept_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    store = SharedDirectory.open(make(tmp_path / "shared"), KEY)
    machine, me = this_machine(), os.getpid()
    living = shared_directory.this_process()
    keep = [f".draft-{machine}-{me}-{living.start}-aa", ".draft-feed-1-1-bb", ".draft--1-1-dd", ".draftsman", "notes"]
    for name in [*keep, f".draft-{machine}-{me}-{living.start + 1}-aa", ".draft-feed-1-1-cc"]:
        (store.path / name).touch()
    os.utime(store.path / ".draft-feed-1-1-cc", (1, 1))  # another machine's, and old by the file system's own clock
    store.sweep()
    assert entries(store.path) == sorted(keep)


# Replies that get lost.


@pytest.mark.parametrize("number", [errno.EEXIST, errno.EIO, errno.ETIMEDOUT, errno.EPERM])
def test_a_lost_reply_of_link_still_is_a_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    store = SharedDirectory.open(make(tmp_path / "shared"), KEY)
    real = os.link

    def lose_the_reply(*args: Any) -> None:
        real(*args)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", lose_the_reply)
    assert store.publish("head", b"mine")
    monkeypatch.undo()
    assert store.read("head") == b"mine"
    assert not store.publish("head", b"other")  # the twin: EEXIST without two links
    assert entries(store.path) == ["head.1"]


def test_a_lost_reply_of_rename_still_is_a_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SharedDirectory.open(make(tmp_path / "shared"), KEY)
    refuse_links(monkeypatch, errno.ENOSYS)
    real = os.rename

    def lose_the_reply(*args: Any) -> None:
        real(*args)
        raise OSError(errno.ENOENT, "sent twice")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lose_the_reply)
        assert store.publish("head", b"mine")
    assert store.read("head") == b"mine"


def test_a_lost_reply_of_mkdir_makes_no_two_winners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SharedDirectory.open(make(tmp_path / "shared"), KEY)
    refuse_links(monkeypatch, errno.ENOTSUP)
    real = os.mkdir

    def lose_the_reply(*args: Any) -> None:
        real(*args)
        raise FileExistsError(errno.EEXIST, "sent twice")

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", lose_the_reply)
        assert not store.publish("head", b"mine")
    assert not store.publish("head", b"other")
    assert store.append("head", b"third") == 2
    assert store.read("head") == b"third"


def test_a_node_that_may_link_and_one_that_may_not_do_not_both_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SharedDirectory.open(make(tmp_path / "shared"), KEY)
    assert store.publish("head", b"linked")
    refuse_links(monkeypatch, errno.EMLINK)
    assert not store.publish("head", b"renamed")
    assert store.read("head") == b"linked"
    assert entries(store.path) == ["head.1"]


# What others planted.


def test_a_value_with_another_key_name_or_number_is_refused(tmp_path: Path) -> None:
    store = SharedDirectory.open(make(tmp_path / "shared"), KEY)
    store.append("head", b"one")
    refusal(lambda: SharedDirectory(store.path, b"x" * 32).read("head"), "head.1", "another secret")
    raw = (store.path / "head.1").read_bytes()
    for name in ("head.2", "tail.1"):  # replayed elsewhere
        (store.path / name).write_bytes(raw)
        refusal(lambda name=name: store.read(name.split(".")[0]), name, "secret")  # type: ignore[misc]


@pytest.mark.parametrize("flip", [0, 31, 32, -1])
def test_a_changed_byte_is_refused(tmp_path: Path, flip: int) -> None:
    store = SharedDirectory.open(make(tmp_path / "shared"), KEY)
    store.publish("head", b"value")
    raw = bytearray((store.path / "head.1").read_bytes())
    raw[flip] ^= 1
    (store.path / "head.1").write_bytes(raw)
    refusal(lambda: store.read("head"), "head.1")


def plant_link(file: Path) -> None:
    target = file.with_name("target")
    target.write_bytes(b"x" * 64)
    file.symlink_to(target)


def plant_huge(file: Path) -> None:
    with file.open("wb") as hole:
        hole.truncate(1 << 40)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (lambda file: file.touch(), "secret"),
        (lambda file: file.write_bytes(b"junk" * 100), "secret"),
        (plant_link, "is a link"),
        (lambda file: file.symlink_to("/nowhere"), "is a link"),
        (plant_huge, "1099511627776 bytes"),
        (os.mkfifo, "not a regular file"),
        (os.mkdir, "not a regular file"),
    ],
)
def test_what_was_planted_in_place_of_a_value_is_refused(
    tmp_path: Path, plant: Callable[[Path], None], words: str
) -> None:
    store = SharedDirectory.open(make(tmp_path / "shared"), KEY)
    plant(store.path / "head.1")
    refusal(lambda: store.read("head"), str(store.path / "head.1"), words)
    assert not store.publish("head", b"mine")


def test_the_largest_value_fits_and_one_byte_more_does_not(tmp_path: Path) -> None:
    store = SharedDirectory.open(make(tmp_path / "shared"), KEY)
    content = bytes(CONTENT_LIMIT_BYTES)
    assert store.publish("big", content)
    assert store.read("big") == content
    with pytest.raises(ValueError, match="at most"):
        store.publish("bigger", content + b"x")


# Directories.


@pytest.mark.parametrize("loose", [0o770, 0o702, 0o777, 0o1777])
def test_a_directory_that_others_may_write_to_is_refused_with_the_remedy(tmp_path: Path, loose: int) -> None:
    path = make(tmp_path / "shared")
    path.chmod(loose)
    refusal(lambda: SharedDirectory.open(path, KEY), f"chmod go-w {path}", f"{loose:04o}")
    assert entries(path) == []


def test_a_directory_that_others_may_only_read_is_used(tmp_path: Path) -> None:
    path = make(tmp_path / "shared")
    path.chmod(0o755)
    assert SharedDirectory.open(path, KEY).publish("head", b"x")


def test_the_owner_is_judged_by_a_file_made_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "shared")
    monkeypatch.setattr(os, "getuid", lambda: 4711)  # squashed by the server: all files belong to somebody else
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    SharedDirectory.open(path, KEY)
    real = os.lstat

    def somebody(file: Any, **options: Any) -> os.stat_result:
        found = list(real(file, **options))
        found[stat.ST_UID] += 1
        return os.stat_result(found)

    monkeypatch.setattr(os, "lstat", somebody)
    refusal(lambda: SharedDirectory.open(path, KEY), str(path), "belongs to user id", "not to you")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EACCES, "you may not"),
        (errno.EROFS, "read-only"),
        (errno.ENOSPC, "no space"),
        (errno.EDQUOT, "quota"),
        (errno.EIO, "mount fails"),
    ],
)
@pytest.mark.parametrize("call", ["open", "fsync"])
def test_trouble_with_the_file_system_is_said_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, words: str
) -> None:
    store = SharedDirectory.open(make(tmp_path / "shared"), KEY)

    def fail(*_: Any, **__: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        refusal(lambda: store.publish("head", b"x"), str(store.path), words)
    assert entries(store.path) == []


def test_a_directory_that_vanished_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(DirectoryGone):
        SharedDirectory.open(tmp_path / "gone", KEY)
    assert SharedDirectory(tmp_path / "gone", KEY).read("head") is None


def test_a_stale_handle_of_nfs_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SharedDirectory.open(make(tmp_path / "shared"), KEY)
    store.publish("head", b"x")
    real, stale = os.open, [True, True]

    def sometimes_stale(*args: Any, **options: Any) -> int:
        if stale:
            stale.pop()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(*args, **options)

    monkeypatch.setattr(os, "open", sometimes_stale)
    assert store.read("head") == b"x"


def test_an_own_folder_is_made_and_cleared(store: SharedDirectory) -> None:
    folder = store.folder("attempt", b"other key")
    folder.make()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.append("log", b"a")
    folder.append("log", b"b")
    (folder.path / "heart").touch()
    folder.clear()
    folder.clear()
    assert entries(store.path) == []
