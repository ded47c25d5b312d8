"""The promise holds while the shares change in every step, and ranks that change them otherwise are found.

A `Rotating` policy moves the weights round by one rank in each step, as `MeasuredShares` moves shares: through the
planner and the loader, two steps ahead. One of the weights is 0, so every rank has nothing to do now and then.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq import config as options
from hetseq.balance.shares import Cost, assign_shares
from hetseq.cluster.membership.step_commit import CommitRow
from hetseq.comm.group import Group
from hetseq.data.plan import StepPlan
from hetseq.errors import DisagreementError
from hetseq.run.build import RankJob, build_session
from hetseq.run.loaded_task import load_material
from hetseq.run.session import Session
from hetseq.run_directory import RunDirectory
from hetseq.task import make_task
from hetseq.training.share import Part
from hetseq.training.share_policy import MeasuredShares, Shift
from tests.support import oracle, toys
from tests.support.nightly import nightly
from tests.support.ranks import RankRaised, run_ranks
from tests.support.training import Facts, Recorder, facts_of, prepared, toy_words

Words = list[str]
LIMIT = 1e-14
WEIGHTS = (5.0, 2.0, 0.0, 3.0)


class Rotating:
    """Other shares in every step: rank r has weight r + step, counted round."""

    def __init__(self, session: Session, world_size: int, *, odd_step: int = 0, tells_loader: bool = True) -> None:
        controller = session.controller
        self._planner, self._loader = controller.planner, controller.loader
        self._weights = WEIGHTS[:world_size] if world_size > 2 else (2.0, 1.0)
        self._odd_step, self._tells_loader = odd_step, tells_loader

    def learn(self, part: Part, *, overhead_s: float) -> Cost | None:
        return None

    def follow(self, plan: StepPlan, rows: Sequence[CommitRow]) -> Shift | None:
        first, turn = plan.step + 2, plan.step + (plan.step == self._odd_step)
        weights = tuple(self._weights[(rank + turn) % len(self._weights)] for rank in range(len(self._weights)))
        assign = functools.partial(assign_shares, weights=weights)
        self._planner.change(first, assign)
        if self._tells_loader:
            self._loader.change(first, assign=assign)
        return None

    def divide(self, total: int) -> tuple[int, ...]:
        return assign_shares(total, self._weights)


class Sentences(toys.TwoTerms):
    """Samples of one, two and three tokens in turn: any six of them in a row have twelve."""

    def load_dataset(self, split: str) -> Any:
        dataset: Any = toys.Rows(self.rows())
        dataset.lengths = [1 + index % 3 for index in range(toys.SAMPLES)]
        return dataset


CLASSES: dict[str, tuple[type[toys.Toy], Callable[..., torch.Tensor]]] = {
    "TwoTerms": (toys.TwoTerms, oracle.two_terms),
    "SometimesUnused": (toys.SometimesUnused, oracle.sometimes_unused),
    "Images": (toys.Images, oracle.images),
    "Sentences": (Sentences, oracle.two_terms),
}


def session_of(group: Group, save_dir: str, toy: str, words: Words) -> tuple[Session, Recorder]:
    multiprocessing.current_process().daemon = False  # so that it may have processes of its own that load data
    config = options.complete(options.parse([*words, "--save-dir", save_dir]))
    task, recorder = make_task(CLASSES[toy][0], config), Recorder()
    material = load_material(config, torch.device("cpu"), task)
    return build_session(RankJob(config, RunDirectory(Path(save_dir)), group, material, metrics=recorder)), recorder


def rotate(group: Group, save_dir: str, toy: str, runs: list[Words]) -> list[Facts]:
    """A rank's life: one training after the other, under a rotating pace."""
    seen = []
    for words in runs:
        session, recorder = session_of(group, save_dir, toy, words)
        session.controller.pace = Rotating(session, group.world_size)
        seen.append(facts_of(session, recorder))
    return seen


def words_of(toy: str, steps: int, **flags: Any) -> Words:
    return toy_words(toy if toy != "Sentences" else "TwoTerms", precision="fp64", max_update=steps, **flags)


def curve_of(toy: str, batch: int, steps: int) -> oracle.Curve:
    task: Any = make_task(CLASSES[toy][0], options.parse([]))
    torch.manual_seed(oracle.SEED)
    model = task.build_model().double()
    optimizer = task.build_optimizer([{"params": sorted(model.parameters(), key=lambda p: p.dim() < 2)}])
    rows, loss = task.rows(), CLASSES[toy][1]
    return oracle.train(model, optimizer, rows, loss, batch_of_epoch=lambda _: batch, steps=steps, dtype=torch.float64)


def worst_error(facts: Facts, curve: oracle.Curve) -> float:
    errors = []
    for mine, right in zip(facts.gradients, curve.gradients, strict=True):
        scale = right.norm().item()
        errors.append((mine - right).norm().item() / scale if scale else mine.norm().item())
    return max(errors)


def check(path: Path, toy: str, world_size: int, runs: list[tuple[Words, int]], steps: int) -> list[list[Facts]]:
    """Every run, given with its global batch, has the gradients of the oracle while its shares change."""
    ranks = run_ranks(rotate, world_size, prepared(path), toy, [words for words, _ in runs], timeout_s=200)
    for number, (words, batch) in enumerate(runs):
        curve = curve_of(toy, batch, steps)
        for facts in ranks:
            assert worst_error(facts[number], curve) <= LIMIT, words
            assert facts[number].absent == curve.absent
            assert facts[number].shares == ranks[0][number].shares
        assert len({tuple(facts[number].parameters.tolist()) for facts in ranks}) == 1, "replicas differ"
        shares = ranks[0][number].shares
        # the decision after step 1 holds from step 3 on; then every full step is divided otherwise than the one before
        full = [share for share in shares[2:] if sum(share) == sum(shares[0])]
        assert len(set(shares)) >= min(world_size, len(full))
    return ranks


@pytest.mark.parametrize(("toy", "world_size"), [("TwoTerms", 2), ("SometimesUnused", 3), ("TwoTerms", 4)])
def test_the_gradient_is_that_of_the_global_batch_while_shares_change(
    toy: str, world_size: int, tmp_path: Path
) -> None:
    # 25 samples: an epoch ends after the third step, and the fourth is the first of another one
    words = words_of(toy, 7, balance="equal", global_batch_size=10, max_sentences=3)
    ranks = check(tmp_path, toy, world_size, [(words, 10)], 7)
    by_hand = {
        2: [(5, 5), (5, 5), (2, 3), (7, 3), (3, 7), (4, 1), (3, 7)],
        3: [(4, 3, 3), (4, 3, 3), (1, 0, 4), (0, 7, 3), (7, 3, 0), (1, 0, 4), (0, 7, 3)],
        4: [(3, 3, 2, 2), (3, 3, 2, 2), (1, 0, 1, 3), (0, 3, 5, 2), (3, 5, 2, 0), (3, 1, 0, 1), (2, 0, 3, 5)],
    }
    assert ranks[0][0].shares == by_hand[world_size]


def test_shares_change_in_tokens_too(tmp_path: Path) -> None:
    # 24 tokens of all ranks together are 12 samples, however the ranks divide them
    runs = [(words_of("Sentences", 6, balance="equal", max_tokens=12), 12)]
    (facts,), _ = check(tmp_path, "Sentences", 2, runs, 6)
    assert [sum(shares) for shares in facts.shares] == [12, 12, 1, 12, 12, 1]


def test_shares_change_in_units_too(tmp_path: Path) -> None:
    runs = [(words_of("TwoTerms", 6, balance="equal", global_batch_size=10, unit_size=3), 10)]
    (facts,), _, _ = check(tmp_path, "TwoTerms", 3, runs, 6)
    # only the last unit of a step has fewer than three samples
    assert all(sum(share % 3 > 0 for share in shares) == 1 for shares in facts.shares)


def test_shares_change_with_worker_processes_too(tmp_path: Path) -> None:
    words = words_of("TwoTerms", 7, balance="equal", global_batch_size=10, max_sentences=3, num_workers=2)
    check(tmp_path, "TwoTerms", 2, [(words, 10)], 7)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("world_size", "num_workers"), [(2, 2), *nightly((2, 0), (3, 0), (3, 2), (4, 0), (4, 2), is_many=True)]
)
@pytest.mark.parametrize("toy", ["TwoTerms", "SometimesUnused"])
def test_the_whole_matrix_while_shares_change(toy: str, world_size: int, num_workers: int, tmp_path: Path) -> None:
    flags = {"balance": "equal", "num_workers": num_workers}
    runs = [
        (words_of(toy, 12, global_batch_size=batch, max_sentences=most, **flags), batch)
        for batch, most in ((10, 10), (10, 2), (7, 3), (25, 4))
    ]
    runs += [(words_of(toy, 12, global_batch_size=batch, unit_size=3, **flags), batch) for batch in (10, 16)]
    if toy == "TwoTerms":
        tokens = [words_of("Sentences", 12, max_tokens=12 // world_size * freq, **flags) for freq in (1, 2)]
        check(tmp_path / "tokens", "Sentences", world_size, [(tokens[0], 6), (tokens[1], 12)], 12)
    check(tmp_path / "samples", toy, world_size, runs, 12)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("world_size", "num_workers"), [(2, 0), *nightly((2, 2), (3, 0), (3, 2), (4, 0), (4, 2), is_many=True)]
)
def test_the_mnist_net_while_shares_change(world_size: int, num_workers: int, tmp_path: Path) -> None:
    flags = {"balance": "equal", "num_workers": num_workers}
    runs = [
        (words_of("Images", 6, global_batch_size=batch, max_sentences=most, **flags), batch)
        for batch, most in ((8, 3), (5, 5))
    ]
    check(tmp_path, "Images", world_size, runs, 6)


# Ranks at odds.


def rotate_apart(group: Group, save_dir: str, words: Words, odd_rank: int, odd_step: int) -> tuple[str, int, Any]:
    """How it ends where one rank's pace decides otherwise once: what is said, after which step, and the parameters."""
    session, _ = session_of(group, save_dir, "TwoTerms", words)
    controller = session.controller
    controller.pace = Rotating(session, group.world_size, odd_step=odd_step if group.rank == odd_rank else 0)
    said = ""
    try:
        session.train()
    except DisagreementError as error:
        said = str(error)
    finally:
        session.close()
    parameters = torch.cat([p.detach().flatten() for p in controller.replica.model.parameters()])
    return said, controller.state.position.step - 1, parameters.tolist()


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_that_changes_its_shares_otherwise_is_found_before_anything_changes(
    num_workers: int, tmp_path: Path
) -> None:
    flags = {"balance": "equal", "global_batch_size": 10, "num_workers": num_workers}
    words = words_of("TwoTerms", 6, **flags)
    ended = run_ranks(rotate_apart, 3, prepared(tmp_path), words, 1, 2)
    right = run_ranks(rotate_apart, 3, prepared(tmp_path), words_of("TwoTerms", 3, **flags), 0, 0)
    # what rank 1 decided after step 2 would hold from step 4 on
    for said, step, parameters in ended:
        assert said.startswith("the ranks did not compute the same step")
        assert step == 3
        assert parameters == right[0][2]
    assert [(said, step) for said, step, _ in right] == [("", 3)] * 3


def rotate_without_a_word(group: Group, save_dir: str, words: Words) -> None:
    session, _ = session_of(group, save_dir, "TwoTerms", words)
    session.controller.pace = Rotating(session, group.world_size, tells_loader=False)
    try:
        session.train()
    finally:
        session.close()


def test_a_loader_that_is_not_told_is_found(tmp_path: Path) -> None:
    words = words_of("TwoTerms", 6, balance="equal", global_batch_size=10)
    with pytest.raises(RankRaised, match="in order"):
        run_ranks(rotate_without_a_word, 2, prepared(tmp_path), words)


# Measured.


class Work(toys.Integers):
    """Enough to do for every sample that its time can be measured."""

    def loss(self, model: Any, sample: toys.Batch) -> dict[str, torch.Tensor]:
        matrix = torch.eye(160)
        for _ in range(2 * len(sample["x"])):
            matrix = matrix @ matrix
        return super().loss(model, sample)


CLASSES["Work"] = (Work, oracle.integers)


def measure(group: Group, save_dir: str, words: Words) -> tuple[Facts, bool]:
    session, recorder = session_of(group, save_dir, "Work", words)
    is_measured = isinstance(session.controller.pace, MeasuredShares)
    return facts_of(session, recorder), is_measured


@pytest.mark.fault("FT-7")
def test_a_rank_that_is_slowed_down_gets_less(tmp_path: Path) -> None:
    """The default balance: equal at first, and other shares from the third step on.

    Slowed down so much that another program on the machine is nothing beside it.
    """
    words = toy_words("Integers", global_batch_size=32, max_update=8)
    save_dir = prepared(tmp_path)
    slowed = run_ranks(measure, 2, save_dir, [*words, "--throttle", "1:40"])
    equal = run_ranks(measure, 2, save_dir, [*words, "--throttle", "1:40", "--balance", "equal"])
    assert [is_measured for _, is_measured in (*slowed, *equal)] == [True, True, False, False]
    assert slowed[0][0].shares == slowed[1][0].shares
    assert slowed[0][0].shares[:2] == [(16, 16)] * 2
    assert all(fast > slow for fast, slow in slowed[0][0].shares[2:])
    assert equal[0][0].shares == [(16, 16)] * 8  # the twin
    assert slowed[0][0].losses == equal[0][0].losses  # to the bit: sums of integers


def batches_of_costs(group: Group, save_dir: str, runs: list[tuple[str, Words]]) -> list[list[int]]:
    """A rank's life: what all ranks told at the end of each run of the micro-batches in their costs, 0 for none."""
    return [batches_of_one_run(group, save_dir, toy, words) for toy, words in runs]


def batches_of_one_run(group: Group, save_dir: str, toy: str, words: Words) -> list[int]:
    session, _ = session_of(group, save_dir, toy, words)
    pace, told = session.controller.pace, list[CommitRow]()
    follow = pace.follow

    def listen(plan: StepPlan, rows: Sequence[CommitRow]) -> Shift | None:
        told[:] = rows
        return follow(plan, rows)

    pace.follow = listen  # type: ignore[method-assign]
    try:
        session.train()
    finally:
        session.close()
    costs = [row.measured.cost for row in told]
    assert None not in costs
    return [cost.batch or 0 for cost in costs if cost]


def test_a_cost_has_the_stairs_of_micro_batches_that_are_all_full_but_the_last(tmp_path: Path) -> None:
    options_of = {"global_batch_size": 12, "balance": "auto"}
    runs = [
        ("TwoTerms", words_of("TwoTerms", 4, **options_of, max_sentences=4)),
        ("TwoTerms", words_of("TwoTerms", 4, **options_of, max_sentences=5, required_batch_size_multiple=2)),
        ("TwoTerms", words_of("TwoTerms", 4, **options_of, unit_size=3)),
        ("TwoTerms", words_of("TwoTerms", 4, **options_of)),
        ("Sentences", words_of("Sentences", 4, max_tokens=6, balance="auto")),  # where they end, nobody knows before
    ]
    ranks = run_ranks(batches_of_costs, 2, prepared(tmp_path), runs)
    assert ranks[0] == ranks[1] == [[4, 4], [4, 4], [1, 1], [0, 0], [0, 0]]
