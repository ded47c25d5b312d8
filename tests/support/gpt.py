"""Small causal language models of both layouts, batches for them, and Hugging Face's with the same weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetseq.tasks.gpt.model import GptConfig, GptForCausalLM, to_hugging_face
from tests.support.parity import Facts

Batch = dict[str, Tensor]

GPT2 = GptConfig(
    vocab_size=53,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=3,
    head_dim=8,
    intermediate_size=40,
    max_position_embeddings=16,
    initializer_range=0.1,  # at 0.02 attention is so flat that its faults hardly show
)
LLAMA = dataclasses.replace(
    GPT2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    hidden_act="silu",
    norm="rms",
    norm_eps=1e-6,
    positions="rotary",
    is_gated=True,
    attention_bias=False,
    mlp_bias=False,
    is_tied=False,
    embedding_dropout=0.0,
    residual_dropout=0.0,
    attention_dropout=0.1,
)
LAYOUTS = {"gpt2": GPT2, "llama": LLAMA}

#: tokens of each row; the last of a row has no target
CASES = {"one": [5], "full": [9, 9, 9], "padded": [12, 7, 3, 1], "longest": [16, 10], "single": [1]}


def make_batch(lengths: list[int], config: GptConfig = GPT2) -> Batch:
    """Ids by a formula that meets all of a small vocabulary; the padding holds an ordinary word."""
    n, longest = len(lengths), max(lengths)
    ids = (torch.arange(n * longest).view(n, longest) * 7 + 3) % config.vocab_size
    is_real = torch.arange(longest) < torch.tensor(lengths)[:, None]
    has_target = torch.zeros_like(is_real)
    has_target[:, :-1] = is_real[:, 1:]
    positions = has_target.flatten().nonzero().flatten()  # (m,)
    return {
        "input_ids": torch.where(is_real, ids, 2),
        "target_positions": positions,
        "target_ids": ids.flatten()[positions + 1],
        "attention_mask": is_real,  # for Hugging Face's alone
    }


def make_model(config: GptConfig = GPT2, dtype: torch.dtype = torch.float64, seed: int = 3) -> GptForCausalLM:
    """Evaluating, unless told otherwise; biases and norms are moved from where they start, so that they matter."""
    torch.manual_seed(seed)
    model = GptForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def our_logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["input_ids"], batch["target_positions"])


def their_logits(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"].long()).logits
    return logits.flatten(0, 1)[batch["target_positions"]]


def facts_of(model: nn.Module, batch: Batch, config: GptConfig) -> Facts:
    """Logits, the summed loss, and its gradient with respect to every parameter, under Hugging Face's names."""
    is_ours = isinstance(model, GptForCausalLM)
    logits = our_logits(model, batch) if is_ours else their_logits(model, batch)
    loss = F.cross_entropy(logits, batch["target_ids"], reduction="sum")
    names, parameters = zip(*model.named_parameters())
    gradients = dict(zip(names, torch.autograd.grad(loss, parameters, materialize_grads=True)))
    theirs = dict(to_hugging_face(config, gradients)) if is_ours else gradients
    facts = {"logits": logits, "loss": loss} | {f"gradient: {name}": theirs[name] for name in sorted(theirs)}
    return {name: fact.detach() for name, fact in facts.items()}


def theirs_of(transformers: ModuleType, ours: GptForCausalLM, *, attention: str = "sdpa", **changes: Any) -> nn.Module:
    """Their model with the weights of ours."""
    content = ours.config.to_hugging_face() | changes
    config = transformers.AutoConfig.for_model(**content)
    config._attn_implementation = attention
    theirs = getattr(transformers, content["architectures"][0])(config).to(next(ours.parameters()).dtype)
    weights = dict(to_hugging_face(ours.config, dict(ours.named_parameters())))
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if ours.config.is_tied else [])
    return theirs.train(ours.training)


@contextmanager
def norms_in_double_precision(transformers: ModuleType) -> Iterator[None]:
    """Their RMSNorm computes in fp32 whatever it is given, as the published equation does not say; here it does not."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        mean = hidden_states.square().mean(-1, keepdim=True)
        return self.weight * (hidden_states / (mean + self.variance_epsilon).sqrt())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.models.llama.modeling_llama.LlamaRMSNorm, "forward", forward)
        yield
