"""Fused vocabulary loss for CPUs: matrix product, bias and cross entropy, one piece of the vocabulary at a time.

Responsible only for the sum of the cross entropies of `linear(hidden, weight, bias)` and its gradients. The result
equals torch's separate functions, which are used on other devices.

The one idea: logits are many times larger than their inputs, and every pass over them goes through main memory. So one
piece that fits the cache is computed and turned into softmax weights, from which backward later makes two products. In
32 and 64 bits, where products are slow, `_Precise` does this without rounding more than torch; in bfloat16, where they
are fast, `_Rounded` makes fewer passes over a piece.
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

_PIECE_ELEMENTS = {torch.float32: 1 << 17, torch.float64: 1 << 17, torch.bfloat16: 1 << 19}  # of logits at once
_LEAST_WORDS = 256
_ADDED = 4  # extra columns of the operands in `_Rounded`: two for the bias and two for the shift
_LARGEST_SUM = 2.0**100  # of exponentials: the numbers of a hidden state divided by it are still normal ones


def vocabulary_loss(hidden: Tensor, weight: Tensor, bias: Tensor, ids: Tensor) -> Tensor:
    """The sum over m tokens of the cross entropies in nats, a scalar; zero for no tokens.

    hidden: (m, hidden_size), weight: (vocab_size, hidden_size), bias: (vocab_size,); ids: (m,) int64, the correct
    words.
    """
    function = _function_for(hidden)
    if function is None:
        return F.cross_entropy(F.linear(hidden, weight, bias), ids, reduction="sum")
    loss: Tensor = function.apply(hidden, weight, bias, ids)
    return loss


def _function_for(hidden: Tensor) -> type[torch.autograd.Function] | None:
    """The autograd function that computes the loss; None: torch's own functions."""
    if hidden.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    if torch.is_autocast_enabled("cpu") and hidden.dtype is not torch.float64:  # autocast does not change float64
        return _Rounded if torch.get_autocast_dtype("cpu") is torch.bfloat16 else None
    return _Precise if hidden.dtype in (torch.float32, torch.float64) else None


class _Precise(torch.autograd.Function):
    """Online softmax with a running maximum over pieces; rounds nothing that torch's functions do not round.

    A larger maximum found later only changes the scale of earlier pieces (Milakov & Gimelshein 2018, arXiv 1805.02867).
    Pieces have the shape (words, tokens), in which these products are fastest.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, ids: Tensor) -> Tensor:
        most = hidden.new_full((len(ids),), -torch.inf)
        total, right = torch.zeros_like(most), torch.empty_like(most)
        weights = hidden.new_empty(len(weight), len(ids))  # of each piece times exp of its own `most`
        pieces = list(_pieces_with_tokens(ids, _pieces(weight, len(ids), hidden.dtype)))
        scales = []
        for words, tokens, places in pieces:
            values = torch.mm(weight[words], hidden.t(), out=weights[words]).add_(bias[words, None])
            right[tokens] = values[places, tokens]
            before, most = most, torch.maximum(most, values.amax(0))
            total = total * (before - most).exp() + values.sub_(most).exp_().sum(0)
            scales.append(most)
        log_total = most + total.log()
        ctx.save_for_backward(hidden, weight)
        ctx.weight = weight  # saved_tensors would forget which tensor it is a view of
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


class _Rounded(torch.autograd.Function):
    """Products of bfloat16 into bfloat16, as under torch's autocast, and two passes over each piece: exp and sum.

    Bias and shift of the softmax are columns of the product, each as two bfloat16 numbers multiplied by ones. The shift
    is the logit of the correct word, which is known beforehand: the loss is then the logarithm of the sum, logits near
    the correct one are rounded least, and a maximum is computed only where the sum is too large. In backward the sums
    divide the tokens, not the pieces, and the -1 at the correct word is added to the gradients without rounding.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, ids: Tensor) -> Tensor:
        size = hidden.shape[1]
        table = weight.new_empty(len(weight), size + _ADDED, dtype=torch.bfloat16)
        table[:, :size], table[:, size + 2 :] = weight, 1
        table[:, size : size + 2] = _in_two(bias)
        tokens = torch.ones(len(ids), size + _ADDED, dtype=torch.bfloat16)
        tokens[:, :size] = hidden
        right = (tokens[:, :size].float() * table[ids, :size]).sum(1) + bias[ids]

        pieces = list(_pieces(weight, len(ids), torch.bfloat16))
        total, weights = _exponentials(tokens, table, pieces, right)
        lost = (total >= _LARGEST_SUM).nonzero()[:, 0]
        shift = right
        if len(lost) > 0:
            most = torch.mm(tokens[lost], table.t()).amax(1)  # above the correct word
            shift = right.index_add(0, lost, most.float())
            total[lost], found = _exponentials(tokens[lost], table, pieces, shift[lost])
            for before, after in zip(weights, found):
                before[lost] = after
        ctx.save_for_backward(tokens, table, ids, total, *weights)
        ctx.weight, ctx.pieces, ctx.dtype = weight, pieces, hidden.dtype
        return (total.log() + (shift - right)).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        tokens, table, ids, total, *weights = ctx.saved_tensors
        size = tokens.shape[1] - _ADDED
        of_weight = empty_gradient(ctx.weight)
        of_bias, of_hidden = of_weight.new_empty(len(of_weight)), of_weight.new_zeros(len(ids), size)
        scale = (factor / total)[:, None]
        scaled = (tokens * scale).bfloat16()  # columns of ones hold the scale itself
        for words, piece in zip(ctx.pieces, weights):
            of_words = torch.mm(piece.t(), scaled)
            of_weight[words], of_bias[words] = of_words[:, :size], of_words[:, size]
            of_hidden += torch.mm(piece, table[words, :size])
        of_hidden.mul_(scale).sub_(table[ids, :size].float() * factor)
        of_weight.index_add_(0, ids, tokens[:, :size].float() * -factor)
        of_bias.index_add_(0, ids, (-factor).expand(len(ids)))
        return of_hidden.to(ctx.dtype), of_weight, of_bias, None


def _exponentials(tokens: Tensor, table: Tensor, pieces: list[slice], shift: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Exponentials of logits minus `shift` (m,): their sum over all words (m,), and those of each piece (m, words).

    The latter are bfloat16. The shift is written into `tokens`.
    """
    tokens[:, -2:] = _in_two(-shift)
    total, weights = torch.zeros_like(shift), []
    for words in pieces:
        weights.append(torch.mm(tokens, table[words].t()).exp_())
        total += weights[-1].sum(1, dtype=shift.dtype)
    return total, weights


def _in_two(numbers: Tensor) -> Tensor:
    """(k,) to (k, 2) in bfloat16, whose sums equal the numbers to within 2^-17 of each."""
    high = numbers.bfloat16()
    return torch.stack([high, (numbers - high).bfloat16()], dim=1)


def _pieces(weight: Tensor, tokens: int, dtype: torch.dtype) -> Iterator[slice]:
    """Slices of the vocabulary, so large that the logits of `tokens` fit the cache."""
    step = max(_LEAST_WORDS, _PIECE_ELEMENTS[dtype] // max(tokens, 1))
    for start in range(0, len(weight), step):
        yield slice(start, min(start + step, len(weight)))


def _pieces_with_tokens(ids: Tensor, pieces: Iterator[slice]) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each piece: its words, the tokens whose correct word is in it, and that word's index in the piece."""
    order = ids.argsort()
    listed = ids[order].tolist()
    for words in pieces:
        tokens = order[bisect.bisect_left(listed, words.start) : bisect.bisect_left(listed, words.stop)]
        yield words, tokens, ids[tokens] - words.start
