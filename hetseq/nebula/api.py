"""The functions of Nebula: set the place for tags, and find the tags there.

Responsible for: the one place that a script saves to, and finding verified tags there. Does not know how a state is
saved. The one idea: a request for a named tag returns that tag or raises, while the latest tag is the newest
that verifies to the last byte, so all names that a script loads from it belong to one moment.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from hetseq.checkpoint.records import DamagedError, TooNewError
from hetseq.errors import CheckpointError, ConfigError
from hetseq.nebula import ranks
from hetseq.nebula.checkpoint import Checkpoint
from hetseq.nebula.memory_budget import budget
from hetseq.nebula.publish import TagPlace
from hetseq.nebula.service import Rules, Service
from hetseq.nebula.slots import await_orphans
from hetseq.nebula.tags import TagCommit, check, numbers_in, scan, tag_of

logger = logging.getLogger(__name__)

_ORPHANS_S = 60.0
_PATIENCE_S = 600.0

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class _Script:
    """The settings that `init` gave this process; the service starts with the first tag."""

    def __init__(self) -> None:
        self.root: Path | None = None
        self.make: Callable[[bool | None], Service] | None = None
        self.together: bool | None = None
        self.service: Service | None = None
        self.pid = 0


_script = _Script()


def init(
    persistent_storage_path: str | os.PathLike[str],
    persistent_time_interval: float = 0,
    num_of_version_in_retention: int = -1,
    memory_buffer_size: int | str | None = None,
    *,
    overlap_with: Optimizers | None = None,
    together: bool | None = None,
) -> None:
    """Set where tags are saved; call it before the first Checkpoint. A second call closes what the first one began.

    `persistent_time_interval`: every tag is copied to memory, and at most one per this many seconds to disk (0: every
    tag). `num_of_version_in_retention`: tags kept on disk; -1 means all. `memory_buffer_size`: memory that the
    processes of this node may use for saved states, in bytes or as in "2GB".

    `overlap_with`: optimizers whose parameters and state change only in their `step`; `save` then copies those
    while the next forward and backward compute. `together`: whether all ranks of torch.distributed save one tag
    together, each its own names (default: if there are several ranks), or each process by itself.

    Raises ConfigError for an invalid argument.
    """
    _check_number("persistent_time_interval", persistent_time_interval, 0)
    keep = num_of_version_in_retention
    if type(keep) is not int or keep < -1 or keep == 0:
        raise ConfigError(f"num_of_version_in_retention is {keep!r}: expected a number of tags, or -1 for all of them")
    if isinstance(overlap_with, torch.optim.Optimizer):
        overlap_with = [overlap_with]
    rules = Rules(float(persistent_time_interval), budget(memory_buffer_size), tuple(overlap_with or ()))
    root = _directory(persistent_storage_path)
    close()

    def make(together: bool | None) -> Service:
        rank, world_size = ranks.world() if together is not False else (0, 1)
        if together and world_size == 1:
            raise ConfigError("together=True without several ranks: call torch.distributed.init_process_group before")
        place = TagPlace(root, keep, rank, _PATIENCE_S)
        return Service(place, rules, world_size=world_size, agree=ranks.of_rank_zero)

    await_orphans(root, patience_s=_ORPHANS_S)
    _script.root, _script.make, _script.together = root, make, together


def service() -> Service:
    """The service that saves the tags of this process; ConfigError before `init`."""
    if _script.make is None:
        raise ConfigError("no place to save to: call hetseq.nebula.init(persistent_storage_path) first")
    if _script.service is None or _script.pid != os.getpid():
        _script.service, _script.pid = _script.make(_script.together), os.getpid()
        atexit.register(_close_at_exit)
    return _script.service


def place() -> Path | None:
    """The directory for tags that `init` was given."""
    return _script.root


def save_alone() -> None:
    """For adapters that save on rank zero alone; ConfigError if several ranks have begun a tag together."""
    owner = _script.service
    if owner is not None and owner.is_shared:
        raise ConfigError("rank 0 saves alone here: pass together=False to hetseq.nebula.init")
    _script.together = False


def close() -> None:
    """Finish all requested saves, wait for them, and free the memory. A script's normal end does the same.

    CheckpointError if the newest tag could not be saved. `init` may be called again.
    """
    _close(is_normal=True)


def flush_persistence(timeout: float | None = None) -> None:
    """Complete the open tag, send the newest tag to the disk and wait for it, at most `timeout` seconds.

    CheckpointError if it could not be saved, TimeoutError if it takes longer. With several ranks every rank calls it.
    """
    if _script.service is not None:
        _script.service.flush(timeout)


def list_checkpoints(persist_path: str | os.PathLike[str] | None = None) -> list[Checkpoint]:
    """All complete tags, newest first, including those that are only in memory. Parsed, not verified."""
    return list(_candidates(_root(persist_path)))


def get_checkpoint(tag: str, persist_path: str | os.PathLike[str] | None = None) -> Checkpoint:
    """The complete tag of this name, the latest if there are several; the empty tag if there is none."""
    return next((found for found in _candidates(_root(persist_path)) if found.tag == tag), Checkpoint())


def get_latest_checkpoint(persist_path: str | os.PathLike[str] | None = None) -> Checkpoint:
    """The newest complete tag that verifies to the last byte; the empty tag if there is none at all.

    A newer, damaged one is skipped with a warning. CheckpointError if there are tags and none of them verifies.
    """
    return _latest(_root(persist_path), lambda checkpoint: True)


def get_latest_checkpoint_path(name: str, persist_path: str | os.PathLike[str] | None = None) -> Path | None:
    """The directory of the newest complete tag with a name that is or begins with `name`; None if there is none.

    It is on disk, and verified as in `get_latest_checkpoint`.
    """

    def fits(checkpoint: Checkpoint) -> bool:
        is_on_disk = checkpoint.status == "persisted"
        return is_on_disk and (checkpoint.tag.startswith(name) or name in checkpoint.names)

    return _latest(_root(persist_path), fits).path


def _latest(root: Path, fits: Callable[[Checkpoint], bool]) -> Checkpoint:
    refused = {path: str(error) for path, error in scan(root).refused.items()}
    too_new = next((error for error in scan(root).refused.values() if isinstance(error, TooNewError)), None)
    if too_new is not None:
        raise too_new
    latest = Checkpoint()
    for checkpoint in _candidates(root):
        if not fits(checkpoint):
            continue
        reason = _damage(checkpoint)
        if reason is None:
            latest = checkpoint
            break
        refused[checkpoint.path or root] = reason
    for path, reason in refused.items():
        if numbers_in(tag_of(path.name) or "") >= numbers_in(latest.tag):
            logger.warning("skipped %s: %s", path, reason)
    if refused and not latest.tag:
        raise CheckpointError(f"{root} has {len(refused)} tags and none of them verifies: restore one from a copy")
    return latest


def _damage(checkpoint: Checkpoint) -> str | None:
    commit = checkpoint.commit_on_disk
    if commit is None:
        return None  # it is in memory
    try:
        check(commit, deep=True)
    except DamagedError as error:
        return str(error)
    return None


def _candidates(root: Path) -> Iterator[Checkpoint]:
    """Complete tags, newest first."""
    owner = _script.service
    living = owner.complete_tags() if owner is not None and owner.place.root == root else []
    found = {saving.attempt.folder_name: (saving.attempt.order, saving) for saving in living}
    commits: dict[str, TagCommit] = {commit.path.name: commit for commit in scan(root).commits}
    orders = {name: commit.order for name, commit in commits.items()}
    orders.update({name: order for name, (order, _) in found.items()})
    for name in sorted(orders, key=lambda name: orders[name], reverse=True):
        if name in commits:
            yield Checkpoint.found(commits[name])
        elif owner is not None:
            yield Checkpoint.under_way(found[name][1], owner)


def _root(persist_path: str | os.PathLike[str] | None) -> Path:
    if persist_path is not None:
        return Path(persist_path).absolute()
    if _script.root is None:
        raise ConfigError("no persist_path, and init was not called: give one of the two")
    return _script.root


def _directory(path: str | os.PathLike[str]) -> Path:
    if not os.fspath(path):
        raise ConfigError("persistent_storage_path is empty: expected a directory")
    root = Path(path).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.scandir(root):
            pass
    except OSError as error:
        raise ConfigError(f"persistent_storage_path {root}: {error.strerror}: expected a writable directory") from None
    return root


def _check_number(name: str, value: float, least: float) -> None:
    if type(value) not in (int, float) or not value >= least:
        raise ConfigError(f"{name} is {value!r}: expected a number of seconds, {least} or more")


def _close(*, is_normal: bool) -> None:
    owner, _script.service = _script.service, None
    if owner is not None and _script.pid == os.getpid():  # a forked process does not touch its parent's
        atexit.unregister(_close_at_exit)
        owner.close(is_normal=is_normal)


def _close_at_exit() -> None:
    # set by Python if an exception ended the script: a tag that was open then is incomplete
    is_normal = getattr(sys, "last_value", None) is None
    try:
        _close(is_normal=is_normal)
    except CheckpointError as error:
        logger.error("%s", error)
