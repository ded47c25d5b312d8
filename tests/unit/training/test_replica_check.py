"""Who is believed where replicas differ."""

from __future__ import annotations

import pytest
import torch

from hetseq.training import replica_check
from hetseq.training.replica_check import Judgement, judge, kind_of

A, B, C = "cpu AVX2", "cpu AVX512", "H100"


@pytest.mark.parametrize(
    ("states", "kinds", "expected"),
    [
        ([7, 9, 7], [A, A, A], Judgement(0, (1,), True)),
        ([9, 7, 7], [A, A, A], Judgement(1, (0,), True)),
        ([7, 8, 7, 9, 7], [A] * 5, Judgement(0, (1, 3), True)),
        ([7, 9], [A, A], Judgement(None, (0, 1), True)),
        ([7, 7, 9, 9], [A] * 4, Judgement(None, (0, 1, 2, 3), True)),
        ([7, 7, 8, 9], [A] * 4, Judgement(None, (0, 1, 2, 3), True)),  # half is no majority
        ([7, 8, 9], [A, A, A], Judgement(None, (0, 1, 2), True)),
        # of different kinds
        ([7, 9], [A, B], Judgement(0, (1,), False)),
        ([7, 9, 9], [A, B, B], Judgement(0, (1, 2), False)),  # two alike are no majority over another kind
        ([7, 9, 8, 7], [A, B, C, A], Judgement(0, (1, 2), False)),
        # of different kinds, and a fault within one
        ([7, 9, 9, 8], [A, B, B, B], Judgement(0, (3,), True)),
        ([7, 8, 9, 9, 9], [A, A, B, B, B], Judgement(2, (0, 1), True)),
        ([7, 8, 9, 6], [A, A, B, B], Judgement(None, (0, 1, 2, 3), True)),
    ],
)
def test_a_majority_of_one_kind_is_right_and_kinds_are_not_at_fault(
    states: list[int], kinds: list[str], expected: Judgement
) -> None:
    assert judge(states, kinds) == expected


def test_a_kind_names_what_rounds() -> None:
    kind = kind_of(torch.device("cpu"))
    assert torch.backends.cpu.get_cpu_capability() in kind
    assert torch.__version__ in kind
    assert len(kind) < replica_check._KIND_BYTES
