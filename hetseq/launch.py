"""Starts this node's workers and watches them: one command, one launcher, one process per rank.

The launcher trains nothing. It checks and locks the run directory, starts the workers from a warm forkserver, passes
stop signals on once, and turns the ends of all workers into one exit code and at most one reason. Workers end with
their launcher, however it ends; it in turn leaves nothing behind. Deciding what the ends mean is a pure function.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from hetseq.config import Config, DistributedConfig
from hetseq.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, ConfigError
from hetseq.options import dump_yaml
from hetseq.processes import ECHO_S, STOP_SIGNALS
from hetseq.run_directory import RunDirectory

_GRACE_S = 5.0  # after one worker has failed, for the others to notice by themselves
_SAVING_S = 60.0  # after one worker has stopped as it was asked to, for the others to end their step and their save
#: signals that a program earns by itself; a queue that restarts it would see them again
_OWN_FAULTS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


@dataclass(frozen=True)
class WorkerEnd:
    """How one worker ended: what it reported, if it still could, and what the kernel says."""

    rank: int
    exit_code: int  # negative: killed by that signal
    code: int | None = None  # as reported
    message: str = ""
    is_secondary: bool = False  # it ended because another rank did


@dataclass(frozen=True)
class Ending:
    """How the run ended on this node."""

    code: int
    message: str = ""


def judge(ends: Sequence[WorkerEnd], *, has_commit: bool, cut_short: str = "", silent: Sequence[int] = ()) -> Ending:
    """One exit code and one reason for the ends of all workers, in the order in which they ended.

    The root cause is the first failure that is not the mere loss of a peer. A lost machine ends with 75 if there is a
    commit to go on from; what would fail again in the same way never does. `cut_short`: why the launcher ended the
    workers itself, if it did. `silent`: ranks that still ran when the others had long noticed that one was missing.
    """
    if cut_short:
        return _lost(cut_short, has_commit)
    killed = [end for end in ends if end.code is None]
    failed = [end for end in ends if end.code not in (None, EXIT_DONE, EXIT_STOPPED) and not end.is_secondary]
    # A rank that the launcher had to end because another one failed is no cause.
    first = next((end for end in ends if end in killed or end in failed), None)
    if first is None:
        bereaved = next((end for end in ends if end.is_secondary), None)
        if bereaved is not None:
            return _lost(_who_fell_silent(silent, bereaved), has_commit)
        code = max((end.code or 0 for end in ends), default=EXIT_DONE)
        return Ending(code, next((end.message for end in ends if end.message), ""))
    if first.code is not None:
        return Ending(first.code, _named(first, ends))
    number = -first.exit_code
    if first.exit_code >= 0:
        return Ending(EXIT_FAILED, f"rank {first.rank} left with exit code {first.exit_code} without a reason")
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number in _OWN_FAULTS:
        return Ending(
            EXIT_FAILED, f"rank {first.rank} crashed ({name}); its last words are in log/rank-{first.rank}.txt"
        )
    hint = ", as the kernel does when memory runs out" if number == signal.SIGKILL else ""
    return _lost(f"rank {first.rank} was killed ({name}{hint})", has_commit)


def _named(end: WorkerEnd, ends: Sequence[WorkerEnd]) -> str:
    """The reason of a failure, with the rank where it is one rank's own."""
    # What rank zero found reaches the others in a row of fixed size, so their copies may be cut short.
    same = [other.message for other in ends if other is end or _is_cut_from(end.message, other.message)]
    return max(same, key=len) if len(same) > 1 or len(ends) == 1 else f"rank {end.rank}: {end.message}"


def _is_cut_from(one: str, other: str) -> bool:
    return bool(one and other) and (one.startswith(other) or other.startswith(one))


def _who_fell_silent(silent: Sequence[int], bereaved: WorkerEnd) -> str:
    if not silent:
        return bereaved.message
    who = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
    return f"{who} fell silent; rank {bereaved.rank} {bereaved.message}"


def _lost(reason: str, has_commit: bool) -> Ending:
    if has_commit:
        return Ending(EXIT_STOPPED, f"{reason}; the same command goes on from the newest checkpoint")
    return Ending(EXIT_FAILED, f"{reason}; nothing had been saved yet")


def launch(config: Config) -> Ending:
    """Run the configuration on this node until it ends. Raises HetSeqError for what is wrong before any worker."""
    devices = local_devices(config.distributed)
    check_one_node(config.distributed, len(devices))
    config.distributed.check_world(len(devices))
    directory = RunDirectory.prepare(config.checkpoint.save_dir, config_yaml=dump_yaml(config))
    with directory.lock():
        return Launcher(config, directory, devices).run()


def local_devices(config: DistributedConfig) -> list[str]:
    """The device of each worker of this node, in rank order."""
    if config.devices:
        devices = list(config.devices)
        if config.cpu and any(device != "cpu" for device in devices):
            raise ConfigError(f"--devices {','.join(devices)} contradicts --cpu: leave one of them out")
        return _check_devices([device if device != "cuda" else "cuda:0" for device in devices])
    visible = 0 if config.cpu else _visible_gpus()
    count = config.distributed_gpus or config.distributed_world_size or max(1, visible)
    if not visible:
        return ["cpu"] * count
    if count == 1:
        return _check_devices([f"cuda:{config.device_id}"])
    if count > visible:
        raise ConfigError(
            f"{count} workers were asked for, but this node shows {visible} GPUs: ask for fewer, add --cpu, or say"
            " which devices to use, as in --devices cuda:0,cuda:0,cpu"
        )
    return [f"cuda:{index}" for index in range(count)]


def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _check_devices(devices: list[str]) -> list[str]:
    wanted = [int(device.partition(":")[2]) for device in devices if device != "cpu"]
    if wanted and max(wanted) >= (visible := _visible_gpus()):
        raise ConfigError(
            f"cuda:{max(wanted)} was asked for (--devices or --device-id), but this node shows {visible} GPUs: name one"
            " that it shows, or add --cpu"
        )
    return devices


def check_one_node(config: DistributedConfig, workers: int) -> None:
    """Raise ConfigError where the options describe a run on several nodes."""
    world_size = config.distributed_world_size or workers
    if world_size != workers or config.distributed_rank:
        raise ConfigError(
            f"--distributed-world-size {world_size} with {workers} workers here (from rank {config.distributed_rank})"
            " asks for several nodes; this version trains on one node: leave --distributed-rank out and let the world"
            " size be the workers of this node"
        )


def run_here(config: Config) -> Ending:
    """Run the only rank in this process, for debuggers and profilers: --distributed-no-spawn."""
    devices = local_devices(config.distributed)
    check_one_node(config.distributed, len(devices))
    if len(devices) > 1:
        raise ConfigError(f"--distributed-no-spawn runs one worker, but {len(devices)} were asked for")
    from hetseq.worker import Placement, StopRequest, run_worker

    directory = RunDirectory.prepare(config.checkpoint.save_dir, config_yaml=dump_yaml(config))
    stop = StopRequest(has_launcher=False)
    stop.install()
    with directory.lock():
        placement = Placement(0, 1, devices[0], _threads_per_worker(1))
        report = run_worker(config, directory, placement, stop, on_ready=directory.adopt_config)
    return Ending(report["code"], report.get("message", ""))


class Launcher:
    """The workers of one node, from start to end."""

    def __init__(self, config: Config, directory: RunDirectory, devices: Sequence[str]) -> None:
        self._config, self._directory, self._devices = config, directory, devices
        self._workers: list[_Worker] = []
        self._asked_s: float | None = None  # when the first stop signal was heeded
        self._cut_short = ""  # why the workers are ended without waiting for their step

    def run(self) -> Ending:
        """Start, watch, judge; every worker has ended when this returns, also when it raises."""
        try:
            with _ringing_on_signals() as bell:
                self._start()
                ends, silent = self._watch(bell)
        finally:
            for worker in self._workers:
                worker.kill()
        return judge(ends, has_commit=self._has_commit(), cut_short=self._cut_short, silent=silent)

    def _start(self) -> None:
        context = _warm_forkserver()
        world_size = len(self._devices)
        store_port, prefix = 0, secrets.token_hex(8)
        if world_size > 1:
            from hetseq.comm import host_store  # imports torch, while the forkserver does

            self._store = host_store()
            store_port = self._store.port
        from hetseq.worker import Placement, worker_main

        threads = _threads_per_worker(world_size)
        for rank, device in enumerate(self._devices):
            placement = Placement(rank, world_size, device, threads, store_port, prefix)
            receiver, sender = context.Pipe(duplex=False)
            # the user's own Options classes are unknown to a fresh process, so their values travel alone
            own = {kind: dataclasses.asdict(values) for kind, values in self._config.extras.items()}
            config = dataclasses.replace(self._config, extras={})
            arguments = (config, own, str(self._directory.path), placement, sender)
            process = context.Process(target=worker_main, args=arguments, name=f"rank-{rank}")
            with _no_main_module():
                process.start()
            sender.close()
            self._workers.append(_Worker(rank, process, receiver))

    def _watch(self, bell: int) -> tuple[list[WorkerEnd], list[int]]:
        """Wait for all workers; once one has failed the others get a short grace. Ends, and ranks that did not end."""
        ends: list[WorkerEnd] = []
        running = list(self._workers)
        deadline: float | None = None
        is_adopted = False
        while running and not self._cut_short:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            happened = set(wait([bell, *(source for worker in running for source in worker.sources())], timeout=left))
            if not happened:
                break
            for worker in running:
                worker.listen()
            if bell in happened:
                self._heed(os.read(bell, 64), time.monotonic())
            if not is_adopted and all(worker.is_ready for worker in self._workers):
                is_adopted = True
                self._directory.adopt_config()
            for worker in [worker for worker in running if worker.sentinel in happened]:
                running.remove(worker)
                end = worker.end()
                ends.append(end)
                if end.code != EXIT_DONE and deadline is None:
                    is_polite = end.code == EXIT_STOPPED and not end.is_secondary
                    deadline = time.monotonic() + (_SAVING_S if is_polite else _GRACE_S)
        return ends, [worker.rank for worker in running]

    def _heed(self, signals: bytes, now_s: float) -> None:
        """Answer stop signals: the first ends the run after its step, or at once if there is none; so does a second."""
        numbers = [number for number in signals if number in STOP_SIGNALS]
        if not numbers:  # one that something else in this process listens to
            return
        name = signal.Signals(numbers[0]).name
        if self._asked_s is not None:
            if now_s - self._asked_s > ECHO_S:
                self._cut_short = f"stopped at once by a second signal ({name})"
            return
        self._asked_s = now_s
        if not all(worker.is_ready for worker in self._workers):
            self._cut_short = f"stopped by {name} before the first step"
            return
        with suppress(OSError):  # a reader that went away is no reason to stop without saving
            sys.stderr.write(f"{name}: finishing this step and saving; a second signal stops at once\n")
        for worker in self._workers:
            worker.ask_to_stop()

    def _has_commit(self) -> bool:
        return any(self._directory.checkpoints.glob("step-*/COMMIT.json"))


@contextmanager
def _ringing_on_signals() -> Iterator[int]:
    """A pipe that is readable once a stop signal has come, with the signals' numbers as bytes.

    Python itself writes into it the moment a signal comes: a handler runs only between two instructions, so one that
    wrote would be heard of minutes later if the signal came just before a wait, or to another thread than the waiting
    one. Once one has come, later ones are ignored afterwards: the process is about to end with a code that tells why.
    """
    bell, hammer = os.pipe()
    os.set_blocking(hammer, False)
    has_rung = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal has_rung
        has_rung = True

    writer_before = signal.set_wakeup_fd(hammer, warn_on_full_buffer=False)
    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield bell
    finally:
        signal.set_wakeup_fd(writer_before)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if has_rung else handler)
        os.close(bell)
        os.close(hammer)


class _Worker:
    """One worker process and the pipe on which it reports."""

    def __init__(self, rank: int, process: Any, channel: Connection) -> None:
        self.rank, self._process, self._channel = rank, process, channel
        self.sentinel: int = process.sentinel
        self.is_ready = False  # it has accepted what it was told, and what was saved before, and begins to train
        self._report: dict[str, Any] = {}

    def sources(self) -> list[Any]:
        """What to wait for: its end, and its next word until it has said the last one."""
        return [self.sentinel] if self._channel.closed else [self.sentinel, self._channel]

    def ask_to_stop(self) -> None:
        if self._process.is_alive():
            os.kill(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def listen(self) -> None:
        """Take in what it has said since; never waits."""
        try:
            while not self._channel.closed and self._channel.poll():
                message = json.loads(self._channel.recv_bytes())
                self.is_ready = self.is_ready or message["kind"] == "ready"
                self._report = message if message["kind"] == "end" else self._report
        except (EOFError, OSError):  # everything it said has been read
            self._channel.close()

    def end(self) -> WorkerEnd:
        """How the process, which has ended, ended."""
        self._process.join()
        self.listen()
        self._channel.close()
        return WorkerEnd(
            self.rank,
            self._process.exitcode,
            self._report.get("code"),
            self._report.get("message", ""),
            self._report.get("is_secondary", False),
        )


def _warm_forkserver() -> Any:
    """A server that has imported torch once and forks workers in a fraction of a second.

    It must outlive a signal to the whole process group, since the workers still want to finish their step; so it starts
    with the stop signals blocked. A worker begins with them blocked too, and gets what came in the meantime once it
    listens: ignored in place of blocked, a signal would be lost to the server, to a young worker and, for this moment,
    to the launcher. It ends when the launcher and all workers have.
    """
    context = multiprocessing.get_context("forkserver")
    # torch imports its compiler when the first optimizer is made: 1.6 s, once here in place of once a worker
    context.set_forkserver_preload(["hetseq.worker", "torch._dynamo"])
    from multiprocessing import forkserver, resource_tracker

    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    path = os.environ.get("PYTHONPATH")
    # the server does not get sys.path, and a checkout that is not installed is found by nothing else
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), path]))
    try:
        resource_tracker.ensure_running()  # unblocks two of them when it has started
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
    return context


@contextmanager
def ending_server() -> Iterator[None]:
    """Kill the fork server that the block starts: by itself it takes seconds to tear down what it had imported.

    For a process that is about to end; its workers have ended before. A server that ran before stays.
    """
    from multiprocessing import forkserver

    server = forkserver._forkserver
    before = getattr(server, "_forkserver_pid", None)
    try:
        yield
    finally:
        pid = getattr(server, "_forkserver_pid", None)
        if pid is not None and before is None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep a new process from importing the launcher's main module again: it needs nothing of it, and a user's script
    without a guard would start another run."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _threads_per_worker(workers: int) -> int:
    """OMP_NUM_THREADS if it is set, else the usable cores divided among the workers."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return max(1, len(os.sched_getaffinity(0)) // workers)
