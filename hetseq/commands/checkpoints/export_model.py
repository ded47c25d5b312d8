"""Export of a checkpoint by the run's own task: `--format hf`.

Builds the task and the model of a run from its `config.yaml`, and loads the weights. The one idea: the task decides
which files it writes for other programs (`Task.export`), so the framework knows no architecture. `checkpoint.export`
makes the directory appear complete or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from hetseq import config as options
from hetseq import registry
from hetseq.checkpoint import Commit
from hetseq.checkpoint.export import export_by
from hetseq.checkpoint.tensor_reader import Spans
from hetseq.commands.checkpoints.model_card import Exported, model_card
from hetseq.errors import ConfigError
from hetseq.monitor.report.recorded import load_run
from hetseq.parallel.base_parameters import base_digest, check_same_base, move_
from hetseq.parallel.replica import load_model_
from hetseq.run.start_notes import kept_back
from hetseq.system.files import sync_file
from hetseq.task import build_model, can_merge, card_of, is_overridden, make_task
from hetseq.training.precision import PRECISIONS


def export_model(
    run: Path, commit: Commit, target: Path, *, merge: bool = False, advance: Callable[[int], None]
) -> Path:  # fmt: skip
    """Have the task of a run write its model with the weights of a checkpoint; returns the path of the directory.

    `merge` is for a task whose export takes it. The directory gets a model card, which replaces a README.md of the
    task.

    Loads no data set, but the files that the task's `build_model` reads must still exist. Raises ConfigError for a run
    without config.yaml and for a task without `export` or with nothing to merge; CheckpointError as `export` does,
    CheckpointMismatch for another model; and whatever the task raises. `advance` is called now and then with the number
    of bytes read.
    """
    config_file = run / "config.yaml"
    if not config_file.is_file():
        raise ConfigError(
            f"{run} has no config.yaml, which defines its model: export with --format safetensors, which needs none"
        )
    config = options.complete(options.parse(["--config", str(config_file), "--save-dir", str(run)]))
    task = make_task(registry.find_task(config.task.task, user_dir=config.task.user_dir), config)
    if not is_overridden(task, "export"):
        raise ConfigError(
            f"the task {config.task.task} has no export(model, folder), which --format hf calls: write one, or export"
            " with --format safetensors"
        )
    if merge and not can_merge(task):
        raise ConfigError(
            f"--merge: the task {config.task.task} has nothing to merge: its export is the whole model; leave --merge"
            " out"
        )
    recorded = load_run(run)
    with kept_back():  # the checkpoint replaces the weights
        model = build_model(task)
    move_(model, torch.device("cpu"), PRECISIONS[config.optimization.precision].storage)
    model.eval()

    def write(spans: Spans, folder: Path) -> Path:
        check_same_base(base_digest(model), spans.state)
        names = [name for name in spans.specs if name.startswith("model.")]
        load_model_(model, {name: spans.whole(name) for name in names})
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]  # export may merge
        task.export(model, folder, **({"merge": True} if merge else {}))
        exported = Exported(
            target.name, config, spans.state, commit.identity.step, commit.attempt.created, recorded,
            parameters=sum(size for size, _ in sizes), trained=sum(size for size, is_trained in sizes if is_trained),
        )  # fmt: skip
        (folder / "README.md").write_text(model_card(card_of(task), exported), encoding="utf-8")
        for path in folder.rglob("*"):
            if path.is_file():
                sync_file(path)
        return folder

    return export_by(write, commit, target, advance=advance)
