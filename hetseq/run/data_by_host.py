"""Training data that differ from host to host: `--data-by-host`, as SageMaker's ShardedByS3Key leaves them.

Responsible for finding the ranks that read the same part, for the text by which a checkpoint remembers the parts, and
for saying which promises the run no longer keeps. It refuses to guess: ranks read the same part if their data have the
same digest, wherever they run.

The one idea: which host has which part is a fact of the data, like their number, so it is part of the provenance.
Ranks that begin, join or resume are checked against it; if a part leaves with its last rank, the run ends.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from hetseq.comm.group import RowTransport
from hetseq.data.shards import Shards
from hetseq.run.loaded_task import LoadedTask

logger = logging.getLogger(__name__)


def parts_of_ranks(material: LoadedTask, group: RowTransport) -> list[tuple[str, int]]:
    """For every rank the digest of its training data and the number of its samples. Collective; raises DataError."""
    row = np.array([int(material.part, 16), len(material.train)], np.int64)
    return [(f"{digest:012x}", samples) for digest, samples in group.all_gather_rows(row).tolist()]


def text_of(parts: Sequence[tuple[str, int]]) -> str:
    """`DIGEST:SAMPLES,...` of each part once, for the provenance of a run; the same wherever the parts are."""
    return ",".join(f"{digest}:{samples}" for digest, samples in sorted(set(parts)))


def shards_of(text: str, parts: Sequence[tuple[str, int]]) -> Shards:
    """The parts of a run by `text_of`, and the data-parallel groups that have each, from the part of every group."""
    named = [entry.split(":") for entry in text.split(",")]
    holders = [tuple(group for group, (digest, _) in enumerate(parts) if digest == name) for name, _ in named]
    return Shards(tuple(int(samples) for _, samples in named), tuple(holders), len(parts))


def say_what_holds(shards: Shards, slots: Sequence[int], *, has_begun: bool) -> None:
    """Say which ranks mix which parts, and what is off; in a later generation what has changed. One rank calls it.

    `slots` are the names of the ranks for users, one for each data-parallel group.
    """
    strangers = sorted(set(slots) - {slots[group] for groups in shards.holders for group in groups})
    if strangers:
        logger.warning(
            "--data-by-host: rank%s %s read%s training data that this run did not begin with, and so get%s no samples",
            "" if len(strangers) == 1 else "s", ", ".join(map(str, strangers)), *("s" * (len(strangers) == 1),) * 2,
        )  # fmt: skip
    if shards.lost:
        logger.warning(
            "--data-by-host: no rank is left that can read %d of the %d parts of the training data (%s samples): the"
            " state is saved; run the same command again once all hosts are back", len(shards.lost),
            len(shards.samples), f"{sum(shards.samples[number] for number in shards.lost):,}",
        )  # fmt: skip
    if has_begun:
        return
    if len(shards.samples) == 1:
        logger.warning(
            "--data-by-host: all ranks read the same training data, so it changes nothing; a host that comes later with"
            " other data gets no samples, so with --join let --min-ranks count the ranks of all hosts"
        )
        return
    for ranks, samples in zip(shards.holders, shards.samples):
        logger.info(
            "--data-by-host: rank%s %s read%s %s of the %s training samples, %.1f %% of every step",
            "" if len(ranks) == 1 else "s", ", ".join(str(slots[rank]) for rank in ranks),
            "s" if len(ranks) == 1 else "",
            f"{samples:,}", f"{shards.total:,}", 100 * samples / shards.total,
        )  # fmt: skip
    logger.warning(
        "--data-by-host: each sample still counts once in an epoch, and losses are exact; but the order is per host, so"
        " data placed otherwise give another curve; shares move only among ranks that read the same part, so the host"
        " with most data for its speed sets the pace; and a host that leaves for good ends the run"
    )
