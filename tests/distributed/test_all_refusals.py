"""Models and tasks that parameters cannot come and go for: each is refused in one sentence, on all ranks, at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hetseq.comm.group import GlooGroup, Group
from hetseq.errors import HetSeqError, PeerLostError
from hetseq.task import make_task
from tests.support import toys
from tests.support.layered import WIDTH, Block, Layered
from tests.support.owned import session_of
from tests.support.ranks import run_ranks
from tests.support.training import Recorder, prepared, toy_words


class AnotherOrder(Layered):
    def hidden(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model["first"](x)
        for number in (0, 2, 1, 3):
            x = model["layers"][number](x)
        return x


class Siamese(Layered):
    def hidden(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        return super().hidden(model, x) - super().hidden(model, -x)


class Twice(Layered):
    def hidden(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model["first"](x)
        for layer in model["layers"]:
            x = layer(layer(x))
        return x


class Box:
    """What hides a tensor from its reader."""

    def __init__(self, content: torch.Tensor) -> None:
        self.content = content


class HidingBlock(Block):
    def forward(self, x: Any) -> Box:
        return Box(super().forward(x.content if isinstance(x, Box) else x))


class Hiding(Layered):
    block = HidingBlock

    def hidden(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        box: Any = super().hidden(model, x)
        content: torch.Tensor = box.content
        return content


class HalfHidingBlock(Block):
    def forward(self, x: Any) -> tuple[torch.Tensor, Box]:
        content = x[1].content if isinstance(x, tuple) else x
        return content.detach(), Box(super().forward(content))


class HalfHiding(Layered):
    """Tensors that no gradient reaches can be seen, and others cannot."""

    block = HalfHidingBlock

    def hidden(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        pair: Any = super().hidden(model, x)
        content: torch.Tensor = pair[1].content
        return content


class AsideBlock(Block):
    """Leaves a term of the loss on itself, computed after its output, as some mixtures of experts do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.aside = (x * self.scale).pow(2).sum()
        assert isinstance(output, torch.Tensor)
        return output


class Aside(Layered):
    block = AsideBlock

    def loss(self, model: Any, sample: toys.Batch) -> dict[str, torch.Tensor]:
        sums = super().loss(model, sample)
        return {"loss": sums["loss"] + 0.01 * sum(layer.aside for layer in model["layers"])}


class Penalty(Layered):
    """Reads the parameters of all layers outside of their forwards."""

    def loss(self, model: Any, sample: toys.Batch) -> dict[str, torch.Tensor]:
        squares = sum((one**2).sum() for one in model.parameters())
        return {"loss": super().loss(model, sample)["loss"] + 1e-3 * squares * len(sample["x"])}


class LatePenalty(Penalty):
    """The same, but not in the first three forwards that are trained."""

    batches = 0

    def loss(self, model: Any, sample: toys.Batch) -> dict[str, torch.Tensor]:
        self.batches += torch.is_grad_enabled()
        return (super() if self.batches > 3 else super(Penalty, self)).loss(model, sample)


class QueryBlock(Block):
    """Returns a part of its own parameters beside its output."""

    def forward(self, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x[0] if isinstance(x, tuple) else x), self.scale[None]


class Query(Layered):
    block = QueryBlock

    def hidden(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        pair: Any = super().hidden(model, x)
        content: torch.Tensor = pair[0] * pair[1]
        return content


class ClampingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.clamp_(-2, 2)
        output = super().forward(x)
        assert isinstance(output, torch.Tensor)
        return output


class Clamping(Layered):
    block = ClampingBlock


class Reentrant(Layered):
    def hidden(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model["first"](x)
        for layer in model["layers"]:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


class OwnBackward(Layered):
    def loss(self, model: Any, sample: toys.Batch) -> dict[str, torch.Tensor]:
        sums = super().loss(model, sample)
        sums["loss"].backward(retain_graph=True)
        return sums


class Forces(Layered):
    """A loss that is made of derivatives by the samples."""

    needs_gradients_in_validation = True

    def loss(self, model: Any, sample: toys.Batch) -> dict[str, torch.Tensor]:
        x = sample["x"].requires_grad_()
        (forces,) = torch.autograd.grad(self.hidden(model, x).sum(), x, create_graph=True)
        return {"loss": (forces**2).sum()}


class ReadsAfterStep(Layered):
    def after_step(self, step: Any) -> None:
        self.norm = step.model["layers"][2].linear.weight.norm()


def fail(group: Group, save_dir: str, words: list[str], task: type[Layered], shares_memory: bool) -> tuple[str, str]:
    """The class and the text of the error with which a run ends."""
    if shares_memory and isinstance(group, GlooGroup):
        group.meet_neighbours()
    try:
        session = session_of(group, save_dir, words, Recorder(), lambda config: make_task(task, config))
        try:
            session.train()
        finally:
            session.close()
    except HetSeqError as error:
        return type(error).__name__, str(error)
    return "", "it was not refused"


NAMES = {
    "order": (
        AnotherOrder, "--shard-model all: layers.1 runs after layers.2, which is behind it: each micro-batch may run"
    ),
    "siamese": (Siamese, "--shard-model all: layers.0 runs after layers.3, which is behind it: each micro-batch may"),
    "twice": (Twice, "--shard-model all: layers.0 runs twice in one micro-batch: each micro-batch may run each layer"),
    "hiding": (Hiding, "--shard-model all: layers.0 returns Box, in which no tensors can be seen: return a tensor"),
    "half hiding": (HalfHiding, "gradients come to parameters of layers."),
    "aside": (Aside, "gradients come to parameters of layers."),
    "penalty": (Penalty, "--shard-model all: layers.1.scale is used outside of the forward of its layer, where it"),
    "late penalty": (LatePenalty, "--shard-model all: layers.1.scale is used outside of the forward of its layer, wh"),
    "query": (Query, "--shard-model all: layers.0 returns a part of its own parameters, whose memory is gone after"),
    "clamping": (Clamping, "forward changes layers.0.scale in place, and the change would be lost: make it a buffer"),
    "reentrant": (Reentrant, "layers.3 runs again in backward before its parameters are here: checkpoint activations"),
    "own backward": (OwnBackward, "let HetSeq call backward"),
    "autograd.grad": (Forces, "--shard-model all: gradients of layers.3 are computed inside the loss, where"),
    "after_step": (ReadsAfterStep, "ReadsAfterStep.after_step uses layers.2.linear.weight, but with --shard-model"),
}  # fmt: skip


def words(*more: str, balance: str = "9,3,0") -> list[str]:
    return [
        *toy_words("TwoTerms", global_batch_size=12, max_sentences=3, precision="fp64", max_update=2, balance=balance),
        "--shard-model", "all", "--own", "1,1,8", *more,
    ]  # fmt: skip


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])
@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_computed_layer_by_layer_is_refused_in_words(
    name: str, shares_memory: bool, tmp_path: Path
) -> None:
    task, wanted = NAMES[name]
    computing = run_ranks(fail, 3, prepared(tmp_path), words(), task, shares_memory, timeout_s=30, group_timeout_s=10)
    for kind, told in computing[:2]:
        assert wanted in told, (kind, told)
        assert kind in ("HetSeqError", "TaskError")
        assert "\n" not in told
    kind, told = computing[2]  # the rank without samples learns that the others have ended
    assert (kind == PeerLostError.__name__) != (wanted in told), (kind, told)


class RecurrentBlock(Block):
    """Keeps its parameters in a list too, as those of torch do."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(self.memory(x)[0])


class Recurrent(Layered):
    block = RecurrentBlock


@pytest.mark.parametrize("task", [Layered, Recurrent])
def test_a_net_of_these_layers_is_trained(task: type[Layered], tmp_path: Path) -> None:
    """The twin: nothing else in these runs is refused."""
    ranks = run_ranks(fail, 3, prepared(tmp_path), words(), task, True, timeout_s=30)
    assert ranks == [("", "it was not refused")] * 3


def test_modules_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    told = run_ranks(fail, 3, prepared(tmp_path), words("--shard-modules", "layer.*"), Layered, True, timeout_s=30)
    for kind, text in told:
        assert kind == "ConfigError"
        assert text.startswith("--shard-modules layer.* fits no module of ModuleDict: expected patterns of names")


class Mean(Layered):
    def loss(self, model: Any, sample: toys.Batch) -> dict[str, torch.Tensor]:
        return {"loss": super().loss(model, sample)["loss"] / len(sample["x"])}


def test_a_loss_that_is_a_mean_is_found_before_the_first_step_on_all_ranks(tmp_path: Path) -> None:
    told = run_ranks(fail, 3, prepared(tmp_path), words(), Mean, True, timeout_s=30)
    for kind, text in told:
        assert (kind, text.partition(",")[0]) == ("TaskError", "Mean.loss returns the mean of 'loss'")
