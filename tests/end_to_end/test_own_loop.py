"""A script with a training loop of its own: equal to plain PyTorch, on any ranks, and through lost ones."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetseq.data.plan import epoch_order
from hetseq.testing import Faults
from tests.support import forked
from tests.support.commands import HETSEQ, ROOT, run_command, start_command
from tests.support.nightly import nightly
from tests.support.own_loops import LINES, Course, course_of_one, courses, farthest, run_lines, run_script
from tests.support.trials import until

pytestmark = pytest.mark.slow

THREE = ("--cpu", "--ranks", 3, "--balance", "5,2,1")
STEPS = 16


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    forked.warm_up()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Course:
    return course_of_one(tmp_path_factory.mktemp("alone"), STEPS)


def plain() -> list[tuple[float, float]]:
    """Loss and gradient norm of the same training in plain PyTorch: the mean over the whole batch."""
    sys.argv = ["", "."]
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(150, 6, generator=draw)
    y = x.square().sum(1) + torch.randn(150, generator=draw)
    counts = torch.rand(150, generator=draw) < 0.7
    x, y = x.double(), y.double()
    model = first_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 4) * 0.9**k)
    rows = []
    for epoch in range(1, 5):
        order = epoch_order(150, seed=5, epoch=epoch, shuffle=True, block=None).take(0, 150)
        for start in range(0, 150, 40):
            batch = torch.from_numpy(order[start : start + 40])
            squares = (model(x[batch])[:, 0] - y[batch]) ** 2
            loss = squares[counts[batch]].mean()
            optimizer.zero_grad()
            loss.backward()
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            norm = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
            for gradient in gradients:
                gradient.mul_(min(1.0, 1.0 / norm))
            optimizer.step()
            scheduler.step()
            rows.append((float(loss.detach()), norm))
    return rows[:STEPS]


def first_model() -> nn.Module:
    """The network as the script draws it, after `hetseq.start(seed=5)`."""
    from hetseq.data.fetch import seed_everything

    seed_everything(5)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1)).double()


def test_it_is_plain_pytorch_to_the_last_digits(alone: Course) -> None:
    ours = [(row["loss"], row["grad_norm"]) for row in alone.values()]
    for (loss, norm), (other, other_norm) in zip(ours, plain(), strict=True):
        assert abs(loss - other) <= 1e-14 * abs(other)
        assert abs(norm - other_norm) <= 1e-14 * other_norm


@pytest.mark.parametrize("options", [THREE, ("--cpu", "--ranks", 2, "--throttle", "1:3")], ids=["5:2:1", "measured"])
def test_unequal_ranks_give_the_course_of_one(options: tuple[Any, ...], alone: Course, tmp_path: Path) -> None:
    finished = run_lines(tmp_path, *options)
    assert finished.code == 0, finished.err
    found = courses(tmp_path)
    assert len(found) == int(options[2])
    assert all(len(course) == STEPS and farthest(alone, course) <= 1e-12 for course in found)


def check_survived(finished: Any, folder: Path, alone: Course) -> None:
    """A rank was lost and replaced, and nobody can see it in the result."""
    assert finished.code == 0, finished.err
    assert re.search(r"ranks? continues? after step", finished.err), "a rank was lost"
    found = courses(folder)
    assert sum(len(course) == STEPS for course in found) >= 1
    assert max(max(course) for course in found) == STEPS
    assert all(farthest(alone, course) <= 1e-12 for course in found)


@pytest.mark.parametrize(
    "event",
    ["kill:body:1:6", "kill:after:0:7", "kill:evaluate:1:8",
     *nightly("kill:body:0:6", "kill:after:2:7", "kill:evaluate:0:8", "kill:evaluate:2:8")],
)  # fmt: skip
def test_a_rank_that_is_killed_in_the_code_of_the_script_changes_nothing(
    event: str, alone: Course, tmp_path: Path
) -> None:
    check_survived(run_lines(tmp_path, *THREE, event=event), tmp_path, alone)


ONE = Faults()


@pytest.mark.parametrize(
    "faults",
    [ONE.kill(rank=0).at(step=6, phase="commit"), ONE.kill(rank=1).at(step=8, phase="boundary"),
     *nightly(*(ONE.kill(rank=rank).at(step=7, phase=phase) for rank in (0, 2)
                for phase in ("reduce", "commit", "optimizer", "boundary")),
              ONE.kill(rank=2).at(step=5, phase="reduce").kill(rank=0).at(step=9, phase="optimizer"),
              ONE.stop(rank=1, seconds=8).at(step=6, phase="reduce"))],
    ids=str,
)  # fmt: skip
def test_a_rank_that_is_killed_in_a_step_changes_nothing(faults: Faults, alone: Course, tmp_path: Path) -> None:
    finished = run_lines(tmp_path, *THREE, "--step-deadline", 5, env=faults.environment())
    check_survived(finished, tmp_path, alone)


def test_a_run_whose_launcher_was_killed_resumes_on_another_world_and_ends_once(alone: Course, tmp_path: Path) -> None:
    words = ["--precision", "fp64", "--save-dir", tmp_path / "run", "--save-interval-updates", 3, LINES, tmp_path]
    with start_command(["run", "--cpu", "--ranks", "3", *map(str, words)], program=HETSEQ) as command:
        rows = tmp_path / "run" / "metrics.jsonl"
        until(lambda: rows.exists() and rows.read_text().count("\n") >= 7, "seven steps")
        os.killpg(command.pid, signal.SIGKILL)
        command.wait()
    first = courses(tmp_path)
    finished = run_script(["--cpu", "--ranks", 2, "--balance", "3,1", *words])
    assert finished.code == 0, finished.err
    assert "resuming after step" in finished.err
    found = courses(tmp_path)
    assert len(found) == len(first) + 2
    assert all(farthest(alone, course) <= 1e-12 for course in found)
    again = run_script(["--cpu", "--ranks", 2, "--balance", "3,1", *words])
    assert (again.code, "nothing left to do: step 16 was the last one" in again.err) == (0, True), again.err
    assert "behind the loop" in again.out


def test_python_alone_is_one_rank_and_writes_nothing(tmp_path: Path) -> None:
    example = ROOT / "docs" / "examples" / "own_loop.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(example)]
    alone = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert alone.returncode == 0, alone.stderr
    assert list(tmp_path.iterdir()) == []
    lines = re.findall(r"step \d+: loss .*", alone.stdout)
    assert len(lines) == 3
    finished = run_script(["--cpu", "--ranks", 2, "--balance", "2,1", "--save-dir", tmp_path / "run", example])
    assert re.findall(r"step \d+: loss .*", finished.out) == lines


# Mistakes

HEAD = """
import sys
import torch
import torch.nn.functional as F
import hetseq

run = hetseq.start(seed=3)
data = [(torch.full((4,), float(i % 7)), torch.tensor(i % 3)) for i in range(48)]
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.own(model, optimizer)
kept, state = [8], torch.zeros(3)
"""
LOOP = """
for step in run.steps(data, global_batch_size=24, max_epoch=2{more}):
    for {given} in {inner}:
        {body}
    {after}
print("behind the loop")
"""
DEFAULTS = {"given": "x, y", "inner": "step", "body": "pass", "after": "pass", "more": "", "own": ""}
GOOD = 'step.backward(F.cross_entropy(model(x), y, reduction="sum"), count=len(y))'
CASES: dict[str, tuple[dict[str, str], int, str]] = {
    "a mean": ({"body": "step.backward(F.cross_entropy(model(x), y), count=len(y))"}, 1,
               r"the gradient of \S+ from the pieces is 2 times that from the whole: step.backward got a mean"),
    "samples compared": ({"body": "z = F.normalize(model(x)); step.backward((z @ z.T).logsumexp(1).sum())"}, 1,
                         r"the loss depends on how a step is cut. It compares the samples of a micro-batch, for which"
                         r" there is step.whole, or"),
    "a state carried along": ({"body": "out = model(x) * (1 + state); state += out.detach().mean().abs(); "
                               "step.backward(F.cross_entropy(out, y, reduction='sum'))"}, 1,
                              r"computed twice with the same random numbers: .* the loop keeps something from one"),
    "loss.backward": ({"body": 'F.cross_entropy(model(x), y, reduction="sum").backward()'}, 1,
                      r"loss.backward\(\) was called: a loop calls step.backward\(loss, count=...\) in its place"),
    "optimizer.step": ({"body": f"{GOOD}; optimizer.step()"}, 1, r"optimizer.step\(\) was called by the script"),
    "zero_grad": ({"body": f"optimizer.zero_grad(); {GOOD}"}, 1, r"optimizer.zero_grad\(\) was called by the script"),
    "two inner loops": ({"body": GOOD, "after": "list(step)"}, 1, r"step 1 was looped over twice: what is done once"),
    "an inner loop that is left": ({"body": f"{GOOD}; break"}, 1,
                                   r"the loop left step 1 before its micro-batches were used up"),
    "the count of another batch": ({"body": GOOD.replace("len(y)", "kept[0]") + "; kept[0] = len(y)"}, 1,
                                   r"the first micro-batch counts \d+ as a whole and \d+ in 2 pieces"),
    "two gradients": ({"body": f"{GOOD}; {GOOD}"}, 1, r"step.backward was called twice for one micro-batch: add the"),
    "terms without counts": ({"body": "step.backward({'a': model(x).sum(), 'b': model(x).sum()})"}, 1,
                             r"step.backward got the terms a, b: several denominators must be known"),
    "no gradient": ({"body": "step.backward(model(x).detach().sum())"}, 1,
                    r"the loss of step.backward has no gradient"),
    "a vector": ({"body": "step.backward(model(x))"}, 1, r"step.backward got a tensor of shape \(\d+, 3\) for the sum"),
    "no count at all": ({"body": GOOD.replace("len(y)", "0")}, 1,
                        r"step.backward counted 0 over all ranks: expected more than 0"),
    "left on one rank": ({"body": GOOD, "after": "if step.number == 2 and run.rank == 1: break"}, 78,
                         r"after step 2 rank 1 left the loop, and rank 0 continues"),
    "evaluated on one rank": ({"body": GOOD, "after": "if run.is_first: run.only_first(int)"}, 78,
                              r"rank 0 is in run.only_first after step 1, rank 1 at the end of the step after step 1"),
    "evaluated by pieces of another size": (
        {"body": GOOD, "after": "run.evaluate(data, lambda b: {'n': (len(b[1]), 1)}, batch_size=8 - run.rank)"}, 78,
        r"run.evaluate: this rank cuts its data into \d batches, and the ranks measured \d+: give it the same"),
    "its own state": ({"body": GOOD, "after": "optimizer.param_groups[0]['lr'] = 0.1 + run.rank"}, 78,
                      r"after step 1 the state of script.py differs: optimizer.* is .*0\.1.* on rank 0, .*1\.1.* on"),
    "an error behind it": ({"body": GOOD, "after": "if step.number == 2 and run.rank: raise KeyError('mine')"}, 1,
                                       r"rank 1: your task failed: script.py:\d+ in <module>.*: KeyError: 'mine'"),
    "an error in the inner loop": ({"body": f"{GOOD}; assert step.number < 2 or not run.rank, 'mine'"}, 1,
                                   r"rank 1: your task failed: script.py:\d+ in <module>.*: AssertionError: mine"),
    "sys.exit with a code of ours": ({"body": GOOD, "after": "sys.exit(75)"}, 1, r"the script called sys.exit\(75\)"),
    "sys.exit": ({"body": GOOD, "after": "sys.exit(3)"}, 3, r"the script called sys.exit\(3\)"),
    "rows of no sample": ({"given": "z", "inner": "step.whole(lambda b: model(b[0]).sum())"}, 1,
                          r"the function of step.whole gave shape \(\) for \d+ samples: expected a tensor with a row"),
    "rows without a loss": ({"given": "z", "inner": "step.whole(lambda b: model(b[0]))"}, 1,
                            r"step.whole gave the rows of the step, and step.backward\(loss\) was not called"),
    "a count of the whole": ({"given": "z", "inner": "step.whole(lambda b: model(b[0]))",
                              "body": "step.backward(z.logsumexp(0).sum(), count=len(z))"}, 1,
                             r"step.backward of step.whole takes the loss itself, a tensor without dimensions, no"),
    "one phase of two": ({"more": ", phases=2", "body": GOOD}, 1,
                         r"the loop left step 1 before its micro-batches were used up: .* once for each of phases="),
    "three phases of two": ({"more": ", phases=2", "body": GOOD,
                             "after": f"for x, y in step: {GOOD}\n    list(step.of(optimizer))"}, 1,
                            r"step 1 was looped over 3 times, and run.steps was given phases=2"),
    "a change between two phases": (
        {"more": ", phases=2", "body": GOOD,
         "after": f"optimizer.param_groups[0]['lr'] = 0.05\n    for x, y in step: {GOOD}"}, 1,
        r"an object of run.own was changed between two phases of a step: do it behind the last inner loop"),
    "an evaluation between two phases": (
        {"more": ", phases=2", "body": GOOD,
         "after": f"run.evaluate(data, int, batch_size=8)\n    for x, y in step: {GOOD}"}, 1,
        r"run.evaluate was called in the middle of a step: it belongs behind the last"),
    "no phases": ({"more": ", phases=0"}, 2, r"run.steps got phases=0: expected the number of updates in a step"),
    "metrics in one word": ({"more": ", metrics='right'"}, 2, r"run.steps got metrics='right': expected a tuple"),
    "a metric of several numbers": ({"more": ", metrics=('q',)", "body": f"step.add('q', y); {GOOD}"}, 1,
                                    r"step.add got a tensor of shape \(\d+,\) for 'q': expected numbers, or tensors"),
    "a tensor of the first rank": ({"body": GOOD, "after": "run.only_first(lambda: model[0].weight)"}, 1,
                                   r"run.only_first: its function returned what JSON cannot hold"),
    "an optimizer that asks again": ({"own": "run.own(model, torch.optim.LBFGS(model.parameters()))"}, 2,
                                     r"run.own got LBFGS, which asks for the loss several times in a step"),
    "an optimizer of nobody": ({"inner": "step.of(torch.optim.SGD(model.parameters(), lr=1.0))", "body": GOOD}, 1,
                               r"step.of got an optimizer that run.own was not given"),
    "a metric without a name": ({"body": f"step.add('right', 1); {GOOD}"}, 1,
                                r"step.add got 'right': run.steps names what it adds, as in metrics=\(\"right\",\)"),
    "evaluate in a step": ({"body": f"run.evaluate(data, int, batch_size=8); {GOOD}"}, 1,
                           r"run.evaluate was called in the middle of a step: it belongs behind"),
}  # fmt: skip


def text_of(parts: dict[str, str]) -> str:
    """A script of these parts."""
    parts = {**DEFAULTS, **parts}
    head = HEAD.replace("run.own(model, optimizer)", parts["own"] or "run.own(model, optimizer)")
    return head + LOOP.format(**parts)


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_loop_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    parts, code, told = CASES[name]
    script = tmp_path / "script.py"
    script.write_text(text_of(parts))
    finished = run_script(["--cpu", "--ranks", 2, "--balance", "1,1", "--save-dir", tmp_path / "run", script])
    assert finished.code == code, finished.err
    last = finished.err[finished.err.rindex("hetseq: ") :]
    assert re.search(told, last), finished.err
    assert "site-packages" not in last
    assert f"{os.sep}hetseq{os.sep}loop" not in last, "no line of ours"


WHOLE = {"given": "z", "inner": "step.whole(lambda b: F.normalize(model(b[0])))",
         "body": "step.backward((z @ z.T).logsumexp(1).mean())"}  # fmt: skip
EACH = f"""def body(batch):
    x, y = batch
    if len(y) > 6 and step.number == 2 and run.rank == 1: raise torch.OutOfMemoryError("CUDA out of memory")
    {GOOD}
run.own(model, optimizer)"""
LORA = """model.requires_grad_(False)
down, up = torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(2, 8, bias=False)
optimizer = torch.optim.AdamW([*down.parameters(), *up.parameters()])
run.own(model, down=down, up=up, optimizer=optimizer)"""
GAN = """critic = torch.nn.Linear(4, 1)
of_critic = torch.optim.RMSprop(critic.parameters())
run.own(model=model, critic=critic, optimizer=optimizer, of_critic=of_critic)"""
AGAIN = EACH.replace("    if len(y) > 6", "    " + GOOD + "\n    if len(y) > 6").replace(
    f"    {GOOD}\nrun.own", "run.own"
)
TWO_HEADS = """class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.aux = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3), torch.nn.Linear(8, 3)
    def forward(self, x):
        x = self.body(x).tanh()
        return (self.head(x), self.aux(x)) if self.training else self.head(x)
model = TwoHeads()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.own(model, optimizer)"""
AT_REST = """there = 2 * torch.rand(6)
there, sign = torch.cat([there, there.flip(0)]).repeat(4), torch.ones(6)
data = list(zip(there[:, None].expand(48, 4).clone(), torch.cat([sign, -sign]).repeat(4)))
model = torch.nn.Linear(4, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
run.own(model, optimizer)"""
TEMPERATURE = """scale = torch.nn.Linear(1, 1)
run.own(model, scale=scale, optimizer=torch.optim.SGD([*model.parameters(), *scale.parameters()], lr=0.1))"""
RIGHT: dict[str, tuple[dict[str, str], int]] = {
    "counts of a mask": ({"body": "m = y > 0; step.backward((F.cross_entropy(model(x), y, reduction='none') * m)"
                                  ".sum(), count=m.sum())"}, 4),
    "adapters of low rank": ({"own": LORA, "body": "out = model[1:](model[0](x) + up(down(x))); step.backward("
                              "F.cross_entropy(out, y, reduction='sum'))"}, 4),
    "a loss over the whole batch": (WHOLE, 4),
    "two updates in a step": ({"own": GAN, "more": ", phases=2", "inner": "step.of(of_critic)",
                               "body": "step.backward(critic(x).sum())",
                               "after": f"for x, y in step.of(optimizer): {GOOD}"}, 8),
    "an output of training alone": ({"own": TWO_HEADS, "body": "a, b = model(x); step.backward(F.cross_entropy(a, y, "
                                     "reduction='sum') + F.cross_entropy(b, y, reduction='sum'))"}, 4),
    "a model that the body sets to training": ({"body": f"model.train(); {GOOD}"}, 4),
    "gradients that nearly cancel": ({"own": AT_REST, "more": ", shuffle=False",
                                      "body": "step.backward((model(x)[:, 0] * (1e6 * y + 1e-3)).sum())"}, 4),
    "draws in the loss of the whole": ({**WHOLE, "body": "step.backward((z[torch.randperm(len(z))] @ z.T).logsumexp(1)"
                                                         ".mean())"}, 4),
    "labels and a temperature": ({"own": TEMPERATURE, "given": "(y,)", "inner": "step.whole(lambda b: (b[1],))",
                                  "body": "step.backward(scale(y.float().mean().view(1, 1)).sum())"}, 4),
    "a metric": ({"more": ", metrics=('right',)", "body": f"step.add('right', (y == 1).sum(), len(y)); {GOOD}",
                  "after": "assert round(step.metrics['right'] * 24, 9) in range(5, 12); assert len(step.terms) == 1"},
                 4),
    "it ends": ({"body": GOOD}, 4),
    "a model in parts that are computed one by one": ({"body": "step.backward(sum(F.cross_entropy(model(x[i:i+1]), "
                                                       "y[i:i+1], reduction='sum') for i in range(len(y))))"}, 4),
    "left on all ranks": ({"body": GOOD, "after": "if step.number == 3: break"}, 3),
    "stopped by one": ({"body": GOOD, "after": "if step.number == 3 and run.rank == 1: run.stop()"}, 3),
    "counts of several terms": ({"more": ", count=lambda b: {'a': len(b[1]), 'b': (b[1] > 0).sum()}",
                                 "body": "out = model(x); step.backward({'a': F.cross_entropy(out, y, "
                                         "reduction='sum'), 'b': (out.square().sum(1) * (y > 0)).sum()})"}, 4),
    "a value of the first rank": ({"body": GOOD, "after": "assert run.only_first(lambda: [step.size]) == [24]"}, 4),
}  # fmt: skip


TOLD = {
    "a norm that forward estimates": (
        {"own": "model[0] = torch.nn.utils.parametrizations.spectral_norm(model[0]); run.own(model, optimizer)",
         "body": GOOD}, "forward changes _u of _SpectralNorm, _v of _SpectralNorm: the changes of all ranks are"),
    "a collater that draws": (
        {"more": ", collate=lambda s: (torch.stack([a for a, _ in s]) + torch.randn(1), "
                 "torch.stack([b for _, b in s]))", "body": GOOD},
        "the collater draws random numbers for a micro-batch, so the loop is not checked"),
    "a body that draws": ({"body": GOOD.replace("model(x)", "model(x + torch.randn_like(x))")},
                          "the loop draws random numbers for a micro-batch, beside dropout, so it is not checked"),
    "memory that runs out in a function": (
        {"own": EACH, "given": "_", "inner": "[step.each(body)]"},
        "the memory of cpu did not hold a micro-batch of 12 samples: this rank takes smaller ones from now on"),
    "memory that runs out after a gradient was sent": (
        {"own": AGAIN, "given": "_", "inner": "[step.each(body)]"},
        "the memory of cpu did not hold a micro-batch of 12 samples: this rank takes smaller ones from now on"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_is_let_alone(name: str, tmp_path: Path) -> None:
    parts, steps = RIGHT[name]
    script = tmp_path / "script.py"
    script.write_text(text_of(parts))
    finished = run_script(["--cpu", "--ranks", 2, "--balance", "1,1", "--save-dir", tmp_path / "run", script])
    assert finished.code == 0, finished.err
    assert "behind the loop" in finished.out
    assert f"done: {steps} steps" in finished.err
    assert "warning" not in finished.err


@pytest.mark.parametrize("name", TOLD)
def test_what_cannot_be_exact_or_was_repeated_is_told(name: str, tmp_path: Path) -> None:
    parts, told = TOLD[name]
    script = tmp_path / "script.py"
    script.write_text(text_of(parts))
    finished = run_script(["--cpu", "--ranks", 2, "--balance", "1,1", "--save-dir", tmp_path / "run", script])
    assert finished.code == 0, finished.err
    assert "done: 4 steps" in finished.err
    assert finished.err.count(told) == 1


def test_a_loop_with_a_name_that_is_left_ends_the_run_at_the_end_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    loop = f"""
steps = run.steps(data, global_batch_size=24, max_epoch=9)
for step in steps:
    for x, y in step:
        {GOOD}
    if step.number == 3:
        break
optimizer_is_mine = optimizer.zero_grad
print("behind the loop")
"""
    script.write_text(HEAD + loop)
    finished = run_script(["--cpu", "--ranks", 2, "--balance", "1,1", "--save-dir", tmp_path / "run", script])
    assert finished.code == 0, finished.err
    assert "done: 3 steps" in finished.err


def test_a_script_that_ends_in_a_step_has_failed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    loop = "try:\n" + "".join(
        f"    {line}\n" for line in LOOP.format(**{**DEFAULTS, "body": f"{GOOD}; assert step.number < 2"}).splitlines()
    )
    script.write_text(HEAD + loop + "except AssertionError:\n    pass\n")
    finished = run_script(["--cpu", "--ranks", 2, "--balance", "1,1", "--save-dir", tmp_path / "run", script])
    assert finished.code == 1, finished.err
    assert "script.py ended in the middle of a step, whose gradient was never complete" in finished.err


def test_a_stopped_script_without_a_launcher_says_how_it_continues(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    start = f"run = hetseq.start(seed=3, save_dir={str(tmp_path / 'run')!r})"
    after = "open('reached', 'w').close(); __import__('time').sleep(0.05)"
    text = HEAD.replace("run = hetseq.start(seed=3)", start) + LOOP.format(**{**DEFAULTS, "body": GOOD, "after": after})
    script.write_text(text.replace("max_epoch=2", "max_epoch=900"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        until((tmp_path / "reached").exists, "a step")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    assert re.search(r"hetseq: stopped after step \d+; the same command resumes from step \d+", err), err
    assert "Traceback" not in err


def test_a_rank_whose_memory_runs_out_begins_anew_with_smaller_micro_batches(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    body = f"""
        if len(y) > 6 and step.number == 2 and run.rank == 1: raise torch.OutOfMemoryError("CUDA out of memory")
        {GOOD}"""
    script.write_text(HEAD + LOOP.format(**{**DEFAULTS, "body": body}))
    finished = run_script(["--cpu", "--ranks", 2, "--balance", "1,1", "--save-dir", tmp_path / "run", script])
    assert finished.code == 0, finished.err
    assert "begins anew with smaller micro-batches [batch-halved]" in finished.err
    (memo,) = (tmp_path / "run" / "status").glob("device-*.json")
    assert 6 in json.loads(memo.read_text()).values()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--lr", "0.1", "x.py"], r"--lr is the script's business: say it in x.py, or behind it"),
        (["--task", "bert", "x.py"], r"--task is the script's business"),
        (["--delayed-init", "x.py"], r"--delayed-init is for tasks: x.py builds the model itself"),
        (["--offload-activations", "x.py"], r"--offload-activations is for tasks: x.py decides what it keeps"),
        (["y.py"], r"there is no script y.py"),
        (["--cpu"], r"found no script in the words after hetseq run: expected hetseq run"),
        (["--nothing", "x.py"], r"unknown option --nothing"),
    ],
)
def test_a_command_that_cannot_be_meant_is_refused_before_torch_is_imported(
    words: list[str], told: str, tmp_path: Path
) -> None:
    (tmp_path / "x.py").write_text("")
    finished = run_command(["run", *words], program=HETSEQ, cwd=tmp_path)
    assert finished.code == 2
    assert re.search(told, finished.err), finished.err


def test_a_run_of_a_script_has_no_task_to_evaluate(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + LOOP.format(**{**DEFAULTS, "body": GOOD}))
    assert run_script(["--cpu", "--ranks", 1, "--save-dir", tmp_path / "run", script]).code == 0
    finished = run_command(["evaluate", str(tmp_path / "run")], program=HETSEQ)
    assert finished.code == 2
    assert "a run of a script has no task to evaluate" in finished.err


@pytest.mark.parametrize("deadline", [*nightly(60), 1])
def test_a_script_may_take_its_time_between_two_steps(deadline: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    wait = "__import__('time').sleep(4)"
    after = f"if step.number == 3: run.only_first(lambda: {wait})\n    if step.number == 4 and run.rank == 1: {wait}"
    script.write_text(text_of({"body": GOOD, "after": after}))
    words = ["--cpu", "--ranks", 2, "--balance", "1,1", "--step-deadline", 1, "--script-deadline", deadline]
    finished = run_script([*words, "--save-dir", tmp_path / "run", script])
    assert finished.code == 0, finished.err
    assert "done: 4 steps" in finished.err
    assert ("fell silent" in finished.err) == (deadline == 1), finished.err


def test_units_of_samples_do_not_hide_a_mean(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    words = ["--cpu", "--ranks", 2, "--balance", "1,1", "--unit-size", 4, "--save-dir", tmp_path / "run", script]
    script.write_text(text_of({"body": "step.backward(F.cross_entropy(model(x), y), count=len(y))"}))
    finished = run_script(words)
    assert finished.code == 1
    assert "step.backward got a mean" in finished.err
    script.write_text(text_of({"body": "z = F.normalize(model(x)); step.backward((z @ z.T).logsumexp(1).sum())"}))
    finished = run_script([*words[:-2], tmp_path / "other", script])
    assert finished.code == 0, finished.err
    assert "its loss compares the samples of a micro-batch, which --unit-size keeps whole" in finished.err


def test_a_loop_that_was_left_continues_once_its_script_was_changed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    words = ["--cpu", "--ranks", 2, "--balance", "1,1", "--save-dir", tmp_path / "run", script]
    script.write_text(text_of({"body": GOOD, "after": "if step.number == 2: run.stop()"}))
    assert "done: 2 steps" in run_script(words).err
    again = run_script(words)
    assert (again.code, "nothing left to do" in again.err) == (0, True), again.err
    assert "its loop was left: a changed script continues, and so does --reset-meters" in again.err
    script.write_text(text_of({"body": GOOD}))
    assert "done: 4 steps" in run_script(words).err
    assert "nothing left to do: step 4" in run_script(words).err


def test_a_program_that_leaves_a_step_fails_and_keeps_its_steps(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    start = f"run = hetseq.start(seed=3, save_dir={str(tmp_path / 'run')!r})"
    lines = LOOP.format(**{**DEFAULTS, "body": f"{GOOD}\n        if step.number == 4: return"}).splitlines()
    text = HEAD.replace("run = hetseq.start(seed=3)", start) + "def main():\n"
    script.write_text(text + "".join(f"    {line}\n" for line in lines) + "main()\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1, done.stderr
    assert "hetseq: script.py ended in the middle of a step, whose gradient was never complete" in done.stderr
    assert "step-000000003" in [path.name[:14] for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
