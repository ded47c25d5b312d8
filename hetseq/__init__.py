"""HetSeq trains one PyTorch model on unequal machines, with the result of one big machine.

The names below are the public API, for tasks and scripts of your own. They are imported on first use, so that the
command line can answer a mistyped option without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hetseq.system import short_names

if TYPE_CHECKING:
    from hetseq.checkpoint import CheckpointManager, CheckpointOptions
    from hetseq.checkpoint.dcp import HetSeqReader
    from hetseq.config.sections import Config, OptimizationConfig, option
    from hetseq.data.lanes import Lanes
    from hetseq.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        HetSeqError,
        MissingSplitError,
        RendezvousError,
        TaskError,
    )
    from hetseq.integrations.hf_trainer import HetSeqTrainer as HetSeqTrainer
    from hetseq.launch.script_worker import start
    from hetseq.loop.run import Run
    from hetseq.loop.step import Step
    from hetseq.monitor.report.recorded import RecordedRun, load_run
    from hetseq.monitor.trackers.protocol import Tracker
    from hetseq.parallel.activation_checkpointing import checkpoint_activations
    from hetseq.parallel.gradient_memory import empty_gradient
    from hetseq.registry import register_lr_scheduler, register_optimizer, register_task
    from hetseq.task import ModelCard, Task, TrainedStep
    from hetseq.training.controller import Controller
    from hetseq.training.muon import Muon

__version__ = "2.0.0.dev0"

_HOMES = {
    "CheckpointError": "errors",
    "CheckpointManager": "checkpoint",
    "CheckpointOptions": "checkpoint",
    "Config": "config.sections",
    "ConfigError": "errors",
    "Controller": "training.controller",
    "DataError": "errors",
    "HetSeqError": "errors",
    "HetSeqReader": "checkpoint.dcp",
    "HetSeqTrainer": "integrations.hf_trainer",
    "Lanes": "data.lanes",
    "MissingSplitError": "errors",
    "ModelCard": "task",
    "Muon": "training.muon",
    "OptimizationConfig": "config.sections",
    "RecordedRun": "monitor.report.recorded",
    "RendezvousError": "errors",
    "Task": "task",
    "TaskError": "errors",
    "Tracker": "monitor.trackers.protocol",
    "TrainedStep": "task",
    "Run": "loop.run",
    "Step": "loop.step",
    "checkpoint_activations": "parallel.activation_checkpointing",
    "empty_gradient": "parallel.gradient_memory",
    "load_run": "monitor.report.recorded",
    "option": "config.sections",
    "start": "launch.script_worker",
    "register_lr_scheduler": "registry",
    "register_optimizer": "registry",
    "register_task": "registry",
}

#: HetSeqTrainer has a home too, and is no part of `import *`: it needs transformers
__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "CheckpointOptions",
    "Config",
    "ConfigError",
    "Controller",
    "DataError",
    "HetSeqError",
    "HetSeqReader",
    "Lanes",
    "MissingSplitError",
    "ModelCard",
    "Muon",
    "OptimizationConfig",
    "RecordedRun",
    "RendezvousError",
    "Run",
    "Step",
    "Task",
    "TaskError",
    "Tracker",
    "TrainedStep",
    "__version__",
    "checkpoint_activations",
    "empty_gradient",
    "load_run",
    "option",
    "register_lr_scheduler",
    "register_optimizer",
    "register_task",
    "start",
]

short_names.install()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hetseq' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hetseq.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
