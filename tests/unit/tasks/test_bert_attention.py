"""Attention for the tokens that are wanted against attention for all, and in blocks of rows against one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hetseq.tasks.bert import attention, model
from hetseq.tasks.bert.attention import AttendForSome, Attention, among_rows, within
from hetseq.tasks.bert.packing import Sequences
from hetseq.tasks.nn.attention import attend

HEADS, SIZE = 2, 4
LENGTHS, PADDING = (2, 1, 2, 33, 32, 40), 2  # of a packed batch
STARTS = (0, 2, 3, 5, 38, 70)
MASK = torch.arange(20) < torch.tensor([[20], [14], [1], [15], [20], [7]])  # of a padded one


def packed() -> Attention:
    positions = torch.cat([torch.arange(length) for length in LENGTHS] + [torch.zeros(PADDING, dtype=torch.int64)])
    return within(Sequences(LENGTHS, PADDING, torch.tensor(STARTS), positions))


def padded() -> Attention:
    return among_rows(MASK)


#: attention in a batch, and the shape of its tokens
BATCHES: dict[str, tuple[Callable[[], Attention], tuple[int, ...]]] = {
    "packed": (packed, (112,)),
    "padded": (padded, tuple(MASK.shape)),
}

#: real tokens of either batch; the first of a sequence or row among them or not, several times, in any order
WANTED = {
    "one of each": [0, 20, 40, 60, 80, 101],
    "unequally many": [8, 6, 12, 0, 9],
    "one twice": [13, 4, 13, 0],
    "one alone": [80],
    "none": [],
}


def parts_of(shape: tuple[int, ...], seed: int = 1) -> Tensor:
    return torch.randn(*shape, 3, HEADS, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def for_some(attention: Attention, wanted: list[int]) -> AttendForSome:
    found = attention.for_some(torch.tensor(wanted, dtype=torch.int64))
    assert found is not None
    return found


def queries(parts: Tensor, wanted: list[int]) -> Tensor:
    return parts.flatten(0, -4)[wanted, 0]


@pytest.fixture(params=["written out", "by the kernel"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("hetseq.tasks.nn.attention.is_written_out", lambda *_: request.param == "written out")
    return str(request.param)


@pytest.mark.parametrize("kinds", [{"cpu"}, set()], ids=["each length apart", "all together"])
@pytest.mark.usefixtures("way")
def test_sequences_in_blocks_are_as_one_by_one(kinds: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetseq.tasks.bert.attention._LENGTHS_APART", frozenset(kinds))
    parts = parts_of((112,)).requires_grad_()
    found = packed()(parts, 0.0)
    alone = [attend(*piece.permute(1, 2, 0, 3)[:, None], 0.0)[0] for piece in parts.split([*LENGTHS, PADDING])[:-1]]
    expected = torch.cat([attended.transpose(0, 1) for attended in alone] + [torch.zeros(PADDING, HEADS, SIZE)])
    factors = parts_of((112,), seed=2)[:, 0]
    for one, other in zip(
        *([attended, *torch.autograd.grad((attended * factors).sum(), parts)] for attended in (found, expected)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", WANTED)
@pytest.mark.usefixtures("way")
def test_it_is_that_of_all_at_the_tokens_wanted(batch: str, case: str) -> None:
    make, shape = BATCHES[batch]
    attention, wanted, parts = make(), WANTED[case], parts_of(shape).requires_grad_()
    of_all = attention(parts, 0.0).flatten(0, -3)[wanted]
    of_some = for_some(attention, wanted)(queries(parts, wanted), parts[..., 1:, :, :], 0.0)
    assert of_some.shape == (len(wanted), HEADS, SIZE)
    factors = queries(parts_of(shape, seed=2), wanted)
    expected, found = (
        [attended, *torch.autograd.grad((attended * factors).sum(), parts)] for attended in (of_all, of_some)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


@pytest.mark.parametrize("batch", BATCHES)
def test_it_drops_weights_at_the_rate(batch: str) -> None:
    make, shape = BATCHES[batch]
    attend, parts = for_some(make(), [0, 20]), torch.ones(*shape, 3, HEADS, SIZE)
    torch.manual_seed(1)
    drawn = torch.stack([attend(queries(parts, [0, 20]), parts[..., 1:, :, :], 0.25) for _ in range(400)])
    of_each = (drawn[..., 0] * 0.75 * torch.tensor([[2], [33]] if batch == "packed" else [[20], [14]])).round()
    assert len(of_each[:, 1, 0].unique()) > 8  # sums of 33 or 14 tokens
    for kept, total in zip(of_each.mean(dim=(0, 2)), (2, 33) if batch == "packed" else (20, 14), strict=True):
        assert kept == pytest.approx(0.75 * total, rel=0.03)


@pytest.mark.parametrize(
    ("batch", "places"),
    # all five are of one sequence or row, so each has five places
    [("packed", 6 * 5 * 40), ("padded", 6 * 5 * 20)],
)
def test_products_are_of_as_many_queries_as_the_sequence_with_most_has(batch: str, places: int) -> None:
    make, shape = BATCHES[batch]
    attend, wanted, parts = make(), [5, 6, 8, 9, 10], parts_of(shape)
    with FlopCounterMode(display=False) as counter:
        for_some(attend, wanted)(queries(parts, wanted), parts[..., 1:, :, :], 0.1)
    assert counter.get_total_flops() == 2 * 2 * HEADS * SIZE * places


def test_products_are_of_rows_of_about_the_length_of_their_sequences() -> None:
    attention, parts = packed(), parts_of((112,))
    with FlopCounterMode(display=False) as counter:
        attention(parts, 0.1)
    # three short ones, one of 33, one of 32, one of 40, in this order
    assert counter.get_total_flops() == 2 * 2 * HEADS * SIZE * (3 * 32**2 + 64**2 + 32**2 + 64**2)


@pytest.mark.parametrize("batch", BATCHES)
def test_for_most_of_the_tokens_it_is_not_worth_while(batch: str) -> None:
    attention = BATCHES[batch][0]()
    assert attention.for_some(torch.arange(80, 101)) is None  # most of what one sequence or row has
    assert attention.for_some(torch.arange(0, 101, 4)) is not None


def test_no_other_device_is_waited_for() -> None:
    # tensors on "meta" have no values, and what is of the host is not among them
    with torch.device("meta"):
        assert among_rows(torch.ones(4, 6, dtype=torch.bool)).for_some(torch.arange(2)) is None
        sequences = Sequences(LENGTHS, PADDING, torch.zeros(6, dtype=torch.int64), torch.zeros(112, dtype=torch.int64))
        parts = torch.empty(112, 3, HEADS, SIZE)
    attention = within(sequences)
    assert attention(parts, 0.1).shape == (112, HEADS, SIZE)
    assert attention.for_some(sequences.starts) is None


class Operations(TorchDispatchMode):
    """Names of what torch computes, in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_gradients_of_queries_keys_and_values_are_put_together_where_they_are_needed() -> None:
    """Another copy of all three was 4 % of a step of BERT-base on an H100."""
    with torch.device("meta"):
        hidden, weight = torch.empty(4, 16, 32), torch.empty(3 * 32, 32, requires_grad=True)
        attend = among_rows(torch.ones(4, 16, dtype=torch.bool))
    with Operations() as operations:
        attend(linear(hidden, weight).unflatten(-1, (3, HEADS, -1)), 0.0).sum().backward()
    after = operations.names[operations.names.index("stack.default") + 1 :]
    assert "mm.default" in after  # the gradient of the weight
    assert "clone.default" not in after


@pytest.mark.parametrize("made_in_forward", [attention._Masked, attention._Packed, attention._Blocks, model._View])
def test_what_forward_makes_has_no_hash_of_its_fields(made_in_forward: type) -> None:
    """torch.compile of torch 2.11 asks for the hash before the fields are set, and fails."""
    assert made_in_forward.__hash__ is object.__hash__
