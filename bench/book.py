"""A small BERT trained on one book: its first loss, and the held-out loss over time.

    python bench/book.py BOOK.txt VOCAB.txt [--ranks 2] [--steps 1500] [--minutes 15]

Makes the corpus and trains 4 layers of 256 with one thread per rank. Prints the loss of the first step beside
ln V + ln 2, the loss on held-out masked words over time, and when it first fell below the entropy of those words'
frequencies. A tenth of the masked words are unchanged in the input and easily copied, so the loss on the others is
printed as well. Ends with a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIG = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024,
    "max_position_embeddings": 128,
}  # fmt: skip
LENGTH, BATCH, EVERY = 64, 16, 250


def main() -> int:
    """Returns 0 if the loss fell below the entropy in time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("book", type=Path)
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--minutes", type=float, default=15.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hetseq-book-") as name:
        folder = Path(name)
        run("-m", "hetseq.preprocessing.bert_corpus", "--output", folder / "data", "--input", options.book,
            "--vocab-file", options.vocabulary, "--max-seq-length", LENGTH, "--duplicate", 10)  # fmt: skip
        facts = json.loads((folder / "data" / "corpus.json").read_text(encoding="utf-8"))
        words = facts["vocabulary"]["tokens"]
        (folder / "4x256.json").write_text(json.dumps({"vocab_size": words, **CONFIG}))
        run(ROOT / "train.py", "--task", "bert", "--cpu", "--data", folder / "data", "--config-file",
            folder / "4x256.json", "--distributed-world-size", options.ranks, "--global-batch-size", BATCH,
            "--dropout", 0, "--lr", 7e-4, "--weight-decay", 0.01, "--clip-norm", 1, "--warmup-updates", 200,
            "--total-num-update", options.steps, "--max-update", options.steps, "--valid-subset", "test",
            "--validate-interval-updates", EVERY, "--max-sentences-valid", 64, "--no-save", "--no-progress-bar",
            "--log-interval", EVERY, "--save-dir", folder / "run")  # fmt: skip
        with (folder / "run" / "metrics.jsonl").open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
    return report(rows, words, facts["splits"]["test"], options.minutes)


def run(*words: object) -> None:
    """A command of this Python, with one thread; its output is shown."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *map(str, words)], check=True, env=environment)


def report(rows: list[dict[str, Any]], words: int, held_out: dict[str, Any], minutes: float) -> int:
    """Print the results; 0 if the held-out loss fell below the words' entropy in time."""
    first = next(row for row in rows if "loss" in row)
    guess, entropy = math.log(words) + math.log(2), held_out["unigram_entropy"]
    print(f"\nfirst step {first['loss']:.3f} nats, ln V + ln 2 = {guess:.3f}")
    print(f"entropy of the held-out masked words' frequencies: {entropy:.3f} nats\n")
    print("   step  minutes  held-out loss  of hidden words")
    seconds, crossed = 0.0, None
    for row in rows:
        seconds += row.get("seconds", 0.0)
        if "valid_mlm" in row:
            is_below = row["valid_mlm"] < entropy
            crossed = seconds / 60 if is_below and crossed is None else crossed
            losses = f"{row['valid_mlm']:15.3f}{row['valid_hidden_mlm']:17.3f}"
            print(f"{row['step']:7}{seconds / 60:9.1f}{losses}{'  below' * is_below}")
    print(json.dumps({"first": first["loss"], "guess": guess, "entropy": entropy, "minutes_to_below": crossed}))
    return 0 if crossed is not None and crossed <= minutes and abs(first["loss"] - guess) <= 0.3 else 1


if __name__ == "__main__":
    sys.exit(main())
