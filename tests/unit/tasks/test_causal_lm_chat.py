"""Rows of conversations for `--task hf_causal_lm`, against a plain loop over `apply_chat_template`; and refusals."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from hetseq import DataError
from hetseq.tasks.hf_causal_lm import chat as module
from hetseq.tasks.hf_causal_lm.chat import rows_of_chats
from hetseq.tasks.hf_causal_lm.documents import TokenRows
from tests.support.causal_lm import CHATML, LLAMA, MARKED, TEMPLATES, chat, make_tokenizer
from tests.support.parity import import_transformers

PATH = Path("train.jsonl")

#: one turn, several, one with white space at its ends, an answer without content, and one that asks last
CHATS = (
    chat("user: The cat sat?", "assistant: On the mat."),
    chat("user: Hello", "assistant: Hi there,\n\nyou.", "user: Über 9,000 ducks?", "assistant: Zwei – über!"),
    chat("user: One", "assistant: a \n", "user: Two", "assistant:", "user: Three", "assistant: b"),
    chat("user: What came", "assistant: nine ducks", "user: and"),
    chat("user: A question alone"),
)
SYSTEM = chat("system: Be very old.", "user: The dog", "assistant: sat on the log.")


@pytest.fixture(autouse=True, scope="module")
def transformers() -> None:
    import_transformers()


def rows_of(tokenizer: Any, *conversations: Any, max_length: int = 1000) -> TokenRows:
    return rows_of_chats(list(enumerate(conversations, 1)), tokenizer, PATH, max_length=max_length)[0]


def answer(tokenizer: Any, messages: Any, at: int) -> tuple[list[int], list[int]]:
    """The tokens of the prompt of an answer, and of both together, without the white space after the answer."""
    before = tokenizer.apply_chat_template(messages[:at], add_generation_prompt=True, return_dict=False)
    after = tokenizer.apply_chat_template(messages[: at + 1], return_dict=False)
    assert after[: len(before)] == before
    while tokenizer.decode(after[-1]).isspace():
        after.pop()
    return before, after


def plain(tokenizer: Any, messages: Any) -> tuple[list[int], list[int], int]:
    """Tokens, indices of the answer tokens and prompt length of a conversation that is one row."""
    is_answered = messages[-1]["role"] == "assistant"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=not is_answered, return_dict=False)
    targets, prompt = [], len(ids)
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = answer(tokenizer, messages, at)
            assert ids[: len(after)] == after
            targets += range(len(before), len(after))
            prompt = len(before) if is_answered else prompt
    return ids, targets, prompt


def facts(rows: TokenRows) -> list[tuple[list[int], list[int], int]]:
    return [(row.ids.tolist(), row.is_target.nonzero()[0].tolist(), row.prompt_length) for row in rows]


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize("name", ["chatml", "marked", "llama", "gemma"])
def test_the_answers_are_what_the_template_adds_to_the_prompt(
    monkeypatch: pytest.MonkeyPatch, name: str, trims: bool
) -> None:
    tokenizer = make_tokenizer(TEMPLATES[name], trims=trims, adds="b")  # a "<s>" of the template is the only one
    chats = CHATS if name == "gemma" else (*CHATS, SYSTEM)
    rows = rows_of(tokenizer, *chats)
    assert facts(rows) == [plain(tokenizer, messages) for messages in chats]
    ends = {tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")}
    for row, messages in zip(rows, chats):
        answers = sum(message["role"] == "assistant" for message in messages)
        assert sum(int(token) in ends for token in row.ids[row.is_target]) == answers  # the end of an answer is learned
    monkeypatch.setattr(module, "_BATCH", 60)  # characters: the tokenizer is called several times
    assert facts(rows_of(tokenizer, *chats)) == facts(rows)


def test_marks_of_the_template_count_and_are_those_of_transformers() -> None:
    tokenizer = make_tokenizer(MARKED.replace("{{ m.content }}<|im_end|>{% endgen", "{{ m.content }}{% endgen"))
    rows = rows_of(tokenizer, *CHATS[:2])
    for row, messages in zip(rows, CHATS):
        found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert row.ids.tolist() == found["input_ids"]
        assert row.is_target.tolist() == list(map(bool, found["assistant_masks"]))
    assert tokenizer.decode(rows[0].ids[rows[0].is_target]) == "On the mat."
    assert tokenizer.decode(rows[1].ids[: rows[1].prompt_length]).endswith("<|im_start|>assistant\n")


def test_the_first_token_of_a_row_is_never_a_target() -> None:
    template = "{% generation %}{{ messages[0].content }}{% endgeneration %}"
    (row,) = rows_of(make_tokenizer(template), chat("assistant: The cat"))
    assert row.is_target.tolist() == [False] + [True] * (len(row.ids) - 1)
    assert row.prompt_length == 1


@pytest.mark.parametrize("trims", [False, True])
def test_a_token_across_the_beginning_of_an_answer_belongs_to_it_as_in_transformers(trims: bool) -> None:
    messages = chat("user: Hello", "assistant: \n\nYes \n", "user: Two", "assistant: no")
    own, marked = (rows_of(make_tokenizer(template, trims=trims), messages) for template in (CHATML, MARKED))
    assert facts(own) == facts(marked)
    tokenizer = make_tokenizer()
    assert tokenizer.decode(own[0].ids[own[0].is_target]) == "\n\n\nYes \n<|im_end|>no<|im_end|>"


def test_a_space_that_the_tokenizer_does_not_count_belongs_to_the_answer() -> None:
    messages = chat("user: Two", "assistant:  no", "user: Three", "assistant: 3")  # transformers' own mask ends here
    rows = [rows_of(make_tokenizer(CHATML, trims=trims), messages) for trims in (False, True)]
    assert facts(rows[0]) == facts(rows[1])
    assert make_tokenizer().decode(rows[1][0].ids[rows[1][0].is_target]) == " no<|im_end|>3<|im_end|>"


def test_answers_are_rows_of_their_own_where_the_template_changes_earlier_turns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = make_tokenizer(TEMPLATES["thinking"])
    once = chat("user: One", "assistant: a | because")
    thrice = chat("user: One", "assistant: a | hm", "user: Two", "assistant: b", "user: Three", "assistant: c | ha")
    asking = chat("user: One", "assistant: a | hm", "user: Two")
    with caplog.at_level(logging.INFO):
        rows = rows_of(tokenizer, once, thrice, asking)
    expected = []
    for messages in (once, thrice[:2], thrice[:4], thrice, asking[:2]):
        before, after = answer(tokenizer, messages, len(messages) - 1)
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        expected.append((ids, list(range(len(before), len(after))), len(before)))
    last = tokenizer.apply_chat_template(asking, add_generation_prompt=True, return_dict=False)
    assert facts(rows) == [*expected, (last, [], len(last))]
    texts = [tokenizer.decode(row.ids[row.is_target]) for row in rows]
    assert texts[3] == "<think>\nha\n</think>\n\nc<|im_end|>"
    assert "hm" not in tokenizer.decode(rows[3].ids)
    assert [record.getMessage() for record in caplog.records] == [
        "train.jsonl: the chat template changes earlier turns of 2 of 3 conversations; each of their 4 answers is a row"
        " of its own"
    ]


def test_rows_are_cut_and_those_without_an_answer_left_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tokenizer()
    whole = [plain(tokenizer, messages) for messages in CHATS]
    length = whole[3][1][2]  # two tokens of the first answer of the fourth
    rows = rows_of(tokenizer, *CHATS, max_length=length)
    expected = [
        (ids[:length], [at for at in targets if at < length], min(prompt, length))
        for ids, targets, prompt in whole
        if len(ids) <= length or any(at < length for at in targets)
    ]
    assert facts(rows) == expected
    assert 0 < len(rows) < len(CHATS)
    cut = sum(len(ids) > length for ids, _, _ in whole)
    out = len(CHATS) - len(rows)
    assert [record.getMessage() for record in caplog.records] == [
        f"train.jsonl: {cut} rows are longer than {length} tokens: of {cut - out} the end is left out, and {out} are"
        " left out whole, since no answer begins before; raise --max-length to keep them"
    ]


@pytest.mark.parametrize(
    ("template", "conversation", "message"),
    [
        (None, CHATS[0], "train.jsonl has conversations, but the tokenizer in .* has no chat template: add a chat_te"),
        ({"tool_use": CHATML}, CHATS[0], "has no default chat template: .*tool_use"),
        (TEMPLATES["gemma"], SYSTEM, r"train.jsonl, line 2: the chat template .*TemplateError: System role not supp"),
        (TEMPLATES["gemma"], chat("user: a", "user: b"), "line 2: .* Conversation roles must alternate user/assistant"),
        (CHATML.replace("m.role", "m.role + 1"), CHATS[0], r"line 1: .*refuses the conversation \(TypeError: can only"),
        (CHATML + "{% if %}", CHATS[0], r"line 1: .*refuses the conversation \(TemplateSyntaxError: "),
        ("{{ '' }}", CHATS[0], "makes an empty text of a conversation"),
        (CHATML, chat("assistant: Hello", "user: you"), "line 2 begins with an answer: expected a message of another"),
        (CHATML.replace("assistant\n", "assistant\n<think>"), CHATS[0],
         r"line 1: the chat template in .* begins message 2 otherwise than its generation prompt, '.*<think>': expec"),
    ],
)  # fmt: skip
def test_a_template_that_does_not_fit_is_refused(template: Any, conversation: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows_of(make_tokenizer(template), CHATS[0], conversation)


def test_a_template_with_the_date_of_today_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    rows_of(make_tokenizer("{{ strftime_now('%d %b %Y') }}" + LLAMA), CHATS[0])
    assert "writes the date of today, so tokens differ from day to day" in caplog.text


@pytest.mark.parametrize("trims", [False, True])
def test_an_answer_that_begins_with_a_space_hides_no_later_one_of_a_template_with_marks(trims: bool) -> None:
    messages = chat("user: Hello", "assistant:  The cat", "user: Two", "assistant: no")
    assert messages[1]["content"] == " The cat"
    own, marked = (rows_of(make_tokenizer(template, trims=trims), messages) for template in (CHATML, MARKED))
    assert facts(marked) == facts(own)
    assert make_tokenizer().decode(marked[0].ids[marked[0].is_target]).endswith("The cat<|im_end|>no<|im_end|>")
