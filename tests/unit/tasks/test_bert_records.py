"""What `--task bert` makes of a folder of records: masks by the recipe, drawn as a function, and batches as of HDF5."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetseq import ConfigError, DataError, MissingSplitError
from hetseq import config as options
from hetseq.task import collater_of, lengths_of, make_task
from hetseq.tasks.bert.dataset import BertRecords, load_records
from hetseq.tasks.bert.masking import Masking, Words, draw, numbers_of
from hetseq.tasks.bert.task import BertTask
from hetseq.tasks.rows.record_index import read_index
from tests.support.bert_records import (
    LENGTH,
    VOCAB,
    as_lists,
    change_index,
    change_numbers,
    make_rows,
    write_folder,
)

MASK = VOCAB.index("[MASK]")
L = 24  # LENGTH, rounded up


def load(folder: Path, split: str = "train", **changes: Any) -> BertRecords:
    return load_records(read_index(folder), split, VOCAB, **{"seed": 1, "masking": Masking(), **changes})


def batch_of(dataset: BertRecords, indices: Any) -> dict[str, list[Any]]:
    batch = dataset.__getitems__(indices)
    layout = batch.pop("sequences", None)  # of a packed one
    facts = {name: tensor.tolist() for name, tensor in batch.items()}
    return facts if layout is None else facts | {"lengths": list(layout.lengths), "starts": layout.starts.tolist()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "data", train=make_rows(50), test=make_rows(9, seed=1), rows_per_file=20)


# The function behind the masks


def test_numbers_are_those_of_splitmix64() -> None:
    # of the reference implementation by Vigna, for the seed 1234567
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert draw(np.array([1234567], np.uint64), np.arange(4)).tolist() == published


def test_numbers_of_a_row_are_a_tree_of_generators() -> None:
    def step(state: int, number: int) -> int:  # in whole numbers, as the paper has it
        z = (state + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    found = numbers_of(2**63 - 1, 7, np.array([3, 10**12]), 5).tolist()
    of_epoch = step(step(2**63 - 1, 0), 7)
    assert found == [[step(step(of_epoch, sample), at) for at in range(5)] for sample in (3, 10**12)]


def test_masks_are_the_same_for_good() -> None:
    # a change of these numbers changes what a resumed run trains on: it needs a new version of the format
    ids = np.array([[2, *range(5, 22), 3, *range(22, 40), 3, 0, 0]])
    words = Words(VOCAB)
    numbers = numbers_of(19940802, 3, np.array([12345]), ids.shape[1])
    at = words.choose(ids, numbers, Masking())
    assert at.tolist() == [10, 20, 22, 28, 32]
    assert words.instead(ids.ravel()[at], numbers.ravel()[at]).tolist() == [14, 4, 4, 32, 35]


# The recipe


def masked_rows(count: int, *, whole_words: bool = False, most: int | None = None) -> tuple[Any, Any, Any, Any]:
    """Rows of 7 to 22 tokens (count, 22), which of them are to be predicted, what is shown, and where words are."""
    rows = make_rows(count, seed=2)
    ids = np.zeros((count, LENGTH), np.int64)
    for row, tokens in enumerate(as_lists(rows)):
        ids[row, : len(tokens)] = tokens
    words = Words(VOCAB)
    numbers = numbers_of(5, 0, np.arange(count), LENGTH)
    at = words.choose(ids, numbers, Masking(whole_words=whole_words, max_predictions=most))
    shown = ids.copy()
    shown.ravel()[at] = words.instead(ids.ravel()[at], numbers.ravel()[at])
    is_masked = np.zeros(ids.shape, bool)
    is_masked.ravel()[at] = True
    assert (np.diff(at) > 0).all()
    return ids, is_masked, shown, ids > MASK


def within(successes: int, trials: int, share: float) -> bool:
    """Whether so many of so many are no surprise: within 5 standard deviations of the binomial distribution."""
    return bool(abs(successes - trials * share) <= 5 * np.sqrt(trials * share * (1 - share)))


def test_the_recipe_is_15_of_100_and_of_these_80_10_10() -> None:
    ids, is_masked, shown, is_word = masked_rows(20_000)
    count = np.floor(is_word.sum(axis=1) * 0.15 + 0.5)
    assert is_masked.sum(axis=1).tolist() == np.maximum(count, 1).tolist()
    assert not (is_masked & ~is_word).any()
    hidden, stays = shown[is_masked] == MASK, shown[is_masked] == ids[is_masked]
    trials, same = int(is_masked.sum()), 1 / (len(VOCAB) - 5)  # a random word may be the one that stood there
    assert trials > 30_000
    assert within(int(hidden.sum()), trials, 0.8)
    assert within(int(stays.sum()), trials, 0.1 + 0.1 * same)
    assert not within(int(stays.sum()), trials, 0.12)  # the twin
    assert (shown == ids)[~is_masked].all()
    others = shown[is_masked & (shown != MASK) & (shown != ids)]
    tally = np.bincount(others, minlength=len(VOCAB))
    assert tally[:5].sum() == 0
    assert all(within(int(count), len(others), same) for count in tally[5:])


def test_every_word_of_a_row_is_chosen_equally_often() -> None:
    ids = np.tile([2, *range(5, 15), 3], (20_000, 1))
    at = Words(VOCAB).choose(ids, numbers_of(0, 0, np.arange(20_000), 12), Masking(share=0.2))
    tally = np.bincount(at % 12, minlength=12)
    assert tally[[0, 11]].tolist() == [0, 0]
    assert all(within(int(count), 20_000, 0.2) for count in tally[1:11])


@pytest.mark.parametrize("whole_words", [False, True])
def test_no_more_are_masked_than_predictions(whole_words: bool) -> None:
    _, free, _, _ = masked_rows(2000, whole_words=whole_words)
    _, capped, _, _ = masked_rows(2000, whole_words=whole_words, most=2)
    assert free.sum(axis=1).max() > 2
    assert capped.sum(axis=1).max() == 2
    # a word of three pieces is passed over, and others come in its place
    assert (capped & ~free).any() == whole_words


def test_whole_words_are_never_split_and_their_share_is_that_of_pieces() -> None:
    ids, is_masked, _, is_word = masked_rows(20_000, whole_words=True)
    goes_on = (ids >= VOCAB.index("##0")) & np.roll(is_word, 1, axis=1)
    goes_on[:, 0] = False
    assert (is_masked == np.roll(is_masked, 1, axis=1))[goes_on].all()
    assert goes_on.sum() > 10_000
    _, plain, _, _ = masked_rows(20_000)
    assert not (plain == np.roll(plain, 1, axis=1))[goes_on].all()  # the twin
    assert (is_masked.sum(axis=1) >= 1).all()
    # of short rows a word is often more than the share, hence only about as many
    assert abs(is_masked.sum() / plain.sum() - 1) < 0.05
    longest = is_masked.sum(axis=1) - is_word.sum(axis=1) * 0.15
    assert longest.max() <= 0.5 * 10 + 1


def test_words_of_one_piece_are_chosen_alike_in_both_ways() -> None:
    ids = np.random.default_rng(0).integers(5, 35, (500, 30))  # no ## among them
    numbers = numbers_of(0, 0, np.arange(500), 30)
    words = Words(VOCAB)
    for most in (None, 3):
        found = [words.choose(ids, numbers, Masking(max_predictions=most, whole_words=way)) for way in (False, True)]
        assert found[0].tolist() == found[1].tolist()


def test_the_first_position_is_never_masked() -> None:
    ids = np.full((200, 6), 5)
    at = Words(VOCAB).choose(ids, numbers_of(0, 0, np.arange(200), 6), Masking(share=0.5))
    assert set((at % 6).tolist()) == {1, 2, 3, 4, 5}


def test_a_row_without_words_has_nothing_to_predict() -> None:
    ids = np.array([[2, 1, 3, 1, 3, 0], [2, 5, 3, 36, 3, 0], [2, 36, 37, 38, 3, 0]])
    numbers = numbers_of(0, 0, np.arange(3), 6)
    words = Words(VOCAB)
    assert set((words.choose(ids, numbers, Masking()) // 6).tolist()) == {1, 2}
    whole = Masking(whole_words=True, max_predictions=2)
    assert set((words.choose(ids, numbers, whole) // 6).tolist()) == {1}  # three pieces of one word are too many
    assert len(words.choose(ids, numbers, Masking(whole_words=True))) == 4  # one of the first row, the whole word


@pytest.mark.parametrize("wrong", [{"share": 0}, {"share": 1.0}, {"max_predictions": 0}])
def test_masking_that_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"masking: {next(iter(wrong))} is"):
        Masking(**wrong)
    with pytest.raises(ConfigError, match="all of them special"):
        Words(VOCAB[:5])


# Batches


def test_a_batch_is_what_hdf5_gives(folder: Path) -> None:
    dataset = load(folder)
    rows, lists = make_rows(50), as_lists(make_rows(50))
    wanted = [49, 3, 3, 20, 0]
    batch = dataset.__getitems__(wanted)
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in batch.items()}
    count = len(batch["masked_ids"])
    whole = (torch.int64, (5, L))
    assert kinds == {
        "input_ids": whole, "token_type_ids": whole, "attention_mask": (torch.bool, (5, L)),
        "masked_positions": (torch.int64, (count,)), "masked_ids": (torch.int64, (count,)),
        "next_sentence_labels": (torch.int64, (5,)),
    }  # fmt: skip
    assert dataset.length == L == dataset.num_tokens(0)
    assert lengths_of(dataset)(np.arange(3)).tolist() == [L] * 3
    ids = batch["input_ids"].clone()
    ids.view(-1)[batch["masked_positions"]] = batch["masked_ids"]
    for at, row in enumerate(wanted):
        size, first = len(lists[row]), int(rows["first_lengths"][row])
        assert ids[at].tolist() == lists[row] + [0] * (L - size)
        assert batch["attention_mask"][at].tolist() == [True] * size + [False] * (L - size)
        assert batch["token_type_ids"][at].tolist() == [0] * first + [1] * (size - first) + [0] * (L - size)
    assert batch["next_sentence_labels"].tolist() == rows["next_sentence_labels"][wanted].tolist()
    stored = dataset.rows(wanted)
    assert stored[0].tolist() == ids.tolist()


def test_masks_do_not_depend_on_the_batch_or_its_order(folder: Path) -> None:
    dataset = load(folder)
    order = np.random.default_rng(0).permutation(50).tolist()
    together = dataset.__getitems__(order)
    one_by_one = dataset.collater([dataset[index] for index in order])
    halves = [dataset.__getitems__(order[:7]), dataset.__getitems__(order[7:])]
    for name, tensor in together.items():
        assert torch.equal(tensor, one_by_one[name])
        second = halves[1][name] + (7 * L if name == "masked_positions" else 0)
        assert torch.equal(tensor, torch.cat([halves[0][name], second]))
    assert collater_of(object(), dataset)(together) is together
    assert len(dataset.collater([])["input_ids"]) == 0
    backwards = dataset.__getitems__(order[::-1])
    assert torch.equal(backwards["input_ids"].flip(0), together["input_ids"])
    assert torch.equal(dataset.__getitems__([-1])["input_ids"], dataset.__getitems__([49])["input_ids"])
    with pytest.raises(IndexError, match="samples 50 to 50 of 50"):
        dataset[50]


def test_the_files_do_not_decide_the_masks(folder: Path, tmp_path: Path) -> None:
    other = write_folder(tmp_path / "other", train=make_rows(50), rows_per_file=7)
    assert batch_of(load(folder), range(50)) == batch_of(load(other), range(50))


def test_an_epoch_and_a_seed_change_the_masks(folder: Path) -> None:
    dataset = load(folder)
    first = batch_of(dataset, range(50))
    dataset.set_epoch(1)
    second = batch_of(dataset, range(50))
    assert first["masked_positions"] != second["masked_positions"]
    dataset.set_epoch(0)
    assert batch_of(dataset, range(50)) == first
    assert batch_of(load(folder, seed=2), range(50))["masked_positions"] != first["masked_positions"]
    assert batch_of(load(folder, seed=1), range(50)) == first


def test_a_pickle_and_a_fork_give_the_same(folder: Path) -> None:
    dataset = load(folder)
    dataset.set_epoch(3)
    here = batch_of(dataset, range(50))
    assert batch_of(pickle.loads(pickle.dumps(dataset)), range(50)) == here
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_answer, args=(dataset, theirs))
    child.start()
    theirs.close()
    assert ours.recv() == here
    child.join()


def _answer(dataset: BertRecords, line: Any) -> None:
    line.send(batch_of(dataset, range(50)))


def test_the_first_files_alone_may_be_taken(folder: Path) -> None:
    dataset = load(folder, num_file=2)
    assert len(dataset) == 40
    assert [path.name for path in dataset.files] == [
        "corpus.json",
        "train_00000.safetensors",
        "train_00001.safetensors",
    ]
    assert batch_of(dataset, range(40)) == batch_of(load(folder), range(40))


def test_the_length_is_no_more_than_the_model_has_positions(folder: Path) -> None:
    assert load(folder, max_positions=23).length == 23
    assert load(folder, max_positions=512).length == L
    with pytest.raises(
        DataError, match=r"corpus.json has rows of up to 22 tokens in train, more than the 21 positions"
    ):
        load(folder, max_positions=21)


def test_a_vocabulary_beyond_65535_tokens_takes_four_bytes(tmp_path: Path) -> None:
    vocab = [*VOCAB, *(f"x{number}" for number in range(70_000))]
    data = write_folder(tmp_path / "data", vocab=vocab, train=make_rows(9, vocab=len(vocab)))
    dataset = load_records(read_index(data), "train", vocab, seed=0, masking=Masking())
    assert dataset.rows(range(9))[0].max() > 65_535
    assert read_index(data).columns["ids"].dtype == "U32"


# What is refused


def labels(numbers: np.ndarray) -> None:
    numbers[3] = 2


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ids", lambda ids: ids.__setitem__(5, len(VOCAB)), f"row 0: ids holds {len(VOCAB)}, expected 0 to 44, as"),
        ("next_sentence_labels", labels, "row 3: next_sentence_labels is 2, expected 0 is next, 1 is not"),
        ("first_lengths", lambda first: first.__setitem__(19, 23), "row 19: first_lengths is 23, expected 1 to"),
        ("first_lengths", lambda first: first.__setitem__(2, 0), "row 2: first_lengths is 0, expected 1 to"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused_at_the_start(
    folder: Path, name: str, change: Callable[[np.ndarray], object], message: str
) -> None:
    change_numbers(folder / "train_00000.safetensors", name, change)
    with pytest.raises(DataError, match=rf"train_00000.safetensors, {message}.*copy the folder again"):
        load(folder)
    load(folder, "test")


def test_a_row_without_tokens_is_refused(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "data", train=make_rows(5))
    change_numbers(data / "train_00000.safetensors", "ids.offsets", lambda offsets: offsets.__setitem__(2, offsets[1]))
    change_index(data, lambda facts: facts["splits"]["train"]["longest"].update(ids=100))
    with pytest.raises(DataError, match=r"row 1: its length is 0, expected at least one token"):
        load(data)


def test_what_stands_between_the_ends_is_refused_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetseq.tasks.bert.dataset._CHECKED_ROWS", 2)
    data = write_folder(tmp_path / "data", train=make_rows(20))
    change_numbers(data / "train_00000.safetensors", "next_sentence_labels", labels)
    dataset = load(data)
    assert len(dataset.__getitems__([0, 1, 2, 4])["input_ids"]) == 4
    with pytest.raises(DataError, match="row 3: next_sentence_labels is 2"):
        dataset.__getitems__([4, 3])
    change_numbers(data / "train_00000.safetensors", "next_sentence_labels", lambda marks: marks.__setitem__(18, 9))
    with pytest.raises(DataError, match="row 18: next_sentence_labels is 9"):
        load(data)


def test_other_columns_other_vocabularies_and_other_splits_are_refused(folder: Path, tmp_path: Path) -> None:
    index = read_index(folder)
    with pytest.raises(MissingSplitError, match=r"corpus.json has no split 'valid': expected one of train, test"):
        load(folder, "valid")
    for vocab, message in (([*VOCAB, "x"], "of 45 tokens, but the one given has 46"), (VOCAB[::-1], "another vocab")):
        with pytest.raises(DataError, match=f"{message}.*give the --dict that the records were made with"):
            load_records(index, "train", vocab, seed=0, masking=Masking())
    change_index(folder, lambda facts: facts["columns"].pop("first_lengths"))
    with pytest.raises(DataError, match=r"has the columns ids \(U16, ragged\), next_sentence_labels \(U8\), expected"):
        load(folder)
    empty = write_folder(tmp_path / "empty", train=[])
    with pytest.raises(DataError, match="no rows in the 1 files of the split 'train'"):
        load(empty)


def test_empty_files_among_others_are_passed_over(folder: Path, tmp_path: Path) -> None:
    (write_folder(tmp_path / "empty", train=[]) / "train_00000.safetensors").rename(folder / "x.safetensors")

    def insert(facts: dict[str, Any]) -> None:
        size = (folder / "x.safetensors").stat().st_size
        entry = {"name": "x.safetensors", "rows": 0, "bytes": size, "sha256": "0" * 64}
        facts["splits"]["train"]["files"].insert(1, entry)

    before = batch_of(load(folder), range(50))
    change_index(folder, insert)
    assert batch_of(load(folder), range(50)) == before


# The task


CONFIG = {
    "vocab_size": len(VOCAB), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32,
}  # fmt: skip


def task_of(folder: Path, *words: str) -> Any:
    (folder / "bert_config.json").write_text(json.dumps(CONFIG))
    return make_task(BertTask, options.parse(["--task", "bert", "--data", str(folder), *words]))


def test_the_task_trains_on_records(folder: Path) -> None:
    task = task_of(folder, "--valid-subset", "test")
    train = task.load_dataset("train")
    batch = train.__getitems__(range(50))
    assert isinstance(train, BertRecords)
    assert [path.name for path in train.files][-2:] == ["bert_config.json", "vocab.txt"]
    sums, counts = task.loss(task.build_model().eval(), batch), task.count(batch)
    assert counts == {"mlm": len(batch["masked_ids"]), "nsp": 50}
    assert sums["mlm"].item() / counts["mlm"] == pytest.approx(np.log(len(VOCAB)), abs=0.2)  # nothing is learned yet


def test_validation_has_one_mask_for_every_seed_and_training_has_not(folder: Path) -> None:
    one, other = (task_of(folder, "--valid-subset", "test", "--seed", seed) for seed in "12")
    assert batch_of(one.load_dataset("test"), range(9)) == batch_of(other.load_dataset("test"), range(9))
    train = batch_of(one.load_dataset("train"), range(9))
    assert train["masked_positions"] != batch_of(other.load_dataset("train"), range(9))["masked_positions"]


def test_whole_words_are_an_option(folder: Path) -> None:
    found = batch_of(task_of(folder, "--whole-words").load_dataset("train"), range(50))
    expected = load(folder, masking=Masking(whole_words=True), seed=19940802, is_packed=True)
    assert found == batch_of(expected, range(50))
    assert found != batch_of(task_of(folder).load_dataset("train"), range(50))


def test_the_share_of_masked_words_is_an_option_of_training(folder: Path) -> None:
    task = task_of(folder, "--mask-prob", "0.4")
    found = batch_of(task.load_dataset("train"), range(50))
    expected = load(folder, masking=Masking(0.4), seed=19940802, is_packed=True)
    assert found == batch_of(expected, range(50))
    usual = batch_of(task_of(folder).load_dataset("train"), range(50))
    assert len(found["masked_ids"]) / len(usual["masked_ids"]) == pytest.approx(0.4 / 0.15, rel=0.1)
    validated, always = (each.load_dataset("test") for each in (task, task_of(folder)))
    assert batch_of(validated, range(9)) == batch_of(always, range(9))


@pytest.mark.parametrize("share", ["0", "1", "-0.1"])
def test_a_share_that_cannot_be_meant_is_refused(share: str) -> None:
    with pytest.raises(ConfigError, match=rf"--mask-prob {share}: expected more than 0 and less than 1"):
        options.parse(["--task", "bert", f"--mask-prob={share}"])


def test_a_folder_of_both_kinds_is_refused(folder: Path) -> None:
    (folder / "x_train.hdf5").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"holds records \(corpus.json lists them\) and HDF5 files \(x_train.hdf5\).*move"
    ):
        task_of(folder).load_dataset("train")


def test_records_without_their_index_are_refused(folder: Path) -> None:
    (folder / "corpus.json").rename(folder / "corpus.txt")
    with pytest.raises(DataError, match=r"has test_00000.safetensors and no corpus.json of records"):
        task_of(folder).load_dataset("train")
    (folder / "corpus.txt").rename(folder / "corpus.json")
    for name in ("corpus.json", "train_00000.safetensors"):
        task = make_task(BertTask, options.parse(["--task", "bert", "--data", str(folder / name)]))
        with pytest.raises(DataError, match="is one file of a folder of records: give the folder"):
            task.load_dataset("train")


def test_an_index_of_a_later_version_is_refused_whatever_lies_beside_it(folder: Path) -> None:
    change_index(folder, lambda facts: facts["format"].update(version=3))
    with pytest.raises(DataError, match="has version 3 of the format: expected version 2"):
        task_of(folder).load_dataset("train")


def test_a_folder_without_a_vocabulary_or_with_one_segment_is_refused(folder: Path) -> None:
    (folder / "vocab.txt").unlink()
    with pytest.raises(DataError, match=r"has no vocab.txt, which is needed .* give --dict FILE"):
        task_of(folder).load_dataset("train")
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in VOCAB))
    task = task_of(folder)
    (folder / "bert_config.json").write_text(json.dumps({**CONFIG, "type_vocab_size": 1}))
    with pytest.raises(DataError, match="type_vocab_size 1, but rows of records have two"):
        task.load_dataset("train")
