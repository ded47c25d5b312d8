"""What a configuration file of GPT-2 or Llama may say, and what is refused with file, key and remedy."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hetseq import DataError
from hetseq.tasks.gpt.config import GptConfig
from tests.support.gpt import GPT2, LAYOUTS, LLAMA
from tests.support.parity import import_transformers

#: as published with the 124M model
PUBLISHED = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
#: keys and values in the manner of an older file of a model of 8 billion parameters
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}


def write(folder: Path, content: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(content) if not isinstance(content, str) else content)
    return path


def read(folder: Path, content: Any) -> GptConfig:
    return GptConfig.from_json_file(write(folder, content))


def refusal(folder: Path, content: Any) -> str:
    path = write(folder, content)
    with pytest.raises(DataError) as caught:
        GptConfig.from_json_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message


def test_the_published_gpt2_is_the_default(tmp_path: Path) -> None:
    assert read(tmp_path, PUBLISHED) == GptConfig(50257, bos_token_id=50256, eos_token_id=50256)
    few = {"model_type": "gpt2", "vocab_size": 53, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3}
    expected = dataclasses.replace(GPT2, intermediate_size=96, initializer_range=0.02)
    assert read(tmp_path, few | {"n_inner": None}) == read(tmp_path, few) == expected


def test_a_file_of_a_llama_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA_8B)
    assert config.parameters == 8_030_261_248
    assert (config.num_key_value_heads, config.head_dim, config.rope_theta) == (8, 128, 500_000.0)
    assert config.eos_token_id == (128001, 128009)
    assert config.embedding_dropout == config.residual_dropout == 0
    older = {key: value for key, value in LLAMA_8B.items() if key not in ("num_key_value_heads", "rope_theta")}
    config = read(tmp_path, older)
    assert (config.num_key_value_heads, config.rope_theta) == (32, 10_000.0)  # as there was nothing else then


def test_frequencies_stand_in_either_place(tmp_path: Path) -> None:
    newer = {key: value for key, value in LLAMA_8B.items() if key not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 500_000.0}
    assert read(tmp_path, newer) == read(tmp_path, LLAMA_8B)
    assert read(tmp_path, LLAMA_8B | {"rope_scaling": {"type": "default"}}) == read(tmp_path, LLAMA_8B)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_is_read_again(tmp_path: Path, layout: str) -> None:
    for changes in ({}, {"is_tied": LAYOUTS[layout] is LLAMA}, {"eos_token_id": (1, 2), "bos_token_id": 3}):
        config = dataclasses.replace(LAYOUTS[layout], **changes)
        content = config.to_hugging_face()
        assert content["model_type"] == layout
        assert read(tmp_path, content) == config


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_their_library_reads_and_writes_the_same(tmp_path: Path, layout: str) -> None:
    transformers: ModuleType = import_transformers()
    write(tmp_path, LAYOUTS[layout].to_hugging_face())
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    for use_diff in (True, False):
        theirs.to_json_file(tmp_path / "config.json", use_diff=use_diff)
        assert GptConfig.from_json_file(tmp_path / "config.json") == LAYOUTS[layout]


@pytest.mark.parametrize("key", ["model_type", "vocab_size", "n_positions", "n_embd", "n_layer", "n_head"])
def test_a_key_that_gpt2_needs_is_missed(tmp_path: Path, key: str) -> None:
    rest = {each: value for each, value in PUBLISHED.items() if each != key}
    assert f"the key {key} is missing" in refusal(tmp_path, rest)
    if key != "model_type":
        assert f"the key {key} is missing" in refusal(tmp_path, PUBLISHED | {key: None})


@pytest.mark.parametrize(
    "key",
    [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("max_position_embeddings", "rms_norm_eps"),
    ],
)
def test_a_key_that_llama_needs_is_missed(tmp_path: Path, key: str) -> None:
    rest = {each: value for each, value in LLAMA_8B.items() if each != key}
    assert f"the key {key} is missing: a llama needs vocab_size, " in refusal(tmp_path, rest)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (PUBLISHED, {"model_type": "mistral"}, 'model_type is "mistral": expected gpt2 or llama'),
        (PUBLISHED, {"model_type": ["gpt2"]}, 'model_type is ["gpt2"]: expected gpt2 or llama'),
        (PUBLISHED, {"n_layers": 3}, "the key 'n_layers' is unknown: did you mean n_layer?"),
        (PUBLISHED, {"rope_theta": 3}, "the key 'rope_theta' is unknown"),
        (PUBLISHED, {"n_embd": 770}, "n_embd 770 cannot be divided among n_head 12: expected a multiple"),
        (PUBLISHED, {"n_embd": "768"}, 'n_embd is "768": expected a whole number from 1 to'),
        (PUBLISHED, {"n_layer": 0}, "n_layer is 0: expected a whole number from 1 to 10000"),
        (PUBLISHED, {"n_inner": -1}, "n_inner is -1: expected a whole number"),
        (PUBLISHED, {"n_head": True}, "n_head is true: expected a whole number"),
        (PUBLISHED, {"resid_pdrop": 1}, "resid_pdrop is 1: expected a number from 0 and below 1"),
        (PUBLISHED, {"layer_norm_epsilon": 0}, "layer_norm_epsilon is 0: expected a number above 0"),
        (PUBLISHED, {"activation_function": "mish"}, 'activation_function is "mish": expected one of gelu'),
        (PUBLISHED, {"activation_function": ["gelu"]}, 'activation_function is ["gelu"]: expected one of gelu'),
        (PUBLISHED, {"tie_word_embeddings": 1}, "tie_word_embeddings is 1: expected true or false"),
        (PUBLISHED, {"eos_token_id": "end"}, 'eos_token_id is "end": expected the id of a token'),
        (PUBLISHED, {"add_cross_attention": True}, "because it asks for attention to a second sequence"),
        (PUBLISHED, {"scale_attn_weights": False}, "scale_attn_weights is false: expected true, or no such key"),
        (PUBLISHED, {"scale_attn_by_inverse_layer_idx": True}, "because it asks for scores that depend on the layer"),
        (PUBLISHED, {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is true"),
        (PUBLISHED, {"quantization_config": {"bits": 4}}, "because it asks for weights of less than 16 bits"),
        (PUBLISHED, {"vocab_size": 2**31 - 1}, "vocab_size 2147483647, n_embd 768, n_layer 12"),
        (LLAMA_8B, {"num_key_value_heads": 5}, "num_attention_heads 32 cannot be divided among num_key_value_heads 5"),
        (LLAMA_8B, {"head_dim": 127}, "head_dim is 127: expected an even number"),
        (LLAMA_8B, {"rope_theta": 0}, "rope_theta is 0: expected a number above 0"),
        (LLAMA_8B, {"rope_scaling": {"rope_type": "llama3"}}, 'expected rope_type "default"'),
        (LLAMA_8B, {"rope_scaling": {"type": "linear", "factor": 2}}, "rotary positions are not stretched here"),
        (LLAMA_8B, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_parameters is"),
        (LLAMA_8B, {"rope_scaling": "linear"}, 'rope_scaling is "linear"'),
        (LLAMA_8B, {"sliding_window": 4096}, "because it asks for tokens that see only so many before them"),
        (LLAMA_8B, {"mlp_bias": None, "attention_bias": "no"}, 'attention_bias is "no": expected true or false'),
    ],
)  # fmt: skip
def test_what_no_model_here_has_is_refused_by_its_key(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    assert message in refusal(tmp_path, base | changes)


@pytest.mark.parametrize(("content", "message"), [("[]", "holds the JSON value is []"), ("{", "is not JSON (")])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str, message: str) -> None:
    assert message in refusal(tmp_path, content)


def test_a_configuration_made_in_code_is_checked_too() -> None:
    with pytest.raises(DataError, match='norm is "batch": expected layer or rms'):
        dataclasses.replace(GPT2, norm="batch")
    with pytest.raises(DataError, match="num_attention_heads 5 cannot be divided among num_key_value_heads 3"):
        dataclasses.replace(GPT2, num_attention_heads=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        GPT2.vocab_size = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": "rotary"},
        {"is_gated": True},
        {"attention_bias": False},
        {"num_key_value_heads": 1},
        {"head_dim": 10},
    ],
)
def test_a_mixture_of_the_two_has_no_file_of_theirs(changes: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="Hugging Face has no class for others"):
        dataclasses.replace(GPT2, **changes).to_hugging_face()
