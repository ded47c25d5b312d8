"""Training in which ranks own parts of the state, as facts that a test can put together again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hetseq import Task
from hetseq import config as options
from hetseq.balance import ownership
from hetseq.comm.group import GlooGroup, Group
from hetseq.parallel import activation_offload
from hetseq.parallel.owned_parameters import _Kind
from hetseq.run.build import RankJob, build_session
from hetseq.run.loaded_task import load_material
from hetseq.run.session import Session
from hetseq.run_directory import RunDirectory
from hetseq.system import host_memory
from hetseq.task import make_task
from hetseq.training.muon import Muon
from hetseq.training.optim import Lamb
from tests.support import hungry
from tests.support.training import Recorder

WEIGHT_DECAY = 0.01  # of matrices
Piece = tuple[str, int, int, torch.Tensor]  # name of the parameter, begin, end, values


@dataclass
class OwnedFacts:
    """What one rank saw and owned."""

    losses: list[float | None] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[list[Piece | None]] = field(default_factory=list)  # by step, of what it owns
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    state: list[Piece] = field(default_factory=list)  # the moments at the end
    owned: int = 0
    sent: list[int] = field(default_factory=list)  # bytes by step
    received: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Setting:
    """A task of the product with another optimizer, without training some parameters, or with compiled layers."""

    base: type[Task]
    optimizer: str  # of `make_optimizer`
    frozen: str = "-"  # part of the names of parameters that are not trained
    compiles: bool = False  # each layer of a list by itself

    def task(self, config: options.Config) -> Any:
        """The task, as `make_task` makes it."""
        setting = self

        class Chosen(setting.base):  # type: ignore[misc, name-defined]
            def build_model(self) -> torch.nn.Module:
                model: torch.nn.Module = super().build_model()
                if setting.compiles:
                    compile_layers_(model)
                return setting.frozen_(model)

            def build_optimizer(self, parameter_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
                return make_optimizer(setting.optimizer, parameter_groups)

        return make_task(Chosen, config)

    def frozen_(self, model: torch.nn.Module) -> torch.nn.Module:
        for name, parameter in model.named_parameters():
            if self.frozen in name:
                parameter.requires_grad_(False)
        return model


def compile_layers_(model: torch.nn.Module) -> None:
    """Compile each layer by itself, into kernels of torch that round as they do without it."""
    warnings.filterwarnings(
        "ignore", message="The .grad attribute of a Tensor", category=UserWarning
    )  # of torch itself
    for layers in model.modules():
        for layer in layers if isinstance(layers, torch.nn.ModuleList) else ():
            layer.compile(backend="aot_eager", dynamic=True)


def make_optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer that a task could build, for the groups that the product or a plain loop makes."""
    if name == "lamb":
        return Lamb([{**g, "has_trust_ratio": g["params"][0].dim() > 1} for g in groups], lr=0.01)
    if name == "muon":
        return Muon([{**g, "use_muon": g["params"][0].dim() == 2} for g in groups], lr=0.01)
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adadelta": torch.optim.Adadelta,
        "adagrad": torch.optim.Adagrad,
    }  # fmt: skip
    settings = {
        "adamw": {"lr": 1e-3},
        "sgd": {"lr": 0.05, "momentum": 0.9},
        "adadelta": {"lr": 1.0},
        # a bias of keys has a gradient of 0, of which rounding leaves 1e-18: with the default of 1e-10 it would move
        "adagrad": {"lr": 0.01, "eps": 1e-6},
    }
    return kinds[name](groups, **settings[name])


def set_free_memory(monkeypatch: pytest.MonkeyPatch, bytes_: int) -> None:
    """Let this host have so many bytes available."""
    monkeypatch.setattr(host_memory, "available", lambda: host_memory.Available(bytes_, {}))


def session_of(
    group: Group, save_dir: str, words: list[str], recorder: Recorder, task_of: Callable[[Any], Any] | None = None
) -> Session:
    """A session in this process, which the caller closes; `task_of` makes the task of a configuration."""
    config = options.complete(options.parse([*words, "--save-dir", save_dir]))
    material = load_material(config, torch.device("cpu"), None if task_of is None else task_of(config), slot=group.rank)
    return build_session(RankJob(config, RunDirectory(Path(save_dir)), group, material, metrics=recorder))


def fragments_with_gradients(session: Session) -> list[Piece | None]:
    """Copies of the gradients of what this rank owns."""
    owned = session.controller.replica.owned
    assert owned is not None
    return [
        (name, one.begin, one.end, one.owned.grad.flatten().clone())
        for name, one in owned.fragments.items()
        if one.owned.grad is not None
    ]


def train_cases(
    group: Group, save_dir: str, cases: list[tuple[list[str], Setting]], shares_memory: bool
) -> list[OwnedFacts]:
    """A rank's life: one training after the other."""
    if shares_memory and isinstance(group, GlooGroup):
        group.meet_neighbours()
    activation_offload.LEAST_BYTES = 1  # the models are small
    return [train_owned(group, save_dir, words, False, setting) for words, setting in cases]


def train_owned(
    group: Group, save_dir: str, words: list[str], shares_memory: bool, setting: Setting | None = None
) -> OwnedFacts:
    """Train as rank `group.rank` with `--shard-model state` among `words`."""
    if shares_memory and isinstance(group, GlooGroup):
        group.meet_neighbours()
    recorder, facts = Recorder(), OwnedFacts()
    session = session_of(group, save_dir, words, recorder, None if setting is None else setting.task)
    replica = session.controller.replica
    assert replica.owned is not None
    exchange = replica.reducer.exchange  # type: ignore[attr-defined]

    def record(*_: Any) -> None:
        facts.gradients.append(fragments_with_gradients(session))
        facts.sent.append(exchange.sent_bytes)
        facts.received.append(exchange.received_bytes)

    replica.optimizer.register_step_pre_hook(record)
    try:
        session.train()
        facts.losses = [row["loss"] for row in recorder.rows]
        facts.norms = [row["grad_norm"] for row in recorder.rows]
        facts.parameters = whole_parameters(replica)
        whole = whole_parameters(replica, with_frozen=True)
        facts.frozen = {name: value for name, value in whole.items() if name not in facts.parameters}
        facts.owned = sum(one.end - one.begin for one in replica.owned.fragments.values())
        for name, one in replica.owned.fragments.items():
            for key, value in replica.optimizer.state[one.owned].items():
                if isinstance(value, torch.Tensor) and value.dim():
                    facts.state.append((f"{name}.{key}", one.begin, one.end, value.flatten().clone()))
        return facts
    finally:
        session.close()


def whole_parameters(replica: Any, *, with_frozen: bool = False) -> dict[str, torch.Tensor]:
    """Copies of the trained parameters, or of all, by name. Every rank calls it."""
    reducer, found = replica.reducer, {}
    reducer.gather()
    with reducer.without_gradients(), reducer.round():
        layer_of = getattr(reducer, "_number_of", {})  # by `id`, if parameters come and go
        for number in sorted({-1, *layer_of.values()}):
            if layer_of:  # as the forward of the layer does
                reducer._issue_to(_Kind.FORWARD, number)
                reducer._await(reducer._root if number < 0 else reducer._layers[number])
            for name, value in replica.model.named_parameters():
                if layer_of.get(id(value), -1) == number and (value.requires_grad or with_frozen):
                    found[name] = value.detach().clone()
    return {name: found[name] for name, _ in replica.model.named_parameters() if name in found}


def train_in_fine_cuts(group: Group, save_dir: str, words: list[str], shares_memory: bool) -> OwnedFacts:
    """As `train_owned`, with cuts between any two elements: the tensors of toys are smaller than a grain."""
    with mock.patch.object(ownership, "GRAIN", 1):
        return train_owned(group, save_dir, words, shares_memory)


@dataclass
class PlainCurve:
    """What a plain loop on one device saw: losses, the gradient of the first step, and the parameters at the end."""

    losses: list[float] = field(default_factory=list)
    gradient: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    parameters: torch.Tensor = field(default_factory=lambda: torch.empty(0))


def plain_curve(
    model: torch.nn.Module,
    optimizer: str,
    loss_of: Callable[[Any, int, int], torch.Tensor],
    *,
    samples: int,
    batch: int,
    steps: int,
    clip_norm: float = 0.0,
) -> PlainCurve:
    """Train in one process with the whole global batch; `loss_of(model, first, end)` is the mean over these samples."""
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    trained = [one for _, one in named]
    groups = [[one for one in trained if (one.dim() >= 2) == is_matrix] for is_matrix in (True, False)]
    settings = [{"params": one, "weight_decay": decay} for one, decay in zip(groups, (WEIGHT_DECAY, 0.0)) if one]
    stepper, curve, at = make_optimizer(optimizer, settings), PlainCurve(), 0
    for _ in range(steps):
        end = min(samples, at + batch)
        stepper.zero_grad(set_to_none=True)
        loss = loss_of(model, at, end)
        loss.backward()
        gradient = torch.cat([(one.grad if one.grad is not None else 0 * one.detach()).flatten() for one in trained])
        norm = gradient.norm().item()
        if clip_norm and norm > clip_norm:
            for one in trained:
                if one.grad is not None:
                    one.grad *= clip_norm / norm
            gradient = gradient * (clip_norm / norm)
        if not curve.losses:
            curve.gradient = gradient.detach().clone()
        curve.losses.append(loss.item())
        stepper.step()
        at = end % samples
    curve.parameters = torch.cat([one.detach().flatten() for one in trained])
    return curve


def whole_gradient(ranks: Sequence[list[Piece | None]], parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    """The flat gradient of all parameters, in the order of `parameters`, from the pieces of all ranks."""
    shapes = {name: value.shape for name, value in parameters.items()}
    pieces = [[one for one in of_rank if one is not None] for of_rank in ranks]
    return torch.cat([value.flatten() for value in put_together(pieces, shapes).values()])


@dataclass
class OwnedMeal(hungry.Meal):
    """A meal of which each rank saw the gradients of its own parts; the test adds the whole ones."""

    pieces: list[list[Piece | None]] = field(default_factory=list)
    shapes: dict[str, torch.Tensor] = field(default_factory=dict)  # parameters in the order of the optimizer


def eat_owned(
    group: Group, runs: list[tuple[str, hungry.Words, list[hungry.Appetite]]], shares_memory: bool
) -> list[OwnedMeal]:
    """As `hungry.eat_all`, with `--shard-model state` among the words."""
    if shares_memory and isinstance(group, GlooGroup):
        group.meet_neighbours()
    return [_eat_owned(group, save_dir, words, appetites[group.rank]) for save_dir, words, appetites in runs]


def _eat_owned(group: Group, save_dir: str, words: hungry.Words, appetite: hungry.Appetite) -> OwnedMeal:
    session, recorder = hungry.session_of(group, save_dir, words)
    controller: Any = session.controller
    replica, exchange = controller.replica, controller.replica.reducer.exchange
    group.all_reduce_sum = lambda tensor: None  # type: ignore[assignment, method-assign, return-value]
    fetched_again = hungry.keep_diary(group, session)
    note, send = group.all_reduce_sum, exchange.sum_to_owners
    del group.all_reduce_sum  # type: ignore[misc]

    def sent(flat: Any, total: torch.Tensor, **about: Any) -> Any:
        note(total)
        return send(flat, total, **about)

    exchange.sum_to_owners = sent
    controller.task.appetite, positions, caps, pieces = appetite, list[Any](), list[Any](), list[Any]()
    replica.optimizer.register_step_pre_hook(lambda *_: pieces.append(fragments_with_gradients(session)))
    replica.model.train()
    try:
        while not controller.has_ended():
            controller.train_step()
            positions.append(controller.state.position)
            caps.append(controller._computer.sizes.cap.samples)
        replica.reducer.gather()
        named = {name: value.detach() for name, value in replica.model.named_parameters()}
        return OwnedMeal(
            shares=[tuple(row["shares"]) for row in recorder.rows],
            positions=positions,
            steps=controller.task.steps,
            caps=caps,
            gradients=[],
            parameters=torch.cat([value.flatten() for value in named.values()]),
            total=replica.model["seen"].total.clone(),
            forwards=int(replica.model["seen"].forwards),
            losses=[row["loss"] for row in recorder.rows],
            fetched_again=fetched_again,
            lineage=str(controller.state.lineage),
            pieces=pieces,
            shapes=dict(sorted(named.items(), key=lambda item: item[1].dim() < 2)),
        )
    finally:
        session.close()


def put_together(pieces_of_ranks: list[list[Piece]], shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Whole tensors from the pieces of all ranks, which must not overlap; zeros where there is none."""
    whole = {name: torch.zeros(shape, dtype=torch.float64).flatten() for name, shape in shapes.items()}
    seen = {name: torch.zeros(len(value), dtype=torch.bool) for name, value in whole.items()}
    for pieces in pieces_of_ranks:
        for name, begin, end, values in pieces:
            assert not seen[name][begin:end].any(), f"{name} has two owners"
            seen[name][begin:end] = True
            whole[name][begin:end] = values.double()
    return {name: value.view(shapes[name]) for name, value in whole.items()}
