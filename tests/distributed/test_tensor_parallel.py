"""Ranks that divide a model have the losses, gradients and parameters of one device, and random numbers as they must.

fp64, three steps of AdamW after clipping by the global norm, two micro-batches each; errors are of whole tensors,
||x - x0|| / ||x0||.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.tensor_ranks import Curve, drop, refuse, train_alone, train_divided

LIMIT = 1e-12
UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
HEADS = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", TIED),
    "llama, untied, biases": ("llama", {**UNTIED, "attention_bias": True, "mlp_bias": True}),
    "gpt2, tied": ("gpt2", {"n_head": 4, **TIED}),
    "gpt2, untied": ("gpt2", {"n_head": 4, **UNTIED}),
    "qwen3, norms of heads": ("qwen3", {**HEADS, **TIED, "head_dim": 8, "intermediate_size": 40}),
    "gemma, scaled words": ("gemma", {"num_key_value_heads": 2}),
    "phi3, gathered outputs": ("phi3", {**HEADS, **UNTIED, "intermediate_size": 40, "pad_token_id": 2}),
}


def apart(mine: Any, right: Any) -> float:
    return float((mine - right).norm() / right.norm()) if right.norm() else float(mine.norm())


def compare(ranks: list[Curve], alone: Curve) -> None:
    for curve in ranks:
        assert curve.losses == pytest.approx(alone.losses, rel=LIMIT)
        assert curve.norms == pytest.approx(alone.norms, rel=LIMIT)
        for mine, right in [*zip(curve.gradients, alone.gradients, strict=True), (curve.parameters, alone.parameters)]:
            assert mine.keys() == right.keys()
            worst = {name: apart(mine[name], right[name]) for name in right}
            assert max(worst.values()) <= LIMIT, worst
        assert curve.storage == curve.elements, "a part keeps the memory of the whole tensor"
    first = ranks[0].parameters
    assert all((first[name] == one).all() for curve in ranks for name, one in curve.parameters.items()), "ranks differ"


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Curve]]:
    """All models on two ranks, one after the other: to import transformers takes a rank longer than all of them."""
    return run_ranks(train_divided, 2, str(tmp_path_factory.mktemp("halves")), MODELS, timeout_s=300)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_that_divide_a_model_train_it_as_one_device(name: str, halves: list[dict[str, Curve]]) -> None:
    alone, ranks = train_alone(*MODELS[name]), [curves[name] for curves in halves]
    compare(ranks, alone)
    assert [curve.is_tied for curve in ranks] == ["lm_head.weight" not in alone.parameters] * 2
    assert ranks[0].elements < 0.56 * alone.elements


def test_four_ranks_as_well(tmp_path: Path) -> None:
    models = {"llama": ("llama", {**TIED, "num_key_value_heads": 4}), "gpt2": ("gpt2", {"n_head": 4})}
    quarters = run_ranks(train_divided, 4, str(tmp_path), models, timeout_s=300)
    for name, (kind, fields) in models.items():
        alone, ranks = train_alone(kind, fields), [curves[name] for curves in quarters]
        compare(ranks, alone)
        assert ranks[0].elements < 0.34 * alone.elements


def test_ranks_drop_other_elements_of_what_is_divided_and_the_same_ones_of_the_rest(tmp_path: Path) -> None:
    first, second = run_ranks(drop, 2, str(tmp_path), [0, 1], False)
    for seed in (0, 1):
        assert first[seed].outside == second[seed].outside
        assert all(mine != other for mine, other in zip(first[seed].inside, second[seed].inside, strict=True))
        assert first[seed].inside[0] != first[seed].inside[1], "two blocks dropped the same elements"
    assert first[0].inside != first[1].inside, "the seed changes nothing"
    assert first[0].outside == first[1].outside, "the seed changes what it does not concern"


def test_activation_checkpointing_drops_the_same_elements_again(tmp_path: Path) -> None:
    (tmp_path / "once").mkdir()
    (tmp_path / "again").mkdir()
    once = run_ranks(drop, 2, str(tmp_path / "once"), [0], False)
    again = run_ranks(drop, 2, str(tmp_path / "again"), [0], True)
    for rank in range(2):
        assert (once[rank][0].gradient == again[rank][0].gradient).all()
        assert len(again[rank][0].inside) == 4, "no forward ran again"
        assert again[rank][0].inside[2:] == once[rank][0].inside[::-1]


def test_ranks_with_different_models_are_refused(tmp_path: Path) -> None:
    for text in run_ranks(refuse, 2, str(tmp_path)):
        assert "different numbers in 0.down.bias: build the model on all of them with the same seed" in text
