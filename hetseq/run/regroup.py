"""The transition between generations: what a rank keeps, and how a rank without the state receives it from a peer.

Responsible for carrying model, optimizer, position and everything a session has learned into the next generation.
Refuses to decide which ranks survive (`cluster.membership`) and to form groups (`comm`).

The one idea: no rank trains before all hold the same state, so the transfer is an ordinary broadcast from the
surviving rank with the lowest number, of a state at rest. Ranks that hold the state take part and drop what arrives.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hetseq.balance.cost_meter import CostMeter
from hetseq.checkpoint import Identity, Loaded
from hetseq.checkpoint.images import Images
from hetseq.checkpoint.records import DamagedError
from hetseq.cluster.membership.decide import Record
from hetseq.comm.directory_groups import DirectoryGroups, gather_texts, send_bytes
from hetseq.errors import DisagreementError, PeerLostError
from hetseq.parallel.checksums import checksums
from hetseq.parallel.owned_state import OwnedState
from hetseq.parallel.owned_units import OwnedUnits
from hetseq.parallel.replica import Replica
from hetseq.run.checkpointing import (
    KnownSaves,
    Provenance,
    Saver,
    Underway,
    batch_record,
    describe,
    read_state,
    saved_batch,
)
from hetseq.run.state_transfer import send_checkpoint
from hetseq.system import faults
from hetseq.training.controller import TrainingState

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]


@dataclass(frozen=True)
class PendingWork:
    """Work that follows from a step besides training, as far as its commit decided it; the same on all ranks."""

    step: int
    epoch: int
    ends_epoch: bool
    is_overdue: bool  # a timed checkpoint
    nonce: int  # the name of the checkpoint, if there is to be one
    best: float | None  # as it was before
    row: Row = field(default_factory=dict)  # of `metrics.jsonl`


@dataclass
class KeptState:
    """The state that a rank keeps when a generation ends; the model's tensors stay in place."""

    optimizer: torch.optim.Optimizer
    state: TrainingState
    provenance: Provenance
    saver: Saver | KnownSaves
    meter: CostMeter
    due: PendingWork | None = None  # interrupted
    rows: tuple[Row, ...] = ()  # the last ones, for a writer that lacks them
    owned: OwnedState | None = None  # what this rank owns of the optimizer's state; None: all of it


@dataclass(frozen=True)
class Regroup:
    """A rank's way into a generation after the first one.

    `carried` is None on a rank that receives the state. If the record has an image, all ranks read it, and of what a
    rank carries only the objects and its facts about saves count.
    """

    record: Record
    carried: KeptState | None

    @property
    def source(self) -> int:
        """The rank that sends the state."""
        return self.record.roster.index(self.record.donors[0])


def succession_by(record: Record, carried: KeptState | None) -> Regroup | None:
    """A rank's way into the generation of a record; None: no rank holds a state, and all begin as at a start.

    Raises PeerLostError if too few ranks are there to begin: they have nothing to save before they stop.
    """
    if record.base is not None:
        return Regroup(record, carried)
    if record.is_last:
        raise PeerLostError("cannot continue: the state is lost, and too few ranks or not all data are left")
    return None


@dataclass(frozen=True)
class StartState:
    """The state that all ranks of a generation begin with."""

    state: TrainingState
    provenance: Provenance
    due: PendingWork | None
    rows: tuple[Row, ...]
    last_saved: int
    owed: Underway | None  # a save that the previous generation gave up
    best: float | None  # metric of the best checkpoint
    known: tuple[int, ...]  # commits that the state follows
    moved_bytes: tuple[int, ...] = ()  # of the optimizer's state, to each rank, where ranks own parts


def hand_over(succession: Regroup, replica: Replica, provenance: Provenance, sharing: DirectoryGroups) -> StartState:
    """Bring every rank to the state of the generation: fresh ranks receive it, and all compare it. Collective.

    Raises DisagreementError if something else arrived than was sent, and PeerLostError.
    """
    carried, source = succession.carried, succession.source
    told = json.loads(send_bytes(sharing.whole, _words(carried).encode(), source=source))
    provenance = replace(provenance, batch=saved_batch(told), samples=told["samples"], parts=told["parts"])
    state = carried.state if carried is not None else TrainingState()
    faults.point("transfer")
    if succession.record.fresh:
        state = _send_state(succession, replica, provenance, sharing, state)
    moved = replica.take_over_parts(sharing.whole)
    replica.task_state.share(sharing.whole)
    due = PendingWork(**told["due"]) if told["due"] is not None else None
    # validation finds the new value again
    state.best = told["best_in_state"] if due is None else due.best
    rows, known = tuple(told["rows"]), tuple(told["known"])
    owed = Underway(**told["owed"]) if told["owed"] is not None else None
    return StartState(state, provenance, due, rows, told["last_saved"], owed, told["best"], known, moved)


def go_back(
    succession: Regroup, replica: Replica, provenance: Provenance, sharing: DirectoryGroups, images: Images | None
) -> StartState:
    """Bring every rank to the state of the image that the generation begins from, in place. Collective.

    Raises PeerLostError if the image cannot be used: the ranks regroup, and report those that are left.
    """
    group, record = sharing.whole, succession.record
    assert images is not None, "all ranks of a run that makes images make them"
    if replica.owned is not None:
        assert isinstance(replica.reducer, OwnedUnits)
        replica.owned.adopt_(replica.reducer, cut=group.generation)  # without a state
    faults.point("transfer")
    try:
        loaded = images.read(record.image, into=replica.common_model_tensors(), wanted=replica.wanted)
    except DamagedError as error:
        raise PeerLostError(str(error)) from None
    saved = loaded.state
    replica.load_model(loaded.tensors)
    replica.load_optimizer(loaded.tensors, saved["optimizer_numbers"] or {})
    state = read_state(saved)
    if state.lineage != record.base:
        raise DisagreementError(f"the image is of {state.lineage}, not of {record.base}, which all ranks go back to")
    replica.task_state.step = loaded.identity.step
    replica.task_state.load(loaded.tensors, saved["task_state"], goes_back=True)
    provenance = replace(provenance, batch=saved_batch(saved), samples=saved["samples"], parts=saved["parts"])
    told = [json.loads(text) for text in gather_texts(group, _words(succession.carried))]
    known = [one for one in told if one]
    newest: dict[str, Any] = max(known, key=lambda one: int(one["last_saved"]), default={})
    owed = next((one["owed"] for one in known if one["owed"] is not None), None)
    return StartState(
        state,
        provenance,
        due=None,
        rows=tuple(saved["rows"]),
        last_saved=newest.get("last_saved", saved["saved"]["last"]),
        owed=None if owed is None else Underway(**owed),
        best=newest.get("best", saved["saved"]["best"]),
        known=tuple(newest.get("known", saved["saved"]["known"])),
    )


def _words(carried: KeptState | None) -> str:
    """The facts that the source sends besides the state; other ranks' ones are ignored."""
    if carried is None:
        return "{}"
    return json.dumps(
        {
            "due": None if carried.due is None else asdict(carried.due),
            "rows": carried.rows,
            "last_saved": carried.saver.last_step,
            "owed": None if carried.saver.owes is None else asdict(carried.saver.owes),
            "best": carried.saver.best,
            "best_in_state": carried.state.best,
            "known": carried.saver.known,
            "global_batch": batch_record(carried.provenance.batch),
            "samples": carried.provenance.samples,
            "parts": carried.provenance.parts,
        }
    )


def _send_state(
    succession: Regroup, replica: Replica, provenance: Provenance, sharing: DirectoryGroups, state: TrainingState
) -> TrainingState:
    """Send the fresh ranks model, optimizer and state; the state of this rank afterwards."""
    group, is_fresh = sharing.whole, succession.carried is None
    loaded = None
    if group.rank == succession.source:
        loaded = _describe(replica, provenance, state)
    received = send_checkpoint(
        sharing, loaded, source=succession.source, has_it=not is_fresh, into=replica.common_model_tensors()
    )  # fmt: skip
    if not is_fresh:
        return state
    if checksums(received.tensors.values()) != received.state["sums"]:
        raise DisagreementError(f"the state that rank {succession.source} sent was changed on the way")
    replica.load_common(received.tensors, received.state["optimizer_numbers"] or {})
    replica.task_state.load(received.tensors, received.state["task_state"])
    logger.info("got the state after step %d from rank %d", received.identity.step, succession.source)
    return read_state(received.state)


def _describe(replica: Replica, provenance: Provenance, state: TrainingState) -> Loaded:
    """The state of this rank as if it had been loaded."""
    optimizer_tensors, numbers = replica.common_optimizer_tensors()
    task_tensors, record = replica.task_state.content()
    live = {**replica.common_model_tensors(), **optimizer_tensors, **task_tensors}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in live.items()}
    content: Mapping[str, Any] = {**describe(state, provenance, numbers), "task_state": record}
    identity = Identity(step=state.position.step - 1, generation=0, lineage=str(state.lineage))
    return Loaded(
        tensors, {**content, "sums": checksums(tensors.values())}, identity, (), Path(), [], run_id="", nonce=0
    )
