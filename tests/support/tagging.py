"""The task of tagged words, trained by SGD, whose gradients are kept."""

from __future__ import annotations

from typing import Any

import torch

from hetseq.tasks.bert.ner import BertNerTask
from tests.support import toys


class RecordingNer(BertNerTask):
    """`--task tests/support/tagging.py:RecordingNer`."""

    def build_optimizer(self, parameter_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return toys.recording(torch.optim.SGD)(parameter_groups, lr=0.1)
