"""Tiny models as published: directories with `config.json`, `model.safetensors`, and a tokenizer with a chat template.

`publish(folder, "llama")` makes one from its configuration, the same bytes for the same arguments. Weights are drawn
in fp64 and stored in `dtype`, so a directory in bf16 holds the rounded weights of the one in fp64. They are large
enough for attention to differ from a mean, and biases and norms are moved from 0 and 1, where faults would not show.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

#: what the tokenizers are trained on
SENTENCES = (
    "The river is wide and the boat is small.",
    "A small boat on a wide river needs a steady hand.",
    "What is the river? It is wide. What is the boat? It is small.",
    "Grüße aus Köln, 你好, and 3.14 is not 2.72!",
)
BOS, EOS, PAD, START, END = "<|bos|>", "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 300  # 256 bytes, 5 special tokens, and merges
#: ChatML, as Qwen publishes it, without a default system message
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: fields of the configurations, by `model_type`; any other causal model is made by its own fields
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_inner": 40, "n_positions": 64, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False},
    "qwen2": {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True},
    "gemma": {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64},
}  # fmt: skip


def publish(
    folder: Path,
    kind: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    has_weights: bool = True,
    template: str | None = CHATML,
    shard_size: str = "50GB",
    **fields: Any,
) -> Path:
    """Make the directory of a causal model; `fields` replace those of `CONFIGS`. Returns `folder`.

    `kind` is a `model_type` of transformers. `shard_size` of "20KB" splits the weights, with an index beside them.
    """
    import transformers

    folder.mkdir(parents=True)
    write_tokenizer(folder, template=template)
    config = configure(kind, **fields)
    if has_weights:
        model: Any = build(config, seed=seed).to(dtype)
        transformers.utils.logging.disable_progress_bar()  # its thread would be left behind
        with mock.patch.dict(os.environ):  # save_pretrained imports deepspeed, which sets a variable
            model.save_pretrained(folder, max_shard_size=shard_size)
    else:
        config.save_pretrained(folder)
    return folder


def configure(kind: str, **fields: Any) -> Any:
    """The configuration of transformers, with the ids of the tokenizer's special tokens."""
    from transformers import AutoConfig

    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    given = {"vocab_size": VOCABULARY, "initializer_range": 0.15, **ids, **CONFIGS.get(kind, {}), **fields}
    return AutoConfig.for_model(kind, **given)


def build(config: Any, *, seed: int = 0) -> nn.Module:
    """The model of a configuration in fp64, drawn by `seed`, in evaluation mode; torch's own random state stays."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def write_tokenizer(folder: Path, *, template: str | None = CHATML) -> None:
    """`tokenizer.json`, a byte-level BPE, and `tokenizer_config.json`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, "clean_up_tokenization_spaces": False,
        "bos_token": BOS, "eos_token": EOS, "pad_token": PAD,
        **({} if template is None else {"chat_template": template}),
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
