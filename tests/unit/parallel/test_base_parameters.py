"""The base of a model: what belongs to it, what moves it, and what its digest sees."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetseq.errors import CheckpointMismatch, TaskError
from hetseq.parallel.base_parameters import base_digest, base_parameters, check_base, check_same_base, move_
from hetseq.parallel.replica import model_tensors
from tests.support.base_tasks import FROZEN, leave_out

CPU = torch.device("cpu")


def make(*, has_base: bool = True) -> nn.Module:
    torch.manual_seed(1)
    frozen = nn.Linear(4, 3, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    model = nn.Sequential(frozen, nn.BatchNorm1d(3), nn.Linear(3, 2))
    if has_base:
        model.register_state_dict_post_hook(leave_out)
    return model


def test_a_frozen_parameter_outside_state_dict_is_the_base_and_is_in_no_checkpoint() -> None:
    assert list(base_parameters(make())) == [FROZEN]
    assert f"model.{FROZEN}" not in model_tensors(make())
    assert base_parameters(make(has_base=False)) == {}  # frozen, and saved


def test_the_base_keeps_its_type_and_everything_else_gets_the_one_of_the_run() -> None:
    model = make()
    move_(model, CPU, torch.float64)
    types = {name: tensor.dtype for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    assert types.pop(FROZEN) is torch.bfloat16
    assert types.pop("1.num_batches_tracked") is torch.int64
    assert set(types.values()) == {torch.float64}
    without = make(has_base=False)
    move_(without, CPU, torch.float64)
    assert without[0].weight.dtype is torch.float64


def test_the_digest_names_the_bits_the_type_and_the_name() -> None:
    def changed(value: float, dtype: torch.dtype = torch.bfloat16) -> str | None:
        model = make()
        model[0].weight = nn.Parameter(model[0].weight.to(dtype), requires_grad=False)
        with torch.no_grad():
            model[0].weight[2, 3] += value
            model[2].weight.add_(1)  # trained: not of the base
        return base_digest(model)

    assert changed(0) == base_digest(make())
    assert len({base_digest(make()), changed(0.25), changed(0, torch.float32)}) == 3
    assert base_digest(make(has_base=False)) is None


def test_a_trained_parameter_outside_state_dict_is_refused() -> None:
    model = make()
    check_base(model)
    model[0].weight.requires_grad_(True)
    with pytest.raises(TaskError, match=r"0\.weight is trained, but state_dict\(\) of the model leaves it out"):
        check_base(model)


def test_a_checkpoint_names_its_base() -> None:
    check_same_base(base_digest(make()), {"base": base_digest(make())})
    check_same_base(base_digest(make(has_base=False)), {})
    with pytest.raises(CheckpointMismatch, match=r"frozen weights 0123, the model here has [0-9a-f]{16}: name the"):
        check_same_base(base_digest(make()), {"base": "0123"})
