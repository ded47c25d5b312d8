"""kill -9 of trainers, writers and the committer at any instant: nothing is torn, nothing that was promised is lost.

Ranks are processes, each with a writer of its own, that save while they train, one state after the other; a rank says
into a pipe what it was promised. One trial kills somebody. Then the state is loaded as a new start would, and the next
trial goes on from it in the same directory. A thousand trials, and a table of what came of them:

    OMP_NUM_THREADS=1 python -m tests.end_to_end.test_checkpoint_kills 1000
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetseq.checkpoint import CheckpointManager, Identity, Retention, SaveResult
from hetseq.checkpoint.arena import Arena
from hetseq.checkpoint.rank_messages import Row, exchange
from hetseq.errors import CheckpointError
from tests.support.checkpoints import LINEAGE, checked_step, fork, loaded_step, manager, save, tensors_of
from tests.support.nightly import nightly
from tests.support.police import adopt_orphans

RANKS = 3
ELEMENTS = 300_000  # 1.2 MB: a write takes about as long as all the rest of a save
SPREAD_S = 0.06  # about as long as a save takes
DEADLINE_S = 60.0
GROUP_LOST = 3  # exit code

WRITER, COMMITTING, SAVED, FAILED = range(4)
_NEWS = struct.Struct("<iiq")  # rank, kind, value: below PIPE_BUF, so whole or not at all
KINDS = ("trainer", "all trainers", "writer", "committer", "everything")


# -- ranks -------------------------------------------------------------------------------------------------------------


class SocketGroup:
    """A rank of several processes: rank zero hears from all and tells all. ConnectionError once one of them is gone."""

    def __init__(self, rank: int, lines: Sequence[socket.socket]) -> None:
        self.rank, self.world_size, self._lines = rank, RANKS, lines  # rank zero: a line to each other; else to zero

    def all_gather_rows(self, row: Any) -> Any:
        size = row.nbytes
        if self.rank:
            self._lines[0].sendall(row.tobytes())
            gathered = _exactly(self._lines[0], size * self.world_size)
        else:
            gathered = b"".join([row.tobytes(), *(_exactly(line, size) for line in self._lines)])
            for line in self._lines:
                line.sendall(gathered)
        return np.frombuffer(gathered, row.dtype).reshape(self.world_size, -1)


def _exactly(line: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        data = line.recv(size - len(received))
        if not data:
            raise ConnectionError("a rank is gone")
        received += data
    return received


class Rank:
    """A rank that trains until it is killed or another one is gone."""

    def __init__(self, group: SocketGroup, run: Path, trial: int, pipe: int) -> None:
        self._group, self._trial, self._pipe = group, trial, pipe
        self._manager = kept_one(run, group)
        self._writer = 0

    def live(self, first: int) -> None:
        try:
            self._manager.recover()
            state = tensors_of(0, ELEMENTS)
            assert self._manager.prepare(state) is None
            for step in count(first):
                self._train(step, state)
        except ConnectionError:
            self._manager.close(has_failed=True)
            os._exit(GROUP_LOST)

    def _train(self, step: int, state: dict[str, Any]) -> None:
        """An update, what belongs to a save, a forward and backward, and the word that all may update again."""
        own = self._manager
        for name, tensor in tensors_of(step, ELEMENTS).items():
            state[name].copy_(tensor)
        if not own.is_underway:
            identity = Identity(step, 0, LINEAGE)
            self._tell(
                own.begin(
                    state, {"step": step}, identity=identity, nonce=self._trial << 32 | step, kinds=["time"],
                    at_once=["model.b"],
                )
            )  # fmt: skip
        state["model.b"].zero_()  # what a forward changes
        own.settle()
        # the end of a step: all know whether somebody's writer is at work
        if any(row.bytes for row in exchange(self._group, Row(bytes=int(own.is_busy)))):
            return
        self._tell(own.go_on())

    def _name_writer(self) -> None:
        background = self._manager._background
        assert background is not None
        if background._writer.pid != self._writer:
            self._writer = background._writer.pid
            self._say(WRITER, self._writer)

    def _tell(self, result: SaveResult | None) -> None:
        self._name_writer()
        background = self._manager._background
        assert background is not None
        if result is not None:
            step = int(result.path.name.split(".")[0].removeprefix("step-"))
            self._say(SAVED if result.ok else FAILED, step)
        elif background._save is not None and background._save.is_committing:
            self._say(COMMITTING, 0)

    def _say(self, kind: int, value: int) -> None:
        os.write(self._pipe, _NEWS.pack(self._group.rank, kind, value))


class HastyRank(Rank):
    """A rank that is promised each state as soon as its save has begun."""

    def _tell(self, result: SaveResult | None) -> None:
        super()._tell(result)
        background = self._manager._background
        assert background is not None
        if background._save is not None:
            self._say(SAVED, background._save.attempt.identity.step)


class KeepingRank(Rank):
    """A rank whose states stay in memory, every one; now and then one is saved too.

    A state is promised once all ranks have told each other that theirs is sealed; while one is being written out only
    that one is, for the others take turns in the slot beside it.
    """

    _kept = 0
    _saves_every = 7

    def _train(self, step: int, state: dict[str, Any]) -> None:
        own = self._manager
        own.settle()
        self._name_writer()
        for name, tensor in tensors_of(step, ELEMENTS).items():
            state[name].copy_(tensor)
        # the end of a step: all know whether every newest state is sealed, and whether somebody's writer is at work
        rows = exchange(self._group, Row(bytes=int(own.is_busy), step=int(own.is_sealed)))
        if all(row.step for row in rows):
            if self._kept and not own.is_underway:
                self._say(SAVED, self._kept)
            identity, content = Identity(step, 0, LINEAGE), {"step": step}
            if step % self._saves_every == 0 and not own.is_underway:
                self._tell(
                    own.begin(
                        state, content, identity=identity, nonce=self._trial << 32 | step, kinds=["time"],
                        at_once=["model.b"],
                    )
                )  # fmt: skip
            else:
                own.keep(state, content, identity=identity, nonce=self._trial << 32 | step, at_once=["model.b"])
            self._kept = step
        state["model.b"].zero_()  # what a forward changes
        if own.is_underway and not any(row.bytes for row in rows) and step % self._saves_every:
            self._tell(own.go_on())


class HastyKeepingRank(KeepingRank):
    """A rank that is promised each state before its copy has begun; it saves none: a save would keep promises back."""

    _saves_every = 1 << 40

    def _say(self, kind: int, value: int) -> None:
        super()._say(kind, value + 1 if kind == SAVED else value)


def kept_one(run: Path, group: Any = None) -> CheckpointManager:
    return manager(run, group, run_id=str(run), retention=Retention(keep_timed=1), patience_s=3.0, keeps_states=True)


# -- a trial -----------------------------------------------------------------------------------------------------------


@dataclass
class Crew:
    """The processes of one trial, and what they have said."""

    trainers: list[int]
    pipe: int
    writers: dict[int, int] = field(default_factory=dict)  # by rank: the newest
    all_writers: set[int] = field(default_factory=set)
    said: Counter[int] = field(default_factory=Counter)  # by kind, of rank zero
    newest: int = 0  # step that anybody was promised
    is_over: bool = False

    def hear(self, timeout_s: float) -> bool:
        """Take in what has been said; whether anything was, or comes within this time."""
        if self.is_over or not select.select([self.pipe], [], [], max(0.0, timeout_s))[0]:
            return False
        data = os.read(self.pipe, 64 * _NEWS.size)
        self.is_over = not data
        for rank, kind, value in _NEWS.iter_unpack(data):
            if kind == WRITER:
                self.writers[rank] = value
                self.all_writers.add(value)
            elif kind == SAVED:
                self.newest = max(self.newest, value)
            self.said[kind] += rank == 0
        return True

    def wait_until_said(self, kind: int, times: int) -> None:
        """Until rank zero has said this that many times since the beginning."""
        deadline = time.monotonic() + DEADLINE_S
        while self.said[kind] < times:
            assert self.hear(deadline - time.monotonic()), f"news of kind {kind}: {dict(self.said)}"
            assert not self.is_over, f"the ranks ended before news of kind {kind}: {dict(self.said)}"

    def wait_for(self, seconds: float) -> None:
        """Hear what is said during this time."""
        deadline = time.monotonic() + seconds
        while self.hear(deadline - time.monotonic()):
            pass

    def end(self) -> list[int]:
        """Kill the trainers, and hear them out; how they ended, or had ended before."""
        _kill(self.trainers)
        while not self.is_over:
            self.hear(DEADLINE_S)
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.trainers]

    def bury_writers(self) -> None:
        """Wait until the last writer has ended: orphans are ours."""
        for pid in self.all_writers:
            with suppress(ChildProcessError):  # its trainer has done that
                os.waitpid(pid, 0)


@contextmanager
def ranks_at_work(run: Path, trial: int, first: int, make_rank: type[Rank]) -> Iterator[Crew]:
    """Ranks that train from step `first` on; none of their processes is left when the block is left."""
    pairs = [socket.socketpair() for _ in range(1, RANKS)]
    pipe, theirs = os.pipe()
    trainers = []
    for rank in range(RANKS):

        def job(_: int, rank: int = rank) -> None:
            os.close(pipe)
            ours = [zero for zero, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]
            for line in (end for pair in pairs for end in pair):
                if line not in ours:
                    line.close()
            make_rank(SocketGroup(rank, ours), run, trial, theirs).live(first)

        pid, other = fork(job)
        os.close(other)
        trainers.append(pid)
    os.close(theirs)
    for line in (end for pair in pairs for end in pair):
        line.close()
    crew = Crew(trainers, pipe)
    try:
        yield crew
    finally:
        if not crew.is_over:
            crew.end()
        crew.bury_writers()
        os.close(pipe)


@dataclass(frozen=True)
class Fact:
    """What came of a trial."""

    kind: str
    promised: int  # the newest step that anybody was promised
    found: int | None  # the step of the state that was loaded; None where none could be, or it was torn
    saved: int  # promises
    failed: int  # saves that were said to have failed
    was_in_between: bool  # a save had been begun and not committed
    was_completed: bool  # the next start has committed it
    problem: str = ""

    @property
    def is_lost(self) -> bool:
        return self.found is not None and self.found < self.promised


def carry_out(
    run: Path, trial: int, kind: str, found: int, generator: random.Random, make_rank: type[Rank]
) -> Fact:  # fmt: skip
    """One trial, in a run whose newest state is `found`."""
    with ranks_at_work(run, trial, found + 1, make_rank) as crew:
        crew.wait_until_said(SAVED, 1)  # from now on any instant will do
        victim = generator.randrange(RANKS)
        if kind == "committer":
            crew.wait_until_said(COMMITTING, crew.said[COMMITTING] + 1)
            crew.wait_for(generator.uniform(0, SPREAD_S / 4))
        else:
            crew.wait_for(generator.uniform(0, SPREAD_S))
        if kind == "trainer":
            _kill([crew.trainers[victim]])
            crew.wait_for(generator.uniform(0, SPREAD_S))
        elif kind in ("writer", "committer"):
            _kill([crew.writers[victim if kind == "writer" else 0]])
            crew.wait_until_said(SAVED, crew.said[SAVED] + 2)  # training and saving go on
        elif kind == "everything":
            _kill([*crew.trainers, *crew.writers.values()])
        codes = crew.end()
        assert set(codes) <= {-signal.SIGKILL, GROUP_LOST}, codes
        if generator.random() < 0.5:
            crew.bury_writers()  # else the next start comes while they are at work
        in_between = [path for path in run.glob("checkpoints/step-*") if not (path / "COMMIT.json").exists()]
        newest = max(crew.newest, found)
        look_at = look_in_memory if issubclass(make_rank, KeepingRank) else look
        first_look, problem = look_at(run)
        done = recover(run) if generator.random() < 0.7 else []
        second_look, second_problem = look_at(run)
        torn = first_look is None or second_look is None or second_look < first_look
    return Fact(
        kind, newest, None if torn else first_look, crew.said[SAVED], crew.said[FAILED], bool(in_between),
        any(sentence.startswith("completed") for sentence in done), problem or second_problem,
    )  # fmt: skip


def look(run: Path) -> tuple[int | None, str]:
    """The step of the state that a start would load, every number in it checked; else what is wrong."""
    try:
        return loaded_step(run), ""
    except (AssertionError, CheckpointError) as error:
        return None, f"{type(error).__name__}: {error}"


def recover(run: Path) -> list[str]:
    """What a start does first; it takes nothing from the next one."""
    own = kept_one(run)
    try:
        return own.recover()
    finally:
        own.close(has_failed=True)


def look_in_memory(run: Path) -> tuple[int | None, str]:
    """As `look`, for a start on the node of the ranks, which finds what they have left in its memory."""
    own = kept_one(run)
    try:
        own.recover()
        loaded = own.load()
        return (None, "nothing") if loaded is None else (checked_step(loaded), "")
    except (AssertionError, CheckpointError) as error:
        return None, f"{type(error).__name__}: {error}"
    finally:
        own.close(has_failed=True)


def carry_out_all(
    run: Path, trials: int, seed: int, *, kinds: Sequence[str] = KINDS, make_rank: type[Rank] = Rank
) -> Iterator[Fact]:
    """That many trials, of each kind as many as of any other."""
    generator = random.Random(seed)
    save(run, 1, kinds=["time"], elements=ELEMENTS)
    found = 1
    for trial in range(trials):
        fact = carry_out(run, trial + 1, kinds[trial % len(kinds)], found, generator, make_rank)
        yield fact
        if fact.found is None:
            return  # the directory is evidence now
        found = fact.found
    last = kept_one(run)
    last.recover()
    last.close()  # with what the last trial has left in memory


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(600)  # 50 s on two idle cores
@pytest.mark.parametrize("trials", [10, *nightly(100)])
def test_kills_at_random_instants_tear_nothing_and_lose_nothing(tmp_path: Path, trials: int) -> None:
    facts = list(carry_out_all(tmp_path / "run", trials, seed=3))
    assert [fact for fact in facts if fact.found is None] == []
    assert [fact for fact in facts if fact.is_lost] == []
    assert [fact for fact in facts if fact.failed] == []  # a writer that is killed once is replaced
    assert len(facts) == trials
    assert sum(fact.was_in_between for fact in facts) > trials // 10  # the kills did hit saves in the middle
    assert any(fact.was_completed for fact in facts)
    assert not list(Path("/dev/shm").glob(f"{Arena.prefix(str(tmp_path / 'run'))}*"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("trials", [8, *nightly(50)])
def test_states_that_stay_in_memory_outlive_kills_at_random_instants(tmp_path: Path, trials: int) -> None:
    facts = list(carry_out_all(tmp_path / "run", trials, seed=5, make_rank=KeepingRank))
    assert [fact for fact in facts if fact.found is None] == []
    assert [fact for fact in facts if fact.is_lost] == []
    assert len(facts) == trials
    assert not list(Path("/dev/shm").glob(f"{Arena.prefix(str(tmp_path / 'run'))}*"))


@pytest.mark.slow
def test_a_promise_made_before_the_seal_would_be_caught(tmp_path: Path) -> None:
    """The twin: a state is not there as soon as it has been computed."""
    facts = list(carry_out_all(tmp_path / "run", 8, seed=6, kinds=["everything"], make_rank=HastyKeepingRank))
    assert any(fact.is_lost for fact in facts)


@pytest.mark.slow
def test_a_promise_made_before_the_commit_would_be_caught(tmp_path: Path) -> None:
    """The twin: what was promised at the beginning of a save is not there after a kill in its middle."""
    facts = list(carry_out_all(tmp_path / "run", 8, seed=4, kinds=["everything"], make_rank=HastyRank))
    assert any(fact.is_lost for fact in facts)


def table_of(facts: Sequence[Fact]) -> Iterator[str]:
    """What came of the trials, by kind."""
    yield f"{'killed':>14} trials saves in-between completed failed lost torn"
    for kind in (*KINDS, "total"):
        those = [fact for fact in facts if kind in (fact.kind, "total")]
        yield (
            f"{kind:>14} {len(those):6} {sum(fact.saved for fact in those):5}"
            f" {sum(fact.was_in_between for fact in those):10} {sum(fact.was_completed for fact in those):9}"
            f" {sum(fact.failed for fact in those):6} {sum(fact.is_lost for fact in those):4}"
            f" {sum(fact.found is None for fact in those):4}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="kill processes that save, and load what is left")
    parser.add_argument("trials", type=int)
    parser.add_argument("--seed", type=int, default=1)
    words = parser.parse_args()
    adopt_orphans()
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="kills-"))
    facts = list(carry_out_all(folder / "run", words.trials, words.seed))
    print("\n".join(table_of(facts)))
    print(f"{time.monotonic() - began:.0f} s, seed {words.seed}, {RANKS} ranks, in {folder}")
    for fact in facts:
        if fact.found is None or fact.is_lost or fact.failed:
            print(fact)
    sys.exit(any(fact.found is None or fact.is_lost for fact in facts))


if __name__ == "__main__":
    main()
