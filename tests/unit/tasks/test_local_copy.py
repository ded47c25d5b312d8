"""`--local-copy`: files of records on a disk of the node, whole or not there, whoever copies and however that ends."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetseq import DataError
from hetseq import config as options
from hetseq.cluster.membership.compatibility import option_fields
from hetseq.commands import evaluate
from hetseq.registry import find_task
from hetseq.run.fingerprint import _data_files
from hetseq.task import make_task
from hetseq.tasks.options import BertOptions, GptOptions
from hetseq.tasks.rows import local_copy
from hetseq.tasks.rows.local_copy import LocalCopy
from hetseq.tasks.rows.record_index import File, read_index
from tests.support import bert, bert_records, gpt_records

_FORK = multiprocessing.get_context("fork")
_PATIENCE_S = 60.0  # with another process; only a broken one takes any of it


class Clock:
    """Time that passes while somebody pauses; then `meanwhile` happens."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.s, self.meanwhile = 0.0, meanwhile

    def now(self) -> float:
        return self.s

    def pause(self, seconds: float) -> None:
        self.s += seconds
        self.meanwhile()


def copies(folder: Path, clock: Clock) -> LocalCopy:
    return LocalCopy(folder, now=clock.now, pause=clock.pause)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = {"train": bert_records.make_rows(50), "test": bert_records.make_rows(9, seed=1)}
    return bert_records.write_folder(tmp_path / "data", rows_per_file=20, **rows)


@pytest.fixture
def files(data: Path) -> list[File]:
    return read_index(data).splits["train"].files_up_to(0)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def contents(files: list[File]) -> list[bytes]:
    return [file.path.read_bytes() for file in files]


def refusal(folder: Path, files: list[File]) -> str:
    with pytest.raises(DataError) as refused:
        LocalCopy(folder).of(files)
    return str(refused.value)


# What is there, and what is trusted


def test_files_are_copied_once_and_not_needed_afterwards(files: list[File], disk: Path) -> None:
    right, found = contents(files), LocalCopy(disk).of(files)
    assert contents(found) == right
    assert [file.path for file in found] == [
        disk / "hetseq-records" / file.sha256[:16] / file.path.name for file in files
    ]
    assert names_in(disk) == [file.path.name for file in files]  # and nothing unfinished
    assert [(file.rows, file.size, file.sha256) for file in found] == [
        (file.rows, file.size, file.sha256) for file in files
    ]
    for file in files:
        file.path.unlink()
    assert contents(LocalCopy(disk).of(files)) == right


def test_a_changed_corpus_does_not_use_the_old_copy(data: Path, files: list[File], disk: Path) -> None:
    LocalCopy(disk).of(files)
    content = bytearray(files[1].path.read_bytes())
    content[-1] ^= 1  # a label: names and sizes stay
    files[1].path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    bert_records.change_index(data, lambda facts: facts["splits"]["train"]["files"][1].update(sha256=digest))
    changed = read_index(data).splits["train"].files_up_to(0)
    assert [file.size for file in changed] == [file.size for file in files]
    assert contents(LocalCopy(disk).of(changed)) == contents(changed)
    assert len(names_in(disk)) == 4


def test_a_copy_that_is_not_of_its_size_is_made_again(files: list[File], disk: Path) -> None:
    found = LocalCopy(disk).of(files)
    os.truncate(found[1].path, 10)
    assert contents(LocalCopy(disk).of(files)) == contents(files)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), "has the sha256 "),
        (lambda content: content[:-8], " bytes, expected "),
        (lambda content: content + b"x", " bytes, expected "),
    ],
)
def test_a_damaged_file_is_named_and_never_becomes_a_copy(
    files: list[File], disk: Path, damage: Callable[[bytes], bytes], words: str
) -> None:
    files[1].path.write_bytes(damage(files[1].path.read_bytes()))
    said = refusal(disk, files)
    assert said.startswith(f"{files[1].path} has ")
    assert words in said
    assert said.endswith(" as in corpus.json; the file is damaged: copy the folder again, or make it again")
    assert names_in(disk) == [files[0].path.name]


def test_a_file_that_cannot_be_read_is_named(files: list[File], disk: Path) -> None:
    files[0].path.unlink()
    assert f"{files[0].path} cannot be read: No such file" in refusal(disk, files)
    assert names_in(disk) == []


# Room, and folders


def test_a_full_disk_is_told_before_anything_is_copied(
    files: list[File], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(file.size for file in files)
    usage = shutil.disk_usage(disk)
    for free in (needed - 1, needed):
        monkeypatch.setattr(local_copy.shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        if free < needed:
            said = refusal(disk, files)
            assert f"--local-copy {disk} has no room: the copies need {needed:,} more bytes, and {free:,} are" in said
            assert names_in(disk) == []
    found = LocalCopy(disk).of(files)  # the twin
    # what is there, or begun by somebody, needs no more room
    found[2].path.rename(found[2].path.with_name(local_copy._unfinished(found[2]).name))
    monkeypatch.setattr(local_copy.shutil, "disk_usage", lambda path: usage._replace(free=0))
    assert contents(LocalCopy(disk).of(files)) == contents(files)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_meanwhile_keeps_nothing_unfinished(
    files: list[File], disk: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write, left = os.write, 4

    def failing(handle: int, piece: Any) -> int:
        nonlocal left
        if (left := left - 1) < 0:
            raise OSError(number, os.strerror(number))
        return write(handle, piece[:1000])  # a disk may take less at a time

    with monkeypatch.context() as patch:
        patch.setattr(local_copy.os, "write", failing)
        said = refusal(disk, files)
    words = "cannot be used" if number == errno.EIO else "is full"
    assert f"--local-copy {disk} {words} ({os.strerror(number)})" in said
    assert "leave the option out" in said
    assert set(names_in(disk)) < {file.path.name for file in files}
    assert contents(LocalCopy(disk).of(files)) == contents(files)


def test_a_disk_that_takes_less_at_a_time_gets_all(
    files: list[File], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, write = Clock(), os.write

    def little(handle: int, piece: Any) -> int:
        clock.s += 1.0
        return write(handle, piece[:100])

    monkeypatch.setattr(local_copy.os, "write", little)
    found = copies(disk, clock).of(files)
    assert [file.copy_of for file in found] == [file.path for file in files]
    assert contents(found) == contents(files)


def test_a_folder_that_cannot_be_used_is_refused(
    files: list[File], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nowhere does not exist: expected a folder on a disk of this node; create it" in refusal(
        disk / "nowhere", files
    )
    (disk / "file").write_text("")
    assert "file is not a folder: expected a folder on a disk of this node" in refusal(disk / "file", files)
    (disk / "hetseq-records").write_text("")
    assert f"--local-copy {disk} cannot be used (File exists): expected a folder" in refusal(disk, files)
    (disk / "hetseq-records").unlink()

    def failing(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", failing)
    assert f"--local-copy {disk} cannot be used (No locks available)" in refusal(disk, files)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_may_not_be_written_to_is_refused(
    files: list[File], disk: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def failing(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "mkdir", failing)
    assert f"--local-copy {disk} cannot be used ({os.strerror(number)}): expected a folder" in refusal(disk, files)


def test_what_others_may_write_is_not_trained_on(
    files: list[File], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LocalCopy(disk).of(files)
    root = disk / "hetseq-records"
    assert root.stat().st_mode & 0o777 == 0o700
    root.chmod(0o777)
    assert "has mode 0777: expected a folder that only you may write to" in refusal(disk, files)
    root.chmod(0o755)
    LocalCopy(disk).of(files)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert f"{root} belongs to user id {root.stat().st_uid} and has mode 0755" in refusal(disk, files)


# Several processes


def copy_by_halves(files: list[File], disk: Path, line: Any) -> None:
    """In a process of its own: copy, and stop in the middle of each file until a word comes."""

    def halves(path: Path) -> Iterator[bytes]:
        content = path.read_bytes()
        yield content[:100]
        line.send("begun")
        line.recv()
        yield content[100:]

    local_copy._pieces = halves
    LocalCopy(disk).of(files)
    line.send("done")


def start(target: Callable[..., None], *arguments: Any) -> tuple[Any, Any]:
    ours, theirs = multiprocessing.Pipe()
    process = _FORK.Process(target=target, args=(*arguments, theirs))
    process.start()
    theirs.close()
    return process, ours


def heard(line: Any) -> Any:
    assert line.poll(_PATIENCE_S)
    return line.recv()


def reading_nothing(path: Path) -> Iterator[bytes]:
    raise AssertionError(f"{path} is read a second time")


def test_who_comes_second_waits_and_copies_nothing(
    files: list[File], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, line = start(copy_by_halves, files[:1], disk)
    assert heard(line) == "begun"
    seen = []

    def finish() -> None:
        seen.append(names_in(disk))
        line.send("go on")
        assert heard(line) == "done"

    monkeypatch.setattr(local_copy, "_pieces", reading_nothing)
    found = copies(disk, Clock(finish)).of(files[:1])
    process.join(_PATIENCE_S)
    line.close()
    assert process.exitcode == 0
    assert [name[0] for name in seen[0]] == ["."]  # not under its name until it was whole
    assert contents(found) == contents(files[:1])


def test_where_a_copier_was_killed_another_one_takes_over(files: list[File], disk: Path) -> None:
    process, line = start(copy_by_halves, files, disk)
    assert heard(line) == "begun"
    left = []

    def kill() -> None:
        process.kill()
        process.join(_PATIENCE_S)
        left.append({path.stat().st_size for path in disk.rglob(".unfinished*")})

    found = copies(disk, Clock(kill)).of(files)
    line.close()
    assert left == [{100}]
    assert contents(found) == contents(files)
    assert names_in(disk) == [file.path.name for file in files]


def test_what_a_process_has_left_unfinished_is_overwritten_however_long_it_is(files: list[File], disk: Path) -> None:
    unfinished = local_copy._unfinished(LocalCopy(disk)._copy_of(files[0]))
    unfinished.parent.mkdir(parents=True)
    unfinished.parent.parent.chmod(0o700)
    unfinished.write_bytes(bytes(files[0].size + 1))
    assert contents(LocalCopy(disk).of(files)) == contents(files)


def test_nodes_that_share_a_folder_by_mistake_do_not_write_into_one_file(
    files: list[File], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, line = start(copy_by_halves, files[:1], disk)
    assert heard(line) == "begun"
    monkeypatch.setattr(local_copy.socket, "gethostname", lambda: "labB")
    monkeypatch.setattr(fcntl, "flock", lambda handle, how: None)  # as where locks are local
    assert contents(copies(disk, Clock()).of(files[:1])) == contents(files[:1])
    line.send("go on")
    assert heard(line) == "done"
    process.join(_PATIENCE_S)
    line.close()
    assert contents([LocalCopy(disk)._copy_of(files[0])]) == contents(files[:1])
    assert names_in(disk) == [files[0].path.name]


def test_a_file_that_gets_its_name_while_it_is_being_locked_is_left_alone(
    files: list[File], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, copy, lock = files[0].path.read_bytes(), LocalCopy(disk)._copy_of(files[0]), fcntl.flock
    unfinished = local_copy._unfinished(copy)

    def finished_before(handle: int, how: int) -> None:
        if not copy.path.exists():
            unfinished.write_bytes(content)
            unfinished.rename(copy.path)
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", finished_before)
    monkeypatch.setattr(local_copy, "_pieces", reading_nothing)
    assert contents(copies(disk, Clock()).of(files[:1])) == [content]
    assert names_in(disk) == [copy.path.name]


def copy_until(call: str, left: int, files: list[File], disk: Path, line: Any) -> None:
    """In a process of its own: copy, and be killed at the call of `os` after `left` of them."""
    real = getattr(os, call)

    def killing(*arguments: Any) -> Any:
        nonlocal left
        if (left := left - 1) < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    setattr(os, call, killing)
    LocalCopy(disk).of(files)


@pytest.mark.parametrize("call", ["truncate", "write", "rename"])
@pytest.mark.parametrize("left", [0, 1])
def test_a_copier_that_is_killed_anywhere_leaves_only_what_is_whole(
    files: list[File], disk: Path, call: str, left: int
) -> None:
    process, line = start(copy_until, call, left, files, disk)
    process.join(_PATIENCE_S)
    line.close()
    assert process.exitcode == -signal.SIGKILL
    whole = {file.path.name: file.path.read_bytes() for file in files}
    there = {path.name: path.read_bytes() for path in disk.rglob("*.safetensors")}
    assert there == {name: whole[name] for name in list(whole)[:left]}
    assert contents(LocalCopy(disk).of(files)) == contents(files)
    assert names_in(disk) == sorted(whole)


def copy_beside(files: list[File], disk: Path, barrier: Any, line: Any) -> None:
    """In a process of its own, as soon as all are there: copy, and say what was read."""
    pieces, read = local_copy._pieces, []

    def counted(path: Path) -> Iterator[bytes]:
        read.append(path.name)
        return pieces(path)

    local_copy._pieces = counted
    barrier.wait(_PATIENCE_S)
    found = LocalCopy(disk).of(files)
    line.send((read, contents(found)))


def test_processes_that_begin_at_once_copy_each_file_once(data: Path, disk: Path) -> None:
    index = read_index(data)
    of_splits = [index.splits[name].files_up_to(0) for name in ("train", "test")]
    wanted = [of_splits[0], of_splits[0] + of_splits[1], of_splits[1] + of_splits[0], of_splits[0]]
    barrier = _FORK.Barrier(len(wanted))
    started = [start(copy_beside, files, disk, barrier) for files in wanted]
    told = [heard(line) for _, line in started]
    for process, line in started:
        process.join(_PATIENCE_S)
        line.close()
    assert [found for _, found in told] == [contents(files) for files in wanted]
    assert sorted(name for read, _ in told for name in read) == names_in(disk)
    assert len(names_in(disk)) == 4


# Time


def test_who_has_waited_long_enough_reads_the_files_themselves(
    files: list[File], disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    LocalCopy(disk).of(files[:1])
    process, line = start(copy_by_halves, files, disk)
    assert heard(line) == "begun"
    clock = Clock()
    found = copies(disk, clock).of(files)
    process.kill()
    process.join(_PATIENCE_S)
    line.close()
    assert clock.s == local_copy._PATIENCE_S
    assert [file.copy_of is not None for file in found] == [True, False, False]
    assert found[1:] == files[1:]
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    beside = [text for text in lines if text.startswith("100 bytes of ")]  # what another process has copied
    assert len(beside) == 119  # every 10 s until the 20 minutes are over
    assert f"after 20 minutes (another process was copying {files[1].path.name}) and are read from" in caplog.text
    assert "the next start resumes copying" in caplog.text
    assert contents(LocalCopy(disk).of(files)) == contents(files)


def test_who_has_copied_long_enough_reads_the_rest_where_it_is(
    files: list[File], disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, pieces = Clock(), local_copy._pieces

    def slow(path: Path) -> Iterator[bytes]:
        for piece in pieces(path):
            yield piece[:50]
            clock.s += 400.0
            yield piece[50:]

    monkeypatch.setattr(local_copy, "_pieces", slow)
    found = copies(disk, clock)
    assert [file.copy_of is not None for file in found.of(files)] == [True, True, False]
    assert names_in(disk) == [file.path.name for file in files[:2]]  # nothing unfinished
    assert "after 20 minutes and are read from" in caplog.text
    # the time is that of all splits: the next one does not begin again
    assert [file.copy_of is not None for file in found.of(files)] == [True, True, False]
    assert [file.copy_of is not None for file in LocalCopy(disk).of(files)] == [True, True, True]


def test_the_log_says_what_is_copied_how_far_it_is_and_how_long_it_takes(
    files: list[File], disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    total = sum(file.size for file in files)

    def slow(path: Path) -> Iterator[bytes]:
        content = path.read_bytes()
        for at in range(0, len(content), 100):
            clock.s += 3.0
            yield content[at : at + 100]

    monkeypatch.setattr(local_copy, "_pieces", slow)
    copies(disk, clock).of(files)
    root = disk / "hetseq-records"
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == (
        f"copying {total:,} bytes in 3 files from {files[0].path.parent} to {root}, once for all runs of this node"
    )
    assert lines[1] == f"400 bytes of {total:,} bytes are in {root}; about {(total - 400) * 12 / 400:.0f} s left"
    assert lines[-1] == f"{total:,} bytes in 3 files are read from {root}"
    assert len(lines) == 2 + (clock.s - 0.1) // 12
    caplog.clear()
    copies(disk, clock).of(files)
    copies(disk, clock).of(files[:1])
    assert [record.getMessage() for record in caplog.records] == [
        lines[-1], f"{files[0].size:,} bytes in 1 file are read from {root}"
    ]  # fmt: skip


@pytest.mark.parametrize(("count", "text"), [(999_999, "999,999 bytes"), (1_500_000, "1.5 MB"), (10**11, "100.0 GB")])
def test_bytes_are_told_as_people_count_them(count: int, text: str) -> None:
    assert local_copy._bytes(count) == text


# The option


def task_of(name: str, data: Path, *words: object) -> Any:
    return make_task(find_task(name), options.parse(["--task", name, "--data", str(data), *map(str, words)]))


def write_bert(folder: Path) -> Path:
    rows = {"train": bert_records.make_rows(50), "test": bert_records.make_rows(9, seed=1)}
    bert_records.write_folder(folder, rows_per_file=20, **rows)
    (folder / "bert_config.json").write_text(f'{{"vocab_size": {len(bert_records.VOCAB)}}}')
    return folder


def write_gpt(folder: Path) -> Path:
    rows = {"train": gpt_records.make_rows(50), "test": gpt_records.make_rows(9, seed=1)}
    return gpt_records.write_folder(folder, rows_per_file=20, **rows)


@pytest.mark.parametrize(("name", "write"), [("bert", write_bert), ("gpt", write_gpt)])
def test_a_task_reads_copies_of_the_splits_that_it_loads(
    name: str, write: Callable[[Path], Path], tmp_path: Path, disk: Path
) -> None:
    folder = write(tmp_path / name)
    plain = task_of(name, folder).load_dataset("train")
    copied = task_of(name, folder, "--local-copy", disk).load_dataset("train")
    assert names_in(disk) == [f"train_0000{number}.safetensors" for number in range(3)]  # and no file of test
    assert _data_files(copied) == _data_files(plain)  # which nodes compare
    right = plain.rows(range(50))
    for path in folder.glob("*.safetensors"):
        path.unlink()
    again = task_of(name, folder, "--local-copy", disk).load_dataset("train")
    for dataset in (copied, again):
        assert all(disk in shard.path.parents for shard in dataset._records._shards)
        assert all((mine == theirs).all() for mine, theirs in zip(dataset.rows(range(50)), right))
    task = task_of(name, folder, "--local-copy", disk)
    assert task._local_copy is task._local_copy  # all splits share its time
    with pytest.raises(DataError, match="cannot be read: No such file"):
        task_of(name, folder).load_dataset("train")  # the twin


def test_as_many_files_are_copied_as_the_run_reads(tmp_path: Path, disk: Path) -> None:
    dataset = task_of("bert", write_bert(tmp_path / "bert"), "--local-copy", disk, "--num-file", 2).load_dataset(
        "train"
    )
    assert len(dataset) == 40
    assert names_in(disk) == ["train_00000.safetensors", "train_00001.safetensors"]


@pytest.mark.parametrize("place", ["in its header", "in its rows"])
def test_a_copy_that_was_damaged_is_told_with_its_remedy(tmp_path: Path, disk: Path, place: str) -> None:
    folder = write_bert(tmp_path / "bert")
    task_of("bert", folder, "--local-copy", disk).load_dataset("train")
    (copy,) = disk.rglob("train_00001.safetensors")
    content = bytearray(copy.read_bytes())
    if place == "in its header":
        content[8:10] = b"[["
        copy.write_bytes(content)
    else:
        bert_records.change_numbers(copy, "ids", lambda ids: ids.fill(60_000))
    words = f"{copy} (a copy of {folder / copy.name}: remove the copy, and the next start makes it again)"
    with pytest.raises(DataError) as refused:
        task_of("bert", folder, "--local-copy", disk).load_dataset("train")
    assert str(refused.value).startswith(words)
    copy.unlink()
    assert len(task_of("bert", folder, "--local-copy", disk).load_dataset("train")) == 50


@pytest.mark.parametrize(("name", "write"), [("bert", write_bert), ("gpt", write_gpt)])
def test_what_an_index_shows_to_be_wrong_is_told_before_anything_is_copied(
    name: str, write: Callable[[Path], Path], tmp_path: Path, disk: Path
) -> None:
    folder = write(tmp_path / name)
    bert_records.change_index(folder, lambda facts: facts["vocabulary"].update(sha256="0" * 64))
    with pytest.raises(DataError, match="was made with another vocabulary"):
        task_of(name, folder, "--local-copy", disk).load_dataset("train")
    assert names_in(disk) == []


def test_hdf5_files_are_refused_with_what_makes_records_of_them(tmp_path: Path, disk: Path) -> None:
    folder = bert.write_folder(tmp_path / "hdf5", 30)
    with pytest.raises(DataError, match=r"--local-copy is for records, .*preprocessing\.convert_hdf5 --input .*hdf5"):
        task_of("bert", folder, "--local-copy", disk).load_dataset("train")
    assert names_in(disk) == []


def test_nodes_may_differ_in_it_and_other_commands_do_not_take_it_over(tmp_path: Path) -> None:
    for kind in (BertOptions, GptOptions):
        assert option_fields([kind(local_copy="/scratch")]) == option_fields([kind()])
    (tmp_path / "config.yaml").write_text(
        options.dump_yaml(options.parse(["--task", "bert", "--whole-words", "--local-copy", "/scratch"]))
    )
    words = ["--config", str(tmp_path / "config.yaml")]
    assert options.parse(words).extras["task"] == BertOptions(whole_words=True, local_copy="/scratch")
    assert options.parse(words, leave_out=evaluate._OF_THE_RUN).extras["task"] == BertOptions(whole_words=True)
