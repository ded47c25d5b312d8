"""Memory that runs out, anywhere in a step and on any ranks: the gradient stays that of the global batch.

What every run must show is in `tests/support/hungry.py`; here stand the stories.
"""

from __future__ import annotations

import itertools
import random
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq import config as options
from hetseq.comm.group import Group
from hetseq.data.plan import MicroBatchCap
from hetseq.errors import DeviceMemoryError, HetSeqError, PeerLostError
from hetseq.parallel.buffers import BufferKeeper
from hetseq.run import planning
from hetseq.run.build import RankJob, build_session
from hetseq.run.loaded_task import load_material
from hetseq.run_directory import RunDirectory
from hetseq.system import device_memory as memory
from hetseq.task import make_task
from hetseq.training.micro_batch_size import MicroBatchSizes
from hetseq.training.share import ShareComputer
from tests.support import cuda_errors, toys
from tests.support.hungry import (
    CALM,
    LAST,
    LIMIT,
    STEPS,
    Appetite,
    Fault,
    Hungry,
    Meal,
    Words,
    check,
    check_buffers,
    curve_of,
    dine,
    eat,
    eat_all,
    forwards_in,
    keep_diary,
    prepared,
    session_of,
    tries,
    words_of,
    worst_error,
)
from tests.support.nightly import nightly
from tests.support.ranks import RankRaised, run_ranks
from tests.support.training import Recorder

# At chosen moments. The bucket of the second term is the first that can leave; samples 0 to 5 have no such term.

LATE = {"balance": "1,1", "max_sentences": 5}  # one micro-batch a step


def attempts_of(meals: list[Meal]) -> list[list[int]]:
    """Attempts at each step, by rank."""
    return [[len(attempts) for attempts in meal.steps.values()] for meal in meals]


def forwards_of(meals: list[Meal], step: int) -> list[int]:
    return [sum(len(forwards_in(attempt)) for attempt in meal.steps[step]) for meal in meals]


@pytest.mark.parametrize("fault", [Fault(0), Fault(0, LAST), Fault(1), Fault(3)])
def test_a_rank_whose_memory_runs_out_before_anything_left_repeats_alone(fault: Fault, tmp_path: Path) -> None:
    # five samples for each rank, in micro-batches of three and two
    meals = dine(tmp_path, words_of(10, balance="1,1", max_sentences=3), CALM, Appetite((fault,)))
    check(meals, 10)
    step, in_vain = fault.number // 2 + 1, fault.number % 2 + 1
    assert attempts_of(meals) == [[1] * 5] * 2
    assert forwards_of(meals, step) == [2, in_vain + 5]
    assert [meal.caps for meal in meals] == [[3] * 5, [3] * (step - 1) + [1] * (6 - step)]


@pytest.mark.parametrize("fault", [Fault(1), Fault(1, LAST)])
def test_activations_that_had_left_are_forgotten_with_the_attempt(fault: Fault, tmp_path: Path) -> None:
    (away := tmp_path / "away").mkdir()
    words = words_of(
        10, balance="1,1", max_sentences=3, offload_activations=True, loading_horizon=0, offload_dir=away
    )  # fmt: skip
    meals = dine(tmp_path, words, CALM, Appetite((fault,)))
    check(meals, 10)
    assert not list(away.iterdir())


@pytest.mark.parametrize("hurt", [(0,), (1,), (0, 1)])
def test_memory_that_runs_out_with_a_bucket_on_its_way_costs_everybody_one_repeat(
    hurt: tuple[int, ...], tmp_path: Path
) -> None:
    appetites = [Appetite((Fault(1, LAST),)) if rank in hurt else CALM for rank in (0, 1)]
    calm, meals = (
        dine(tmp_path / "calm", words_of(10, **LATE), CALM, CALM),
        dine(tmp_path, words_of(10, **LATE), *appetites),
    )
    check(meals, 10)
    assert (
        calm[0].lineage != meals[0].lineage
    )  # a step done twice is another history, as its sums may be rounded otherwise
    assert attempts_of(meals) == [[1, 2, 1, 1, 1]] * 2
    assert forwards_of(meals, 2) == [1 + 3 if rank in hurt else 2 for rank in (0, 1)]
    assert [meal.caps for meal in meals] == [[5, 2, 2, 2, 2] if rank in hurt else [5] * 5 for rank in (0, 1)]


def test_memory_that_runs_out_again_and_again(tmp_path: Path) -> None:
    # rank 0 takes the samples 0 to 7: in one piece, then in fours, in twos, and one by one
    faults = (Fault(0, LAST), Fault(2, LAST), Fault(6, LAST))
    meals = dine(tmp_path, words_of(16, balance="1,1", max_sentences=8), Appetite(faults), CALM)
    check(meals, 16)
    assert attempts_of(meals) == [[4, 1, 1, 1, 1]] * 2
    assert forwards_of(meals, 1) == [1 + 2 + 4 + 8, 4]
    # the same without anything on its way: nobody else learns of it
    faults = (Fault(0), Fault(1), Fault(3))
    meals = dine(tmp_path / "early", words_of(16, balance="1,1", max_sentences=8), Appetite(faults), CALM)
    check(meals, 16)
    assert attempts_of(meals) == [[1] * 5] * 2
    assert forwards_of(meals, 1) == [1 + 2 + 1 + 8, 1]


def test_memory_that_runs_out_in_the_repeat_of_another_rank(tmp_path: Path) -> None:
    # rank 0 asks for a repeat, in which rank 1 fails: without a bucket on its way, and then with one
    for name, fault, attempts in (("early", Fault(1), 2), ("late", Fault(1, LAST), 3)):
        words = words_of(20, balance="2,2,1", max_sentences=8)
        meals = dine(tmp_path / name, words, Appetite((Fault(0, LAST),)), Appetite((fault,)), CALM)
        check(meals, 20)
        assert attempts_of(meals) == [[attempts, 1, 1, 1, 1]] * 3, name


def test_one_rank_alone_repeats_by_itself(tmp_path: Path) -> None:
    words = words_of(10, max_sentences=5)
    meals = dine(tmp_path, words, Appetite((Fault(1), Fault(3, 3), Fault(9, LAST))))
    check(meals, 10)
    assert meals[0].caps[-1] == 1


def test_a_rank_that_is_slowed_down_on_purpose_never_sends_early(tmp_path: Path) -> None:
    words = [*words_of(10, **LATE), "--throttle", "1:2"]
    meals = dine(tmp_path, words, CALM, Appetite((Fault(1, LAST),)))
    check(meals, 10)
    assert attempts_of(meals) == [[1] * 5] * 2


@pytest.mark.parametrize("world_size", [1, 3])
def test_worker_processes_load_what_is_computed_again(world_size: int, tmp_path: Path) -> None:
    # the third step is the last of its epoch, and its repeat comes when the data of the next epoch are there
    words = words_of(10, balance="2,1,2" if world_size == 3 else "equal", max_sentences=10, num_workers=2)
    meals = dine(tmp_path, words, *[Appetite((Fault(0),), late=(2,)), CALM, CALM][:world_size])
    check(meals, 10)
    attempts = 2 if world_size > 1 else 1  # of a rank alone nothing is on its way
    assert attempts_of(meals) == [[1, 1, attempts, 1, 1]] * world_size
    assert forwards_of(meals, 3)[0] > 2, "the first share was done again"


def test_a_later_start_remembers_what_the_memory_refused(tmp_path: Path) -> None:
    (save_dir,), words = prepared(tmp_path, 1), words_of(10, balance="1,1")
    hurt, again, told = (
        run_ranks(eat_all, 2, [(save_dir, [*words, *more], [appetite, CALM])])
        for appetite, more in ((Appetite(most=2), []), (CALM, []), (CALM, ["--batch-size", "4"]))
    )
    assert [meal.caps[-1] for (meal,) in hurt] == [2, None]
    assert [meal.caps for (meal,) in again] == [[2] * 5] * 2  # both ranks are of this host
    assert [meal.caps for (meal,) in told] == [[4] * 5] * 2, "a cap that is given wins"
    check([meal for (meal,) in again], 10)


# Learned from what a device says of itself.


@dataclass(frozen=True)
class Learned:
    """What a rank saw of its sizes: those of the forwards of each step, the cap after it, and those watched."""

    steps: list[list[int]]
    caps: list[int | None]
    watched: list[int]


def learn_sizes(group: Group, save_dir: str, words: Words, free_bytes: int) -> Learned:
    """Train on a device that needs 100 bytes for a sample and 50 besides, and tells so as a GPU does."""

    def learning(cap: MicroBatchCap, **flags: Any) -> MicroBatchSizes:
        return MicroBatchSizes(cap, **{**flags, "is_learning": True})

    planning.MicroBatchSizes = learning  # type: ignore[assignment, misc]
    session, _ = session_of(group, save_dir, words)
    keep_diary(group, session)
    controller: Any = session.controller
    task, caps, watched = controller.task, [], []
    task.appetite = CALM

    @contextmanager
    def peak_of(device: torch.device) -> Iterator[memory.Peak]:
        peak = memory.Peak()
        yield peak
        watched.append(len(forwards_in(task.attempt)[-1]))
        peak.bytes = 50 + 100 * watched[-1]

    def free_by_now(device: torch.device) -> int:
        return free_bytes if controller.state.updates else 10**9  # the optimizer takes its memory in the first update

    memory.peak_of, memory.free_bytes = peak_of, free_by_now
    try:
        while not controller.has_ended():
            controller.train_step()
            caps.append(controller._computer.sizes.cap.samples)
    finally:
        session.close()
    steps = [list(itertools.chain(*map(forwards_in, attempts))) for attempts in task.steps.values()]
    return Learned([list(map(len, forwards)) for forwards in steps], caps, watched)


@pytest.mark.parametrize(("free_bytes", "most"), [(1300, 11), (100_000, 899), (100, 8)])
def test_sizes_grow_in_the_first_step_and_tell_what_later_ones_may_hold(
    free_bytes: int, most: int, tmp_path: Path
) -> None:
    (learned,) = run_ranks(learn_sizes, 1, *prepared(tmp_path, 1), words_of(25), free_bytes)
    growing = [1, 2, 4, 8, 8, 2]
    left = [min(most, 25 - at) for at in range(0, 25, most)]
    assert learned.steps == [growing] + [left] * (STEPS - 1)
    assert learned.caps == [None] + [most] * (STEPS - 1)
    assert learned.watched == growing  # and no more: watching is not free


# The twins: what would come of a rank that is careless.


def be_careless(group: Group, how: str, run: tuple[str, Words, list[Appetite]]) -> list[Meal]:
    """A rank that forgets the samples that failed, or to take its buffers back."""
    compute: Any = ShareComputer.compute
    if how == "samples":
        ShareComputer.compute = lambda *args: replace(compute(*args), is_whole=True)  # type: ignore[method-assign]
    else:
        BufferKeeper.restore_ = lambda self: None  # type: ignore[method-assign]
    return eat_all(group, [run])


def test_a_rank_that_forgets_something_is_found_by_the_same_measures(tmp_path: Path) -> None:
    appetites = [CALM, Appetite((Fault(1, LAST),))]
    lost, kept = prepared(tmp_path, 2)
    meals = [meal for (meal,) in run_ranks(be_careless, 2, "samples", (lost, words_of(10, **LATE), appetites))]
    assert worst_error(meals, curve_of(10)) > 0.01
    meals = [meal for (meal,) in run_ranks(be_careless, 2, "buffers", (kept, words_of(10, **LATE), appetites))]
    assert worst_error(meals, curve_of(10)) <= LIMIT
    with pytest.raises(AssertionError):
        check_buffers(meals, 10)


# At random moments.


@dataclass(frozen=True)
class Round:
    """One run with random failures."""

    batch: int
    words: Words
    appetites: list[Appetite]


def draw_round(world_size: int, chance: random.Random) -> Round:
    weights = [",".join(words[:world_size]) for words in (["5", "3", "1", "4"], ["2", "0", "1", "3"])]
    batch, kind = chance.choice([10, 16, 25]), chance.choice(["one", "some", "all"])
    words = words_of(
        batch,
        balance=chance.choice(["equal", "auto", *weights]),
        max_sentences=chance.choice([2, 5, 8, 25, 25]),
        bucket_cap_mb=chance.choice([0.0001, 0.0001, 0.0003, 1]),
    )
    one = chance.randrange(world_size)
    hurt = [kind == "all" or (rank == one if kind == "one" else chance.random() < 0.5) for rank in range(world_size)]
    return Round(batch, words, [draw_appetite(chance) if is_hurt else CALM for is_hurt in hurt])


def draw_appetite(chance: random.Random) -> Appetite:
    """A few failures anywhere, some of them in a row, and a few at the end of a share when buckets have left."""
    first, places = chance.randrange(12), [None, *range(6)]
    numbers = {first, chance.randrange(25)}.union(first + gap for gap in (1, 2) if chance.random() < 0.3)
    late = {chance.randrange(6)}.union(range(*sorted((chance.randrange(6), chance.randrange(6)))))
    return Appetite(
        tuple(Fault(number, chance.choice(places)) for number in sorted(numbers)),
        late=tuple(late) if chance.random() < 0.7 else (),
        most=chance.choice([1000, 1000, 1000, 3, 1]),
    )


def check_rounds(path: Path, world_size: int, rounds: int, seed: int) -> Counter[str]:
    """Play them in one life of the ranks; gives how often what happened."""
    chance = random.Random(seed)
    drawn = [draw_round(world_size, chance) for _ in range(rounds)]
    runs = [(save_dir, one.words, one.appetites) for save_dir, one in zip(prepared(path, rounds), drawn)]
    ranks = run_ranks(eat_all, world_size, runs, timeout_s=30 + 3 * rounds)
    happened: Counter[str] = Counter()
    for one, meals in zip(drawn, map(list, zip(*ranks))):
        check(meals, one.batch)
        for step in range(1, STEPS + 1):
            together = [meal.steps[step] for meal in meals]
            happened["repeated by all"] += len(together[0]) == 2
            happened["repeated by all, twice"] += len(together[0]) > 2
            happened["repeated alone"] += any(len(tries(attempt)) > 1 for one in together for attempt in one)
            happened["calm"] += all(len(one) == len(tries(one[0])) == 1 for one in together)
    return happened


@pytest.mark.parametrize("world_size", [1, 3])
def test_ten_runs_with_random_failures(world_size: int, tmp_path: Path) -> None:
    happened = check_rounds(tmp_path, world_size, 5, seed=world_size)
    assert min(happened["repeated alone"], happened["calm"]) > 0
    assert (happened["repeated by all"] > 0) == (world_size > 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world_size", "rounds"), [(1, 50), (3, 15), *nightly((2, 50), (4, 15), (3, 50), (4, 50), is_many=True)]
)
def test_many_runs_with_random_failures(world_size: int, rounds: int, tmp_path: Path) -> None:
    happened = check_rounds(tmp_path, world_size, rounds, seed=10 + world_size)
    kinds = [kind for kind, times in happened.items() if times > 0]
    assert sorted(kinds) == sorted(happened if world_size > 1 else ("calm", "repeated alone"))
    assert len(happened) == 4


# Nothing smaller.


def starve(group: Group, save_dir: str, words: Words, appetite: Appetite) -> tuple[str, str, int]:
    """How a run ends in which memory holds nothing on one rank: the exception, its words, the updates made."""
    session, _ = session_of(group, save_dir, words)
    keep_diary(group, session)
    controller: Any = session.controller
    controller.task.appetite = appetite if group.rank == 1 else CALM
    try:
        session.train()
    except HetSeqError as error:
        return type(error).__name__, str(error), controller.state.updates
    finally:
        session.close()
    return "", "", controller.state.updates


@pytest.mark.parametrize(
    ("flags", "appetite", "what"),
    [
        ({"max_sentences": 4}, Appetite(most=0), ("hold even one sample", "make samples or model smaller")),
        ({"unit_size": 3}, Appetite(most=2), ("hold a unit of 3 samples", "give a smaller --unit-size")),
        ({"unit_size": 3}, Appetite((Fault(0, LAST),)), ("hold a unit of 3 samples", "give a smaller --unit-size")),
    ],
    ids=["sample", "unit", "late"],
)
def test_a_rank_that_holds_nothing_says_so_and_nobody_hangs(
    flags: dict[str, Any], appetite: Appetite, what: tuple[str, str], tmp_path: Path
) -> None:
    (save_dir,), words = prepared(tmp_path, 1), words_of(10, balance="1,1,1", **flags)
    first, second, third = run_ranks(starve, 3, save_dir, words, appetite)
    assert second[0] == DeviceMemoryError.__name__
    for said in (f"rank 1 on {socket.gethostname()}: the memory of cpu", *what, "GiB in use by this rank", "--devices"):
        assert said in second[1]
    assert [first[0], third[0]] == [PeerLostError.__name__] * 2
    assert [first[2], second[2], third[2]] == [0, 0, 0]


def test_what_holds_a_unit_is_enough(tmp_path: Path) -> None:
    """The twin of the one above."""
    words = words_of(10, balance="1,1,1", unit_size=3)
    assert run_ranks(starve, 3, prepared(tmp_path, 1)[0], words, Appetite(most=3)) == [("", "", STEPS)] * 3


def test_another_failure_is_not_taken_for_one_of_memory(tmp_path: Path) -> None:
    with pytest.raises(RankRaised, match="RuntimeError: mat1 and mat2 shapes cannot be multiplied"):
        dine(tmp_path, words_of(10), Appetite(has_bug=True))


# No exception of ours: the system refuses.

MIB = 1 << 20


class Greedy(Hungry):
    """Needs `per_sample` bytes for each sample of a micro-batch, in forward or in backward."""

    per_sample = 0
    is_in_backward = False

    def loss(self, model: Any, sample: toys.Batch) -> dict[str, torch.Tensor]:
        sums = super().loss(model, sample)
        needed = len(sample["x"]) * self.per_sample
        if self.is_in_backward:
            sums["cls"].register_hook(lambda gradient: take(needed))
        else:
            take(needed)
        return sums


def take(needed_bytes: int) -> None:
    """Have so much memory for a moment, without touching it."""
    torch.empty(needed_bytes, dtype=torch.uint8)


def live_in_a_small_house(group: Group, save_dir: str, words: Words, is_in_backward: bool) -> tuple[Any, Any]:
    """Train while rank 1 may have 512 MiB more than now, and a sample needs 100."""
    config = options.complete(options.parse([*words, "--save-dir", save_dir]))
    task: Any = make_task(Greedy, config)
    material = load_material(config, torch.device("cpu"), task)
    session = build_session(RankJob(config, RunDirectory(Path(save_dir)), group, material, metrics=Recorder()))
    controller: Any = session.controller
    task.is_in_backward = is_in_backward
    if group.rank == 1:
        task.per_sample = 100 * MIB
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + 512 * MIB, resource.RLIM_INFINITY))
    try:
        session.train()
        return controller.replica.optimizer.seen, controller._computer.sizes.cap.samples
    finally:
        session.close()


@pytest.mark.parametrize("is_in_backward", [False, True])
def test_a_process_that_may_have_no_more_memory_takes_less_at_once(is_in_backward: bool, tmp_path: Path) -> None:
    words = words_of(25, balance="8,17", max_sentences=17)
    ranks = run_ranks(live_in_a_small_house, 2, *prepared(tmp_path, 1), words, is_in_backward)
    assert [cap for _, cap in ranks] == [17, 4]  # 17, 8, 4
    curve = curve_of(25)
    for gradients, _ in ranks:
        assert all(
            (g - right).norm() <= LIMIT * right.norm() for g, right in zip(gradients, curve.gradients, strict=True)
        )


# While a sample is moved to the device.


def eat_what_cannot_be_placed(group: Group, save_dir: str, words: Words, most: int) -> Meal:
    """Train where memory does not even take the samples of more than `most` at once."""
    to = torch.Tensor.to

    def place(tensor: torch.Tensor, *args: Any, **flags: Any) -> torch.Tensor:
        if flags.get("non_blocking") and tensor.dim() and len(tensor) > most:
            raise cuda_errors.out_of_memory()
        return to(tensor, *args, **flags)

    torch.Tensor.to = place  # type: ignore[method-assign, assignment]
    return eat(group, save_dir, words, CALM)


@pytest.mark.parametrize("workers", [0, 1])
def test_memory_that_runs_out_while_a_sample_is_placed_is_halved_like_any_other(workers: int, tmp_path: Path) -> None:
    words = words_of(12, balance="1,1", num_workers=workers)
    meals = run_ranks(eat_what_cannot_be_placed, 2, prepared(tmp_path, 1)[0], words, 4)
    assert worst_error(meals, curve_of(12)) <= LIMIT
    assert [meal.caps for meal in meals] == [[3] * STEPS] * 2


# In validation, which has no micro-batch of its own where the options give none.


def validate_at_the_end(group: Group, save_dir: str, words: Words, most: list[int]) -> list[dict[str, Any]]:
    session, recorder = session_of(group, save_dir, words)
    keep_diary(group, session)
    session.controller.task.appetite = Appetite(most=most[group.rank])  # type: ignore[attr-defined]
    with session:
        session.train()
    return recorder.validations


def test_a_rank_whose_memory_holds_little_validates_in_as_small_micro_batches_as_it_trains(tmp_path: Path) -> None:
    """Without a cap one forward would have a whole global batch of the split."""
    words = [word for word in words_of(24, balance="1,1", max_update=2) if word != "--disable-validation"]
    runs = zip(prepared(tmp_path, 2), ([1000, 1000], [5, 2]), strict=True)
    (calm, hurt) = (run_ranks(validate_at_the_end, 2, save_dir, words, most) for save_dir, most in runs)
    assert len(calm[0]) == 1
    assert hurt[0] == hurt[1]
    for name, value in calm[0][0].items():
        assert hurt[0][0][name] == (pytest.approx(value, rel=1e-13) if isinstance(value, float) else value)
