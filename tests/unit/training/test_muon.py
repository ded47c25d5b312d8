"""Which weights Muon trains, that its bits depend on no order of a sum, and what it owes to torch's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hetseq import Muon
from hetseq.config.sections import OptimizationConfig
from hetseq.errors import TaskError
from hetseq.tasks.gpt.config import GptConfig
from hetseq.tasks.gpt.model import GptForCausalLM
from hetseq.training.muon import muon, orthogonal
from hetseq.training.optim import hidden_matrices, parameter_groups

SHAPES = [(123, 131), (139, 383), (300, 17), (8, 5000)]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def drawn(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def in_plain_products(matrix: torch.Tensor) -> torch.Tensor:
    """The iteration as it is written."""
    iterate: torch.Tensor = matrix / matrix.norm()
    for _ in range(5):
        gram = iterate @ iterate.T
        iterate = 3.4445 * iterate + (-4.7750 * gram + 2.0315 * gram @ gram) @ iterate
    return iterate


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_update_has_the_same_bits_in_any_order_of_its_sums(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix, shuffle = drawn(shape, dtype), torch.Generator().manual_seed(1)
    rows, columns = (torch.randperm(size, generator=shuffle) for size in shape)
    whole = orthogonal(matrix)
    assert torch.equal(orthogonal(matrix[rows][:, columns]), whole[rows][:, columns])
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(orthogonal(matrix), whole), threads
    plain = in_plain_products(matrix)
    assert not torch.equal(in_plain_products(matrix[rows][:, columns]), plain[rows][:, columns])


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 5e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_grid_costs_no_accuracy(shape: tuple[int, int], dtype: torch.dtype, limit: float) -> None:
    # measured, as a share of the largest element: at most 3e-6 and 9e-13
    plain = in_plain_products(drawn(shape, dtype).double())
    assert (orthogonal(drawn(shape, dtype)).double() - plain).abs().max() <= limit * plain.abs().max()


def test_a_gradient_of_zeros_and_a_tiny_one_give_finite_updates() -> None:
    assert torch.equal(orthogonal(torch.zeros(3, 5)), torch.zeros(3, 5).double())
    assert orthogonal(torch.full((3, 5), 1e-38)).isfinite().all()
    assert orthogonal(torch.full((3, 5), 1e38)).isfinite().all()


def test_it_is_muon_and_adamw_of_torch_up_to_their_bfloat16() -> None:
    ours: Any = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 3))
    theirs = copy.deepcopy(ours)
    config = OptimizationConfig(optimizer="muon", lr=(0.01,), weight_decay=0.1)
    optimizer = muon(parameter_groups(ours, config), config)
    biases = {"params": [theirs[0].bias, theirs[2].bias], "weight_decay": 0.0}
    aux: list[dict[str, Any]] = [{"params": [theirs[2].weight]}, biases]
    others: list[torch.optim.Optimizer] = [
        torch.optim.Muon([theirs[0].weight], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(aux, lr=0.01, weight_decay=0.1, fused=True),
    ]
    before = ours[0].weight.detach().clone()
    for number in range(5):
        for one, other in zip(ours.parameters(), theirs.parameters()):
            one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(number))
            other.grad = one.grad.clone()
        optimizer.step()
        for their in others:
            their.step()
    for mine, right in list(zip(ours.parameters(), theirs.parameters()))[1:]:
        assert torch.equal(mine, right)
    mine, right = ours[0].weight.detach(), theirs[0].weight.detach()
    way, apart = (right - before).norm().item(), (right - mine).norm().item()
    assert apart <= 0.02 * way  # measured: 0.009


def names(model: nn.Module) -> set[str]:
    hidden = set(map(id, hidden_matrices(model)))
    return {name for name, value in model.named_parameters() if id(value) in hidden}


def test_hidden_are_matrices_between_embedding_and_output() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Linear(4, 8), nn.Linear(8, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 3)
    )
    assert names(net) == {"1.weight", "2.weight"}
    sizes: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
    }
    for is_tied in (True, False):
        found = names(GptForCausalLM(GptConfig(**sizes, is_tied=is_tied)))
        assert any("down" in name for name in found)
        assert not [name for name in found if "tokens" in name or "positions" in name or "head" in name]


def test_a_group_for_muon_takes_matrices_only() -> None:
    with pytest.raises(TaskError, match=r"a group with use_muon has a parameter of shape \(3,\): expected matrices"):
        Muon([{"params": [nn.Parameter(torch.ones(3))], "use_muon": True}])


def test_a_copied_optimizer_continues_with_the_same_bits() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        for value in model.parameters():
            value.grad = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
        optimizer.step()

    model: Any = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    config = OptimizationConfig(optimizer="muon")
    optimizer = muon(parameter_groups(model, config), config)
    step(model, optimizer, 0)
    twin, other = copy.deepcopy((model, optimizer))
    step(model, optimizer, 1)
    step(twin, other, 1)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), twin.parameters()))
    assert set(optimizer.state[model[0].weight]) == {"momentum_buffer"}
    assert set(optimizer.state[model[1].weight]) == {"step", "exp_avg", "exp_avg_sq"}
