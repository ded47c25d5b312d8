"""How much a rank computes at once: halved by what memory refuses, foreseen from what the first sizes needed."""

from __future__ import annotations

import pytest

from hetseq.data.plan import MicroBatchCap
from hetseq.training.micro_batch_size import MicroBatchSizes


@pytest.mark.parametrize(
    ("refused", "multiple", "left"),
    [(16, 1, 8), (7, 1, 3), (3, 1, 1), (2, 1, 1), (16, 4, 8), (14, 4, 4), (12, 4, 4), (9, 4, 4), (8, 4, 4), (7, 4, 3)],
)
def test_what_memory_refuses_is_halved_to_whole_multiples(refused: int, multiple: int, left: int) -> None:
    told: list[int] = []
    sizes = MicroBatchSizes(MicroBatchCap(16, 900, multiple), remember=told.append)
    assert sizes.refuse(refused)
    assert sizes.cap == MicroBatchCap(left, 900, multiple)
    assert told == [left]
    assert [sizes.holds(left), sizes.holds(left + 1)] == [True, False]


def test_a_single_sample_cannot_be_halved() -> None:
    told: list[int] = []
    sizes = MicroBatchSizes(MicroBatchCap(4), remember=told.append)
    assert not sizes.refuse(1)
    assert sizes.cap == MicroBatchCap(4)
    assert told == []


def test_units_are_never_halved() -> None:
    sizes = MicroBatchSizes(MicroBatchCap(4), is_fixed=True)
    assert not sizes.refuse(4)
    assert not sizes.refuse(3)  # the ragged last one
    assert sizes.cap == MicroBatchCap(4)
    assert MicroBatchSizes(MicroBatchCap(4)).refuse(4)  # the twin


def test_without_a_cap_every_size_may_be_tried() -> None:
    sizes = MicroBatchSizes(MicroBatchCap())
    assert sizes.holds(10**9)
    assert sizes.refuse(10**9)
    assert sizes.cap.samples == 10**9 // 2


def test_the_first_step_grows_and_the_others_do_not() -> None:
    sizes = MicroBatchSizes(MicroBatchCap(8, 100, 2))
    assert sizes.first() == MicroBatchCap(8, 100, 2, is_ramp=True)
    assert sizes.cap == MicroBatchCap(8, 100, 2)


def learning(seen: dict[int, int], cap: MicroBatchCap | None = None) -> tuple[MicroBatchSizes, list[int]]:
    told: list[int] = []
    sizes = MicroBatchSizes(cap or MicroBatchCap(), is_learning=True, remember=told.append)
    for samples, needed_bytes in seen.items():
        sizes.see(samples, needed_bytes)
    return sizes, told


@pytest.mark.parametrize(
    ("seen", "free_bytes", "most"),
    [
        # 0.9 * 10,000 bytes at 100 a sample, of which 50 stay whatever the size
        ({1: 150, 2: 250, 4: 450}, 10_000, 89),
        ({1: 100, 2: 200, 4: 400}, 10_000, 90),
        # only the two largest count: small ones are rounded up by the allocator
        ({1: 9_999, 2: 200, 4: 400}, 10_000, 90),
        # a fixed part below nothing is noise
        ({2: 100, 4: 400}, 10_000, 60),
        # what has passed is believed, whatever is said to be free
        ({4: 400, 8: 800}, 100, 8),
        # sizes come in any order, and the largest of several readings counts
        ({8: 800, 4: 400}, 10_000, 90),
    ],
)
def test_the_memory_of_two_sizes_tells_how_many_samples_it_holds(
    seen: dict[int, int], free_bytes: int, most: int
) -> None:
    sizes, told = learning(seen)
    sizes.foresee(free_bytes)
    assert sizes.cap == MicroBatchCap(most)
    assert told == [most]
    assert not sizes.is_learning


def test_a_size_that_was_seen_twice_counts_with_the_larger_reading() -> None:
    sizes, _ = learning({2: 200, 4: 500})
    sizes.see(4, 400)  # 150 bytes a sample and nothing fixed, not 100
    sizes.foresee(10_000)
    assert sizes.cap.samples == 60


def test_one_size_tells_nothing() -> None:
    sizes, told = learning({1: 150})
    sizes.foresee(10_000)
    assert (sizes.cap, told, sizes.is_learning) == (MicroBatchCap(), [], True)
    sizes.see(2, 250)
    sizes.foresee(10_000)
    assert sizes.cap.samples == 89


def test_memory_that_does_not_grow_with_the_size_sets_no_limit() -> None:
    for seen in ({1: 300, 2: 300}, {1: 300, 2: 200}):
        sizes, told = learning(seen)
        sizes.foresee(10_000)
        assert (sizes.cap, told, sizes.is_learning) == (MicroBatchCap(), [], False)


def test_foresight_never_raises_a_size_that_was_refused() -> None:
    sizes, told = learning({1: 150, 2: 250, 4: 450})
    assert sizes.refuse(8)
    sizes.foresee(10_000)
    assert (sizes.cap.samples, told) == (4, [4])
    sizes, told = learning({1: 150, 2: 250, 4: 450})
    assert sizes.refuse(400)
    sizes.foresee(10_000)
    assert (sizes.cap.samples, told) == (89, [200, 89])


# Where tokens are counted.


def test_where_tokens_are_counted_they_are_halved_and_short_samples_stay_many() -> None:
    sizes = MicroBatchSizes(MicroBatchCap(tokens=1000))
    assert sizes.holds(50, 1000)
    assert sizes.refuse(2, 900)  # two long samples
    assert sizes.cap == MicroBatchCap(tokens=450)
    assert not sizes.holds(2, 900)
    assert sizes.holds(45, 450)
    assert sizes.holds(1, 451), "a longer one has to be tried by itself"
    assert not sizes.refuse(1, 451)


@pytest.mark.parametrize(
    ("cap", "share", "needed", "rounds", "size"),
    [
        (4, 12, 3, 3, 4),
        (4, 4, 1, 3, 2),  # two and two: the third round is another rank's alone
        (4, 9, 3, 3, 3),
        (None, 12, 1, 4, 3),  # no limit of its own
        (4, 2, 1, 5, 1),
        (4, 0, 0, 3, 4),  # a rank without samples
    ],
)
def test_a_share_is_cut_evenly_into_the_rounds_of_all_ranks(
    cap: int | None, share: int, needed: int, rounds: int, size: int
) -> None:
    sizes = MicroBatchSizes(MicroBatchCap(cap))
    assert sizes.needed(share, cut=99) == needed
    cut = [min(cap or share, share)]
    assert sizes.spread(share, rounds, cut=cut) == (share > 0 and cut[0] != size)
    assert sizes.cap.samples == (size if share else cap)
    if share:
        assert not sizes.spread(share, rounds, cut=[size]), "it is cut so already"
    assert sizes.needed(12, cut=99) == (3 if cap else 1), "what memory allows stays known"


def test_units_and_tokens_are_not_cut_into_rounds() -> None:
    units, tokens = MicroBatchSizes(MicroBatchCap(4), is_fixed=True), MicroBatchSizes(MicroBatchCap(None, 100))
    for sizes in (units, tokens):
        before = sizes.cap
        assert sizes.needed(12, cut=5) == 5
        assert not sizes.spread(12, 6, cut=[4, 4, 4])
        assert sizes.cap == before
