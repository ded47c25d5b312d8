"""Rows of text for `--task hf_causal_lm`, against a plain loop over the tokenizer; and refusals."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from hetseq import DataError
from hetseq.tasks.hf_causal_lm import documents as module
from hetseq.tasks.hf_causal_lm.documents import CHATS, TEXTS, TokenRows, read_items, rows_of_texts
from tests.support import causal_lm
from tests.support.causal_lm import make_tokenizer, write_lines
from tests.support.parity import import_transformers


@pytest.fixture(autouse=True, scope="module")
def transformers() -> None:
    import_transformers()


def rows_of(path: Path, tokenizer: Any, max_length: int = 12) -> TokenRows:
    kind, items = read_items(path)
    assert kind == TEXTS
    return rows_of_texts(items, tokenizer, path, max_length=max_length)[0]


def expected_rows(texts: list[str], tokenizer: Any, max_length: int) -> list[list[int]]:
    rows = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        if tokenizer.eos_token_id is not None and ids[-1] != tokenizer.eos_token_id:
            ids = [*ids, tokenizer.eos_token_id]
        rows += [ids[begin : begin + max_length] for begin in range(0, len(ids), max_length)]
    return rows


def write_text(path: Path) -> list[str]:
    """The documents of a file with Windows line ends, a mark, and separators with and without text between them."""
    texts = [text.strip("\n") for text in causal_lm.TEXTS]
    lines = "\n<|endoftext|>\n<|endoftext|>  \n\n".join(texts)
    path.write_bytes(("\ufeff" + lines + "\n<|endoftext|>").replace("\n", "\r\n").encode())
    return texts


@pytest.mark.parametrize("end", ["</s>", None])
@pytest.mark.parametrize("adds", ["", "b", "be"])
def test_rows_are_the_tokens_of_each_document_and_its_end(tmp_path: Path, adds: str, end: str | None) -> None:
    texts, tokenizer = write_text(tmp_path / "train.txt"), make_tokenizer(adds=adds, end=end)
    rows, expected = rows_of(tmp_path / "train.txt", tokenizer), expected_rows(texts, tokenizer, 12)
    assert [row.ids.tolist() for row in rows] == expected
    assert [row.is_target.tolist() for row in rows] == [[False] + [True] * (len(row) - 1) for row in expected]
    assert rows.lengths.tolist() == list(map(len, expected))
    assert len(rows) > 2 * len(texts)
    # all is a prompt but the end of a document
    ends = [row[-1] == tokenizer.eos_token_id for row in expected]
    assert sum(ends) == (3 if end else 0)
    assert rows.prompt_lengths.tolist() == [max(1, len(row) - is_end) for row, is_end in zip(expected, ends)]
    again = pickle.loads(pickle.dumps(rows))
    assert [row.ids.tolist() for row in again] == expected


def test_a_row_with_only_the_end_of_a_document_has_a_prompt_and_no_target(tmp_path: Path) -> None:
    path, tokenizer = write_lines(tmp_path / "train.jsonl", [{"text": "abcd"}]), make_tokenizer()
    size = len(tokenizer("abcd")["input_ids"])
    rows = rows_of(path, tokenizer, max_length=size)
    assert rows.lengths.tolist() == [size, 1]
    assert rows.prompt_lengths.tolist() == [size, 1]
    assert rows.is_target.sum() == size - 1


def test_lines_of_json_are_documents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = ["One text,\nof two lines. <|endoftext|>", "  ", "Another </s> über", ""]
    path = write_lines(tmp_path / "train.jsonl", [{"text": text, "meta": 3} for text in texts])
    path.write_text("\n" + path.read_text(encoding="utf-8") + "\n\n", encoding="utf-8")
    tokenizer = make_tokenizer(adds="b")
    rows = rows_of(path, tokenizer, max_length=64)
    assert [row.ids.tolist() for row in rows] == expected_rows([texts[0], texts[2]], tokenizer, 64)
    assert [record.getMessage() for record in caplog.records] == [f"{path}: 2 of 4 texts are empty and are left out"]


def test_a_long_text_is_encoded_in_stretches_with_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\n".join([*causal_lm.TEXTS, "x" * 90, *causal_lm.TEXTS * 3])
    path = write_lines(tmp_path / "train.jsonl", [{"text": text}, {"text": "short"}, {"text": text}])
    tokenizer = make_tokenizer(adds="be")
    whole = rows_of(path, tokenizer)
    monkeypatch.setattr(module, "_STRETCHES", 100)
    for size in range(20, 60):  # one of them ends within the blank line
        monkeypatch.setattr(module, "_STRETCH", size)
        assert len(list(module._stretches(text))) > 4
        assert "".join(module._stretches(text)) == text
        cut = rows_of(path, tokenizer)
        assert cut.ids.tolist() == whole.ids.tolist()
        assert cut.lengths.tolist() == whole.lengths.tolist()


def test_conversations_are_told_from_texts_by_the_first_line(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    path = write_lines(tmp_path / "chat.jsonl", [{"messages": messages, "text": "both"}, {"messages": messages}])
    kind, items = read_items(path)
    assert kind == CHATS
    assert list(items) == [(1, messages), (2, messages)]


GOOD = '{"text": "good"}\n'
CHAT = '{"messages": [{"role": "user", "content": "Hello"}]}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"train.jsonl is empty \(0 bytes\)"),
        (GOOD + "{'text': 3}", r"line 2 is not JSON \(Expecting property name"),
        (GOOD + "\n" + '["text"]', "line 3 is not a JSON object"),
        (GOOD + '{"body": "x"}', "line 2 has no 'text': it has body; expected one JSON object per line"),
        ('{"body": "x"}', "line 1 has no 'text': it has body"),
        (GOOD + "{}", "line 2 has no 'text': it has nothing"),
        (GOOD + CHAT, "line 2 has 'messages', but line 1 has 'text': expected one kind of"),
        (CHAT + GOOD, "line 2 has 'text', but line 1 has 'messages'"),
        ('{"text": 3}', "line 1: its text is 3: expected a string in quotes"),
        ('{"text": "a\\ud800b"}', r"line 1: its text has the half character \\ud800 at 1: expected both halves"),
        ('{"messages": []}', r"line 1: its messages are \[\]: expected a list of one or more"),
        ('{"messages": "Hello"}', "line 1: its messages are 'Hello': expected a list"),
        ('{"messages": ["Hello"]}', "line 1: message 1 is 'Hello': expected an object with role and content"),
        (CHAT.replace("]", ', {"content": "x"}]'), "line 1: message 2 has no 'role': it has content"),
        ('{"messages": [{"from": "user", "value": "x"}]}', "line 1: message 1 has no 'role': it has from, value"),
        ('{"messages": [{"role": "user", "content": null}]}', "line 1: the content of message 1 is None: expected a"),
        ('{"messages": [{"role": 1, "content": "x"}]}', "line 1: the role of message 1 is 1: expected a string"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_row_is_refused_by_its_number(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        list(read_items(path)[1])


def test_a_text_file_without_a_document_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text("<|endoftext|>\n \n<|endoftext|>\n")
    with pytest.raises(DataError, match=r"train.txt has only <\|endoftext\|> lines: expected text in UTF-8"):
        read_items(path)
    path.write_bytes(b"good\n\xff\n")
    with pytest.raises(DataError, match=r"train.txt, line 2: byte 0xff is not UTF-8"):
        read_items(path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "t"}]}', "line 1 has 'tools'"),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}', "line 1: message 1 has a 'weight'"),
    ],
)
def test_fields_that_change_the_loss_or_the_text_elsewhere_are_refused(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=says):
        list(read_items(path)[1])


def test_a_tokenizer_without_an_end_of_text_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "train.txt"
    path.write_text("The cat sat.")
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    rows = rows_of(path, tokenizer)
    assert rows.ids.tolist() == tokenizer("The cat sat.")["input_ids"]
    assert "the tokenizer has no end of text, so the model does not learn where one ends" in caplog.text
