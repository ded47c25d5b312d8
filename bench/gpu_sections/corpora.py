"""Small corpora for the sections that train BERT and GPT, made once from the manual by HetSeq's own commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpu_sections.section import ROOT, Place, one_line

CHARACTERS = 200_000


def corpus(place: Place, task: str) -> Path:
    """The folder that `--task TASK --data FOLDER` reads, for "bert" or "gpt": rows of 64 tokens, 2 layers of 128."""
    folder = place.shared / task
    if folder.exists():
        return folder
    place.begin(f"the corpus of {task}")
    text = place.folder / "text.txt"
    pages = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md")))
    text.write_text(pages[:CHARACTERS], encoding="utf-8")
    made = place.folder / task
    done = subprocess.run(
        [sys.executable, "-m", f"hetseq.preprocessing.{task}_corpus", "--input", str(text), "--output", str(made),
         "--vocab-size", "1024", "--max-seq-length", "64"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(
            f"hetseq.preprocessing.{task}_corpus ended with {done.returncode}: {one_line(done.stderr[-300:])}"
        )
    os.rename(made, folder)  # whole, or not there
    return folder
