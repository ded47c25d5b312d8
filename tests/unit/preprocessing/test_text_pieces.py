"""Text files in pieces: read once for what they are, cut where it changes nothing, and never held as a whole."""

from __future__ import annotations

import hashlib
import os
import tracemalloc
from pathlib import Path

import pytest

from hetseq import DataError
from hetseq.preprocessing.corpus.sentences import documents_of
from hetseq.preprocessing.corpus.text_chunks import Scan, scanned, sentences_of

PARAGRAPHS = "\n\n".join(f"Line {n} begins.\nIt goes on, and ends {n % 7}. A third one" for n in range(60)) + "\n"


def documents(path: Path, form: str, piece_bytes: int) -> list[list[str]]:
    """Of a file in pieces, put together again."""
    found: list[list[str]] = []
    for part in scanned(Scan(path, form, piece_bytes))[1]:
        own, goes_on = sentences_of(part)
        if goes_on and found and own:
            found[-1] += own[0]
            own = own[1:]
        found += own
    return [document for document in found if document]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("form", ["paragraphs", "lines", "wikitext"])
def test_a_file_in_pieces_has_the_sentences_of_the_whole(tmp_path: Path, form: str, newline: str) -> None:
    text = PARAGRAPHS.replace("Line 3", " = Title =\nLine 3").replace("begins", "bégïns") + "\n  \n Last one"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", newline).encode())
    whole = [document for document in documents_of(text, form) if document]
    for piece_bytes in (150, 151, 152, 333, 1 << 20):
        assert documents(tmp_path / "a.txt", form, piece_bytes) == whole
    assert len(scanned(Scan(tmp_path / "a.txt", form, 150))[1]) > 15


def test_a_long_paragraph_is_cut_at_a_line_and_a_long_line_at_a_space(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(["one two three"] * 40))
    assert set(documents(tmp_path / "a.txt", "lines", 50)[0]) == {"one two three"}
    (tmp_path / "b.txt").write_text(" ".join(["word"] * 100))
    (sentences,) = documents(tmp_path / "b.txt", "paragraphs", 64)
    assert len(sentences) > 5
    assert " ".join(sentences).split() == ["word"] * 100
    (tmp_path / "c.txt").write_text("é" * 100)
    (sentences,) = documents(tmp_path / "c.txt", "paragraphs", 31)
    assert "".join(sentences) == "é" * 100


def test_lines_that_are_cut_within_a_document_stay_one_document(tmp_path: Path) -> None:
    text = "\n".join(f"sentence {n}" for n in range(50)) + "\n\n" + "\n".join(f"other {n}" for n in range(50))
    (tmp_path / "a.txt").write_text(text)
    for piece_bytes in range(20, 60):
        found = documents(tmp_path / "a.txt", "lines", piece_bytes)
        assert [document[0].split()[0] for document in found] == ["sentence", "other"]
        assert sum(map(len, found)) == 100


def test_a_line_of_odd_spaces_behind_a_cut_ends_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 60 + "\n\u00a0\n" + "another line\n" * 12)
    assert documents(tmp_path / "a.txt", "lines", 50) == [["x" * 60], ["another line"] * 12]


def test_no_more_than_a_few_pieces_of_an_endless_line_are_held(tmp_path: Path) -> None:
    with (tmp_path / "a.txt").open("wb") as file:
        for _ in range(40):
            file.write(b"abc de" * 25_000)
    size = (tmp_path / "a.txt").stat().st_size
    tracemalloc.start()
    try:
        _, parts = scanned(Scan(tmp_path / "a.txt", "paragraphs", 1 << 16))
        sentences = sum(len(document) for part in parts for document in sentences_of(part)[0])
        assert tracemalloc.get_traced_memory()[1] < size / 4
    finally:
        tracemalloc.stop()
    assert len(parts) == sentences == size // (1 << 16)


def test_control_characters_are_no_ends_of_sentences(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"One\x01two\x7f three\x1cfour.\x0b Five\n")
    assert documents(tmp_path / "a.txt", "paragraphs", 1 << 20) == [["One\x01two\x7f three four.", "Five"]]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(PARAGRAPHS)
    part = scanned(Scan(tmp_path / "a.txt", "lines", 300))[1][-1]
    for content in (PARAGRAPHS[:-1].encode(), b"\xff" * len(PARAGRAPHS)):
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.txt changed while it was read"):
            sentences_of(part)


def test_a_source_is_its_name_its_size_and_its_sum(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbfOne\r\ntwo\rthree\n"
    (tmp_path / "a.txt").write_bytes(content)
    source, (part,) = scanned(Scan(tmp_path / "a.txt", "lines"))
    assert (source.name, source.size) == ("a.txt", len(content))
    assert source.sha256 == hashlib.sha256(content).hexdigest()
    assert sentences_of(part) == ([["One", "two", "three"]], False)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("naïve".encode("latin-1"), "is not UTF-8: byte 0xef at offset 2"),
        (b"\xef\xbb\xbf" + b"x" * 2000 + b"\xe9", "is not UTF-8: byte 0xe9 at offset 2,003"),
        (b"x" * 2047 + b"\xc3x", "is not UTF-8: byte 0xc3 at offset 2,047"),
        ("Ada".encode("utf-16"), "is not UTF-8: byte 0xff at offset 0"),
        ("Ada".encode("utf-16-le"), "byte 0x00 at offset 1; if it is UTF-16"),
        (b"x" * 5000 + b"\0", "byte 0x00 at offset 5,000; if it is UTF-16"),
    ],
)
def test_another_encoding_is_refused_with_its_place_and_a_remedy(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(content)
    for piece_bytes in (1 << 20, 1024):
        with pytest.raises(DataError, match=complaint) as refused:
            scanned(Scan(path, "paragraphs", piece_bytes))
        assert str(path) in str(refused.value)
        assert f"iconv -f LATIN1 -t UTF-8 '{path}'" in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b" \n\t\n"])
def test_a_file_without_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.txt has no text"):
        scanned(Scan(tmp_path / "a.txt", "paragraphs"))


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"a\.txt cannot be read: Permission denied"):
        scanned(Scan(tmp_path / "a.txt", "paragraphs"))


def test_a_name_that_is_no_utf_8_is_written_out(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9-\xc3\xa9.txt"))
    path.write_text("One.")
    assert scanned(Scan(path, "paragraphs"))[0].name == r"caf\xe9-é.txt"
