"""Each advice is given where it holds, and not just below its limit."""

from __future__ import annotations

from typing import Any

import pytest

from hetseq.monitor.advice import ADVICE_STEPS, AdviceSetting, Adviser, advise
from hetseq.monitor.rank_table import RankSummary, summarise

GIB = 2**30
AUTO = AdviceSetting("runs/a")


def row_of(shares: list[int], **changes: Any) -> dict[str, Any]:
    """A step in which a sample took each rank 1 ms, as long as nothing else is said."""
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
    return {"step": 1, "shares": shares, "seconds": 0.1, "communication_s": 0.0, "ranks": ranks | own} | changes


def summary(shares: list[int], *, steps: int = ADVICE_STEPS, **changes: Any) -> RankSummary:
    found = summarise([row_of(shares, **changes)] * steps)
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


def test_a_wait_for_data_has_to_be_longer_than_steps_differ_anyway() -> None:
    rows = [row_of([100, 100], data_s=[0.0, 0.0121], seconds=0.1 * (1 + 0.3 * (at % 2))) for at in range(ADVICE_STEPS)]
    found = summarise(rows)
    assert found is not None
    assert found.step_spread > 0.121
    assert advise(found, AUTO) == ()


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


def test_an_owner_of_state_is_not_taken_out() -> None:
    slow = {"overhead_s": [0.0, 0.0, 0.12], "fixed_s": [0.0, 0.0, 0.12], "seconds": 0.12}
    row = row_of([100, 100, 0], **slow)
    for owned, is_said in (([4, 4, 0], True), ([0, 0, 8], False)):
        row["ranks"]["owned_bytes"] = owned
        found = summarise([row] * ADVICE_STEPS)
        assert found is not None
        assert ("hetseq drop" in str(advise(found, AUTO))) == is_said


def test_a_step_gets_no_shorter_than_what_the_others_compute_already() -> None:
    # by its costs the third rank is 120 ms of a step, but the second one was seen to compute for 115 ms of it
    slow = {"overhead_s": [0.0, 0.0, 0.12], "fixed_s": [0.0, 0.0, 0.12], "seconds": 0.12}
    assert said([100, 100, 0], **slow, compute_s=[0.1, 0.115, 0.0]) == (
        "lab2 costs 4% of a step: `hetseq drop runs/a lab2` takes it out"
    )
    assert said([100, 100, 0], **slow, compute_s=[0.1, 0.119, 0.0]) == ""


def test_a_gain_has_to_be_larger_than_steps_differ_anyway() -> None:
    slow = {"overhead_s": [0.0, 0.0, 0.12], "fixed_s": [0.0, 0.0, 0.12]}
    rows = [row_of([100, 100, 0], seconds=0.12 * (1 + 0.1 * (at % 2)), **slow) for at in range(ADVICE_STEPS)]
    noisy = [{**row, "seconds": row["seconds"] * (1 + 0.3 * (at % 2))} for at, row in enumerate(rows)]
    quiet, busy = summarise(rows), summarise(noisy)
    assert quiet is not None
    assert busy is not None
    assert len(advise(quiet, AUTO)) == 1
    assert advise(busy, AUTO) == ()


def test_a_few_steps_are_no_reason_for_advice() -> None:
    adviser = Adviser(AUTO)
    late = {"data_s": [0.0, 0.05]}
    assert adviser.look(summary([100, 100], steps=ADVICE_STEPS - 1, **late)) == ()
    assert [advice.key for advice in adviser.look(summary([100, 100], **late))] == ["data"]
    assert [advice.key for advice in adviser.look(None)] == ["data"]


@pytest.mark.parametrize("unknown", ["seconds", "communication_s"])
def test_what_is_not_known_is_no_reason_either(unknown: str) -> None:
    assert said([100, 100], **{unknown: None}) == ""


def test_where_shares_were_arranged_by_somebody_nobody_is_to_be_done_without() -> None:
    slow = {"overhead_s": [0.0, 0.0, 0.12], "fixed_s": [0.0, 0.0, 0.12], "seconds": 0.12}
    arranged = AdviceSetting("runs/a", is_arranged=True)
    assert "lab2 costs" in said([100, 100, 0], **slow)
    assert said([100, 100, 0], arranged, **slow) == ""
    assert "--num-workers" in said([100, 100], arranged, data_s=[0.0, 0.0121])
