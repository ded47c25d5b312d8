"""This node's worker processes: started from a warm fork server, heard over pipes, ended with their launcher.

Responsible for processes and pipes alone. What the workers' words and ends mean is for the launcher.

No wait for the end of a process is without a bound: one that waits inside the kernel for a disk or a network mount that
does not answer cannot even be killed (`Worker.is_held`). It is left behind, and ends when it gets its answer.
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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from hetseq.cluster.membership.assignment import Assignment, InferenceJob
from hetseq.cluster.membership.exit_status import WorkerEnd
from hetseq.config.sections import Config
from hetseq.system import faults
from hetseq.system.processes import STOP_SIGNALS
from hetseq.system.rank_phase import Cell, Phase

logger = logging.getLogger(__name__)

_HALF_S = 5.0  # for the rest of a message; whoever is stopped in the middle of one is killed
_SECONDS = struct.Struct("ll")  # and microseconds, as setsockopt(2) has them
_LOOK_S = 0.005
_OURS = "hetseq"  # any text sets PYTHONSAFEPATH; this one tells ours from the user's
_NO_STATUS = 255  # what multiprocessing gives for a process whose fork server cannot tell how it ended
_SERVER_S = 0.5  # for a fork server whose pipes are closed to have ended
_HELD_S = 10.0  # for a killed process to end: it may have to give back much memory


class Worker:
    """One worker process and the pipe between it and the launcher."""

    def __init__(
        self, rank: int, starts: int, process: Any, channel: Connection, *, device: str = "", cell: Cell | None = None
    ) -> None:  # fmt: skip
        self.rank, self.starts = rank, starts  # its slot, and how often that was started before
        self.device, self.cell = device, cell  # where it computes; where it stands
        self._process, self._channel = process, channel
        self._server = server_pid()  # which it was forked from
        _set_deadline(channel, _HALF_S)
        self.sentinel: int = process.sentinel
        self.is_ready = False  # it has accepted what it was told, and what was saved before, and begins to train
        self._report: dict[str, Any] = {}
        self._killed_s: float | None = None
        self._is_closed = False

    def sources(self) -> list[Any]:
        """What to wait for: its end, and its next word until it has said the last one."""
        return [self.sentinel] if self._channel.closed else [self.sentinel, self._channel]

    @property
    def pid(self) -> int:
        """Of its process, until `kill` has given that back."""
        return int(self._process.pid)

    @property
    def is_held(self) -> bool:
        """It was killed, and the kernel has not let go of it in all the time that an end may take."""
        if self._is_closed or self._killed_s is None or time.monotonic() - self._killed_s < _HELD_S:
            return False
        return bool(self._process.is_alive())

    def why_held(self) -> str:
        """What there is to say of one that is held."""
        return (
            f"rank {self.rank} (pid {self._process.pid}) was killed and has not ended within {_HELD_S:.0f} s: the"
            " kernel holds it, as for a disk or a network mount that does not answer; it is left behind until that does"
        )

    def fence(self) -> None:
        """Kill it, since the run goes on without it; its end is noticed as any other."""
        if self._killed_s is None and not self._is_closed and self._process.is_alive():
            self._process.kill()
            self._killed_s = time.monotonic()

    def kill(self) -> bool:
        """End it if it lives, and give back what was open for it; may be called twice, and is the last thing called.

        Waits for its end, but not for that of one that is held: then False.
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
        self._process.close()  # now, and not when the interpreter finds the time
        return True

    def tell(self, kind: str, **facts: Any) -> None:
        """Say something to it; one that has ended hears nothing, one that reads nothing is killed."""
        try:
            self._channel.send_bytes(json.dumps({"kind": kind, **facts}).encode())
        except BlockingIOError:
            self._give_up("has read nothing")
        except OSError:
            pass

    def listen(self) -> list[dict[str, Any]]:
        """What it has said since, except what is kept here: `ready` and its last words. Waits for the rest of a message
        alone, and not long."""
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
        """Nothing that follows in the pipe would be understood."""
        logger.warning("the process of rank %d %s for %.0f s and is killed", self.rank, why, _HALF_S)
        self._channel.close()
        self.fence()

    def end(self) -> WorkerEnd:
        """How the process, which has ended or is held, ended."""
        self.listen()
        self._channel.close()
        code = self._process.exitcode
        # the status of a worker comes from its fork server; where that is gone, multiprocessing gives 255
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
    """Have the kernel end whatever waits for the other end of a pipe with BlockingIOError: a launcher has others to
    listen to."""
    with socket.socket(fileno=os.dup(channel.fileno())) as pipe:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            pipe.setsockopt(socket.SOL_SOCKET, option, _SECONDS.pack(int(seconds), int(seconds % 1 * 1e6)))


def start_worker(
    config: Config,
    run_path: Path,
    placement: Assignment,
    errand: InferenceJob | None = None,
    *,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Worker:
    """Start one rank, which uses the run directory `run_path`, to train or to do an errand.

    Waits for the fork server to have imported torch; where that is killed because the worker `is_wanted` no more,
    raises EOFError.
    """
    context = warm_forkserver()
    end, end_of_worker = context.Pipe(duplex=True)
    # the user's own Options classes are unknown to a fresh process, so their values travel alone
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
    """Start a process from the fork server, or from another one where that is killed meanwhile.

    Its workers end with it, and a launcher may hear of them first: it then asks a server for new ones that takes the
    request, and is gone before it answers.
    """
    try:
        process.start()
    except (EOFError, ConnectionError):
        if not is_wanted():
            raise
        _await_end_of_server()  # or it would be taken for alive again
        warm_forkserver()
        process.start()


def kill_server() -> None:
    """End the fork server where a worker that it is to start is wanted no more; its workers end with it."""
    if (pid := server_pid()) is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def server_pid() -> int | None:
    """The process of the fork server; None: there is none."""
    from multiprocessing import forkserver

    return getattr(forkserver._forkserver, "_forkserver_pid", None)


def _await_end_of_server() -> None:
    pid = server_pid()
    deadline = time.monotonic() + _HELD_S
    while pid is not None and not _has_ended(pid, patience_s=0.0):
        if time.monotonic() > deadline:
            raise ProcessLookupError(
                f"the fork server, process {pid}, answers nothing and has not ended for {_HELD_S:g} s"
            )
        time.sleep(_LOOK_S)


def _has_ended(pid: int | None, *, patience_s: float) -> bool:
    """Whether a child of this process has ended, and may have been waited for since."""
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
    """End all of these, and tell of each that is held; some may have been ended before."""
    for worker in workers:
        worker.fence()  # all at once, so that their ends take the time of one
    for worker in workers:
        if not worker.kill():
            tell(worker.why_held())


def _enter(*arguments: Any) -> None:
    """Where a worker begins: in a process that has torch, which the launcher has not."""
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

    It must outlive a signal to the whole process group, since the workers still want to finish their step; so it starts
    with the stop signals blocked. A worker begins with them blocked too, and gets what came in the meantime once it
    listens: ignored in place of blocked, a signal would be lost to the server, to a young worker and, for this moment,
    to the launcher. It ends when the launcher and all workers have.
    """
    context = multiprocessing.get_context("forkserver")
    # torch imports its compiler when the first optimizer is made: 1.6 s, once here in place of once a worker
    context.set_forkserver_preload(["hetseq.launch.worker", "torch._dynamo"])
    from multiprocessing import forkserver, resource_tracker, util

    # Python before 3.10.9 and 3.11.1: such a socket has no mode, and any user could send the server a pickle
    util.abstract_sockets_supported = False  # type: ignore[misc]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    before_path = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
    # the server does not get sys.path, and a checkout that is not installed is found by nothing else
    root = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, before_path["PYTHONPATH"]]))
    # else the current folder comes first: workers would run another HetSeq if one lies there, or take its tasks.py for
    # the included tasks. Python 3.10 knows no such variable
    os.environ["PYTHONSAFEPATH"] = _OURS
    try:
        with _tidied_up_in_silence():
            resource_tracker.ensure_running()  # unblocks two of them when it has started
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
    """Called by a worker: programs that the task starts find modules in the current folder, as ever."""
    if os.environ.get("PYTHONSAFEPATH") == _OURS:
        del os.environ["PYTHONSAFEPATH"]


@contextmanager
def ending_server() -> Iterator[None]:
    """Kill the fork server that the block starts: by itself it takes seconds to tear down what it had imported.

    For a process that is about to end; its workers have ended before, or are held: then the interpreter would wait for
    them at its end, and the resource tracker too, which holds on as long as any of them. A server that ran before
    stays.
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
    """A resource tracker that the block starts does not warn of what it tidies up.

    Workers end without a farewell, or are killed, and may leave such things as the lock of a progress bar.
    """
    before = sys.warnoptions[:]
    sys.warnoptions.append("ignore:resource_tracker")  # how its warnings begin
    try:
        yield
    finally:
        sys.warnoptions[:] = before


@contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep a new process from importing the launcher's main module again: it needs nothing of it, and a user's script
    without a guard would start another run."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
