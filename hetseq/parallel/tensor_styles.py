"""Tensor parallelism of single modules that torch does not divide, or not exactly: styles for `parallelize_module`.

Responsible for embeddings cut by vocabulary, the transposed linear layers (Conv1D) of GPT-2, and small parameters in
the middle of divided layers. Each style keeps parameters as DTensors, whose whole tensors are equal to the tensors of
the undivided model, and computes on local tensors. Communication is DTensor's: a sum in forward or in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard


class VocabularyRows(ParallelStyle):
    """An embedding whose rows are divided: each rank looks up its own words, and the ranks' results are added.

    It runs the embedding's own forward on local rows, so subclasses that scale their result keep doing so. The padding
    row has no gradient on the rank that has it, as without tensor parallelism.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding), "the plan was checked"
        rows = module.num_embeddings // device_mesh.size()
        begin = rows * device_mesh.get_local_rank()
        _divide_(module, device_mesh, {"weight": Shard(0)})
        padding = module.padding_idx
        module.padding_idx = padding - begin if padding is not None and begin <= padding < begin + rows else None
        whole_forward = module.forward

        def forward(words: Tensor) -> Tensor:
            local = words - begin  # any shape
            is_elsewhere = (local < 0) | (local >= rows)
            with _local_parameters(module):
                found = whole_forward(local.masked_fill(is_elsewhere, 0))
            return sum_over_ranks(found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), device_mesh)

        _replace_forward_(module, forward)
        return module


class ColumnsOfConv1D(ParallelStyle):
    """A Conv1D (weight: inputs, outputs) whose outputs are divided.

    `parts` projections lie side by side in its outputs, such as 3 for query, key and value: each is divided by itself.
    """

    output_layouts: tuple[Placement, ...] = (Shard(-1),)

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.parts = parts

    def placement(self, dim: int) -> Placement:
        """How the outputs are divided, which are dimension `dim` of a tensor."""
        return Shard(dim) if self.parts == 1 else _StridedShard(dim, split_factor=self.parts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _divide_(module, device_mesh, {"weight": self.placement(1), "bias": self.placement(0)})
        module.nf //= device_mesh.size()  # type: ignore[operator, assignment]  # of transformers.pytorch_utils.Conv1D
        whole_forward = module.forward

        def forward(x: Tensor) -> Tensor:
            with _local_parameters(module):
                result: Tensor = whole_forward(_summed_in_backward(x, device_mesh))
            return result

        _replace_forward_(module, forward)
        return module


class RowsOfConv1D(ParallelStyle):
    """A Conv1D (weight: inputs, outputs) whose inputs are divided, as the output of `ColumnsOfConv1D` is."""

    input_layouts: tuple[Placement, ...] = (Shard(-1),)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _divide_(module, device_mesh, {"weight": Shard(0), "bias": Replicate()})

        def forward(x: Tensor) -> Tensor:
            weight, bias = _local(module.weight), _local(module.bias)
            product = x.reshape(-1, x.size(-1)) @ weight
            return sum_over_ranks(product, device_mesh).add(bias).view(*x.shape[:-1], -1)

        _replace_forward_(module, forward)
        return module


class SummedGradient(ParallelStyle):
    """A small module between divided ones, such as a norm of each head: whole on each rank, gradients are added.

    Each rank sees the gradient of its own heads only. It is added up in each backward, before it is accumulated.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: sum_over_ranks(gradient, device_mesh))
        return module


def _replace_forward_(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    module.forward = forward


def _divide_(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    """Replace parameters of a module, which are equal on all ranks, by DTensors of which each rank has its part."""
    for name, placement in placements.items():
        whole = getattr(module, name)
        divided = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(divided, requires_grad=whole.requires_grad))


@contextmanager
def _local_parameters(module: nn.Module) -> Iterator[None]:
    """Context in which a module's forward finds the local tensors of its parameters."""
    # torch's FSDP keeps them as plain attributes while it has gathered them
    homes: list[dict[str, Any]] = [module._parameters, module.__dict__]
    held = [(home, name, one) for home in homes for name, one in home.items() if isinstance(one, DTensor)]
    for home, name, parameter in held:
        home[name] = _local(parameter)
    try:
        yield
    finally:
        for home, name, parameter in held:
            home[name] = parameter


def _local(parameter: Any) -> Tensor:
    assert isinstance(parameter, DTensor), "divided before"
    return parameter.to_local()


def sum_over_ranks(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of a tensor over the ranks; in backward each rank gets the gradient of the sum."""
    parts = DTensor.from_local(part, mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local()


def _summed_in_backward(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor itself, equal on all ranks; in backward the ranks' gradients are added."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
