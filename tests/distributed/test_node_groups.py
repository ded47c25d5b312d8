"""One group of ranks for each node: the curve of one device, with the bytes of the planner's formula."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from hetseq.comm.group import Group
from hetseq.run import rank_room
from tests.distributed.test_owned_exactness import MODULES, check, reference, words
from tests.support.owned import OwnedFacts, train_in_fine_cuts
from tests.support.ranks import run_ranks
from tests.support.training import prepared

TOY, STEPS, NUMBER = "TwoTermsAdam", 8, 8  # bytes of a number in double precision
#: the first and the third rank are on one host, and the others on another one
HOSTS = "abab"


def train_on_hosts(group: Group, save_dir: str, line: list[str]) -> OwnedFacts:
    """A rank that takes its machine for one of `HOSTS`."""
    with mock.patch.object(rank_room.socket, "gethostname", return_value=HOSTS[group.rank]):
        return train_in_fine_cuts(group, save_dir, line, shares_memory=False)


def trained(folder: Path, kind: str, balance: str, groups: str = "node") -> list[OwnedFacts]:
    line = [*words(TOY, balance, STEPS), "--shard-model", kind, "--shard-groups", groups]
    line += ["--shard-modules", MODULES[TOY]] if kind == "all" else ["--bucket-cap-mb", "0.0001"]
    ranks = run_ranks(train_on_hosts, len(HOSTS), prepared(folder), line, timeout_s=60)
    curve = reference(TOY, len(HOSTS), STEPS)
    for node in ("a", "b"):
        of_node = [facts for host, facts in zip(HOSTS, ranks, strict=True) if host == node]
        assert check(of_node, curve) <= 1e-14  # each has the whole gradient
    for facts in ranks:
        assert max(abs(mine - right) for mine, right in zip(facts.losses, curve.losses, strict=True)) <= 1e-12
        assert all(torch.equal(facts.parameters[name], ranks[0].parameters[name]) for name in facts.parameters)
    return ranks


def of_a_step(totals: list[int]) -> set[int]:
    """The bytes of each step in which all samples of a global batch are there, but for the first step.

    An epoch is such a step and one of a single sample; the first step also distributes the first numbers.
    """
    return {after - before for before, after in zip(totals[1:-1:2], totals[2::2], strict=True)}


@pytest.mark.parametrize("balance", ["1,1,1,1", "3,1,2,0"])
def test_state_travels_within_a_node_and_sums_between_nodes(balance: str, tmp_path: Path) -> None:
    ranks = trained(tmp_path, "state", balance)
    total = sum(value.numel() for value in ranks[0].parameters.values())
    shares = [int(share) for share in balance.split(",")]
    for rank, facts in enumerate(ranks):
        other = ranks[(rank + 2) % 4]
        computes, serves = shares[rank] > 0, shares[(rank + 2) % 4] > 0
        assert facts.owned + other.owned == total
        # parameters to the other rank of the node, gradients to their owner, and 2 (2 - 1) / 2 of the sums
        sent = serves * facts.owned + computes * other.owned + facts.owned
        received = computes * other.owned + serves * facts.owned + facts.owned
        for mine, formula in ((facts.sent, sent), (facts.received, received)):
            # a node adds up whole numbers of elements of each unit and segment
            assert all(abs(one - NUMBER * formula) <= NUMBER * 4 for one in of_a_step(mine)), of_a_step(mine)


def test_parameters_come_and_go_within_a_node_in_each_round_and_sums_travel_once(tmp_path: Path) -> None:
    ranks, rounds = trained(tmp_path, "all", "1,1,1,1"), 3  # of two samples
    total = sum(value.numel() for value in ranks[0].parameters.values())
    last = sum(value.numel() for name, value in ranks[0].parameters.items() if name.startswith("reg"))
    for facts in ranks:
        part = facts.owned / total
        # forward everything, backward without the last layer, gradients; each a part to or from the other rank
        sent = rounds * (part * (2 * total - last) + (1 - part) * total) + facts.owned
        for one in of_a_step(facts.sent):
            assert one == pytest.approx(NUMBER * sent, abs=NUMBER * 8)


def test_what_auto_chooses_is_a_group_for_each_node_here(tmp_path: Path) -> None:
    by_node = trained(tmp_path, "state", "1,1,1,1", groups="auto")
    total = sum(value.numel() for value in by_node[0].parameters.values())
    assert by_node[0].owned + by_node[2].owned == by_node[1].owned + by_node[3].owned == total
