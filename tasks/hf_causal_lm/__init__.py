"""The task `hf_causal_lm`: training of any causal language model of Hugging Face transformers, whole or with LoRA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetseq.tasks.lazy_names import importer

if TYPE_CHECKING:
    from hetseq.tasks.hf_causal_lm.task import HfCausalLmTask

__all__ = ["HfCausalLmTask"]

__getattr__ = importer(__name__, {"HfCausalLmTask": "task"})
