"""The configuration of a causal language model, read from and written to a `config.json` of GPT-2 or Llama.

Responsible for valid configurations, and for reading and writing the files of both in their own keys; knows no tensors.
The one idea: the two formats are dialects of one list of options. Each lists its keys for our fields, its fixed
properties, and the keys that ask for a network that HetSeq does not have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
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
    check_positive,
    check_whole,
    own_keys,
    read_object,
    wrong,
)

_EXAMPLE = 'a JSON object such as {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, ...}'
_NO_KEYS: Mapping[str, str] = {}
#: the id of a special token; kept for programs that generate text with an exported network
TokenId = int | tuple[int, ...] | None


@dataclass(frozen=True)
class GptConfig:
    """The shape of a causal language model; default: GPT-2 with 124 million parameters.

    `norm` is "layer" or "rms"; `positions` is "learned" or "rotary". `is_gated`: the feed-forward part multiplies by a
    gate (SwiGLU if `hidden_act` is silu). `num_key_value_heads` below `num_attention_heads`: groups of heads share
    their keys and values. `is_tied`: the vocabulary head is the word embeddings. The ids of special tokens are kept for
    text generation and have no effect here: padding at the end of a row gives no word a gradient, but a word that also
    serves as padding is learned where it occurs as a word (unlike in Hugging Face's Llama).

    Raises DataError for a value that no model can have.
    """

    vocab_size: int
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    intermediate_size: int = 3072
    max_position_embeddings: int = 1024
    hidden_act: str = "gelu_new"
    norm: str = "layer"
    norm_eps: float = 1e-5
    positions: str = "learned"
    rope_theta: float = 10_000.0
    is_gated: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    is_tied: bool = True
    embedding_dropout: float = 0.1
    residual_dropout: float = 0.1
    attention_dropout: float = 0.1
    initializer_range: float = 0.02
    bos_token_id: TokenId = None
    eos_token_id: TokenId = None
    pad_token_id: TokenId = None

    def __post_init__(self) -> None:
        _check(vars(self), _NO_KEYS)
        for field in dataclasses.fields(self):
            if field.type == "float":  # 0 and 0.0 are the same configuration on all nodes
                object.__setattr__(self, field.name, float(getattr(self, field.name)))

    @property
    def parameters(self) -> int:
        """The number of parameters of `GptForCausalLM` with this configuration, computed without building it."""
        return _count_parameters(vars(self))

    @classmethod
    def from_json_file(cls, path: str | Path) -> GptConfig:
        """Read a Hugging Face `config.json` for GPT-2 or Llama.

        Raises DataError naming file, key, the value found and the expected one; also for a key that is missing,
        unknown, or asks for a different model.
        """
        try:
            return _from_hugging_face(read_object(Path(path), _EXAMPLE))
        except DataError as error:
            raise DataError(f"{path}: {error}") from error

    def to_hugging_face(self) -> dict[str, Any]:
        """The content of a `config.json` for the same network. Raises DataError if Hugging Face has no such class."""
        for dialect in _DIALECTS.values():
            content = dialect.content(self)
            with suppress(DataError):  # from sizes that this dialect has no keys for
                if _from_hugging_face(content) == self:
                    return content
        raise DataError(
            f"norm {self.norm}, positions {self.positions}, is_gated {self.is_gated}, num_key_value_heads"
            f" {self.num_key_value_heads}: expected GPT-2 (layer, learned, not gated, with biases, a key for each head)"
            " or Llama (rms, rotary, gated, dropout only in attention), since Hugging Face has no class for others;"
            " --format safetensors writes the weights of any network"
        )

    def with_dropout(self, p: float) -> GptConfig:
        """The same model with all dropout rates set to `p`; Llama's layout has only one. Raises DataError."""
        if self.positions == "rotary":
            return dataclasses.replace(self, attention_dropout=p)
        return dataclasses.replace(self, embedding_dropout=p, residual_dropout=p, attention_dropout=p)


def _check(values: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    """Raise DataError for values that no model can have, naming them as in `keys`."""
    for field in dataclasses.fields(GptConfig):
        key, value = keys.get(field.name, field.name), values[field.name]
        if field.type == "int":
            check_whole(key, value, 1, MOST_LAYERS if field.name == "num_hidden_layers" else LARGEST_SIZE)
        elif field.name == "rope_theta":
            check_positive(key, value)
        elif field.type == "float":
            check_fraction(key, value, may_be_zero=field.name.endswith("_dropout"))
        elif field.type == "bool" and type(value) is not bool:
            raise DataError(wrong(key, value, "true or false, without quotes"))
        elif field.type == "TokenId" and not _is_token_id(value):
            raise DataError(wrong(key, value, "the id of a token, a list of them, or null"))
    check_activation(keys.get("hidden_act", "hidden_act"), values["hidden_act"])
    for name, choices in (("norm", ("layer", "rms")), ("positions", ("learned", "rotary"))):
        if values[name] not in choices:
            raise DataError(wrong(name, values[name], " or ".join(choices)))
    heads, groups = ("num_attention_heads", "num_key_value_heads")
    check_divides(keys.get(groups, groups), values[groups], keys.get(heads, heads), values[heads], "as many is usual")
    if values["positions"] == "rotary" and values["head_dim"] % 2:
        raise DataError(wrong("head_dim", values["head_dim"], "an even number, since rotary positions rotate pairs"))
    count = _count_parameters(values)
    if count > MOST_PARAMETERS:
        sizes = ", ".join(f"{keys.get(name, name)} {values[name]}" for name in _SIZES)
        raise DataError(
            f"{sizes}: the model would have {count:,} parameters; expected at most {MOST_PARAMETERS:,} parameters"
        )


def _is_token_id(value: object) -> bool:
    ids = value if isinstance(value, tuple) else (value,)
    return value is None or all(type(each) is int and each >= 0 for each in ids)


#: the fields that the number of parameters depends on most
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings")


def _count_parameters(values: Mapping[str, Any]) -> int:
    hidden, inner, head = values["hidden_size"], values["intermediate_size"], values["head_dim"]
    mixed, shared = values["num_attention_heads"] * head, values["num_key_value_heads"] * head
    norm = hidden * (2 if values["norm"] == "layer" else 1)
    attention = hidden * (mixed + 2 * shared) + mixed * hidden
    attention += values["attention_bias"] * (mixed + 2 * shared + hidden)
    wide = 2 if values["is_gated"] else 1  # dense layers from the hidden to the inner size
    between = (wide + 1) * hidden * inner + values["mlp_bias"] * (wide * inner + hidden)
    words = values["vocab_size"] * hidden * (1 if values["is_tied"] else 2)
    places = values["max_position_embeddings"] * hidden if values["positions"] == "learned" else 0
    return int(words + places + values["num_hidden_layers"] * (2 * norm + attention + between) + norm)


# Hugging Face's files.


@dataclass(frozen=True)
class _Dialect:
    """The format of one `model_type`: its keys for our fields, required keys, and fixed properties."""

    model_type: str
    architecture: str
    keys: Mapping[str, str]  # field -> key
    required: tuple[str, ...]
    defaults: Mapping[str, Any]  # of fields, if the file does not have the key
    fixed: Mapping[str, Any]  # of fields, whatever the file says
    other_models: OtherModels
    without_effect: tuple[str, ...]

    def content(self, config: GptConfig) -> dict[str, Any]:
        """The content of a file of this model_type for a configuration."""
        own = {key: getattr(config, field) for field, key in self.keys.items()}
        if "rope_theta" in own:  # where newer versions of transformers read it
            own["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
        return {"model_type": self.model_type, "architectures": [self.architecture], **own}


_TOKENS = {name: name for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
_NO_CROSS_ATTENTION: OtherModels = {
    "add_cross_attention": ((False, None), "attention to a second sequence"),
    "is_encoder_decoder": ((False, None), "an encoder beside a decoder"),
    "pruned_heads": (({}, [], None), "layers with fewer heads than the others"),
    "quantization_config": ((None,), "weights of less than 16 bits"),
}

_GPT2 = _Dialect(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    keys={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "n_positions",
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "hidden_act": "activation_function",
        "norm_eps": "layer_norm_epsilon",
        "embedding_dropout": "embd_pdrop",
        "residual_dropout": "resid_pdrop",
        "attention_dropout": "attn_pdrop",
        "initializer_range": "initializer_range",
        "is_tied": "tie_word_embeddings",
        **_TOKENS,
    },
    required=("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"),
    defaults={},
    fixed={"norm": "layer", "positions": "learned", "is_gated": False, "attention_bias": True, "mlp_bias": True},
    other_models={
        **_NO_CROSS_ATTENTION,
        "scale_attn_weights": ((True, None), "scores that are not divided by the root of a head's size"),
        "scale_attn_by_inverse_layer_idx": ((False, None), "scores that depend on the layer"),
        "reorder_and_upcast_attn": ((False, None), "scores in fp32 beside weights of 16 bits"),
    },
    without_effect=(*WITHOUT_EFFECT, "n_ctx", "summary_*", "task_specific_params"),
)

_LLAMA = _Dialect(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_position_embeddings",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "num_key_value_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "intermediate_size": "intermediate_size",
        "hidden_act": "hidden_act",
        "norm_eps": "rms_norm_eps",
        "rope_theta": "rope_theta",
        "attention_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
        "attention_dropout": "attention_dropout",
        "initializer_range": "initializer_range",
        "is_tied": "tie_word_embeddings",
        **_TOKENS,
    },
    required=(
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    ),
    defaults={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "is_tied": False,
    },
    fixed={
        "norm": "rms",
        "positions": "rotary",
        "is_gated": True,
        "embedding_dropout": 0.0,
        "residual_dropout": 0.0,
    },
    other_models={
        **_NO_CROSS_ATTENTION,
        "rope_scaling": ((None,), "rotary positions that are stretched"),
        "sliding_window": ((None,), "tokens that see only so many before them"),
    },
    without_effect=(*WITHOUT_EFFECT, "pretraining_tp"),
)

_DIALECTS = {dialect.model_type: dialect for dialect in (_GPT2, _LLAMA)}


def _from_hugging_face(found: dict[str, Any]) -> GptConfig:
    if "model_type" not in found:
        raise DataError(f"the key model_type is missing: expected {' or '.join(_DIALECTS)}")
    dialect = _DIALECTS.get(found["model_type"]) if isinstance(found["model_type"], str) else None
    if dialect is None:
        raise DataError(wrong("model_type", found["model_type"], f"{' or '.join(_DIALECTS)}, the available networks"))
    found = {key: value for key, value in found.items() if key != "model_type"}
    found = _plain_rotation(found) if dialect is _LLAMA else found
    own = own_keys(
        found,
        list(dialect.keys.values()),
        other_models=dialect.other_models,
        without_effect=dialect.without_effect,
    )
    missing = [key for key in dialect.required if own.get(key) is None]
    if missing:
        raise DataError(f"the key {missing[0]} is missing: a {dialect.model_type} needs {', '.join(dialect.required)}")
    # in these files, null means the default
    given = {field: own[key] for field, key in dialect.keys.items() if own.get(key) is not None}
    for name in _TOKENS:
        if isinstance(given.get(name), list):
            given[name] = tuple(given[name])
    values = {**dialect.defaults, **_derived(dialect, own), **given, **dialect.fixed}
    usual = {field.name: field.default for field in dataclasses.fields(GptConfig)}
    _check(usual | values, dialect.keys)
    return GptConfig(**values)


def _plain_rotation(found: dict[str, Any]) -> dict[str, Any]:
    """Convert the newer `rope_parameters` to the `rope_theta` and `rope_scaling` of older files."""
    given = found.get("rope_parameters")
    rest = {key: value for key, value in found.items() if key != "rope_parameters"}
    for key in ("rope_parameters", "rope_scaling"):
        value = found.get(key)
        if value is None:
            continue
        kind = value.get("rope_type", value.get("type", "default")) if isinstance(value, dict) else value
        if kind != "default":
            raise DataError(wrong(key, value, 'rope_type "default", since rotary positions are not stretched here'))
        rest.pop("rope_scaling", None)
    if isinstance(given, dict) and "rope_theta" in given:
        rest["rope_theta"] = given["rope_theta"]
    return rest


def _derived(dialect: _Dialect, own: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that a file may omit because they follow from others."""
    key = dialect.keys
    hidden, heads = own[key["hidden_size"]], own[key["num_attention_heads"]]
    for name, value in ((key["hidden_size"], hidden), (key["num_attention_heads"], heads)):
        check_whole(name, value, 1, LARGEST_SIZE)
    check_divides(key["num_attention_heads"], heads, key["hidden_size"], hidden, "64 to 128 a head is usual")
    return {"num_key_value_heads": heads, "head_dim": hidden // heads, "intermediate_size": 4 * hidden}
