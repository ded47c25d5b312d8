"""One node's part of a run, from its first word to the hub to its last.

The launcher trains nothing. It takes a place in the run, settles on a run directory with the other nodes, starts this
node's workers, passes their words to the hub and its answers back, passes stop signals on once, and ends with the code
and reason that the hub gives to all nodes. Workers end with their launcher, however it ends; it leaves nothing behind.

A run on one node walks the same road: its hub is a thread of this process, and no socket is opened.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar, cast

from hetseq.checkpoint.arena import await_writers
from hetseq.checkpoint.recovery import complete_newer
from hetseq.cluster.channel import ChannelClosed, ChannelError
from hetseq.cluster.contract import build_tag, node_fields
from hetseq.cluster.directories import Mark, has_commits, leave_mark, newest_step, remove_mark, sees
from hetseq.cluster.member import Member, claim_of, join
from hetseq.config import Config
from hetseq.ending import Ending, WorkerEnd, judge, lost
from hetseq.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, ConfigError, HetSeqError, RendezvousError
from hetseq.options import dump_yaml
from hetseq.placement import Placement
from hetseq.processes import ECHO_S, STOP_SIGNALS, ringing_on_signals
from hetseq.run_directory import RunDirectory
from hetseq.workers import Worker, start_worker, threads_per_worker, warm_forkserver

Record = dict[str, Any]
_T = TypeVar("_T")

_GRACE_S = 5.0  # after one worker has failed, for the others to notice by themselves
_START_GRACE_S = 2.0  # ... before they train, when all find the same faults at the same time
_SAVING_S = 60.0  # after one worker has stopped as it was asked to, for the others to end their step and their save
_SILENCE_S = 150.0  # of a hub, which speaks every 10 s while it waits, and gives an ending run 90 s
_WRITERS_S = 3.0
_VERDICT_S = 120.0  # after the last worker of this node, for those of the other nodes


class _Stopped(Exception):
    """A stop signal came before the workers were there."""


class _Over(Exception):
    """The hub has ended the run."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.message)
        self.ending = ending


class Launcher:
    """The workers of one node, from start to end."""

    def __init__(self, config: Config, devices: Sequence[str], *, command: str, interface: str | None = None) -> None:
        self._config, self._devices, self._command, self._interface = config, devices, command, interface
        self._member: Member | None = None
        self._directory: RunDirectory | None = None
        self._is_owner = False  # of the run directory: made and locked here
        self._mark: Mark | None = None
        self._workers: list[Worker] = []
        self._asked_s: float | None = None  # when the first stop signal was heeded
        self._cut_short = ""  # why the workers are ended without waiting for their step
        self._closing = ExitStack()

    def run(self) -> Ending:
        """Start, watch, end; every worker has ended when this returns, also when it raises HetSeqError."""
        with ringing_on_signals() as bell, self._closing:
            self._bell = bell
            warm_forkserver()
            try:
                member, begin = self._take_part()
                return self._train(member, begin)
            except _Over as over:
                return over.ending
            except _Stopped as stop:
                ending = lost(f"stopped by {stop} before the first step", self._has_commit())
                if self._member is not None:
                    with suppress(ChannelError):
                        self._member.send("refused", code=ending.code, message=ending.message)
                return ending
            finally:
                for worker in self._workers:
                    worker.kill()
                self._remove_mark()

    # Before the workers

    def _take_part(self) -> tuple[Member, Record]:
        """A place in the run, once all nodes have one, and what the hub says of the start."""
        while True:
            member = join(
                self._config.distributed,
                command=self._command,
                interface=self._interface,
                pause=self._pause,
                tell=_tell,
            )
            self._member = member
            self._closing.callback(member.close)
            try:
                self._claim(member)
                return member, self._prepare(member)
            except ChannelClosed:
                if self._directory is not None:
                    raise
                member.close()
                _tell("the node that the others call has left before the start: looking for another")

    def _claim(self, member: Member) -> None:
        member.send(
            "claim", claim=claim_of(self._config.distributed, len(self._devices)).to_record(),
            address=member.address, door=member.door, fields=node_fields(self._config), build=build_tag(),
            save_dir=os.path.abspath(self._config.checkpoint.save_dir),
        )  # fmt: skip

    def _prepare(self, member: Member) -> Record:
        """Do what the hub asks for until it says `begin`."""
        while True:
            record = self._next(member)
            try:
                answer = self._answer(member, record)
            except (HetSeqError, OSError) as error:
                code = error.exit_code if isinstance(error, HetSeqError) else EXIT_USAGE
                member.send("refused", code=code, message=str(error))
                continue
            if record["kind"] == "begin":
                return record
            if answer is not None:
                member.send(**answer)

    def _answer(self, member: Member, record: Record) -> Record | None:
        kind = record["kind"]
        if kind == "reach":
            return {"kind": "reached", "failures": self._beside(lambda: member.try_peers(record["peers"]))}
        if kind == "own":
            self._own()
            assert self._directory is not None
            assert self._mark is not None
            return {
                "kind": "owned", "path": str(self._directory.path), "mark": dataclasses.asdict(self._mark),
                "run_id": self._directory.run_id, "newest": newest_step(self._directory),
            }  # fmt: skip
        if kind == "see":
            mark = Mark(**record["mark"])
            is_shared = sees(mark, pause=self._pause)
            if is_shared:
                self._check_own_place(mark.path)
                self._directory = RunDirectory(Path(mark.path))
            return {"kind": "seen", "is_shared": is_shared}
        return None

    def _check_own_place(self, path: str) -> None:
        """Raise ConfigError where this node was told of another directory, and checkpoints there would be forgotten."""
        config = self._config.checkpoint
        own = RunDirectory(Path(os.path.abspath(config.save_dir)))
        newest = None if config.save_dir == type(config).save_dir or str(own.path) == path else newest_step(own)
        if newest is not None:
            raise ConfigError(
                f"--save-dir {config.save_dir} holds checkpoints up to step {newest}, but the run directory is {path},"
                " the --save-dir of the node with rank 0, which this node shares: give all nodes the same --save-dir"
            )

    def _own(self) -> None:
        """Make this node's run directory, keep others out of it, and leave a mark for those who may share it."""
        directory = RunDirectory.prepare(
            self._config.checkpoint.save_dir, config_yaml=dump_yaml(self._config)
        )  # fmt: skip
        self._closing.enter_context(directory.lock())
        self._directory, self._is_owner, self._mark = directory, True, leave_mark(directory)

    def _remove_mark(self) -> None:
        if self._mark is not None:
            remove_mark(self._mark)
            self._mark = None

    def _next(self, member: Member) -> Record:
        """The hub's next record that is not for the user."""
        while True:
            if not self._wait([member.channel], _SILENCE_S):
                raise RendezvousError(
                    f"the node that the others call has said nothing for {_SILENCE_S:.0f} s: is it stopped?"
                )
            record = member.channel.receive(10.0)
            if record["kind"] == "ending":
                raise _Over(Ending(record["code"], record["message"]))
            if record["kind"] != "tell":
                return record
            _tell(record["text"])

    def _beside(self, job: Callable[[], _T]) -> _T:
        """What a job that may block for seconds gives, done in a thread, so that stop signals are heeded all along."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(job)
            while not future.done():
                self._pause(0.02)
            return future.result()

    def _pause(self, seconds: float) -> None:
        self._wait([], seconds)

    def _wait(self, sources: list[Any], timeout_s: float) -> bool:
        """Wait for the first of the sources, True if there was one; raises _Stopped when a stop signal comes."""
        happened = wait([self._bell, *sources], timeout=timeout_s)
        if self._bell in happened:
            number = _stop_signal(os.read(self._bell, 64))
            if number is not None:
                raise _Stopped(signal.Signals(number).name)
        return bool(happened)

    # With the workers

    def _train(self, member: Member, begin: Record) -> Ending:
        member.close_door()
        self._remove_mark()
        assert self._directory is not None
        try:
            if self._is_owner:
                self._directory = self._directory.adopt_run_id(begin["run_id"])
            self._start_workers(member, begin)
        except (HetSeqError, OSError) as error:
            code = error.exit_code if isinstance(error, HetSeqError) else EXIT_FAILED
            member.send("refused", code=code, message=str(error))
            while True:
                self._next(member)  # until the hub has ended it for all
        return self._watch(member)

    def _start_workers(self, member: Member, begin: Record) -> None:
        assert self._directory is not None
        nodes, name, first = tuple(begin["nodes"]), begin["name"], begin["first_rank"]
        if first > 0:
            ranks = f"rank {first}" if len(self._devices) == 1 else f"ranks {first}-{first + len(self._devices) - 1}"
            _tell(f"{socket.gethostname()} has {ranks} of {len(nodes)}; {nodes[0]} shows the curve; logs are in"
                  f" {self._directory.logs}")  # fmt: skip
        threads = threads_per_worker(len(self._devices))
        for local, device in enumerate(self._devices):
            placement = Placement(
                first + local, len(nodes), device, threads, host=member.address, sources=member.sources, name=name,
                key=member.key_of(name),
                nodes=nodes, is_only_node=len(nodes) == len(self._devices),
                parts=tuple(tuple(part) for part in begin["parts"]),
            )  # fmt: skip
            self._workers.append(start_worker(self._config, self._directory.path, placement))

    def _watch(self, member: Member) -> Ending:
        """Pass words on until all workers have ended; once one has failed the others get a short grace."""
        watch, hub = _Watch(self._workers), cast(Any, member.channel)
        while watch.running and not self._cut_short and watch.hub_is_there:
            sources = [self._bell, hub, *(source for worker in watch.running for source in worker.sources())]
            happened = set(wait(sources, timeout=watch.left_s()))
            if not happened:
                break
            try:
                if hub in happened:
                    self._hear(member.channel.receive(10.0), watch)
                for worker in watch.running:
                    for said in worker.listen():
                        member.send(said.pop("kind"), rank=worker.rank, **said)
                if not watch.is_ready_told and all(worker.is_ready for worker in self._workers):
                    watch.is_ready_told = True
                    member.send("ready")
                for end in watch.ended(happened):
                    member.send("end", end=dataclasses.asdict(end))
            except ChannelError:
                watch.hub_is_there = False
            if self._bell in happened:
                self._heed(os.read(self._bell, 64), time.monotonic())
        return self._last_words(member, watch)

    def _hear(self, record: Record, watch: _Watch) -> None:
        kind = record["kind"]
        if kind == "ending":
            raise _Over(Ending(record["code"], record["message"]))
        if kind == "tell":
            _tell(record["text"])
        elif kind == "go":
            for worker in self._workers:
                worker.tell("go")
        elif kind == "value":
            asker = next(worker for worker in self._workers if worker.rank == record["rank"])
            asker.tell("value", value=record["value"])
        elif kind == "begun":
            self._adopt_config()
        elif kind == "ebb":
            is_training = all(worker.is_ready for worker in self._workers)
            watch.set_deadline(_SAVING_S if record["is_polite"] else _GRACE_S if is_training else _START_GRACE_S)

    def _adopt_config(self) -> None:
        if self._is_owner and self._directory is not None:
            try:
                self._directory.adopt_config()
            except HetSeqError as error:
                _tell(f"warning: {error}; it says what an earlier start said, and the run goes on")

    def _heed(self, signals: bytes, now_s: float) -> None:
        """Answer stop signals: the first ends the run after its step, or at once if there is none; so does a second."""
        number = _stop_signal(signals)
        if number is None:
            return
        name = signal.Signals(number).name
        if self._asked_s is not None:
            if now_s - self._asked_s > ECHO_S:
                self._cut_short = f"stopped at once by a second signal ({name})"
            return
        self._asked_s = now_s
        if not all(worker.is_ready for worker in self._workers):
            self._cut_short = f"stopped by {name} before the first step"
            return
        _tell(f"{name}: finishing this step and saving; a second signal stops at once")
        for worker in self._workers:
            worker.ask_to_stop()

    def _is_impatient(self, signals: bytes, now_s: float) -> bool:
        """Whether the user does not want to wait for the other nodes: no echo of what was heeded before."""
        if _stop_signal(signals) is None:
            return False
        if self._asked_s is None:
            self._asked_s = now_s
            _tell("waiting for the other nodes to end; a second signal leaves at once")
            return False
        return now_s - self._asked_s > ECHO_S

    def _last_words(self, member: Member, watch: _Watch) -> Ending:
        """Report how this node ended, and hear how the run did."""
        silent, hub = [worker.rank for worker in watch.running], cast(Any, member.channel)
        for worker in watch.running:
            worker.kill()
        if watch.hub_is_there:
            with suppress(ChannelError):
                member.send("over", silent=silent, cut_short=self._cut_short, has_commit=self._has_commit())
                deadline = time.monotonic() + _VERDICT_S
                while happened := wait([self._bell, hub], timeout=max(0.0, deadline - time.monotonic())):
                    if self._bell in happened and self._is_impatient(os.read(self._bell, 64), time.monotonic()):
                        break
                    if hub in happened:
                        self._hear(member.channel.receive(10.0), watch)
        ending = judge(watch.ends, has_commit=self._has_commit(), cut_short=self._cut_short, silent=silent)
        is_bereaved = all(end.is_secondary or end.code == EXIT_DONE for end in watch.ends)
        if is_bereaved and not self._cut_short:
            return lost("the node that the others call is gone", self._has_commit())
        return ending

    def _has_commit(self) -> bool:
        """Whether there is a checkpoint to go on from; one that lacks nothing but its commit gets it now."""
        directory = self._directory or RunDirectory(Path(os.path.abspath(self._config.checkpoint.save_dir)))
        if has_commits(directory) or not directory.checkpoints.is_dir():
            return has_commits(directory)
        with suppress(OSError, HetSeqError):
            await_writers(directory.run_id, patience_s=_WRITERS_S)  # they outlive their trainers to finish
            complete_newer(directory.checkpoints, None)
        return has_commits(directory)


class _Watch:
    """What is known of this node's workers while they run."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.running = list(workers)
        self.ends: list[WorkerEnd] = []
        self.is_ready_told = False
        self.hub_is_there = True
        self._deadline_s: float | None = None

    def left_s(self) -> float | None:
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def set_deadline(self, seconds: float) -> None:
        """The others must have ended by then; the first deadline stands."""
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + seconds

    def ended(self, happened: set[Any]) -> list[WorkerEnd]:
        """The ends of the workers whose processes have just ended."""
        ended = [worker for worker in self.running if worker.sentinel in happened]
        ends = [worker.end() for worker in ended]
        self.running = [worker for worker in self.running if worker not in ended]
        self.ends.extend(ends)
        return ends


def _stop_signal(signals: bytes) -> int | None:
    """The first stop signal among those that came; others are somebody else's in this process."""
    return next((number for number in signals if number in STOP_SIGNALS), None)


def _tell(text: str) -> None:
    with suppress(OSError):  # a reader that went away is no reason to stop
        sys.stderr.write(f"{text}\n")
