"""Tags of words: files and entities against their definitions, the numbers of a validation against seqeval's."""

from __future__ import annotations

import itertools
import logging
import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq import DataError, MissingSplitError
from hetseq.balance.shares import assign_shares
from hetseq.comm.group import LocalGroup
from hetseq.data.loader import Source
from hetseq.data.plan import MicroBatchCap
from hetseq.task import counts_of
from hetseq.tasks.rows.tagged_words import entities, read_sentences
from hetseq.training.validation import Validator
from tests.support import labelled

SCHEMES = ["O", *(f"{position}-{kind}" for position in "BIES" for kind in ("PER", "LOC"))]


@pytest.fixture
def network(tmp_path: Path) -> list[str]:
    return labelled.write_network(tmp_path)


def task_of(tmp_path: Path, words: Sequence[str], train: str = labelled.TAGGED, **others: str) -> Any:
    data = tmp_path / "data"
    data.mkdir(exist_ok=True)
    for name, text in {"train": train, **others}.items():
        (data / f"{name}.txt").write_text(text, encoding="utf-8")
    return labelled.make("bert_ner", data, list(words))


def by_definition(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Entities by conlleval's two questions: does one end before this word, does one begin with it?"""
    chunks, begin = set(), 0
    pairs = [("O", "")] + [(tag[0], tag[2:]) for tag in tags] + [("O", "")]
    for at, ((before, kind_before), (here, kind)) in enumerate(itertools.pairwise(pairs)):
        changes = kind_before != kind
        ends = before in "ES" or (before in "BI" and here in "BSO") or (before != "O" and changes)
        begins = here in "BS" or (before in "ESO" and here in "EI") or (here != "O" and changes)
        if ends:
            chunks.add((kind_before, begin, at - 1))
        if begins:
            begin = at
    return chunks


def test_entities_are_those_of_the_definition_for_all_tags_in_any_order() -> None:
    for tags in itertools.product(SCHEMES, repeat=4):
        assert entities(tags) == by_definition(tags), tags


def test_other_letters_and_bare_kinds_make_entities_too() -> None:
    assert entities(["B-PER", "M-PER", "L-PER", "U-PER", "U-PER"]) == {("PER", 0, 2), ("PER", 3, 3), ("PER", 4, 4)}
    assert entities(["ORG", "ORG", "PER", "O", "ORG"]) == {("ORG", 0, 1), ("PER", 2, 2), ("ORG", 4, 4)}
    assert entities(["B", "I", "B", "O"]) == {("_", 0, 1), ("_", 2, 2)}
    assert entities(["B-creative-work", "I-creative-work"]) == {("creative-work", 0, 1)}


def drawn(seed: int, sentences: int) -> tuple[list[list[str]], list[list[str]]]:
    """Tags, and tags that are often the same."""
    draw = random.Random(seed)
    right = [[draw.choice(SCHEMES) for _ in range(draw.randint(1, 9))] for _ in range(sentences)]
    found = [[tag if draw.random() < 0.7 else draw.choice(SCHEMES) for tag in tags] for tags in right]
    return right, found


class Saying(torch.nn.Module):
    """Says the tags of `said` for words, whose sentence is known by the number in its first piece but one."""

    def __init__(self, said: list[list[int]], count: int) -> None:
        super().__init__()
        self.said, self.count = said, count

    def forward(self, ids: torch.Tensor, types: torch.Tensor, mask: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        rows, columns = at // ids.shape[1], at % ids.shape[1]
        numbers = [self.said[int(ids[row, -1])][int(column) - 1] for row, column in zip(rows, columns)]
        return torch.nn.functional.one_hot(torch.tensor(numbers, dtype=torch.int64), self.count).float()


def validated(task: Any, model: torch.nn.Module, dataset: Any, cap: int) -> dict[str, float]:
    def count(sample: Any, size: int) -> tuple[float, ...]:
        return tuple(counts_of(task, sample, size).values())

    source = Source(dataset, dataset.collater, count, lambda sample: sample, 1, seed=7)
    validator = Validator("valid", source, MicroBatchCap(cap), None, ("loss",), (1.0,))
    assert validator.names(task, model) == ["loss", "f1", "precision", "recall", "token_accuracy", "token_f1"]
    return validator.evaluate(task, model, LocalGroup(), lambda total: assign_shares(total, (1.0,)))


def token_f1(tags: list[tuple[str, str]]) -> float:
    """The harmonic mean of precision and recall of the words that are not O, of (right, found) of each word."""
    hits = sum(right == found != "O" for right, found in tags)
    precision = hits / sum(found != "O" for _, found in tags)
    recall = hits / sum(right != "O" for right, _ in tags)
    return 2 * precision * recall / (precision + recall)


class Numbered:
    """The data set, with the number of the sample where the last column of its row would be."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return index, self.dataset[index]

    def collater(self, samples: Any) -> Any:
        batch = self.dataset.collater([sample for _, sample in samples])
        numbers = torch.tensor([number for number, _ in samples])
        width = batch["input_ids"].shape[1]
        rows, columns = batch["positions"] // width, batch["positions"] % width
        ids = torch.cat([batch["input_ids"], numbers[:, None]], dim=1)
        return {**batch, "input_ids": ids, "positions": rows * (width + 1) + columns}


@pytest.mark.parametrize("judge", ["the definition", "seqeval"])
def test_the_numbers_of_a_split_are_those_of_all_its_sentences_at_once(
    judge: str, tmp_path: Path, network: list[str]
) -> None:
    right, found = drawn(3, 60)
    text = "\n".join("".join(f"cat {tag}\n" for tag in tags) for tags in right)
    task = task_of(tmp_path, [*network, "--no-packing"], text)
    assert task.labels == tuple(sorted(SCHEMES))
    model = Saying([[task.labels.index(tag) for tag in tags] for tags in found], len(task.labels))
    numbers = validated(task, model, Numbered(task.load_dataset("train")), cap=7)
    if judge == "seqeval":
        metrics = pytest.importorskip("seqeval.metrics")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = {
                "f1": metrics.f1_score(right, found),
                "precision": metrics.precision_score(right, found),
                "recall": metrics.recall_score(right, found),
                "token_accuracy": metrics.accuracy_score(right, found),
            }
    else:
        pairs = [(by_definition(one), by_definition(other)) for one, other in zip(right, found)]
        hits, there, said = (sum(map(len, sets)) for sets in zip(*((one & two, one, two) for one, two in pairs)))
        precision, recall = hits / said, hits / there
        tags = [(a, b) for one, other in zip(right, found) for a, b in zip(one, other)]
        expected = {
            "f1": 2 * precision * recall / (precision + recall),
            "precision": precision,
            "recall": recall,
            "token_f1": token_f1(tags),
            "token_accuracy": sum(a == b for a, b in tags) / len(tags),
        }
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, abs=1e-9, rel=0)
    assert 0.3 < numbers["f1"] < 0.9


def test_the_first_piece_of_a_word_has_its_tag_and_the_others_have_none(tmp_path: Path, network: list[str]) -> None:
    dataset = task_of(tmp_path, network).load_dataset("train")
    sample = dataset[1]  # the cat un ##walk ##ed
    assert [labelled.TOKENS[piece] for piece in sample["pieces"]] == [
        "[CLS]", "the", "cat", "un", "##walk", "##ed", "[SEP]",
    ]  # fmt: skip
    assert sample["columns"].tolist() == [1, 2, 3]
    batch = labelled.batch_of(dataset)
    assert batch["input_ids"].shape == (2, 7)
    assert batch["positions"].tolist() == [1, 2, 3, 4, 5, 8, 9, 10]
    assert batch["kept"].tolist() == list(range(8))
    assert dataset.lengths.tolist() == [7, 7]


def test_neither_padding_nor_packing_changes_loss_or_tags(tmp_path: Path, network: list[str]) -> None:
    text = labelled.TAGGED + "\n\ncat O\n\nBob B-PER\nwalk O\n".replace(" ", "\t")
    task, plain = (task_of(tmp_path, [*network, *more], text) for more in ([], ["--no-packing"]))
    torch.manual_seed(1)
    model, dataset = task.build_model().double().eval(), task.load_dataset("train")
    packed, padded = (labelled.batch_of(each.load_dataset("train")) for each in (task, plain))
    alone = [labelled.batch_of(dataset, index) for index in range(4)]
    assert sum(packed["sequences"].lengths) == int(padded["attention_mask"].sum()) < padded["input_ids"].numel()
    losses = [task.loss(model, batch)["loss"].item() for batch in alone]
    for together in (packed, padded):
        assert task.loss(model, together)["loss"].item() == pytest.approx(sum(losses), rel=1e-13)
        assert task.predictions(model, together) == [line for batch in alone for line in task.predictions(model, batch)]
        assert [len(line.split(" ")) for line in task.predictions(model, together)] == [5, 3, 1, 2]
        assert task.count(together) == {"loss": 11}
        assert task.metrics(model, together) == task.metrics(model, padded)


def test_words_that_are_cut_off_are_no_loss_and_count_as_missed(
    tmp_path: Path, network: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    text = "unwalked O\n" * 3 + "Paris B-LOC\ncat O\nAnna B-PER\n\nBob S-PER\n"
    with caplog.at_level(logging.WARNING):
        task = task_of(tmp_path, [*network, "--max-pred-length", "12", "--no-packing"], text)
        dataset = task.load_dataset("train")
    assert "train.txt: 1 of 2 sentences are longer than 12 pieces and are truncated: 2 words" in caplog.text
    batch = labelled.batch_of(dataset)
    assert batch["input_ids"].shape == (2, 12)
    assert labelled.TOKENS[batch["input_ids"][0, -1]] == "[SEP]"
    assert task.count(batch) == {"loss": 5}
    tags = [task.labels.index(tag) for tag in ("O", "O", "O", "B-LOC", "S-PER")]
    model = lambda *inputs: torch.nn.functional.one_hot(torch.tensor(tags), len(task.labels)).float()  # noqa: E731
    assert task.predictions(model, batch) == ["O O O B-LOC O O", "S-PER"]
    assert task.metrics(model, batch) == {
        "f1": (4.0, 5.0), "precision": (2.0, 2.0), "recall": (2.0, 3.0), "token_f1": (4.0, 5.0),
        "token_accuracy": (6.0, 7.0),
    }  # fmt: skip


def test_a_word_of_which_nothing_is_left_is_unknown_and_keeps_its_tag(tmp_path: Path, network: list[str]) -> None:
    dataset = task_of(tmp_path, network, "\u200b\tO\nqqq\tO\ncat\tX\n").load_dataset("train")
    assert [labelled.TOKENS[piece] for piece in dataset[0]["pieces"]] == ["[CLS]", "[UNK]", "[UNK]", "cat", "[SEP]"]
    assert dataset[0]["columns"].tolist() == [1, 2, 3]


def test_columns_by_spaces_or_tabs_documents_and_marks(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(
        "\ufeff-DOCSTART- -X- O O\r\n\r\nEU NNP B-NP B-ORG\r\nsaid VBD O O\r\n \t \r\n\r\nNo DT O O", "utf-8"
    )
    assert [(s.words, s.tags, s.lines) for s in read_sentences(path)] == [
        (("EU", "said"), ("B-ORG", "O"), (3, 4)),
        (("No",), ("O",), (7,)),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "train.txt is empty"),
        (b"\n \n", "train.txt is empty"),
        (b"-DOCSTART- O\n", "train.txt has no words"),
        (b"cat O\nmat\n", "train.txt, line 2: 'mat' has no tag"),
        (b"cat\tO\nmat\t\n", "train.txt, line 2: 'mat' has no tag"),
        (b"cat O\nNew York O\n", "train.txt, line 2 has 3 columns, but line 1 has 2"),
        ("cat O\nZürich O\n".encode("latin-1"), "train.txt, line 2: byte 0xfc is not UTF-8"),
        (b"cat O\nmat O\n", "train.txt gives all words the tag 'O'"),
    ],
)
def test_a_file_that_is_none_is_refused_by_line(
    tmp_path: Path, network: list[str], content: bytes, message: str
) -> None:
    task = task_of(tmp_path, network)
    (tmp_path / "data" / "train.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        task.load_dataset("train")


def test_a_tag_that_training_does_not_know_is_refused_by_line(tmp_path: Path, network: list[str]) -> None:
    task = task_of(tmp_path, network, dev="cat\tO\n\nAnna\tB-MISC\n")
    with pytest.raises(DataError, match=r"dev.txt, line 3: the tag 'B-MISC' does not occur in .*train.txt"):
        task.load_dataset("valid")


def test_splits_are_found_by_their_words_and_by_whole_names(tmp_path: Path, network: list[str]) -> None:
    known = "cat\tO\n"
    task = task_of(tmp_path, network, dev=known, test=known, notes_value=known)
    assert [task.load_dataset(split).files[0].name for split in ("train", "valid", "test", "dev.txt")] == [
        "train.txt", "dev.txt", "test.txt", "dev.txt",
    ]  # fmt: skip
    with pytest.raises(MissingSplitError, match=r"no file for the split 'other'.*found dev.txt, notes_value.txt"):
        task.load_dataset("other")
    task = task_of(tmp_path, network, dev=known, valid=known)
    with pytest.raises(DataError, match=r"several files for the split 'valid', dev.txt and valid.txt"):
        task.load_dataset("valid")
    assert task.load_dataset("valid.txt").files[0].name == "valid.txt"
    for name in ("dev.txt", "valid.txt"):
        (tmp_path / "data" / name).rename(tmp_path / "data" / f"my.val.{name[0]}.tsv")
    with pytest.raises(DataError, match=r"several files for the split 'valid', my.val.d.tsv and my.val.v.tsv"):
        task.load_dataset("valid")
    both = labelled.make("bert_ner", tmp_path / "data", [*network, "--train-subset", "a_train_dev.txt"])
    (tmp_path / "data" / "a_train_dev.txt").write_text(labelled.TAGGED)
    for path in (tmp_path / "data").glob("*.tsv"):
        path.unlink()
    with pytest.raises(DataError, match=r"a_train_dev.txt belongs to two splits"):
        both.load_dataset("valid")


def test_files_are_those_that_are_read(tmp_path: Path, network: list[str]) -> None:
    task = task_of(tmp_path, network, dev="cat\tO\n")
    assert [path.name for path in task.load_dataset("valid").files] == [
        "dev.txt", "network.json", "words.txt",
    ]  # fmt: skip


def test_other_tags_of_the_training_split_are_another_vocabulary(tmp_path: Path, network: list[str]) -> None:
    tags = ["cat\tO\nran\tB-X\n", "cat\tO\nran\tB-Y\n", "ran\tB-Y\ncat\tO\n"]
    folders = [tmp_path / str(number) for number in range(3)]
    digests = []
    for folder, text in zip(folders, tags):
        folder.mkdir()
        digests.append(task_of(folder, network, train=text).load_dataset("train").vocabulary_digest)
    assert digests[0] != digests[1] == digests[2]


def test_the_tweets_of_wnut_17(shared_data: Callable[[str], Path]) -> None:
    words = ["--config-file", str(shared_data("bert/uncased_L-12_H-768_A-12") / "bert_config.json")]
    words += ["--dict", str(shared_data("bert/uncased_L-12_H-768_A-12") / "vocab.txt")]
    task = labelled.make("bert_ner", shared_data("ner/wnut17"), words)
    dataset = task.load_dataset("valid")
    assert (len(dataset), len(task.labels)) == (1009, 13)
    assert sum(len(dataset[index]["tags"]) for index in range(1009)) == 15733
