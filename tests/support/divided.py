"""Training in which ranks divide a model, as facts that a test can put together again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from hetseq import Task
from hetseq.balance import ownership
from hetseq.comm.group import GlooGroup, Group
from hetseq.errors import ConfigError, TaskError
from hetseq.parallel.divided_model import TensorPart
from hetseq.task import make_task
from tests.support.owned import Setting, session_of
from tests.support.training import Recorder

WORDS, WIDTH, LENGTH, SAMPLES = 12, 8, 5, 48
PLAN = {"words": "embedding_rowwise", "layers.*.up": "colwise", "layers.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return result


class SlopedBlock(Block):
    """A block with a trained number between the layers that are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(self.slope(self.up(self.norm(x))))
        return result


class NextWord(nn.Module):
    """A language model whose words are tied to its head."""

    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList([block(), block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(self.norm(x))
        return result


def rows() -> torch.Tensor:
    return torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(3))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The sum over samples."""
    found = model(batch[:, :-1])
    return functional.cross_entropy(found.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum") / (LENGTH - 1)


class NextWordTask(Task):
    """The task of a divided model."""

    def load_dataset(self, split: str) -> Any:
        return [{"words": row} for row in rows()]

    def build_model(self) -> nn.Module:
        return NextWord()

    def tensor_plan(self) -> dict[str, str]:
        return PLAN

    def loss(self, model: nn.Module, sample: Any) -> dict[str, torch.Tensor]:
        return {"loss": loss_of(model, sample["words"])}


class SlopedTask(NextWordTask):
    """The plan leaves out the module between the divided layers."""

    def build_model(self) -> nn.Module:
        return NextWord(SlopedBlock)


class SummedSlopesTask(SlopedTask):
    def tensor_plan(self) -> dict[str, str]:
        return {**PLAN, "layers.*.slope": "replicated_with_grad_allreduce"}


class ByNameTask(NextWordTask):
    """Weight decay by the ends of names, which a rank with the whole model calls otherwise."""

    def build_optimizer(self, parameter_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        names = {one: name for name, one in self.built.named_parameters()}
        every = [one for group in parameter_groups for one in group["params"]]
        biases = [one for one in every if names[one].endswith("bias")]
        rest = [one for one in every if not names[one].endswith("bias")]
        return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.1}])

    def build_model(self) -> nn.Module:
        self.built = super().build_model()
        return self.built


def refuse(group: Group, save_dir: str, words: list[str], task: type[Task]) -> str:
    """What a training of this task is refused with."""
    try:
        _train(group, save_dir, words, functools.partial(make_task, task))
    except (TaskError, ConfigError) as error:
        return str(error)
    return "trained"


def losses(group: Group, save_dir: str, words: list[str], task: type[Task]) -> list[float]:
    return _train(group, save_dir, words, functools.partial(make_task, task)).losses


Piece = tuple[TensorPart | None, str, int, int, torch.Tensor]


@dataclass
class DividedFacts:
    """What one rank saw and owned."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    validations: list[float] = field(default_factory=list)
    gradients: list[list[Piece]] = field(default_factory=list)  # by step, of what it owns
    parameters: list[Piece] = field(default_factory=list)
    elements: int = 0  # of the model in its memory
    own_parts: int = 0  # elements that it owns of divided parameters, and of others
    own_whole: int = 0
    sent_bytes: list[int] = field(default_factory=list)  # until the update of each step, beside activations


def train(group: Group, save_dir: str, words: list[str], shares_memory: bool) -> DividedFacts:
    """Train as rank and slot `group.rank`, with cuts between any two elements."""
    if shares_memory and isinstance(group, GlooGroup):
        group.meet_neighbours()
    with mock.patch.object(ownership, "GRAIN", 1):
        return _train(group, save_dir, words)


def train_task(group: Group, save_dir: str, words: list[str], setting: Setting) -> DividedFacts:
    """The same with another task."""
    return _train(group, save_dir, words, setting.task)


def _train(group: Group, save_dir: str, words: list[str], task_of: Callable[[Any], Any] | None = None) -> DividedFacts:
    recorder, facts = Recorder(), DividedFacts()
    task_of = task_of or functools.partial(make_task, NextWordTask)
    session = session_of(group, save_dir, words, recorder, task_of)
    replica = session.controller.replica
    exchange = replica.reducer.exchange  # type: ignore[attr-defined]

    def record(*_: Any) -> None:
        facts.gradients.append(pieces(replica, lambda one: one.grad))
        facts.sent_bytes.append(exchange.sent_bytes)

    replica.optimizer.register_step_pre_hook(record)
    try:
        session.train()
        facts.losses = [row["loss"] for row in recorder.rows]
        facts.norms = [row["grad_norm"] for row in recorder.rows]
        facts.validations = [row["valid_loss"] for row in recorder.validations]
        replica.reducer.gather()
        facts.parameters = pieces(replica, lambda one: one)
        for name, one in replica.owned.fragments.items():
            facts.own_parts += (one.end - one.begin) * (name in replica.owned.described.parts)
            facts.own_whole += (one.end - one.begin) * (name not in replica.owned.described.parts)
        facts.elements = sum(one.numel() for one in replica.model.parameters())
        return facts
    finally:
        session.close()


def pieces(replica: Any, value_of: Any) -> list[Piece]:
    """Copies of what this rank owns, for the first group of ranks that holds it."""
    owned = replica.owned
    return [
        (owned.described.parts.get(name), name, one.begin, one.end, value_of(one.owned).detach().flatten().clone())
        for name, one in owned.fragments.items()
        if not owned.is_copy and value_of(one.owned) is not None
    ]


def put_together(ranks: list[list[Piece]], shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Whole tensors from the pieces of all ranks; each element has exactly one owner."""
    whole = {name: torch.zeros(shape, dtype=torch.float64).flatten() for name, shape in shapes.items()}
    seen = {name: torch.zeros(len(value), dtype=torch.long) for name, value in whole.items()}
    for part, name, begin, end, values in (piece for of_rank in ranks for piece in of_rank):
        numbers = torch.arange(whole[name if part is None else part.name].numel())
        at = numbers[begin:end] if part is None else part.of(numbers.view(part.shape)).flatten()[begin:end]
        name = name if part is None else part.name
        whole[name][at] = values.double()
        seen[name][at] += 1
    assert all((one == 1).all() for one in seen.values()), "an element has no owner, or two"
    return {name: value.view(shapes[name]) for name, value in whole.items()}
