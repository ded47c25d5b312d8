"""The task `gpt`: training of causal language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetseq.tasks.lazy_names import importer

if TYPE_CHECKING:
    from hetseq.tasks.gpt.task import GptTask

__all__ = ["GptTask"]

__getattr__ = importer(__name__, {"GptTask": "task"})
