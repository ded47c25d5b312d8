"""`hetseq evaluate RUN`: a checkpoint of a run on its validation splits, in one process.

The run's own `config.yaml` says what task, data and model it is; options on the command line win. Nothing in the run
directory is changed, so a run may be evaluated while it goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from hetseq import options
from hetseq.capacity import assign_shares
from hetseq.checkpoint import CheckpointManager, Retention
from hetseq.comm import LocalGroup
from hetseq.config import Config
from hetseq.errors import CheckpointError, ConfigError
from hetseq.launch import local_devices
from hetseq.material import load_material
from hetseq.planning import make_validators
from hetseq.replica import load_model_, model_tensors
from hetseq.run_directory import RunDirectory

_USAGE = "expected `hetseq evaluate RUN [options]`, with RUN the --save-dir of a run, as in: hetseq evaluate runs/mnist"


def parse_arguments(argv: Sequence[str]) -> Config:
    """The configuration of `RUN --valid-subset test --restore-file best ...`. Raises ConfigError."""
    if not argv or argv[0].startswith("-"):
        raise ConfigError(_USAGE)
    run, rest = Path(argv[0]), list(argv[1:])
    config_file = run / "config.yaml"
    if not config_file.is_file():
        raise ConfigError(f"{run} is no run directory: it has no config.yaml; {_USAGE}")
    return options.complete(options.parse(["--config", str(config_file), "--save-dir", str(run), *rest]))


def evaluate_run(config: Config) -> Iterator[str]:
    """One line per validation split. Raises CheckpointError where the run has no checkpoint that verifies."""
    device = torch.device(local_devices(config.distributed)[0])
    group, directory = LocalGroup(), RunDirectory(Path(config.checkpoint.save_dir))
    material = load_material(config, device)
    if not material.valid:
        raise ConfigError(f"the data have no split {config.data.valid_subset!r}: name one with --valid-subset")
    manager = CheckpointManager(
        directory.path, run_id=directory.run_id, group=group, retention=Retention(-1, -1)
    )  # fmt: skip
    which = config.checkpoint.restore_file
    which = "latest" if which == type(config.checkpoint).restore_file else which
    loaded = manager.load(which, into=model_tensors(material.model))
    if loaded is None:
        raise CheckpointError(f"{directory.path} holds no checkpoint that verifies: train it first")
    load_model_(material.model, loaded.tensors)
    for validator in make_validators(config, material):
        values = validator.evaluate(material.task, material.model, group, lambda total: assign_shares(total, (1.0,)))
        numbers = " ".join(f"{name} {value:.6g}" for name, value in values.items())
        yield f"step {loaded.identity.step} {validator.split} {numbers}"
