"""The small GPT of `random_tokens` on ranks whose slices take chains, and on ranks whose slices never do."""

from __future__ import annotations

import sys

from random_tokens import RandomTokenTask

from hetseq.balance import chains
from hetseq.tasks.gpt.model import GptForCausalLM


class Chained(RandomTokenTask):
    """6.2 M parameters."""

    words, length, width, layers = 12_000, 16, 256, 4


class Direct(Chained):
    """The same without chains."""

    def build_model(self) -> GptForCausalLM:
        chains.FEWEST = sys.maxsize
        return super().build_model()
