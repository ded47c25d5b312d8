"""A rank whose training loop is a script of the user's own: `hetseq.start`, and the workers of `hetseq run`.

The script is run as Python runs a program: `sys.argv`, the folder of the script first on `sys.path`, `__name__` and
`__file__`. It meets the run in `start`, and its exit code becomes the exit code of the rank unless the run has a
report.
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from hetseq import config as options
from hetseq.cluster.membership.assignment import Assignment, ScriptJob
from hetseq.config.sections import Config, OptimizationConfig, TaskConfig
from hetseq.config.tracker_specs import check_packages
from hetseq.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, ConfigError, TaskError
from hetseq.launch.launcher_link import LauncherLink
from hetseq.launch.rank_life import LeftBehindError, RankLife
from hetseq.launch.script_alone import Process, close_alone, open_alone
from hetseq.launch.stop_request import StopRequest
from hetseq.launch.worker import begin_process, end_process, report_of_failure
from hetseq.loop.run import Run
from hetseq.monitor.trackers.protocol import Tracker
from hetseq.run_directory import RunDirectory
from hetseq.system.device_memory import is_exhausted
from hetseq.system.rank_phase import Cell
from hetseq.system.started_by import forget_other_launchers
from hetseq.system.task_failure import summary, trace_of

logger = logging.getLogger(__name__)

Report = dict[str, Any]


_process: Process | None = None


def start(
    *, save_dir: str | None = None, seed: int | None = None, precision: str | None = None,
    trackers: Sequence[str | Tracker] = (),
) -> Run:  # fmt: skip
    """Take part in the run that `hetseq run` has started this script for, or be a run of one rank.

    `save_dir` is the run directory (`python script.py` without one writes nothing), `seed` determines the sample order
    and random numbers, `precision` as `--precision`: fp64, fp32, tf32, bf16 or fp16. What the command line of `hetseq
    run` says comes first. `trackers`, as in `["wandb:project=digits", MyTracker()]`, come beside those of --tracker.
    Seeds torch, NumPy and Python. Every rank calls it, once, before it builds its model. In a notebook a second call
    ends the run before it; in a program `run.close()` does, if there is no launcher. Raises TaskError for another
    second call, and ConfigError.
    """
    global _process
    _end_run_before()
    if _process is None:
        if multiprocessing.parent_process() is not None:
            raise TaskError(
                "hetseq.start was called in a process that a program has started, not in the script of hetseq run: keep"
                ' the script under `if __name__ == "__main__":`; a run of a script has no task to evaluate'
            )
        _process = open_alone(options.parse([]), save_dir)
        atexit.register(_close)
    config = _process.config
    if seed is not None and config.task.seed == TaskConfig.seed:
        config = replace(config, task=replace(config.task, seed=seed))
    if precision is not None and config.optimization.precision == OptimizationConfig.precision:
        config = replace(config, optimization=replace(config.optimization, precision=precision))
    if isinstance(trackers, str):
        raise TaskError(f"hetseq.start got trackers={trackers!r}: expected a list, as in [{trackers!r}]")
    if _process.tell_check is not None:
        trackers = ()  # a check is no run
    words = [word for one in trackers if isinstance(one, str) for word in one.split(",")]
    config = replace(config, log=replace(config.log, tracker=(*config.log.tracker, *words)))
    check_packages(config.log.tracker_specs())
    _process.life.trackers = [tracker for tracker in trackers if not isinstance(tracker, str)]
    _process.run = Run(
        config, _process.life, device=_process.device, name=_process.name, is_alone=_process.is_alone,
        tell_check=_process.tell_check,
    )  # fmt: skip
    return _process.run


def _end_run_before() -> None:
    """Make place for another run. Raises TaskError if there can be none."""
    global _process
    if _process is None or _process.run is None:
        return
    if not _process.is_alone:
        raise TaskError("hetseq.start was called twice: a run of hetseq run is one for all its processes")
    if not _process.run.is_closed and not _process.is_interactive:
        raise TaskError("hetseq.start was called twice: end the run before it with run.close()")
    atexit.unregister(_close)
    _close()
    _process = None


def _close() -> None:
    if _process is not None:
        close_alone(_process)


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
        process = _process = Process(config, life, torch.device(placement.device), closing, _name_of(job))

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
    forget_other_launchers()
    sys.argv = [job.script, *job.arguments]
    if job.is_module:
        sys.path.insert(0, os.getcwd())
        _check_module(job.script)
        runpy.run_module(job.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(job.script)))
        runpy.run_path(job.script, run_name="__main__")


def _check_module(name: str) -> None:
    """Raise ConfigError if `python -m name` would find no module to run."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # a package above it imports something else that is missing
        found = None
    if found is None:
        raise ConfigError(f"-m {name}: there is no such module, neither in {os.getcwd()} nor installed")
    if found.submodule_search_locations is not None and importlib.util.find_spec(f"{name}.__main__") is None:
        raise ConfigError(f"-m {name}: a package without __main__.py: name the module in it that trains")


def _why_unfinished(process: Process) -> str:
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
    # what HetSeq means by 75, a run that can be resumed, the script cannot know
    code = error.code if isinstance(error.code, int) and error.code != EXIT_STOPPED else EXIT_FAILED
    return {"code": code, "message": f"the script called sys.exit({error.code!r})"}


def _failed(error: BaseException, process: Process, placement: Assignment) -> Report:
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


# hetseq run --check


def check_script(config: Config, job: ScriptJob, say: Callable[[str], None]) -> Report:
    """Run the script in this process until its loop is checked, before its first update; returns a report."""
    global _process
    process = _process = open_alone(config, None)
    process.tell_check, process.name = say, _name_of(job)
    placement = Assignment(0, str(process.device), torch.get_num_threads())
    with process.closing:
        try:
            _execute(job)
        except SystemExit as error:
            return _report_of(process.run) or _exited(error)
        except Exception as error:
            return report_of_failure(error, placement, is_ready=False, has_log=False)
        return _report_of(process.run) or {"code": EXIT_FAILED, "message": _why_unfinished(process)}


def _name_of(job: ScriptJob) -> str:
    return job.script if job.is_module else os.path.basename(job.script)
