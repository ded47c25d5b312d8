"""The two halves of a part that is saved in the background: its image in shared memory, and its file."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hetseq.checkpoint import part_writer as part_writing
from hetseq.checkpoint import snapshot
from hetseq.checkpoint.arena import Arena
from hetseq.checkpoint.layout import Piece, divide
from hetseq.checkpoint.part_format import check_sums
from hetseq.checkpoint.part_io import _DTYPE, spec_of, write_part
from hetseq.checkpoint.part_writer import PartWriting
from hetseq.checkpoint.records import CHUNK_BYTES, DamagedError
from hetseq.checkpoint.snapshot import Snapshot, image_bytes
from tests.support import cuda_errors


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


def test_what_follows_a_copy_is_waited_for_by_finish_and_not_by_settle(taken: Snapshot) -> None:
    """Checksums take their time, and an update need not wait for them."""
    may_end, told = threading.Event(), []

    def tell() -> None:
        assert may_end.wait(20)
        told.append(threading.current_thread().name)

    tensors = {"weight": torch.ones(1000), "buffer": torch.ones(1000)}
    taken.begin(tensors, at_once=[], when_whole=tell)
    taken.settle()
    taken.settle()
    assert told == []
    may_end.set()
    taken.finish()
    assert told == ["snapshot"]
    taken.finish()
    assert told == ["snapshot"]


def test_what_goes_wrong_after_a_copy_is_raised_by_finish_and_once(taken: Snapshot) -> None:
    tensors = {"weight": torch.ones(1000), "buffer": torch.ones(1000)}
    taken.begin(tensors, at_once=[], when_whole=lambda: [][1])
    with pytest.raises(IndexError):
        taken.finish()
    taken.finish()
    taken.settle()
    taken.begin(tensors, at_once=[], when_whole=lambda: None)
    taken.finish()


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
    with pytest.raises(DamagedError, match="do not match their checksum"):
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


# -- memory that the driver is told of ---------------------------------------------------------------------------------


class Driver:
    """Stands in for CUDA: a call that fails leaves its error behind, and the next kernel of the thread raises it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, register: int = 0, unregister: int = 0) -> None:
        self._codes, self.left, self.kernels = (register, unregister), 0, []
        zeros = torch.zeros

        def launch(*shape: int, device: Any = None) -> Tensor:
            self.kernels.append(device)
            left, self.left = self.left, 0
            if left:
                raise cuda_errors.accelerator_error(cuda_errors.NO_HOST_MEMORY)
            return zeros(*shape)

        monkeypatch.setattr(torch, "zeros", launch)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.left = self._codes[0]
        return self.left

    def cudaHostUnregister(self, address: int) -> int:
        self.left = self._codes[1]
        return self.left


@pytest.mark.parametrize(("register", "unregister"), [(0, 0), (2, 0), (0, 713), (712, 0)])
def test_what_the_driver_refuses_does_not_fail_the_next_kernel(
    register: int, unregister: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver, device = Driver(monkeypatch, register=register, unregister=unregister), torch.device("cuda:1")
    arena: Any = SimpleNamespace(image=memoryview(bytearray(1 << 16)))
    address = snapshot._register(arena, device)
    assert driver.left == 0, "else the next forward raises it"
    assert bool(address) == (register == 0)
    snapshot._unregister(address, device)
    assert driver.left == 0
    assert driver.kernels == [device] * ((register != 0) + (unregister != 0)), "no kernel where nothing was refused"
    assert ["copies to it are slower" in record.message for record in caplog.records] == [True] * (register != 0)
