"""The life of one rank's process: load, agree with its peers, connect, build, train, and say how it ended.

A worker is started by the launcher and ends with it. They speak JSON over a pipe (`Line`): the worker presents what its
ranks must agree on and waits for `go`, asks for what its peers have put into the run's store, says `ready` before its
first step, and sends one `end` with its exit code and, if something went wrong, the reason. It always leaves by
`os._exit`: after a lost peer the transport's destructors may abort the process, which would look like a second failure.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hetseq.comm import AnyGroup, LocalGroup, Meeting, connect
from hetseq.commit import Wish
from hetseq.config import CheckpointConfig, Config
from hetseq.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_USAGE,
    HetSeqError,
    PeerLostError,
    RendezvousError,
    TaskError,
)
from hetseq.fingerprint import rank_fields
from hetseq.metrics import Metrics
from hetseq.options import with_own_options
from hetseq.placement import Placement
from hetseq.processes import ECHO_S, STOP_SIGNALS, die_with_parent, die_with_pipe, keep_freed_memory
from hetseq.replica_check import ReplicasDiffer
from hetseq.run_directory import RunDirectory, open_appending
from hetseq.saving import Saver
from hetseq.session import Session, build_session, load_material
from hetseq.sharing import everything_shared, share

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 120.0  # all have loaded by then and connect within seconds; launchers see one that dies
_GO_TIMEOUT_S = 3600.0  # the head waits half as long for the slowest rank to load


class Line:
    """A worker's end of the pipe to its launcher; also the store over which ranks find each other."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, kind: str, **facts: Any) -> None:
        self._connection.send_bytes(json.dumps({"kind": kind, **facts}).encode())

    def present(self, fields: Mapping[str, str]) -> None:
        """Show what this rank would train; returns when all ranks have shown the same. Raises RendezvousError."""
        self.send("present", fields=dict(fields))
        self._await("go", _GO_TIMEOUT_S, "the other ranks to have loaded their data")

    def ready(self) -> None:
        self.send("ready")

    def set(self, key: str, value: bytes) -> None:
        self.send("set", key=key, value=base64.b64encode(value).decode())

    def get(self, key: str, timeout_s: float) -> bytes:
        self.send("get", key=key)
        return base64.b64decode(self._await("value", timeout_s, f"a peer ({key})")["value"])

    def close(self) -> None:
        self._connection.close()

    def _await(self, kind: str, timeout_s: float, what: str) -> dict[str, Any]:
        if not self._connection.poll(timeout_s):
            raise RendezvousError(f"waited {timeout_s:.0f} s for {what}")
        try:
            record: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise RendezvousError("the launcher of this rank is gone") from None
        assert record["kind"] == kind, record
        return record


class Alone:
    """In place of a Line where the only rank runs without a launcher; `on_ready` is what a launcher would do then."""

    def __init__(self, on_ready: Callable[[], None]) -> None:
        self.ready = on_ready

    def present(self, fields: Mapping[str, str]) -> None:
        pass


class StopRequest:
    """Set by the first SIGTERM, SIGINT or SIGUSR1; what a second one means the launcher knows, if there is one."""

    def __init__(self, *, has_launcher: bool = True) -> None:
        self.is_set = False
        self._has_launcher = has_launcher
        self._first_s = 0.0

    def install(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # the fork server holds them back, see launch

    def wish(self) -> Wish:
        return Wish.STOP if self.is_set else Wish.NONE

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_set and not self._has_launcher and time.monotonic() - self._first_s > ECHO_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._first_s = self._first_s or time.monotonic()
        self.is_set = True


def worker_main(
    config: Config, own: dict[str, dict[str, Any]], run_path: str, placement: Placement, channel: Connection
) -> None:
    """Entry point of a worker process; never returns. `own` holds the values of `config.extras` by kind."""
    stop = StopRequest()
    stop.install()
    os.setsid()  # a terminal's Ctrl-C goes to the launcher alone, which decides what it means
    die_with_parent(os.getppid())
    launcher = parent_process()  # by name; the parent that the kernel knows is the fork server
    if launcher is not None:
        die_with_pipe(launcher.sentinel)

    line, directory = Line(channel), RunDirectory(Path(run_path))
    report = run_worker(config, directory, placement, stop, own=own, line=line)
    line.send("end", **report)
    line.close()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # whoever read it has gone
            stream.flush()
    os._exit(report["code"])


def run_worker(
    config: Config,
    directory: RunDirectory,
    placement: Placement,
    stop: StopRequest,
    *,
    own: dict[str, dict[str, Any]] | None = None,
    line: Line | Alone,
) -> dict[str, Any]:
    """One rank from beginning to end in this process; gives its report and never raises.

    It says `line.ready` before the first step, when nothing is left that this rank could refuse.
    """
    is_ready = False
    with ExitStack() as closing:
        try:
            config = with_own_options(config, own or {})
            build = _start(config, directory, placement, stop, line, closing)
            gone_back_to = 0
            while True:
                with contextlib.closing(build(config)) as session:
                    if not is_ready:
                        line.ready()
                        is_ready = True
                    try:
                        return _train(session)
                    except ReplicasDiffer as error:
                        gone_back_to = _newest_to_go_back_to(session, error, gone_back_to)
                del session  # its tensors, before there are others
                config = _as_for_a_restart(config)
        except SystemExit as error:
            return {"code": EXIT_FAILED, "message": f"the task's code called sys.exit({error.code!r}) during the run"}
        except Exception as error:
            return _describe(error, is_ready=is_ready)


def _start(
    config: Config,
    directory: RunDirectory,
    placement: Placement,
    stop: StopRequest,
    line: Line | Alone,
    closing: ExitStack,
) -> Callable[[Config], Session]:
    torch.set_num_threads(placement.threads)
    device = torch.device(placement.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    is_writer = placement.rank == placement.writer
    if placement.rank > 0:
        _send_output_to(directory.logs / f"rank-{placement.rank}.out")
    files = directory if is_writer else None
    has_display = placement.rank == 0
    metrics = Metrics(files, config.log, is_writer=is_writer, has_display=has_display, total_steps=None)
    closing.callback(metrics.close)
    _set_up_logging(directory, placement, metrics, closing)
    material = load_material(config, device)
    line.present(rank_fields(config, material))
    group = _connect(placement, line)
    closing.callback(group.close)
    sharing = share(group, placement.parts) if placement.parts else everything_shared(group)
    closing.callback(sharing.close)
    return lambda config: build_session(
        config, directory, group, material, metrics=metrics, wish=stop.wish, sharing=sharing
    )


def _newest_to_go_back_to(session: Session, error: ReplicasDiffer, gone_back_to: int) -> int:
    """The step of the newest checkpoint; raises `error` where there is none, or where it was gone back to before."""
    newest = session.saver.last_step  # the same on all ranks
    if newest <= gone_back_to:
        raise error
    level = logging.WARNING if session.controller.group.rank == 0 else logging.INFO  # all know the same
    logger.log(level, "%s; going back to the checkpoint of step %d", error, newest)
    return newest


def _as_for_a_restart(config: Config) -> Config:
    """The run's own newest checkpoint, if there is one; else the one of another run that this one began with."""
    if not os.path.isdir(config.checkpoint.restore_file):
        config = replace(config, checkpoint=replace(config.checkpoint, restore_file=CheckpointConfig.restore_file))
    return config


def _train(session: Session) -> dict[str, Any]:
    if session.controller.has_ended():
        logger.info("nothing left to do: step %d was the last one", session.last_step)
        return {"code": EXIT_DONE}
    has_ended, saver = session.train(), session.saver
    _repeat_failures(saver, has_ended=has_ended)
    if has_ended and saver.last_error is None:
        return {"code": EXIT_DONE}
    if has_ended:
        kept = f"the newest checkpoint is of step {saver.last_step}" if saver.last_step else "nothing was ever saved"
        message = f"the final save failed: {saver.last_error}; {kept}: see to --save-dir, then give this command again"
        return {"code": EXIT_FAILED, "message": message}
    if saver.last_step:
        message = f"stopped after step {session.last_step}; the same command goes on from step {saver.last_step}"
        return {"code": EXIT_STOPPED, "message": message}
    return {"code": EXIT_FAILED, "message": f"stopped after step {session.last_step}, and nothing was ever saved"}


def _repeat_failures(saver: Saver, *, has_ended: bool) -> None:
    """Say once more at the end which saves have failed: their own lines have long scrolled away."""
    failures = saver.failures[:-1] if has_ended and saver.last_error is not None else saver.failures
    if failures and saver.writes_here:
        reason = failures[-1][1]
        steps = ", ".join(str(failed) for failed, _ in failures[:5]) + (", ..." if len(failures) > 5 else "")
        logger.warning(
            "%d saves of this run failed, after steps %s; the last of them: %s", len(failures), steps, reason
        )


def _describe(error: Exception, *, is_ready: bool) -> dict[str, Any]:
    """The report of a failure. What HetSeq raises explains itself; anything else comes with its traceback."""
    is_ours = isinstance(error, HetSeqError)
    text = str(error) if is_ours else "".join(traceback.format_exception(error)).rstrip()
    code = _exit_code(error, is_ready=is_ready)
    return {"code": code, "message": text, "is_secondary": isinstance(error, PeerLostError)}


def _exit_code(error: Exception, *, is_ready: bool) -> int:
    """The code that an error stands for: what is refused before the first step is usage, a failure after it."""
    if not isinstance(error, HetSeqError):
        return EXIT_FAILED
    if not is_ready and isinstance(error, TaskError):
        return EXIT_USAGE
    if is_ready and error.exit_code == EXIT_USAGE:
        return EXIT_FAILED
    return error.exit_code


def _connect(placement: Placement, line: Line | Alone) -> AnyGroup:
    if placement.world_size == 1 or isinstance(line, Alone):
        return LocalGroup()
    meeting = Meeting(
        line, placement.name, placement.key, placement.host, placement.sources, shares_memory=placement.is_only_node
    )
    rank, world_size = placement.rank, placement.world_size
    return connect(rank=rank, world_size=world_size, meeting=meeting, timeout_s=_CONNECT_TIMEOUT_S)


def _set_up_logging(directory: RunDirectory, placement: Placement, metrics: Metrics, closing: ExitStack) -> None:
    """Everything into log/rank-N.txt; on the terminal, what rank zero says and what any rank warns of."""
    rank, root = placement.rank, logging.getLogger()
    log = closing.enter_context(open_appending(directory.logs / f"rank-{rank}.txt"))
    to_file = logging.StreamHandler(log)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    to_terminal = metrics.log_handler
    to_terminal.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    where = f"[rank {rank} {socket.gethostname()}] "
    to_terminal.setFormatter(_TerminalFormatter(where))
    root.setLevel(logging.INFO)
    for handler in (to_file, to_terminal):
        root.addHandler(handler)
        closing.callback(root.removeHandler, handler)


class _TerminalFormatter(logging.Formatter):
    """Plain lines, with rank and node before a warning."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{self._where}{record.levelname.lower()}: {text}"


def _send_output_to(path: Path) -> None:
    """What the user's code prints is wanted once, from rank zero; the other ranks' goes to a file."""
    with open_appending(path) as file:
        sys.stdout.flush()
        os.dup2(file.fileno(), 1)
