"""The end of a step: rows that keep every bit, one verdict from them, and a history that two states can compare."""

from __future__ import annotations

import math
import struct
from dataclasses import astuple, fields, replace
from typing import Any

import numpy as np
import pytest

from hetseq.balance.noise_scale import PartialGradient
from hetseq.balance.shares import Cost
from hetseq.cluster.membership.step_commit import (
    CommitRow,
    Lineage,
    Measured,
    OwnedBytes,
    RowFormat,
    SaveStatus,
    Verdict,
    Vote,
    Wish,
    add_in_rank_order,
    parse_lineage,
    resolve,
)
from hetseq.errors import DisagreementError

COST = Cost(0.25, 2.0**-20, None, 2.0**-9, 8)
ROW = CommitRow(
    digest=-1234567890123456789,
    vote=Vote.OK,
    next_samples=8,
    next_counts=(8.0, 3.5),
    sums=(1.25, -0.0),
    used=np.array([True, False, True]),
    measured=Measured(0.125, 0.0, 1e-300, 0.5, 2**40, 2**41, COST),
    wish=Wish.NONE,
    saving=SaveStatus(nonce=2**62 + 1),
    partial=PartialGradient(2**40, 1e-300),
    norm=2.0**-30,
)
FORMAT = RowFormat(terms=2, parameters=3)


def saying(**saving: Any) -> CommitRow:
    """The row of a rank that says something else of saving."""
    return replace(ROW, saving=replace(ROW.saving, **saving))


def through_words(row: CommitRow, row_format: RowFormat = FORMAT) -> CommitRow:
    words = row_format.pack(row)
    assert words.dtype == np.int64
    assert words.shape == (row_format.words,)
    return row_format.unpack(words)


def bits(row: CommitRow) -> tuple[object, ...]:
    """Everything of a row, floats by their bits: NaN equals itself, and -0.0 is not 0.0."""
    *seconds, memory_bytes, limit_bytes, cost, state = astuple(row.measured)
    floats = (*row.next_counts, *row.sums, *seconds, row.partial.square, row.norm)
    exact = struct.pack(f"{len(floats)}d", *floats)
    whole = (row.digest, row.vote, row.next_samples, memory_bytes, limit_bytes, cost, state, row.wish, row.saving)
    return (*whole, row.partial.samples, len(row.next_counts), exact, row.used.tolist())


# Rows.


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        replace(ROW, sums=(math.nan, math.inf), next_counts=(-math.inf, 5e-324), measured=Measured(-0.0, math.nan)),
        replace(saying(save=True, nonce=0), vote=Vote.NON_FINITE, wish=Wish.STOP, digest=-(2**63)),
        replace(saying(save=True, nonce=2**63 - 1), vote=Vote.REDO, digest=2**63 - 1, next_samples=0),
        replace(ROW, used=np.array([False, False, False])),
        saying(writing=True, keep=True, sealed=False),
        saying(unsent=True, lacking=0),
        saying(unsent=True, lacking=(1 << 8) - 1, failed=True),
        replace(saying(save=True, keep=True, sealed=True), wish=Wish.STOP),
        saying(save=True, writing=True, sealed=False),
        saying(writing=True, failed=True),
    ],
)
def test_a_row_comes_back_bit_for_bit(row: CommitRow) -> None:
    assert bits(through_words(row)) == bits(row)


@pytest.mark.parametrize("parameters", [0, 1, 63, 64, 65, 200])
def test_a_flag_for_each_parameter_comes_back(parameters: int) -> None:
    generator = np.random.default_rng(parameters)
    for share in (0.0, 0.5, 1.0):
        used = generator.random(parameters) < share
        back = through_words(replace(ROW, used=used), RowFormat(2, parameters))
        assert back.used.tolist() == used.tolist()
        assert bits(replace(back, used=ROW.used)) == bits(ROW)


@pytest.mark.parametrize("parameters", [0, 64, 65])
def test_what_a_rank_owns_is_five_words_more_where_ranks_own_parts(parameters: int) -> None:
    used, state = np.ones(parameters, np.bool_), OwnedBytes(2**40, 2**41, 0, 2**42)
    plain, owners = RowFormat(2, parameters), RowFormat(2, parameters, has_owners=True)
    saving = replace(ROW.saving, making_us=2**50)
    row = replace(ROW, used=used, measured=replace(ROW.measured, state=state), saving=saving)
    assert owners.words == plain.words + 5
    assert bits(through_words(row, owners)) == bits(row)
    assert owners.pack(row)[:-5].tolist() == plain.pack(row).tolist()
    assert through_words(row, plain).measured.state is None
    assert through_words(row, plain).saving.making_us == 0


@pytest.mark.parametrize("terms", [1, 2, 5])
def test_counts_and_sums_of_any_number_of_terms_come_back(terms: int) -> None:
    row = replace(ROW, next_counts=tuple(map(float, range(terms))), sums=tuple(-float(n) for n in range(terms)))
    assert bits(through_words(row, RowFormat(terms, 3))) == bits(row)


def test_a_row_that_differs_anywhere_has_other_words() -> None:
    twins = [
        replace(ROW, digest=0),
        replace(ROW, vote=Vote.REDO),
        replace(ROW, norm=2.0**-31),
        replace(ROW, next_samples=7),
        replace(ROW, next_counts=(8.0, 3.0)),
        replace(ROW, sums=(1.25, 0.0)),  # 0.0 for -0.0
        replace(ROW, used=np.array([True, True, True])),
        *(
            replace(ROW, measured=replace(ROW.measured, **{field.name: 7}))
            for field in fields(Measured)
            if field.name not in ("cost", "state")  # of which the latter does not travel in this format
        ),
        *(
            replace(ROW, measured=replace(ROW.measured, cost=replace(COST, **{field.name: 7})))
            for field in fields(Cost)
            if field.name != "limit"  # which does not travel
        ),
        replace(ROW, measured=replace(ROW.measured, cost=None)),
        replace(ROW, wish=Wish.STOP),
        saying(save=True),
        saying(nonce=0),
        saying(writing=True),
        saying(failed=True),
        saying(keep=True),
        saying(sealed=False),
    ]
    assert len({FORMAT.pack(row).tobytes() for row in [ROW, *twins]}) == len(twins) + 1
    assert all(bits(through_words(row)) != bits(ROW) for row in twins)


def test_a_rank_that_does_not_know_its_cost_says_so() -> None:
    assert Measured().cost is None
    assert through_words(replace(ROW, measured=Measured())).measured.cost is None


@pytest.mark.parametrize("cost", [Cost(0.5, 0.25), Cost(0.0, 1e-9, None, 0.125, 1), Cost(3.0, 2.0, None, 0.0, 64)])
def test_a_cost_comes_out_of_a_row_as_it_went_in(cost: Cost) -> None:
    assert through_words(replace(ROW, measured=Measured(cost=cost))).measured.cost == cost


# Verdicts.


@pytest.mark.parametrize(
    ("votes", "verdict"),
    [
        ([Vote.OK], Verdict.APPLY),
        ([Vote.OK, Vote.OK, Vote.OK], Verdict.APPLY),
        ([Vote.NON_FINITE], Verdict.SKIP),
        ([Vote.OK, Vote.NON_FINITE, Vote.OK], Verdict.SKIP),
        ([Vote.REDO, Vote.OK], Verdict.REDO),
        ([Vote.NON_FINITE, Vote.REDO], Verdict.REDO),
        ([Vote.REDO, Vote.NON_FINITE, Vote.OK], Verdict.REDO),
    ],
)
def test_the_worst_vote_decides_for_all(votes: list[Vote], verdict: Verdict) -> None:
    assert resolve([replace(ROW, vote=vote) for vote in votes], next_samples=0).verdict is verdict


def test_the_counts_of_the_next_step_are_known_only_if_they_cover_all_of_it() -> None:
    rows = [ROW, replace(ROW, next_samples=2, next_counts=(2.0, 0.5)), replace(ROW, next_samples=0, next_counts=(0, 0))]
    assert resolve(rows, next_samples=10).next_counts == (10.0, 4.0)
    late = [ROW, replace(ROW, next_samples=0, next_counts=(0.0, 0.0)), rows[2]]
    assert resolve(late, next_samples=10).next_counts is None
    assert resolve(rows, next_samples=11).next_counts is None
    assert resolve(rows, next_samples=9).next_counts is None


def test_sums_are_added_in_rank_order_so_that_all_ranks_get_the_same_bits() -> None:
    columns = [(1e16,), (1.0,), (-1e16,), (1.0,)]
    assert add_in_rank_order(columns) == (1.0,)
    assert add_in_rank_order([columns[0], columns[2], columns[1], columns[3]]) == (2.0,)  # the twin: another order
    rows = [replace(ROW, sums=(*column, 0.5)) for column in columns]
    assert resolve(rows, next_samples=0).sums == (1.0, 2.0)


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ((3.0, 4.0), 5.0),
        ((0.1,), 0.1),  # the square of which is rounded
        ((0.0, 0.1, 0.0), 0.1),
        ((0.0, 0.0), 0.0),
        ((3e200, 4e200), 5e200),  # whose squares overflow
        ((3e-200, 4e-200), 5e-200),
        ((1.0, math.inf), math.inf),
    ],
)
def test_the_norm_is_that_of_all_parts(parts: tuple[float, ...], whole: float) -> None:
    found = resolve([replace(ROW, norm=part) for part in parts], next_samples=0).norm
    assert found == whole if len(set(parts) - {0.0}) < 2 else found == pytest.approx(whole, rel=1e-15)


@pytest.mark.parametrize("parts", [(math.nan, 1.0), (1.0, math.nan), (math.inf, math.nan), (0.0, math.nan, math.nan)])
def test_a_part_that_is_no_number_makes_the_norm_none(parts: tuple[float, ...]) -> None:
    assert not math.isfinite(resolve([replace(ROW, norm=part) for part in parts], next_samples=0).norm)


def test_a_parameter_counts_as_used_if_it_is_on_any_rank() -> None:
    rows = [replace(ROW, used=np.array(used)) for used in ([True, False, False], [False, False, True])]
    assert resolve(rows, next_samples=0).used.tolist() == [True, False, True]
    assert resolve(rows[:1], next_samples=0).used.tolist() == [True, False, False]


def test_a_group_of_several_ranks_is_added_up_once_and_each_of_its_ranks_has_a_vote() -> None:
    rows = [replace(ROW, sums=(1.0, 2.0)), replace(ROW, sums=(1.0, 2.0)), replace(ROW, sums=(4.0, 8.0))]
    groups = resolve(rows, next_samples=16, leaders=(0, 2))  # ranks 0 and 1 are one group, of 8 samples
    assert groups.sums == (5.0, 10.0)
    assert groups.next_counts == (16.0, 7.0)
    single = resolve(rows, next_samples=24)
    assert (single.sums, single.next_counts) == ((6.0, 12.0), (24.0, 10.5))
    assert resolve(rows, next_samples=16).next_counts is None, "they are three shares then"
    rows[1] = replace(rows[1], vote=Vote.NON_FINITE)
    assert resolve(rows, next_samples=16, leaders=(0, 2)).verdict is Verdict.SKIP


def test_one_rank_that_wishes_to_stop_is_enough() -> None:
    rows = [ROW, replace(ROW, wish=Wish.STOP), ROW]
    assert resolve(rows, next_samples=0).wish is Wish.STOP
    assert resolve([ROW, ROW], next_samples=0).wish is Wish.NONE


def test_rank_zero_alone_says_whether_to_save_and_under_which_name() -> None:
    zero, other = saying(save=True, nonce=5), saying(save=False, nonce=9)
    saved = resolve([zero, other], next_samples=0)
    assert (saved.save, saved.nonce) == (True, 5)
    not_saved = resolve([other, zero], next_samples=0)
    assert (not_saved.save, not_saved.nonce) == (False, 9)


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_step_is_with_the_shadows_once_no_rank_has_to_send_it(rank: int | None) -> None:
    rows = [saying(unsent=False), saying(unsent=False)]
    if rank is not None:
        rows[rank] = saying(unsent=True)
    assert resolve(rows, next_samples=16).unsent == (rank is not None)


def test_a_state_is_kept_if_rank_zero_says_so_and_the_one_before_is_sealed_on_every_rank() -> None:
    zero, other = saying(keep=True), ROW
    assert resolve([zero, other, other], next_samples=0).keep
    assert not resolve([other, zero, zero], next_samples=0).keep
    for rank in range(3):
        rows = [zero, other, other]
        rows[rank] = replace(rows[rank], saving=replace(rows[rank].saving, sealed=False))
        assert not resolve(rows, next_samples=0).keep


def test_a_save_goes_on_once_no_rank_writes() -> None:
    assert not resolve([ROW, ROW], next_samples=0).writing
    assert resolve([ROW, saying(writing=True)], next_samples=0).writing


def test_all_ranks_learn_which_of_them_could_not_save() -> None:
    assert resolve([ROW, ROW], next_samples=0).failed == ()
    assert resolve([saying(failed=True), ROW, saying(failed=True)], next_samples=0).failed == (0, 2)


def test_ranks_that_computed_different_steps_are_told_apart() -> None:
    with pytest.raises(DisagreementError, match=r"rank 0: 0+5, rank 1: 0+6, rank 2: f+e") as caught:
        resolve([replace(ROW, digest=digest) for digest in (5, 6, -2)], next_samples=0)
    assert "same HetSeq, data and options" in str(caught.value)
    resolve([replace(ROW, digest=5)] * 3, next_samples=0)


# Lineages.


def grown(*steps: tuple[int, Verdict]) -> Lineage:
    lineage = Lineage()
    for step, verdict in steps:
        lineage = lineage.extend(step, generation=0, attempt=0, verdict=verdict)
    return lineage


APPLY, SKIP = Verdict.APPLY, Verdict.SKIP


def test_equal_histories_have_equal_lineages() -> None:
    assert grown((1, APPLY), (2, SKIP), (3, APPLY)) == grown((1, APPLY), (2, SKIP), (3, APPLY))


def test_histories_that_differ_anywhere_have_different_lineages() -> None:
    base = grown((1, APPLY))
    histories = [
        Lineage(),
        base,
        grown((1, APPLY), (2, APPLY)),
        grown((1, APPLY), (2, SKIP)),
        grown((1, SKIP), (2, APPLY)),
        grown((2, APPLY), (1, APPLY)),  # order matters
        base.extend(2, generation=1, attempt=0, verdict=APPLY),
        base.extend(2, generation=0, attempt=1, verdict=APPLY),
    ]
    assert len({lineage.chain for lineage in histories}) == len(histories)
    # a difference is never forgotten
    later = [lineage.extend(9, generation=0, attempt=0, verdict=APPLY) for lineage in histories]
    assert len({lineage.chain for lineage in later}) == len(histories)


def test_the_digest_of_a_step_contains_the_whole_history_and_the_plan() -> None:
    base = grown((1, APPLY))
    digests = {
        base.digest(generation=0, attempt=0, plan=3),
        base.digest(generation=1, attempt=0, plan=3),
        base.digest(generation=0, attempt=1, plan=3),
        base.digest(generation=0, attempt=0, plan=4),
        grown((1, SKIP)).digest(generation=0, attempt=0, plan=3),
        replace(base, step=2).digest(generation=0, attempt=0, plan=3),
    }
    assert len(digests) == 6
    assert base.digest(generation=0, attempt=0, plan=3) in digests


def test_a_lineage_survives_being_written_down() -> None:
    for lineage in (Lineage(), grown((1, APPLY)), Lineage(3, -1), Lineage(3, -(2**63)), Lineage(3, 2**63 - 1)):
        text = str(lineage)
        assert len(text) == 16
        assert parse_lineage(lineage.step, text) == lineage
        assert parse_lineage(lineage.step + 1, text) != lineage


def test_a_lineage_is_the_same_on_every_machine() -> None:
    # frozen: it stands in checkpoints
    assert str(grown((1, APPLY), (2, SKIP), (3, APPLY))) == "2e63746cfe66397f"
