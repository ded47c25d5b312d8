"""Optimizers by name, and the parameter groups of a model.

Responsible for turning an `OptimizationConfig` into a `torch.optim.Optimizer`; knows no schedule (the controller
writes `lr` into every group before each step), no gradient scale and no other rank. The one idea: a builder takes
parameter groups and a configuration and returns an optimizer whose state consists of tensors with fixed names, so that
checkpoints, replica checksums and late joins can treat every optimizer alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from hetseq.config.sections import OptimizationConfig
from hetseq.errors import TaskError

#: the default of `--lr`; a user's own optimizer has `_OTHER_RATE`
_DEFAULT_RATES = {"adam": 1e-3, "adamw": 1e-3, "lamb": 1e-3, "muon": 1e-3, "sgd": 0.1, "adadelta": 1.0}
_OTHER_RATE = 1e-3


def learning_rates(config: OptimizationConfig) -> tuple[float, ...]:
    """The base learning rate per epoch (then the last one): `--lr`, or the default of the optimizer."""
    return config.lr if config.lr is not None else (_DEFAULT_RATES.get(config.optimizer, _OTHER_RATE),)


def parameter_groups(model: nn.Module, config: OptimizationConfig) -> list[dict[str, Any]]:
    """At most two groups of trainable parameters in the model's order: decayed ones, then the others.

    For muon the `hidden_matrices` are another group before these, with `use_muon`. Decayed are parameters of two or
    more dimensions; biases and norms (fewer dimensions) are not, unless `config.decay_all`. The split does not depend
    on the size of the decay, so a run can be resumed with another `--weight-decay`. Raises TaskError if nothing is
    trainable.
    """
    hidden = hidden_matrices(model) if config.optimizer == "muon" else []
    is_hidden = set(map(id, hidden))
    decayed: list[nn.Parameter] = []
    left_alone: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in is_hidden:
            (decayed if parameter.ndim >= 2 or config.decay_all else left_alone).append(parameter)
    if not hidden and not decayed and not left_alone:
        raise TaskError(
            f"{type(model).__name__} has no parameter that requires a gradient: expected at least one to train;"
            " check the return value of build_model, and whether it froze everything"
        )
    groups: list[dict[str, Any]] = [
        {"params": hidden, "weight_decay": _weight_decay(config), "use_muon": True},
        {"params": decayed, "weight_decay": _weight_decay(config)},
        {"params": left_alone, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters of two dimensions, without those of embeddings and of the output layer.

    The output layer is the last `nn.Linear`, unless a layer of the model takes an input of its width: then the output
    is tied to an embedding, and that Linear is a hidden layer. Sources: Jordan et al. 2024; Liu et al. 2025.
    """
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    outer = {id(module.weight) for module in embeddings}
    widths = {module.in_features for module in linears} | {module.embedding_dim for module in embeddings}
    if linears and linears[-1].out_features not in widths:
        outer.add(id(linears[-1].weight))
    return [value for value in model.parameters() if value.requires_grad and value.ndim == 2 and id(value) not in outer]


def adam(
    parameter_groups: list[dict[str, Any]], config: OptimizationConfig, options: Any = None
) -> torch.optim.Optimizer:
    """AdamW: the "adam" of 2020 decoupled its weight decay too, so both names mean the same."""
    return torch.optim.AdamW(
        parameter_groups,
        lr=learning_rates(config)[0],
        betas=cast("tuple[float, float]", config.adam_betas),
        eps=config.adam_eps,
        weight_decay=_weight_decay(config),
        **kernel(parameter_groups),
    )


adamw = adam


def sgd(
    parameter_groups: list[dict[str, Any]], config: OptimizationConfig, options: Any = None
) -> torch.optim.Optimizer:
    """SGD with `--momentum` (no dampening, not Nesterov's); the weight decay is added to the gradient."""
    return torch.optim.SGD(
        parameter_groups,
        lr=learning_rates(config)[0],
        momentum=config.momentum,
        weight_decay=_weight_decay(config),
        **kernel(parameter_groups),
    )


def adadelta(
    parameter_groups: list[dict[str, Any]], config: OptimizationConfig, options: Any = None
) -> torch.optim.Optimizer:
    """Adadelta as in torch: `--adadelta-weight-decay`, else `--weight-decay`, is added to the gradient."""
    return torch.optim.Adadelta(
        parameter_groups,
        lr=learning_rates(config)[0],
        rho=config.adadelta_rho,
        eps=config.adadelta_eps,
        weight_decay=_weight_decay(config),
        foreach=True,
    )


def lamb(
    parameter_groups: list[dict[str, Any]], config: OptimizationConfig, options: Any = None
) -> torch.optim.Optimizer:
    """`Lamb` with betas and epsilon of the adam options; parameters without decay (biases, norms) have no trust ratio.

    The authors' code and NVIDIA's FusedLAMB do the same, and recipes for BERT depend on it. `--decay-all` gives every
    parameter decay and ratio; `--optimizer-overrides "{'has_trust_ratio': True}"` gives biases and norms a ratio too.
    """
    groups = [
        {**group, "has_trust_ratio": config.decay_all or any(one.ndim >= 2 for one in group["params"])}
        for group in parameter_groups
    ]
    return Lamb(
        groups,
        lr=learning_rates(config)[0],
        betas=cast("tuple[float, float]", config.adam_betas),
        eps=config.adam_eps,
        weight_decay=_weight_decay(config),
    )


class Lamb(torch.optim.Optimizer):
    """Layerwise adaptive moments for large batches (You et al. 2019, arXiv 1904.00962, algorithm 2, phi = identity).

    A layer is one parameter tensor w with gradient g; t counts its updates from 1, b1 and b2 are the betas:

        m = b1 m + (1 - b1) g                     v = b2 v + (1 - b2) g^2
        r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
        u = r + weight_decay * w                  (decoupled: the decay enters neither m nor v)
        ratio = |w| / |u|                         (L2 norms; 1 where either of them is 0)
        w = w - lr * ratio * u

    In a group without `has_trust_ratio` the ratio is 1, which makes it AdamW.

    State per parameter as in AdamW: `step` (a float32 tensor on the CPU), `exp_avg` (m), `exp_avg_sq` (v). Parameters
    without a gradient are not touched. `step` makes no host-device synchronisation.
    """

    def __init__(
        self,
        params: list[dict[str, Any]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        has_trust_ratio: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "has_trust_ratio": has_trust_ratio})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient; the closure, if any, recomputes and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # _foreach operations need one device and one dtype
            for parameters in _alike([parameter for parameter in group["params"] if parameter.grad is not None]):
                self._update_(parameters, group)
        return loss

    def _update_(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [cast(Tensor, parameter.grad) for parameter in parameters]
        states = [self._state_of(parameter) for parameter in parameters]
        averages = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        beta1, beta2 = group["betas"]
        for state in states:
            state["step"] += 1
        # step lies on the CPU: reading it is no sync
        steps = [state["step"].item() for state in states]

        torch._foreach_lerp_(averages, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        updates = torch._foreach_div(averages, [1 - beta1**step for step in steps])
        scales = torch._foreach_div(squares, [1 - beta2**step for step in steps])
        torch._foreach_sqrt_(scales)
        torch._foreach_add_(scales, group["eps"])
        torch._foreach_div_(updates, scales)
        if group["weight_decay"] != 0:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])

        if not group["has_trust_ratio"]:
            torch._foreach_add_(parameters, updates, alpha=-group["lr"])
            return
        # Norms are summed in float64 and rounded once, so that the order of summation, which differs with the
        # number of threads and the kind of device, practically never shows in a replica's float32 parameters.
        for parameter, update in zip(parameters, updates, strict=True):
            weight_norm = torch.linalg.vector_norm(parameter, dtype=torch.float64)
            update_norm = torch.linalg.vector_norm(update, dtype=torch.float64)
            has_ratio = (weight_norm > 0) & (update_norm > 0)
            ratio = torch.where(has_ratio, weight_norm / update_norm, 1.0).to(parameter.dtype)
            parameter.sub_(update.mul_(ratio), alpha=group["lr"])

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def _weight_decay(config: OptimizationConfig) -> float:
    if config.optimizer == "adadelta" and config.adadelta_weight_decay is not None:
        return config.adadelta_weight_decay
    return config.weight_decay


def kernel(groups: list[dict[str, Any]]) -> dict[str, bool]:
    """`fused` if torch has such a kernel for every parameter, else `foreach`; both give the same bits for any
    number of threads (measured with 1, 2 and 7 threads on a million elements), not the same as each other."""
    has_fused = all(
        parameter.is_floating_point() and parameter.device.type in ("cpu", "cuda")
        for group in groups
        for parameter in group["params"]
    )
    return {"fused": True} if has_fused else {"foreach": True}


def _alike(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """The parameters in lists of one device and dtype each, in the order in which each kind first appears."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    yield from kinds.values()
