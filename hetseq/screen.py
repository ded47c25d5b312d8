"""The terminal of a live view: another screen and keys that are read at once, given back as they were.

Responsible for every way in which a view may end or pause: q, a signal, Ctrl-Z, a terminal that is gone. Refuses to
know what is shown. The one idea: both are this process' affair, and one that ends without a word leaves them on; so
whatever ends it is made an exception, and Ctrl-Z gives them back before the process stands still.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

#: what a terminal is told, as rich's Live tells it
_OWN_SCREEN, _OTHER_SCREEN = b"\x1b[?1049l\x1b[?25h", b"\x1b[?1049h\x1b[?25l"
_GONE = (errno.EIO, errno.EPIPE, errno.ENXIO)


@contextmanager
def ending_once() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP leave the view as an exception does, and a second one does not disturb that.

    A terminal that is gone ends it without a word; a signal that is ignored, as under nohup, stays so.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, end)
        yield
    except OSError as error:
        if error.errno not in _GONE:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def keys() -> Iterator[Callable[[float], bool]]:
    """Gives what waits for so many seconds, and says whether q was pressed; needs a terminal to read from."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def is_quit(seconds: float) -> bool:
        is_there, _, _ = select.select([descriptor], [], [], seconds)
        return bool(is_there) and not {b"q", b"Q", b""}.isdisjoint(_each(os.read(descriptor, 64)))

    try:
        yield is_quit
    finally:
        with suppress(termios.error):  # it is gone
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextmanager
def stepping_aside(output: int, redraw: Callable[[], None]) -> Iterator[None]:
    """Within it Ctrl-Z gives the shell its screen and its keys, and `fg` draws the view anew on `output`.

    Enter it before `keys`, whose settings are taken back and set again.
    """
    source = sys.stdin.fileno() if sys.stdin.isatty() else None
    calm = None if source is None else termios.tcgetattr(source)

    def stand_still(number: int, frame: FrameType | None) -> None:
        own = None if source is None else termios.tcgetattr(source)
        os.write(output, _OWN_SCREEN)
        if source is not None and calm is not None:
            termios.tcsetattr(source, termios.TCSADRAIN, calm)
        os.kill(os.getpid(), signal.SIGSTOP)  # SIGTSTP would be lost where no shell of ours looks on
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


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _each(pressed: bytes) -> list[bytes]:
    return [pressed[place : place + 1] for place in range(len(pressed))] or [b""]
