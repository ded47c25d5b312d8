"""Tensor parallelism: the ranks of a group of equal devices hold one model together, each a part of every large layer.

Responsible for the plan (which module is divided how), for refusing what does not divide, and for dividing a model
whose parameters torch's FSDP takes: in divided modules they are DTensors. The others stay whole, with equal gradients
on all ranks, which compute the same rows. In the engine `divided_model` divides a model.

A plan comes from the caller or a method `tensor_plan()` of the model; else transformers ships one for most of its
models, and the one for GPT-2 is here. It uses the words of transformers: `colwise` divides the outputs of a linear
layer, `rowwise` its inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import _StridedShard

from hetseq.errors import ConfigError, DisagreementError, few
from hetseq.parallel.checksums import checksums
from hetseq.parallel.tensor_randomness import separate_randomness_
from hetseq.parallel.tensor_ranks import TensorRanks
from hetseq.parallel.tensor_styles import (
    Columns,
    ColumnsOfConv1D,
    Cut,
    Rows,
    RowsOfConv1D,
    Style,
    SummedGradient,
    VocabularyRows,
)

Plan = dict[str, Style]
#: how a plan says how one module is divided
Word = str | tuple[int, ...] | ParallelStyle

#: the plans of models for which transformers has none, by `model_type`: for modules of the base model
_OWN_PLANS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "wte": "embedding_rowwise", "h.*.attn.c_attn": "fused", "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise",
    },
}  # fmt: skip
#: plan entries that divide nothing
_WHOLE = ("replicate", "keep_full_weight")
#: `fused` is `colwise` for query, key and value side by side in one Conv1D
_WORDS = ("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input", "embedding_rowwise", "fused")
#: older words of transformers for the same
_OLD_WORDS = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
#: attributes by which the forward of a module knows how much of the heads it has
_NUMBERS_OF_HEADS = (
    "num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_head", "n_heads", "n_kv_heads",
    "split_size", "all_head_size",
)  # fmt: skip
_OF_LINEAR: Mapping[str, Style] = {
    "colwise": Columns(), "colwise_gather_output": Columns(gathers=True), "rowwise": Rows(),
    "rowwise_split_input": Rows(splits=True),
}  # fmt: skip
_OF_CONV1D: Mapping[str, Style] = {
    "colwise": ColumnsOfConv1D(), "fused": ColumnsOfConv1D(blocks=(1, 1, 1)), "rowwise": RowsOfConv1D(),
}  # fmt: skip
_KEY_OR_VALUE = re.compile(r"(^|_)(k|v|key|value)(_|$)")


def plan_of(model: nn.Module, task_plan: Mapping[str, Word] | None = None) -> Plan:
    """How each module that is divided is divided, by its name; with tied weights, both modules.

    `task_plan` maps names of modules, with `*` for any one part of a name, to words or torch's styles, or a Linear in
    which several lie side by side to their widths. None: what the model's method `tensor_plan()` returns, if it has
    one, else the plan that it has in transformers or here.

    Raises ConfigError for a model without one, an unknown word, a name that fits nothing, and modules that cannot be
    divided exactly.
    """
    name = type(model).__name__
    written = getattr(model, "tensor_plan", None)
    if task_plan is None and callable(written):
        task_plan = cast(Mapping[str, Word], written())
    given = dict(_own_plan(model) if task_plan is None else task_plan)
    source = f"the plan of {name}" if task_plan is None else f"the tensor_plan() for {name}"
    modules = dict(model.named_modules())
    plan: Plan = {}
    for pattern, word in given.items():
        fitting = [one for one in modules if one and _fits(pattern, one)]
        if not fitting and (task_plan is not None or _has_parameter(model, pattern)):
            raise ConfigError(
                f"{source} divides {pattern}, which is no module of {name}: expected names as in"
                " model.named_modules(), with * for any one part; give the model a tensor_plan() with such names"
            )
        for one in fitting:
            style = _style(one, modules[one], word, source)
            if style is not None:
                plan[one] = style
    if not plan:
        raise ConfigError(
            f"{name} has no plan for tensor parallelism: give it or its task a method tensor_plan(), which returns"
            ' one as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}, or take a model of transformers whose'
            " configuration has a base_model_tp_plan, such as Llama"
        )
    _divide_ties_alike_(model, plan)
    return {one: plan[one] for one in modules if one in plan}


def check_plan(model: nn.Module, plan: Plan, degree: int) -> None:
    """Raise ConfigError where heads, a vocabulary or a width does not divide by `degree`, the ranks of the group."""
    for name, style in plan.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding):
            _check_divides(name, "a vocabulary", module.num_embeddings, "words", degree)
        elif isinstance(style, (Columns, ColumnsOfConv1D)):
            _check_columns(model, name, style, degree)
        elif isinstance(style, (Rows, RowsOfConv1D)):
            _check_divides(name, "a width", _inputs(module), "inputs", degree)


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
    ranks, ties = MeshRanks(mesh), _ties(model)
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


def compute_with_parts_(model: nn.Module, plan: Plan, ranks: TensorRanks, *, seed: int) -> None:
    """Let the modules of a plan, whose parameters have been divided, compute with this rank's parts."""
    for name, style in plan.items():
        style.divide_(model.get_submodule(name), ranks)
    opening = [name for name, style in plan.items() if style.gives_divided]
    for around in {name.rpartition(".")[0] for name in opening}:
        module = model.get_submodule(around)
        for attribute in _numbers_of_heads(module):
            setattr(module, attribute, getattr(module, attribute) // ranks.size)
    separate_randomness_(
        model, ranks.place, seed=seed, opening=opening,
        closing=[name for name, style in plan.items() if style.takes_divided],
    )  # fmt: skip


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


def _own_plan(model: nn.Module) -> Mapping[str, str]:
    """The plan that a model brings, or that is known here; empty if there is none."""
    found = getattr(model, "_tp_plan", None)  # transformers has merged the plan of its configuration into it
    if found:
        return dict(found)
    config: Any = getattr(model, "config", None)
    known = _OWN_PLANS.get(getattr(config, "model_type", ""), {})
    base = f"{getattr(model, 'base_model_prefix', '')}."
    is_base = not any(name.startswith(base) for name, _ in model.named_modules())
    head = {"lm_head": "colwise_gather_output"} if known and hasattr(model, "lm_head") else {}
    return {name if is_base else base + name: word for name, word in known.items()} | head


def _fits(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def _has_parameter(model: nn.Module, pattern: str) -> bool:
    return any(_fits(pattern, name) for name, _ in model.named_parameters())


def _style(name: str, module: nn.Module, word: Word, source: str) -> Style | None:
    """The style for one module; None if it stays whole."""
    kind = type(module).__name__
    if isinstance(word, tuple):
        if not isinstance(module, nn.Linear) or sum(word) != module.out_features:
            raise ConfigError(
                f"{source} gives {name}, a {kind}, the widths {', '.join(map(str, word))}: expected a Linear whose"
                " outputs are layers of these widths side by side"
            )
        return Columns(blocks=word)
    if isinstance(word, ParallelStyle):
        style = _style_of_torch(word) if isinstance(module, nn.Linear) else None
        if style is None:
            raise ConfigError(
                f"{source} gives {name}, a {kind}, the style {type(word).__name__}: of torch's styles HetSeq takes"
                f" ColwiseParallel and RowwiseParallel of a Linear; else use one of the words {', '.join(_WORDS)}"
            )
        return style
    word = _OLD_WORDS.get(word, word)
    if word in _WHOLE:
        return None
    if word == "replicated_with_grad_allreduce":
        return SummedGradient()
    style = None
    if isinstance(module, nn.Embedding) and word == "embedding_rowwise":
        _check_embedding(name, module)
        style = VocabularyRows()
    elif isinstance(module, nn.Linear) and not any(True for _ in module.children()):
        style = _OF_LINEAR.get(word)
    elif _is_conv1d(module):
        style = _OF_CONV1D.get(word)
    if style is None:
        raise ConfigError(
            f"{source} gives {name}, a {kind}, the word {word!r}, which HetSeq cannot divide exactly: expected a Linear"
            f" or Embedding and one of {', '.join(_WORDS)}; give the model a tensor_plan() without this module"
        )
    return style


def _style_of_torch(style: ParallelStyle) -> Style | None:
    """The style that does what one of torch does, of a Linear that is given and gives plain tensors."""
    if isinstance(style, ColwiseParallel):
        return Columns(gathers=style.output_layouts[0].is_replicate())
    if isinstance(style, RowwiseParallel):
        return Rows(splits=style.input_layouts[0].is_replicate())
    return None


def _check_columns(model: nn.Module, name: str, style: Columns | ColumnsOfConv1D, degree: int) -> None:
    parent, _, own = name.rpartition(".")
    around = model.get_submodule(parent)
    head_width = getattr(around, "head_dim", None)
    if not (style.gives_divided and isinstance(head_width, int) and head_width > 0):
        head_width = None
    for at, block in enumerate(style.blocks):
        outputs = _outputs(model.get_submodule(name)) * block // sum(style.blocks)
        if own in ("lm_head", "embed_out"):
            _check_divides(name, "a vocabulary", outputs, "words", degree)
        if head_width is not None and outputs % head_width == 0:
            kind = "key-value" if at > 0 or _KEY_OR_VALUE.search(own) else "attention"
            _check_divides(name, f"{outputs // head_width} {kind} heads", outputs // head_width, "", degree)
        _check_divides(name, "a width", outputs, "outputs", degree)
    for attribute in _numbers_of_heads(around) if style.gives_divided else ():
        number = getattr(around, attribute)
        _check_divides(name, f"{attribute} {number} around it", number, "", degree)


def _check_embedding(name: str, module: nn.Embedding) -> None:
    for attribute in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, attribute):
            raise ConfigError(
                f"{name} is an Embedding with {attribute}={getattr(module, attribute)}, which tensor parallelism cannot"
                f" divide: leave {attribute} out, or give the model a tensor_plan() without {name}"
            )


def _check_divides(name: str, what: str, number: int, unit: str, degree: int) -> None:
    if number % degree:
        raise ConfigError(
            f"{name} has {what}{f' of {number} {unit}' if unit else ''}, which {degree} tensor-parallel ranks cannot"
            f" divide evenly: use a degree that divides {number}, or give the model a tensor_plan() without this module"
        )


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is the Conv1D of transformers, which is not imported for the question."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


def _outputs(module: nn.Module) -> int:
    return int(module.nf if _is_conv1d(module) else module.out_features)  # type: ignore[arg-type]


def _inputs(module: nn.Module) -> int:
    return int(module.nx if _is_conv1d(module) else module.in_features)  # type: ignore[arg-type]


def _numbers_of_heads(module: nn.Module) -> list[str]:
    return [one for one in _NUMBERS_OF_HEADS if isinstance(getattr(module, one, None), int)]


def _ties(model: nn.Module) -> list[list[tuple[str, str]]]:
    """The places of each parameter that has several: names of the module and of the parameter in it."""
    places: dict[int, list[tuple[str, str]]] = {}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((name, own))
    return [found for found in places.values() if len(found) > 1]


def _divide_ties_alike_(model: nn.Module, plan: Plan) -> None:
    """Add to a plan the modules whose weight is tied to one that is divided. Raises ConfigError if that cannot be."""
    for places in _ties(model):
        divided = [name for name, _ in places if name in plan]
        for name, _ in places if divided else ():
            module = model.get_submodule(name)
            if name in plan:
                continue
            if isinstance(module, nn.Embedding):
                _check_embedding(name, module)
                plan[name] = VocabularyRows()
            elif isinstance(module, nn.Linear):
                plan[name] = Columns(gathers=True)
        found = {name: _rows(plan.get(name), own) for name, own in places} if divided else {}
        if len(set(found.values())) > 1 or None in found.values():
            raise ConfigError(
                f"{' and '.join(found)} share one parameter, which the plan for tensor parallelism divides differently:"
                " give the model a tensor_plan() with colwise or embedding_rowwise for all of them, or without them"
            )


def _rows(style: Style | None, parameter: str) -> str | None:
    """Along which dimension a style divides a parameter, in a word; None if it is not known to."""
    if not isinstance(style, (Columns, Rows, VocabularyRows)):
        return None
    one = style.cuts.get(parameter)
    return "whole" if one is None else "last" if one.dim else "first"


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
