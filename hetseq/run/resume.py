"""Resuming a run: which checkpoint `--resume` means here, and which parts of it are used.

The same command resumes from the newest commit. Options that reset something (`--reset-*`) do so once: a job that is
killed and requeued with the same command must not reset it every time, so a checkpoint remembers the steps at which
that happened.

If the ranks use several run directories, each directory group offers the checkpoint in its own, the newest offer wins,
and groups that lack it receive it over the network. A failure is an offer too: no group raises before all have heard.

A checkpoint is read, or received, straight into the model, so that its parameters are never held twice. It is checked
before: a checkpoint that `resume` would refuse is read beside the model, which keeps its values until the refusal.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hetseq.checkpoint import CheckpointManager, Loaded, Retention, TooNewError
from hetseq.checkpoint.directory import scan
from hetseq.checkpoint.target_memory import Wanted
from hetseq.comm.directory_groups import DirectoryGroups
from hetseq.comm.group import Group
from hetseq.config.sections import CheckpointConfig, flag
from hetseq.data.plan import GlobalBatch, Position
from hetseq.errors import CheckpointError, CheckpointMismatch, CheckpointRefused, PeerLostError
from hetseq.monitor.metrics import Metrics
from hetseq.parallel.base_parameters import SAME_BASE
from hetseq.parallel.replica import Replica
from hetseq.parallel.task_state import without_place
from hetseq.run.checkpointing import STATE_VERSION, Provenance, Saver, read_state, saved_batch
from hetseq.run.recipe import changes
from hetseq.run.state_transfer import complete_rows, send_checkpoint
from hetseq.run_directory import RunDirectory
from hetseq.training.controller import TrainingState

logger = logging.getLogger(__name__)

_NEWEST = 2  # checkpoints kept where no option says how many; of a run without an end, of each kind
RESETS = ("dataloader", "lr_scheduler", "meters", "optimizer")


def retention_of(config: CheckpointConfig, root: Path, *, has_end: bool) -> Retention:
    """How many checkpoints in `root` are kept if no option sets it.

    The newest and the best without any option about saving; otherwise all, and of a run without an end the newest of
    each kind, unless starts that had an end left more.
    """
    if not config.says_when_to_save:
        return Retention(keep_newest=_NEWEST)
    unsaid = -1
    if not has_end:
        kinds = Counter(kind for commit in scan(root).commits for kind in commit.kinds)
        # one more exists while a save replaces it
        unsaid = _NEWEST if max(kinds["epoch"], kinds["interval"]) <= _NEWEST + 1 else -1
    interval, epochs = (unsaid if n is None else n for n in (config.keep_interval_updates, config.keep_last_epochs))
    return Retention(interval, epochs, keep_every=config.keep_every_updates)


def open_checkpoints(
    config: CheckpointConfig,
    directory: RunDirectory,
    group: Group,
    *,
    has_end: bool = True,
    keeps_states: bool = True,
    known: Sequence[int] | None = None,
) -> CheckpointManager:
    """The run's checkpoints; those that lacked only their commit are completed. Collective.

    With `keeps_states` states stay in memory too, unless the options say never. With `known`, the nonces of the commits
    that precede the present state, the run continues without a search.
    """
    retention = retention_of(config, directory.checkpoints, has_end=has_end)
    if known is None and retention.keep_newest is not None and not config.no_save:
        logger.info(
            "the newest %d checkpoints of this run and the best one stay; --keep-last-epochs -1 keeps one of each"
            " epoch",
            retention.keep_newest,
        )
    elif not has_end and known is None and config.keep_last_epochs is None and retention.keep_last_epochs > 0:
        logger.info(
            "of its checkpoints the best one and the newest %d of epochs stay, as it has no end; --keep-last-epochs -1"
            " keeps one of each epoch", retention.keep_last_epochs,
        )  # fmt: skip
    manager = CheckpointManager(
        directory.path, run_id=directory.run_id, group=group, retention=retention,
        memory_bytes=config.memory_buffer_bytes(), keeps_states=keeps_states and config.memory_interval_updates != 0,
    )  # fmt: skip
    if known is None:
        manager.recover()
    else:
        manager.succeed(known)
    return manager


@dataclass(frozen=True)
class Beginning:
    """The checkpoint that a run resumes from; equal on all ranks except for the path and `is_received`."""

    loaded: Loaded
    is_own: bool  # of this run, not of another run that this one starts from
    is_received: bool  # over the wire, because the directory of this rank lacks it
    source: int = 0  # the rank whose directory had it


@dataclass(frozen=True)
class Target:
    """The replica that takes a checkpoint on this rank, and what the command line says about the run."""

    replica: Replica
    here: Provenance
    is_explicit_batch: bool

    def accepts(self, loaded: Loaded, config: CheckpointConfig, *, is_own: bool) -> bool:
        """Whether `resume` would accept it; needs only the shapes and types of its tensors."""
        try:
            _check_version(loaded)
            resets, _ = _agree(loaded, config, self.here, is_own=is_own, is_explicit_batch=self.is_explicit_batch)
            _check_fit(self.replica, loaded, resets)
        except CheckpointMismatch:
            return False
        return True


def choose_checkpoint(
    manager: CheckpointManager,
    config: CheckpointConfig,
    directory: RunDirectory,
    sharing: DirectoryGroups,
    target: Target | None = None,
) -> Beginning | None:
    """The checkpoint that --resume means here; None: begin without one. Collective.

    It is loaded into the model of `target` as far as it fits; without one, into memory of its own. Going back within
    one run is refused: which checkpoint is the latest would be ambiguous. Raises CheckpointMismatch, or
    CheckpointRefused if a checkpoint cannot be used, on all ranks alike; the model may then hold anything.
    """
    which = config.which_checkpoint
    sight = _look_around(manager, which, directory, sharing)
    newest_step = sight.newest_step
    if which == "none":
        if newest_step:
            place = sharing.text_of(sight.newest_at, str(directory.path))
            raise CheckpointMismatch(
                f"--resume none, but {place} holds checkpoints up to step {newest_step}:"
                " begin anew in another --save-dir"
            )
        return None
    is_path = which not in ("latest", "best") and not which.isdigit()
    if newest_step and is_path and sight.is_elsewhere:
        logger.info("--resume %s was the beginning of this run, which has continued since", which)
        which = "latest"
    into = target.replica.model_tensors() if target is not None else {}
    reads_parts = target is not None and target.replica.owned is not None and sharing.count == 1
    is_whole = target is not None and target.replica.has_parameters and target.replica.divided is None
    if target is not None and (reads_parts or not is_whole):
        into = target.replica.common_model_tensors()

    def accepts(loaded: Loaded, is_own: bool) -> bool:
        return target is not None and target.accepts(loaded, config, is_own=is_own)

    def wanted(loaded: Loaded, is_own: bool) -> Wanted | None:
        """Of a checkpoint that fits, what this rank owns; another one is read whole, and refused by all ranks alike."""
        assert target is not None
        return target.replica.wanted(loaded.tensors) if accepts(loaded, is_own) else None

    beginning = _load_newest(
        manager, which, directory, sharing, into=into, accepts=accepts, wanted=wanted if reads_parts else None
    )  # fmt: skip
    if beginning is not None and which != "latest" and beginning.loaded.identity.step < newest_step:
        place = sharing.text_of(sight.newest_at, str(directory.path))
        raise CheckpointMismatch(
            f"--resume {which} is step {beginning.loaded.identity.step}, but {place} has reached step"
            f" {newest_step}: go back in another directory, --save-dir NEW --resume {beginning.loaded.path}"
        )
    return beginning


@dataclass(frozen=True)
class _Sight:
    """The content of the run directories, and where --resume is, as their writers see it."""

    newest_step: int  # of the newest checkpoint of all, 0 if there is none
    newest_at: int  # the rank that writes the directory with it
    is_elsewhere: bool  # a path outside every run directory


def _look_around(manager: CheckpointManager, which: str, directory: RunDirectory, sharing: DirectoryGroups) -> _Sight:
    """Only writers look: other ranks of a directory may see an older list of its files. Collective."""
    row, trouble = [0, 0, 0, 0], ""
    if sharing.is_writer:
        try:
            is_inside = _is_below(which, str(directory.path))
            row = [0, manager.newest_step(), os.path.isdir(which), is_inside]
        except (OSError, ValueError, CheckpointError) as error:
            row, trouble = [1, 0, 0, 0], f"{directory.path} cannot be read: {error}"
    seen = sharing.gather(row)  # (directory groups, 4)
    if seen[:, 0].any():
        raise CheckpointRefused(sharing.text_of(sharing.writers[int(seen[:, 0].argmax())], trouble))
    is_folder, is_inside = seen[:, 2] == 1, seen[:, 3] == 1
    place = int(seen[:, 1].argmax())
    is_elsewhere = bool((is_folder & ~is_inside).any()) and not bool((is_folder & is_inside).any())
    return _Sight(int(seen[place, 1]), sharing.writers[place], is_elsewhere)


@dataclass(frozen=True)
class Offer:
    """The checkpoint that one directory group could resume from; equal names mean equal states."""

    has_failed: bool = False
    is_fatal: bool = False  # no other group's offer can replace it
    is_there: bool = False
    is_own: bool = False
    order: tuple[int, int] = (0, 0)  # step and generation
    name: tuple[int, ...] = ()  # lineage, nonce, run id

    def pack(self) -> list[int]:
        flags = [self.has_failed, self.is_fatal, self.is_there, self.is_own]
        return [*map(int, flags), *self.order, *(self.name or (0, 0, 0))]

    @staticmethod
    def unpack(words: Sequence[int]) -> Offer:
        has_failed, is_fatal, is_there, is_own = map(bool, words[:4])
        return Offer(has_failed, is_fatal, is_there, is_own, (words[4], words[5]), tuple(words[6:]))


def best_offer(offers: Sequence[Offer]) -> int | None:
    """The place of the newest offer, the first of equals; None if there is none."""
    there = [place for place, offer in enumerate(offers) if offer.is_there]
    return max(there, key=lambda place: (offers[place].order, -place), default=None)


def _load_newest(
    manager: CheckpointManager,
    which: str,
    directory: RunDirectory,
    sharing: DirectoryGroups,
    *,
    into: Mapping[str, Tensor],
    accepts: Callable[[Loaded, bool], bool],
    wanted: Callable[[Loaded, bool], Wanted | None] | None,
) -> Beginning | None:
    """The newest of the checkpoints that the directory groups find for `which`, on every rank. Collective.

    A received checkpoint overwrites everything that this group has read into the model, or is refused by `resume`.
    """

    def is_own(found: Loaded) -> bool:
        return _is_below(str(found.path), str(directory.path))

    loaded, error = _load(
        manager, which, into, lambda found: accepts(found, is_own(found)),
        None if wanted is None else lambda found: wanted(found, is_own(found)),
    )  # fmt: skip
    mine = _offer(loaded, error, directory)
    rows = [Offer.unpack(row) for row in sharing.whole.all_gather_rows(np.array(mine.pack(), np.int64)).tolist()]
    offers = [rows[writer] for writer in sharing.writers]
    refusal = str(error or "")
    fatal = next((rank for rank, offer in enumerate(rows) if offer.is_fatal), None)
    winner = best_offer(offers)
    if fatal is None and winner is None:
        fatal = next((rank for rank, offer in zip(sharing.writers, offers) if offer.has_failed), None)
    if fatal is not None:
        told = sharing.text_of(fatal, refusal)
        if mine.is_fatal and error is not None:
            raise error
        raise CheckpointRefused(told) if which == "latest" else CheckpointMismatch(f"--resume {which}: {told}")
    if winner is None:
        return None
    has_it = [offer.is_there and offer.name == offers[winner].name for offer in offers]
    if not all(has_it):
        source = sharing.writers[winner]
        if not has_it[sharing.number]:
            _say_what_is_lacking(directory, loaded, error, sharing, source)
            loaded = None  # the received one needs its memory
        is_own_there = offers[winner].is_own
        loaded = send_checkpoint(
            sharing, loaded, source=source, has_it=has_it[sharing.number], into=into,
            fits=lambda sent: accepts(sent, is_own_there),
        )  # fmt: skip
    assert loaded is not None, "a group without an offer has just received one"
    return Beginning(loaded, offers[winner].is_own, not has_it[sharing.number], sharing.writers[winner])


def _say_what_is_lacking(
    directory: RunDirectory, loaded: Loaded | None, error: Exception | None, sharing: DirectoryGroups, source: int
) -> None:
    has = "no checkpoint" if loaded is None else f"only the checkpoint of step {loaded.identity.step}"
    is_worth_a_warning = error is not None and sharing.is_writer
    logger.log(
        logging.WARNING if is_worth_a_warning else logging.INFO,
        "%s has %s: the run resumes from one in the directory of rank %d",
        directory.path, f"none that can be used ({error})" if error else has, source,
    )  # fmt: skip


def _load(
    manager: CheckpointManager,
    which: str,
    into: Mapping[str, Tensor],
    fits: Callable[[Loaded], bool],
    wanted: Callable[[Loaded], Wanted | None] | None,
) -> tuple[Loaded | None, Exception | None]:
    try:
        return manager.load(which, into=into, fits=fits, wanted=wanted), None
    except PeerLostError:
        raise  # no peer is left to tell
    except Exception as error:
        return None, error


def _offer(loaded: Loaded | None, error: Exception | None, directory: RunDirectory) -> Offer:
    if loaded is None:
        is_fatal = isinstance(error, TooNewError) or not isinstance(error, CheckpointError)
        return Offer(has_failed=error is not None, is_fatal=error is not None and is_fatal)
    identity = loaded.identity
    name = [int(identity.lineage, 16), loaded.nonce, int(sha256(loaded.run_id.encode()).hexdigest()[:16], 16)]
    return Offer(
        is_there=True,
        is_own=_is_below(str(loaded.path), str(directory.path)),
        order=(identity.step, identity.generation),
        name=tuple(number - 2**64 if number >= 2**63 else number for number in name),
    )


def begin_from(
    beginning: Beginning, directory: RunDirectory, saver: Saver, sharing: DirectoryGroups, *, metrics: Metrics
) -> None:
    """Write into the run directory that the run resumes, once no rank can refuse any more. Collective.

    A directory that lacked the checkpoint, or rows of the steps before it, receives them and is complete again.
    """
    loaded = beginning.loaded
    complete_rows(
        directory, sharing, step=loaded.identity.step, source=beginning.source, is_received=beginning.is_received
    )
    fields = {
        "path": None if loaded.is_from_memory else str(loaded.path),
        "refused": loaded.skipped,
        "received": beginning.is_received,
    }
    metrics.complete(loaded.state.get("rows", ()) if beginning.is_own else ())
    metrics.event("resume", step=loaded.identity.step, **fields)
    is_lacking = beginning.is_received or loaded.is_from_memory
    saver.adopt(loaded if is_lacking and beginning.is_own else None, step=loaded.identity.step)


def resume(
    beginning: Beginning, config: CheckpointConfig, replica: Replica, here: Provenance, *, is_explicit_batch: bool
) -> tuple[TrainingState, Provenance]:
    """Put a checkpoint into the replica; returns the state to resume from and the provenance from now on.

    On resume the command line overrides everything that is not part of the provenance. Raises CheckpointMismatch.
    """
    loaded, is_own = beginning.loaded, beginning.is_own
    saved = loaded.state
    _check_version(loaded)
    _say_what_is_not_repeated(loaded, config, is_own=is_own)
    resets, batch = _agree(loaded, config, here, is_own=is_own, is_explicit_batch=is_explicit_batch)
    if batch != here.batch:
        logger.info(
            "the global batch stays %s, as in the checkpoint (the options would give %s)",
            _in_words(batch),
            _in_words(here.batch),
        )
    here = dataclasses.replace(here, batch=batch)
    _check_fit(replica, loaded, resets)
    replica.load_model(loaded.tensors)
    if "optimizer" not in resets:
        if saved["updates"] and saved["optimizer_numbers"] is None:
            logger.warning("%s holds no optimizer state: the optimizer starts afresh", loaded.path)
        replica.load_optimizer(loaded.tensors, saved["optimizer_numbers"] or {})
    state = read_state(saved)
    replica.task_state.step = loaded.identity.step
    if "task_state" in saved:  # not written before 2026-11
        if "dataloader" in resets:
            saved = {**saved, "task_state": without_place(saved["task_state"])}
        if "meters" in resets and not replica.task_state.is_script:
            _say_what_the_task_forgets(saved["task_state"])
        else:
            replica.task_state.load(loaded.tensors, saved["task_state"])
            state.ended_by_task = state.ended_by_task and replica.task_state.stays_ended
    if "dataloader" in resets:
        state.position = Position(state.position.step, 1, 0)
    if "lr_scheduler" in resets:
        state.updates, state.decay_steps = 0, None
    if "meters" in resets:
        state.best, state.ended_by_task = None, False
    state.resets = {**(state.resets if is_own else {}), **dict.fromkeys(resets, loaded.identity.step)}
    is_in_run = is_own and not loaded.is_from_memory
    place = "/".join(loaded.path.parts[-2:]) if is_in_run else loaded.place
    logger.info("resuming after step %d (%s)", loaded.identity.step, place)
    if changed := changes(saved.get("recipe", {}), here.recipe):  # not written before 2026-11
        logger.info("changed since step %d: %s", loaded.identity.step, ", ".join(changed))
    return state, here


def _say_what_the_task_forgets(record: Mapping[str, Any]) -> None:
    factor, forgets = record["learning_rate_factor"], []
    if record["values"]:
        forgets.append(f"its own state ({', '.join(record['values'])})")
    if factor != 1:
        forgets.append(f"its learning_rate_factor {factor:g}")
    if forgets:
        logger.info("--reset-meters: the task begins without %s", " and ".join(forgets))


def _check_version(loaded: Loaded) -> None:
    version = loaded.state.get("state_version")
    if version != STATE_VERSION:
        raise CheckpointMismatch(f"{loaded.path}: state version {version}, this HetSeq reads {STATE_VERSION}")


def _agree(
    loaded: Loaded, config: CheckpointConfig, here: Provenance, *, is_own: bool, is_explicit_batch: bool
) -> tuple[list[str], GlobalBatch]:
    """The resets to do now and the global batch to continue with. Raises CheckpointMismatch."""
    saved = loaded.state
    done = _resets_done(loaded, config, is_own=is_own)
    resets = [name for name in RESETS if getattr(config, f"reset_{name}") and name not in done]
    batch = choose_batch(saved, here.batch, is_explicit=is_explicit_batch, resets_data="dataloader" in resets)
    check_provenance(saved, here, resets)
    return resets, batch


def _check_fit(replica: Replica, loaded: Loaded, resets: Sequence[str]) -> None:
    """Raise CheckpointMismatch if the checkpoint does not fit the replica."""
    numbers = loaded.state["optimizer_numbers"] or {}
    names = [name for name in (*loaded.tensors, *numbers) if name.startswith("optim.")]
    replica.check(replica.outlines(loaded.tensors), [] if "optimizer" in resets else names)


def _resets_done(loaded: Loaded, config: CheckpointConfig, *, is_own: bool) -> dict[str, int]:
    """The --reset-* options of this command that this run has done already, each with its step.

    A run that its task has ended since then is meant to continue: its meters are reset again.
    """
    done = dict(loaded.state["resets"]) if is_own else {}
    if loaded.state.get("ended_by_task"):
        done.pop("meters", None)
    return {
        name: done[name]
        for name in RESETS
        if getattr(config, f"reset_{name}") and name in done and done[name] < loaded.identity.step
    }


def _say_what_is_not_repeated(loaded: Loaded, config: CheckpointConfig, *, is_own: bool) -> None:
    for name, step in _resets_done(loaded, config, is_own=is_own).items():
        logger.info(
            "--reset-%s was done at step %d of this run and is not repeated; to do it again resume in another"
            " directory, with --save-dir NEW --resume %s",
            name.replace("_", "-"),
            step,
            config.save_dir,
        )


def nothing_to_do(config: CheckpointConfig, state: TrainingState) -> CheckpointMismatch:
    """The refusal of a run that begins at the end of another one and would end there too."""
    if state.ended_by_task:
        return CheckpointMismatch(
            f"--resume {config.restore_file}: the task's after_step ended that run with step {state.position.step - 1},"
            " where this command would end before its first step: begin a new phase with --reset-meters, which forgets"
            " that, the best metric and the task's own state"
        )
    anew = [
        f"{counted} anew with {flag(name)}"
        for name, counted in (("reset_lr_scheduler", "updates"), ("reset_dataloader", "epochs"))
        if not getattr(config, name)
    ]
    or_else = f", or count {' and '.join(anew)}" if anew else ""
    return CheckpointMismatch(
        f"--resume {config.restore_file}, as this command takes it, has made {state.updates} updates and is in epoch"
        f" {state.position.epoch}, where this command would end before its first step: ask for more with --max-update"
        f" or --max-epoch, or for a smaller --min-lr{or_else}"
    )


def choose_batch(saved: Mapping[str, Any], asked: GlobalBatch, *, is_explicit: bool, resets_data: bool) -> GlobalBatch:
    """The global batch to continue with: the checkpoint's, unless the data begin anew.

    A different explicit --global-batch-size is refused; a product of --batch-size, ranks and --update-freq is not.
    """
    batch = saved_batch(saved)
    if resets_data or batch == asked:
        return asked
    if is_explicit:
        raise CheckpointMismatch(
            f"--global-batch-size {asked.samples} differs from the checkpoint's {_in_words(batch)}: leave it out,"
            " begin the data anew with --reset-dataloader, or choose another --save-dir"
        )
    return batch


def _in_words(batch: GlobalBatch) -> str:
    parts = [f"{batch.samples} samples" if batch.samples else "", f"{batch.tokens} tokens" if batch.tokens else ""]
    freq = "" if batch.update_freq == (1,) else f" x {','.join(map(str, batch.update_freq))}"
    return " or ".join(part for part in parts if part) + freq


_LANES_GIVEN = "give hetseq.Lanes the same lanes, length, window and seed, and no Lanes where there were none"


def check_provenance(saved: Mapping[str, Any], here: Provenance, resets: list[str]) -> None:
    """Raise CheckpointMismatch if the checkpoint belongs to a run with another result."""
    # older checkpoints have none of these
    saved = {"shuffle_block": None, "parts": None, "lanes": None, "base": None, **saved}
    if saved.get("vocabulary") is None or here.vocabulary is None:
        saved["vocabulary"] = here.vocabulary  # one of the two is unknown
    anew = ", or begin the data anew: --reset-dataloader"
    resets_data = "dataloader" in resets
    checks: list[tuple[str, bool, str]] = [
        ("task", False, "give the same --task"),
        ("vocabulary", False, "give the --data and the --dict that belong to it"),
        ("precision", False, f"give --precision {saved['precision']}"),
        ("base", False, SAME_BASE),
        (
            "optimizer",
            "optimizer" in resets,
            "give the same --optimizer, or begin with a fresh one: --reset-optimizer",
        ),
        ("seed", resets_data, f"give --seed {saved['seed']}{anew}"),
        ("split", resets_data, f"give --train-subset {saved['split']}{anew}"),
        ("parts", resets_data, f"{_parts_given(saved)}{anew}"),
        ("samples", resets_data, f"give the same --data, and the same options that make samples of it{anew}"),
        ("lanes", resets_data, f"{_LANES_GIVEN}{anew}"),
        ("curriculum", resets_data, f"give --curriculum {saved['curriculum']}{anew}"),
        ("unit_size", resets_data, f"{_given(saved, 'unit_size')}{anew}"),
        ("shuffle_block", resets_data, f"{_given(saved, 'shuffle_block')}{anew}"),
    ]
    for name, is_covered, remedy in checks:
        value = getattr(here, name)
        # older checkpoints do not contain the unit size
        if saved.get(name, value) != value and not is_covered:
            raise CheckpointMismatch(
                f"the checkpoint was trained with {name} {saved[name]}, this command says {value}: {remedy}; or choose"
                " another --save-dir"
            )


def _given(saved: Mapping[str, Any], name: str) -> str:
    value = saved.get(name)
    return f"leave out {flag(name)}" if value is None else f"give {flag(name)} {value}"


def _parts_given(saved: Mapping[str, Any]) -> str:
    if saved["parts"] is None:
        return "leave out --data-by-host"
    return "give --data-by-host, on hosts that have the same parts of the data"


def _is_below(path: str, folder: str) -> bool:
    inner, outer = os.path.realpath(path), os.path.realpath(folder)
    return os.path.commonpath([inner, outer]) == outer
