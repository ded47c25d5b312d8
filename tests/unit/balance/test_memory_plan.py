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
    rounds_seconds,
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
    none, state = candidates(ranks, model, total, kinds=("none", "state"))
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


# parameters that come and go

#: four layers and a root of 25 million parameters each, so 0.1 GB as numbers of 32 bits
FIVE = ModelMemory(125_000_000, 300_000_000, layers=4)
TENTH = GB // 10


def all_of(*ranks: RankMemory, model: ModelMemory = FIVE, total: int = 64) -> Layout:
    (found,) = candidates(ranks, model, total, kinds=("all",))
    assert isinstance(found, Layout), found
    return found


def in_micro_batches(of: int, rank_: RankMemory) -> RankMemory:
    return replace(rank_, cost=replace(rank_.cost, batch=of))


def test_a_rank_holds_its_part_two_layers_the_root_their_gradients_and_one_micro_batch() -> None:
    found = all_of(rank(24, 4), rank(24, 4), total=2)
    assert (found.shares, found.fractions, found.rounds) == ((1, 1), (0.5, 0.5), 1)
    # 16 bytes of each parameter that it owns; three units of parameters; gradients of the root, of a layer at work and
    # of two that travel; half of what an owner of all would receive: two units from two ranks, and their sums
    taken = 8 * 125_000_000 + 3 * TENTH + 4 * TENTH + 6 * TENTH // 2 + 300_000_000
    assert found.left_bytes == (int(0.92 * 24 * GB) - taken,) * 2


def test_a_root_of_another_size_is_counted_by_its_own() -> None:
    large = replace(FIVE, root_parameters=65_000_000)  # and four layers of 15 million
    assert (large.root, large.layer, FIVE.root, FIVE.layer) == (65_000_000, 15_000_000, 25_000_000, 25_000_000)
    (even,), (uneven,) = ([all_of(rank(24, 4), total=1, model=model).left_bytes[0]] for model in (FIVE, large))
    # one rank alone: no more of the two layers, more of the root, three times in what travels, and nine in all
    parameters = 2 * (15 - 25) + (65 - 25)
    gradients = (65 - 25) + (15 - 25) + 2 * (65 - 25) + 6 * (65 - 25)
    assert even - uneven == 4_000_000 * (parameters + gradients)


def test_copies_of_16_bits_last_until_backward_unless_layers_are_computed_again() -> None:
    plain, half, again = (
        all_of(rank(24, 4), total=1, model=replace(FIVE, activation_bytes_per_sample=0, **fields)).left_bytes[0]
        for fields in ({}, {"cast_bytes_per_parameter": 2}, {"cast_bytes_per_parameter": 2, "checkpoints": True})
    )
    assert plain - half == 2 * 125_000_000
    assert plain - again == 2 * 75_000_000


def test_bytes_of_a_round_by_hand_for_two_ranks() -> None:
    found = all_of(rank(24, 4), rank(24, 4), total=2)
    # to each: half of five units and, for backward, of three (not the last layer, nor the root): 0.4 GB of parameters.
    # From each: as much to the other, and half of the gradient
    assert found.sent_bytes == found.received_bytes == (4 * TENTH + 5 * TENTH // 2,) * 2
    twice = all_of(*[in_micro_batches(1, rank(24, 4))] * 2, total=4)
    assert twice.rounds == 2
    assert twice.sent_bytes == tuple(2 * sent for sent in found.sent_bytes)


def test_bytes_of_a_round_by_hand_for_two_ranks_and_a_memory_server() -> None:
    found = all_of(rank(24, 4), rank(24, 4), rank(64, 0, is_stable=True), total=2)
    assert (found.shares, found.fractions) == ((1, 1, 0), (0, 0, 1))
    assert found.sent_bytes == (5 * TENTH, 5 * TENTH, 2 * 8 * TENTH)
    assert found.received_bytes == (8 * TENTH, 8 * TENTH, 2 * 5 * TENTH)
    # what does not compute holds no layer, and receives
    assert found.left_bytes[2] == int(0.92 * 64 * GB) - 16 * 125_000_000 - 6 * TENTH


def test_the_link_of_a_memory_server_carries_a_model_once_each_way_by_a_chain() -> None:
    ranks = [*(rank(24, 4) for _ in range(4)), rank(64, 0, is_stable=True)]
    (found,) = candidates(ranks, BILLION, total=4, kinds=("state",))
    assert isinstance(found, Layout)
    assert (found.shares, found.fractions) == ((1, 1, 1, 1, 0), (0, 0, 0, 0, 1))
    # with c = g = 4: the server 4 P each way; the first passes parameters on, the last a sum, the others both
    assert found.sent_bytes == tuple(places * 4 * BILLION.parameters for places in (2, 2, 2, 1, 1))
    assert found.received_bytes == tuple(places * 4 * BILLION.parameters for places in (1, 2, 2, 2, 1))
    (direct,) = candidates([*ranks[:2], ranks[4]], BILLION, total=2, kinds=("state",))
    assert isinstance(direct, Layout)
    assert direct.sent_bytes == tuple(places * 4 * BILLION.parameters for places in (1, 1, 2))


def test_a_single_layer_stays_between_forward_and_backward() -> None:
    found = all_of(rank(24, 4), rank(24, 0, is_stable=True), model=replace(FIVE, layers=1), total=1)
    assert found.received_bytes[0] == found.sent_bytes[0] == 5 * TENTH  # nothing comes a second time
    assert found.step_s == pytest.approx(1 / 4 + 2 * 5 * TENTH / TEN_GBIT)  # and nothing is hidden


def test_a_model_that_fits_only_with_parameters_that_come_and_go() -> None:
    # 7 billion: 28 GB of parameters, and 84 GB of state
    seven = ModelMemory(7_000_000_000, 500_000_000, 37_500_000, layers=32)
    none, state, all_ = found = candidates([rank(80, 8), rank(24, 2), rank(64, 0)], seven, 32)
    assert isinstance(none, Misfit)
    assert isinstance(state, Misfit)
    assert isinstance(all_, Layout)
    assert choose(found) is all_
    assert all_.shares[1] > 0
    assert all_.shares[2] == 0
    room = [own / (own + left / (16 * 7 * GB)) for own, left in zip(all_.fractions, all_.left_bytes)]
    assert room == pytest.approx([room[0]] * 3, abs=0.01)  # each is left about the same part of its room


def test_host_memory_holds_parts_of_the_parameters_too() -> None:
    seven = ModelMemory(7_000_000_000, 500_000_000, layers=32)
    (misfit,) = candidates([rank(24, 4)] * 4, seven, 32, kinds=("all",))
    assert isinstance(misfit, Misfit)
    lacking = misfit.missing_state_bytes
    found = all_of(*[rank(24, 4, host_bytes=30 * GB)] * 4, model=seven, total=32)
    assert found.fractions == (0.25,) * 4
    assert min(found.left_bytes) > 0
    exact = all_of(*[rank(24, 4, host_bytes=-(-lacking // 4))] * 4, model=seven, total=32)
    assert exact.micro_batch == 1
    (short,) = candidates([rank(24, 4, host_bytes=lacking // 4 - 1)] * 4, seven, 32, kinds=("all",))
    assert isinstance(short, Misfit)


def test_a_misfit_says_what_is_lacking_and_three_remedies() -> None:
    wide = replace(FIVE, parameters=50 * 25_000_000 * 5)
    tiny, server = rank(16, 4), rank(128, 0)
    (found,) = candidates([tiny, server], wide, 4, kinds=("all",))
    assert isinstance(found, Misfit)
    # seven units of 5 GB, and a sample
    assert found.missing_bytes == (35 * GB + 300_000_000 - int(0.92 * 16 * GB), 0)
    assert found.reason == (
        "16G lacks 20.6 GB for two layers, the root and one micro-batch: compute layers again with"
        " --checkpoint-modules auto, name smaller modules with --shard-modules, or leave such ranks out"
    )
    (again,) = candidates([tiny, server], replace(wide, checkpoints=True), 4, kinds=("all",))
    assert isinstance(again, Misfit)
    assert "micro-batch: name smaller modules with --shard-modules, or leave such ranks out" in again.reason
    (full,) = candidates([rank(64, 4)], wide, 4, kinds=("all",))
    assert isinstance(full, Misfit)
    assert full.reason.startswith(
        "parameters, optimizer state and gradient sums take 130 GB, and there is room for 23."
    )
    assert full.reason.endswith("or compute fewer samples at a time (--batch-size, --checkpoint-modules auto)")
    with pytest.raises(ConfigError, match="--shard-model all: parameters, optimizer state and gradient sums take"):
        choose([full])


def test_a_share_is_cut_evenly_into_the_rounds_of_the_rank_that_needs_the_most() -> None:
    # 10 samples by four, so three rounds; the other one computes 5 as 2, 2, 1 and never four at once
    small = replace(FIVE, activation_bytes_per_sample=GB)
    found = all_of(
        in_micro_batches(4, rank(24, 8)), in_micro_batches(4, rank(24, 4, is_stable=True)), model=small, total=15
    )
    assert (found.shares, found.rounds, found.fractions) == ((10, 5), 3, (0, 1))
    taken = 16 * 125_000_000 + 7 * TENTH + 6 * TENTH + 2 * GB
    assert found.left_bytes[1] == int(0.92 * 24 * GB) - taken


def test_a_round_takes_the_part_of_its_slowest_rank() -> None:
    quick = replace(FIVE, parameters=125)  # its bytes take no time

    def compute_s(*costs: Cost) -> float:
        return all_of(*[rank(24, 4, cost=cost) for cost in costs], model=quick, total=15).compute_s

    # 10 as 4, 4, 2 and 5 as 2, 2, 1: 1 s a sample and 2 s a sample
    assert compute_s(Cost(0, 1.0, batch=4), Cost(0, 2.0, batch=4)) == 4 + 4 + 2
    # 10 as 3, 3, 3, 1 and 5 as 2, 2, 1: first the second rank is the slowest, then the first; five rounds are better
    assert rounds_seconds((10, 5), (Cost(0, 1.0), Cost(0, 2.0)), 4) == 4 + 4 + 3 + 1
    assert rounds_seconds((10, 5), (Cost(0, 1.0), Cost(0, 2.0)), 5) == 5 * 2
    assert compute_s(Cost(0, 1.0, batch=3), Cost(0, 2.0, batch=3)) == 10
    # 0.5 s once a step, and 0.25 s for each micro-batch
    costs = Cost(0.5, 1.0, per_batch_s=0.25, batch=4), Cost(0.5, 2.0, per_batch_s=0.25, batch=4)
    assert compute_s(*costs) == 0.5 + 3 * 0.25 + 10
    # without micro-batches of its own, a step of one round takes what it takes
    assert compute_s(Cost(0.5, 1.0), Cost(1.0, 2.0)) == 11


def test_seconds_in_rounds_are_those_of_rounds_that_are_played_one_by_one() -> None:
    draw = random.Random(5)
    for _ in range(200):
        costs = [Cost(draw.random(), draw.random() + 0.1, per_batch_s=draw.random(), batch=64) for _ in range(3)]
        shares, rounds = [draw.randint(0, 40) for _ in costs], draw.randint(1, 12)
        played = 0.0
        left = list(shares)
        for number in range(rounds):
            times = [0.0]
            for at, (share, cost) in enumerate(zip(shares, costs)):
                samples = min(-(-share // rounds), left[at])
                left[at] -= samples
                if samples:
                    times.append(cost.seconds(samples) - (cost.fixed_s if number else 0.0))
            played += max(times)
        assert left == [0, 0, 0]
        assert rounds_seconds(shares, costs, rounds) == pytest.approx(played)


def test_what_compute_hides_costs_nothing_but_the_first_layer_and_the_root() -> None:
    fast = [rank(24, 1), rank(64, 0, is_stable=True)]
    found = all_of(*fast, total=1)
    # the server sends eight units and receives five; of these two come before forward and two go after backward
    shown_s = 4 * TENTH / TEN_GBIT
    assert found.exchange_s == pytest.approx((5 + 3 + 2) * TENTH / TEN_GBIT)
    assert found.step_s == pytest.approx(1 + shown_s)
    # three units of 0.8 s behind three quarters of a forward of 1/3 s, and of a backward of 2/3 s
    slow = all_of(*[replace(one, link_bytes_per_s=TENTH / 0.8) for one in fast], total=1)
    assert slow.step_s == pytest.approx(1 + 4 * 0.8 + (2.4 - 0.75 / 3) + (2.4 - 0.75 * 2 / 3))
    # in every round again
    twice = all_of(*[in_micro_batches(1, replace(one, link_bytes_per_s=TENTH / 0.8)) for one in fast], total=2)
    assert (twice.rounds, twice.step_s) == (2, pytest.approx(2 * slow.step_s))


def test_larger_micro_batches_are_chosen_where_each_round_costs_bytes() -> None:
    found = all_of(rank(24, 8), rank(24, 8), total=64)
    assert (found.rounds, found.micro_batch) == (1, 32)
    small = all_of(rank(7, 8), rank(7, 8), total=64)
    assert small.rounds > 1
    assert small.step_s > found.step_s


# activations


def test_layers_that_are_computed_again_keep_their_inputs_and_one_layer_at_work() -> None:
    plain = ModelMemory(GB, 960_000_000, layers=24)
    again = replace(plain, checkpoints=True)
    assert plain.kept_bytes_per_sample == 960_000_000
    assert again.kept_bytes_per_sample == 60_000_000 + 40_000_000
    assert plain.costs(Cost(1.0, 3.0, per_batch_s=6.0, batch=2)) == Cost(1.0, 3.0, per_batch_s=6.0, batch=2)
    assert again.costs(Cost(1.0, 3.0, per_batch_s=6.0, batch=2)) == Cost(1.0, 4.0, per_batch_s=8.0, batch=2)
    slow = [rank(64, 4, link_bytes_per_s=TEN_GBIT / 10)] * 2
    kinds = [candidates(slow, model, 64) for model in (plain, again)]
    for before, after in zip(*kinds):
        assert isinstance(before, Layout)
        assert isinstance(after, Layout)
        assert after.compute_s == pytest.approx(4 / 3 * before.compute_s)
    # backward is three of four parts, and hides more
    none, again_none = kinds[0][0], kinds[1][0]
    assert isinstance(none, Layout)
    assert isinstance(again_none, Layout)
    for one, part in ((none, 2 / 3), (again_none, 3 / 4)):
        hidden_s = one.compute_s + one.exchange_s - one.step_s
        assert hidden_s == pytest.approx(part * one.compute_s / one.rounds)


def test_activations_that_leave_the_device_keep_those_of_the_horizon_and_two_more() -> None:
    plain = ModelMemory(GB, 960_000_000, layers=24, offloads=True)
    assert plain.kept_bytes_per_sample == 960_000_000 * 4 // 24
    assert replace(plain, horizon=0).kept_bytes_per_sample == 960_000_000 * 2 // 24
    assert replace(plain, layers=3).kept_bytes_per_sample == 960_000_000  # fewer than stay
    assert replace(plain, checkpoints=True).kept_bytes_per_sample == 10_000_000 + 40_000_000


def test_a_sample_too_large_for_a_card_fits_where_it_leaves_or_is_computed_again() -> None:
    long = ModelMemory(1_000_000_000, 30 * GB, layers=24)
    for kind in ("state", "all"):
        fitting = []
        for fields in ({}, {"checkpoints": True}, {"offloads": True}):
            (found,) = candidates([rank(24, 4)] * 4, replace(long, **fields), 4, kinds=(kind,))
            fitting.append(isinstance(found, Layout))
        assert fitting == [False, True, True]


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
    assert "4G lacks 4.62 GB for the whole parameters and one micro-batch: divide the parameters" in tiny.reason


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
    seen = {"none": 0, "state": 0, "all": 0, "misfit": 0, "idle": 0, "rounds": 0}
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
            seen["rounds"] += found.rounds > 1
            assert sum(found.shares) == total
            assert min(found.left_bytes) >= -len(ranks)  # rounded
            assert sum(found.sent_bytes) == pytest.approx(sum(found.received_bytes), abs=len(ranks))
            assert found.compute_s <= found.step_s <= found.compute_s + found.exchange_s
            if found.shard_model != "none":
                assert sum(found.fractions) == pytest.approx(1)
                owned = model.owned_bytes(found.shard_model)
                if found.shard_model == "all":
                    owned += 24 * model.layer  # what an owner receives
                part = [own * owned / (left + own * owned)
                        for own, left in zip(found.fractions, found.left_bytes) if own]  # fmt: skip
                assert part == pytest.approx([part[0]] * len(part), abs=1e-6)
    assert min(seen.values()) > 50, seen


def test_frozen_weights_are_whole_on_every_rank_unless_parameters_have_owners() -> None:
    """A base of 7 billion weights in 16 bits under adapters of 20 million."""
    plain = ModelMemory(20_000_000, layers=32)
    lora = replace(plain, frozen_bytes=14 * GB)
    assert lora.parameter_bytes - plain.parameter_bytes == 14 * GB
    assert lora.state_bytes == plain.state_bytes
    assert lora.owned_bytes("state") == plain.owned_bytes("state")
    assert lora.owned_bytes("all") - plain.owned_bytes("all") == 14 * GB
    assert lora.whole_bytes - plain.whole_bytes == round(14 * GB * 3 / 33)  # two layers and the root
    ranks = [rank(8, 2.0), rank(12, 1.0)]
    *_, small = candidates(ranks, plain, total=8)
    none, state, whole = candidates(ranks, lora, total=8)
    assert isinstance(none, Misfit)
    assert isinstance(state, Misfit)
    assert isinstance(whole, Layout)
    assert isinstance(small, Layout)
    assert sum(small.left_bytes) - sum(whole.left_bytes) == pytest.approx(14 * GB * (1 + 2 * 3 / 33), rel=1e-3)
    assert sum(whole.sent_bytes) - sum(small.sent_bytes) == pytest.approx(
        14 * GB * (1 + 31 / 33) * whole.rounds, rel=0.01
    )
