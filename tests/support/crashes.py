"""A simulated crash between two system calls: stop at the n-th one, inside this process.

`Crash(at=n)` as a context: the n-th call that changes or reads the file system raises `Killed`, and so does every later
call, as if the process had ended: no `finally` block can tidy up. `calls` is the number of calls.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

CALLS = ("open", "write", "fsync", "link", "unlink", "mkdir", "rename", "rmdir", "scandir", "listdir")


class Killed(BaseException):
    """kill -9: nothing catches it."""


class Crash:
    """`half` writes the first half of the data when it dies in a write; `at=None` only counts."""

    def __init__(self, *, at: int | None, half: bool = False) -> None:
        self.at = at
        self.half = half
        self.calls = 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[Crash]:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self._dying(name, getattr(os, name)))
            with contextlib.suppress(Killed):
                yield self

    def _dying(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.at is not None and self.calls >= self.at:
                if self.half and name == "write" and self.calls == self.at:
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                raise Killed
            return real(*args, **options)

        return call


def refuse_links(patch: pytest.MonkeyPatch, number: int) -> None:
    """A file system without hard links, as link(2) says it."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    patch.setattr(os, "link", refuse)
