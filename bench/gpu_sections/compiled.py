"""--compile on this device, with loader processes: the losses of an eager run, and what compiling takes."""

from __future__ import annotations

import os
import shutil
import statistics
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from gpu_sections.corpora import corpus
from gpu_sections.runs import PICTURES, PLAIN, Wanted, gap, train_all
from gpu_sections.section import Check, Place, Skipped, figure_of, within

STEPS = 20


def checks(place: Place) -> Iterator[Check]:
    """BERT on a GPU; on a CPU, whose compiler takes longer, the network of pictures."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place.folder / "inductor")  # nothing is compiled yet
    header = Path(sysconfig.get_path("include")) / "Python.h"
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None or not header.exists():
        raise Skipped("needs a C compiler and Python.h")
    one = place.devices(1)
    words: tuple[object, ...] = (*PLAIN, "--max-update", STEPS, "--lr", "0.0005", "--num-workers", 2)
    if place.is_gpu:
        words = (*words, "--task", "bert", "--data", corpus(place, "bert"), "--dropout", 0, "--global-batch-size", 32)
    else:
        words = (*words, "--task", PICTURES, "--global-batch-size", 96)
    runs = train_all(place, [Wanted("eager", words, one), Wanted("compiled", (*words, "--compile"), one)])
    yield within("compiled against eager, nats", gap(runs["eager"], runs["compiled"]), 1e-3)
    for name, run in runs.items():
        later = statistics.median(row["seconds"] for row in run.rows[5:])
        yield Check(f"{name}: whole run, median step", f"{figure_of(run.seconds)}, {figure_of(later)}")
