"""What a corpus asks of a network: padding in its rows, and the losses that can be reached without reading.

    python bench/corpus.py FOLDER ...

For folders of `preprocessing.bert_corpus`. Two guesses are judged on the masked words of each split. One knows how
frequent each of these words is, and its loss is their entropy. The other also looks at what stands in the place of the
word: where that is not [MASK], it is the word itself or, as often, any word, so a frequent one is nearly always right.
Only below the second does a network surely use the neighbours of a word. Ends with a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from figures import json_line, table

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def main() -> None:
    """Judge and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    found = [
        {"corpus": str(folder), "split": split, **judged(folder, split)}
        for folder in parser.parse_args().folders
        for split in json.loads((folder / "corpus.json").read_text(encoding="utf-8"))["splits"]
    ]
    heads = ("corpus", "split", "rows", "padding", "ln V", "entropy", "and copying", "times the entropy", "right")
    print(table(heads, [cells(row) for row in found]))
    print(json_line("corpus", {}, found))


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
    rows, real, cells_in_all = 0, 0, 0
    words, shown = [], []  # what is to be found, and what stands there
    for path in sorted(folder.glob(f"corpus_{split}_*.hdf5")):
        with h5py.File(path) as file:
            ids, positions = file["input_ids"][:], file["masked_lm_positions"][:]
            words.append(file["masked_lm_ids"][:][positions > 0].astype(np.int64))
            mask = file["input_mask"][:]
        at, _ = np.nonzero(positions)
        shown.append(ids[at, positions[positions > 0]].astype(np.int64))
        rows, real, cells_in_all = rows + len(ids), real + int(mask.sum()), cells_in_all + mask.size
    word, seen = np.concatenate(words), np.concatenate(shown)  # (masked words,)
    share = np.bincount(word, minlength=len(tokens)) / len(word)  # (V,)
    entropy = -float(np.log(share[word]).mean())
    loss, right = copying(word, seen, share, tokens)
    return {
        "rows": rows, "padding": 1 - real / cells_in_all, "ln_v": math.log(len(tokens)), "entropy": entropy,
        "copying": loss, "right": right,
    }  # fmt: skip


def copying(word: Any, seen: Any, share: Any, tokens: list[str]) -> tuple[float, float]:
    """The mean loss of who knows `share`, the frequency of each word, and what stands there; how often that is right.

    By Bayes' rule: of ten masked words one stands there as it is, and one is replaced by any but the special tokens.
    """
    any_word = 1 / (len(tokens) - len(SPECIAL_TOKENS))
    kept = share / (share + any_word)  # (V,) the chance that a word which stands there is the one that was masked
    is_hidden = seen == tokens.index("[MASK]")
    chance = np.where(is_hidden, share[word], (1 - kept[seen]) * share[word] + kept[seen] * (seen == word))
    # the best guess is what stands there, or else the most frequent word
    most = int(share.argmax())
    copies = ~is_hidden & (kept[seen] + (1 - kept[seen]) * share[seen] > (1 - kept[seen]) * share[most])
    return -float(np.log(chance).mean()), float((np.where(copies, seen, most) == word).mean())


if __name__ == "__main__":
    main()
