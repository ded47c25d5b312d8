"""Ranks that divide one model: torch's process group of a test, and trainings that give whole tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import tiny_models

STEPS, LIMIT, MICRO_BATCHES = 3, 0.5, 2
#: The gradient of a key's bias is 0 but for rounding, 1e-17, as a softmax does not see it. AdamW divides by it, so with
#: torch's eps of 1e-8 two orders of one sum are 7e-12 apart after three steps.
EPS = 1e-6


@dataclass
class Curve:
    """A training by AdamW with clipping: losses, norms before clipping, whole gradients and parameters by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    is_tied: bool = False
    elements: int = 0  # that it holds
    storage: int = 0  # the elements for which it has memory


@contextmanager
def mesh_of(group: Any, folder: str) -> Iterator[Any]:
    """A mesh of one dimension of all ranks of a test, over loopback."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(Path(folder) / "store"), group.world_size), rank=group.rank,
        world_size=group.world_size, timeout=timedelta(seconds=60),
    )  # fmt: skip
    try:
        yield init_device_mesh("cpu", (group.world_size,))
    finally:
        distributed.destroy_process_group()


def model_of(kind: str, fields: Mapping[str, Any]) -> nn.Module:
    return tiny_models.build(tiny_models.configure(kind, **fields)).train()


def words(step: int) -> Tensor:
    """Rows of a micro-batch, (3, 7); among them the padding word, number 2, and the third word of each other part."""
    draw = torch.Generator().manual_seed(step)
    rows = torch.randint(tiny_models.VOCABULARY, (3, 7), generator=draw)
    rows[0, -2:] = 2
    rows[1, 1:4] = 2 + tiny_models.VOCABULARY // 4 * torch.arange(1, 4)
    return rows


def train_alone(kind: str, fields: Mapping[str, Any]) -> Curve:
    """The oracle: one process and plain torch."""
    model: Any = model_of(kind, fields)
    optimizer, curve = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS, foreach=False), Curve()
    for step in range(STEPS):
        optimizer.zero_grad()
        curve.losses.append(_backward(model, step))
        curve.gradients.append(
            {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        )
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        curve.norms.append(norm.item())
        optimizer.step()
    curve.parameters = {name: one.detach().clone() for name, one in model.named_parameters()}
    curve.elements = sum(one.numel() for one in model.parameters())
    return curve


def train_divided(group: Any, folder: str, models: Mapping[str, tuple[str, Mapping[str, Any]]]) -> dict[str, Curve]:
    """The same of several models on ranks that divide each of them."""
    with mesh_of(group, folder) as mesh:
        return {name: _train_divided(mesh, kind, fields) for name, (kind, fields) in models.items()}


def _train_divided(mesh: Any, kind: str, fields: Mapping[str, Any]) -> Curve:
    from hetseq.parallel.tensor_parallel import gradient_norm, tensor_parallel_, whole_tensor

    model: Any = model_of(kind, fields)
    tensor_parallel_(model, mesh, seed=0)
    parameters = list(model.parameters())
    optimizer, curve = torch.optim.AdamW(parameters, lr=1e-2, eps=EPS, foreach=False), Curve()
    for step in range(STEPS):
        optimizer.zero_grad()
        curve.losses.append(_backward(model, step))
        curve.gradients.append(
            {name: whole_tensor(one.grad).clone() for name, one in model.named_parameters() if one.grad is not None}
        )
        norm = gradient_norm(parameters)
        curve.norms.append(norm.item())
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad *= min(1.0, LIMIT / (norm.item() + 1e-6))
        optimizer.step()
    curve.parameters = {name: whole_tensor(one) for name, one in model.named_parameters()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    curve.is_tied = embedding.weight is head.weight
    local = [getattr(one, "_local_tensor", one) for one in parameters]
    curve.elements = sum(one.numel() for one in local)
    curve.storage = sum(one.untyped_storage().nbytes() for one in local) // 8
    return curve


def _backward(model: Any, step: int) -> float:
    """The summed loss of two micro-batches, whose gradients add up."""
    total = 0.0
    for number in range(MICRO_BATCHES):
        rows = words(MICRO_BATCHES * step + number)
        logits = model(input_ids=rows).logits  # (rows, words, vocabulary)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten(), reduction="sum") / 36
        loss.backward()
        total += loss.item()
    return total


class Block(nn.Module):
    """Two linear layers with dropout between them and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.inside = nn.Linear(8, 64), nn.Dropout(0.5)
        self.down, self.outside = nn.Linear(64, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.outside(self.down(self.inside(self.up(x))))
        return result


@dataclass
class Dropped:
    """Which elements a rank kept in the dropout inside and outside of divided layers, and its gradient."""

    inside: list[list[bool]]
    outside: list[list[bool]]
    gradient: Tensor


def drop(group: Any, folder: str, seeds: list[int], is_checkpointed: bool) -> dict[int, Dropped]:
    """Two blocks on ranks that divide them, by tensor-parallel seed; every rank has the same seed of torch."""
    from hetseq.parallel.activation_checkpointing import checkpoint_activations
    from hetseq.parallel.tensor_parallel import plan_of, tensor_parallel_, whole_tensor

    found = {}
    with mesh_of(group, folder) as mesh:
        for seed in seeds:
            torch.manual_seed(1)
            model = nn.Sequential(Block(), Block()).double()
            plan = plan_of(model, {"*.up": "colwise", "*.down": "rowwise"})
            tensor_parallel_(model, mesh, seed=seed, plan=plan)
            if is_checkpointed:
                checkpoint_activations(model, ["0", "1"])
            kept: dict[str, list[list[bool]]] = {"inside": [], "outside": []}
            for name, module in model.named_modules():
                if isinstance(module, nn.Dropout):
                    module.register_forward_hook(partial(_keep, kept[name.rpartition(".")[2]]))
            torch.manual_seed(2)
            model(torch.randn(4, 8, dtype=torch.float64)).square().sum().backward()
            gradients = [whole_tensor(one.grad).flatten() for one in model.parameters() if one.grad is not None]
            found[seed] = Dropped(kept["inside"], kept["outside"], torch.cat(gradients))
    return found


def _keep(kept: list[list[bool]], _: nn.Module, given: Any, result: Tensor) -> None:
    kept.append((result != 0).flatten().tolist())


def refuse(group: Any, folder: str) -> str:
    """The error on a rank whose model has other numbers than the first rank's."""
    from hetseq.errors import DisagreementError
    from hetseq.parallel.tensor_parallel import plan_of, tensor_parallel_

    with mesh_of(group, folder) as mesh:
        torch.manual_seed(3)
        model = nn.Sequential(Block())
        with torch.no_grad():
            model[0].down.bias += group.rank
        try:
            tensor_parallel_(model, mesh, seed=0, plan=plan_of(model, {"0.up": "colwise", "0.down": "rowwise"}))
        except DisagreementError as error:
            return str(error)
    return "nothing"
