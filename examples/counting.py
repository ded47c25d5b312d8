"""GPT-2 of Hugging Face's transformers, built from a config, as a task: nothing is downloaded.

It learns to count up and down, as in 7 8 9 0 1 or 2 1 0 9, in rows of 4 to 16 digits. `model(..., labels=...).loss`
would be a mean over the tokens of one micro-batch, and these are of unequal numbers. So the loss is the sum over the
predicted tokens, and `count` says how many there are. The second digit is a coin toss: 94 % of all can be known.

    hetseq train --task examples/counting.py:Counting --batch-size 32 --max-epoch 5 --lr 0.003 --save-dir runs/counts
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hetseq import ConfigError, Task

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    raise ConfigError(
        "examples/counting.py needs the package transformers: pip install 'transformers>=5', or try"
        " examples/discs.py, which needs nothing"
    ) from None

NOTHING = -100  # stands where there is nothing to predict


class Counting(Task):
    """Predict each digit from those before it; the second may be either neighbour of the first, the rest follow."""

    def load_dataset(self, split: str) -> list[Tensor]:  # type: ignore[override]  # a list is a map-style data set
        random = torch.Generator().manual_seed(1 if split == "train" else 2)
        drawn = torch.randint(10 * 13 * 2, (512,), generator=random).tolist()
        return [(n % 10 + (-1) ** (n // 130) * torch.arange(4 + n // 10 % 13)) % 10 for n in drawn]

    def collater(self, samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Digits and what follows each of them, both (n, longest - 1), padded on the right."""
        digits = pad_sequence([sample[:-1] for sample in samples], batch_first=True)
        return digits, pad_sequence([sample[1:] for sample in samples], batch_first=True, padding_value=NOTHING)

    def build_model(self) -> nn.Module:
        dropout = 0.1 if self.config.task.dropout is None else self.config.task.dropout
        model: nn.Module = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=10, n_positions=16, n_embd=64, n_layer=2, n_head=2, use_cache=False,
                bos_token_id=None, eos_token_id=None, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
            )
        )  # fmt: skip
        return model

    def count(self, sample: tuple[Tensor, Tensor]) -> dict[str, float]:
        return {"loss": float((sample[1] != NOTHING).sum())}

    def loss(self, model: nn.Module, sample: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        digits, following = sample
        logits = model(input_ids=digits).logits  # causal, so that padding on the right is seen by nobody
        return {"loss": F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")}

    def metrics(self, model: nn.Module, sample: tuple[Tensor, Tensor]) -> dict[str, tuple[float, float]]:
        digits, following = sample
        is_right = model(input_ids=digits).logits.argmax(dim=2) == following
        return {"accuracy": (float(is_right.sum()), float((following != NOTHING).sum()))}
