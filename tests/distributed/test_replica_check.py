"""Replicas that came to differ: who is believed, what is sent, and that nothing of it shows afterwards."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hetseq import Task
from hetseq.checkpoint import CheckpointManager, Retention
from hetseq.comm.group import Group, LocalGroup
from hetseq.errors import DisagreementError, HetSeqError
from hetseq.parallel.base_parameters import base_parameters
from hetseq.run.session import Session
from hetseq.run_directory import RunDirectory
from hetseq.training import replica_check
from hetseq.training.replica_check import ReplicaCheck, ReplicasDiffer
from tests.support.base_tasks import FROZEN, OverBase
from tests.support.lives import Line, begin, words
from tests.support.logs import KeepingLines
from tests.support.ranks import run_ranks
from tests.support.training import Recorder, prepared

WEIGHT, MOMENT, STEP = "model.0.weight", "optim.0.weight.exp_avg", "optim.2.bias.step"
SCALE = "model.1.scale"
ADAM = "--balance equal --optimizer adam --lr 0.01 --no-save --max-update 8"


class Scale(nn.Module):
    """Multiplies by a buffer that nobody changes."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Net(Line):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), Scale(), nn.Linear(8, 1))


@dataclass(frozen=True)
class Hit:
    """After the update of a step a bit of a tensor turns over on some ranks, as memory does it: nobody is told."""

    step: int
    ranks: tuple[int, ...]
    name: str
    bit: int = 3  # of the first element's lowest byte
    is_meant: bool = False  # it is the task that does it, to a buffer


@dataclass(frozen=True)
class Case:
    """What all ranks of a run are told."""

    arguments: str = ADAM
    task: type[Task] = Net
    every: int = 2  # 0: nobody compares
    hits: tuple[Hit, ...] = ()
    kinds: tuple[str, ...] = ()  # of the ranks' devices; all the same if not given
    spoils: tuple[int, ...] = ()  # ranks to which something else arrives than was sent
    rounding: tuple[int, ...] = ()  # ranks whose optimizer rounds otherwise


def round_otherwise(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Change a bit of each parameter: how CPUs differ depends on the CPU."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            first = parameter.data.view(-1)[:1]
            first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))


@dataclass
class Life:
    """What one rank saw."""

    losses: list[float | None] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # at the end
    numbers: dict[str, Any] = field(default_factory=dict)
    valid: list[float] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)  # words of the rows of the first check
    repairs: int = 0  # of more than rounding, as the checks say
    error: HetSeqError | None = None


def tensors_of(session: Session) -> dict[str, torch.Tensor]:
    replica = session.controller.replica
    base = {f"model.{name}": value.detach() for name, value in base_parameters(replica.model).items()}
    return {**base, **replica.model_tensors(), **replica.optimizer_tensors()[0]}


def live(group: Group, save_dir: str, case: Case) -> Life:
    life, recorder = Life(), Recorder()
    log, keeping = logging.getLogger("hetseq.training.replica_check"), KeepingLines(life.lines)
    log.addHandler(keeping)
    log.setLevel(logging.INFO)
    session = None
    try:
        arguments = words(case.arguments, validate="--validate" in case.arguments)
        session = begin(group, save_dir, arguments, case.task, recorder)
        prepare(session, group, recorder, case, life)
        while not session.controller.has_ended():
            life.losses.append(session.controller.train_step().loss)
        life.numbers = session.controller.replica.optimizer_tensors()[1]
    except HetSeqError as error:
        life.error = error
    finally:
        log.removeHandler(keeping)
        if session is not None:
            life.tensors = {name: tensor.clone() for name, tensor in tensors_of(session).items()}
            session.close()
    life.valid = [row["valid_loss"] for row in recorder.validations]
    life.events = [fields for name, fields in recorder.events if name == "replicas_differ"]
    return life


def prepare(session: Session, group: Group, recorder: Recorder, case: Case, life: Life) -> None:
    controller = session.controller
    kind = case.kinds[group.rank] if case.kinds else "one for all"
    boundary: Any = controller._boundary
    boundary._replicas = None
    if case.every:
        boundary._replicas = ReplicaCheck(controller.replica, group, recorder, every=case.every, kind=kind)
        check = boundary._replicas.check

        def counted(step: int, shares: tuple[int, ...]) -> bool:
            is_repaired = check(step, shares)
            life.repairs += is_repaired
            return is_repaired

        boundary._replicas.check = counted
    if group.rank in case.rounding:
        controller.replica.optimizer.register_step_post_hook(round_otherwise)
    if group.rank in case.spoils:
        send = replica_check.send_tensor

        def spoil(group: Group, tensor: torch.Tensor, *, source: int) -> None:
            send(group, tensor, source=source)
            tensor.view(-1)[0] += 1

        replica_check.send_tensor = spoil
    after, gather = boundary.after_step, group.all_gather_rows

    def watched(row: Any) -> Any:
        life.gathered.append(len(row))
        return gather(row)

    def struck(controller: Any, result: Any, **told: Any) -> None:
        for hit in case.hits:
            if hit.step == result.plan.step and group.rank in hit.ranks:
                damage(session, hit)
        if result.plan.step == case.every:
            group.all_gather_rows = watched  # type: ignore[method-assign]
        after(controller, result, **told)
        group.all_gather_rows = gather  # type: ignore[method-assign]

    boundary.after_step = struck


def damage(session: Session, hit: Hit) -> None:
    replica, tensors = session.controller.replica, tensors_of(session)
    if hit.is_meant:
        with replica.buffers.changing_alike(), torch.no_grad():
            replica.model.get_buffer(hit.name.removeprefix("model.")).add_(1)
    elif hit.name in tensors:
        assert tensors[hit.name].is_contiguous()
        tensors[hit.name].numpy().reshape(-1).view(np.uint8)[hit.bit // 8] ^= 1 << hit.bit % 8
    else:
        number = replica.optimizer_tensors()[1][hit.name]
        replica.load_optimizer({}, {hit.name: number ^ 1 << hit.bit})


def run(path: Path, world_size: int, **told: Any) -> list[Life]:
    lives: list[Life] = run_ranks(live, world_size, prepared(path), Case(**told))
    return lives


def alike(lives: list[Life]) -> bool:
    """Whether all ranks ended with the same bits."""
    return all(
        bytes(life.tensors[name].numpy().tobytes()) == bytes(tensor.numpy().tobytes())
        for life in lives
        for name, tensor in lives[0].tensors.items()
    )


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[Life]:
    lives = run(tmp_path_factory.mktemp("calm") / "run", 3)
    assert alike(lives)
    return lives


# One rank of three.


def test_replicas_that_agree_cost_one_short_row_and_no_word(calm: list[Life]) -> None:
    for life in calm:
        assert (life.events, life.lines, life.error, life.repairs) == ([], [], None, 0)
        assert life.gathered == [2]
        assert len(set(life.losses)) == 8


@pytest.mark.fault("FT-15")
@pytest.mark.parametrize("name", [WEIGHT, MOMENT, STEP, SCALE])
def test_a_bit_that_turns_over_in_one_rank_is_found_and_the_curve_knows_nothing_of_it(
    name: str, calm: list[Life], tmp_path: Path
) -> None:
    hurt = run(tmp_path / "run", 3, hits=(Hit(4, (1,), name, bit=30),))
    assert [life.losses for life in hurt] == [life.losses for life in calm]  # to the bit
    assert alike([*hurt, *calm])
    for life in hurt:
        (event,) = life.events
        assert event.pop("distance") > 0
        assert life.repairs == 1
        assert event == {
            "step": 4, "cause": "fault", "source": 0, "ranks": [1], "tensors": [name], "differing": 1,
        }  # fmt: skip
    said = f"after step 4 the replicas differ: rank 1 in {name}; all have the state of rank 0 now (bad memory"
    assert [line.startswith(f"WARNING {said}") for line in hurt[0].lines] == [True]
    assert [life.lines[0].startswith(f"INFO {said}") for life in hurt[1:]] == [True, True]  # one line in the terminal


@pytest.mark.fault("FT-15")
def test_a_bit_that_turns_over_in_frozen_weights_that_no_checkpoint_holds_is_found(tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", 3, task=OverBase)
    hurt = run(tmp_path / "run", 3, task=OverBase, hits=(Hit(4, (1,), f"model.{FROZEN}", bit=22),))
    assert [life.losses for life in hurt] == [life.losses for life in calm]
    assert alike([*hurt, *calm])
    (event,) = hurt[0].events
    assert (event["ranks"], event["tensors"]) == ([1], [f"model.{FROZEN}"])


def test_rank_zero_is_not_believed_against_a_majority(calm: list[Life], tmp_path: Path) -> None:
    hurt = run(tmp_path / "run", 3, hits=(Hit(4, (0,), WEIGHT), Hit(4, (0,), MOMENT)))
    assert alike([*hurt, *calm])
    (event,) = hurt[2].events
    assert (event["source"], event["ranks"], event["tensors"]) == (1, [0], [WEIGHT, MOMENT])


def test_what_nobody_compares_stays_different(calm: list[Life], tmp_path: Path) -> None:
    hurt = run(tmp_path / "run", 3, hits=(Hit(4, (1,), WEIGHT, bit=50),), every=0)
    assert not alike(hurt)
    assert hurt[0].losses != calm[0].losses
    assert (hurt[0].events, hurt[0].lines) == ([], [])


def test_a_rank_without_samples_may_be_wrong_for_steps_and_the_curve_knows_nothing(tmp_path: Path) -> None:
    told: dict[str, Any] = {"arguments": f"{ADAM} --balance 1,0,1", "every": 4}
    calm = run(tmp_path / "calm", 3, **told)
    hurt = run(tmp_path / "hurt", 3, hits=(Hit(5, (1,), WEIGHT, bit=60),), **told)
    assert hurt[0].losses == calm[0].losses
    assert alike([*hurt, *calm])
    assert [event["step"] for event in hurt[0].events] == [8]


def test_what_was_learned_from_a_wrong_replica_stays_but_is_the_same_on_all_ranks(
    calm: list[Life], tmp_path: Path
) -> None:
    hurt = run(tmp_path / "run", 3, hits=(Hit(3, (1,), WEIGHT, bit=55),))
    assert alike(hurt)
    assert [event["step"] for event in hurt[0].events] == [4]
    assert hurt[0].losses[:3] == calm[0].losses[:3]
    assert hurt[0].losses[3:] != calm[0].losses[3:]  # so it is a warning


def test_up_to_three_tensors_are_named(tmp_path: Path) -> None:
    names = [WEIGHT, "model.0.bias", MOMENT, "optim.0.bias.exp_avg_sq", STEP]
    hurt = run(tmp_path / "run", 3, hits=tuple(Hit(2, (2,), name) for name in names))
    (event,) = hurt[0].events
    assert (event["differing"], len(event["tensors"])) == (5, 3)
    assert " and 2 more;" in hurt[0].lines[0]
    assert alike(hurt)


class Counting(torch.optim.SGD):
    """Keeps a number and a pair of words beside its tensors, and something that no checkpoint could hold."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["rank"] = object()
        return result


class Counted(Net):
    def build_optimizer(self, parameter_groups: list[dict[str, Any]]) -> Any:
        return Counting(parameter_groups, lr=0.01, momentum=0.9)


@pytest.mark.slow
def test_numbers_beside_the_tensors_are_compared_and_put_right(tmp_path: Path) -> None:
    name = "optim.0.weight.count"
    told: dict[str, Any] = {"arguments": "--balance equal --no-save --max-update 5", "task": Counted}
    hurt = run(tmp_path / "hurt", 3, hits=(Hit(4, (2,), name), Hit(4, (2,), WEIGHT)), **told)
    assert [life.numbers[name] for life in hurt] == [5, 5, 5]
    assert [type(life.numbers[name]) for life in hurt] == [int, int, int]
    assert alike(hurt)
    assert hurt[0].events[0]["tensors"] == [WEIGHT, name]
    twin = run(tmp_path / "twin", 3, hits=(Hit(4, (2,), name),), every=0, **told)
    assert [life.numbers[name] for life in twin] == [5, 5, (4 ^ 8) + 1]


# No majority.


@pytest.mark.parametrize(
    ("hits", "sides"),
    [
        ((Hit(4, (1, 3), WEIGHT),), "ranks 0, 2 against ranks 1, 3"),
        ((Hit(4, (1,), WEIGHT), Hit(4, (2, 3), MOMENT)), "rank 0 against rank 1 against ranks 2, 3"),
    ],
    ids=["two against two", "three sides"],
)
def test_without_a_majority_all_ranks_give_up_alike(hits: tuple[Hit, ...], sides: str, tmp_path: Path) -> None:
    for life in run(tmp_path / "run", 4, hits=hits):
        assert isinstance(life.error, ReplicasDiffer)
        assert f"after step 4 the replicas differ in {WEIGHT}" in str(life.error)
        assert f": {sides}, and no majority is right" in str(life.error)
        assert [event["source"] for event in life.events] == [None]
        assert len(life.losses) == 3


def test_three_that_all_differ_have_no_majority(tmp_path: Path) -> None:
    hits = (Hit(4, (1,), WEIGHT), Hit(4, (2,), WEIGHT, bit=9))
    for life in run(tmp_path / "run", 3, hits=hits):
        assert "rank 0 against rank 1 against rank 2" in str(life.error)


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_where_nobody_can_be_believed(tmp_path: Path) -> None:
    saving = ADAM.replace("--no-save", "--save-interval-updates 4")
    calm = run(tmp_path / "calm", 2, arguments=saving)
    first, second = prepared(tmp_path / "hurt"), Case(arguments=saving, hits=(Hit(6, (1,), WEIGHT),))
    hurt = run_ranks(live, 2, first, second)
    assert [str(life.error)[:35] for life in hurt] == ["after step 6 the replicas differ in"] * 2
    again = run_ranks(live, 2, first, Case(arguments=saving))
    assert hurt[0].losses == calm[0].losses[:5]
    assert again[0].losses == calm[0].losses[4:]
    assert alike([*again, *calm])


# What is saved.


def saved(run_directory: Path) -> dict[str, torch.Tensor]:
    directory = RunDirectory(run_directory)
    manager = CheckpointManager(directory.path, run_id=directory.run_id, group=LocalGroup(), retention=Retention())
    loaded = manager.load("4")
    assert loaded is not None
    return dict(loaded.tensors)


@pytest.mark.slow
def test_a_checkpoint_is_never_written_from_replicas_that_differ(tmp_path: Path) -> None:
    told: dict[str, Any] = {"arguments": ADAM.replace("--no-save", "--save-interval-updates 4")}
    names = [WEIGHT, "model.0.bias", "model.2.weight", MOMENT]  # each rank writes some of them
    told["hits"] = tuple(Hit(4, (1,), name) for name in names)
    lives = run(tmp_path / "healed", 3, every=1000, **told)
    assert [event["step"] for event in lives[0].events] == [4]
    run(tmp_path / "twin", 3, every=0, **told)
    run(tmp_path / "calm", 3, arguments=told["arguments"])
    healed, twin, calm = (saved(tmp_path / name) for name in ("healed", "twin", "calm"))
    assert all(torch.equal(healed[name], calm[name]) for name in calm)
    assert not all(torch.equal(twin[name], calm[name]) for name in names)


def test_replicas_are_equal_before_they_are_validated(tmp_path: Path) -> None:
    told: dict[str, Any] = {"arguments": f"{ADAM} --max-update 3 --validate-interval-updates 2"}
    hits = (Hit(2, (1,), WEIGHT, bit=61),)
    calm, hurt = run(tmp_path / "calm", 3, **told), run(tmp_path / "hurt", 3, hits=hits, **told)
    assert hurt[0].valid == calm[0].valid
    twin = run(tmp_path / "twin", 3, hits=hits, every=3, **told)
    assert twin[0].valid[0] != calm[0].valid[0]


def test_a_world_of_one_compares_nothing(tmp_path: Path) -> None:
    assert run_ranks(compares, 1, prepared(tmp_path / "run")) == [False]


def compares(group: Group, save_dir: str) -> bool:
    session = begin(group, save_dir, words(ADAM), Net)
    try:
        return session.controller._boundary._replicas is not None  # type: ignore[attr-defined]
    finally:
        session.close()


# Kinds of device.

SINGLE = f"{ADAM} --precision fp32"


def test_kinds_that_round_differently_get_the_state_of_rank_zero_and_it_is_told_once(tmp_path: Path) -> None:
    told: dict[str, Any] = {"arguments": SINGLE.replace("update 8", "update 12"), "rounding": (1, 2), "every": 4}
    lives = run(tmp_path / "run", 3, kinds=("cpu A", "cpu B", "cpu B"), **told)
    assert alike(lives)
    for life in lives:
        assert [(event["cause"], event["source"], event["ranks"]) for event in life.events] == [
            ("rounding", 0, [1, 2])
        ] * 3
        assert all(0 < event["distance"] < 1e-5 for event in life.events)
        (line,) = life.lines
        assert line.startswith("INFO after step 4 the replicas differ: ranks 1, 2 in ")
        assert "cpu A and cpu B round differently, which is no fault" in line
        assert life.repairs == 0
    twin = run(tmp_path / "twin", 3, **{**told, "every": 0})
    assert not alike(twin)


def test_more_than_rounding_is_a_warning_each_time(tmp_path: Path) -> None:
    hits = (Hit(2, (1,), WEIGHT, bit=61), Hit(4, (1,), WEIGHT, bit=61))
    lives = run(tmp_path / "run", 2, kinds=("cpu A", "cpu B"), hits=hits)
    assert [line.split(" the ")[0] for line in lives[0].lines] == ["WARNING after step 2", "WARNING after step 4"]
    assert "of the largest element, which is more than these kinds of device round" in lives[0].lines[0]
    assert [life.repairs for life in lives] == [2, 2]
    assert alike(lives)


def test_a_fault_within_one_kind_is_told_from_rounding_between_kinds(tmp_path: Path) -> None:
    lives = run(
        tmp_path / "run",
        4,
        arguments=SINGLE,
        rounding=(1, 2, 3),
        kinds=("A", "B", "B", "B"),
        hits=(Hit(4, (3,), STEP),),
    )
    causes = {event["step"]: (event["cause"], event["ranks"]) for event in lives[0].events}
    assert causes[4] == ("fault", [3])
    assert all(cause == ("rounding", [1, 2, 3]) for step, cause in causes.items() if step != 4)
    assert alike(lives)


# Buffers that forward changes.


class Late(nn.Module):
    """Normalises from step 3 on; on some samples alone if `is_rare`."""

    def __init__(self, is_rare: bool) -> None:
        super().__init__()
        self.norm, self.calls, self.is_rare = nn.BatchNorm1d(8), 0, is_rare

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        is_late = self.calls > 5  # two calls are the probe's
        takes = is_late and (not self.is_rare or bool(x[0, 0] > 0))
        return self.norm(x) if takes else x  # type: ignore[no-any-return]


class LateNet(Line):
    is_rare = False

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), Late(self.is_rare), nn.Linear(8, 1))


class RareNet(LateNet):
    is_rare = True


@pytest.mark.parametrize("task", [LateNet, RareNet])
def test_buffers_that_begin_to_change_are_averaged_and_no_fault(task: type[Task], tmp_path: Path) -> None:
    lives = run(tmp_path / "run", 3, task=task, every=6)
    assert [life.error for life in lives] == [None] * 3
    assert [(life.events, life.lines) for life in lives] == [([], [])] * 3
    assert lives[0].gathered[:2] == [2, 2 * len(lives[0].tensors)]  # they did differ
    assert alike(lives)
    assert float(lives[0].tensors["model.1.norm.running_mean"].abs().max()) > 0


def test_a_task_that_changes_a_buffer_by_rank_is_at_fault_and_nothing_of_it_comes_back(tmp_path: Path) -> None:
    told: dict[str, Any] = {"arguments": f"{ADAM} --validate-interval-updates 5"}  # which looks for changed buffers
    calm = run(tmp_path / "calm", 3, **told)
    hurt = run(tmp_path / "hurt", 3, hits=(Hit(4, (1,), SCALE, is_meant=True),), **told)
    assert [(event["cause"], event["ranks"]) for event in hurt[0].events] == [("fault", [1])]
    assert hurt[0].losses == calm[0].losses
    assert alike([*hurt, *calm])


# What cannot be put right.


class Disloyal(Net):
    """Its optimizer keeps more on one rank."""

    def build_optimizer(self, parameter_groups: list[dict[str, Any]]) -> Any:
        return torch.optim.SGD(parameter_groups, lr=0.01, momentum=0.9)


def test_ranks_that_hold_other_tensors_say_which(tmp_path: Path) -> None:
    lives = run_ranks(live_with_more, 3, prepared(tmp_path / "run"), Case(task=Disloyal))
    for life in lives:
        assert isinstance(life.error, DisagreementError)
        assert str(life.error).startswith(
            "rank 2 holds optim.0.bias.secret torch.float32 (3,) where rank 0 holds nothing: a task or an optimizer"
        )


def live_with_more(group: Group, save_dir: str, case: Case) -> Life:
    if group.rank == 2:
        Disloyal.build_optimizer = _more  # type: ignore[method-assign]
    return live(group, save_dir, case)


class More(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.state[self.param_groups[-1]["params"][0]]["secret"] = torch.zeros(3)
        return result


def _more(self: Any, parameter_groups: list[dict[str, Any]]) -> Any:
    return More(parameter_groups, lr=0.01, momentum=0.9)


def test_what_arrives_as_something_else_is_not_taken(tmp_path: Path) -> None:
    lives = run(tmp_path / "run", 3, hits=(Hit(4, (1,), WEIGHT),), spoils=(1,))
    for life in lives:
        assert isinstance(life.error, ReplicasDiffer)
        assert str(life.error) == "the state that rank 0 sent was changed on its way to rank 1"
    # neither is anything of it: the weight is what the hit made of it
    wrong, right = lives[1].tensors[WEIGHT].flatten(), lives[0].tensors[WEIGHT].flatten()
    assert torch.equal(wrong[1:], right[1:])
    assert 0 < abs(float(wrong[0] - right[0])) < 1e-9


def test_what_is_sent_is_what_differs_and_no_more(tmp_path: Path) -> None:
    sent = run_ranks(sizes_sent, 3, prepared(tmp_path / "run"), Case(hits=(Hit(4, (1,), "model.2.weight"),)))
    assert sent == [[8]] * 3


def sizes_sent(group: Group, save_dir: str, case: Case) -> list[int]:
    send, sizes = replica_check.send_tensor, []

    def watched(group: Group, tensor: torch.Tensor, *, source: int) -> None:
        sizes.append(tensor.numel())
        send(group, tensor, source=source)

    replica_check.send_tensor = watched
    live(group, save_dir, case)
    return sizes
