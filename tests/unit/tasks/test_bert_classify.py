"""Labels of texts: the three forms of files, rows of one text or two, and figures as scikit-learn has them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetseq import ConfigError, DataError
from hetseq.balance.shares import assign_shares
from hetseq.comm.group import LocalGroup
from hetseq.data.loader import Source
from hetseq.data.plan import MicroBatchCap
from hetseq.task import counts_of
from hetseq.tasks.rows.labelled_texts import Columns, Labelled, read_labelled
from hetseq.training.validation import Validator
from tests.support import labelled


@pytest.fixture
def network(tmp_path: Path) -> list[str]:
    return labelled.write_network(tmp_path)


def task_of(tmp_path: Path, words: list[str], **files: str) -> Any:
    data = tmp_path / "data"
    data.mkdir(exist_ok=True)
    for name, text in {"train_csv": labelled.TEXTS, **files}.items():
        (data / name.replace("_", ".")).write_text(text, encoding="utf-8")
    return labelled.make("bert_classify", data, words)


def rows_of(path: Path, content: str, columns: Columns = Columns()) -> list[Labelled]:  # noqa: B008
    path.write_text(content, encoding="utf-8")
    return read_labelled(path, columns)


def test_the_three_forms_hold_the_same_rows(tmp_path: Path) -> None:
    csv = rows_of(tmp_path / "a.csv", 'text,label\n"a ""b"", c\nd",x\n\ne,y\n')
    assert csv == [Labelled(('a "b", c\nd',), "x", 2), Labelled(("e",), "y", 5)]
    assert rows_of(tmp_path / "a.tsv", 'sentence\tlabel\n"a b\tx\n') == [Labelled(('"a b',), "x", 2)]
    lines = [{"label": 3, "sentence": "a"}, {"sentence": "b", "label": "x", "more": None}]
    json_lines = rows_of(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)))
    assert json_lines == [Labelled(("a",), "3", 1), Labelled(("b",), "x", 2)]


def test_columns_are_found_by_usual_names_given_names_or_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    assert rows_of(path, "Text\tCategory\na\tx\n")[0].label == "x"
    assert rows_of(path, "intent\ttext\nx\ta\n") == [Labelled(("a",), "x", 2)]
    wide = "id\ta\tb\tgold\n7\tone\ttwo\tx\n"
    assert rows_of(path, wide, Columns("a", "B", "gold")) == [Labelled(("one", "two"), "x", 2)]
    assert rows_of(path, "1\tx\n", Columns("1")) == [Labelled(("1",), "x", 1)]
    assert rows_of(path, "u\t1\t*\ta\n", Columns("4", None, "2")) == [Labelled(("a",), "1", 1)]


@pytest.mark.parametrize(
    ("name", "content", "columns", "message"),
    [
        ("a.csv", "utterance,intent\na,x\n", Columns(), r"a.csv: its first line, 'utterance, intent', names no column"),
        ("a.csv", "id,text,gold\n1,a,x\n", Columns(), "names no column label or category"),
        ("a.csv", "text,label\na,x\n", Columns("body"), "a.csv has no column 'body': its first line names text, label"),
        ("a.csv", "a,x\n", Columns("1", None, "3"), "a.csv has 2 columns and no column 3"),
        ("a.csv", "text,label\na,x\na,b,x\n", Columns(), "a.csv, line 3 has 3 columns, but line 1 has 2"),
        ("a.csv", "text,label\na,x\nb,\n", Columns(), "a.csv, line 3 has no label"),
        ("a.csv", 'text,label\n"a,x\n', Columns(), "a.csv, line 2: unexpected end of data"),
        ("a.csv", "text,label\n", Columns(), "a.csv has no rows"),
        ("a.csv", "", Columns(), "a.csv is empty"),
        ("a.jsonl", '{"text": "a", "label": "x"}\n{"text": "a"\n', Columns(), "a.jsonl, line 2 is not JSON"),
        ("a.jsonl", '["a", "x"]\n', Columns(), "a.jsonl, line 1 is not a JSON object"),
        ("a.jsonl", '{"body": "a", "label": "x"}\n', Columns(), "line 1 has no 'text or sentence': it has body, label"),
        ("a.jsonl", '{"text": 3, "label": "x"}\n', Columns(), "line 1: its text is"),
        ("a.jsonl", '{"text": "a", "label": 0.5}\n', Columns(), "line 1: its label is 0.5"),
    ],
)
def test_a_file_that_is_none_is_refused(
    tmp_path: Path, name: str, content: str, columns: Columns, message: str
) -> None:  # fmt: skip
    with pytest.raises(DataError, match=message):
        rows_of(tmp_path / name, content, columns)


def test_labels_are_sorted_and_numbers_by_their_value(tmp_path: Path, network: list[str]) -> None:
    assert task_of(tmp_path, network).labels == ("cat", "people", "place")
    numbers = "text,label\na,10\nb,9\nc,2\n"
    assert task_of(tmp_path, network, train_csv=numbers).labels == ("2", "9", "10")
    with pytest.raises(DataError, match=r"gives all texts the label 'x'"):
        task_of(tmp_path, network, train_csv="text,label\na,x\n").labels  # noqa: B018


def test_a_label_that_training_does_not_know_is_refused_by_line(tmp_path: Path, network: list[str]) -> None:
    task = task_of(tmp_path, network, dev_tsv="text\tlabel\na\tcat\nb\tdog\n")
    with pytest.raises(DataError, match=r"dev.tsv, line 3: the label 'dog' does not occur in .*train.csv"):
        task.load_dataset("valid")


def test_two_texts_are_two_segments_and_the_longer_is_cut_first(
    tmp_path: Path, network: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    pairs = "one,two,label\nthe cat,anna sat in,x\n" + f"cat sat,{'mat ' * 20},y\n{'mat ' * 20},{'cat ' * 20},y\n"
    pairs += f"{'mat ' * 20},{'cat ' * 19},y\n"
    words = [*network, "--text-column", "one", "--text-pair-column", "two", "--no-packing"]
    with caplog.at_level(logging.WARNING):
        dataset = task_of(tmp_path, words, train_csv=pairs).load_dataset("train")
    batch = labelled.batch_of(dataset)
    shown = [" ".join(labelled.TOKENS[piece] for piece in row) for row in batch["input_ids"]]
    assert shown == [
        "[CLS] the cat [SEP] anna sat in [SEP] [PAD] [PAD] [PAD] [PAD]",
        "[CLS] cat sat [SEP] mat mat mat mat mat mat mat [SEP]",
        "[CLS] mat mat mat mat [SEP] cat cat cat cat cat [SEP]",
        "[CLS] mat mat mat mat mat [SEP] cat cat cat cat [SEP]",
    ]
    assert batch["token_type_ids"].tolist() == [
        [0] * 4 + [1] * 4 + [0] * 4,
        [0] * 4 + [1] * 8,
        [0] * 6 + [1] * 6,
        [0] * 7 + [1] * 5,
    ]
    assert batch["attention_mask"].sum(dim=1).tolist() == dataset.lengths.tolist() == [8, 12, 12, 12]
    assert "3 of 4 texts are longer than 12 pieces" in caplog.text
    one_segment = labelled.write_network(tmp_path, type_vocab_size=1)
    with pytest.raises(ConfigError, match=r"--text-pair-column two makes rows of two segments, but type_vocab_size"):
        task_of(tmp_path, [*one_segment, *words[len(network) :]], train_csv=pairs).load_dataset("train")


def test_neither_padding_nor_packing_changes_loss_or_label(tmp_path: Path, network: list[str]) -> None:
    task, plain = (task_of(tmp_path, [*network, *more]) for more in ([], ["--no-packing"]))
    torch.manual_seed(1)
    model, dataset = task.build_model().double().eval(), task.load_dataset("train")
    packed, padded = (labelled.batch_of(each.load_dataset("train")) for each in (task, plain))
    alone = [labelled.batch_of(dataset, index) for index in range(4)]
    assert sum(packed["sequences"].lengths) == int(padded["attention_mask"].sum()) < padded["input_ids"].numel()
    losses = [task.loss(model, batch)["loss"].item() for batch in alone]
    for together in (packed, padded):
        assert task.loss(model, together)["loss"].item() == pytest.approx(sum(losses), rel=1e-13)
        assert task.predictions(model, together) == [line for batch in alone for line in task.predictions(model, batch)]
        assert set(task.predictions(model, together)) <= {"cat", "people", "place"}
        assert task.metrics(model, together) == task.metrics(model, padded)


class Saying(nn.Module):
    """Says of a text the label whose number its first piece after [CLS] stands for."""

    def forward(self, ids: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(ids[:, 1] - 5, 6).float()


@pytest.mark.slow
def test_accuracy_and_macro_f1_are_those_of_scikit_learn(tmp_path: Path, network: list[str]) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    torch.manual_seed(5)
    right = torch.randint(0, 5, (80,))  # the sixth label is in training only, and is never found
    found = torch.where(torch.rand(80) < 0.6, right, torch.randint(0, 5, (80,)))
    words = [piece for piece in labelled.PIECES if not piece.startswith("#")][:6]
    train = "text,label\n" + "".join(f"{word},l{number}\n" for number, word in enumerate(words))
    valid = "text,label\n" + "".join(f"{words[said]},l{label}\n" for said, label in zip(found, right))
    task = task_of(tmp_path, network, train_csv=train, valid_csv=valid)
    dataset = task.load_dataset("valid")

    def count(sample: Any, size: int) -> tuple[float, ...]:
        return tuple(counts_of(task, sample, size).values())

    source = Source(dataset, dataset.collater, count, lambda sample: sample, 1, seed=7)
    validator = Validator("valid", source, MicroBatchCap(7), None, ("loss",), (1.0,))
    numbers = validator.evaluate(task, Saying(), LocalGroup(), lambda total: assign_shares(total, (1.0,)))
    assert list(numbers) == validator.names(task, Saying()) == ["loss", "accuracy", "macro_f1"]
    assert numbers["accuracy"] == pytest.approx(metrics.accuracy_score(right, found), abs=1e-12)
    assert numbers["macro_f1"] == pytest.approx(metrics.f1_score(right, found, average="macro"), abs=1e-12)
    assert 0.4 < numbers["macro_f1"] < 0.9


def test_the_questions_of_banking77(shared_data: Callable[[str], Path]) -> None:
    bert = shared_data("bert/uncased_L-12_H-768_A-12")
    words = ["--config-file", str(bert / "bert_config.json"), "--dict", str(bert / "vocab.txt")]
    task = labelled.make("bert_classify", shared_data("cls/banking77"), words)
    assert (len(task.load_dataset("test")), len(task.labels)) == (3080, 77)
