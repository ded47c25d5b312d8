"""Losses that a corpus allows without context, and the speed of making corpora.

    python bench/corpus.py FOLDER ...
    python bench/corpus.py --speed TEXT VOCAB.txt [--rounds 3]

For folders of `bert_corpus`: padding in their rows, and the losses that are possible without reading.
Two guesses are scored on the masked words of each split (for records: of epoch 0). The first knows the frequency of
each of these words, and its loss is their entropy. The second also looks at the token in the word's place: if it is
not [MASK], it is the word itself or, as often, any word, so a frequent one is nearly always right. Only below the
second loss does a network surely use a word's neighbours.

With --speed the command itself makes records of TEXT, a file or a folder, with the given vocabulary: with one process
and with two, in one pass over the text and in five. A MB is 1,000,000 bytes of input text, counted once in all cases.
MB/s a core divides those bytes by the CPU time of all processes, from the start of Python on; the speed-up is in wall
time, which is meaningful on idle cores only. Ends with a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from figures import json_line, paired, spread, table

ROOT = Path(__file__).resolve().parents[1]
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def main() -> None:
    """Judge or measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="*", metavar="FOLDER")
    parser.add_argument("--speed", type=Path, nargs=2, metavar=("TEXT", "VOCAB"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.speed:
        text, vocab = options.speed
        measure(text, vocab, options.rounds)
        return
    found = [
        {"corpus": str(folder), "split": split, **judged(folder, split)}
        for folder in options.folders
        for split in json.loads((folder / "corpus.json").read_text(encoding="utf-8"))["splits"]
    ]
    heads = ("corpus", "split", "rows", "padding", "ln V", "entropy", "and copying", "times the entropy", "right")
    print(table(heads, [cells(row) for row in found]))
    print(json_line("corpus", {}, found))


def measure(text: Path, vocab: Path, rounds: int) -> None:
    """Make corpora by turns, and print how fast."""
    sys.path.insert(0, str(ROOT))
    from hetseq.preprocessing.corpus.sentences import text_files

    megabytes = sum(path.stat().st_size for path in text_files([text])) / 1e6
    kinds = [(duplicate, processes) for duplicate in (1, 5) for processes in (1, 2)]
    taken: dict[tuple[int, int], list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind in [*kinds[number % len(kinds) :], *kinds[: number % len(kinds)]]:
            taken[kind].append(made(text, vocab, *kind))
    found: list[dict[str, Any]] = []
    for (duplicate, processes), seconds in taken.items():
        alone = taken[duplicate, 1]
        found.append({
            "duplicate": duplicate, "processes": processes,
            "mb_per_core_s": spread([megabytes / cpu for _, cpu in seconds]),
            "mb_per_s": spread([megabytes / wall for wall, _ in seconds]),
            "speed_up": spread(paired([wall for wall, _ in alone], [wall for wall, _ in seconds])),
            "cpu": spread(paired([cpu for _, cpu in seconds], [cpu for _, cpu in alone])),
        })  # fmt: skip
    print(f"{megabytes:.2f} MB of input text, counted once; {rounds} rounds, medians and quartiles\n")
    heads = ("gone through", "processes", "MB/s a core", "MB/s of wall time", "speed-up", "CPU time against one")
    rows = [(f"{row['duplicate']} x", str(row["processes"]), list(row.values())[2:]) for row in found]
    print(table(heads, [[times, count, *(value.shown() for value in figures)] for times, count, figures in rows]))
    print(json_line("corpus speed", {"megabytes": megabytes, "rounds": rounds}, found))


def made(text: Path, vocab: Path, duplicate: int, processes: int) -> tuple[float, float]:
    """Wall and CPU seconds of making one corpus, over all its processes."""
    with tempfile.TemporaryDirectory(prefix="hetseq-corpus-") as folder:
        words = ["--output", f"{folder}/out", "--input", text, "--vocab-file", vocab, "--duplicate", duplicate]
        command = [sys.executable, "-m", "hetseq.preprocessing.bert_corpus", *words, "--processes", processes]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        began = time.perf_counter()
        child = os.posix_spawn(
            sys.executable, list(map(str, command)), environment,
            file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
        )  # fmt: skip
        _, status, usage = os.wait4(child, 0)
        wall = time.perf_counter() - began
    if status:
        raise SystemExit(f"{' '.join(map(str, command))} failed")
    return wall, usage.ru_utime + usage.ru_stime


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table; losses are in nats per masked word."""
    losses = [f"{row[name]:.2f}" for name in ("ln_v", "entropy", "copying")]
    ratio = f"{row['copying'] / row['entropy']:.3f}"
    return [
        row["corpus"],
        row["split"],
        f"{row['rows']:,}",
        f"{row['padding']:.1%}",
        *losses,
        ratio,
        f"{row['right']:.1%}",
    ]


def judged(folder: Path, split: str) -> dict[str, float]:
    """Rows and share of padding of a split; the losses in nats of both guesses, and how often the second is right."""
    tokens = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    facts = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    look = seen_in_records if facts["format"]["version"] == 2 else seen_in_hdf5
    word, seen, rows, padding = look(folder, split, tokens)
    share = np.bincount(word, minlength=len(tokens)) / len(word)  # (V,)
    entropy = -float(np.log(share[word]).mean())
    loss, right = copying(word, seen, share, tokens)
    return {
        "rows": rows, "padding": padding, "ln_v": math.log(len(tokens)), "entropy": entropy,
        "copying": loss, "right": right,
    }  # fmt: skip


def seen_in_hdf5(folder: Path, split: str, tokens: list[str]) -> tuple[Any, Any, int, float]:
    """The masked words, the tokens shown in their place, the rows, and the share of padding."""
    import h5py

    rows, real, cells_in_all = 0, 0, 0
    words, shown = [], []  # the masked words, and the tokens shown in their place
    for path in sorted(folder.glob(f"corpus_{split}_*.hdf5")):
        with h5py.File(path) as file:
            ids, positions = file["input_ids"][:], file["masked_lm_positions"][:]
            words.append(file["masked_lm_ids"][:][positions > 0].astype(np.int64))
            mask = file["input_mask"][:]
        at, _ = np.nonzero(positions)
        shown.append(ids[at, positions[positions > 0]].astype(np.int64))
        rows, real, cells_in_all = rows + len(ids), real + int(mask.sum()), cells_in_all + mask.size
    return np.concatenate(words), np.concatenate(shown), rows, 1 - real / cells_in_all


def seen_in_records(folder: Path, split: str, tokens: list[str]) -> tuple[Any, Any, int, float]:
    """The same of records, as validation masks them."""
    sys.path.insert(0, str(ROOT))
    from hetseq.tasks.bert.dataset import load_records
    from hetseq.tasks.bert.masking import Masking
    from hetseq.tasks.rows.record_index import read_index

    dataset = load_records(read_index(folder), split, tokens, seed=0, masking=Masking())
    words, shown, real, cells_in_all = [], [], 0, 0
    for start in range(0, len(dataset), 1024):
        batch = dataset.__getitems__(range(start, min(start + 1024, len(dataset))))
        ids, mask = batch["input_ids"].numpy(), batch["attention_mask"].numpy()
        words.append(batch["masked_ids"].numpy())
        shown.append(ids.ravel()[batch["masked_positions"].numpy()])
        real, cells_in_all = real + int(mask.sum()), cells_in_all + mask.size
    return np.concatenate(words), np.concatenate(shown), len(dataset), 1 - real / cells_in_all


def copying(word: Any, seen: Any, share: Any, tokens: list[str]) -> tuple[float, float]:
    """The mean loss of a guess by `share`, each word's frequency, and the token shown; and how often it is right.

    By Bayes' rule: one of ten masked words is unchanged, and one is replaced by any but the special tokens.
    """
    any_word = 1 / (len(tokens) - len(SPECIAL_TOKENS))
    kept = share / (share + any_word)  # (V,) the chance that the word shown is the masked one
    is_hidden = seen == tokens.index("[MASK]")
    chance = np.where(is_hidden, share[word], (1 - kept[seen]) * share[word] + kept[seen] * (seen == word))
    # the best guess is the word shown, or else the most frequent word
    most = int(share.argmax())
    copies = ~is_hidden & (kept[seen] + (1 - kept[seen]) * share[seen] > (1 - kept[seen]) * share[most])
    return -float(np.log(chance).mean()), float((np.where(copies, seen, most) == word).mean())


if __name__ == "__main__":
    main()
