"""The loss of a vocabulary head, a piece of the vocabulary at a time: the sum of torch's cross entropies."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hetseq.tasks.nn import vocabulary_loss as module
from hetseq.tasks.nn.vocabulary_loss import vocabulary_loss

SIZE = 6
Facts = tuple[Tensor, ...]  # the loss, and the gradients of hidden, weight and bias


def made(words: int, tokens: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """hidden, weight and bias, which want gradients, and ids: the first, the last, and some word twice."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(7), dtype=dtype)
    leaves = draw(tokens, SIZE) * scale, draw(words, SIZE), draw(words)
    ids = torch.tensor([0, words - 1, words // 2, words // 2, *range(words)][:tokens], dtype=torch.int64)
    return *(leaf.requires_grad_() for leaf in leaves), ids


def facts_of(hidden: Tensor, weight: Tensor, bias: Tensor, ids: Tensor, *, is_plain: bool = False) -> Facts:
    if is_plain:
        loss = F.cross_entropy(F.linear(hidden, weight, bias), ids, reduction="sum")
    else:
        loss = vocabulary_loss(hidden, weight, bias, ids)
    return loss.detach(), *torch.autograd.grad(loss * 0.25, (hidden, weight, bias))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight words each."""
    monkeypatch.setattr(module, "_PIECE_ELEMENTS", dict.fromkeys(module._PIECE_ELEMENTS, 1))
    monkeypatch.setattr(module, "_LEAST_WORDS", 8)


@pytest.mark.parametrize("tokens", [0, 1, 5, 30])
@pytest.mark.parametrize("words", [1, 7, 8, 9, 16, 27])
@pytest.mark.usefixtures("small_pieces")
def test_loss_and_gradients_are_those_of_torch(words: int, tokens: int) -> None:
    case = made(words, min(tokens, words + 4))
    for found, expected in zip(facts_of(*case), facts_of(*case, is_plain=True), strict=True):
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.usefixtures("small_pieces")
def test_logits_far_apart_neither_overflow_nor_vanish() -> None:
    case = made(27, 5, scale=1000)
    for found, expected in zip(facts_of(*case), facts_of(*case, is_plain=True), strict=True):
        assert found.isfinite().all()
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert facts_of(*case)[0] > 1000  # the twin: it is not that nothing is far apart


@pytest.mark.usefixtures("small_pieces")
def test_what_is_no_number_is_seen_in_the_loss() -> None:
    hidden, weight, bias, ids = made(27, 5)
    with torch.no_grad():
        hidden[2, 1] = torch.nan
    assert facts_of(hidden, weight, bias, ids)[0].isnan()


@pytest.mark.usefixtures("small_pieces")
def test_backward_may_run_again() -> None:
    hidden, weight, bias, ids = made(27, 5)
    loss = vocabulary_loss(hidden, weight, bias, ids)
    first = torch.autograd.grad(loss, (hidden, weight, bias), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight, bias))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_in_single_precision_it_rounds_like_torch_in_pieces_of_the_usual_size() -> None:
    case = made(30522, 152, dtype=torch.float32)
    for found, expected in zip(facts_of(*case), facts_of(*case, is_plain=True), strict=True):
        assert (found - expected).norm() <= 2e-6 * expected.norm()


def test_in_fp16_it_is_what_torch_does() -> None:
    case = made(27, 5, dtype=torch.float32)
    with torch.autocast("cpu", torch.float16):
        found, expected = facts_of(*case), facts_of(*case, is_plain=True)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def errors(case: tuple[Tensor, ...], found: Facts) -> list[float]:
    """Of loss and gradients, relative to those of double precision."""
    exact = facts_of(*(leaf.detach().double().requires_grad_() for leaf in case[:3]), case[3], is_plain=True)
    return [float((one - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)]


@pytest.mark.parametrize("tokens", [1, 5, 152])
@pytest.mark.usefixtures("small_pieces")
def test_in_bf16_it_is_nearer_to_the_truth_than_torch(tokens: int) -> None:
    case = made(500, tokens, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = errors(case, facts_of(*case)), errors(case, facts_of(*case, is_plain=True))
    assert max(ours) < 0.01
    assert ours[3] < theirs[3]
    assert sum(ours[1:]) < sum(theirs[1:])


@pytest.mark.parametrize(
    "above", [60, 80, 87, 1000]
)  # around what exp of single precision can give, and what 1 over it
@pytest.mark.usefixtures("small_pieces")
def test_in_bf16_logits_far_apart_neither_overflow_nor_vanish(above: int) -> None:
    hidden, weight, bias, ids = made(27, 5, dtype=torch.float32)
    with torch.no_grad():
        weight[11] = hidden[0] / hidden[0].square().sum() * above  # a wrong word, for the first token by far the best
    with torch.autocast("cpu", torch.bfloat16):
        found = facts_of(hidden, weight, bias, ids)
    assert found[0] > above
    assert max(errors((hidden, weight, bias, ids), found)) < 0.01


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.usefixtures("small_pieces")
def test_in_bf16_no_tokens_have_no_loss_and_no_number_is_seen(tokens: int) -> None:
    hidden, weight, bias, ids = made(27, tokens, dtype=torch.float32)
    with torch.no_grad():
        hidden[2:3, 1] = torch.nan
    with torch.autocast("cpu", torch.bfloat16):
        loss, *gradients = facts_of(hidden, weight, bias, ids)
    assert loss.isnan() if tokens else loss == 0
    assert any(gradient.any() for gradient in gradients) == (tokens > 0)


def test_in_fp64_autocast_rounds_nothing() -> None:
    case = made(27, 5)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = facts_of(*case), facts_of(*case, is_plain=True)
    assert all(torch.allclose(*pair, rtol=1e-13, atol=1e-14) for pair in zip(found, expected, strict=True))
