"""A causal language model, in the layout of GPT-2 or of Llama.

Responsible for the arithmetic, the initialisation, and the names and shapes of parameters in Hugging Face's files;
knows no files, losses or ranks. The one idea: both layouts are the same tree of modules, a stack of layers that
normalise, mix tokens and mix features; differences are options of a module. Only positions with a target reach the last
norm and the vocabulary head, and forward never reads a value, so it never waits for a device.

A token sees only itself and earlier tokens, so padding at the end of a row changes nothing and needs no mask.

The arithmetic equals Hugging Face's `GPT2LMHeadModel` and `LlamaForCausalLM`. Their names and shapes differ from each
other, so ours follow neither: GPT-2's matrices are stored as (in, out), and Llama's queries, keys and values are
separate. Here every matrix is an `nn.Linear` weight, (out, in), and the three are one, as in GPT-2. The conversion
happens once, when a file is read or written, not in every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetseq.tasks.gpt.config import GptConfig
from hetseq.tasks.nn.activation_checkpointing import LayerStack
from hetseq.tasks.nn.activations import ACTIVATIONS
from hetseq.tasks.nn.attention import attend
from hetseq.tasks.nn.dropout import Dropout

__all__ = ["GptConfig", "GptForCausalLM", "from_hugging_face", "their_names", "to_hugging_face"]

Rotation = tuple[Tensor, Tensor]


class GptForCausalLM(nn.Module):
    """Predicts the next token: logits over the vocabulary.

    A new model is initialised like GPT-2: weights normal with `initializer_range`, those that add to the residual
    stream divided by the root of their number (2 per layer), biases zero, norms the identity. The first cross entropy
    is then about ln vocab_size. Parameters depend only on torch's seed.

    A tied head has no parameter of its own: its matrix *is* the word embeddings.
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = _Embeddings(config)
        self.rotation = _Rotation(config) if config.positions == "rotary" else None
        self.layers = LayerStack([_Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = _norm(config)
        self.head = None if config.is_tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(self._init_weights)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # Radford et al. 2019, section 2.3: the stream sums two terms per layer, and its variance must not grow
        deviation = self.config.initializer_range
        if isinstance(module, _Addend):
            deviation /= math.sqrt(2 * self.config.num_hidden_layers)
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=deviation)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def tensor_plan(self) -> dict[str, str | tuple[int, ...]]:
        """How ranks divide it (`hetseq.Task.tensor_plan`): attention and MLP by heads and features.

        The vocabulary stays whole: its size is often odd, and logits would have to be gathered.
        """
        divided = {"mlp.up": "colwise", "mlp.down": "rowwise", "attention.output": "rowwise"}
        if self.config.is_gated:
            divided["mlp.gate"] = "colwise"
        plan: dict[str, str | tuple[int, ...]] = {f"layers.*.{name}": word for name, word in divided.items()}
        return plan | {"layers.*.attention.qkv": tuple(qkv_widths(self.config))}

    def forward(self, input_ids: Tensor, target_positions: Tensor) -> Tensor:
        """Logits (m, vocab_size) at the positions that have a target, which is the next token.

        input_ids: (n, L) int64, padded at the end of rows with any token; target_positions: (m,) int64, row * L +
        column. m may be 0: the sum of no cross entropies is 0, with zero gradients. Raises ValueError for shapes that
        do not fit each other or the model, never for values.
        """
        _check_shapes(input_ids, target_positions, self.config.max_position_embeddings)
        hidden = self.embeddings(input_ids)  # (n, L, hidden_size)
        rotation = None if self.rotation is None else self.rotation(hidden)
        hidden = self.layers(hidden, rotation)
        targeted = hidden.flatten(0, 1).index_select(0, target_positions)  # (m, hidden_size)
        head = self.embeddings.tokens if self.head is None else self.head
        return F.linear(self.norm(targeted), head.weight)


def _check_shapes(input_ids: Tensor, target_positions: Tensor, max_length: int) -> None:
    shape = tuple(input_ids.shape)
    if len(shape) != 2 or shape[1] < 1:
        raise ValueError(f"input_ids has shape {shape}, expected (n, L) with L of at least 1")
    if shape[1] > max_length:
        raise ValueError(
            f"input_ids has shape {shape}, rows of {shape[1]} tokens: expected at most {max_length}, the number of"
            " positions in the model's configuration; make shorter rows, or a model with more positions"
        )
    if target_positions.ndim != 1:
        raise ValueError(
            f"target_positions has shape {tuple(target_positions.shape)}, expected (m,): row * L + column of each"
        )


class _Embeddings(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        is_learned = config.positions == "learned"
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if is_learned else None
        self.dropout = Dropout(config.embedding_dropout)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.tokens(input_ids)  # (n, L, hidden_size)
        if self.positions is not None:
            hidden = hidden + self.positions.weight[: input_ids.shape[1]]
        return cast(Tensor, self.dropout(hidden))


class _Rotation(nn.Module):
    """Cosines and sines (L, head_dim) of the angles by which rotary positions rotate pairs of features.

    Su et al. 2021, arXiv 2104.09864, equation 15; feature i is paired with i + head_dim / 2, as in Hugging Face's
    Llama. Angles are in fp32 whatever the model's dtype: published weights were trained with fp32 angles, and at
    position 8,000 another precision makes a difference of 1e-4.
    """

    frequencies: Tensor

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.register_buffer("frequencies", 1.0 / config.rope_theta**exponents, persistent=False)  # (head_dim / 2,)

    def forward(self, hidden: Tensor) -> Rotation:
        places = torch.arange(hidden.shape[1], dtype=torch.float32, device=hidden.device)
        angles = torch.outer(places, self.frequencies.float()).repeat(1, 2)
        return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)


def _turned(x: Tensor, rotation: Rotation) -> Tensor:
    # x: (n, heads, L, head_dim)
    cosines, sines = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


class _Layer(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = _Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = _Mlp(config)

    def forward(self, hidden: Tensor, rotation: Rotation | None) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation)
        return cast(Tensor, hidden + self.mlp(self.mlp_norm(hidden)))


def _norm(config: GptConfig) -> nn.Module:
    kind = nn.LayerNorm if config.norm == "layer" else nn.RMSNorm
    return kind(config.hidden_size, eps=config.norm_eps)


class _Addend(nn.Linear):
    """A dense layer whose output is added to the residual stream."""


class _Attention(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        # ranks that divide the model have fewer heads of each kind
        self.num_heads, self.num_key_value_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.hidden_size, sum(qkv_widths(config)), bias=config.attention_bias)
        self.output = _Addend(self.num_heads * self.head_dim, config.hidden_size, bias=config.attention_bias)
        self.dropout_rate = config.attention_dropout
        self.dropout = Dropout(config.residual_dropout)

    def forward(self, hidden: Tensor, rotation: Rotation | None) -> Tensor:
        heads, groups = self.num_heads, self.num_key_value_heads
        of_all = self.qkv(hidden).unflatten(2, (heads + 2 * groups, self.head_dim))
        # (n, heads or groups, L, head_dim)
        query, key, value = (part.transpose(1, 2) for part in of_all.split((heads, groups, groups), dim=2))
        if rotation is not None:
            query, key = _turned(query, rotation), _turned(key, rotation)
        if groups < heads:
            # explicit, since not every SDPA kernel supports groups: head h uses group h // (heads / groups)
            key, value = (part.repeat_interleave(heads // groups, dim=1) for part in (key, value))
        rate = self.dropout_rate if self.training else 0.0
        attended = attend(query, key, value, rate, is_causal=True)
        return cast(Tensor, self.dropout(self.output(attended.transpose(1, 2).flatten(2))))


def qkv_widths(config: GptConfig) -> list[int]:
    """The number of rows for queries, keys and values in the one matrix that computes all three."""
    shared = config.num_key_value_heads * config.head_dim
    return [config.num_attention_heads * config.head_dim, shared, shared]


class _Mlp(nn.Module):
    """Two dense layers and an activation between them; with a gate, Shazeer 2020, arXiv 2002.05202, equation 6."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        size, wide, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate = nn.Linear(size, wide, bias) if config.is_gated else None
        self.up = nn.Linear(size, wide, bias)
        self.down = _Addend(wide, size, bias)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.dropout = Dropout(config.residual_dropout)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.activation(self.up(x)) if self.gate is None else self.activation(self.gate(x)) * self.up(x)
        return cast(Tensor, self.dropout(self.down(wide)))


# Names and shapes in Hugging Face's files.

#: ours -> GPT-2's, without and within a layer
_GPT2_NAMES = {
    "embeddings.tokens": "transformer.wte",
    "embeddings.positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "layers": "transformer.h",
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_LLAMA_NAMES = {
    "embeddings.tokens": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers": "model.layers",
    "attention_norm": "input_layernorm",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_LLAMA_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def their_names(config: GptConfig, name: str) -> tuple[str, ...]:
    """The Hugging Face name of one of our parameters; three names if theirs is in three pieces."""
    module, _, kind = name.rpartition(".")
    is_llama = config.norm == "rms"
    names = _LLAMA_NAMES if is_llama else _GPT2_NAMES
    if not module.startswith("layers."):
        return (f"{names[module]}.{kind}",)
    _, number, within = module.split(".", 2)
    inner = _LLAMA_QKV if is_llama and within == "attention.qkv" else (names[within],)
    return tuple(f"{names['layers']}.{number}.{each}.{kind}" for each in inner)


def _is_turned_over(config: GptConfig, name: str) -> bool:
    """Whether the file stores the transpose: GPT-2's dense layers are (in, out) there."""
    return config.norm == "layer" and name.startswith("layers.") and name.endswith(".weight") and "norm" not in name


def to_hugging_face(config: GptConfig, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Convert our tensors to the names and shapes of Hugging Face's class for that configuration; views if possible.

    A tied head has no name of its own there either.
    """
    for name, tensor in tensors.items():
        theirs = their_names(config, name)
        pieces = tensor.split(qkv_widths(config)) if len(theirs) > 1 else (tensor,)
        for their_name, piece in zip(theirs, pieces, strict=True):
            yield their_name, piece.t() if _is_turned_over(config, name) else piece


def from_hugging_face(config: GptConfig, name: str, pieces: tuple[Tensor, ...]) -> Tensor:
    """Our parameter `name` from the tensors that a file has under `their_names`; a view if possible."""
    tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return tensor.t() if _is_turned_over(config, name) else tensor
