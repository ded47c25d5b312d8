"""`hetseq demo`: the promise in a minute or two, with data that are there already.

`hetseq demo mnist` trains digits with two workers, one of them three times slower, first with equal shares and then
with shares of 3:1: the curves agree to rounding, since shares never change what a step computes, and the second run is
faster, since nobody waits. `hetseq demo bert` makes a corpus of the text that comes with Python, pre-trains a small
BERT on it with two unequal workers, and repeats the first steps in one process. All run directories stay, to be looked
at.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hetseq import config as options
from hetseq.config.command_line import Argument, Command
from hetseq.errors import HetSeqError
from hetseq.launch.launch import launch
from hetseq.monitor.metrics import read_rows

_SLOW_DOWN = 3
_EPOCHS, _STEPS_PER_EPOCH = 12, 12  # 1,437 digits in batches of 128
_DIGITS = (
    "--task mnist --cpu --distributed-world-size 2 --global-batch-size 128 --precision fp64 --dropout 0 --seed 1"
    f" --max-epoch {_EPOCHS} --optimizer sgd --lr 0.1 --momentum 0.9 --warmup-updates 10"
    f" --total-num-update {_EPOCHS * _STEPS_PER_EPOCH} --throttle 1:{_SLOW_DOWN} --validate-interval 4"
    f" --persistent-time-interval 0 --no-epoch-checkpoints --log-interval {4 * _STEPS_PER_EPOCH} --no-progress-bar"
)
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
            "mnist (the default): digits, two unequal workers, with equal and with fitting shares; a minute. bert: a"
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
    runs = {}
    for name, balance in (("equal", "equal"), ("3-to-1", f"{_SLOW_DOWN},1")):
        print(f"-- shares {balance} --", flush=True)
        runs[name] = _train(folder / name, _DIGITS, "--balance", balance)
        print(flush=True)
    equal, unequal = (_speed(rows) for rows in runs.values())
    accuracy = [row["valid_accuracy"] for row in runs["3-to-1"] if "valid_accuracy" in row][-1]
    print(f"accuracy on unseen digits           {accuracy:.1%}")
    _print_difference(*runs.values())
    print(f"speed with equal shares             {equal:,.0f} samples/s")
    gain = f"{unequal / equal:.2f} times as fast"
    print(f"speed with shares of {_SLOW_DOWN}:1             {unequal:,.0f} samples/s ({gain})")
    print(f"run directories                     {folder / 'equal'}, {folder / '3-to-1'}")


def _run_bert(folder: Path) -> None:
    data = folder / "corpus"
    print(f"a small BERT, from text to masked words, on two unequal workers; everything goes to {folder}\n")
    _make_corpus(data)
    print("\n-- two workers with shares of 3:1 --", flush=True)
    shared = _train(
        folder / "shared", _BERT, "--data", str(data), "--max-update", str(_BERT_STEPS),
        "--distributed-world-size", "2", "--balance", "3,1",
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
    ending = launch(options.parse([*words.split(), *more, "--env", "none", "--save-dir", str(save_dir)]))
    if ending.code:
        raise HetSeqError(f"the demo's run in {save_dir} failed: {ending.message}")
    return read_rows(save_dir / "metrics.jsonl")


def _losses(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [row["loss"] for row in rows if "loss" in row]


def _speed(rows: list[dict[str, Any]]) -> float:
    """Samples per second of the median step."""
    steps = [row for row in rows if "loss" in row][_FIRST_STEPS:]
    return float(statistics.median(row["samples"] / row["seconds"] for row in steps))
