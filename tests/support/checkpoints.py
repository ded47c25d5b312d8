"""Checkpoints for tests: small states, ranks as threads, and a disk that fails at the n-th call.

`together` runs ranks as threads of this process over a gather that needs no network; the real group has its own test
in tests/distributed. `Disk` stands between HetSeq and the functions of `os` that change the disk.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetseq.checkpoint import CheckpointManager, CheckpointOptions, Identity, Loaded, Retention, SaveResult
from hetseq.checkpoint.arena import Arena
from hetseq.comm.group import LocalGroup

LINEAGE = "00112233445566aa"
SMALL = 1000  # bytes of an image


@contextmanager
def held(run_id: str, image_bytes: int = SMALL) -> Iterator[Arena]:
    """An arena in use, whose file stays."""
    arena = Arena.create(run_id, image_bytes)
    try:
        yield arena
    finally:
        arena.close(unlink=False)


class ThreadGroup:
    """A rank of several in one process."""

    def __init__(self, rank: int, world_size: int, barrier: threading.Barrier, rows: list[Any]) -> None:
        self.rank, self.world_size = rank, world_size
        self._barrier, self._rows = barrier, rows

    def all_gather_rows(self, row: Any) -> Any:
        self._rows[self.rank] = row.copy()
        self._barrier.wait()
        gathered = np.stack(self._rows)
        self._barrier.wait()
        return gathered

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> None:
        self._rows[self.rank] = tensor
        self._barrier.wait()
        assert tensor.nbytes == self._rows[source].nbytes  # gloo would read or write past the end
        if self.rank != source:
            tensor.copy_(self._rows[source])
        self._barrier.wait()


def together(world_size: int, fn: Callable[[Any], Any]) -> list[Any]:
    """What `fn(group)` returns, or the exception it raises, on every rank."""
    barrier, rows = threading.Barrier(world_size, timeout=20), [None] * world_size
    results: list[Any] = [None] * world_size

    def live(rank: int) -> None:
        try:
            results[rank] = fn(ThreadGroup(rank, world_size, barrier, rows))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(1, world_size)]
    for thread in threads:
        thread.start()
    live(0)
    for thread in threads:
        thread.join()
    return results


def manager(run: Path, group: Any = None, **settings: Any) -> CheckpointManager:
    """A manager that does not wait and has a fixed clock."""
    rare = {"patience_s": 0.0, "underway_s": 0.0, "clock": lambda: 1.7e9}
    rare |= {field.name: settings.pop(field.name) for field in fields(CheckpointOptions) if field.name in settings}
    settings = {"run_id": "a-run", "retention": Retention(), **settings, "options": CheckpointOptions(**rare)}
    return CheckpointManager(run, group=group or LocalGroup(), **settings)


def tensors_of(step: int, elements: int = 1000) -> dict[str, torch.Tensor]:
    """A state whose every number tells its step."""
    return {
        "model.a": torch.full((elements,), float(step)),
        "model.b": torch.full((7, 3), step, dtype=torch.int64),
        "optim.a.step": torch.tensor(float(step)),
    }


def save(
    run: Path,
    step: int,
    *,
    group: Any = None,
    generation: int = 0,
    kinds: Any = ("epoch",),
    nonce: int | None = None,
    elements: int = 1000,
    value: int | None = None,
    **settings: Any,
) -> SaveResult:
    """Save the state of `step`, or numbers that tell `value` in its place."""
    return manager(run, group, **settings).save(
        tensors_of(step if value is None else value, elements),
        {"step": step},
        identity=Identity(step, generation, LINEAGE),
        nonce=step * 16 + generation if nonce is None else nonce,
        kinds=kinds,
    )


def loaded_step(run: Path, which: str = "latest") -> int | None:
    """The step of the state that is loaded, after a check that no number in it is of another step."""
    loaded = manager(run).load(which)
    return None if loaded is None else checked_step(loaded)


def checked_step(loaded: Loaded) -> int:
    """The step of a state, after a check that no number in it is of another step."""
    step = loaded.identity.step
    expected = tensors_of(step, loaded.tensors["model.a"].numel())
    assert loaded.state == {"step": step}
    assert {name: tensor.dtype for name, tensor in loaded.tensors.items()} == {
        name: tensor.dtype for name, tensor in expected.items()
    }
    assert all(torch.equal(loaded.tensors[name], expected[name]) for name in expected)
    return step


def keeping(run: Path, group: Any = None, *, elements: int = 1000, **settings: Any) -> CheckpointManager:
    """A manager with room for two states in memory; its run has an id of its own."""
    own = manager(run, group, **{"run_id": str(run), "keeps_states": True, **settings})
    run.mkdir(exist_ok=True)
    own.recover()
    assert own.prepare(tensors_of(0, elements)) is None
    return own


def keep(own: CheckpointManager, step: int, *, elements: int = 1000, generation: int = 0, notes: str = "") -> bool:
    """Keep the state of `step` in memory; sealed when this returns."""
    state = {"step": step, "notes": notes} if notes else {"step": step}
    is_kept = own.keep(
        tensors_of(step, elements),
        state,
        identity=Identity(step, generation, LINEAGE),
        nonce=step * 16 + 8 + generation,
        at_once=["model.b"],
    )
    own.settle()
    seal(own)
    return is_kept


def seal(own: CheckpointManager) -> None:
    """Wait until the last copy is sealed."""
    assert own._background is not None
    for snapshot in own._background._snapshots:
        snapshot.finish()


def leave(run: Path, *steps: int, ranks: int = 1, **settings: Any) -> None:
    """A run whose ranks kept these states, and failed."""

    def live(group: Any) -> None:
        own = keeping(run, group, **settings)
        for step in steps:
            keep(own, step, elements=settings.get("elements", 1000))
        own.close(has_failed=True)

    assert together(ranks, live) == [None] * ranks


def started(run: Path, group: Any = None, **settings: Any) -> CheckpointManager:
    """The manager of the next start, which has looked into the memory; to be closed."""
    own = manager(run, group, **{"run_id": str(run), "keeps_states": True, **settings})
    own.recover()
    return own


class NoWriter:
    """A substitute for the writer process where nothing is written."""

    is_busy, share = False, 0.0

    def __init__(self, *args: Any) -> None:
        pass

    def close(self, *, is_hasty: bool = False) -> None:
        pass


def folder(run: Path, step: int) -> Path:
    """The only folder of a step."""
    (found,) = (run / "checkpoints").glob(f"step-{step:09d}.*")
    return found


def contents(run: Path) -> set[str]:
    """The folders of attempts."""
    return {path.name for path in (run / "checkpoints").glob("step-*")}


class Disk:
    """Counts the calls that change the disk below `root`, and calls `fault(name)` in place of the chosen ones."""

    CALLS = ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir", "ftruncate")

    def __init__(self, root: Path, is_hit: Callable[[int, str], bool], fault: Callable[..., Any]) -> None:
        self.root, self.is_hit, self.fault = str(root), is_hit, fault
        self.calls: list[str] = []
        self._mine: set[int] = set()  # descriptors below root
        self._lock = threading.Lock()

    @contextmanager
    def between(self) -> Iterator[Disk]:
        """Stand between this process and its disk."""
        real = {name: getattr(os, name) for name in self.CALLS}
        try:
            for name in self.CALLS:
                setattr(os, name, self._wrap(name, real[name]))
            yield self
        finally:
            for name in self.CALLS:
                setattr(os, name, real[name])

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *args: Any, **kwargs: Any) -> Any:
            is_ours = target in self._mine if isinstance(target, int) else str(target).startswith(self.root)
            if not is_ours:
                return real(target, *args, **kwargs)
            with self._lock:
                self.calls.append(name)
                hit = self.is_hit(len(self.calls), name)
            if hit:
                self.fault(name, real, target, *args)
            result = real(target, *args, **kwargs)
            if name == "open":
                self._mine.add(result)
            elif name == "close":
                self._mine.discard(target)
            return result

        return call


def fork(job: Callable[[int], Any]) -> tuple[int, int]:
    """Pid of a child that runs `job(descriptor)` and ends with 0, or 7 if it raised; and the other end of its pipe."""
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: the threads of torch are at rest here
        pid = os.fork()
    if pid == 0:
        code = 7
        try:
            os.close(ours)
            job(theirs)
            code = 0
        finally:
            os._exit(code)
    os.close(theirs)
    return pid, ours


def reap(pid: int, pipe: int) -> tuple[int, list[int]]:
    """How the child ended (minus the signal, or its exit code), and the bytes it wrote, as numbers."""
    said = b""
    while block := os.read(pipe, 4096):
        said += block
    os.close(pipe)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), list(said)
