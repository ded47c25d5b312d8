"""Phase 2 of BERT's pre-training goes on where phase 1 ended: longer rows, another batch, a schedule of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hetseq import config as options
from hetseq.comm.group import Group
from hetseq.errors import HetSeqError
from hetseq.run.session import Session
from hetseq.task import make_task
from hetseq.tasks.bert.task import BertTask
from tests.support.bert_records import VOCAB, make_rows, write_folder
from tests.support.lives import begin
from tests.support.ranks import run_ranks
from tests.support.training import Recorder, prepared

SHARED = (
    "--dropout 0 --precision fp64 --curriculum 1000000 --disable-validation --optimizer lamb --adam-eps 1e-6"
    " --weight-decay 0.01 --clip-norm 1 --lr-scheduler polynomial_from_zero --power 0.5"
)
ONE = "--global-batch-size 8 --lr 0.006 --warmup-updates 0.2843 --total-num-update 5 --max-update 5"
TWO = "--global-batch-size 4 --lr 0.004 --warmup-updates 0.5 --total-num-update 4 --max-update 4"
ANEW = "--reset-dataloader --reset-lr-scheduler --reset-meters"


@dataclass
class Phase:
    """What a phase began with, took and ended with."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    steps: list[int]
    rates: list[float]
    losses: list[float]


def everything(session: Session) -> dict[str, Tensor]:
    replica = session.controller.replica
    return {
        name: tensor.clone() for name, tensor in {**replica.model_tensors(), **replica.optimizer_tensors()[0]}.items()
    }


def train(group: Group, save_dir: str, words: list[str]) -> Phase:
    recorder = Recorder()
    session = begin(group, save_dir, words, BertTask, recorder)
    try:
        before = everything(session)
        session.train()
        rows = recorder.rows
        return Phase(before, everything(session), *([row[name] for row in rows] for name in ("step", "lr", "loss")))
    finally:
        session.close()


def in_turn(group: Group, runs: list[tuple[str, list[str]]]) -> list[Phase | str]:
    """Each run, or what refused it."""
    phases: list[Phase | str] = []
    for save_dir, words in runs:
        try:
            phases.append(train(group, save_dir, words))
        except HetSeqError as error:
            phases.append(str(error))
    return phases


def folder(path: Path, *, length: int, positions: int = 64, vocab: list[str] | None = None) -> Path:
    """40 rows of up to `length` tokens, and the configuration of a small network."""
    write_folder(path, train=make_rows(40, length=length), vocab=vocab)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = {**sizes, "vocab_size": len(VOCAB), "max_position_embeddings": positions}
    (path / "bert_config.json").write_text(json.dumps(config))
    return path


def words(data: Path, text: str) -> list[str]:
    return [*SHARED.split(), "--data", str(data), *text.split()]


def loss_of(data: Path, weights: dict[str, Tensor], samples: int) -> float:
    """Of the first samples of the first epoch, in plain torch with these weights."""
    task = make_task(BertTask, options.parse(["--task", "bert", "--data", str(data), "--dropout", "0", "--no-packing"]))
    model = task.build_model().double()
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in weights.items()}, strict=False)
    dataset = task.load_dataset("train")
    dataset.set_epoch(1)
    batch = dataset.__getitems__(range(samples))
    predicted, pairs = model(
        batch["input_ids"], batch["token_type_ids"], batch["attention_mask"], batch["masked_positions"]
    )
    return (
        F.cross_entropy(predicted, batch["masked_ids"]) + F.cross_entropy(pairs, batch["next_sentence_labels"])
    ).item()


def test_the_second_phase_has_weights_and_moments_of_the_first_and_a_schedule_of_its_own(tmp_path: Path) -> None:
    short, long = folder(tmp_path / "short", length=32), folder(tmp_path / "long", length=64)
    first, second = prepared(tmp_path / "one"), prepared(tmp_path / "two")
    runs = [(first, words(short, ONE)), (second, words(long, f"{TWO} --resume {first} {ANEW}"))]
    ((one, two),) = run_ranks(in_turn, 1, runs)
    assert one.steps == [1, 2, 3, 4, 5]
    assert two.before.keys() == one.after.keys()
    assert {name for name, tensor in two.before.items() if not torch.equal(tensor, one.after[name])} == set()
    assert two.losses[0] == pytest.approx(loss_of(long, one.after, samples=4), rel=1e-12)
    assert two.losses[0] != pytest.approx(loss_of(long, one.before, samples=4), rel=1e-6)
    # 0, 1/2 of the way through a warm-up of 2, then the square root of what is left of 4
    assert two.rates == pytest.approx([0.0, 0.002, 0.004 * 0.5**0.5, 0.004 * 0.25**0.5], rel=1e-15)
    assert two.steps == [6, 7, 8, 9]  # of the model: random numbers are not drawn twice
    moments = [name for name in two.after if name.endswith(".step")]
    assert {two.after[name].item() for name in moments} == {9.0}  # what corrects the bias of the moments goes on


def test_what_a_second_phase_forgets_is_said(tmp_path: Path) -> None:
    short, long = folder(tmp_path / "short", length=32), folder(tmp_path / "long", length=64)
    first = prepared(tmp_path / "one")
    swapped = folder(tmp_path / "swapped", length=64, vocab=[*VOCAB[:-2], VOCAB[-1], VOCAB[-2]])
    narrow = folder(tmp_path / "narrow", length=32, positions=32)
    wide = folder(tmp_path / "wide", length=64, positions=128)
    again, anew = f"{TWO} --resume {first}", f"{TWO} --resume {first} {ANEW}"
    said = {
        "--global-batch-size 4 differs from the checkpoint's 8 samples": words(long, again),
        "has made 5 updates and is in epoch 1": words(long, f"{again} --reset-dataloader"),
        "trained with vocabulary": words(swapped, anew),
        "position_embeddings.weight is (64, 16) float64 there, (128, 16)": words(wide, anew),
        "rows of up to 64 tokens in train, more than the 32 positions of the model": words(
            long, f"{anew} --config-file {narrow / 'bert_config.json'}"
        ),
    }
    runs = [(prepared(tmp_path / f"{number}"), arguments) for number, arguments in enumerate(said.values())]
    ((_, *refusals),) = run_ranks(in_turn, 1, [(first, words(short, ONE)), *runs])
    assert [told for told, refusal in zip(said, refusals, strict=True) if told not in refusal] == []
    assert "--reset-lr-scheduler" in refusals[1]


def test_a_second_phase_that_ended_has_nothing_left_to_do_and_is_no_error(tmp_path: Path) -> None:
    short, long = folder(tmp_path / "short", length=32), folder(tmp_path / "long", length=64)
    first, second = prepared(tmp_path / "one"), prepared(tmp_path / "two")
    again = (second, words(long, f"{TWO} --resume {first} {ANEW}"))
    ((_, two, three),) = run_ranks(in_turn, 1, [(first, words(short, ONE)), again, again])
    assert (two.steps, three.steps) == ([6, 7, 8, 9], [])


class Telling(Recorder):
    """Knows which step is expected to be the last."""

    last: int | None = None

    def set_total(self, steps: int | None) -> None:
        self.last = steps


def last_steps(group: Group, first: tuple[str, list[str]], others: list[tuple[str, list[str]]]) -> list[int | None]:
    """The last step that each of the others expects, before it trains."""
    train(group, *first)
    found = []
    for save_dir, arguments in others:
        recorder = Telling()
        begin(group, save_dir, arguments, BertTask, recorder).close()
        found.append(recorder.last)
    return found


def test_the_last_step_is_known_where_updates_or_epochs_are_counted_anew(tmp_path: Path) -> None:
    short, long = folder(tmp_path / "short", length=32), folder(tmp_path / "long", length=64)
    first = prepared(tmp_path / "one")  # ends with the first step of its second epoch
    elsewhere = f"--global-batch-size 4 --resume {first}"
    expected = {
        f"{elsewhere} {ANEW} --max-update 4": 10,
        f"{elsewhere} --reset-dataloader --max-update 9": 9,
        f"{elsewhere} {ANEW} --max-epoch 2": 26,  # two epochs of 10 steps
        f"{elsewhere} {ANEW} --max-epoch 2 --max-update 19": 25,
        f"{elsewhere} {ANEW}": None,
        f"--global-batch-size 8 --resume {first} --max-epoch 3": 15,
    }
    others = [(prepared(tmp_path / f"{number}"), words(long, text)) for number, text in enumerate(expected)]
    (found,) = run_ranks(last_steps, 1, (first, words(short, f"{ONE} --max-update 6")), others)
    assert dict(zip(expected, found, strict=True)) == expected
