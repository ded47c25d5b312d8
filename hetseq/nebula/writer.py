"""The process that writes saved states, so that the script does not wait for the disk. It imports no torch.

Responsible for: carrying out the requests of the script's process in order: write the image in an arena as a
file, commit a tag. Knows nothing of tensors, or of which tags are due. The one idea: the script announces in advance
what to do with a complete tag, so if it is killed, this process finishes every complete tag,
including those that were only in memory, and a script that starts again finds them.

It speaks JSON lines over its standard input, a socket (`hetseq.checkpoint.writer.MessagePipe`).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetseq.checkpoint.arena import READY, Arena
from hetseq.checkpoint.leftover_memory import sweep
from hetseq.checkpoint.part_writer import PartWriting
from hetseq.checkpoint.records import utc_text
from hetseq.checkpoint.writer import MessagePipe
from hetseq.errors import CheckpointError
from hetseq.nebula.publish import TagPlace, TagPublisher
from hetseq.nebula.tags import TagAttempt, TagManifest, data_name, manifest_name
from hetseq.system.files import describe_os_error
from hetseq.system.processes import ignore_stop_signals

logger = logging.getLogger(__name__)

_REQUEST = Path("request")  # the source named in errors about a damaged record
_NICENESS = 10
_FILLING_S = 600.0  # limit for one copy


def setting_of(place: TagPlace) -> dict[str, Any]:
    """The first line sent to a writer."""
    return {"root": str(place.root), "keep": place.keep, "rank": place.rank, "patience_s": place.patience_s}


class TagWriter:
    """Carries out requests in order."""

    def __init__(self, line: MessagePipe, place: TagPlace, anchors: Sequence[int]) -> None:
        self._line, self._place, self._anchors = line, place, anchors
        self._publisher = TagPublisher(place)
        self._arenas: dict[str, Arena] = {}
        self._announced: dict[str, dict[str, Any]] = {}  # by folder: complete tags that are not on disk
        self._acts = {"write": self._write, "commit": self._commit}

    def serve(self) -> None:
        """Serve until the script sends `end`, or is gone and everything it announced is done."""
        while (request := self._line.take(None)) is not None:
            kind = request["do"]
            if kind == "end":
                return
            if kind in self._acts:
                answer = self._answer(request)
                self._line.send({"serial": request["serial"], **answer})
                if kind == "commit":
                    self._after(request, answer)
            elif kind == "announce":
                self._announce(request)
            elif kind == "forget":
                self._announced.pop(request["folder"], None)
            elif kind == "note":
                self._publisher.note(request["row"])
        self._finish_alone()

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a request; any error becomes the answer, because the script waits for one."""
        try:
            return self._acts[request["do"]](request)
        except OSError as error:
            return {"failed": describe_os_error(error)}
        except CheckpointError as error:
            return {"failed": str(error)}
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"}

    def _announce(self, request: dict[str, Any]) -> None:
        """Record what to do if the script is killed; hold its arenas from now on."""
        self._announced[request["folder"]] = request
        for path, _ in request["images"]:
            with suppress(OSError):
                self._arena(path)

    def _finish_alone(self) -> None:
        """The script is gone without an `end`: write and commit the tags it had completed."""
        for announced in list(self._announced.values()):
            request = {**announced["commit"], "has_ended": True}
            for path, serial in announced["images"]:
                with suppress(OSError):
                    if self._arena(path).status == (READY, serial):
                        self._answer({"do": "write", "arena": path, "image": serial, "again": True})
            answer = self._answer(request)
            logger.info("%s: %s", announced["folder"], answer.get("failed", "committed"))
            self._after(request, answer)
        for arena in self._arenas.values():
            arena.close(unlink=False)
        for descriptor in self._anchors:
            os.close(descriptor)
        sweep(self._place.run_id, now_s=time.time())  # the script's arenas are not locked any more

    def _arena(self, path: str) -> Arena:
        """The arena of this name, under the lock that the script shares."""
        if path not in self._arenas:
            for known in [known for known in self._arenas if not os.path.exists(known)]:
                self._arenas.pop(known).close(unlink=False)
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._arenas[path] = Arena(descriptor, None)
        return self._arenas[path]

    def _write(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Write the image in an arena as a file, and its manifest."""
        began = time.perf_counter()
        arena, serial = self._arena(request["arena"]), request["image"]
        record = arena.record(serial)
        attempt, name = TagAttempt.from_json(record["attempt"], source=_REQUEST), record["name"]
        size, tree_size = record["file_bytes"], record["tree_bytes"]
        folder = self._publisher.open(attempt, size_bytes=size)
        if request.get("again"):
            for leftover in (data_name(name), manifest_name(name)):
                with suppress(FileNotFoundError):
                    os.unlink(folder / leftover)
        self._await_image(arena, serial)
        writing = PartWriting(folder / data_name(name), arena.image[:size])
        try:
            crc32 = self._write_politely(writing)
        finally:
            writing.close()
        tree = json.loads(bytes(arena.image[size : size + tree_size]))
        self._publisher.write_manifest(TagManifest(attempt, name, size, crc32, tree))
        arena.mark_written(serial)
        return {"seconds": time.perf_counter() - began}

    def _await_image(self, arena: Arena, serial: int) -> None:
        deadline = time.monotonic() + _FILLING_S
        while arena.status != (READY, serial):
            if self._line.has_ended and arena.status != (READY, serial):
                raise OSError(0, "the script ended before its copy was whole")
            if time.monotonic() > deadline:
                raise OSError(0, f"the copy was not whole after {_FILLING_S:.0f} s")
            self._line.listen(0.05)
            self._line.hears("go")

    def _write_politely(self, writing: PartWriting) -> tuple[int, ...]:
        """Write in a thread of low priority, until told to hurry: a priority once lowered cannot be raised again."""
        outcome: list[BaseException] = []

        def write() -> None:
            try:
                with suppress(OSError, AttributeError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
                writing.run(lambda: self._line.hears("hurry"))
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=write, name="polite", daemon=True)
        thread.start()
        thread.join()
        if outcome:
            raise outcome[0]
        return writing.run(lambda: False)  # the rest

    def _commit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        attempt = TagAttempt.from_json(request["attempt"], source=_REQUEST)
        commit = self._publisher.commit(
            attempt, request["names"], error=request["error"], has_ended=bool(request.get("has_ended"))
        )  # fmt: skip
        return {} if commit is None else {"bytes": commit.size_bytes, "files": len(commit.files)}

    def _after(self, request: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        """Clean up after a tag that is over; no process waits for it."""
        attempt = TagAttempt.from_json(request["attempt"], source=_REQUEST)
        self._announced.pop(attempt.folder_name, None)
        if self._place.rank != 0:
            return
        if "failed" not in answer:
            self._publisher.tidy(attempt)
        self._publisher.note(_row(request["row"], answer))


def _row(known: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """The line of `checkpointHistories.csv` for a tag that is over."""
    duration_s = time.monotonic() - known["began_s"]
    row = {name: value for name, value in known.items() if name != "began_s"}
    row.update(time_utc=utc_text(int(time.time())), duration_s=f"{duration_s:.3f}")
    if "failed" in answer:
        return {**row, "result": "failed", "error": answer["failed"]}
    size, files = answer["bytes"], answer["files"]
    rate = f"{size / 1e6 / max(duration_s, 1e-9):.1f}"
    return {**row, "result": "ok", "bytes": size, "files": files, "throughput_MBps": rate}


class _ForwardTag(logging.Handler):
    """Sends log records to the script's process, which logs them."""

    def __init__(self, line: MessagePipe) -> None:
        super().__init__()
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        self._line.send({"log": record.levelno, "text": record.getMessage()})


def main() -> None:
    """The main function of the process; the first line it receives names its directories."""
    ignore_stop_signals()
    line = MessagePipe(socket.socket(fileno=os.dup(0)))
    logging.getLogger().addHandler(_ForwardTag(line))
    logging.getLogger().setLevel(logging.INFO)
    setting = line.take(None)
    if setting is None:
        return
    place = TagPlace(Path(setting["root"]), setting["keep"], setting["rank"], setting["patience_s"])
    line.send({"started": os.getpid()})
    TagWriter(line, place, setting["arenas"]).serve()
    os._exit(0)  # nothing to tear down, and the arenas' maps may still be in use
