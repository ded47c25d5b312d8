"""What the BERT task measures, and what it asks of its files."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetseq import DataError
from hetseq import config as options
from hetseq.task import make_task
from hetseq.tasks.bert.task import BertTask
from tests.support import bert

#: two rows of 4; masked are a word left as it is, two under a [MASK] of 4, and one under another word
SAMPLE = {
    "input_ids": torch.tensor([[2, 7, 4, 3], [2, 4, 9, 3]]),
    "token_type_ids": torch.zeros(2, 4, dtype=torch.int64),
    "attention_mask": torch.ones(2, 4, dtype=torch.bool),
    "masked_positions": torch.tensor([1, 2, 5, 6]),
    "masked_ids": torch.tensor([7, 8, 6, 5]),
    "next_sentence_labels": torch.tensor([0, 1]),
}


class Answering(nn.Module):
    """Says that the words were `words`, of 10, and that every pair belongs together."""

    def __init__(self, words: list[int]) -> None:
        super().__init__()
        self.words = words

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.functional.one_hot(torch.tensor(self.words), 10).float(), torch.tensor([[1.0, 0.0]] * 2)


@pytest.fixture
def task(tmp_path: Path) -> Any:
    data = bert.write_folder(tmp_path / "data", 60)
    return make_task(BertTask, options.parse(["--task", "bert", "--data", str(data)]))


def test_words_and_pairs_are_counted_apart(task: BertTask) -> None:
    assert task.count(SAMPLE) == {"mlm": 4, "nsp": 2}
    bare = {**SAMPLE, "masked_positions": torch.tensor([], dtype=torch.int64), "masked_ids": torch.tensor([]).long()}
    assert task.count(bare) == {"mlm": 0, "nsp": 2}


def test_a_word_that_the_input_shows_is_not_hidden(task: BertTask) -> None:
    copier = Answering([7, 4, 4, 9]).eval()  # whatever stands there
    found = task.metrics(copier, SAMPLE)
    assert found["mlm_accuracy"] == (1.0, 4.0)
    assert found["hidden_accuracy"] == (0.0, 3.0)
    assert found["nsp_accuracy"] == (1.0, 2.0)
    reader = Answering([0, 8, 6, 0]).eval()
    assert task.metrics(reader, SAMPLE)["hidden_accuracy"] == (2.0, 3.0)
    loss, count = task.metrics(reader, SAMPLE)["hidden_mlm"]
    words, _ = reader()
    assert loss == pytest.approx(nn.functional.cross_entropy(words[1:], SAMPLE["masked_ids"][1:], reduction="sum"))
    assert count == 3.0


def test_nothing_masked_is_nothing_measured(task: BertTask) -> None:
    nothing = torch.tensor([], dtype=torch.int64)
    model = Answering([]).eval()
    model.forward = lambda *inputs: (torch.zeros(0, 10), torch.zeros(2, 2))  # type: ignore[method-assign]
    found = task.metrics(model, {**SAMPLE, "masked_positions": nothing, "masked_ids": nothing})
    assert found["mlm_accuracy"] == found["hidden_accuracy"] == found["hidden_mlm"] == (0.0, 0.0)


@pytest.mark.parametrize("words", [["--mask-prob", "0.4"], ["--whole-words"]])
def test_masks_that_files_hold_already_are_not_drawn_by_options(words: list[str], tmp_path: Path) -> None:
    data = bert.write_folder(tmp_path / "data", 60)
    task: Any = make_task(BertTask, options.parse(["--task", "bert", "--data", str(data), *words]))
    with pytest.raises(DataError, match=f"{' '.join(words)} is for records.* hetseq.preprocessing.convert_hdf5"):
        task.load_dataset("train")


def test_a_file_of_two_splits_is_refused(tmp_path: Path) -> None:
    data = bert.write_folder(tmp_path / "data", 60, train="pretrain", valid="pretrain_valid")
    task: Any = make_task(BertTask, options.parse(["--task", "bert", "--data", str(data)]))
    for split in ("train", "valid"):
        with pytest.raises(
            DataError, match=r"pretrain_valid_0.hdf5 belongs to two splits.*'train'.*'valid'|'valid'.*'train'"
        ):
            task.load_dataset(split)


def test_padding_elsewhere_than_the_configuration_says_is_refused(tmp_path: Path) -> None:
    data = bert.write_folder(tmp_path / "data", 60)
    tokens = [*bert.TOKENS[1:4], "[PAD]", *bert.TOKENS[4:]]
    (data / "vocab.txt").write_text("\n".join(tokens) + "\n")
    task: Any = make_task(BertTask, options.parse(["--task", "bert", "--data", str(data)]))
    with pytest.raises(DataError, match=r'pad_token_id 0 \(the default\), but \[PAD\] is token 3 .*"pad_token_id": 3'):
        task.build_model()
    (data / "bert_config.json").write_text(json.dumps({**bert.CONFIG, "pad_token_id": 3}))
    assert task.build_model().config.pad_token_id == 3


def test_the_files_that_no_option_names_are_compared_too(tmp_path: Path) -> None:
    data = bert.write_folder(tmp_path / "data", 60)
    (data / "vocab.txt").write_text("\n".join(bert.TOKENS) + "\n")
    words = ["--task", "bert", "--data", str(data)]
    task: Any = make_task(BertTask, options.parse(words))
    names = ["x_train_0.hdf5", "x_train_1.hdf5", "bert_config.json", "vocab.txt"]
    assert [path.name for path in task.load_dataset("train").files] == names
    named = ["--dict", str(data / "vocab.txt"), "--config-file", str(data / "bert_config.json")]
    task = make_task(BertTask, options.parse([*words, *named]))
    assert [path.name for path in task.load_dataset("train").files] == names[:2]


def test_a_folder_that_may_not_be_entered_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **how: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    task: Any = make_task(BertTask, options.parse(["--task", "bert", "--data", str(tmp_path / "locked" / "data")]))
    with pytest.raises(DataError, match="locked/data does not exist"):
        task.load_dataset("train")
    monkeypatch.setattr(Path, "stat", refuse)  # a test may run as root
    with pytest.raises(DataError, match=r"locked/data cannot be read: Permission denied; expected a folder you may"):
        task.load_dataset("train")
