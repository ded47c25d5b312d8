"""BERT with real command lines: one curve on any ranks, and the same bits after a death."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import pytest

from hetseq.monitor.metrics import read_rows
from hetseq.tasks.bert.model import BertConfig, BertForPreTraining
from hetseq.tasks.nn.huggingface import write_pretrained
from tests.support import bert, bert_records, forked, labelled
from tests.support.commands import HETSEQ, TRAIN, run_command
from tests.support.trials import curve, is_bit_equal, last_state, run_trial, start_trial

pytestmark = pytest.mark.slow

WORDS = shlex.split(
    "--task bert --cpu --optimizer adam --lr 0.002 --weight-decay 0.01 --clip-norm 1 --warmup-updates 5"
)


@pytest.fixture(scope="module", autouse=True)
def no_imports() -> None:
    """Commands here begin after their imports."""
    forked.warm_up()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with whole stretches without a masked word."""
    return bert.write_folder(tmp_path_factory.mktemp("bert") / "data", 200)


def losses(save_dir: Path) -> list[float]:
    return [row["loss"] for row in read_rows(save_dir / "metrics.jsonl") if "loss" in row]


def test_three_unequal_ranks_follow_the_curve_of_one_process(data: Path, tmp_path: Path) -> None:
    common = [*WORDS, "--data", data, "--global-batch-size", 48, "--max-update", 50, "--precision", "fp64"]
    runs = {"one": [], "three": [3, "--balance", "45,2,1"], "seed": [1, "--seed", 3]}
    for name, spread in runs.items():
        ranks = ["--distributed-world-size", *spread] if spread else []
        done = run_command([*common, "--dropout", 0, *ranks, "--save-dir", tmp_path / name], is_cold=False)
        assert done.code == 0, done.err
    one, three, seed = (losses(tmp_path / name) for name in runs)
    assert len(one) == 50
    assert max(abs(mine - right) for mine, right in zip(three, one, strict=True)) <= 1e-12
    assert max(abs(mine - right) for mine, right in zip(seed, one, strict=True)) > 1e-3, "the twin"
    last = read_rows(tmp_path / "three" / "metrics.jsonl")[-1]
    assert {"valid_loss", "valid_mlm", "valid_nsp", "valid_mlm_accuracy", "valid_nsp_accuracy"} <= set(last)


def test_a_killed_run_goes_on_to_the_bit(data: Path, tmp_path: Path) -> None:
    """With dropout; the second life begins within an epoch."""
    words = [*WORDS, "--data", data, "--global-batch-size", 24, "--batch-size", 7, "--max-update", 40]
    words += ["--save-interval-updates", 5]
    calm, hurt = tmp_path / "calm", tmp_path / "hurt"
    assert run_trial(words, calm).code == 0
    with start_trial([*words, "--throttle", "0:4"], hurt) as trial:
        trial.wait_for_step(17)
        trial.kill_everything()
    assert max(curve(hurt)) < 40
    assert run_trial(words, hurt).code == 0
    assert curve(hurt) == curve(calm)
    assert is_bit_equal(last_state(hurt), last_state(calm))


def test_ranks_that_read_a_local_copy_follow_the_same_curve_and_need_nothing_else(tmp_path: Path) -> None:
    rows = {"train": bert_records.make_rows(60), "valid": bert_records.make_rows(9, seed=1)}
    data, disk = bert_records.write_folder(tmp_path / "data", rows_per_file=20, **rows), tmp_path / "disk"
    disk.mkdir()
    config = {**bert.CONFIG, "vocab_size": len(bert_records.VOCAB), "max_position_embeddings": 24}
    (data / "bert_config.json").write_text(json.dumps(config))
    words = [*WORDS, "--data", data, "--global-batch-size", 12, "--max-update", 8, "--distributed-world-size", 2]
    curves = []
    for name, copied in {"plain": [], "copying": ["--local-copy", disk], "copied": ["--local-copy", disk]}.items():
        done = run_command([*words, "--balance", "equal", *copied, "--save-dir", tmp_path / name], is_cold=False)
        assert done.code == 0, done.err
        told = "".join(log.read_text() for log in (tmp_path / name / "log").glob("*.txt"))  # whichever rank copied
        assert ("once for all runs of this node" in told) == (name == "copying")
        curves.append(curve(tmp_path / name))
        if name == "copying":
            for path in data.glob("*.safetensors"):
                path.unlink()
    assert len(curves[0]) == 8
    assert curves[0] == curves[1] == curves[2]
    assert len(list(disk.rglob("*.safetensors"))) == 4


def test_training_begins_at_the_entropy_of_a_guess(data: Path, tmp_path: Path) -> None:
    done = run_command(
        [*WORDS, "--data", data, "--global-batch-size", 96, "--max-update", 1, "--save-dir", tmp_path / "run"]
    )
    assert done.code == 0, done.err
    (row,) = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert abs(row["terms"]["mlm"] - math.log(bert.VOCAB)) < 0.3
    assert abs(row["terms"]["nsp"] - math.log(2)) < 0.3
    assert row["loss"] == pytest.approx(row["terms"]["mlm"] + row["terms"]["nsp"])


REFUSALS = [
    ([], ("--data", "python -m hetseq.preprocessing.bert_corpus")),
    (["--data", "nowhere"], ("nowhere", "does not exist")),
    (["--data", "DATA", "--config-file", "none.json"], ("none.json",)),
    (["--data", "DATA", "--config-file", "wide.json"], ("hidden_sise", "hidden_size")),
    (["--data", "DATA", "--dict", "long.txt"], ("long.txt", "bert_config.json", "43", "40")),
    (["--data", "DATA", "--valid-subset", "test"], ("test", "x_train_0.hdf5")),
]


@pytest.mark.parametrize(("words", "says"), REFUSALS, ids=lambda value: " ".join(map(str, value))[-24:])
def test_what_is_missing_or_disagrees_is_said(
    data: Path, tmp_path: Path, words: list[str], says: tuple[str, ...]
) -> None:
    (tmp_path / "wide.json").write_text(json.dumps({**bert.CONFIG, "hidden_sise": 8}))
    (tmp_path / "long.txt").write_text("\n".join([*bert.TOKENS, "three", "words", "more"]) + "\n")
    given = [str(data) if word == "DATA" else word for word in words]
    done = run_command(["--task", "bert", "--cpu", *given], cwd=tmp_path, is_cold=False)
    assert done.code == 2, done.err
    assert "Traceback" not in done.err
    assert all(word in done.err for word in says), done.err
    assert not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.nightly
def test_a_fresh_head_is_told_where_training_begins_with_it_alone(tmp_path: Path) -> None:
    labelled.write_network(tmp_path)
    model = BertForPreTraining(BertConfig(**labelled.CONFIG))
    write_pretrained(model, tmp_path / "start", vocab_file=tmp_path / "words.txt")
    (tmp_path / "data").mkdir()
    for split in ("train", "valid"):
        (tmp_path / "data" / f"{split}.txt").write_text(labelled.TAGGED)
    train = ["--task", "bert_ner", "--data", "data", "--init-from", "start", "--cpu", "--distributed-world-size", 2]
    train += ["--global-batch-size", 2, "--save-dir", "run", "--max-update"]
    export = ["checkpoints", "export", "run", "--format", "hf", "--to", "out"]
    commands = [[*train, 2], [*train, 4], ["evaluate", "run", "--cpu"], export]
    done = [run_command(words, cwd=tmp_path, program=TRAIN if at < 2 else HETSEQ) for at, words in enumerate(commands)]
    assert [one.code for one in done] == [0] * 4
    assert [(one.out + one.err).count("left as initialised: the head for labels") for one in done] == [1, 0, 0, 0]
    assert ["not needed" in one.out + one.err for one in done] == [True, False, False, False]
