"""Sends requests to the writer process one after the other, so that the caller does not wait.

Responsible for: a thread that sends requests and waits for the answers. Does not know what they mean. The one idea: the
writer is told in advance what to do if this process dies, and a writer that replaces a dead one is
told again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hetseq.checkpoint.writer_client import WriterProcess

logger = logging.getLogger(__name__)

_Make = Callable[[], Mapping[str, Any]]
_Then = Callable[[Mapping[str, Any]], None]


class Courier:
    """One writer process, which inherits `descriptors`, and the thread that talks to it."""

    def __init__(self, setting: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        self._setting, self._descriptors = dict(setting), list(descriptors)
        self._writer = self._start()
        self._pid = self._writer.pid
        self._changed = threading.Condition()
        self._jobs: deque[tuple[_Make, _Then]] = deque()
        self._standing: dict[str, dict[str, Any]] = {}
        self._serial = 0
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="nebula", daemon=True)
        self._thread.start()

    @property
    def writer_pid(self) -> int:
        """The pid of the current writer."""
        return self._writer.pid

    def ask(self, make: _Make, then: _Then) -> None:
        """Queue a request for the writer; another thread calls both functions.

        `make` returns the request when its turn comes, `then` receives the answer.
        """
        with self._changed:
            self._jobs.append((make, then))
            self._changed.notify_all()

    def say(self, message: Mapping[str, Any]) -> None:
        """Send the writer a message that needs no answer."""
        self._writer.say(message)

    def announce(self, folder: str, message: dict[str, Any]) -> None:
        """Tell the writer what to do with a folder if this process dies."""
        with self._changed:
            self._standing[folder] = message
        self._writer.say(message)

    def forget(self, folder: str) -> None:
        """Tell the writer that nothing remains to be done with a folder."""
        with self._changed:
            known = self._standing.pop(folder, None)
        if known is not None:
            self._writer.say({"do": "forget", "folder": folder})

    def close(self) -> None:
        """Wait until all requests are done and the writer has ended."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        self._thread.join()
        self._writer.close()

    def _start(self) -> WriterProcess:
        return WriterProcess("hetseq.nebula.writer", self._setting, self._descriptors)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._is_ending:
                    self._changed.wait()
                if not self._jobs:
                    return
                make, then = self._jobs.popleft()
            try:
                then(self._carry(make()))
            except Exception:  # other callers still wait for their requests
                logger.exception("handling the result of a save failed")

    def _carry(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer to a request, or the reason why there is none."""
        self._serial += 1
        try:
            self._writer.ask({**request, "serial": self._serial})
            answer = self._writer.answer(None)
        except Exception as error:  # no process could be started; the next request tries again
            with suppress(OSError):
                self._writer = self._start()
            return {"failed": f"{type(error).__name__}: {error}"}
        if self._writer.pid != self._pid:
            self._pid = self._writer.pid
            with self._changed:
                standing = list(self._standing.values())
            for message in standing:
                self._writer.say(message)
        return answer if answer is not None else {"failed": "the writer gave no answer"}
