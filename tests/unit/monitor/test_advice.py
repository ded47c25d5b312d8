"""Each advice is given where it holds, and not just below its limit."""

from __future__ import annotations

from typing import Any

import pytest

from hetseq.monitor.advice import ADVICE_STEPS, AdviceSetting, Adviser, advise
from hetseq.monitor.rank_table import RankSummary, summarise

GIB = 2**30
AUTO = AdviceSetting("runs/a", "auto")


def summary(shares: list[int], *, steps: int = ADVICE_STEPS, **changes: Any) -> RankSummary:
    """Steps in which a sample took each rank 1 ms, as long as nothing else is said."""
    size = len(shares)
    zeros = [0.0] * size
    ranks = {
        "names": [f"lab{rank}/cuda:0" for rank in range(size)],
        "compute_s": [share / 1e3 for share in shares],
        "data_s": zeros,
        "wait_s": zeros,
        "overhead_s": zeros,
        "fixed_s": zeros,
        "per_sample_s": [1e-3] * size,
        "memory_bytes": [GIB] * size,
        "memory_limit_bytes": [8 * GIB] * size,
    }
    own = {key: changes.pop(key) for key in list(changes) if key in ranks or "micro_batch" in key}
    row = {"step": 1, "shares": shares, "seconds": 0.1, "communication_s": 0.0, "ranks": ranks | own} | changes
    found = summarise([row] * steps)
    assert found is not None
    return found


def said(
    shares: list[int], setting: AdviceSetting = AUTO, standing: frozenset[str] = frozenset(), **changes: Any
) -> str:
    return "\n".join(advice.text for advice in advise(summary(shares, **changes), setting, standing=standing))


def test_nothing_is_said_of_a_run_that_lacks_nothing() -> None:
    assert said([100, 100]) == ""


def test_a_rank_that_waits_for_its_data_is_named_with_the_option() -> None:
    assert said([100, 100], data_s=[0.0, 0.0049]) == ""
    assert said([100, 100], data_s=[0.0, 0.0121]) == (
        "rank 1 (lab1/cuda:0) waits 12% of a step for its data: more --num-workers on lab1 may help"
    )


def test_others_that_wait_for_their_data_are_counted() -> None:
    assert "12% of a step for its data, and 1 other rank waits too: more" in said([9, 9], data_s=[0.0121, 0.0120])
    assert ", and 2 other ranks wait too: more" in said([9, 9, 9], data_s=[0.0121, 0.0120, 0.0120])


def test_a_sentence_that_stands_is_withdrawn_later_than_it_is_given() -> None:
    assert "waits" in said([100, 100], standing=frozenset({"data"}), data_s=[0.0, 0.0045])
    assert said([100, 100], standing=frozenset({"data"}), data_s=[0.0, 0.0039]) == ""


def test_memory_close_to_its_limit_is_named() -> None:
    assert said([100, 100], memory_bytes=[GIB, 7.5 * GIB]) == ""
    assert said([100, 100], memory_bytes=[GIB, 7.7 * GIB]).startswith("rank 1 (lab1/cuda:0) has used 96% of its memory")


def test_ranks_on_the_cpu_of_a_node_share_its_memory() -> None:
    crowded = {"names": ["a/cpu", "a/cpu"], "memory_bytes": [4 * GIB, 4 * GIB]}
    assert said([100, 100], **crowded).startswith("a (all ranks on its CPU) has used 100% of its memory")
    assert said([100, 100], **{**crowded, "names": ["a/cpu", "b/cpu"]}) == ""


def test_a_node_that_costs_more_than_it_brings_can_be_dropped() -> None:
    # its presence, 120 ms, is longer than the 100 ms in which the two others do all the work
    slow = {"overhead_s": [0.0, 0.0, 0.12], "fixed_s": [0.0, 0.0, 0.12], "seconds": 0.12}
    assert said([100, 100, 0], **slow) == "lab2 costs 17% of a step: `hetseq drop runs/a lab2` takes it out"
    assert said([100, 100, 0], **{**slow, "overhead_s": [0.0, 0.0, 0.101]}) == ""


def test_nobody_is_told_to_drop_the_first_node_as_the_run_ends_with_it() -> None:
    slow = {"overhead_s": [0.12, 0.0, 0.0], "fixed_s": [0.12, 0.0, 0.0], "seconds": 0.12}
    text = said([0, 100, 100], **slow)
    assert "rank 0 (lab0/cuda:0) costs 17% of a step" in text
    assert "drop" not in text


def test_equal_shares_of_unequal_ranks_are_an_advice_and_fitting_ones_are_not() -> None:
    equal = AdviceSetting("runs/a", "equal")
    unequal = {"per_sample_s": [1e-3, 3e-3], "seconds": 0.3}
    assert "with --balance auto a step would be 50% shorter" in said([100, 100], equal, **unequal)
    assert said([100, 100], AUTO, **unequal) == ""
    assert said([100, 100], equal, per_sample_s=[1e-3, 1.1e-3]) == ""  # 4.8 %


def test_other_shares_are_an_advice_only_where_they_are_shares_of_whole_units() -> None:
    uneven = {"per_sample_s": [1e-3, 1.3e-3], "seconds": 0.0208}
    assert "with --balance auto" in said([16, 16], AdviceSetting("runs/a", "equal"), **uneven)
    assert said([16, 16], AdviceSetting("runs/a", "equal", unit=16), **uneven) == ""


def test_a_share_that_fills_its_micro_batch_is_not_advised_to_grow() -> None:
    # one sample more would be another 100 ms, which the line within the micro-batch does not know
    equal, slow = (
        AdviceSetting("runs/a", "equal"),
        {"fixed_s": [0.0, 0.0], "per_sample_s": [1e-3, 1e-6], "seconds": 0.2},
    )
    filled = {"per_micro_batch_s": [0.0, 0.1], "micro_batch": [None, 100]}
    assert said([200, 100], equal, **slow, **filled) == ""
    assert "a step would be 50% shorter" in said([200, 1], equal, **slow, **filled)
    assert "with --balance auto" in said([200, 100], equal, **{**slow, "fixed_s": [0.0, 0.1]})


def test_waiting_that_is_rounding_comes_with_the_global_batch_that_removes_it() -> None:
    # 3:2 of 4 samples is 2.4 and 1.6; of 5 it is 3 and 2
    rounded = {"per_sample_s": [2e-3, 3e-3], "seconds": 6e-3, "wait_s": [2e-3, 0.0]}
    text = said([2, 2], **rounded)
    assert text == "20% of a step is lost as shares are whole samples: --global-batch-size 5 would remove it"
    # with 2 ms more for a micro-batch, 4 of 6 ms: all would be done at 4.5 ms if samples could be cut
    stairs = {"per_sample_s": [1e-3, 3e-3], "per_micro_batch_s": [2e-3, 0.0], "micro_batch": [2, None]}
    assert said([2, 2], **{**rounded, **stairs}).startswith("25% of a step is lost")
    assert said([3, 2], **rounded) == ""
    assert said([2, 2], **{**rounded, "wait_s": [0.0, 0.0]}) == ""  # nobody waits for it
    assert said([2, 2], AdviceSetting("runs/a", "auto", unit=0), **rounded) == ""  # tokens are dealt


def test_a_few_steps_are_no_reason_for_advice() -> None:
    adviser = Adviser(AUTO)
    late = {"data_s": [0.0, 0.05]}
    assert adviser.look(summary([100, 100], steps=ADVICE_STEPS - 1, **late)) == ()
    assert [advice.key for advice in adviser.look(summary([100, 100], **late))] == ["data"]
    assert [advice.key for advice in adviser.look(None)] == ["data"]


@pytest.mark.parametrize("unknown", ["seconds", "communication_s"])
def test_what_is_not_known_is_no_reason_either(unknown: str) -> None:
    assert said([100, 100], **{unknown: None}) == ""


def test_with_data_by_host_nobody_is_to_be_done_without_and_no_batch_helps() -> None:
    slow = {"overhead_s": [0.0, 0.0, 0.12], "fixed_s": [0.0, 0.0, 0.12], "seconds": 0.12}
    by_host = AdviceSetting("runs/a", "auto", is_by_host=True)
    assert "lab2 costs" in said([100, 100, 0], **slow)
    assert said([100, 100, 0], by_host, **slow) == ""
    assert "--num-workers" in said([100, 100], by_host, data_s=[0.0, 0.0121])
