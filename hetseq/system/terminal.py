"""The terminal of a live view: another screen and keys that are read at once, given back as they were.

Responsible for every way in which a view may end or pause: q, a signal, Ctrl-Z, a terminal that is gone. Refuses to
know what is shown. The one idea: both are this process' affair, and one that ends without a word leaves them on; so a
signal is only noted and heard between two pictures, and Ctrl-Z gives both back before the process stands still.
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

#: what a terminal is told, as rich's Live tells it
_OWN_SCREEN, _OTHER_SCREEN = b"\x1b[?1049l\x1b[?25h", b"\x1b[?1049h\x1b[?25l"
_GONE = (errno.EIO, errno.EPIPE, errno.ENXIO)


class ViewEnding:
    """Whether a signal has asked the view to end; `bell` can be read from then on."""

    def __init__(self, bell: int, ignore: Callable[[], None]) -> None:
        self.bell, self._ignore = bell, ignore
        self.number: int | None = None

    def is_asked(self) -> bool:
        """Whether it is to end; then no further signal disturbs that."""
        if self.number is not None:
            self._ignore()
        return self.number is not None


@contextmanager
def ending_once() -> Iterator[ViewEnding]:
    """Ctrl-C, SIGTERM and SIGHUP end the view between two pictures, and the latter two then the process.

    A second one, before the first was heard, ends it at once. A terminal that is gone ends it without a word; a signal
    that is ignored, as under nohup, stays so.
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
    """Gives what waits for so many seconds, and says whether the view is to end: by q, or as `ending` says.

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


def _each(pressed: bytes) -> list[bytes]:
    return [pressed[place : place + 1] for place in range(len(pressed))] or [b""]
