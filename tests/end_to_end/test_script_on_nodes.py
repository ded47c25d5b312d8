"""A script with a loop of its own on several nodes: they follow the course of one rank and run the same script."""

from __future__ import annotations

import re
import shutil
import socket
from pathlib import Path

import pytest

from hetseq.cluster.membership.compatibility import file_state
from hetseq.errors import EXIT_DISAGREE
from tests.support import forked
from tests.support.nightly import nightly
from tests.support.nodes import Ended, Nodes
from tests.support.own_loops import LINES, Course, courses, farthest, run_lines, run_script
from tests.support.places import tcp

pytestmark = pytest.mark.slow

STEPS = 40


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    forked.warm_up()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Course:
    """The course on one rank."""
    folder = tmp_path_factory.mktemp("alone")
    finished = run_lines(folder, "--cpu", "--ranks", 1, env={"LOOP_STEPS": str(STEPS)})
    assert finished.code == 0, finished.err
    (course,) = courses(folder)
    return course


def words(nodes: Nodes, url: str, ranks: int, *, at_least: int) -> list[object]:
    """The options of a node of a run."""
    meeting = ["--join", url, "--min-ranks", at_least, "--ranks", ranks]
    return ["--cpu", "--precision", "fp64", "--save-dir", nodes.folder / "run", *meeting]


def test_a_node_that_joins_leaves_the_course_of_one_rank(nodes: Nodes, alone: Course) -> None:
    url, course = tcp().url, nodes.folder / "course"
    course.mkdir()
    script = [LINES, course, "", STEPS, 3]
    head = nodes.start(*words(nodes, url, 1, at_least=1), script=script)
    nodes.wait_until(lambda: any(3 in found for found in courses(course)), "step 3")
    nodes.start(*words(nodes, url, 2, at_least=1), script=script)
    nodes.wait_until_said(head, "3 ranks continue", within_s=40)
    assert [ended.code for ended in nodes.finish()] == [0, 0], nodes.story()
    found = courses(course)
    assert sorted(len(one) == STEPS for one in found) == [False, False, True], "two have joined"
    assert all(max(one) == STEPS for one in found)
    assert all(farthest(alone, one) <= 1e-12 for one in found)


@pytest.mark.parametrize("event", ["stop:body:1:6", *nightly("stop:body:0:6", "stop:evaluate:1:8")])
def test_a_rank_that_is_stopped_for_longer_than_the_deadline_changes_nothing(
    event: str, alone: Course, tmp_path: Path
) -> None:
    """By SIGSTOP, in the script's own code; it is never continued."""
    three = ("--cpu", "--ranks", 3, "--balance", "5,2,1", "--step-deadline", 3, "--script-deadline", 3)
    finished = run_lines(tmp_path, *three, event=event)
    assert finished.code == 0, finished.err
    who = event.split(":")[2]
    assert re.search(rf"rank {who} on \S+ fell silent, .*SIGSTOP.*: 2 ranks continue after step", finished.err)
    assert re.search(rf"rank {who} on \S+ is back: 3 ranks continue after step", finished.err)
    found = courses(tmp_path)
    assert len(found) == 4
    assert sum(len(one) == 16 for one in found) == 2, "the other two have seen every step"
    assert all(farthest(alone, one) <= 1e-12 for one in found)


# Another script on another node

SCRIPT = """
import sys
import torch
import torch.nn.functional as F
import hetseq
{imports}

run = hetseq.start(seed=3)
data = [(torch.full((4,), float(i % 7)), torch.tensor(i % 3)) for i in range(48)]
model = torch.nn.Linear(4, 3)
run.own(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in run.steps(data, global_batch_size=24, max_epoch=1):
    for x, y in step:
        step.backward(F.cross_entropy(model(x), y, reduction="sum"), count=len(y))
print("behind the loop of", __name__, *sys.argv[1:])
"""


def folders(nodes: Nodes, imports: str, **files: str) -> list[Path]:
    """Two folders with the same script and files."""
    found = [nodes.folder / name for name in ("one", "other")]
    for folder in found:
        for name, text in {"train": SCRIPT.format(imports=imports), **files}.items():
            path = folder / f"{name.replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return found


def run_both(nodes: Nodes, places: list[Path], *script: str) -> list[Ended]:
    """The same command in both folders."""
    url = tcp().url
    for place in places:
        nodes.start(*words(nodes, url, 1, at_least=2), script=script, cwd=place)
    return nodes.finish()


def change(path: Path) -> list[str]:
    """Add a line to a file; the digests before and after."""
    before = file_state(path)
    path.write_text(path.read_text() + "# one line more\n")
    return [before, file_state(path)]


def check_refused(nodes: Nodes, ends: list[Ended], *says: str) -> None:
    for ended in ends:
        assert ended.code == EXIT_DISAGREE, nodes.story()
        assert [word for word in says if word not in ended.message] == [], nodes.story()
        assert "--task" not in ended.message
    assert not list(nodes.folder.rglob("metrics.jsonl")), "a step was made"


REMEDY = "To fix this: copy the same script, and the modules beside it, to all nodes [code-differs]"


def test_another_script_on_another_node_is_refused(nodes: Nodes) -> None:
    places = folders(nodes, "")
    one, other = change(places[1] / "train.py")
    ends = run_both(nodes, places, "train.py")
    who = [f"{socket.gethostname()} (pid {node.pid})" for node in nodes.started]
    told = {f"sha256 of the script: train.py {first} on {who[a]}; train.py {second} on {who[b]}"
            for first, second, a, b in ((one, other, 0, 1), (other, one, 1, 0))}  # fmt: skip
    check_refused(nodes, ends, REMEDY)
    assert any(text in ends[0].message for text in told), nodes.story()


def test_another_module_beside_the_script_is_refused(nodes: Nodes) -> None:
    places = folders(nodes, "from parts import helper", **{"parts.helper": "A = 1\n", "idle": "B = 1\n"})
    change(places[1] / "idle.py")  # not imported
    digests = change(places[1] / "parts" / "helper.py")
    ends = run_both(nodes, places, "train.py")
    check_refused(nodes, ends, "modules of the script: parts/helper.py", *digests, REMEDY)


def test_another_module_behind_m_is_refused(nodes: Nodes) -> None:
    files = {"mine.jobs.run": SCRIPT.format(imports="from mine import helper"), "mine.helper": "A = 1\n",
             "mine.__init__": "", "mine.jobs.__init__": ""}  # fmt: skip
    places = folders(nodes, "", **files)
    digests = change(places[1] / "mine" / "jobs" / "run.py")
    check_refused(
        nodes, run_both(nodes, places, "-m", "mine.jobs.run"), "sha256 of the script: run.py", *digests, REMEDY
    )
    shutil.copy(places[0] / "mine" / "jobs" / "run.py", places[1] / "mine" / "jobs")
    digests = change(places[1] / "mine" / "helper.py")
    nodes.forget(*nodes.started)
    check_refused(nodes, run_both(nodes, places, "-m", "mine.jobs.run"), "modules of the script: helper.py", *digests)


def test_other_arguments_of_the_script_on_another_node_are_refused(nodes: Nodes) -> None:
    places, url = folders(nodes, ""), tcp().url
    for place, smoothing in zip(places, ("0.1", "0.2")):
        script = ["train.py", "--data", place, "--smoothing", smoothing]
        nodes.start(*words(nodes, url, 1, at_least=2), script=script, cwd=place)
    remedy = (
        "To fix this: give the script the same arguments on all nodes; paths may differ, and an environment variable"
        " can hold what one node has for itself [options-differ]"
    )
    told = [f"--data (a path) --smoothing {number} on" for number in ("0.1", "0.2")]
    check_refused(nodes, nodes.finish(), "  arguments of the script: --data (a path)", *told, remedy)


def test_the_same_script_in_another_place_and_by_another_name_is_the_same(nodes: Nodes) -> None:
    """The twin."""
    places, url = folders(nodes, "import helper", helper="A = 1\n"), tcp().url
    (places[1] / "train.py").rename(places[1] / "renamed.py")
    for place, name in zip(places, ("train.py", "renamed.py")):
        script = [name, "--epochs", "3", f"--out={place}"]
        nodes.start(*words(nodes, url, 1, at_least=2), script=script, cwd=place)
    ends = nodes.finish()
    assert [ended.code for ended in ends] == [0, 0], nodes.story()
    assert "behind the loop of __main__ --epochs 3" in "".join(ended.out for ended in ends)


def test_a_module_behind_m_is_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(imports=""))
    words = ["--cpu", "--ranks", 2, "--save-dir", "run", "-m", "train", "--epochs", "3"]
    finished = run_script(words, cwd=tmp_path)
    assert finished.code == 0, finished.err
    assert finished.out.count("behind the loop of __main__ --epochs 3") == 1
    assert (tmp_path / "run" / "config.yaml").exists()
