"""Two towers and a temperature, with the loss of CLIP over the whole global batch; words as for `lines`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hetseq
from tests.support.loops.happening import happen, note

STEPS, SAMPLES, BATCH = 8, 110, 24


class Pairs(torch.utils.data.Dataset[Any]):
    """Two views of the same few numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        draw = torch.Generator().manual_seed(index)
        seen = torch.randn(4, generator=draw)
        return torch.cat([seen, torch.randn(3, generator=draw)]), torch.cat([torch.randn(2, generator=draw), -seen])


class TwoTowers(nn.Module):
    """Rows of length 1 for both views, with dropout, and the temperature of their products."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(7, 16), nn.GELU(), nn.Linear(16, 8))
        self.text = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def embed(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)

    def loss(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        logits, target = self.scale.exp() * image @ text.T, torch.arange(len(image), device=image.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def main() -> None:
    run = hetseq.start(seed=3)
    model = TwoTowers()
    run.own(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    for step in run.steps(Pairs(), global_batch_size=BATCH, max_steps=STEPS, clip_norm=0.5):

        def embed(batch: Any, number: int = step.number) -> Any:
            happen("body", run.rank, number)
            return model.embed(*batch)

        for image, text in step.whole(embed):
            happen("loss", run.rank, step.number)
            step.backward(model.loss(image, text))
        scale = float(model.scale.detach())
        note({"step": step.number, "loss": step.loss, "grad_norm": step.grad_norm, "scale": scale})


if __name__ == "__main__":
    main()
