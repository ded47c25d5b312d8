"""BERT with a head of labels: one for each word, or one for each row.

Responsible for the two heads; the encoder is that of `tasks/bert/model.py`. Arithmetic and names are those of
`BertForTokenClassification` and `BertForSequenceClassification` of Hugging Face: dropout, then one dense layer. Freshly
made, they are initialised as pre-training is.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from hetseq.tasks.bert.model import BertConfig, BertForPreTraining
from hetseq.tasks.bert.packing import Sequences
from hetseq.tasks.nn.dropout import Dropout


class BertForTokenClassification(nn.Module):
    """A label for chosen tokens. It has no pooler.

    `labels` are the names of the logits, `dropout` is the rate before the head; None: `hidden_dropout_prob`.
    """

    def __init__(self, config: BertConfig, labels: tuple[str, ...], *, dropout: float | None = None) -> None:
        super().__init__()
        self.config, self.labels = config, labels
        self.bert = BertForPreTraining(config).bert
        self.bert.register_module("pooler", nn.Identity())  # nobody asks for what it would give
        self.dropout = Dropout(config.hidden_dropout_prob if dropout is None else dropout)
        self.classifier = _classifier(config, labels)

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor | Sequences, positions: Tensor
    ) -> Tensor:  # fmt: skip
        """Logits (m, labels) of the tokens at `positions` (m,) int64, row * L + column; the rest as in pre-training.

        Of a packed batch there are its `Sequences` in place of the mask, and positions are 0 to T - 1.
        """
        chosen, _ = self.bert(input_ids, token_type_ids, attention_mask, wanted=positions)  # (m, hidden_size)
        return cast(Tensor, self.classifier(self.dropout(chosen)))


class BertForSequenceClassification(nn.Module):
    """A label for each row, by its pooled output. `labels` and `dropout` as for tokens."""

    def __init__(self, config: BertConfig, labels: tuple[str, ...], *, dropout: float | None = None) -> None:
        super().__init__()
        self.config, self.labels = config, labels
        self.bert = BertForPreTraining(config).bert
        self.dropout = Dropout(config.hidden_dropout_prob if dropout is None else dropout)
        self.classifier = _classifier(config, labels)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor | Sequences) -> Tensor:
        """Logits (n, labels), in the order of the samples; of a packed batch too."""
        nothing_else = input_ids.new_empty(0)
        _, pooled = self.bert(input_ids, token_type_ids, attention_mask, wanted=nothing_else)
        return cast(Tensor, self.classifier(self.dropout(pooled)))


Labelling = BertForTokenClassification | BertForSequenceClassification


def _classifier(config: BertConfig, labels: tuple[str, ...]) -> nn.Linear:
    dense = nn.Linear(config.hidden_size, len(labels))
    nn.init.normal_(dense.weight, std=config.initializer_range)
    nn.init.zeros_(dense.bias)
    return dense
