"""A rank whose training loop is a script of the user's own: in a worker of `hetseq run`, or as `python script.py`.

The script is run as Python runs a program: `sys.argv`, the folder of the script first on `sys.path`, `__name__` and
`__file__`. It meets the run in `start`, and its exit code is that of the rank unless the run has a report.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from hetseq import config as options
from hetseq.cluster.membership.assignment import Assignment, ScriptJob
from hetseq.config import dump_yaml
from hetseq.config.sections import Config, OptimizationConfig, TaskConfig
from hetseq.config.tracker_specs import check_packages
from hetseq.errors import EXIT_DONE, EXIT_FAILED, TaskError
from hetseq.launch.launch import local_devices
from hetseq.launch.launcher_link import LauncherLink, NoLauncher
from hetseq.launch.rank_life import LeftBehindError, RankLife
from hetseq.launch.run_directory_guard import in_use
from hetseq.launch.stop_request import StopRequest
from hetseq.launch.worker import begin_process, end_process, report_of_failure
from hetseq.launch.worker_processes import threads_per_worker
from hetseq.loop.run import Run
from hetseq.monitor.trackers.protocol import Tracker
from hetseq.run_directory import RunDirectory
from hetseq.system.device_memory import is_exhausted
from hetseq.system.rank_phase import Cell
from hetseq.system.task_failure import summary, trace_of

logger = logging.getLogger(__name__)

Report = dict[str, Any]


@dataclass
class _Process:
    """What this process has for the one run that its script may start."""

    config: Config
    life: RankLife
    device: torch.device
    closing: ExitStack
    name: str
    facts: dict[str, str]  # about the script, to compare with the other ranks
    run: Run | None = None


_process: _Process | None = None


def start(
    *, save_dir: str | None = None, seed: int | None = None, precision: str | None = None,
    trackers: Sequence[str | Tracker] = (),
) -> Run:  # fmt: skip
    """Take part in the run that `hetseq run` has started this script for, or be a run of one rank.

    `save_dir` is the run directory (`python script.py` without one writes nothing), `seed` that of the sample order and
    of random numbers, `precision` as `--precision`: fp64, fp32, tf32, bf16 or fp16. What the command line of `hetseq
    run` says comes first. `trackers`, as in `["wandb:project=digits", MyTracker()]`, come beside those of `--tracker`.
    Seeds torch, NumPy and Python. Every rank calls it, once, before it builds its model.
    Raises TaskError for a second call, and ConfigError.
    """
    global _process
    if _process is None:
        if multiprocessing.parent_process() is not None:
            raise TaskError(
                "hetseq.start was called in a process that a program has started, not in the script of hetseq run: keep"
                ' the script under `if __name__ == "__main__":`; a run of a script has no task to evaluate'
            )
        _process = _alone(save_dir, precision)
    if _process.run is not None:
        raise TaskError("hetseq.start was called twice: a process has one run")
    config = _process.config
    if seed is not None and config.task.seed == TaskConfig.seed:
        config = replace(config, task=replace(config.task, seed=seed))
    if precision is not None and config.optimization.precision == OptimizationConfig.precision:
        config = replace(config, optimization=replace(config.optimization, precision=precision))
    words = [word for one in trackers if isinstance(one, str) for word in one.split(",")]
    config = replace(config, log=replace(config.log, tracker=(*config.log.tracker, *words)))
    check_packages(config.log.tracker_specs())
    _process.life.trackers = [tracker for tracker in trackers if not isinstance(tracker, str)]
    _process.run = Run(config, _process.life, device=_process.device, name=_process.name, facts=_process.facts)
    return _process.run


# a worker of `hetseq run`


def script_main(
    config: Config, own: dict[str, dict[str, Any]], run_path: str, placement: Assignment, channel: Connection,
    job: ScriptJob, cell: Cell,
) -> NoReturn:  # fmt: skip
    """Entry point of a worker process of `hetseq run`; never returns."""
    stop, line = begin_process(config, channel, cell)
    end_process(line, run_script(config, RunDirectory(Path(run_path)), placement, stop, line=line, job=job))


def run_script(
    config: Config, directory: RunDirectory, placement: Assignment, stop: StopRequest, *, line: LauncherLink,
    job: ScriptJob,
) -> Report:  # fmt: skip
    """Run the script as one rank of a run; returns its report and never raises."""
    global _process
    with ExitStack() as closing:
        try:
            life = RankLife(config, directory, placement, stop, line, closing, None)
            life.open_device()
        except Exception as error:
            return report_of_failure(error, placement, is_ready=False, has_log=False)
        process = _process = _Process(
            config, life, torch.device(placement.device), closing, _name_of(job), _facts_of(job)
        )  # fmt: skip

        def give_up(error: BaseException) -> NoReturn:
            end_process(line, _failed(error, process, placement))

        life.give_up = give_up
        try:
            _execute(job)
            if process.run is not None:
                process.run.close()
        except SystemExit as error:
            return _report_of(process.run) or _exited(error)
        except BaseException as error:
            return _failed(error, process, placement)
        return _report_of(process.run) or {"code": EXIT_FAILED, "message": _why_unfinished(process)}


def _execute(job: ScriptJob) -> None:
    sys.argv = [job.script, *job.arguments]
    if job.is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(job.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(job.script)))
        runpy.run_path(job.script, run_name="__main__")


def _why_unfinished(process: _Process) -> str:
    """Why a script that has ended by itself has no report."""
    if process.run is not None and process.run.is_in_step:
        return f"{process.name} ended in the middle of a step, whose gradient was never complete"
    return f"{process.name} ended without a loop over run.steps(...): nothing was trained"


def _report_of(run: Run | None) -> Report | None:
    return None if run is None else run.report


def _exited(error: SystemExit) -> Report:
    """The report of a script that called sys.exit before its run had ended."""
    if error.code is None or error.code == EXIT_DONE:
        return {"code": EXIT_FAILED, "message": "the script called sys.exit() before its loop had ended"}
    code = error.code if isinstance(error.code, int) else EXIT_FAILED
    return {"code": code, "message": f"the script called sys.exit({error.code!r})"}


def _failed(error: BaseException, process: _Process, placement: Assignment) -> Report:
    """The report of a script that an exception has ended."""
    life, is_ready = process.life, process.life.is_ready
    if isinstance(error, LeftBehindError):
        return {"code": EXIT_FAILED, "message": str(error), "has_lost_device": True}
    if is_ready and is_exhausted(error) and process.run is not None and process.run.take_smaller():
        message = "memory ran out in the loop of the script; it begins anew with smaller micro-batches [batch-halved]"
        return {"code": EXIT_FAILED, "message": message, "has_lost_device": True}
    if not isinstance(error, Exception):
        error = RuntimeError(f"{type(error).__name__} ended the script")
    life.output.write_last_words(trace_of(error) if summary(error) else str(error))
    return report_of_failure(error, placement, is_ready=is_ready)


# python script.py


def _alone(save_dir: str | None, precision: str | None) -> _Process:
    """A run of one rank in this process."""
    script = os.path.abspath(sys.argv[0]) if sys.argv and sys.argv[0] else "a notebook"
    config, closing = options.parse([]), ExitStack()
    if save_dir is None:
        folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="hetseq-"))
        config = replace(config, checkpoint=replace(config.checkpoint, no_save=True))
    if precision is not None:
        config = replace(config, optimization=replace(config.optimization, precision=precision))
    config = replace(config, task=replace(config.task, task=script),
                     checkpoint=replace(config.checkpoint, save_dir=save_dir or f"{folder}/run"))  # fmt: skip
    directory = RunDirectory.prepare(config.checkpoint.save_dir, config_yaml=dump_yaml(config))
    if save_dir is not None:
        closing.enter_context(in_use(directory, logger.warning))
    stop = StopRequest(has_launcher=False)

    def begin() -> None:
        stop.install()  # before this point there is no step to finish
        directory.adopt_config()

    placement = Assignment(0, local_devices(config.distributed)[0], threads_per_worker(1))
    life = RankLife(config, directory, placement, stop, NoLauncher(begin), closing, None)
    life.open_device()
    life.give_up = _end
    atexit.register(_close)
    return _Process(config, life, torch.device(placement.device), closing, Path(script).name, {})


def _end(error: BaseException) -> NoReturn:
    sys.stderr.write(f"hetseq: {error}\n")
    sys.stderr.flush()
    os._exit(EXIT_FAILED)


def _close() -> None:
    """At the end of `python script.py`: a loop that was left by `break` ends the run, unless the script has failed."""
    process = _process
    if process is None:
        return
    with process.closing:
        run = process.run
        if run is not None and getattr(sys, "last_value", None) is None:
            run.close()
        if run is not None and run.report is not None and (message := run.report.get("message")):
            sys.stderr.write(f"hetseq: {message}\n")


def _name_of(job: ScriptJob) -> str:
    return job.script if job.is_module else os.path.basename(job.script)


def _facts_of(job: ScriptJob) -> dict[str, str]:
    """The script's content, which all nodes must share."""
    if job.is_module:
        return {}
    with suppress(OSError):
        return {"source of the script": hashlib.sha256(Path(job.script).read_bytes()).hexdigest()[:12]}
    return {}
