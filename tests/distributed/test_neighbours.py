"""Ranks of one machine: sums and rows through memory that they share, and what a death, a stop or a stranger does."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from hetseq.comm import group as comm
from hetseq.comm import shared_memory as neighbours
from hetseq.comm.group import GlooGroup
from hetseq.comm.shared_memory import MemoryDoor, SharedMemoryRanks
from hetseq.errors import PeerLostError
from hetseq.parallel.gradient_sync import GradientReducer
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory without a name")

CPU = torch.device("cpu")
KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


@contextmanager
def sharing(group: GlooGroup, name: str = "sharing", timeout_s: float = 30.0) -> Iterator[GlooGroup]:
    """The same ranks as a group that shares memory."""
    meeting = comm.GroupMeeting(group._meeting.store, f"{group._meeting.name}/{name}", b"key", shares_memory=True)
    inner = comm.connect(rank=group.rank, world_size=group.world_size, meeting=meeting, timeout_s=timeout_s)
    try:
        yield inner
    finally:
        inner.close()


def shared_bytes() -> int:
    """How much of this process's address space is shared memory without a name."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:hetseq" in line]
    return sum(int(stop, 16) - int(start, 16) for start, _, stop in (words[0].partition("-") for words in lines))


def values(rank: int, step: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randn(elements, generator=generator, dtype=torch.float64) * 100).to(dtype)


def add(group: GlooGroup, sizes: list[int]) -> bool:
    """Sums of all kinds and sizes, over steps and at uneven speeds: the sum in rank order, to the bit."""
    sleeping = random.Random(group.rank)
    with sharing(group) as inner:
        memory = [inner.zeros(size, dtype, CPU) for size in sizes for dtype in KINDS]
        for step in range(6):
            pending = []
            for tensor in memory:
                tensor.copy_(values(group.rank, step, tensor.numel(), tensor.dtype))
                pending.append(inner.all_reduce_sum(tensor))
                time.sleep(sleeping.random() / 500)
            for tensor, work in zip(memory, pending):
                work.wait()
                time.sleep(sleeping.random() / 500)
                terms = [values(rank, step, tensor.numel(), tensor.dtype) for rank in range(group.world_size)]
                right = terms[0]
                for term in terms[1:]:
                    right = right + term
                assert torch.equal(tensor, right), (step, tensor.numel(), tensor.dtype)
    return shared_bytes() > 0


@pytest.mark.parametrize("world", [2, 3, 5])
def test_sums_are_those_in_rank_order_whatever_the_size(world: int) -> None:
    assert all(run_ranks(add, world, [1, 2, 15, 16, 17, 100, 70_001]))


@pytest.mark.slow
def test_sums_of_more_than_one_piece_per_slice() -> None:
    assert all(run_ranks(add, 3, [1_000_003]))


def gather(group: GlooGroup) -> list[int]:
    with sharing(group) as inner:
        rows = []
        for width in (1, 40, 4096, 4097, 10_000):  # beyond 4,096 words another road
            row = np.arange(width, dtype=np.int64) + 100_000 * group.rank
            table = inner.all_gather_rows(row)
            assert table.shape == (group.world_size, width)
            rows += table[:, -1].tolist()
        inner.broadcast(tensor := torch.full((3,), float(group.rank)), source=1)
        return [*rows, int(tensor.sum())]


def test_rows_of_all_ranks_in_rank_order() -> None:
    last = [100_000 * rank + width - 1 for width in (1, 40, 4096, 4097, 10_000) for rank in range(3)]
    assert run_ranks(gather, 3) == [[*last, 3]] * 3


def leave_at_once(group: GlooGroup) -> int:
    """A rank that has all it needs ends while others still take in what came: nobody misses it."""
    for number in range(60):
        with sharing(group, f"group-{number}") as inner:
            memory = inner.zeros(8, torch.float64, CPU)
            memory.fill_(number)
            inner.all_reduce_sum(memory).wait()
            assert memory.eq(3 * number).all()
            total = inner.all_gather_rows(np.array([number], np.int64)).sum()
        assert total == 3 * number
        assert shared_bytes() > 0
        del memory
    return shared_bytes()


def test_who_is_done_may_leave_and_no_memory_stays() -> None:
    assert run_ranks(leave_at_once, 3) == [0, 0, 0]


def build_again(group: GlooGroup) -> list[bool]:
    """Reducers one after another, as where a run goes back to a checkpoint: each takes the memory of one."""
    with sharing(group) as inner:
        held = []
        for _ in range(3):
            parameters = [torch.nn.Parameter(torch.zeros(5000))]
            reducer = GradientReducer(parameters, inner, bucket_bytes=1 << 20)
            held.append(shared_bytes())
            reducer.close()
            del reducer, parameters
            gc.collect()
        return [held[0] > 0, held[1] == held[0], held[2] == held[0]]


def test_a_closed_reducer_gives_the_shared_memory_back() -> None:
    assert run_ranks(build_again, 2) == [[True] * 3] * 2


def lose(group: GlooGroup, how: str, when: str) -> tuple[str, float]:
    """Rank 1 dies or stops at some moment of a step."""
    with ExitStack() as stack:
        inner = stack.enter_context(sharing(group, timeout_s=2.0))
        memory = inner.zeros(1000, torch.float32, CPU)
        inner.all_gather_rows(np.zeros(1, np.int64))
        if group.rank == 1 and when == "before":
            os.kill(os.getpid(), getattr(signal, how))
        began = time.monotonic()
        try:
            pending = inner.all_reduce_sum(memory)
            if group.rank == 1 and when == "ready":
                os.kill(os.getpid(), getattr(signal, how))
            if group.rank == 1 and when == "summed":
                dying = partial(os.kill, os.getpid(), getattr(signal, how))
                stack.enter_context(mock.patch.object(neighbours._Shared, "copy_other_slices", dying))
            pending.wait()
            inner.all_gather_rows(np.zeros(1, np.int64))
        except PeerLostError as error:
            return str(error), time.monotonic() - began
    return "nothing", 0.0


@pytest.mark.alone
@pytest.mark.parametrize("when", ["before", "ready", "summed"])
def test_a_rank_that_dies_is_missed_at_once(when: str) -> None:
    for fate in run_ranks(lose, 3, "SIGKILL", when, dies=[1])[::2]:
        assert "lost a peer while waiting up to 2 s for" in fate[0]
        assert "of this machine is gone" in fate[0]
        assert fate[1] < 2, "not by the deadline"


@pytest.mark.alone
@pytest.mark.parametrize("when", ["before", "ready", "summed"])
def test_a_rank_that_stands_still_is_missed_after_the_deadline(when: str) -> None:
    for message, seconds in run_ranks(lose, 3, "SIGSTOP", when, dies=[1])[::2]:
        assert "lost a peer while waiting up to 2 s for" in message
        assert "of this machine" in message
        assert 1.5 < seconds < 5


def hurry(group: GlooGroup) -> list[float]:
    """Rank 0 begins the next step at once; rank 1 takes its time to take over what rank 0 has added up."""
    seen = []
    with sharing(group) as inner:
        memory = inner.zeros(64, torch.float64, CPU)
        copy = neighbours._Shared.copy_other_slices

        def dawdle(shared: neighbours._Shared) -> None:
            time.sleep(0.1)
            copy(shared)

        with mock.patch.object(neighbours._Shared, "copy_other_slices", dawdle if group.rank else copy):
            for step in range(3):
                memory.fill_(step)
                inner.all_reduce_sum(memory).wait()
                seen += sorted(set(memory.tolist()))
    return seen


def test_nobody_writes_into_memory_that_another_still_reads() -> None:
    assert run_ranks(hurry, 2) == [[0.0, 2.0, 4.0]] * 2


@pytest.mark.parametrize("has_read", [True, False])
def test_who_has_said_all_and_left_is_not_missed(has_read: bool) -> None:
    (first, one), (second, two) = (socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    met, rows = SharedMemoryRanks(0, {1: first, 2: second}), list[bytes]()
    asked = threading.Thread(target=lambda: rows.extend(met.all_gather(b"zero", timeout_s=5)))
    asked.start()
    assert two.recv(10)[1:] == b"zero"  # it was told last
    if has_read:
        one.recv(10)
    one.send(bytes([neighbours._ROW]) + b"one")
    one.close()
    while 1 not in met._gone and asked.is_alive():
        threading.Event().wait(0.001)
    two.send(bytes([neighbours._ROW]) + b"two")
    asked.join()
    assert rows == [b"zero", b"one", b"two"]
    with pytest.raises(RuntimeError, match="rank 1 of this machine is gone"):  # the twin: it is awaited again
        met.all_gather(b"zero", timeout_s=5)
    two.close()
    met.close()


def test_a_rank_that_dies_when_memory_is_handed_out_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    met = SharedMemoryRanks(0, {1: ours})
    theirs.send(bytes([neighbours._ROW, True]))
    new_memory = neighbours._new_memory
    gathered = met.all_gather

    def die_after_it(row: bytes, *, timeout_s: float) -> list[bytes]:
        rows = gathered(row, timeout_s=timeout_s)
        theirs.close()
        return rows

    monkeypatch.setattr(met, "all_gather", die_after_it)
    made = list[int]()
    monkeypatch.setattr(neighbours, "_new_memory", lambda size: made.append(new_memory(size) or 0) or made[-1])
    with pytest.raises(neighbours.NeighbourError, match="rank 1 of this machine is gone"):
        met.zeros(10, torch.float32, timeout_s=5)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])
    met.close()


def test_who_answers_at_a_door_without_the_key_is_no_rank() -> None:
    door, name = MemoryDoor(), os.urandom(16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as false_door:
        false_door.bind("\0hetseq-" + name.hex())
        false_door.listen()

        def answer() -> None:
            with false_door.accept()[0] as connection:
                connection.recv(100)
                connection.send(bytes(32))

        answers = threading.Thread(target=answer)
        answers.start()
        with pytest.raises(ConnectionRefusedError, match="the process that answers as rank 0 lacks the key"):
            door.meet(rank=1, names=[name, door.name], key=b"k", timeout_s=5)
        answers.join()
    door.close()


def flood(group: GlooGroup) -> float:
    """More words than the sockets hold, from all at once, before anybody listens."""
    with sharing(group) as inner:
        memory = [inner.zeros(1, torch.float32, CPU) for _ in range(3)]
        for tensor in memory:
            tensor.fill_(1)
        pending = [inner.all_reduce_sum(memory[number % 3]) for number in range(3000)]
        for work in pending:
            work.wait()
        return float(memory[0])


def test_more_words_than_the_sockets_hold_block_nobody() -> None:
    first, second = run_ranks(flood, 2)
    assert first == second > 2


def refuse(*_: Any, **__: Any) -> None:
    raise OSError("no")


def do_without(group: GlooGroup, what: str) -> tuple[float, int, bool]:
    """What keeps one rank from sharing keeps all of them, and the sums are as right."""
    replaced: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "machine": (comm, "machine", lambda: os.urandom(16)),
        "door": (comm, "open_door", lambda: None),
        "meeting": (MemoryDoor, "meet", refuse),
        "memory": (neighbours, "_new_memory", lambda size: None),
    }
    with ExitStack() as stack:
        if what in replaced and group.rank == 1:
            stack.enter_context(mock.patch.object(*replaced[what]))
        stack.enter_context(mock.patch.object(comm, "_MEET_S", 0.5))
        inner = stack.enter_context(sharing(group))
        memory = inner.zeros(5, torch.float32, CPU)
        memory.fill_(group.rank + 1)
        inner.all_reduce_sum(memory).wait()
        total = inner.all_gather_rows(np.array([group.rank], np.int64)).sum()
        return float(memory.sum()), int(total), shared_bytes() > 0


@pytest.mark.parametrize("what", ["machine", "door", "meeting", "memory"])
def test_what_keeps_one_rank_from_sharing_keeps_all(what: str) -> None:
    assert run_ranks(do_without, 3, what) == [(30.0, 3, False)] * 3
    assert run_ranks(do_without, 3, "nothing") == [(30.0, 3, True)] * 3  # the twin


def other_memory(group: GlooGroup) -> list[float]:
    """Tensors that were not made for it, views and empty ones are added up as well."""
    with sharing(group) as inner:
        shared = inner.zeros(6, torch.float32, CPU)
        own, empty = torch.ones(4), inner.zeros(0, torch.float32, CPU)
        shared.fill_(group.rank)
        for tensor in (own, shared[:3], empty):
            inner.all_reduce_sum(tensor).wait()
        return [*own.tolist(), *shared.tolist()]


def test_other_tensors_take_the_other_road() -> None:
    assert run_ranks(other_memory, 2) == [[2.0] * 4 + [1.0] * 3 + [float(rank)] * 3 for rank in range(2)]


def test_a_stranger_at_the_door_takes_nobodys_place() -> None:
    doors = [MemoryDoor(), MemoryDoor()]
    names = [door.name for door in doors]
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    for stranger, said in zip(strangers, (b"", (1).to_bytes(4, "big") + bytes(32), b"\xff" * 36)):
        stranger.connect("\0hetseq-" + names[0].hex())
        stranger.send(said) if said else stranger.close()
    met: dict[int, SharedMemoryRanks] = {}
    threads = [
        threading.Thread(
            target=lambda rank=rank: met.update({rank: doors[rank].meet(rank=rank, names=names, key=b"k", timeout_s=5)})
        )
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asked = threading.Thread(target=met[0].all_gather, args=(b"zero",), kwargs={"timeout_s": 5})
    asked.start()
    assert met[1].all_gather(b"one", timeout_s=5) == [b"zero", b"one"]
    asked.join()
    owned: list[Any] = [*met.values(), *doors, *strangers]
    for own in owned:
        own.close()


def test_another_user_is_sent_away_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_user_of", lambda connection: os.getuid() + 1)
    doors = [MemoryDoor(), MemoryDoor()]
    names = [door.name for door in doors]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect("\0hetseq-" + names[0].hex())  # whoever is heard may keep us waiting
        silent.settimeout(5)
        asked = threading.Thread(target=lambda: silent.recv(1))
        asked.start()
        with pytest.raises(TimeoutError):
            doors[0].meet(rank=0, names=names, key=b"k", timeout_s=0.3)
        asked.join()
    for door in doors:
        door.close()


def test_a_rank_without_the_key_is_not_met() -> None:
    doors = [MemoryDoor(), MemoryDoor()]
    names, errors = [door.name for door in doors], []

    def meet(rank: int) -> None:
        try:
            doors[rank].meet(rank=rank, names=names, key=b"k%d" % rank, timeout_s=0.5).close()
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    for door in doors:
        door.close()
