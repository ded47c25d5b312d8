"""A model that several ranks hold together, part by part, in the engine: its layers, its parts, and their names.

Responsible for dividing the modules of a plan (`tensor_parallel`), and for which elements of the whole tensors a part
holds. Knows neither gradients nor owners; ranks communicate through `TensorRanks`.

The one idea: the part of a tensor at a place is a parameter of its own, with the same name and shape on whatever rank
holds it. A rank that is one of `degree` has the part at its own place; a rank that holds the model alone, beside such
ranks, has all parts as parameters and joins them whenever a forward reads the tensor. So sums, owners and moves of the
state see parts, and none of them needs to know how a tensor was cut.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hetseq.errors import ConfigError, TaskError
from hetseq.parallel.tensor_parallel import Plan, check_plan, compute_with_parts_
from hetseq.parallel.tensor_ranks import TensorRanks

#: of a gradient: devices round differently, in 16 bits by a hundredth
_ALIKE = 0.05
_OF_ALL = 1e-4


@dataclass(frozen=True)
class TensorPart:
    """The part at `place` of `degree` of a tensor with `shape`: an equal share of each of the blocks into which its
    dimension `dim` is cut first. `blocks`: their widths in relation to each other."""

    name: str  # of the whole parameter
    shape: tuple[int, ...]
    dim: int
    place: int
    degree: int
    blocks: tuple[int, ...] = (1,)

    @property
    def full_name(self) -> str:
        """A name for this part alone."""
        return f"{self.name}@{self.place}"

    @property
    def part_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.shape[self.dim] // self.degree, *self.shape[self.dim + 1 :])

    @property
    def offset(self) -> int | None:
        """The place of its first element in the whole tensor, in row-major order, if its elements follow each other."""
        return self.place * self.width if self.rows == 1 == len(self.blocks) else None

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Where its share of each block is along `dim` of the whole tensor: begin and width."""
        unit, found, begin = self.shape[self.dim] // sum(self.blocks), list[tuple[int, int]](), 0
        for block in self.blocks:
            width = block * unit // self.degree
            found.append((begin + self.place * width, width))
            begin += block * unit
        return found

    def of(self, whole: Tensor) -> Tensor:
        """Its elements of the whole tensor, as new memory. Shape `part_shape`."""
        return torch.cat([whole.narrow(self.dim, begin, width) for begin, width in self.pieces], self.dim)

    @property
    def rows(self) -> int:
        """The rows of a part, of `width` elements each; those of the whole tensor are `degree` times as wide."""
        return math.prod(self.shape[: self.dim])

    @property
    def width(self) -> int:
        """The elements of a row of a part."""
        return math.prod(self.part_shape[self.dim :])

    def put_(self, whole: Tensor, part: Tensor) -> None:
        """Write some rows of the part to where they are in the same rows of the whole tensor; both are flat."""
        inner, start = math.prod(self.shape[self.dim + 1 :]), 0
        rows, own = whole.view(-1, self.width * self.degree), part.view(-1, self.width)
        for begin, width in self.pieces:
            end = start + width
            rows[:, begin * inner : (begin + width) * inner] = own[:, start * inner : end * inner]
            start = end


class JoinedParts(nn.Module):
    """The whole tensor of the parts at all places (`torch.nn.utils.parametrize`)."""

    def __init__(self, parts: Sequence[TensorPart]) -> None:
        super().__init__()
        self.parts = tuple(parts)

    def forward(self, *given: Tensor) -> Tensor:
        first = self.parts[0]
        widths = [width for _, width in first.pieces]
        pieces = [one.split(widths, first.dim) for one in given]  # by place and block
        return torch.cat([one for of_block in zip(*pieces, strict=True) for one in of_block], first.dim)

    def right_inverse(self, whole: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.of(whole) for part in self.parts)


@dataclass(frozen=True)
class DividedModel:
    """What dividing a model has made of it, on this rank."""

    ranks: TensorRanks
    #: in the order of the undivided model, on all ranks the same: each trained parameter, or each part of one, by a
    #: name for it alone; a part of another place has no memory (device meta)
    named: Mapping[str, nn.Parameter]
    parts: Mapping[str, TensorPart] = field(default_factory=dict)  # by that name
    #: shape and type of the tensors of the undivided model's state_dict that are divided here, on meta, by name
    whole: Mapping[str, Tensor] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)  # `replica.tied_names` of the undivided model

    @functools.cached_property
    def first_names(self) -> dict[str, str]:
        """For the name of each whole parameter that is divided, the name of its first part."""
        return {part.name: name for name, part in self.parts.items() if part.place == 0}

    def cast_(self, dtype: torch.dtype) -> None:
        """Give what has no memory here the type to which the model has been moved."""
        absent = [one for one in self.named.values() if one.is_meta and one.is_floating_point()]
        for parameter in absent:
            parameter.data = parameter.data.to(dtype)
        for like in self.whole.values():
            like.data = like.data.to(dtype)

    def place_of(self, name: str) -> int | None:
        """The place of a part by the name in `named`; None for a parameter that every rank has whole."""
        return self.parts[name].place if name in self.parts else None


def divide_(model: nn.Module, plan: Plan, ranks: TensorRanks, *, degree: int, seed: int) -> DividedModel:
    """Divide a model in place into `degree` parts, of which this rank gets one, or all of them if it has no peers.

    `ranks` has `degree` members, or this rank alone. All ranks have the same model with numbers, on the CPU. `seed` is
    as in `tensor_parallel_`. Raises ConfigError as `check_plan`, and for a model whose divided parameters are frozen.
    """
    check_plan(model, plan, degree)
    names = {one: name for name, one in model.named_parameters()}  # of several names the first
    trained = [(name, one) for one, name in names.items() if one.requires_grad]
    cuts = _cuts(model, plan, names, degree)
    by_id = {id(one): name for one, name in names.items()}
    shapes = {name: torch.empty_like(one, device="meta") for one, name in names.items() if name in cuts}
    for parameter, name in names.items():
        if name in cuts and not parameter.requires_grad:
            raise ConfigError(
                f"{name} is frozen, and the plan for tensor parallelism divides it: give the model a tensor_plan()"
                " without its module, or train it"
            )
    own = _replace_(model, cuts, by_id, ranks)
    if ranks.size > 1:
        compute_with_parts_(model, plan, ranks, seed=seed)
    named: dict[str, nn.Parameter] = {}
    for name, parameter in trained:
        for part in cuts.get(name, ()):
            absent = nn.Parameter(torch.empty(part.part_shape, dtype=parameter.dtype, device="meta"))
            named[part.full_name] = own.get(part.full_name, absent)
        if name not in cuts:
            named[name] = parameter
    every_part = {part.full_name: part for parts in cuts.values() for part in parts}
    return DividedModel(ranks, named, every_part, shapes)


@torch.no_grad()
def check_alike(gradients: Mapping[str, Tensor], ranks: TensorRanks) -> None:
    """Raise TaskError if the ranks of a model have different gradients of a parameter that each of them has whole.

    One of them gives that gradient. A parameter between layers whose outputs are divided sees this rank's part of them
    alone, so its gradient would be a part. Collective among these ranks; raises on all of them, or on none.
    """
    squares = []
    for gradient in gradients.values():
        own = gradient.to(torch.float64)
        mean = ranks.sum(own) / ranks.size
        squares.append(torch.stack([(own - mean).square().sum(), mean.square().sum()]))
    if not squares:
        return
    apart, scale = (ranks.sum(torch.stack(squares)) / ranks.size).T.tolist()  # sync
    least = _OF_ALL**2 * sum(scale)  # a gradient of 0 has no digits to compare
    for name, error, size in zip(gradients, apart, scale, strict=True):
        if error > max(least, _ALIKE**2 * size):
            raise TaskError(
                f"{name} has another gradient on each rank that divides the model: it is between layers whose outputs"
                " are divided, so each rank sees a part of them. Give its module the word"
                ' "replicated_with_grad_allreduce" in tensor_plan(), or divide other layers'
            )


def _cuts(model: nn.Module, plan: Plan, names: Mapping[nn.Parameter, str], degree: int) -> dict[str, list[TensorPart]]:
    """The parts of each parameter that is divided, by its name; a parameter that two modules share is cut once."""
    found: dict[str, list[TensorPart]] = {}
    for name, style in plan.items():
        module = model.get_submodule(name)
        for own, one in style.cuts.items():
            parameter = getattr(module, own, None)
            if parameter is None:
                continue
            if parameter not in names:
                raise ConfigError(
                    f"the plan for tensor parallelism divides {name}.{own}, which is computed from other parameters:"
                    " give the model a tensor_plan() without this module, or a parameter there"
                )
            full = names[parameter]
            parts = [TensorPart(full, tuple(parameter.shape), one.dim, at, degree, one.blocks) for at in range(degree)]
            assert found.get(full, parts) == parts, "the plan divides tied parameters alike"
            found[full] = parts
    return found


def _replace_(
    model: nn.Module, cuts: Mapping[str, Sequence[TensorPart]], by_id: Mapping[int, str], ranks: TensorRanks
) -> dict[str, nn.Parameter]:
    """Give the modules the parts that this rank holds in place of whole parameters; the parts by their names."""
    found: dict[str, nn.Parameter] = {}
    for module in list(model.modules()):
        for own, parameter in list(module.named_parameters(recurse=False)):
            parts = cuts.get(by_id.get(id(parameter), ""))
            if parts is None:
                continue
            if ranks.size > 1:
                part = parts[ranks.place]
                if part.full_name not in found:
                    found[part.full_name] = nn.Parameter(part.of(parameter.detach()))
                module.register_parameter(own, found[part.full_name])
                continue
            parametrize.register_parametrization(module, own, JoinedParts(parts))
            joined: Any = module.parametrizations[own]  # type: ignore[index]
            for place, part in enumerate(parts):
                one = found.setdefault(part.full_name, getattr(joined, f"original{place}"))
                setattr(joined, f"original{place}", one)
    return found
