"""Attention for the tokens that are wanted against attention for all, of which those are chosen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tasks.bert_attention import AttendForSome, Attention, among_rows, within
from tasks.bert_packing import Sequences

HEADS, SIZE = 2, 4
LENGTHS = (7, 7, 3, 2, 2, 2)  # of a packed batch
MASK = torch.arange(6) < torch.tensor([[6], [4], [1], [5]])  # of a padded one

#: a batch and as many tokens as it has places
BATCHES: dict[str, tuple[Callable[[], Attention], int]] = {
    "packed": (
        lambda: within(
            Sequences(
                lengths=LENGTHS,
                positions=torch.cat([torch.arange(length) for length in LENGTHS]),
                starts=torch.tensor([0, 7, 14, 17, 19, 21]),
            )
        ),
        23,
    ),
    "padded": (lambda: among_rows(MASK), 24),
}

#: of either batch; the first of a row or sequence among them or not, several times, in any order
WANTED = {
    "one of each": [0, 9, 15, 17, 20, 22],
    "unequally many": [8, 6, 12, 0, 9],
    "one twice": [13, 4, 13, 0],
    "one alone": [22],
    "none": [],
}


def parts_of(tokens: int, seed: int = 1) -> Tensor:
    return torch.randn(tokens, 3, HEADS, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def shaped(parts: Tensor) -> Tensor:
    """As of the padded batch, if it has as many tokens."""
    return parts.unflatten(0, MASK.shape) if len(parts) == MASK.numel() else parts


def for_some(attend: Attention, wanted: list[int]) -> AttendForSome:
    found = attend.for_some(torch.tensor(wanted, dtype=torch.int64))
    assert found is not None
    return found


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", WANTED)
@pytest.mark.parametrize("is_written_out", [True, False])
def test_it_is_that_of_all_at_the_tokens_wanted(
    batch: str, case: str, is_written_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("attention", "bert_attention"):
        monkeypatch.setattr(f"tasks.{module}.is_written_out", lambda *_: is_written_out)
    make, tokens = BATCHES[batch]
    attend, wanted = make(), WANTED[case]
    parts = parts_of(tokens).requires_grad_()
    of_all = attend(shaped(parts), 0.0).reshape(tokens, HEADS, SIZE)[wanted]
    of_some = for_some(attend, wanted)(parts[wanted, 0], shaped(parts[:, 1:]), 0.0)
    assert of_some.shape == (len(wanted), HEADS, SIZE)
    factors = parts_of(tokens, seed=2)[: len(wanted), 0]
    expected, found = (
        [attended, *torch.autograd.grad((attended * factors).sum(), parts)] for attended in (of_all, of_some)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


@pytest.mark.parametrize("batch", BATCHES)
def test_gradients_with_dropout_are_its_derivatives(batch: str) -> None:
    make, tokens = BATCHES[batch]
    attend, wanted = for_some(make(), WANTED["unequally many"]), WANTED["unequally many"]

    def attended(query: Tensor, others: Tensor) -> Tensor:
        torch.manual_seed(2)  # the same elements are left out every time
        return attend(query, shaped(others), 0.3)

    parts = parts_of(tokens)
    given = parts[wanted, 0].requires_grad_(), parts[:, 1:].contiguous().requires_grad_()
    assert torch.autograd.gradcheck(attended, given, eps=1e-6, atol=1e-9, rtol=1e-6)


def test_it_drops_weights_at_the_rate() -> None:
    attend, parts = for_some(BATCHES["padded"][0](), [6, 7]), torch.ones(24, 3, HEADS, SIZE)
    torch.manual_seed(1)
    drawn = torch.stack([attend(parts[[6, 7], 0], shaped(parts[:, 1:]), 0.25) for _ in range(400)])
    kept = drawn[..., 0] * 0.75 * 4  # of the four real tokens of their row
    assert set(kept.round().flatten().tolist()) == {0.0, 1.0, 2.0, 3.0, 4.0}
    assert kept.mean() == pytest.approx(3.0, abs=0.05)


@pytest.mark.parametrize(
    ("batch", "places"),
    # at most three of a sequence of seven tokens, and none of the shorter ones; at most three of a row
    [("packed", 2 * 3 * 7 + 3 + 3 * 2), ("padded", 4 * 3 * 6)],
)
def test_products_are_of_as_many_queries_as_the_sequence_with_most_has(batch: str, places: int) -> None:
    make, tokens = BATCHES[batch]
    attend, wanted, parts = make(), WANTED["unequally many"], parts_of(tokens)
    with FlopCounterMode(display=False) as counter:
        for_some(attend, wanted)(parts[wanted, 0], shaped(parts[:, 1:]), 0.1)
    assert counter.get_total_flops() == 2 * 2 * HEADS * SIZE * places


@pytest.mark.parametrize("batch", BATCHES)
def test_for_most_of_the_tokens_it_is_not_worth_while(batch: str) -> None:
    make, tokens = BATCHES[batch]
    attend = make()
    assert attend.for_some(torch.arange(tokens)) is None
    assert attend.for_some(torch.arange(0, tokens, 4)) is not None


def test_no_other_device_is_waited_for() -> None:
    with torch.device("meta"):
        assert among_rows(torch.ones(4, 6, dtype=torch.bool)).for_some(torch.arange(2)) is None
