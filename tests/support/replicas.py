"""A small model with an optimizer, a run directory with its checkpoint, and the means to resume from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hetseq import config as options
from hetseq.comm.directory_groups import DirectoryGroups, everything_shared
from hetseq.comm.group import LocalGroup
from hetseq.config.sections import CheckpointConfig
from hetseq.data.plan import GlobalBatch, Position
from hetseq.parallel.buffers import BufferKeeper
from hetseq.parallel.gradient_sync import Gradients
from hetseq.parallel.replica import Replica
from hetseq.parallel.task_state import TaskState
from hetseq.run.checkpointing import Provenance, Saver
from hetseq.run.resume import Beginning, Target, choose_checkpoint, open_checkpoints, resume
from hetseq.run_directory import RunDirectory
from hetseq.training.controller import TrainingState
from tests.support.training import prepared


class Net(torch.nn.Module):
    """A matrix, a transposed one, and a buffer."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.plain = torch.nn.Parameter(torch.randn(width, 3, generator=generator))
        self.turned = torch.nn.Parameter(torch.randn(3, 5, generator=generator).t())
        self.register_buffer("seen", torch.zeros(2))

    def forward(self) -> torch.Tensor:
        self.seen += 1
        return (self.plain**2).sum() + (self.turned**2).sum()


class Stateless:
    """A task that keeps nothing between steps."""

    learning_rate_factor = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise AssertionError("nothing was saved")


def replica_of(model: torch.nn.Module) -> Replica:
    """A replica that trains alone, with AdamW."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    reducer = Gradients(trained)
    return Replica(model, optimizer, reducer, BufferKeeper(model, LocalGroup()), TaskState(Stateless()))


def trained() -> Replica:
    """After two steps."""
    replica = replica_of(Net())
    for _ in range(2):
        replica.model().backward()
        replica.optimizer.step()
        replica.optimizer.zero_grad()
    return replica


def everything(replica: Replica) -> dict[str, torch.Tensor]:
    """Its live state, as in a checkpoint."""
    return {**replica.model_tensors(), **replica.optimizer_tensors()[0]}


#: what the command line says of the run
HERE = Provenance("Toy", "AdamW", 7, "train", 100, 1, "fp32", GlobalBatch(10))


def saved_run(
    path: Path, *, resets: dict[str, int] | None = None, replica: Replica | None = None
) -> tuple[Replica, RunDirectory]:
    """A replica, and a run directory with its checkpoint."""
    replica, directory = replica or trained(), RunDirectory(Path(prepared(path)))
    config, sharing = _config(directory, ""), everything_shared(LocalGroup())
    manager = open_checkpoints(config, directory, sharing.group)
    saver, state = Saver(manager, config, HERE, replica, sharing=sharing), TrainingState()
    state.position, state.resets = Position(3, 1, 20), resets or {}
    ended = saver.save(state, nonce=5, kinds=["epoch"], is_last=True)
    assert [one.result.ok for one in ended] == [True]
    saver.close()
    return replica, directory


def begun(
    directory: RunDirectory,
    replica: Replica,
    *,
    here: Provenance = HERE,
    words: str = "",
    in_place: bool = True,
    sharing: DirectoryGroups | None = None,
) -> Beginning:
    """The checkpoint that these words mean, loaded into the replica's model where it fits; collective."""
    config, sharing = _config(directory, words), sharing or everything_shared(LocalGroup())
    manager = open_checkpoints(config, directory, sharing.group)
    target = Target(replica, here, is_explicit_batch=True) if in_place else None
    beginning = choose_checkpoint(manager, config, directory, sharing, target)
    assert beginning is not None
    return beginning


def resumed(
    directory: RunDirectory, replica: Replica, beginning: Beginning, *, here: Provenance = HERE, words: str = ""
) -> None:
    """`resume` with these words."""
    resume(beginning, _config(directory, words), replica, here, is_explicit_batch=True)


def _config(directory: RunDirectory, words: str) -> CheckpointConfig:
    return options.parse(["--save-dir", str(directory.path), *words.split()]).checkpoint
