"""The numeric reference: one process, the whole global batch in one piece, plain torch.

It imports only the toys' models and data from the product. A step takes the next samples in the data's own
order; the last batch of an epoch is the remainder; a term's loss is its sum over the batch divided by its count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

SEED = 7


@dataclass
class Curve:
    """What a plain loop saw: per step the loss before the update and the gradient."""

    losses: list[float] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    absent: list[list[bool]] = field(default_factory=list)


def two_terms(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    hidden = torch.tanh(model["body"](batch["x"]))
    loss = F.cross_entropy(model["cls"](hidden), batch["y"], reduction="sum") / len(batch["x"])
    squares = (model["reg"](hidden) - batch["z"]) ** 2
    if batch["mask"].sum() > 0:
        loss = loss + 0.25 * (squares * batch["mask"]).sum() / batch["mask"].sum()
    return loss


def sometimes_unused(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    total = torch.zeros((), dtype=batch["x"].dtype)
    for x, y, takes_branch in zip(batch["x"], batch["y"], batch["branch"]):
        output = model["main"](x)
        if takes_branch:
            output = output + model["branch"](x)
        total = total + (output[0] - y) ** 2
    return total / len(batch["x"])


def integers(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (batch["x"] @ model.weight[0] - batch["y"]).abs().sum() / len(batch["x"])


def images(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    columns: dict[str, torch.Tensor],
    loss_of: Callable[[Any, dict[str, torch.Tensor]], torch.Tensor],
    *,
    batch_of_epoch: Callable[[int], int],
    steps: int,
    dtype: torch.dtype,
) -> Curve:
    """Train `steps` steps; `batch_of_epoch(e)` is the global batch of epoch e, from 1."""
    curve, epoch, at = Curve(), 1, 0
    samples = len(next(iter(columns.values())))
    columns = {name: c.to(dtype) if c.is_floating_point() else c for name, c in columns.items()}
    model.to(dtype)
    for _ in range(steps):
        end = min(samples, at + batch_of_epoch(epoch))
        batch = {name: column[at:end] for name, column in columns.items()}
        at, epoch = (0, epoch + 1) if end == samples else (end, epoch)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, batch)
        loss.backward()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        flat = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters]
        curve.gradients.append(torch.cat(flat).detach().clone())
        curve.absent.append([p.grad is None for p in parameters])
        curve.losses.append(loss.item())
        optimizer.step()
    return curve
