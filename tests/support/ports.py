"""Third-party training programs as small tasks: each keeps the property that made its port fail or be misjudged.

The network is small; the original's handling of its loss, batches or state is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hetseq import Task, option

SAMPLES, WORDS = 48, 16


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Sample i is a row of four numbers made of i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


class Port(Task):
    """Two linear layers, and the squared error of rebuilding a row."""

    def load_dataset(self, split: str) -> Any:
        return Numbers() if split == "train" else None

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4))

    def loss(self, model: nn.Module, sample: torch.Tensor) -> Any:
        return {"loss": ((model(sample) - sample) ** 2).sum()}


class TwoPhases(Port):
    """A GAN's turns: steps of one term, then of the other, as `update_step` has set."""

    phase = 0

    def update_step(self, num_updates: int) -> None:
        self.phase = num_updates % 2

    def count(self, sample: torch.Tensor) -> dict[str, float]:
        return {"first": len(sample) * (self.phase == 0), "second": len(sample) * (self.phase == 1)}

    def loss(self, model: nn.Module, sample: torch.Tensor) -> Any:
        error = ((model(sample) - sample) ** 2).sum()
        return {"first": error * (self.phase == 0), "second": 2 * error * (self.phase == 1)}


class PhasesOfTheBatch(Port):
    """The same with the phase in the batch: samples of one sign have the first term, the others the second."""

    def count(self, sample: torch.Tensor) -> dict[str, float]:
        first = int((sample[:, 0] > 0).sum())
        return {"first": first, "second": len(sample) - first}

    def loss(self, model: nn.Module, sample: torch.Tensor) -> Any:
        errors = ((model(sample) - sample) ** 2).sum(1)
        is_first = sample[:, 0] > 0
        return {"first": errors[is_first].sum(), "second": 2 * errors[~is_first].sum()}


class NeverAGradient(Port):
    """The loss is made of a detached output: nothing is learned."""

    def loss(self, model: nn.Module, sample: torch.Tensor) -> Any:
        output = model(sample)
        return {"loss": ((output.detach() - sample) ** 2).sum() + 0 * output.sum()}


@dataclass(frozen=True)
class NanOptions:
    """How often the loss is NaN."""

    fault_every: int = option(1, "the loss of every N-th step is NaN")


class NanOfAConstant(Port):
    """The loss is NaN, and its gradient is finite: the added value is detached."""

    Options = NanOptions
    updates = 0

    def update_step(self, num_updates: int) -> None:
        self.updates = num_updates

    def loss(self, model: nn.Module, sample: torch.Tensor) -> Any:
        error = ((model(sample) - sample) ** 2).sum()
        is_broken = model.training and (self.updates + 1) % self.options.fault_every == 0
        return {"loss": error + (math.nan if is_broken else 0.0)}


class Mlm(Task):
    """run_mlm: Hugging Face's BERT and its collator, which masks at random."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        from transformers import BertTokenizerFast, DataCollatorForLanguageModeling

        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(WORDS))]
        tokenizer = BertTokenizerFast(vocab={word: number for number, word in enumerate(words)})
        self._collator, self._words = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3), len(words)

    def load_dataset(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(5, self._words, (SAMPLES, 8), generator=generator).tolist()
        return [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows] if split == "train" else None

    def collater(self, samples: Any) -> Any:
        return self._collator(samples)

    def build_model(self) -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        return BertForMaskedLM(
            BertConfig(
                vocab_size=self._words, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                intermediate_size=16, max_position_embeddings=16, initializer_range=0.001,  # every word costs ln V
            )
        )  # fmt: skip

    def count(self, sample: Any) -> dict[str, float]:
        return {"mlm": int((sample["labels"] != -100).sum())}

    def loss(self, model: nn.Module, sample: Any) -> Any:
        logits = model(input_ids=sample["input_ids"], attention_mask=sample["attention_mask"]).logits
        return {"mlm": F.cross_entropy(logits.flatten(0, 1), sample["labels"].flatten(), reduction="sum")}


class TiedHead(nn.Module):
    """nanoGPT's tie: the head shares the embedding's weight, and `state_dict()` has both names."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, 8)
        self.lm_head = nn.Linear(8, WORDS, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, words: torch.Tensor) -> Any:
        return self.lm_head(self.wte(words))


class NanoGpt(Task):
    """Each word predicts the next one."""

    def load_dataset(self, split: str) -> Any:
        rows = torch.randint(0, WORDS, (SAMPLES, 9), generator=torch.Generator().manual_seed(0))
        return list(rows) if split == "train" else None

    def build_model(self) -> nn.Module:
        return TiedHead()

    def count(self, sample: torch.Tensor) -> dict[str, float]:
        return {"loss": sample[:, 1:].numel()}

    def loss(self, model: nn.Module, sample: torch.Tensor) -> Any:
        logits = model(sample[:, :-1])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), sample[:, 1:].flatten(), reduction="sum")}


class TwoOptimizers(Port):
    """As Lightning takes them."""

    def build_optimizer(self, parameter_groups: Any) -> Any:
        return [torch.optim.SGD(parameter_groups, lr=0.1), torch.optim.Adam(parameter_groups)]


class ForeignOptimizer(Port):
    """An optimizer of another framework: it only looks like one."""

    def build_optimizer(self, parameter_groups: Any) -> Any:
        class Momentum:
            param_groups = parameter_groups

            def step(self) -> None: ...

        return Momentum()


class LazyModel(Port):
    """The sizes are found in the first forward."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 4))


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """Samples that only come one after the other."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(Numbers()[index] for index in range(SAMPLES))


class Streaming(Port):
    """A data set without places."""

    def load_dataset(self, split: str) -> Any:
        return Stream() if split == "train" else None


class SpectralNorm(Port):
    """A discriminator's layer: in training each forward moves a buffer by one step of the power iteration."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 4))


class MixupInLoss(Port):
    """timm's Mixup, called in the loss: it draws by NumPy, and mixes each sample with another one of its batch."""

    def loss(self, model: nn.Module, sample: torch.Tensor) -> Any:
        if model.training:
            if len(sample) % 2:
                raise AssertionError("Batch size should be even when using this")
            sample = sample.lerp(sample.flip(0), np.random.beta(1, 1))
        return super().loss(model, sample)


class FlakyCard(Port):
    """Once a gradient is not finite, and not when it is computed again."""

    has_happened = False

    def loss(self, model: nn.Module, sample: torch.Tensor) -> Any:
        error = ((model(sample) - sample) ** 2).sum()
        if model.training and not FlakyCard.has_happened:
            FlakyCard.has_happened = True
            error.register_hook(lambda gradient: gradient * math.inf)
        return {"loss": error}


class MixupInCollater(Port):
    """The same Mixup where it belongs: the batch is mixed before it is counted."""

    def collater(self, samples: Any) -> torch.Tensor:
        batch = torch.stack(list(samples))
        return batch.lerp(batch.flip(0), np.random.beta(1, 1))


class WordModel(nn.Module):
    """word_language_model: an LSTM whose hidden state of one batch is the initial state of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(WORDS, 6), nn.LSTM(6, 6, batch_first=True), nn.Linear(6, WORDS)
        self.hidden: Any = None

    def forward(self, words: torch.Tensor) -> Any:
        hidden = None if self.hidden is None else tuple(part[:, -1:].expand(-1, len(words), -1) for part in self.hidden)
        output, self.hidden = self.lstm(self.embed(words), None if hidden is None else tuple(map(_whole, hidden)))
        self.hidden = tuple(part.detach() for part in self.hidden)
        return self.head(output)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous()


class StatefulLstm(NanoGpt):
    """Each word predicts the next one, from the words of the batches before."""

    def build_model(self) -> nn.Module:
        return WordModel()
