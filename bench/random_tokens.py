"""Causal language models on synthetic tokens in memory: tasks for the benchmarks, and for plain loops beside them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetseq import Task
from hetseq.tasks.gpt.model import GptConfig, GptForCausalLM
from hetseq.tasks.nn.activation_checkpointing import checkpoint_activations_

SAMPLES = 4096


class RandomTokens(torch.utils.data.Dataset[Any]):
    """Rows of tokens, (SAMPLES, length)."""

    def __init__(self, words: int, length: int) -> None:
        self.rows = torch.randint(words, (SAMPLES, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return self.rows[indices]

    def collater(self, samples: Any) -> Any:
        return samples


def summed_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """The cross entropy of all tokens but the first of each row, in nats, summed."""
    length = rows.shape[1]
    positions = torch.arange(rows.numel()).view_as(rows)[:, : length - 1].flatten()
    return F.cross_entropy(model(rows, positions), rows[:, 1:].flatten(), reduction="sum")


class RandomTokenTask(Task):
    """Modelling of made-up tokens by a small GPT, without dropout; subclasses have other sizes."""

    words, length, width, layers = 2000, 64, 256, 8  # 6.8 M parameters

    @classmethod
    def network(cls) -> GptForCausalLM:
        """The network with new weights."""
        config = GptConfig(
            cls.words, cls.width, cls.layers, cls.width // 64, cls.width // 64, 64, 4 * cls.width, cls.length,
            embedding_dropout=0.0, residual_dropout=0.0, attention_dropout=0.0,
        )  # fmt: skip
        return GptForCausalLM(config)

    @classmethod
    def rows(cls) -> RandomTokens:
        """The data set."""
        return RandomTokens(cls.words, cls.length)

    def load_dataset(self, split: str) -> RandomTokens:
        return self.rows()

    def build_model(self) -> GptForCausalLM:
        return self.network()

    def count(self, sample: Any) -> dict[str, float]:
        return {"loss": sample.shape[0] * (sample.shape[1] - 1)}

    def loss(self, model: nn.Module, sample: Any) -> dict[str, Tensor]:
        return {"loss": summed_loss(model, sample)}


class Tiny(RandomTokenTask):
    """As small as it can be, with every kind of parameter: 0.13 M."""

    words, length, width, layers = 256, 16, 64, 2


class Large(RandomTokenTask):
    """40 M parameters. Layers are computed again in backward, so activations take little room beside them."""

    words, length, width, layers = 4000, 64, 512, 12

    def build_model(self) -> GptForCausalLM:
        model = self.network()
        checkpoint_activations_(model)
        return model


class Huge(Large):
    """230 M parameters in many layers, each of which is 3 % of them."""

    words, length, width, layers = 4000, 16, 768, 32


class Deep(Large):
    """457 M parameters in many layers, each of which is 1.5 % of them."""

    words, length, width, layers = 4000, 16, 768, 64


class TwoUnits(Large):
    """As `Large`, for a try of the script: 4 M parameters."""

    words, length, width, layers = 4000, 16, 256, 4


GPTS = {"gpt": RandomTokenTask, "gpt-tiny": Tiny, "gpt-4m": TwoUnits, "gpt-40m": Large}
