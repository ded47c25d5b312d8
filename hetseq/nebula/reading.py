"""Loads saved states: from a file of a complete tag, or from memory before they are written.

Responsible for: one saved name, verified to the last byte if it comes from a file. Does not choose a tag. The one
idea: a file's tensors are filled while its checksums are computed, and nothing is returned before all of them match.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hetseq.checkpoint.part_format import header_bytes, read_header
from hetseq.checkpoint.part_io import allocate, dtype_of, read_part
from hetseq.checkpoint.records import DamagedError
from hetseq.checkpoint.verification import reason_of
from hetseq.errors import CheckpointError
from hetseq.nebula.slots import Slot
from hetseq.nebula.state_tree import rebuild
from hetseq.nebula.tags import TagCommit, check_file, data_name

MapLocation = str | torch.device | None


def load_file(commit: TagCommit, name: str, map_location: MapLocation) -> Any:
    """The state that was saved under a name; KeyError for an unknown name, CheckpointError if a byte changed."""
    record = commit.file(name)
    if record is None:
        known = ", ".join(repr(file.name) for file in commit.files)
        raise KeyError(f"the tag {commit.tag!r} has no {name!r}: it holds {known}")
    try:
        manifest = check_file(commit, record, deep=False)
        path = commit.path / data_name(name)
        header = read_header(path)
        tensors = allocate(piece.spec for piece in header.pieces)
        read_part(path, header, manifest.crc32, tensors)
        return rebuild(manifest.tree, _at(tensors, map_location))
    except DamagedError as error:
        raise DamagedError(f"{commit.path}: {error}") from None
    except (OSError, EOFError) as error:
        raise CheckpointError(f"{commit.path}: {data_name(name)}: {reason_of(error)}") from None


def load_slot(slot: Slot, tree: bytes, map_location: MapLocation) -> Any:
    """A copy of the state in a slot."""
    pieces, image, tensors = slot.pieces, slot.arena.image, {}
    offset = len(header_bytes(pieces))
    for piece in pieces:
        dtype = dtype_of(piece.spec.dtype)
        tensors[piece.spec.name] = tensor = torch.empty(piece.spec.shape, dtype=dtype)
        if piece.bytes:
            flat = torch.frombuffer(image, dtype=dtype, count=piece.spec.elements, offset=offset)
            tensor.copy_(flat.view(piece.spec.shape))
        offset += piece.bytes
    return rebuild(json.loads(tree), _at(tensors, map_location))


def _at(tensors: Mapping[str, Tensor], map_location: MapLocation) -> Mapping[str, Tensor]:
    if map_location is None:
        return tensors
    return {name: tensor.to(map_location) for name, tensor in tensors.items()}
