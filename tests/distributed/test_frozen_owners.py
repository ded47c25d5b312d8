"""Frozen parameters come and go like trained ones, in checkpoints or not: the curve of one device."""

from __future__ import annotations

import itertools
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from hetseq import config as options
from hetseq import registry
from hetseq.balance import ownership
from hetseq.cluster.membership.assignment import InferenceJob
from hetseq.comm.group import Group, LocalGroup
from hetseq.errors import HetSeqError
from hetseq.parallel import portions
from hetseq.run import inference, loaded_task
from hetseq.run.base_again import base_again
from hetseq.run.build import RankJob, build_session
from hetseq.run.loaded_task import load_material
from hetseq.run.shadow import Shadow
from hetseq.run_directory import RunDirectory
from hetseq.task import make_task
from tests.support.adapted import Adapted, Still, is_base, leave_out
from tests.support.layered import WIDTH
from tests.support.lives import words
from tests.support.owned import OwnedFacts, PlainCurve, Setting, plain_curve, session_of, train_owned, whole_gradient
from tests.support.ranks import run_ranks
from tests.support.toys import SAMPLES
from tests.support.training import Recorder, prepared
from tests.support.trials import last_state

BATCH, STEPS, SEED = 12, 8, 7
#: who owns how much, who computes how much
LAYOUTS = [("3,1", "9,3"), ("6,2,1", "7,4,1"), ("2,0,1", "5,4,3"), ("1,1,8", "9,3,0"), ("0,0,1", "3,1,0")]
SETTING = Setting(Adapted, "adamw")
WORDS = (
    f"--no-save --lr 0.001 --weight-decay 0.01 --global-batch-size {BATCH} --batch-size 2 --max-update {STEPS}"
    f" --seed {SEED}"
)


def built() -> torch.nn.Module:
    """The model that each rank begins with."""
    torch.manual_seed(SEED)
    model: torch.nn.Module = make_task(Adapted, options.parse([])).build_model()
    for name, parameter in model.named_parameters():
        if not is_base(name):
            parameter.data = parameter.data.double()
    return model


@pytest.fixture(scope="module")
def alone() -> PlainCurve:
    """The same training in a plain loop."""
    task = make_task(Adapted, options.parse([]))
    rows = task.rows()

    def loss_of(model: torch.nn.Module, first: int, end: int) -> torch.Tensor:
        return F.cross_entropy(model["head"](task.hidden(model, rows["x"][first:end])), rows["y"][first:end])  # type: ignore[index]

    return plain_curve(built(), "adamw", loss_of, samples=SAMPLES, batch=BATCH, steps=STEPS)


def train_fine(group: Group, save_dir: str, told: list[str], shares_memory: bool) -> OwnedFacts:
    logging.getLogger("hetseq").addHandler(logging.NullHandler())
    with mock.patch.object(ownership, "GRAIN", 1):  # the tensors are smaller than a grain
        return train_owned(group, save_dir, told, shares_memory, SETTING)


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])
@pytest.mark.parametrize(("own", "balance"), LAYOUTS)
def test_adapters_over_frozen_weights_have_the_gradient_of_the_global_batch(
    own: str, balance: str, shares_memory: bool, alone: PlainCurve, tmp_path: Path
) -> None:
    told = words(f"{WORDS} --balance {balance} --own {own} --shard-model all --shard-modules layers.*")
    ranks = run_ranks(train_fine, own.count(",") + 1, prepared(tmp_path), told, shares_memory, timeout_s=60)
    gradient = whole_gradient([facts.gradients[0] for facts in ranks], ranks[0].parameters)
    assert (gradient - alone.gradient).norm() <= 1e-14 * alone.gradient.norm()
    mine = torch.cat([value.flatten() for value in ranks[0].parameters.values()])
    assert (mine - alone.parameters).norm() <= 1e-12 * alone.parameters.norm()
    frozen = {name: value.detach() for name, value in built().named_parameters() if not value.requires_grad}
    assert len(frozen) == 8
    for facts in ranks:
        assert facts.losses == pytest.approx(alone.losses, rel=1e-12)
        assert facts.frozen.keys() == frozen.keys()
        for name, value in frozen.items():
            assert torch.equal(facts.frozen[name], value), name
            assert facts.frozen[name].dtype == value.dtype
    total = sum(value.numel() for value in built().parameters())
    weights = [float(weight) for weight in own.split(",")]
    for facts, weight in zip(ranks, weights):
        assert abs(facts.owned - total * weight / sum(weights)) <= 12  # one for each cut


# checkpoints

RESUMED = {
    "none": "--balance 9,3",
    "state": "--balance 9,3 --shard-model state --own 1,3",
    "all 3:1": "--balance 9,3 --shard-model all --own 3,1 --shard-modules layers.*",
    "all 0:1": "--balance 3,1 --shard-model all --own 0,1 --shard-modules layers.*",
}
SAVED = 4


def train_in_turn(group: Group, runs: list[tuple[str, list[str]]]) -> list[list[float]]:
    """The losses of one run after the other."""
    logging.getLogger("hetseq").addHandler(logging.NullHandler())
    found = []
    for save_dir, told in runs:
        recorder = Recorder()
        with mock.patch.object(ownership, "GRAIN", 1):
            session = session_of(group, save_dir, told, recorder, SETTING.task)
            session.train()
            session.close()
        found.append([row["loss"] for row in recorder.rows])
    return found


def test_a_run_resumes_on_any_layout_with_its_frozen_tensors(alone: PlainCurve, tmp_path: Path) -> None:
    told = words(WORDS.replace("--no-save", f"--save-interval-updates {SAVED} --no-epoch-checkpoints"))
    begun = {name: prepared(tmp_path / str(number)) for number, name in enumerate(RESUMED)}
    first = [(folder, [*told, *RESUMED[name].split(), "--max-update", str(SAVED)]) for name, folder in begun.items()]
    run_ranks(train_in_turn, 2, first, timeout_s=120)
    frozen = {name: one.detach() for name, one in built().named_parameters() if not one.requires_grad}
    for folder in begun.values():
        saved = last_state(Path(folder))
        for name, value in frozen.items():
            assert (f"model.{name}" in saved.tensors) != is_base(name)
            assert is_base(name) or torch.equal(saved.tensors[f"model.{name}"], value), name
        assert len(saved.state["base"]) == 16
    ways = list(itertools.product(RESUMED, RESUMED))
    then = []
    for number, (source, target) in enumerate(ways):
        shutil.copytree(begun[source], tmp_path / f"resumed-{number}")
        then.append((str(tmp_path / f"resumed-{number}"), [*told, *RESUMED[target].split()]))
    for way, losses in zip(ways, run_ranks(train_in_turn, 2, then, timeout_s=120)[0], strict=True):
        assert losses == pytest.approx(alone.losses[SAVED:], rel=1e-12), way


def judge_in_turn(group: Group, run: str, ways: list[list[str]]) -> list[str]:
    """What `hetseq evaluate` prints of a run."""
    logging.getLogger("hetseq").addHandler(logging.NullHandler())
    found = []
    for told in ways:
        config = options.complete(options.parse([*told, "--save-dir", run]))
        errand = InferenceJob(run=run, output=None, wants_json=True)
        with mock.patch.object(registry, "find_task", return_value=Adapted):
            material = inference.prepare(errand, config, torch.device("cpu"))
        found.append(inference.perform(errand, config, material, group))
    return found


def test_the_run_is_evaluated_by_ranks_that_own_parts(tmp_path: Path) -> None:
    told = words(WORDS.replace("--no-save", f"--save-interval-updates {SAVED} --no-epoch-checkpoints"))
    run = prepared(tmp_path)
    run_ranks(train_in_turn, 2, [(run, [*told, *RESUMED["all 3:1"].split(), "--max-update", str(SAVED)])])
    ways = [
        [*words("--batch-size 2", validate=True), *RESUMED[name].split()] for name in ("none", "all 3:1", "all 0:1")
    ]
    whole, *parts = run_ranks(judge_in_turn, 2, run, ways)[0]
    assert "valid_loss" in whole
    assert parts == [whole, whole]


# memory


@dataclass
class Held:
    """Bytes of frozen parameters on one rank."""

    owned: int
    most_here: int = 0  # at a time, in the memory of layers


class OnTop(Adapted):
    """Only the highest layer has something to train, and the head: backward reaches no other."""

    def build_model(self) -> torch.nn.Module:
        model = super().build_model()
        model["layers"][1].requires_grad_(False)  # type: ignore[index]
        return model


def count_frozen(group: Group, save_dir: str, told: list[str], task: type[Adapted]) -> Held:
    logging.getLogger("hetseq").addHandler(logging.NullHandler())
    with mock.patch.object(ownership, "GRAIN", 1):
        session = session_of(group, save_dir, told, Recorder(), Setting(task, "adamw").task)
    replica = session.controller.replica
    frozen = [one for one in replica.model.parameters() if not one.requires_grad]
    try:
        owned = replica.owned
        assert owned is not None
        held = Held(sum(one.owned.nbytes for name, one in owned.fragments.items() if name in owned.described.frozen))

        def look(*_: object) -> None:
            storages = {one.untyped_storage()._cdata: one.untyped_storage().size() for one in frozen}
            held.most_here = max(held.most_here, sum(storages.values()))

        for layer in replica.model["layers"]:  # type: ignore[index]
            layer.register_forward_hook(look)
        reducer: Any = replica.reducer
        collected, issue = [], reducer._issue

        def issuing() -> None:
            issue()
            look()
            collected.append(reducer._at)

        reducer._issue = issuing
        session.train()
        assert collected
        look()
        return held
    finally:
        session.close()


@pytest.mark.parametrize("task", [Adapted, OnTop])
def test_a_rank_holds_its_part_of_the_frozen_weights_and_two_layers_and_the_root(
    task: type[Adapted], tmp_path: Path
) -> None:
    told = words(f"{WORDS} --balance 9,3 --own 3,1 --shard-model all --shard-modules layers.*")
    ranks = run_ranks(count_frozen, 2, prepared(tmp_path), told, task)
    layer, of_adapter, root = 2 * WIDTH**2, 8 * WIDTH, 8 * (WIDTH**2 + WIDTH)
    frozen_adapter = 0 if task is Adapted else 8 * 4 * WIDTH
    total = 4 * layer + 2 * of_adapter + frozen_adapter + root
    assert [held.most_here for held in ranks] == [2 * layer + of_adapter + frozen_adapter + root] * 2
    assert sum(held.owned for held in ranks) == total
    assert abs(ranks[1].owned - total / 4) <= 8 * 8  # one number for each unit


# refusals


class Changing(Adapted):
    """Its forward changes a frozen vector."""

    def loss(self, model: Any, sample: Any) -> dict[str, torch.Tensor]:
        found = super().loss(model, sample)
        with torch.no_grad():
            model["first"].bias.mul_(0.5)
        return found


class Thawing(Adapted):
    """Trains a frozen vector."""

    def loss(self, model: Any, sample: Any) -> dict[str, torch.Tensor]:
        model["layers"][1].scale.requires_grad_(True)
        return super().loss(model, sample)


class Reading(Adapted):
    """Reads a frozen vector between two steps."""

    def build_model(self) -> torch.nn.Module:
        self.model = super().build_model()
        return self.model

    def update_step(self, num_updates: int) -> None:
        self.model["layers"][1].scale.sum()  # type: ignore[index]


def fail(group: Group, save_dir: str, told: list[str], task: type[Adapted]) -> str:
    logging.getLogger("hetseq").addHandler(logging.NullHandler())
    session = None
    try:
        session = session_of(group, save_dir, told, Recorder(), Setting(task, "adamw").task)
        session.train()
    except HetSeqError as error:
        return str(error)
    finally:
        if session is not None:
            session.close()
    return ""


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (Changing, "forward changes first.bias in place, and the change would be lost: make it a buffer"),
        (Thawing, "layers.1.scale gets a gradient, but was frozen when the run began"),
        (Reading, "uses layers.1.scale, but with --shard-model all no rank has whole parameters between two steps"),
    ],
)
def test_what_would_be_lost_is_refused(task: type[Adapted], says: str, tmp_path: Path) -> None:
    told = words(f"{WORDS} --balance 9,3 --own 3,1 --shard-model all --shard-modules layers.*")
    for said in run_ranks(fail, 2, prepared(tmp_path), told, task):
        assert says in said


# the base again


def test_the_base_is_built_again_for_what_a_lost_rank_owned(tmp_path: Path) -> None:
    config = options.complete(
        options.parse(
            [*words("--shard-model all --shard-modules layers.* --no-save"), "--save-dir", prepared(tmp_path)]
        )
    )
    material = load_material(config, torch.device("cpu"), SETTING.task(config))
    base = [one for name, one in material.model.named_parameters() if is_base(name)]
    right = [one.detach().clone() for one in base]
    for one in base:
        one.data = torch.zeros_like(one)
    base_again(config, material)(base)
    assert all(torch.equal(one, value) for one, value in zip(base, right))


def test_another_base_in_its_place_ends_the_run_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = options.complete(
        options.parse(
            [*words("--shard-model all --shard-modules layers.* --no-save"), "--save-dir", prepared(tmp_path)]
        )
    )
    material = load_material(config, torch.device("cpu"), SETTING.task(config))
    monkeypatch.setattr(Adapted, "seed", 6)
    with pytest.raises(
        HetSeqError, match=f"owned a part of the frozen weights {material.base}, and .* builds .* in their"
    ):
        base_again(config, material)


# shadows


def test_owners_give_a_shadow_the_frozen_tensors_of_a_checkpoint_and_no_gradients_of_them(tmp_path: Path) -> None:
    told = words(f"{WORDS} --shard-model all --shard-modules layers.*")
    logging.getLogger("hetseq").addHandler(logging.NullHandler())
    with session_of(LocalGroup(), prepared(tmp_path), told, Recorder(), SETTING.task) as session:
        replica = session.controller.replica
        with_gradients = {one.name for one in portions.portions_of(replica, session.controller.group)}
        right = built()
        assert with_gradients == {name for name, one in right.named_parameters() if one.requires_grad}
        frozen = portions.frozen_portions_of(replica)
        assert {one.name for one in frozen} == {"first.weight", "first.bias", "layers.1.scale", "layers.3.scale"}
        pieces, numbers = portions.state_pieces(replica, frozen)
        assert numbers == {}
        other = built()
        for one in other.parameters():
            one.data = torch.zeros_like(one)
        shadow = Shadow.__new__(Shadow)
        shadow._every, shadow._parameters = dict(other.named_parameters()), {}
        for piece, values in pieces:
            shadow._load_trained(piece, values)
        for name, one in right.named_parameters():
            assert torch.equal(other.get_parameter(name), one) == (name in {portion.name for portion in frozen})


# delayed initialisation


class DrawnStill(Still):
    """A layer of the base that is drawn from the seed of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.weight)


class Drawn(Adapted):
    """Layers of the base between trained ones."""

    def build_model(self) -> torch.nn.Module:
        layers = torch.nn.ModuleList([DrawnStill(), torch.nn.Linear(WIDTH, WIDTH), DrawnStill()])
        first, head = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 3)
        model = torch.nn.ModuleDict({"first": first, "layers": layers, "head": head})
        model.register_state_dict_post_hook(leave_out)
        return model


def train_drawn(group: Group, save_dir: str, told: list[str]) -> tuple[str | None, list[float], bool]:
    """The name of the base, the losses, and whether the base is the same when it is drawn again."""
    logging.getLogger("hetseq").addHandler(logging.NullHandler())
    config = options.complete(options.parse([*told, "--save-dir", save_dir]))
    material, recorder = load_material(config, torch.device("cpu"), Setting(Drawn, "adamw").task(config)), Recorder()
    job = RankJob(config, RunDirectory(Path(save_dir)), group, material, metrics=recorder)
    with build_session(job) as session:
        session.train()
        owned = session.controller.replica.owned
        is_same = True
        if owned is not None:
            before = {
                name: owned.fragments[name].owned.detach().clone() for name in owned.base & owned.fragments.keys()
            }
            for name in before:
                owned.fragments[name].owned.data.zero_()
            session.controller.replica.take_base(lambda: base_again(config, material))
            is_same = all(torch.equal(owned.fragments[name].owned, value) for name, value in before.items())
    return material.base, [row["loss"] for row in recorder.rows], is_same


def test_a_base_that_is_drawn_has_the_same_name_and_numbers_on_any_layout(tmp_path: Path) -> None:
    told = [*words(f"{WORDS} --delayed-init --balance 9,3")]
    whole = run_ranks(train_drawn, 2, prepared(tmp_path / "whole"), told)
    parts = run_ranks(train_drawn, 2, prepared(tmp_path / "parts"), [*told, *RESUMED["all 3:1"].split()])
    for name, losses, is_same in parts:
        assert name is not None
        assert name == whole[0][0]
        assert losses == pytest.approx(whole[0][1], rel=1e-12)
        assert is_same


def train_beside_the_host(group: Group, save_dir: str, told: list[str]) -> OwnedFacts:
    """With the CPU in the place of a GPU, whose memory may not hold the model."""
    with mock.patch.object(loaded_task, "_is_beside_host", return_value=True):
        return train_fine(group, save_dir, told, True)


def test_a_base_that_stays_on_the_host_until_it_is_divided_has_the_same_bits(alone: PlainCurve, tmp_path: Path) -> None:
    told = [*words(WORDS), *RESUMED["all 3:1"].split()]
    for facts in run_ranks(train_beside_the_host, 2, prepared(tmp_path), told):
        assert facts.losses == pytest.approx(alone.losses, rel=1e-12)
        for name, value in built().named_parameters():
            assert value.requires_grad or torch.equal(facts.frozen[name], value), name
