"""Launcher: runs one node's part of a run, from joining the coordinator to the exit code.

The launcher does not train. It joins the run, settles on a run directory with the other nodes, starts this node's
workers, passes records between them and the coordinator, forwards stop signals once, and ends with the code and reason
that the coordinator gives to all nodes. Workers end with their launcher, however it ends; it leaves nothing behind.

A run on one node works the same way: its coordinator is a thread of this process, and no socket is opened.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar, cast

from hetseq.cluster.membership import decide as membership
from hetseq.cluster.membership.assignment import Assignment, Errand, GenerationRanks
from hetseq.cluster.membership.compatibility import build_tag, node_fields
from hetseq.cluster.membership.coordinator_client import Member, claim_of, join
from hetseq.cluster.membership.exit_status import TOO_EARLY, Ending, WorkerEnd, judge, lost, stopped
from hetseq.cluster.membership.failover import Orphans, orphaned_hub
from hetseq.cluster.membership.run_directory_discovery import (
    Mark,
    check_own_place,
    leave_mark,
    newest_step,
    remove_mark,
    sees,
)
from hetseq.cluster.membership.worker_roster import incarnation
from hetseq.cluster.rendezvous.channel import ChannelClosed, ChannelError
from hetseq.cluster.rendezvous.meet import Meeting, OtherNodes, meet
from hetseq.config import dump_yaml
from hetseq.config.sections import Config
from hetseq.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE, HetSeqError, RendezvousError, text_of
from hetseq.launch.leave_request import is_asked
from hetseq.launch.run_directory_guard import adopt_config, in_use, looked_after, taken_over
from hetseq.launch.stall_detector import SHARE, Reminder, Standstill
from hetseq.launch.watchdog import LOADING_DEADLINE_S
from hetseq.launch.worker_processes import (
    Worker,
    end_all,
    kill_server,
    server_pid,
    start_worker,
    threads_per_worker,
    warm_forkserver,
)
from hetseq.launch.worker_watch import WorkerWatch, may_go_on
from hetseq.monitor.colour import tone_of, toned
from hetseq.monitor.progress import takes_text
from hetseq.run_directory import RunDirectory
from hetseq.system.processes import ECHO_S, die_of_next_signal, first_stop_signal, ringing_on_signals

Record = dict[str, Any]
_T = TypeVar("_T")

_GRACE_S = 5.0  # after one worker has failed, for the others to notice it themselves
_START_GRACE_S = 2.0  # ... before they train, when all ranks find the same errors at the same time
_SAVING_S = 60.0  # after one worker has stopped as requested, for the others to end their step and their save
_SILENCE_S = 150.0  # of a coordinator, which sends a line every 10 s while it waits, and gives an ending run 90 s
_TELLING_S = 3.0  # of a coordinator that this node only tells why it cannot take part
_LOOK_S = 1.0  # between two checks for a request to leave
_YIELD_S = 20.0  # of a shadow, in which the other nodes consider a head on another machine dead and elect one
_ELECTION_S = 60.0  # a head on another machine is considered dead after 15 s without a sign of life
_RESTARTS_S = 3600.0  # window in which restarts are counted
#: records that are passed on to the workers they name, or to all
_FOR_WORKERS = ("go", "value", "freeze", "record", "wish", "dismiss")
_VERDICT_S = 120.0  # after the last worker of this node has ended, for the workers of other nodes


class _Stopped(Exception):
    """A stop signal came before the workers were started."""


class _CutShort(Exception):
    """A second stop signal came while a replacement worker was being started."""


class _Rejoin(Exception):
    """Another node leads the run now, and this node must join it late."""


class _Over(Exception):
    """The coordinator has ended the run."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.message)
        self.ending = ending


class Launcher:
    """The workers of one node, from start to end."""

    def __init__(
        self, config: Config, devices: Sequence[str], *, others: OtherNodes, interface: str | None = None,
        errand: Errand | None = None, refusal: HetSeqError | None = None,
    ) -> None:  # fmt: skip
        self._refusal = refusal  # why this node cannot take part; it joins only to tell the others
        self._config, self._devices, self._others, self._interface = config, devices, others, interface
        self._errand = errand  # the workers run it instead of training
        self._begun_s = time.monotonic()
        self._member: Member | None = None
        self._directory: RunDirectory | None = None
        self._is_owner = False  # this launcher made and locked the run directory
        self._mark: Mark | None = None
        self._workers: list[Worker] = []
        self._newest = membership.Record(0, ())  # the newest generation known to this node
        self._started: dict[int, int] = {}  # by slot of the run: number of earlier starts, as of that generation
        self._presented: dict[int, dict[str, str]] = {}  # by slot: the fields it presented
        self._parts: tuple[str, ...] = ()  # of the training data, at the start of the run
        self._placements: dict[int, Assignment] = {}  # by slot: of the newest worker
        self._restarts: dict[int, list[float]] = {}  # times of restarts, by slot
        self._is_dropped = False  # it was asked to leave by `hetseq drop`
        self._asked_s: float | None = None  # when the first stop signal was handled
        self._has_begun = False  # the run has begun; replacement workers here may still be loading
        self._cut_short = ""  # why the workers are ended without waiting for their step
        self._closing, self._keeping = ExitStack(), ExitStack()  # open resources; those of the run directory
        self._was_part = False  # this node took part in the run before its head was lost
        self._is_over = False  # the whole run is over, not just this node's part

    def run(self) -> Ending:
        """Start, watch and end the workers. All of them have ended when this returns or raises HetSeqError."""
        with ringing_on_signals() as bell, self._closing:
            self._bell = bell
            if self._refusal is None:
                warm_forkserver()
            try:
                while True:
                    member, begin = self._take_part()
                    try:
                        return self._train(member, begin)
                    except _Rejoin:
                        self._start_over(member)
            except _Over as over:
                self._is_over = True
                return over.ending
            except _Stopped as stop:
                _stop_early(str(stop))
                ending = stopped(f"stopped by {stop} {TOO_EARLY}", self._has_commit())
                if self._member is not None:
                    with suppress(ChannelError):
                        self._member.send("refused", code=ending.code, message=ending.message)
                return ending
            finally:
                end_all(self._workers, _tell)
                self._leave_directory()

    def _start_over(self, member: Member) -> None:
        """End this node's old part in the run before it joins again."""
        _tell("the head node is gone: joining the run again at its new head")
        end_all(self._workers, _tell)
        self._workers, self._placements, self._presented, self._was_part = [], {}, {}, True
        self._has_begun = False
        self._leave_directory()
        member.close()

    # Before the workers

    def _take_part(self) -> tuple[Member, Record]:
        """Join the run; returns the membership, and the `begin` record of the coordinator once all nodes are here."""
        while True:
            member = join(
                self._config.distributed,
                others=self._others,
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
                if self._directory is not None and not self._was_part:
                    raise
                self._leave_directory()
                member.close()
                _tell("the head node left before the start: looking for another head")

    def _claim(self, member: Member) -> None:
        member.send(
            "claim", claim=claim_of(self._config.distributed, len(self._devices)).to_record(),
            address=member.address, door=member.door, fields=node_fields(self._config, self._errand), build=build_tag(),
            save_dir=os.path.abspath(self._config.checkpoint.save_dir),
        )  # fmt: skip

    def _prepare(self, member: Member) -> Record:
        """Answer the coordinator's requests until it sends `begin`."""
        while True:
            record = self._next(member)
            try:
                answer = self._answer(member, record)
            except (HetSeqError, OSError) as error:
                code = error.exit_code if isinstance(error, HetSeqError) else EXIT_USAGE
                member.send("refused", code=code, message=text_of(error))
                continue
            if record["kind"] == "begin":
                return record
            if answer is not None:
                member.send(**answer)

    def _answer(self, member: Member, record: Record) -> Record | None:
        kind = record["kind"]
        if self._refusal is not None:
            raise self._refusal
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
                check_own_place(self._config, mark.path)
                self._directory = RunDirectory(Path(mark.path))
                self._keeping.enter_context(looked_after(self._directory, _tell, is_over=lambda: self._is_over))
            return {"kind": "seen", "is_shared": is_shared}
        return None

    def _own(self) -> None:
        """Make this node's run directory, lock it, and leave a mark for nodes that may share it."""
        directory = RunDirectory.prepare(self._config.checkpoint.save_dir, config_yaml=dump_yaml(self._config))
        self._keeping.enter_context(in_use(directory, _tell))
        self._directory, self._is_owner, self._mark = directory, True, leave_mark(directory)

    def _leave_directory(self) -> None:
        """Give up the run directory; one that was made here becomes free for others."""
        if self._mark is not None:
            remove_mark(self._mark)
        self._directory, self._is_owner, self._mark = None, False, None
        self._keeping.close()

    def _next(self, member: Member) -> Record:
        """The coordinator's next record; prints the lines that are for the user."""
        while True:
            patience_s = _SILENCE_S if self._refusal is None else _TELLING_S
            if not self._wait([member.channel], patience_s):
                raise RendezvousError(f"the head node has been silent for {patience_s:.0f} s: is it stopped?")
            record = member.channel.receive(10.0)
            if record["kind"] == "ending":
                raise _Over(Ending(record["code"], record["message"]))
            if record["kind"] != "tell":
                return record
            _tell(record["text"])

    def _beside(self, job: Callable[[], _T], pause: Callable[[float], None] | None = None) -> _T:
        """The result of a job that may block, run in a thread so that stop signals are handled meanwhile.

        If `pause` raises, the job is abandoned.
        """
        future: Future[_T] = Future()

        def do() -> None:
            try:
                future.set_result(job())
            except Exception as error:  # raised in the caller, as if it had run the job itself
                future.set_exception(error)

        threading.Thread(target=do, name="beside", daemon=True).start()
        while not future.done():
            (pause or self._pause)(0.02)
        return future.result()

    def _pause(self, seconds: float) -> None:
        self._wait([], seconds)

    def _wait(self, sources: list[Any], timeout_s: float) -> bool:
        """Wait until a source is ready; returns whether one is. Raises _Stopped on a stop signal."""
        happened = wait([self._bell, *sources], timeout=timeout_s)
        if self._bell in happened and (number := first_stop_signal(os.read(self._bell, 64))) is not None:
            raise _Stopped(signal.Signals(number).name)
        return bool(happened)

    # With the workers

    def _train(self, member: Member, begin: Record) -> Ending:
        member.close_door()
        assert self._directory is not None
        try:
            if self._is_owner:
                self._directory = self._directory.adopt_run_id(begin["run_id"])
            self._start_workers(member, begin)
        except (HetSeqError, OSError) as error:
            code = error.exit_code if isinstance(error, HetSeqError) else EXIT_FAILED
            member.send("refused", code=code, message=text_of(error))
            while True:
                self._next(member)  # until the coordinator has ended the run for all
        return self._watch(member, self._directory)

    def _start_workers(self, member: Member, begin: Record) -> None:
        assert self._directory is not None
        nodes, name, first = tuple(begin["nodes"]), begin["name"], begin["first_rank"]
        is_late = "starts" in begin
        if first > 0 and not is_late:
            ranks = f"rank {first}" if len(self._devices) == 1 else f"ranks {first}-{first + len(self._devices) - 1}"
            _tell(f"{socket.gethostname()} has {ranks} of {len(nodes)}; {nodes[0]} shows the curve; logs are in"
                  f" {self._directory.logs}")  # fmt: skip
        threads, parts = threads_per_worker(len(self._devices)), tuple(tuple(part) for part in begin["parts"])
        is_only_node = len(nodes) == len(self._devices)
        crew = GenerationRanks(0, tuple(range(len(nodes))), nodes, parts, is_only_node)
        sources = tuple(begin["addresses"]) if is_late else member.sources
        for local, device in enumerate(self._devices):
            slot, starts = first + local, begin["starts"][local] if is_late else 0
            self._placements[slot] = Assignment(
                slot, device, threads, crew, host=member.address, sources=sources, name=name,
                key=member.key_of(name), incarnation=incarnation(slot, starts), starts=starts, is_replacement=is_late,
                is_shadow=self._config.distributed.shadow, begun_s=self._begun_s,
            )  # fmt: skip
            self._start_worker(self._placements[slot], self._pause)
        self._newest = membership.Record(0, tuple(incarnation(slot, 0) for slot in range(len(nodes))))

    def _start_worker(self, placement: Assignment, pause: Callable[[float], None]) -> Worker:
        """Start a process once the fork server has imported torch; `pause` may raise to abandon the wait."""
        assert self._directory is not None
        path, given_up = self._directory.path, threading.Event()
        begin_s, reminder = time.monotonic(), Reminder(SHARE * LOADING_DEADLINE_S)

        def start() -> Worker:
            return start_worker(
                self._config, path, placement, self._errand, is_wanted=lambda: not given_up.is_set()
            )  # fmt: skip

        def wait_a_while(seconds: float) -> None:
            pause(seconds)
            if reminder.is_due(for_s := time.monotonic() - begin_s):
                _tell(f"rank {placement.slot} has not started: importing torch (process {server_pid()}) has taken"
                      f" {for_s:.0f} s")  # fmt: skip

        try:
            worker = self._beside(start, wait_a_while)
        except (_Stopped, _CutShort):
            given_up.set()
            kill_server()
            raise
        self._workers.append(worker)
        return worker

    def _may_restart(self, end: WorkerEnd) -> bool:
        """Whether to restart a lost worker: not if it was asked to leave, and not too often."""
        if not end.is_loss or end.has_left or end.is_secondary or self._asked_s is not None:
            return False
        now_s, times = time.monotonic(), self._restarts.setdefault(end.rank, [])
        times[:] = [at for at in times if now_s - at < _RESTARTS_S]
        if len(times) >= self._config.distributed.max_restarts:
            _tell(f"rank {end.rank} is not started again: {len(times)} restarts within an hour (--max-restarts)")
            return False
        times.append(now_s)
        return True

    def _restart(self, slot: int) -> Worker:
        """Start a replacement for a lost worker; it takes part as soon as it has loaded its data."""
        starts = self._placements[slot].starts + 1
        self._placements[slot] = dataclasses.replace(
            self._placements[slot], starts=starts, incarnation=incarnation(slot, starts), is_replacement=True
        )  # fmt: skip
        return self._start_worker(self._placements[slot], self._pause_in_training)

    def _pause_in_training(self, seconds: float) -> None:
        """Sleep; raises _CutShort on a stop signal that ends the run at once."""
        if self._bell in wait([self._bell], timeout=seconds):
            self._heed(os.read(self._bell, 64), time.monotonic())
        if self._cut_short:
            raise _CutShort

    def _watch(self, member: Member, directory: RunDirectory) -> Ending:
        """Pass records on until all workers have ended; once one has failed, the others get a short grace period."""
        watch = WorkerWatch(self._workers, Standstill(directory, member.send, _tell))
        while watch.running and not self._cut_short and watch.hub_is_there:
            hub = cast(Any, member.channel)
            sources = [self._bell, hub, *(source for worker in watch.running for source in worker.sources())]
            happened = set(wait(sources, timeout=min(watch.left_s(), _LOOK_S)))
            if not happened and watch.left_s() == 0.0:
                break
            self._look_for_drop(watch)
            try:
                watch.standstill.look(watch.running)
                if hub in happened:
                    self._hear(member.channel.receive(10.0), watch)
                for worker in watch.running:
                    for said in worker.listen():
                        if said["kind"] == "present":
                            self._presented[worker.rank] = said["fields"]
                        member.send(said.pop("kind"), rank=worker.rank, starts=worker.starts, **said)
                if watch.is_ending:  # an earlier `ready` has been read by now
                    end_all(watch.take_loading(), _tell)
                if not watch.is_ready_told and all(worker.is_ready for worker in self._workers):
                    watch.is_ready_told = True
                    member.send("ready")
                for worker, end in watch.ended(happened):
                    if worker.is_held:
                        end_all([worker], _tell)
                    is_restarting = watch.is_training and self._may_restart(end)
                    member.send(
                        "end", end=dataclasses.asdict(end), starts=worker.starts, is_restarting=is_restarting
                    )  # fmt: skip
                    if is_restarting:
                        worker.kill()  # frees its resources
                        self._workers.remove(worker)
                        watch.running.append(self._restart(worker.rank))
            except _CutShort:
                break
            except ChannelError:
                watch.hub_is_there = self._take_over(member, watch)
            if self._bell in happened:
                self._heed(os.read(self._bell, 64), time.monotonic())
        return self._last_words(member, watch)

    def _take_over(self, member: Member, watch: WorkerWatch) -> bool:
        """Replace a lost coordinator: rejoin another head, or lead the ranks here; False if they are not training."""
        is_possible = watch.is_training and not member.is_head and bool(watch.running)
        if not is_possible or self._directory is None:
            return False
        is_shadow = self._config.distributed.shadow and (self._config.distributed.join or "").startswith("file:")
        if is_shadow and not any(worker.is_ready for worker in watch.running):
            self._beside_ranks()
        meeting = self._meet_again()
        if meeting is not None and not meeting.is_head:
            meeting.close()
            raise _Rejoin
        mark = None
        if meeting is None:
            _tell("the head node is gone: saving the state here, to resume from it")
        else:
            _tell("the head node is gone: this node is the new head")
            mark = self._mark = self._mark or leave_mark(self._directory, is_owner=self._is_owner)
            if not self._is_owner:
                self._keeping.enter_context(taken_over(self._directory, _tell))
        placements, limits = self._placements, self._config.distributed
        orphans = Orphans(
            socket.gethostname(), os.getpid(), member.address, node_fields(self._config, self._errand),
            {slot: placement.starts for slot, placement in placements.items()}, self._started, self._presented,
            self._parts,
            str(self._directory.path), self._directory.run_id, next(iter(placements.values())).name,
        )  # fmt: skip
        hub = orphaned_hub(
            orphans, self._newest, now_s=time.monotonic(), mark=mark, min_ranks=limits.min_ranks or 1,
            wait_s=limits.join_timeout,
        )  # fmt: skip
        member.become_head(hub, meeting, _tell)
        return True

    def _beside_ranks(self) -> None:
        """Let a node with ranks become the head, if there is one: its state is newer than the shadow's."""
        _tell(f"the head node is gone: waiting {_YIELD_S:.0f} s for another node to lead the run")
        with suppress(_Stopped):
            self._pause(_YIELD_S)

    def _meet_again(self) -> Meeting | None:
        """Find the present head, new or old; None if there is none."""
        brief = dataclasses.replace(self._config.distributed, join_timeout=_ELECTION_S)
        try:
            return meet(
                brief, pause=self._pause, tell=_tell, others=OtherNodes(self._others.command),
                interface=self._interface, is_again=True,
            )  # fmt: skip
        except (HetSeqError, OSError, _Stopped) as error:
            _tell(f"found no other node that leads the run ({error})")
            return None

    def _hear(self, record: Record, watch: WorkerWatch) -> None:
        kind = record["kind"]
        if kind == "ending":
            raise _Over(Ending(record["code"], record["message"]))
        if kind == "tell":
            _tell(record["text"])
        elif kind in _FOR_WORKERS:
            if kind == "record":
                self._newest = membership.Record.from_record(record["record"])
                self._started = {int(slot): int(starts) for slot, starts in record["started"]}
                assert self._member is not None
                self._member.send(
                    "heard", rank=record["rank"], starts=record["starts"], generation=self._newest.generation
                )  # fmt: skip
            watch.pass_on(record)
        elif kind == "fence":
            for worker in watch.named(record):
                worker.fence()
        elif kind == "begun":
            watch.is_training, self._has_begun, self._parts = True, True, tuple(record["parts"])
            if self._directory is not None:
                adopt_config(self._directory, _tell)
        elif kind == "ebb":
            watch.is_training = False
            is_training = all(worker.is_ready for worker in self._workers)
            watch.set_deadline(_SAVING_S if record["is_polite"] else _GRACE_S if is_training else _START_GRACE_S)
            watch.is_ending = self._has_begun and record["is_polite"]
            if not record["is_polite"]:
                for worker in watch.running:
                    worker.tell("dismiss", why="the run is ending")

    def _heed(self, signals: bytes, now_s: float) -> None:
        """Handle stop signals: the first ends the run after its step, or at once before training; a second at once."""
        number = first_stop_signal(signals)
        if number is None:
            return
        name = signal.Signals(number).name
        if self._asked_s is not None:
            if now_s - self._asked_s > ECHO_S:
                self._cut_short = f"stopped at once by a second signal ({name})"
            return
        self._asked_s = now_s
        is_at_work = self._config.distributed.shadow or any(worker.is_ready for worker in self._workers)
        if not (self._has_begun and is_at_work):
            self._cut_short = f"stopped by {name} {TOO_EARLY}"
            _stop_early(name)
            return
        self._ask_to_leave(f"{name}: finishing this step; a second signal stops at once", now_s)

    def _ask_to_leave(self, text: str, now_s: float) -> None:
        self._asked_s = now_s
        _tell(text)
        assert self._member is not None
        with suppress(ChannelError):
            self._member.send("leave")

    def _look_for_drop(self, watch: WorkerWatch) -> None:
        """Leave if a user has asked for it with `hetseq drop`."""
        if not watch.is_training or self._asked_s is not None or self._directory is None:
            return
        if is_asked(self._directory, socket.gethostname()):
            self._is_dropped = True
            self._ask_to_leave("hetseq drop: finishing this step and leaving", time.monotonic())

    def _is_impatient(self, signals: bytes, now_s: float) -> bool:
        """Whether a second signal, not an echo of the first, says that the user will not wait for the other nodes."""
        if first_stop_signal(signals) is None:
            return False
        if self._asked_s is None:
            self._asked_s = now_s
            _tell("waiting for the other nodes to end; a second signal leaves at once")
            return False
        return now_s - self._asked_s > ECHO_S

    def _last_words(self, member: Member, watch: WorkerWatch) -> Ending:
        """Report how this node ended; returns how the run ended."""
        silent, hub = [worker.rank for worker in watch.running], cast(Any, member.channel)
        watch.say_who_is_left(_tell if not self._cut_short else lambda _: None)
        end_all(watch.running, _tell)
        if watch.hub_is_there:
            with suppress(ChannelError):
                member.send("over", silent=silent, cut_short=self._cut_short, has_commit=self._has_commit())
                if not member.is_head and self._cut_short:
                    return stopped(self._cut_short, self._has_commit())
                if not member.is_head and watch.has_left:
                    return Ending(EXIT_DONE if self._is_dropped else EXIT_STOPPED, watch.ends[0].message)
                deadline = time.monotonic() + _VERDICT_S
                member.ask_when_idle()
                while happened := self._wait_for_verdict(hub, watch, deadline):
                    if self._bell in happened and self._is_impatient(os.read(self._bell, 64), time.monotonic()):
                        break
                    if hub in happened:
                        self._hear(member.channel.receive(10.0), watch)
        ending = judge(watch.ends, has_commit=self._has_commit(), cut_short=self._cut_short, silent=silent)
        is_bereaved = all(end.is_secondary or end.code == EXIT_DONE for end in watch.ends)
        if is_bereaved and not self._cut_short:
            return lost("the head node is gone", self._has_commit())
        return ending

    def _wait_for_verdict(self, hub: Any, watch: WorkerWatch, deadline: float) -> list[Any]:
        """The next events; empty if the other nodes should have ended by now. While they train this may take days."""
        timeout_s = None if watch.is_training else max(0.0, deadline - time.monotonic())
        return list(wait([self._bell, hub], timeout=timeout_s))

    def _has_commit(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        path = Path(os.path.abspath(self._config.checkpoint.save_dir))
        return may_go_on(self._directory or RunDirectory(path))


def _stop_early(name: str) -> None:
    """Handle a signal that ends the run at once; the remaining work takes a few seconds at most."""
    die_of_next_signal()
    _tell(f"{name}: stopping; a second signal stops at once")


def _tell(text: str) -> None:
    with suppress(OSError):  # neither stop for a reader that went away, nor wait for one that stopped
        if takes_text(sys.stderr, patience_s=_LOOK_S):
            clear = "\r\x1b[K" if sys.stderr.isatty() else ""  # the live line of rank zero is there
            sys.stderr.write(f"{clear}{toned(text, tone_of(text), sys.stderr)}\n")
