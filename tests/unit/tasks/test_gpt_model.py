"""Our causal language model against Hugging Face's GPT-2 and Llama, number by number."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hetseq import DataError
from hetseq.tasks.gpt.model import GptConfig, GptForCausalLM, from_hugging_face, their_names, to_hugging_face
from tests.support.gpt import (
    CASES,
    GPT2,
    LAYOUTS,
    LLAMA,
    facts_of,
    make_batch,
    make_model,
    norms_in_double_precision,
    our_logits,
    theirs_of,
)
from tests.support.parity import distance, import_transformers

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
PADDED = CASES["padded"]


# Against Hugging Face. The import takes three seconds, so these are slow; the recorded numbers below are not.


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    return import_transformers()


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "fp64"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_summed_loss_and_all_gradients_are_theirs(
    transformers: ModuleType, layout: str, case: str, dtype: torch.dtype, attention: str
) -> None:
    if attention == "eager" and layout == "llama" and dtype == torch.float64:
        pytest.skip("their eager attention of Llama takes its softmax in fp32")
    ours, batch = make_model(LAYOUTS[layout], dtype), make_batch(CASES[case])
    theirs = theirs_of(transformers, ours, attention=attention)
    found = facts_of(ours, batch, ours.config)
    # measured: at most 7.0e-7 in fp32 and 1.8e-15 in fp64
    with norms_in_double_precision(transformers):
        assert distance(found, facts_of(theirs, batch, ours.config)) <= TOLERANCE[dtype]
    if case == "single":
        assert found["loss"] == 0  # a row of one token has nothing to predict
    # and as they are: their RMSNorm rounds to fp32, 3.2e-7 apart
    assert distance(found, facts_of(theirs, batch, ours.config)) <= (1e-5 if layout == "llama" else TOLERANCE[dtype])


@pytest.mark.slow
def test_their_mean_loss_is_our_sum_over_all_targets(transformers: ModuleType) -> None:
    for config in LAYOUTS.values():
        ours, batch = make_model(config, torch.float32), make_batch(PADDED)
        labels = torch.where(batch["attention_mask"], batch["input_ids"], -100)
        theirs, mask = theirs_of(transformers, ours), batch["attention_mask"].long()
        mean = theirs(batch["input_ids"], attention_mask=mask, labels=labels).loss
        found = facts_of(ours, batch, config)["loss"].item() / len(batch["target_ids"])
        assert found == pytest.approx(mean.item(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (GPT2, {"is_tied": False}),
        (GPT2, {"hidden_act": "relu", "num_hidden_layers": 1, "norm_eps": 1e-2}),
        (GPT2, {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 24, "num_hidden_layers": 3}),
        (LLAMA, {"is_tied": True}),
        (LLAMA, {"attention_bias": True, "mlp_bias": True}),
        (LLAMA, {"num_key_value_heads": 1, "norm_eps": 1e-2}),
        (LLAMA, {"num_key_value_heads": 4, "hidden_act": "gelu"}),
        (LLAMA, {"head_dim": 10, "rope_theta": 37.5, "num_hidden_layers": 3}),
    ],
    ids=lambda value: ",".join(f"{key}={each}" for key, each in value.items()) if isinstance(value, dict) else "",
)
def test_other_configurations_are_theirs_too(
    transformers: ModuleType, config: GptConfig, changes: dict[str, Any]
) -> None:
    ours = make_model(dataclasses.replace(config, **changes))
    batch, theirs = make_batch(PADDED), theirs_of(transformers, ours)
    with norms_in_double_precision(transformers):
        expected = facts_of(theirs, batch, ours.config)
    assert distance(facts_of(ours, batch, ours.config), expected) <= 1e-12
    assert ours.config.parameters == sum(parameter.numel() for parameter in theirs.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_training_both_drop_the_same_with_the_same_random_numbers(
    transformers: ModuleType, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so dropout sits in the same places, in the same order and with the same rates
    for module in ("dropout", "attention"):
        monkeypatch.setattr(f"hetseq.tasks.nn.{module}.drop", torch.nn.functional.dropout)
    rates = {"attention_dropout": 0.4}
    rates |= {"embedding_dropout": 0.2, "residual_dropout": 0.3} if layout == "gpt2" else {}
    # a head for each key: else theirs hands groups to SDPA, which draws other numbers
    config = dataclasses.replace(LAYOUTS[layout], **rates, num_key_value_heads=LAYOUTS[layout].num_attention_heads)
    ours, batch = make_model(config).train(), make_batch(PADDED)
    theirs = theirs_of(transformers, ours)
    torch.manual_seed(5)
    with norms_in_double_precision(transformers):
        expected = facts_of(theirs, batch, config)
    torch.manual_seed(5)
    assert distance(facts_of(ours, batch, config), expected) <= 1e-12
    for name in rates:
        other = make_model(dataclasses.replace(config, **{name: 0.1})).train()
        torch.manual_seed(5)
        assert distance(facts_of(other, batch, config), expected) > 0.01
    assert distance(facts_of(ours.eval(), batch, config), expected) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_change_of_any_one_weight_of_theirs_is_seen(transformers: ModuleType, layout: str) -> None:
    ours, batch = make_model(LAYOUTS[layout]), make_batch(PADDED)
    theirs, found = theirs_of(transformers, ours), facts_of(ours, batch, ours.config)
    used = (
        int(batch["input_ids"][0, 0]) * ours.config.hidden_size + 1
    )  # of the word embeddings: of a word that is there
    unseen = []
    with norms_in_double_precision(transformers):
        for name, parameter in theirs.named_parameters():
            kept = parameter.detach().clone()
            with torch.no_grad():
                parameter.view(-1)[used % parameter.numel()] += (
                    1e-6  # not a row: a LayerNorm forgets what is added to all of one
                )
            if distance(found, facts_of(theirs, batch, ours.config)) < 1e-9:
                unseen.append(name)
            with torch.no_grad():
                parameter.copy_(kept)
        assert distance(found, facts_of(theirs, batch, ours.config)) <= 1e-12  # all is as it was
    assert unseen == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("gpt2", {"layer_norm_epsilon": 1e-3}),
        ("gpt2", {"activation_function": "gelu"}),
        ("gpt2", {"n_head": 4}),
        ("llama", {"rms_norm_eps": 1e-3}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 9999.0}}),
    ],
)
def test_another_configuration_of_theirs_is_seen(
    transformers: ModuleType, layout: str, changes: dict[str, Any]
) -> None:
    ours, batch = make_model(LAYOUTS[layout]), make_batch(PADDED)
    theirs = theirs_of(transformers, ours, **changes)
    assert distance(facts_of(ours, batch, ours.config), facts_of(theirs, batch, ours.config)) > 2e-6


# The same without Hugging Face, by what it once gave.

# transformers 5.23.0, float64, its RMSNorm too: the summed loss, and its slope when all weights move along a direction
RECORDED = {
    "gpt2": (147.85145928246718, -102.10081541568687),
    "llama": (94.42528648066208, 58.56419312565934),
}


def recordable(model: torch.nn.Module, config: GptConfig) -> tuple[float, float]:
    """Loss and slope of a model whose weights are set by a formula that knows only Hugging Face's names."""
    own = dict(model.named_parameters())
    is_ours = isinstance(model, GptForCausalLM)
    theirs = dict(to_hugging_face(config, own)) if is_ours else own
    values, direction = {}, {}
    for at, (name, parameter) in enumerate(sorted(theirs.items())):
        steps = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape)
        values[name] = 0.3 * torch.sin(0.7 * steps + at) + float(".ln_" in name or "norm" in name)
        direction[name] = torch.cos(1.3 * steps - at)
    with torch.no_grad():
        for name, parameter in own.items():
            pieces = tuple(values[each] for each in their_names(config, name)) if is_ours else (values[name],)
            parameter.copy_(from_hugging_face(config, name, pieces) if is_ours else pieces[0])
    facts = facts_of(model, make_batch(PADDED), config)
    slope = torch.stack([(facts[f"gradient: {name}"] * each).sum() for name, each in direction.items()]).sum()
    return facts["loss"].item(), slope.item()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_slope_are_the_recorded_ones(layout: str) -> None:
    config = LAYOUTS[layout]
    assert recordable(make_model(config), config) == pytest.approx(RECORDED[layout], rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_theirs_still_gives_the_recorded_numbers(transformers: ModuleType, layout: str) -> None:
    config = LAYOUTS[layout]
    theirs = theirs_of(transformers, make_model(config))
    with norms_in_double_precision(transformers):
        assert recordable(theirs, config) == pytest.approx(RECORDED[layout], rel=1e-10)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("gpt2", {"norm_eps": 1.001e-5}),
        ("gpt2", {"hidden_act": "gelu"}),
        ("gpt2", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 6}),
        ("llama", {"norm_eps": 1.01e-6}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_theta": 10_001.0}),
    ],
)
def test_another_configuration_gives_other_numbers(layout: str, changes: dict[str, Any]) -> None:
    config = dataclasses.replace(LAYOUTS[layout], **changes)
    assert recordable(make_model(config), config) != pytest.approx(RECORDED[layout], rel=1e-9)


# What holds for ours alone.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_vocabulary_head_sees_the_positions_with_a_target_only(layout: str) -> None:
    model, batch = make_model(LAYOUTS[layout]), make_batch(PADDED)
    seen: list[tuple[int, ...]] = []
    model.norm.register_forward_hook(lambda _, inputs, output: seen.extend((inputs[0].shape, output.shape)))
    assert our_logits(model, batch).shape == (19, 53)  # 11 + 6 + 2 + 0
    assert seen == [(19, 24), (19, 24)]  # of 4 x 12 tokens


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_token_sees_itself_and_what_stands_before_it(layout: str) -> None:
    model = make_model(LAYOUTS[layout])
    ids, everywhere = make_batch([9])["input_ids"], torch.arange(9)
    before = model(ids, everywhere)
    for column in range(9):
        changed = ids.clone()
        changed[0, column] = (changed[0, column] + 1) % 53
        after = model(changed, everywhere)
        assert torch.allclose(after[:column], before[:column], rtol=1e-12, atol=1e-14)
        assert (after[column:] - before[column:]).abs().amax(dim=1).min() > 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_stands_in_the_padding_changes_nothing(layout: str) -> None:
    model, batch = make_model(LAYOUTS[layout]), make_batch(PADDED)
    junk = torch.where(batch["attention_mask"], batch["input_ids"], 17)
    calm, hurt = facts_of(model, batch, model.config), facts_of(model, batch | {"input_ids": junk}, model.config)
    assert all(torch.equal(calm[name], hurt[name]) for name in ("logits", "loss"))
    assert distance(hurt, calm) <= 1e-13  # gradients too: of the junk's word as well
    everywhere = {"target_positions": torch.arange(4 * 12)}
    logits = [our_logits(model, batch | each | everywhere) for each in ({}, {"input_ids": junk})]
    assert not torch.allclose(*logits)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_micro_batch_without_a_target_adds_nothing(layout: str, autocast: bool) -> None:
    model, batch = make_model(LAYOUTS[layout], torch.float32).train(), make_batch([1, 1])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = our_logits(model, batch)
        loss = F.cross_entropy(logits, batch["target_ids"], reduction="sum")
    loss.backward()
    assert logits.shape == (0, 53)
    assert loss.item() == 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_a_tied_head_is_the_word_embeddings_and_an_untied_one_is_not() -> None:
    for config in (GPT2, dataclasses.replace(LLAMA, is_tied=True)):
        assert not any("head" in name for name in GptForCausalLM(config).state_dict())
    model, batch = make_model(GPT2), make_batch([5])
    absent = next(token for token in range(53) if token not in batch["input_ids"])
    words = model.embeddings.tokens.weight
    assert torch.autograd.grad(our_logits(model, batch)[0, absent], words)[0][absent].any()
    model = make_model(LLAMA)
    words = model.embeddings.tokens.weight
    assert not torch.autograd.grad(our_logits(model, batch)[0, absent], words)[0][absent].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_stored_is_what_is_learned(layout: str) -> None:
    model = GptForCausalLM(LAYOUTS[layout])
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_and_forms_go_to_theirs_and_back(layout: str) -> None:
    model = make_model(LAYOUTS[layout])
    theirs = dict(to_hugging_face(model.config, model.state_dict()))
    for name, tensor in model.state_dict().items():
        pieces = tuple(theirs.pop(each) for each in their_names(model.config, name))
        assert torch.equal(from_hugging_face(model.config, name, pieces), tensor)
    assert theirs == {}


@pytest.mark.slow  # a second for what torch imports of "meta"
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_in_forward_looks_at_a_value(layout: str) -> None:
    # tensors on "meta" have none, as those on a GPU have none without waiting for it
    with torch.device("meta"):
        model = GptForCausalLM(LAYOUTS[layout]).train()
    batch = {name: torch.empty_like(tensor, device="meta") for name, tensor in make_batch(PADDED).items()}
    assert our_logits(model, batch).shape == (19, 53)


#: what waits for a device: a number for Python, a shape that depends on values, a comparison, a copy from the host
WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::lift_fresh", "aten::item"}


def operations_of(compute: Callable[[], object]) -> set[str]:
    """The names of what is computed, and of what that computes in turn."""
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        compute()
    return {event.name for event in profile.function_events}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_in_forward_waits_for_a_device(layout: str) -> None:
    model, batch = make_model(LAYOUTS[layout], torch.float32).train(), make_batch(PADDED)
    names = operations_of(lambda: our_logits(model, batch))
    assert {"aten::embedding", "aten::baddbmm", "aten::index_select"} <= names
    assert not names & WAITING
    assert operations_of(lambda: torch.tensor([1.0])) & WAITING


# Initialisation.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_new_model_is_initialised_as_published(layout: str) -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(
        LAYOUTS[layout], vocab_size=503, hidden_size=96, head_dim=24, intermediate_size=200, initializer_range=0.03
    )
    for name, parameter in GptForCausalLM(config).named_parameters():
        if "norm" in name and name.endswith("weight"):
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            adds = "attention.output" in name or "mlp.down" in name
            expected = 0.03 / 2 if adds else 0.03  # the root of 2 x 2 layers
            spread = expected / math.sqrt(parameter.numel())
            assert parameter.std().item() == pytest.approx(expected, abs=4 * spread), name
            assert abs(parameter.mean().item()) < 5 * spread, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_initial_parameters_depend_on_the_seed_alone(layout: str) -> None:
    models = []
    for seed in (1, 1, 2):
        torch.rand(seed)  # whatever was drawn before
        torch.manual_seed(seed)
        models.append(GptForCausalLM(LAYOUTS[layout]).state_dict())
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert not any(torch.equal(models[0][name], models[2][name]) for name in models[0] if models[0][name].ndim == 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_loss_is_that_of_a_guess(layout: str) -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(LAYOUTS[layout], vocab_size=2003, initializer_range=0.02)
    batch = make_batch([16] * 16, config)
    with torch.no_grad():
        loss = F.cross_entropy(our_logits(GptForCausalLM(config), batch), batch["target_ids"])
    assert loss.item() == pytest.approx(math.log(2003), abs=0.1)


# Sizes.


def published(**changes: Any) -> GptConfig:
    return GptConfig(50257, **changes)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (published(), 124_439_808),
        (
            published(
                hidden_size=1600,
                num_hidden_layers=48,
                num_attention_heads=25,
                num_key_value_heads=25,
                intermediate_size=6400,
            ),
            1_557_611_200,
        ),
        (
            dataclasses.replace(
                LLAMA,
                vocab_size=32000,
                hidden_size=4096,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=32,
                head_dim=128,
                intermediate_size=11008,
                max_position_embeddings=4096,
            ),
            6_738_415_616,
        ),
    ],
    ids=["gpt2", "gpt2-xl", "llama-2-7b"],
)
def test_the_published_sizes_have_the_published_number_of_parameters(config: GptConfig, count: int) -> None:
    assert config.parameters == count


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}, {"is_tied": True}])
def test_parameters_are_counted_without_making_them(layout: str, changes: dict[str, bool]) -> None:
    config = dataclasses.replace(LAYOUTS[layout], **changes)
    assert config.parameters == sum(parameter.numel() for parameter in GptForCausalLM(config).parameters())


# Dropout.


def outputs(config: GptConfig, *, training: bool, seed: int) -> Tensor:
    model, batch = make_model(config).train(training), make_batch(PADDED)
    torch.manual_seed(seed)
    return our_logits(model, batch)


@pytest.mark.parametrize("kind", ["embedding_dropout", "residual_dropout", "attention_dropout"])
def test_each_dropout_is_active_in_training_and_absent_in_evaluation(kind: str) -> None:
    config = dataclasses.replace(GPT2.with_dropout(0.0), **{kind: 0.1})
    assert not torch.allclose(outputs(config, training=True, seed=1), outputs(config, training=True, seed=2))
    assert torch.equal(outputs(config, training=True, seed=1), outputs(config, training=True, seed=1))
    assert torch.equal(outputs(config, training=False, seed=1), outputs(config, training=False, seed=2))


def test_with_dropout_sets_the_rates_that_a_layout_has() -> None:
    names = ("embedding_dropout", "residual_dropout", "attention_dropout")
    assert [getattr(GPT2.with_dropout(0.25), name) for name in names] == [0.25, 0.25, 0.25]
    assert [getattr(LLAMA.with_dropout(0.25), name) for name in names] == [0.0, 0.0, 0.25]
    with pytest.raises(DataError, match=r"dropout is 1\.5: expected a number from 0 and below 1"):
        GPT2.with_dropout(1.5)


# Inputs that do not fit.


@pytest.mark.parametrize(
    ("ids", "positions", "message"),
    [
        (torch.zeros(4, dtype=torch.int64), torch.zeros(1), r"input_ids has shape \(4,\), expected \(n, L\)"),
        (torch.zeros(2, 0, dtype=torch.int64), torch.zeros(1), "L of at least 1"),
        (torch.zeros(2, 17, dtype=torch.int64), torch.zeros(1), "17 tokens: expected at most 16"),
        (
            torch.zeros(2, 9, dtype=torch.int64),
            torch.zeros(2, 9),
            r"target_positions has shape \(2, 9\), expected \(m,",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused_in_words(ids: Tensor, positions: Tensor, message: str) -> None:
    for config in LAYOUTS.values():
        with pytest.raises(ValueError, match=message):
            make_model(config)(ids, positions.long())
