"""The task `hf_causal_lm`: its sums and counts, continuations, exports, and options that contradict each other."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hetseq import ConfigError
from hetseq import config as options
from hetseq.task import make_task
from hetseq.tasks.hf_causal_lm.task import HfCausalLmTask
from tests.support import causal_runs
from tests.support.tiny_models import publish

CHATS = causal_runs.make_chats(6)
OPT = {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "word_embed_proj_dim": 16,
       "max_position_embeddings": 256}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("causal")
    causal_runs.make_model(folder / "llama", "llama")
    publish(folder / "opt", "opt", **OPT)
    causal_runs.write_chats(folder / "data", CHATS)
    return folder


def make(folder: Path, *more: str, model: str = "llama", data: str = "data") -> HfCausalLmTask:
    words = ["--task", "hf_causal_lm", "--model", str(folder / model), "--data", str(folder / data)]
    config = options.complete(options.parse([*words, "--save-dir", "none", "--precision", "fp64", *more]))
    task = make_task(HfCausalLmTask, config)
    assert isinstance(task, HfCausalLmTask)
    return task


def batch_of(dataset: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = dataset.collater([dataset[at] for at in range(len(dataset))])
    return found


def plain(model: Any, task: HfCausalLmTask) -> tuple[float, int, int]:
    """Nats, right ones and predicted tokens of the conversations, each computed by itself."""
    nats, right, count = 0.0, 0, 0
    for chat in CHATS:
        ids, is_answer = causal_runs.tokens_of(task._tokenizer, chat)
        logits, targets = model(input_ids=ids[None]).logits[0, :-1][is_answer[1:]], ids[1:][is_answer[1:]]
        nats += F.cross_entropy(logits, targets, reduction="sum").item()
        right += int((logits.argmax(1) == targets).sum())
        count += len(targets)
    return nats, right, count


@pytest.mark.parametrize("kind", ["llama", "opt"], ids=["packed", "a row each"])
@torch.no_grad()
def test_loss_count_and_figures_are_those_of_a_plain_loop(kind: str, folder: Path) -> None:
    task = make(folder, model=kind)
    dataset = task.load_dataset("train")
    model = task.build_model().eval()
    batch = batch_of(dataset)
    assert dataset.is_packed is (kind == "llama")
    assert len(batch["input_ids"]) == 6 if kind == "opt" else len(batch["input_ids"]) < 6
    nats, right, count = plain(model, task)
    assert task.count(batch) == {"loss": count}
    assert task.loss(model, batch)["loss"].item() == pytest.approx(nats, rel=1e-12)
    sums = task.metrics(model, batch)
    assert sums["token_accuracy"] == (right, count)
    figures = task.summarise(sums)
    assert figures["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-12)
    assert task.summarise({"token_accuracy": (0.0, 1.0), "perplexity": (1e9, 1.0)})["perplexity"] == math.inf


@torch.no_grad()
def test_a_prediction_is_the_answer_that_the_model_gives_alone(folder: Path) -> None:
    task = make(folder, "--max-new-tokens", "6")
    dataset = task.load_dataset("train")
    model: Any = task.build_model().eval()
    found = [json.loads(line) for line in task.predictions(model, batch_of(dataset))]
    for chat, text in zip(CHATS, found, strict=True):
        prompt = task._tokenizer.apply_chat_template(
            chat[:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        right = model.generate(input_ids=prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert text == task._tokenizer.decode(right[0, prompt.shape[1] :], skip_special_tokens=True)


@torch.no_grad()
def test_settings_that_the_model_was_published_with_do_not_change_a_prediction(folder: Path) -> None:
    task = make(folder, "--max-new-tokens", "6")
    batch = batch_of(task.load_dataset("train"))
    model: Any = task.build_model().eval()
    plain = task.predictions(model, batch)
    for name, value in {"repetition_penalty": 3.0, "num_return_sequences": 2, "return_dict_in_generate": True}.items():
        setattr(model.generation_config, name, value)
    assert task.predictions(model, batch) == plain


@torch.no_grad()
def test_of_a_prompt_that_leaves_no_room_the_last_tokens_count(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = make(folder, "--max-new-tokens", "246")
    dataset = task.load_dataset("train")
    model: Any = task.build_model().eval()
    row = dataset.collater([dataset[0]])
    prompt = row["input_ids"][0, : int(row["prompt_lengths"][0])]
    assert len(prompt) > 10
    right = model.generate(input_ids=prompt[None, -10:], max_new_tokens=246, do_sample=False, pad_token_id=0)[0, 10:]
    text = task._tokenizer.decode(right, skip_special_tokens=True)
    assert [json.loads(line) for line in task.predictions(model, row)] == [text]
    assert caplog.text.count("their last 10 tokens count") == 1
    with pytest.raises(ConfigError, match="--max-new-tokens 256: the model in "):
        make(folder, "--max-new-tokens", "256").predictions(model, row)


# Exports.


def trained(task: HfCausalLmTask) -> Any:
    """A model whose trained weights have changed."""
    torch.manual_seed(4)
    model = task.build_model().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    return model


@torch.no_grad()
def test_an_export_of_all_weights_opens_with_equal_logits(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    task = make(folder)
    model = trained(task)
    ids = torch.arange(3, 40)[None]
    wanted = model(input_ids=ids).logits
    task.export(model, tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert opened.dtype is torch.float64
    assert torch.equal(opened(input_ids=ids).logits, wanted)
    assert opened.config.use_cache
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_template == task._tokenizer.chat_template
    assert tokenizer("A small boat")["input_ids"] == task._tokenizer("A small boat")["input_ids"]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, by peft
@torch.no_grad()
def test_adapters_open_over_their_base_with_equal_logits_and_merged_without_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # merging would leave its thread behind

    task = make(folder, "--lora-rank", "3", "--lora-targets", "q_proj,up_proj")
    model, ids = trained(task), torch.arange(3, 40)[None]
    wanted = model(input_ids=ids).logits
    task.export(model, tmp_path / "adapter")
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert "model.safetensors" not in names
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (3, 6.0)
    assert set(settings["target_modules"]) == {"q_proj", "up_proj"}
    assert settings["base_model_name_or_path"] == str(folder / "llama")
    base = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float64)
    assert not torch.allclose(base(input_ids=ids).logits, wanted)
    opened = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(opened(input_ids=ids).logits, wanted)

    task.export(model, tmp_path / "merged", merge=True)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(whole(input_ids=ids).logits, wanted, rtol=0, atol=1e-13)


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")  # of peft, of the same
@pytest.mark.parametrize(("target", "other"), [("lm_head", "model.embed_tokens"), ("embed_tokens", "lm_head")])
def test_adapters_over_a_weight_that_two_modules_share_are_not_merged(
    target: str, other: str, folder: Path, tmp_path: Path
) -> None:
    publish(tmp_path / "tied", "qwen2")
    task = make(tmp_path, "--data", str(folder / "data"), "--lora-rank", "2", "--lora-targets", target, model="tied")
    with pytest.raises(
        ConfigError, match=rf"adapters on (model\.)?{target}, whose weight the model uses in {other} too"
    ):
        task.export(trained(task), tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


def test_there_is_nothing_to_merge_without_adapters(folder: Path, tmp_path: Path) -> None:
    task = make(folder)
    with pytest.raises(ConfigError, match="--merge: the run has trained all weights and no adapters"):
        task.export(task.build_model(), tmp_path, merge=True)


# Options.


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--lora-alpha", "4"], "--lora-alpha 4.0: without --lora-rank there are no adapters"),
        (["--lora-targets", "q_proj"], "--lora-targets q_proj: without --lora-rank there are no adapters"),
        (["--lora-rank", "0"], "--lora-rank 0: expected 1 or more"),
        (["--lora-rank", "2", "--lora-alpha", "0"], "--lora-alpha 0: expected a number above 0"),
        (["--lora-rank", "2", "--lora-targets", " ,"], "--lora-targets ' ,': expected names such as"),
        (["--max-length", "1"], "--max-length 1: expected 2 or more"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0: expected 1 or more"),
    ],
)
def test_options_that_cannot_be_meant(words: list[str], says: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        make(folder, *words)


def test_rows_longer_than_the_positions_of_the_model_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-length 257: the model in \S+ has 256 positions"):
        make(folder, "--max-length", "257").load_dataset("train")
    assert make(folder, "--max-length", "40").load_dataset("train").length <= 40


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float32), ("fp32", torch.float32)]
)
def test_the_base_has_16_bits_with_bf16_alone_and_only_under_adapters(
    precision: str, dtype: torch.dtype, folder: Path
) -> None:
    adapted = make(folder, "--lora-rank", "2", "--precision", precision).build_model()
    assert {p.dtype for p in adapted.parameters() if not p.requires_grad and p.ndim} == {dtype}
    assert {p.dtype for p in make(folder, "--precision", precision).build_model().parameters()} == {torch.float32}
