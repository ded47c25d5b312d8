"""A weight that is looked up and multiplied with has one gradient, which is that of autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetseq.tasks.nn.tied_embedding import Tied

WORDS, SIZE, PADDING = 11, 4, 2


def made() -> tuple[nn.Parameter, Tensor, Tensor]:
    """A weight, ids of which some come twice and one is padding, and a factor for each number of a row."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(WORDS, SIZE, generator=generator, dtype=torch.float64)
    return nn.Parameter(weight), torch.tensor([[3, 3, PADDING], [0, 3, 10]]), torch.randn(SIZE, generator=generator)


def loss_of(rows: Tensor | None, head: Tensor | None, factor: Tensor) -> Tensor:
    looked_up = torch.zeros(()) if rows is None else (rows**2 * factor).sum()
    return looked_up if head is None else looked_up + (head @ factor.double()).exp().sum()


@pytest.mark.parametrize("uses", [("rows", "head"), ("rows",), ("head",)])
def test_the_gradient_is_that_of_autograd(uses: tuple[str, ...]) -> None:
    weight, ids, factor = made()
    tied = Tied(weight, padding=PADDING)
    rows, head = tied.look_up(ids), tied.head
    loss_of(rows if "rows" in uses else None, head if "head" in uses else None, factor).backward()
    found, weight.grad = weight.grad, None
    plain = nn.functional.embedding(ids, weight, PADDING)
    loss_of(plain if "rows" in uses else None, weight if "head" in uses else None, factor).backward()
    assert found is not None
    assert weight.grad is not None
    assert found.layout is torch.strided
    assert torch.allclose(found, weight.grad, rtol=1e-15, atol=0)
    if uses == ("rows",):
        assert found[[0, 3, 10]].all()
        assert not found[PADDING].any()


def test_no_gradient_as_large_as_the_weight_is_made_for_what_is_looked_up() -> None:
    weight, ids, factor = made()

    def backward_of(rows: Tensor, head: Tensor) -> set[str]:
        with torch.autograd.profiler.profile(use_kineto=False) as profile:
            loss_of(rows, head, factor).backward()
        return {event.name for event in profile.function_events}

    tied = Tied(weight, padding=PADDING)
    assert "aten::embedding_dense_backward" not in backward_of(tied.look_up(ids), tied.head)
    plain = nn.functional.embedding(ids, weight, PADDING)
    assert "aten::embedding_dense_backward" in backward_of(plain, weight)  # the twin


def test_backward_may_run_again() -> None:
    weight, ids, factor = made()
    tied = Tied(weight, padding=PADDING)
    loss = loss_of(tied.look_up(ids), tied.head, factor)
    (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, weight)
    assert torch.equal(kept, second)


def test_a_weight_that_is_not_trained_is_only_used() -> None:
    weight, ids, _ = made()
    weight.requires_grad = False
    tied = Tied(weight, padding=PADDING)
    assert tied.head is weight
    assert torch.equal(tied.look_up(ids), weight[ids])
