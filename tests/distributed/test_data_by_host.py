"""--data-by-host: each rank trains on what it can read, every sample once, and the loss is that of the whole step."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.support.parts import train_on_part, write_parts
from tests.support.ranks import RankRaised, run_ranks
from tests.support.toys import SAMPLES
from tests.support.training import prepared

EVEN, ODD = range(0, 18, 2), [*range(1, 18, 2), *range(18, SAMPLES)]
WORDS = (
    "--data-by-host --global-batch-size 12 --batch-size 30 --precision fp64 --optimizer sgd --lr 0.05 --seed 3"
    " --lr-scheduler constant --clip-norm 0 --disable-validation"
)


def words(steps: int, *more: str) -> list[str]:
    return [*WORDS.split(), "--max-update", str(steps), *more]


def run(path: Path, folders: list[str], steps: int, *more: str) -> Any:
    return run_ranks(train_on_part, len(folders), prepared(path), words(steps, *more), folders)


@pytest.mark.parametrize("balance", ["equal", "1,1,5", "auto"])
def test_every_row_is_computed_once_by_a_rank_that_has_it_and_losses_are_those_of_one_process(
    balance: str, tmp_path: Path
) -> None:
    even, odd = write_parts(tmp_path / "parts", EVEN, ODD)
    per_epoch = -(-SAMPLES // 12)
    together = run(tmp_path / "three", [even, odd, even], 2 * per_epoch, "--balance", balance, "--no-save")
    facts = together[0][0]
    assert all(other.losses == facts.losses for other, _ in together)
    left = [iter(seen) for _, seen in together]
    by_step = [[row for rank in range(3) for row in islice(left[rank], shares[rank])] for shares in facts.shares]
    assert all(set(seen) <= set(ODD if rank == 1 else EVEN) for rank, (_, seen) in enumerate(together))
    for epoch in (by_step[:per_epoch], by_step[per_epoch:]):
        assert sorted(row for rows in epoch for row in rows) == list(range(SAMPLES))
    assert by_step[0] != by_step[per_epoch]
    shares = [(shares[0] + shares[2], shares[1]) for shares in facts.shares[: per_epoch - 1]]
    assert set(shares) == {(5, 7), (4, 8)}, "of every step in proportion to what the hosts have"
    if balance == "1,1,5":
        assert facts.shares[0][2] > facts.shares[0][0], "within a host shares follow the weights"

    # one process that is given the same rows in the order of the steps
    whole = write_parts(tmp_path / "whole", [row for rows in by_step[:per_epoch] for row in rows])
    order = ["--curriculum", "9", "--no-save"]
    alone = run(tmp_path / "one", whole, per_epoch, *order)[0][0]
    assert max(abs(mine - right) for mine, right in zip(facts.losses, alone.losses)) <= 1e-12


def test_a_run_goes_on_with_other_ranks_as_long_as_all_parts_are_there(tmp_path: Path) -> None:
    even, odd = write_parts(tmp_path / "parts", EVEN, ODD)
    whole = run(tmp_path / "whole", [even, odd], 12)[0][0]
    first = run(tmp_path / "run", [even, odd, even], 5)[0][0]
    later = run(tmp_path / "run", [odd, odd, even, even], 12)[0][0]
    assert max(abs(a - b) for a, b in zip([*first.losses, *later.losses], whole.losses, strict=True)) <= 1e-12


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ("lacking", "give --data-by-host, on hosts that have the same parts of the data"),
        ("changed", "give --data-by-host, on hosts that have the same parts of the data"),
    ],
)
def test_a_run_does_not_go_on_without_its_data(other: str, says: str, tmp_path: Path) -> None:
    even, odd, changed = write_parts(tmp_path / "parts", EVEN, ODD, [0, *ODD[1:]])
    run(tmp_path / "run", [even, odd], 3)
    with pytest.raises(RankRaised, match=says):
        run(tmp_path / "run", [even, even] if other == "lacking" else [even, changed], 6)
