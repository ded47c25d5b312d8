"""HDF5 files to records and back: rows survive, masks are undone and drawn, and nothing is left of what fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetseq.preprocessing import convert_hdf5
from hetseq.tasks.bert.dataset import BertRecords, load_records
from hetseq.tasks.bert.hdf5_dataset import load_bert
from hetseq.tasks.bert.masking import Masking
from hetseq.tasks.rows.record_index import read_index
from tests.support.bert_files import Arrays, make_rows, write_hdf5
from tests.support.bert_records import VOCAB, write_folder
from tests.support.bert_records import make_rows as make_records

h5py = pytest.importorskip("h5py")

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(95))]


def run(source: Path, folder: Path, *words: object) -> int:
    return convert_hdf5.main(["--input", str(source), "--output", str(folder), *map(str, words)])


def load(folder: Path, split: str, **changes: Any) -> BertRecords:
    tokens = (folder / "vocab.txt").read_text().split()
    return load_records(read_index(folder), split, tokens, **{"seed": 1, "masking": Masking(), **changes})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "hdf5"
    for name, rows, seed in (("0_train", 30, 0), ("1_train", 12, 1), ("x_test", 7, 2)):
        write_hdf5(folder / f"{name}.hdf5", rows=rows, seed=seed)
    (folder / "vocab.txt").write_text("\n".join(TOKENS) + "\n")
    (folder / "bert_config.json").write_text('{"vocab_size": 100}\n')
    return folder


def true_words(arrays: Arrays) -> list[list[int]]:
    """The words of each row as they stood in the text, by a loop over rows."""
    found = []
    for row, mask in enumerate(arrays["input_mask"]):
        ids = arrays["input_ids"][row].tolist()
        for at, word in zip(arrays["masked_lm_positions"][row], arrays["masked_lm_ids"][row]):
            if at == 0:
                break
            ids[at] = int(word)
        found.append(ids[: int(mask.sum())])
    return found


def segments(arrays: Arrays) -> list[list[int]]:
    return [row[: int(mask.sum())].tolist() for row, mask in zip(arrays["segment_ids"], arrays["input_mask"])]


def test_records_hold_the_words_behind_the_masks(source: Path, tmp_path: Path) -> None:
    assert run(source, tmp_path / "records", "--rows-per-file", 8) == 0
    dataset = load(tmp_path / "records", "train")
    files = [make_rows(rows=30, seed=0), make_rows(rows=12, seed=1)]
    ids, lengths, first, labels = dataset.rows(range(42))
    words = [row[:length].tolist() for row, length in zip(ids, lengths)]
    assert words == true_words(files[0]) + true_words(files[1])
    masked = [row[:length].tolist() for arrays in files for row, length in zip(arrays["input_ids"], lengths)]
    assert words != masked  # the twin
    halves = [[0] * begin + [1] * (length - begin) for begin, length in zip(first, lengths)]
    assert halves == segments(files[0]) + segments(files[1])
    assert labels.tolist() == [*files[0]["next_sentence_labels"], *files[1]["next_sentence_labels"]]
    names = sorted(path.name for path in (tmp_path / "records").iterdir())
    data = [f"corpus_{name}.safetensors" for name in ("test_00000", *(f"train_{number:05}" for number in range(6)))]
    assert names == ["bert_config.json", "corpus.json", *data, "vocab.txt"]
    assert len(load(tmp_path / "records", "test")) == 7


def test_rows_survive_the_way_to_records_and_back_and_there_again(source: Path, tmp_path: Path) -> None:
    for way, (begin, end) in enumerate((("hdf5", "a"), ("a", "b"), ("b", "c"), ("c", "d"), ("d", "e"))):
        assert run(tmp_path / begin, tmp_path / end, "--seed", 7, "--epoch", way) == 0
    for split in ("train", "test"):
        kept = [[part.tolist() for part in load(tmp_path / name, split).rows(range(7))] for name in "ace"]
        assert kept[0] == kept[1] == kept[2]
    sums = [
        [file.sha256 for split in read_index(tmp_path / name).splits.values() for file in split.files] for name in "ace"
    ]
    assert sums[0] == sums[1] == sums[2]
    assert (tmp_path / "b" / "corpus_train_00000.hdf5").read_bytes() != (
        tmp_path / "d" / "corpus_train_00000.hdf5"
    ).read_bytes()  # another epoch, other masks


@pytest.mark.parametrize("whole_words", [False, True])
def test_hdf5_has_the_masks_that_training_draws(tmp_path: Path, whole_words: bool) -> None:
    records = write_folder(tmp_path / "records", train=make_records(40, length=24), rows_per_file=15)
    words = ["--seed", 3, "--epoch", 2, "--max-predictions", 5, *["--whole-words"] * whole_words]
    assert run(records, tmp_path / "hdf5", *words) == 0
    ours = load(records, "train", seed=3, masking=Masking(max_predictions=5, whole_words=whole_words))
    theirs = load_bert(tmp_path / "hdf5", "train", vocab_size=len(VOCAB), max_positions=24, type_vocab_size=2)
    ours.set_epoch(2)
    found, expected = theirs.__getitems__(range(40)), ours.__getitems__(range(40))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in expected.items()
    }
    ours.set_epoch(1)
    assert ours.__getitems__(range(40))["masked_positions"].tolist() != found["masked_positions"].tolist()


def test_the_same_files_give_the_same_bytes(source: Path, tmp_path: Path) -> None:
    for name in "ab":
        assert run(source, tmp_path / name) == 0
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_one_file_is_converted_too(source: Path, tmp_path: Path) -> None:
    assert run(source / "1_train.hdf5", tmp_path / "records") == 0
    assert list(read_index(tmp_path / "records").splits) == ["train"]
    assert len(load(tmp_path / "records", "train")) == 12


def test_a_corpus_is_replaced_only_where_that_is_said(source: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(source, tmp_path / "records") == 0
    before = (tmp_path / "records" / "corpus.json").read_bytes()
    assert run(source, tmp_path / "records", "--rows-per-file", 9) == 2
    assert "already holds a corpus" in capsys.readouterr().err
    assert (tmp_path / "records" / "corpus.json").read_bytes() == before
    assert run(source, tmp_path / "records", "--rows-per-file", 9, "--overwrite") == 0
    assert len(read_index(tmp_path / "records").splits["train"].files) == 5
    shutil.copy(tmp_path / "records" / "corpus_test_00000.safetensors", tmp_path / "records" / "mine.safetensors")
    assert run(source, tmp_path / "records", "--overwrite") == 2
    assert "data files that the corpus in its corpus.json does not list (mine.safetensors)" in capsys.readouterr().err


def set_to(name: str, row: int, values: list[int]) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        file[name][row] = values

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_to("segment_ids", 3, [0, 1, 0, 1] * 4), "0_train.hdf5, row 3: segment_ids are not zeros and then ones"),
        (set_to("segment_ids", 3, [1] * 16), "0_train.hdf5, row 3: segment_ids are not zeros and then ones"),
        (set_to("input_ids", 0, [100] * 16), "0_train.hdf5, row 0: input_ids holds 100"),
    ],
)
def test_rows_that_records_cannot_hold_are_refused_and_nothing_is_left(
    source: Path, tmp_path: Path, capsys: Any, change: Callable[[Any], None], message: str
) -> None:
    with h5py.File(source / "0_train.hdf5", "r+") as file:
        change(file)
    assert run(source, tmp_path / "new" / "records") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_padding_in_the_middle_is_refused(source: Path, tmp_path: Path, capsys: Any) -> None:
    with h5py.File(source / "0_train.hdf5", "r+") as file:
        file["input_mask"][4] = [1, 0] * 8
        file["masked_lm_positions"][4] = 0
    assert run(source, tmp_path / "records") == 2
    assert "0_train.hdf5, row 4: input_mask has a 1 behind a 0, expected padding at its end" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--splits", "dev"], "has no files of the splits dev: expected HDF5 files whose names contain one of these"),
        (["--splits", "train", "0_tr"], "0_train.hdf5 belongs to two splits"),
        (["--rows-per-file", 0], "--rows-per-file 0: expected 1 or more"),
        (["--epoch", -1], "--epoch -1: expected 0 or more"),
        (["--max-predictions", 0], "--max-predictions 0: expected 1 or more"),
        (["--vocab-file", "nowhere.txt"], "nowhere.txt does not exist"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    source: Path, tmp_path: Path, capsys: Any, words: list[object], message: str
) -> None:
    assert run(source, tmp_path / "records", *words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "records").exists()


def test_one_folder_for_both_and_no_vocabulary_are_refused(source: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(source, source) == 2
    assert "are the same folder: give two" in capsys.readouterr().err
    (source / "vocab.txt").rename(tmp_path / "elsewhere.txt")
    assert run(source, tmp_path / "records") == 2
    assert "has no vocab.txt: expected the vocabulary" in capsys.readouterr().err
    assert run(source, tmp_path / "records", "--vocab-file", tmp_path / "elsewhere.txt") == 0
    assert json.loads((tmp_path / "records" / "corpus.json").read_text())["vocabulary"]["tokens"] == 100
    assert np.array_equal(
        load(tmp_path / "records", "test").rows([0])[1], make_rows(rows=7, seed=2)["input_mask"][:1].sum(1)
    )
