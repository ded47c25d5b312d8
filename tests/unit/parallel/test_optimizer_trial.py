"""The trial of an optimizer: what ranks may do with parts of its parameters, and what cannot be divided."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hetseq.errors import ConfigError
from hetseq.loop.joint_optimizer import joined
from hetseq.parallel.optimizer_trial import try_out
from hetseq.training.muon import Muon
from hetseq.training.optim import Lamb

Make = Callable[..., torch.optim.Optimizer]
ELEMENTWISE: dict[str, Make] = {
    "adamw fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, foreach=True),
    "adamw amsgrad": lambda groups: torch.optim.AdamW(groups, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "sgd momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adadelta": torch.optim.Adadelta,
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.9, centered=True),
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "adamax": torch.optim.Adamax,
    "rprop": torch.optim.Rprop,
}
WHOLE: dict[str, Make] = {
    "lamb": Lamb,
    "adafactor": torch.optim.Adafactor,
    "muon": lambda groups: Muon([{**group, "use_muon": True} for group in groups]),
}


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    return try_out(optimizer).is_elementwise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", list(ELEMENTWISE))
def test_an_optimizer_of_single_elements_lets_parameters_be_cut(kind: str, dtype: torch.dtype) -> None:
    assert is_elementwise(ELEMENTWISE[kind]([{"params": [nn.Parameter(torch.ones(5, 4, dtype=dtype))]}]))


@pytest.mark.parametrize("kind", list(WHOLE))
def test_an_optimizer_of_whole_tensors_does_not(kind: str) -> None:
    optimizer = WHOLE[kind]([{"params": [nn.Parameter(torch.ones(5, 4))]}])
    assert not is_elementwise(optimizer)
    # one group of several decides; and it is asked of a copy
    both = [{"params": [nn.Parameter(torch.ones(5))]}, {"params": [nn.Parameter(torch.ones(3, 2))]}]
    lamb = Lamb([{**both[0], "has_trust_ratio": False}, {**both[1], "has_trust_ratio": True}])
    assert not is_elementwise(lamb)
    assert not lamb.state
    assert all(bool((one == 1).all()) for group in lamb.param_groups for one in group["params"])
    lamb.param_groups[1]["has_trust_ratio"] = False
    assert is_elementwise(lamb), "the twin: it is AdamW then"


def test_the_answer_does_not_depend_on_settings() -> None:
    """The last elements of a tensor, which fill no vector, may be rounded otherwise than the others."""
    settings = itertools.product(
        (1e-2, 3e-3, 1e-3, 1e-4), ((0.9, 0.999), (0.9, 0.98), (0.8, 0.95)), (0, 0.01, 0.05, 0.1)
    )
    for rate, betas, decay in settings:
        optimizer = torch.optim.AdamW(
            [nn.Parameter(torch.ones(7))], lr=rate, betas=betas, weight_decay=decay, fused=True
        )  # fmt: skip
        assert is_elementwise(optimizer), f"{rate}, {betas}, {decay}"


class Changed(torch.optim.SGD):
    """SGD that changes gradients first."""

    def change(self, parameters: list[torch.Tensor]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.change([one for group in self.param_groups for one in group["params"] if one.grad is not None])
        super().step()


class DecayOfMatrices(Changed):
    def change(self, parameters: list[torch.Tensor]) -> None:
        for one in parameters:
            if one.dim() > 1:
                one.mul_(0.99)


class Centralised(Changed):
    """Yong et al. 2020: the gradient of a matrix without the mean of each row."""

    def change(self, parameters: list[torch.Tensor]) -> None:
        for one in parameters:
            if one.grad is not None and one.dim() > 1:
                one.grad -= one.grad.mean(dim=1, keepdim=True)


class Clipped(Changed):
    def change(self, parameters: list[torch.Tensor]) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)


class Wrapper(torch.optim.Optimizer):
    """Leaves the work to another optimizer of the same parameters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.SGD(list(parameters), lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class Configured(torch.optim.SGD):
    """Has an attribute that an optimizer's own copy would lose."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.setting = 3

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.setting == 3
        super().step()


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(4))]


@pytest.mark.parametrize("make", [DecayOfMatrices, Centralised])
def test_a_matrix_is_tried_as_a_matrix(make: Make) -> None:
    assert not is_elementwise(make(parameters(), lr=0.1))
    assert is_elementwise(make(parameters()[1:], lr=0.1)), "the twin: it has vectors only"


@pytest.mark.parametrize("rate", [0.01, 0.0, torch.tensor(0.0)], ids=["rate", "no rate", "tensor"])
@pytest.mark.parametrize("kind", list(WHOLE))
def test_a_schedule_does_not_void_the_trial(kind: str, rate: Any) -> None:
    optimizer = WHOLE[kind]([{"params": parameters()[:1]}])
    optimizer.param_groups[0]["lr"] = rate
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    assert not is_elementwise(optimizer)
    plain = torch.optim.SGD(parameters(), lr=0.0)
    torch.optim.lr_scheduler.LambdaLR(plain, lambda _: 1.0)
    assert is_elementwise(plain)


REFUSED: dict[str, tuple[Make, str]] = {
    "a norm over all": (lambda: Clipped(parameters(), lr=0.1), "updates one parameter by others"),
    "a wrapper": (lambda: Wrapper(parameters()), "changes nothing in a copy"),
    "a closure": (lambda: torch.optim.LBFGS(parameters()), "could not be tried .*closure"),
}


@pytest.mark.parametrize(("make", "told"), REFUSED.values(), ids=list(REFUSED))
def test_what_ranks_cannot_divide_is_refused(make: Make, told: str) -> None:
    with pytest.raises(ConfigError, match=f"--shard-model: .*{told}.*--shard-model none"):
        try_out(make())


def test_an_optimizer_that_cannot_be_copied_or_has_another_step_is_refused() -> None:
    locked, changed = torch.optim.SGD(parameters(), lr=0.1), torch.optim.SGD(parameters(), lr=0.1)
    locked.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"SGD could not be tried .*lock"):
        try_out(locked)
    changed.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    with pytest.raises(ConfigError, match="SGD has a step"):
        try_out(changed)


def test_parts_of_a_joint_optimizer_and_groups_without_parameters_are_tried() -> None:
    matrix, vector = parameters()
    joint = joined([Configured([matrix], lr=0.1), torch.optim.Adam([{"params": [vector]}, {"params": []}])])
    assert is_elementwise(joint)
    assert not is_elementwise(joined([Configured([vector], lr=0.1), Lamb([matrix])]))
    assert not joint.state
    assert bool((matrix == 1).all())


def test_keys_of_the_state_without_an_element_for_each_of_the_parameters_are_known() -> None:
    assert try_out(torch.optim.AdamW(parameters())).common_keys == {"step"}
    assert try_out(torch.optim.Adafactor(parameters())).common_keys == {"step", "row_var", "col_var"}
    assert try_out(torch.optim.SGD(parameters(), lr=0.1, momentum=0.9)).common_keys == set()
