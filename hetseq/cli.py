"""The command line: `hetseq train` and the other commands; imports torch only when it must.

`python train.py OPTIONS`, `hetseq train OPTIONS` and `python -m hetseq train OPTIONS` are the same. Each other command
has its line, its help and its work in a module of its own (`command_line`). Every error of HetSeq ends here as one
message on standard error, which begins with the command, and with the exit code of its exception.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hetseq import __version__
from hetseq import config as options
from hetseq.config.command_line import CommandRefused
from hetseq.errors import EXIT_USAGE, HetSeqError, text_of
from hetseq.monitor.colour import Tone, toned
from hetseq.registry import nearest
from hetseq.system.processes import interrupting_on_signals

if TYPE_CHECKING:
    from hetseq.cluster.membership.exit_status import Ending
    from hetseq.config.sections import Config


#: command -> address of its function, which receives the words and a function to print a line; and its purpose
COMMANDS = {
    "train": ("hetseq.cli:train", "train a task; `hetseq train --help-all` lists every option"),
    "run": ("hetseq.commands.run_script:run", "run a script with a training loop of its own on all devices"),
    "evaluate": ("hetseq.commands.evaluate:run_evaluate", "evaluate a checkpoint of a run on a split"),
    "predict": (
        "hetseq.commands.evaluate:run_predict",
        "write a checkpoint's prediction for each sample of a split",
    ),
    "plan": ("hetseq.commands.plan.command:run_plan", "how fast a run would be with other shares or other ranks"),
    "simulate": (
        "hetseq.commands.plan.command:run_simulate",
        "how fast a cluster described in a YAML file would be",
    ),
    "checkpoints": (
        "hetseq.commands.checkpoints.command:run",
        "list, show, verify, prune or export the checkpoints of a run",
    ),
    "report": ("hetseq.monitor.report.command:run", "write report.html of a run, or compare two runs"),
    "doctor": ("hetseq.commands.doctor:run", "is this node ready to train, and what to fix if not"),
    "top": ("hetseq.commands.top:run", "what a run does now: its step, its ranks, any slow or gone"),
    "drop": ("hetseq.commands.drop:run", "take a node out of a run, which continues without it"),
    "script": ("hetseq.commands.script.command:run", "a batch script for Slurm, Grid Engine, PBS, LSF or HTCondor"),
    "ssh": ("hetseq.commands.ssh.command:run", "start a run on several hosts over ssh"),
    "selftest": ("hetseq.commands.selftest:run", "check whether your own task is exact on any shares"),
    "completion": ("hetseq.commands.completion:run", "a script that completes commands and options in your shell"),
    "demo": ("hetseq.commands.demo:run", "watch unequal workers give the result of one machine, in a minute"),
}


def main(argv: Sequence[str] | None = None, *, save_dir: str | None = None) -> int:
    """Run one command; returns the exit code. `save_dir`: the run directory of `train` without --save-dir."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage(), end="")
        return 0 if words else EXIT_USAGE
    if words[0] in ("-V", "--version"):
        print(_versions())
        return 0
    name = words[0]
    if name not in COMMANDS:
        hint = nearest(name, [*COMMANDS, "--version", "--help"])
        options_of_train = " (options of a training run come after `hetseq train`)" if name.startswith("-") else ""
        remedy = f"did you mean {hint!r}?" if hint else "`hetseq --help` lists them"
        print(f"hetseq: unknown command {name!r}{options_of_train}; {remedy} [command-unknown]", file=sys.stderr)
        return EXIT_USAGE
    module, _, function = COMMANDS[name][0].partition(":")
    try:
        command: Callable[[Sequence[str], Callable[[str], None]], int]
        command = getattr(importlib.import_module(module), function)
        if name == "train":
            command = partial(train, save_dir=save_dir)
        return command(words[1:], _say)
    except options.HelpRequested as request:
        print(request.text, end="" if request.text.endswith("\n") else "\n")
        return 0
    except HetSeqError as error:
        # the reason why a run ends reads the same on every node, without the command
        who = "" if isinstance(error, CommandRefused) else "hetseq: " if name == "train" else f"hetseq {name}: "
        print(toned(f"{who}{text_of(error)}", Tone.ERROR, sys.stderr), file=sys.stderr)
        return error.exit_code


def _usage() -> str:
    lines = [f"  {name:<13}{about}" for name, (_, about) in COMMANDS.items()]
    ends = [
        "",
        "`hetseq COMMAND --help` says more, `hetseq --version` the versions.",
        "",
        "for example:",
        "  hetseq demo",
        "  hetseq top --help",
    ]
    return "\n".join(["usage: hetseq COMMAND [options]", "", *lines, *ends]) + "\n"


def _versions() -> str:
    """What a report of an error needs to say, without the seconds of importing torch."""
    try:
        torch = f"torch {importlib.metadata.version('torch')}"
    except importlib.metadata.PackageNotFoundError:
        torch = "no torch"
    return f"hetseq {__version__} ({torch}, Python {platform.python_version()})"


def train(argv: Sequence[str], say: Callable[[str], None], *, save_dir: str | None = None) -> int:
    """`hetseq train`: the launcher of this node. `save_dir`: the run directory without --save-dir."""
    config: Config | None = None
    with interrupting_on_signals():
        try:
            config = options.parse(argv, save_dir=save_dir)
            ending = _run(config)
        except KeyboardInterrupt as signal:  # the launcher does not handle signals yet, or there is none
            from hetseq.launch.launch import stopped_early

            ending = stopped_early(str(signal), config)
    from hetseq.launch.launch import tell_ending

    tell_ending(ending)
    return ending.code


def _run(config: Config) -> Ending:
    for note in options.retired_notes(config):
        print(note, file=sys.stderr)
    if config.distributed.distributed_no_spawn:
        from hetseq.launch.launch import run_here

        return run_here(config)
    from hetseq.launch.launch import launch
    from hetseq.launch.worker_processes import ending_server

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with ending_server():
        return launch(config)


def _say(line: str) -> None:
    """Print one line of a command's answer at once; a closed pipe, as with `| head`, does not end the command."""
    try:
        print(line, flush=True)
    except BrokenPipeError:  # the command still finishes its work
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
