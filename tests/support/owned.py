"""Training in which ranks own parts of the state, as facts that a test can put together again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hetseq import config as options
from hetseq.comm.group import GlooGroup, Group
from hetseq.run.build import RankJob, build_session
from hetseq.run.loaded_task import load_material
from hetseq.run_directory import RunDirectory
from tests.support.training import Recorder

Piece = tuple[str, int, int, torch.Tensor]  # name of the parameter, begin, end, values


@dataclass
class OwnedFacts:
    """What one rank saw and owned."""

    losses: list[float | None] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[list[Piece | None]] = field(default_factory=list)  # by step, of what it owns
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    state: list[Piece] = field(default_factory=list)  # the moments at the end
    owned: int = 0
    sent: list[int] = field(default_factory=list)  # bytes by step
    received: list[int] = field(default_factory=list)


def train_owned(group: Group, save_dir: str, words: list[str], shares_memory: bool) -> OwnedFacts:
    """Train as rank `group.rank` with `--shard-model state` among `words`."""
    if shares_memory and isinstance(group, GlooGroup):
        group.meet_neighbours()
    config = options.complete(options.parse([*words, "--save-dir", save_dir]))
    recorder, facts = Recorder(), OwnedFacts()
    material = load_material(config, torch.device("cpu"))
    session = build_session(RankJob(config, RunDirectory(Path(save_dir)), group, material, metrics=recorder))
    replica = session.controller.replica
    assert replica.owned is not None
    exchange = replica.reducer.exchange  # type: ignore[attr-defined]

    def record(*_: Any) -> None:
        assert replica.owned is not None
        facts.gradients.append(
            [
                (name, one.begin, one.end, one.owned.grad.flatten().clone())
                for name, one in replica.owned.fragments.items()
                if one.owned.grad is not None
            ]
        )
        facts.sent.append(exchange.sent_bytes)
        facts.received.append(exchange.received_bytes)

    replica.optimizer.register_step_pre_hook(record)
    try:
        session.train()
        replica.reducer.gather()
        facts.losses = [row["loss"] for row in recorder.rows]
        facts.norms = [row["grad_norm"] for row in recorder.rows]
        facts.parameters = {name: value.detach().clone() for name, value in replica.model.named_parameters()}
        facts.owned = sum(one.end - one.begin for one in replica.owned.fragments.values())
        for name, one in replica.owned.fragments.items():
            for key, value in replica.optimizer.state[one.owned].items():
                if isinstance(value, torch.Tensor) and value.dim():
                    facts.state.append((f"{name}.{key}", one.begin, one.end, value.flatten().clone()))
        return facts
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
