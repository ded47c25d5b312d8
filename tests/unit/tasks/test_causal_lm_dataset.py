"""The data set of `--task hf_causal_lm`: splits, packed batches, records, and tokens that the model lacks."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetseq import ConfigError, DataError, MissingSplitError
from hetseq import config as options
from hetseq.task import collater_of, lengths_of
from hetseq.tasks.gpt.tokenizer import read_tokens
from hetseq.tasks.hf_causal_lm.dataset import CausalRows, load_rows
from hetseq.tasks.hf_causal_lm.documents import Row, TokenRows
from hetseq.tasks.hf_causal_lm.files import CausalLmFiles
from hetseq.tasks.rows.record_index import vocab_digest
from tests.support import gpt_records
from tests.support.causal_lm import CHATML, SIZE, TEXTS, chat, make_tokenizer, write_lines, write_model_folder
from tests.support.gpt_records import TOKENS, make_rows, tokenizer_json
from tests.support.parity import import_transformers

CHATS = (
    chat("user: The cat sat?", "assistant: On the mat."),
    chat("user: Hello", "assistant: Hi there.", "user: Ducks?", "assistant: Nine"),
    chat("user: A question alone"),
)


@pytest.fixture(autouse=True, scope="module")
def transformers() -> None:
    import_transformers()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "model", make_tokenizer())


def load(
    model: Path, data: Path, split: str = "train", *, vocab_size: int = SIZE, max_length: int | None = 64
) -> CausalRows:
    config = options.parse(["--task", "gpt", "--data", str(data)])
    return load_rows(CausalLmFiles(config, str(model)), split, vocab_size=vocab_size, max_length=max_length)


def made_of(lengths: Sequence[int], *, max_length: int | None = None, seed: int = 0) -> CausalRows:
    """Rows of random ids from 1 and random targets, of which the first `length - 1` tokens are a prompt."""
    chance = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        is_target = chance.random(length) < 0.5
        is_target[0] = False
        rows.append(Row(chance.integers(1, 50, length).astype(np.int32), is_target, max(1, length - 1)))
    return CausalRows(TokenRows(rows), [], max_length=max_length)


def segments(batch: dict[str, torch.Tensor]) -> list[list[tuple[int, int]]]:
    """The spans of each row whose positions count from 0."""
    found = []
    for row in batch["position_ids"].tolist():
        begins = [at for at, position in enumerate(row) if position == 0]
        spans = list(zip(begins, [*begins[1:], len(row)]))
        assert row == [at for begin, end in spans for at in range(end - begin)]
        found.append(spans)
    return found


# Batches


def check_samples(dataset: CausalRows, indices: Sequence[int], batch: dict[str, torch.Tensor]) -> None:
    """Each sample is in the batch once, whole, with its own positions and targets, and the rest is padding."""
    assert {(tensor.dtype) for tensor in batch.values()} == {torch.int64}
    ids, width = batch["input_ids"].flatten(), batch["input_ids"].shape[1]
    samples = [dataset[index] for index in indices]
    assert batch["lengths"].tolist() == [len(sample["input_ids"]) for sample in samples]
    assert batch["prompt_lengths"].tolist() == [int(sample["prompt_length"]) for sample in samples]
    spans = [(start, start + length) for start, length in zip(batch["starts"].tolist(), batch["lengths"].tolist())]
    for (start, end), sample in zip(spans, samples):
        assert ids[start:end].tolist() == sample["input_ids"].tolist()
        assert start // width == (end - 1) // width
    known = [row * width + begin for row, spans in enumerate(segments(batch)) for begin, _ in spans]
    assert set(batch["starts"].tolist()) <= set(known)
    assert len(known) - len(spans) <= len(batch["input_ids"])  # at most one stretch of padding in each row
    is_padding = torch.ones(len(ids), dtype=torch.bool)
    for start, end in spans:
        assert is_padding[start:end].all()  # no two samples overlap
        is_padding[start:end] = False
    assert not ids[is_padding].any()
    targets = [int(at) + start for (start, _), sample in zip(spans, samples) for at in sample["target_positions"]]
    assert batch["target_positions"].tolist() == targets


@pytest.mark.parametrize("is_packed", [True, False])
def test_every_sample_is_whole_in_a_batch(is_packed: bool) -> None:
    lengths = np.random.default_rng(1).integers(1, 30, 60).tolist()
    dataset = made_of(lengths)
    assert dataset.is_packed
    dataset.is_packed = is_packed
    for seed in range(20):
        indices = np.random.default_rng(seed).integers(0, 60, 1 + seed).tolist()
        batch = dataset.collater(dataset.__getitems__(indices))
        check_samples(dataset, indices, batch)
        rows, width = batch["input_ids"].shape
        assert width % 8 == 0
        assert width <= dataset.length == 32
        if is_packed:
            used = [
                spans[-1][0] if row[-1] == 0 else spans[-1][1]
                for row, spans in zip(batch["input_ids"], segments(batch))
            ]
            assert width - 8 < max(used) <= width
            # any two rows together have more than one row may have, or first fit would have joined them
            assert all(a + b > 32 for at, a in enumerate(used) for b in used[:at])
        else:
            assert rows == len(indices)
            assert batch["starts"].tolist() == [row * width for row in range(rows)]


def test_first_fit_takes_the_longest_first_and_keeps_the_order_of_equal_ones() -> None:
    dataset = made_of([3, 9, 5, 9, 6, 1, 16], max_length=16)
    batch = dataset.collater(dataset.__getitems__(range(7)))
    # rows: the 16; the first 9, then 6 and 1; the second 9, then 5; the 3 fits in no earlier row
    assert batch["input_ids"].shape == (4, 16)
    assert batch["starts"].tolist() == [3 * 16, 16, 2 * 16 + 9, 2 * 16, 16 + 9, 16 + 15, 0]
    assert segments(batch) == [[(0, 16)], [(0, 9), (9, 15), (15, 16)], [(0, 9), (9, 14), (14, 16)], [(0, 3), (3, 16)]]


def test_rows_are_multiples_of_eight_as_far_as_they_may_be() -> None:
    assert [made_of([5, 21], max_length=most).length for most in (None, 64, 24, 22, 21)] == [24, 24, 24, 22, 21]
    dataset = made_of([5, 21, 2], max_length=22)
    widths = [
        dataset.collater(dataset.__getitems__(wanted))["input_ids"].shape for wanted in ([0], [0, 2], [1], [1, 0])
    ]
    assert widths == [(1, 8), (1, 8), (1, 22), (2, 22)]


def test_a_batch_depends_only_on_its_samples() -> None:
    dataset = made_of(range(1, 30))
    samples = [dataset[index] for index in (28, 3, 3, 17)]
    batch = dataset.collater(samples)
    again = pickle.loads(pickle.dumps(dataset))
    other = collater_of(object(), again)(again.__getitems__([28, 3, 3, 17]))
    assert batch.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in batch.items())
    assert dataset.collater([])["input_ids"].shape == (0, 0)
    assert lengths_of(dataset)(np.arange(4)).tolist() == [1, 2, 3, 4]
    with pytest.raises(IndexError):
        dataset[29]


# Splits


def test_texts_and_chats_are_loaded_with_a_line_that_counts_them(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data").mkdir()
    text, chats = tmp_path / "data" / "train.txt", write_lines(
        tmp_path / "data" / "dev.jsonl", [{"messages": messages} for messages in CHATS]
    )  # fmt: skip
    text.write_text("\n<|endoftext|>\n".join(TEXTS), encoding="utf-8")
    with caplog.at_level(logging.INFO, logger="hetseq"):
        train, valid = (load(model, tmp_path / "data", split, max_length=48) for split in ("train", "valid"))
    tokens = [int(dataset.lengths.sum()) for dataset in (train, valid)]
    targets = [sum(len(dataset[at]["target_positions"]) for at in range(len(dataset))) for dataset in (train, valid)]
    assert targets[0] == tokens[0] - len(train)
    assert 0 < targets[1] < tokens[1] - len(valid)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("hetseq")] == [
        f"train: {len(train)} rows of 3 documents from {text}, {targets[0]} of {tokens[0]} tokens predicted",
        f"valid: 3 rows of 3 conversations from {chats}, {targets[1]} of {tokens[1]} tokens predicted",
    ]
    beside = [model / name for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")]
    assert (train.files, valid.files) == ([text, *beside], [chats, *beside])
    digest = vocab_digest(read_tokens(model / "tokenizer.json"))
    assert train.vocabulary_digest == valid.vocabulary_digest == digest
    assert len(valid[2]["target_positions"]) == 0
    assert int(valid[2]["prompt_length"]) == len(valid[2]["input_ids"])
    with pytest.raises(MissingSplitError, match="no file for the split 'test'"):
        load(model, tmp_path / "data", "test")


def test_a_training_split_with_nothing_to_learn_is_refused(tmp_path: Path, model: Path) -> None:
    path = write_lines(tmp_path / "data" / "train.jsonl", [{"messages": CHATS[2]}])
    with pytest.raises(
        DataError, match=r"train.jsonl has nothing to learn \(1 conversations, rows of at most 64 tokens\)"
    ):
        load(model, path)
    write_lines(tmp_path / "data" / "prompts.jsonl", [{"messages": CHATS[2]}])
    assert len(load(model, tmp_path / "data", "prompts")) == 1  # for `hetseq predict`
    write_lines(path, [{"text": "  "}])
    with pytest.raises(DataError, match=r"train.jsonl has nothing to learn \(0 documents"):
        load(model, path)
    with pytest.raises(ConfigError, match=r"train.jsonl is cut into rows, .*: give --max-length N"):
        load(model, path, max_length=None)


def test_a_token_that_the_model_does_not_have_is_named(tmp_path: Path, model: Path) -> None:
    tokenizer: Any = make_tokenizer(CHATML)
    tokenizer.add_tokens(["<|new|>"])
    write_model_folder(model, tokenizer)
    number = tokenizer.convert_tokens_to_ids("<|new|>")
    path = write_lines(tmp_path / "train.jsonl", [{"text": "Here is <|new|>."}])
    assert len(load(model, path, vocab_size=number + 1)) == 1
    expected = (
        rf"model gives the token '<\|new\|>' the id {number}, but vocab_size in .*config.json is {number}: expected"
    )
    with pytest.raises(DataError, match=expected):
        load(model, path, vocab_size=number)


def test_a_tokenizer_that_does_not_open_is_refused(tmp_path: Path, model: Path) -> None:
    path = write_lines(tmp_path / "train.jsonl", [{"text": "Hello"}])
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(
        DataError, match=r"transformers cannot open the tokenizer in .*model \(.*\): expected the tokeni"
    ):
        load(model, path)


# Records


def test_records_are_rows_of_which_every_token_but_the_first_is_predicted(tmp_path: Path) -> None:
    rows = make_rows(30, bare=range(3, 6))
    data = gpt_records.write_folder(tmp_path / "records", train=rows, rows_per_file=12)
    model = write_model_folder(tmp_path / "model")
    for max_length in (None, 14, 64):
        dataset = load(model, data, vocab_size=len(TOKENS), max_length=max_length)
        assert (len(dataset), dataset.length) == (30, 14 if max_length == 14 else 16)
        assert dataset.lengths.tolist() == list(map(len, rows))
        indices = [29, 3, 3, 20, 0, 11, 12]
        batch = dataset.collater(dataset.__getitems__(indices))
        check_samples(dataset, indices, batch)
        assert len(batch["target_positions"]) == sum(len(rows[index]) - 1 for index in indices)
        assert batch["prompt_lengths"].tolist() == [len(rows[index]) for index in indices]
        assert [dataset[index]["input_ids"].tolist() for index in indices] == [rows[index] for index in indices]
    assert dataset.vocabulary_digest == vocab_digest(TOKENS)
    assert [path.name for path in dataset.files] == ["corpus.json", *(f"train_0000{n}.safetensors" for n in range(3))]
    with pytest.raises(DataError, match=r"rows of up to 14 tokens in train, but a row may have 13, by --max-length or"):
        load(model, data, max_length=13)
    with pytest.raises(DataError, match=r"has ids of 53 tokens, but .*config.json has vocab_size 52"):
        load(model, data, vocab_size=52)


def test_rows_of_one_length_have_lengths_too(tmp_path: Path) -> None:
    rows = [row for row in make_rows(300) if len(row) == gpt_records.LENGTH][:5]
    data = gpt_records.write_folder(tmp_path / "records", train=rows, is_ragged=False)
    dataset = load(write_model_folder(tmp_path / "model"), data, vocab_size=len(TOKENS))
    assert dataset.lengths.tolist() == [gpt_records.LENGTH] * 5
    check_samples(dataset, [4, 0], dataset.collater(dataset.__getitems__([4, 0])))


def test_records_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    data = gpt_records.write_folder(tmp_path / "records", train=make_rows(5))
    model = write_model_folder(tmp_path / "model")
    for tokens in (TOKENS, [*TOKENS[:-1], "other"]):
        (model / "tokenizer.json").write_text(json.dumps(tokenizer_json(tokens)))
        if tokens is TOKENS:
            assert load(model, data, vocab_size=len(TOKENS)).files[-1] == model / "tokenizer.json"
        else:
            with pytest.raises(
                DataError, match=r"corpus.json was made with another vocabulary .* than .*tokenizer.json"
            ):
                load(model, data, vocab_size=len(TOKENS))
