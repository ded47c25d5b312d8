"""A thread that does one thing after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_END_S = 2.0  # for the thread to end once its connections are cut


class SerialThread:
    """A thread that does one thing after the other; it starts with the first one and does not keep a process alive."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._name = name
        self._thread: threading.Thread | None = None

    def put(self, task: Callable[[], T]) -> Future[T]:
        """Do `task` after the earlier ones; the future has its result or error."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(task())
            except BaseException as error:  # raised by the thread that waits
                future.set_exception(error)

        self._tasks.put(run)
        return future

    def end(self, *, patience_s: float = _END_S) -> None:
        """End the thread after what it does now; waits for that for at most `patience_s`."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(patience_s)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # it holds memory
