"""Models of transformers: reading them, freezing them under adapters, and computing some of their logits."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hetseq import ConfigError, DataError
from hetseq.parallel.base_parameters import base_digest, base_parameters
from hetseq.tasks.hf_causal_lm.model import (
    Lora,
    PredictedOnly,
    Setting,
    build,
    hub_name,
    keeps_documents_apart,
    small_keeps_documents_apart,
)
from tests.support.tiny_models import publish

FP64 = Setting(torch.float64)
ADAPTED = Setting(torch.float64, lora=Lora(2, 4.0))
NARROW = Setting(torch.bfloat16, lora=Lora(2, 4.0, ("all-linear",)))
BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4}
MIXTRAL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4,
           "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 64}  # fmt: skip
MAMBA = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
OPT = {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "word_embed_proj_dim": 16,
       "max_position_embeddings": 64}  # fmt: skip
BERT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA2 = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
          "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("models") / "llama")


def ids(*shape: int) -> torch.Tensor:
    return torch.arange(3, 3 + shape[0] * shape[1]).view(shape) % 300


# Weights.


def test_the_weights_are_those_of_the_directory_in_the_type_that_is_wanted(llama: Path) -> None:
    stored = load_file(llama / "model.safetensors")
    for dtype in (torch.float64, torch.bfloat16):
        model = build(llama, Setting(dtype))
        assert model.training
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert all(torch.equal(value, stored[name].to(dtype)) for name, value in model.state_dict().items())


def test_weights_in_several_files_are_the_same(llama: Path, tmp_path: Path) -> None:
    parts = publish(tmp_path / "parts", shard_size="20KB")
    assert len(list(parts.glob("*.safetensors"))) > 2
    one, other = build(llama, FP64).state_dict(), build(parts, FP64).state_dict()
    assert all(torch.equal(one[name], value) for name, value in other.items())


def test_without_weights_they_are_drawn_from_the_seed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = publish(tmp_path / "bare", has_weights=False)
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(build(folder, FP64).state_dict()["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])
    assert f"{folder} has no weights: they are drawn from --seed" in caplog.text


# Adapters.


def test_adapters_alone_are_trained_and_saved_and_the_base_has_16_bits(llama: Path) -> None:
    model = build(llama, Setting(torch.bfloat16, lora=Lora(2, 4.0)))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == set(model.state_dict())
    assert all("lora_" in name for name in trained)
    base = base_parameters(model)
    assert base.pop("lora_factor").item() == 2
    assert {tensor.dtype for tensor in base.values()} == {torch.bfloat16}
    assert {model.state_dict()[name].dtype for name in trained} == {torch.float32}
    assert len(base) == len(load_file(llama / "model.safetensors"))


def test_a_base_that_is_drawn_stays_in_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build(publish(tmp_path / "bare", has_weights=False), ADAPTED)
    assert list(base_parameters(model)) == ["lora_factor"]
    assert "every checkpoint holds it" in caplog.text


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        ((), {"q_proj", "v_proj"}),
        (("up_proj", "k_proj"), {"up_proj", "k_proj"}),
        (("all-linear",), {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
    ids=["default", "given", "all"],
)
def test_targets(targets: tuple[str, ...], modules: set[str], llama: Path) -> None:
    names = build(llama, Setting(torch.float64, lora=Lora(2, 4.0, targets))).state_dict()
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in names} == modules


def test_targets_that_no_module_has_are_refused_even_beside_others(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"--lora-targets q_proj,query: no module of .* is called query; it has"):
        build(llama, Setting(lora=Lora(2, 4.0, ("q_proj", "query"))))


def test_all_linear_goes_alone_and_other_modules_have_no_adapters(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--lora-targets all-linear,lm_head: all-linear goes alone"):
        build(llama, Setting(lora=Lora(2, 4.0, ("all-linear", "lm_head"))))
    with pytest.raises(
        ConfigError, match=r"--lora-targets mlp: peft refuses them \(it has adapters for linear modules .*q_proj"
    ):
        build(llama, Setting(lora=Lora(2, 4.0, ("mlp",))))
    with pytest.raises(
        ConfigError, match=r"all-linear: peft refuses them \(.*Mamba.*\): give names of in_proj, x_proj, "
    ):
        build(publish(tmp_path / "mamba", "mamba", **MAMBA), Setting(lora=Lora(2, 4.0, ("all-linear",))))


def test_the_digest_of_the_base_knows_the_factor_of_the_adapters(llama: Path) -> None:
    digests = {base_digest(build(llama, Setting(lora=Lora(2, alpha)))) for alpha in (4.0, 4.0, 8.0)}
    assert len(digests) == 2


def test_an_architecture_without_default_targets_needs_them(tmp_path: Path) -> None:
    folder = publish(tmp_path / "mamba", "mamba", **MAMBA)
    with pytest.raises(ConfigError, match=r"no default targets for mamba: give --lora-targets, of in_proj, x_proj"):
        build(folder, Setting(lora=Lora(2, 4.0)))
    assert build(folder, Setting(lora=Lora(2, 4.0, ("x_proj",)))).state_dict()


# Documents that share a row.


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [("llama", {}, True), ("gpt2", {}, True), ("gemma2", GEMMA2, True), ("opt", OPT, False), ("mamba", MAMBA, False)],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_whether_a_model_keeps_documents_apart(
    kind: str, fields: dict[str, Any], expected: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = publish(tmp_path / kind, kind, **fields)
    model = build(folder, Setting(dtype))
    state = torch.random.get_rng_state()
    assert keeps_documents_apart(model, folder) is expected
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [("llama", {}, True), ("gpt2", {}, True), ("gemma2", GEMMA2, True), ("opt", OPT, False), ("mamba", MAMBA, False)],
)
def test_a_small_model_shows_whether_the_whole_one_keeps_documents_apart(
    kind: str, fields: dict[str, Any], expected: bool, tmp_path: Path
) -> None:
    folder, state = publish(tmp_path / kind, kind, **fields), torch.random.get_rng_state()
    assert small_keeps_documents_apart(folder, Setting()) is expected
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("setting", [FP64, ADAPTED, NARROW], ids=["fp64", "lora", "bf16 lora"])
def test_a_model_that_looks_ahead_is_refused(setting: Setting, tmp_path: Path) -> None:
    folder = publish(tmp_path / "bert", "bert", **BERT)
    with pytest.raises(DataError, match=r"config\.json: BertLMHeadModel is no causal language model"):
        keeps_documents_apart(build(folder, setting), folder)


@pytest.mark.parametrize("kind", ["bloom", "opt"])
def test_a_leak_that_rounding_to_16_bits_would_hide_is_seen(kind: str, tmp_path: Path) -> None:
    folder = publish(tmp_path / kind, kind, initializer_range=0.02, **(OPT if kind == "opt" else BLOOM))
    model = build(folder, NARROW)
    before = [parameter.clone() for parameter in model.parameters()]
    assert not keeps_documents_apart(model, folder)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert torch.bfloat16 in {parameter.dtype for parameter in model.parameters()}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma", "mixtral"])
def test_rounding_to_16_bits_is_no_leak(kind: str, tmp_path: Path) -> None:
    fields = MIXTRAL if kind == "mixtral" else {}
    folder = publish(tmp_path / kind, kind, initializer_range=0.02, **fields)
    targets = ("q_proj",)
    assert keeps_documents_apart(build(folder, Setting(torch.bfloat16, lora=Lora(2, 4.0, targets))), folder)


def test_experts_that_round_by_the_number_of_their_tokens_are_causal_and_train_in_fp64(tmp_path: Path) -> None:
    folder = publish(tmp_path / "mixtral", "mixtral", initializer_range=0.08, **MIXTRAL)
    for dtype in (torch.float64, torch.float32):
        assert keeps_documents_apart(build(folder, Setting(dtype)), folder)


# Logits.


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2"])
def test_the_head_computes_predicted_tokens_alone_with_the_same_logits(kind: str, tmp_path: Path) -> None:
    model = build(publish(tmp_path / kind, kind, **(GEMMA2 if kind == "gemma2" else {})), FP64).eval()
    tokens, places = ids(3, 8), torch.tensor([1, 2, 6, 9, 20])
    whole = model(input_ids=tokens).logits
    seen: list[tuple[int, ...]] = []
    predicted_only = PredictedOnly(model)
    model.get_output_embeddings().register_forward_pre_hook(lambda _, given: seen.append(tuple(given[0].shape)))
    found = predicted_only.logits(model, tokens, None, places)
    assert torch.allclose(found, whole.flatten(0, 1)[places], rtol=0, atol=1e-14)
    assert seen == [(1, 5, model.config.hidden_size)]
    assert model(input_ids=tokens).logits.shape == whole.shape  # as `generate` calls it
    assert predicted_only.logits(model, tokens, None, places[:0]).shape == (0, 300)


@pytest.mark.parametrize("setting", [FP64, ADAPTED], ids=["all weights", "lora"])
def test_activation_checkpointing_changes_no_bit(setting: Setting, llama: Path) -> None:
    found = []
    for checkpoints in (False, True):
        torch.manual_seed(1)
        chosen = Setting(setting.dtype, 0.2, setting.lora, checkpoints)
        model = build(llama, chosen)
        torch.manual_seed(2)
        loss = PredictedOnly(model).logits(model, ids(2, 8), None, torch.arange(7)).logsumexp(1).sum()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
        found.append([loss.detach(), *gradients])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_dropout_sets_all_rates(tmp_path: Path, llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build(publish(tmp_path / "gpt2", "gpt2"), Setting(dropout=0.3, lora=Lora(2, 4.0)))
    rates = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    assert rates == {0.3}
    assert build(llama, Setting(dropout=0.3)).config.attention_dropout == 0.3
    caplog.set_level(logging.INFO)
    build(publish(tmp_path / "mamba", "mamba", **MAMBA), Setting(dropout=0.3))
    assert "mamba has no dropout of its own" in caplog.text


# Directories that cannot be used.


def changed(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "llamma"}, r"config\.json: transformers 5\S+ does not know this model"),
        ({"model_type": "t5"}, r"config\.json has model_type t5, for which transformers 5\S+ has no causal"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "has a quantization_config"),
        ({"num_hidden_layers": 3}, r"its weights lack model\.layers\.2\.input_layernorm\.weight, .* and 3 more of the"),
        ({"intermediate_size": 48}, "its weights have another shape|transformers cannot read its weights"),
    ],
    ids=["unknown", "not causal", "quantized", "a layer more", "another width"],
)
def test_a_directory_of_another_model_is_refused(fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=says):
        build(changed(publish(tmp_path / "model"), **fields), FP64)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    folder = publish(tmp_path / "model")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"cannot read its weights \(.*\): copy the model again"):
        build(folder, FP64)


def test_tensors_that_the_model_does_not_have_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = publish(tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, "vision.weight": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})
    build(folder, FP64)
    assert "not needed: vision.weight" in caplog.text


def test_the_name_of_a_model_from_the_hub_is_that_of_its_repository(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--Qwen--Qwen2.5-0.5B" / "snapshots" / "0123"
    assert hub_name(folder) == "Qwen/Qwen2.5-0.5B"
    assert hub_name(Path("base")) == "base"


def test_dropout_tells_what_it_cannot_set_and_leaves_out_rates_of_whole_layers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mpt = publish(tmp_path / "mpt", "mpt", d_model=16, n_heads=2, n_layers=1, max_seq_len=64)
    build(mpt, Setting(dropout=0.3))
    assert "--dropout leaves attn_pdrop at 0: " in caplog.text  # transformers takes it for a whole number
    opt = build(publish(tmp_path / "opt", "opt", **OPT), Setting(dropout=0.3)).config
    assert (opt.dropout, opt.layerdrop) == (0.3, 0.0)


def test_stacks_of_experts_without_adapters_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    every = Setting(lora=Lora(2, 4.0, ("all-linear",)))
    build(publish(tmp_path / "llama"), every)
    assert "stacks of experts" not in caplog.text
    experts = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
               "num_key_value_heads": 1, "num_local_experts": 4, "head_dim": 8}  # fmt: skip
    build(publish(tmp_path / "granitemoe", "granitemoe", **experts), every)
    assert "no adapters on " in caplog.text
    assert "stacks of experts' matrices" in caplog.text
