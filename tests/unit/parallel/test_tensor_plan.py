"""Plans for tensor parallelism: where they come from; what cannot be divided is refused by name, number and degree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from hetseq.errors import ConfigError
from hetseq.parallel import tensor_parallel
from hetseq.parallel.tensor_parallel import check_plan, gradient_norm, plan_of
from hetseq.parallel.tensor_styles import Columns
from tests.support import gpt, tiny_models

HEADS = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 12,
         "num_hidden_layers": 1}  # fmt: skip


def llama(**fields: Any) -> nn.Module:
    return tiny_models.build(tiny_models.configure("llama", **{**HEADS, **fields}))


def gpt2(**fields: Any) -> nn.Module:
    return tiny_models.build(tiny_models.configure("gpt2", n_layer=1, **fields))


def test_the_plan_of_transformers_is_that_of_each_layer_and_of_both_tied_modules() -> None:
    plan = plan_of(llama(tie_word_embeddings=True))
    styles = {name.rpartition(".")[2]: type(style).__name__ for name, style in plan.items()}
    assert styles == {
        "embed_tokens": "VocabularyRows", "q_proj": "Columns", "k_proj": "Columns", "v_proj": "Columns",
        "o_proj": "Rows", "gate_proj": "Columns", "up_proj": "Columns", "down_proj": "Rows", "lm_head": "Columns",
    }  # fmt: skip


def test_a_plan_that_is_given_goes_before_that_of_the_model() -> None:
    plan = plan_of(
        llama(), {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": RowwiseParallel()}
    )
    assert list(plan) == ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]


def test_a_tied_head_that_is_divided_takes_the_embedding_with_it() -> None:
    plan = plan_of(llama(tie_word_embeddings=True), {"lm_head": "colwise_gather_output"})
    assert set(plan) == {"model.embed_tokens", "lm_head"}


class Planned(nn.Sequential):
    def tensor_plan(self) -> dict[str, str]:
        return {"0": "colwise"}


def test_a_model_may_have_a_method_with_its_plan() -> None:
    assert list(plan_of(Planned(nn.Linear(2, 2)))) == ["0"]
    assert list(plan_of(Planned(nn.Linear(2, 2), nn.Linear(2, 2)), {"1": "rowwise"})) == ["1"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no plan": (nn.Sequential(nn.Linear(2, 2)), None,
                r"Sequential has no plan for tensor parallelism: give it or its task a method"
                r" tensor_plan\(\).* or take a model of transformers whose configuration has a base_model_tp_plan"),
    "a name": (nn.Sequential(nn.Linear(2, 2)), {"up": "colwise"},
               r"tensor_plan\(\) for Sequential divides up, which is no module of Sequential: expected names as in"),
    "a word": (nn.Sequential(nn.Linear(2, 2)), {"0": "column"},
               r"tensor_plan\(\) for Sequential gives 0, a Linear, the word 'column', .* one of colwise"),
    "widths": (nn.Sequential(nn.Linear(2, 6)), {"0": (4, 4)},
               r"tensor_plan\(\) for Sequential gives 0, a Linear, the widths 4, 4: expected a Linear whose outputs"),
    "a module": (nn.Sequential(nn.Conv2d(2, 2, 1)), {"0": "colwise"}, r"gives 0, a Conv2d, the word 'colwise'"),
    "a style": (nn.Sequential(nn.LayerNorm(2)), {"0": SequenceParallel()},
                r"gives 0, a LayerNorm, the style SequenceParallel: of torch's styles HetSeq takes"),
    "an embedding": (nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), {"0": "embedding_rowwise"},
                     r"0 is an Embedding with max_norm=1.0, which tensor parallelism cannot divide: leave"),
    "a tie": (Tied(), {"one": ColwiseParallel(), "other": RowwiseParallel()},
              r"one and other share one parameter, which the plan for tensor parallelism divides differently"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_plan_that_cannot_be_is_refused(what: str) -> None:
    model, task_plan, message = REFUSED[what]
    with pytest.raises(ConfigError, match=message):
        plan_of(model, task_plan)


def test_experts_are_refused_by_name() -> None:
    mixtral = tiny_models.build(tiny_models.configure("mixtral", **HEADS, num_local_experts=2))
    with pytest.raises(ConfigError, match=r"divides model.layers.\*.mlp.experts.\w+, which is no module of Mixtral"):
        plan_of(mixtral)


UNEVEN: dict[str, tuple[Any, int, str]] = {
    "attention heads": ((llama, {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 18}), 2,
                        r"layers.0.self_attn.q_proj has 3 attention heads, which 2 tensor-parallel ranks cannot"),
    "key-value heads": ((llama, {}), 4, r"layers.0.self_attn.k_proj has 2 key-value heads, which 4 tensor"),
    "vocabulary": ((llama, {"vocab_size": 301}), 2, r"model.embed_tokens has a vocabulary of 301 words, which 2"),
    "feed-forward": ((llama, {"intermediate_size": 13}), 2, r"mlp.gate_proj has a width of 13 outputs, which 2 tensor"),
    "fused heads of unequal numbers": ((gpt.make_model, {"config": gpt.LLAMA}), 4,
                                       r"layers.0.attention.qkv has 2 key-value heads, which 4 tensor"),
    "fused heads": ((gpt2, {"n_head": 3}), 2, r"h.0.attn.c_attn has 3 attention heads, which 2 tensor"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNEVEN)
def test_what_does_not_divide_is_refused(what: str) -> None:
    (make, fields), degree, message = UNEVEN[what]
    model = make(**fields)
    with pytest.raises(ConfigError, match=message):
        check_plan(model, plan_of(model), degree)


class Heads(nn.Module):
    """Attention that knows only how many heads it has."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.query, self.out = 3, nn.Linear(12, 12), nn.Linear(12, 12)


def test_a_number_of_heads_beside_a_divided_module_must_divide_too() -> None:
    model = nn.Sequential(Heads())
    with pytest.raises(
        ConfigError, match=r"0.query has n_heads 3 around it, which 2 tensor-parallel ranks cannot divide"
    ):
        check_plan(model, plan_of(model, {"0.query": "colwise", "0.out": "rowwise"}), 2)


def test_the_norm_of_whole_parameters_needs_no_ranks() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert gradient_norm([parameter, nn.Parameter(torch.zeros(1))]).item() == 5.0


def test_beside_fsdp_a_layer_of_unequal_layers_is_refused() -> None:
    mesh: Any = None  # refused before anything is sent
    with pytest.raises(ConfigError, match="layers of different widths, which torch's FSDP cannot keep"):
        tensor_parallel._divide_parameters_(nn.Linear(2, 8), mesh, Columns(blocks=(4, 2, 2)).cuts)
