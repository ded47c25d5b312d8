"""Our BERT against Hugging Face's, number by number, and what its configuration file may not say."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hetseq import DataError
from hetseq.config.sections import OptimizationConfig
from hetseq.tasks.bert.model import ACTIVATIONS, TIED_NAMES, BertConfig, BertForPreTraining, BertModel
from hetseq.training.optim import parameter_groups
from tests.support.parity import Facts, distance, import_transformers

Batch = dict[str, Tensor]

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
TINY = BertConfig(
    vocab_size=53,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=40,
    max_position_embeddings=16,
    initializer_range=0.1,  # at 0.02 attention is so flat that its faults hardly show
)

# rows: real tokens of each, and the columns that are masked
FULL = [(9, [1, 4, 8]), (9, [2]), (9, [1, 2, 3, 4, 5, 6, 7])]
PADDED = [(12, [0, 5, 11]), (7, []), (3, [2]), (1, [0])]  # a sentence without a masked token, and one of one token
NONE_MASKED = [(6, []), (4, [])]
LONGEST = [(16, [15, 0, 7]), (10, [9])]  # as long as there are positions, in no order
CASES = {"one": [(5, [3])], "full": FULL, "padded": PADDED, "none_masked": NONE_MASKED, "longest": LONGEST}


def make_batch(rows: list[tuple[int, list[int]]], config: BertConfig = TINY) -> Batch:
    """Ids by a formula that meets all of a small vocabulary, the id of [PAD] among the real tokens too."""
    n, length = len(rows), max(real for real, _ in rows)
    columns, real = torch.arange(length), torch.tensor([[real] for real, _ in rows])
    attention_mask = columns < real
    ids = (torch.arange(n * length).view(n, length) * 7 + config.pad_token_id) % config.vocab_size
    positions = torch.tensor([row * length + column for row, (_, masked) in enumerate(rows) for column in masked])
    return {
        "input_ids": torch.where(attention_mask, ids, config.pad_token_id),
        "token_type_ids": ((columns >= real // 2) & attention_mask).long() % config.type_vocab_size,
        "attention_mask": attention_mask,
        "masked_positions": positions.long(),
        "masked_ids": (positions.long() * 5 + 1) % config.vocab_size,
        "next_sentence_labels": torch.arange(n) % 2,
    }


def make_model(config: BertConfig = TINY, dtype: torch.dtype = torch.float64, seed: int = 3) -> BertForPreTraining:
    """Evaluating, unless told otherwise; biases and LayerNorms are moved from where they start, so that they matter."""
    torch.manual_seed(seed)
    model = BertForPreTraining(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def logits_of(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return model(*(batch[name] for name in ("input_ids", "token_type_ids", "attention_mask", "masked_positions")))


def logits_by_all_rows(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The same, but every token goes through the last layer."""
    encoder: Any = model.bert
    hidden, pooled = encoder(*(batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")))
    masked = hidden.flatten(0, -2)[batch["masked_positions"]]
    words = encoder.embeddings.word_embeddings.weight
    heads: Any = model.cls
    return heads.predictions(masked, words, None), heads.seq_relationship(pooled)


def facts_of(model: nn.Module, batch: Batch, logits: Callable[[nn.Module, Batch], Any] = logits_of) -> Facts:
    """Logits, both terms as sums, and the gradient of each term with respect to every parameter."""
    masked, sentence = logits(model, batch)
    terms = {
        "masked": F.cross_entropy(masked, batch["masked_ids"], reduction="sum"),
        "sentence": F.cross_entropy(sentence, batch["next_sentence_labels"], reduction="sum"),
    }
    names, parameters = zip(*model.named_parameters())
    facts = {"masked logits": masked, "sentence logits": sentence}
    for term, value in terms.items():
        gradients = torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True)
        facts |= {f"{term} term": value} | {f"{term} gradient: {name}": each for name, each in zip(names, gradients)}
    return {name: fact.detach() for name, fact in facts.items()}


# Against Hugging Face. The import takes three seconds, so these are slow; the recorded numbers below are not.


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    return import_transformers()


MakeTheirs = Callable[..., nn.Module]


@pytest.fixture
def make_theirs(transformers: ModuleType) -> MakeTheirs:
    """Their model with the weights of ours."""

    def make(ours: BertForPreTraining, *, attention: str = "sdpa", **changes: Any) -> nn.Module:
        settings = dataclasses.asdict(ours.config) | changes
        config = transformers.BertConfig(**settings, attn_implementation=attention)
        theirs = transformers.BertForPreTraining(config).to(next(ours.parameters()).dtype)
        weights = ours.state_dict()
        theirs.load_state_dict(weights | {name: weights[same] for name, same in TIED_NAMES.items()})
        return theirs.train(ours.training)

    return make


def their_logits(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    output = model(batch["input_ids"], batch["attention_mask"].long(), batch["token_type_ids"])
    return output.prediction_logits.flatten(0, 1)[batch["masked_positions"]], output.seq_relationship_logits


def their_mean_loss(model: nn.Module, batch: Batch) -> float:
    labels = torch.full_like(batch["input_ids"], -100)
    labels.view(-1)[batch["masked_positions"]] = batch["masked_ids"]
    named = {name: batch[name] for name in ("input_ids", "token_type_ids")}
    mask = batch["attention_mask"].long()
    output = model(**named, attention_mask=mask, labels=labels, next_sentence_label=batch["next_sentence_labels"])
    return output.loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "fp64"])
@pytest.mark.parametrize("case", CASES)
def test_logits_terms_and_all_gradients_are_theirs(
    make_theirs: MakeTheirs, case: str, dtype: torch.dtype, attention: str
) -> None:
    ours, batch = make_model(dtype=dtype), make_batch(CASES[case])
    theirs = make_theirs(ours, attention=attention)
    found = facts_of(ours, batch)
    # measured: at most 2.2e-6 in fp32 and 3.9e-15 in fp64
    assert distance(found, facts_of(theirs, batch, their_logits)) <= TOLERANCE[dtype]
    mean = their_mean_loss(theirs, batch)
    if case == "none_masked":
        assert math.isnan(mean)  # 0 / 0
        assert found["masked term"] == 0
    else:
        m, n = len(batch["masked_ids"]), len(batch["input_ids"])
        ours_mean = found["masked term"].item() / m + found["sentence term"].item() / n
        assert ours_mean == pytest.approx(mean, rel=TOLERANCE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        *({"hidden_act": name} for name in ACTIVATIONS),
        {"num_attention_heads": 1, "num_hidden_layers": 1},
        {"num_attention_heads": 24, "num_hidden_layers": 3, "intermediate_size": 8},
        {"vocab_size": 7, "pad_token_id": 6, "type_vocab_size": 1},
        {"type_vocab_size": 3, "layer_norm_eps": 0.1, "initializer_range": 0.3},
        {"initializer_range": 0.02, "hidden_size": 48, "max_position_embeddings": 12},
    ],
    ids=lambda changes: ",".join(f"{value}" for value in changes.values()),
)
def test_other_configurations_are_theirs_too(make_theirs: MakeTheirs, changes: dict[str, Any]) -> None:
    ours = make_model(dataclasses.replace(TINY, **changes))
    batch = make_batch(PADDED, ours.config)
    assert distance(facts_of(ours, batch), facts_of(make_theirs(ours), batch, their_logits)) <= 1e-12


@pytest.mark.slow
def test_in_training_both_drop_the_same_with_the_same_random_numbers(
    make_theirs: MakeTheirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so dropout sits in the same places, in the same order and with the same rates
    for module in ("dropout", "attention"):
        monkeypatch.setattr(f"hetseq.tasks.nn.{module}.drop", torch.nn.functional.dropout)
    ours = make_model(dataclasses.replace(TINY, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.4)).train()
    batch, theirs = make_batch(PADDED), make_theirs(ours)
    torch.manual_seed(5)
    expected = facts_of(theirs, batch, their_logits)
    torch.manual_seed(5)
    assert distance(facts_of(ours, batch, logits_by_all_rows), expected) <= 1e-12
    other = make_model(dataclasses.replace(TINY, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3)).train()
    torch.manual_seed(5)
    assert distance(facts_of(other, batch, logits_by_all_rows), expected) > 0.01
    assert distance(facts_of(ours.eval(), batch, logits_by_all_rows), expected) > 0.01


@pytest.mark.slow
def test_a_change_of_any_one_weight_of_theirs_is_seen(make_theirs: MakeTheirs) -> None:
    ours, batch = make_model(), make_batch(PADDED)
    theirs, found = make_theirs(ours), facts_of(ours, batch)
    unseen = []
    for name, parameter in theirs.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.view(-1)[1] += 1e-6  # not a row: a LayerNorm forgets what is added to all of one
        if distance(found, facts_of(theirs, batch, their_logits)) < 1e-9:
            unseen.append(name)
        with torch.no_grad():
            parameter.copy_(kept)
    # what is added to all keys alike is forgotten by softmax
    assert unseen == [f"bert.encoder.layer.{layer}.attention.self.key.bias" for layer in range(2)]
    assert distance(found, facts_of(theirs, batch, their_logits)) <= 1e-12  # all is as it was


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"layer_norm_eps": 1e-3}, {"hidden_act": "gelu_new"}, {"num_attention_heads": 4}, {"pad_token_id": 1}]
)
def test_another_configuration_of_theirs_is_seen(make_theirs: MakeTheirs, changes: dict[str, Any]) -> None:
    ours, batch = make_model(), make_batch(PADDED)
    found, other = facts_of(ours, batch), facts_of(make_theirs(ours, **changes), batch, their_logits)
    assert distance(found, other) > 1e-4
    if "pad_token_id" in changes:  # only gradients of the word embeddings differ
        words = "gradient: bert.embeddings.word_embeddings.weight"
        rest = [{name: fact for name, fact in facts.items() if words not in name} for facts in (found, other)]
        assert distance(*rest) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["mask", "types", "positions"])
def test_an_input_that_one_of_the_two_takes_otherwise_is_seen(make_theirs: MakeTheirs, fault: str) -> None:
    ours, batch = make_model(), make_batch(PADDED)
    faulty = {
        "mask": {"attention_mask": torch.ones_like(batch["attention_mask"])},
        "types": {"token_type_ids": torch.zeros_like(batch["token_type_ids"])},
        "positions": {"masked_positions": batch["masked_positions"].flip(0)},
    }
    expected = facts_of(make_theirs(ours), batch | faulty[fault], their_logits)
    assert distance(facts_of(ours, batch), expected) > 0.01


@pytest.mark.slow
def test_names_shapes_and_number_of_parameters_are_theirs_and_weights_go_both_ways(
    transformers: ModuleType, make_theirs: MakeTheirs
) -> None:
    ours = make_model()
    theirs = make_theirs(ours)  # strict: ours and the tied names are all there is
    shapes = [{name: tensor.shape for name, tensor in model.named_parameters()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]
    assert theirs.state_dict().keys() - ours.state_dict().keys() == TIED_NAMES.keys()

    fresh = transformers.BertForPreTraining(theirs.config).double().eval()
    batch = make_batch(PADDED)
    assert distance(facts_of(ours, batch), facts_of(fresh, batch, their_logits)) > 0.01
    ours.load_state_dict({name: tensor for name, tensor in fresh.state_dict().items() if name not in TIED_NAMES})
    assert distance(facts_of(ours, batch), facts_of(fresh, batch, their_logits)) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("use_diff", [True, False])
def test_their_configuration_file_is_read(transformers: ModuleType, tmp_path: Path, use_diff: bool) -> None:
    settings = dataclasses.asdict(TINY) | {"hidden_dropout_prob": 0, "pad_token_id": 3}
    transformers.BertConfig(**settings).to_json_file(tmp_path / "config.json", use_diff=use_diff)
    assert BertConfig.from_json_file(tmp_path / "config.json") == BertConfig(**settings)


# The same without Hugging Face, by what it once gave.

RECORDED_CONFIG = dataclasses.replace(TINY, layer_norm_eps=1e-3, pad_token_id=3)
# transformers 5.23.0, float64: both terms, and the slope of each when all weights move along `direction`
RECORDED = {
    "masked term": 20.101263928403466,
    "masked slope": -0.2913027553126719,
    "sentence term": 3.487722333746829,
    "sentence slope": -0.7369979569699362,
}


def set_by_formula(model: nn.Module) -> Facts:
    """Weights that no generator of random numbers can change; returns a direction in their space."""
    direction = {}
    with torch.no_grad():
        for at, (name, parameter) in enumerate(sorted(model.named_parameters())):
            steps = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape)
            parameter.copy_(0.3 * torch.sin(0.7 * steps + at) + float(name.endswith("LayerNorm.weight")))
            direction[name] = torch.cos(1.3 * steps - at)
    return direction


def recordable(model: nn.Module, logits: Callable[[nn.Module, Batch], Any] = logits_of) -> dict[str, float]:
    direction, facts = set_by_formula(model), facts_of(model, make_batch(PADDED, RECORDED_CONFIG), logits)
    found = {}
    for term in ("masked", "sentence"):
        found[f"{term} term"] = facts[f"{term} term"].item()
        along = [(facts[f"{term} gradient: {name}"] * each).sum() for name, each in direction.items()]
        found[f"{term} slope"] = torch.stack(along).sum().item()
    return found


def test_both_terms_and_their_slopes_are_the_recorded_ones() -> None:
    assert recordable(make_model(RECORDED_CONFIG)) == pytest.approx(RECORDED, rel=1e-10)


@pytest.mark.parametrize(
    "changes",
    [{"layer_norm_eps": 1.001e-3}, {"hidden_act": "gelu_new"}, {"num_attention_heads": 4}, {"pad_token_id": 4}],
)
def test_another_configuration_gives_other_numbers(changes: dict[str, Any]) -> None:
    assert recordable(make_model(dataclasses.replace(RECORDED_CONFIG, **changes))) != pytest.approx(RECORDED, rel=1e-8)


@pytest.mark.slow
def test_theirs_still_gives_the_recorded_numbers(make_theirs: MakeTheirs) -> None:
    assert recordable(make_theirs(make_model(RECORDED_CONFIG)), their_logits) == pytest.approx(RECORDED, rel=1e-10)


@pytest.mark.parametrize(
    ("names", "formula"),
    [
        (("gelu",), lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2)))),
        (
            ("gelu_new", "gelu_pytorch_tanh"),
            lambda x: 0.5 * x * (1 + math.tanh(0.7978845608028654 * (x + 0.044715 * x**3))),
        ),
        (("relu",), lambda x: max(x, 0.0)),
        (("silu", "swish"), lambda x: x / (1 + math.exp(-x))),
    ],
)
def test_activations_are_what_their_names_say(names: tuple[str, ...], formula: Callable[[float], float]) -> None:
    for name in names:
        for x in (-3.0, -0.4, 0.0, 0.7, 2.5):
            assert ACTIVATIONS[name](torch.tensor(x, dtype=torch.float64)).item() == pytest.approx(
                formula(x), abs=1e-14
            )


# What holds for ours alone.


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_a_micro_batch_without_a_masked_token_adds_nothing_to_that_term(autocast: bool) -> None:
    model, batch = make_model(dtype=torch.float32).train(), make_batch(NONE_MASKED)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        masked, sentence = logits_of(model, batch)
        term = F.cross_entropy(masked, batch["masked_ids"], reduction="sum")
        (term + F.cross_entropy(sentence, batch["next_sentence_labels"], reduction="sum")).backward()
    assert masked.shape == (0, 53)
    assert term.item() == 0
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients.values())
    still = {name for name, gradient in gradients.items() if gradient is not None and not gradient.any()}
    head = {name for name in gradients if name.startswith("cls.predictions.")}
    assert head <= still
    assert "bert.encoder.layer.0.output.dense.weight" not in still


def test_the_vocabulary_head_sees_the_masked_rows_only() -> None:
    model, batch = make_model(), make_batch(PADDED)
    seen: list[tuple[int, ...]] = []
    model.cls.predictions.register_forward_hook(lambda _, inputs, output: seen.extend((inputs[0].shape, output.shape)))
    logits_of(model, batch)
    assert seen == [(5, 24), (5, 53)]  # of 4 x 12 tokens


@pytest.mark.parametrize("case", CASES)
def test_the_last_layer_is_computed_for_wanted_rows_only_with_the_same_result(case: str) -> None:
    model, batch = make_model(), make_batch(CASES[case])
    seen: list[int] = []
    for layer in model.bert.encoder.layer:
        layer.register_forward_hook(lambda _, inputs, output: seen.append(output.numel() // 24))
    found = facts_of(model, batch)
    n, length = batch["input_ids"].shape
    assert seen == [n * length, len(batch["masked_positions"]) + n]
    assert distance(found, facts_of(model, batch, logits_by_all_rows)) <= 1e-12


@pytest.mark.parametrize("rate", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
def test_dropout_is_active_in_the_last_layer_too(rate: str) -> None:
    one = dataclasses.replace(TINY, num_hidden_layers=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model, batch = make_model(dataclasses.replace(one, **{rate: 0.5})).train(), make_batch(FULL)
    model.bert.embeddings.dropout.p = 0.0
    torch.manual_seed(1)
    first, second = logits_of(model, batch), logits_of(model, batch)
    assert all((a != b).any(dim=-1).all() for a, b in zip(first, second))


def test_a_position_counts_rows_and_columns() -> None:
    model, batch = make_model(), make_batch(PADDED)
    masked, _ = logits_of(model, batch | {"masked_positions": torch.tensor([2 * 12 + 1])})
    alone, _ = logits_of(model, make_batch(PADDED) | {"masked_positions": torch.arange(4 * 12)})
    assert torch.allclose(masked[0], alone.view(4, 12, 53)[2, 1], rtol=1e-12)
    assert not torch.allclose(masked[0], alone.view(4, 12, 53)[1, 2], rtol=1e-3)


def test_what_stands_in_the_padding_changes_nothing() -> None:
    model, batch = make_model(), make_batch(PADDED)
    junk = torch.where(batch["attention_mask"], batch["input_ids"], 17)
    calm, hurt = logits_of(model, batch), logits_of(model, batch | {"input_ids": junk})
    assert all(torch.equal(a, b) for a, b in zip(calm, hurt))
    attended = batch | {"attention_mask": torch.ones_like(batch["attention_mask"])}
    assert not torch.allclose(logits_of(model, attended)[0], logits_of(model, attended | {"input_ids": junk})[0])


def test_a_row_of_padding_alone_hurts_no_other_row() -> None:
    model, batch = make_model(), make_batch([(9, [1, 4]), (9, [2])])
    empty = batch["attention_mask"].clone()
    empty[1] = False
    calm, hurt = logits_of(model, batch), logits_of(model, batch | {"attention_mask": empty})
    assert all(logits.isfinite().all() for logits in hurt)
    assert torch.equal(calm[0][:2], hurt[0][:2])
    assert torch.equal(calm[1][0], hurt[1][0])


def test_the_vocabulary_head_is_the_word_embeddings() -> None:
    model, batch = make_model(), make_batch([(5, [3])])
    assert not [name for name in model.state_dict() if "decoder" in name]
    words = model.bert.embeddings.word_embeddings.weight
    absent = next(token for token in range(53) if token not in batch["input_ids"])
    before = logits_of(model, batch)[0]
    gradient = torch.autograd.grad(before[0, absent], words)[0]
    assert gradient[absent].any()  # by the head: that word was not looked up
    with torch.no_grad():
        words[absent] += 1
    after = logits_of(model, batch)[0]
    assert not torch.equal(before[0, absent], after[0, absent])
    others = torch.arange(53) != absent
    assert torch.allclose(before[0, others], after[0, others], rtol=1e-12)


def test_looking_padding_up_gives_its_row_no_gradient() -> None:
    model, batch = make_model(), make_batch(FULL)
    assert 0 in batch["input_ids"]
    words = model.bert.embeddings.word_embeddings.weight
    gradient = torch.autograd.grad(logits_of(model, batch)[1].sum(), words)[0]  # not through the vocabulary head
    assert not gradient[0].any()
    assert all(gradient[token].any() for token in batch["input_ids"].unique().tolist() if token != 0)


#: what waits for a device: a number for Python, a shape that depends on values, a comparison
WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"}


def operations_of(compute: Callable[[], object]) -> set[str]:
    """The names of what is computed, and of what that computes in turn."""
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        compute()
    return {event.name for event in profile.function_events}


def test_nothing_in_forward_waits_for_a_device() -> None:
    model, batch = make_model(dtype=torch.float32).train(), make_batch(PADDED)
    names, mask = operations_of(lambda: logits_of(model, batch)), batch["attention_mask"]
    assert {"aten::embedding", "aten::native_layer_norm", "aten::index_select", "aten::tanh"} <= names
    assert not names & WAITING
    for looks in (lambda: bool(mask.all()), lambda: mask[mask], lambda: torch.equal(mask, mask)):
        assert operations_of(looks) & WAITING


def test_the_last_layer_has_queries_of_the_wanted_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make_model().train(), make_batch(PADDED)  # with dropout, so written out
    counts = []
    for kinds in ({"cpu"}, set()):
        monkeypatch.setattr("hetseq.tasks.bert.attention._LENGTHS_APART", frozenset(kinds))
        with FlopCounterMode(display=False) as counter:
            logits_of(model, batch)
        counts.append(counter.get_total_flops())
    size, (rows, length) = TINY.hidden_size, batch["input_ids"].shape
    wanted, places = 5 + rows, 4 * rows  # three masked tokens and the first one in the row that has most
    assert counts[1] - counts[0] == 2 * size * size * (rows * length - wanted) + 4 * size * length * (
        rows * length - places
    )


@pytest.mark.slow  # a second for what torch imports of "meta"
def test_nothing_in_forward_looks_at_a_value() -> None:
    # tensors on "meta" have none, as those on a GPU have none without waiting for it
    with torch.device("meta"):
        model = BertForPreTraining(TINY).train()
        batch = {name: torch.empty_like(tensor, device="meta") for name, tensor in make_batch(PADDED).items()}
    assert [logits.shape for logits in logits_of(model, batch)] == [(5, 53), (4, 2)]
    with pytest.raises((RuntimeError, NotImplementedError)):
        batch["attention_mask"].all().item()


@pytest.mark.parametrize(
    ("config", "published"),
    [(BertConfig(30522), 110_106_428), (BertConfig(30522, 1024, 24, 16, 4096), 336_226_108)],
    ids=["base", "large"],
)
def test_the_published_sizes_have_the_published_number_of_parameters(config: BertConfig, published: int) -> None:
    assert config.parameters == published


@pytest.mark.parametrize(
    "config", [TINY, BertConfig(101, 6, 5, 2, 7, max_position_embeddings=13, type_vocab_size=3)], ids=["tiny", "odd"]
)
def test_parameters_are_counted_without_making_them(config: BertConfig) -> None:
    model = BertForPreTraining(config)
    assert config.parameters == sum(parameter.numel() for parameter in model.parameters())
    for name in ("vocab_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings", "type_vocab_size"):
        assert dataclasses.replace(config, **{name: getattr(config, name) + 1}).parameters > config.parameters


def test_a_new_model_is_initialised_as_in_the_paper() -> None:
    torch.manual_seed(0)
    config = BertConfig(2003, 64, 2, 4, 256, pad_token_id=5, initializer_range=0.03)
    for name, parameter in BertForPreTraining(config).named_parameters():
        if name.endswith("LayerNorm.weight"):
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            deviation, spread = parameter.std().item(), 0.03 / math.sqrt(parameter.numel())
            assert deviation == pytest.approx(0.03, abs=4 * spread), name  # spread of a deviation: over sqrt(2 n)
            assert abs(parameter.mean().item()) < 5 * spread, name
        if name.endswith("word_embeddings.weight"):
            assert (parameter[5] == 0).all()
            assert parameter[0].any()


def test_the_first_loss_is_that_of_a_guess() -> None:
    torch.manual_seed(0)
    config = BertConfig(2003, 64, 2, 4, 256, max_position_embeddings=32)
    rows = [(32, [3, 9, 20, 31])] * 32
    batch = make_batch(rows, config)
    facts = facts_of(BertForPreTraining(config).train(), batch)
    assert facts["masked term"].item() / 128 == pytest.approx(math.log(2003), abs=0.1)  # measured 7.61 to 7.65
    assert facts["sentence term"].item() / 32 == pytest.approx(math.log(2), abs=0.1)


# Dropout.


def outputs(config: BertConfig, *, training: bool, seed: int) -> Tensor:
    model, batch = make_model(config).train(training), make_batch(PADDED)
    torch.manual_seed(seed)
    return torch.cat([logits.flatten() for logits in logits_of(model, batch)])


@pytest.mark.parametrize("kind", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
def test_each_dropout_is_active_in_training_and_absent_in_evaluation(kind: str) -> None:
    config = dataclasses.replace(TINY.with_dropout(0.0), **{kind: 0.1})
    assert not torch.allclose(outputs(config, training=True, seed=1), outputs(config, training=True, seed=2))
    assert torch.equal(outputs(config, training=True, seed=1), outputs(config, training=True, seed=1))
    assert torch.equal(outputs(config, training=False, seed=1), outputs(config, training=False, seed=2))


def test_without_dropout_training_computes_what_evaluation_does() -> None:
    config = TINY.with_dropout(0.0)
    assert torch.equal(outputs(config, training=True, seed=1), outputs(config, training=False, seed=2))
    assert not torch.equal(outputs(TINY, training=True, seed=1), outputs(TINY, training=False, seed=2))


def test_with_dropout_sets_both_rates_and_nothing_else() -> None:
    expected = {"hidden_dropout_prob": 0.25, "attention_probs_dropout_prob": 0.25}
    assert dataclasses.asdict(TINY.with_dropout(0.25)) == dataclasses.asdict(TINY) | expected
    assert TINY.hidden_dropout_prob == 0.1
    with pytest.raises(DataError, match=r"hidden_dropout_prob is 1\.5: expected a number from 0 and below 1"):
        TINY.with_dropout(1.5)


# Inputs that do not fit.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": torch.zeros(4, dtype=torch.int64)}, r"input_ids has shape \(4,\), expected \(n, L\)"),
        ({"input_ids": torch.zeros(2, 0, dtype=torch.int64)}, "L of at least 1"),
        (
            {"input_ids": torch.zeros(2, 17, dtype=torch.int64)},
            "17 tokens: expected at most 16.*max_position_embeddings",
        ),
        (
            {"token_type_ids": torch.zeros(1, 9, dtype=torch.int64)},
            r"token_type_ids has shape \(1, 9\), expected \(3, 9\)",
        ),
        ({"attention_mask": torch.ones(3, 1, dtype=torch.bool)}, r"attention_mask has shape \(3, 1\)"),
        ({"attention_mask": torch.ones(3, 9)}, "attention_mask is torch.float32, expected torch.bool"),
        (
            {"masked_positions": torch.zeros(3, 2, dtype=torch.int64)},
            r"masked_positions has shape \(3, 2\), expected \(m,\)",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused_in_words(changes: Batch, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        logits_of(make_model(), make_batch(FULL) | changes)


def test_the_encoder_alone_refuses_them_too() -> None:
    ids = torch.zeros(2, 17, dtype=torch.int64)
    with pytest.raises(ValueError, match="at most 16"):
        BertModel(TINY)(ids, ids, ids.bool())


# The configuration file.

GOOGLE = {
    "attention_probs_dropout_prob": 0.1,
    "directionality": "bidi",
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform",
    "type_vocab_size": 2,
    "vocab_size": 119547,
}
HUGGING_FACE = {
    "architectures": ["BertForPreTraining"],
    "_name_or_path": "bert-base-cased",
    "classifier_dropout": None,
    "gradient_checkpointing": False,
    "id2label": {"0": "no", "1": "yes"},
    "layer_norm_eps": 1e-12,
    "model_type": "bert",
    "output_past": True,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "transformers_version": "4.1.0",
    "use_cache": True,
    "vocab_size": 28996,
}


def write(folder: Path, content: str | bytes | dict[str, Any]) -> Path:
    path = folder / "bert_config.json"
    text = json.dumps(content) if isinstance(content, dict) else content
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        BertConfig.from_json_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "expected" in message.lower()
    return message


def test_files_of_google_and_hugging_face_are_read(tmp_path: Path) -> None:
    assert BertConfig.from_json_file(write(tmp_path, GOOGLE)) == BertConfig(vocab_size=119547)
    assert BertConfig.from_json_file(str(write(tmp_path, HUGGING_FACE))) == BertConfig(vocab_size=28996)


def test_every_key_of_a_file_is_obeyed(tmp_path: Path) -> None:
    other = dataclasses.asdict(BertConfig(60, 32, 3, 4, 48, "relu", 0.2, 0.3, 64, 3, 0.05, 1e-6, 7))
    default = dataclasses.asdict(BertConfig(30522))
    assert all(other[name] != default[name] for name in default)
    assert dataclasses.asdict(BertConfig.from_json_file(write(tmp_path, other))) == other


def test_a_mark_in_front_of_utf_8_is_no_fault(tmp_path: Path) -> None:
    assert (
        BertConfig.from_json_file(write(tmp_path, b"\xef\xbb\xbf" + json.dumps(GOOGLE).encode())).vocab_size == 119547
    )


def test_a_whole_number_for_a_rate_is_the_same_configuration(tmp_path: Path) -> None:
    config = BertConfig.from_json_file(write(tmp_path, {"vocab_size": 9, "hidden_dropout_prob": 0}))
    assert repr(config.hidden_dropout_prob) == "0.0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": "30522"}, 'vocab_size is "30522": expected a whole number from 1 to 2147483647, without'),
        ({"vocab_size": 0}, "vocab_size is 0: expected a whole number from 1"),
        ({"hidden_size": 768.0}, "hidden_size is 768.0: expected a whole number"),
        ({"hidden_size": True}, "hidden_size is true: expected a whole number"),
        ({"hidden_size": None}, "hidden_size is null: expected a whole number"),
        ({"hidden_size": [768]}, "hidden_size is [768]: expected a whole number"),
        ({"intermediate_size": 10**30}, "expected a whole number from 1 to 2147483647"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1: expected a whole number from 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"type_vocab_size": 0}, "type_vocab_size is 0"),
        ({"pad_token_id": 119547}, "pad_token_id is 119547: expected a whole number from 0 to 119546"),
        ({"pad_token_id": -1}, "pad_token_id is -1"),
        ({"num_attention_heads": 7}, "hidden_size 768 cannot be divided among num_attention_heads 7"),
        ({"hidden_dropout_prob": math.nan}, "hidden_dropout_prob is NaN: expected a number from 0 and below 1"),
        ({"hidden_dropout_prob": "0.1"}, 'hidden_dropout_prob is "0.1": expected a number'),
        ({"hidden_dropout_prob": False}, "hidden_dropout_prob is false: expected a number"),
        ({"attention_probs_dropout_prob": 1}, "attention_probs_dropout_prob is 1: expected a number from 0"),
        ({"attention_probs_dropout_prob": -0.1}, "attention_probs_dropout_prob is -0.1"),
        ({"initializer_range": math.inf}, "initializer_range is Infinity: expected a number above 0 and below 1"),
        ({"initializer_range": False}, "initializer_range is false"),
        ({"layer_norm_eps": 1e12}, "layer_norm_eps is 1000000000000.0: expected a number above 0 and below 1"),
        ({"layer_norm_eps": 0}, "layer_norm_eps is 0: expected a number above 0"),
        ({"layer_norm_eps": 10**400}, "...: expected a number above 0 and below 1"),
        ({"hidden_act": "mish"}, 'hidden_act is "mish": expected one of gelu, gelu_new, gelu_pytorch_tanh, relu, silu'),
        ({"hidden_act": ["gelu"]}, 'hidden_act is ["gelu"]: expected one of gelu'),
        ({"hiden_size": 768}, "the key 'hiden_size' is unknown: did you mean hidden_size? Expected keys: vocab_size,"),
        ({"NUM_HIDDEN_LAYER": 768}, "did you mean num_hidden_layers?"),
        ({"Hidden-Size": 768}, "did you mean hidden_size?"),
        ({"quantization_config": {}}, "remove it if the model is the same without it"),
        ({"is_decoder": True}, "is_decoder is true: expected false, or no such key, because it asks for a decoder"),
        ({"position_embedding_type": "relative_key"}, 'is "relative_key": expected "absolute", or no such key'),
        ({"model_type": "roberta"}, 'model_type is "roberta": expected "bert"'),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is false: expected true"),
        ({"add_cross_attention": True}, "a second sequence"),
        ({"is_encoder_decoder": True}, "an encoder beside a decoder"),
        ({"pruned_heads": {"1": [0, 2]}}, "fewer heads"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)  # fmt: skip
def test_a_value_that_no_model_can_have_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert message in refusal(write(tmp_path, GOOGLE | changes))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON (Expecting value: line 1 column 1 (char 0))"),
        (b'{"vocab_size": 30522,}', "is not JSON ("),
        (b"[PAD]\n[unused0]\n", "is not JSON ("),
        (b"{}", 'the key vocab_size is missing: expected the lines of the vocabulary, as in "vocab_size": 30522'),
        (b"[1, 2]", "holds the JSON value is [1, 2]: expected a JSON object"),
        (b"null", "expected a JSON object"),
        (b'"' + b"x" * 500 + b'"', "x...: expected a JSON object"),
        (b'{"vocab_size": 30522, "vocab_size": 30}', "the key 'vocab_size' occurs more than once"),
        ('{"hidden_act": "gelü", "vocab_size": 9}'.encode("latin-1"), "is not UTF-8 (byte 19 is 0xfc)"),
        (json.dumps(GOOGLE).encode("utf-16"), "is not UTF-8 (byte 0 is 0xff)"),
        (json.dumps(GOOGLE).encode("utf-16-le"), "is not JSON ("),
        (b"[" * 100_000, "is not JSON ("),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "is not JSON ("),
        (b" " * (1 << 24) + b"{}", "is longer than 16 MiB"),
    ],
    ids=range(14),
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    assert message in refusal(write(tmp_path, content))


def test_a_file_that_is_not_there_or_not_readable_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "no" / "config.json")
    assert "cannot be read: Is a directory" in refusal(tmp_path)
    path = write(tmp_path, GOOGLE)
    assert "cannot be read: Not a directory" in refusal(path / "config.json")
    assert "cannot be read: File name too long" in refusal(tmp_path / ("x" * 300))
    path.chmod(0)
    if not os.access(path, os.R_OK):  # root may read everything
        assert "cannot be read: Permission denied" in refusal(path)


def test_a_parent_folder_without_permission_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    path = write(tmp_path, GOOGLE)
    for name in ("open", "stat", "exists", "is_file", "read_bytes"):
        monkeypatch.setattr(Path, name, refuse)
    assert "cannot be read: Permission denied; expected a file you may read" in refusal(path)


@pytest.mark.parametrize(
    ("changes", "key", "count"),
    [
        ({"vocab_size": 2**31 - 1}, "vocab_size", 110_106_428 + (2**31 - 1 - 30522) * 769),
        ({"hidden_size": 2**28 * 7, "num_attention_heads": 7}, "hidden_size", None),
        ({"intermediate_size": 2**31 - 1}, "intermediate_size", None),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings", None),
        ({"type_vocab_size": 10**9}, "type_vocab_size", None),
        ({"num_hidden_layers": 10_000}, "num_hidden_layers", None),
        ({"hidden_size": 120_000, "vocab_size": 10**6}, "hidden_size", None),
    ],
    ids=["vocab", "hidden", "intermediate", "positions", "types", "layers", "two"],
)
def test_a_model_that_no_memory_holds_is_refused_with_the_key_that_makes_it_so(
    tmp_path: Path, changes: dict[str, int], key: str, count: int | None
) -> None:
    message = refusal(write(tmp_path, GOOGLE | changes))
    assert f"{key} is {changes[key]}: the model would have " in message
    assert "expected at most 68,719,476,736 parameters" in message
    if count:
        assert f"would have {count:,} parameters" in message


def test_a_model_at_the_bound_is_a_model_and_one_word_more_is_none() -> None:
    words = (2**36 - BertConfig(1).parameters) // 769 + 1
    assert BertConfig(words).parameters <= 2**36
    with pytest.raises(DataError, match="vocab_size is"):
        BertConfig(words + 1)


def test_more_layers_than_anybody_trains_are_refused_however_small() -> None:
    with pytest.raises(DataError, match="num_hidden_layers is 10001: expected a whole number from 1 to 10000"):
        BertConfig(9, 1, 10_001, 1, 1)


def test_a_configuration_made_in_code_is_checked_too() -> None:
    with pytest.raises(DataError, match="vocab_size is"):
        BertConfig(vocab_size=torch.tensor(3))  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        TINY.vocab_size = 4  # type: ignore[misc]


def test_what_is_not_decayed_is_what_the_published_recipes_leave_out_by_name() -> None:
    model = BertForPreTraining(TINY)
    decayed, left_alone = parameter_groups(model, OptimizationConfig(weight_decay=0.01))
    names = {parameter: name for name, parameter in model.named_parameters()}
    by_name = {name for name in names.values() if "bias" in name or "LayerNorm" in name}
    assert {names[parameter] for parameter in left_alone["params"]} == by_name
    assert {names[parameter] for parameter in decayed["params"]} == set(names.values()) - by_name
    assert (decayed["weight_decay"], left_alone["weight_decay"]) == (0.01, 0.0)
