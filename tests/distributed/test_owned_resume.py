"""A checkpoint of any layout is resumed under any layout: replicas, owners of the state or of all, memory servers, and
ranks that divide the model.

One run for each layout trains to its end without an interruption and saves half-way. Each of these checkpoints is
resumed under each layout. What a checkpoint holds has the same bits for every reader. The losses behind it are those
of one device, to rounding: each layout adds the same gradients, but not all layouts add them in the same order. Where
the order is the same, the bits are.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hetseq.checkpoint import Held
from hetseq.comm.group import GlooGroup, Group
from hetseq.task import make_task
from tests.support import toys
from tests.support.nightly import nightly
from tests.support.owned import Piece, put_together, session_of
from tests.support.ranks import run_ranks
from tests.support.training import Recorder, prepared
from tests.support.trials import last_state

SAMPLES, BATCH = 83, 16  # ragged epochs of 6 steps
SAVED, LAST = 10, 20  # steps; the save is in the middle of an epoch
TOLERANCE = 1e-12
WORDS = (
    f"--precision fp64 --seed 7 --disable-validation --lr-scheduler constant --global-batch-size {BATCH}"
    f" --batch-size 3 --bucket-cap-mb 0.008 --max-update {LAST} --save-interval-updates {SAVED}"
    " --no-epoch-checkpoints --memory-interval-updates 0 --memory-buffer-size 0"
).split()


@dataclass(frozen=True)
class Layout:
    """Who computes, and who owns: weights by rank; None for replicas, which all own everything.

    `kind`: of which things a rank has only what it owns; with `all` of parameters too.
    """

    balance: str
    own: str | None = None
    kind: str = "state"
    groups: str = "all"  # the ranks of each group that holds everything
    tensors: str = "1"  # the ranks of each group that divides the model

    @property
    def world_size(self) -> int:
        return self.balance.count(",") + 1

    def words(self) -> list[str]:
        owners = [] if self.own is None else ["--shard-model", self.kind, "--own", self.own]
        owners += [] if self.own is None else ["--shard-groups", self.groups]
        owners += ["--shard-modules", "first,still,last"] if self.kind == "all" else []
        return ["--balance", self.balance, "--tensor-parallel-degree", self.tensors, *owners]


LAYOUTS = {
    "1 replica": Layout("1"),
    "3 replicas": Layout("7,4,1"),
    "3:1": Layout("3,1", "3,1"),
    "6:2:1": Layout("7,4,1", "6,2,1"),
    "server": Layout("3,1,0", "0,0,1"),
    "all 2+1": Layout("7,4,1", "1,3,1", "all", groups="2+1"),
    "tensors 2+1": Layout("2,2,1", tensors="2+1"),
    "tensors 2, state": Layout("2,2,1,1", "3,1,1,2", tensors="2"),
}
#: The ranks of each pair compute the same samples. Replicas that share memory, and owners, add the gradients of all
#: ranks in rank order, and AdamW updates element by element. So every sum of both has one order, if no step is clipped:
#: the norm of a gradient is added from the parts of the ranks, which are others.
IN_ONE_ORDER = [("3:1", "server"), ("3 replicas", "6:2:1")]


class Mixed(toys.Toy):
    """A net with a frozen layer, scalars of which one is frozen, and matrices that are cut inside."""

    def rows(self) -> toys.Batch:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(SAMPLES, 16, generator=generator, dtype=torch.float64)
        return {"x": x, "y": torch.randint(0, 10, (SAMPLES,), generator=generator)}

    def build_model(self) -> nn.Module:
        model = nn.ModuleDict({"first": nn.Linear(16, 48), "still": nn.Linear(48, 48), "last": nn.Linear(48, 10)})
        model.register_parameter("scale", nn.Parameter(torch.tensor(0.7)))
        model.register_parameter("shift", nn.Parameter(torch.tensor(0.1), requires_grad=False))
        model["still"].requires_grad_(False)
        return model

    def build_optimizer(self, parameter_groups: list[dict[str, Any]]) -> Any:
        return None  # the one that --optimizer names

    def tensor_plan(self) -> dict[str, str]:
        return {"first": "colwise_gather_output", "last": "rowwise_split_input"}

    def loss(self, model: Any, sample: Any) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(model["still"](torch.tanh(model["first"](sample["x"]))) + model.shift)
        return {"loss": F.cross_entropy(model["last"](hidden) * model.scale, sample["y"], reduction="sum")}


@dataclass
class Course:
    """What one rank saw of a run: losses and norms by step, and what it held at the beginning and at the end."""

    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    begun: dict[str, Any] = field(default_factory=dict)
    ended: dict[str, Any] = field(default_factory=dict)


def copy_of(held: Mapping[str, Held]) -> dict[str, Any]:
    """Copies of whole tensors, and of slices as pieces."""
    return {
        name: one.clone()
        if isinstance(one, torch.Tensor)
        else [((name, part.begin, part.end, part.tensor.clone()), part.shape) for part in one]
        for name, one in held.items()
    }


def live(group: Group, runs: list[tuple[str, list[str]]], shares_memory: bool) -> list[Course]:
    """A rank's life: one run after the other, each to its end."""
    if shares_memory and isinstance(group, GlooGroup):
        group.meet_neighbours()
    return [train(group, save_dir, words) for save_dir, words in runs]


def train(group: Group, save_dir: str, words: list[str]) -> Course:
    recorder = Recorder()
    session = session_of(group, save_dir, words, recorder, lambda config: make_task(Mixed, config))
    try:
        replica, course = session.controller.replica, Course()
        course.begun = copy_of(replica.held_tensors(group)[0])
        session.train()
        course.ended = copy_of(replica.held_tensors(group)[0])
        course.losses = {row["step"]: row["loss"] for row in recorder.rows}
        course.norms = {row["step"]: row["grad_norm"] for row in recorder.rows}
        return course
    finally:
        session.close()


def whole(held: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The tensors that all ranks hold together; what several of them hold has the same bits."""
    tensors: dict[str, torch.Tensor] = {}
    shapes: dict[str, torch.Size] = {}
    pieces: list[list[Piece]] = []
    for of_rank in held:
        pieces.append([])
        for name, one in of_rank.items():
            if isinstance(one, torch.Tensor):
                assert torch.equal(tensors.setdefault(name, one), one), name
                continue
            pieces[-1] += [piece for piece, _ in one]
            shapes[name] = torch.Size(one[0][1])
    assert not tensors.keys() & shapes.keys()
    for name, shape in shapes.items():
        elements = sum(end - begin for of_rank in pieces for at, begin, end, _ in of_rank if at == name)
        assert elements == shape.numel(), f"{name}: {elements} elements of {shape.numel()} have an owner"
    return tensors | put_together(pieces, shapes)


@dataclass
class Matrix:
    """All courses: of each layout alone, and of each source under each target."""

    calm: dict[str, list[Course]]
    saved: dict[str, dict[str, torch.Tensor]]  # the checkpoint of each layout, read in one process
    resumed: dict[tuple[str, str], list[Course]]
    runs: dict[str, Path]
    words: list[str]


def run_all(jobs: Mapping[Any, tuple[str, str, list[str]]], shares_memory: bool) -> dict[Any, list[Course]]:
    """The courses of jobs, each a layout, a run directory and words; those of one size in one life of its ranks."""
    found: dict[Any, list[Course]] = {}
    for world_size in sorted({LAYOUTS[layout].world_size for layout, _, _ in jobs.values()}):
        chosen = {key: job for key, job in jobs.items() if LAYOUTS[job[0]].world_size == world_size}
        runs = [(folder, [*words, *LAYOUTS[layout].words()]) for layout, folder, words in chosen.values()]
        ranks = run_ranks(live, world_size, runs, shares_memory, timeout_s=180)
        found |= {key: list(courses) for key, courses in zip(chosen, zip(*ranks), strict=True)}
    return found


def copied(source: Path, target: Path) -> str:
    """A run directory as it was just after the first save."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(f"step-{LAST:09d}*"))
    return str(target)


#: by the place of the gradients' memory: the optimizer, and whether a step is clipped
CASES = {
    "shared": ["--optimizer", "adamw", "--lr", "0.01", "--weight-decay", "0.1", "--clip-norm", "0"],
    "gloo": ["--optimizer", "sgd", "--momentum", "0.9", "--lr", "0.2", "--clip-norm", "0.5"],
}


@pytest.fixture(scope="module", params=["shared", *nightly("gloo")], ids=["adamw", "sgd-momentum-clip"])
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder, words = tmp_path_factory.mktemp("matrix"), [*WORDS, *CASES[request.param]]
    runs = {name: folder / str(number) for number, name in enumerate(LAYOUTS)}
    calm = run_all(
        {name: (name, prepared(place), words) for name, place in runs.items()}, request.param == "shared"
    )  # fmt: skip
    pairs = list(itertools.product(LAYOUTS, LAYOUTS))
    jobs = {
        pair: (pair[1], copied(runs[pair[0]], folder / f"resumed-{number}"), words) for number, pair in enumerate(pairs)
    }
    saved = {name: dict(last_state(Path(jobs[name, name][1])).tensors) for name in LAYOUTS}
    return Matrix(calm, saved, run_all(jobs, request.param == "shared"), runs, words)


def differing(courses: Sequence[Course], others: Sequence[Course]) -> list[str]:
    """The tensors at the end of two runs that differ in a bit."""
    one, other = (whole([course.ended for course in each]) for each in (courses, others))
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def farthest(mine: Mapping[Any, float], right: Mapping[Any, float]) -> float:
    """The largest relative difference of two courses over the same steps."""
    return max(abs(mine[step] - right[step]) / abs(right[step]) for step in mine)


PAIRS = pytest.mark.parametrize(("source", "target"), list(itertools.product(LAYOUTS, LAYOUTS)))


@PAIRS
def test_every_layout_reads_every_checkpoint_to_the_bit(matrix: Matrix, source: str, target: str) -> None:
    courses = matrix.resumed[source, target]
    found, saved = whole([course.begun for course in courses]), matrix.saved[source]
    assert found.keys() == saved.keys()
    assert {"model.scale", "model.shift", "model.still.weight", "model.first.weight"} <= saved.keys()
    assert any(name.startswith("optim.first.weight.") for name in saved)
    assert [name for name in saved if not torch.equal(found[name], saved[name])] == []
    own = LAYOUTS[target].own
    if own is not None:
        has_cuts = any(isinstance(one, list) for course in courses for one in course.begun.values())
        assert has_cuts == (own != "0,0,1"), "a single owner holds whole tensors"


@PAIRS
def test_the_losses_behind_every_checkpoint_are_those_of_one_device(matrix: Matrix, source: str, target: str) -> None:
    alone, courses = matrix.calm["1 replica"][0], matrix.resumed[source, target]
    for course in courses:
        assert list(course.losses) == list(range(SAVED + 1, LAST + 1))
        assert course.losses == courses[0].losses
    worst = farthest(courses[0].losses, alone.losses), farthest(courses[0].norms, alone.norms)
    print(f"{source} resumed as {target}: largest relative error {max(worst):.1e}")
    assert max(worst) <= TOLERANCE, worst
    ended, right = whole([course.ended for course in courses]), whole([alone.ended])
    assert ended.keys() == right.keys()
    for name, tensor in right.items():
        assert (ended[name] - tensor).norm() <= TOLERANCE * tensor.norm(), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_resumes_under_its_own_layout_has_the_bits_of_one_that_never_stopped(
    matrix: Matrix, layout: str
) -> None:
    calm, courses = matrix.calm[layout], matrix.resumed[layout, layout]
    for course, right in zip(courses, calm, strict=True):
        assert course.losses == {step: right.losses[step] for step in course.losses}
        assert course.norms == {step: right.norms[step] for step in course.norms}
    assert differing(courses, calm) == []


@pytest.mark.parametrize("matrix", ["shared"], indirect=True, ids=["adamw"])
@pytest.mark.parametrize(("source", "target"), [way for pair in IN_ONE_ORDER for way in itertools.permutations(pair)])
def test_so_has_one_that_resumes_under_a_layout_with_the_same_order_of_sums(
    matrix: Matrix, source: str, target: str
) -> None:
    calm, courses = matrix.calm[target], matrix.resumed[source, target]
    for course, right in zip(courses, calm, strict=True):
        assert course.losses == {step: right.losses[step] for step in course.losses}
    assert differing(courses, calm) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_comparison_sees_a_resume_that_lost_the_moments(matrix: Matrix, layout: str, tmp_path: Path) -> None:
    """The twin: the parameters are those of the checkpoint, and the losses are not those of one device."""
    job = (layout, copied(matrix.runs[layout], tmp_path / "run"), [*matrix.words, "--reset-optimizer"])
    courses = run_all({layout: job}, True)[layout]
    begun, saved = whole([course.begun for course in courses]), matrix.saved[layout]
    assert begun.keys() == {name for name in saved if name.startswith("model.")}
    assert [name for name in begun if not torch.equal(begun[name], saved[name])] == []
    assert farthest(courses[0].losses, matrix.calm["1 replica"][0].losses) > 1e-6
