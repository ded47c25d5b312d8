"""Corpora of records, made by many, in pieces, again and again: the same bytes each time."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetseq import ConfigError, DataError
from hetseq.preprocessing import bert_corpus
from hetseq.preprocessing.bert import jobs as bert_pieces
from hetseq.preprocessing.bert.build import Shard
from hetseq.preprocessing.bert_corpus import Options
from hetseq.preprocessing.corpus import atomic_folder as corpus_folder
from hetseq.preprocessing.corpus.process_pool import LostProcess
from hetseq.tasks.bert.dataset import FIRST_LENGTHS, IDS, LABEL, BertRecords, columns_of, load_records
from hetseq.tasks.bert.masking import Masking
from hetseq.tasks.rows.record_index import read_index, verify, vocab_digest
from tests.support.corpora import contents, restored, rows_of, story, write_vocab

ROOT = Path(__file__).resolve().parents[3]
SPLITS = ("train", "test")


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """Three files in many pieces, and rows in several files."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in "xyz":
        (texts / f"{name}.txt").write_text(story(120, name=name))
    return Options(
        inputs=(texts,),
        vocab_file=write_vocab(tmp_path / "vocab.txt"),
        max_seq_length=64,
        duplicate=2,
        test_share=0.1,
        files=3,
        piece_bytes=1500,
    )


def make(options: Options, folder: Path, **words: Any) -> list[str]:
    """Make a corpus; what was said of it."""
    said: list[str] = []
    bert_corpus.make_corpus(options, folder, say=said.append, track=lambda *_: lambda _: None, **words)
    return said


def load(folder: Path, split: str, **changes: Any) -> BertRecords:
    tokens = (folder / "vocab.txt").read_text().split()
    return load_records(read_index(folder), split, tokens, **{"seed": 1, "masking": Masking(), **changes})


def facts_of(folder: Path) -> Any:
    return json.loads((folder / "corpus.json").read_text())


def pieces_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"{corpus_folder._PIECES}/*/*") if not path.name.startswith("."))


# Records


def test_records_are_what_the_command_writes_unless_told_otherwise(options: Options, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    words = ["--output", folder, "--input", *options.inputs, "--vocab-file", options.vocab_file]
    assert bert_corpus.main(list(map(str, words))) == 0
    assert set(contents(folder)) == {
        "bert_config.json", "corpus.json", "corpus_test_00000.safetensors", "corpus_train_00000.safetensors",
        "vocab.txt",
    }  # fmt: skip
    index = read_index(folder)
    assert not verify([file for split in index.splits.values() for file in split.files], lambda _: None)
    assert index.vocab_sha256 == vocab_digest((tmp_path / "vocab.txt").read_text().split())


def test_rows_of_records_are_those_of_hdf5_before_they_are_masked(options: Options, tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    make(options, tmp_path / "records")
    make(Options(**{**vars(options), "output_format": "hdf5"}), tmp_path / "hdf5")
    for split in SPLITS:
        rows = rows_of(tmp_path / "hdf5", split)
        dataset = load(tmp_path / "records", split)
        ids, lengths, first, labels = dataset.rows(range(len(dataset)))
        width = rows["input_ids"].shape[1]
        assert np.array_equal(np.where(np.arange(width) < lengths[:, None], restored(rows), 0), ids[:, :width])
        assert np.array_equal(lengths, rows["input_mask"].sum(axis=1))
        assert np.array_equal(lengths - first, rows["segment_ids"].sum(axis=1))
        assert np.array_equal(labels, rows["next_sentence_labels"])


def test_the_facts_of_records_are_those_of_what_training_may_mask(options: Options, tmp_path: Path) -> None:
    make(options, tmp_path / "out")
    tokens = (tmp_path / "out" / "vocab.txt").read_text().split()
    for split in SPLITS:
        stated = facts_of(tmp_path / "out")["splits"][split]
        dataset = load(tmp_path / "out", split)
        ids, lengths, _, labels = dataset.rows(range(len(dataset)))
        words = [n for row, length in zip(ids, lengths) for n in row[:length] if not tokens[n].startswith("[")]
        counts = np.bincount(words, minlength=len(tokens))
        shares = counts[counts > 0] / counts.sum()
        assert stated["unigram_entropy"] == pytest.approx(-(shares * np.log(shares)).sum(), abs=1e-6)
        assert stated["most_frequent"]["token"] == tokens[int(counts.argmax())]
        assert stated["random_next"] == labels.sum()
        # as many in each epoch
        for epoch in (0, 1):
            dataset.set_epoch(epoch)
            assert stated["masked_tokens"] == len(dataset.__getitems__(range(len(dataset)))["masked_ids"])
    names = [file.path.name for file in read_index(tmp_path / "out").splits["train"].files]
    assert names == [f"corpus_train_{number:05}.safetensors" for number in range(3)]


@pytest.mark.parametrize("tokens", [65_535, 65_536])
def test_the_columns_are_those_that_training_reads(tokens: int) -> None:
    assert bert_pieces.columns_of(tokens) == columns_of(tokens)
    assert (bert_pieces.IDS, bert_pieces.FIRST_LENGTHS, bert_pieces.LABEL) == (IDS, FIRST_LENGTHS, LABEL)
    assert Masking.share == bert_pieces.MASKED_SHARE


def test_masks_are_no_affair_of_records() -> None:
    for change in ({"masked_share": 0.2}, {"max_predictions": 7}):
        with pytest.raises(ConfigError, match=r"records have none, since training draws them; .*--output-format hdf5"):
            Options(**change)


# The same bytes


def test_two_processes_leave_the_bytes_of_one(options: Options, tmp_path: Path) -> None:
    trained = Options(**{**vars(options), "vocab_file": None, "vocab_size": 300})
    for name, processes in (("one", 1), ("two", 2)):
        make(trained, tmp_path / name, processes=processes)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert not pieces_in(tmp_path / "two")
    make(Options(**{**vars(trained), "seed": 3}), tmp_path / "other")
    assert contents(tmp_path / "one") != contents(tmp_path / "other")


def test_an_error_in_another_process_names_the_file(
    options: Options, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts" / "b.txt").write_bytes(b"x" * 5000 + b"\xff")
    words = ["--output", tmp_path / "out", "--input", *options.inputs, "--processes", 2]
    assert bert_corpus.main([str(word) for word in words]) == 2
    assert "b.txt is not UTF-8: byte 0xff at offset 5,000" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from hetseq.preprocessing import bert_corpus
left, renamed = int(sys.argv[1]), os.rename
def rename(source, target):
    global left
    if (left := left - 1) < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    renamed(source, target)
os.rename = rename
texts, vocab, out = map(Path, sys.argv[2:5])
options = bert_corpus.Options(
    inputs=(texts,), vocab_file=vocab, max_seq_length=64, duplicate=2, test_share=0.1, files=3, piece_bytes=1500
)
bert_corpus.make_corpus(options, out, say=str, track=lambda *_: lambda _: None)
"""


def killed(left: int, options: Options, folder: Path) -> None:
    """Begin a corpus in a process that is killed when it has finished `left` pieces."""
    command = [sys.executable, "-c", KILLED, str(left), *map(str, (*options.inputs, options.vocab_file, folder))]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == -signal.SIGKILL


def test_a_build_that_was_killed_goes_on_and_leaves_the_same_bytes(options: Options, tmp_path: Path) -> None:
    make(options, tmp_path / "calm")
    expected = contents(tmp_path / "calm")
    finished: list[int] = []
    for left in (3, 14, 8):
        killed(left, options, tmp_path / "hurt")
        finished.append(len(pieces_in(tmp_path / "hurt")))
    # each life went on where the last one was; the last one had moved some files out of their pieces
    assert finished[:2] == [3, 17]
    said = make(options, tmp_path / "hurt")
    assert said[0] == f"resuming: {finished[-1]} finished pieces in {said[0].split(' in ')[1]}"
    assert contents(tmp_path / "hurt") == expected
    assert not (tmp_path / "hurt" / corpus_folder._PIECES).exists()


def test_one_process_that_is_killed_ends_the_others_and_keeps_what_is_finished(
    options: Options, tmp_path: Path
) -> None:
    def say(line: str) -> None:
        if line.startswith("text:"):
            multiprocessing.active_children()[0].kill()

    with pytest.raises(LostProcess, match="was done: if memory is short, give fewer --processes"):
        bert_corpus.make_corpus(options, tmp_path / "hurt", processes=2, say=say, track=lambda *_: lambda _: None)
    assert contents(tmp_path / "hurt") == {}
    assert "resuming: " in make(options, tmp_path / "hurt")[0]
    make(options, tmp_path / "calm")
    assert contents(tmp_path / "hurt") == contents(tmp_path / "calm")


def test_a_piece_that_was_damaged_is_made_again(options: Options, tmp_path: Path) -> None:
    make(options, tmp_path / "calm")
    killed(28, options, tmp_path / "hurt")
    for folder in pieces_in(tmp_path / "hurt"):
        largest = max(folder.iterdir(), key=lambda path: (path.name != "piece.json", path.stat().st_size))
        content = largest.read_bytes()
        largest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if content else b"x")
    make(options, tmp_path / "hurt")
    assert contents(tmp_path / "hurt") == contents(tmp_path / "calm")


def test_other_options_or_another_text_begin_anew_and_say_so(options: Options, tmp_path: Path) -> None:
    for change in ("options", "text"):
        killed(10, options, tmp_path / change)
        other = Options(**{**vars(options), "seed": 7}) if change == "options" else options
        if change == "text":
            (tmp_path / "texts" / "x.txt").write_text(story(80, name="w"))
        assert "from other text, options or versions: they are removed" in make(other, tmp_path / change)[0]
        make(other, tmp_path / f"{change}-calm")
        assert contents(tmp_path / change) == contents(tmp_path / f"{change}-calm")


MANY_PIECES = """
import sys
from hetseq.preprocessing.bert import build as bert_building; from preprocessing import bert_corpus
genuine = bert_building.Scan
bert_building.Scan = lambda path, form, _: genuine(path, form, 200)
if __name__ == "__main__":
    sys.exit(bert_corpus.main(sys.argv[1:]))
"""


def test_ctrl_c_ends_all_processes_and_keeps_what_is_finished(options: Options, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(MANY_PIECES)
    words = ["--output", tmp_path / "out", "--input", *options.inputs, "--vocab-file", options.vocab_file]
    command = [sys.executable, tmp_path / "script.py", *words, "--processes", "2"]
    process = subprocess.Popen(
        list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("text: 3 documents")
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert said.splitlines() == [
        f"interrupted: {tmp_path / 'out'} is unchanged",
        f"finished pieces are kept in {tmp_path / 'out' / corpus_folder._PIECES}: the same command resumes from them",
    ]


# Shards


@pytest.mark.parametrize("shards", [(0, 1), (1, 0), (1,), (0, 0)])
def test_shards_one_after_another_leave_the_bytes_of_one_run(
    options: Options, tmp_path: Path, shards: tuple[int, ...]
) -> None:
    make(options, tmp_path / "whole")
    for turn, number in enumerate(shards):
        make(options, tmp_path / "parts", shard=Shard(number, 2))
        assert contents(tmp_path / "parts") == {}
        files = [path.name for path in pieces_in(tmp_path / "parts") if path.name.startswith("file-corpus_train")]
        own = [file for file in range(3) if file % 2 in shards[: turn + 1]]
        assert files == [f"file-corpus_train_{file:05}.safetensors" for file in own]
    assert "resuming: " in make(options, tmp_path / "parts")[0]
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_shards_at_the_same_time_leave_the_bytes_of_one_run(options: Options, tmp_path: Path) -> None:
    words = ["--input", *options.inputs, "--vocab-file", options.vocab_file, "--files", 4, "--processes", 1]
    command = [sys.executable, "-m", "hetseq.preprocessing.bert_corpus", "--output", tmp_path / "parts", *words]
    running = [
        subprocess.Popen([*map(str, command), "--shard", f"{number}/2"], cwd=ROOT, stdout=subprocess.DEVNULL)
        for number in range(2)
    ]
    assert [process.wait() for process in running] == [0, 0]
    assert bert_corpus.main(["--output", str(tmp_path / "whole"), *map(str, words)]) == 0
    assert bert_corpus.main(["--output", str(tmp_path / "parts"), *map(str, words)]) == 0
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_a_shard_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("2/2", "x", "1", "-1/2", "0/0"):
        assert bert_corpus.main(["--output", str(tmp_path / "out"), f"--shard={text}"]) == 2
        assert f"--shard {text}: expected I/N" in capsys.readouterr().err
    assert bert_corpus.main(["--output", str(tmp_path / "out"), "--shard", "0/2", "--output-format", "hdf5"]) == 2
    assert "--shard applies to files of records" in capsys.readouterr().err
    assert bert_corpus.main(["--output", str(tmp_path / "out"), "--processes", "0"]) == 2
    assert "--processes 0: expected at least 1" in capsys.readouterr().err


def test_a_shard_does_not_work_for_a_folder_that_has_a_corpus(options: Options, tmp_path: Path) -> None:
    make(options, tmp_path / "out")
    with pytest.raises(DataError, match="already holds a corpus"):
        make(options, tmp_path / "out", shard=Shard(0, 2))


def test_a_process_that_makes_a_corpus_imports_no_torch() -> None:
    code = "import sys, hetseq.preprocessing.bert_corpus; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
