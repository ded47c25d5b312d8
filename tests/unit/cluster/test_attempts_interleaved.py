"""Launchers in every order the dice give: at each call of the operating system another one may go on, stall, or die.

Four launchers are threads of which one runs at a time, on a clock of their own; who goes on is drawn at every call that
touches the file system, so a seed is one exact history. A fault that it once found: a head whose last word met a claim
made by mistake left its record behind, and all others followed a head that had ended.
"""

from __future__ import annotations

import math
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hetseq.cluster.rendezvous import file_rendezvous as attempts
from hetseq.cluster.rendezvous import file_store as shared_directory
from hetseq.cluster.rendezvous.file_rendezvous import Patience, find_attempt
from hetseq.cluster.rendezvous.leader_election import LEASE_S
from hetseq.cluster.rendezvous.process_identity import Process
from tests.support.crashes import Killed

CALLS = ("open", "write", "link", "unlink", "mkdir", "rename", "rmdir", "lstat", "listdir")
LAUNCHERS = range(4)
ROUNDS = 3


@dataclass
class History:
    """One history: `seed` draws it, `kill` is the chance to die at a call, `is_foreign`: all on other hosts."""

    seed: int
    kill: float
    is_foreign: bool
    links: Callable[..., Any] | None = None
    now_s: float = 0.0
    turn: int | None = None
    in_office: int | None = None
    heads: int = 0
    faults: list[str] = field(default_factory=list)
    living: set[int] = field(default_factory=lambda: set(LAUNCHERS))
    ended: set[int] = field(default_factory=set)
    wakes_s: dict[int, float] = field(default_factory=dict)
    stalled_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.baton = threading.Condition()
        self.own = threading.local()

    def play(self, path: Path) -> History:
        """Run all launchers to their end; what went wrong is in `faults`."""
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                real = self.links if name == "link" and self.links else getattr(os, name)
                patch.setattr(os, name, self._taking_turns(real))
            for module in (attempts, shared_directory):
                patch.setattr(module, "this_process", lambda: Process("m", self.own.launcher + 1, 1))
                patch.setattr(module, "is_alive", self._is_alive)
            threads = [threading.Thread(target=self._launcher, args=(number, path)) for number in LAUNCHERS]
            for thread in threads:
                thread.start()
            with self.baton:
                self._pass_on()
            for thread in threads:
                thread.join()
        if not self.kill and path.exists() and os.listdir(path):
            self.faults.append(f"left: {os.listdir(path)}")
        return self

    def _launcher(self, me: int, path: Path) -> None:
        self.own.launcher = me
        with self.baton:
            self.baton.wait_for(lambda: self.turn == me)
        try:
            for _ in range(ROUNDS):
                self._one_run(me, path)
        except Killed:
            pass
        except Exception as error:
            self.faults.append(f"{me}: {error!r}")
        finally:
            with self.baton:
                self.ended.add(me)
                self._pass_on()

    def _one_run(self, me: int, path: Path) -> None:
        attempt = find_attempt(
            path, b"k", listen=lambda: ("here", me), now=lambda: self.now_s, sleep=self._sleep, patience=Patience(400)
        )
        if attempt.is_head:
            self.heads += 1
            if self.in_office is not None:
                self.faults.append(f"{self.in_office} and {me} lead")
            self.in_office = me
            for _ in range(self.dice.randrange(5)):
                assert attempt.heart is not None
                attempt.heart.beat()
                self._sleep(self.dice.choice([0.0, 0.01, 0.5]))
            self.in_office = None
        else:
            if attempt.head.port == me:
                self.faults.append(f"{me} follows what it was itself")
            self._sleep(self.dice.choice([0.0, 0.01, 0.3]))
        attempt.close()

    def _taking_turns(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            me = getattr(self.own, "launcher", None)
            if me is not None:
                self._step(me)
            return real(*args, **options)

        return call

    def _step(self, me: int) -> None:
        with self.baton:
            if me not in self.living:
                raise Killed  # the dead do nothing more, not even tidy up
            self.now_s += 0.001
            chance = self.dice.random()
            # a slow machine, but not slower than a lease allows: who stalls for longer leaves its files to the next run
            if chance < 0.01 and self.now_s - self.stalled_s.get(me, -math.inf) > 2 * LEASE_S:
                self.stalled_s[me] = self.now_s
                self.wakes_s[me] = self.now_s + 4 * self.dice.random()
            if chance < 0.6:
                self._pass_on()
            self.baton.wait_for(lambda: self.turn == me)
            if self.dice.random() < self.kill and len(self.living) > 1:
                self.living.discard(me)
                if self.in_office == me:
                    self.in_office = None
                raise Killed

    def _sleep(self, seconds: float) -> None:
        me = self.own.launcher
        with self.baton:
            self.wakes_s[me] = self.now_s + seconds
            self._pass_on()
            self.baton.wait_for(lambda: self.turn == me)

    def _pass_on(self) -> None:
        left = [number for number in LAUNCHERS if number not in self.ended]
        if not left:
            return
        self.now_s = max(self.now_s, min(self.wakes_s.get(number, 0.0) for number in left))
        self.turn = self.dice.choice([number for number in left if self.wakes_s.get(number, 0.0) <= self.now_s])
        self.baton.notify_all()

    def _is_alive(self, process: Process) -> bool | None:
        if self.is_foreign and process.pid - 1 != self.own.launcher:
            return None
        return process.pid - 1 in self.living - self.ended


def refuse(*_: Any, **__: Any) -> None:
    raise PermissionError(1, "no links here")


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 60), marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize("links", [None, refuse])
@pytest.mark.parametrize("is_foreign", [False, True])
@pytest.mark.parametrize("kill", [0.0, 0.003, 0.01])
def test_in_no_order_of_events_do_two_launchers_lead(
    tmp_path: Path, kill: float, is_foreign: bool, links: Callable[..., Any] | None, seeds: range
) -> None:
    histories = [History(seed, kill, is_foreign, links).play(tmp_path / str(seed)) for seed in seeds]
    assert {history.seed: history.faults for history in histories if history.faults} == {}
    assert sum(history.heads for history in histories) > 2.5 * len(seeds)


@pytest.mark.slow
def test_two_heads_are_seen_where_the_file_system_lets_two_win(tmp_path: Path) -> None:
    def overwrite(draft: Path, file: Path) -> None:
        file.write_bytes(draft.read_bytes())

    faults = [
        fault for seed in range(60) for fault in History(seed, 0, False, overwrite).play(tmp_path / str(seed)).faults
    ]
    assert [fault for fault in faults if "lead" in fault]
