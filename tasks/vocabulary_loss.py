"""The loss of a vocabulary head on a CPU: product, bias and cross entropy, a piece of the vocabulary at a time.

Responsible for the sum of the cross entropies of `linear(hidden, weight, bias)` and its gradients, and for nothing else
of the head. What it computes is what torch's functions compute one after the other; elsewhere they do.

The one idea: logits are many times as large as what they are made of, and every pass over them goes through the whole
memory. A piece that fits the cache is made, turned into weights of a softmax and left; what a maximum found later
changes is only the scale of what was left before (Milakov & Gimelshein 2018, arXiv 1805.02867). They lie there words by
tokens, which is the order in which the products are fastest.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hetseq import empty_gradient

_PIECE_ELEMENTS = 1 << 17  # of logits at once: half a megabyte in single precision
_LEAST_WORDS = 256
_PRECISE = frozenset({torch.float32, torch.float64})  # elsewhere products are cheap, and rounding would cost passes


def vocabulary_loss(hidden: Tensor, weight: Tensor, bias: Tensor, ids: Tensor) -> Tensor:
    """The sum over m tokens of the cross entropies in nats, a scalar; zero for no tokens.

    hidden: (m, hidden_size), weight: (vocab_size, hidden_size), bias: (vocab_size,); ids: (m,) int64 of the words that
    are right.
    """
    is_slow = hidden.device.type == "cpu" and hidden.dtype in _PRECISE and not torch.is_autocast_enabled("cpu")
    if not is_slow or torch.compiler.is_compiling():
        return F.cross_entropy(F.linear(hidden, weight, bias), ids, reduction="sum")
    loss: Tensor = _Loss.apply(hidden, weight, bias, ids)  # type: ignore[no-untyped-call]
    return loss


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, ids: Tensor) -> Tensor:
        most = hidden.new_full((len(ids),), -torch.inf)
        total, right = torch.zeros_like(most), torch.empty_like(most)
        weights = hidden.new_empty(len(weight), len(ids))  # of each piece times exp of its own `most`
        pieces = list(_pieces(ids, len(weight)))
        scales = []
        for words, tokens, places in pieces:
            values = torch.mm(weight[words], hidden.t(), out=weights[words]).add_(bias[words, None])
            right[tokens] = values[places, tokens]
            before, most = most, torch.maximum(most, values.amax(0))
            total = total * (before - most).exp() + values.sub_(most).exp_().sum(0)
            scales.append(most)
        log_total = most + total.log()
        ctx.save_for_backward(hidden, weight)
        ctx.weight = weight  # itself, whose view it may be
        ctx.weights, ctx.pieces, ctx.scales = weights, pieces, [(scale - log_total).exp() for scale in scales]
        return (log_total - right).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        of_hidden, of_weight = torch.zeros_like(hidden), empty_gradient(ctx.weight)
        of_bias = weight.new_empty(len(weight))
        for (words, tokens, places), scale in zip(ctx.pieces, ctx.scales):
            of_logits = ctx.weights[words] * (scale * factor)  # (words, m)
            of_logits[places, tokens] -= factor
            torch.sum(of_logits, 1, out=of_bias[words])
            torch.mm(of_logits, hidden, out=of_weight[words])
            of_hidden.addmm_(of_logits.t(), weight[words])
        return of_hidden, of_weight, of_bias, None


def _pieces(ids: Tensor, vocab_size: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Words of the vocabulary, the tokens for which one of them is right, and which one, counted from the first."""
    order = ids.argsort()
    listed = ids[order].tolist()
    step = max(_LEAST_WORDS, _PIECE_ELEMENTS // max(len(ids), 1))
    for start in range(0, vocab_size, step):
        words = slice(start, min(start + step, vocab_size))
        tokens = order[bisect.bisect_left(listed, words.start) : bisect.bisect_left(listed, words.stop)]
        yield words, tokens, ids[tokens] - start
