"""Images: the state of a run in the memory of its nodes, each part of it on two of them, so that no part dies with one.

Responsible for the images that the ranks of one generation make, and for finding and freeing images on a node. Used
where each rank owns a part of the state; replicas need none. Does not decide when an image is made, or which one a
generation begins from.

The one idea: an image is begun only when the one before is safe, that is whole on both places of each part, and takes
the memory of the one before that. So at any time the newest safe image survives the loss of any one node. Each part
lies in an arena like a part that waits for the disk, so the next start of a run finds it in the same way.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hetseq.balance.second_places import IMAGES, Lodging, second_places
from hetseq.checkpoint.arena import STATE_BYTES, arena_bytes, available_bytes, check_memory, memory_name, node_name
from hetseq.checkpoint.context import CheckpointContext
from hetseq.checkpoint.holdings import Layout, describe, key_of, lay_out
from hetseq.checkpoint.image_copy import KeptPart, OwnPart, Way
from hetseq.checkpoint.image_plan import ImagePart, NodeImages, digest_of, image_parts, image_to_keep
from hetseq.checkpoint.layout import TensorSpec
from hetseq.checkpoint.leftover_memory import LeftPart, Remains, directory_mark
from hetseq.checkpoint.load import Loaded
from hetseq.checkpoint.memory_recovery import Send, find_states, recall_wanted
from hetseq.checkpoint.part_io import allocate as allocated
from hetseq.checkpoint.publish import Place
from hetseq.checkpoint.rank_messages import Row, RowGroup, exchange, exchange_texts, failure_row, first_failure
from hetseq.checkpoint.records import Attempt, DamagedError, Identity, check_state, sha256, state_bytes
from hetseq.checkpoint.retention import Retention
from hetseq.checkpoint.snapshot import image_bytes
from hetseq.checkpoint.target_memory import Wanted, memory_for
from hetseq.checkpoint.tensor_slices import Held
from hetseq.comm.messages import Messages
from hetseq.errors import CheckpointError

_CHUNK_S = 120.0  # for a chunk to arrive


@dataclass(frozen=True)
class Protection:
    """How the images of a generation protect it; the same on all ranks."""

    image_bytes: tuple[int, ...]  # of what each rank owns
    keepers: tuple[tuple[int, ...], ...]  # the ranks that keep a copy of it
    refusal: str | None = None  # why there are no images

    @property
    def alone(self) -> tuple[int, ...]:
        """The ranks whose part has no second place."""
        return tuple(rank for rank, (size, at) in enumerate(zip(self.image_bytes, self.keepers)) if size and not at)


class Images:
    """The images of one generation on one rank; every rank has one and makes the same collective calls.

    `start` identifies this start of the run, `owned` says how much of the state each rank owns, `messages` are between
    all ranks (None: a world of one), and `memory_bytes` limits what all ranks of a node take (None: half of the free
    memory). `groups` has the number of the group of each rank, where each group holds the whole state; empty: all
    ranks are one.
    """

    def __init__(
        self,
        run_directory: Path,
        run_id: str,
        group: RowGroup,
        *,
        start: str,
        owned: Sequence[float],
        messages: Messages | None,
        memory_bytes: int | None = None,
        groups: Sequence[int] = (),
    ) -> None:
        place = Place(run_directory, Retention(), 0.0, 0.0)
        # what all hold goes to the owners
        self._setting = CheckpointContext(place, run_id, group, tuple(owned), time.time)
        self._start, self._messages, self._memory_bytes = start, messages, memory_bytes
        self._groups = groups or (0,) * group.world_size
        self._directory = directory_mark(run_directory)
        self._layout: Layout | None = None
        self._parts: list[ImagePart] = []
        self._digest = ""
        self._own: list[OwnPart] = []
        self._kept: list[KeptPart] = []
        #: None before the first image
        self.protection: Protection | None = None
        self._serial = 0
        self._lock = threading.Lock()
        self._awaited = 0  # own parts of the newest image that are not safe yet
        self._began_s = 0.0
        #: seconds from the beginning of the copy of the newest safe image until it was safe, on this rank
        self.making_s = 0.0
        #: seconds for which the training thread has waited for images, and that helper threads computed
        self.blocked_s, self.helper_s = 0.0, 0.0
        self._step = 0  # of the newest image
        #: the step of the newest image that is safe on all ranks; None: there is none of this generation
        self.safe_step: int | None = None
        #: images of before may be here, which the first image after this serial replaces; None: there are none
        self._older_until: int | None = 0

    @property
    def is_safe(self) -> bool:
        """Whether what this rank owns of the newest image is whole on both its places; True before the first one."""
        return self._awaited == 0

    @property
    def has_made_one(self) -> bool:
        """Whether this generation has begun an image."""
        return self._serial > 0

    @property
    def facts(self) -> dict[str, Any]:
        """What the images of this generation have cost on this rank."""
        return {"images": self._serial, "blocked_seconds": self.blocked_s, "helper_cpu_seconds": self.helper_s}

    @property
    def is_refused(self) -> bool:
        """Whether there is no memory for images; the same on all ranks."""
        return self.protection is not None and self.protection.refusal is not None

    def make(
        self,
        tensors: Mapping[str, Held],
        state: Mapping[str, Any],
        *,
        identity: Identity,
        nonce: int,
        at_once: Collection[str],
        known: Sequence[int],
    ) -> bool:
        """Begin an image of this state; every rank calls it, once `is_safe` was True on all of them.

        Arguments as for `CheckpointManager.keep`; `known` are the nonces of the commits that the state follows. False,
        on all ranks, if there is no memory, or the state has too much data besides tensors.
        """
        check_state(state)
        began_s = time.perf_counter()
        self._lay_out(tensors)
        attempt = Attempt(self._setting.run_id, identity, nonce, ("time",), "", len(self._parts))
        content = state_bytes(attempt, state)  # of different lengths, as ranks count seconds differently
        if self.is_refused:
            return False
        if max(row.bytes for row in exchange(self._setting.group, Row(bytes=len(content)))) > STATE_BYTES:
            return False
        plan = sha256(f"{attempt.to_json()} {self._digest}".encode())
        self._serial, self._step = self._serial + 1, identity.step
        slot, serial = self._serial % IMAGES, self._serial
        with self._lock:  # the time of an image begins here: memory for images is allocated only once
            self._awaited, self._began_s = len(self._own), time.perf_counter()

        def record_of(part: ImagePart) -> dict[str, Any]:
            return {
                "attempt": attempt.to_json(),
                "plan": plan,
                "directory": self._directory,
                "start": self._start,
                "part": part.index,
                "image_bytes": image_bytes(part.pieces),
                "size_bytes": sum(piece.bytes for one in self._parts for piece in one.pieces),
                "state": content.decode() if part.index == 0 else None,
                "is_kept": True,
                "known": list(known),
            }

        for kept in self._kept:
            kept.begin(slot, serial, record_of(kept.part), when_over=self._count)
        for own in self._own:
            own.begin(slot, serial, record_of(own.part), tensors, at_once=at_once, when_safe=self._one_is_safe)
        self.blocked_s += time.perf_counter() - began_s
        return True

    def settle(self) -> None:
        """Wait until the tensors of the newest image may change. Any rank, alone."""
        began_s = time.perf_counter()
        for own in self._own:
            own.settle()
        self.blocked_s += time.perf_counter() - began_s

    def note_commit(self, *, are_all_safe: bool) -> None:
        """After each commit: once the first image of this generation is safe on all ranks, free the older ones."""
        if not (self.has_made_one and are_all_safe):
            return
        self.safe_step = self._step
        if self._older_until is not None and self._serial > self._older_until:
            self._older_until = None
            free_images(self._setting.run_id, self._setting.run_directory)

    def read(
        self, plan: str, *, into: Mapping[str, Held], wanted: Callable[[Mapping[str, Tensor]], Wanted | None]
    ) -> Loaded:
        """`read_image` of this run."""
        return read_image(
            self._setting,
            plan,
            start=self._start,
            into=into,
            wanted=wanted,
            send=self._send if self._messages else None,
        )

    def _send(self, content: memoryview, source: int, targets: Sequence[int]) -> None:
        assert self._messages is not None
        rank, patience_s = self._setting.group.rank, {"timeout_s": _CHUNK_S}
        if rank in targets:
            self._messages.receive(content, source, channel=0, channels=1, **patience_s)
        for target in targets if rank == source else ():
            self._messages.send(content, target, channel=0, channels=1, **patience_s)

    def keep_only(self, plan: str, *, holds_state: bool, step: int) -> None:
        """At the beginning of a generation, with the state after `step`, free all images of this start but one, which
        stays until a new one is safe: `plan`, or by `image_to_keep` if it is empty. Collective.

        `holds_state`: this rank had that state at the end of the generation before.
        """
        images = [
            (image.plan, image.identity.step, image.identity.generation, image.number_of_parts, image.parts)
            for image in images_here(self._setting.run_id, self._setting.run_directory, start=self._start)
        ]
        texts = exchange_texts(self._setting.group, json.dumps([memory_name(), holds_state, images]))
        nodes = [
            NodeImages(memory, holds, tuple((*facts, tuple(parts)) for *facts, parts in of_node))
            for memory, holds, of_node in map(json.loads, texts)
        ]
        kept = plan or image_to_keep(nodes, step=step)
        free_images(self._setting.run_id, self._setting.run_directory, start=self._start, besides=kept)

    def close(self, *, keep: bool) -> None:
        """Release everything; with `keep` whole copies stay in the memory of this node. Any rank, alone."""
        if self._messages is not None:
            self._messages.sever()  # threads that wait for one end
        for one in (*self._own, *self._kept):
            one.close(keep=keep)
        self._own, self._kept = [], []
        if self._messages is not None:
            self._messages.close()

    def free(self) -> None:
        """Free all images of this run in the memory of this node. Any rank, alone, after `close`."""
        free_images(self._setting.run_id, self._setting.run_directory)

    def _one_is_safe(self, helper_s: float) -> None:
        with self._lock:
            self.helper_s += helper_s
            self._awaited -= 1
            if not self._awaited:
                self.making_s = time.perf_counter() - self._began_s

    def _count(self, helper_s: float) -> None:
        with self._lock:
            self.helper_s += helper_s

    def _lay_out(self, tensors: Mapping[str, Held]) -> None:
        """Agree on the layout of these tensors, and allocate memory where it is new. Collective."""
        setting, before = self._setting, self._layout
        if before is None or before.is_equal:
            rows = exchange(setting.group, Row(nonce=key_of(tensors)))
            self._layout = describe(setting, tensors, rows)
        else:
            self._layout = lay_out(setting, tensors, before)
        if before is None or before.digest != self._layout.digest:
            self._allocate(self._layout)

    def _allocate(self, layout: Layout) -> None:
        setting, rank = self._setting, self._setting.group.rank
        for one in (*self._own, *self._kept):
            one.close(keep=True)  # the images of the layout before stay until a new one is safe
        self._own, self._kept, self._older_until = [], [], self._serial
        sizes = [sum(piece.bytes for piece in pieces) for pieces in layout.parts]
        allowed = available_bytes() // 2
        room = allowed if self._memory_bytes is None else min(allowed, self._memory_bytes)
        text = f"{memory_name()} {node_name()} {room}"
        ranks = []
        for size, told, number in zip(sizes, exchange_texts(setting.group, text), self._groups, strict=True):
            node, machine, free = told.split(" ")
            ranks.append(Lodging(node, machine, int(free), size, number))
        places = second_places(ranks)
        self._parts = image_parts(layout.parts, places)
        self._digest = digest_of(layout.digest, self._parts)
        keepers = tuple(tuple(place.rank for place in of_rank) for of_rank in places)
        refusal = self._take_memory([one.node for one in ranks], rank)
        self.protection = Protection(tuple(sizes), keepers, refusal)

    def _take_memory(self, nodes: Sequence[str], rank: int) -> str | None:
        """Allocate the parts of this rank, or none on any rank, and return the reason. Collective."""
        row = Row()
        needs = [0] * len(nodes)
        for part in self._parts:
            for at in (part.owner, part.keeper):
                if at is not None:
                    needs[at] += IMAGES * arena_bytes(image_bytes(part.pieces))
        try:
            check_memory([need for need, node in zip(needs, nodes) if node == nodes[rank]], allowed=self._memory_bytes)
        except OSError as error:
            row = failure_row(error)
        # no rank takes memory before all have looked how much there is
        refusal = first_failure(exchange(self._setting.group, row))
        if refusal is not None:
            return refusal
        try:
            for part in self._parts:
                way = None if self._messages is None else Way(self._messages, part.index, len(self._parts))
                if part.owner == rank:
                    self._own.append(OwnPart(part, self._setting.run_id, way))
                elif part.keeper == rank:
                    self._kept.append(KeptPart(part, self._setting.run_id, way))
        except OSError as error:
            row = failure_row(error)
        refusal = first_failure(exchange(self._setting.group, row))
        if refusal is not None:
            for one in (*self._own, *self._kept):
                one.close(keep=False)
            self._own, self._kept = [], []
        return refusal


@dataclass(frozen=True)
class ImageOnNode:
    """The parts of one image that are whole in the memory of this node."""

    plan: str
    identity: Identity
    parts: tuple[int, ...]
    number_of_parts: int


def images_here(run_id: str, run_directory: Path, *, start: str) -> list[ImageOnNode]:
    """The images of this start of the run in the memory of this node, newest first. Any process, alone."""
    remains = Remains(run_id, run_directory, start=start)
    try:
        found: dict[str, list[LeftPart]] = {}
        for part in remains.parts:
            found.setdefault(part.plan, []).append(part)
        images = [
            ImageOnNode(
                plan, parts[0].attempt.identity, tuple(sorted({part.index for part in parts})),
                parts[0].attempt.number_of_parts,
            )
            for plan, parts in found.items()
        ]  # fmt: skip
    finally:
        remains.close(remove=False)
    return sorted(images, key=lambda image: (image.identity.generation, image.identity.step), reverse=True)


def free_images(
    run_id: str,
    run_directory: Path,
    *,
    start: str | None = None,
    plan: str | None = None,
    besides: str | None = None,
) -> None:
    """Free the images of this run on this node that no process holds: all, or of one start, one plan, or all but one.

    Any process, alone.
    """
    remains = Remains(run_id, run_directory, start=start, are_images=True)
    paths = [part.arena.path for part in remains.parts if plan in (None, part.plan) and part.plan != besides]
    remains.close(remove=False)
    for path in filter(None, paths):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(descriptor)


def read_image(
    setting: CheckpointContext,
    plan: str,
    *,
    start: str,
    into: Mapping[str, Held],
    wanted: Callable[[Mapping[str, Tensor]], Wanted | None],
    send: Send | None = None,
) -> Loaded:
    """What this rank wants of an image, from the memory of the nodes, every byte verified; every rank calls it.

    `into` and `wanted` as in `CheckpointManager.load`; `wanted` gets shapes and types; `send` as in `recall_wanted`.
    Raises DamagedError on all ranks if a part is missing or damaged; that image is freed then.
    """
    remains, outlines, row = Remains(setting.run_id, setting.run_directory, start=start), list[Loaded](), Row()

    def allocate(attempt: Attempt, state: dict[str, Any], specs: Sequence[TensorSpec]) -> Mapping[str, Any]:
        tensors = allocated(specs, device="meta")
        outlines.append(
            Loaded(
                tensors, state, attempt.identity, attempt.kinds, setting.place.folder(attempt), [], attempt.run_id,
                attempt.nonce, is_from_memory=True,
            )
        )  # fmt: skip
        return memory_for(specs, into, wanted(tensors) or {})

    try:
        states = find_states(setting.group, remains.parts, says_what_lacks=False)
        state = next((state for state in states if state.plan == plan), None)
        if state is None:
            raise DamagedError("a part of the image is in the memory of no node any more")
        recalled = None
        try:
            recalled = recall_wanted(setting.group, remains, state, allocate, send=send)
        except (OSError, CheckpointError) as error:
            row = failure_row(error)
        reason = first_failure(exchange(setting.group, row))
    finally:
        remains.close(remove=False)
    if reason is not None:
        free_images(setting.run_id, setting.run_directory, plan=plan)
        raise DamagedError(f"the image of step {state.order[0]} in memory cannot be used: {reason}")
    assert recalled is not None
    return replace(outlines[0], tensors=dict(recalled.tensors))
