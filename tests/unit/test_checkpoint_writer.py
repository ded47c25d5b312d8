"""Saving in the background, piece by piece: the copy, the part's file, the writer, and what becomes of its death."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hetseq.checkpoint import CheckpointManager, Identity, Retention, SaveResult, part_writing, snapshot, writer_process
from hetseq.checkpoint import writer as writer_module
from hetseq.checkpoint.arena import READY, Arena
from hetseq.checkpoint.layout import Piece, divide
from hetseq.checkpoint.part_format import check_sums
from hetseq.checkpoint.part_writing import PartWriting
from hetseq.checkpoint.parts import _DTYPE, spec_of, write_part
from hetseq.checkpoint.publishing import Place
from hetseq.checkpoint.records import CHUNK_BYTES, DamagedError
from hetseq.checkpoint.snapshot import Snapshot, image_bytes
from hetseq.checkpoint.writer import Line, Writer
from tests.support.checkpoints import (
    LINEAGE,
    fork,
    loaded_step,
    manager,
    reap,
    save,
    tensors_of,
    together,
)


def begin(own: CheckpointManager, tensors: Mapping[str, Tensor], step: int) -> SaveResult | None:
    """Begin to save; "model.b" may change at once."""
    identity = Identity(step, 0, LINEAGE)
    return own.begin(
        tensors, {"step": step}, identity=identity, nonce=step * 16, kinds=["epoch"], at_once=["model.b"]
    )  # fmt: skip


def save_meanwhile(own: CheckpointManager, step: int) -> SaveResult:
    """A save in the background whose tensors change as soon as they may."""
    tensors = tensors_of(step)
    result = begin(own, tensors, step)
    tensors["model.b"].zero_()
    own.settle()
    tensors["model.a"].zero_()
    result = result or own.finish()
    assert result is not None
    return result


def prepared(run: Path, group: Any = None, **settings: Any) -> CheckpointManager:
    """A manager that is ready to save in the background."""
    own = manager(run, group, **{"run_id": run_id_of(run), **settings})
    assert own.prepare(tensors_of(0)) is None
    return own


def run_id_of(run: Path) -> str:
    """Of nobody else: starts of one run wait for each other's writers, and another test run may be going on."""
    return str(run)


def recover(run: Path) -> list[str]:
    """What the next start of a run does, after the last writer of the one before has ended."""
    return manager(run, run_id=run_id_of(run)).recover()


def writer_of(own: CheckpointManager) -> writer_process.WriterProcess:
    assert own._background is not None
    return own._background._writer


@pytest.fixture
def own(tmp_path: Path) -> Iterator[CheckpointManager]:
    """The manager of a run of one rank, with a writer."""
    made = prepared(tmp_path)
    yield made
    made.close()


class Gate:
    """Holds the copies of all snapshots until it is opened; `now` are those that did not wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open, self._copy = threading.Event(), snapshot._copy
        monkeypatch.setattr(snapshot, "_copy", self._wait)
        self.open = self._open.set

    def _wait(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert self._open.wait(20)
        self._copy(pairs)


# -- the copy ----------------------------------------------------------------------------------------------------------


def every_kind() -> dict[str, Tensor]:
    """Tensors of each type, and of each shape and layout that is somehow special."""
    plain = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    kinds = {f"type.{name}": torch.arange(5).to(dtype) for name, dtype in _DTYPE.items()}
    return {
        **kinds,
        "no dimension": torch.tensor(3.5),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "transposed": plain.T,
        "every other": plain[::2, ::3],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "a parameter": torch.nn.Parameter(plain.clone()),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negated": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "../a/name@0:3": plain.clone(),
    }


@pytest.mark.parametrize("parts", [1, 3, 40])
def test_the_image_of_each_kind_of_tensor_is_the_file_that_a_save_would_write(tmp_path: Path, parts: int) -> None:
    tensors = every_kind()
    divided = divide([spec_of(name, tensor) for name, tensor in tensors.items()], [1.0] * parts)
    assert parts < 40 or any(piece.is_slice for pieces in divided for piece in pieces)
    at_once = set(list(tensors)[::2])
    for index, pieces in enumerate(divided):
        image = tmp_path / f"image-{index}"
        image.write_bytes(image_of(tensors, pieces, at_once))
        write_part(tmp_path / f"part-{index}", pieces, tensors)
        assert image.read_bytes() == (tmp_path / f"part-{index}").read_bytes()
        assert len(load_file(image)) == len(pieces)  # the library of others opens it


def image_of(tensors: Mapping[str, Tensor], pieces: list[Piece], at_once: set[str]) -> bytes:
    arena = Arena.create("a-run", image_bytes(pieces))
    taken = Snapshot(arena, pieces)
    taken.begin(tensors, at_once=at_once, when_whole=lambda: None)
    taken.settle()
    content = bytes(arena.image)
    taken.close()
    arena.close(unlink=True)
    return content


@pytest.fixture
def taken() -> Iterator[Snapshot]:
    """A snapshot of two vectors, "weight" and "buffer"."""
    specs = [spec_of(name, torch.zeros(1000)) for name in ("weight", "buffer")]
    (pieces,) = divide(specs, [1.0])
    arena = Arena.create("a-run", image_bytes(pieces))
    made = Snapshot(arena, pieces)
    yield made
    made.close()
    arena.close(unlink=True)


def numbers_in(taken: Snapshot) -> dict[str, set[float]]:
    """The numbers that stand in the image, by name."""
    return {piece.spec.name: set(target.tolist()) for piece, target in zip(taken.pieces, taken._targets)}


def test_after_settle_a_tensor_may_change_and_the_image_does_not(
    taken: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, whole = Gate(monkeypatch), []
    tensors = {"weight": torch.full((1000,), 1.0), "buffer": torch.full((1000,), 1.0)}
    taken.begin(tensors, at_once=["buffer"], when_whole=lambda: whole.append(True))
    tensors["buffer"].fill_(2.0)  # a forward, while the copy has not even begun
    assert whole == []
    gate.open()
    taken.settle()
    tensors["weight"].fill_(2.0)  # an update
    assert numbers_in(taken) == {"weight": {1.0}, "buffer": {1.0}}
    assert whole == [True]


def test_without_settle_an_update_would_be_in_the_image(taken: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: the copy reads the live tensor, so who does not wait for it saves a state that never was."""
    gate = Gate(monkeypatch)
    tensors = {"weight": torch.full((1000,), 1.0), "buffer": torch.full((1000,), 1.0)}
    taken.begin(tensors, at_once=["buffer"], when_whole=lambda: None)
    for name in tensors:
        tensors[name].fill_(2.0)
    gate.open()
    taken.settle()
    assert numbers_in(taken) == {"weight": {2.0}, "buffer": {1.0}}


def test_a_copy_that_fails_is_not_whole_and_says_so_where_it_is_awaited(
    taken: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[bool] = []
    tensors = {"weight": torch.ones(1000), "buffer": torch.ones(1000)}
    with monkeypatch.context() as context:
        context.setattr(snapshot._Copying, "_work", lambda self: [][1])
        taken.begin(tensors, at_once=[], when_whole=lambda: whole.append(True))
        with pytest.raises(IndexError):
            taken.settle()
    assert whole == []
    taken.begin(tensors, at_once=[], when_whole=lambda: whole.append(True))
    taken.settle()
    assert whole == [True]


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def image() -> bytes:
    """Three chunks and a piece."""
    return os.urandom(CHUNK_BYTES) * 3 + b"a piece"


@pytest.mark.parametrize("pauses", [0, 1, 3])
@pytest.mark.parametrize("has_range", [True, False])
def test_a_part_that_was_paused_is_the_same_with_the_same_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: bytes, pauses: int, has_range: bool
) -> None:
    monkeypatch.setattr(part_writing, "WINDOW_BYTES", CHUNK_BYTES)
    if not has_range:
        monkeypatch.setattr(part_writing, "_sync_file_range", None)
    path = tmp_path / "part"
    writing = PartWriting(path, memoryview(image))
    sizes = []
    for _ in range(pauses):
        writing.run(lambda: True)
        sizes.append(path.stat().st_size)
    sums = writing.run(lambda: False)
    assert writing.run(lambda: True) == sums  # over is over
    writing.close()
    assert sizes == [CHUNK_BYTES * (pause + 1) for pause in range(pauses)]
    assert path.read_bytes() == image
    check_sums(path, sums)
    with pytest.raises(DamagedError, match="another checksum"):
        check_sums(path, (*sums[:2], sums[2] ^ 1, sums[3]))


@pytest.mark.parametrize("name", ["write", "fsync", "close"])
def test_what_the_disk_refuses_is_the_end_of_the_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: bytes, name: str
) -> None:
    writing, real = PartWriting(tmp_path / "part", memoryview(image)), getattr(os, name)

    def refuse(descriptor: int, *args: Any) -> Any:
        if name == "close":
            real(descriptor)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as context:
        context.setattr(os, name, refuse)
        with pytest.raises(OSError, match="Input/output error"):
            writing.run(lambda: False)
    writing.close()


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to(path.parent / "elsewhere")])
def test_a_part_never_goes_where_something_is(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "part")
    with pytest.raises(FileExistsError):
        PartWriting(tmp_path / "part", memoryview(b"data"))
    assert not (tmp_path / "elsewhere").exists()


# -- the line ----------------------------------------------------------------------------------------------------------


def test_a_message_that_comes_in_halves_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that names the parts of a thousand ranks does not fit into one packet."""
    ours, theirs = socket.socketpair()
    line, halves = Line(theirs), [b'{"do": "com', b'mit"}\n{"do": "end"}\n']

    def wait(readers: Any, writers: Any, errors: Any, timeout_s: float | None) -> Any:
        if timeout_s is None and halves:  # who waits is sent the next half
            ours.sendall(halves.pop(0))
        return select.select(readers, writers, errors, 0)

    monkeypatch.setattr(writer_module, "select", SimpleNamespace(select=wait))
    assert line.take(None) == {"do": "commit"}
    assert line.take(0) == {"do": "end"}
    assert line.take(0) is None
    ours.close()
    assert line.take(None) is None
    assert line.has_ended
    theirs.close()


def test_who_is_spoken_to_after_his_end_hears_nothing_and_nobody_is_hurt() -> None:
    ours, theirs = socket.socketpair()
    line = Line(ours)
    theirs.close()
    line.send({"do": "write"})
    line.send({"do": "write"})
    assert line.take(None) is None
    ours.close()


def test_a_writer_that_died_after_its_last_byte_is_repeated_and_gets_the_same_part(tmp_path: Path) -> None:
    """The arena says WRITTEN then, and nobody has been told."""
    save(tmp_path, 1)
    own = prepared(tmp_path)
    tensors = tensors_of(2)
    begin(own, tensors, 2)
    own.settle()
    assert own._background is not None
    answer = writer_of(own).answer(None)
    ours, theirs = socket.socketpair()
    line, arena = Line(theirs), own._background._arena
    assert arena.status[0] != READY
    writer = Writer(line, [arena], Place(tmp_path, Retention(), 0.0), is_polite=False)
    ours.sendall(json.dumps({"do": "write", "slot": 0, "serial": 1, "again": True}).encode() + b"\n")
    ours.shutdown(socket.SHUT_WR)
    writer.serve()
    with ours.makefile() as heard:
        again = json.loads(heard.readline())
    assert answer is not None
    assert (again["bytes"], again["sha256"]) == (answer["bytes"], answer["sha256"])
    ours.close()
    theirs.close()
    own.close()


# -- the process -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_polite", [True, False])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_save_in_the_background_is_file_by_file_the_one_that_is_waited_for(
    tmp_path: Path, ranks: int, is_polite: bool
) -> None:
    waited = together(ranks, lambda group: save(tmp_path / "waited", 5, group=group))

    def live(group: Any) -> SaveResult:
        own = prepared(tmp_path / "meanwhile", group, run_id="a-run", is_polite=is_polite, patience_s=20.0)
        result = save_meanwhile(own, 5)
        own.close()
        return result

    meanwhile = together(ranks, live)
    assert [result.ok for result in meanwhile] == [True] * ranks
    assert [result.bytes for result in meanwhile] == [result.bytes for result in waited]
    assert checkpoint_files(tmp_path / "meanwhile") == checkpoint_files(tmp_path / "waited")
    assert len(checkpoint_files(tmp_path / "waited")) == 3 + 2 * ranks
    save(tmp_path / "other", 5, value=6)
    assert checkpoint_files(tmp_path / "other") != checkpoint_files(tmp_path / "waited")


def checkpoint_files(run: Path) -> dict[str, bytes]:
    """The content of all files below `checkpoints/`."""
    root = run / "checkpoints"
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_writer_killed_while_it_has_nothing_to_do_is_replaced(own: CheckpointManager, tmp_path: Path) -> None:
    assert save_meanwhile(own, 1).ok
    first = writer_of(own).pid
    os.kill(first, signal.SIGKILL)
    assert save_meanwhile(own, 2).ok
    assert writer_of(own).pid != first
    assert loaded_step(tmp_path) == 2


def test_a_writer_killed_while_it_waits_for_the_copy_is_replaced(
    own: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    begin(own, tensors_of(1), 1)
    while not list(tmp_path.glob("checkpoints/*/state.json")):  # it has begun
        assert own.is_busy
    os.kill(writer_of(own).pid, signal.SIGKILL)
    gate.open()
    result = own.finish()
    assert result is not None
    assert result.ok
    assert loaded_step(tmp_path) == 1


def test_a_save_over_which_three_writers_die_has_failed_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    with monkeypatch.context() as context:
        deadly = "import hetseq.checkpoint.writer as writer, os; writer.Writer._write = lambda *_: os._exit(3); "
        before, _, after = writer_process._PROGRAM.rpartition("importlib.import_module")
        context.setattr(writer_process, "_PROGRAM", f"{before}{deadly}importlib.import_module{after}")
        own = prepared(tmp_path)
        result = save_meanwhile(own, 2)
        assert not result.ok
        assert result.error == "rank 0: 3 writer processes died (exit code 3)"
        assert loaded_step(tmp_path) == 1
    assert save_meanwhile(own, 3).ok
    assert loaded_step(tmp_path) == 3
    own.close()


def test_where_no_other_writer_can_be_started_the_save_has_failed_and_training_goes_on(
    own: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    assert save_meanwhile(own, 1).ok
    os.kill(writer_of(own).pid, signal.SIGKILL)
    with monkeypatch.context() as context:
        context.setattr(subprocess, "Popen", refuse)
        for step in (2, 3):
            result = save_meanwhile(own, step)
            assert not result.ok
            assert "no process to write checkpoints: [Errno 11]" in str(result.error)
    assert loaded_step(tmp_path) == 1
    assert save_meanwhile(own, 4).ok
    assert loaded_step(tmp_path) == 4


# -- the end of the trainer --------------------------------------------------------------------------------------------


def train_until_killed(run: Path, *, ranks: int, is_whole: bool) -> None:
    """Ranks as threads of a child that is killed in the middle of the save of step 2, before or after the copy."""

    def live(group: Any) -> None:
        own = prepared(run, group, patience_s=20.0)
        begin(own, tensors_of(2), 2)
        if group.rank == 0 and not is_whole:
            while not list(run.glob("checkpoints/step-000000002.*/state.json")):  # its writer has begun
                assert own.is_busy
        own.settle()
        group.all_gather_rows(torch.zeros(1).numpy())
        os.kill(os.getpid(), signal.SIGKILL)

    def job(pipe: int) -> None:
        if not is_whole:
            snapshot._Copying._run = lambda self: None  # type: ignore[method-assign]
        together(ranks, live)

    assert reap(*fork(job)) == (-signal.SIGKILL, [])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_killed_after_its_copy_has_lost_nothing(tmp_path: Path, ranks: int) -> None:
    together(ranks, lambda group: save(tmp_path, 1, group=group))
    train_until_killed(tmp_path, ranks=ranks, is_whole=True)
    done = recover(tmp_path)
    assert [sentence.rpartition(", ")[2] for sentence in done] == ["which lacked nothing but its commit"]
    assert loaded_step(tmp_path) == 2


def test_a_trainer_killed_before_its_copy_was_whole_has_saved_nothing(tmp_path: Path) -> None:
    """The twin: the writer made the folder, and never made a part of what stood in the arena."""
    save(tmp_path, 1)
    train_until_killed(tmp_path, ranks=1, is_whole=False)
    assert recover(tmp_path) == []
    assert loaded_step(tmp_path) == 1
    assert [path.name for path in tmp_path.glob("checkpoints/step-000000002.*/*")] == ["state.json"]
    assert save(tmp_path, 3).ok
    assert not list(tmp_path.glob("checkpoints/step-000000002.*"))


def test_a_trainer_that_ends_in_the_middle_of_a_save_leaves_it_to_the_next_start(tmp_path: Path) -> None:
    save(tmp_path, 1)
    own = prepared(tmp_path)
    begin(own, tensors_of(2), 2)
    own.settle()
    own.close()
    assert loaded_step(tmp_path) == 1
    assert len(recover(tmp_path)) == 1
    assert loaded_step(tmp_path) == 2
