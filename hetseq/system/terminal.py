"""The terminal of a live view: alternate screen and unbuffered keys, restored at the end.

Responsible for every way in which a view may end or pause: q, a signal, Ctrl-Z, a terminal that is gone. Does not
know the content. The one idea: this process must restore screen and keys, and one that is killed leaves them on; so a
signal is only noted, and handled between two frames, and Ctrl-Z restores both before the process stops.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

#: control sequences, as in rich's Live
_OWN_SCREEN, _OTHER_SCREEN = b"\x1b[?1049l\x1b[?25h", b"\x1b[?1049h\x1b[?25l"
_GONE = (errno.EIO, errno.EPIPE, errno.ENXIO)


class ViewEnding:
    """Whether a signal has asked the view to end; `bell` is readable from then on."""

    def __init__(self, bell: int, ignore: Callable[[], None]) -> None:
        self.bell, self._ignore = bell, ignore
        self.number: int | None = None

    def is_asked(self) -> bool:
        """Whether the view is to end; from then on no further signal interferes."""
        if self.number is not None:
            self._ignore()
        return self.number is not None


@contextmanager
def ending_once() -> Iterator[ViewEnding]:
    """Ctrl-C, SIGTERM and SIGHUP end the view between two frames; the latter two then end the process.

    A second one, before the first was handled, ends it at once. A terminal that is gone ends it without a message; a
    signal that is ignored, as under nohup, stays ignored.
    """
    bell, hammer = os.pipe()

    def note(number: int, frame: FrameType | None) -> None:
        if ending.number is not None:
            raise KeyboardInterrupt
        ending.number = number
        os.write(hammer, b".")

    def ignore() -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)

    ending = ViewEnding(bell, ignore)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, note)
        yield ending
    except OSError as error:
        if error.errno not in _GONE:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(bell)
        os.close(hammer)
    if ending.number in (signal.SIGTERM, signal.SIGHUP):
        raise SystemExit(128 + ending.number)


@contextmanager
def keys(ending: ViewEnding) -> Iterator[Callable[[float], bool]]:
    """Yields a function that waits for so many seconds and returns whether the view is to end: by q, or by `ending`.

    Without a terminal to read from there are no keys.
    """
    source = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = None if source is None else termios.tcgetattr(source)

    def is_quit(seconds: float) -> bool:
        readable, _, _ = select.select([ending.bell] if source is None else [ending.bell, source], [], [], seconds)
        if ending.is_asked():
            return True
        return source in readable and not {b"q", b"Q", b""}.isdisjoint(_each(os.read(source, 64)))

    try:
        if source is not None:
            tty.setcbreak(source)
        yield is_quit
    finally:
        if source is not None and before is not None:
            with suppress(termios.error):  # it is gone
                termios.tcsetattr(source, termios.TCSADRAIN, before)


@contextmanager
def stepping_aside(output: int, redraw: Callable[[], None]) -> Iterator[None]:
    """Within this context, Ctrl-Z gives the shell its screen and keys, and `fg` redraws the view on `output`.

    Enter it before `keys`, whose settings are restored and set again.
    """
    source = sys.stdin.fileno() if sys.stdin.isatty() else None
    calm = None if source is None else termios.tcgetattr(source)

    def stand_still(number: int, frame: FrameType | None) -> None:
        own = None if source is None else termios.tcgetattr(source)
        os.write(output, _OWN_SCREEN)
        if source is not None and calm is not None:
            termios.tcsetattr(source, termios.TCSADRAIN, calm)
        os.kill(os.getpid(), signal.SIGSTOP)  # SIGTSTP would be lost without a job-control shell
        if source is not None and own is not None:
            termios.tcsetattr(source, termios.TCSADRAIN, own)
        os.write(output, _OTHER_SCREEN)
        redraw()

    before = signal.getsignal(signal.SIGTSTP)
    if before == signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGTSTP, stand_still)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)


def _each(pressed: bytes) -> list[bytes]:
    return [pressed[place : place + 1] for place in range(len(pressed))] or [b""]
