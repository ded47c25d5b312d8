"""Packed batches of BERT against padded ones: the same losses, gradients and metrics, and no sample sees another."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hetseq import config as options
from hetseq.data.loader import place_on
from hetseq.data.plan import EpochOrder, MicroBatchCap, cut, epoch_order
from hetseq.task import lengths_of, make_task
from hetseq.tasks.bert.attention import within
from hetseq.tasks.bert.model import BertForPreTraining
from hetseq.tasks.bert.packing import Sequences, pack
from hetseq.tasks.bert.task import BertTask
from tests.support import bert, bert_records
from tests.support.parity import Facts, distance
from tests.unit.tasks.test_bert_model import (
    CASES,
    RECORDED,
    RECORDED_CONFIG,
    TINY,
    facts_of,
    make_batch,
    make_model,
    recordable,
)

Batch = dict[str, Any]

#: with rows of equal length among others, and the longest not at the ends
MIXED = [(4, [0, 3]), (9, [2, 5, 8]), (1, [0]), (4, [1]), (9, []), (7, [6])]
ALL_CASES = {**CASES, "mixed": MIXED, "one of two is short": [(9, [4]), (3, [1])]}


@pytest.fixture(params=["each length apart", "padded for attention"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Attention as on a CPU and as on other devices."""
    kinds = {"cpu"} if request.param == "each length apart" else set()
    monkeypatch.setattr("hetseq.tasks.bert.attention._LENGTHS_APART", frozenset(kinds))
    return str(request.param)


def logits_of(model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of a packed batch, or of one that has no padding."""
    layout = batch["sequences"] if "sequences" in batch else batch["attention_mask"]
    words, pairs = model(batch["input_ids"], batch["token_type_ids"], layout, batch["masked_positions"])
    return words, pairs


def packed_facts(model: BertForPreTraining, batch: Batch) -> Facts:
    return facts_of(model, pack(batch), logits_of)


# The layout


def test_tokens_lie_by_length_and_samples_keep_their_order() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    batch = {
        "input_ids": torch.tensor([[10, 11, 12, 0], [20, 0, 0, 0], [30, 31, 0, 0], [40, 0, 0, 0]]),
        "token_type_ids": torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]),
        "attention_mask": mask,
        "masked_positions": torch.tensor([0, 2, 9, 12]),
        "masked_ids": torch.tensor([5, 6, 7, 8]),
        "next_sentence_labels": torch.tensor([0, 1, 1, 0]),
    }
    packed = pack(batch)
    nobody = [0] * 9  # up to a multiple of 16 tokens
    assert packed["input_ids"].tolist() == [20, 40, 30, 31, 10, 11, 12, *nobody]
    assert packed["token_type_ids"].tolist() == [0, 0, 0, 1, 0, 1, 1, *nobody]
    assert packed["sequences"].lengths == (1, 1, 2, 3)
    assert packed["sequences"].starts.tolist() == [4, 0, 2, 1]
    assert packed["sequences"].positions.tolist() == [0, 0, 0, 1, 0, 1, 2, *nobody]
    assert packed["sequences"].padding == 9
    assert packed["masked_positions"].tolist() == [4, 6, 3, 1]
    assert packed["masked_ids"] is batch["masked_ids"]
    assert packed["next_sentence_labels"] is batch["next_sentence_labels"]
    assert "attention_mask" not in packed


@pytest.mark.parametrize(
    "mask",
    [[[1, 1], [1, 1]], [[1, 0, 1], [1, 1, 1]], [[0, 1], [1, 1]], [[0, 0], [1, 0]], np.ones((0, 3))],
    ids=["full", "a hole", "padding in front", "no token", "no row"],
)
def test_what_has_no_padding_behind_its_rows_stays_as_it_is(mask: Any) -> None:
    is_real = torch.tensor(mask).bool()
    batch = {"attention_mask": is_real, "input_ids": is_real.long(), "masked_positions": torch.tensor([]).long()}
    assert pack(batch) is batch


def test_it_travels_between_processes_and_to_a_device() -> None:
    packed = pack(make_batch(MIXED))
    there = place_on(torch.device("cpu"), torch.float64)(pickle.loads(pickle.dumps(packed)))
    assert isinstance(there["sequences"], Sequences)
    assert there["sequences"].lengths == (1, 4, 4, 7, 9, 9)
    assert torch.equal(there["sequences"].positions, packed["sequences"].positions)


# The network


@pytest.mark.parametrize("case", ALL_CASES)
def test_logits_terms_and_all_gradients_are_those_of_padded_rows(case: str) -> None:
    model, batch = make_model(), make_batch(ALL_CASES[case])
    assert distance(packed_facts(model, batch), facts_of(model, batch)) <= 1e-12


def test_in_single_precision_the_terms_are_the_same_to_rounding() -> None:
    model, batch = make_model(dtype=torch.float32), make_batch(MIXED)
    found, expected = packed_facts(model, batch), facts_of(model, batch)
    for term in ("masked term", "sentence term"):
        assert found[term].item() == pytest.approx(expected[term].item(), rel=1e-6)  # measured: 2e-7


def test_a_packed_batch_has_the_terms_and_slopes_once_recorded_of_transformers() -> None:
    def packed_logits(model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        packed = pack(batch)
        assert "sequences" in packed
        return logits_of(model, packed)

    assert recordable(make_model(RECORDED_CONFIG), packed_logits) == pytest.approx(RECORDED, rel=1e-10)


def test_a_sample_does_not_depend_on_its_neighbours() -> None:
    model = make_model()
    one, other = make_batch(MIXED), make_batch([*MIXED[:3], (8, [1]), *MIXED[4:]])
    others = [row for row in range(6) if row != 3]
    # the words that are masked: 2, 3, 1, then that of the changed row, then 0 and 1
    words, pairs = logits_of(model, pack(one))
    other_words, other_pairs = logits_of(model, pack(other))
    assert (pairs - other_pairs)[others].abs().max() <= 1e-12
    assert (words - other_words)[[0, 1, 2, 3, 4, 5, 7]].abs().max() <= 1e-12
    assert (pairs - other_pairs)[3].abs().max() > 1e-3  # the twin
    assert (words - other_words)[6].abs().max() > 1e-3


@pytest.mark.parametrize("fault", ["lengths", "starts", "positions", "order"])
def test_sequences_that_lie_elsewhere_are_seen(fault: str) -> None:
    model, batch = make_model(), make_batch(MIXED)
    packed = pack(batch)
    lengths, padding, starts, positions = packed["sequences"]
    wrong = {
        "lengths": {"lengths": (2, 3, 4, 7, 9, 9)},
        "starts": {"starts": starts.roll(1)},
        "positions": {"positions": positions.clamp(max=5)},
        "order": {"lengths": lengths[::-1]},
    }[fault]
    if fault in ("lengths", "order"):  # where the sequences are padded, they begin at the positions 0
        ends = np.cumsum(wrong["lengths"])
        begins = np.repeat(ends - wrong["lengths"], wrong["lengths"])
        wrong["positions"] = F.pad(torch.arange(int(ends[-1])) - torch.from_numpy(begins), (0, padding))
    found = facts_of(model, packed | {"sequences": packed["sequences"]._replace(**wrong)}, logits_of)
    assert distance(found, facts_of(model, batch)) > 0.01


def test_in_training_attention_drops_by_the_seed() -> None:
    config = dataclasses.replace(TINY, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5)
    model, packed = make_model(config).train(), pack(make_batch(MIXED))

    def pairs_of(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return logits_of(model, packed)[1]

    assert torch.equal(pairs_of(1), pairs_of(1))
    assert (pairs_of(1) - pairs_of(2)).abs().max() > 1e-3
    assert torch.equal(model.eval()(*list_of(packed))[1], pairs_of(1))


def test_gradients_of_attention_with_dropout_are_its_derivatives() -> None:
    attend = within(pack(make_batch(MIXED))["sequences"])
    parts = torch.randn(48, 3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def attended(parts: Tensor) -> Tensor:
        torch.manual_seed(2)  # the same elements are left out every time
        return attend(parts, 0.3)

    assert torch.autograd.gradcheck(attended, parts.requires_grad_(), eps=1e-6, atol=1e-9, rtol=1e-6)


def list_of(packed: Batch) -> list[Any]:
    return [packed[name] for name in ("input_ids", "token_type_ids", "sequences", "masked_positions")]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("input_ids", lambda ids: ids[1:], r"input_ids has shape \(47,\), expected \(48,\): 6 sequences of 34 tok"),
        ("token_type_ids", lambda types: types[None], r"token_type_ids has shape \(1, 48\), expected \(48,\)"),
        ("sequences", lambda found: found._replace(positions=found.positions[1:]), r"positions has shape \(47,\)"),
        ("sequences", lambda found: found._replace(starts=found.starts[1:]), r"starts has shape \(5,\), expected \(6,"),
        (
            "sequences",
            lambda found: found._replace(lengths=(17, 17)),
            "2 sequences have 17 to 17 tokens: expected 1 to 16",
        ),
        ("sequences", lambda found: found._replace(lengths=(0, 34)), "2 sequences have 0 to 34 tokens: expected 1 to"),
        ("sequences", lambda found: found._replace(lengths=()), "0 sequences have 0 to 0 tokens: expected 1 to 16"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name: str, change: Any, message: str) -> None:
    packed = pack(make_batch(MIXED))
    with pytest.raises(ValueError, match=message):
        make_model()(*list_of(packed | {name: change(packed[name])}))


# The task


def hdf5_task(folder: Path, *words: str) -> Any:
    data = folder if folder.exists() else bert.write_folder(folder, 60)
    return make_task(BertTask, options.parse(["--task", "bert", "--data", str(data), *words]))


def records_task(folder: Path, *words: str) -> Any:
    if not folder.exists():
        bert_records.write_folder(folder, train=bert_records.make_rows(60))
        config = bert.CONFIG | {"vocab_size": len(bert_records.VOCAB), "max_position_embeddings": 32}
        (folder / "bert_config.json").write_text(json.dumps(config))
    return make_task(BertTask, options.parse(["--task", "bert", "--data", str(folder), *words]))


MAKE = pytest.mark.parametrize("make", [hdf5_task, records_task], ids=["hdf5", "records"])


@MAKE
def test_counts_losses_and_metrics_are_those_of_no_packing(make: Any, tmp_path: Path) -> None:
    packing, padding = make(tmp_path / "data"), make(tmp_path / "data", "--no-packing")
    batches = [task.load_dataset("train").__getitems__(range(40, 60)) for task in (packing, padding)]
    assert "sequences" in batches[0]
    assert "sequences" not in batches[1]
    torch.manual_seed(0)
    model = packing.build_model().double().eval()
    assert packing.count(batches[0]) == padding.count(batches[1])
    found, expected = (task.loss(model, batch) for task, batch in zip((packing, padding), batches))
    assert {name: term.item() for name, term in found.items()} == pytest.approx(
        {name: term.item() for name, term in expected.items()}, rel=1e-12
    )
    measured = [task.metrics(model, batch) for task, batch in zip((packing, padding), batches)]
    for name, (total, count) in measured[1].items():
        assert measured[0][name] == (pytest.approx(total, rel=1e-12), count)


@MAKE
def test_one_by_one_and_together_are_the_same_batch(make: Any, tmp_path: Path) -> None:
    dataset = make(tmp_path / "data").load_dataset("train")
    together, one_by_one = dataset.__getitems__([3, 59, 0, 3]), dataset.collater([dataset[i] for i in (3, 59, 0, 3)])
    assert together["sequences"].lengths == one_by_one["sequences"].lengths
    for name in ("input_ids", "token_type_ids", "masked_positions", "masked_ids", "next_sentence_labels"):
        assert torch.equal(together[name], one_by_one[name])


@MAKE
def test_a_sample_costs_its_real_tokens_and_micro_batches_are_cut_by_them(make: Any, tmp_path: Path) -> None:
    packing, padding = make(tmp_path / "data"), make(tmp_path / "data", "--no-packing")
    dataset, padded = packing.load_dataset("train"), padding.load_dataset("train")
    real = padded.__getitems__(range(60))["attention_mask"].sum(dim=1).tolist()
    lengths = lengths_of(dataset)
    assert lengths is not None
    assert lengths(np.arange(60)).tolist() == real
    assert dataset.num_tokens(-1) == real[-1]
    with pytest.raises(IndexError, match="of 60"):
        dataset.num_tokens(60)
    assert {padded.num_tokens(index) for index in range(60)} == {padded.length}
    order = epoch_order(60, seed=0, epoch=1, shuffle=True)
    sizes = [_tokens(dataset, order, *piece) for piece in cut(order, 0, 60, MicroBatchCap(tokens=50), lengths=lengths)]
    assert sum(sizes) == sum(real)
    assert max(sizes) <= 50


def _tokens(dataset: Any, order: EpochOrder, start: int, stop: int) -> int:
    return sum(dataset.__getitems__(order.take(start, stop).tolist())["sequences"].lengths)
