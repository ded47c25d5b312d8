"""The doctor's side of its all-reduce rank, a child process that may hang, be killed, or be aborted by gloo.

Gives an answer before a deadline, whatever happens to the child, and relays messages between the child and the head. It
does not know what is measured.

The one idea: the answer says which node is at fault. A child that lost its peers reports it and is not to blame. A
child that is killed, or hangs after it was told that a rank is lost, is to blame.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO, Any

Record = dict[str, Any]

READY_S = 90.0  # to import torch from a slow disk
#: longer than any wait of the child, which has its own deadlines
SILENCE_S = 40.0
#: for the child to end after it was told of a lost rank; it needs milliseconds
GRACE_S = 5.0
_ALIVE_S, _TURN_S = 2.0, 0.5
_END_S = 2.0


def _fault_here(trouble: str, measured: dict[str, float]) -> Record:
    return {"measured": measured, "trouble": trouble, "is_secondary": False}


class Participant:
    """One child, for one all-reduce."""

    def __init__(self, module: str = "hetseq.commands.doctor.all_reduce_child") -> None:
        with contextlib.ExitStack() as files:
            self._errors = files.enter_context(tempfile.TemporaryFile())
            self._files = files.pop_all()
        held, self._leash = os.pipe()  # the child is killed when this process, which holds the other end, ends
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", module, str(held)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, pass_fds=(held,),
            )  # fmt: skip
        finally:
            os.close(held)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._heard: queue.SimpleQueue[Record | None] = queue.SimpleQueue()  # None: it has ended
        self._said: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._gone_at: float | None = None
        self._threads = [
            threading.Thread(target=self._listen, args=(self._child.stdout,), name="participant's words", daemon=True),
            threading.Thread(target=self._speak, args=(self._child.stdin,), name="words to it", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def await_ready(self, limit_s: float = READY_S) -> Record:
        """An empty record once the child is ready for its part, or its trouble."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                record = self._heard.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return {"trouble": f"its process was not ready for an all-reduce within {limit_s:.0f} s"}
            if record is None:
                return {"trouble": self._end_of_child()}
            if record["kind"] == "ready":
                return {}

    def pass_on(self, record: Record) -> None:
        """Relay a message of the head to the child; never waits."""
        if record["kind"] == "gone" and self._gone_at is None:
            self._gone_at = time.monotonic()
        self._said.put(record)

    def take_part(self, part: Record, say: Callable[[Record], None]) -> Record:
        """Have the child take part; returns its answer, or how it failed. `say` relays its messages to the head.

        The answer has `measured`, the seconds by bytes, and after a failure `trouble` and `is_secondary`. A child that
        has failed may still run: `close` ends it.
        """
        self.pass_on({"kind": "part", **part})
        measured: dict[str, float] = {}
        heard_at = said_at = time.monotonic()
        while True:
            now = time.monotonic()
            if now > said_at + _ALIVE_S:
                say({"kind": "alive"})
                said_at = now
            if self._gone_at is not None and now > self._gone_at + GRACE_S:
                return _fault_here("its process hung", measured)
            if now > heard_at + SILENCE_S:
                return _fault_here(f"its process said nothing for {SILENCE_S:.0f} s", measured)
            try:
                record = self._heard.get(timeout=_TURN_S)
            except queue.Empty:
                continue
            heard_at = time.monotonic()
            if record is None:
                return _fault_here(self._end_of_child(), measured)
            if record["kind"] == "set":
                say(record)
            elif record["kind"] == "measured":
                measured[str(record["bytes"])] = record["seconds"]
            elif record["kind"] == "trouble":
                return {"measured": measured, "trouble": record["trouble"], "is_secondary": record["is_secondary"]}
            elif record["kind"] == "end":
                return {"measured": measured}

    def close(self) -> None:
        """End the child if it still runs; a child stuck in a driver is left behind. May be called twice."""
        if self._child.poll() is None:
            self._child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_END_S)
        self._said.put(None)
        for thread in self._threads:
            thread.join(_END_S)
        leash, self._leash = self._leash, -1
        if leash >= 0:
            os.close(leash)
            self._files.close()

    def _end_of_child(self) -> str:
        """How the child ended, after it has closed its end of the pipe."""
        try:
            code = self._child.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "its process closed its output and still runs"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"its process was ended by {signal.Signals(-code).name}"
            return f"its process was ended by signal {-code}"
        return f"its process ended with code {code}{self._last_words()}"

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1]}" if lines else ""

    def _listen(self, source: IO[bytes]) -> None:
        with source:
            for line in iter(source.readline, b""):
                with contextlib.suppress(ValueError):  # output of a library
                    record = json.loads(line)
                    if isinstance(record, dict) and "kind" in record:
                        self._heard.put(record)
        self._heard.put(None)

    def _speak(self, sink: IO[bytes]) -> None:
        with contextlib.suppress(OSError), sink:  # it has ended
            while (record := self._said.get()) is not None:
                sink.write(json.dumps(record).encode() + b"\n")
                sink.flush()
