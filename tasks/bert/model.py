"""BERT with its two pre-training heads.

Responsible for the arithmetic and for the names of the parameters; knows no data files, losses or ranks. `config`
reads `bert_config.json`. The one idea: only masked tokens are predicted, so only their rows reach the vocabulary head,
which would take 70 % of the arithmetic at 4 layers of 256 if every token did; and after attention in the last layer,
only they and the first tokens are computed. Forward never reads a value, so it never waits for a device. Batches are
padded, or packed by `packing`; the results are the same.

Arithmetic and names equal Hugging Face's `BertForPreTraining`, except that the latter lists tied tensors under two
further names, `TIED_NAMES`: leave them out when reading, and repeat the tensors when writing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetseq.tasks.bert.attention import AttendForSome, Attention, among_rows, within
from hetseq.tasks.bert.config import BertConfig
from hetseq.tasks.bert.packing import Sequences
from hetseq.tasks.nn.activation_checkpointing import LayerStack
from hetseq.tasks.nn.activations import ACTIVATIONS
from hetseq.tasks.nn.dropout import Dropout
from hetseq.tasks.nn.tied_embedding import Tied
from hetseq.tasks.nn.vocabulary_loss import vocabulary_loss

__all__ = ["TENSOR_PLAN", "TIED_NAMES", "BertConfig", "BertForPreTraining", "BertModel"]

#: names in Hugging Face's state_dict that ours does not have -> the name of the same tensor in both
TIED_NAMES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
#: how ranks divide the encoder: one product makes queries, keys and values, so attention stays whole
TENSOR_PLAN = {
    "bert.encoder.layer.*.intermediate.dense": "colwise",
    "bert.encoder.layer.*.output.dense": "rowwise",
}


class BertForPreTraining(nn.Module):
    """BERT with a head for masked tokens and one for the next sentence.

    The vocabulary head is tied: its matrix *is* the word embeddings, so it is not a separate parameter and appears once
    in `state_dict()`. `tasks/nn/huggingface.py` reads and writes Hugging Face directories. To load one of their
    `state_dict()`s, leave `TIED_NAMES` out; to make one, add them:

        model.load_state_dict({name: tensor for name, tensor in theirs.items() if name not in TIED_NAMES})
        theirs = ours | {name: ours[same] for name, same in TIED_NAMES.items()}

    A new model is initialised: weights normal with `initializer_range`, biases and the row of [PAD] zero, LayerNorms
    the identity. The first cross entropies are then ln vocab_size and ln 2.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.bert = BertModel(config)
        self.cls = _Heads(config)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        initialise_(module, self.config.initializer_range)

    def tensor_plan(self) -> dict[str, str]:
        """How ranks divide it (`hetseq.Task.tensor_plan`)."""
        return dict(TENSOR_PLAN)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        attention_mask: Tensor | Sequences,
        masked_positions: Tensor,
        masked_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Vocabulary logits (m, vocab_size) of the masked positions only, and next-sentence logits (n, 2).

        With `masked_ids` (m,) int64, the correct words, the first result is the sum of their cross entropies in nats, a
        scalar.

        input_ids, token_type_ids: (n, L) int64; attention_mask: (n, L) bool, True for a real token, False for padding;
        masked_positions: (m,) int64, row * L + column. m may be 0: the sum of no cross entropies is 0, with zero
        gradients. For a packed batch, the first two are (T,), `Sequences` replace the mask, and masked_positions are in
        0 to T - 1. Raises ValueError for shapes that do not fit each other or the model, never for values.
        """
        if masked_positions.ndim != 1:
            raise ValueError(
                f"masked_positions has shape {tuple(masked_positions.shape)}, expected (m,): row * L + column of each"
            )
        words = self.bert.embeddings.word_embeddings
        tied = Tied(words.weight, padding=words.padding_idx)
        masked, pooled = self.bert(
            input_ids, token_type_ids, attention_mask, look_up=tied.look_up, wanted=masked_positions
        )  # fmt: skip
        return self.cls.predictions(masked, tied.head, masked_ids), self.cls.seq_relationship(pooled)


class BertModel(nn.Module):
    """The encoder: ids and mask as in `BertForPreTraining`, to hidden states (n, L, hidden_size) and (n, hidden_size).

    The first result is (T, hidden_size) for a packed batch, and (k, hidden_size) if only k positions are wanted, which
    saves most of the last layer. The second is the pooled output: the first tokens after another dense layer and tanh.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = _Embeddings(config)
        self.encoder = _Encoder(config)
        self.pooler = _Pooler(config)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        attention_mask: Tensor | Sequences,
        look_up: Callable[[Tensor], Tensor] | None = None,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`look_up` replaces the word embeddings; `wanted`: (k,) int64, like masked_positions; None: all.

        Raises ValueError as `BertForPreTraining` does.
        """
        most = self.embeddings.position_embeddings.num_embeddings
        look_up = look_up or self.embeddings.word_embeddings
        if isinstance(attention_mask, Sequences):
            _check_packed(input_ids, token_type_ids, attention_mask, most)
            embedded = self.embeddings(look_up(input_ids), token_type_ids, attention_mask.positions)
            attend, starts = within(attention_mask), attention_mask.starts
        else:
            _check_shapes(input_ids, token_type_ids, attention_mask, most)
            embedded = self.embeddings(look_up(input_ids), token_type_ids)
            attend = among_rows(attention_mask)
            starts = torch.arange(0, input_ids.numel(), input_ids.shape[1], device=input_ids.device)
        if wanted is None:
            hidden = self.encoder(embedded, attend)
            return hidden, self.pooler(hidden.flatten(0, -2).index_select(0, starts))
        hidden, first = self.encoder(embedded, attend, torch.cat([wanted, starts])).split([len(wanted), len(starts)])
        return hidden, self.pooler(first)


def _check_shapes(input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor, max_length: int) -> None:
    # a mask of another shape would broadcast, and a float mask would be added to the scores: wrong without an error
    shape = tuple(input_ids.shape)
    if len(shape) != 2 or shape[1] < 1:
        raise ValueError(f"input_ids has shape {shape}, expected (n, L) with L of at least 1")
    if shape[1] > max_length:
        raise ValueError(
            f"input_ids has shape {shape}, rows of {shape[1]} tokens: expected at most {max_length}, the"
            " max_position_embeddings of the model's configuration; make shorter rows, or a model with more positions"
        )
    for name, tensor in (("token_type_ids", token_type_ids), ("attention_mask", attention_mask)):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape} as input_ids has")
    if attention_mask.dtype is not torch.bool:
        raise ValueError(f"attention_mask is {attention_mask.dtype}, expected torch.bool: True where there is a token")


def _check_packed(input_ids: Tensor, token_type_ids: Tensor, sequences: Sequences, max_length: int) -> None:
    real, padding, count = sum(sequences.lengths), sequences.padding, len(sequences.lengths)
    shortest, longest = min(sequences.lengths, default=0), max(sequences.lengths, default=0)
    if not 1 <= shortest <= longest <= max_length:
        raise ValueError(
            f"{count} sequences have {shortest} to {longest} tokens: expected 1 to {max_length}, the"
            " max_position_embeddings of the model's configuration; make shorter rows, or a model with more positions"
        )
    for name, tensor, expected in (
        ("input_ids", input_ids, (real + padding,)), ("token_type_ids", token_type_ids, (real + padding,)),
        ("positions", sequences.positions, (real + padding,)), ("starts", sequences.starts, (count,)),
    ):  # fmt: skip
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected {expected}: {count} sequences of {real} tokens in"
                f" total, and {padding} of padding"
            )


class _Embeddings(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        size = config.hidden_size
        # padding_idx: looking up [PAD] gives its row no gradient; as a word of the tied head it gets one
        self.word_embeddings = nn.Embedding(config.vocab_size, size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size)
        self.LayerNorm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, words: Tensor, token_type_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        # (n, L, hidden_size), or (T, hidden_size) if the tokens' positions (T,) are given
        typed = words + self.token_type_embeddings(token_type_ids)
        if positions is None:
            placed = typed + self.position_embeddings.weight[: token_type_ids.shape[1]]
        else:
            placed = typed + self.position_embeddings(positions)
        return cast(Tensor, self.dropout(self.LayerNorm(placed)))


class _Encoder(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = LayerStack([_Layer(config) for _ in range(config.num_hidden_layers)])

    def forward(self, hidden: Tensor, attend: Attention, rows: Tensor | None = None) -> Tensor:
        last = None if rows is None else _View(attend, rows, attend.for_some(rows))
        return cast(Tensor, self.layer(hidden, _View(attend), last))


@dataclass(frozen=True, eq=False)
class _View:
    """The attention of a layer, and the `rows` (k,) int64 of hidden states to compute; None: all."""

    attend: Attention
    rows: Tensor | None = None
    attend_for_rows: AttendForSome | None = None

    def chosen(self, hidden: Tensor) -> Tensor:
        """(n, L, size) or (T, size) to (k, size), or unchanged."""
        return hidden if self.rows is None else hidden.flatten(0, -2).index_select(0, self.rows)


class _Layer(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = _Attention(config)
        self.intermediate = _DenseWithActivation(config, config.intermediate_size)
        self.output = _AddAndNorm(config, config.intermediate_size)

    def forward(self, hidden: Tensor, view: _View) -> Tensor:
        attended = self.attention(hidden, view)
        return cast(Tensor, self.output(self.intermediate(attended), attended))


class _Attention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = _SelfAttention(config)
        self.output = _AddAndNorm(config, config.hidden_size)

    def forward(self, hidden: Tensor, view: _View) -> Tensor:
        chosen = view.chosen(hidden)
        return cast(Tensor, self.output(self.self(hidden, chosen, view), chosen))


class _SelfAttention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads, self.dropout_rate = config.num_attention_heads, config.attention_probs_dropout_prob
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size)
        self.value = nn.Linear(size, size)

    def forward(self, hidden: Tensor, chosen: Tensor, view: _View) -> Tensor:
        rate = self.dropout_rate if self.training else 0.0
        if view.attend_for_rows is None:
            return view.chosen(view.attend(self._project(hidden, self.query, self.key, self.value), rate).flatten(-2))
        query, others = self._project(chosen, self.query), self._project(hidden, self.key, self.value)
        return view.attend_for_rows(query.squeeze(-3), others, rate).flatten(-2)

    def _project(self, hidden: Tensor, *parts: nn.Linear) -> Tensor:
        # (..., size) to (..., parts, heads, head size), by one product
        weight, bias = torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
        return cast(Tensor, F.linear(hidden, weight, bias).unflatten(-1, (len(parts), self.heads, -1)))


class _AddAndNorm(nn.Module):
    """A dense layer back to the hidden size, dropout, and the normalised sum with the residual `around`."""

    def __init__(self, config: BertConfig, in_features: int) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, around: Tensor) -> Tensor:
        return cast(Tensor, self.LayerNorm(self.dropout(self.dense(x)) + around))


class _DenseWithActivation(nn.Module):
    def __init__(self, config: BertConfig, out_features: int) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, out_features)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.dense(x))


class _Pooler(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, first: Tensor) -> Tensor:
        return torch.tanh(self.dense(first))  # (n, hidden_size)


class _Heads(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = _VocabularyHead(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)


class _VocabularyHead(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = _Transform(config)
        self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def forward(self, hidden: Tensor, word_embeddings: Tensor, ids: Tensor | None) -> Tensor:
        transformed = self.transform(hidden)
        if ids is None:
            return F.linear(transformed, word_embeddings, self.bias)
        return vocabulary_loss(transformed, word_embeddings, self.bias, ids)


class _Transform(_DenseWithActivation):
    def __init__(self, config: BertConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.LayerNorm(super().forward(x)))


@torch.no_grad()
def initialise_(module: nn.Module, standard_deviation: float) -> None:
    """Set the parameters that a module itself has; not of norms, which begin as the identity."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=standard_deviation)
    if isinstance(module, nn.Linear | _VocabularyHead):
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        module.weight[module.padding_idx].zero_()
