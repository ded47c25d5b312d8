"""Nebula's checkpoint calls for any PyTorch script: `import hetseq.nebula as nm`, without HetSeq's trainer.

A script calls `api` and gets a `checkpoint`. `service` holds the tags that are being saved, `slots` their shared
memory; `writer` is the process, without torch, that writes them. `state_tree` takes a state apart, `tags` and `publish`
define the files, `reading` loads them, `memory_budget` limits the memory; only `ranks` uses torch.distributed. The
adapters `lightning`, `deepspeed` and `transformers` need those packages and are imported separately.

The names below are imported on first use: importing the package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetseq.nebula.api import (
        close,
        flush_persistence,
        get_checkpoint,
        get_latest_checkpoint,
        get_latest_checkpoint_path,
        init,
        list_checkpoints,
    )
    from hetseq.nebula.checkpoint import Checkpoint

_HOMES = {
    "Checkpoint": "checkpoint",
    "close": "api",
    "flush_persistence": "api",
    "get_checkpoint": "api",
    "get_latest_checkpoint": "api",
    "get_latest_checkpoint_path": "api",
    "init": "api",
    "list_checkpoints": "api",
}

__all__ = [
    "init",
    "Checkpoint",
    "list_checkpoints",
    "get_checkpoint",
    "get_latest_checkpoint",
    "get_latest_checkpoint_path",
    "flush_persistence",
    "close",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
