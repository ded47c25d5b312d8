"""Every optimizer against a plain NumPy float64 transcription of its definition that shares no code with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hetseq.config.sections import OptimizationConfig
from hetseq.errors import TaskError
from hetseq.training.muon import muon
from hetseq.training.optim import Lamb, adadelta, adam, adamw, lamb, learning_rates, parameter_groups, sgd

Array = np.ndarray
Rule = Callable[[Array, Array, dict[str, Array], int], Array]  # weights, gradient, state, t from 1 -> weights

BUILDERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": adam,
    "adamw": adamw,
    "sgd": sgd,
    "adadelta": adadelta,
    "lamb": lamb,
    "muon": muon,
}


def adamw_rule(weights: Array, gradient: Array, state: dict[str, Array], t: int) -> Array:
    lr, beta1, beta2, eps, decay = 0.03, 0.8, 0.95, 1e-6, 0.1
    state["m"] = beta1 * state["m"] + (1 - beta1) * gradient
    state["v"] = beta2 * state["v"] + (1 - beta2) * gradient**2
    corrected = np.sqrt(state["v"] / (1 - beta2**t)) + eps
    return weights - lr * decay * weights - lr * (state["m"] / (1 - beta1**t)) / corrected


def lamb_rule(weights: Array, gradient: Array, state: dict[str, Array], t: int) -> Array:
    lr, beta1, beta2, eps, decay = 0.03, 0.8, 0.95, 1e-6, 0.1
    state["m"] = beta1 * state["m"] + (1 - beta1) * gradient
    state["v"] = beta2 * state["v"] + (1 - beta2) * gradient**2
    update = (state["m"] / (1 - beta1**t)) / (np.sqrt(state["v"] / (1 - beta2**t)) + eps) + decay * weights
    norm = np.sqrt((weights**2).sum())
    update_norm = np.sqrt((update**2).sum())
    ratio = norm / update_norm if norm > 0 and update_norm > 0 else 1.0
    return weights - lr * ratio * update


def muon_rule(weights: Array, gradient: Array, state: dict[str, Array], t: int) -> Array:
    """The polynomial of the iteration acts on singular values alone."""
    if weights.ndim != 2:
        return adamw_rule(weights, gradient, state, t)
    lr, momentum, decay = 0.03, 0.9, 0.1
    state["m"] = momentum * state["m"] + (1 - momentum) * gradient
    left, values, right = np.linalg.svd(momentum * state["m"] + (1 - momentum) * gradient, full_matrices=False)
    values = values / np.sqrt((values**2).sum())
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    size = 0.2 * np.sqrt(max(weights.shape))
    return weights - lr * decay * weights - lr * size * (left * values) @ right


def sgd_rule(weights: Array, gradient: Array, state: dict[str, Array], t: int) -> Array:
    lr, momentum, decay = 0.03, 0.9, 0.1
    state["m"] = momentum * state["m"] + gradient + decay * weights
    return weights - lr * state["m"]


def adadelta_rule(weights: Array, gradient: Array, state: dict[str, Array], t: int) -> Array:
    lr, rho, eps, decay = 0.03, 0.7, 1e-4, 0.1
    gradient = gradient + decay * weights
    state["m"] = rho * state["m"] + (1 - rho) * gradient**2
    delta = np.sqrt(state["v"] + eps) / np.sqrt(state["m"] + eps) * gradient
    state["v"] = rho * state["v"] + (1 - rho) * delta**2
    return weights - lr * delta


RULES: dict[str, Rule] = {
    "adam": adamw_rule,
    "adamw": adamw_rule,
    "sgd": sgd_rule,
    "adadelta": adadelta_rule,
    "lamb": lamb_rule,
    "muon": muon_rule,
}


def config_of(name: str, **changes: Any) -> OptimizationConfig:
    settings: dict[str, Any] = {
        "optimizer": name,
        "lr": (0.03,),
        "weight_decay": 0.1,
        "adam_betas": (0.8, 0.95),
        "adam_eps": 1e-6,
        "momentum": 0.9,
        "adadelta_rho": 0.7,
        "adadelta_eps": 1e-4,
        "decay_all": True,
    }
    return OptimizationConfig(**(settings | changes))


def arrays(seed: int) -> list[Array]:
    generator = np.random.default_rng(seed)
    return [generator.normal(size=shape) for shape in ((3, 5), (7,), (2, 3, 4))]


def updated_by_torch(name: str, *, steps: int = 6, dtype: torch.dtype = torch.float64, **changes: Any) -> list[Array]:
    config = config_of(name, **changes)
    model = nn.ParameterList([torch.tensor(array, dtype=dtype) for array in arrays(0)])
    optimizer = BUILDERS[name](parameter_groups(model, config), config)
    for step in range(steps):
        for parameter, gradient in zip(model, arrays(1 + step), strict=True):
            parameter.grad = torch.tensor(gradient, dtype=dtype)
        optimizer.step()
    return [parameter.detach().double().numpy() for parameter in model]


def updated_by_numpy(rule: Rule, *, steps: int = 6) -> list[Array]:
    weights = arrays(0)
    states = [{"m": np.zeros_like(weight), "v": np.zeros_like(weight)} for weight in weights]
    for step in range(steps):
        gradients = arrays(1 + step)
        weights = [
            rule(weight, gradient, state, step + 1)
            for weight, gradient, state in zip(weights, gradients, states, strict=True)
        ]
    return weights


def distance(left: list[Array], right: list[Array]) -> float:
    return max(float(np.abs(one - other).max()) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("name", sorted(RULES))
def test_six_updates_follow_the_definition_and_no_other(name: str) -> None:
    updated = updated_by_torch(name)
    assert distance(updated, updated_by_numpy(RULES[name])) < 1e-12
    for other, rule in RULES.items():
        if rule is not RULES[name]:
            assert distance(updated, updated_by_numpy(rule)) > 1e-3, other


@pytest.mark.parametrize("name", sorted(RULES))
def test_float32_stays_near_the_definition(name: str) -> None:
    # measured: at most 7e-7 after six updates of weights near 1
    assert distance(updated_by_torch(name, dtype=torch.float32), updated_by_numpy(RULES[name])) < 5e-6


def test_adadelta_takes_its_own_weight_decay_before_the_common_one() -> None:
    own = updated_by_torch("adadelta", weight_decay=0.7, adadelta_weight_decay=0.1)
    assert distance(own, updated_by_numpy(adadelta_rule)) < 1e-12
    off = updated_by_torch("adadelta", weight_decay=0.1, adadelta_weight_decay=0.0)
    assert distance(off, updated_by_numpy(adadelta_rule)) > 1e-3
    # and it belongs to adadelta alone
    assert distance(updated_by_torch("sgd", adadelta_weight_decay=0.7), updated_by_numpy(sgd_rule)) < 1e-12


def test_biases_and_norms_are_not_decayed_unless_told_so() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2), nn.LayerNorm(2))
    groups = parameter_groups(model, config_of("adamw", decay_all=False))
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [tuple(parameter.shape) for parameter in groups[0]["params"]] == [(4, 3), (2, 3)]
    assert [tuple(parameter.shape) for parameter in groups[1]["params"]] == [(2,), (2,), (2,)]

    (everything,) = parameter_groups(model, config_of("adamw"))
    assert everything["weight_decay"] == 0.1
    assert [id(parameter) for parameter in everything["params"]] == [id(parameter) for parameter in model.parameters()]


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_zero_gradient_moves_decayed_weights_only(name: str) -> None:
    config = config_of(name, decay_all=False)
    model = nn.Linear(3, 2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = BUILDERS[name](parameter_groups(model, config), config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert not torch.equal(model.weight, before[0])
    assert torch.equal(model.bias, before[1])


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_parameter_without_gradient_is_left_alone(name: str) -> None:
    config = config_of(name)
    model = nn.Linear(3, 2)
    bias = model.bias.detach().clone()
    optimizer = BUILDERS[name](parameter_groups(model, config), config)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert torch.equal(model.bias, bias)
    assert model.bias not in optimizer.state


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    (group,) = parameter_groups(model, config_of("sgd", decay_all=False))
    assert group["params"] == [model.weight]


def test_a_shared_parameter_is_updated_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    (group,) = parameter_groups(model, config_of("sgd"))
    assert len(group["params"]) == 1


def test_a_model_with_nothing_to_train_is_refused_in_words() -> None:
    with pytest.raises(TaskError, match=r"^Linear has no parameter that requires a gradient"):
        parameter_groups(nn.Linear(3, 2).requires_grad_(False), OptimizationConfig())


def test_lamb_leaves_what_it_does_not_decay_to_adamw() -> None:
    settings = {"decay_all": False, "weight_decay": 0.1}
    model = nn.Linear(3, 2, dtype=torch.float64)
    twin = nn.Linear(3, 2, dtype=torch.float64)
    twin.load_state_dict(model.state_dict())
    for name, trained in (("lamb", model), ("adamw", twin)):
        config = config_of(name, **settings)
        optimizer = BUILDERS[name](parameter_groups(trained, config), config)
        for step in range(3):
            trained.weight.grad, trained.bias.grad = (
                torch.tensor(array).flatten()[: one.numel()].view_as(one)
                for array, one in zip(arrays(1 + step), (trained.weight, trained.bias))
            )
            optimizer.step()
    assert torch.allclose(model.bias, twin.bias, rtol=0, atol=1e-15)
    assert not torch.allclose(model.weight, twin.weight, rtol=0, atol=1e-3)


def test_an_update_of_lamb_by_hand() -> None:
    # |w| = 5; at first r = (1, 1), whatever the gradient, so u = r + 0.01 w = (1.03, 1.04), and the ratio is 5 / |u|
    layer = nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    alone = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    config = OptimizationConfig(optimizer="lamb", lr=(0.006,), weight_decay=0.01, adam_eps=1e-30)
    optimizer = lamb(parameter_groups(nn.ParameterList([layer, alone]), config), config)
    layer.grad, alone.grad = torch.tensor([[0.5, 2.0]], dtype=torch.float64), torch.tensor([0.5, 2.0]).double()
    optimizer.step()
    # 5 / sqrt(1.03^2 + 1.04^2) = 3.4159349: 3 - 0.006 * 3.4159349 * 1.03, 4 - 0.006 * 3.4159349 * 1.04
    assert layer.flatten().tolist() == pytest.approx([2.97888952, 3.97868457], abs=1e-8)
    assert alone.tolist() == pytest.approx([2.994, 3.994], abs=1e-12)


def test_what_is_decayed_has_a_trust_ratio_and_an_override_may_say_otherwise() -> None:
    def ratios(model: nn.Module, *, decay_all: bool) -> list[bool]:
        config = config_of("lamb", decay_all=decay_all)
        return [group["has_trust_ratio"] for group in lamb(parameter_groups(model, config), config).param_groups]

    assert ratios(nn.Linear(3, 2), decay_all=False) == [True, False]
    assert ratios(nn.LayerNorm(3), decay_all=False) == [False]
    assert ratios(nn.LayerNorm(3), decay_all=True) == [True]
    # what --optimizer-overrides may name; a layer of one's own has the ratio of the paper
    assert Lamb([{"params": [nn.Parameter(torch.ones(2))]}]).defaults["has_trust_ratio"] is True


def test_a_layer_of_zeros_has_a_trust_ratio_of_one() -> None:
    layer = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = Lamb([{"params": [layer]}], lr=0.5)
    layer.grad = torch.tensor([1.0, -2.0, 3.0, -4.0], dtype=torch.float64)
    optimizer.step()
    assert layer.tolist() == pytest.approx([-0.5, 0.5, -0.5, 0.5], abs=1e-8)


def test_lamb_updates_layers_of_two_dtypes_as_if_each_were_alone() -> None:
    def updated(*dtypes: torch.dtype) -> dict[torch.dtype, torch.Tensor]:
        layers = {dtype: nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes}
        optimizer = Lamb([{"params": list(layers.values())}], lr=0.1)
        for layer in layers.values():
            layer.grad = torch.tensor([1.0, 2.0, -3.0], dtype=layer.dtype)
        optimizer.step()
        return {dtype: layer.detach() for dtype, layer in layers.items()}

    together = updated(torch.float32, torch.float64)
    for dtype in together:
        assert torch.equal(together[dtype], updated(dtype)[dtype])


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_reloaded_optimizer_goes_on_bit_for_bit(name: str) -> None:
    config = config_of(name)

    def steps(model: nn.ParameterList, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            for parameter, gradient in zip(model, arrays(1 + number), strict=True):
                parameter.grad = torch.tensor(gradient)
            optimizer.step()

    def fresh() -> nn.ParameterList:
        return nn.ParameterList([torch.tensor(array) for array in arrays(0)])

    calm = fresh()
    steps(calm, BUILDERS[name](parameter_groups(calm, config), config), range(4))

    first = fresh()
    saved = BUILDERS[name](parameter_groups(first, config), config)
    steps(first, saved, range(2))
    second = fresh()
    second.load_state_dict(first.state_dict())
    resumed = BUILDERS[name](parameter_groups(second, config), config)
    forgetful = nn.ParameterList([parameter.detach().clone() for parameter in second])
    resumed.load_state_dict(saved.state_dict())
    steps(second, resumed, range(2, 4))
    assert all(torch.equal(one, other) for one, other in zip(calm, second, strict=True))

    steps(forgetful, BUILDERS[name](parameter_groups(forgetful, config), config), range(2, 4))
    assert not any(torch.equal(one, other) for one, other in zip(calm, forgetful, strict=True))


def test_state_is_tensors_with_the_names_of_adamw() -> None:
    states = {}
    for name in ("adamw", "lamb"):
        model, config = nn.Linear(3, 2), config_of(name)
        optimizer = BUILDERS[name](parameter_groups(model, config), config)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        states[name] = optimizer.state[model.weight]
        assert all(isinstance(value, torch.Tensor) for value in states[name].values())
    assert set(states["lamb"]) == set(states["adamw"]) == {"step", "exp_avg", "exp_avg_sq"}


def test_lamb_recomputes_the_loss_with_gradients_enabled() -> None:
    layer = nn.Parameter(torch.ones(2))
    optimizer = Lamb([{"params": [layer]}], lr=0.1)

    def closure() -> float:
        loss = (layer**2).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 2.0
    assert not torch.equal(layer, torch.ones(2))


def test_default_learning_rates_fit_the_optimizer() -> None:
    defaults = {name: learning_rates(OptimizationConfig(optimizer=name)) for name in (*RULES, "my_own")}
    assert defaults == {
        "adam": (1e-3,),
        "adamw": (1e-3,),
        "lamb": (1e-3,),
        "muon": (1e-3,),
        "sgd": (0.1,),
        "adadelta": (1.0,),
        "my_own": (1e-3,),
    }
    assert learning_rates(OptimizationConfig(optimizer="sgd", lr=(0.3, 0.2))) == (0.3, 0.2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", sorted(RULES))
def test_a_gpu_follows_the_definition(name: str) -> None:
    config = config_of(name)
    model = nn.ParameterList([torch.tensor(array) for array in arrays(0)]).cuda()
    optimizer = BUILDERS[name](parameter_groups(model, config), config)
    for step in range(6):
        for parameter, gradient in zip(model, arrays(1 + step), strict=True):
            parameter.grad = torch.tensor(gradient).cuda()
        optimizer.step()
    updated = [parameter.detach().cpu().numpy() for parameter in model]
    assert distance(updated, updated_by_numpy(RULES[name])) < 1e-12
