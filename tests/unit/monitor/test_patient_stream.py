"""A rank that prints to a terminal or a pipe that is not read: it goes on, and its words are in a file."""

from __future__ import annotations

import fcntl
import io
import os
import socket
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetseq.monitor import patient_stream
from hetseq.monitor.patient_stream import PatientWriter, patient


class End:
    """Both ends of something to write to; the kernel holds `room` bytes at most for its reader."""

    def __init__(self, kind: str) -> None:
        if kind == "pipe":
            self.reader, self.writer = os.pipe()
        elif kind == "terminal":
            self.reader, self.writer = os.openpty()
            settings = termios.tcgetattr(self.writer)
            settings[1] &= ~termios.OPOST
            termios.tcsetattr(self.writer, termios.TCSANOW, settings)
        else:
            ours, theirs = socket.socketpair()
            self.reader, self.writer = ours.detach(), theirs.detach()

    def read(self) -> bytes:
        """What the kernel holds now."""
        os.set_blocking(self.reader, False)
        found = b""
        try:
            while piece := os.read(self.reader, 1 << 16):
                found += piece
        except BlockingIOError:
            return found
        return found

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture(params=["pipe", "terminal", "socket"])
def end(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[End]:
    monkeypatch.setattr(patient_stream, "_PATIENCE_S", 0.01)
    end = End(request.param)
    yield end
    end.close()


def test_what_is_read_arrives_and_what_is_not_is_spilt_in_order(end: End) -> None:
    spilt = list[bytes]()
    writer = PatientWriter(end.writer, spilt.append)
    assert writer.write(b"first\n") == 6
    assert (end.read(), spilt) == (b"first\n", [])
    lines = [b"%07d\n" % number for number in range(200_000)]  # 1.6 MB, more than any kernel holds
    assert all(writer.write(line) == 8 for line in lines)
    taken = end.read()
    assert taken
    assert taken + b"".join(spilt) == b"".join(lines)
    assert writer.write(b"again\n") == 6, "the reader is back"
    assert end.read() == b"again\n"
    writer.close()


def test_other_processes_that_hold_the_descriptor_still_wait_for_their_reader(end: End) -> None:
    """The shell that started the run, for one: its terminal is the same."""
    PatientWriter(end.writer, lambda data: None).close()
    assert not fcntl.fcntl(end.writer, fcntl.F_GETFL) & os.O_NONBLOCK


def test_a_text_stream_gives_each_line_at_once_and_is_a_terminal_where_it_was_one(end: End) -> None:
    with io.TextIOWrapper(io.FileIO(os.dup(end.writer), "w"), encoding="utf-8", errors="replace") as before:
        stream = patient(before, PatientWriter(end.writer, lambda data: None))
        stream.write("käse\n")
        assert end.read() == "käse\n".encode()
        assert (stream.fileno(), stream.isatty()) == (end.writer, os.isatty(end.writer))
        assert (stream.encoding, stream.errors) == ("utf-8", "replace")
        stream.close()


def test_a_reader_that_has_gone_is_told_as_ever() -> None:
    reader, writer = os.pipe()
    patiently = PatientWriter(writer, lambda data: None)
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        patiently.write(b"x")
    patiently.close()
    os.close(writer)


def test_a_file_that_takes_nothing_ends_nobody(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    writer = PatientWriter(full, lambda data: None)
    writer.is_in_file = True
    assert writer.write(b"x") == 1
    writer.close()
    os.close(full)
