"""What a run goes on from: which checkpoint `--restore-file` means here, and what of it is taken.

The same command goes on from the newest commit. Options that begin something anew (`--reset-*`) do so once: a job that
is killed and put into the queue again with the same command must not begin anew every time, so a checkpoint remembers
the steps at which that happened.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from hetseq.checkpoint import CheckpointManager, Loaded, Retention
from hetseq.comm import AnyGroup
from hetseq.config import CheckpointConfig
from hetseq.controller import TrainingState
from hetseq.errors import CheckpointMismatch, CheckpointRefused
from hetseq.plan import GlobalBatch, Position
from hetseq.replica import Replica
from hetseq.run_directory import RunDirectory
from hetseq.saving import STATE_VERSION, Provenance, read_state, saved_batch

logger = logging.getLogger(__name__)

RESETS = ("dataloader", "lr_scheduler", "meters", "optimizer")


def open_checkpoints(config: CheckpointConfig, directory: RunDirectory, group: AnyGroup) -> CheckpointManager:
    """The run's checkpoints, those that only lacked their commit completed. Collective."""
    retention = Retention(config.keep_interval_updates, config.keep_last_epochs)
    manager = CheckpointManager(directory.path, run_id=directory.run_id, group=group, retention=retention)
    manager.recover()
    return manager


def choose_checkpoint(manager: CheckpointManager, config: CheckpointConfig, group: AnyGroup) -> Loaded | None:
    """What --restore-file means here; None: begin. Collective.

    Going back within one run directory is refused: which checkpoint is the latest would be ambiguous. Raises
    CheckpointMismatch.
    """
    which, newest_step = config.restore_file, _newest_step(manager, group)
    if which == "none":
        if newest_step:
            raise CheckpointMismatch(
                f"--restore-file none, but {config.save_dir} holds checkpoints up to step {newest_step}:"
                " begin anew in another --save-dir"
            )
        return None
    if which == CheckpointConfig.restore_file:
        return manager.load("latest")
    is_word = which in ("latest", "best") or which.isdigit()
    if newest_step and not is_word and os.path.isdir(which) and not _is_below(which, config.save_dir):
        logger.info("--restore-file %s was the beginning of this run, which has gone on since", which)
        return manager.load("latest")
    try:
        loaded = manager.load(which)
    except CheckpointRefused as error:
        raise CheckpointMismatch(f"--restore-file {which}: {error}") from None
    if loaded is not None and loaded.identity.step < newest_step:
        raise CheckpointMismatch(
            f"--restore-file {which} is step {loaded.identity.step}, but {config.save_dir} has gone on to step"
            f" {newest_step}: go back in another directory, --save-dir NEW --restore-file {loaded.path}"
        )
    return loaded


def resume(
    loaded: Loaded, config: CheckpointConfig, replica: Replica, here: Provenance, *, is_explicit_batch: bool
) -> tuple[TrainingState, Provenance]:
    """Put a checkpoint into the replica; gives the state to go on from and the provenance that holds from now on.

    On resume the command line wins for everything but what the result depends on. Raises CheckpointMismatch.
    """
    saved = loaded.state
    if saved.get("state_version") != STATE_VERSION:
        raise CheckpointMismatch(
            f"{loaded.path}: state version {saved.get('state_version')}, this HetSeq reads {STATE_VERSION}"
        )
    is_own = _is_below(str(loaded.path), config.save_dir)
    resets = _resets_to_do(config, dict(saved["resets"]) if is_own else {}, step=loaded.identity.step)
    batch = choose_batch(saved, here.batch, is_explicit=is_explicit_batch, resets_data="dataloader" in resets)
    here = dataclasses.replace(here, batch=batch)
    check_provenance(saved, here, resets)
    replica.load_model(loaded.tensors)
    if "optimizer" not in resets:
        if saved["updates"] and saved["optimizer_numbers"] is None:
            logger.warning("%s holds no optimizer state: the optimizer begins afresh", loaded.path)
        replica.load_optimizer(loaded.tensors, saved["optimizer_numbers"] or {})
    state = read_state(saved)
    if "dataloader" in resets:
        state.position = Position(state.position.step, 1, 0)
    if "lr_scheduler" in resets:
        state.updates = 0
    if "meters" in resets:
        state.best = None
    state.resets = {**(state.resets if is_own else {}), **dict.fromkeys(resets, loaded.identity.step)}
    logger.info("going on after step %d (%s)", loaded.identity.step, loaded.path)
    return state, here


def _resets_to_do(config: CheckpointConfig, done: Mapping[str, int], *, step: int) -> list[str]:
    """The --reset-* options that are to take effect now: those that this run has not followed already."""
    asked = [name for name in RESETS if getattr(config, f"reset_{name}")]
    for name in asked:
        if name in done and done[name] < step:
            logger.info(
                "--reset-%s was done at step %d of this run and is not repeated; to do it again go on in another"
                " directory, with --save-dir NEW --restore-file %s",
                name.replace("_", "-"),
                done[name],
                config.save_dir,
            )
    return [name for name in asked if name not in done or done[name] >= step]


def choose_batch(saved: Mapping[str, Any], asked: GlobalBatch, *, is_explicit: bool, resets_data: bool) -> GlobalBatch:
    """The global batch to go on with: the checkpoint's, unless the data begin anew.

    Another explicit --global-batch-size is refused; a product of --max-sentences, ranks and --update-freq gives way.
    """
    batch = saved_batch(saved)
    if resets_data or batch == asked:
        return asked
    if is_explicit:
        raise CheckpointMismatch(
            f"--global-batch-size {asked.samples} differs from the checkpoint's {_in_words(batch)}: leave it out, or"
            " begin the data anew with --reset-dataloader"
        )
    logger.info(
        "the global batch stays %s, as in the checkpoint (the options would give %s)",
        _in_words(batch),
        _in_words(asked),
    )
    return batch


def _in_words(batch: GlobalBatch) -> str:
    parts = [f"{batch.samples} samples" if batch.samples else "", f"{batch.tokens} tokens" if batch.tokens else ""]
    freq = "" if batch.update_freq == (1,) else f" x {','.join(map(str, batch.update_freq))}"
    return " or ".join(part for part in parts if part) + freq


def check_provenance(saved: Mapping[str, Any], here: Provenance, resets: list[str]) -> None:
    """Raise CheckpointMismatch where the checkpoint is of a run with another result."""
    anew = ", or begin the data anew: --reset-dataloader"
    resets_data = "dataloader" in resets
    checks: list[tuple[str, bool, str]] = [
        ("task", False, "give the same --task"),
        ("precision", False, f"give --precision {saved['precision']}"),
        (
            "optimizer",
            "optimizer" in resets,
            "give the same --optimizer, or begin with a fresh one: --reset-optimizer",
        ),
        ("seed", resets_data, f"give --seed {saved['seed']}{anew}"),
        ("split", resets_data, f"give --train-subset {saved['split']}{anew}"),
        ("samples", resets_data, f"give the same --data{anew}"),
        ("curriculum", resets_data, f"give --curriculum {saved['curriculum']}{anew}"),
    ]
    for name, is_covered, remedy in checks:
        value = getattr(here, name)
        if saved[name] != value and not is_covered:
            raise CheckpointMismatch(
                f"the checkpoint was trained with {name} {saved[name]}, this command says {value}: {remedy}; or choose"
                " another --save-dir"
            )


def _newest_step(manager: CheckpointManager, group: AnyGroup) -> int:
    """Step of the newest checkpoint, 0 if there is none, as rank zero sees it: others may see an older list."""
    newest = manager.latest() if group.rank == 0 else None
    row = np.array([newest.identity.step if newest is not None else 0], np.int64)
    return int(group.all_gather_rows(row)[0, 0])


def _is_below(path: str, folder: str) -> bool:
    inner, outer = os.path.realpath(path), os.path.realpath(folder)
    return os.path.commonpath([inner, outer]) == outer
