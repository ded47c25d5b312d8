"""BERT: pre-training (task `bert`) and fine-tuning (`bert_ner`, `bert_classify`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetseq.tasks.lazy_names import importer

if TYPE_CHECKING:
    from hetseq.tasks.bert.task import BertTask

__all__ = ["BertTask"]

__getattr__ = importer(__name__, {"BertTask": "task"})
