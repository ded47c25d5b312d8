"""The trainer's end of its writer process: start it, ask it, hear from it, and start another one if it dies.

Responsible for: one request being carried out although the process that does it may be killed. Refuses to know what
the requests mean. The one idea: a request is repeated to a new process until one of them answers, so whoever asks only
ever sees an answer, or that three processes in a row have died over it.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hetseq
from hetseq.checkpoint.writer import Line

logger = logging.getLogger(__name__)

_DEATHS = 3  # processes that one request may cost
_END_S, _EXIT_S = 5.0, 1.0
_HOME = str(Path(hetseq.__file__).resolve().parents[1])
# -I -S: no packages of the user's, which take a second to look for and could bring torch
_PROGRAM = "import importlib, sys; sys.path.append(sys.argv[1]); importlib.import_module(sys.argv[2]).main()"


class WriterProcess:
    """A process that runs `main` of `module`, started at once and again whenever it has died.

    Its first line is `setting`; `descriptors`, of arenas, are open in it under the same numbers. Requests are
    dictionaries with "do" and "serial"; one is open at a time, and `answer` gives its answer. May be used by two
    threads, of which one only calls `say`.
    """

    def __init__(self, module: str, setting: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        self._module, self._setting, self._descriptors = module, dict(setting), tuple(descriptors)
        self._request: dict[str, Any] | None = None
        self._deaths = 0
        self.share = 0.0  # of the open request, as far as the process has told
        self._lock = threading.Lock()  # around what says which process it is
        self._start()

    @property
    def pid(self) -> int:
        """Of the process that works now."""
        return self._process.pid

    @property
    def is_busy(self) -> bool:
        """Whether a request waits for its answer."""
        return self._request is not None

    def ask(self, request: Mapping[str, Any]) -> None:
        """Have it do something that it answers."""
        assert self._request is None, "one request at a time"
        self._request, self._deaths, self.share = dict(request), 0, 0.0
        self._line.send(self._request)

    def say(self, message: Mapping[str, Any]) -> None:
        """Tell it something that needs no answer; a process that has died does not hear it."""
        with self._lock:
            self._line.send(message)

    def answer(self, timeout_s: float | None = 0.0) -> dict[str, Any] | None:
        """The answer to the open request, once: None if it does not come within this time (None: wait for it).

        An answer with "failed" says that processes died over it.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._request is not None:
            rest = None if deadline is None else max(0.0, deadline - time.monotonic())
            message = self._line.take(rest)
            if message is None and self._line.has_ended:
                message = self._begin_again()
            elif message is None:
                return None
            self.share = (message or {}).get("written", self.share)
            if message is None or self._is_log(message) or message.get("serial") != self._request["serial"]:
                continue
            self._request = None
            return message
        return None

    def close(self) -> None:
        """Let it finish what it has been told, for some seconds; afterwards it finishes on its own."""
        self.say({"do": "end"})
        deadline = time.monotonic() + _END_S
        while not self._line.has_ended and (rest := deadline - time.monotonic()) > 0:
            message = self._line.take(rest)
            if message is not None:
                self._is_log(message)
        self._hang_up()

    def _hang_up(self) -> None:
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):  # it still has something to finish, and does so on its own
            self._process.wait(_EXIT_S)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _PROGRAM, _HOME, self._module],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    pass_fds=self._descriptors,
                    start_new_session=True,  # what is sent to the trainer's group is the trainer's affair
                )
            except OSError:
                ours.close()
                raise
        with self._lock:
            self._process, self._connection, self._line = process, ours, Line(ours)
            self._line.send({**self._setting, "arenas": self._descriptors})

    def _begin_again(self) -> dict[str, Any] | None:
        """Another process for the open request; an answer in its place where too many have died."""
        assert self._request is not None
        self._hang_up()
        self._deaths += 1
        reason = f"exit code {self._process.returncode}"
        logger.warning("the process %d that writes checkpoints has died (%s)", self._process.pid, reason)
        try:
            self._start()
        except OSError as error:  # no process can be had now; the next request tries again
            return {"serial": self._request["serial"], "failed": f"no process to write checkpoints: {error}"}
        if self._deaths >= _DEATHS:
            return {"serial": self._request["serial"], "failed": f"{_DEATHS} writer processes died ({reason})"}
        self._line.send({**self._request, "again": True})
        return None

    @staticmethod
    def _is_log(message: Mapping[str, Any]) -> bool:
        if "log" in message:
            logger.log(message["log"], "%s", message["text"])
        return "log" in message or "started" in message
