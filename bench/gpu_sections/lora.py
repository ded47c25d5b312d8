"""LoRA on a Llama of 1.1 B weights made from its configuration: this device with a rank on the CPU, against it alone.

The base is in bf16 and frozen, so only the gradients of the adapters travel. The CPU is far slower than a GPU and gets
a small share; the step must not take longer for it. On a CPU the model is tiny and speeds are only reported.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_sections.runs import PLAIN, Run, gap, train
from gpu_sections.section import ROOT, Check, Place, holds, within

STEPS, SETTLE = 40, 15  # of a run; before speeds are taken
APART = 1e-2  # nats; products in bf16, in other micro-batches and on another device
COMMON = (
    "--task", "hf_causal_lm", "--lora-rank", 8, "--precision", "bf16", "--optimizer", "adamw", "--lr", 1e-3,
    "--max-update", STEPS, *PLAIN,
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Of the model and of a step: tokens of a row, rows of a step and of a micro-batch."""

    model: dict[str, int]
    length: int
    rows: int
    micro_batch: int


LARGE = Sizes(
    {"vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
     "num_attention_heads": 32, "num_key_value_heads": 8},
    length=256, rows=128, micro_batch=32,
)  # fmt: skip
TINY = Sizes(
    {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
     "num_key_value_heads": 2},
    length=64, rows=16, micro_batch=8,
)  # fmt: skip


def checks(place: Place) -> Iterator[Check]:
    """The curve and the speed of both ranks; the device alone trains before and after, as its clock may drift."""
    sizes = LARGE if place.is_gpu else TINY
    weights = write_model(place, sizes)
    yield Check("model", f"Llama of {weights / 1e6:,.1f} M weights, in bf16")
    words = (
        *COMMON, "--model", place.folder / "model", "--data", write_texts(place, sizes), "--max-length", sizes.length,
        "--global-batch-size", sizes.rows, "--batch-size", sizes.micro_batch,
    )  # fmt: skip
    alone = train(place, "alone", *words, devices=place.devices(1))
    both = train(place, "both", *words, devices=place.devices(1, 1))
    again = train(place, "alone-again", *words, devices=place.devices(1))
    first, last = both.losses[0], both.losses[-1]
    yield holds("the loss falls", last < first - 10 * APART, seen=f"{first:.3f} to {last:.3f}", expected="by 0.1 nats")
    yield within("both against alone, nats", gap(alone, both), APART)
    shares = both.rows[-1]["shares"]
    one, two = statistics.mean([speed(alone), speed(again)]), speed(both)
    figure = f"{two:,.0f} against {one:,.0f} tokens/s, shares {' and '.join(map(str, shares))}"
    if place.is_gpu:
        yield holds("speed of both and of the card alone", two >= one, seen=figure, expected="at least as fast")
    else:
        yield Check("speed of both and of one alone", figure)


def speed(run: Run) -> float:
    """Predicted tokens per second, the median over steps with settled shares."""
    return statistics.median(float(row["counts"]["loss"] / row["seconds"]) for row in run.rows[SETTLE:])


def write_model(place: Place, sizes: Sizes) -> int:
    """The directory `model` of the section, a Llama as published, with a tokenizer of bytes; its number of weights."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    place.begin("the model")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    folder = place.folder / "model"
    config = LlamaConfig(**sizes.model, max_position_embeddings=sizes.length, tie_word_embeddings=False)
    torch.manual_seed(1)
    with torch.device(place.device):
        model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    return sum(weight.numel() for weight in model.parameters())


def write_texts(place: Place, sizes: Sizes) -> Path:
    """A file of texts, each of as many bytes as a row has tokens, from the manual."""
    pages = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md")))
    text = pages.encode("ascii", "ignore").decode("ascii")
    path = place.folder / "texts.jsonl"
    starts = range(0, min(len(text) // sizes.length, 8 * sizes.rows) * sizes.length, sizes.length)
    lines = [json.dumps({"text": text[start : start + sizes.length]}) for start in starts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
