"""The benefit of pre-training: word tagging and text classification, from pre-trained and from random weights.

    python bench/finetune.py --model DIR --output DIR [--ner FOLDER] [--classify FOLDER] [--seeds 3] [--lr X ...]

`--model` is a Hugging Face directory, as `hetseq checkpoints export --format hf` writes it. From scratch the same
network with random weights is trained, with the same vocabulary, data, options and number of steps; the pooler for
text labels is random in both. Both try every rate of `--lr`, and each is judged by its rate with the best mean, so
neither is held to a rate that suits the other. All metrics are measured on the held-out split after the last
step, which is not used to choose a step. A seed determines the order, dropout and the random weights.

    better   the difference of the means; met if it is larger than the spread, the larger one of the two ranges from
             the worst to the best seed

Complete runs in DIR are reused. Ends with a line of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from figures import json_line, table
from pretrain import command, read_rows

PRETRAINED, SCRATCH = "pre-trained", "from scratch"


@dataclass(frozen=True)
class Kind:
    """A task, and the metrics on its held-out split."""

    task: str
    split: str
    metrics: tuple[str, ...]
    batch: int
    updates: int  # some three epochs
    of_pretrained: tuple[str, ...] = ()  # words of a run that begins with pre-trained weights


KINDS = {
    "ner": Kind("bert_ner", "dev", ("f1", "token_f1"), 16, 640),
    "classify": Kind("bert_classify", "test", ("accuracy", "macro_f1"), 32, 940, ("--fresh-pooler",)),
}


class Cell(NamedTuple):
    """A metric of one way to begin, at its best rate."""

    lr: float
    values: tuple[float, ...]  # by seed

    @property
    def mean(self) -> float:
        """Of all seeds."""
        return statistics.fmean(self.values)

    @property
    def range(self) -> float:
        """From the worst to the best seed."""
        return max(self.values) - min(self.values)


def main() -> None:
    """Train all, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="the pre-trained network")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--ner", type=Path, metavar="FOLDER", help="data of --task bert_ner, with a split `dev`")
    parser.add_argument("--classify", type=Path, metavar="FOLDER", help="data of --task bert_classify, with `test`")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--lr", type=float, nargs="+", default=[5e-4], metavar="X", help="learning rates that both try")
    options = parser.parse_args()
    rows = []
    for name, kind in KINDS.items():
        data = getattr(options, name)
        if data is None:
            continue
        runs = {
            (start, lr, seed): train(options, kind, data, start, lr, seed)
            for seed, lr, start in itertools.product(range(1, options.seeds + 1), options.lr, (PRETRAINED, SCRATCH))
        }
        rows += compared(kind, runs)
    if not rows:
        parser.error("nothing to do: give --ner, --classify or both")
    heads = ("", "figure", PRETRAINED, SCRATCH, "better", "spread", "met")
    print(table(heads, [line(row) for row in rows]))
    print(json_line("finetune", {"seeds": options.seeds, "lr": options.lr}, rows))


def train(options: argparse.Namespace, kind: Kind, data: Path, start: str, lr: float, seed: int) -> Mapping[str, float]:
    """One run; the metrics of its last validation."""
    save_dir = options.output / f"{kind.task}-{start.replace(' ', '-')}-{lr:g}-{seed}"
    model: Path = options.model
    network = ["--config-file", str(model / "config.json"), "--dict", str(model / "vocab.txt")]
    command([
        "hetseq", "train", "--task", kind.task, "--data", str(data), "--valid-subset", kind.split,
        *(["--init-from", str(model), *kind.of_pretrained] if start == PRETRAINED else network),
        "--global-batch-size", str(kind.batch), "--precision", "bf16", "--clip-norm", "1", "--lr", f"{lr:g}",
        "--warmup-updates", "0.1", "--total-num-update", str(kind.updates), "--max-update", str(kind.updates),
        "--validate-interval", "1000", "--save-interval", "1000",
        "--seed", str(seed),
        "--no-epoch-checkpoints", "--save-dir", str(save_dir),
    ])  # fmt: skip
    rows = [row for row in read_rows(save_dir) if f"valid_{kind.metrics[0]}" in row]
    return {name: rows[-1][f"valid_{name}"] for name in kind.metrics}


def compared(kind: Kind, runs: Mapping[tuple[str, float, int], Mapping[str, float]]) -> list[dict[str, Any]]:
    """Both initializations' results for each metric; `runs` has the metrics by way, rate and seed."""
    rows = []
    for name in kind.metrics:
        cells = {start: best(start, name, runs) for start in (PRETRAINED, SCRATCH)}
        better = cells[PRETRAINED].mean - cells[SCRATCH].mean
        spread = max(cell.range for cell in cells.values())
        rows.append({
            "task": kind.task, "figure": name, "better": better, "spread": spread, "met": better > spread,
            **{start: {"mean": cell.mean, "lr": cell.lr, "values": cell.values} for start, cell in cells.items()},
        })  # fmt: skip
    return rows


def best(start: str, name: str, runs: Mapping[tuple[str, float, int], Mapping[str, float]]) -> Cell:
    """The rate with which a way to begin has the best mean of a metric, and its values."""
    by_rate: dict[float, list[float]] = {}
    for (began, lr, _), metrics in runs.items():
        if began == start:
            by_rate.setdefault(lr, []).append(metrics[name])
    return max((Cell(lr, tuple(values)) for lr, values in by_rate.items()), key=lambda cell: cell.mean)


def line(row: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    ways = []
    for way in (row[PRETRAINED], row[SCRATCH]):
        low, high = min(way["values"]), max(way["values"])
        ways.append(f"{way['mean']:.3f} ({low:.3f}-{high:.3f}) at {way['lr']:g}")
    met = "yes" if row["met"] else "no"
    return [row["task"], row["figure"], *ways, f"{row['better']:+.3f}", f"{row['spread']:.3f}", met]


if __name__ == "__main__":
    main()
