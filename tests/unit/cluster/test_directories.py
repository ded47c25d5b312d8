"""Two launchers, one directory or two: what tells, and which run it is."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hetseq.cluster.membership import run_directory_discovery as directories
from hetseq.cluster.membership.run_directory_discovery import (
    FoundDirectories,
    Mark,
    choose_run_id,
    has_commits,
    is_local,
    leave_mark,
    newest_step,
    remove_mark,
    sees,
)
from hetseq.errors import RunDirectoryError
from hetseq.run_directory import MARKER, RunDirectory

ID_A, ID_B = "a" * 16, "b" * 16


class Clock:
    """Time that passes only while somebody waits; `at` calls something when it is that late."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.plans: list[tuple[float, Callable[[], object]]] = []

    def at(self, second: float, action: Callable[[], object]) -> None:
        self.plans.append((second, action))

    def pause(self, seconds: float) -> None:
        self.now_s += seconds
        for plan in [plan for plan in self.plans if plan[0] <= self.now_s]:
            self.plans.remove(plan)
            plan[1]()

    def now(self) -> float:
        return self.now_s


def look(mark: Mark, clock: Clock) -> bool:
    return sees(mark, pause=clock.pause, now=clock.now)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def owned(tmp_path: Path) -> RunDirectory:
    return RunDirectory.prepare(tmp_path / "new" / "run", config_yaml="seed: 1\n")


@pytest.fixture
def on_nfs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every path lies on a network file system."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text("22 1 0:20 / / rw - nfs4 server:/ rw\n")
    monkeypatch.setattr(directories, "_MOUNTS", mounts)


# The mark.


def test_the_same_directory_is_seen_at_once_and_nothing_is_left(owned: RunDirectory, clock: Clock) -> None:
    before = sorted(os.listdir(owned.path))
    mark = leave_mark(owned)
    assert look(Mark(**json.loads(json.dumps(dataclasses.asdict(mark)))), clock)
    remove_mark(mark)
    remove_mark(mark)
    assert sorted(os.listdir(owned.path)) == before
    assert clock.now_s == 0.0


def test_another_directory_under_the_same_path_is_not_it(owned: RunDirectory, clock: Clock) -> None:
    mark = leave_mark(owned)
    (owned.path / mark.name).unlink()  # as another node's disk shows the path
    assert not look(mark, clock)
    (owned.path / mark.name).write_text("0" * 32)
    assert not look(mark, clock)
    (owned.path / mark.name).write_text(mark.content)
    assert look(mark, clock)  # the twin


def test_a_link_is_not_a_mark(owned: RunDirectory, clock: Clock, tmp_path: Path) -> None:
    mark = leave_mark(owned)
    (owned.path / mark.name).rename(tmp_path / "elsewhere")
    (owned.path / mark.name).symlink_to(tmp_path / "elsewhere")
    assert not look(mark, clock)


@pytest.mark.parametrize("name", ["", "../run/.mark-" + "0" * 32, ".mark-0", "config.yaml"])
def test_a_mark_that_names_no_mark_is_not_looked_for(name: str, owned: RunDirectory, clock: Clock) -> None:
    mark = leave_mark(owned)
    content = (owned.path / "config.yaml").read_text()
    assert not look(dataclasses.replace(mark, name=name, content=content), clock)
    assert not look(dataclasses.replace(mark, path="relative"), clock)
    assert clock.now_s == 0.0


@pytest.mark.usefixtures("on_nfs")
def test_a_file_that_shows_late_on_a_network_is_waited_for(owned: RunDirectory, clock: Clock) -> None:
    mark = leave_mark(owned)
    (owned.path / mark.name).unlink()
    clock.at(14.0, lambda: (owned.path / mark.name).write_text(mark.content))
    assert look(mark, clock)
    assert 14.0 <= clock.now_s < 14.5


@pytest.mark.usefixtures("on_nfs")
def test_a_file_that_never_shows_is_given_up_after_fifteen_seconds(owned: RunDirectory, clock: Clock) -> None:
    mark = leave_mark(owned)
    (owned.path / mark.name).unlink()
    assert not look(mark, clock)
    assert 15.0 <= clock.now_s < 15.5


def test_on_a_disk_of_this_node_alone_nobody_waits(
    owned: RunDirectory, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mountinfo").write_text("22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n")
    monkeypatch.setattr(directories, "_MOUNTS", tmp_path / "mountinfo")
    mark = leave_mark(owned)
    (owned.path / mark.name).unlink()
    assert not look(mark, clock)
    assert clock.now_s == 0.0


@pytest.mark.usefixtures("on_nfs")
def test_nobody_waits_where_an_older_folder_of_the_path_is_missing(owned: RunDirectory, clock: Clock) -> None:
    mark = leave_mark(owned)
    assert mark.standing == str(owned.path.parents[1])  # the other two are new, and may show late
    elsewhere = dataclasses.replace(mark, path="/scratch-of-another-node/run", standing="/scratch-of-another-node")
    assert not look(elsewhere, clock)
    assert clock.now_s == 0.0
    assert not look(dataclasses.replace(elsewhere, standing="/"), clock)  # the twin: waits
    assert clock.now_s >= 15.0


def test_a_directory_that_may_only_be_read_is_not_shared(
    owned: RunDirectory, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mark, real = leave_mark(owned), directories.open_private

    def read_only(path: Path, flags: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(30, "Read-only file system")
        return real(path, flags)

    monkeypatch.setattr(directories, "open_private", read_only)
    assert not look(mark, clock)
    assert "Read-only file system" in caplog.text


def test_marks_of_a_killed_launcher_are_swept(owned: RunDirectory) -> None:
    leave_mark(owned)
    mark = leave_mark(owned)
    assert [name for name in os.listdir(owned.path) if name.startswith(".mark-")] == [mark.name]


# Mounts.

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /nfs rw - nfs4 server:/nfs rw,vers=4.2
31 30 0:41 / /nfs/fast rw - tmpfs tmpfs rw
32 22 0:42 / /my\\040data rw master:3 - lustre mgs:/data rw
33 22 0:43 / /once rw - xfs /dev/sdb rw
34 33 0:44 / /once rw - fuse.sshfs host: rw
35 22 0:45 / /containers rw - overlay overlay rw
36 22 0:46 / /odd rw - something-new x rw
not a line of this file
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", True),
        ("/nfs-not", True),  # begins with the letters of a mount and lies on another
        ("/nfs", False),
        ("/nfs/run", False),
        ("/nfs/fast/run", True),
        ("/my data/run", False),
        ("/once/run", False),  # mounted over
        ("/containers/a", True),
        ("/odd/run", False),  # of unknown kind: it might be shared
    ],
)
def test_which_paths_lie_on_this_node_alone(path: str, expected: bool) -> None:
    assert is_local(path, MOUNTS) is expected


def test_without_mounts_a_path_may_be_shared() -> None:
    assert not is_local("/run", "")


# Commits.


def commit(directory: RunDirectory, step: int, *, is_whole: bool = True) -> None:
    folder = directory.checkpoints / f"step-{step:09d}.{step:016x}"
    folder.mkdir()
    if is_whole:
        (folder / "COMMIT.json").write_text("{}")


def test_what_was_never_committed_does_not_count(owned: RunDirectory, tmp_path: Path) -> None:
    assert newest_step(RunDirectory(tmp_path / "nowhere")) is None
    commit(owned, 30, is_whole=False)
    assert not has_commits(owned)
    commit(owned, 20)
    commit(owned, 9)
    (owned.checkpoints / "step-000000040.copy").mkdir()
    assert newest_step(owned) == 20
    assert has_commits(owned)


# FAULT: the launcher looked into all of them, also into the newest, in which a writer hung on a mount that did not
# answer; so it hung there too, after the run had ended (tests/chaos/test_unkillable.py)
def test_a_folder_in_which_a_writer_may_hang_is_looked_into_last(
    owned: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (9, 20):
        commit(owned, step)
    commit(owned, 30, is_whole=False)
    looked_into: list[int] = []

    def lexists(path: Path) -> bool:
        looked_into.append(int(path.parent.name[5:14]))
        return path.exists()

    monkeypatch.setattr("os.path.lexists", lexists)
    assert has_commits(owned)
    assert looked_into == [9]
    assert newest_step(owned) == 20
    assert looked_into[1:] == [30, 20]


# Which run.


def found(host: str, run_id: str, newest: int | None) -> FoundDirectories:
    return FoundDirectories(host, f"/scratch/{host}", run_id, newest)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([found("one", ID_A, None)], ID_A),
        ([found("one", ID_A, None), found("two", ID_B, None)], ID_A),  # all new: that of rank zero
        ([found("one", ID_A, None), found("two", ID_B, 7)], ID_B),  # rank zero's was lost
        ([found("one", ID_A, 7), found("two", ID_B, None)], ID_A),
        ([found("one", ID_A, 7), found("two", ID_B, None), found("three", ID_A, 5)], ID_A),
    ],
)
def test_a_directory_without_a_commit_takes_the_id_of_the_others(places: list[FoundDirectories], expected: str) -> None:
    assert choose_run_id(places) == (expected, None)


def test_checkpoints_of_two_runs_are_a_disagreement_that_names_both() -> None:
    places = [found("new", "c" * 16, None), found("labA", ID_A, 7), found("labC", ID_A, 6), found("labB", ID_B, 40)]
    _, told = choose_run_id(places)
    assert told is not None
    for part in ("labA", "/scratch/labA", ID_A, "step 7", "labB", "/scratch/labB", ID_B, "step 40", "--save-dir"):
        assert part in told
    assert "new" not in told.replace("another", "")
    assert choose_run_id(places[:3]) == (ID_A, None)  # the twin


# The directory takes the id of another one.


def test_a_new_directory_takes_the_id_of_the_run_and_keeps_it(tmp_path: Path) -> None:
    directory = RunDirectory.prepare(tmp_path, config_yaml="seed: 1\n")
    before = directory.run_id
    with directory.lock():
        adopted = directory.adopt_run_id(ID_A)
        assert RunDirectory(tmp_path).run_id == ID_A != before
        adopted.adopt_config()
    assert (tmp_path / "config.yaml").read_text().splitlines()[1:] == ["seed: 1"]
    again = RunDirectory.prepare(tmp_path, config_yaml="seed: 2\n")
    assert again.run_id == ID_A
    with again.lock():
        assert again.adopt_run_id(ID_A) is again


def test_taking_an_id_leaves_the_configuration_of_an_earlier_start_until_all_are_ready(tmp_path: Path) -> None:
    RunDirectory.prepare(tmp_path, config_yaml="seed: 1\n")
    directory = RunDirectory.prepare(tmp_path, config_yaml="seed: 2\n")
    with directory.lock():
        directory = directory.adopt_run_id(ID_A)
        head, *rest = (tmp_path / "config.yaml").read_text().splitlines()
        assert head.startswith(f"{MARKER}, run id {ID_A}")
        assert rest == ["seed: 1"]
        directory.adopt_config()
        head, *rest = (tmp_path / "config.yaml").read_text().splitlines()
        assert head.startswith(f"{MARKER}, run id {ID_A}")
        assert rest == ["seed: 2"]


def test_who_shares_a_directory_changes_no_configuration(tmp_path: Path) -> None:
    RunDirectory.prepare(tmp_path, config_yaml="seed: 1\n")
    before = (tmp_path / "config.yaml").read_bytes()
    RunDirectory(tmp_path).adopt_config()
    assert (tmp_path / "config.yaml").read_bytes() == before


def test_a_disk_that_does_not_take_the_id_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory.prepare(tmp_path, config_yaml="")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hetseq.run_directory.replace_file", full)
    with pytest.raises(RunDirectoryError, match="no space is left"):
        directory.adopt_run_id(ID_A)
