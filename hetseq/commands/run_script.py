"""`hetseq run`: a script with a training loop of its own, on all devices and nodes of `hetseq train`."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hetseq import config as options
from hetseq.cluster.membership.assignment import ScriptJob
from hetseq.config.command_line import Argument, Command, CommandOption
from hetseq.config.fields import catalogue_of
from hetseq.config.sections import SECTIONS, Config, DistributedConfig
from hetseq.errors import ConfigError, UnknownOptionError
from hetseq.system.processes import interrupting_on_signals

COMMAND = Command(
    "run",
    "Run a script with a training loop of its own on all devices, and on several nodes.",
    usage=("[options of hetseq train] SCRIPT.py [arguments]", "[options of hetseq train] -m MODULE [arguments]"),
    words=(
        Argument("SCRIPT.py", "a program with a loop over `run.steps(...)`, started once for each device"),
        Argument("MODULE", "the same behind -m, by the dotted name of a module", is_optional=True),
        Argument("arguments", "the script's own, behind it", is_optional=True),
        CommandOption("--check", "only find out whether the loop is exact, before its first update, in this process"),
    ),
    examples=(
        "hetseq run train.py --epochs 3",
        "hetseq run --devices cuda:0,cpu --save-dir runs/mine train.py",
        "hetseq run --join tcp://labA:29400 train.py",
        "hetseq run --check train.py --epochs 3",
    ),
    notes=(
        "The options of hetseq train about devices, nodes, shares, precision, checkpoints and logs come before the"
        " script; `hetseq train --help-all` lists them. The script defines the training.",
    ),
    train="among",
)
#: options of training that a script leaves to the command line
_LEFT = {
    "seed", "precision", "max_skipped_steps", "noise_scale_every", "num_workers", "max_sentences", "global_batch_size",
    "unit_size", "shuffle_block", "required_batch_size_multiple",
}  # fmt: skip
_OF_A_TASK = ("task", "data", "validation", "optimization", "memory")


def run(argv: Sequence[str], say: Callable[[str], None]) -> int:
    """`hetseq run`: the launcher of this node."""
    if "--check" in argv[: _script_at(argv)]:
        return _check(argv, say)
    from hetseq.launch.launch import launch, stopped_early, tell_ending
    from hetseq.launch.worker_processes import ending_server

    config: Config | None = None
    with interrupting_on_signals():
        try:
            config, job = parse(argv)
            logging.basicConfig(format="%(message)s", level=logging.WARNING)
            with ending_server():
                ending = launch(config, job)
        except KeyboardInterrupt as signal:  # the launcher does not handle signals yet
            ending = stopped_early(str(signal), config)
    tell_ending(ending)
    return ending.code


@dataclass(frozen=True)
class Program:
    """What other commands start on a node: `train OPTIONS`, or `run OPTIONS SCRIPT ARGUMENTS`."""

    options: tuple[str, ...]
    script: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "run" if self.script else "train"

    def words(self, more: Sequence[str] = ()) -> list[str]:
        """The words behind `hetseq`, with further options."""
        return [self.name, *self.options, *more, *self.script]

    def config(self, more: Sequence[str] = ()) -> Config:
        """The options with further ones, as a node reads them. Raises ConfigError."""
        if self.script:
            return parse([*self.options, *more, *self.script])[0]
        return options.parse([*self.options, *more])


def program_of(words: Sequence[str]) -> Program:
    """The program behind `--` of another command. Raises ConfigError for `run` without a script."""
    if not words or words[0] != "run":
        return Program(tuple(words))
    at = _script_at(words)
    if at == len(words):
        raise ConfigError("found no script behind run: expected -- run [options] SCRIPT.py [arguments]")
    return Program(tuple(words[1:at]), tuple(words[at:]))


def _script_at(argv: Sequence[str]) -> int:
    """The place of the script among the words, or of -m before a module; behind the last one if there is neither."""
    return next((at for at, word in enumerate(argv) if word == "-m" or word.endswith(".py")), len(argv))


def _check(argv: Sequence[str], say: Callable[[str], None]) -> int:
    """`hetseq run --check`: one rank in this process, which ends before its first update."""
    from hetseq.cluster.membership.exit_status import Ending
    from hetseq.launch.launch import tell_ending
    from hetseq.launch.script_worker import check_script

    at = list(argv).index("--check")
    report = check_script(*parse([*argv[:at], *argv[at + 1 :]]), lambda found: say(f"check: {found}"))
    ending = Ending(report["code"], report.get("message", ""))
    tell_ending(ending)
    return ending.code


def parse(argv: Sequence[str]) -> tuple[Config, ScriptJob]:
    """The options, and the script with its arguments. Raises ConfigError and HelpRequested."""
    at = _script_at(argv)
    if at == len(argv):
        if {"--help", "-h"} & set(argv):
            raise options.HelpRequested(COMMAND.help())
        raise ConfigError("found no script in the words after hetseq run: expected hetseq run [options] SCRIPT.py")
    is_module = argv[at] == "-m"
    words = list(argv[at + is_module :])
    if not words:
        raise ConfigError("-m: expected the name of a module behind it, as in -m mypackage.train")
    if not is_module and not os.path.isfile(words[0]):
        raise ConfigError(f"there is no script {words[0]}: expected the path of a Python file")
    script = words[0] if is_module else os.path.abspath(words[0])
    call = " ".join(["hetseq run", *(["-m"] if is_module else []), words[0]])
    try:
        config = options.parse(argv[:at], save_dir=f"runs/{os.path.basename(script).removesuffix('.py')}")
    except UnknownOptionError as error:
        raise ConfigError(f"{error}; an option of {words[0]} stands behind it: {call} {error.words[0]} ...") from None
    _check_left(config, words[0], call)
    task = dataclasses.replace(config.task, task=script)
    return dataclasses.replace(config, task=task), ScriptJob(script, tuple(words[1:]), is_module)


def _check_left(config: Config, script: str, call: str) -> None:
    """Raise ConfigError for an option that the script decides."""
    if config.distributed.shard_model == "all":
        raise ConfigError(
            f"--shard-model all is for tasks: {script} may use the parameters at any time, when they are not here; use"
            " --shard-model state"
        )
    if config.distributed.shard_modules != DistributedConfig.shard_modules:
        raise ConfigError(f"--shard-modules is for tasks, whose parameters may come and go: leave it out for {script}")
    if config.distributed.tensor_degree > 1:
        raise ConfigError(
            f"--tensor-parallel-degree is for tasks: {script} builds the model itself; divide it there with"
            " hetseq.sagemaker, or write a task"
        )
    if config.distributed.delayed_init:
        raise ConfigError(
            f"--delayed-init is for tasks: {script} builds the model itself; build it as small as it has to be there,"
            " or write a task"
        )
    defaults: Any = options.parse([])
    for section in _OF_A_TASK:
        for field in dataclasses.fields(getattr(config, section)):
            value = getattr(getattr(config, section), field.name)
            if field.name not in _LEFT and value != getattr(getattr(defaults, section), field.name):
                flag = catalogue_of(SECTIONS)[field.name].flags[0]
                if section == "memory":
                    raise ConfigError(
                        f"{flag} is for tasks: {script} decides what it keeps, and calls"
                        " hetseq.checkpoint_activations(model) to keep less"
                    )
                raise ConfigError(
                    f"{flag} is the script's business: say it in {script}, or behind it if {script} takes it: {call}"
                    f" {flag} ..."
                )
