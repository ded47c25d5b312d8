"""`run_ranks`: the ranks of a test as processes, from a warm server, about 0.1 s a call.

A rank is a module-level function `fn(group, *args)` that returns facts; the assertions are in the test. The server
is a multiprocessing forkserver that has imported torch, pytest and hetseq once per pytest run (some seconds, in the
background while the tests of one process run); a rank is a fork of it with one thread and with warnings as errors. It
sees the environment as it was when the server started, not later changes by a test.

Three ways to fail, three exceptions: a rank raised (its traceback is shown), died (the signal or exit code), or hung
(the stack it hangs in). A rank that only lost its peers is never named as the culprit while there is another one.
"""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# what the server imports before the first fork; a name that does not exist is passed over
WARM = (
    "torch",
    "torch.distributed",
    "torch._dynamo",  # 1.6 s, which torch otherwise spends when the first optimizer is made
    "numpy",
    "pytest",
    "hetseq.comm.group",
    "hetseq.task",
    "hetseq.training.optim",
    "hetseq.training.lr_scheduler",
    "hetseq.registry",
    "hetseq.data.fetch",
    "hetseq.data.loader",
    "hetseq.parallel.gradient_sync",
    "hetseq.checkpoint",
    "hetseq.run.build",
    "tests.support.ranks",
    "tests.support.training",
)
# Once one rank has failed the others get this long to end by themselves (measured: a gloo peer notices a death in
# 0.1 s), so that the report shows all of them.
GRACE_S = 1.0


class RankFailure(Exception):
    """A rank did not do what the test expected; the message tells of every rank."""


class RankRaised(RankFailure):
    """A rank ended with an exception."""


class RankDied(RankFailure):
    """A rank's process ended without a word: a signal, or os._exit."""


class RankHung(RankFailure):
    """A rank had neither returned nor failed when the time was over."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    group_timeout_s: float | None = None,
    dies: Sequence[int] = (),
) -> list[Any]:
    """Run `fn(group, *args)` on every rank and return what each rank returned, in rank order.

    `group` is a hetseq.comm.group.Group over loopback, for a world of one a LocalGroup. `timeout_s` bounds the whole
    call; `group_timeout_s` is the deadline of a collective (default: later than `timeout_s`, so a hang is reported as
    one). `dies` names ranks that the test kills or stops (SIGSTOP) on purpose: their result is None, and the failure is
    then that one of them returns or raises.

    Raises RankRaised, RankDied or RankHung. `fn`, `args` and the results travel by pickle.
    """
    job = pickle.dumps((fn, args))  # by plain pickle: torch's own would pass tensors as handles of this process
    port = _store_port() if world_size > 1 else 0
    prefix = uuid.uuid4().hex  # of the store that all calls share
    warm_up()
    ranks: list[_Rank] = []
    try:
        for rank in range(world_size):
            life = _Life(job, rank, world_size, port, prefix, group_timeout_s or timeout_s + 2 * GRACE_S)
            ranks.append(_start(life))
        fates = _watch(ranks, time.monotonic() + timeout_s, frozenset(dies))
    finally:
        for started in ranks:
            started.end()
    _judge(fates, timeout_s, frozenset(dies))
    return [fate.value for fate in fates]


def warm_up() -> None:
    """Start the server if it does not run; returns at once, the server imports in the background."""
    _context.set_forkserver_preload(list(WARM))
    # the server takes its search path from the environment only (multiprocessing drops sys.path up to Python 3.13)
    with _environment(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join([str(ROOT), *filter(None, sys.path)])):
        forkserver.ensure_running()


def cool_down() -> None:
    """Close the store; the server ends with this process."""
    _store.cache_clear()


_context = multiprocessing.get_context("forkserver")


@functools.lru_cache(maxsize=1)
def _store() -> Any:
    from torch import distributed  # imported with the first ranks, not with the tests that need none

    # torch would listen on every interface; it takes over this socket, which does not
    listener = socket.create_server(("127.0.0.1", 0))
    port, descriptor = listener.getsockname()[1], listener.detach()
    store = distributed.TCPStore(
        "127.0.0.1", port, None, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )
    return store, port


def _store_port() -> int:
    return int(_store()[1])


class TestStore:
    """The store of a test's ranks: torch's own, in the process of the test."""

    __test__ = False

    def __init__(self, port: int) -> None:
        from torch import distributed

        self._client = distributed.TCPStore("127.0.0.1", port, None, is_master=False)

    def set(self, key: str, value: bytes) -> None:
        self._client.set(key, value)

    def check(self) -> None:
        pass

    def get(self, key: str, timeout_s: float) -> bytes:
        self._client.wait([key], timedelta(seconds=timeout_s))
        return bytes(self._client.get(key))


@dataclass(frozen=True)
class _Life:
    """The instructions of a rank."""

    job: bytes
    rank: int
    world_size: int
    store_port: int
    prefix: str
    group_timeout_s: float


@dataclass(frozen=True)
class _Fate:
    """The fate of a rank: returned, raised, died, or hung; `blameless` where it only lost its peers."""

    rank: int
    how: str
    value: Any = None
    story: str = ""
    blameless: bool = False


class _Rank:
    """A started rank, as its parent sees it."""

    def __init__(self, life: _Life, process: BaseProcess, facts: Connection, stacks: Connection) -> None:
        self.number, self.process, self.facts, self.stacks = life.rank, process, facts, stacks
        self.has_spoken = False

    def fate(self) -> _Fate:
        """Blocks until the rank says something or ends."""
        try:
            how, value, story, blameless = pickle.loads(self.facts.recv_bytes())
        except (EOFError, OSError):
            self.process.join(5)
            return _Fate(self.number, "died", story=_describe_exit(self.process.exitcode))
        self.has_spoken = True
        return _Fate(self.number, how, value, story, blameless)

    def stack(self) -> str:
        """Stacks of the rank and its loader processes, for a rank that does not answer."""
        if self.process.pid is None or not self.process.is_alive():
            return ""
        own = self._stack_of(self.process.pid)
        children = _children(self.process.pid)
        return own + "".join(f"\nits process {child}:\n{self._stack_of(child)}" for child in children)

    def _stack_of(self, pid: int) -> str:
        os.kill(pid, signal.SIGUSR2)  # a forked process answers as its rank does, into the same pipe
        text = b""
        while connection.wait([self.stacks], timeout=0.5):  # a stopped process writes nothing
            chunk = os.read(self.stacks.fileno(), 65536)
            if not chunk:
                break
            text += chunk
        return text.decode(errors="replace") or "(no stack: the process is stopped, or inside a library's call)"

    def is_stopped(self) -> bool:
        stat = Path(f"/proc/{self.process.pid}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] in ("T", "t")

    def end(self) -> None:
        """Leave no process: ranks that answered end by themselves, all others are killed."""
        self.process.join(5 if self.has_spoken else 0)
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self.process.close()
        self.facts.close()
        self.stacks.close()


def _children(pid: int) -> list[int]:
    """The processes that it has forked and that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(path.parent.name))
    return sorted(found)


def _start(life: _Life) -> _Rank:
    facts, facts_of_rank = _context.Pipe(duplex=False)
    stacks, stacks_of_rank = _context.Pipe(duplex=False)
    process = _context.Process(
        target=_live, args=(life, facts_of_rank, stacks_of_rank), name=f"rank {life.rank}", daemon=True
    )
    try:
        process.start()
    except (EOFError, OSError) as error:
        facts.close()
        stacks.close()
        raise RankFailure(
            f"the server of the ranks is gone ({error!r}): one of {', '.join(WARM)} may not import. Try each by hand."
        ) from error
    finally:
        facts_of_rank.close()
        stacks_of_rank.close()
    return _Rank(life, process, facts, stacks)


def _watch(ranks: list[_Rank], deadline: float, dies: frozenset[int]) -> list[_Fate]:
    """One fate per rank, in rank order; waits for all, but not much longer than for the first failure."""
    fates: dict[int, _Fate] = {}
    silent = {rank.facts: rank for rank in ranks}
    while silent:
        if fates and all(rank.number in dies for rank in silent.values()):
            if all(rank.is_stopped() for rank in silent.values()):
                break
            deadline = min(deadline, time.monotonic() + GRACE_S)
        ready = connection.wait(list(silent), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = silent.pop(pipe)
            fates[rank.number] = fate = rank.fate()
            if fate.how != "returned" and rank.number not in dies:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    for rank in silent.values():
        others_failed = any(fate.how != "returned" and number not in dies for number, fate in fates.items())
        story = "" if rank.number in dies else rank.stack()
        fates[rank.number] = _Fate(rank.number, "hung", story=story, blameless=others_failed)
    return [fates[rank.number] for rank in ranks]


def _judge(fates: list[_Fate], timeout_s: float, dies: frozenset[int]) -> None:
    """Raise what the test should see, if anything; a culprit comes before ranks that only lost their peers."""
    for fate in fates:
        if fate.rank in dies and fate.how in ("returned", "raised"):
            raise RankFailure(f"rank {fate.rank} was to die and {fate.how} instead\n" + _report(fates))
    failed = [fate for fate in fates if fate.how != "returned" and fate.rank not in dies]
    if not failed:
        return
    order = ["died", "raised", "hung"]
    culprit = min(failed, key=lambda fate: (fate.blameless, order.index(fate.how), fate.rank))
    report = _report(fates)
    if culprit.how == "died":
        raise RankDied(f"rank {culprit.rank} of {len(fates)} died: {culprit.story}\n{report}")
    if culprit.how == "raised":
        raise RankRaised(f"rank {culprit.rank} of {len(fates)} raised\n{report}")
    raise RankHung(f"rank {culprit.rank} of {len(fates)} had not ended after {timeout_s:g} s\n{report}")


def _report(fates: list[_Fate]) -> str:
    lines = []
    for fate in fates:
        lines.append(f"--- rank {fate.rank} {fate.how}" + (" (because it lost its peers)" if fate.blameless else ""))
        if fate.story:
            lines.append(fate.story.rstrip())
    return "\n".join(lines)


def _describe_exit(exit_code: int | None) -> str:
    if exit_code is None:
        return "closed its pipe and still runs"
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}, no exception"


def _live(life: _Life, facts: Connection, stacks: Connection) -> None:
    """A rank, from its fork to its end; never returns."""
    try:
        faulthandler.register(signal.SIGUSR2, file=stacks.fileno(), all_threads=True)
        warnings.simplefilter("error")
        message = pickle.dumps(("returned", _play(life), "", False))
    except BaseException as error:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        message = pickle.dumps(("raised", None, text, _is_want_of_peers(error)))
    facts.send_bytes(message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no exit handlers: those inherited from the server are not this rank's to run


def _play(life: _Life) -> Any:
    import torch

    from hetseq.comm import group as comm

    torch.set_num_threads(1)
    fn, args = pickle.loads(life.job)
    if life.world_size == 1:
        return fn(comm.LocalGroup(), *args)
    meeting = comm.GroupMeeting(TestStore(life.store_port), life.prefix, life.prefix.encode())
    group = comm.connect(rank=life.rank, world_size=life.world_size, meeting=meeting, timeout_s=life.group_timeout_s)
    try:
        return fn(group, *args)
    finally:
        group.close()


def _is_want_of_peers(error: BaseException) -> bool:
    from hetseq.errors import PeerLostError, RendezvousError

    return isinstance(error, (PeerLostError, RendezvousError))


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
