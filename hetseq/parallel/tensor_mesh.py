"""A model that the ranks of torch's mesh divide: in divided modules parameters are DTensors, which torch's FSDP takes.

Responsible for dividing by a plan (`tensor_parallel`), for whole tensors, and for the norm of their gradients. It has
a module of its own because importing DTensors takes a second, which ranks of the engine need not spend.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from hetseq.errors import ConfigError, DisagreementError, few
from hetseq.parallel.checksums import checksums
from hetseq.parallel.tensor_parallel import Plan, check_plan, compute_with_parts_, plan_of, tied_places
from hetseq.parallel.tensor_ranks import TensorRanks
from hetseq.parallel.tensor_styles import Cut


def tensor_parallel_(model: nn.Module, mesh: DeviceMesh, *, seed: int, plan: Plan | None = None) -> None:
    """Divide a model among the ranks of a mesh of one dimension, in place. Collective.

    Every rank gives the same whole model, on the device that computes, before activation checkpointing, compilation and
    the optimizer. `seed` is for random numbers of divided activations (`tensor_randomness`); other numbers come from
    torch's generator, to which every rank must give the same seed in every micro-batch. The default of `plan` is
    `plan_of(model)`. Ties are kept.

    Raises ConfigError as `plan_of` and `check_plan`, and DisagreementError if the ranks' models differ.
    """
    if mesh.ndim != 1:
        raise ValueError(f"a mesh of {mesh.ndim} dimensions: expected one, of the ranks that divide the model")
    plan = plan_of(model) if plan is None else plan
    check_plan(model, plan, mesh.size())
    _check_same_model(model, mesh)
    ranks, ties = MeshRanks(mesh), tied_places(model)
    for name, style in plan.items():
        _divide_parameters_(model.get_submodule(name), mesh, style.cuts)
    for places in ties:
        _tie_again_(model, places)
    compute_with_parts_(model, plan, ranks, seed=seed)
    for name in plan:
        _with_local_parameters_(model.get_submodule(name))


class MeshRanks(TensorRanks):
    """The ranks of a mesh of one dimension, for the life of torch's process group."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh.size(), mesh.get_local_rank())
        self._mesh = mesh

    def sum(self, part: Tensor) -> Tensor:
        parts = DTensor.from_local(part, self._mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[Replicate()]).to_local()


def _divide_parameters_(module: nn.Module, mesh: DeviceMesh, cuts: Mapping[str, Cut]) -> None:
    """Replace parameters of a module, which are equal on all ranks, by DTensors of which each rank has its part."""
    for name, one in cuts.items():
        whole = getattr(module, name)
        if whole is not None:
            if len(set(one.blocks)) > 1:
                raise ConfigError(
                    "the plan for tensor parallelism divides a layer that consists of layers of different widths, which"
                    " torch's FSDP cannot keep: use `hetseq train` or `hetseq.start`, or a tensor_plan() without it"
                )
            blocks = len(one.blocks)
            placement = Shard(one.dim) if blocks == 1 else _StridedShard(one.dim, split_factor=blocks)
            divided = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(divided, requires_grad=whole.requires_grad))


def _with_local_parameters_(module: nn.Module) -> None:
    """Let a module's forward find the local tensors of its parameters."""
    forward = module.forward

    def on_parts(*args: Any, **kwargs: Any) -> Any:
        # torch's FSDP keeps them as plain attributes while it has gathered them
        homes: list[dict[str, Any]] = [module._parameters, module.__dict__]
        held = [(home, name, one) for home in homes for name, one in home.items() if isinstance(one, DTensor)]
        for home, name, parameter in held:
            home[name] = parameter.to_local()
        try:
            return forward(*args, **kwargs)
        finally:
            for home, name, parameter in held:
                home[name] = parameter

    module.forward = on_parts


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of the whole gradient of a divided model, in fp64, equal on all ranks: each element counts once.

    Collective. `.grad` of parameters that every rank has whole must be equal on all ranks.
    """
    divided, whole, mesh = [], [], None  # squares
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and not gradient.placements[0].is_replicate():
            assert not gradient.placements[0].is_partial(), "torch adds up the gradients of parameters in backward"
            mesh = gradient.device_mesh
            divided.append(_square(gradient.to_local()))
        elif gradient is not None:
            whole.append(_square(gradient.to_local() if isinstance(gradient, DTensor) else gradient))
    squares = [torch.stack(whole).sum()] if whole else []
    if mesh is not None:
        squares.append(MeshRanks(mesh).sum(torch.stack(divided).sum()))
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)


def _square(tensor: Tensor) -> Tensor:
    return tensor.detach().double().square().sum()


def whole_tensor(tensor: Tensor) -> Tensor:
    """A tensor as the undivided model has it; collective if it is divided. Of a parameter, a gradient or a moment."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _tie_again_(model: nn.Module, places: list[tuple[str, str]]) -> None:
    """Make several places hold one parameter again; torch has given each a DTensor of its own."""
    first = getattr(model.get_submodule(places[0][0]), places[0][1])
    for name, own in places[1:]:
        other = getattr(model.get_submodule(name), own)
        assert _placements(other) == _placements(first), "the plan divides tied parameters alike"
        setattr(model.get_submodule(name), own, first)


def _placements(tensor: Tensor) -> tuple[Placement, ...]:
    return tensor.placements if isinstance(tensor, DTensor) else ()


def _check_same_model(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise DisagreementError unless all ranks of the mesh give a model with the same bits."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    absent = [name for name, one in tensors.items() if one.is_meta]
    if absent:
        raise ConfigError(
            f"{few(absent)} of {type(model).__name__} have no numbers yet (device meta): tensor parallelism divides a"
            " model that has them; build it on the CPU"
        )
    mine = torch.tensor(checksums(tensors.values()), device=mesh.device_type)  # (tensors,)
    all_ranks = DTensor.from_local(mine[None], mesh, [Shard(0)], run_check=False).full_tensor().cpu()
    differing = (all_ranks != all_ranks[0]).any(0).tolist()  # sync
    names = [name for name, differs in zip(tensors, differing, strict=True) if differs]
    if names:
        raise DisagreementError(
            f"the ranks of a tensor-parallel group have different numbers in {few(names)}: build the model on all of"
            " them with the same seed or from the same files"
        )
