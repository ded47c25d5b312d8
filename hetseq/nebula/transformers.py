"""Hugging Face's Trainer saves through `hetseq.nebula`: a TrainerCallback, and the way back.

Responsible for: mapping the Trainer's state to names in a tag. Does not decide when to save; the Trainer's
`save_strategy` and `save_steps` do. The one idea: the callback saves just before the Trainer would write
its folder; to resume, such a folder is made from a verified tag, so the Trainer's own way of resuming is used.

    trainer = Trainer(..., callbacks=[NebulaCallback("runs/tags", persistent_time_interval=100)])
    trainer.train(resume_from_checkpoint=resume_folder("runs/tags", "runs/resume"))
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any, cast

import numpy
import safetensors.torch
import torch

import hetseq.nebula as nm
from hetseq.errors import ConfigError
from hetseq.nebula import ranks

_TrainerCallback: Any = importlib.import_module("transformers.trainer_callback").TrainerCallback

MODEL, OPTIMIZER, SCHEDULER, STATE = "model", "optimizer", "scheduler", "trainer_state"


class NebulaCallback(_TrainerCallback):  # type: ignore[misc]
    """Saves in place of the Trainer, in the background, as the tag checkpoint-STEP.

    Takes the place and the options of `hetseq.nebula.init`. With several processes rank zero saves model and
    optimizer and every process its random numbers; FSDP and DeepSpeed, which shard those, are refused.
    """

    def __init__(self, persistent_storage_path: str | os.PathLike[str], **options: Any) -> None:
        self._place, self._options = persistent_storage_path, options

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set where tags go. ConfigError if the Trainer would look for a folder of its own."""
        if args.load_best_model_at_end or str(getattr(args.save_strategy, "value", args.save_strategy)) == "best":
            raise ConfigError(
                "NebulaCallback saves no folder that load_best_model_at_end or save_strategy='best' could go back to"
            )
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise ConfigError("NebulaCallback saves whole models: with DeepSpeed use hetseq.nebula.deepspeed")
        nm.init(self._place, **self._options)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> Any:
        """Save if the Trainer is about to."""
        return self._take_over(args, state, control, parts)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **parts: Any) -> Any:
        """Save if the Trainer is about to."""
        return self._take_over(args, state, control, parts)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait until everything is on disk."""
        nm.flush_persistence()

    def _take_over(self, args: Any, state: Any, control: Any, parts: dict[str, Any]) -> Any:
        if not control.should_save:
            return control
        control.should_save = False
        checkpoint = nm.Checkpoint(f"checkpoint-{state.global_step}", -2)
        if args.process_index == 0:
            checkpoint.save(MODEL, parts["model"])
            if not args.save_only_model:
                checkpoint.save(OPTIMIZER, parts["optimizer"])
                checkpoint.save(SCHEDULER, parts["lr_scheduler"])
            checkpoint.save(STATE, json.dumps(dataclasses.asdict(state)))
        if not args.save_only_model:
            checkpoint.save(_random_name(args.process_index, args.world_size), _random_state())
        checkpoint.commit()
        return control


def resume_folder(
    persist_path: str | os.PathLike[str], folder: str | os.PathLike[str], tag: str | None = None
) -> str | None:
    """A folder for `trainer.train(resume_from_checkpoint=...)`, made from the newest tag that verifies.

    `folder` is created anew. `tag` names another tag. None if there is none: the Trainer then starts from the
    beginning. With several processes rank zero calls this before the others read the folder.
    """
    found = nm.get_latest_checkpoint(persist_path) if tag is None else nm.get_checkpoint(tag, persist_path)
    if not found.tag:
        return None
    target = Path(folder) / found.tag
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in found.names:
        state = found.load(name)
        if name == MODEL:
            apart = {key: tensor.clone() for key, tensor in state.items()}  # the format has no tied weights
            safetensors.torch.save_file(apart, target / "model.safetensors", {"format": "pt"})
        elif name == STATE:
            (target / "trainer_state.json").write_text(state)
        else:
            torch.save(_with_arrays(state) if name.startswith("rng_state") else state, target / f"{name}{_end(name)}")
    return str(target)


def _end(name: str) -> str:
    return ".pth" if name.startswith("rng_state") else ".pt"


def _random_name(process_index: int, world_size: int) -> str:
    """The Trainer's name for the file of a process."""
    return f"rng_state_{process_index}" if world_size > 1 else "rng_state"


def _random_state() -> dict[str, Any]:
    """The generators that the Trainer restores."""
    kind, keys, position, has_gauss, gauss = cast(Any, numpy.random.get_state(legacy=True))
    state = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(numpy.int64)), int(position), int(has_gauss), float(gauss)),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        is_distributed, cuda = ranks.world()[1] > 1, torch.cuda.random
        state["cuda"] = list(cuda.get_rng_state_all()) if is_distributed else cuda.get_rng_state()
    return state


def _with_arrays(state: dict[str, Any]) -> dict[str, Any]:
    kind, keys, *rest = state["numpy"]
    return {**state, "numpy": (kind, keys.numpy().astype(numpy.uint32), *rest)}
