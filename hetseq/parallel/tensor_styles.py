"""How single layers are divided among ranks, and how a layer computes with its part.

Responsible for the styles of a plan (`tensor_parallel.plan_of`) and for the forward of a divided layer, which finds
local tensors as its parameters. Refuses to decide how a part is kept: as a parameter of its own in the engine
(`divided_model`), as a DTensor beside torch's FSDP (`tensor_parallel`). Ranks communicate through `TensorRanks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from hetseq.parallel.tensor_ranks import TensorRanks, gathered, split, sum_over_ranks, summed_in_backward


@dataclass(frozen=True)
class Cut:
    """A parameter is cut along `dim`, where it first consists of blocks, each of which is cut by itself.

    `blocks`: their widths in relation to each other.
    """

    dim: int
    blocks: tuple[int, ...] = (1,)


class Style(Protocol):
    """How one module is divided."""

    @property
    def cuts(self) -> Mapping[str, Cut]:
        """The parameters of the module that are divided, by their names in it; others stay whole."""
        ...

    @property
    def gives_divided(self) -> bool:
        """Whether the module's result stays divided, so that what follows sees a part of it."""
        ...

    @property
    def takes_divided(self) -> bool:
        """Whether the module expects that what it is given is divided."""
        ...

    def divide_(self, module: Any, ranks: TensorRanks) -> None:
        """Let the module compute with the parts of its parameters that this rank has."""
        ...


@dataclass(frozen=True)
class Columns:
    """The outputs of a Linear are divided; with `gathers` its result is whole again.

    `blocks` are the widths of layers that lie side by side in it, such as query, key and value; each is divided by
    itself.
    """

    gathers: bool = False
    blocks: tuple[int, ...] = (1,)
    takes_divided: ClassVar = False

    @property
    def cuts(self) -> Mapping[str, Cut]:
        return {"weight": Cut(0, self.blocks), "bias": Cut(0, self.blocks)}

    @property
    def gives_divided(self) -> bool:
        return not self.gathers

    def divide_(self, module: Any, ranks: TensorRanks) -> None:
        whole_forward = module.forward

        def forward(x: Tensor) -> Tensor:
            found: Tensor = whole_forward(summed_in_backward(x, ranks))
            return gathered(found, ranks) if self.gathers else found

        module.out_features //= ranks.size
        module.forward = forward


@dataclass(frozen=True)
class Rows:
    """The inputs of a Linear are divided: already by what comes before, or here if it `splits`."""

    splits: bool = False
    cuts: ClassVar = {"weight": Cut(1)}
    gives_divided: ClassVar = False

    @property
    def takes_divided(self) -> bool:
        return not self.splits

    def divide_(self, module: Any, ranks: TensorRanks) -> None:
        def forward(x: Tensor) -> Tensor:
            part = nn.functional.linear(split(x, ranks) if self.splits else x, module.weight)
            found = sum_over_ranks(part, ranks)
            return found if module.bias is None else found + module.bias.to(found.dtype)

        module.in_features //= ranks.size
        module.forward = forward


@dataclass(frozen=True)
class ColumnsOfConv1D:
    """The outputs of a Conv1D (weight: inputs, outputs) are divided.

    `blocks` are the widths, in relation to each other, of projections that lie side by side in its outputs, such as
    query, key and value; each is divided by itself.
    """

    blocks: tuple[int, ...] = (1,)
    gives_divided: ClassVar = True
    takes_divided: ClassVar = False

    @property
    def cuts(self) -> Mapping[str, Cut]:
        return {"weight": Cut(1, self.blocks), "bias": Cut(0, self.blocks)}

    def divide_(self, module: Any, ranks: TensorRanks) -> None:
        whole_forward = module.forward
        module.nf //= ranks.size
        module.forward = lambda x: whole_forward(summed_in_backward(x, ranks))


@dataclass(frozen=True)
class RowsOfConv1D:
    """The inputs of a Conv1D (weight: inputs, outputs) are divided, as the result of `ColumnsOfConv1D` is."""

    cuts: ClassVar = {"weight": Cut(0)}
    gives_divided: ClassVar = False
    takes_divided: ClassVar = True

    def divide_(self, module: Any, ranks: TensorRanks) -> None:
        def forward(x: Tensor) -> Tensor:
            product = sum_over_ranks(x.reshape(-1, x.size(-1)) @ module.weight, ranks)
            return product.add(module.bias.to(product.dtype)).view(*x.shape[:-1], -1)

        module.forward = forward


@dataclass(frozen=True)
class VocabularyRows:
    """The rows of an embedding are divided: each rank looks up its own words, and the ranks' results are added.

    It runs the embedding's own forward on local rows, so subclasses that scale their result keep doing so. The padding
    row has no gradient on the rank that has it, as in an embedding that is whole.
    """

    cuts: ClassVar = {"weight": Cut(0)}
    gives_divided: ClassVar = False
    takes_divided: ClassVar = False

    def divide_(self, module: Any, ranks: TensorRanks) -> None:
        rows, padding, whole_forward = module.num_embeddings // ranks.size, module.padding_idx, module.forward
        begin = rows * ranks.place
        module.padding_idx = padding - begin if padding is not None and begin <= padding < begin + rows else None

        def forward(words: Tensor) -> Tensor:
            local = words - begin  # any shape
            is_elsewhere = (local < 0) | (local >= rows)
            is_word = (words >= 0) & (words < rows * ranks.size)  # another number is refused, as by the whole layer
            found = whole_forward(local.masked_fill(is_elsewhere & is_word, 0))
            return sum_over_ranks(found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), ranks)

        module.forward = forward


@dataclass(frozen=True)
class SummedGradient:
    """A small module between divided ones, such as a norm of each head: whole on each rank, gradients are added.

    Each rank sees the gradient of its own heads only. It is added up in each backward, before it is accumulated.
    """

    cuts: ClassVar = dict[str, Cut]()
    gives_divided: ClassVar = False
    takes_divided: ClassVar = False

    def divide_(self, module: Any, ranks: TensorRanks) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                parameter.register_hook(ranks.sum)
