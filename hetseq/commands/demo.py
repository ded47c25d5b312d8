"""`hetseq demo`: the promise in a minute or two, with data that are there already.

`hetseq demo mnist` trains digits with two workers, one of them slowed down three times. Equal shares and shares of 3:1
take turns in one run, so that a busy machine treats both alike, and one process then repeats the run: the curves agree
to rounding, because shares never change what a step computes. `hetseq demo bert` makes a corpus from the text that
comes with Python, pre-trains a small BERT on it with two unequal workers, and repeats the first steps in one process.
All run directories stay.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hetseq import config as options
from hetseq.balance.shares import TURN_STEPS
from hetseq.config.command_line import Argument, Command
from hetseq.errors import HetSeqError
from hetseq.launch.launch import launch
from hetseq.monitor.metrics import read_rows
from hetseq.system.started_by import DEMO, starting_by

_SLOW_DOWN = 3
_EPOCHS, _STEPS_PER_EPOCH = 12, 12  # 1,437 digits in batches of 128
_DIGITS = (
    "--task mnist --cpu --global-batch-size 128 --precision fp64 --dropout 0 --seed 1"
    f" --max-epoch {_EPOCHS} --optimizer sgd --lr 0.1 --momentum 0.9 --warmup-updates 10"
    f" --total-num-update {_EPOCHS * _STEPS_PER_EPOCH} --validate-interval 4 --persistent-time-interval 0"
    f" --no-epoch-checkpoints --log-interval {4 * _STEPS_PER_EPOCH} --no-progress-bar"
)
_EQUAL, _FITTING = "1,1", f"{_SLOW_DOWN},1"
_FIRST_STEPS = 20  # connections, caches and thread pools warm up
_BERT_STEPS, _BERT_REPEATED = 1200, 20
_CORPUS = "--vocab-size 2048 --max-seq-length 64"
_BERT = (
    "--task bert --cpu --dropout 0 --global-batch-size 16 --optimizer adam --lr 0.0015 --weight-decay 0.01"
    f" --clip-norm 1 --warmup-updates 100 --total-num-update {_BERT_STEPS} --valid-subset test --no-progress-bar"
    " --max-sentences-valid 64 --no-epoch-checkpoints --log-interval 100"
)


COMMAND = Command(
    "demo",
    "See unequal workers give the result of one machine, in a minute or two.",
    usage=("[mnist | bert]",),
    words=(
        Argument(
            "NAME",
            "mnist (the default): digits on two unequal workers, with equal and with fitting shares; a minute. bert: a"
            " corpus of the text that comes with Python, and a small BERT on two unequal workers; two minutes",
            among=("mnist", "bert"),
            is_optional=True,
        ),
    ),
    examples=("hetseq demo", "hetseq demo bert"),
    notes=("Everything goes to a new folder in ./runs.",),
)


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """`hetseq demo [mnist|bert]`: run a demo, which prints what it shows; gives 0. Raises HetSeqError."""
    demos = {"mnist": _run_mnist, "bert": _run_bert}
    demos[COMMAND.read(words)["NAME"] or "mnist"](_new_folder())
    return 0


def _run_mnist(folder: Path) -> None:
    print(f"two workers, rank 1 slowed down {_SLOW_DOWN} times on purpose; everything goes to {folder}\n")
    print(f"-- two workers: equal shares and shares of {_SLOW_DOWN}:1 in turn, {TURN_STEPS} steps each --", flush=True)
    shared = _train(
        folder / "shared", _DIGITS, "--ranks", "2", "--throttle", f"1:{_SLOW_DOWN}",
        "--balance", f"{_EQUAL}/{_FITTING}",
    )  # fmt: skip
    print("\n-- the same in one process --", flush=True)
    alone = _train(folder / "alone", _DIGITS, "--ranks", "1")
    accuracy = [row["valid_accuracy"] for row in shared if "valid_accuracy" in row][-1]
    print(f"\naccuracy on unseen digits           {accuracy:.1%}")
    _print_difference(shared, alone)
    for line in _speeds(shared):
        print(line)
    print(f"run directories                     {folder / 'shared'}, {folder / 'alone'}")


def _run_bert(folder: Path) -> None:
    data = folder / "corpus"
    print(f"a small BERT, from text to masked words, on two unequal workers; everything goes to {folder}\n")
    _make_corpus(data)
    print("\n-- two workers with shares of 3:1 --", flush=True)
    shared = _train(
        folder / "shared", _BERT, "--data", str(data), "--max-update", str(_BERT_STEPS),
        "--ranks", "2", "--balance", "3,1",
    )  # fmt: skip
    print(f"\n-- the first {_BERT_REPEATED} steps again, in one process --", flush=True)
    alone = _train(
        folder / "alone", _BERT, "--data", str(data), "--max-update", str(_BERT_REPEATED), "--disable-validation",
        "--no-save",
    )  # fmt: skip
    found = [row for row in shared if "valid_mlm_accuracy" in row][-1]
    held_out = json.loads((data / "corpus.json").read_text(encoding="utf-8"))["splits"]["test"]
    guess = held_out["most_frequent"]
    print(f"\nmasked words of unseen text         {held_out['masked_tokens']:,}")
    print(f"guessed right                       {found['valid_mlm_accuracy']:.1%}")
    print(f"by always guessing {guess['token']!r:<17}{guess['share']:.1%}")
    print(f"of those the input does not show    {found['valid_hidden_accuracy']:.1%}")
    print(f"loss per masked word                {found['valid_mlm']:.2f} nats")
    print(f"entropy of the words' frequencies   {held_out['unigram_entropy']:.2f} nats")
    _print_difference(shared[: len(alone)], alone)
    print(f"run directories                     {folder / 'shared'}, {folder / 'alone'}")


def _make_corpus(folder: Path) -> None:
    """As a user would, with a program of its own: this package knows no tasks and no corpora."""
    words = ["-m", "hetseq.preprocessing.bert_corpus", "--output", str(folder), *_CORPUS.split()]
    print(f"-- {shlex.join(['python', *words])} --", flush=True)
    words[words.index(str(folder))] = str(folder.resolve())
    # from beside this package: a folder `hetseq` of the user's own would be taken first
    done = subprocess.run([sys.executable, *words], check=False, cwd=Path(__file__).resolve().parents[2])
    if done.returncode:
        raise HetSeqError(f"the corpus in {folder} could not be made: see above")


def _print_difference(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> None:
    pairs = list(zip(_losses(one), _losses(other), strict=True))
    difference = max(abs(mine - right) for mine, right in pairs)
    print(f"largest difference of the curves    {difference:.1e} nats over {len(pairs)} steps")


def _new_folder() -> Path:
    """A fresh folder in ./runs, or where this folder cannot be written, among the temporary files."""
    try:
        Path("runs").mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="demo-", dir="runs"))
    except OSError:
        return Path(tempfile.mkdtemp(prefix="hetseq-demo-"))


def _train(save_dir: Path, words: str, *more: str) -> list[dict[str, Any]]:
    with starting_by(DEMO):
        ending = launch(options.parse([*words.split(), *more, "--env", "none", "--save-dir", str(save_dir)]))
    if ending.code:
        raise HetSeqError(f"the demo's run in {save_dir} failed: {ending.message}")
    return read_rows(save_dir / "metrics.jsonl")


def _losses(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [row["loss"] for row in rows if "loss" in row]


def _speeds(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What to say of equal and of fitting shares: each time that one follows the other is a pair of its own.

    Where a quarter of the pairs show no gain, the machine was too busy to measure one.
    """
    steps = [row for row in rows if "loss" in row and row["step"] > _FIRST_STEPS]
    most = max(row["samples"] for row in steps)  # the last step of an epoch is smaller
    blocks = [
        statistics.median(row["seconds"] for row in block if row["samples"] == most)
        for _, block in itertools.groupby(steps, key=lambda row: (row["step"] - 1) // TURN_STEPS)
    ]
    pairs = list(zip(blocks[::2], blocks[1::2]))
    ratios = [equal_s / fitting_s for equal_s, fitting_s in pairs]
    if statistics.quantiles(ratios, n=4)[0] <= 1:
        load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
        return [
            f"speed                               not measured: this machine is busy (load {load:.1f} on {cores}"
            f" core{'s' * (cores > 1)}); the curves above are"
        ]
    equal, fitting = (most / statistics.median(seconds) for seconds in zip(*pairs))
    return [
        f"speed with equal shares             {equal:,.0f} samples/s",
        f"speed with shares of {_SLOW_DOWN}:1             {fitting:,.0f} samples/s,"
        f" {statistics.median(ratios):.2f} times as fast",
    ]
