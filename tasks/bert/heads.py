"""BERT with a classification head: a label for each word, or for each row.

Responsible for the two heads; `tasks/bert/model.py` has the encoder. Arithmetic and names equal Hugging Face's
`BertForTokenClassification` and `BertForSequenceClassification`: dropout, then one dense layer. New heads are
initialised as in pre-training.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from hetseq.tasks.bert.model import TENSOR_PLAN, BertConfig, BertForPreTraining, initialise_
from hetseq.tasks.bert.packing import Sequences
from hetseq.tasks.nn.dropout import Dropout


class BertForTokenClassification(nn.Module):
    """Predicts a label for chosen tokens. It has no pooler.

    `labels`: names of the logits; `dropout`: rate before the head; None: `hidden_dropout_prob`.
    """

    def __init__(self, config: BertConfig, labels: tuple[str, ...], *, dropout: float | None = None) -> None:
        super().__init__()
        self.config, self.labels = config, labels
        self.bert = BertForPreTraining(config).bert
        self.bert.register_module("pooler", nn.Identity())  # its output is not used
        self.dropout = Dropout(config.hidden_dropout_prob if dropout is None else dropout)
        self.classifier = nn.Linear(config.hidden_size, len(labels))
        self._init_weights(self.classifier)

    def _init_weights(self, module: nn.Module) -> None:
        initialise_(module, self.config.initializer_range)

    def tensor_plan(self) -> dict[str, str]:
        """How ranks divide it (`hetseq.Task.tensor_plan`)."""
        return dict(TENSOR_PLAN)

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor | Sequences, positions: Tensor
    ) -> Tensor:  # fmt: skip
        """Logits (m, labels) of the tokens at `positions` (m,) int64, row * L + column; the rest as in pre-training.

        For a packed batch, `Sequences` replace the mask, and positions are in 0 to T - 1.
        """
        chosen, _ = self.bert(input_ids, token_type_ids, attention_mask, wanted=positions)  # (m, hidden_size)
        return cast(Tensor, self.classifier(self.dropout(chosen)))


class BertForSequenceClassification(nn.Module):
    """Predicts a label for each row from its pooled output. `labels` and `dropout` as for tokens."""

    def __init__(self, config: BertConfig, labels: tuple[str, ...], *, dropout: float | None = None) -> None:
        super().__init__()
        self.config, self.labels = config, labels
        self.bert = BertForPreTraining(config).bert
        self.dropout = Dropout(config.hidden_dropout_prob if dropout is None else dropout)
        self.classifier = nn.Linear(config.hidden_size, len(labels))
        self._init_weights(self.classifier)

    def _init_weights(self, module: nn.Module) -> None:
        initialise_(module, self.config.initializer_range)

    def tensor_plan(self) -> dict[str, str]:
        """How ranks divide it (`hetseq.Task.tensor_plan`)."""
        return dict(TENSOR_PLAN)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor | Sequences) -> Tensor:
        """Logits (n, labels), in the order of the samples, also for a packed batch."""
        nothing_else = input_ids.new_empty(0)
        _, pooled = self.bert(input_ids, token_type_ids, attention_mask, wanted=nothing_else)
        return cast(Tensor, self.classifier(self.dropout(pooled)))


Labelling = BertForTokenClassification | BertForSequenceClassification
