"""The memory planner: the examples of its design, what every layout keeps, and what is told where nothing fits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hetseq.balance.memory_plan import (
    Candidate,
    Layout,
    Misfit,
    ModelMemory,
    RankMemory,
    candidates,
    choose,
    in_words,
    own_fractions,
)
from hetseq.balance.shares import Cost
from hetseq.errors import ConfigError

GB = 10**9
TEN_GBIT = 1.25e9
#: 24 layers and a root of 0.1 billion; the second has parameters of 16 bits and a master copy
BILLION = ModelMemory(1_000_000_000, 250_000_000, 37_500_000)
HALF = ModelMemory(1_300_000_000, 120_000_000, 50_000_000, 2, 0, 4, 8, 2)


def rank(memory_gb: float, samples_per_s: float, **other: object) -> RankMemory:
    """A rank of 24 GB and the like at 10 Gbit/s; with 0 samples/s it computes nothing."""
    cost = Cost(0.0, 1 / samples_per_s) if samples_per_s else Cost(0.0, 1.0, limit=0)
    return replace(RankMemory(f"{memory_gb:g}G", cost, int(memory_gb * GB), TEN_GBIT), **other)


def both(*ranks: RankMemory, model: ModelMemory = BILLION, total: int = 64) -> tuple[Candidate, Candidate]:
    none, state = candidates(ranks, model, total)
    assert (none.shard_model, state.shard_model) == ("none", "state")
    return none, state


PAIR = rank(24, 8), rank(12, 4)

# the examples of the design


def test_on_two_equal_cards_replicas_are_faster_as_they_hide_more() -> None:
    none, state = both(rank(24, 4), rank(24, 4))
    assert isinstance(none, Layout)
    assert isinstance(state, Layout)
    assert (none.shares, none.fractions, none.micro_batch) == ((32, 32), (1.0, 1.0), 16)
    assert none.step_s == pytest.approx(8 + 3.2 - 2 / 3 * 4)  # 8.5 s: two thirds of a micro-batch hide a part
    assert state.step_s == pytest.approx(8 + 1.6)  # backward hides the gradients, and nothing the parameters
    assert state.fractions == (0.5, 0.5)
    assert none.sent_bytes == none.received_bytes == state.sent_bytes == state.received_bytes == (4 * GB, 4 * GB)
    assert choose((none, state)) is none


def test_gradients_of_one_micro_batch_take_three_units_and_what_is_received_two() -> None:
    (_, small), (_, large) = (
        both(rank(24, 4), rank(24, 4), model=replace(BILLION, largest_unit_parameters=unit), total=2)
        for unit in (10_000_000, 20_000_000)
    )
    assert isinstance(small, Layout)
    assert isinstance(large, Layout)
    assert small.left_bytes[0] - large.left_bytes[0] == 5 * 10_000_000 * 4


def test_a_small_card_owns_by_its_memory_and_computes_by_its_speed() -> None:
    none, state = both(*(replace(one, cost=replace(one.cost, batch=16)) for one in PAIR), model=HALF)
    assert isinstance(none, Misfit)
    assert isinstance(state, Layout)
    assert state.shares == (43, 21)
    assert state.fractions == pytest.approx((0.80, 0.20), abs=0.005)
    # a backward of 1.19 s hides a part of one of the two exchanges, each of 2.08 GB at the large owner
    assert state.step_s == pytest.approx(5.375 + 1.664 + (1.664 - 1.194), abs=0.02)
    assert choose((none, state)) is state


def test_a_card_too_small_for_gradients_that_add_up_serves_memory_alone() -> None:
    wide = replace(BILLION, parameters=1_300_000_000, activation_bytes_per_sample=900_000_000)
    _, state = both(rank(24, 4), rank(12, 2), model=wide)
    assert isinstance(state, Layout)
    assert state.shares == (64, 0)
    assert state.fractions[1] > 0.3
    assert state.compute_s == 16


def test_a_server_with_memory_owns_nearly_all_of_it_and_computes_nothing() -> None:
    big = ModelMemory(3_000_000_000, 200_000_000, 87_500_000, 2, 0, 4, 8, 2)
    cards = rank(24, 4), rank(24, 4)
    assert all(isinstance(found, Misfit) for found in both(*cards, model=big))
    _, state = both(*cards, rank(128, 0), model=big)
    assert isinstance(state, Layout)
    assert state.shares == (32, 32, 0)
    assert state.fractions[2] > 0.85
    _, alone = both(*cards, rank(128, 0, is_stable=True), model=big)
    assert isinstance(alone, Layout)
    assert alone.fractions == (0, 0, 1)
    # without samples: gradients of both come in, parameters go out to both
    assert (alone.sent_bytes[2], alone.received_bytes[2]) == (12 * GB, 12 * GB)
    assert alone.exchange_s == pytest.approx(2 * 12 / 1.25)  # one after the other
    assert alone.sent_bytes[:2] == alone.received_bytes[:2] == (6 * GB, 6 * GB)


def test_host_memory_beside_a_card_holds_state() -> None:
    big = replace(HALF, parameters=3_000_000_000)
    assert isinstance(both(rank(24, 4), rank(24, 4), model=big)[1], Misfit)
    _, state = both(*[rank(24, 4, host_bytes=32 * GB)] * 2, model=big)
    assert isinstance(state, Layout)
    assert state.fractions == (0.5, 0.5)


# choosing


def test_of_layouts_as_fast_within_two_percent_the_simpler_is_chosen() -> None:
    none, state = both(rank(24, 4), rank(24, 4))
    assert isinstance(none, Layout)
    assert isinstance(state, Layout)
    for factor, chosen in ((0.98, "none"), (0.97, "state"), (1.5, "none")):
        other = replace(state, step_s=none.step_s * factor)
        assert choose((none, other)).shard_model == chosen


def test_where_nothing_fits_it_is_told_which_ranks_and_how_much_and_what_to_do() -> None:
    none, state = found = both(rank(24, 4), rank(12, 2), model=replace(BILLION, parameters=2_000_000_000))
    assert isinstance(none, Misfit)
    assert isinstance(state, Misfit)
    # 32 GB for parameters, moments and gradients, of which 22.08 and 11.04 GB fit; with one sample of 0.25 GB
    assert none.reason.startswith(
        "24G lacks 10.2 GB, 12G lacks 21.2 GB for a whole replica: divide the optimizer state"
    )
    assert state.missing_bytes == (0, 0)
    assert state.missing_state_bytes > 0
    with pytest.raises(ConfigError, match="--shard-model state: optimizer state and gradient sums take 24 GB, and"):
        choose(found)
    _, tiny = both(rank(24, 4), rank(4, 2), model=replace(BILLION, parameters=2_000_000_000))
    assert isinstance(tiny, Misfit)
    assert tiny.missing_bytes[0] == 0
    assert tiny.missing_bytes[1] == 4_620_000_000
    assert "4G lacks 4.62 GB for the whole parameters and one micro-batch: leave such ranks out, comp" in tiny.reason


def test_a_cap_on_the_memory_for_state_is_kept() -> None:
    _, state = both(rank(24, 4), rank(24, 4, most_owned_bytes=1 * GB))
    assert isinstance(state, Layout)
    assert state.fractions[1] * BILLION.state_bytes <= 1 * GB
    _, full = both(rank(24, 4, most_owned_bytes=4 * GB), rank(24, 4, most_owned_bytes=1 * GB))
    assert isinstance(full, Misfit)
    assert full.missing_state_bytes == 12 * GB - 5 * GB


# fractions of a run


def test_every_rank_is_left_the_same_part_of_its_room() -> None:
    assert own_fractions([6 * GB, 2 * GB, 0], [False] * 3, 4 * GB) == (0.75, 0.25, 0)
    assert own_fractions([6 * GB, 2 * GB], [False] * 2, 8 * GB) == (0.75, 0.25)
    assert own_fractions([0, 0], [False] * 2, 0) == (0.5, 0.5)


def test_stable_ranks_own_alone_if_they_can() -> None:
    room, stable = [6 * GB, 2 * GB, 4 * GB], [False, True, True]
    assert own_fractions(room, stable, 6 * GB) == pytest.approx((0, 1 / 3, 2 / 3))
    assert own_fractions(room, stable, 7 * GB) == pytest.approx((0.5, 1 / 6, 1 / 3))


def test_rooms_that_are_too_small_are_refused_with_three_remedies() -> None:
    with pytest.raises(ConfigError) as refusal:
        own_fractions([16 * GB, 4_500_000, 0], [True, False, False], 36 * GB)
    assert str(refusal.value) == (
        "--own auto: optimizer state and gradient sums take 36 GB, and there is room for 16 GB (rank 0 16 GB, rank 1"
        " 4.5 MB, rank 2 none): 20 GB are missing. Add a node with memory, which need not compute (--balance 3,1,0),"
        " raise --own-memory where it is set, or take an optimizer with less state"
    )
    with pytest.raises(ConfigError, match="rank 7 none and 3 more"):
        own_fractions([0] * 11, [False] * 11, 1)


def test_sizes_have_three_digits() -> None:
    words = [in_words(count) for count in (0, 12, 1500, 24 * GB, 11_040_000_000, 1234 * GB)]
    assert words == ["none", "12 bytes", "1.5 kB", "24 GB", "11 GB", "1.23 TB"]


# what holds of every layout


def test_layouts_fit_cover_everything_once_and_send_what_is_received() -> None:
    draw = random.Random(3)
    seen = {"none": 0, "state": 0, "misfit": 0, "idle": 0}
    for _ in range(300):
        ranks = [
            rank(draw.choice((8, 12, 24, 80)), draw.choice((0, 1, 2, 8)), is_stable=draw.random() < 0.3)
            for _ in range(draw.randint(1, 5))
        ]
        ranks.append(rank(24, 4))  # one computes
        model = replace(BILLION, parameters=draw.randrange(10**8, 3 * 10**9))
        total = draw.randint(1, 100)
        for found in candidates(ranks, model, total):
            if isinstance(found, Misfit):
                seen["misfit"] += 1
                assert sum(found.missing_bytes) + found.missing_state_bytes > 0
                continue
            seen[found.shard_model] += 1
            seen["idle"] += 0 in found.shares
            assert sum(found.shares) == total
            assert min(found.left_bytes) >= -len(ranks)  # rounded
            assert sum(found.sent_bytes) == pytest.approx(sum(found.received_bytes), abs=len(ranks))
            assert found.compute_s <= found.step_s <= found.compute_s + found.exchange_s
            if found.shard_model == "state":
                assert sum(found.fractions) == pytest.approx(1)
                part = [own * model.state_bytes / (left + own * model.state_bytes)
                        for own, left in zip(found.fractions, found.left_bytes) if own]  # fmt: skip
                assert part == pytest.approx([part[0]] * len(part), abs=1e-6)
    assert min(seen.values()) > 50, seen
