"""Files of records: what is written is read, by whatever rows are asked for, and what is wrong is refused in words."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from hetseq import ConfigError, DataError
from hetseq.preprocessing import records as writing
from hetseq.preprocessing.records import Ragged, write_split
from hetseq.tasks.rows import mapped_files as mapped
from hetseq.tasks.rows.record_index import OFFSETS, Column, File, read_index, verify
from hetseq.tasks.rows.records import Records, open_shard
from tests.support.bert_records import as_lists, change_header, change_index, change_numbers, make_rows, write_folder

COLUMNS = {
    "words": Column("U32", is_ragged=True),
    "place": Column("I16", shape=(2, 3)),
    "mark": Column("U8"),
}


def some_rows(count: int) -> dict[str, Any]:
    """Lists of 0 to 4 values, the third one empty."""
    lengths = (np.arange(count) * 3 + 4) % 5
    lengths[2:3] = 0
    return {
        "words": Ragged(np.arange(lengths.sum()) * 70_000 % 2**32, lengths),
        "place": np.arange(count * 6).reshape(count, 2, 3) - 9,
        "mark": np.arange(count) % 256,
    }


def write(folder: Path, *batches: dict[str, Any], rows_per_file: int = 1000) -> list[File]:
    found = write_split(folder, "train", batches, COLUMNS, rows_per_file=rows_per_file)
    return [File(folder / file["name"], file["rows"], file["bytes"], file["sha256"]) for file in found["files"]]


def load(files: list[File], longest: int = 4) -> Records:
    shards = [open_shard(file, COLUMNS) for file in files]
    return Records([shard for shard in shards if shard.rows], {"words": longest})


def expected_words(rows: dict[str, Any], wanted: list[int], width: int) -> list[list[int]]:
    ends = np.cumsum(rows["words"].lengths)
    lists = [rows["words"].values[end - size : end].tolist() for end, size in zip(ends, rows["words"].lengths)]
    return [lists[row] + [7] * (width - len(lists[row])) for row in wanted]


@pytest.mark.parametrize("rows_per_file", [1, 4, 13, 20, 1000])
def test_any_rows_are_read_as_they_were_written(tmp_path: Path, rows_per_file: int) -> None:
    rows = some_rows(20)
    records = load(write(tmp_path, rows, rows_per_file=rows_per_file))
    assert len(records) == 20
    for wanted in ([*range(20)], [19, 0, 7, 7, 2], [2], []):
        found, lengths = records.padded("words", records.find(np.array(wanted, np.int64)), 6, 7)
        assert found.tolist() == expected_words(rows, wanted, 6)
        assert lengths.tolist() == rows["words"].lengths[wanted].tolist()
        assert (
            records.fixed("place", records.find(np.array(wanted, np.int64))).tolist() == rows["place"][wanted].tolist()
        )
        assert records.fixed("mark", records.find(np.array(wanted, np.int64))).tolist() == rows["mark"][wanted].tolist()


def test_files_do_not_depend_on_how_the_rows_came(tmp_path: Path) -> None:
    rows = some_rows(20)
    for name in "ab":
        (tmp_path / name).mkdir()
    at_once = write(tmp_path / "a", rows, rows_per_file=6)
    one_by_one = [writing._cut(rows, row, row + 1) for row in range(20)]
    in_pieces = write(tmp_path / "b", *one_by_one, rows_per_file=6)
    assert [file.rows for file in at_once] == [6, 6, 6, 2]
    assert [file.sha256 for file in at_once] == [file.sha256 for file in in_pieces]
    assert len({file.sha256 for file in at_once}) == 4  # the twin: other rows have other sums


def test_the_library_of_safetensors_reads_the_same(tmp_path: Path) -> None:
    rows = some_rows(5)
    (file,) = write(tmp_path, rows)
    with safe_open(file.path, framework="numpy") as opened:
        assert sorted(opened.keys()) == ["mark", "place", "words", "words.offsets"]
        assert opened.get_tensor("words").tolist() == rows["words"].values.tolist()
        assert opened.get_tensor("words.offsets").tolist() == [0, *np.cumsum(rows["words"].lengths).tolist()]
        assert opened.get_tensor("place").tolist() == rows["place"].tolist()


def test_opening_takes_no_torch() -> None:
    code = "import sys, tasks.rows.records, tasks.bert.masking; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rows_without_any_value_are_read(tmp_path: Path) -> None:
    nothing = {
        "words": Ragged(np.zeros(0, np.int64), np.zeros(3, np.int64)),
        "place": np.zeros((3, 2, 3), np.int64),
        "mark": np.zeros(3, np.int64),
    }
    records = load(write(tmp_path, nothing), longest=0)
    found, lengths = records.padded("words", records.find(np.arange(3)), 2, 7)
    assert found.tolist() == [[7, 7]] * 3
    assert lengths.tolist() == [0, 0, 0]


def test_a_split_without_rows_is_a_file_without_rows(tmp_path: Path) -> None:
    (file,) = write(tmp_path)
    assert (file.rows, open_shard(file, COLUMNS).rows) == (0, 0)


def test_a_pickle_and_a_fork_open_the_files_anew(tmp_path: Path) -> None:
    records = load(write(tmp_path, some_rows(20), rows_per_file=7))
    here = records.padded("words", records.find(np.arange(20)), 6, 7)[0].tolist()
    before = records._maps.held
    assert before is not None
    copy = pickle.loads(pickle.dumps(records))
    assert copy._maps.held is None
    assert copy.padded("words", copy.find(np.arange(20)), 6, 7)[0].tolist() == here
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_answer, args=(records, theirs))
    child.start()
    theirs.close()
    found, is_same = ours.recv()
    child.join()
    assert found == here
    assert not is_same
    assert records._maps.held is before


def _answer(records: Records, line: Any) -> None:
    before = records._maps.held
    line.send((records.padded("words", records.find(np.arange(20)), 6, 7)[0].tolist(), records._maps.held is before))


def test_no_more_files_are_mapped_than_a_process_may_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "_OPEN_MAPS", 2)
    records = load(write(tmp_path, some_rows(20), rows_per_file=2))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert records.fixed("mark", records.find(np.arange(20))).tolist() == list(range(20))
    assert len(records._maps.get()) == 2
    assert len(os.listdir("/proc/self/fd")) == before + 2


def test_a_file_that_changed_since_the_start_is_refused(tmp_path: Path) -> None:
    (file,) = write(tmp_path, some_rows(20))
    records = load([file])
    file.path.write_bytes(file.path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"train_00000.safetensors now has [\d,]+ bytes and had [\d,]+ at the start"):
        records.fixed("mark", records.find(np.arange(2)))


@pytest.mark.parametrize("size", [1, 2, 9, 100])
def test_a_file_that_was_cut_is_refused_by_its_size(tmp_path: Path, size: int) -> None:
    (file,) = write(tmp_path, some_rows(20))
    file.path.write_bytes(file.path.read_bytes()[:-size])
    with pytest.raises(DataError, match=r"train_00000.safetensors has [\d,]+ bytes, expected [\d,]+ .*copy the folder"):
        open_shard(file, COLUMNS)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    (file,) = write(tmp_path, some_rows(20))
    file.path.unlink()
    with pytest.raises(DataError, match=r"train_00000.safetensors cannot be read: No such file"):
        open_shard(file, COLUMNS)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "header would have 0 bytes"),
        (b"\x89HDF\r\n\x1a\n" * 9, r"header would have [\d,]+ bytes"),
        (b"\x05\0\0\0\0\0\0\0hello", "not JSON"),
        (b"\x02\0\0\0\0\0\0\0[]", "not a JSON object"),
        (b"\x02\0\0\0\0\0\0\0{}", "no array 'words.offsets'"),
    ],
    ids=["empty", "HDF5", "text", "list", "nothing"],
)
def test_foreign_files_are_refused(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"x\.safetensors.*{why}"):
        open_shard(File(path, 3, len(content), ""), COLUMNS)


def entry(name: str, **fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda header: header[name].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (entry("ids", dtype="F16"), "ids: dtype is F16, expected one of U8"),
        (entry("ids", dtype=["U16"]), r"ids: dtype is \['U16'\]"),
        (entry("ids", dtype="I16"), "ids: dtype is I16, expected U16"),
        (entry("ids.offsets", dtype="I32", data_offsets=[0, 84]), "ids.offsets: dtype is I32, expected I64 or U64"),
        (entry("ids.offsets", shape=[7, 3]), r"ids.offsets: shape is \[7, 3\], expected \[21\]"),
        (entry("first_lengths", shape=[20, 1]), r"first_lengths: shape is \[20, 1\], expected \[20\]"),
        (entry("ids", shape=None), "no shape and place of ids"),
        (entry("ids", shape=[True]), "no shape and place of ids"),
        (entry("ids", data_offsets=[0, 2, 4]), "no shape and place of ids"),
        (entry("ids", data_offsets=[0, 2]), "ids of shape .* would lie in the bytes 0 to 2"),
        (entry("next_sentence_labels", data_offsets=[10**6, 10**6 + 20]), "would lie in the bytes 1000000"),
        (entry("first_lengths", data_offsets=[1, 41]), r"first_lengths begins at byte \d+, which is not a multiple"),
        (lambda header: header.pop("ids"), "no array 'ids'"),
    ],
)
def test_headers_that_cannot_be_meant_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    folder = write_folder(tmp_path / "data", train=make_rows(20))
    change_header(folder / "train_00000.safetensors", change)
    index = read_index(folder)
    with pytest.raises(DataError, match=f"train_00000.safetensors.*{message}.*copy the folder again"):
        open_shard(index.splits["train"].files[0], index.columns)


@pytest.mark.parametrize(
    ("row", "offset", "is_seen_at_start"), [(0, 1, True), (20, 5, True), (7, -1, False), (7, 10**9, False)]
)
def test_impossible_offsets_are_refused(tmp_path: Path, row: int, offset: int, is_seen_at_start: bool) -> None:
    folder = write_folder(tmp_path / "data", train=make_rows(20))
    path = folder / "train_00000.safetensors"
    change_numbers(path, "ids.offsets", lambda offsets: offsets.__setitem__(row, offset))
    index = read_index(folder)
    (file,) = index.splits["train"].files
    if is_seen_at_start:
        with pytest.raises(DataError, match=r"train_00000.safetensors, ids.offsets goes from .* expected 0 to"):
            open_shard(file, index.columns)
        return
    records = Records([open_shard(file, index.columns)], index.splits["train"].longest)
    for at in (row - 1, row):
        with pytest.raises(DataError, match=rf"train_00000.safetensors, row {at}: ids.offsets spans"):
            records.padded("ids", records.find(np.array([at])), 30, 0)


def test_rows_longer_than_the_index_states_are_refused(tmp_path: Path) -> None:
    records = load(write(tmp_path, some_rows(20)), longest=3)
    with pytest.raises(DataError, match=r"row 0: words.offsets spans 0 to 4, expected at most 3"):
        records.padded("words", records.find(np.arange(1)), 8, 0)


# The index


def file_of(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda facts: facts["splits"]["train"]["files"][0].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda facts: facts["format"].update(version=3), "has version 3 of the format: expected version 2.*update"),
        (lambda facts: facts["format"].update(version="2"), "has version -1"),
        (lambda facts: facts["format"].update(name="other"), "is not an index of records"),
        (lambda facts: facts.pop("columns"), "columns is null"),
        (lambda facts: facts.update(columns={}), "columns is {}, expected at least one column"),
        (lambda facts: facts["columns"]["ids"].update(dtype="F32"), 'columns.ids.dtype is "F32", expected one of'),
        (lambda facts: facts["columns"]["ids"].update(shape=[0]), r"columns.ids.shape is \[0\]"),
        (lambda facts: facts["columns"].update({f"x{OFFSETS}": {"dtype": "U8"}}), "expected no name that ends in"),
        (lambda facts: facts["vocabulary"].update(tokens=-1), "vocabulary.tokens is -1, expected an integer"),
        (lambda facts: facts["vocabulary"].update(sha256="ab"), 'vocabulary.sha256 is "ab", expected a SHA-256'),
        (lambda facts: facts.update(splits=[]), r"splits is \[\]"),
        (lambda facts: facts["splits"]["train"].update(files=[]), r"splits.train.files is \[\]"),
        (lambda facts: facts["splits"]["train"].update(rows=21), "splits.train.rows is 21, expected 20"),
        (lambda facts: facts["splits"]["train"].update(longest={}), "splits.train.longest.ids is null"),
        (file_of(name="../x.safetensors"), "splits.train.files.0.name is .* without a folder"),
        (file_of(name="x.hdf5"), "splits.train.files.0.name is .* ends in .safetensors"),
        (file_of(rows=True), "splits.train.files.0.rows is true"),
        (file_of(bytes=1.5), "splits.train.files.0.bytes is 1.5"),
    ],
)
def test_an_index_that_cannot_be_meant_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    folder = write_folder(tmp_path / "data", train=make_rows(20))
    read_index(folder)
    change_index(folder, change)
    with pytest.raises(DataError, match=rf"corpus\.json.*{message}"):
        read_index(folder)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_without_an_index_is_told_from_one_with_another(tmp_path: Path, is_there: bool) -> None:
    folder = tmp_path / "data"
    if is_there:
        folder.mkdir()
    with pytest.raises(DataError, match=r"corpus\.json does not exist: expected the index of a folder of records"):
        read_index(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 10**5, b"3"])
def test_a_file_that_is_no_index_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "corpus.json").write_bytes(content)
    with pytest.raises(DataError, match=r"corpus\.json is not an index of records"):
        read_index(tmp_path)


def test_sums_tell_a_flipped_bit_a_cut_and_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "data", train=make_rows(20), rows_per_file=5)
    files = read_index(folder).splits["train"].files
    read: list[int] = []
    assert verify(files, read.append) == {}
    assert sum(read) == sum(file.size for file in files)
    assert writing.main([str(folder)]) == 0
    content = bytearray(files[1].path.read_bytes())
    content[-1] ^= 1
    files[1].path.write_bytes(content)
    files[2].path.write_bytes(content[:-1])
    files[3].path.unlink()
    found = verify(files, read.append)
    assert [path.name for path in found] == [f"train_0000{at}.safetensors" for at in (1, 2, 3)]
    assert [problem.split(" ")[0] for problem in found.values()] == ["sha256", f"{len(content) - 1:,}", "missing"]
    assert writing.main([str(folder)]) == 1
    assert "train_00003.safetensors: missing" in capsys.readouterr().out
    assert writing.main([str(tmp_path)]) == 2


def test_numbers_too_large_for_a_column_are_not_written(tmp_path: Path) -> None:
    rows = some_rows(3)
    for name, number in (("mark", 256), ("mark", -1), ("place", 2**15)):
        wrong = {
            **rows,
            name: np.where(np.arange(3).reshape(-1, *[1] * (rows[name].ndim - 1)) == 1, number, rows[name]),
        }
        with pytest.raises(DataError, match=f"{name} would hold"):
            write(tmp_path, wrong)
    with pytest.raises(ConfigError, match="--rows-per-file 0"):
        write(tmp_path, rows, rows_per_file=0)


def test_the_rows_of_the_support_are_what_is_read(tmp_path: Path) -> None:
    rows = make_rows(20)
    folder = write_folder(tmp_path / "data", train=rows, rows_per_file=6)
    index = read_index(folder)
    records = Records(
        [open_shard(file, index.columns) for file in index.splits["train"].files], index.splits["train"].longest
    )
    ids, lengths = records.padded("ids", records.find(np.arange(20)), 22, 0)
    assert [row[:length].tolist() for row, length in zip(ids, lengths)] == as_lists(rows)
    assert records.place_of(7).endswith("train_00001.safetensors, row 1")
    assert json.loads((folder / "corpus.json").read_text())["splits"]["train"]["longest"] == {"ids": 22}
