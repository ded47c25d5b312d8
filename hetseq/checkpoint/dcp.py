"""HetSeq checkpoints for `torch.distributed.checkpoint`: read in place into any of its layouts, or written as its own.

Responsible for: a storage reader for that library, and for a folder that it can open without HetSeq. Knows nothing of
the files of a checkpoint, and makes no collective call: the library does, in the process group of its caller.
The one idea: each tensor is presented as a single piece, so the library asks for boxes of it, however it was sliced;
a box lies within one span of elements, which `tensor_reader` reads and verifies.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from hetseq.checkpoint.records import DamagedError
from hetseq.checkpoint.selection import Skipped, choose, describe, used_instead
from hetseq.checkpoint.tensor_reader import Spans
from hetseq.errors import CheckpointError, CheckpointRefused

logger = logging.getLogger(__name__)

BLOCK_BYTES = 32 << 20  # a larger span is read in pieces


class HetSeqReader(dcp.StorageReader):
    """`dcp.load(state_dict, storage_reader=HetSeqReader(path))` loads a HetSeq checkpoint, verified.

    `path` is the folder of a checkpoint or of a run. For a run, the newest checkpoint whose small files and headers
    verify is read, and a warning names those that were skipped. Names are as in the files, `model.<name>` and
    `optim.<name>.<state>`; with a `prefix`, only names that begin with it, stripped of it. Every rank makes its own
    reader; if the ranks chose different checkpoints, loading is refused. Takes up to 40 MiB besides the tensors.

    Raises CheckpointRefused or another CheckpointError if there is no such checkpoint or it is damaged, on that rank
    alone: the others would wait in `dcp.load` until the group's deadline, so let the rank end. A damaged
    tensor is only found by `dcp.load`, which wraps every exception in its CheckpointException: `failures` holds ours
    by rank. Do not use tensors that were filled before such an error.
    """

    def __init__(self, path: str | os.PathLike[str], *, prefix: str = "") -> None:
        self._prefix = prefix
        self._spans = _open(Path(path), prefix)

    @property
    def checkpoint_id(self) -> Path:
        """The folder of the checkpoint that is read."""
        return self._spans.commit.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switch to another path, if one is given."""
        if checkpoint_id is not None:
            self._spans = _open(Path(checkpoint_id), self._prefix)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this could be the path of a HetSeq checkpoint."""
        return Path(checkpoint_id).is_dir()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The tensors whose names begin with the prefix, without it, each in one piece."""
        specs = {name: spec for name, spec in self._spans.specs.items() if name.startswith(self._prefix)}
        return Metadata(
            {
                name.removeprefix(self._prefix): TensorStorageMetadata(
                    TensorProperties(dtype=self._spans.dtype(name)),
                    torch.Size(spec.shape),
                    [ChunkStorageMetadata(torch.Size([0] * len(spec.shape)), torch.Size(spec.shape))],
                )
                for name, spec in specs.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """A no-op: the reader's constructor has read the metadata."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """This rank's plan, with the checkpoint it is for."""
        return replace(plan, storage_data=self._spans.commit.sha256)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans unchanged if all ranks read one checkpoint; else CheckpointError. On the coordinator only."""
        if len({plan.storage_data for plan in plans}) > 1:
            raise CheckpointError(
                f"the ranks found different checkpoints (the coordinator: {self.checkpoint_id}), as happens while a run"
                " continues: name the folder of one checkpoint"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan, part by part from front to back; DamagedError if a byte has changed.

        Values are converted if a tensor's type differs from the saved one, as in the library's own reader.
        """
        for item in sorted(plan.items, key=self._position):
            target = planner.resolve_tensor(item).detach()
            self._fill_(target, self._name(item), item.storage_offsets, item.lengths)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _name(self, item: ReadItem) -> str:
        return self._prefix + item.storage_index.fqn

    def _position(self, item: ReadItem) -> tuple[int, int]:
        name = self._name(item)
        return self._spans.position(name, _span(self._spans.specs[name].shape, item.storage_offsets, item.lengths)[0])

    def _fill_(self, target: Tensor, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        """Copy a box of a tensor, `lengths` elements from `offsets` on, into `target`, which has that shape."""
        spec = self._spans.specs[name]
        begin, end = _span(spec.shape, offsets, lengths)
        long = [dimension for dimension, length in enumerate(lengths) if length > 1]
        if long and (end - begin) * spec.itemsize > BLOCK_BYTES:
            first = long[0]
            half = lengths[first] // 2
            for start, length in ((0, half), (half, lengths[first] - half)):
                self._fill_(
                    target.narrow(first, start, length),
                    name,
                    _with(offsets, first, offsets[first] + start),
                    _with(lengths, first, length),
                )
            return
        span = self._spans.read(name, begin, end)
        target.copy_(span.as_strided(tuple(lengths), _strides(spec.shape)))


def write_dcp(folder: Path, spans: Spans) -> None:
    """Write the tensors into an existing, empty folder that `dcp.load` opens without HetSeq; names are unchanged.

    One file per tensor, because the library keeps all tensors of a file in memory: this takes the largest two.
    Raises DamagedError, or OSError where the disk refuses.
    """
    shapes = {
        name: torch.empty(spec.shape, dtype=spans.dtype(name), device="meta") for name, spec in spans.specs.items()
    }
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, overwrite=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp.save(shapes, storage_writer=writer, planner=_AsTheyAreWritten(spans), no_dist=True)
    except dcp.CheckpointException as error:
        reason = error.failures[0][0]
        if isinstance(reason.__context__, OSError):  # torch raises an error of its own over the disk's
            reason = reason.__context__
        raise reason from None


class _AsTheyAreWritten(dcp.DefaultSavePlanner):
    """Plans from the shapes alone, and reads each tensor only when it is written."""

    def __init__(self, spans: Spans) -> None:
        super().__init__()
        self._spans = spans

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._spans.whole(index.fqn)


def _open(path: Path, prefix: str) -> Spans:
    spans = _newest(path)
    if not any(name.startswith(prefix) for name in spans.specs):
        some = ", ".join(list(spans.specs)[:3]) or "none"
        raise CheckpointRefused(f"no tensor of {spans.commit.path} begins with {prefix!r}: the names are {some}, ...")
    return spans


def _newest(path: Path) -> Spans:
    """The checkpoint that a path names; for a run, the newest that can be opened."""
    try:
        choice = choose(os.path.abspath(path), path)  # never a bare word: `latest` would be a run, not a folder
    except OSError as error:
        raise CheckpointRefused(f"{path} cannot be read: {error.strerror or error}") from None
    skipped = list(choice.skipped)
    for commit in choice.commits:
        try:
            opened = Spans(commit)
        except DamagedError as error:
            if choice.is_explicit:
                raise
            reason = str(error).removeprefix(describe(commit.path, ""))
            skipped.append(Skipped.of(commit.path, reason))
            continue
        if skipped:
            logger.warning("%s", used_instead(skipped, f"step {commit.identity.step}"))
        return opened
    raise CheckpointRefused(f"no checkpoint in {path} can be used: {'; '.join(one.sentence for one in skipped)}")


def _span(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """The elements (begin, end) of a tensor, in row-major order, that enclose a box of it."""
    strides = _strides(shape)
    begin = sum(offset * stride for offset, stride in zip(offsets, strides))
    return begin, begin + sum((length - 1) * stride for length, stride in zip(lengths, strides)) + 1


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def _with(values: Sequence[int], index: int, value: int) -> list[int]:
    return [*values[:index], value, *values[index + 1 :]]
