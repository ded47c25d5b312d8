"""Small tokenizers with a chat template, model directories without weights, and chats in the shapes of templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Splits
from tokenizers.processors import ByteLevel as TrimSpaces
from tokenizers.processors import Sequence as Steps
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
SIZE = 340

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: marks the answers, with their end but without the line end after it
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
#: as Qwen3: the thoughts of an answer disappear once there is a later question
THINKING = (
    "{% set last = namespace(user=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > last.user %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "marked": MARKED, "llama": LLAMA, "gemma": GEMMA, "thinking": THINKING}

TEXTS = (
    "The cat sat on the mat.\nThe dog sat on the log.\n",
    "A long time ago there was a cat, a dog and a very old log;\n\n  nine ducks came and went.",
    "Zwei Enten schwimmen über den See – über 9,000 of them!",
)


def make_tokenizer(
    template: str | None = CHATML, *, adds: str = "", end: str | None = "</s>", trims: bool = False
) -> Any:
    """A byte-level tokenizer of `SIZE` tokens or fewer, as transformers opens it.

    It adds "<s>" before a text if `adds` is "b", and "</s>" after it too if it is "be". `trims`: the characters of a
    token are given without the spaces at its ends.
    """
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(BPE())
    # as with Llama 3, line ends in a row are one word, whatever follows them
    words = Split(Regex(r"\n+| ?[^\s\p{P}]+| ?\p{P}+|\s"), "isolated")
    inner.pre_tokenizer = Splits([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    inner.decoder = ByteDecoder()
    trainer = BpeTrainer(
        vocab_size=SIZE, show_progress=False, special_tokens=list(SPECIAL), initial_alphabet=ByteLevel.alphabet()
    )
    inner.train_from_iterator([*TEXTS, "user\nassistant\nsystem\nmodel\n<think>\n\n</think>"] * 3, trainer)
    single = f"{'<s> ' if 'b' in adds else ''}$A{' </s>' if 'e' in adds else ''}"
    special = [(token, inner.token_to_id(token)) for token in ("<s>", "</s>")]
    steps: list[Any] = [TrimSpaces(trim_offsets=trims, add_prefix_space=False)]
    inner.post_processor = Steps([*steps, TemplateProcessing(single=single, special_tokens=special)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token=end)
    tokenizer.chat_template = template
    return tokenizer


def write_model_folder(folder: Path, tokenizer: Any = None, **config: Any) -> Path:
    """A model directory with a configuration, the tokenizer if one is given, and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"model_type": "llama", "vocab_size": SIZE, "max_position_embeddings": 64} | config
    (folder / "config.json").write_text(json.dumps(content))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def chat(*turns: str) -> list[dict[str, str]]:
    """Messages from turns such as "user: Hello" and "assistant: Hi | with thoughts"."""
    messages = []
    for turn in turns:
        role, _, content = turn.partition(": ")
        content, _, thought = content.partition(" | ")
        messages.append({"role": role, "content": content} | ({"reasoning_content": thought} if thought else {}))
    return messages


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    """A JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path
