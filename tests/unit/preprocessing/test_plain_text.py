"""From files to sentences: three conventions, the splitter, what is held out, and the text that ships with Python."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetseq import DataError
from hetseq.preprocessing.corpus.python_docs import python_documents
from hetseq.preprocessing.corpus.sentences import documents_of, hold_out, split_sentences, text_files

# The splitter


@pytest.mark.parametrize(
    "sentences",
    [
        ["It is a truth.", "However little known it is, it holds."],
        ["Why?", "Because!", "And so on..."],
        ["“My dear Mr. Bennet,” said his lady, “have you heard?”", "Mr. Bennet replied that he had not."],
        ["“But it is,” returned she; “for Mrs. Long has just been here.”"],
        ["“Is that his design?”", "“Design!", "Nonsense, how can you talk so!"],
        ["“What is his name?” cried she."],
        ['He said "no."', "(She did not.)", "[Exeunt.]", "_Really._", "*Really!*"],
        ["Dr. Watson met Prof. J. S. Bach at St. James.", "They ate."],
        ["The U.S. Army is in Washington D.C. and elsewhere.", "It is large."],
        ["Tools, e.g. Hammers, are useful, i.e. They help."],
        ["He said no.", "Then he left.", "See No. 7 and vol. 2 on p. 12."],
        ["It was I.", "Nobody else came."],
        ["The value is 3.14 and v2.0 is out.", "Next."],
        ["He paid $5.", "4 were left.", "Éva came."],
        ["Bread, milk, etc.", "They were cheap."],
        ["The fileset bos.rte is read.", "`name` is not. and this goes on"],
        ["Wait...", "What?", "No…", "Yes.", "And so... on."],
    ],
)
def test_sentences_are_told_apart_as_a_reader_would(sentences: list[str]) -> None:
    found = split_sentences("  ".join(sentences))
    assert found == sentences


def test_hard_wrapped_lines_and_odd_spaces_become_one_space() -> None:
    assert split_sentences("One\n  two\tthree.\x0c\nFour\u00a0five.") == ["One two three.", "Four five."]


def test_what_has_neither_letter_nor_digit_is_no_sentence() -> None:
    assert split_sentences("* * * * *") == []
    assert split_sentences("") == []
    assert split_sentences("“—!” Yes.") == ["Yes."]


# The conventions


def sentences_of(text: str, form: str) -> list[list[str]]:
    return [document for document in documents_of(text, form) if document]


def test_paragraphs_end_with_a_blank_line_and_a_file_is_a_document() -> None:
    text = "CHAPTER 1\n\nOne goes\non. Two\n \nThree\n\n\n* * *\n"
    assert sentences_of(text, "paragraphs") == [["CHAPTER 1", "One goes on.", "Two", "Three"]]


def test_lines_are_sentences_and_a_blank_line_ends_a_document() -> None:
    text = "\nOne. Still one\n two  words\n\n\n---\n\nThree\n"
    assert sentences_of(text, "lines") == [["One. Still one", "two words"], ["Three"]]


WIKITEXT = """ 
 = Homarus gammarus = 
 
 The lobster ( H. americanus ) is 0 @.@ 7 – 2 @.@ 2 kg heavy . It said " No . " and left ! 
 Next <unk> @-@ line <unk>-53 costs 1 @,@ 000 @,@
 
 = = Description = = 
 
 " Who ? " he asked . " Me . " 
 
 = Other = 
 
 Short . 
"""  # noqa: W291, W293


def test_wikitext_begins_a_document_at_each_title_and_undoes_its_signs() -> None:
    assert sentences_of(WIKITEXT, "wikitext") == [
        [
            "The lobster ( H. americanus ) is 0.7 – 2.2 kg heavy .",
            'It said " No . "',
            "and left !",
            "Next [UNK]-line [UNK]-53 costs 1,000,",
            '" Who ? "',
            "he asked .",
            '" Me . "',
        ],
        ["Short ."],
    ]


@pytest.mark.parametrize("form", ["paragraphs", "lines", "wikitext"])
def test_a_text_without_words_has_no_document(form: str) -> None:
    assert sentences_of(" \n\n * * *\n", form) == []


def test_the_books_are_split_at_a_plausible_length(shared_data: Callable[[str], Path]) -> None:
    text = (shared_data("text/books") / "01342_pride_and_prejudice.txt").read_text(encoding="utf-8-sig")
    (document,) = documents_of(text, "paragraphs")
    lengths = np.array([len(sentence.split()) for sentence in document])
    assert 18 < lengths.mean() < 24
    assert lengths.max() < 200
    assert not any(sentence.endswith(("Mr.", "Mrs.")) for sentence in document)
    assert "However little known" in document[4]


def test_the_articles_of_wikitext_are_found(shared_data: Callable[[str], Path]) -> None:
    text = (shared_data("text/wikitext-2") / "valid.txt").read_text(encoding="utf-8")
    documents = sentences_of(text, "wikitext")
    assert len(documents) == 60
    assert documents[0][0].startswith("Homarus gammarus , known as the European lobster")
    assert not any("<unk>" in sentence or "@" in sentence for d in documents for sentence in d)


# Files


def test_a_folder_stands_for_its_texts_by_name_and_a_file_for_itself(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md", ".hidden.txt", "vocab.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "sub.txt").mkdir()
    (tmp_path / "sub.txt" / "d.txt").write_text("x")
    found = text_files([tmp_path / "c.md", tmp_path], besides=[tmp_path / "vocab.txt"])
    assert [path.name for path in found] == ["c.md", "a.txt", "b.txt"]


def test_files_of_one_name_in_two_folders_are_two(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
    found = text_files([tmp_path / "two", tmp_path / "one"])
    assert [path.read_text() for path in found] == ["two", "one"]


def test_what_is_missing_or_empty_or_named_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"none\.txt does not exist; expected a text file or a folder"):
        text_files([tmp_path / "none.txt"])
    with pytest.raises(DataError, match=r"empty has no text: expected files \*\.txt"):
        text_files([tmp_path / "empty"])
    with pytest.raises(DataError, match=r"a\.txt/below does not exist"):
        text_files([tmp_path / "a.txt" / "below"])
    with pytest.raises(DataError, match="x cannot be read: File name too long; expected a text file"):
        text_files([tmp_path / ("x" * 300)])
    with pytest.raises(DataError, match="null is neither a file nor a folder"):
        text_files([Path("/dev/null")])
    with pytest.raises(DataError, match=r"a\.txt is named twice"):
        text_files([tmp_path, tmp_path / "empty" / ".." / "a.txt"])


def test_a_folder_that_may_not_be_listed_is_not_called_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("iterdir", "is_file"):
        (tmp_path / "a.txt").write_text("x")
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, refuse)
            with pytest.raises(DataError, match=f"{tmp_path.name} cannot be read: Permission denied"):
                text_files([tmp_path])


# What is held out


def held(*sizes: int, share: float, seed: int = 0) -> list[int]:
    """How many sentences of each document are held out."""
    kept = hold_out(sizes, share, np.random.default_rng(seed))
    assert ((kept >= 0) & (kept <= sizes)).all()
    return [size - left for size, left in zip(sizes, kept.tolist())]


@pytest.mark.parametrize("sizes", [(200,), (40, 60, 3, 1), (7,) * 99])
def test_of_a_few_documents_the_ends_are_held_out(sizes: tuple[int, ...]) -> None:
    assert held(*sizes, share=0.1) == [round(size * 0.1) for size in sizes]


def test_of_many_documents_whole_ones_are_held_out() -> None:
    sizes = tuple(range(1, 201))
    found = held(*sizes, share=0.1)
    assert all(test in (0, size) for test, size in zip(found, sizes))
    assert 0.09 < sum(found) / sum(sizes) <= 0.1
    assert held(*sizes, share=0.1) == found
    assert held(*sizes, share=0.1, seed=1) != found
    # not only the small ones
    assert max(found) > 100


def test_with_a_share_of_nothing_nothing_is_held_out_and_with_a_small_one_something() -> None:
    for sizes in ((50,) * 120, (300,)):
        assert not any(held(*sizes, share=0.0))
    assert sum(held(*(50,) * 120, share=0.001)) == 50


# The text that ships with Python

TOPICS = {
    "zebra": (
        'The "assert" statement\n**********************\n\nAssert statements are a convenient way to insert debugging'
        " assertions\ninto a program. They can be\nswitched off.\n\n"
        '   assert_stmt ::= "assert" expression ["," expression] | "debug" [":" name]\n'
    ),
    "again": "Assert statements are a convenient way to insert debugging\nassertions. More of it here.\n",
    "alone": "Nothing but one sentence of some length.",
}
MODULE = '''"""What this module does is nothing at all.

Really, it does nothing for anybody.

>>> and this session is not read because it is code
"""
import no_such_module
raise SystemExit("never imported")

class First:
    """A class of things that are first of all things."""

    async def inner(self):
        """Waits for what it was given, and then it ends."""

def later():
    """The function after it gives what it was given."""

text = "\\d"
'''


@pytest.fixture
def stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def only_topics(name: str) -> Any:
        assert name == "pydoc_data.topics"
        return types.SimpleNamespace(topics=TOPICS)

    monkeypatch.setattr(importlib, "import_module", only_topics)
    for name in ("b.py", "pack/a.py", "test/x.py", "site-packages/y.py", "tkinter/z.py", "_sysconfigdata_x.py"):
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(MODULE.replace("nothing", f"nothing of {path.stem}").replace("given", path.stem))
    (tmp_path / "lib" / "broken.py").write_text('"""Half a file that is no Python at all. Not one."""\nif')
    return tmp_path / "lib"


def test_topics_and_docstrings_become_documents_in_the_order_of_their_names(stdlib: Path) -> None:
    found, source = python_documents(stdlib)
    assert [document.name for document in found] == ["topic again", "topic zebra", "module b", "module pack.a"]
    assert found[2].sentences == [
        "What this module does is nothing of b at all.",
        "Really, it does nothing of b for anybody.",
        "A class of things that are first of all things.",
        "Waits for what it was b, and then it ends.",
        "The function after it gives what it was b.",
    ]
    assert source.sha256 == python_documents(stdlib)[1].sha256
    (stdlib / "b.py").write_text(MODULE)
    assert source.sha256 != python_documents(stdlib)[1].sha256


def test_grammars_titles_and_sessions_are_not_taken_for_english(stdlib: Path) -> None:
    (topic,) = (document for document in python_documents(stdlib)[0] if document.name == "topic zebra")
    assert topic.sentences == [
        "Assert statements are a convenient way to insert debugging assertions into a program.",
        "They can be switched off.",
    ]


def test_a_paragraph_is_read_once(stdlib: Path) -> None:
    (stdlib / "c.py").write_text((stdlib / "b.py").read_text())
    found, _ = python_documents(stdlib)
    assert [document.name for document in found] == ["topic again", "topic zebra", "module b", "module pack.a"]
    everything = [sentence for document in found for sentence in document.sentences]
    # the two modules of the fixture share one docstring, which the second does not repeat
    assert everything.count("A class of things that are first of all things.") == 1


def test_a_python_without_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(DataError, match=r"ships no text here .*--input"):
        python_documents(tmp_path)


@pytest.mark.slow
def test_this_python_ships_a_quarter_of_a_million_words() -> None:
    found, _ = python_documents()
    assert len(found) > 300
    everything = [sentence for document in found for sentence in document.sentences]
    assert sum(len(sentence.split()) for sentence in everything) > 200_000
    assert not any(">>>" in sentence for sentence in everything)
