"""The checkpoints of a run: the interface for code outside this package.

Responsible for the methods that a controller, a command or a script calls, and for tidying up at the start. Knows
nothing of what tensors mean or how rows are sent. The one idea: methods that change something or must agree are
collective (`save`, `load`, `recover`); methods that only read are not (`list`, `latest`, `verify`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hetseq.checkpoint.arena import arena_bytes, check_memory, node_name
from hetseq.checkpoint.async_save import Background
from hetseq.checkpoint.bandwidth import better_weights
from hetseq.checkpoint.context import CheckpointContext
from hetseq.checkpoint.directory import attempt_name, scan, write_latest
from hetseq.checkpoint.holdings import HoldingsDifferError, Layout, check_holdings, describe, lay_out
from hetseq.checkpoint.layout import Piece
from hetseq.checkpoint.leftover_memory import Remains, await_writers
from hetseq.checkpoint.load import Load, Loaded
from hetseq.checkpoint.memory_recovery import LeftState, believed, find_states
from hetseq.checkpoint.publish import Place, Publisher
from hetseq.checkpoint.rank_messages import Row, RowGroup, exchange, failure_row, first_failure
from hetseq.checkpoint.records import Commit, Identity, check_state, utc_text
from hetseq.checkpoint.recovery import complete_newer, newest_verified, remove_litter, remove_temporaries
from hetseq.checkpoint.retention import Retention
from hetseq.checkpoint.selection import describe as describe_choice
from hetseq.checkpoint.snapshot import image_bytes
from hetseq.checkpoint.sync_save import Plan, Save, SaveResult, make_plan, say
from hetseq.checkpoint.target_memory import Wanted
from hetseq.checkpoint.tensor_slices import Held
from hetseq.checkpoint.verification import verify

logger = logging.getLogger(__name__)

WRITERS_S = 60.0  # how long a start waits for the writers of an earlier one

Parts = Sequence[Sequence[Piece]]
_T = TypeVar("_T")
# `list` is a method below, and would hide the type
Commits = list[Commit]
Sentences = list[str]


@dataclass(frozen=True)
class CheckpointOptions:
    """Settings of a `CheckpointManager` that rarely need to change; the same on every rank.

    `weights` are the relative bytes each rank writes, one number for each rank (default: equal); measured disk speeds
    may change them later. `patience_s` is how long a rank waits for a file that another rank has announced:
    network file systems show new files late. An attempt that was never committed is removed after a later commit, but
    not within `underway_s` of its last change, because a stopping node may still be writing it. `clock` gives seconds
    since 1970 and is only used for labels. With `is_polite` the process that writes in the background yields the
    processors to others.
    """

    weights: Sequence[float] | None = None
    patience_s: float = 15.0
    underway_s: float = 600.0
    clock: Callable[[], float] = time.time
    is_polite: bool = True


class CheckpointManager:
    """The checkpoints in `<run_directory>/checkpoints`; one on every rank, all with the same arguments.

    `memory_bytes` limits the memory that the ranks of this node together use for states that wait to be written
    (default: half of what is free). With `keeps_states` states also stay there, if there is room for two. `options` is
    a `CheckpointOptions`. If a rank dies during a collective method, the group's own exception is raised.
    """

    def __init__(
        self,
        run_directory: Path,
        *,
        run_id: str,
        group: RowGroup,
        retention: Retention,
        memory_bytes: int | None = None,
        keeps_states: bool = False,
        options: CheckpointOptions = CheckpointOptions(),
    ) -> None:
        weights = options.weights
        if weights is not None and len(weights) != group.world_size:
            raise ValueError(f"{len(weights)} weights for {group.world_size} ranks: expected one for each rank")
        shares = tuple(float(weight) for weight in weights or [1.0] * group.world_size)
        place = Place(Path(run_directory), retention, options.patience_s, options.underway_s)
        self._setting = CheckpointContext(place, run_id, group, shares, options.clock)
        self._publisher = Publisher(place)  # only used on rank zero
        self._is_polite, self._memory_bytes, self._wants_to_keep = options.is_polite, memory_bytes, keeps_states
        self._background: Background | None = None
        self._node_bytes = 0
        self._layout: Layout | None = None  # of the latest tensors
        self._prepared: tuple[int, ...] = ()  # the keys of the layout that the memory was prepared for
        self._nonce = 0  # of the latest save
        self._known: list[int] = []  # the nonce of the newest commit, as far as this manager knows
        self._remains: Remains | None = None  # what earlier starts left in memory
        self._left: list[LeftState] = []  # the states in it, the same on all ranks
        self._needs_remains = False  # this start resumed from one of them

    def save(
        self,
        tensors: Mapping[str, Held],
        state: Mapping[str, Any],
        *,
        identity: Identity,
        nonce: int,
        kinds: Sequence[str],
    ) -> SaveResult:
        """Write one checkpoint and commit it; every rank calls it, with equal arguments besides `tensors`.

        `tensors` is what this rank holds: whole tensors, and sequences of TensorSlice. Together the ranks hold every
        element; what several of them hold is equal there, and one of them writes it. `state` is taken from rank zero:
        JSON, whose floats may be NaN or infinite, whose keys are strings, and which has no key "checkpoint". `nonce`,
        from 0 to 2^64 - 1, is fresh for every attempt. If the disk refuses on any rank, `ok` is False on all of them,
        and the older checkpoints stay. Raises ValueError or TypeError if something cannot be saved. Raises
        DisagreementError on all ranks if their other arguments differ, if a tensor's shape or type does, or if no rank
        holds some element.
        """
        check_state(state)

        def run(layout: Layout) -> SaveResult:
            plan = make_plan(self._setting, layout, identity=identity, nonce=nonce, kinds=kinds)
            return Save(self._setting, plan, self._publisher).run(tensors, state)

        result = self._with_layout(tensors, run)
        self._heed(result, nonce)
        return result

    def _with_layout(self, tensors: Mapping[str, Held], action: Callable[[Layout], _T]) -> _T:
        """The result of an action that opens with a row; again if that shows that the ranks hold different things."""
        self._layout = lay_out(self._setting, tensors, self._layout)
        try:
            return action(self._layout)
        except HoldingsDifferError as difference:
            self._layout = describe(self._setting, tensors, difference.rows)
        return action(self._layout)

    def prepare(self, tensors: Mapping[str, Held]) -> str | None:
        """Prepare to save tensors like these while training continues: allocate memory, start the writer process.

        Every rank calls it. If a node lacks the memory or a way to share it, returns the reason, equal on all ranks;
        `begin` then saves while training waits. It may be called again for other tensors.
        """
        return self._with_layout(tensors, self._prepare)

    def _prepare(self, layout: Layout) -> str | None:
        self._release()
        self._prepared = layout.keys
        size = arena_bytes(image_bytes(layout.parts[self._setting.group.rank]))
        needs = exchange(self._setting.group, Row(bytes=size, text=node_name(), nonce=layout.key))
        check_holdings(needs)
        sizes = [need.bytes for need in needs if need.text == node_name()]
        refusal = None
        for slots in (2, 1) if self._wants_to_keep else (1,):
            refusal = self._take_memory(layout.parts, sizes, slots)
            exchange(self._setting.group, Row())  # all have freed the memory that some could not get
            if refusal is None:
                break
        return refusal

    def _is_ready(self, plan: Plan, layout: Layout) -> bool:
        """Whether the memory was prepared for this layout; the same on all ranks."""
        background = self._background
        return background is not None and background.fits(plan) and self._prepared == layout.keys

    def _take_memory(self, parts: Parts, sizes: Sequence[int], slots: int) -> str | None:
        """Allocate this many slots on every rank, or none on any of them and return the reason; collective."""
        row = Row()
        try:
            check_memory([slots * size for size in sizes], allowed=self._memory_bytes)
            self._background = Background(
                self._setting, parts, self._publisher, is_polite=self._is_polite, slots=slots
            )  # fmt: skip
        except OSError as error:
            row = failure_row(error)
        refusal = first_failure(exchange(self._setting.group, row))
        if refusal is not None:
            self._release()
        self._node_bytes = slots * sum(sizes)
        return refusal

    def begin(
        self,
        tensors: Mapping[str, Held],
        state: Mapping[str, Any],
        *,
        identity: Identity,
        nonce: int,
        kinds: Sequence[str],
        at_once: Collection[str],
    ) -> SaveResult | None:
        """As `save`, but training continues meanwhile; every rank calls it. Returns a result only if already over.

        Tensors named in `at_once` may change as soon as this returns, the others after `settle`. From then on
        every rank calls `go_on` whenever `is_busy` has become False on all ranks, until it returns the result, and
        `cancel` if `has_failed` is True on a rank. If the tensors differ in kind from those given to `prepare`, it is
        called again; without `prepare` they are saved synchronously.
        """
        check_state(state)
        is_prepared = self._background is not None

        def start(layout: Layout) -> SaveResult | None:
            plan = make_plan(self._setting, layout, identity=identity, nonce=nonce, kinds=kinds)
            if is_prepared and not self._is_ready(plan, layout):
                self._prepare(layout)  # the optimizer's state or the division of the bytes has changed
            background = self._background
            self._nonce = nonce
            if background is None:
                return Save(self._setting, plan, self._publisher).run(tensors, state)
            return background.begin(plan, tensors, state, at_once=at_once, known=self._known)

        return self._heed(self._with_layout(tensors, start), nonce)

    def keep(
        self,
        tensors: Mapping[str, Held],
        state: Mapping[str, Any],
        *,
        identity: Identity,
        nonce: int,
        at_once: Collection[str],
    ) -> bool:
        """Copy a state to this node's memory, where the next start finds it if this one is killed; nothing is written.

        Every rank calls it, with arguments as for `save`, if `keeps_states`, once `is_sealed` was True on all of them.
        Two states are kept; the older one is replaced. `at_once` and `settle` work as with `begin`. Returns False if it
        was not kept: its data besides tensors are too large, or its layout is not the current save's. After states that
        were the same whole tensors on all ranks, call `prepare` before the first one with slices: `keep` exchanges
        nothing as long as the ranks are replicas.
        """
        check_state(state)

        def start(layout: Layout) -> bool:
            plan = make_plan(self._setting, layout, identity=identity, nonce=nonce, kinds=["time"])
            if not self._is_ready(plan, layout):
                if self.is_underway:
                    return False
                self._prepare(layout)
            background = self._background
            if background is None or not background.keeps_states:
                return False
            return background.keep(plan, tensors, state, at_once=at_once, known=self._known)

        return self._with_layout(tensors, start)

    @property
    def keeps_states(self) -> bool:
        """Whether there is room to keep a state in memory; the same on all ranks."""
        return self._background is not None and self._background.keeps_states

    @property
    def is_sealed(self) -> bool:
        """Whether the newest state in memory, if there is one, could be recovered after the death of this rank."""
        return not self.keeps_states or (self._background is not None and self._background.is_sealed)

    @property
    def keeping_s(self) -> float:
        """Seconds that the last `keep` took on this rank, with its checksums; 0 before the first one has ended."""
        return self._background.keeping_s if self._background is not None else 0.0

    def _heed(self, result: SaveResult | None, nonce: int) -> SaveResult | None:
        """Act on the result of a save, if there is one; the same on all ranks."""
        if result is not None and result.ok:
            self._known = [nonce]
            self._release_remains()  # a file is newer
        if result is not None and result.ok and self._background is not None:
            # if the disks are unequal, the next save divides the bytes differently
            weights = better_weights(self._background.last_sizes, self._background.last_seconds)
            # of slices, most are written by the only rank that holds them, whatever the weights
            if weights is not None and self._layout is not None and self._layout.is_equal:
                self._setting = replace(self._setting, weights=weights)
        return result

    @property
    def node_memory_bytes(self) -> int:
        """Bytes of this node's memory that its ranks hold for states that wait to be written."""
        return self._node_bytes if self._background is not None else 0

    @property
    def is_underway(self) -> bool:
        """Whether a save is in progress; the same on all ranks."""
        return self._background is not None and self._background.is_underway

    @property
    def share(self) -> float:
        """The fraction of this rank's part of the current save that is known to be written, from 0 to 1."""
        return self._background.share if self._background is not None else 0.0

    @property
    def is_busy(self) -> bool:
        """Whether the current save is still waiting for this rank."""
        return self._background is not None and self._background.is_busy

    @property
    def has_failed(self) -> bool:
        """Whether this rank's part of the current save has failed, as of the last call of `is_busy`."""
        return self._background is not None and self._background.has_failed

    def cancel(self) -> None:
        """Give up this rank's part of the current save because another rank's `has_failed` is True. Any rank, alone."""
        if self._background is not None:
            self._background.cancel()

    def settle(self) -> None:
        """Wait until all tensors of the last `begin` may change; no wait if there is no copy. Any rank, alone."""
        if self._background is not None:
            self._background.settle()

    def go_on(self) -> SaveResult | None:
        """Take the current save one event further, once no rank is busy. Every rank calls it."""
        assert self._background is not None, "nothing is under way"
        return self._heed(self._background.go_on(), self._nonce)

    def finish(self) -> SaveResult | None:
        """Wait for the current save, if there is one, and return its result. Every rank calls it."""
        return self._heed(self._background.finish(), self._nonce) if self._background is not None else None

    def give_up(self, step: int, *, nonce: int, kinds: Sequence[str], error: str) -> SaveResult:
        """Report a save that an earlier manager of this run began and did not finish; rank zero logs and notes it."""
        result = SaveResult(self._setting.root / attempt_name(step, nonce), False, error, 0, 0.0, 0.0)
        if self._setting.is_rank_zero:
            say(result, step=step)
            row = {"run": self._setting.run_id, "step": step, "tier": "persistent", "kinds": "+".join(kinds)}
            now = utc_text(int(self._setting.clock()))
            self._publisher.note({"time_utc": now, **row, "bytes": 0, "result": "failed", "error": error})
        return result

    def close(self, *, has_failed: bool = False, is_hasty: bool = False) -> None:
        """Release memory and process. The next start completes the current save if it can. `is_hasty` is for ranks
        that continue and will repeat a save that is given up.

        With `has_failed` the newest state stays in memory for the next start. A state that an earlier start left there
        stays too if this start resumed from it and has saved nothing since.
        """
        self._release(keep=has_failed, is_hasty=is_hasty)
        # also arenas that a killed rank had created before its own writer had heard of them
        await_writers(self._setting.run_id, patience_s=0.0)
        if has_failed or self._needs_remains:
            self._release_remains(remove=False)
        else:
            self._release_remains()

    def _release(self, *, keep: bool = False, is_hasty: bool = False) -> None:
        if self._background is not None:
            self._background.close(keep=keep, is_hasty=is_hasty)
            self._background = None

    def _release_remains(self, *, remove: bool = True) -> None:
        if self._remains is not None:
            self._remains.close(remove=remove)
            self._remains, self._left, self._needs_remains = None, [], False

    def load(
        self,
        which: str = "latest",
        *,
        into: Mapping[str, Held] | None = None,
        fits: Callable[[Loaded], bool] | None = None,
        wanted: Callable[[Loaded], Wanted | None] | None = None,
    ) -> Loaded | None:
        """The state that `which` names, every byte verified; every rank calls it and gets the same.

        "latest" is the newest checkpoint that verifies, or None if there is none at all; "best"; a step number; or a
        path: the folder of a checkpoint, or of another run, meaning that run's latest. Raises CheckpointRefused on all
        ranks if nothing can be loaded, or if a checkpoint that was named explicitly is damaged.

        A tensor whose name is in `into`, with equal shape and type and in contiguous CPU memory, is read into
        that memory, and is `into[name]` in the result; the others get new memory. `fits` is called before a
        checkpoint's tensors are read, with a Loaded whose tensors have shapes and types alone (device "meta");
        if it returns False, `into` is not used for it. If this raises, and under names that the result lacks, `into`
        may hold unverified values: do not use them. If this returns None, `into` is unchanged.

        `wanted`, given on all ranks or on none, is called after `fits` with the same Loaded, and returns what this rank
        wants: for each name the elements (begin, end) in row-major order, sorted and disjoint; None is everything.
        Tensors that it does not name are read whole. The result has a tuple of TensorSlice for each name that it names,
        empty if it named no elements; `into` may lend a whole tensor or slices for them. Each rank reads what it wants,
        and the ranks together verify every byte before any of them gets the state. Raises ValueError for elements that
        do not exist.
        """
        load = Load(
            self._setting, which, into=into or {}, fits=fits, wanted=wanted, remains=self._remains, left=self._left
        )
        loaded = load.run()
        self._needs_remains = loaded is not None and loaded.is_from_memory
        return loaded

    def list(self) -> Commits:
        """All commits of this run, newest first, parsed but not verified. Any rank, alone."""
        found = scan(self._setting.root)
        for path, error in found.refused.items():
            logger.warning("%s", describe_choice(path, error))
        return found.commits

    def latest(self) -> Commit | None:
        """The newest commit whose small files verify (the tensors' bytes are not read). Any rank, alone."""
        return newest_verified(self._setting.root)

    def verify(self, commit: Commit, deep: bool = True) -> Sentences:
        """The problems of a checkpoint, one sentence per file; empty if there are none. Any rank, alone."""
        return verify(commit, deep=deep)

    def recover(self) -> Sentences:
        """At the start of a run, before `load`: complete attempts that lack only a commit, remove incomplete ones.

        Every rank calls it; rank zero acts and returns one sentence for each thing it did, the others return none. If
        the disk refuses, a warning is logged. Waits for the writers that a killed start of this run left on this node;
        from then on, "latest" may also mean a state that it left in memory.
        """
        done: Sentences = []
        for path in await_writers(self._setting.run_id, patience_s=WRITERS_S):
            logger.warning(
                "a writer of an earlier start of this run is still running after %.0f s: %s", WRITERS_S, path
            )
        exchange(self._setting.group, Row())  # on every node
        if self._setting.is_rank_zero:
            self._setting.place.quietly("tidy up", lambda: self._recover(done))
        self._remains = Remains(self._setting.run_id, self._setting.run_directory)
        row = Row()
        if self._setting.is_rank_zero:
            commits: Commits = []
            self._setting.place.quietly(
                "look for checkpoints", lambda: commits.extend(scan(self._setting.root).commits)
            )
            row = Row(place=1, nonce=commits[0].attempt.nonce) if commits else row
        told = exchange(self._setting.group, row)[0]  # no rank looks for a checkpoint before this is over
        self._known = [told.nonce] if told.place else []
        self._left = find_states(self._setting.group, self._remains.parts)
        return done

    @property
    def known(self) -> tuple[int, ...]:
        """The nonces of the commits that the current state follows, as far as this rank knows."""
        return tuple(self._known)

    def succeed(self, known: Sequence[int]) -> None:
        """Replaces `recover` if other ranks continued from an earlier manager of this same run: nothing is read.

        `known` comes from that manager. States that dead ranks left in memory are freed by the next save. Any rank,
        alone.
        """
        self._known = list(known)
        self._remains = Remains(self._setting.run_id, self._setting.run_directory, are_images=False)

    def forget_images(self) -> None:
        """Unmap images that an earlier start left: newer ones are in memory (`checkpoint.images`), which frees them."""
        if self._remains is not None:
            self._remains.forget_images()

    def keep_best_until(self, step: int) -> None:
        """Keep the best checkpoint of the steps until `step` for good; every rank, before the first save."""
        place = self._setting.place
        place = replace(place, retention=replace(place.retention, reset_step=step))
        self._setting, self._publisher = replace(self._setting, place=place), Publisher(place)

    def newest_step(self) -> int:
        """The step of the newest checkpoint, or of a newer state in memory after it; 0: none. Rank zero, alone."""
        newest, listed = self.latest(), scan(self._setting.root).commits
        steps = [state.order[0] for state in believed(self._left, listed[0] if listed else None)]
        return max([newest.identity.step if newest is not None else 0, *steps])

    def _recover(self, done: Sentences) -> None:
        root = self._setting.root
        if not root.is_dir():
            return
        for commit in complete_newer(root, newest_verified(root)):
            done.append(f"completed {commit.path}, which lacked only its commit")
        newest = newest_verified(root)
        if newest is not None:
            for path in remove_litter(root, newest, generation=newest.identity.generation):
                done.append(f"removed {path}, which was never committed")
            write_latest(root, newest)
        remove_temporaries(root)
        for sentence in done:
            logger.info("%s", sentence)
