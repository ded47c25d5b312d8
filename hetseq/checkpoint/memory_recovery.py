"""Recovery of a state that killed processes left in memory: verified as from a disk, and much faster.

Responsible for: agreeing on a state of which every part is still on some node, and reading it on all ranks.
Does not decide whether a checkpoint on disk is newer. The one idea: first all ranks exchange which parts
their nodes hold, so all know which rank sends which part; a part that some node lacks is sent by the lowest rank
that has it, and every part that a rank reads or receives is compared with its checksums.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetseq.checkpoint.layout import TensorSpec, whole_tensors
from hetseq.checkpoint.leftover_memory import LeftPart, Remains
from hetseq.checkpoint.memory_checksums import chunk_sum
from hetseq.checkpoint.part_format import PartHeader, header_in, parse_header
from hetseq.checkpoint.part_io import copy_part
from hetseq.checkpoint.rank_messages import RowGroup, exchange_texts
from hetseq.checkpoint.records import CHUNK_BYTES, Attempt, Commit, DamagedError, parse_state
from hetseq.checkpoint.shared_read import PartTargets, agree, copy_chunks

logger = logging.getLogger(__name__)

_AT_ONCE = 16 << 20  # bytes sent at once, so that a deadline applies to a piece

#: brings bytes from rank `source` to the ranks `targets`, into `content`; every rank calls it
Send = Callable[[memoryview, int, Sequence[int]], None]
#: returns memory for the tensors of a checkpoint, from the attempt, the state and the tensors' shapes
Allocate = Callable[[Attempt, dict[str, Any], Sequence[TensorSpec]], Mapping[str, Any]]


@dataclass(frozen=True)
class LeftState:
    """A state of which every part is in the memory of some node; equal on all ranks."""

    plan: str
    order: tuple[int, int]  # step and generation
    sizes: tuple[int, ...]  # of the parts' images, in bytes
    holders: tuple[frozenset[int], ...]  # the ranks on whose nodes each part is
    nonce: int = 0
    is_kept: bool = True  # meant for memory only; otherwise meant for the disk too
    known: tuple[int, ...] = ()  # nonces of the newest commit that the run knew of, and of the one in progress


@dataclass(frozen=True)
class Recalled:
    """The state as read on this rank."""

    attempt: Attempt
    state: dict[str, Any]
    tensors: Mapping[str, Any]  # whole tensors, or tuples of TensorSlice


def find_states(group: RowGroup, parts: Sequence[LeftPart], *, says_what_lacks: bool = True) -> list[LeftState]:
    """The states that are complete over all nodes, newest first; every rank calls it with its node's parts."""
    facts = [
        [part.plan, part.attempt.identity.step, part.attempt.identity.generation, part.attempt.number_of_parts,
         part.index, part.image_bytes, part.attempt.nonce, part.is_kept, part.known]
        for part in parts
    ]  # fmt: skip
    told = [json.loads(text) for text in exchange_texts(group, json.dumps(facts))]
    return whole_states(told, says_what_lacks=says_what_lacks)


def whole_states(facts_by_rank: Sequence[Sequence[Sequence[Any]]], *, says_what_lacks: bool = True) -> list[LeftState]:
    """`find_states`, from the rows of all ranks, which hold the fields of each `LeftPart`."""
    found: dict[tuple[Any, ...], dict[int, tuple[int, set[int]]]] = {}
    besides: dict[str, Sequence[Any]] = {}
    for rank, facts in enumerate(facts_by_rank):
        for plan, step, generation, number, index, size, *others in facts:
            parts = found.setdefault((step, generation, plan, number), {})
            parts.setdefault(index, (size, set()))[1].add(rank)
            besides[plan] = others
    states = []
    for (step, generation, plan, number), parts in sorted(found.items(), reverse=True):
        if len(parts) < number:
            lacking = [str(index) for index in range(number) if index not in parts]
            level = logging.INFO if says_what_lacks else logging.DEBUG
            logger.log(level, "the state of step %d in memory lacks part %s of %d", step, ", ".join(lacking), number)
            continue
        ordered = [parts[index] for index in range(number)]
        sizes, holders = tuple(size for size, _ in ordered), tuple(frozenset(ranks) for _, ranks in ordered)
        states.append(LeftState(plan, (step, generation), sizes, holders, *besides[plan]))
    return states


def believed(states: Sequence[LeftState], newest: Commit | None) -> list[LeftState]:
    """The states that know the newest commit on disk, or are that commit; all of them if there is none.

    The others belong to a discarded past: checkpoints were deleted or restored, or another node continued the run.
    """
    if newest is None:
        return list(states)
    return [state for state in states if newest.attempt.nonce in (state.nonce, *state.known)]


def choose_state(states: Sequence[LeftState], newest: Commit | None) -> LeftState | None:
    """The state to resume from in place of a commit, None if there is none; `states` newest first.

    A state that was being written to disk is preferred to later ones: its file is completed, later steps are redone.
    """
    found = [state for state in states if newest is None or state.order >= newest.order[:2]]
    for place, state in enumerate(found):
        is_unsaved = not state.is_kept and (newest is None or state.order > newest.order[:2])
        # states kept after that save had failed do not know its nonce
        if is_unsaved and all(state.nonce in later.known for later in found[:place]):
            return state
    return found[0] if found else None


def recall(group: RowGroup, remains: Remains, wanted: LeftState, allocate: Allocate) -> Recalled:
    """Read a state on this rank; every rank calls it. DamagedError if this rank failed; others may have succeeded.

    All ranks take part in every transfer, even after a failure of their own, so none waits for a rank that has failed.
    """
    own = {part.index: part for part in remains.parts if part.plan == wanted.plan}
    images = _gather_images(group, own, wanted)
    return _read([images[index] for index in range(len(wanted.sizes))], allocate)


def recall_wanted(
    group: RowGroup, remains: Remains, state: LeftState, allocate: Allocate, *, send: Send | None = None
) -> Recalled:
    """As `recall`, if `allocate` returns only what this rank wants, which may be slices.

    A chunk is sent only if a rank wants it whose node lacks that part; no rank holds a second image of a part. Chunks
    that no rank wants are verified on the nodes that have them. `send` (default: a broadcast) is called in the same
    order on all ranks.
    """
    own = {part.index: part for part in remains.parts if part.plan == state.plan}
    images = [_image_or_header(group, own.get(index), index, state) for index in range(len(state.sizes))]
    recalled: list[Recalled] = []

    def open_parts() -> list[PartTargets]:
        headers = [
            parse_header(image.content, source=_place(image), size=size) for image, size in zip(images, state.sizes)
        ]
        recalled.append(_allocate(images, headers, allocate))
        tensors = recalled[0].tensors
        return [
            PartTargets(_place(image), header, size, image.sums, tensors)
            for image, header, size in zip(images, headers, state.sizes)
        ]

    parts, plan = agree(group, open_parts, holders=state.holders)
    failures = []
    for image, part, holders in zip(images, parts, state.holders):
        try:
            if group.rank in holders:
                copy_chunks(image.content, part, plan.chunks(group.rank, image.index), chunk_sum)
        except Exception as error:  # raised only after the other ranks have got what they want
            failures.append(error)
        lacking = [rank for rank in range(group.world_size) if rank not in holders]
        for chunk in sorted(set().union(*(plan.wanted[rank][image.index] for rank in lacking))):
            source = sorted(holders)[chunk % len(holders)]
            targets = [rank for rank in lacking if chunk in plan.wanted[rank][image.index]]
            received = _chunk(image, part, chunk, is_here=group.rank == source)
            if send is None:
                _broadcast(group, received, source=source)
            else:
                send(received, source, targets)
            try:
                if group.rank in targets:
                    part.take(chunk, received, chunk_sum)
            except DamagedError as error:
                failures.append(error)
    if failures:
        raise failures[0]
    return recalled[0]


def _image_or_header(group: RowGroup, part: LeftPart | None, index: int, state: LeftState) -> _Image:
    """A part on this rank's own node; of another one, only the header, which the lowest rank that has it sends."""
    size, holders = state.sizes[index], state.holders[index]
    own = None if part is None else _Image(index, part.arena.image[:size], part.sums, part.state)
    if len(holders) == group.world_size:
        assert own is not None
        return own
    header = None if own is None else header_in(own.content)
    told = None if own is None or header is None else [list(own.sums), own.state, len(header)]
    sums, text, length = json.loads(exchange_texts(group, json.dumps(told))[min(holders)])
    content = memoryview(bytearray(length))
    if group.rank == min(holders):
        assert header is not None
        content[:] = header
    _broadcast(group, content, source=min(holders))
    return own or _Image(index, content, sums, text)


def _chunk(image: _Image, part: PartTargets, chunk: int, *, is_here: bool) -> memoryview:
    """One chunk of a part, or memory for it."""
    length = part.length(chunk)
    return image.content[chunk * CHUNK_BYTES :][:length] if is_here else memoryview(bytearray(length))


def _broadcast(group: RowGroup, content: memoryview, *, source: int) -> None:
    for begin in range(0, len(content), _AT_ONCE):
        group.broadcast(torch.from_numpy(np.frombuffer(content[begin : begin + _AT_ONCE], np.uint8)), source=source)


@dataclass(frozen=True)
class _Image:
    """One part in memory, and its expected content."""

    index: int
    content: memoryview
    sums: Sequence[int]
    state: str | None


def _gather_images(group: RowGroup, own: Mapping[int, LeftPart], wanted: LeftState) -> dict[int, _Image]:
    """All parts on this rank: those on its own node in place, the others received."""
    images: dict[int, _Image] = {}
    everybody = frozenset(range(group.world_size))
    for index, (size, holders) in enumerate(zip(wanted.sizes, wanted.holders)):
        part = own.get(index)
        if part is not None:
            images[index] = _Image(index, part.arena.image[:size], part.sums, part.state)
        if holders != everybody:
            images[index] = _send(group, images.get(index), index, size, source=min(holders))
    return images


def _send(group: RowGroup, own: _Image | None, index: int, size: int, *, source: int) -> _Image:
    """The part of rank `source`, on every rank; ranks that have it already keep their own."""
    is_source = group.rank == source
    head = json.dumps([list(own.sums), own.state] if own is not None and is_source else None)
    sums, state = json.loads(exchange_texts(group, head)[source])
    content = own.content if own is not None else memoryview(bytearray(size))
    scratch = torch.empty(min(size, _AT_ONCE), dtype=torch.uint8)
    for begin in range(0, size, _AT_ONCE):
        piece = content[begin : begin + _AT_ONCE]
        is_used = is_source or own is None
        flat = torch.from_numpy(np.frombuffer(piece, np.uint8)) if is_used else scratch[: len(piece)]
        group.broadcast(flat, source=source)
    return own or _Image(index, content, sums, state)


def _read(images: Sequence[_Image], allocate: Allocate) -> Recalled:
    headers = [parse_header(image.content, source=_place(image)) for image in images]
    recalled = _allocate(images, headers, allocate)
    for image, header in zip(images, headers):
        copy_part(_place(image), image.content, header, image.sums, recalled.tensors)
    return recalled


def _allocate(images: Sequence[_Image], headers: Sequence[PartHeader], allocate: Allocate) -> Recalled:
    """The state, and memory for its tensors."""
    attempt, state = parse_state((images[0].state or "").encode(), source=_place(images[0]))
    try:
        specs = whole_tensors(piece for header in headers for piece in header.pieces)
    except ValueError as error:
        raise DamagedError(f"the parts in memory do not fit together: {error}") from None
    return Recalled(attempt, state, allocate(attempt, state, specs))


def _place(image: _Image) -> Path:
    """The name of the part in errors."""
    return Path(f"part {image.index} in memory")
