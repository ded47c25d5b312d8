"""The command from text to rows of a causal language model: what lies in the folder, and the same bytes each time."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from hetseq import ConfigError, DataError
from hetseq import config as options
from hetseq.preprocessing import bert_corpus, gpt_corpus
from hetseq.preprocessing.corpus import byte_pairs
from hetseq.preprocessing.corpus.sentences import Document
from hetseq.preprocessing.corpus.text_chunks import Source
from hetseq.task import make_task
from hetseq.tasks.gpt.config import GptConfig
from hetseq.tasks.gpt.task import GptTask
from tests.support.parity import import_transformers
from tests.unit.preprocessing.test_bert_corpus import story

ROOT = Path(__file__).resolve().parents[3]
END = "<|endoftext|>"
# what a careless encoder changes: spaces in a row, blank lines, tabs, signs, another script, an end that is text
ODD = "  Ünï  code\n\n\n\tindented \n中文 — “x”\nthe end is <|endoftext|> here\n"


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(story(120) + ODD + story(20, name="y"))
    return path


def run(folder: Path, *arguments: object) -> int:
    return gpt_corpus.main(["--output", str(folder), *map(str, arguments)])


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def facts_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "corpus.json").read_text())
    return found


def rows_of(folder: Path, split: str) -> list[list[int]]:
    dataset = make_task(GptTask, options.parse(["--task", "gpt", "--data", str(folder)])).load_dataset(split)
    ids, lengths = dataset.rows(range(len(dataset)))  # type: ignore[union-attr]
    return [row[:length].tolist() for row, length in zip(ids, lengths)]


def text_of(folder: Path, split: str) -> str:
    tokens = [token for row in rows_of(folder, split) for token in row]
    return Tokenizer.from_file(str(folder / "tokenizer.json")).decode(tokens, skip_special_tokens=False)


# What it makes


def test_a_folder_has_all_that_training_needs(book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my corpus"
    assert run(folder, "--input", book, "--vocab-size", 400) == 0
    names = ["config.json", "corpus.json", "corpus_test_00000.safetensors", "corpus_train_00000.safetensors"]
    assert sorted(contents(folder)) == [*names, "tokenizer.json"]
    out = capsys.readouterr().out.splitlines()
    command = shlex.split(out[-1])
    assert command[:6] == ["hetseq", "train", "--task", "gpt", "--data", str(folder)]
    assert command[6:8] == ["--valid-subset", "test"]
    config = GptConfig.from_json_file(folder / "config.json")
    assert (config.vocab_size, config.eos_token_id, config.max_position_embeddings) == (400, 0, 128)
    assert config.parameters < 500_000


def test_the_rows_are_the_text_to_the_letter_and_of_equal_length(book: Path, tmp_path: Path) -> None:
    assert (
        run(tmp_path / "out", "--input", book, "--vocab-size", 300, "--max-seq-length", 50, "--rows-per-file", 9) == 0
    )
    text = book.read_text().strip("\n")
    train, test = text_of(tmp_path / "out", "train"), text_of(tmp_path / "out", "test")
    assert train.endswith(END)
    assert test.endswith(END)
    assert train.removesuffix(END) + test.removesuffix(END) == text
    lengths = [len(row) for row in rows_of(tmp_path / "out", "train")]
    assert set(lengths[:-1]) == {50}
    assert 2 <= lengths[-1] <= 50
    # the name of the end, in the text, is text
    assert [token for row in rows_of(tmp_path / "out", "train") for token in row].count(0) == 1
    lines = text.count("\n") + 1
    assert test.count("\n") + 1 == round(lines * 0.05)


def test_rows_go_on_from_one_piece_of_work_to_the_next(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--input", book, "--vocab-size", 300, "--max-seq-length", 10)
    run(tmp_path / "whole", *words)
    monkeypatch.setattr(gpt_corpus, "_ROWS_AT_ONCE", 7)
    run(tmp_path / "pieces", *words)
    assert contents(tmp_path / "whole") == contents(tmp_path / "pieces")
    # a long document is encoded in stretches: other tokens where they meet, the same text
    monkeypatch.setattr(gpt_corpus, "_STRETCH", 100)
    monkeypatch.setattr(gpt_corpus, "_STRETCHES", 300)
    run(tmp_path / "stretches", *words)
    for split in ("train", "test"):
        assert text_of(tmp_path / "stretches", split) == text_of(tmp_path / "whole", split)


def test_a_single_token_is_no_row() -> None:
    def lengths(count: int) -> list[int]:
        batches = list(gpt_corpus._rows(np.arange(count, dtype=np.uint16), 4, lambda _: None))
        return [int(length) for batch in batches for length in batch["ids"].lengths]  # type: ignore[union-attr]

    assert [lengths(count) for count in (2, 4, 5, 6, 8, 9)] == [[2], [4], [4], [4, 2], [4, 4], [4, 4]]


def test_a_file_may_hold_several_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"{END}\none\n{END} \n\ntwo\nof two lines\n{END}\n\n{END}\nthree")
    assert run(tmp_path / "out", "--input", tmp_path / "a.txt", "--test-share", 0) == 0
    assert text_of(tmp_path / "out", "train") == f"one{END}two\nof two lines{END}three{END}"
    assert facts_of(tmp_path / "out")["splits"]["train"]["documents"] == 3


def test_with_a_hundred_documents_whole_ones_are_held_out(tmp_path: Path) -> None:
    (tmp_path / "many.txt").write_text(f"\n{END}\n".join(f"document {n} of\nmany" for n in range(100)))
    assert run(tmp_path / "out", "--input", tmp_path / "many.txt", "--test-share", "0.1") == 0
    halves = [
        set(re.findall(r"document (\d+) of\nmany<", text_of(tmp_path / "out", split))) for split in ("train", "test")
    ]
    assert [len(half) for half in halves] == [90, 10]
    assert halves[0] | halves[1] == {str(number) for number in range(100)}


def test_the_tokenizer_is_trained_on_the_training_part_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(story(200) + "\nXylophone xylophone." * 10)
    for name, share in (("tail", "0.4"), ("none", "0")):
        run(tmp_path / name, "--input", tmp_path / "a.txt", "--vocab-size", 500, "--test-share", share)
    assert "ylophone" not in (tmp_path / "tail" / "tokenizer.json").read_text()
    assert "ylophone" in (tmp_path / "none" / "tokenizer.json").read_text()


def published(path: Path, *, end: str = "</s>") -> Path:
    """A tokenizer of somebody else's, which cuts long texts off, pads short ones and puts a token in front."""
    tokenizer = byte_pairs.train_tokenizer([story(50)], 300)
    tokenizer.add_special_tokens([end, "<s>"])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=20_000)
    content = json.loads(tokenizer.to_str())
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<s>": {"id": "<s>", "ids": [301], "tokens": ["<s>"]}}
    template = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    content["post_processor"] = template
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != END]
    content["model"]["vocab"]["zero"] = content["model"]["vocab"].pop(END)
    path.write_text(json.dumps(content))
    return path


def test_a_published_tokenizer_is_taken_as_it_is(book: Path, tmp_path: Path) -> None:
    file = published(tmp_path / "theirs.json")
    assert run(tmp_path / "out", "--input", book, "--tokenizer", file) == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == file.read_bytes()
    facts = facts_of(tmp_path / "out")
    assert facts["vocabulary"]["from"] == "theirs.json"
    assert facts["end_of_text"] == {"token": "</s>", "id": 300}
    text = book.read_text().strip("\n")
    assert (
        text_of(tmp_path / "out", "train").removesuffix("</s>") == text[: -len(text_of(tmp_path / "out", "test")) + 4]
    )
    assert GptConfig.from_json_file(tmp_path / "out" / "config.json").vocab_size == 302


def test_the_end_of_a_text_may_be_named(book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = published(tmp_path / "theirs.json", end="<stop>")
    words = ("--input", book, "--tokenizer", file)
    assert run(tmp_path / "out", *words) == 2
    assert (
        "has none of the tokens <|endoftext|>, <|end_of_text|>, </s>, <eos>: name the token" in capsys.readouterr().err
    )
    assert run(tmp_path / "out", *words, "--end-of-text", "<halt>") == 2
    assert "--end-of-text <halt>: the tokenizer has no such token" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run(tmp_path / "out", *words, "--end-of-text", "<stop>") == 0
    assert facts_of(tmp_path / "out")["end_of_text"]["id"] == 300


def test_the_facts_are_those_of_the_files(book: Path, tmp_path: Path) -> None:
    run(tmp_path / "out", "--input", book, "--vocab-size", 300, "--max-seq-length", 20)
    facts, sums = facts_of(tmp_path / "out"), contents(tmp_path / "out")
    assert facts["tokenizer"]["sha256"] == sums["tokenizer.json"]
    assert facts["configuration"]["sha256"] == sums["config.json"]
    content = book.read_bytes()
    source = {"name": "book.txt", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert facts["sources"] == [source]
    assert sum(facts["splits"][split]["text_bytes"] for split in ("train", "test")) == len(content.strip(b"\n"))
    for split in ("train", "test"):
        stated, rows = facts["splits"][split], rows_of(tmp_path / "out", split)
        ids, counts = np.unique([token for row in rows for token in row[1:]], return_counts=True)
        shares = counts / counts.sum()
        assert (stated["rows"], stated["longest"]["ids"]) == (len(rows), 20)
        assert stated["predicted_tokens"] == counts.sum()
        assert stated["most_frequent"]["share"] == pytest.approx(shares.max(), abs=1e-6)
        tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
        assert stated["most_frequent"]["token"] == tokenizer.decode([ids[counts.argmax()]])
        assert stated["unigram_entropy"] == pytest.approx(-sum(p * np.log(p) for p in shares), abs=1e-6)


@pytest.mark.slow
def test_transformers_makes_the_same_tokens_of_a_text(tmp_path: Path) -> None:
    text = story(40) + ODD.split("the end")[0]
    (tmp_path / "a.txt").write_text(text)
    assert run(tmp_path / "data", "--input", tmp_path / "a.txt", "--vocab-size", 400, "--test-share", 0) == 0
    task = make_task(GptTask, options.parse(["--task", "gpt", "--data", str(tmp_path / "data")]))
    task.export(task.build_model(), tmp_path / "gpt")
    tokenizer = import_transformers().AutoTokenizer.from_pretrained(tmp_path / "gpt")
    tokens = [token for row in rows_of(tmp_path / "data", "train") for token in row]
    assert [*tokenizer(text.strip("\n"))["input_ids"], tokenizer.eos_token_id] == tokens
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text.strip("\n")


# The same bytes

TRAIN_AGAIN = """
import sys
from hetseq.preprocessing.corpus.byte_pairs import train_tokenizer
sys.stdout.write(train_tokenizer([sys.stdin.read()], 600).to_str())
"""


@pytest.mark.slow
def test_another_process_trains_the_same_tokenizer() -> None:
    # hash maps of the trainer are seeded anew for each map, so that once is a weak test and eight times a strong one
    here = {byte_pairs.train_tokenizer([story(120)], 600).to_str() for _ in range(8)}
    assert len(here) == 1
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    there = subprocess.run(
        [sys.executable, "-c", TRAIN_AGAIN], cwd=ROOT, env=environment, input=story(120).encode(), capture_output=True,
        check=True,
    )  # fmt: skip
    assert there.stdout.decode() == here.pop()


def test_the_same_text_gives_the_same_bytes_wherever_it_lies(tmp_path: Path) -> None:
    found = []
    for place, seed in (("a", 1), ("b/c", 1), ("d", 2)):
        texts = tmp_path / place / "texts"
        texts.mkdir(parents=True)
        for number in range(100):  # so that whole documents are held out, which depend on the seed
            (texts / f"{number:02}.txt").write_text(story(2, name="vwxyz"[number % 5] + "abcdefghij"[number // 10]))
        assert run(tmp_path / place / "out", "--input", texts, "--vocab-size", 300, "--seed", seed) == 0
        found.append(contents(tmp_path / place / "out"))
    assert found[0] == found[1]
    assert {name for name in found[0] if found[0][name] != found[2][name]} >= {
        "corpus.json", "corpus_test_00000.safetensors", "corpus_train_00000.safetensors",
    }  # fmt: skip


# Where it goes


def test_a_corpus_is_replaced_by_another_kind_only_if_asked_for(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("h5py")
    words = ["--output", str(tmp_path / "out"), "--input", str(book), "--vocab-size", "300"]
    assert bert_corpus.main(words) == 0
    before = contents(tmp_path / "out")
    assert gpt_corpus.main(words) == 2
    assert "already holds a corpus (vocab.txt, bert_config.json, corpus.json)" in capsys.readouterr().err
    assert contents(tmp_path / "out") == before
    assert gpt_corpus.main([*words, "--overwrite"]) == 0
    assert sorted(name for name in contents(tmp_path / "out") if "corpus" not in name) == [
        "config.json", "tokenizer.json",
    ]  # fmt: skip
    assert bert_corpus.main([*words, "--overwrite"]) == 0
    assert contents(tmp_path / "out").keys() == before.keys()


def test_what_is_not_of_the_corpus_is_not_lost(book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, words = tmp_path / "out", ("--input", book, "--vocab-size", 300, "--overwrite")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert run(folder, *words) == 2
    assert "config.json belongs to no corpus and would be lost" in capsys.readouterr().err
    (folder / "config.json").unlink()
    assert run(folder, *words) == 0
    (folder / "tokenizer.json").write_text("{}")
    assert run(folder, *words) == 2
    assert "tokenizer.json was changed after its corpus was made" in capsys.readouterr().err
    assert (folder / "tokenizer.json").read_text() == "{}"


def test_without_input_it_is_the_text_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [Document("topic", ["One sentence.", "Another one."]), Document("module", ["A third."])]
    monkeypatch.setattr(gpt_corpus, "python_documents", lambda: (documents, Source("text of Python", 3, "0" * 64)))
    assert run(tmp_path / "out", "--test-share", 0) == 0
    assert text_of(tmp_path / "out", "train") == f"One sentence.\nAnother one.\n{END}A third.\n{END}"


# What is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--vocab-size", 256), "--vocab-size 256: expected at least 257, the bytes and the end of a text"),
        (("--max-seq-length", 1), "--max-seq-length 1: expected at least 2"),
        (("--test-share", 0.6), "--test-share 0.6: expected 0"),
        (("--seed", -1), "--seed -1: expected 0 or more"),
        (("--rows-per-file", 0), "--rows-per-file 0: expected at least 1"),
        (("--tokenizer", "t.json"), "t.json: does not exist: expected the tokenizer of a model in one file"),
        (("--tokenizer", "t.json", "--vocab-size", 300), "--vocab-size 300 applies when a tokenizer is trained"),
        (("--input", "nowhere"), "nowhere does not exist; expected a text file or a folder of *.txt"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[object, ...], message: str
) -> None:
    assert run(tmp_path / "out", "--input", book, *words) == 2
    assert f"error: {message}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_text_and_tokenizers_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    def refused(error: type[Exception], message: str, **given: Any) -> None:
        with pytest.raises(error, match=message):
            gpt_corpus.make_corpus(
                gpt_corpus.Options(**given), tmp_path / "out", say=lambda _: None, track=lambda *_: lambda _: None
            )
        assert not (tmp_path / "out").exists()

    (tmp_path / "ends.txt").write_text(f"{END}\n\n{END}\n")
    refused(DataError, "ends.txt: found only document separators", inputs=(tmp_path / "ends.txt",))
    (tmp_path / "line.txt").write_text("all in one line")
    refused(
        DataError, "line.txt: the test part has 0 tokens, expected at least 2; raise --test-share, or hold nothing out",
        inputs=(tmp_path / "line.txt",),
    )  # fmt: skip
    (tmp_path / "t.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}))
    given = {"inputs": (tmp_path / "line.txt",), "tokenizer_file": tmp_path / "t.json"}
    refused(DataError, "t.json is not a tokenizer that tokenizers can open", **given)
    with pytest.raises(ConfigError):
        gpt_corpus.Options(max_seq_length=0)
