"""Trainings of `--task hf_causal_lm` that record gradients, and the plain loop over transformers and peft beside them.

The loop computes each conversation by itself, without padding and packing, with the chat template's text for tokens and
the marks of ChatML for answers. It shares no code with the task.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from hetseq.comm.group import Group
from hetseq.tasks.hf_causal_lm.task import HfCausalLmTask
from tests.support import toys
from tests.support.tiny_models import END, SENTENCES, START, publish
from tests.support.training import Facts, train

SEED, RATE, BATCH, STEPS = 11, 0.2, 10, 5
SAMPLES = 26  # an epoch ends with 6 of them
RANK, ALPHA = 4, 8.0
ANSWER = f"{START}assistant\n"
Chat = list[dict[str, str]]


class RecordingCausalLm(HfCausalLmTask):
    """Keeps a copy of the gradients that its optimizer is given."""

    def build_optimizer(self, parameter_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return toys.recording(torch.optim.SGD)(parameter_groups, lr=RATE)


def words_of(model: Path, data: Path, *more: str, balance: str = "equal", steps: int = STEPS) -> list[str]:
    """The words of an exact run of this task, on the data in their own order."""
    return [
        "--task", f"{__file__}:RecordingCausalLm", "--model", str(model), "--data", str(data),
        "--curriculum", "1000000",
        "--seed", str(SEED), "--clip-norm", "0", "--lr", str(RATE), "--lr-scheduler", "constant", "--no-save",
        "--disable-validation", "--global-batch-size", str(BATCH), "--batch-size", "4", "--balance", balance,
        "--max-update", str(steps), "--precision", "fp64", *more,
    ]  # fmt: skip


def rank(group: Group, save_dir: str, words: list[str]) -> Facts:
    with gemma_norms_in_double_precision():
        return train(group, save_dir, words)


@contextmanager
def gemma_norms_in_double_precision() -> Iterator[None]:
    """Gemma's RMSNorm of transformers computes in 32 bits whatever it is given, its weight too.

    So the gradient of that weight is a sum over tokens in 32 bits, 9e-9 apart for two orders of the tokens.
    """
    from transformers.models.gemma import modeling_gemma

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)

    with mock.patch.object(modeling_gemma.GemmaRMSNorm, "forward", forward):
        yield


def make_chats(count: int = SAMPLES, *, seed: int = 3) -> list[Chat]:
    """Conversations of one or two questions, of very unequal lengths."""
    draw, pieces = random.Random(seed), " ".join(SENTENCES).split()

    def text(most: int) -> str:
        return " ".join(draw.choice(pieces) for _ in range(draw.randint(1, most)))

    chats: list[Chat] = []
    for at in range(count):
        chat = [{"role": "system", "content": text(2)}] if at % 3 == 0 else []
        for _ in range(1 + at % 2):
            chat += [{"role": "user", "content": text(3)}, {"role": "assistant", "content": text(5)}]
        chats.append(chat)
    return chats


def write_chats(folder: Path, chats: Sequence[Chat], split: str = "train") -> Path:
    """JSONL for the split, in a folder for `--data`."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"messages": chat}) + "\n" for chat in chats)
    (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


def make_model(folder: Path, kind: str) -> Path:
    """A tiny model that takes these conversations whole."""
    return publish(folder, kind, **{"n_positions" if kind == "gpt2" else "max_position_embeddings": 256})


@dataclass
class Curve:
    """Facts of the plain loop; a gradient is flat, matrices before vectors, as the optimizer has them."""

    losses: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    model: Any = None


@gemma_norms_in_double_precision()
def plain_loop(folder: Path, chats: Sequence[Chat], *, has_adapters: bool, steps: int = STEPS) -> Curve:
    """Train with nothing but transformers, peft and torch."""
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if has_adapters:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # between the two libraries
            model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA))
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained.sort(key=lambda parameter: parameter.dim() < 2)
    optimizer, curve = torch.optim.SGD(trained, lr=RATE), Curve(model=model)
    at = 0
    for _ in range(steps):
        batch = chats[at : at + BATCH]
        at = at + BATCH if at + BATCH < len(chats) else 0
        total, count = torch.zeros((), dtype=torch.float64), 0
        for chat in batch:
            ids, is_answer = tokens_of(tokenizer, chat)
            logits = model(input_ids=ids[None]).logits[0, :-1]
            total = total + F.cross_entropy(logits[is_answer[1:]], ids[1:][is_answer[1:]], reduction="sum")
            count += int(is_answer[1:].sum())
        optimizer.zero_grad()
        (total / count).backward()
        curve.losses.append(total.item() / count)
        curve.counts.append(count)
        curve.gradients.append(torch.cat([parameter.grad.flatten() for parameter in trained]).clone())
        optimizer.step()
    return curve


def tokens_of(tokenizer: Any, chat: Chat) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of a conversation in ChatML, (T,), and which belong to an answer or to the mark at its end."""
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    found = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    is_answer = torch.zeros(len(found["input_ids"]), dtype=torch.bool)
    begin = 0
    while (begin := text.find(ANSWER, begin)) >= 0:
        begin += len(ANSWER)
        end = text.index(END, begin) + len(END)
        for at, (first, last) in enumerate(found["offset_mapping"]):
            is_answer[at] |= first >= begin and last <= end and last > first
    return torch.tensor(found["input_ids"]), is_answer
