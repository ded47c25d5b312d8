"""Directory groups: which ranks share a run directory, and how data is sent between directories.

Responsible for the partition of the ranks into directory groups, for the small group of ranks around each directory,
and for sending bytes and tensors from one rank to all. Knows nothing of files: the caller decides what is sent.

The one idea: ranks of one directory group work on its files together, over a group of their own, and the lowest of them
is its writer. Anything that concerns several directories uses the group of all ranks, and every rank takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hetseq.comm.group import Group, LocalGroup, Rows, RowTransport, TensorTransport

_CHUNK_BYTES = 16 << 20  # bytes sent at once, so that a deadline applies to a piece and not to a whole model


@dataclass(frozen=True)
class DirectoryGroups:
    """The directory groups of a run, as one rank sees them; `number` is the index of its own group in `parts`."""

    number: int
    parts: tuple[tuple[int, ...], ...]  # the ranks of each directory group, in the order of their lowest ranks
    group: Group  # of the ranks of this directory group, renumbered from 0
    whole: Group  # of all ranks

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that work in the same run directory as this one."""
        return self.parts[self.number]

    @property
    def count(self) -> int:
        """The number of run directories."""
        return len(self.parts)

    @property
    def writers(self) -> tuple[int, ...]:
        """The rank that writes the files of each directory: the lowest of its group."""
        return tuple(part[0] for part in self.parts)

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the files of its directory."""
        return self.group.rank == 0

    def gather(self, row: Sequence[int]) -> Rows:
        """The values of the writers: n integers on each rank give (count, n), in the order of the directory groups."""
        return self.whole.all_gather_rows(np.array(row, np.int64))[list(self.writers)]

    def text_of(self, rank: int, text: str) -> str:
        """The text of rank `rank`, on every rank; every rank calls it."""
        return send_bytes(self.whole, text.encode("utf-8", "replace"), source=rank).decode("utf-8", "replace")

    def close(self) -> None:
        """Close the sockets between the ranks of this directory group; the group of all ranks stays open."""
        if self.group is not self.whole:
            self.group.close()


def everything_shared(group: Group) -> DirectoryGroups:
    """All ranks use one run directory."""
    return DirectoryGroups(0, (tuple(range(group.world_size)),), group, group)


def share(group: Group, parts: Sequence[Sequence[int]]) -> DirectoryGroups:
    """The directory groups that the launchers have found: each rank in one of them; none: all share. Collective.

    ValueError for parts that leave out a rank, name one twice, or are out of order. Raises RendezvousError if the
    ranks of a part do not find each other.
    """
    ordered = tuple(tuple(part) for part in parts) or (tuple(range(group.world_size)),)
    ranks = [rank for part in ordered for rank in part]
    is_sorted = all(part and list(part) == sorted(part) for part in ordered) and list(ordered) == sorted(ordered)
    if not is_sorted or sorted(ranks) != list(range(group.world_size)):
        raise ValueError(
            f"directory groups {ordered} of {group.world_size} ranks: expected every rank once, in rising order, and"
            " the groups in the order of their lowest ranks"
        )
    number = next(number for number, part in enumerate(ordered) if group.rank in part)
    part = ordered[number]
    if len(part) == group.world_size:
        return everything_shared(group)
    own = LocalGroup() if len(part) == 1 else group.subgroup(part, f"directory-{number}")
    return DirectoryGroups(number, ordered, own, group)


def send_bytes(group: Group, data: bytes, *, source: int, is_wanted: bool = True) -> bytes:
    """The `data` of rank `source`, on every rank with `is_wanted`; empty on the others. Every rank calls it."""
    size = int(group.all_gather_rows(np.array([len(data)], np.int64))[source, 0])
    received = bytearray()
    for begin in range(0, size, _CHUNK_BYTES):
        end = min(begin + _CHUNK_BYTES, size)
        if group.rank == source:
            chunk = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.uint8)
        else:
            chunk = torch.empty(end - begin, dtype=torch.uint8)
        group.broadcast(chunk, source=source)
        if is_wanted:
            received += chunk.numpy().tobytes()
    return bytes(received)


def gather_texts(group: RowTransport, text: str) -> list[str]:
    """The texts of all ranks, in rank order, on every rank; every rank calls it."""
    data = text.encode()
    sizes = group.all_gather_rows(np.array([len(data)], np.int64))[:, 0].tolist()
    width = -(-max(sizes) // 8) * 8
    rows = group.all_gather_rows(np.frombuffer(data.ljust(width), np.int64)) if width else [np.empty(0)] * len(sizes)
    return [row.tobytes()[:size].decode() for row, size in zip(rows, sizes, strict=True)]


def send_tensor(group: TensorTransport, tensor: torch.Tensor, *, source: int) -> None:
    """Copy `tensor`, contiguous and on the CPU, bit for bit from rank `source`; every rank calls it."""
    flat = tensor.view(-1).view(torch.uint8)  # (bytes,), the tensor's own memory
    for begin in range(0, flat.numel(), _CHUNK_BYTES):
        group.broadcast(flat[begin : begin + _CHUNK_BYTES], source=source)
