"""This node's worker processes: started from a warm fork server, heard over pipes, ended with their launcher.

Responsible for processes and pipes alone. What the workers' words and ends mean is for the launcher.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from hetseq.config import Config
from hetseq.ending import WorkerEnd
from hetseq.placement import Placement
from hetseq.processes import STOP_SIGNALS


class Worker:
    """One worker process and the pipe between it and the launcher."""

    def __init__(self, rank: int, process: Any, channel: Connection) -> None:
        self.rank, self._process, self._channel = rank, process, channel
        self.sentinel: int = process.sentinel
        self.is_ready = False  # it has accepted what it was told, and what was saved before, and begins to train
        self._report: dict[str, Any] = {}
        self._is_closed = False

    def sources(self) -> list[Any]:
        """What to wait for: its end, and its next word until it has said the last one."""
        return [self.sentinel] if self._channel.closed else [self.sentinel, self._channel]

    def ask_to_stop(self) -> None:
        if not self._is_closed and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it if it lives, and give back what was open for it; may be called twice, and is the last thing called."""
        if self._is_closed:
            return
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._channel.close()
        self._process.close()  # now, and not when the interpreter finds the time
        self._is_closed = True

    def tell(self, kind: str, **facts: Any) -> None:
        """Say something to it; one that has ended hears nothing."""
        with suppress(OSError):
            self._channel.send_bytes(json.dumps({"kind": kind, **facts}).encode())

    def listen(self) -> list[dict[str, Any]]:
        """What it has said since, except what is kept here: `ready` and its last words. Never waits."""
        said = []
        try:
            while not self._channel.closed and self._channel.poll():
                message = json.loads(self._channel.recv_bytes())
                self.is_ready = self.is_ready or message["kind"] == "ready"
                if message["kind"] == "end":
                    self._report = message
                elif message["kind"] != "ready":
                    said.append(message)
        except (EOFError, OSError):  # everything it said has been read
            self._channel.close()
        return said

    def end(self) -> WorkerEnd:
        """How the process, which has ended, ended."""
        self._process.join()
        self.listen()
        self._channel.close()
        return WorkerEnd(
            self.rank,
            self._process.exitcode,
            self._report.get("code"),
            self._report.get("message", ""),
            self._report.get("is_secondary", False),
        )


def start_worker(config: Config, run_path: Path, placement: Placement) -> Worker:
    """Start one rank, which uses the run directory `run_path`."""
    context = warm_forkserver()
    end, end_of_worker = context.Pipe(duplex=True)
    # the user's own Options classes are unknown to a fresh process, so their values travel alone
    own = {kind: dataclasses.asdict(values) for kind, values in config.extras.items()}
    arguments = (dataclasses.replace(config, extras={}), own, str(run_path), placement, end_of_worker)
    process = context.Process(target=_enter, args=arguments, name=f"rank-{placement.rank}")
    with _no_main_module():
        process.start()
    end_of_worker.close()
    return Worker(placement.rank, process, end)


def _enter(*arguments: Any) -> None:
    """Where a worker begins: in a process that has torch, which the launcher has not."""
    from hetseq.worker import worker_main

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
    context.set_forkserver_preload(["hetseq.worker", "torch._dynamo"])
    from multiprocessing import forkserver, resource_tracker, util

    # Python before 3.10.9 and 3.11.1: such a socket has no mode, and any user could send the server a pickle
    util.abstract_sockets_supported = False  # type: ignore[misc]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    path = os.environ.get("PYTHONPATH")
    # the server does not get sys.path, and a checkout that is not installed is found by nothing else
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), path]))
    try:
        resource_tracker.ensure_running()  # unblocks two of them when it has started
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
    return context


@contextmanager
def ending_server() -> Iterator[None]:
    """Kill the fork server that the block starts: by itself it takes seconds to tear down what it had imported.

    For a process that is about to end; its workers have ended before. A server that ran before stays.
    """
    from multiprocessing import forkserver

    server = forkserver._forkserver
    before = getattr(server, "_forkserver_pid", None)
    try:
        yield
    finally:
        pid = getattr(server, "_forkserver_pid", None)
        if pid is not None and before is None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


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
