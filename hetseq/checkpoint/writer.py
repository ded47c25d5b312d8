"""The process that writes a rank's checkpoints, so that training does not wait for the disk.

Responsible for: carrying out the trainer's requests in order: open an attempt, write the image of an
arena as a part, commit, conclude. Knows nothing of tensors: it must start at once and stay small, so this module
does not import torch. The one idea: the arena holds all that the writer needs to know about the part beside it, so if
the trainer is killed after the image was complete, the writer still finishes the part; the run's next start finds it.

It speaks JSON lines over its standard input, a socket: requests `write` (an arena and a serial), `go` (the image is
complete), `hurry`, `cancel` (another rank's part has failed), `commit`, `conclude`, `end`; one answer for each write
and each commit. It ignores stop signals, which are the trainer's to handle, and ends when the socket does.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetseq.checkpoint.arena import READY, WRITTEN, Arena
from hetseq.checkpoint.directory import STATE_NAME, manifest_name, part_name
from hetseq.checkpoint.part_writer import PartWriting
from hetseq.checkpoint.publish import Place, Publisher, write_manifest
from hetseq.checkpoint.records import Attempt, Manifest, PartRecord
from hetseq.checkpoint.retention import Retention
from hetseq.checkpoint.verification import patiently
from hetseq.system import faults
from hetseq.system.files import describe_os_error, sync_directory, write_new
from hetseq.system.processes import ignore_stop_signals

logger = logging.getLogger(__name__)

ARENA_SOURCE = Path("arena")  # the source named in errors about a damaged record
_NICENESS = 10
_OPENING = 4  # an attempt's folder may appear this many times later than a file
_FILLING_S = 600.0  # limit for one copy


def setting_of(place: Place, arenas: Sequence[Arena], *, is_polite: bool) -> dict[str, Any]:
    """The first line sent to a writer; a polite one runs at the lowest priority until it is told to hurry."""
    return {
        "paths": [str(arena.path) for arena in arenas],
        "run_directory": str(place.run_directory),
        "retention": asdict(place.retention),
        "patience_s": place.patience_s,
        "underway_s": place.underway_s,
        "is_polite": is_polite,
        "faults": faults.handed_down(),
    }


class MessagePipe:
    """JSON lines over a socket; `has_ended` once the other end is gone, `is_stuck` once it has read nothing for the
    socket's SO_SNDTIMEO, if that is set."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""
        self._requests: deque[dict[str, Any]] = deque()
        self._sending = threading.Lock()
        self.has_ended = self.is_stuck = False

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; a no-op if the other end is gone, or stuck."""
        with self._sending, suppress(OSError):
            if not self.is_stuck:
                try:
                    self._connection.sendall(json.dumps(message).encode() + b"\n")
                except BlockingIOError:
                    self.is_stuck = True

    def hint(self, message: Mapping[str, Any]) -> None:
        """Send a message unless the socket is full: a message that no process needs must not block the sender."""
        with suppress(OSError, ValueError):
            if select.select([], [self._connection], [], 0)[1]:
                self.send(message)

    def take(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next message; None if there is none in time, or the other end is gone."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        rest = timeout_s
        while not (self._requests or self.has_ended) and (rest is None or rest >= 0):
            self.listen(rest)  # may return after half a line, too
            rest = None if deadline is None else deadline - time.monotonic()
        return self._requests.popleft() if self._requests else None

    def hears(self, kind: str) -> bool:
        """Whether a message of this kind is queued, which is then removed; never waits."""
        self.listen(0)
        for message in self._requests:
            if message["do"] == kind:
                self._requests.remove(message)
                return True
        return False

    def listen(self, timeout_s: float | None) -> None:
        """Receive the messages that have arrived, or arrive within this time."""
        while not self.has_ended and select.select([self._connection], [], [], timeout_s)[0]:
            try:
                data = self._connection.recv(1 << 16)
            except OSError:
                data = b""
            self.has_ended = not data
            *lines, self._received = (self._received + data).split(b"\n")
            self._requests.extend(json.loads(line) for line in lines)
            timeout_s = 0


class Writer:
    """Carries out requests in order."""

    def __init__(self, line: MessagePipe, arenas: list[Arena], place: Place, *, is_polite: bool) -> None:
        self._line, self._arenas, self._place, self._is_polite = line, arenas, place, is_polite
        self._publisher = Publisher(place)
        self._acts = {"write": self._write, "commit": self._commit}

    def serve(self) -> None:
        """Serve until the trainer sends `end` or is gone, and all its requests are done."""
        while (request := self._line.take(None)) is not None:
            kind = request["do"]
            if kind == "end":
                return
            if kind == "conclude":
                self._conclude(request)
            elif kind in self._acts:
                self._line.send({"serial": request["serial"], **self._answer(request)})

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a request; any error becomes the answer, because the trainer waits for one."""
        try:
            return self._acts[request["do"]](request)
        except OSError as error:
            return {"errno": error.errno or 0, "failed": describe_os_error(error)}
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"}

    def _write(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Write the part in an arena and its manifest; on rank zero, open the attempt's folder first."""
        arena, serial = self._arenas[request["slot"]], request["serial"]
        record = arena.record(serial)
        attempt = Attempt.from_json(record["attempt"], source=ARENA_SOURCE)
        faults.at_step(attempt.identity.step)
        folder, index = self._place.folder(attempt), record["part"]
        is_again = bool(request.get("again"))
        if is_again:
            _remove_leftovers(folder, index)
        if record["state"] is not None:
            self._open(attempt, record, is_again=is_again)
        else:
            self._await_folder(folder, arena)
        self._await_image(arena, serial)
        faults.point("persist")
        began = time.perf_counter()
        writing = PartWriting(folder / part_name(index), arena.image[: record["image_bytes"]])
        try:
            crc32 = self._write_politely(writing)
        finally:
            writing.close()
        digest = write_manifest(
            folder, Manifest(attempt, record["state_sha256"], index, record["image_bytes"], crc32)
        )  # fmt: skip
        arena.mark_written(serial)
        return {"bytes": record["image_bytes"], "sha256": digest, "writing_s": time.perf_counter() - began}

    def _open(self, attempt: Attempt, record: Mapping[str, Any], *, is_again: bool) -> None:
        content, folder = record["state"].encode(), self._place.folder(attempt)
        if not (is_again and folder.is_dir()):
            self._publisher.open(attempt, content, size_bytes=record["size_bytes"])
            return
        # the folder from the writer that died stays: other ranks may have written into it already
        with suppress(FileNotFoundError):
            os.unlink(folder / STATE_NAME)
        write_new(folder / STATE_NAME, content)

    def _await_folder(self, folder: Path, arena: Arena) -> None:
        """Wait for the folder: rank zero may have to make room first, or may have died before creating it."""

        def look() -> None:
            self._stop_if_cancelled()
            if not self._line.has_ended:
                sync_directory(folder)

        def look_alone() -> None:
            if arena.is_given_up:
                raise OSError(0, "the run has continued without this save")
            sync_directory(folder)

        patiently(look, patience_s=_OPENING * self._place.patience_s)
        if self._line.has_ended:  # the next start waits for this process
            patiently(look_alone, patience_s=self._place.patience_s)

    def _await_image(self, arena: Arena, serial: int) -> None:
        deadline = time.monotonic() + _FILLING_S
        whole = [(READY, serial), (WRITTEN, serial)]  # the latter by a writer that died before it answered
        while arena.status not in whole:
            if self._line.has_ended and arena.status not in whole:
                raise OSError(0, "the trainer ended before its copy was whole")
            if time.monotonic() > deadline:
                raise OSError(0, f"the copy was not whole after {_FILLING_S:.0f} s")
            self._line.listen(0.05)
            self._line.hears("go")
            self._stop_if_cancelled()

    def _write_politely(self, writing: PartWriting) -> tuple[int, ...]:
        """Write in a thread of low priority, until told to hurry: a priority once lowered cannot be raised again."""
        if not self._is_polite:
            return writing.run(lambda: self._tell(writing))
        outcome: list[BaseException] = []
        thread = threading.Thread(target=self._write_niced, args=(writing, outcome), name="polite", daemon=True)
        thread.start()
        thread.join()
        if outcome:
            raise outcome[0]
        return writing.run(lambda: self._tell(writing))  # the rest

    def _write_niced(self, writing: PartWriting, outcome: list[BaseException]) -> None:
        try:
            with suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            writing.run(lambda: self._tell(writing) or self._line.hears("hurry"))
        except BaseException as error:
            outcome.append(error)

    def _tell(self, writing: PartWriting) -> bool:
        """Report the progress, for a live view of the run. Never pauses the write, but may find a request to stop."""
        self._stop_if_cancelled()
        self._line.hint({"written": writing.share})
        return False

    def _stop_if_cancelled(self) -> None:
        if self._line.hears("cancel"):
            raise OSError(errno.ECANCELED, "given up because another rank's part failed")

    def _commit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        attempt = Attempt.from_json(request["attempt"], source=ARENA_SOURCE)
        parts = [PartRecord(size, digest) for size, digest in request["parts"]]
        faults.at_step(attempt.identity.step)
        faults.point("rename")
        self._publisher.commit(
            attempt, state_sha256=request["state_sha256"], state_bytes=request["state_bytes"], parts=parts
        )  # fmt: skip
        return {}

    def _conclude(self, request: Mapping[str, Any]) -> None:
        """Clean up after a save that succeeded or failed; a failure here does no harm."""
        attempt = Attempt.from_json(request["attempt"], source=ARENA_SOURCE)
        if request["ok"]:
            self._publisher.retire(attempt)
        else:
            self._publisher.discard(attempt)
        self._publisher.note(request["row"])


def _remove_leftovers(folder: Path, index: int) -> None:
    """Remove the files of this part from a writer that died: no process has been told of them."""
    for name in (part_name(index), manifest_name(index)):
        with suppress(FileNotFoundError):
            os.unlink(folder / name)


class _Forward(logging.Handler):
    """Sends log records to the trainer, which logs them."""

    def __init__(self, line: MessagePipe) -> None:
        super().__init__()
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        self._line.send({"log": record.levelno, "text": record.getMessage()})


def main() -> None:
    """The main function of the process; its first line of input names its directories and its arenas' descriptors."""
    ignore_stop_signals()
    line = MessagePipe(socket.socket(fileno=os.dup(0)))
    logging.getLogger().addHandler(_Forward(line))
    logging.getLogger().setLevel(logging.INFO)
    setting = line.take(None)
    if setting is None:
        return
    if setting.get("faults") is not None:
        faults.arm(**setting["faults"])
    waits = {name: setting[name] for name in ("patience_s", "underway_s")}
    place = Place(Path(setting["run_directory"]), Retention(**setting["retention"]), **waits)
    arenas = [Arena(descriptor, None) for descriptor in setting["arenas"]]
    line.send({"started": os.getpid()})
    Writer(line, arenas, place, is_polite=setting["is_polite"]).serve()
    if line.has_ended:  # without `end`: the trainer was killed, and its arenas are left to this process
        for arena, path in zip(arenas, setting["paths"]):
            with suppress(OSError):
                if arena.is_sealed:  # for the next start, which sees this time as its age
                    os.utime(arena.descriptor)
                else:
                    os.unlink(path)
    sys.stdout.flush()
    os._exit(0)  # nothing to tear down, and the arenas' maps may still be in use
