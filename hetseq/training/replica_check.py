"""Checks that all ranks still hold the same replica, and repairs ranks that differ.

Responsible for a checksum of model and optimizer state, for the decision which rank is wrong, and for giving the state
of one rank to those that differ. It knows no checkpoints: if no replica can be trusted it raises ReplicasDiffer, and
the caller goes back to a checkpoint.

The one idea: a flipped bit, or a task that changes its model by rank, is a fault of few ranks, so within one kind of
device the majority is right. Different kinds of device round differently, so a difference between kinds is expected,
and rank zero's state is as good as any. All ranks see the same checksums, so all decide alike.
"""

from __future__ import annotations

import json
import logging
import math
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hetseq.comm.directory_groups import send_bytes, send_tensor
from hetseq.comm.group import Group, gather_floats
from hetseq.errors import DisagreementError, HetSeqError, few
from hetseq.monitor.metrics import Metrics
from hetseq.parallel.base_parameters import base_parameters
from hetseq.parallel.checksums import checksums, hash_of
from hetseq.parallel.replica import Replica

logger = logging.getLogger(__name__)

_KIND_BYTES = 96
# Relative to the largest element of a tensor. Measured: AdamW, fused on one rank and not on the other, was 1e-6 apart
# after 1,000 steps and 1.4e-5 after 3,000.
_MORE_THAN_ROUNDING = 1e-2


class ReplicasDiffer(HetSeqError):
    """The replicas differ, and none of them can be trusted; every rank raises it in the same step."""


class ReplicaCheck:
    """Compares the replicas of all ranks, every `every` steps and on request.

    All ranks construct it together, in a world of two or more; `kind` is `kind_of` this rank's device.
    """

    def __init__(self, replica: Replica, group: Group, metrics: Metrics, *, every: int, kind: str) -> None:
        self._replica, self._group, self._metrics, self._every = replica, group, metrics, every
        text = np.frombuffer(kind.encode("ascii", "replace")[:_KIND_BYTES].ljust(_KIND_BYTES), np.int64)
        #: the kind of device of each rank
        self.kinds = tuple(row.tobytes().decode("ascii").strip() for row in group.all_gather_rows(text))
        self._has_told = False  # of rounding
        self._written = self._writings()

    def is_due(self, step: int) -> bool:
        """Whether the replicas are due for comparison after step `step`."""
        return step % self._every == 0

    def check(self, step: int, shares: Sequence[int]) -> bool:
        """Compare all replicas after step `step`, whose samples by rank are `shares`; whether more than rounding
        was repaired. Collective.

        If they differ, a line and the event `replicas_differ` say so, and the wrong ranks get the state of a right one.
        Raises ReplicasDiffer if no rank can be trusted, DisagreementError if the ranks do not even hold tensors of the
        same names, both on all ranks.
        """
        table = self._compare()
        if table is not None and table.has_late_buffers:
            # forward has begun to change them, by each rank's own samples, which BufferKeeper has not seen yet
            self._replica.buffers.synchronise_(tuple(shares))
            table = self._compare()
        self._written = self._writings()
        if table is None:
            return False
        judgement = judge(table.states, self.kinds)
        cause, ranks = "fault" if judgement.is_fault else "rounding", list(judgement.wrong)
        fields = {"step": step, "cause": cause, "source": judgement.source, "ranks": ranks}
        fields |= {"tensors": table.names[:3], "differing": len(table.names)}
        if judgement.source is None:
            self._metrics.event("replicas_differ", **fields)
            raise ReplicasDiffer(
                f"after step {step} the replicas differ in {few(table.names)}: {_sides(table.states)}, and no majority"
                " is right (bad memory does that, or a task that changes its model by rank)"
            )
        distance = self._resynchronise(table, judgement.source)
        self._metrics.event("replicas_differ", distance=distance if math.isfinite(distance) else None, **fields)
        self._tell(step, judgement, table.names, distance)
        return judgement.is_fault or not distance <= _MORE_THAN_ROUNDING

    def _tell(self, step: int, judgement: Judgement, names: list[str], distance: float) -> None:
        """Rank zero warns; the other ranks, which know the same, write the line into their files."""
        level, cause = logging.WARNING, "bad memory does that, or a task that changes its model by rank"
        if not judgement.is_fault and not distance <= _MORE_THAN_ROUNDING:
            cause = f"by {distance:.1g} of the largest element, which is more than these kinds of device round"
        elif not judgement.is_fault:
            level = logging.DEBUG if self._has_told else logging.INFO
            cause = f"{' and '.join(sorted(set(self.kinds)))} round differently, which is no fault; not told again"
            self._has_told = True
        if self._group.rank:
            level = min(level, logging.INFO)
        logger.log(
            level, "after step %d the replicas differ: %s in %s; all have the state of rank %d now (%s)", step,
            _ranks(judgement.wrong), few(names), judgement.source, cause,
        )  # fmt: skip

    # comparing

    def _compare(self) -> _Table | None:
        """The differences between the ranks, None if there are none. Collective: one row, two if they differ."""
        tensors, numbers = self._state()
        shapes = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items()]
        entries = [*shapes, *numbers]
        own = np.array([*checksums(tensors.values()), *(hash_of(text.encode()) for text in numbers.values())], np.int64)
        rows = self._group.all_gather_rows(np.array([hash_of("\n".join(entries).encode()), hash_of(own.tobytes())]))
        self._check_structure(rows[:, 0].tolist(), entries)
        states = rows[:, 1].tolist()
        if len(set(states)) == 1:
            return None
        now = self._writings()
        is_written = np.array([now.get(name) != self._written.get(name) for name in [*tensors, *numbers]], np.int64)
        table = self._group.all_gather_rows(np.concatenate([own, is_written]))  # (world_size, 2 * entries)
        sums, written = table[:, : len(own)], table[:, len(own) :].any(axis=0)
        differs = (sums != sums[0]).any(axis=0)
        names = [name for name, does in zip([*tensors, *numbers], differs) if does]
        return _Table(names, states, sums[:, differs], bool((differs & written).any()))

    def _state(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Live tensors by name, the base too; and other numbers as JSON, as far as a checkpoint could hold them.

        Where ranks own parts of the state, only the parameters are on several of them, or not even these.
        """
        owned = self._replica.owned
        kept = frozenset[str]() if owned is None else owned.base
        base = {
            f"model.{name}": tensor.detach()
            for name, tensor in base_parameters(self._replica.model).items()
            if name not in kept
        }
        live = self._replica.model_tensors() if self._replica.has_parameters else self._replica.common_model_tensors()
        if self._replica.divided is not None:  # ranks of different places hold different parts
            live = {**self._replica.common_model_tensors(), **self._replica.undivided_tensors()}
        tensors, texts = {**base, **live}, dict[str, str]()
        if self._replica.owned is not None:
            return tensors, texts
        optimizer_tensors, numbers = self._replica.optimizer_tensors()
        for name, value in numbers.items():
            try:
                texts[name] = json.dumps(value)
            except (TypeError, ValueError):
                continue
        return {**tensors, **optimizer_tensors}, texts

    def _writings(self) -> dict[str, tuple[int, int]]:
        """By name of a buffer: versions that a write to a buffer of its module changes, but a flipped bit does not.

        Batch normalisation bypasses the version counter for its averages, but counts its batches in another buffer.
        """
        model, found = self._replica.model, {}
        for module_name, module in model.named_modules():
            own = [buffer for buffer in module._buffers.values() if buffer is not None]
            sign = hash(tuple((id(buffer), buffer._version) for buffer in own)), len(own)
            for name in module._buffers:
                found["model." + (f"{module_name}.{name}" if module_name else name)] = sign
        return found

    def _check_structure(self, structures: list[int], entries: list[str]) -> None:
        """Raise DisagreementError, on all ranks, if they hold different tensors; collective only then."""
        if len(set(structures)) == 1:
            return
        common = Counter(structures).most_common(1)[0][0]
        one, other = structures.index(common), next(r for r, found in enumerate(structures) if found != common)
        text = "\n".join(entries).encode()
        listed = [send_bytes(self._group, text, source=rank).decode().split("\n") for rank in (one, other)]
        only = [sorted(set(listed[at]) - set(listed[1 - at])) for at in (0, 1)]
        raise DisagreementError(
            f"rank {other} holds {few(only[1])} where rank {one} holds {few(only[0])}: a task or an optimizer of your"
            " own must keep the same state on every rank"
        )

    # making equal

    def _resynchronise(self, table: _Table, source: int) -> float:
        """Give all ranks the differing entries of rank `source`; returns the largest distance corrected. Collective.

        The entries are received beside the live ones, checked on all ranks, and only then swapped in.
        """
        group, (tensors, texts) = self._group, self._state()
        is_mine = table.sums[group.rank] != table.sums[source]  # (differing,)
        received: dict[str, torch.Tensor] = {}
        for name, differs in zip(table.names, is_mine):
            if name in tensors:
                live = tensors[name]
                carrier = live.cpu().contiguous() if group.rank == source else torch.empty(live.shape, dtype=live.dtype)
                send_tensor(group, carrier, source=source)
                if differs:
                    received[name] = carrier
        sent = send_bytes(group, json.dumps([texts.get(name) for name in table.names]).encode(), source=source)
        new_texts = [text for text, differs in zip(json.loads(sent), is_mine) if differs and text is not None]
        sums = [*checksums(received.values()), *(hash_of(text.encode()) for text in new_texts)]
        distance = max((_distance(new, tensors[name]) for name, new in received.items()), default=0.0)
        rows = gather_floats(group, [float(sums == table.sums[source][is_mine].tolist()), distance])
        if not rows[:, 0].all():
            spoilt = np.flatnonzero(rows[:, 0] == 0).tolist()
            raise ReplicasDiffer(f"the state that rank {source} sent was changed on its way to {_ranks(spoilt)}")
        mine = [name for name, differs in zip(table.names, is_mine) if differs and name not in tensors]
        self._swap_in(tensors, received, dict(zip(mine, new_texts)))
        return float(rows[:, 1].max())

    @torch.no_grad()
    def _swap_in(
        self, tensors: dict[str, torch.Tensor], received: dict[str, torch.Tensor], texts: dict[str, str]
    ) -> None:
        for name, new in received.items():
            tensors[name].copy_(new)
        if texts:
            self._replica.load_optimizer({}, {name: json.loads(text) for name, text in texts.items()})
        self._replica.buffers.renew()
        self._written = self._writings()


@dataclass(frozen=True)
class _Table:
    """The differences between the ranks; equal on all of them."""

    names: list[str]
    states: list[int]  # by rank: of the whole replica
    sums: npt.NDArray[np.int64]  # (world_size, len(names))
    has_late_buffers: bool  # includes a buffer that was written on purpose since the last check


@dataclass(frozen=True)
class Judgement:
    """The wrong ranks, and a rank whose state is right; None: undecidable."""

    source: int | None
    wrong: tuple[int, ...]
    is_fault: bool


def judge(states: Sequence[int], kinds: Sequence[str]) -> Judgement:
    """Decide which ranks to trust, from the checksums of replicas that differ and the kinds of device, by rank.

    Within a kind the majority is right, and the lowest right rank gives its state. If each kind agrees with itself
    there is no fault, and rank zero gives its state.
    """
    right: set[int] = set()
    for kind in set(kinds):
        ranks = [rank for rank, other in enumerate(kinds) if other == kind]
        state, votes = Counter(states[rank] for rank in ranks).most_common(1)[0]
        if 2 * votes > len(ranks):
            right.update(rank for rank in ranks if states[rank] == state)
    source = min(right, default=None)
    is_fault = len(right) < len(states)
    others = [rank for rank, state in enumerate(states) if source is None or state != states[source]]
    wrong = others if not is_fault or source is None else sorted(set(range(len(states))) - right)
    return Judgement(source, tuple(wrong), is_fault)


def kind_of(device: torch.device) -> str:
    """The kind of a device, which decides how it rounds: equal kinds give equal bits for equal operations."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two tensors relative to the largest element; infinite if an element is not finite."""
    if not one.is_floating_point() or not one.numel():
        return 0.0
    other = other.cpu()
    distance, size = float((one - other).abs().max()), max(float(one.abs().max()), float(other.abs().max()))
    return distance / size if math.isfinite(distance) and size else 0.0 if one.equal(other) else math.inf


def _sides(states: Sequence[int]) -> str:
    alike = [[rank for rank, other in enumerate(states) if other == state] for state in set(states)]
    return " against ".join(map(_ranks, sorted(alike)))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
