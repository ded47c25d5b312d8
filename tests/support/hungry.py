"""A task whose memory runs out on request, its diary, and the invariants of every run with it.

A `Hungry` toy raises torch's exception in forwards and backwards that a test has chosen, and keeps a diary: forwards,
sent buckets, failures. The expected course follows from the diary without asking the product: a failure
before any bucket is sent concerns only the rank, a failure after it makes all ranks repeat the step.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hetseq import config as options
from hetseq.comm.group import Group
from hetseq.data.plan import Position
from hetseq.parallel import activation_offload
from hetseq.run.build import RankJob, build_session
from hetseq.run.loaded_task import load_material
from hetseq.run.session import Session
from hetseq.run_directory import RunDirectory
from hetseq.task import make_task
from tests.support import cuda_errors, oracle, toys
from tests.support.ranks import run_ranks
from tests.support.training import Recorder, toy_words

Words = list[str]
STEPS = 5
LIMIT = 1e-14
LAST = 0  # the parameter whose gradient comes last
DEADLINE_S = 20  # of a collective: longer than any step here, so that a hang is an error and no hang


class Fault(NamedTuple):
    """Memory runs out in the rank's forward `number` (from 0, over the whole run), or in the backward after it.

    `parameter`: at whose gradient in backward, in registration order; None: in forward.
    """

    number: int
    parameter: int | None = None


@dataclass(frozen=True)
class Appetite:
    """What goes wrong on one rank."""

    faults: tuple[Fault, ...] = ()  # a forward of a single sample is always spared
    late: tuple[int, ...] = ()  # attempts (from 0, over the whole run) whose last micro-batch fails in backward
    most: int = 1000  # the samples that its memory holds; more fail in forward
    has_bug: bool = False  # another failure than one of memory


CALM = Appetite()


class Attempt(list[Any]):
    """What a rank did between entering and leaving the forward and backward of a step, in order.

    The samples of a forward, by their positions in the data; "sent": a bucket left; "failed": memory ran out.
    """


class Seen(torch.nn.Module):
    """A buffer to which every forward adds what it sees: the same in the end however the samples are cut."""

    total: torch.Tensor
    forwards: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(6))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))


class Hungry(toys.TwoTerms):
    """Two terms, of which the first six samples lack one, and a buffer; memory runs out as `appetite` says."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.appetite: Appetite | None = None
        self.forwards, self.end = 0, 0  # what has been done; where this rank's share ends
        self.steps: dict[int, list[Attempt]] = {}
        self._fault: Fault | None = None
        self._is_watched = False

    def rows(self) -> toys.Batch:
        index = torch.arange(toys.SAMPLES)
        mask = np.random.default_rng(6).random((toys.SAMPLES, 4)) < 0.6
        return {**super().rows(), "mask": torch.from_numpy(mask) * (index >= 6)[:, None].double(), "index": index}

    def build_model(self) -> torch.nn.Module:
        model = super().build_model()
        model["seen"] = Seen()
        return model

    def loss(self, model: Any, sample: toys.Batch) -> dict[str, torch.Tensor]:
        seen = model["seen"]
        if model.training:
            seen.total += sample["x"].sum(0)
            seen.forwards += 1
        if self.appetite is not None:
            self._count(model, sample["index"].tolist())
        return super().loss(model, sample)

    def _count(self, model: Any, samples: list[int]) -> None:
        assert self.appetite is not None
        self.attempt.append(samples)
        if self.appetite.has_bug:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        if not self._is_watched:
            for index, parameter in enumerate(model.parameters()):
                parameter.register_hook(self._hook(index))
            self._is_watched = True
        number, self.forwards = self.forwards, self.forwards + 1
        self._fault = next((fault for fault in self.appetite.faults if fault.number == number), None)
        is_last = samples[-1] == self.end - 1
        if is_last and sum(map(len, self.steps.values())) - 1 in self.appetite.late:
            self._fault = Fault(number, LAST)
        if len(samples) > self.appetite.most or (self._fault == (number, None) and len(samples) > 1):
            self._run_out()
        if len(samples) == 1:
            self._fault = None

    def _hook(self, index: int) -> Any:
        def at_gradient(gradient: torch.Tensor) -> None:
            if self._fault is not None and self._fault.parameter == index:
                self._run_out()

        return at_gradient

    def _run_out(self) -> None:
        self._fault = None
        self.attempt.append("failed")
        raise cuda_errors.out_of_memory()

    @property
    def attempt(self) -> Attempt:
        """The attempt under way."""
        return self.steps[max(self.steps)][-1]


@dataclass
class Meal:
    """Observations of one rank in one run."""

    shares: list[tuple[int, ...]]
    positions: list[Position]  # after each step
    steps: dict[int, list[Attempt]]
    caps: list[int | None]  # after each step
    gradients: list[torch.Tensor]
    parameters: torch.Tensor
    total: torch.Tensor  # the buffer
    forwards: int  # the counter among the buffers
    losses: list[float | None]
    fetched_again: set[int]  # steps whose data were fetched another time
    lineage: str


def session_of(group: Group, save_dir: str, words: Words) -> tuple[Session, Recorder]:
    multiprocessing.current_process().daemon = False  # so that it may have processes of its own that load data
    config = options.complete(options.parse([*words, "--save-dir", save_dir]))
    material, recorder = load_material(config, torch.device("cpu"), make_task(Hungry, config)), Recorder()
    return build_session(RankJob(config, RunDirectory(Path(save_dir)), group, material, metrics=recorder)), recorder


def keep_diary(group: Group, session: Session) -> set[int]:
    """Note where attempts begin, and what leaves during them; the rest leaves anyway. Gives the steps fetched again."""
    controller: Any = session.controller
    computer, compute, send = controller._computer, controller._computer.compute, group.all_reduce_sum
    task, loader, under_way = controller.task, controller.loader, []
    fetch_again, fetched_again = loader.fetch_again, set()

    def fetch(data: Any, cap: Any) -> Any:
        fetched_again.add(data.plan.step)
        return fetch_again(data, cap)

    def attempt(data: Any, *args: Any) -> Any:
        task.steps.setdefault(data.plan.step, []).append(Attempt())
        under_way.append(True)
        task.end = data.plan.range_of(group.rank)[1]
        part = compute(data, *args)
        under_way.clear()
        return part

    def sent(tensor: torch.Tensor) -> Any:
        if under_way:
            task.attempt.append("sent")
        return send(tensor)

    computer.compute, group.all_reduce_sum, loader.fetch_again = attempt, sent, fetch
    return fetched_again


def eat(group: Group, save_dir: str, words: Words, appetite: Appetite) -> Meal:
    """Train with one appetite; `group` is used again afterwards."""
    send = group.all_reduce_sum
    activation_offload.LEAST_BYTES = 1  # the model is small
    session, recorder = session_of(group, save_dir, words)
    controller: Any = session.controller
    fetched_again = keep_diary(group, session)
    controller.task.appetite, positions, caps = appetite, [], []
    controller.replica.model.train()
    try:
        while not controller.has_ended():
            controller.train_step()
            positions.append(controller.state.position)
            caps.append(controller._computer.sizes.cap.samples)
        model, offload = controller.replica.model, controller._computer._offload
        assert offload is None or offload.facts.moved, "no activation has left"
        return Meal(
            shares=[tuple(row["shares"]) for row in recorder.rows],
            positions=positions,
            steps=controller.task.steps,
            caps=caps,
            gradients=controller.replica.optimizer.seen,
            parameters=torch.cat([p.detach().flatten() for p in model.parameters()]),
            total=model["seen"].total.clone(),
            forwards=int(model["seen"].forwards),
            losses=[row["loss"] for row in recorder.rows],
            fetched_again=fetched_again,
            lineage=str(controller.state.lineage),
        )
    finally:
        session.close()
        group.all_reduce_sum = send  # type: ignore[method-assign]


def eat_all(group: Group, runs: list[tuple[str, Words, list[Appetite]]]) -> list[Meal]:
    """A rank's life: one run after the other, each in a run directory of its own."""
    return [eat(group, save_dir, words, appetites[group.rank]) for save_dir, words, appetites in runs]


def words_of(batch: int, **flags: Any) -> Words:
    # buckets of 100 bytes: one for nearly every parameter, so that some have left when others fail
    flags = {"bucket_cap_mb": 0.0001, "precision": "fp64", "max_update": STEPS, "step_deadline": DEADLINE_S} | flags
    return toy_words("TwoTerms", global_batch_size=batch, **flags)


def prepared(path: Path, count: int) -> list[str]:
    """Run directories: one each, since it stores the size that fits in memory."""
    for number in range(count):
        RunDirectory.prepare(path / str(number), config_yaml="")
    return [str(path / str(number)) for number in range(count)]


def dine(path: Path, words: Words, *appetites: Appetite) -> list[Meal]:
    """One run; what each rank saw."""
    run = (prepared(path, 1)[0], words, list(appetites))
    return [meals[0] for meals in run_ranks(eat_all, len(appetites), [run])]


# Invariants of every run, whatever went wrong.


def toy() -> Any:
    return make_task(Hungry, options.parse([]))


def curve_of(batch: int) -> oracle.Curve:
    torch.manual_seed(oracle.SEED)
    model = toy().build_model()
    parameters = sorted(model.double().parameters(), key=lambda p: p.dim() < 2)
    optimizer, rows = toy().build_optimizer([{"params": parameters}]), toy().rows()
    return oracle.train(
        model, optimizer, rows, oracle.two_terms, batch_of_epoch=lambda _: batch, steps=STEPS, dtype=torch.float64
    )


def worst_error(meals: list[Meal], curve: oracle.Curve) -> float:
    return max(
        ((mine - right).norm() / right.norm()).item()
        for meal in meals
        for mine, right in zip(meal.gradients, curve.gradients, strict=True)
    )


def steps_by_hand(batch: int) -> Iterator[tuple[int, int]]:
    """First and end position of each step, in the data's own order."""
    at = 0
    for _ in range(STEPS):
        end = min(toys.SAMPLES, at + batch)
        yield at, end
        at = end % toys.SAMPLES


def position_by_hand(number: int, batch: int) -> Position:
    """The position of training after step `number`, from 1."""
    epoch, steps = divmod(number, -(-toys.SAMPLES // batch))
    return Position(number + 1, epoch + 1, steps * batch)


def tries(attempt: Attempt) -> list[list[Any]]:
    """An attempt cut after each failure."""
    found: list[list[Any]] = [[]]
    for event in attempt:
        if found[-1][-1:] == ["failed"]:
            found.append([])
        found[-1].append(event)
    return found


def forwards_in(events: list[Any]) -> list[list[int]]:
    """The samples of each forward, in order."""
    return [event for event in events if isinstance(event, list)]


def is_in_vain(attempt: Attempt) -> bool:
    """Memory ran out when a bucket was on its way: elsewhere a rank continues after a failure."""
    return attempt[-1:] == ["failed"]


def check_diary(meals: list[Meal], batch: int) -> None:
    """Every rank did what the failures of all ranks ask for, and nothing else."""
    for number, (start, end) in enumerate(steps_by_hand(batch), 1):
        shares = meals[0].shares[number - 1]
        borders = list(itertools.accumulate(shares, initial=start))
        assert borders[-1] == end
        for rank, meal in enumerate(meals):
            assert meal.shares[number - 1] == shares
            assert meal.positions[number - 1] == position_by_hand(number, batch)
            for attempt in meal.steps[number]:
                check_attempt(attempt, list(range(borders[rank], borders[rank + 1])))
        # all ranks enter the same attempts; one is in vain if a rank failed too late, and then there is another
        together = list(zip(*(meal.steps[number] for meal in meals), strict=True))
        assert [any(map(is_in_vain, attempts)) for attempts in together] == [True] * (len(together) - 1) + [False]


def check_attempt(attempt: Attempt, mine: list[int]) -> None:
    """A rank begins again with its first sample, in halves, if and only if nothing has left."""
    *earlier, last = tries(attempt)
    for events in (*earlier, last):
        samples = list(itertools.chain(*forwards_in(events)))
        is_whole = "failed" not in events
        assert samples == (mine if is_whole else mine[: len(samples)])
    assert not any("sent" in events for events in earlier)
    assert "failed" not in last or "sent" in last
    for failing, following in itertools.pairwise([*earlier, last]):
        assert max(map(len, forwards_in(following))) <= len(forwards_in(failing)[-1]) // 2


def check_sizes(meal: Meal) -> None:
    """A size that ran out of memory is halved, and no later step tries a larger one."""
    largest = 10**6
    for number, cap in enumerate(meal.caps, 1):
        for events in itertools.chain.from_iterable(map(tries, meal.steps[number])):
            sizes = [len(samples) for samples in forwards_in(events)]
            assert max(sizes, default=0) <= largest
            largest = sizes[-1] // 2 if "failed" in events else largest
        assert cap == largest or largest == 10**6
    # what comes after a failure is cut by the loader, once
    failures = {step for step, attempts in meal.steps.items() if any("failed" in attempt for attempt in attempts)}
    assert meal.fetched_again == failures


def check_buffers(meals: list[Meal], batch: int) -> None:
    """Each step adds the mean over the ranks, by their samples, of what each of them saw once."""
    x, total, forwards = toy().rows()["x"], torch.zeros(6, dtype=torch.float64), 0
    for number, (start, end) in enumerate(steps_by_hand(batch), 1):
        shares = meals[0].shares[number - 1]
        for share in shares:
            total += x[start : start + share].sum(0) * share / sum(shares)
            start += share
        assert start == end
        leader = meals[shares.index(max(shares))]  # the one whose counters all take
        forwards += len(forwards_in(tries(leader.steps[number][-1])[-1]))
    for meal in meals:
        assert (meal.total - total).norm() <= 1e-13 * total.norm()
        assert meal.forwards == forwards


def check(meals: list[Meal], batch: int) -> None:
    """Check all invariants of a run."""
    check_diary(meals, batch)
    for meal in meals:
        check_sizes(meal)
    check_buffers(meals, batch)
    curve = curve_of(batch)
    assert worst_error(meals, curve) <= LIMIT
    assert all(meal.losses == pytest.approx(curve.losses, rel=1e-14) for meal in meals)
    assert len({tuple(meal.parameters.tolist()) for meal in meals}) == 1, "replicas differ"
    assert len({meal.lineage for meal in meals}) == 1
