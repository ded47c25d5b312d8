"""The rows that ranks exchange about a checkpoint: integers of fixed length.

Responsible for: packing success or failure, sizes and digests into int64, since groups gather nothing else. Does not
know how rows are sent. The one idea: every exchange of a save or a load has the same row, so ranks at
different points still make the same collective call.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from hetseq.errors import HetSeqError
from hetseq.system.files import describe_os_error

if TYPE_CHECKING:  # processes without torch read rows too
    from torch import Tensor

_TEXT_BYTES = 256
_ROW = np.dtype(
    [
        ("failed", "<i8"),
        ("busy", "<i8"),
        ("fatal", "<i8"),
        ("errno", "<i8"),
        ("bytes", "<i8"),
        ("step", "<i8"),
        ("time", "<i8"),
        ("place", "<i8"),
        ("nonce", "u1", (8,)),
        ("digest", "u1", (32,)),
        ("plan", "u1", (32,)),
        ("text", "u1", (_TEXT_BYTES,)),
    ]
)


class RowGroup(Protocol):
    """The part of a group of ranks that checkpoints need; `hetseq.comm.group` has two of them."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather_rows(self, row: NDArray[np.int64]) -> NDArray[np.int64]: ...

    def broadcast(self, tensor: Tensor, *, source: int) -> None: ...


@dataclass(frozen=True)
class Row:
    """One rank's message. Digests are hexadecimal sha256 or empty; `text` is cut to 256 bytes when sent."""

    failed: bool = False
    busy: bool = False  # the writer of this rank is still busy
    fatal: bool = False  # no rank may try another checkpoint
    errno: int = 0
    bytes: int = 0
    step: int = 0
    time: int = 0
    place: int = 0
    nonce: int = 0
    digest: str = ""
    plan: str = ""
    text: str = ""

    def pack(self) -> NDArray[np.int64]:
        record = np.zeros(1, _ROW)
        for name in ("failed", "busy", "fatal", "errno", "bytes", "step", "time", "place"):
            record[name] = int(getattr(self, name))
        record["nonce"] = np.frombuffer(self.nonce.to_bytes(8, "little"), np.uint8)
        record["digest"] = _digest(self.digest)
        record["plan"] = _digest(self.plan)
        text = self.text.encode("utf-8", "replace")[:_TEXT_BYTES].decode("utf-8", "ignore").encode()
        record["text"][0, : len(text)] = np.frombuffer(text, np.uint8)
        return record.view(np.int64).reshape(-1)

    @staticmethod
    def unpack(row: NDArray[np.int64]) -> Row:
        record = np.ascontiguousarray(row, np.int64).view(_ROW)[0]
        return Row(
            failed=bool(record["failed"]),
            busy=bool(record["busy"]),
            fatal=bool(record["fatal"]),
            errno=int(record["errno"]),
            bytes=int(record["bytes"]),
            step=int(record["step"]),
            time=int(record["time"]),
            place=int(record["place"]),
            nonce=int.from_bytes(record["nonce"].tobytes(), "little"),
            digest=record["digest"].tobytes().hex(),
            plan=record["plan"].tobytes().hex(),
            text=record["text"].tobytes().rstrip(b"\0").decode("utf-8", "replace"),
        )


def exchange(group: RowGroup, row: Row) -> list[Row]:
    """The rows of all ranks, in their order; every rank calls it."""
    return [Row.unpack(gathered) for gathered in group.all_gather_rows(row.pack())]


def exchange_texts(group: RowGroup, text: str) -> list[str]:
    """The texts of all ranks, in their order; every rank calls it. A text does not end with spaces."""
    content = text.encode()
    most = max(row.bytes for row in exchange(group, Row(bytes=len(content))))
    padded = np.frombuffer(content.ljust(-(-most // 8) * 8), np.int64)
    return [row.tobytes().rstrip(b" ").decode() for row in group.all_gather_rows(padded.copy())]


def failure_row(error: BaseException) -> Row:
    """A row that tells the others why this rank failed."""
    if isinstance(error, HetSeqError):
        return Row(failed=True, text=str(error))
    if not isinstance(error, OSError):
        return Row(failed=True, text=f"{type(error).__name__}: {error}")
    return Row(failed=True, errno=error.errno or 0, text=describe_os_error(error))


def first_failure(rows: Sequence[Row]) -> str | None:
    """The reason of the lowest rank that failed, with its number; None if none did.

    A rank that was told to give up (ECANCELED), because another one failed, is named only if there is no other.
    """
    failed = [(row.errno == errno.ECANCELED, rank) for rank, row in enumerate(rows) if row.failed]
    if not failed:
        return None
    rank = min(failed)[1]
    return f"rank {rank}: {rows[rank].text}"


def _digest(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(bytes.fromhex(text).ljust(32, b"\0"), np.uint8)
