"""Child processes that end with the process that started them, however it ends.

The kernel's parent-death signal needs no thread and no cooperation, so it also reaches a process stuck in C code. It
exists on Linux only, and only for the direct parent; otherwise the pipes between the processes must serve.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType

#: signals that ask a run to stop after its step
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
#: `timeout`, terminals and schedulers signal a process and its group: a repetition within these seconds is one request
ECHO_S = 1.0
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_LARGE_BYTES = 4 << 20
_MOST_BLOCKS = 1 << 15  # the kernel allows a process 65,530 mappings


def state_and_start(pid: int) -> tuple[str, int] | None:
    """The kernel's letter for the state of a process, and its start in clock ticks since boot; None: no such process.

    Source: proc(5), fields 3 and 22 of /proc/PID/stat, counted after the name in brackets.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; at once if it has already ended."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_pipe(descriptor: int) -> None:
    """Have this process killed when the other end of a pipe is closed, as when the process that holds it ends.

    If the kernel has signal-driven input (Linux), it does so itself: that needs no thread, and thus not the interpreter
    lock, which a long call in C may hold. A thread watches as well, for kernels that only claim to have it.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    # checks first, and so also sees an end that came before
    threading.Thread(target=_die_once_readable, args=(descriptor,), name="launcher-watch", daemon=True).start()


def _die_once_readable(descriptor: int) -> None:
    wait([descriptor])
    os.kill(os.getpid(), signal.SIGKILL)


def ignore_stop_signals() -> None:
    """For helpers of a worker: the worker decides when to stop, and still needs them to finish its step."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next step instead of returning it to the kernel and requesting it again.

    A step frees and allocates the same hundreds of megabytes of activations; each return costs a page fault per 4 kB.
    Measured on one core: a step of the MNIST net on 256 images takes 170 to 190 ms with this, 310 to 340 without.
    Other C libraries have no mallopt; then nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def return_large_memory() -> None:
    """Have glibc return each freed block of 4 MiB or more to the kernel at once, also after `keep_freed_memory`.

    Where parameters come and go, a heap would end up with gaps between them. Costs a page fault per 4 kB of each such
    block. Other C libraries have no mallopt; then nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, _MOST_BLOCKS)
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)  # fixed; by itself it would rise


def return_freed_memory() -> None:
    """Have glibc return all freed memory to the kernel, once, also after `keep_freed_memory`.

    Other C libraries have no malloc_trim; then nothing happens.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def first_stop_signal(signals: bytes) -> int | None:
    """The first stop signal among those that came; other signals belong to other code in this process."""
    return next((number for number in signals if number in STOP_SIGNALS), None)


@contextmanager
def holding_interrupts() -> Iterator[None]:
    """Context in which Ctrl-C of a prompt or notebook waits for the end of the block; a handler of one's own does not.

    For the main thread; in others it does nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            raise KeyboardInterrupt


@contextmanager
def interrupting_on_signals() -> Iterator[None]:
    """The first stop signal interrupts the block by a KeyboardInterrupt with its name; a second one kills."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        die_of_next_signal()
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is interrupt:  # else it was one of these, or the block's last word
                signal.signal(number, handler)


def die_of_next_signal() -> None:
    """From now on a stop signal ends this process at once, unless it is an echo of the one that came just now."""
    first_s = time.monotonic()

    def die(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - first_s > ECHO_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in STOP_SIGNALS:
        signal.signal(number, die)


@contextmanager
def ringing_on_signals() -> Iterator[int]:
    """A pipe that is readable once a stop signal has arrived, with the signals' numbers as bytes.

    Python itself writes to it the moment a signal arrives. A handler runs only between two instructions, so its
    write could come minutes late if the signal came just before a wait, or to a thread other than the waiting
    one. After the first, later ones are ignored: the process is about to end with a code that names the reason.
    """
    bell, hammer = os.pipe()
    os.set_blocking(hammer, False)
    has_rung = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal has_rung
        has_rung = True

    writer_before = signal.set_wakeup_fd(hammer, warn_on_full_buffer=False)
    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield bell
    finally:
        signal.set_wakeup_fd(writer_before)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if has_rung else handler)
        os.close(bell)
        os.close(hammer)
