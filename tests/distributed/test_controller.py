"""A step among ranks when something is not as it should be: late data, numbers that are not finite, ranks at odds."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq import Task
from hetseq import config as options
from hetseq.comm.group import Group
from hetseq.data.loader import StepData
from hetseq.data.plan import MicroBatchCap, StepPlan
from hetseq.errors import DisagreementError, HetSeqError, NonFiniteError
from hetseq.parallel import gradient_sync
from hetseq.run.build import RankJob, build_session
from hetseq.run.loaded_task import load_material
from hetseq.run.session import Session
from hetseq.run_directory import RunDirectory
from hetseq.task import make_task
from tests.support import oracle, toys
from tests.support.logs import Keeping
from tests.support.ranks import run_ranks
from tests.support.training import Facts, Recorder, prepared, toy_words, train

Words = list[str]


def session_of(group: Group, save_dir: str, words: Words, task_class: type[Task] | None = None) -> Session:
    config = options.complete(options.parse([*words, "--save-dir", save_dir]))
    task = make_task(task_class, config) if task_class else None
    material = load_material(config, torch.device("cpu"), task)
    return build_session(RankJob(config, RunDirectory(Path(save_dir)), group, material, metrics=Recorder()))


def flat_parameters(session: Session) -> list[float]:
    parameters = session.controller.replica.model.parameters()
    return torch.cat([p.detach().flatten() for p in parameters]).tolist()


# Late data.


class Late:
    """A loader whose worker processes are late in some steps."""

    def __init__(self, loader: Any, is_late: Any) -> None:
        self._loader, self._is_late = loader, is_late

    def take(self, plan: StepPlan) -> StepData:
        data: StepData = self._loader.take(plan)
        return data

    def peek(self, plan: StepPlan) -> StepData | None:
        data: StepData | None = self._loader.peek(plan)
        return None if self._is_late(plan.step) else data

    def fetch_again(self, data: StepData, cap: MicroBatchCap) -> StepData:
        again: StepData = self._loader.fetch_again(data, cap)
        return again

    def close(self) -> None:
        self._loader.close()


def train_late(group: Group, save_dir: str, words: Words, late: dict[int, list[int]]) -> dict[str, Any]:
    """A rank's life; `late` says for which steps the data of which rank come late. Gives the rows that travelled."""
    session = session_of(group, save_dir, words)
    controller, rows = session.controller, []
    gather = group.all_gather_rows

    def spy(row: Any) -> Any:
        rows.append(len(row))
        return gather(row)

    controller.loader = Late(controller.loader, lambda step: step in late.get(group.rank, []))  # type: ignore[assignment]
    group.all_gather_rows = spy  # type: ignore[method-assign]
    losses = []
    try:
        while not controller.has_ended():
            losses.append(controller.train_step().loss)
        return {"losses": losses, "parameters": flat_parameters(session), "rows": rows}
    finally:
        session.close()


COUNTS = 3  # words of a gather of counts: the samples and two terms


def gathers_by_step(rows: list[int]) -> list[int]:
    """How often the counts travelled on their own before each step's commit."""
    by_step = [0]
    for words in rows:
        if words == COUNTS:
            by_step[-1] += 1
        else:
            by_step.append(0)
    return by_step[:-1]


def test_data_that_come_late_on_one_rank_cost_a_gather_and_change_nothing(tmp_path: Path) -> None:
    words = toy_words("TwoTerms", balance="3,1,1", global_batch_size=10, max_update=6, precision="fp64")
    save_dir = prepared(tmp_path)
    calm = run_ranks(train_late, 3, save_dir, words, {})
    late = run_ranks(train_late, 3, save_dir, words, {1: [3, 5, 6], 2: [3]})
    assert [gathers_by_step(facts["rows"]) for facts in calm] == [[1, 0, 0, 0, 0, 0]] * 3
    assert [gathers_by_step(facts["rows"]) for facts in late] == [[1, 0, 1, 0, 1, 1]] * 3
    assert late[0]["losses"] == calm[0]["losses"]  # to the bit
    assert all(facts["parameters"] == calm[0]["parameters"] for facts in late)
    assert len(set(calm[0]["losses"])) == 6


# Numbers that are not finite.


class Poisoned(toys.Toy):
    """Two terms; some samples bring an infinite sum of the second, or a finite sum whose gradient is not."""

    rate = 0.01
    poison: tuple[int, ...] = ()
    by_gradient = False

    def rows(self) -> toys.Batch:
        generator = torch.Generator().manual_seed(5)
        rows = {"x": torch.randn(40, 3, generator=generator), "factor": torch.ones(40)}
        rows["factor"][list(self.poison)] = 0.0 if self.by_gradient else math.inf
        return rows

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(3, 1)

    def count(self, sample: Any) -> dict[str, float]:
        return {"plain": len(sample["x"]), "scaled": len(sample["x"])}

    def loss(self, model: Any, sample: Any) -> dict[str, torch.Tensor]:
        output = model(sample["x"])[:, 0]
        if self.by_gradient:  # the square root of zero has an infinite slope
            return {"plain": (output**2).sum(), "scaled": (output.abs() * sample["factor"]).sqrt().sum()}
        return {"plain": (output**2).sum(), "scaled": (output * sample["factor"]).abs().sum()}


class PoisonedAt17(Poisoned):
    poison = (17,)


class PoisonedInGradient(PoisonedAt17):
    by_gradient = True


class PoisonedApart(PoisonedAt17):
    """The poison goes through parameters that no other sample uses: their part of a bucket is what travelled last."""

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Linear(3, 1))

    def loss(self, model: Any, sample: Any) -> dict[str, torch.Tensor]:
        output, is_well = model[0](sample["x"])[:, 0], bool(sample["factor"].isfinite().all())
        scaled = output if is_well else model[1](sample["x"])[:, 0] * sample["factor"]
        return {"plain": (output**2).sum(), "scaled": scaled.abs().sum()}


class PoisonedNowAndThen(Poisoned):
    poison = (3, 29)


class PoisonedInARow(Poisoned):
    poison = (12, 29)


@dataclass
class Poisoning:
    """What one rank saw, per step."""

    losses: list[float | None]
    has_moved: list[bool]
    updates: list[int]
    consumed: list[int]
    warnings: list[str]
    told: list[str]
    error: HetSeqError | None


def train_poisoned(group: Group, save_dir: str, words: Words, task_class: type[Task], steps: int) -> Poisoning:
    session = session_of(group, save_dir, words, task_class)
    controller, seen = session.controller, Poisoning([], [], [], [], [], [], None)
    log, keeping = logging.getLogger("hetseq.training.controller"), Keeping()
    log.addHandler(keeping)
    log.setLevel(logging.INFO)
    try:
        for _ in range(steps):
            before = flat_parameters(session)
            seen.losses.append(controller.train_step().loss)
            seen.has_moved.append(flat_parameters(session) != before)
            seen.updates.append(controller.state.updates)
            seen.consumed.append(controller.state.position.consumed)
    except HetSeqError as error:
        seen.error = error
    finally:
        log.removeHandler(keeping)
        session.close()
    skips = [record for record in keeping.records if "skipped" in record.getMessage()]
    seen.told = [record.getMessage() for record in skips]
    seen.warnings = [record.getMessage() for record in skips if record.levelno >= logging.WARNING]
    return seen


def poisoned_words(**flags: Any) -> Words:
    return toy_words("Integers", balance="1,1", global_batch_size=10, **flags)


@pytest.mark.fault("FT-14")
@pytest.mark.parametrize(
    ("task_class", "brought"),
    [
        (PoisonedAt17, "loss term 'scaled'"),
        (PoisonedInGradient, "a gradient of finite losses"),
        (PoisonedApart, "loss term 'scaled'"),
    ],
)
def test_a_sample_that_is_not_finite_on_one_rank_skips_the_step_on_all(
    task_class: type[Task], brought: str, tmp_path: Path
) -> None:
    ranks = run_ranks(train_poisoned, 2, prepared(tmp_path), poisoned_words(), task_class, 4)
    for seen in ranks:
        assert seen.error is None
        assert [loss is None for loss in seen.losses] == [False, True, False, False]
        assert seen.has_moved == [True, False, True, True]
        assert seen.updates == [1, 1, 2, 3]
        assert seen.consumed == [10, 20, 30, 0]  # its samples are used up, the epoch ends where it would have
        # sample 17 is at position 17: the second half of positions 10 to 19 is rank 1's
        assert seen.told == [
            f"step 2 skipped: its gradient is not finite; rank 1 produced it ({brought}; positions 15 to 19 of epoch 1)"
        ]
    assert [len(seen.warnings) for seen in ranks] == [1, 0]  # all know the same, one says it
    assert ranks[0].losses == ranks[1].losses


def test_without_poison_no_step_is_skipped(tmp_path: Path) -> None:
    for seen in run_ranks(train_poisoned, 2, prepared(tmp_path), poisoned_words(), Poisoned, 4):
        assert seen.has_moved == [True] * 4
        assert (seen.updates, seen.told) == ([1, 2, 3, 4], [])


def test_too_many_skipped_steps_in_a_row_end_the_run_on_all_ranks(tmp_path: Path) -> None:
    words = poisoned_words(max_skipped_steps=2)
    for seen in run_ranks(train_poisoned, 2, prepared(tmp_path), words, PoisonedInARow, 5):
        assert isinstance(seen.error, NonFiniteError)
        assert seen.updates == [1, 1]  # the error comes out of step 3
        assert "2 steps in a row were skipped (--max-skipped-steps)" in str(seen.error)
        assert "rank 1 produced it (loss term 'scaled'; positions 25 to 29 of epoch 1)" in str(seen.error)
    for seen in run_ranks(train_poisoned, 2, prepared(tmp_path), words, PoisonedNowAndThen, 4):
        assert seen.error is None  # the twin: as many, but not in a row
        assert seen.has_moved == [False, True, False, True]


# The length of a gradient.

CLIP = 0.05


def test_clipping_is_that_of_torch_on_the_whole_gradient(tmp_path: Path) -> None:
    def words(clip_norm: float) -> Words:
        # buckets of 100 bytes: the norm is of all of them together
        flags = {"balance": "5,2,1", "global_batch_size": 10, "max_update": 3, "precision": "fp64"}
        return [*toy_words("TwoTerms", bucket_cap_mb=0.0001, **flags), "--clip-norm", str(clip_norm)]

    ranks, right = (
        run_ranks(train_all, 3, prepared(tmp_path), list(map(words, (CLIP, 0.0, 1000.0)))),
        clipped_by_torch(3),
    )
    for facts, free, unreached in ranks:
        for mine, theirs in zip(facts.gradients, right, strict=True):
            # torch divides by the norm + 1e-6
            assert (mine - theirs).norm() / theirs.norm() < 1e-6 / CLIP
            assert mine.norm().item() == pytest.approx(CLIP, rel=1e-12)
        assert min(gradient.norm().item() for gradient in free.gradients) > 2 * CLIP  # the twin
        assert unreached.losses == free.losses != facts.losses


def train_rounding_otherwise(group: Group, save_dir: str, words: Words) -> list[float]:
    """Each rank's norms are rounded in another way, as on devices of several kinds; the parameters at the end."""
    compute = gradient_sync.norm_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_sync, "norm_of", lambda *given: compute(*given) * (1 + 1e-7 * group.rank))
        session = session_of(group, save_dir, words)
        session.controller.fit()
        return flat_parameters(session)


def test_ranks_that_round_differently_clip_by_the_same_bits(tmp_path: Path) -> None:
    flags = {"balance": "5,2,1", "global_batch_size": 10, "max_update": 3, "precision": "fp64"}
    words = [*toy_words("TwoTerms", **flags), "--clip-norm", str(CLIP)]
    first, *others = run_ranks(train_rounding_otherwise, 3, prepared(tmp_path), words)
    assert others == [first, first]


def train_all(group: Group, save_dir: str, runs: list[Words]) -> list[Facts]:
    return [train(group, save_dir, words) for words in runs]


def clipped_by_torch(steps: int) -> list[torch.Tensor]:
    """The plain loop over whole batches, with torch's clipping."""
    task: Any = make_task(toys.TwoTerms, options.parse([]))
    torch.manual_seed(oracle.SEED)
    model = task.build_model().double()
    parameters = sorted(model.parameters(), key=lambda p: p.dim() < 2)  # matrices first, as the product groups them
    optimizer, columns, at, gradients = torch.optim.SGD(parameters, lr=toys.TwoTerms.rate), task.rows(), 0, []
    for _ in range(steps):
        end = min(toys.SAMPLES, at + 10)
        optimizer.zero_grad()
        oracle.two_terms(model, {name: column[at:end] for name, column in columns.items()}).backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        gradients.append(
            torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in parameters])
        )
        optimizer.step()
        at = end % toys.SAMPLES
    return gradients


# Ranks at odds.


def train_apart(group: Group, save_dir: str, words: Words, own_words: dict[int, Words]) -> str:
    session = session_of(group, save_dir, [*words, *own_words.get(group.rank, [])])
    try:
        while not session.controller.has_ended():
            session.controller.train_step()
    except DisagreementError as error:
        return f"step {session.controller.state.position.step}: {error}"
    finally:
        session.close()
    return "agreed"


@pytest.mark.parametrize(
    "own_words",
    [["--balance", "3,1"], ["--seed", "8"], ["--global-batch-size", "12"], ["--curriculum", "1"]],
)
def test_a_rank_with_another_plan_is_found_before_anything_changes(own_words: Words, tmp_path: Path) -> None:
    words = toy_words("TwoTerms", balance="1,1", global_batch_size=10, max_update=4, precision="fp64")
    for told in run_ranks(train_apart, 2, prepared(tmp_path), words, {1: own_words}):
        assert told.startswith("step 1: the ranks did not compute the same step")


def test_ranks_with_the_same_plan_agree(tmp_path: Path) -> None:
    words = toy_words("TwoTerms", balance="1,1", global_batch_size=10, max_update=4, precision="fp64")
    assert run_ranks(train_apart, 2, prepared(tmp_path), words, {1: ["--seed", "7"]}) == ["agreed"] * 2


# A slow rank.


def test_a_rank_that_is_throttled_changes_nothing_but_the_time(tmp_path: Path) -> None:
    words = toy_words("TwoTerms", balance="3,1", global_batch_size=10, max_update=6, precision="fp64")
    save_dir = prepared(tmp_path)
    runs = [words, [*words, "--throttle", "1:3"], [*words, "--seed", "8"]]
    for calm, slow, other in run_ranks(train_all, 2, save_dir, runs):
        assert slow.losses == calm.losses != other.losses
        assert torch.equal(slow.parameters, calm.parameters)
        assert not torch.equal(other.parameters, calm.parameters)


def wait_for_a_long_validation(group: Group, save_dir: str, words: Words) -> list[float]:
    """Deadlines in force during a step's worth of samples, a million steps' worth, and afterwards."""
    session = session_of(group, save_dir, words)
    try:
        session.train()
        controller, seen = session.controller, []
        for steps in (1, 1_000_000):
            with controller.patience_for(samples=steps * 5):
                seen.append(group.deadline_s)
        return [*seen, group.deadline_s]
    finally:
        session.close()


def test_ranks_wait_longer_for_more_samples_between_steps_and_not_afterwards(tmp_path: Path) -> None:
    words = toy_words("TwoTerms", global_batch_size=5, max_update=5, step_deadline=7, balance="1,0")
    for short, long, afterwards in run_ranks(wait_for_a_long_validation, 2, prepared(tmp_path), words):
        assert long > 2 * short > 2 * afterwards == 14.0
