"""A checkpoint goes straight into the model and the optimizer, and a refused one leaves the model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq import options
from hetseq.buffers import BufferKeeper
from hetseq.comm import LocalGroup
from hetseq.controller import TrainingState
from hetseq.errors import CheckpointMismatch
from hetseq.plan import GlobalBatch
from hetseq.reduction import GradientReducer
from hetseq.replica import Replica
from hetseq.resuming import Beginning, Target, choose_checkpoint, open_checkpoints, resume
from hetseq.run_directory import RunDirectory
from hetseq.saving import Provenance, Saver
from hetseq.sharing import everything_shared
from tests.support.training import prepared


def replica_of(model: torch.nn.Module) -> Replica:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    reducer = GradientReducer(trained, LocalGroup(), bucket_bytes=1 << 20)
    return Replica(model, optimizer, reducer, BufferKeeper(model, LocalGroup()))


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


def trained(steps: int = 2) -> Replica:
    replica = replica_of(Net())
    for _ in range(steps):
        replica.model().backward()
        replica.optimizer.step()
        replica.optimizer.zero_grad()
    return replica


def everything(replica: Replica) -> dict[str, torch.Tensor]:
    return {**replica.model_tensors(), **replica.optimizer_tensors()[0]}


HERE = Provenance("Toy", "AdamW", 7, "train", 100, 1, "fp32", GlobalBatch(10))


def saved_run(path: Path, *, here: Provenance = HERE) -> tuple[Replica, RunDirectory]:
    """A run directory with a checkpoint of the second step."""
    replica, directory = trained(), RunDirectory(Path(prepared(path)))
    config, sharing = options.parse(["--save-dir", str(path)]).checkpoint, everything_shared(LocalGroup())
    manager = open_checkpoints(config, directory, sharing.group)
    saver, state = Saver(manager, config, here, replica, sharing=sharing), TrainingState()
    state.position = type(state.position)(3, 1, 20)
    ended = saver.save(state, nonce=5, kinds=["epoch"], is_last=True)
    assert [one.result.ok for one in ended] == [True]
    saver.close()
    return replica, directory


def begun(
    directory: RunDirectory, replica: Replica, *, here: Provenance = HERE, words: str = "", in_place: bool = True
) -> Beginning:
    config, sharing = options.parse(["--save-dir", str(directory.path), *words.split()]).checkpoint, None
    sharing = everything_shared(LocalGroup())
    manager = open_checkpoints(config, directory, sharing.group)
    target = Target(replica, here, is_explicit_batch=True) if in_place else None
    beginning = choose_checkpoint(manager, config, directory, sharing, target)
    assert beginning is not None
    return beginning


def resumed(
    directory: RunDirectory, replica: Replica, beginning: Beginning, *, here: Provenance = HERE, words: str = ""
) -> None:
    config = options.parse(["--save-dir", str(directory.path), *words.split()]).checkpoint
    resume(beginning, config, replica, here, is_explicit_batch=True)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_resume_holds_neither_model_nor_optimizer_twice(tmp_path: Path, in_place: bool) -> None:
    before, directory = saved_run(tmp_path / "run")
    after = replica_of(Net())
    live = {name: tensor.data_ptr() for name, tensor in after.model_tensors().items()}
    beginning = begun(directory, after, in_place=in_place)
    read = {name: tensor.data_ptr() for name, tensor in beginning.loaded.tensors.items()}
    resumed(directory, after, beginning)
    assert {name: tensor.data_ptr() for name, tensor in after.model_tensors().items()} == live
    alike = {name for name in live if read[name] == live[name]}
    # of another layout than a file's: read beside the model and copied
    assert alike == ({"model.plain", "model.seen"} if in_place else set())
    state = after.optimizer_tensors()[0]
    copied = {name for name, tensor in state.items() if tensor.data_ptr() != read[name]}
    assert copied == {"optim.turned.exp_avg", "optim.turned.exp_avg_sq"}
    assert all(torch.equal(tensor, everything(before)[name]) for name, tensor in everything(after).items())
    assert {name: tensor.stride() for name, tensor in everything(after).items()} == {
        name: tensor.stride() for name, tensor in everything(before).items()
    }
    assert not torch.equal(after.model.plain, Net().plain)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "task": ({"task": "Other"}, "task Toy, this command says Other"),
    "precision": ({"precision": "fp64"}, "precision fp32, this command says fp64"),
    "optimizer": ({"optimizer": "SGD"}, "optimizer AdamW, this command says SGD"),
    "seed": ({"seed": 8}, "seed 7, this command says 8"),
    "batch": ({"batch": GlobalBatch(11)}, "--global-batch-size 11 differs"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_checkpoint_that_is_refused_has_not_touched_the_model(tmp_path: Path, name: str) -> None:
    _, directory = saved_run(tmp_path / "run")
    changes, told = REFUSALS[name]
    here = Provenance(**{**vars(HERE), **changes})
    after = replica_of(Net())
    beginning = begun(directory, after, here=here)
    with pytest.raises(CheckpointMismatch, match=told):
        resumed(directory, after, beginning, here=here)
    assert torch.equal(after.model.plain, Net().plain)
    assert beginning.loaded.tensors["model.plain"].abs().sum() > 0


def test_a_checkpoint_of_another_model_has_not_touched_this_one(tmp_path: Path) -> None:
    _, directory = saved_run(tmp_path / "run")
    other = replica_of(Net(width=6))
    beginning = begun(directory, other)
    with pytest.raises(CheckpointMismatch, match=r"model.plain is \(4, 3\) float32 there, \(6, 3\) float32 here"):
        resumed(directory, other, beginning)
    frozen = Net()
    frozen.turned.requires_grad_(False)
    partly = replica_of(frozen)
    beginning = begun(directory, partly)
    with pytest.raises(CheckpointMismatch, match="optimizer state of turned, which the model does not train"):
        resumed(directory, partly, beginning)
    for model, untouched in ((other.model, Net(width=6)), (partly.model, Net())):
        assert torch.equal(model.plain, untouched.plain)
        assert torch.equal(model.turned, untouched.turned)
        assert not model.seen.any()


@pytest.mark.parametrize(
    ("words", "here"), [("--reset-optimizer", {"optimizer": "SGD"}), ("--reset-dataloader", {"seed": 8})]
)
def test_what_a_reset_allows_is_read_in_place(tmp_path: Path, words: str, here: dict[str, Any]) -> None:
    before, directory = saved_run(tmp_path / "run")
    after, there = replica_of(Net()), Provenance(**{**vars(HERE), **here})
    beginning = begun(directory, after, here=there, words=words)
    assert beginning.loaded.tensors["model.plain"].data_ptr() == after.model.plain.data_ptr()
    resumed(directory, after, beginning, here=there, words=words)
    assert torch.equal(after.model.plain, before.model.plain)
    assert bool(after.optimizer.state) == (words != "--reset-optimizer")
