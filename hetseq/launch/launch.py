"""Launch: runs a configuration on this node, from choosing its workers to the exit code.

One command per node starts one launcher, which starts one process per rank. Without a launcher, `run_here` runs the
only rank in this process.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from hetseq import __version__
from hetseq.cluster.membership.admission import why_ranks_do_not_fit
from hetseq.cluster.membership.assignment import Assignment, Errand, InferenceJob
from hetseq.cluster.membership.exit_status import TOO_EARLY, Ending, stopped, with_trace
from hetseq.cluster.rendezvous.interfaces import interfaces
from hetseq.config import dump_yaml
from hetseq.config.byte_size import parse_size
from hetseq.config.sections import Config, DistributedConfig
from hetseq.errors import EXIT_STOPPED, ConfigError, HetSeqError, few, text_of
from hetseq.launch.early_checks import check_command
from hetseq.launch.environments import (
    AppliedEnvironment,
    Look,
    Seen,
    choose,
    leaves_room,
    other_nodes,
    seconds_to_stop,
    see,
)
from hetseq.launch.launcher import Launcher
from hetseq.launch.run_directory_guard import in_use
from hetseq.launch.visible_gpus import cpu_build, visible_gpus
from hetseq.launch.worker_processes import threads_per_worker
from hetseq.launch.worker_watch import may_go_on
from hetseq.monitor.colour import Tone, toned
from hetseq.run_directory import RunDirectory
from hetseq.system.started_by import started_by

logger = logging.getLogger(__name__)

_PATIENCE_S = 1.0  # with a terminal that accepts no output
_TELLING_S = 3.0  # to tell the other nodes why this one cannot take part
_MOST_OF_2020 = 4  # workers of a node whose options only say where the nodes meet, as in HetSeq of 2020


def launch(config: Config, errand: Errand | None = None) -> Ending:
    """Run the configuration on this node until it ends, together with other nodes if it says where they meet.

    With an errand the ranks run that instead of training a task: a script, or on this node only an inference, whose
    result is the message.

    Raises HetSeqError for errors before this node has joined the run.
    """
    config = _with_memory_of_environment(config)
    if config.distributed.shadow:
        _check_shadow(config, errand)
    is_inference = isinstance(errand, InferenceJob)
    seen = None if is_inference else _see(config.distributed)
    refusal = _refusal_of(config, errand)
    is_among_others = config.distributed.meeting_url is not None or (seen is not None and not seen.is_alone)
    if refusal is not None and not is_among_others:
        raise refusal
    if refusal is not None:  # at once; the others are told when this node has found them
        _say(f"{text_of(refusal)}; telling the other nodes")
    if not is_among_others:
        _check_weights(config.distributed)
    choice = AppliedEnvironment(config.distributed)
    if seen is not None:
        choice = choose(config.distributed, seen, gpus=visible_gpus)
        config = replace(config, distributed=choice.config)
        if choice.line is not None:
            _say(choice.line)
    devices = local_devices(config.distributed)
    check_place(config.distributed, len(devices))
    interface = _interface(seen)
    others = other_nodes(" ".join([command_line(sys.argv), *choice.words]), seen, started_by())
    fault = why_ranks_do_not_fit(config.distributed, len(devices))
    if refusal is None and fault is not None:
        refusal = ConfigError(fault)
        _say(f"{fault}; telling the other nodes")
    if refusal is None:
        launcher = Launcher(config, devices, others=others, interface=interface, errand=errand)
        _say(_first_line(config, devices, is_run=not is_inference))  # the workers print nothing for seconds
        with _stopping_in_time(seen):
            return launcher.run()
    # the other nodes would wait for this one in vain, so it joins anyway, and the refusal reaches all of them
    brief = replace(config.distributed, join_timeout=min(_TELLING_S, config.distributed.join_timeout))
    with suppress(HetSeqError):
        Launcher(
            replace(config, distributed=brief), devices, others=others, interface=interface, refusal=refusal
        ).run()  # fmt: skip
    raise refusal


def _check_shadow(config: Config, errand: Errand | None) -> None:
    """Refuse what a shadow cannot follow. Raises ConfigError."""
    if errand is not None:
        raise ConfigError("--shadow follows a task of hetseq train, not a script with a loop of its own: leave it out")
    if config.data.data_by_host:
        raise ConfigError("--shadow needs all of the data, and --data-by-host gives each host a part: leave one out")


def _first_line(config: Config, devices: Sequence[str], *, is_run: bool) -> str:
    """What begins, for a user who has just pressed Enter."""
    workers = f"{len(devices)} worker{'s' if len(devices) > 1 else ''}"
    parts = [f"hetseq {__version__}"] + ([f"run {config.checkpoint.save_dir}"] if is_run else [])
    return " · ".join([*parts, f"starting {workers} on {socket.gethostname()} ({few(devices, most=8)})"])


def _refusal_of(config: Config, errand: Errand | None) -> HetSeqError | None:
    try:
        check_command(config, errand)
    except HetSeqError as error:
        return error
    return None


def _check_weights(config: DistributedConfig) -> None:
    """Compare weights with a number of ranks that is known before GPUs are counted, which takes seconds."""
    ranks = config.distributed_world_size or len(config.devices) or config.distributed_gpus
    if ranks:
        config.check_world(ranks)


def _see(config: DistributedConfig) -> Seen | None:
    """The environment that started this process, if the options leave room for one."""
    if not leaves_room(config):
        return None
    look = Look(os.environ, _text_of, socket.gethostname(), is_terminal=sys.stdin is not None and sys.stdin.isatty())
    return see(look, config.env, tell=_say)


def check_alone(script: str) -> None:
    """Raise ConfigError if a program has started this process as one of several, each of which would be a run."""
    seen = _see(DistributedConfig())
    if seen is not None and seen.processes > 1 and not seen.is_script:
        raise ConfigError(
            f"{seen.system} has started {seen.processes} processes of this script ({seen.why}), and each would train"
            f" alone: start hetseq run in them, as in {seen.system} ... -m hetseq run {script}, or hetseq run --env"
            " none for one alone"
        )


def tell_ending(ending: Ending) -> None:
    """Print why a run ended, if there is anything to say. The exit code still tells if the reader has gone."""
    from hetseq.monitor.progress import takes_text

    with suppress(OSError):
        if ending.message and takes_text(sys.stderr, patience_s=_PATIENCE_S):
            tone = Tone.WARNING if ending.code == EXIT_STOPPED else Tone.ERROR
            sys.stderr.write(toned(f"hetseq: {ending.message}", tone, sys.stderr) + "\n")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _text_of(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _interface(seen: Seen | None) -> str | None:
    """The network interface in GLOO_SOCKET_IFNAME, which gloo also reads; else the environment's, if it exists here."""
    if wish := os.environ.get("GLOO_SOCKET_IFNAME"):
        return wish
    if seen is None or seen.is_alone or seen.interface not in [one.name for one in interfaces()]:
        return None
    return seen.interface


@contextmanager
def _stopping_in_time(seen: Seen | None) -> Iterator[None]:
    """Send this process a stop signal shortly before its job ends, if the scheduler says when that is."""
    seconds = None if seen is None else seconds_to_stop(seen, time.time())
    if seen is None or seconds is None:
        yield
        return

    def stop() -> None:
        _say(f"{seen.system} ends this job in a few minutes: stopping the run")
        os.kill(os.getpid(), signal.SIGUSR1)

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the timer may fire just after the launcher ended
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join(1.0)
        signal.signal(signal.SIGUSR1, before)


def _with_memory_of_environment(config: Config) -> Config:
    """Apply HETSEQ_MEMORY_BUFFER_SIZE, or half of Nebula's variable (the rest is for other uses), if no flag is set."""
    if config.checkpoint.memory_buffer_size is not None:
        return config
    for name, part in (("HETSEQ_MEMORY_BUFFER_SIZE", 1), ("NEBULA_MEMORY_BUFFER_SIZE", 2)):
        if text := os.environ.get(name):
            size = str(parse_size(text, name) // part)
            return replace(config, checkpoint=replace(config.checkpoint, memory_buffer_size=size))
    return config


def command_line(words: list[str]) -> str:
    """This command, as typed on another node."""
    program = Path(words[0]).name
    begin = ["hetseq"] if program in ("__main__.py", "hetseq") else ["python", words[0]]
    return shlex.join([*begin, *words[1:]])


def local_devices(config: DistributedConfig) -> list[str]:
    """The device of each worker of this node, in rank order; several workers may share a GPU.

    Raises ConfigError for a missing device and for contradictory options.
    """
    if config.shadow:
        return ["cpu"]
    if config.devices:
        return _named_devices(config)
    visible = 0 if config.cpu else visible_gpus()
    count = config.distributed_gpus or _default_workers(config, visible)
    if not visible:
        return ["cpu"] * count
    if count == 1:
        return _check_devices([f"cuda:{config.device_id}"], f"--device-id {config.device_id}")
    if count > visible:
        raise ConfigError(
            f"{count} workers were asked for, but this node shows {visible} GPUs: ask for fewer, add --cpu, or name"
            " the devices to use, as in --devices cuda:0,cuda:0,cpu [device-missing]"
        )
    return [f"cuda:{index}" for index in range(count)]


def _named_devices(config: DistributedConfig) -> list[str]:
    devices, said = config.devices, f"--devices {','.join(config.devices)}"
    if config.cpu and any(device != "cpu" for device in devices):
        raise ConfigError(f"{said} contradicts --cpu: leave one of them out")
    if config.distributed_gpus not in (None, 0, len(devices)):
        raise ConfigError(
            f"{said} names {len(devices)} workers, --ranks {config.distributed_gpus} another number: leave"
            " one of them out"
        )
    numbered = [device if device == "cpu" else f"cuda:{int(device.partition(':')[2] or 0)}" for device in devices]
    return _check_devices(numbered, said)


def _default_workers(config: DistributedConfig, visible: int) -> int:
    if config.join is not None:
        return max(1, visible)
    if config.distributed_init_method is not None:
        left = (config.distributed_world_size or visible) - config.distributed_rank
        return max(1, min(_MOST_OF_2020, visible, left))
    return config.distributed_world_size or max(1, visible)


def _check_devices(devices: list[str], said: str) -> list[str]:
    wanted = sorted({int(device.removeprefix("cuda:")) for device in devices if device != "cpu"})
    visible = visible_gpus() if wanted else 0
    absent = [f"cuda:{index}" for index in wanted if index >= visible]
    if absent:
        raise ConfigError(
            f"{said} asks for {' and '.join(absent)}, but this node shows"
            f" {_what_is_there(visible)}, or leave --devices and --device-id out and add --cpu [device-missing]"
        )
    return devices


def _what_is_there(visible: int) -> str:
    """The GPUs of this node, and a remedy."""
    if visible:
        only = "only cuda:0" if visible == 1 else f"only cuda:0 to cuda:{visible - 1}"
        return f"{only} (nvidia-smi and CUDA_VISIBLE_DEVICES tell why): name devices that it shows"
    if build := cpu_build():
        return f"no GPU, as its torch {build} is built for CPUs: install another torch, name cpu instead"
    return "no GPU (nvidia-smi and CUDA_VISIBLE_DEVICES tell why): name cpu instead"


def check_place(config: DistributedConfig, workers: int) -> None:
    """Raise ConfigError if this node cannot run without others, or if weights or throttles do not fit the world."""
    if config.meeting_url is not None:
        if config.distributed_world_size is not None:
            config.check_world(config.distributed_world_size)
        return
    world_size = config.distributed_world_size or workers
    if world_size != workers or config.distributed_rank:
        raise ConfigError(
            f"--distributed-world-size {world_size} with {workers} workers here (from rank {config.distributed_rank})"
            " asks for several nodes, but not where they meet: add --distributed-init-method tcp://HOST:PORT (the first"
            " node's) or file:///PATH (a shared directory); for a run on this node alone leave these two out"
        )
    config.check_world(workers)


def run_here(config: Config, errand: InferenceJob | None = None) -> Ending:
    """Run the only rank in this process, for debuggers and profilers: --distributed-no-spawn. Errand: see `launch`."""
    check_command(config)
    devices = local_devices(config.distributed)
    if config.distributed.meeting_url is not None or len(devices) > 1:
        where = config.distributed.meeting_url or f"{len(devices)} workers"
        raise ConfigError(
            f"--distributed-no-spawn runs a single rank, but {where} was asked for: leave one of them out"
        )
    check_place(config.distributed, len(devices))
    from hetseq.launch.launcher_link import NoLauncher
    from hetseq.launch.stop_request import StopRequest
    from hetseq.launch.worker import run_worker

    directory = RunDirectory.prepare(config.checkpoint.save_dir, config_yaml=dump_yaml(config))
    stop = StopRequest(has_launcher=False)

    def begin() -> None:
        stop.install()  # before this point there is no step to finish
        directory.adopt_config()

    with in_use(directory, logger.warning):
        placement = Assignment(0, devices[0], threads_per_worker(1))
        report = run_worker(config, directory, placement, stop, line=NoLauncher(begin), errand=errand)
    return Ending(report["code"], with_trace(report.get("message", ""), placement.slot))


def stopped_early(name: str, config: Config | None) -> Ending:
    """The end of a run that signal `name` stopped before its launcher was listening; `config` if it was read."""
    path = None if config is None else Path(os.path.abspath(config.checkpoint.save_dir))
    return stopped(f"stopped by {name} {TOO_EARLY}", path is not None and may_go_on(RunDirectory(path)))
