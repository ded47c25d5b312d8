"""Attention written out and as torch's kernel has it: the same numbers, and the choice between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hetseq.tasks.nn import attention
from hetseq.tasks.nn.attention import attend, is_written_out

IS_REAL = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])[:, None, None, :]


def parts() -> list[Tensor]:
    """Queries, keys and values (2, 3, 6, 4)."""
    drawn = torch.randn(3, 2, 3, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return [part.requires_grad_() for part in drawn]


@pytest.mark.parametrize("who", [{}, {"is_causal": True}, {"mask": IS_REAL}])
def test_attention_written_out_is_that_of_torch(who: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*, is_by_kernel: bool) -> list[Tensor]:
        monkeypatch.setattr(attention, "is_written_out", lambda *_: not is_by_kernel)
        given = parts()
        attended = attend(*given, 0.0, **who)
        return [attended, *torch.autograd.grad((attended * given[0].detach().exp()).sum(), given)]

    for ours, theirs in zip(found(is_by_kernel=False), found(is_by_kernel=True), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def test_what_is_hidden_has_no_weight() -> None:
    seen, changed = parts(), parts()
    with torch.no_grad():
        for part in changed[1:]:
            part[1, :, 4:] = 1e3
    with_mask = [attend(*given, 0.0, mask=IS_REAL) for given in (seen, changed)]
    torch.manual_seed(1)
    dropped = attend(*seen, 0.5, mask=IS_REAL)
    torch.manual_seed(1)
    assert torch.equal(attend(*changed, 0.5, mask=IS_REAL), dropped)
    torch.testing.assert_close(with_mask[0], with_mask[1], rtol=0, atol=1e-14)
    assert not torch.equal(attend(*seen, 0.0), attend(*changed, 0.0))  # the twin


def test_each_head_drops_weights_of_its_own_and_keeps_the_mean() -> None:
    query, key, value = torch.randn(3, 1, 2, 64, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    drawn = torch.stack([attend(query, key, value, 0.25) for _ in range(400)])
    assert (drawn[0, :, 0] - drawn[0, :, 1]).abs().max() > 0.01
    error = drawn.std(0) / 20
    expected = F.scaled_dot_product_attention(query, key, value)
    assert ((drawn.mean(0) - expected) / error).abs().max() < 6


@pytest.mark.parametrize(
    ("dtype", "length", "rate", "expected"),
    [
        (torch.float32, 512, 0.0, True), (torch.float32, 513, 0.0, False), (torch.float32, 513, 0.1, True),
        (torch.bfloat16, 1024, 0.0, True), (torch.bfloat16, 1025, 0.0, False), (torch.float16, 128, 0.0, False),
    ],
)  # fmt: skip
def test_torch_is_asked_where_it_is_fast(dtype: torch.dtype, length: int, rate: float, expected: bool) -> None:
    assert is_written_out(torch.empty(0, dtype=dtype), length, rate) is expected
    assert not is_written_out(torch.empty(0, dtype=dtype, device="meta"), length, rate)
