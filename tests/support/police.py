"""Leak check of the tests: threads, processes, environment variables, signal handlers, shared memory.

`Scene.now()` before the test, `scene.leaks()` after it: one sentence per leak. Anything about to end gets a
moment; then each remaining leak is named. The fixture in `conftest.py` turns the sentences into a failure.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

# what libraries set once, on their first import
LIBRARIES_SET = frozenset(
    {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "PYTEST_CURRENT_TEST", "PYTEST_VERSION", "TORCHINDUCTOR_CACHE_DIR"}
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
PATIENCE_S = 2.0
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000


@dataclass(frozen=True)
class Scene:
    """The traces that a test could leave, as they are at one moment."""

    threads: frozenset[threading.Thread]
    processes: frozenset[int]
    environment: dict[str, str]
    handlers: tuple[object, ...]
    folder: str
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> Scene:
        """The traces of this moment."""
        return cls(
            threads=frozenset(threading.enumerate()),
            processes=frozenset(_descendants()),
            environment=dict(os.environ),
            handlers=tuple(signal.getsignal(number) for number in SIGNALS),
            folder=os.getcwd(),
            shared_memory=frozenset(_shared_memory()),
        )

    def leaks(self, *, patience_s: float = PATIENCE_S) -> list[str]:
        """Differences since this scene, one sentence each."""
        found = [
            *(f"thread {thread.name!r} still runs" for thread in _settled(self._new_threads, patience_s)),
            *(f"process {pid} still runs: {_command(pid)}" for pid in _settled(self._new_processes, patience_s)),
            *(f"/dev/shm/{name} is left" for name in _settled(self._new_shared_memory, patience_s)),
        ]
        now = dict(os.environ)
        for name in sorted((self.environment.keys() | now.keys()) - LIBRARIES_SET):
            before, after = self.environment.get(name), now.get(name)
            if before != after:
                found.append(f"environment variable {name} was {before!r} and is {after!r}")
        for number, handler in zip(SIGNALS, self.handlers):
            if signal.getsignal(number) != handler:
                found.append(f"the handler of {number.name} was {handler!r} and is {signal.getsignal(number)!r}")
        if os.getcwd() != self.folder:
            found.append(f"the working directory was {self.folder} and is {os.getcwd()}")
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            found.append("torch's default process group is initialised")
        return found

    def restore(self) -> None:
        """Undo what can be undone, so that one leak fails one test."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        for number, handler in zip(SIGNALS, self.handlers):
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)  # type: ignore[arg-type]
        for pid in self._new_processes():
            os.kill(pid, signal.SIGKILL)
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()

    def _new_threads(self) -> list[threading.Thread]:
        return sorted(set(threading.enumerate()) - self.threads, key=lambda thread: thread.name)

    def _new_processes(self) -> list[int]:
        return sorted(set(_descendants()) - self.processes)

    def _new_shared_memory(self) -> list[str]:
        return sorted(set(_shared_memory()) - self.shared_memory)


def adopt_orphans() -> None:
    """From now on a process whose parent has ended becomes our child and not init's: no leak escapes (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def own_shared_memory() -> bool:
    """From now on /dev/shm is empty and this process's and its descendants' alone; False without the right to mount.

    Leftovers of a killed rank belong to no process: in a /dev/shm that two test runs share, each would accuse
    the other's tests. In one of its own everything is its own.
    """
    if sys.platform != "linux" or os.getuid() != 0 or not Path("/dev/shm").is_dir():
        return False
    before = os.statvfs("/dev/shm")
    options = f"mode=1777,size={before.f_blocks * before.f_frsize}".encode()
    libc = ctypes.CDLL(None)
    return (
        libc.unshare(_CLONE_NEWNS) == 0
        and libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) == 0  # or every process would see the next mount
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, options) == 0
    )


def _settled(look: Callable[[], list], patience_s: float) -> list:  # type: ignore[type-arg]
    """What `look` still finds after a grace period."""
    deadline = time.monotonic() + patience_s
    while (found := look()) and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    return found


def _descendants() -> Iterator[int]:
    """Living processes that descend from this one, save the two servers of multiprocessing."""
    children: dict[int, list[int]] = {}
    # every test looks three times; pathlib would take a millisecond longer for each
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            descriptor = os.open(f"/proc/{name}/stat", os.O_RDONLY)
        except OSError:
            continue  # it has just ended
        try:
            state, parent = os.read(descriptor, 1024).rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        finally:
            os.close(descriptor)
        if state not in b"ZX":
            children.setdefault(int(parent), []).append(int(name))
    servers = {
        getattr(forkserver._forkserver, "_forkserver_pid", None),
        getattr(resource_tracker._resource_tracker, "_pid", None),
    }
    to_visit = [os.getpid()]
    while to_visit:
        for pid in children.get(to_visit.pop(), []):
            to_visit.append(pid)
            if pid not in servers:
                yield pid


def _shared_memory() -> Iterator[str]:
    """Names in /dev/shm that are HetSeq's, of this user."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return
    for path in folder.glob("hetseq*"):
        try:
            is_ours = path.lstat().st_uid == os.getuid() and not _is_used_elsewhere(path)
        except FileNotFoundError:
            continue
        if is_ours:
            yield path.name


def _is_used_elsewhere(path: Path) -> bool:
    """Whether a process outside this test run maps the file: another run on the same machine owns it then."""
    ours = {os.getpid(), *_descendants()}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if int(maps.parent.name) in ours:
            continue
        try:
            if str(path) in maps.read_text():
                return True
        except OSError:
            continue  # it has just ended, or is another user's
    return False


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()[:200]
    except OSError:
        return "(it has just ended)"
