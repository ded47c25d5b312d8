"""A BERT of 4 layers of 256 from a folder of books, on two unequal workers, and the same run in one process.

    python bench/pretrain.py TEXT --output DIR [--updates 5800] [--slower 1.5] [--picture FILE.svg]

HetSeq's own commands, which are printed, do all the work. The second worker is deliberately slowed down. Complete
results in DIR are reused, so running the command again resumes an interrupted run; the training time is the sum over
the steps, so it includes all parts.

    masked accuracy      on the masked words of the held-out text; beside it the accuracy of always guessing the most
                         frequent one, and the accuracy where the input does not show the word
    apart                the difference of the two curves at a step, in nats: the largest, and the median

The micro-batches are units of 4 rows, so that both runs compute the same products, and gradients are accumulated in
double precision, so that the order of additions does not matter: both curves are expected to be equal in every
step. Ends with a line of JSON, and with `--picture` both curves are drawn.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures import json_line, largest_gap, table
from line_chart import Curve, Panel, picture

ROOT = Path(__file__).resolve().parents[1]
CORPUS = "--cased --vocab-size 8192 --max-seq-length 64 --duplicate 4"
NETWORK = {
    "vocab_size": 8192, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 1024, "max_position_embeddings": 128,
}  # fmt: skip
TRAINING = (
    "--task bert --valid-subset test --mask-prob 0.4 --global-batch-size 20 --unit-size 4 --precision bf16 --dropout 0"
    " --lr 0.0006 --adam-betas 0.9,0.98 --clip-norm 1 --reduce-dtype fp64"
)
BAR, MOST_MINUTES = 2.0, 30.0  # times the most frequent word's accuracy; of the two workers

Row = dict[str, Any]


def main() -> None:
    """Train twice, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("text", type=Path, metavar="TEXT", help="text files in UTF-8, or a folder of them")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--updates", type=int, default=5800, metavar="N", help="steps of each run")
    parser.add_argument("--slower", type=float, default=1.5, metavar="X", help="how much slower the second worker is")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw both curves there")
    options = parser.parse_args()
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    corpus, network = folder / "corpus", folder / "network.json"
    if not (corpus / "corpus.json").exists():
        words = f"--input {shlex.quote(str(options.text))} {CORPUS} --output {shlex.quote(str(corpus))}"
        command(["hetseq.preprocessing.bert_corpus", *shlex.split(words)])
    network.write_text(json.dumps(NETWORK, indent=2) + "\n", encoding="utf-8")
    two = run(options, "two", ["--distributed-world-size", "2", "--throttle", f"1:{options.slower:g}"])
    one = run(options, "one", [])
    found = judged(two, one, json.loads((corpus / "corpus.json").read_text(encoding="utf-8"))["splits"]["test"])
    print(table(("", "printed", "bar"), cells(found)))
    if options.picture:
        options.picture.write_text(drawn(two, one), encoding="utf-8")
    print(json_line("pretrain", {"updates": options.updates, "slower": options.slower}, [found]))


def run(options: argparse.Namespace, name: str, more: Sequence[str]) -> list[Row]:
    """Train in DIR/name, or resume; returns the rows of its metrics.jsonl. Ends the program if training fails."""
    folder, updates = options.output, options.updates
    words = [
        *TRAINING.split(), "--data", str(folder / "corpus"), "--config-file", str(folder / "network.json"),
        "--warmup-updates", str(updates // 10), "--total-num-update", str(updates), "--max-update", str(updates),
        "--validate-interval-updates", str(max(updates // 2, 1)), "--save-interval-updates", str(max(updates // 2, 1)),
        "--save-dir", str(folder / name), *more,
    ]  # fmt: skip
    command(["hetseq", "train", *words])
    return read_rows(folder / name)


def command(words: Sequence[str]) -> None:
    """Run `python -m words` from the repository, every process with one thread; ends the program where it fails."""
    print(f"-- {shlex.join(['python', '-m', *words])}", flush=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    began_s = time.monotonic()
    with subprocess.Popen([sys.executable, "-m", *words], env=environment) as process:
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:  # it received Ctrl-C too, and saves
                pass
    print(f"-- {time.monotonic() - began_s:.0f} s", flush=True)
    if code:
        sys.exit(f"{Path(__file__).name}: the command above ended with {code}; run this command again to resume")


def read_rows(save_dir: Path) -> list[Row]:
    """A run's rows of steps and validations."""
    lines = (save_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def judged(two: Sequence[Row], one: Sequence[Row], held_out: Row) -> Row:
    """All figures of both runs; `held_out` is the corpus.json entry of the held-out text."""
    curves = [losses(two), losses(one)]
    apart = [abs(ours - theirs) for ours, theirs in zip(*curves, strict=True)]
    steps = [row for row in two if "loss" in row]
    last = [row for row in two if "valid_mlm_accuracy" in row][-1]
    alone = [row for row in one if "valid_mlm_accuracy" in row][-1]
    minutes, alone_minutes = (sum(row["seconds"] for row in rows if "loss" in row) / 60 for rows in (two, one))
    return {
        "minutes": minutes,
        "one_process_minutes": alone_minutes,
        "share_of_first": sum(row["shares"][0] for row in steps) / sum(map(sum, (row["shares"] for row in steps))),
        "efficiency": statistics.median(row["efficiency"] for row in steps if row.get("efficiency")),
        "masked_accuracy": last["valid_mlm_accuracy"],
        "most_frequent": held_out["most_frequent"]["share"],
        "times_the_most_frequent": last["valid_mlm_accuracy"] / held_out["most_frequent"]["share"],
        "hidden_accuracy": last["valid_hidden_accuracy"],
        "pairs_accuracy": last["valid_nsp_accuracy"],
        "loss_per_masked_word": last["valid_mlm"],
        "unigram_entropy": held_out["unigram_entropy"],
        "steps": len(steps),
        "largest_apart": largest_gap(curves),
        "median_apart": statistics.median(apart),
        "validation_apart": abs(last["valid_mlm"] - alone["valid_mlm"]),
    }


def losses(rows: Sequence[Row]) -> list[float]:
    """The loss of every step, in order."""
    return [row["loss"] for row in rows if "loss" in row]


def cells(found: Row) -> list[list[str]]:
    """Rows of the table."""
    times = found["times_the_most_frequent"]
    return [
        ["training on two workers, min", f"{found['minutes']:.1f}", f"{MOST_MINUTES:.0f}"],
        ["training in one process, min", f"{found['one_process_minutes']:.1f}", ""],
        ["the first worker's share", f"{found['share_of_first']:.1%}", ""],
        ["efficiency (median)", f"{found['efficiency']:.2f}", ""],
        ["masked words guessed right", f"{found['masked_accuracy']:.1%}", ""],
        ["by always guessing the most frequent", f"{found['most_frequent']:.1%}", ""],
        ["times as often", f"{times:.2f}", f"{BAR:g}"],
        ["of those the input does not show", f"{found['hidden_accuracy']:.1%}", ""],
        ["pairs of passages told right", f"{found['pairs_accuracy']:.1%}", ""],
        ["loss per masked word, nats", f"{found['loss_per_masked_word']:.3f}", ""],
        ["entropy of the words' frequencies, nats", f"{found['unigram_entropy']:.3f}", ""],
        [f"largest difference of the curves over {found['steps']:,} steps, nats", f"{found['largest_apart']:.1e}", ""],
        ["median difference, nats", f"{found['median_apart']:.1e}", ""],
        ["difference of the validation losses, nats", f"{found['validation_apart']:.1e}", ""],
    ]


def drawn(two: Sequence[Row], one: Sequence[Row]) -> str:
    """Both curves, their difference, and the two workers' shares below each other."""
    steps = [row for row in two if "loss" in row]
    curves = [
        Curve(name, [(row["step"], row["loss"]) for row in rows if "loss" in row])
        for name, rows in (("two unequal workers", two), ("one process", one))
    ]
    apart = [(x, abs(y - other)) for (x, y), (_, other) in zip(*(curve.points for curve in curves)) if math.isfinite(y)]
    are_equal = not any(difference for _, difference in apart)
    shares = [
        Curve(f"worker {rank}", [(row["step"], row["shares"][rank] / sum(row["shares"])) for row in steps])
        for rank in (0, 1)
    ]
    loss = "loss of a step, nats: masked words and next sentence"
    difference = [] if are_equal else [Panel("difference of the two, nats", [Curve("", apart)], logarithmic=True)]
    return picture(
        [
            Panel(f"{loss}; the two are equal in every step" if are_equal else loss, curves),
            *difference,
            Panel("share of the step's rows", shares),
        ],
        "step",
    )


if __name__ == "__main__":
    main()
