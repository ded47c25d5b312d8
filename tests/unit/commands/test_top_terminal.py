"""The live view of `hetseq top` gives the terminal back as it was, however it ends."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

OTHER_SCREEN, OWN_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
HIDDEN_CURSOR, SHOWN_CURSOR = b"\x1b[?25l", b"\x1b[?25h"


def hear_signals() -> None:
    """Tests in the background of a script have SIGINT ignored, those under nohup SIGHUP; children would have it too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Watched:
    """`hetseq top` on a terminal of 24 lines of 80 columns, and what has been written to it."""

    def __init__(self, run: Path) -> None:
        self.controller, self.terminal = os.openpty()
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = self.attributes()
        self.screen = b""
        unset = ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "LINES", "COLUMNS")
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hetseq", "top", str(run), "--interval", "0.1"],
            stdin=self.terminal,
            stdout=self.terminal,
            stderr=self.terminal,
            env=environment | {"TERM": "xterm"},
            start_new_session=True,
            preexec_fn=hear_signals,
        )

    def attributes(self) -> list[object]:
        return list(termios.tcgetattr(self.terminal))

    def shows(self, words: bytes) -> None:
        deadline = time.monotonic() + 30
        while words not in self.screen:
            assert time.monotonic() < deadline, self.screen
            assert self.process.poll() is None, self.screen
            self._read(0.1)

    def ends(self) -> int:
        deadline = time.monotonic() + 30
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.screen
            self._read(0.1)
        while self._read(0):
            pass
        return self.process.returncode

    def _read(self, seconds: float) -> bytes:
        is_there, _, _ = select.select([self.controller], [], [], seconds)
        found = os.read(self.controller, 65536) if is_there else b""
        self.screen += found
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)
        os.close(self.controller)


def write(run: Path, state: str) -> None:
    (run / "status").mkdir(exist_ok=True)
    told = {"pid": 1, "node": "labA", "device": "cpu", "step": 8, "state": state, "share": 4}
    beside = run / "status" / ".rank-0.new"
    beside.write_text(json.dumps(told))
    beside.replace(run / "status" / "rank-0.json")


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    write(tmp_path, "train")
    watched = Watched(tmp_path)
    watched.shows(b"labA/cpu")
    assert watched.attributes() != watched.before  # each key is read at once, and not shown
    yield watched
    watched.close()


def is_sane(watched: Watched) -> bool:
    screen = watched.screen
    is_back = screen.rfind(OWN_SCREEN) > screen.rfind(OTHER_SCREEN) >= 0
    has_cursor = screen.rfind(SHOWN_CURSOR) > screen.rfind(HIDDEN_CURSOR) >= 0
    return is_back and has_cursor and watched.attributes() == watched.before


def test_ctrl_z_gives_the_terminal_back_until_the_view_goes_on(watched: Watched) -> None:
    watched.process.send_signal(signal.SIGTSTP)  # as a terminal does that has a shell
    deadline = time.monotonic() + 30
    while os.waitid(os.P_PID, watched.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is None:
        assert time.monotonic() < deadline
        watched._read(0.1)
    while watched._read(0):
        pass
    assert is_sane(watched)
    watched.screen = b""
    watched.process.send_signal(signal.SIGCONT)
    watched.shows(b"labA/cpu")
    assert OTHER_SCREEN in watched.screen
    assert watched.attributes() != watched.before
    os.write(watched.controller, b"q")
    assert watched.ends() == 0
    assert is_sane(watched)


def test_a_terminal_that_is_gone_ends_the_view(watched: Watched) -> None:
    """As a window that is closed; what the process says of it goes nowhere, so its end tells."""
    os.close(watched.controller)
    watched.controller = os.open(os.devnull, os.O_RDWR)
    assert watched.process.wait(30) in (0, 128 + signal.SIGHUP, -signal.SIGHUP)


def test_a_window_of_another_size_is_filled(watched: Watched) -> None:
    fcntl.ioctl(watched.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 40, 0, 0))
    watched.screen = b""
    watched.shows(b"state")
    watched.screen = b""
    watched.shows(b"state")  # a whole picture of the new size
    assert b"labA/cpu" not in watched.screen  # the column of names has no room
    os.write(watched.controller, b"q")
    assert watched.ends() == 0


def test_q_ends_the_view_and_leaves_what_was_seen(watched: Watched) -> None:
    os.write(watched.controller, b"xq")
    assert watched.ends() == 0
    assert is_sane(watched)
    assert b"labA/cpu" in watched.screen.rpartition(OWN_SCREEN)[2]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_view_and_leaves_the_terminal_sane(watched: Watched, number: int, code: int) -> None:
    watched.process.send_signal(number)
    assert watched.ends() == code
    assert is_sane(watched)
    assert b"Traceback" not in watched.screen


def test_the_view_ends_with_the_run(watched: Watched, tmp_path: Path) -> None:
    write(tmp_path, "done")
    assert watched.ends() == 0
    assert is_sane(watched)
    assert b"finished after step 8" in watched.screen.rpartition(OWN_SCREEN)[2]


def launched(run: Path) -> None:
    """A launcher that has made the directory and whose workers have not reported."""
    (run / "config.yaml").write_text("# HetSeq run configuration, run id 0123456789abcdef\ndistributed_world_size: 2\n")
    (run / ".lock").write_text('{"pid": 1, "host": "labA"}')


def test_a_run_that_starts_is_waited_for_until_it_ends(tmp_path: Path) -> None:
    launched(tmp_path)
    watched = Watched(tmp_path)
    try:
        watched.shows(b"starting: 0 of 2 ranks have loaded")
        write(tmp_path, "train")
        watched.shows(b"labA/cpu")
        write(tmp_path, "done")
        assert watched.ends() == 0
        assert is_sane(watched)
        assert b"finished after step 8" in watched.screen.rpartition(OWN_SCREEN)[2]
    finally:
        watched.close()
