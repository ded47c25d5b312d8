"""The command that makes a corpus, here of HDF5: what is in the folder afterwards, and that nothing is if it fails."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetseq import ConfigError, DataError
from hetseq.preprocessing import bert_corpus
from hetseq.preprocessing.bert import build as bert_building
from hetseq.preprocessing.bert import hdf5 as bert_hdf5
from hetseq.preprocessing.bert import jobs as bert_pieces
from hetseq.preprocessing.bert import pairs as bert_pairs
from hetseq.preprocessing.corpus import atomic_folder as corpus_folder
from hetseq.preprocessing.corpus import work_units as pieces
from hetseq.preprocessing.corpus.sentences import Document
from hetseq.preprocessing.corpus.text_chunks import Source
from tests.support.corpora import contents, marks, restored, rows_of, story, write_vocab

h5py = pytest.importorskip("h5py")

ROOT = Path(__file__).resolve().parents[3]
LAYOUT = {
    "input_ids": np.uint16,
    "input_mask": np.int8,
    "segment_ids": np.int8,
    "masked_lm_positions": np.int16,
    "masked_lm_ids": np.uint16,
    "next_sentence_labels": np.int8,
}


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """Short, for what does not depend on its length."""
    path = tmp_path / "book.txt"
    path.write_text(story(100))
    return path


@pytest.fixture
def long_book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(story(400))
    return path


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    return write_vocab(tmp_path / "my-vocab.txt")


def run(folder: Path, *arguments: object) -> int:
    return bert_corpus.main(
        ["--output", str(folder), "--output-format", "hdf5", "--processes", "1", *map(str, arguments)]
    )


def facts_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "corpus.json").read_text())
    return found


def words_of(folder: Path, split: str) -> set[str]:
    """The whole words of the rows of a split."""
    tokens = (folder / "vocab.txt").read_text().split("\n")
    return {
        word
        for row in restored(rows_of(folder, split))
        for word in " ".join(tokens[number] for number in row).replace(" ##", "").split()
    }


# What it makes


def test_a_folder_has_all_that_training_needs(book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my corpus"
    assert run(folder, "--input", book, "--vocab-size", 300) == 0
    assert set(contents(folder)) == {
        "bert_config.json", "corpus.json", "corpus_test_0.hdf5", "corpus_train_0.hdf5", "vocab.txt",
    }  # fmt: skip
    out = capsys.readouterr().out.splitlines()
    command = shlex.split(out[-1])
    assert command[:6] == ["hetseq", "train", "--task", "bert", "--data", str(folder)]
    assert command[6:8] == ["--valid-subset", "test"]
    assert "text: 1 document, 100 sentences" in out
    model = json.loads((folder / "bert_config.json").read_text())
    assert model["vocab_size"] == len((folder / "vocab.txt").read_text().splitlines()) <= 300
    assert model["pad_token_id"] == 0
    assert model["hidden_size"] % model["num_attention_heads"] == 0
    assert model["max_position_embeddings"] == 128


def test_the_files_are_plain_contiguous_hdf5_of_small_integers(book: Path, vocab: Path, tmp_path: Path) -> None:
    run(tmp_path / "out", "--input", book, "--vocab-file", vocab, "--max-seq-length", 64, "--max-predictions", 7)
    with h5py.File(tmp_path / "out" / "corpus_train_0.hdf5") as file:
        assert {name: file[name].dtype for name in file} == LAYOUT
        count = facts_of(tmp_path / "out")["splits"]["train"]["instances"]
        widths = {name: file[name].shape for name in file}
        assert widths == {
            "input_ids": (count, 64), "input_mask": (count, 64), "segment_ids": (count, 64),
            "masked_lm_positions": (count, 7), "masked_lm_ids": (count, 7), "next_sentence_labels": (count,),
        }  # fmt: skip
        assert all(file[name].chunks is None and file[name].compression is None for name in file)


def test_a_row_can_be_read_as_the_text_it_is_from(long_book: Path, vocab: Path, tmp_path: Path) -> None:
    run(tmp_path / "out", "--input", long_book, "--vocab-file", vocab, "--duplicate", 1)
    tokens = vocab.read_text().split("\n")
    text = " ".join(long_book.read_text().lower().replace(".", " . ").split())
    rows = rows_of(tmp_path / "out", "train")
    complete, places = 0, []
    for ids, mask, segments in zip(restored(rows), rows["input_mask"], rows["segment_ids"]):
        assert tokens[ids[0]] == "[CLS]"
        for segment in (0, 1):
            chosen = [tokens[number] for number in ids[(mask == 1) & (segments == segment)]]
            assert chosen[-1] == "[SEP]"
            # a half may begin within a word
            read = " ".join(chosen[1 - segment : -1]).replace(" ##", "").replace("##", "")
            assert read in text
            complete += read.count(" . ")
            places.append(text.index(read))
    assert complete > len(rows["input_ids"])
    # shuffled: where a row is in the file says nothing about where it is in the text
    assert abs(np.corrcoef(places[::2], np.arange(len(places) // 2))[0, 1]) < 0.2


def test_the_same_text_in_both_splits_is_paired_and_masked_in_two_ways(vocab: Path, tmp_path: Path) -> None:
    (tmp_path / "twice.txt").write_text(story(90) + "\n\n" + story(90))
    run(tmp_path / "out", "--input", tmp_path / "twice.txt", "--vocab-file", vocab, "--test-share", 0.5)
    train, test = (rows_of(tmp_path / "out", split)["input_ids"].tolist() for split in ("train", "test"))
    assert not {tuple(row) for row in train} & {tuple(row) for row in test}


def test_no_sentence_is_trained_and_tested_on(long_book: Path, vocab: Path, tmp_path: Path) -> None:
    run(tmp_path / "out", "--input", long_book, "--vocab-file", vocab, "--test-share", "0.1", "--duplicate", 9)
    train, test = words_of(tmp_path / "out", "train"), words_of(tmp_path / "out", "test")
    every = marks("z", 0, 400)
    assert train & every <= marks("z", 0, 360)
    assert test & every <= marks("z", 360, 400)
    assert len(train & every) > 300
    assert len(test & every) > 30


def test_with_a_hundred_documents_whole_ones_are_held_out(vocab: Path, tmp_path: Path) -> None:
    names = [f"{a}{b}" for a in "vwxyz" for b in "abcdefghijklmnopqrst"]
    text = "\n\n".join(
        story(12, name=name).replace(".\n\n", ". ").replace("\n", " ").replace(". ", ".\n") for name in names
    )
    (tmp_path / "many.txt").write_text(text)
    arguments = ("--input", tmp_path / "many.txt", "--format", "lines", "--vocab-file", vocab, "--test-share", "0.1")
    arguments += ("--duplicate", 1)
    assert run(tmp_path / "out", *arguments) == 0
    splits = facts_of(tmp_path / "out")["splits"]
    assert (splits["train"]["documents"], splits["test"]["documents"]) == (90, 10)
    pattern = re.compile("([v-z][a-t])[ghjmnpqrst]{4}")
    homes = [
        {match[1] for word in words_of(tmp_path / "out", split) if (match := pattern.fullmatch(word))}
        for split in ("train", "test")
    ]
    assert len(homes[0]) == 90
    assert len(homes[1]) == 10
    assert homes[0].isdisjoint(homes[1])


def test_the_vocabulary_is_trained_on_the_training_part_alone(tmp_path: Path) -> None:
    text = story(200) + "Xylophone xylophone. " * 20
    (tmp_path / "a.txt").write_text(text)
    run(tmp_path / "tail", "--input", tmp_path / "a.txt", "--vocab-size", 400, "--test-share", "0.1")
    run(tmp_path / "none", "--input", tmp_path / "a.txt", "--vocab-size", 400, "--test-share", "0")
    assert "xylophone" not in (tmp_path / "tail" / "vocab.txt").read_text().split()
    assert "xylophone" in (tmp_path / "none" / "vocab.txt").read_text().split()


def test_letters_are_kept_as_they_are_if_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(story(200) + "Éva Éva. " * 20)
    arguments = ("--input", tmp_path / "a.txt", "--vocab-size", 400, "--test-share", 0)
    for flag, kept in (("--cased", "Éva"), ("--lower-case", "eva")):
        run(tmp_path / flag[2:], *arguments, flag)
        assert kept in words_of(tmp_path / flag[2:], "train")
        assert facts_of(tmp_path / flag[2:])["vocabulary"]["lower_case"] == (flag == "--lower-case")


def test_a_vocabulary_among_the_texts_is_no_text(book: Path, vocab: Path, tmp_path: Path) -> None:
    (tmp_path / "latin").mkdir()
    run(tmp_path / "latin" / "out", "--input", tmp_path, "--vocab-file", vocab)
    assert [source["name"] for source in facts_of(tmp_path / "latin" / "out")["sources"]] == ["book.txt"]


def test_without_a_share_nothing_is_held_out(
    book: Path, vocab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "out", "--input", book, "--vocab-file", vocab, "--test-share", 0)
    assert facts_of(tmp_path / "out")["files"] == ["corpus_train_0.hdf5"]
    assert "test" not in facts_of(tmp_path / "out")["splits"]
    assert capsys.readouterr().out.splitlines()[-1].count("--disable-validation") == 1


def test_the_outline_of_a_file_reads_as_it_was_written_with_zeros_between() -> None:
    outline = bert_hdf5._Outline()
    for place, part in ((2, b"abcd"), (9, b"xy"), (4, b"CD")):
        assert outline.seek(place) == place
        assert outline.write(memoryview(part)) == len(part)
    assert outline.seek(0, os.SEEK_END) == outline.tell() == outline.size == 11
    outline.seek(3)
    assert outline.read(7) == b"bCD\0\0\0x"
    assert outline.read(7) == b"y"
    assert outline.read(7) == b""


def test_rows_are_spread_over_files_without_changing(long_book: Path, vocab: Path, tmp_path: Path) -> None:
    for name, files in (("one", 1), ("twelve", 12)):
        run(tmp_path / name, "--input", long_book, "--vocab-file", vocab, "--files", files)
    names = facts_of(tmp_path / "twelve")["files"]
    assert names == [*(f"corpus_train_{number:02}.hdf5" for number in range(12)), "corpus_test_0.hdf5"]
    one, twelve = (rows_of(tmp_path / name, "train") for name in ("one", "twelve"))
    assert all(np.array_equal(one[name], twelve[name]) for name in LAYOUT)
    sizes = []
    for name in names[:-1]:
        with h5py.File(tmp_path / "twelve" / name) as file:
            sizes.append(len(file["input_ids"]))
    assert max(sizes) - min(sizes) <= 1


def test_blocks_are_written_one_after_another(
    long_book: Path, vocab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "whole", "--input", long_book, "--vocab-file", vocab)
    monkeypatch.setattr(bert_corpus, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(bert_pieces, "SENTENCES_AT_ONCE", 7)
    run(tmp_path / "pieces", "--input", long_book, "--vocab-file", vocab)
    assert contents(tmp_path / "whole") == contents(tmp_path / "pieces")


def test_a_large_vocabulary_has_wider_ids(book: Path, vocab: Path, tmp_path: Path) -> None:
    tokens = [*(token for token in vocab.read_text().splitlines() if token != "."), "."]  # the last one is in use
    size = 65_536
    assert [bert_hdf5.id_type(count) for count in (size - 1, size)] == [np.uint16, np.uint32]
    large = tmp_path / "large.txt"
    large.write_text("\n".join([*(f"[w{number}]" for number in range(size - len(tokens))), *tokens]))
    assert run(tmp_path / "out", "--input", book, "--vocab-file", large, "--duplicate", 1) == 0
    rows = rows_of(tmp_path / "out", "train")
    assert rows["input_ids"].dtype == rows["masked_lm_ids"].dtype == np.uint32
    assert rows["input_ids"].max() == size - 1
    assert json.loads((tmp_path / "out" / "bert_config.json").read_text())["vocab_size"] == size


@pytest.mark.parametrize(("length", "positions", "predictions"), [(8, 128, 2), (128, 128, 20), (512, 512, 77)])
def test_lengths_fit_the_model_and_the_masks(
    book: Path, vocab: Path, tmp_path: Path, length: int, positions: int, predictions: int
) -> None:
    run(tmp_path / "out", "--input", book, "--vocab-file", vocab, "--max-seq-length", length, "--test-share", "0.3")
    assert json.loads((tmp_path / "out" / "bert_config.json").read_text())["max_position_embeddings"] == positions
    assert rows_of(tmp_path / "out", "train")["masked_lm_ids"].shape[1] == predictions


def test_the_model_is_told_where_the_padding_is(book: Path, vocab: Path, tmp_path: Path) -> None:
    tokens = vocab.read_text().splitlines()
    vocab.write_text("\n".join([*tokens[1:], tokens[0]]))  # [PAD] comes last
    run(tmp_path / "out", "--input", book, "--vocab-file", vocab)
    model = json.loads((tmp_path / "out" / "bert_config.json").read_text())
    assert model["pad_token_id"] == len(tokens) - 1
    rows = rows_of(tmp_path / "out", "train")
    assert set(rows["input_ids"][rows["input_mask"] == 0]) == {model["pad_token_id"]}


def test_a_sentence_without_a_token_is_no_sentence(vocab: Path, tmp_path: Path) -> None:
    documents = [["ba be", "", "\u200b", "bi"], [""], ["bo."]]
    text = pieces.finished(
        tmp_path, "text", lambda folder: bert_pieces.write_sentences(folder, documents, goes_on=False)
    )
    sizes = np.array([4, 1, 1])
    sentences = bert_building.Sentences([text], sizes, kept=sizes)
    encoded = bert_pieces.make_ids(bert_pieces.EncodeJob(tmp_path, 0, text, bert_pieces.Words(vocab, "", True)))
    tokens = vocab.read_text().split()
    ids = bert_pairs.Ids(0, 2, 3, 4, 5, vocab_size=len(tokens))
    chosen = ((encoded, is_chosen, homes) for _, is_chosen, homes in sentences.by_piece("train"))
    corpus = bert_pieces.corpus_of(bert_pieces.make_corpus(tmp_path, "train", chosen, ids, 3), len(tokens))
    assert [tokens[number] for number in corpus.ids] == ["ba", "be", "bi", "bo", "."]
    assert corpus.sentences.tolist() == [0, 2, 3, 5]
    assert corpus.documents.tolist() == [0, 2, 3]


# The facts


def test_the_facts_are_those_of_the_files(long_book: Path, vocab: Path, tmp_path: Path) -> None:
    run(tmp_path / "out", "--input", long_book, "--vocab-file", vocab, "--seed", 3)
    facts = facts_of(tmp_path / "out")
    content = long_book.read_bytes()
    assert facts["sources"] == [
        {"name": "book.txt", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    ]
    assert facts["options"]["seed"] == 3
    assert facts["vocabulary"]["from"] == "my-vocab.txt"
    assert facts["vocabulary"]["sha256"] == hashlib.sha256(vocab.read_bytes()).hexdigest()
    assert (tmp_path / "out" / "vocab.txt").read_bytes() == vocab.read_bytes()
    assert facts["configuration"]["sha256"] == contents(tmp_path / "out")["bert_config.json"]
    assert {"hetseq", "python", "numpy", "tokenizers", "h5py"} <= set(facts["versions"])
    assert sum(facts["splits"][split]["sentences"] for split in ("train", "test")) == 400
    tokens = vocab.read_text().split("\n")
    for split in ("train", "test"):
        rows, stated = rows_of(tmp_path / "out", split), facts["splits"][split]
        masked = rows["masked_lm_ids"][rows["masked_lm_positions"] > 0]
        ids, counts = np.unique(masked, return_counts=True)
        shares = counts / counts.sum()
        assert stated["documents"] == 1
        assert stated["instances"] == len(rows["input_ids"])
        assert stated["random_next"] == rows["next_sentence_labels"].sum()
        assert stated["masked_tokens"] == len(masked)
        assert stated["most_frequent"]["token"] == tokens[ids[counts.argmax()]]
        assert stated["most_frequent"]["share"] == pytest.approx(shares.max(), abs=1e-6)
        assert stated["unigram_entropy"] == pytest.approx(-sum(p * np.log(p) for p in shares), abs=1e-6)
        assert 0 < stated["unigram_entropy"] < np.log(len(tokens))


def test_unknown_words_are_counted_and_told(
    book: Path, vocab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book.write_text(book.read_text().replace(" ba", " ярко"))
    run(tmp_path / "out", "--input", book, "--vocab-file", vocab)
    train = facts_of(tmp_path / "out")["splits"]["train"]
    assert train["unknown_tokens"] > 0.01 * train["tokens"]
    assert f"({train['unknown_tokens'] / train['tokens']:.1%} [UNK])" in capsys.readouterr().out


# The same bytes


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(tmp_path: Path) -> None:
    found = []
    for place, seed in (("a", 1), ("b/c", 1), ("d", 2)):
        # the text lies elsewhere each time: the facts name files, not paths
        texts = tmp_path / place / "texts"
        texts.mkdir(parents=True)
        (texts / "one.txt").write_text(story(150))
        (texts / "two.txt").write_text(story(90, name="y"))
        folder = tmp_path / place / "out"
        assert run(folder, "--input", texts, "--vocab-size", 300, "--seed", seed) == 0
        found.append(contents(folder))
    assert found[0] == found[1]
    assert {name for name in found[0] if found[0][name] != found[2][name]} == {
        "corpus.json", "corpus_test_0.hdf5", "corpus_train_0.hdf5",
    }  # fmt: skip


def test_the_clock_is_in_none_of_the_files(
    book: Path, vocab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "now", "--input", book, "--vocab-file", vocab)
    for name in contents(tmp_path / "now"):
        content = (tmp_path / "now" / name).read_bytes()
        moment = int((tmp_path / "now" / name).stat().st_mtime)
        for second in range(moment - 60, moment + 1):
            assert second.to_bytes(4, "little") not in content


# Where it goes


def test_a_corpus_is_not_overwritten_unless_asked_for(
    book: Path, vocab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    arguments = ("--input", book, "--vocab-file", vocab)
    run(folder, *arguments, "--files", 3)
    (folder / "notes.md").write_text("mine")
    before = contents(folder)
    assert run(folder, *arguments, "--seed", 5) == 2
    assert f"{folder} already holds a corpus (vocab.txt, bert_config.json, corpus.json)" in capsys.readouterr().err
    assert contents(folder) == before
    assert run(folder, *arguments, "--seed", 5, "--overwrite") == 0
    # the files of the old one are gone, for they would be trained on; what is not of a corpus stays
    assert set(contents(folder)) == {
        "bert_config.json", "corpus.json", "corpus_test_0.hdf5", "corpus_train_0.hdf5", "notes.md", "vocab.txt",
    }  # fmt: skip
    assert facts_of(folder)["options"]["seed"] == 5


def test_data_of_somebody_else_is_never_overwritten(
    book: Path, vocab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    arguments = ("--input", book, "--vocab-file", vocab, "--overwrite")
    run(folder, *arguments)
    (folder / "wiki_train.h5").write_bytes(b"x")
    before = contents(folder)
    assert run(folder, *arguments) == 2
    assert "data files that the corpus in its corpus.json does not list" in capsys.readouterr().err
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["vocab.txt", "bert_config.json", "corpus.json"])
@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
def test_a_file_that_was_there_before_any_corpus_is_never_lost(
    book: Path, vocab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, overwrite: tuple[str, ...]
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / name).write_text("{}")
    assert run(folder, "--input", book, "--vocab-file", vocab, *overwrite) == 2
    assert (
        f"{folder / name} belongs to no corpus and would be lost; move it away or give another"
        in capsys.readouterr().err
    )
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(name, "{}")]


@pytest.mark.parametrize("name", ["vocab.txt", "bert_config.json"])
def test_a_file_of_the_corpus_that_was_worked_on_is_not_lost(
    book: Path, vocab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = tmp_path / "out"
    arguments = ("--input", book, "--vocab-file", vocab, "--overwrite")
    run(folder, *arguments)
    genuine = (folder / name).read_text()
    (folder / name).write_text(genuine.replace("2", "3") + "\n")
    before = contents(folder)
    assert run(folder, *arguments) == 2
    assert f"{folder / name} was changed after its corpus was made" in capsys.readouterr().err
    assert contents(folder) == before
    (folder / name).rename(tmp_path / "mine")
    assert run(folder, *arguments) == 0
    assert (folder / name).read_text() == genuine


def test_its_own_vocabulary_may_be_given_when_a_corpus_is_replaced(book: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    run(folder, "--input", book, "--vocab-size", 300)
    before = contents(folder)["vocab.txt"]
    assert run(folder, "--input", book, "--vocab-file", folder / "vocab.txt", "--overwrite") == 0
    assert contents(folder)["vocab.txt"] == before


def test_what_a_killed_run_left_is_removed(book: Path, vocab: Path, tmp_path: Path) -> None:
    stage = tmp_path / "out" / corpus_folder._STAGE
    stage.mkdir(parents=True)
    (stage / "corpus_train_7.hdf5").write_bytes(b"half a file")
    assert run(tmp_path / "out", "--input", book, "--vocab-file", vocab) == 0
    assert not stage.exists()
    assert len(contents(tmp_path / "out")) == 5


def test_the_facts_are_the_last_to_arrive_and_the_first_to_go(
    book: Path, vocab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "out", "--input", book, "--vocab-file", vocab)
    genuine, moved = os.replace, []

    def seen(source: Path, target: Path) -> None:
        moved.append(target.relative_to(tmp_path / "out").as_posix())
        genuine(source, target)

    monkeypatch.setattr(corpus_folder.os, "replace", seen)
    run(tmp_path / "out", "--input", book, "--vocab-file", vocab, "--overwrite")
    assert len(moved) == 10
    assert moved[0] == f"{corpus_folder._STAGE}/previous/corpus.json"
    assert moved[-1] == "corpus.json"


def test_two_at_a_time_in_one_folder_are_refused(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        assert run(tmp_path, "--input", book) == 2
    finally:
        os.close(handle)
    assert "another corpus is being made in it; wait until it ends" in capsys.readouterr().err


# What fails leaves nothing

Fault = Callable[[pytest.MonkeyPatch], None]


def failing(where: Any, name: str, error: BaseException, *, at: int = 1) -> Fault:
    """Lets call number `at` of `where.name` raise `error`."""

    def install(monkeypatch: pytest.MonkeyPatch) -> None:
        genuine, calls = getattr(where, name), iter(range(1, 1000))

        def faulty(*arguments: Any, **words: Any) -> Any:
            if next(calls) == at:
                raise error
            return genuine(*arguments, **words)

        monkeypatch.setattr(where, name, faulty)

    return install


FULL = OSError(errno.ENOSPC, "Can't synchronously write data")
FAULTS = {
    "full disk in the rows": (failing(bert_pairs, "fill", FULL), 2),
    "full disk in a text": (failing(bert_corpus, "_write_text", FULL), 2),
    "full disk at a rename": (failing(corpus_folder.os, "replace", FULL, at=3), 2),
    "Ctrl-C while reading": (failing(bert_building, "scanned", KeyboardInterrupt()), 130),
    "Ctrl-C in the second file": (failing(bert_pairs, "fill", KeyboardInterrupt(), at=2), 130),
    "Ctrl-C at the first rename": (failing(corpus_folder.os, "replace", KeyboardInterrupt()), 130),
    "Ctrl-C at a later rename": (failing(corpus_folder.os, "replace", KeyboardInterrupt(), at=8), 130),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_fault_the_folder_is_as_it_was(
    book: Path, vocab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    fault: str,
) -> None:  # fmt: skip
    install, code = FAULTS[fault]
    arguments = ("--input", book, "--vocab-file", vocab)
    folder = tmp_path / "old"
    run(folder, *arguments)
    before = contents(folder)
    with monkeypatch.context() as patch:
        install(patch)
        assert run(folder, *arguments, "--overwrite", "--seed", 9) == code
    assert contents(folder) == before
    said = capsys.readouterr().err
    # what is finished waits for the same command, and the next corpus that is complete removes it
    is_kept = (folder / corpus_folder._PIECES).exists()
    assert is_kept == ("while reading" not in fault)
    assert is_kept == (f"kept in {folder / corpus_folder._PIECES}: the same command resumes from them" in said)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*[corpus_folder._PIECES] * is_kept, *before])
    assert ("No space left on device; expected a writable folder" in said) == (code == 2)
    assert ("is unchanged" in said) == (code == 130)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if "later" not in fault])
def test_after_a_fault_a_new_folder_is_gone_or_has_nothing_but_what_is_finished(
    book: Path, vocab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    install, code = FAULTS[fault]
    folder = tmp_path / "new" / "deep" / "out"
    with monkeypatch.context() as patch:
        install(patch)
        assert run(folder, "--input", book, "--vocab-file", vocab) == code
    if "while reading" in fault:
        assert not (tmp_path / "new").exists()
        return
    assert [path.name for path in folder.iterdir()] == [corpus_folder._PIECES]
    assert run(folder, "--input", book, "--vocab-file", vocab) == 0
    assert not (folder / corpus_folder._PIECES).exists()


# a limit of the system on the size of a file comes as late as a full disk does
LIMITED = """
import resource, signal, sys
from hetseq.preprocessing import bert_corpus
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for limit in map(int, sys.argv[1].split(",")):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for folder in sys.argv[2:4]:
        sys.stdout.write(f"{bert_corpus.main(['--output', folder, *sys.argv[4:]])}\\n")
"""


def test_a_disk_that_is_full_is_told_and_leaves_nothing(long_book: Path, vocab: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    arguments = ["--input", str(long_book), "--vocab-file", str(vocab), "--duplicate", "1", "--output-format", "hdf5"]
    run(old, *arguments)
    before = contents(old)
    largest = max(path.stat().st_size for path in old.iterdir())
    limits = (0, 600, 40_000, largest - 1)
    assert sorted(limits) == list(limits)
    command = [sys.executable, "-c", LIMITED, ",".join(map(str, limits)), old, new, *arguments, "--overwrite"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line for line in done.stdout.splitlines() if line.isdigit()] == ["2"] * 2 * len(limits)
    said = "error: {} cannot be written: File too large; expected a writable folder with free space"
    told = [line for line in done.stderr.splitlines() if not line.startswith("finished pieces are kept in ")]
    assert told == [said.format(folder) for _ in limits for folder in (old, new)]
    assert contents(old) == before
    assert not (old / corpus_folder._STAGE).exists()
    assert contents(new) == {}


def test_ctrl_c_is_the_signal_of_the_terminal(
    book: Path, vocab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = bert_pairs.fill

    def interrupted(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return genuine(*arguments)

    monkeypatch.setattr(bert_pairs, "fill", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which the jobs of a shell ignore
    try:
        assert run(tmp_path / "out", "--input", book, "--vocab-file", vocab) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert contents(tmp_path / "out") == {}


# Bad input


def bad(tmp_path: Path) -> Iterator[tuple[str, list[object], str]]:
    """Command lines with what is to be said of them."""
    book, vocab = tmp_path / "book.txt", tmp_path / "my-vocab.txt"
    for name, content in {
        "latin.txt": "naïve".encode("latin-1"),
        "empty.txt": b"",
        "stars.txt": b"* * *\n\n- - -\n",
        "short.txt": b"Only one sentence.\n",
        "lonely.txt": b"One a document.\n\nAnother one.\n",
        "few.txt": b"One. Two. Three. Four. Five. Six.",
        "russian.txt": "Да нет. Нет да. Да да. Нет нет.".encode() * 20,
        "no-specials.txt": b"a\nb\n",
        "foreign.txt": b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n",
    }.items():
        (tmp_path / name).write_bytes(content)
    yield "missing file", ["--input", tmp_path / "none.txt"], r"none\.txt does not exist"
    yield "encoding", ["--input", tmp_path / "latin.txt"], r"latin\.txt is not UTF-8: byte 0xef at offset 2; .*iconv"
    yield "empty", ["--input", tmp_path / "empty.txt"], r"empty\.txt has no text"
    yield "no words", ["--input", tmp_path / "stars.txt"], r"stars\.txt: no sentence found; .*--format paragraphs"
    yield (
        "one sentence",
        ["--input", tmp_path / "short.txt", "--vocab-size", 99, "--test-share", 0],
        (r"short\.txt: the train part has 1 sentence in 1 document and no two that follow each other; give more text"),
    )
    yield (
        "no pairs",
        (["--input", tmp_path / "lonely.txt", "--format", "lines", "--vocab-size", 99, "--test-share", 0]),
        r"has 2 sentences in 2 documents and no two .*give the right --format \(now lines\)",
    )
    yield (
        "no test pairs",
        ["--input", tmp_path / "few.txt", "--vocab-size", 99],
        (r"few\.txt: the test part has 0 sentences in 0 documents .*raise --test-share.*--test-share 0"),
    )
    yield (
        "foreign vocabulary",
        ["--input", tmp_path / "russian.txt", "--vocab-file", tmp_path / "foreign.txt"],
        (r"no word of the train part is in .*foreign\.txt; give another"),
    )
    yield (
        "no special tokens",
        ["--input", book, "--vocab-file", tmp_path / "no-specials.txt"],
        r"has 2 lines.* no \[PAD\]",
    )
    yield "missing vocabulary", ["--input", book, "--vocab-file", tmp_path / "none"], "none cannot be read"
    yield (
        "two vocabularies",
        ["--input", book, "--vocab-file", vocab, "--vocab-size", 4096],
        r"--vocab-size 4096 .*my-vocab\.txt.*one of the two",
    )
    yield "long name", ["--input", tmp_path / ("x" * 300)], "x cannot be read: File name too long; expected a text"
    yield (
        "long vocabulary",
        ["--input", book, "--vocab-file", "x" * 300],
        "x cannot be read: File name too long; .*BERT",
    )
    yield "nobody", ["--input", "~nobody-of-that-name/x"], "~nobody-of-that-name/x does not exist"
    yield "small vocabulary", ["--input", book, "--vocab-size", 10], "--vocab-size 10 has no room"
    yield "too many files", ["--input", book, "--vocab-file", vocab, "--files", 9999], "too few for --files 9999"
    yield "format without input", ["--format", "lines"], "--format lines describes the files of --input"
    for flag, values in {
        "--max-seq-length": ("7", "0", "-1"),
        "--max-predictions": ("0", "129", "-3"),
        "--masked-share": ("0", "1", "nan", "-0.1", "15"),
        "--short-sequence-share": ("-0.1", "1.1", "nan"),
        "--test-share": ("-0.1", "0.6", "nan"),
        "--duplicate": ("0",),
        "--files": ("0",),
        "--seed": ("-1",),
        "--vocab-size": ("0",),
    }.items():
        for value in values:
            yield f"{flag} {value}", ["--input", book, f"{flag}={value}"], f"{flag} {float(value):g}.*: expected "


def test_bad_input_is_refused_with_what_to_do_and_nothing_is_left(
    book: Path, vocab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, arguments, complaint in bad(tmp_path):
        code = run(tmp_path / "out", *arguments)
        said = capsys.readouterr().err
        assert (name, code) == (name, 2)
        assert said.startswith("error: ")
        assert re.search(complaint, said), (name, said)
        assert not (tmp_path / "out").exists(), name


def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bert_corpus, "text_of", None)
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        assert run(place, "--input", book) == 2
        assert f"{place} cannot be written: " in capsys.readouterr().err


def hiding(genuine: Callable[..., Any]) -> Callable[..., Any]:
    """A method of paths that may not look at those called "hidden"."""

    def look(path: Path, **words: Any) -> Any:
        if path.name == "hidden":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return genuine(path, **words)

    return look


def test_a_place_that_the_system_hides_is_refused_by_its_name(
    book: Path, vocab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--input", book, "--vocab-file", vocab)
    place = tmp_path / ("x" * 300)
    assert run(place, *arguments) == 2
    assert f"{place} cannot be written: File name too long" in capsys.readouterr().err

    # what is_dir and is_file ask too; up to Python 3.13 they pass this error on
    for name in ("stat", "exists"):
        monkeypatch.setattr(Path, name, hiding(getattr(Path, name)))
    hidden = tmp_path / "hidden"
    assert run(hidden, *arguments) == 2
    assert f"{hidden} cannot be written: Permission denied" in capsys.readouterr().err
    assert run(tmp_path / "out", "--input", hidden) == 2
    assert f"{hidden} cannot be read: Permission denied; expected a text file" in capsys.readouterr().err
    assert run(tmp_path / "out", *arguments[:2], "--vocab-file", hidden) == 2
    assert f"{hidden} cannot be read: Permission denied; expected the vocabulary" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_is_looked_at_before_the_text(book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bert_corpus, "text_of", None)
    assert run(tmp_path / "out", "--input", book, "--vocab-file", tmp_path / "none") == 2


def test_names_that_are_no_utf_8_are_written_out(
    book: Path, vocab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = [
        path.rename(os.fsdecode(os.fsencode(path.parent / stem) + b"\xe9.txt"))
        for path, stem in ((book, "b"), (vocab, "v"))
    ]
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    assert run(folder, "--input", odd[0], "--vocab-file", odd[1]) == 0
    facts = facts_of(folder)
    assert (facts["sources"][0]["name"], facts["vocabulary"]["from"]) == (r"b\xe9.txt", r"v\xe9.txt")
    assert r"caf\xe9" in capsys.readouterr().out
    assert run(folder, "--input", odd[0], "--vocab-file", odd[1]) == 2
    assert r"caf\xe9 already holds a corpus" in capsys.readouterr().err


def test_text_is_never_read_from_the_folder_that_is_written(book: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--input and --output are both"):
        bert_corpus.make_corpus(
            bert_corpus.Options(inputs=(book.parent,)), tmp_path, say=str.upper, track=lambda *_: lambda _: None
        )


def test_a_machine_without_h5py_is_told_how_to_get_it(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    assert run(tmp_path / "out", "--input", book) == 2
    assert "pip install 'hetseq[hdf5]'" in capsys.readouterr().err


# The text that needs no download, and real books


def test_without_input_the_text_of_python_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [Document(name, story(9, name=name).replace("\n", " ").split(". ")) for name in ("x", "y")]
    monkeypatch.setattr(bert_building, "python_documents", lambda: (texts, Source("text of Python 3.99", 7, "abc")))
    assert run(tmp_path / "out", "--vocab-size", 200, "--test-share", "0.4") == 0
    facts = facts_of(tmp_path / "out")
    assert facts["sources"] == [{"name": "text of Python 3.99", "size": 7, "sha256": "abc"}]
    assert facts["options"]["format"] is None
    assert facts["vocabulary"]["from"] == "training part"


@pytest.mark.nightly
def test_the_text_of_this_python_gives_the_same_bytes_twice(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert run(tmp_path / name) == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    train = facts_of(tmp_path / "a")["splits"]["train"]
    assert train["instances"] > 10_000
    assert train["unknown_tokens"] < 0.001 * train["tokens"]


@pytest.mark.slow
def test_a_real_book_gives_rows_in_proportion(shared_data: Callable[[str], Path], tmp_path: Path) -> None:
    book, part = shared_data("text/books") / "01342_pride_and_prejudice.txt", tmp_path / "part.txt"
    part.write_text(book.read_text(encoding="utf-8")[:200_000], encoding="utf-8")
    vocabulary = shared_data("bert/uncased_L-12_H-768_A-12") / "vocab.txt"
    assert run(tmp_path / "out", "--input", part, "--vocab-file", vocabulary, "--duplicate", 1) == 0
    facts = facts_of(tmp_path / "out")["splits"]
    assert 43_000 < facts["train"]["tokens"] + facts["test"]["tokens"] < 47_000
    # with a random next, the half that was not used begins the next row
    assert 1.0 < facts["train"]["instances"] * 128 / facts["train"]["tokens"] < 1.5
    assert facts["train"]["most_frequent"]["token"] == ","
    assert facts["train"]["unknown_tokens"] < 10
    assert {"elizabeth", "darcy"} < words_of(tmp_path / "out", "train")


def test_options_that_nobody_can_mean_are_refused_where_they_are_made() -> None:
    with pytest.raises(ConfigError, match="--format prose: expected one of paragraphs, lines, wikitext"):
        bert_corpus.Options(form="prose")
    with pytest.raises(DataError, match="does not exist"):
        bert_corpus.plain_text.text_files([Path("none")])
