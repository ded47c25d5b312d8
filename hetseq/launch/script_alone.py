"""A script as one rank in a process of its own: `python script.py`, a notebook, `hetseq run --check`."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch

from hetseq.cluster.membership.assignment import Assignment
from hetseq.config import dump_yaml
from hetseq.config.sections import Config
from hetseq.errors import EXIT_FAILED, TaskError
from hetseq.launch.launch import check_alone, local_devices
from hetseq.launch.launcher_link import NoLauncher
from hetseq.launch.rank_life import RankLife
from hetseq.launch.run_directory_guard import in_use
from hetseq.launch.stop_request import StopRequest
from hetseq.launch.worker_processes import threads_per_worker
from hetseq.loop.run import Run
from hetseq.run_directory import RunDirectory

logger = logging.getLogger(__name__)


@dataclass
class Process:
    """What this process has for the run of its script."""

    config: Config
    life: RankLife
    device: torch.device
    closing: ExitStack
    name: str
    is_alone: bool = False  # it has no launcher
    is_interactive: bool = False
    run: Run | None = None
    tell_check: Callable[[str], None] | None = None  # with it, the loop is only checked


def is_interactive() -> bool:
    """Whether this is a notebook or a prompt: cells run again, and Ctrl-C ends a cell, not the process.

    While a program runs: at its exit Python has forgotten its file.
    """
    return not hasattr(sys.modules["__main__"], "__file__")


def open_alone(config: Config, save_dir: str | None) -> Process:
    """One rank, on the first device that the options allow. Raises HetSeqError."""
    script = "a notebook" if is_interactive() else os.path.abspath(sys.argv[0])
    check_alone(os.path.basename(script))
    closing = ExitStack()
    if save_dir is None:
        folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="hetseq-"))
        config = replace(config, checkpoint=replace(config.checkpoint, no_save=True))
    config = replace(config, task=replace(config.task, task=script),
                     checkpoint=replace(config.checkpoint, save_dir=save_dir or f"{folder}/run"))  # fmt: skip
    directory = RunDirectory.prepare(config.checkpoint.save_dir, config_yaml=dump_yaml(config))
    if save_dir is not None:
        closing.enter_context(in_use(directory, logger.warning))
    stop = StopRequest(has_launcher=False)

    def begin() -> None:
        if not is_interactive():
            stop.install()  # before this point there is no step to finish
        directory.adopt_config()

    placement = Assignment(0, local_devices(config.distributed)[0], threads_per_worker(1))
    life = RankLife(config, directory, placement, stop, NoLauncher(begin), closing, None)
    life.open_device()
    life.give_up = _end
    return Process(
        config, life, torch.device(placement.device), closing, Path(script).name, is_alone=True,
        is_interactive=is_interactive(),
    )  # fmt: skip


def close_alone(process: Process) -> None:
    """End the run with a checkpoint, unless the program has failed; one that has left a step ends with 1."""
    with process.closing:
        run = process.run
        if run is None:
            return
        has_failed = getattr(sys, "last_value", None) is not None and not process.is_interactive
        has_left_step = run.is_in_step and not has_failed and not run.is_closed
        if not has_failed:
            run.close()
        if run.report is not None and (message := run.report.get("message")):
            sys.stderr.write(f"hetseq: {message}\n")
    if has_left_step and not process.is_interactive:
        _end(TaskError(f"{process.name} ended in the middle of a step, whose gradient was never complete"))


def _end(error: BaseException) -> NoReturn:
    sys.stderr.write(f"hetseq: {error}\n")
    sys.stderr.flush()
    os._exit(EXIT_FAILED)
