"""Options of this process that follow from its launch environment: meeting place, ranks and device.

Pure: options and a `Seen` in, options and a line of text out. Options set by the user are kept. Ranks are set only if
every process knows its rank and the host of rank zero; otherwise they are assigned at the rendezvous.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hetseq.cluster.rendezvous.meet import OtherNodes
from hetseq.config.sections import DistributedConfig
from hetseq.errors import ConfigError
from hetseq.launch.environments.detected import Seen
from hetseq.system.started_by import SSH

_STOP_BEFORE_S = 300.0  # before the end of a job, to finish the step and the checkpoint
_STARTED_BY_OTHERS_S = 30.0  # for a program that starts all nodes
_STOP_BEFORE_PART = 0.25  # of the remaining time, in short jobs


@dataclass(frozen=True)
class AppliedEnvironment:
    """The options of this process, and a line about them for the user."""

    config: DistributedConfig
    words: tuple[str, ...] = ()  # the same options as flags, for a command typed on another node
    line: str | None = None  # None: another process of the same job prints it


def leaves_room(config: DistributedConfig) -> bool:
    """Whether an environment may set options: no meeting place or rank is given, or the environment is named."""
    if config.env == "none":
        return False
    said = (config.join, config.distributed_init_method, config.distributed_world_size, config.distributed_rank or None)
    return config.env != "auto" or all(value is None for value in said)


def choose(config: DistributedConfig, seen: Seen, *, gpus: Callable[[], int]) -> AppliedEnvironment:
    """Fill in the options that the user left out. `gpus` counts the visible GPUs; it is called only if needed.

    Raises ConfigError if the options of this node do not fit the processes started on it.
    """
    if seen.is_alone:
        return AppliedEnvironment(config, line=f"{_name(seen)}: one process on one node, with no others to meet")
    if seen.is_script and config.env == "auto":
        return AppliedEnvironment(config, line=_line_of_script(seen))
    if seen.is_per_device:
        config = _with_own_device(config, seen, gpus)
    config, words = _with_meeting(config, seen)
    return AppliedEnvironment(config, words, _line(config, seen) if is_first(seen) else None)


def other_nodes(command: str, seen: Seen | None, started_by: str) -> OtherNodes:
    """How the other nodes are started: by the environment, by `hetseq ssh`, or by the user with this command."""
    if started_by == SSH:
        return OtherNodes("", _STARTED_BY_OTHERS_S)
    is_started = seen is not None and not seen.is_alone and not seen.is_script
    return OtherNodes(command, _STARTED_BY_OTHERS_S if is_started else 0.0)


def is_first(seen: Seen) -> bool:
    """Whether this process prints for all: rank zero, or the first process of the first host."""
    if seen.rank is not None:
        return seen.rank == 0
    return not seen.index and not seen.local_rank


def seconds_to_stop(seen: Seen, now_s: float) -> float | None:
    """Seconds until the run must stop to end before its job does; None if another process has to watch the time.

    The run stops 300 s before the end, or with a quarter of the time left if that is less. `now_s`: seconds since 1970.
    """
    if seen.end_time is None or not is_first(seen) or seen.end_time <= now_s:
        return None
    left_s = seen.end_time - now_s
    return left_s - min(_STOP_BEFORE_S, left_s * _STOP_BEFORE_PART)


def _with_own_device(config: DistributedConfig, seen: Seen, gpus: Callable[[], int]) -> DistributedConfig:
    local, count = seen.local_rank or 0, seen.local_size or 1
    if config.devices:
        if len(config.devices) not in (1, count):
            raise ConfigError(
                f"--devices {','.join(config.devices)} names {len(config.devices)} workers, but {seen.system} started"
                f" {_processes(count)} on this node, each with one worker: name one device or {count}, or start one"
                " process per node"
            )
        return replace(config, devices=(config.devices[local % len(config.devices)],), distributed_gpus=None)
    if config.distributed_gpus not in (None, 0, 1, count):
        raise ConfigError(
            f"--ranks {config.distributed_gpus}, but {seen.system} started {_processes(count)} on this node,"
            " each with one worker: leave it out, or start one process per node"
        )
    # if the scheduler shows each task only one GPU, it is cuda:0 in every task
    device_id = config.device_id or (local if not config.cpu and gpus() > 1 else 0)
    return replace(config, distributed_gpus=1, device_id=device_id)


def _with_meeting(config: DistributedConfig, seen: Seen) -> tuple[DistributedConfig, tuple[str, ...]]:
    if config.join is not None:
        return config, ()
    url, words = config.distributed_init_method, []
    if url is None:
        url = _url(seen)
        if seen.rank is None:
            least = config.min_ranks or seen.processes
            return replace(config, join=url, min_ranks=least), ("--join", url, "--min-ranks", str(least))
        words += ["--distributed-init-method", url]
    if seen.rank is None:
        return config, ()
    world_size = config.distributed_world_size or seen.processes
    rank = config.distributed_rank or seen.rank
    words += ["--distributed-world-size", str(world_size), "--ranks", "1", "--distributed-rank", str(rank)]
    filled = replace(
        config, distributed_init_method=url, distributed_world_size=world_size, distributed_rank=rank
    )  # fmt: skip
    return filled, tuple(words)


def _url(seen: Seen) -> str:
    if not seen.hosts:
        raise ConfigError(
            f"{_name(seen)} does not say on which host to meet: set MASTER_ADDR, or name a place with --join"
            " file:///SHARED --min-ranks N"
        )
    host = "127.0.0.1" if seen.nodes == 1 else seen.hosts[0]
    return f"tcp://[{host}]:{seen.port}" if ":" in host else f"tcp://{host}:{seen.port}"


def _line(config: DistributedConfig, seen: Seen) -> str:
    nodes = f"{seen.nodes} node{'s' * (seen.nodes != 1)}"
    each = "one device each" if seen.is_per_device else "each with the devices of its node"
    how = f"--join {config.join} --min-ranks {config.min_ranks}"
    if config.join is None:
        how = f"--distributed-init-method {config.distributed_init_method}, ranks as given"
    return f"{_name(seen)}: {_processes(seen.processes)} on {nodes}, {each}; chosen: {how} (--env none: not)"


def _line_of_script(seen: Seen) -> str:
    return (
        f"{_name(seen)}: a batch script runs only on the first of its {seen.nodes} nodes, and so does this run; to use"
        f" all nodes, write it with hetseq script {seen.system} (--env {seen.system}: wait here for the others)"
    )


def _name(seen: Seen) -> str:
    return f"{seen.system} ({seen.why})"


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count != 1)}"
