"""`hetseq evaluate` and `hetseq predict` as commands: any number of ranks, a lost one, a signal, and bad input."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.commands import HETSEQ, Finished, WarmLauncher, start_command
from tests.support.cuda_errors import OUT_OF_MEMORY
from tests.support.refusals import check_refusal, write_task
from tests.support.trials import until

pytestmark = pytest.mark.slow

SAMPLES = 36  # of the task; pieces of 5, the last one of 1
PREDICTIONS = (
    'scores = model(sample["x"])[:, 0].tolist()\n'
    '        return [f"{index} {score:.17g}" for index, score in zip(sample["index"].tolist(), scores)]'
)
#: of the rank that is given sample 7
AT_SEVEN = 'if 7 in sample["index"].tolist(): {}\n        return ["x"] * len(sample["index"])'
STOPS = "os.kill(os.getpid(), 19)"
TRAINED = ("--cpu", "--batch-size", "5", "--max-update", "3", "--lr", "0.001", "--precision", "fp64")


def toy(folder: Path, **bodies: str) -> Path:
    """The file of a task whose model has a module inside."""
    return write_task(folder, build_model="return torch.nn.Sequential(torch.nn.Linear(3, 1))", **bodies)


@pytest.fixture(scope="module", autouse=True)
def no_imports() -> None:
    """Commands that are signalled begin after their imports."""
    forked.warm_up()


@pytest.fixture(scope="module")
def run(warm: WarmLauncher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a trained toy, which says things of its own that are not meant for these commands."""
    folder = tmp_path_factory.mktemp("evaluate")
    task = toy(folder, predictions=PREDICTIONS)
    cluster = ("--distributed-world-size", "2", "--balance", "3,1", "--throttle", "0:1.5")
    start = ("--disable-validation", "--resume", "none")
    done = warm.run(["train", "--task", f"{task}:Toy", *TRAINED, *cluster, *start, "--save-dir", str(folder / "run")])
    assert done.code == 0, done.err
    return folder / "run"


def on(ranks: int) -> tuple[str, ...]:
    return ("--distributed-world-size", str(ranks))


#: parameters come and go; rank 1 owns a quarter of them, and has fewer pieces
DIVIDED = ("--shard-model", "all", "--shard-modules", "0", "--own", "3,1", "--balance", "7,1")


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_every_number_of_ranks_gives_the_same_lines_and_files_and_leaves_the_run_as_it_was(
    warm: WarmLauncher, run: Path, tmp_path: Path
) -> None:
    before = files_of(run)
    lines, rows, files = set(), set(), set()
    for ranks, words in ((1, ()), (2, ()), (3, ()), (2, DIVIDED)):
        how = (*on(ranks), *words)
        said = [warm.run(["evaluate", run, *how]), warm.run(["evaluate", run, "--json", *how])]
        output = tmp_path / f"{ranks}{len(words)}.txt"
        said.append(warm.run(["predict", run, "--subset", "valid", "--output", output, *how]))
        assert [each.code for each in said] == [0, 0, 0], [each.err for each in said]
        lines.add(said[0].out)
        rows.add(said[1].out)
        files.add(output.read_bytes())
        assert said[2].out == "step 3 valid predictions 36\n"
    assert (len(lines), len(rows), len(files)) == (1, 1, 1)
    row = json.loads(rows.pop())
    assert row.keys() == {"step", "subset", "valid_loss"}
    assert lines == {f"step 3 valid loss {row['valid_loss']:.6g}\n"}
    indices = [int(line.split()[0]) for line in files.pop().decode().splitlines()]
    assert indices == list(range(SAMPLES))
    assert files_of(run) == before


def test_a_file_that_exists_is_replaced_only_where_that_was_asked_for(
    warm: WarmLauncher, run: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.txt"
    output.write_text("mine")
    words = ["predict", run, "--subset=valid", f"--output={output}", "--resume", "best"]
    refused = warm.run(words)
    check_refusal(refused, "out.txt exists", "--overwrite")
    assert output.read_text() == "mine"
    assert warm.run([*words, "--resume", "3", "--overwrite"]).code == 0
    assert output.read_text().count("\n") == SAMPLES
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]


def test_a_file_that_somebody_else_has_made_meanwhile_stays(warm: WarmLauncher, run: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.txt"
    done = predict_otherwise(warm, run, tmp_path, f"open({str(output)!r}, 'w').write('theirs')")
    check_refusal(done, "out.txt exists", "--overwrite")
    assert output.read_text() == "theirs"


def predict_otherwise(warm: WarmLauncher, run: Path, tmp_path: Path, at_seven: str) -> Finished:
    """The command on three ranks with a task that does something else at sample 7."""
    task = toy(tmp_path, predictions=AT_SEVEN.format(at_seven))
    words = ["predict", run, "--task", f"{task}:Toy", "--subset", "valid", "--output", tmp_path / "out.txt", *on(3)]
    words += ["--step-deadline", "2"] if at_seven.endswith(STOPS) else []
    return warm.run(words)


@pytest.mark.parametrize(
    ("at_seven", "code", "says"),
    [
        ("import os; os.kill(os.getpid(), 9)", 1, ("rank 1 was killed (SIGKILL", "run the command again")),
        (f"import os; {STOPS}", 1, ("rank 1 fell silent", "run the command again")),
        ("import ctypes; ctypes.string_at(0)", 1, ("rank 1 crashed (SIGSEGV)",)),
        (f"raise torch.OutOfMemoryError({OUT_OF_MEMORY!r})", 1, ("rank 1: the memory of cpu does not hold",)),
        ('return ["a\\nb"] * 5', 2, ("rank 1: Toy.predictions gave", "for sample 5: expected one line")),
        ("return []", 2, ("rank 1: Toy.predictions gave 0 of them for 5 samples",)),
    ],
)
def test_a_rank_that_fails_ends_the_command_in_words_and_leaves_no_file(
    warm: WarmLauncher, run: Path, tmp_path: Path, at_seven: str, code: int, says: tuple[str, ...]
) -> None:
    done = predict_otherwise(warm, run, tmp_path, at_seven)
    check_refusal(done, *says, code=code)
    where = "rank 1 has not ended, last seen on cpu evaluating, or predicting for"
    assert (where in done.err and "its process is stopped" in done.err) == at_seven.endswith(STOPS)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".py" and path.name != "__pycache__"] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_interrupted_leaves_no_file(run: Path, tmp_path: Path, number: int) -> None:
    sign, output = tmp_path / "sign", tmp_path / "out"
    output.mkdir()
    task = toy(tmp_path, predictions=AT_SEVEN.format(f"open({str(sign)!r}, 'x'); import time; time.sleep(600)"))
    words = ["predict", run, "--task", f"{task}:Toy", "--subset", "valid", "--output", output / "out.txt", *on(2)]
    environment = {"TMPDIR": str(output)}
    with start_command(words, program=HETSEQ, env=environment, is_cold=False) as command:
        until(sign.exists, "the ranks at work")
        until(lambda: list(output.glob(".out.txt.*")), "a file that is being written")
        os.kill(command.pid, number)
        finished = command.finish(timeout_s=20)
    assert finished.code == 130, finished
    assert f"stopped by {signal.Signals(number).name}; run the command again" in finished.err
    assert list(output.iterdir()) == []


BAD = {
    "no run": (["/nowhere"], "/nowhere does not exist: expected the --save-dir of a run"),
    "no word": ([], "expected one RUN, found none"),
    "no checkpoint at all": (["BARE"], "has no checkpoint: train it first"),
    "no such checkpoint": (["RUN", "--resume", "77"], "77"),
    "no split": (["RUN", "--subset", "gone", "--task", "TASK"], "Toy.load_dataset('gone') gave no data set"),
    "mistyped": (["RUN", "--subst", "valid"], "unknown option --subst: did you mean --subset?"),
    "no value": (["RUN", "--subset"], "--subset has no value"),
    "several nodes": (
        ["RUN", "--distributed-init-method", "tcp://127.0.0.1:1"],
        "only the ranks of this node",
    ),
    "no such device": (["RUN", "--devices", "cuda:99"], "--devices cuda:99 asks for cuda:99"),
    "ranks that are not there": (["RUN", "--balance", "3,1", *on(3)], "--balance"),
}
BAD_OUTPUT = {
    "none": ([], "--output FILE is missing"),
    "no folder": (["--output", "HERE/gone/out.txt"], "there is no folder HERE/gone; make it first"),
    "a folder": (["--output", "HERE"], "is a folder"),
    "two splits": (["--output", "HERE/out.txt", "--subset", "valid,test"], "expected one split, found"),
    "no predictions": (["--output", "HERE/out.txt", "--task", "MUTE", *on(2)], "Toy has no predictions(model, sample)"),
}


def refused(warm: WarmLauncher, run: Path, tmp_path: Path, command: str, words: list[str], says: str) -> None:
    """The command is refused in these words, and no file is made."""
    bare = tmp_path / "bare"
    task = toy(tmp_path, load_dataset='return [sample(index) for index in range(9)] if split != "gone" else None')
    mute = toy(tmp_path, name="mute", load_dataset="raise AssertionError('no one may ask for data here')")
    bare.mkdir()
    (bare / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    places = {"RUN": run, "BARE": bare, "TASK": f"{task}:Toy", "MUTE": f"{mute}:Toy", "HERE": tmp_path}
    for name, place in places.items():
        words = [word.replace(name, str(place)) for word in words]
    says = says.replace("HERE", str(tmp_path)).replace("COMMAND", command)
    check_refusal(warm.run([command, *words]), says, code=1 if "train it first" in says else 2)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
        "bare",
        "mute.py",
        "task.py",
    ]


@pytest.mark.parametrize(("words", "says"), BAD.values(), ids=BAD)
def test_what_cannot_be_evaluated_is_refused_in_words(
    warm: WarmLauncher, run: Path, tmp_path: Path, words: list[str], says: str
) -> None:
    refused(warm, run, tmp_path, "evaluate", words, says)


@pytest.mark.parametrize(("words", "says"), BAD_OUTPUT.values(), ids=BAD_OUTPUT)
def test_what_cannot_be_predicted_is_refused_in_words(
    warm: WarmLauncher, run: Path, tmp_path: Path, words: list[str], says: str
) -> None:
    refused(warm, run, tmp_path, "predict", ["RUN", *words], says)
