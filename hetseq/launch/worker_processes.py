"""Worker processes of this node: started from a warm fork server, connected by pipes, ended with their launcher.

Handles only processes and pipes. The launcher interprets the workers' records and exit statuses.

Every wait for the end of a process is bounded: a process that waits in the kernel for an unresponsive disk or network
mount cannot even be killed (`Worker.is_held`). It is left behind, and ends when the disk or mount responds.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from hetseq.cluster.membership.assignment import Assignment, Errand, ScriptJob
from hetseq.cluster.membership.exit_status import WorkerEnd
from hetseq.config.sections import Config
from hetseq.errors import ConfigError
from hetseq.system import faults
from hetseq.system.processes import STOP_SIGNALS
from hetseq.system.rank_phase import Cell, Phase

logger = logging.getLogger(__name__)

_HALF_S = 5.0  # for the rest of a message; a worker that stops in the middle of one is killed
_SECONDS = struct.Struct("ll")  # and microseconds, as setsockopt(2) has them
_LOOK_S = 0.005
_OURS = "hetseq"  # any text sets PYTHONSAFEPATH; this text marks the value as HetSeq's, not the user's
_NO_STATUS = 255  # the exit code from multiprocessing if the fork server cannot report it
_SERVER_S = 0.5  # for a fork server whose pipes are closed to end
#: bytes: multiprocessing puts a socket two names of 32 characters deeper, and its path has at most 107
_LONGEST_FOLDER = 75
_HELD_S = 10.0  # for a killed process to end: it may have to free much memory


class Worker:
    """One worker process and the pipe between it and the launcher."""

    def __init__(
        self, rank: int, starts: int, process: Any, channel: Connection, *, device: str = "", cell: Cell | None = None
    ) -> None:  # fmt: skip
        self.rank, self.starts = rank, starts  # its slot, and the number of earlier starts
        self.device, self.cell = device, cell  # where it computes; shared memory with its phase
        self._process, self._channel = process, channel
        self._server = server_pid()  # the fork server of this process
        _set_deadline(channel, _HALF_S)
        self.sentinel: int = process.sentinel
        self.is_ready = False  # it has accepted its config and the checkpoint, and begins to train
        self._report: dict[str, Any] = {}
        self._killed_s: float | None = None
        self._is_closed = False

    def sources(self) -> list[Any]:
        """Objects to wait on: its end, and its pipe until that is closed."""
        return [self.sentinel] if self._channel.closed else [self.sentinel, self._channel]

    @property
    def pid(self) -> int:
        """The process id; valid until `kill` has closed the process object."""
        return int(self._process.pid)

    @property
    def is_held(self) -> bool:
        """Whether it was killed, but the kernel has not ended it within `_HELD_S`."""
        if self._is_closed or self._killed_s is None or time.monotonic() - self._killed_s < _HELD_S:
            return False
        return bool(self._process.is_alive())

    def why_held(self) -> str:
        """The message about a worker that is held."""
        return (
            f"rank {self.rank} (pid {self._process.pid}) was killed but has not ended within {_HELD_S:.0f} s: the"
            " kernel holds it, as for a disk or network mount that does not respond; it is left behind until that does"
        )

    def fence(self) -> None:
        """Kill it, since the run continues without it; its end is noticed like any other."""
        if self._killed_s is None and not self._is_closed and self._process.is_alive():
            self._process.kill()
            self._killed_s = time.monotonic()

    def kill(self) -> bool:
        """End it if it is alive, and free its resources; the last method to call, and may be called twice.

        Waits for the process to end; returns False if it is held.
        """
        if self._is_closed:
            return True
        self.fence()
        self._is_closed = True
        if self.cell is not None:
            self.cell.close()
            self.cell = None
        self._process.join(max(0.0, (self._killed_s or 0.0) + _HELD_S - time.monotonic()))
        self._channel.close()
        if self._process.exitcode is None:
            return False
        self._process.close()  # now, not at the next garbage collection
        return True

    def tell(self, kind: str, **facts: Any) -> None:
        """Send it a record; does nothing if it has ended, and kills it if it does not read."""
        try:
            self._channel.send_bytes(json.dumps({"kind": kind, **facts}).encode())
        except BlockingIOError:
            self._give_up("has read nothing")
        except OSError:
            pass

    def listen(self) -> list[dict[str, Any]]:
        """Its new records, except `ready` and `end`, which are kept here. Waits only for the rest of a message, at most
        `_HALF_S`."""
        said = []
        try:
            while not self._channel.closed and self._channel.poll():
                message = json.loads(self._channel.recv_bytes())
                self.is_ready = self.is_ready or message["kind"] == "ready"
                if message["kind"] == "end":
                    self._report = message
                elif message["kind"] != "ready":
                    said.append(message)
        except BlockingIOError:
            self._give_up("has stopped in the middle of a message")
        except (EOFError, OSError):  # everything it said has been read
            self._channel.close()
        return said

    def _give_up(self, why: str) -> None:
        """Kill the worker: the rest of the pipe could not be parsed."""
        logger.warning("the process of rank %d %s for %.0f s and is killed", self.rank, why, _HALF_S)
        self._channel.close()
        self.fence()

    def end(self) -> WorkerEnd:
        """How the process ended; it must have ended or be held."""
        self.listen()
        self._channel.close()
        code = self._process.exitcode
        # the fork server reports the exit status; if the server is gone, multiprocessing returns 255
        is_untold = code == _NO_STATUS and not self._report
        server = self._server if is_untold and _has_ended(self._server, patience_s=_SERVER_S) else None
        return WorkerEnd(
            self.rank,
            -signal.SIGKILL if code is None or server is not None else code,
            self._report.get("code"),
            self._report.get("message", ""),
            self._report.get("is_secondary", False),
            self._report.get("has_left", False),
            self._report.get("has_lost_device", False),
            server,
        )


def _set_deadline(channel: Connection, seconds: float) -> None:
    """Let blocking calls on a pipe fail with BlockingIOError after `seconds`: a launcher has other workers to serve."""
    with socket.socket(fileno=os.dup(channel.fileno())) as pipe:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            pipe.setsockopt(socket.SOL_SOCKET, option, _SECONDS.pack(int(seconds), int(seconds % 1 * 1e6)))


def start_worker(
    config: Config,
    run_path: Path,
    placement: Assignment,
    errand: Errand | None = None,
    *,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Worker:
    """Start one rank, which uses the run directory `run_path`, to train or to run an errand.

    Waits until the fork server has imported torch. Raises EOFError if the server is killed because the worker is no
    longer wanted (`is_wanted`).
    """
    context = warm_forkserver()
    end, end_of_worker = context.Pipe(duplex=True)
    # a new process does not know the user's own Options classes, so only their values are sent
    own = {kind: dataclasses.asdict(values) for kind, values in config.extras.items()}
    placement = dataclasses.replace(placement, faults=os.environ.get(faults.VARIABLE, ""))
    cell = Cell()
    cell.enter(Phase.STARTING)
    arguments = (dataclasses.replace(config, extras={}), own, str(run_path), placement, end_of_worker, errand, cell)
    process = context.Process(target=_enter, args=arguments, name=f"rank-{placement.slot}")
    with _no_main_module():
        _start(process, is_wanted)
    end_of_worker.close()
    return Worker(placement.slot, placement.starts, process, end, device=placement.device, cell=cell)


def _start(process: Any, is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Start a process from the fork server, or from a new server if that one is killed meanwhile.

    Workers end with their server, and the launcher may notice their ends first. It may then ask the dying server for
    new workers, which accepts the request but is gone before it answers.
    """
    try:
        process.start()
    except (EOFError, ConnectionError):
        if not is_wanted():
            raise
        _await_end_of_server()  # else it would be considered alive again
        warm_forkserver()
        process.start()


def kill_server() -> None:
    """End the fork server if the worker it should start is no longer wanted; its other workers end with it."""
    if (pid := server_pid()) is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def server_pid() -> int | None:
    """The process id of the fork server; None if there is none."""
    from multiprocessing import forkserver

    return getattr(forkserver._forkserver, "_forkserver_pid", None)


def _await_end_of_server() -> None:
    pid = server_pid()
    deadline = time.monotonic() + _HELD_S
    while pid is not None and not _has_ended(pid, patience_s=0.0):
        if time.monotonic() > deadline:
            raise ProcessLookupError(
                f"the fork server, process {pid}, does not respond and has not ended for {_HELD_S:g} s"
            )
        time.sleep(_LOOK_S)


def _has_ended(pid: int | None, *, patience_s: float) -> bool:
    """Whether a child of this process has ended, even if it has been reaped since."""
    deadline = time.monotonic() + patience_s
    while pid is not None:
        try:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return True
        except ChildProcessError:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_S)
    return False


def end_all(workers: Sequence[Worker], tell: Callable[[str], None]) -> None:
    """End all of these workers, and print a line for each that is held; some may have ended before."""
    for worker in workers:
        worker.fence()  # all at once, so that they end in parallel
    for worker in workers:
        if not worker.kill():
            tell(worker.why_held())


def _enter(*arguments: Any) -> None:
    """Entry point of a worker process, which has torch loaded; the launcher has not."""
    if any(isinstance(argument, ScriptJob) for argument in arguments):
        from hetseq.launch.script_worker import script_main

        script_main(*arguments)
    from hetseq.launch.worker import worker_main

    worker_main(*arguments)


def threads_per_worker(workers: int) -> int:
    """OMP_NUM_THREADS if it is set, else the usable cores divided among the workers."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return max(1, len(os.sched_getaffinity(0)) // workers)


def warm_forkserver() -> Any:
    """A server that has imported torch once and forks workers in a fraction of a second.

    The server must survive a signal to the whole process group, because the workers must still finish their step, so it
    starts with the stop signals blocked. A worker also starts with them blocked, and receives pending ones once it
    listens. If they were ignored instead, signals to the server, to a new worker and, for this moment, to the launcher
    would be lost. The server ends when the launcher and all workers have ended.

    Raises ConfigError if the folder for temporary files has too long a name.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        raise ConfigError(
            f"the folder for temporary files, {folder}, has a name of {len(os.fsencode(folder))} bytes, and a socket in"
            f" it would have a longer name than the system allows: set TMPDIR to one of at most {_LONGEST_FOLDER} bytes"
        )
    context = multiprocessing.get_context("forkserver")
    # torch imports its compiler with the first optimizer: 1.6 s, here once instead of once per worker
    context.set_forkserver_preload(["hetseq.launch.worker", "torch._dynamo"])
    from multiprocessing import forkserver, resource_tracker, util

    # Python before 3.10.9 and 3.11.1: an abstract socket has no mode, so any user could send the server a pickle
    util.abstract_sockets_supported = False  # type: ignore[misc]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    before_path = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
    # the server does not inherit sys.path, and only PYTHONPATH lets it find a checkout that is not installed
    root = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, before_path["PYTHONPATH"]]))
    # else the current folder comes first: workers would run another HetSeq if one is there, or import its tasks.py
    # instead of the included tasks. Python 3.10 ignores this variable
    os.environ["PYTHONSAFEPATH"] = _OURS
    try:
        with _tidied_up_in_silence():
            resource_tracker.ensure_running()  # unblocks two of the signals when it has started
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for name, value in before_path.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    return context


def forget_safe_path() -> None:
    """Called by a worker, so that programs started by the task find modules in the current folder as usual."""
    if os.environ.get("PYTHONSAFEPATH") == _OURS:
        del os.environ["PYTHONSAFEPATH"]


@contextmanager
def ending_server() -> Iterator[None]:
    """Kill the fork server that the block starts: on its own it takes seconds to tear down its imports.

    For a process that is about to end, whose workers have ended or are held. At exit the interpreter would wait for
    held workers, and so would the resource tracker, which lives as long as any of them. An earlier server is kept.
    """
    from multiprocessing import forkserver, process, resource_tracker

    server, tracker = forkserver._forkserver, resource_tracker._resource_tracker
    before = getattr(server, "_forkserver_pid", None)
    try:
        yield
    finally:
        helpers = [getattr(server, "_forkserver_pid", None)]
        if held := multiprocessing.active_children():
            process._children.difference_update(held)  # type: ignore[attr-defined]
            helpers.append(tracker._pid)  # type: ignore[attr-defined]
        for pid in filter(None, helpers if before is None else ()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def _tidied_up_in_silence() -> Iterator[None]:
    """Silence the warnings of a resource tracker that the block starts.

    Workers exit without cleaning up, or are killed, and may leave resources such as the lock of a progress bar.
    """
    before = sys.warnoptions[:]
    sys.warnoptions.append("ignore:resource_tracker")  # how its warnings begin
    try:
        yield
    finally:
        sys.warnoptions[:] = before


@contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep a new process from importing the launcher's main module again: it does not need it, and a user's script
    without a guard would start another run."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
