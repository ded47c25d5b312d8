"""The trainer's client of its writer process: starts it, sends requests, and replaces it if it dies.

Responsible for: carrying out one request even if the process that does it is killed. Does not know what the requests
mean. The one idea: a request is repeated to a new process until one answers, so the caller only sees an answer, or
that three processes in a row died over the request, or that one stopped responding: on a file system
that hangs, another process would hang too.
"""

from __future__ import annotations

import logging
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hetseq
from hetseq.checkpoint.writer import MessagePipe

logger = logging.getLogger(__name__)

_DEATHS = 3  # processes that may die over one request
_END_S, _EXIT_S = 5.0, 1.0
_SILENCE_S = 900.0  # it sends a message for every chunk that it has written
_TAKING_S = 10.0  # it may stop reading: a disk that hangs, and many tags that stay in memory
_LOOK_S = 60.0  # upper bound for the time between two checks: this process may have been stopped itself
_HOME = str(Path(hetseq.__file__).resolve().parents[1])
# -I -S: without the user's packages, whose search takes a second and which could import torch
_PROGRAM = "import importlib, sys; sys.path.append(sys.argv[1]); importlib.import_module(sys.argv[2]).main()"


class WriterProcess:
    """A process that runs `main` of `module`, started at once and restarted whenever it has died.

    The first line sent to it is `setting`; `descriptors`, of arenas, are open in it under the same numbers. Requests
    are dictionaries with "do" and "serial"; one is open at a time, and `answer` returns its answer. Two
    threads may use it if one of them only calls `say`.
    """

    def __init__(self, module: str, setting: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        self._module, self._setting, self._descriptors = module, dict(setting), tuple(descriptors)
        self._request: dict[str, Any] | None = None
        self._deaths = 0
        self._is_cancelled = False  # the open request
        self._silent_s, self._looked_s = 0.0, 0.0
        self.share = 0.0  # of the open request, as last reported by the process
        self._lock = threading.Lock()  # guards the fields that identify the process
        self._start()

    @property
    def pid(self) -> int:
        """The pid of the current process."""
        return self._process.pid

    @property
    def is_busy(self) -> bool:
        """Whether a request waits for its answer."""
        return self._request is not None

    def ask(self, request: Mapping[str, Any]) -> None:
        """Send a request that will be answered."""
        assert self._request is None, "one request at a time"
        self._request, self._deaths, self.share = dict(request), 0, 0.0
        self._is_cancelled = False
        self._silent_s, self._looked_s = 0.0, time.monotonic()
        self._tell(self._request)

    def cancel(self) -> None:
        """Ask it to give up the open request soon, which is then answered with ECANCELED unless it is already done."""
        if self._request is not None and not self._is_cancelled:
            self._is_cancelled = True
            self.say({"do": "cancel"})

    def say(self, message: Mapping[str, Any]) -> None:
        """Send a message that needs no answer; it is lost if the process has died."""
        with self._lock:
            self._tell(message)

    def _tell(self, message: Mapping[str, Any]) -> None:
        self._line.send(message)
        if self._line.is_stuck:  # half a line may have been sent
            self._process.kill()

    def answer(self, timeout_s: float | None = 0.0) -> dict[str, Any] | None:
        """The answer to the open request, once; None if there is none within `timeout_s` (None: wait for it).

        An answer with "failed" says that processes died over it, or that one stopped responding.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._request is not None:
            rest = _LOOK_S if deadline is None else max(0.0, deadline - time.monotonic())
            message = self._line.take(rest)
            if message is None and self._line.has_ended:
                message = self._begin_again()
            elif message is None and (self._line.is_stuck or self._is_silent()):
                message = self._give_up()
            elif message is None and deadline is not None:
                return None
            self._silent_s = 0.0 if message is not None else self._silent_s
            self.share = (message or {}).get("written", self.share)
            if message is None or self._is_log(message) or message.get("serial") != self._request["serial"]:
                continue
            self._request = None
            return message
        return None

    def close(self, *, is_hasty: bool = False) -> None:
        """Let it finish its requests, for some seconds unless `is_hasty`; after that it finishes unattended."""
        self.say({"do": "end"})
        deadline = time.monotonic() + (0.0 if is_hasty else _END_S)
        while not self._line.has_ended and (rest := deadline - time.monotonic()) > 0:
            message = self._line.take(rest)
            if message is not None:
                self._is_log(message)
        self._hang_up(0.0 if is_hasty else _EXIT_S)

    def kill(self) -> None:
        """Kill it, whatever it is doing; `close` must follow."""
        self._process.kill()

    def _hang_up(self, patience_s: float = _EXIT_S) -> None:
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):  # it still has work to finish, and does so unattended
            self._process.wait(patience_s)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        line = MessagePipe(ours)
        line.send({**self._setting, "arenas": self._descriptors})  # it arrives even if this process is killed meanwhile
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _PROGRAM, _HOME, self._module],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    pass_fds=self._descriptors,
                    start_new_session=True,  # signals to the trainer's group are the trainer's to handle
                )
            except OSError:
                ours.close()
                raise
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _time_of(_TAKING_S))
        with self._lock:
            self._process, self._connection, self._line = process, ours, line
        self._setting.pop("faults", None)  # a test meant them for the first process only

    def _begin_again(self) -> dict[str, Any] | None:
        """Start another process for the open request; returns an answer instead if too many have died."""
        assert self._request is not None
        self._hang_up()
        self._deaths += 1
        reason = f"exit code {self._process.returncode}"
        logger.warning("the process %d that writes checkpoints has died (%s)", self._process.pid, reason)
        try:
            self._start()
        except OSError as error:  # no process can be started now; the next request tries again
            return {"serial": self._request["serial"], "failed": f"no process to write checkpoints: {error}"}
        if self._deaths >= _DEATHS:
            return {"serial": self._request["serial"], "failed": f"{_DEATHS} writer processes died ({reason})"}
        self._line.send({**self._request, "again": True})
        if self._is_cancelled:
            self._line.send({"do": "cancel"})
        return None

    def _is_silent(self) -> bool:
        now_s = time.monotonic()
        self._silent_s += min(now_s - self._looked_s, _LOOK_S)
        self._looked_s = now_s
        return self._silent_s >= _SILENCE_S

    def _give_up(self) -> dict[str, Any]:
        """Start another process for later requests; returns an answer to the open one in place of the silent one's."""
        assert self._request is not None
        logger.warning("the process %d that writes checkpoints stopped responding and is killed", self._process.pid)
        self._process.kill()  # if it waits for a hung disk, it dies when that is back, and writes nothing more
        self._hang_up()
        with suppress(OSError):  # the next request tries again
            self._start()
        is_stuck = self._silent_s < _SILENCE_S
        silence = f"read nothing for {_TAKING_S:.0f} s" if is_stuck else f"sent nothing for {_SILENCE_S:.0f} s"
        reason = f"the writer process has {silence}: does --save-dir respond?"
        return {"serial": self._request["serial"], "failed": reason}

    @staticmethod
    def _is_log(message: Mapping[str, Any]) -> bool:
        if "log" in message:
            logger.log(message["log"], "%s", message["text"])
        return "log" in message or "started" in message


def _time_of(seconds: float) -> bytes:
    """In the format of setsockopt(2): seconds and microseconds."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
