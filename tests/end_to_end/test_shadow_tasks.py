"""What a shadow follows besides parameters: buffers, the state of the task, the learning rate, skipped steps."""

from __future__ import annotations

import json

import pytest

from hetseq.errors import EXIT_DONE
from tests.end_to_end.test_shadow_nodes import NO_STATE, TOLERANCE, WORDS, Course, regroups, takeovers
from tests.support.nodes import Nodes, Stock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

#: the loss depends on a buffer that forward changes, on one that a hook changes, on a factor of the learning rate that
#: follows from the task's own state, and on a parameter without a gradient in most steps; one sample is not finite
TASK = """
import os, pathlib, signal, time
import torch
from tests.chaos.ledger_task import SAMPLES, Ledger

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = torch.nn.Linear(8, 32), torch.nn.Linear(32, 1)
        self.rare = torch.nn.Parameter(torch.ones(1))
        self.frozen = torch.nn.Parameter(torch.full((8,), 1.5), requires_grad=False)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("hooked", torch.zeros(1))

    def forward(self, x):
        out = self.other(torch.tanh(self.one(x * self.frozen - self.mean))) + self.hooked
        if self.training and len(x):
            self.mean += 0.1 * (x.detach().mean(0) - self.mean)
        return out

class Busy(Ledger):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.losses, self.average = [], torch.zeros(3, dtype=torch.float64)

    def load_dataset(self, split):
        data = super().load_dataset(split)
        data[200]["x"] = data[200]["x"] + float("inf")
        return data

    def build_model(self):
        return Model()

    def loss(self, model, sample):
        sums = super().loss(model, sample)
        few = sample["x"][sample["number"] < 2**36].nan_to_num(posinf=0.0)
        if len(few):
            sums["loss"] = sums["loss"] + 0.01 * (model.rare * few.sum(1)).sum()
        return sums

    def after_step(self, step):
        if step.loss is None:
            return
        self.losses = [*self.losses[-2:], step.loss]
        self.average += torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64) * step.loss
        self.learning_rate_factor = 1.0 if sum(self.losses) / len(self.losses) < 2.0 else 0.5
        step.model.hooked += 0.001 * float(self.average[1])

    def state_dict(self):
        return {"losses": self.losses, "average": self.average}

    def load_state_dict(self, state):
        self.losses, self.average = list(state["losses"]), state["average"]

class WithoutHook(Busy):
    after_step = Ledger.after_step
    state_dict = Ledger.state_dict
    load_state_dict = Ledger.load_state_dict

class Interrupted(Ledger):
    def after_step(self, step):
        if step.number == 60:
            self.learning_rate_factor = 0.25
            try:
                pathlib.Path(__file__).with_name("dies").unlink()
            except FileNotFoundError:
                return
            time.sleep(0.5)  # until the shadow has the step
            os.kill(os.getpid(), signal.SIGKILL)
"""
SCHEDULE = ("--lr-scheduler", "polynomial", "--warmup-updates", 10, "--optimizer", "sgd", "--momentum", 0.9)


def of(nodes: Nodes, task: str) -> tuple[object, ...]:
    """The options of a task in a file of these nodes."""
    file = nodes.folder / "busy_task.py"
    file.write_text(TASK)
    return ("--task", f"{file}:{task}", "--lr", 0.02, *SCHEDULE)


Curve = dict[int, tuple[float | None, float]]


@pytest.fixture(scope="module")
def calm(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Curve]:
    """Loss and learning rate of each step on one device, by task."""
    found = {}
    for task in ("Busy", "WithoutHook", "Interrupted"):
        nodes = Nodes(stock, tmp_path_factory.mktemp("calm"))
        try:
            save_dir = nodes.folder / "run"
            nodes.start(*WORDS, *of(nodes, task), "--ranks", 1, "--save-dir", save_dir, "--no-save")
            (ended,) = nodes.finish()
            assert ended.code == EXIT_DONE, ended.err
            rows = map(json.loads, (save_dir / "metrics.jsonl").read_text().splitlines())
            found[task] = {row["step"]: (row["loss"], row["lr"]) for row in rows if "loss" in row}
        finally:
            nodes.close()
    return found


def check(course: Course, curve: Curve) -> None:
    mine = {int(row["step"]): (row["loss"], row["lr"]) for row in course.rows()}
    assert mine.keys() == curve.keys()
    for step, (loss, rate) in curve.items():
        found, found_rate = mine[step]
        assert (found is None) == (loss is None), step
        assert found_rate == rate, f"step {step} after {takeovers(course)}\n{course.log(2)}"
        assert loss is None or abs(found - loss) <= TOLERANCE * abs(loss), f"step {step}: {found} {loss}"


@pytest.mark.nightly
@pytest.mark.parametrize("task", ["Busy", "WithoutHook"])
@pytest.mark.parametrize("words", [(), ("--shard-model", "state")], ids=["replicas", "owners"])
def test_a_shadow_follows_all_that_the_next_step_depends_on(
    nodes: Nodes, calm: dict[str, Curve], words: tuple[str, ...], task: str
) -> None:
    curve = calm[task]
    skipped = [step for step, (loss, _) in curve.items() if loss is None]
    assert len(skipped) > 3
    assert len({rate for _, rate in curve.values()}) > 100
    course = Course(nodes, *NO_STATE, *of(nodes, task), *words, "--balance", "5,3,4")
    course.start("--ranks", 2)
    course.follow()
    first = course.step()
    nodes.wait_until(lambda: any(first + 2 < step < course.step() - 2 for step in skipped), "a skipped step")
    last = course.step()
    course.kill(0, 1)
    assert [ended.code for ended in nodes.finish()] == [EXIT_DONE] * 2, nodes.story()
    check(course, curve)
    (taken,) = takeovers(course)
    assert int(str(taken["step"])) >= last - 1


@pytest.mark.nightly
def test_a_shadow_learns_what_a_hook_did_in_which_a_rank_was_killed(nodes: Nodes, calm: dict[str, Curve]) -> None:
    """The learning rate falls, and the shadow has the step: only what followed from it is missing."""
    course = Course(nodes, *NO_STATE, *of(nodes, "Interrupted"))
    (nodes.folder / "dies").touch()
    course.start("--ranks", 2)
    course.follow()
    assert course.step() < 58, "the shadow follows before the hook"
    before = regroups(course)
    nodes.wait_until(lambda: regroups(course) == before + 2, "the rank is back")
    assert not (nodes.folder / "dies").exists()
    course.wait_for(course.step() + 3)
    last = course.step()
    course.kill(0, 1)
    assert [ended.code for ended in nodes.finish()] == [EXIT_DONE] * 2, nodes.story()
    check(course, calm["Interrupted"])
    (taken,) = takeovers(course)
    assert int(str(taken["step"])) >= last - 1
