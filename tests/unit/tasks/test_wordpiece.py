"""Vocabularies: trained the same way each time, read with suspicion, applied as BERT does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hetseq import ConfigError, DataError
from hetseq.tasks.bert import wordpiece
from hetseq.tasks.bert.vocab import read_vocab
from hetseq.tasks.bert.wordpiece import SPECIAL_TOKENS, Encoder, Vocabulary, read_vocabulary, train_vocabulary

ROOT = Path(__file__).resolve().parents[3]

SPECIALS = "".join(f"{token}\n" for token in SPECIAL_TOKENS)
SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "A dog is not a fox, and foxes are not dogs!",
    "“Quickly,” said the fox, “jump over the dogs.”",
    "Jumping is what the brown foxes do; lying is what lazy dogs do.",
] * 3


def write(folder: Path, *tokens: str, text: str | None = None) -> Path:
    path = folder / "vocab.txt"
    path.write_bytes(("\n".join(tokens) + "\n" if text is None else text).encode())
    return path


def pieces(vocabulary: Vocabulary, sentence: str) -> list[str]:
    (ids,) = Encoder(vocabulary).encode([sentence])
    return [vocabulary.tokens[number] for number in ids]


# Training

TRAIN_AGAIN = """
from hetseq.tasks.bert import wordpiece
from hetseq.tasks.bert.wordpiece import train_vocabulary
from tests.unit.tasks.test_wordpiece import SENTENCES
import sys
sys.stdout.write(train_vocabulary(SENTENCES, 200, is_lower_case=True).text())
"""


def test_another_process_trains_the_same_vocabulary() -> None:
    # the trainer's hash maps are seeded anew for each map, so that once is a weak test and eight times a strong one
    here = {train_vocabulary(SENTENCES, 200, is_lower_case=True) for _ in range(8)}
    assert len(here) == 1
    there = subprocess.run([sys.executable, "-c", TRAIN_AGAIN], cwd=ROOT, capture_output=True, check=True).stdout
    assert there.decode() == here.pop().text()


def test_the_order_of_the_sentences_is_nothing_to_it_and_their_words_are() -> None:
    vocabulary = train_vocabulary(SENTENCES, 200, is_lower_case=True)
    assert train_vocabulary(SENTENCES[::-1], 200, is_lower_case=True) == vocabulary
    assert train_vocabulary([*SENTENCES, "Dodos dodder. Dodos dodder."], 200, is_lower_case=True) != vocabulary


@pytest.mark.parametrize("size", [80, 95, 110])
def test_a_vocabulary_begins_with_the_special_tokens_and_has_no_more_than_its_size(size: int) -> None:
    tokens = train_vocabulary(SENTENCES, size, is_lower_case=True).tokens
    assert tokens[:5] == SPECIAL_TOKENS
    assert len(tokens) == len(set(tokens)) == size
    assert not any(any(letter.isupper() for letter in token) for token in tokens[5:])
    assert "the" in tokens


def test_what_was_trained_on_is_never_unknown() -> None:
    vocabulary = train_vocabulary(SENTENCES, 90, is_lower_case=True)
    for sentence in SENTENCES:
        assert "[UNK]" not in pieces(vocabulary, sentence)
    assert pieces(vocabulary, "%") == ["[UNK]"]


def test_signs_and_chinese_characters_stand_alone_and_continue_nothing() -> None:
    tokens = train_vocabulary([*SENTENCES, "中文 and 中国。", "x2 x2"], 200, is_lower_case=True).tokens
    assert {"中", "文", ".", ","} < set(tokens)
    assert not {"##中", "##文", "##.", "##,", "##“"} & set(tokens)
    assert {"##2", "##e"} < set(tokens)


def test_cased_text_keeps_its_capitals_and_accents() -> None:
    words = [*SENTENCES, "Café Café Café."]
    assert "Café" in train_vocabulary(words, 200, is_lower_case=False).tokens
    assert "cafe" in train_vocabulary(words, 200, is_lower_case=True).tokens


def test_a_size_without_room_for_the_alphabet_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--vocab-size 40 has no room .*give at least \d+") as refused:
        train_vocabulary(SENTENCES, 40, is_lower_case=True)
    least = int(str(refused.value).split("at least ")[1].split(",")[0])
    assert len(train_vocabulary(SENTENCES, least, is_lower_case=True).tokens) == least


def test_of_a_thousand_and_more_characters_the_rarest_are_left_out_always_the_same_ones() -> None:
    rare = [chr(0x4E00 + number) for number in range(1200)]
    sentences = [*SENTENCES, " ".join(rare), " ".join(rare[:900])]
    backwards = [" ".join(reversed(sentence.split())) for sentence in reversed(sentences)]
    first, again = (train_vocabulary(given, 4000, is_lower_case=True) for given in (sentences, backwards))
    assert first == again
    assert set(rare[:900]) < set(first.tokens)
    assert rare[-1] not in first.tokens


# Reading


def test_a_vocabulary_is_read_in_its_order(tmp_path: Path) -> None:
    path = write(tmp_path, "[PAD]", "[unused0]", *SPECIAL_TOKENS[1:], "a", "##b")
    expected = ("[PAD]", "[unused0]", *SPECIAL_TOKENS[1:], "a", "##b")
    assert read_vocabulary(path, is_lower_case=True).tokens == expected
    assert read_vocabulary(path, is_lower_case=True).text() == path.read_text()
    windows = write(tmp_path, text="\r\n".join(expected))
    assert read_vocabulary(windows, is_lower_case=True).tokens == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a\nb\n", r"no \[PAD\], \[UNK\], \[CLS\], \[SEP\], \[MASK\]"),
        ("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n", r"no \[MASK\]"),
        (f"{SPECIALS}a\nb\na\n", "line 8: token 'a' is also in line 6"),
        (f"{SPECIALS}[PAD]\n", r"line 6: token '\[PAD\]' is also in line 1"),
        (f"{SPECIALS}\na\n", "line 6 is empty"),
        (f"{SPECIALS}a\n\n", "line 7 is empty"),
        (f"{SPECIALS}a\n ", "line 7 is empty"),
        (f"\ufeff{SPECIALS}a\n", "byte order mark"),
        ("", "is empty"),
    ],
)
def test_a_vocabulary_that_training_would_refuse_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = write(tmp_path, text=text)
    with pytest.raises(DataError, match=complaint) as refused:
        read_vocabulary(path, is_lower_case=True)
    assert str(path) in str(refused.value)
    with pytest.raises(DataError):
        read_vocab(path)


def test_a_vocabulary_that_is_no_text_or_not_there_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bin").write_bytes(b"[PAD]\n\xff\xfe")
    for name, complaint in {
        "none.txt": "none.txt cannot be read: No such file .*; expected the vocabulary of a BERT model.*--vocab-file",
        "x" * 300: "x cannot be read: File name too long; .*--vocab-file",
        ".": " is not a file; .*--vocab-file",
        "pipe": "pipe is not a file; .*--vocab-file",
        "bin": "line 2: byte 0xff is not UTF-8",
    }.items():
        with pytest.raises(DataError, match=complaint):
            read_vocabulary(tmp_path / name, is_lower_case=True)


# Encoding


def test_words_are_cut_into_the_longest_pieces() -> None:
    vocabulary = Vocabulary((*SPECIAL_TOKENS, "un", "##aff", "##able", "##a", ",", "cafe", "run"))
    assert pieces(vocabulary, "Unaffable, Café  RUN") == ["un", "##aff", "##able", ",", "cafe", "run"]
    assert pieces(vocabulary, "unaffx run") == ["[UNK]", "run"]
    assert pieces(Vocabulary(vocabulary.tokens, is_lower_case=False), "Café run") == ["[UNK]", "run"]


def test_special_tokens_in_a_text_are_text_but_for_the_unknown_word() -> None:
    vocabulary = Vocabulary((*SPECIAL_TOKENS, "[", "]", "mask", "sep", "cls", "pad", "a"))
    assert pieces(vocabulary, "a [MASK] [SEP]") == ["a", "[", "mask", "]", "[", "sep", "]"]
    assert pieces(vocabulary, "[CLS][PAD]") == ["[", "cls", "]", "[", "pad", "]"]
    assert pieces(vocabulary, "a [UNK]a") == ["a", "[UNK]", "a"]


def test_the_published_vocabulary_is_read_and_applied(shared_data: Callable[[str], Path]) -> None:
    path = shared_data("bert/uncased_L-12_H-768_A-12") / "vocab.txt"
    vocabulary = read_vocabulary(path, is_lower_case=True)
    assert len(vocabulary.tokens) == 30_522
    assert vocabulary.text().encode() == path.read_bytes()
    assert pieces(vocabulary, "“Is he married, or unmarried?”") == (
        ["“", "is", "he", "married", ",", "or", "unmarried", "?", "”"]
    )


def test_words_that_are_remembered_have_the_ids_of_whole_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = "abcdefgxyzÉéßİΣς中́ٱ"
    tokens = [*letters.lower(), *(f"##{c}" for c in letters.lower()), *".,!“”’—…-'[]*", "unk", "##unk", "mask"]
    vocabulary = Vocabulary((*SPECIAL_TOKENS, *dict.fromkeys(tokens)))
    chance = np.random.default_rng(0)
    signs = [*letters, *".,!“”’—…-'[]*", "[UNK]", "[MASK]", "\x01", "\u200b", "\u0301", "\u3000x", "Dž"]
    sentences = [
        " ".join("".join(chance.choice(signs, size=chance.integers(0, 5))) for _ in range(chance.integers(1, 6)))
        for _ in range(400)
    ]
    encoder = Encoder(vocabulary)
    expected = [encoder._tokenizer.encode(sentence, add_special_tokens=False).ids for sentence in sentences]
    for most in (1_000_000, 10):
        monkeypatch.setattr(wordpiece, "_MOST_WORDS", most)
        for start in range(0, 400, 50):
            ids, lengths = encoder.encode_joined(sentences[start : start + 50])
            assert ids.tolist() == [number for each in expected[start : start + 50] for number in each]
            assert lengths.tolist() == [len(each) for each in expected[start : start + 50]]
    assert len(encoder._numbers) < 300  # of 50 sentences, not of 400
    assert encoder.encode([]) == []
    assert [ids.tolist() for ids in encoder.encode(sentences)] == expected
