"""A shadow follows a run without computing; if all computing ranks are killed, it continues the run."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from hetseq.errors import EXIT_DONE, EXIT_STOPPED, EXIT_USAGE
from hetseq.monitor.lookout import Lookout
from hetseq.monitor.run_view import view
from hetseq.testing import Faults
from tests.support.nightly import nightly
from tests.support.nodes import Node, Nodes, Stock
from tests.support.places import tcp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TASK = Path(__file__).parents[1] / "chaos" / "ledger_task.py"
STEPS, TOLERANCE = 120, 1e-11
WORDS = shlex.split(
    f"--cpu --task {TASK}:Ledger --global-batch-size 24 --lr 0.003 --lr-scheduler constant --optimizer adamw"
    f" --weight-decay 0.01 --clip-norm 1 --precision fp64 --disable-validation --no-progress-bar --num-workers 0"
    f" --max-update {STEPS}"
)
SHARDED = ("--shard-model", "state", "--own", "2,1", "--bucket-cap-mb", "0.0001")
LAYERED = ("--shard-model", "all", "--own", "2,1", "--shard-modules", "0,2")
OF_STATE, OF_LAYERS = (*SHARDED[:2], *SHARDED[4:]), (*LAYERED[:2], *LAYERED[4:])
IN_GROUPS = ("--shard-groups", "2+1", "--own", "2,1,1", "--throttle", "0:30,1:30,2:30")


UNITS = 16_000
GRADIENT_BYTES = 8 * (10 * UNITS + 1)
WIDE = f"""
import torch
from tests.chaos.ledger_task import Ledger

class Wide(Ledger):
    def build_model(self):
        return torch.nn.Sequential(torch.nn.Linear(8, {UNITS}), torch.nn.Tanh(), torch.nn.Linear({UNITS}, 1))
"""
OVER_BASE = """
import torch
from tests.chaos.ledger_task import Ledger

class OverBase(Ledger):
    def build_model(self):
        layers = [torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Linear(32, 1)]
        model = torch.nn.Sequential(*layers)
        model[2].double().requires_grad_(False)
        model.register_state_dict_post_hook(leave_out)
        return model

def leave_out(model, state, prefix, _):
    state.pop(prefix + "2.weight")
"""
SLOWLY = ("--throttle", "0:30,1:30")  # so that other processes start while these two ranks train
NO_STATE = ("--no-save", "--memory-interval-updates", 0)  # a state that no process has is lost


class Course:
    """The nodes of one run, which share a run directory; the shadow has the slot behind the `ranks`."""

    def __init__(self, nodes: Nodes, *words: object, place: str | None = None, ranks: int = 2) -> None:
        self.slot = ranks
        self.nodes, self.save_dir = nodes, nodes.folder / "run"
        meeting = ["--join", place or tcp().url, "--min-ranks", 1]
        self.words = [*WORDS, *SLOWLY, *words, *meeting, "--save-dir", self.save_dir]

    def start(self, *words: object, cold: bool = False, environment: dict[str, str] | None = None) -> Node:
        return self.nodes.start(*self.words, *words, cold=cold, environment=environment)

    def follow(self, *words: object, environment: dict[str, str] | None = None) -> Node:
        """Start a shadow, once the ranks train; it has the state then."""
        self.wait_for(3)
        shadow = self.start("--shadow", *words, environment=environment)
        self.nodes.wait_until(lambda: self.states() > 0, "the shadow has the state")
        return shadow

    def states(self) -> int:
        """How often the shadow has got the whole state."""
        return self.log(self.slot).count("got the state after step")

    def shadow(self) -> int:
        """The process that follows."""
        return int(re.findall(r"process (\d+) follows", self.log(self.slot))[-1])

    def rows(self) -> list[dict[str, float]]:
        try:
            lines = (self.save_dir / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        rows = []
        with suppress(ValueError):  # a line that is being written
            rows.extend(row for row in map(json.loads, lines) if "loss" in row)
        return rows

    def step(self) -> int:
        return max((int(row["step"]) for row in self.rows()), default=0)

    def wait_for(self, step: int) -> None:
        self.nodes.wait_until(lambda: self.step() >= step, f"step {step}")

    def log(self, slot: int) -> str:
        path = self.save_dir / "log" / f"rank-{slot}.txt"
        return path.read_text() if path.exists() else ""

    def pids(self, *slots: int) -> list[int]:
        return [json.loads((self.save_dir / "status" / f"rank-{slot}.json").read_text())["pid"] for slot in slots]

    def ranks(self) -> list[int]:
        """The ranks that train, by the newest change of them."""
        changes = [event for event in self.events() if event["event"] == "generation"]
        return list(changes[-1]["ranks"]) if changes else []  # type: ignore[call-overload]

    def kill(self, *slots: int) -> None:
        for pid in self.pids(*slots):
            os.kill(pid, signal.SIGKILL)

    def events(self) -> list[dict[str, object]]:
        lines = (self.save_dir / "events.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written


@pytest.fixture(scope="module")
def calm(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The curve of one device."""
    nodes = Nodes(stock, tmp_path_factory.mktemp("calm"))
    try:
        save_dir = nodes.folder / "run"
        nodes.start(*WORDS, "--ranks", 1, "--save-dir", save_dir, "--no-save")
        (ended,) = nodes.finish()
        assert ended.code == EXIT_DONE, ended.err
        rows = map(json.loads, (save_dir / "metrics.jsonl").read_text().splitlines())
        return {row["step"]: row["loss"] for row in rows if "loss" in row}
    finally:
        nodes.close()


def check_curve(course: Course, calm: dict[int, float]) -> None:
    mine = {int(row["step"]): row["loss"] for row in course.rows()}
    assert mine.keys() == calm.keys()
    wrong = [step for step in calm if abs(mine[step] - calm[step]) > TOLERANCE * abs(calm[step])]
    assert not wrong, f"{wrong[:5]}\n{course.nodes.story()}\n{course.log(course.slot)}"
    worst = max(abs(mine[step] - calm[step]) / abs(calm[step]) for step in calm)
    assert worst <= TOLERANCE, f"{worst:.1e}"


def takeovers(course: Course) -> list[dict[str, object]]:
    return [event for event in course.events() if "takes over" in str(event.get("story"))]


def check_nothing_lost(course: Course, taken: dict[str, object]) -> None:
    """No step is made again whose row was written before the kill."""
    written = [int(row["step"]) for row in course.rows() if row["generation"] < int(str(taken["generation"]))]
    assert max(written) <= int(str(taken["step"])), f"{taken} {written[-3:]}\n{course.log(course.slot)}"


def regroups(course: Course) -> int:
    return sum(event["event"] == "generation" for event in course.events())


@pytest.mark.parametrize("words", [(), *nightly(SHARDED), LAYERED], ids=["replicas", "owners", "layers"])
def test_when_all_ranks_are_killed_the_run_goes_on_from_the_shadow(
    nodes: Nodes, calm: dict[int, float], words: tuple[str, ...]
) -> None:
    course = Course(nodes, *NO_STATE, *words)
    course.start("--ranks", 2)
    course.follow()
    course.wait_for(course.step() + 10)
    course.kill(0, 1)
    assert [ended.code for ended in nodes.finish()] == [EXIT_DONE] * 2, nodes.story()
    check_curve(course, calm)
    (taken,) = takeovers(course)
    check_nothing_lost(course, taken)
    assert "lost" not in taken


@pytest.mark.parametrize(
    ("words", "victim"), [(SHARDED, 0), *nightly((SHARDED, 1), (LAYERED, 0), (LAYERED, 1), is_many=True)]
)
def test_an_owner_that_is_killed_costs_nothing_while_a_shadow_follows(
    nodes: Nodes, calm: dict[int, float], words: tuple[str, ...], victim: int
) -> None:
    course = Course(nodes, *NO_STATE, *words)
    course.start("--ranks", 2)
    course.follow()
    course.wait_for(course.step() + 10)
    course.kill(victim)
    assert [ended.code for ended in nodes.finish()] == [EXIT_DONE] * 2, nodes.story()
    check_curve(course, calm)
    (taken,) = takeovers(course)
    check_nothing_lost(course, taken)


@pytest.mark.parametrize(
    ("kind", "victims"),
    [(OF_STATE, (0, 2)), *nightly((OF_LAYERS, (0, 1, 2)), (OF_STATE, (0, 1, 2)), (OF_LAYERS, (1, 2)), is_many=True)],
)
def test_beside_groups_a_shadow_takes_over_when_no_group_is_whole(
    nodes: Nodes, calm: dict[int, float], kind: tuple[str, ...], victims: tuple[int, ...]
) -> None:
    course = Course(nodes, *NO_STATE, *kind, *IN_GROUPS, ranks=3)
    course.start("--ranks", 3)
    course.follow()
    before = regroups(course)
    course.kill(1)
    nodes.wait_until(lambda: regroups(course) > before and course.ranks() == [0, 1, 2], "rank 1 is back")
    assert not takeovers(course), "the other group was whole"
    course.wait_for(course.step() + 5)
    course.kill(*victims)
    assert [ended.code for ended in nodes.finish()] == [EXIT_DONE] * 2, nodes.story()
    check_curve(course, calm)
    (taken,) = takeovers(course)
    check_nothing_lost(course, taken)
    assert "lost" not in taken


@pytest.mark.nightly
def test_so_it_is_with_an_owner_of_frozen_weights(nodes: Nodes) -> None:
    task = nodes.folder / "over_base_task.py"
    task.write_text(OVER_BASE)
    words = ("--task", f"{task}:OverBase")
    nodes.start(*WORDS, *words, "--ranks", 1, "--save-dir", nodes.folder / "calm", "--no-save")
    (ended,) = nodes.finish()
    assert ended.code == EXIT_DONE, ended.err
    rows = map(json.loads, (nodes.folder / "calm" / "metrics.jsonl").read_text().splitlines())
    calm = {row["step"]: row["loss"] for row in rows if "loss" in row}
    course = Course(nodes, *NO_STATE, *LAYERED[:-1], "0,2,3", *words)
    both = course.start("--ranks", 2)
    shadow = course.follow()
    course.wait_for(course.step() + 10)
    course.kill(0)
    assert [ended.code for ended in nodes.finish(both, shadow)] == [EXIT_DONE] * 2, nodes.story()
    check_curve(course, calm)
    (taken,) = takeovers(course)
    check_nothing_lost(course, taken)


def test_a_rank_that_is_killed_leaves_the_shadow_a_shadow(nodes: Nodes, calm: dict[int, float]) -> None:
    course = Course(nodes, *NO_STATE)
    course.start("--ranks", 2)
    course.follow()
    course.wait_for(course.step() + 3)
    course.kill(1)
    assert [ended.code for ended in nodes.finish()] == [EXIT_DONE] * 2, nodes.story()
    check_curve(course, calm)
    assert not takeovers(course)
    assert {tuple(row["slots"]) if "slots" in row else (0, 1) for row in course.rows()} <= {(0, 1), (0,)}


@pytest.mark.nightly
def test_the_ranks_wait_for_a_stopped_shadow_in_no_phase(nodes: Nodes, calm: dict[int, float]) -> None:
    course = Course(nodes, *NO_STATE)
    course.start("--ranks", 2)
    course.follow()
    pid = course.shadow()
    before = regroups(course)
    os.kill(pid, signal.SIGSTOP)
    try:
        first = course.step()
        course.wait_for(first + 25)
        assert regroups(course) == before, nodes.story()  # nothing has happened
        course.kill(1)  # and a regroup does not wait for it either
        course.wait_for(course.step() + 10)
        nodes.wait_until(lambda: regroups(course) >= before + 2, "rank 1 is back")
    finally:
        os.kill(pid, signal.SIGCONT)
    asked = course.states()
    nodes.wait_until(lambda: course.states() > asked, "the shadow has the state again")
    assert course.shadow() == pid, "in the same process"
    course.wait_for(course.step() + 3)
    course.kill(0, 1)
    assert [ended.code for ended in nodes.finish()] == [EXIT_DONE] * 2, nodes.story()
    check_curve(course, calm)
    (taken,) = takeovers(course)
    check_nothing_lost(course, taken)


def test_the_death_of_a_shadow_costs_the_ranks_nothing(nodes: Nodes, calm: dict[int, float]) -> None:
    course = Course(nodes, *NO_STATE)
    course.start("--ranks", 2)
    course.follow()
    before, states = regroups(course), course.states()
    os.kill(course.shadow(), signal.SIGKILL)
    nodes.wait_until(lambda: course.states() > states, "its replacement has the state")
    assert regroups(course) == before + 1  # for the replacement
    course.wait_for(course.step() + 3)
    course.kill(0, 1)
    assert [ended.code for ended in nodes.finish()] == [EXIT_DONE] * 2, nodes.story()
    check_curve(course, calm)
    assert len(takeovers(course)) == 1


PHASES = ["loading", "join", "follow_state", "follow", "optimizer"]


@pytest.mark.nightly
def test_a_shadow_may_die_in_each_phase(nodes: Nodes, calm: dict[int, float]) -> None:
    course, faults = Course(nodes, *NO_STATE), Faults()
    for incarnation, phase in enumerate(PHASES):
        faults = faults.kill(rank=2).at(phase=phase, incarnation=incarnation)
    course.start("--ranks", 2)
    diary = nodes.folder / "diary"
    course.follow("--max-restarts", 10, environment={"HETSEQ_FAULTS": faults.diary(diary).text()})
    nodes.wait_until(lambda: course.states() == 3, "the last one has the state")
    kills = [json.loads(line) for line in diary.read_text().splitlines()]
    assert [kill["phase"] for kill in kills] == PHASES
    course.wait_for(course.step() + 3)
    course.kill(0, 1)
    assert [ended.code for ended in nodes.finish()] == [EXIT_DONE] * 2, nodes.story()
    check_curve(course, calm)
    assert len(takeovers(course)) == 1


@pytest.mark.nightly
def test_two_shadows_one_after_the_other(nodes: Nodes, calm: dict[int, float]) -> None:
    course = Course(nodes, *NO_STATE, "--max-restarts", 0)
    course.start("--ranks", 2)
    course.follow("--throttle", "2:30")
    course.start("--shadow", "--throttle", "3:30")
    nodes.wait_until(lambda: "got the state after step" in course.log(3), "the second shadow has the state")
    course.wait_for(course.step() + 3)
    course.kill(0, 1)
    nodes.wait_until(lambda: len(takeovers(course)) == 1, "a shadow has taken over")
    (first,) = takeovers(course)[0]["ranks"]  # the one that was further, or the one that came first
    nodes.wait_until(lambda: "follows 1 ranks" in course.log({2: 3, 3: 2}[first]), "the other one follows it")
    course.wait_for(course.step() + 10)
    course.kill(first)
    codes = [ended.code for ended in nodes.finish()]
    assert codes == [EXIT_DONE] * 3, nodes.story()
    check_curve(course, calm)
    assert len(takeovers(course)) == 2


@pytest.mark.parametrize("words", nightly(SHARDED[:4], ()), ids=["owners", "replicas"])
def test_a_step_brings_the_shadow_the_bytes_of_its_gradient(nodes: Nodes, words: tuple[str, ...]) -> None:
    task = nodes.folder / "wide_task.py"
    task.write_text(WIDE)
    course = Course(nodes, *NO_STATE, *words, "--task", f"{task}:Wide", "--max-update", 60)
    course.start("--ranks", 2)
    course.follow()
    assert [ended.code for ended in nodes.finish()] == [EXIT_DONE] * 2, nodes.story()
    sent = [re.findall(r"sent the shadow 2.0 (\d+) steps in (\d+) bytes", course.log(rank))[-1] for rank in (0, 1)]
    assert min(int(steps) for steps, _ in sent) > 10
    more = sum(int(size) / int(steps) for steps, size in sent) / GRADIENT_BYTES - 1
    print(f"{sent}: {more:.2%} more than the gradient")
    assert 0 <= more <= 0.01


@pytest.mark.nightly
def test_a_shadow_that_is_asked_to_leave_leaves_alone(nodes: Nodes) -> None:
    course = Course(nodes, *NO_STATE)
    ranks = course.start("--ranks", 2)
    shadow = course.follow()
    before = regroups(course)
    shadow.signal(signal.SIGTERM)
    (ended,) = nodes.finish(shadow)
    assert ended.code == EXIT_STOPPED, nodes.story()
    assert "a shadow has left; the others continue" in ended.err
    assert ranks.poll() is None
    nodes.finish(ranks)
    assert ranks.code == EXIT_DONE, nodes.story()
    assert regroups(course) == before


def test_a_shadow_that_is_the_first_node_is_refused(nodes: Nodes) -> None:
    course = Course(nodes, *NO_STATE)
    course.start("--shadow")
    (ended,) = nodes.finish()
    assert ended.code == EXIT_USAGE, nodes.story()
    assert "is the first node, and --shadow follows the others" in ended.message


@pytest.mark.nightly
def test_a_shadow_that_comes_before_the_ranks_have_begun_follows_them(nodes: Nodes, calm: dict[int, float]) -> None:
    course = Course(nodes, *NO_STATE)
    head = course.start("--ranks", 2, "--min-ranks", 3)
    nodes.wait_until_said(head, "1 missing")
    shadow = course.start("--shadow", "--min-ranks", 3)
    nodes.wait_until_said(shadow, "joins once they train")
    other = course.start("--ranks", 1, "--min-ranks", 3, "--throttle", "2:30")
    nodes.wait_until(lambda: "got the state after step" in course.log(3), "the shadow has the state")
    assert [ended.code for ended in nodes.finish(head, other, shadow)] == [EXIT_DONE] * 3, nodes.story()
    check_curve(course, calm)


def top(course: Course) -> str:
    """What `hetseq top` shows of the run."""
    look = Lookout(course.save_dir)
    return "\n".join(view(course.save_dir, look.signs(), look, width=200).lines)


@pytest.mark.nightly
def test_a_shadow_that_has_missed_steps_gets_the_state_again(nodes: Nodes) -> None:
    """More than the kernels keep for it, so that the ranks have to drop steps."""
    task = nodes.folder / "wide_task.py"
    task.write_text(WIDE)
    course = Course(nodes, *NO_STATE, "--task", f"{task}:Wide", "--max-update", 90)
    course.start("--ranks", 2)
    course.follow()
    pid, before = course.shadow(), regroups(course)
    nodes.wait_until(lambda: "(log/rank-2.txt) follows, and was sent step" in top(course), "it follows by hetseq top")
    os.kill(pid, signal.SIGSTOP)
    try:
        course.wait_for(course.step() + 30)
        nodes.wait_until(lambda: "(log/rank-2.txt) lacks the state" in top(course), "it lacks it by hetseq top")
    finally:
        os.kill(pid, signal.SIGCONT)
    nodes.wait_until(lambda: course.states() == 2, "the shadow has the state again")
    assert (course.shadow(), regroups(course)) == (pid, before), nodes.story()
    course.wait_for(course.step() + 5)
    course.kill(0, 1)
    assert [ended.code for ended in nodes.finish()] == [EXIT_DONE] * 2, nodes.story()
    assert len(takeovers(course)) == 1
    alone = nodes.folder / "alone"
    nodes.start(*WORDS, "--task", f"{task}:Wide", "--max-update", 90, "--ranks", 1, "--save-dir", alone, "--no-save")
    nodes.finish()
    rows = map(json.loads, (alone / "metrics.jsonl").read_text().splitlines())
    check_curve(course, {row["step"]: row["loss"] for row in rows if "loss" in row})


FROZEN = """
import torch
from tests.chaos.ledger_task import Ledger

class Model(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        self.frozen = torch.nn.Parameter(torch.zeros(32 << 20), requires_grad=False)

class Frozen(Ledger):
    def build_model(self):
        return Model()
"""


@pytest.mark.nightly
def test_a_large_frozen_model_does_not_keep_the_shadow_from_following(nodes: Nodes) -> None:
    """256 MB that all have, and steps that take no longer than a few of them over the network."""
    task = nodes.folder / "frozen_task.py"
    task.write_text(FROZEN)
    course = Course(nodes, *NO_STATE, "--task", f"{task}:Frozen", "--throttle", "0:5,1:5", "--max-update", 400)
    course.start("--ranks", 2)
    course.follow()
    assert [ended.code for ended in nodes.finish()] == [EXIT_DONE] * 2, nodes.story()
    assert course.states() <= 5, course.log(2)  # one, unless the machine is busy; 18 with the frozen part each time
