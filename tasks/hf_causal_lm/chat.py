"""Conversations as rows of tokens, of which the answers of the assistant are the targets.

Responsible for the answer tokens and the prompt of each row; the tokenizer's own chat template makes the text. The one
idea: an answer is the text that the template adds to the prompt that the model would have seen, by the template itself.
Where the template marks answers with `{% generation %}`, its marks count.

Some templates change earlier turns once there are later ones: Qwen3 drops what the model thought before. Of such a
conversation every answer is a row of its own, with the earlier turns as they were when it was given, and with the loss
on that answer only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetseq import ConfigError, DataError
from hetseq.tasks.hf_causal_lm.documents import Flags, Ids, Item, Row, TokenRows
from hetseq.tasks.hf_causal_lm.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
Span = tuple[int, int]  # characters begin to end - 1

_ASSISTANT = "assistant"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it
_BATCH = 2 << 20  # characters per call of the tokenizer
_INSTALL = "pip install 'jinja2>=3.1.6'"


class _Rendered:
    """A text of the template, the characters of its answers, and its first characters that are a prompt."""

    def __init__(self, text: str, answers: Sequence[Span], prompt: int) -> None:
        self.text, self.answers, self.prompt = text, answers, prompt


@dataclass
class _Tally:
    """What the log reports about the conversations of a file."""

    conversations: int = 0
    divided: int = 0  # conversations whose answers are rows of their own
    answers: int = 0  # of these
    cut: int = 0  # rows whose end is left out
    dropped: int = 0  # rows that are left out


def rows_of_chats(
    conversations: Iterable[Item], tokenizer: Tokenizer, path: Path, *, max_length: int
) -> tuple[TokenRows, int]:
    """The rows of conversations, and the number of conversations.

    A row that ends without an answer ends with the generation prompt, for `hetseq predict`. The end of a row after
    `max_length` tokens is left out, and the whole row if no answer is left; the log says how many. Raises DataError
    naming file and line for a template that refuses a conversation, and if there is no template.
    """
    template = _Template(tokenizer, path)
    rows: list[Row] = []
    tally = template.tally
    for row in template.rows(conversations):
        fits = len(row.ids) <= max_length
        tally.cut += not fits
        if fits or row.is_target[:max_length].any():
            kept = row.ids[:max_length], row.is_target[:max_length]
            rows.append(Row(*kept, min(row.prompt_length, max_length)))
        else:
            tally.dropped += 1
    if tally.divided:
        logger.info(
            "%s: the chat template changes earlier turns of %d of %d conversations; each of their %d answers is a row"
            " of its own",
            path, tally.divided, tally.conversations, tally.answers,
        )  # fmt: skip
    if tally.cut:
        logger.warning(
            "%s: %d rows are longer than %d tokens: of %d the end is left out, and %d are left out whole, since no"
            " answer begins before; raise --max-length to keep them",
            path, tally.cut, max_length, tally.cut - tally.dropped, tally.dropped,
        )  # fmt: skip
    return TokenRows(rows), tally.conversations


class _Template:
    """The chat template of a tokenizer, applied to the conversations of a file."""

    def __init__(self, tokenizer: Tokenizer, path: Path) -> None:
        self._tokenizer, self._path = tokenizer, path
        self._folder = tokenizer.name_or_path
        self.tally = _Tally()
        if not tokenizer.chat_template:
            raise DataError(
                f"{path} has conversations, but the tokenizer in {self._folder} has no chat template: add a"
                ' chat_template.jinja to the model directory, or give {"text": "..."} lines'
            )
        if not tokenizer.is_fast:
            raise DataError(
                f"{path} has conversations, but the tokenizer in {self._folder} cannot say which characters a token"
                ' has: expected a tokenizer.json; add it, or give {"text": "..."} lines'
            )
        try:
            self._content: str = tokenizer.get_chat_template()
        except ValueError as error:  # several templates, and none is called default
            raise DataError(f"the tokenizer in {self._folder} has no default chat template: {error}") from error
        self._marks_answers = _GENERATION.search(self._content) is not None
        if "strftime_now" in self._content:
            logger.warning(
                "%s: the chat template in %s writes the date of today, so tokens differ from day to day; put a fixed"
                " date into chat_template.jinja",
                path, self._folder,
            )  # fmt: skip

    def rows(self, conversations: Iterable[Item]) -> Iterator[Row]:
        """The rows of all conversations, in order and of any length."""
        held: list[_Rendered] = []
        size = 0
        for line, messages in conversations:
            self.tally.conversations += 1
            texts = [self._marked(line, messages)] if self._marks_answers else self._rendered(line, messages)
            held += texts
            size += sum(len(each.text) for each in texts)
            if size >= _BATCH:
                yield from self._encoded(held)
                held, size = [], 0
        if held:
            yield from self._encoded(held)

    def _marked(self, line: int, messages: Messages) -> _Rendered:
        """The text of a conversation, with the answers that `{% generation %}` marks.

        `apply_chat_template` gives a mask of tokens instead, which ends at an answer that begins with a space where the
        tokenizer trims the characters of a token (transformers 5.23).
        """
        is_answered = messages[-1]["role"] == _ASSISTANT
        with self._refusing(line):
            from transformers.utils.chat_template_utils import render_jinja_template

            (text,), (answers,) = render_jinja_template(
                conversations=[messages], chat_template=self._content, return_assistant_tokens_mask=True,
                add_generation_prompt=not is_answered, **self._tokenizer.special_tokens_map,
            )  # fmt: skip
        return _Rendered(text, answers, answers[-1][0] if is_answered and answers else len(text))

    def _rendered(self, line: int, messages: Messages) -> list[_Rendered]:
        """The texts of a conversation: one, or one for each answer if the template changes earlier turns."""
        texts, answers = [], []
        for at, message in enumerate(messages):
            if message["role"] == _ASSISTANT:
                before, after = self._answer(line, messages, at)
                texts.append(after)
                answers.append((len(before), max(len(before), len(after.rstrip()))))
        is_answered = messages[-1]["role"] == _ASSISTANT
        whole = texts[-1] if is_answered else self._text(line, messages, add_generation_prompt=True)
        if all(whole.startswith(text[:end]) for text, (_, end) in zip(texts, answers)):
            return [_Rendered(whole, answers, answers[-1][0] if is_answered else len(whole))]
        self.tally.divided += 1
        self.tally.answers += len(answers)
        single = [_Rendered(text, [answer], answer[0]) for text, answer in zip(texts, answers)]
        return single if is_answered else [*single, _Rendered(whole, [], len(whole))]

    def _answer(self, line: int, messages: Messages, at: int) -> tuple[str, str]:
        """The prompt of an answer, and the text up to its end, which begins with the prompt."""
        if not at:
            raise DataError(
                f"{self._path}, line {line} begins with an answer: expected a message of another role before it, since"
                " a chat template has no empty prompt; add one, or give a template with {% generation %}"
            )
        before = self._text(line, messages[:at], add_generation_prompt=True)
        after = self._text(line, messages[: at + 1], add_generation_prompt=False)
        if not after.startswith(before):
            raise DataError(
                f"{self._path}, line {line}: the chat template in {self._folder} begins message {at + 1} otherwise than"
                f" its generation prompt, {before[-40:]!r}: expected the same, to find the answer; mark answers with"
                " {% generation %} in the template"
            )
        return before, after

    def _text(self, line: int, messages: Messages, *, add_generation_prompt: bool) -> str:
        with self._refusing(line):
            text: str = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        return text

    @contextmanager
    def _refusing(self, line: int) -> Iterator[None]:
        try:
            yield
        except ImportError as error:
            raise ConfigError(f"{self._path} has conversations, which need jinja2 ({error}): {_INSTALL}") from error
        except Exception as error:  # a template is a program, which raises whatever it wants
            raise DataError(
                f"{self._path}, line {line}: the chat template in {self._folder} refuses the conversation"
                f" ({type(error).__name__}: {error}); correct the line, or the template"
            ) from error

    def _encoded(self, rendered: Sequence[_Rendered]) -> Iterator[Row]:
        """The tokens of each text; a token is part of an answer if any of its characters is."""
        found = self._tokenizer(
            [each.text for each in rendered], add_special_tokens=False, return_offsets_mapping=True,
            return_attention_mask=False, return_token_type_ids=False, verbose=False,
        )  # fmt: skip
        for each, ids, offsets in zip(rendered, found["input_ids"], found["offset_mapping"]):
            begins, ends = np.array(offsets, np.int64).reshape(-1, 2).T  # (tokens,) each
            # some tokenizers give a space the empty span after it; as the end of an answer is no space, none is missed
            is_answer = np.zeros(len(ids), np.bool_)
            for begin, end in each.answers:
                is_answer |= (begins < end) & (ends > begin)
            yield self._row(np.array(ids, np.int32), is_answer, int((ends <= each.prompt).sum()))

    def _row(self, ids: Ids, is_answer: Flags, prompt: int) -> Row:
        if not len(ids):
            raise DataError(
                f"{self._path}: the chat template in {self._folder} makes an empty text of a conversation: expected its"
                " messages; correct the template"
            )
        is_answer[0] = False  # the first token of a row is never predicted
        return Row(ids, is_answer, max(1, prompt))
