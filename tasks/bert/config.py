"""The configuration of a BERT, read from `bert_config.json` or `config.json`.

Responsible for valid values and for reading the file; knows no tensors, and imports no torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetseq import DataError
from hetseq.tasks.nn.model_config import (
    LARGEST_SIZE,
    MOST_LAYERS,
    MOST_PARAMETERS,
    WITHOUT_EFFECT,
    OtherModels,
    check_activation,
    check_divides,
    check_fraction,
    check_whole,
    own_keys,
    read_object,
)

_EXAMPLE = 'a JSON object such as {"vocab_size": 30522, "hidden_size": 256, ...}'

#: keys that ask for a different model unless they have one of these values -> the model they ask for
_OTHER_MODELS: OtherModels = {
    "model_type": (("bert",), "a model that is not BERT"),
    "position_embedding_type": (("absolute", None), "positions relative to each other"),
    "is_decoder": ((False, None), "a decoder, where a token sees only those before it"),
    "is_encoder_decoder": ((False, None), "an encoder beside a decoder"),
    "add_cross_attention": ((False, None), "attention to a second sequence"),
    "tie_word_embeddings": ((True, None), "a vocabulary head with weights of its own"),
    "pruned_heads": (({}, [], None), "layers with fewer heads than the others"),
}

#: patterns of keys that have no effect on this model
_WITHOUT_EFFECT = (*WITHOUT_EFFECT, "classifier_dropout", "directionality", "pooler_*", "xla_device", "*_token_id")


@dataclass(frozen=True)
class BertConfig:
    """The shape of a BERT, named as in Google's bert_config.json and Hugging Face's config.json; default: BERT-base.

    Raises DataError for a value that no model can have.
    """

    vocab_size: int
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "float":
                check_fraction(field.name, value, may_be_zero=field.name.endswith("_prob"))
                object.__setattr__(self, field.name, float(value))  # 0 and 0.0 are the same configuration on all nodes
            elif field.type == "int":
                # vocab_size is the first field, so it is a valid number when pad_token_id is checked
                low, high = (0, self.vocab_size - 1) if field.name == "pad_token_id" else (1, LARGEST_SIZE)
                check_whole(field.name, value, low, MOST_LAYERS if field.name == "num_hidden_layers" else high)
        check_activation("hidden_act", self.hidden_act)
        check_divides(
            "num_attention_heads", self.num_attention_heads, "hidden_size", self.hidden_size, "64 a head is usual"
        )
        if self.parameters > MOST_PARAMETERS:
            sizes = self._sizes()
            # blame the key whose usual value would shrink the model most: a product has no largest term
            key = min(_USUAL_SIZES, key=lambda key: _count_parameters(**sizes | {key: _USUAL_SIZES[key]}))
            raise DataError(
                f"{key} is {sizes[key]}: the model would have {self.parameters:,} parameters; expected at most"
                f" {MOST_PARAMETERS:,} parameters, and {_USUAL_SIZES[key]} is usual for {key}"
            )

    @property
    def parameters(self) -> int:
        """The number of parameters of `BertForPreTraining` with this configuration, computed without building it."""
        return _count_parameters(**self._sizes())

    def _sizes(self) -> dict[str, int]:
        return {key: getattr(self, key) for key in _USUAL_SIZES}

    @classmethod
    def from_json_file(cls, path: str | Path) -> BertConfig:
        """Read a Google, NVIDIA or Hugging Face file, or your own with some of the keys above.

        Raises DataError naming file, key, the value found and the expected one; also for a key that is unknown or asks
        for a different model.
        """
        try:
            return cls(**_own_keys(read_object(Path(path), _EXAMPLE)))
        except DataError as error:
            raise DataError(f"{path}: {error}") from error

    def with_dropout(self, p: float) -> BertConfig:
        """The same model with both dropout rates set to `p`. Raises DataError unless 0 <= p < 1."""
        return dataclasses.replace(self, hidden_dropout_prob=p, attention_probs_dropout_prob=p)


#: the keys that determine the number of parameters, with the values of BERT-base
_USUAL_SIZES = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}


def _count_parameters(
    vocab_size: int,
    hidden_size: int,
    num_hidden_layers: int,
    intermediate_size: int,
    max_position_embeddings: int,
    type_vocab_size: int,
) -> int:
    norm = 2 * hidden_size
    square = hidden_size * hidden_size + hidden_size  # a dense layer from the hidden size to the hidden size
    between = 2 * hidden_size * intermediate_size + intermediate_size + hidden_size  # both dense layers
    embeddings = (vocab_size + max_position_embeddings + type_vocab_size) * hidden_size + norm
    layer = 4 * square + norm + between + norm
    heads = square + norm + vocab_size + 2 * hidden_size + 2
    return embeddings + num_hidden_layers * layer + square + heads


def _own_keys(values: dict[str, Any]) -> dict[str, Any]:
    """The keys that `BertConfig` has. Raises DataError unless all others have no effect."""
    fields = [field.name for field in dataclasses.fields(BertConfig)]
    own = own_keys(values, fields, other_models=_OTHER_MODELS, without_effect=_WITHOUT_EFFECT)
    if "vocab_size" not in own:
        raise DataError(
            'the key vocab_size is missing: expected the lines of the vocabulary, as in "vocab_size": 30522'
        )
    return own
