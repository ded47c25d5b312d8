"""Which checkpoints are kept: as long as any one of a checkpoint's kinds keeps it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetseq.checkpoint import Identity, Retention
from hetseq.checkpoint.directory import scan
from hetseq.checkpoint.records import Attempt
from hetseq.checkpoint.retention import superseded
from tests.support.checkpoints import LINEAGE, Disk, contents, folder, loaded_step, manager, save


def kept(commits: list[tuple[int, str]], retention: Retention, *, generation: int = 0) -> list[int]:
    """The steps that stay of (step, kinds) in any order."""
    newest_first = [
        Attempt("run", Identity(step, 0, LINEAGE), 0, tuple(kinds.split()), "", 1)
        for step, kinds in sorted(commits)[::-1]
    ]
    goes = superseded(newest_first, retention, generation=generation)
    assert goes == sorted(goes, reverse=True)  # the oldest is deleted first
    return [newest_first[index].identity.step for index in range(len(commits)) if index not in goes][::-1]


EPOCHS = [(step, "epoch") for step in range(1, 7)]


@pytest.mark.parametrize(
    ("retention", "commits", "stay"),
    [
        (Retention(), EPOCHS, [1, 2, 3, 4, 5, 6]),
        (Retention(keep_last_epochs=2), EPOCHS, [5, 6]),
        (Retention(keep_last_epochs=0), EPOCHS, [6]),
        (Retention(keep_interval_updates=2), EPOCHS, [1, 2, 3, 4, 5, 6]),
        (Retention(keep_interval_updates=1), [(1, "interval"), (2, "interval"), (3, "epoch")], [2, 3]),
        (Retention(), [(1, "time"), (2, "final"), (3, "signal"), (4, "time")], [3, 4]),
        (Retention(keep_timed=-1), [(1, "time"), (2, "final"), (3, "signal")], [1, 2, 3]),
        (Retention(), [(1, "best"), (2, "best"), (3, "epoch")], [2, 3]),
        (Retention(keep_last_epochs=1), [(1, "epoch best"), (2, "epoch"), (3, "epoch")], [1, 3]),
        (Retention(keep_last_epochs=1), [(1, "epoch time"), (2, "epoch"), (3, "time"), (4, "time")], [2, 3, 4]),
        (Retention(keep_timed=0), [(1, "time"), (2, "time")], [2]),
        (Retention(keep_interval_updates=1, keep_every=3), [(n, "interval") for n in range(1, 9)], [3, 6, 8]),
        (Retention(keep_every=4), [(4, "time"), (5, "time"), (6, "time"), (7, "time"), (8, "signal")], [4, 7, 8]),
        (Retention(), [], []),
    ],
)
def test_a_checkpoint_stays_while_one_of_its_kinds_keeps_it(
    retention: Retention, commits: list[tuple[int, str]], stay: list[int]
) -> None:
    assert kept(commits, retention) == stay


@pytest.mark.parametrize(
    ("commits", "stay"),
    [
        ([(n, "epoch ~") for n in range(1, 6)], [4, 5]),
        ([(1, "best ~"), (2, "best time ~"), (3, "epoch ~"), (4, "time ~"), (5, "final ~")], [2, 4, 5]),
        # those of starts that kept more, or of before this rule, are never deleted
        ([(1, "epoch"), (2, "best"), (3, "time"), (4, "epoch ~"), (5, "best ~"), (6, "time ~"), (7, "time ~")],
         [1, 2, 3, 5, 6, 7]),
        ([(1, "epoch ~"), (2, "epoch ~"), (3, "epoch")], [2, 3]),
    ],
)  # fmt: skip
def test_where_no_option_speaks_of_saving_the_newest_two_and_the_best_stay(
    commits: list[tuple[int, str]], stay: list[int]
) -> None:
    """`~`: written by a start that followed this rule."""
    newest_first = [
        Attempt("run", Identity(step, 0, LINEAGE), 0, tuple(kinds.strip(" ~").split()), "", 1, "~" in kinds)
        for step, kinds in sorted(commits)[::-1]
    ]
    goes = superseded(newest_first, Retention(keep_newest=2), generation=0)
    assert [newest_first[index].identity.step for index in range(len(commits)) if index not in goes][::-1] == stay


def test_only_a_start_under_this_rule_marks_its_checkpoints_and_deletes_them(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        assert save(tmp_path, step, kinds=["epoch"], retention=Retention()).ok
    for step in (4, 5, 6, 7):
        assert save(tmp_path, step, kinds=["epoch"], retention=Retention(keep_newest=2)).ok
    commits = scan(tmp_path / "checkpoints").commits
    assert [(commit.identity.step, commit.is_prunable) for commit in commits] == [
        (7, True), (6, True), (3, False), (2, False), (1, False),
    ]  # fmt: skip
    assert '"prunable"' not in (commits[-1].path / "state.json").read_text()  # the format of before


@pytest.mark.parametrize(
    ("commits", "stay"),
    [
        ([(1, "best"), (2, "best"), (4, "best"), (5, "best"), (6, "time")], [2, 5, 6]),
        ([(1, "best"), (2, "best"), (4, "time"), (5, "time"), (6, "time")], [2, 5, 6]),
    ],
)
@pytest.mark.parametrize("keep_newest", [None, 2])
def test_the_best_of_before_the_best_metric_was_forgotten_stays(
    commits: list[tuple[int, str]], stay: list[int], keep_newest: int | None
) -> None:
    newest_first = [
        Attempt("run", Identity(step, 0, LINEAGE), 0, tuple(kinds.split()), "", 1, True)
        for step, kinds in sorted(commits)[::-1]
    ]
    goes = superseded(newest_first, Retention(keep_newest=keep_newest, reset_step=3), generation=0)
    assert [newest_first[index].identity.step for index in range(len(commits)) if index not in goes][::-1] == stay


def test_a_manager_keeps_the_best_of_before_for_good(tmp_path: Path) -> None:
    for step in (1, 2, 4, 5):
        own = manager(tmp_path, retention=Retention(keep_newest=1))
        own.keep_best_until(3)
        assert own.save({}, {}, identity=Identity(step, 0, LINEAGE), nonce=step, kinds=["best"]).ok
    assert [commit.identity.step for commit in manager(tmp_path).list()] == [5, 2]


def test_a_newer_generation_is_not_ours_to_delete() -> None:
    commits = [Attempt("run", Identity(step, 3, LINEAGE), 0, ("time",), "", 1) for step in (4, 3, 2, 1)]
    assert superseded(commits, Retention(), generation=2) == []
    assert superseded(commits, Retention(), generation=3) == [3, 2]


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="keep_timed -2"):
        Retention(keep_timed=-2)


def test_old_checkpoints_leave_nothing_behind(tmp_path: Path) -> None:
    for step in range(1, 6):
        assert save(tmp_path, step, kinds=["time"]).ok
    assert {name[:14] for name in contents(tmp_path)} == {"step-000000004", "step-000000005"}
    assert loaded_step(tmp_path) == 5


def test_a_checkpoint_that_was_just_promised_stays_though_later_steps_are_there(tmp_path: Path) -> None:
    for step in (8, 9, 3):  # a run that has gone back to step 2
        assert save(tmp_path, step, kinds=["time"]).ok
    assert loaded_step(tmp_path, "3") == 3


def test_deletion_takes_the_commit_first_and_for_good(tmp_path: Path) -> None:
    save(tmp_path, 1, kinds=["time"])
    save(tmp_path, 2, kinds=["time"])
    old = folder(tmp_path, 1)
    order: list[str] = []

    def note(number: int, name: str) -> bool:
        order.append(name)
        return False

    with Disk(old, note, lambda *_: None).between():
        save(tmp_path, 3, kinds=["time"])
    assert not old.exists()
    removal = order[order.index("unlink") :]
    assert removal[:4] == ["unlink", "open", "fsync", "close"]  # COMMIT.json, and its absence on the disk
    assert removal.count("unlink") == 4


def test_a_folder_that_cannot_be_deleted_spoils_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        save(tmp_path, step, kinds=["time"])
    (folder(tmp_path, 1) / "notes of mine").mkdir()
    assert save(tmp_path, 3, kinds=["time"]).ok
    assert "could not be deleted" in caplog.text
    assert os.listdir(folder(tmp_path, 1)) == ["notes of mine"]
    assert [commit.identity.step for commit in manager(tmp_path).list()] == [3, 2]
