"""Loading straight into memory that is there, by several threads: every byte in its place, or none is believed."""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq.checkpoint import Identity, Loaded
from hetseq.checkpoint import part_io as parts
from hetseq.checkpoint.layout import Piece
from hetseq.checkpoint.part_format import read_header
from hetseq.checkpoint.part_io import allocate, read_part, spec_of, write_part
from hetseq.checkpoint.records import DamagedError
from hetseq.errors import CheckpointRefused
from tests.support.checkpoints import LINEAGE, folder, manager, save, tensors_of, together

DEADLINE_S = 20.0


def zeros() -> dict[str, torch.Tensor]:
    """Memory for the state of `save`."""
    return {name: torch.zeros_like(tensor) for name, tensor in tensors_of(1).items()}


def damage(path: Path, byte: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


def is_equal(tensors: dict[str, torch.Tensor], step: int) -> bool:
    expected = tensors_of(step)
    return tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)


# Into memory that is lent.


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (3, 2), (2, 3)])
def test_any_number_of_ranks_reads_into_its_own_memory(tmp_path: Path, writers: int, readers: int) -> None:
    together(writers, lambda group: save(tmp_path, 5, group=group))
    memory = [zeros() for _ in range(readers)]
    results = together(readers, lambda group: manager(tmp_path, group).load(into=memory[group.rank]))
    for loaded, own in zip(results, memory):
        assert all(loaded.tensors[name] is own[name] for name in own)
        assert is_equal(own, 5)
        assert not is_equal(own, 4)


class Strange(torch.Tensor):
    """A tensor whose bytes may be anywhere."""


UNFIT: dict[str, Callable[[], torch.Tensor]] = {
    "another shape": lambda: torch.zeros(3, 7, dtype=torch.int64),
    "another type": lambda: torch.zeros(7, 3),
    "columns first": lambda: torch.zeros(3, 7, dtype=torch.int64).t(),
    "with gaps": lambda: torch.zeros(7, 6, dtype=torch.int64)[:, :3],
    "no memory": lambda: torch.zeros(7, 3, dtype=torch.int64, device="meta"),
    "another class": lambda: torch.zeros(7, 3, dtype=torch.int64).as_subclass(Strange),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_what_does_not_fit_is_left_alone_and_its_tensor_gets_memory_of_its_own(tmp_path: Path, kind: str) -> None:
    save(tmp_path, 5)
    own = zeros() | {"model.b": UNFIT[kind](), "model.unknown": torch.zeros(2)}
    loaded = manager(tmp_path).load(into=own)
    assert loaded is not None
    assert is_equal(loaded.tensors, 5)
    assert [name for name in loaded.tensors if loaded.tensors[name] is own[name]] == ["model.a", "optim.a.step"]
    assert own["model.b"].is_meta or not own["model.b"].any()
    assert not own["model.unknown"].any()


def test_a_parameter_that_is_trained_is_read_into_and_torch_hears_of_it(tmp_path: Path) -> None:
    save(tmp_path, 5)
    parameter = torch.nn.Parameter(torch.zeros(1000))
    other = torch.zeros(3)
    before = parameter._version, other._version
    loaded = manager(tmp_path).load(into={"model.a": parameter, "other": other})
    assert loaded is not None
    assert loaded.tensors["model.a"] is parameter
    assert parameter.requires_grad
    assert torch.equal(parameter, torch.full((1000,), 5.0))
    assert parameter._version > before[0]
    assert other._version == before[1]


def test_of_tensors_that_share_memory_only_one_is_read_into_it(tmp_path: Path) -> None:
    arena = torch.zeros(1001)
    shared = {"a": arena[:1000], "b": arena[999:1000], "c": arena[1000:]}
    for step, tensors in ((1, shared), (2, {name: tensor.clone() for name, tensor in shared.items()})):
        values = {name: torch.full_like(tensor, index + 1.0) for index, (name, tensor) in enumerate(tensors.items())}
        arguments: dict[str, Any] = {"identity": Identity(step, 0, LINEAGE), "nonce": step, "kinds": ["epoch"]}
        assert manager(tmp_path).save(values, {}, **arguments).ok
        loaded = manager(tmp_path).load(into=tensors)
        assert loaded is not None
        assert [float(loaded.tensors[name].min()) for name in "abc"] == [1, 2, 3]
        in_place = [name for name in "abc" if loaded.tensors[name] is tensors[name]]
        assert in_place == (["a", "c"] if step == 1 else ["a", "b", "c"])


@pytest.mark.parametrize("answer", [True, False])
def test_whoever_lends_looks_at_a_checkpoint_before_it_is_read(tmp_path: Path, answer: bool) -> None:
    save(tmp_path, 5)
    own, seen = zeros(), []

    def fits(outline: Loaded) -> bool:
        seen.append((outline.identity.step, outline.state, outline.path))
        kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in outline.tensors.items()}
        assert kinds == {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}
        assert all(tensor.is_meta for tensor in outline.tensors.values())
        assert not any(tensor.any() for tensor in own.values())
        return answer

    loaded = manager(tmp_path).load(into=own, fits=fits)
    assert loaded is not None
    assert seen == [(5, {"step": 5}, folder(tmp_path, 5))]
    assert is_equal(loaded.tensors, 5)
    assert is_equal(own, 5) == answer
    assert any(tensor.any() for tensor in own.values()) == answer


def test_an_older_checkpoint_overwrites_what_a_damaged_one_has_left(tmp_path: Path) -> None:
    for step in (1, 2):
        together(2, lambda group, step=step: save(tmp_path, step, group=group))
    damage(folder(tmp_path, 2) / "part-00001.safetensors")
    memory = [zeros(), zeros()]
    for loaded, own in zip(together(2, lambda group: manager(tmp_path, group).load(into=memory[group.rank])), memory):
        assert loaded.identity.step == 1
        assert "part-00001" in loaded.skipped[0]
        assert is_equal(own, 1)


def test_where_nothing_verifies_the_lender_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    own = zeros()
    assert manager(tmp_path).load(into=own) is None
    assert not any(tensor.any() for tensor in own.values())
    save(tmp_path, 2)
    damage(folder(tmp_path, 2) / "part-00000.safetensors")
    with pytest.raises(CheckpointRefused, match="part-00000"):
        manager(tmp_path).load(into=own)


# By several threads.


@pytest.fixture
def three_cores(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with three cores, and chunks of 1000 bytes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(parts, "CHUNK_BYTES", 1000)
    return monkeypatch


def part_of(path: Path, state: dict[str, torch.Tensor]) -> tuple[Path, list[int]]:
    """A part that holds these tensors, and its checksums for chunks of 1000 bytes."""
    specs = [spec_of(name, tensor) for name, tensor in state.items()]
    write_part(path, [Piece(spec, 0, spec.elements) for spec in specs], state)
    return path, sums_of(path)


def sums_of(path: Path) -> list[int]:
    content = path.read_bytes()
    return [zlib.crc32(content[begin : begin + 1000]) for begin in range(0, len(content), 1000)]


def filled(path: Path, crc32: list[int]) -> dict[str, torch.Tensor]:
    header = read_header(path)
    tensors = allocate([piece.spec for piece in header.pieces])
    read_part(path, header, crc32, tensors)
    return tensors


def wait_until(is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


def checkers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "checkpoint-checker"]


class Reads:
    """Stands before `os.preadv` and keeps the bytes at which reads began."""

    def __init__(self, patch: pytest.MonkeyPatch, before: Callable[[int], None] = lambda begin: None) -> None:
        self.begun: list[int] = []
        self._real, self._before = os.preadv, before
        patch.setattr(os, "preadv", self)

    def __call__(self, descriptor: int, views: Any, begin: int) -> int:
        assert threading.current_thread().name != "checkpoint-checker"
        self.begun.append(begin)
        self._before(begin)
        return self._real(descriptor, views, begin)


def before_each_check(patch: pytest.MonkeyPatch, look: Callable[[Any, int], None]) -> None:
    """`look(the pass, chunk)` before a chunk is checked."""
    real = parts._Pass._check

    def check(self: Any, index: int) -> None:
        look(self, index)
        real(self, index)

    patch.setattr(parts._Pass, "_check", check)


def test_the_file_goes_on_being_read_while_others_check(tmp_path: Path, three_cores: pytest.MonkeyPatch) -> None:
    path, crc32 = part_of(tmp_path / "part", {"a": torch.arange(2000)})
    expected = list(range(0, len(crc32) * 1000, 4000))  # four chunks at once, in the order of the file
    seen: list[str] = []

    def wait_for_a_check(begin: int) -> None:
        if begin:
            wait_until(lambda: seen)

    reads = Reads(three_cores, wait_for_a_check)

    def look(_: Any, index: int) -> None:
        seen.append(threading.current_thread().name)
        wait_until(lambda: len(reads.begun) > min(index // 4 + 1, len(expected) - 1))

    before_each_check(three_cores, look)
    assert torch.equal(filled(path, crc32)["a"], torch.arange(2000))
    assert reads.begun == expected
    assert len(expected) > 3
    assert seen[0] == "checkpoint-checker"
    assert len(seen) == len(crc32)
    assert checkers() == []


def test_the_thread_that_read_helps_to_check(tmp_path: Path, three_cores: pytest.MonkeyPatch) -> None:
    path, crc32 = part_of(tmp_path / "part", {"a": torch.arange(2000)})
    checked: dict[str, list[int]] = {}
    caller = threading.current_thread().name

    def look(_: Any, index: int) -> None:
        checked.setdefault(threading.current_thread().name, []).append(index)
        if threading.current_thread().name != caller:
            wait_until(lambda: caller in checked)

    before_each_check(three_cores, look)
    assert torch.equal(filled(path, crc32)["a"], torch.arange(2000))
    assert sorted(index for indices in checked.values() for index in indices) == list(range(len(crc32)))  # each once


@pytest.mark.parametrize(("cores", "most"), [(1, 2), (2, 2), (3, 3), (64, 3)])
def test_there_are_no_more_threads_than_cores_chunks_and_use(
    tmp_path: Path, three_cores: pytest.MonkeyPatch, cores: int, most: int
) -> None:
    three_cores.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    seen: list[int] = []
    real = parts._Pass._check_all

    def check_all(self: Any) -> None:
        seen.append(threading.get_ident())
        real(self)

    three_cores.setattr(parts._Pass, "_check_all", check_all)
    for elements, chunks in ((2, 1), (150, 2), (5000, 41)):
        seen.clear()
        path, crc32 = part_of(tmp_path / str(elements), {"a": torch.arange(elements)})
        assert len(crc32) == chunks
        assert torch.equal(filled(path, crc32)["a"], torch.arange(elements))
        assert len(seen) == min(most, chunks)


def test_many_small_tensors_and_reads_that_give_little(tmp_path: Path, three_cores: pytest.MonkeyPatch) -> None:
    three_cores.setattr(parts, "CHUNK_BYTES", 8 << 20)
    state = {f"t{index}": torch.tensor(float(index)) for index in range(3000)} | {"large": torch.arange(3000)}
    path, _ = part_of(tmp_path / "part", state)
    crc32, real = [zlib.crc32(path.read_bytes())], os.preadv
    sizes = iter([1, 7, 3, 100_000, 5, 4096, 2] * 3000)

    def little(descriptor: int, views: Any, begin: int) -> int:
        assert len(views) <= 1024  # what Linux takes
        limit, few = next(sizes), []
        for view in views:
            few.append(view[:limit])
            limit -= len(few[-1])
        return real(descriptor, [view for view in few if len(view)], begin)

    three_cores.setattr(os, "preadv", little)
    found = filled(path, crc32)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_the_first_damaged_chunk_is_named_whichever_is_found_first(
    tmp_path: Path, three_cores: pytest.MonkeyPatch
) -> None:
    path, crc32 = part_of(tmp_path / "part", {"a": torch.arange(2000)})
    with pytest.MonkeyPatch.context() as patch:
        before_each_check(patch, lambda self, index: wait_until(lambda: self._failures) if index == 3 else None)
        for byte in (3500, 5001):
            damage(path, byte)
        with pytest.raises(DamagedError, match=r"part: .* byte 3000 "):
            filled(path, crc32)
    damage(path, 3500)
    with pytest.raises(DamagedError, match=r"part: .* byte 5000 "):
        filled(path, crc32)
    damage(path, 5001)
    assert torch.equal(filled(path, crc32)["a"], torch.arange(2000))


def test_a_damaged_chunk_that_was_taken_is_checked_although_a_later_one_was_bad(
    tmp_path: Path, three_cores: pytest.MonkeyPatch
) -> None:
    path, crc32 = part_of(tmp_path / "part", {"a": torch.arange(2000)})
    passes: list[Any] = []
    begin = parts._Pass.__init__

    class Queue(parts.SimpleQueue):  # type: ignore[type-arg]
        """Chunk 3 reaches its thread after a later one was found to be bad."""

        def get(self) -> Any:
            index = super().get()
            if index == 3:
                wait_until(lambda: passes[0]._has_ended)
            return index

    def begun(self: Any, *args: Any) -> None:
        begin(self, *args)
        passes.append(self)

    three_cores.setattr(parts, "SimpleQueue", Queue)
    three_cores.setattr(parts._Pass, "__init__", begun)
    for byte in (3500, 5001):
        damage(path, byte)
    with pytest.raises(DamagedError, match=r"part: .* byte 3000 "):
        filled(path, crc32)


def test_a_damaged_chunk_ends_the_reading_and_the_checking(tmp_path: Path, three_cores: pytest.MonkeyPatch) -> None:
    path, crc32 = part_of(tmp_path / "part", {"a": torch.arange(2000)})
    passes: list[Any] = []
    checked: list[int] = []

    def wait_for_the_end(begin: int) -> None:
        if begin:
            wait_until(lambda: passes and passes[0]._has_ended)

    def look(self: Any, index: int) -> None:
        passes.append(self)
        checked.append(index)
        if index > 3:
            wait_until(lambda: self._has_ended)

    reads = Reads(three_cores, wait_for_the_end)
    before_each_check(three_cores, look)
    damage(path, 3500)
    with pytest.raises(DamagedError, match=r"part: .* byte 3000 "):
        filled(path, crc32)
    assert reads.begun == [0, 4000]
    assert sorted(checked) in ([0, 1, 2, 3], [0, 1, 2, 3, 4])  # one checker may have waited for the next chunk


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), RuntimeError("odd"), KeyboardInterrupt()])
@pytest.mark.parametrize("who", ["reader", "reader that checks", "checker"])
def test_what_any_thread_raises_the_caller_raises(
    tmp_path: Path, three_cores: pytest.MonkeyPatch, error: BaseException, who: str
) -> None:
    path, crc32 = part_of(tmp_path / "part", {"a": torch.arange(20_000)})
    has_failed = threading.Event()

    def fail() -> None:
        has_failed.set()
        raise error

    def fail_at_the_second_read(begin: int) -> None:
        if begin and who == "reader":
            fail()

    def look(_: Any, index: int) -> None:
        is_checker = threading.current_thread().name == "checkpoint-checker"
        if who == ("checker" if is_checker else "reader that checks"):
            fail()
        assert has_failed.wait(DEADLINE_S)

    Reads(three_cores, fail_at_the_second_read)
    before_each_check(three_cores, look)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(type(error)) as caught:
        filled(path, crc32)
    assert caught.value is error
    assert checkers() == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("is_idle", [True, False])
def test_checkers_stop_where_reading_fails(tmp_path: Path, three_cores: pytest.MonkeyPatch, is_idle: bool) -> None:
    path, crc32 = part_of(tmp_path / "part", {"a": torch.arange(2000)})
    asked: list[None] = []
    told: list[int] = []

    class Queue(parts.SimpleQueue):  # type: ignore[type-arg]
        def get(self) -> Any:
            asked.append(None)
            return super().get()

    def fail_at_the_second_read(begin: int) -> None:
        if begin:  # while both wait for a chunk after the first four, or while both are checking one
            wait_until(lambda: len(asked) == (4 + 2 if is_idle else 2))
            raise OSError(5, "Input/output error")

    def look(self: Any, index: int) -> None:
        if not is_idle:
            wait_until(lambda: self._has_ended)
        told.append(index)

    Reads(three_cores, fail_at_the_second_read)
    before_each_check(three_cores, look)
    three_cores.setattr(parts, "SimpleQueue", Queue)
    with pytest.raises(OSError, match="Input/output error"):
        filled(path, crc32)
    assert sorted(told) == ([0, 1, 2, 3] if is_idle else [0, 1])
    assert checkers() == []


def test_an_interrupt_is_not_taken_for_damage(tmp_path: Path, three_cores: pytest.MonkeyPatch) -> None:
    path, crc32 = part_of(tmp_path / "part", {"a": torch.arange(20_000)})
    damage(path, 500)
    taken = threading.Event()  # by a checker

    def wait_for_the_first_check(begin: int) -> None:
        assert not begin or taken.wait(DEADLINE_S)

    def look(self: Any, index: int) -> None:
        if index == 0:
            taken.set()
            wait_until(lambda: self._failures)
        elif threading.current_thread().name != "checkpoint-checker":
            raise KeyboardInterrupt
        else:
            wait_until(lambda: self._failures)

    Reads(three_cores, wait_for_the_first_check)
    before_each_check(three_cores, look)
    with pytest.raises(KeyboardInterrupt):
        filled(path, crc32)


def test_a_disk_that_fails_while_tensors_are_read_is_told_and_the_one_before_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    save(tmp_path, 1)
    save(tmp_path, 2)
    real, is_bad = os.preadv, iter([True, False, False, False])

    def preadv(descriptor: int, views: Any, begin: int) -> int:
        if next(is_bad):
            raise OSError(5, "Input/output error")
        return real(descriptor, views, begin)

    monkeypatch.setattr(os, "preadv", preadv)
    own = zeros()
    loaded = manager(tmp_path).load(into=own)
    assert loaded is not None
    assert loaded.identity.step == 1
    assert loaded.skipped[0].endswith("part-00000.safetensors: Input/output error")
    assert is_equal(own, 1)


def test_a_part_that_shrinks_or_changes_its_header_while_it_is_read(
    tmp_path: Path, three_cores: pytest.MonkeyPatch
) -> None:
    path, crc32 = part_of(tmp_path / "part", {"a": torch.arange(2000)})
    header, tensors, content = read_header(path), {"a": torch.zeros(2000, dtype=torch.int64)}, path.read_bytes()
    path.write_bytes(content[:-10])
    with pytest.raises(EOFError):
        read_part(path, header, crc32, tensors)
    path.write_bytes(content.replace(b'"a"', b'"b"', 1))
    with pytest.raises(DamagedError, match="its header changed"):
        read_part(path, header, sums_of(path), tensors)
    path.write_bytes(content)
    with pytest.raises(DamagedError, match="its size differs"):
        read_part(path, header, crc32[:-1], tensors)
    read_part(path, header, crc32, tensors)
    assert torch.equal(tensors["a"], torch.arange(2000))
