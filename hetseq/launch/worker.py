"""Worker: one rank's process, which loads, passes the compatibility check, then trains generation after generation.

The launcher starts the worker, and the worker ends with it. They exchange JSON over a pipe (`launcher_link`). The
worker presents the fields that all ranks must agree on and waits for `go`, reads its peers' values from the run's
store, sends `ready` before its first step, and one `end` with its exit code and, on failure, the reason. After losing
a peer it reports the state it holds, and continues according to the record of the next generation. It always leaves by
`os._exit`: after a lost peer the transport's destructors may abort the process, which would look like a second failure.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from hetseq.cluster.membership.assignment import Assignment, InferenceJob
from hetseq.config import with_own_options
from hetseq.config.sections import Config
from hetseq.errors import (
    EXIT_FAILED,
    EXIT_USAGE,
    DeviceMemoryError,
    HetSeqError,
    PeerLostError,
    TaskError,
    text_of,
)
from hetseq.launch.launcher_link import LauncherLink, NoLauncher
from hetseq.launch.rank_life import RankLife
from hetseq.launch.stop_request import StopRequest
from hetseq.launch.watchdog import Watchdog
from hetseq.launch.worker_processes import forget_safe_path
from hetseq.run_directory import RunDirectory
from hetseq.system import gpu
from hetseq.system import rank_phase as whereabouts
from hetseq.system.device_memory import is_exhausted, where_exhausted
from hetseq.system.processes import die_with_parent, die_with_pipe
from hetseq.system.rank_phase import Cell
from hetseq.system.task_failure import FAILED, summary, trace_of
from hetseq.training.step_engine import drive

logger = logging.getLogger(__name__)


def worker_main(
    config: Config,
    own: dict[str, dict[str, Any]],
    run_path: str,
    placement: Assignment,
    channel: Connection,
    errand: InferenceJob | None,
    cell: Cell,
) -> None:
    """Entry point of a worker process; never returns. `own` holds the values of `config.extras` by kind."""
    stop, line = begin_process(config, channel, cell)
    directory = RunDirectory(Path(run_path))
    end_process(line, run_worker(config, directory, placement, stop, own=own, line=line, errand=errand))


def begin_process(config: Config, channel: Connection, cell: Cell) -> tuple[StopRequest, LauncherLink]:
    """Tie this process to its launcher: signals, phases, its end, and the pipe between them."""
    stop = StopRequest()
    stop.install()
    forget_safe_path()
    whereabouts.arm(cell)
    os.setsid()  # Ctrl-C in the terminal reaches only the launcher, which decides what it means
    die_with_parent(os.getppid())
    launcher = parent_process()  # for multiprocessing; to the kernel the parent is the fork server
    if launcher is not None:
        die_with_pipe(launcher.sentinel)
    line = LauncherLink(channel, join_timeout_s=config.distributed.join_timeout)
    line.pulse = Watchdog(cell, line.deadline)
    line.pulse.start()
    return stop, line


def end_process(line: LauncherLink, report: Mapping[str, Any]) -> NoReturn:
    """Send the report, and leave without destructors."""
    line.send("end", **report)
    line.close()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has gone
            stream.flush()
    os._exit(report["code"])


def run_worker(
    config: Config,
    directory: RunDirectory,
    placement: Assignment,
    stop: StopRequest,
    *,
    own: dict[str, dict[str, Any]] | None = None,
    line: LauncherLink | NoLauncher,
    errand: InferenceJob | None = None,
) -> dict[str, Any]:
    """Run one rank from start to end in this process; returns its report and never raises.

    Calls `line.ready` before the first step, after all checks of this rank. With an errand it runs that instead of
    training, and never calls `ready`: a rank that loses a peer then has no state to continue from.
    """
    life: RankLife | None = None
    with ExitStack() as closing:
        try:
            life = RankLife(with_own_options(config, own or {}), directory, placement, stop, line, closing, errand)
            life.load()
            return drive(life.run())
        except SystemExit as error:
            return {"code": EXIT_FAILED, "message": f"the task's code called sys.exit({error.code!r}) during the run"}
        except Exception as error:
            if gpu.is_unusable(error, torch.device(placement.device)):
                gpu.never_release(error)
            if life is not None:
                life.output.write_last_words(trace_of(error) if summary(error) else _text_of(error))
            is_ready, has_log = life is not None and life.is_ready, life is not None and errand is None
            return report_of_failure(error, placement, is_ready=is_ready, has_log=has_log)


def report_of_failure(
    error: Exception, placement: Assignment, *, is_ready: bool, has_log: bool = True
) -> dict[str, Any]:  # fmt: skip
    """The report of a failed rank, whose log file has the whole traceback if it `has_log`."""
    device = torch.device(placement.device)
    if is_ready and gpu.has_failed(error, device):
        message = f"its device failed ({gpu.first_line(error)})"
        return {"code": EXIT_FAILED, "message": message, "has_lost_device": True}
    if is_exhausted(error):  # outside a share, whose micro-batches would have been cut: a trial, build or validation
        when = "" if is_ready else "before the first step "
        what = where_exhausted(error, device)
        error = DeviceMemoryError(
            f"rank {placement.slot} on {socket.gethostname()}: {when}{what}: make samples or model smaller, or leave"
            " this device out of --devices"
        )
    code = _exit_code(error, is_ready=is_ready)
    message = _text_of(error)
    if message.startswith(FAILED) and not has_log:
        message = f"{message}\nfull traceback:\n{trace_of(error)}"
    return {"code": code, "message": message, "is_secondary": isinstance(error, PeerLostError)}


def _text_of(error: Exception) -> str:
    """The text of an error: HetSeq's own errors explain themselves, the user's code has a summary, and the rest come
    with their traceback."""
    if isinstance(error, HetSeqError):
        return text_of(error)
    return summary(error) or f"{trace_of(error)} [worker-raised]"


def _exit_code(error: Exception, *, is_ready: bool) -> int:
    """The exit code of an error: a usage error before the first step is a failure after it."""
    if not isinstance(error, HetSeqError) or (is_ready and error.exit_code == EXIT_USAGE):
        return EXIT_FAILED
    return EXIT_USAGE if not is_ready and isinstance(error, TaskError) else error.exit_code
