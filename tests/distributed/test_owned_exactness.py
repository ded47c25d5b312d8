"""With owners, the gradient and the curve are still those of one device: whoever owns or computes how much."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetseq import config as options
from hetseq.task import make_task
from tests.support import oracle, toys
from tests.support.nightly import nightly
from tests.support.owned import OwnedFacts, put_together, train_in_fine_cuts
from tests.support.ranks import run_ranks
from tests.support.training import prepared, toy_words

TOYS = {
    "TwoTerms": oracle.two_terms,
    "TwoTermsAdam": oracle.two_terms,
    "TwoTermsAdadelta": oracle.two_terms,
    "SometimesUnused": oracle.sometimes_unused,
}
SOME_TOYS = ["TwoTermsAdam", *nightly(*(toy for toy in TOYS if toy != "TwoTermsAdam"))]
#: an owner of most for three others and more: over a network its slices take chains
CHAINS = [("0,0,0,0,1", "3,1,2,2,0"), ("1,1,1,9", "3,2,2,1")]
#: who owns how much, who computes how much
LAYOUTS = [("3,1", "9,3"), ("6,2,1", "7,4,1"), ("1,1,8", "9,3,0"), ("2,0,1", "5,4,3"), ("0,0,1", "3,1,0"), *CHAINS]


def words(toy: str, balance: str, steps: int, **flags: object) -> list[str]:
    given = {"max_sentences": 2, "update_freq": 3, "precision": "fp64", "max_update": steps, **flags}
    return toy_words(toy, balance=balance, **given)


def reference(toy: str, world_size: int, steps: int) -> oracle.Curve:
    """The same training in a plain loop."""
    task = make_task(getattr(toys, toy), options.parse([]))
    torch.manual_seed(oracle.SEED)
    model = task.build_model().double()
    optimizer = task.build_optimizer([{"params": sorted(model.parameters(), key=lambda p: p.dim() < 2)}])
    return oracle.train(
        model, optimizer, task.rows(), TOYS[toy], batch_of_epoch=lambda _: 6 * world_size, steps=steps,
        dtype=torch.float64,
    )  # fmt: skip


def flat_in_order(whole: dict[str, torch.Tensor]) -> torch.Tensor:
    ordered = sorted(whole.values(), key=lambda value: value.dim() < 2)
    return torch.cat([value.flatten() for value in ordered])


def check(ranks: list[OwnedFacts], curve: oracle.Curve) -> float:
    """The worst relative error of any step's gradient."""
    shapes = {name: value.shape for name, value in ranks[0].parameters.items()}
    worst = 0.0
    for step, right in enumerate(curve.gradients):
        mine = flat_in_order(put_together([facts.gradients[step] for facts in ranks], shapes))
        scale = right.norm().item() or 1.0
        worst = max(worst, (mine - right).norm().item() / scale)
    return worst


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])
@pytest.mark.parametrize(("own", "balance"), LAYOUTS)
@pytest.mark.parametrize("toy", SOME_TOYS)
def test_owners_have_the_gradient_of_the_global_batch(
    toy: str, own: str, balance: str, shares_memory: bool, tmp_path: Path
) -> None:
    world_size = own.count(",") + 1
    line = [*words(toy, balance, 8), "--shard-model", "state", "--own", own, "--bucket-cap-mb", "0.0001"]
    ranks = run_ranks(train_in_fine_cuts, world_size, prepared(tmp_path), line, shares_memory, timeout_s=60)
    worst = check(ranks, reference(toy, world_size, 8))
    assert worst <= 1e-14, f"{worst:.1e}"
    for name in ranks[0].parameters:
        assert all(torch.equal(facts.parameters[name], ranks[0].parameters[name]) for facts in ranks)
    weights = [float(weight) for weight in own.split(",")]
    total = sum(value.numel() for value in ranks[0].parameters.values())
    for facts, weight in zip(ranks, weights):
        assert abs(facts.owned - total * weight / sum(weights)) <= 8  # one for each cut


#: who owns how much, who computes how much, and the ranks of each group
GROUPS = [
    ("3,1,2", "9,3,4", "2+1"), ("1,1", "9,3", "1+1"), ("2,1,1,3,2", "7,4,1,2,1", "3+2"), ("1,0,1,1", "5,4,0,3", "2+2"),
    ("1,2,3", "5,4,3", "1+1+1"), ("1,3,1,1", "9,3,0,0", "2+2"),
]  # fmt: skip


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])
@pytest.mark.parametrize(("own", "balance", "groups"), GROUPS)
@pytest.mark.parametrize("kind", ["state", "all"])
def test_groups_that_each_hold_everything_have_the_same_gradient(
    kind: str, own: str, balance: str, groups: str, shares_memory: bool, tmp_path: Path
) -> None:
    """Elements that each rank sends to other groups: its own, times 2 (G - 1) / G."""
    toy, world_size = "TwoTermsAdam", own.count(",") + 1
    line = [*words(toy, balance, 8), "--shard-model", kind, "--own", own, "--shard-groups", groups]
    line += ["--shard-modules", MODULES[toy]] if kind == "all" else ["--bucket-cap-mb", "0.0001"]
    ranks = run_ranks(train_in_fine_cuts, world_size, prepared(tmp_path), line, shares_memory, timeout_s=60)
    curve, first = reference(toy, world_size, 8), 0
    for size in map(int, groups.split("+")):
        worst = check(ranks[first : first + size], curve)
        assert worst <= 1e-14, f"{worst:.1e}"
        total = sum(facts.owned for facts in ranks[first : first + size])
        assert total == sum(value.numel() for value in ranks[0].parameters.values())
        first += size
    for name in ranks[0].parameters:
        assert all(torch.equal(facts.parameters[name], ranks[0].parameters[name]) for facts in ranks)


MODULES = {toy: "main,branch" if toy == "SometimesUnused" else "body,cls,reg" for toy in TOYS}
ALL = [
    ("3,1", "9,3"),
    ("1,3", "9,3"),
    ("6,2,1", "7,4,1"),
    ("1,1,8", "9,3,0"),
    ("2,0,1", "5,4,3"),
    ("0,0,1", "3,1,0"),
    *CHAINS,
]


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])
@pytest.mark.parametrize(("own", "balance"), ALL)
@pytest.mark.parametrize("toy", SOME_TOYS)
def test_parameters_that_come_and_go_give_the_gradient_of_the_global_batch(
    toy: str, own: str, balance: str, shares_memory: bool, tmp_path: Path
) -> None:
    world_size = own.count(",") + 1
    line = [*words(toy, balance, 8), "--shard-model", "all", "--own", own, "--shard-modules", MODULES[toy]]
    ranks = run_ranks(train_in_fine_cuts, world_size, prepared(tmp_path), line, shares_memory, timeout_s=60)
    worst = check(ranks, reference(toy, world_size, 8))
    assert worst <= 1e-14, f"{worst:.1e}"
    for name in ranks[0].parameters:
        assert all(torch.equal(facts.parameters[name], ranks[0].parameters[name]) for facts in ranks)
