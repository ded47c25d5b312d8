"""Delayed initialisation: the same numbers in any parts, distributed as without it, and nothing lost in silence."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hetseq.errors import TaskError
from hetseq.parallel.build_record import BuildRecord, put_
from hetseq.parallel.delayed_init import DelayedInit, RefusingNumbers, make_absent_
from hetseq.tasks.bert.heads import BertForTokenClassification
from hetseq.tasks.bert.model import BertConfig, BertForPreTraining
from hetseq.tasks.gpt.model import GptForCausalLM
from tests.support.gpt import LAYOUTS

Build = Callable[[], nn.Module]
WIDE: dict[str, Any] = {"hidden_size": 64, "vocab_size": 80, "intermediate_size": 128}
BERT = BertConfig(
    vocab_size=80, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    max_position_embeddings=64,
)  # fmt: skip


def published(kind: str, **more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    size: dict[str, Any] = {"vocab_size": 80, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, **size, **more)
    else:
        config = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            pad_token_id=0, **size, **more,
        )  # fmt: skip
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


class Tied(nn.Module):
    """A head that is tied to an embedding, and drawn in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(80, 64, padding_idx=3)
        self.head = nn.Linear(64, 80)
        self.head.weight = self.words.weight


class Apart(nn.Module):
    """As `Tied`, with a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(80, 64, padding_idx=3)
        self.head = nn.Linear(64, 80)


class OverDefaults(nn.Module):
    """Changes some of what the constructors have drawn, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.norm = nn.LayerNorm(64)
        self.apply(self._init_weights)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.mul_(0.1)  # of the constructor's numbers
            module.bias[:32] = 1.0


MODELS: dict[str, Build] = {
    "gpt2": lambda: GptForCausalLM(dataclasses.replace(LAYOUTS["gpt2"], **WIDE)),
    "llama": lambda: GptForCausalLM(dataclasses.replace(LAYOUTS["llama"], **WIDE)),
    "bert": lambda: BertForPreTraining(BERT),
    "labels": lambda: BertForTokenClassification(BERT, ("a", "b")),
    "published gpt2": lambda: published("gpt2"),
    "published llama": lambda: published("llama"),
    "published llama, tied": lambda: published("llama", tie_word_embeddings=True),
    "tied": Tied,
    "over defaults": OverDefaults,
    "attention": lambda: nn.TransformerEncoderLayer(64, 4, 128),
    "copied layers": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2),
    "lstm": lambda: nn.Sequential(nn.LSTM(64, 64), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.PReLU()),
}


def built(build: Build, *, initialise: Callable[[nn.Module], bool] | None = None) -> tuple[nn.Module, DelayedInit]:
    record = BuildRecord(getattr(initialise, "__self__", None))
    with record.building():
        model = build()
    return model, DelayedInit(model, record, 7, initialise=initialise)


def drawn(build: Build) -> dict[str, torch.Tensor]:
    """All parameters, drawn at once."""
    model, delayed = built(build)
    delayed.fill(list(model.parameters()))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_is_built_without_memory_for_parameters_and_with_its_buffers(name: str) -> None:
    torch.manual_seed(3)
    plain = MODELS[name]()
    model, _ = built(MODELS[name])
    assert all(parameter.is_meta for parameter in model.parameters())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", list(MODELS))
def test_any_part_of_a_model_is_drawn_with_the_same_bits(name: str) -> None:
    whole = drawn(MODELS[name])
    model, delayed = built(MODELS[name])
    for _, parameter in reversed(list(model.named_parameters())):
        delayed.fill([parameter])
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, whole[key]), key

    model, delayed = built(MODELS[name])  # into memory of another type, in two groups, with gaps
    parameters = list(model.parameters())
    for parameter in parameters:
        put_(parameter, torch.zeros(*parameter.shape, 2, dtype=torch.float64)[..., 0])
    delayed.fill(parameters[1::2])
    delayed.fill(parameters[::2])
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, whole[key].double()), key


@pytest.mark.parametrize("name", list(MODELS))
def test_the_numbers_are_distributed_as_in_plain_building(name: str) -> None:
    torch.manual_seed(3)
    plain, compared = dict(MODELS[name]().named_parameters()), 0
    for key, values in drawn(MODELS[name]).items():
        right = plain[key].detach()
        if right.std(correction=0) == 0:
            assert torch.equal(values, right), key
        elif values.numel() >= 4096:  # of which the standard deviation is known to 1.1 %
            mean, spread, most = (float(found) for found in (values.mean(), values.std(), values.abs().max()))
            assert spread == pytest.approx(float(right.std()), rel=0.05), key
            assert abs(mean) < 0.1 * spread, key
            assert most == pytest.approx(float(right.abs().max()), rel=0.3), key
            compared += 1
    assert compared >= 1


def test_the_seed_and_the_name_of_a_module_decide() -> None:
    values = drawn(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    assert not torch.equal(values["0.weight"], values["1.weight"])
    longer = drawn(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)))
    assert torch.equal(values["1.weight"], longer["1.weight"])
    record = BuildRecord(None)
    with record.building():
        model = nn.Sequential(nn.Linear(8, 8))
    DelayedInit(model, record, 8).fill(list(model.parameters()))
    assert not torch.equal(values["0.weight"], model[0].weight)


def test_a_tied_parameter_has_the_numbers_of_its_first_name() -> None:
    tied, apart = drawn(Tied), drawn(Apart)
    assert list(tied) == ["words.weight", "head.bias"]
    assert torch.equal(tied["words.weight"], apart["words.weight"])
    assert torch.equal(tied["words.weight"][3], torch.zeros(64))
    assert torch.equal(tied["head.bias"], apart["head.bias"])


def test_other_parameters_and_the_generators_stay_as_they_are() -> None:
    model, delayed = built(lambda: nn.Sequential(nn.Linear(8, 8), nn.MultiheadAttention(16, 2)))
    parameters = dict(model.named_parameters())
    bias, projection = parameters["0.bias"], parameters["1.out_proj.weight"]
    put_(bias, torch.full((8,), 5.0))
    make_absent_([projection], torch.device("cpu"))
    before = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["pos"], random.getstate()
    delayed.fill([parameters["0.weight"], parameters["1.in_proj_weight"], parameters["1.out_proj.bias"]])
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state(legacy=False)["state"]["pos"], random.getstate())
    assert torch.equal(bias, torch.full((8,), 5.0))
    assert projection.untyped_storage().size() == 0
    assert parameters["1.in_proj_bias"].is_meta
    assert torch.equal(parameters["1.out_proj.bias"], torch.zeros(16))


def test_what_has_its_type_and_is_on_the_cpu_is_drawn_where_it_is() -> None:
    model, delayed = built(lambda: nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512)))
    memory = torch.empty(sum(parameter.numel() for parameter in model.parameters()))
    at = 0
    for parameter in model.parameters():
        put_(parameter, memory[at : at + parameter.numel()].view(parameter.shape))
        at += parameter.numel()
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        delayed.fill(list(model.parameters()))
    grown = [event.self_cpu_memory_usage for event in profile.events() if event.self_cpu_memory_usage > 0]  # type: ignore[union-attr]
    assert max(grown, default=0) <= 0.01 * memory.nbytes
    assert memory.isfinite().all()


class OwnWay:
    """A task that draws the embeddings itself."""

    answer: Any = True

    def initialise(self, module: nn.Module) -> bool:
        if not isinstance(module, nn.Embedding):
            return False
        self.set(module)
        return self.answer  # type: ignore[no-any-return]

    def set(self, module: nn.Embedding) -> None:
        nn.init.constant_(module.weight, 4.0)


class Half(OwnWay):
    def set(self, module: nn.Embedding) -> None:
        with torch.no_grad():
            module.weight[:3] = 4.0


class Nothing(OwnWay):
    def set(self, module: nn.Embedding) -> None:
        pass


class Wordless(OwnWay):
    answer = None


def test_initialise_of_the_task_comes_first() -> None:
    model, delayed = built(Apart, initialise=OwnWay().initialise)
    delayed.fill(list(model.parameters()))
    values, others = dict(model.named_parameters()), drawn(Apart)
    assert torch.equal(values["words.weight"], torch.full((80, 64), 4.0))
    assert torch.equal(values["head.weight"], others["head.weight"])


def test_initialise_sets_all_or_says_that_it_does_not() -> None:
    with pytest.raises(TaskError, match=r"returned True for words, but leaves words\.weight as it is"):
        built(Apart, initialise=Nothing().initialise)
    with pytest.raises(TaskError, match=r"Wordless\.initialise returned NoneType: expected True"):
        built(Apart, initialise=Wordless().initialise)
    model, delayed = built(Apart, initialise=Half().initialise)
    with pytest.raises(TaskError, match=r"initialise left numbers of words\.weight unset"):
        delayed.fill(list(model.parameters()))


def read_from_a_file() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model.load_state_dict({"0.weight": torch.ones(4, 4), "0.bias": torch.ones(4)})
    return model


def changed_at_the_end() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.view(-1)[3:5] *= 2
    return model


def changed_past_autograd() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    nn.init.zeros_(model[0].bias.data)
    return model


def applied_to_all() -> nn.Module:
    def xavier(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)

    return nn.Sequential(nn.Linear(4, 4)).apply(xavier)


def put_in_its_place() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.randn(4, 4))
    return model


def from_pretrained() -> nn.Module:
    return nn.Sequential(nn.Embedding.from_pretrained(torch.randn(4, 4)))


class Scaled(nn.Module):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(values)


class SetInConstructor(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        nn.init.zeros_(self.weight)


class SetFromAbove(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.5)


@pytest.mark.parametrize(
    ("build", "parameter"),
    [
        (read_from_a_file, "0.weight"),
        (changed_at_the_end, "0.weight"),
        (changed_past_autograd, "0.bias"),
        (applied_to_all, "0.weight"),
        (put_in_its_place, "0.weight"),
        (from_pretrained, "0.weight"),
        (lambda: Scaled(torch.ones(4)), "scale"),
        (SetInConstructor, "weight"),
        (SetFromAbove, "inner.0.weight"),
    ],
)
def test_numbers_that_would_be_lost_are_refused(build: Build, parameter: str) -> None:
    with pytest.raises(TaskError) as caught:
        built(build)
    text = str(caught.value)
    assert f"--delayed-init: {parameter} gets its numbers at test_delayed_init.py:" in text
    assert "set them in initialise(module) of the task, or leave --delayed-init out" in text


def averaged() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("mean", model[0].weight.detach().mean())
    return model


def read_out() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    assert model[0].weight.sum().item() != 0
    return model


def two_in_one_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    return model


def past_register_parameter() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0]._parameters["weight"] = nn.Parameter(torch.ones(4, 4))
    return model


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Scaled(torch.empty(4)), "no function sets scale: Scaled has no reset_parameters()"),
        (averaged, "the buffer mean was computed from parameters"),
        (read_out, "needs numbers of parameters, which are drawn later"),
        (two_in_one_memory, "0.weight and 1.weight are two parameters in the same memory"),
        (past_register_parameter, "0.weight has numbers already"),
    ],
)
def test_a_model_that_cannot_be_delayed_is_refused(build: Build, text: str) -> None:
    with pytest.raises(TaskError) as caught:
        built(build)
    assert text in str(caught.value)


def test_building_leaves_torch_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), BuildRecord(None).building():
        raise ZeroDivisionError
    torch.manual_seed(3)
    assert nn.Linear(4, 4).weight.abs().sum() > 0


def test_an_optimizer_may_read_shapes_and_types_of_absent_parameters_but_no_numbers() -> None:
    model = nn.Linear(4, 4)
    right = torch.optim.Adagrad(model.parameters()).state[model.weight]["sum"].clone()
    make_absent_(list(model.parameters()), torch.device("cpu"))
    with RefusingNumbers(model, "Mine.build_optimizer"):
        optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0)
        torch.optim.AdamW(model.parameters(), fused=True)
    assert torch.equal(optimizer.state[model.weight]["sum"], right)
    with (
        pytest.raises(TaskError, match=r"Mine\.build_optimizer uses the numbers of weight, which have no memory yet"),
        RefusingNumbers(model, "Mine.build_optimizer"),
    ):
        [parameter.detach().clone() for parameter in model.parameters()]
