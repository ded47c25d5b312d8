"""`hetseq script SYSTEM`: write a batch script for a run on the nodes of a queue, to read, change and submit.

Parses the command line, and finds mistakes before the job waits in the queue: the parser of `hetseq train` reads the
options of the run. It submits nothing and writes no file. `batch_scripts` makes the text.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hetseq.commands.run_script import Program, program_of
from hetseq.commands.script.batch_scripts import SYSTEMS, Job, file_name, submit_line
from hetseq.config.command_line import Argument, Command, CommandOption, whole_number
from hetseq.config.sections import Config
from hetseq.errors import ConfigError

_CPUS_PER_WORKER = 4
#: characters allowed in a directive, where the shell's quotes do not work
_PLAIN = re.compile(r"[\w.,:@/+-]+")
_NAME = re.compile(r"[A-Za-z][\w-]*")
#: options that only some schedulers have
_ONLY = {
    "--parallel-environment": ("sge",),
    "--time": ("slurm", "sge", "pbs", "lsf"),
    "--queue": ("slurm", "sge", "pbs", "lsf"),
}


def _seconds(text: str) -> int:
    """HH:MM:SS in seconds."""
    found = re.fullmatch(r"(\d+):([0-5]\d):([0-5]\d)", text)
    if found is None or not any(map(int, found.groups())):
        raise ValueError("expected HH:MM:SS, such as 24:00:00")
    hours, minutes, seconds = map(int, found.groups())
    return hours * 3600 + minutes * 60 + seconds


COMMAND = Command(
    "script",
    "Write a batch script for a run on the nodes of a queue, to read, change and submit. Nothing is submitted.",
    usage=(
        "SYSTEM [options] -- OPTIONS OF hetseq train",
        "SYSTEM [options] -- run [options] SCRIPT.py [arguments]",
    ),
    words=(
        Argument("SYSTEM", "the scheduler: slurm, sge, pbs, lsf or condor", among=tuple(SYSTEMS)),
        CommandOption("--nodes", "number of nodes; default 1", "N", read=whole_number(1), default=1),
        CommandOption(
            "--gpus-per-node",
            "GPUs per node, one worker each; default 0: one worker on the CPU, or --ranks",
            "G",
            read=whole_number(0),
            default=0,
        ),
        CommandOption("--cpus-per-node", "cores per node; default 4 per worker", "C", read=whole_number(1)),
        CommandOption(
            "--time", "time limit; 2 minutes before it the run saves and ends with 75", "HH:MM:SS", read=_seconds
        ),
        CommandOption("--queue", "queue; for Slurm the partition (also --partition)", "Q", also=("--partition",)),
        CommandOption("--account", "account or project", "A"),
        CommandOption("--memory", "memory per node, such as 64G", "M"),
        CommandOption("--name", "name of the job; default: the last part of --save-dir", "NAME"),
        CommandOption(
            "--setup", "shell command before the run on each node, such as 'module load cuda'; may be repeated", "LINE",
            is_many=True,
        ),
        CommandOption("--requeue", "put the job back into the queue after exit code 75"),
        CommandOption("--python", "the Python that has hetseq; default: the one that runs this command", "PY"),
        CommandOption(
            "--parallel-environment", "of Grid Engine, needed for several nodes; qconf -spl lists them", "P"
        ),
        CommandOption("--gpu-resource", "Grid Engine's name for GPUs; default gpu", "NAME", default="gpu"),
    ),
    examples=(
        "hetseq script slurm --nodes 2 --gpus-per-node 4 --time 24:00:00 -- --task mnist --global-batch-size 64"
        " --save-dir runs/digits > digits.sh",
    ),
    notes=("The script goes to standard output, the line that submits it to standard error.",),
    train="behind",
)  # fmt: skip


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """Print the script, and on standard error how to submit it; returns the exit code. Raises as `parse` does."""
    system, job = parse(words)
    for line in SYSTEMS[system](job).splitlines():
        say(line)
    sys.stderr.write(f"save it as {file_name(system, job)} in {job.directory}, then {submit_line(system, job)}\n")
    return 0


def parse(words: Sequence[str]) -> tuple[str, Job]:
    """The scheduler and the job. Raises ConfigError for mistakes that would fail after the queue."""
    asked = COMMAND.read(words)
    system, program = asked["SYSTEM"], program_of(asked.rest)
    train = program.options
    for name, systems in _ONLY.items():
        if system not in systems and asked[name] is not None:
            raise COMMAND.refusal(f"{name} does not apply to {system}: leave it out")
    meets = asked["--nodes"] > 1 and not _has(train, "--join")
    config = _checked(program, asked["--nodes"], meets=meets)
    workers = _workers(config, asked["--gpus-per-node"])
    directory, run_directory = os.getcwd(), Path(os.path.abspath(config.checkpoint.save_dir))
    job = Job(
        name=asked["--name"] or re.sub(r"^[^A-Za-z]*", "", re.sub(r"[^\w-]", "-", run_directory.name)) or "hetseq",
        nodes=asked["--nodes"],
        cpus=asked["--cpus-per-node"] or _CPUS_PER_WORKER * workers,
        gpus=asked["--gpus-per-node"],
        directory=directory,
        shared=str(run_directory.parent),
        python=asked["--python"] or sys.executable,
        program=replace(program, options=(*train, *_own_words(config, asked["--gpus-per-node"]))),
        meets=meets,
        min_ranks=asked["--nodes"] * workers if meets and not _has(train, "--min-ranks") else None,
        setup=asked["--setup"],
        time_s=asked["--time"],
        queue=asked["--queue"],
        account=asked["--account"],
        memory=asked["--memory"],
        parallel_environment=asked["--parallel-environment"],
        gpu_resource=asked["--gpu-resource"],
        is_requeued=asked["--requeue"],
    )
    _check(system, job)
    return system, job


def _has(train: Sequence[str], option: str) -> bool:
    return any(word.partition("=")[0] == option for word in train)


def _checked(program: Program, nodes: int, *, meets: bool) -> Config:
    """The options of the run, as each node will read them."""
    train = program.options
    if any(_has(train, f"--distributed-{name}") for name in ("init-method", "world-size", "rank")) and nodes > 1:
        raise ConfigError(
            "a script for several nodes uses --join, which assigns the ranks: leave out --distributed-init-method,"
            " --distributed-world-size and --distributed-rank"
        )
    least = [] if _has(train, "--min-ranks") else ["--min-ranks", "1"]
    config = program.config(["--join", "file:///meeting", *least] if meets else [])
    if nodes == 1:
        return config
    cluster = config.distributed
    if cluster.distributed_no_spawn:
        raise ConfigError(
            f"--distributed-no-spawn runs one rank alone, but --nodes {nodes} was asked for: leave one out"
        )
    if config.data.global_batch_size is None and not program.script:  # a script says it
        raise ConfigError(
            f"--nodes {nodes} needs --global-batch-size N after -- (samples per step over all ranks): otherwise the"
            " batch size would depend on how many nodes start in time"
        )
    return config


def _workers(config: Config, gpus: int) -> int:
    """Workers of each node, as the launcher there will count them."""
    cluster = config.distributed
    return len(cluster.devices) or cluster.distributed_gpus or cluster.distributed_world_size or max(1, gpus)


def _own_words(config: Config, gpus: int) -> list[str]:
    """The option that makes the node start a worker per requested GPU, and complain if it has fewer."""
    cluster = config.distributed
    says = cluster.devices or cluster.distributed_gpus or cluster.distributed_world_size or cluster.distributed_no_spawn
    return [] if says or cluster.cpu or not gpus else ["--ranks", str(gpus)]


def _check(system: str, job: Job) -> None:
    """Refuse values that would break the script."""
    if not _NAME.fullmatch(job.name):
        raise ConfigError(f"--name {job.name}: expected a letter, then letters, digits, _ and -")
    for name in ("queue", "account", "memory", "parallel_environment", "gpu_resource"):
        value = getattr(job, name)
        if value is not None and not _PLAIN.fullmatch(value):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: expected letters, digits and . , : @ / + _ -")
    if system == "sge" and job.nodes > 1 and job.parallel_environment is None:
        raise ConfigError(
            f"--nodes {job.nodes} needs --parallel-environment NAME: each site of Grid Engine has its own, and"
            " qconf -spl lists them"
        )
    if not _PLAIN.fullmatch(job.shared):
        raise ConfigError(
            f"--save-dir is in {job.shared}, where the nodes would meet, and schedulers pass such a name on unquoted:"
            " choose a folder with only letters, digits and . , : @ / + _ -"
        )
    if any("\n" in line for line in (*job.setup, *job.program.words())):
        raise ConfigError("a line break in --setup or after --: give --setup once for each line")
