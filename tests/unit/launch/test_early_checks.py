"""What a launcher refuses before there are workers: in the words of a worker, and nothing that a worker would take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetseq import registry
from hetseq.cluster.membership.exit_status import Ending
from hetseq.config import complete, parse
from hetseq.errors import EXIT_DONE, EXIT_USAGE, ConfigError, HetSeqError, text_of
from hetseq.launch import early_checks
from hetseq.launch import launch as launch_module
from hetseq.task import build_model, load_split, make_task
from tests.support.commands import ROOT
from tests.support.gpt_records import make_rows, write_folder

TASKS = {
    "good.py": "import torch\nfrom hetseq import Task\nclass Spirals(Task):\n    pass\n",
    "syntax.py": "import torch\ndef f(:\n",
    "outside.py": "x = 1\nreturn x\n",
    "bytes.py": "x = 'a\0b'\n",
    "none.py": "import torch\ndef main():\n    return 1\n",
    "plain.py": "class Plain:\n    pass\nclass Twice:\n    pass\nTwice = type(str(Twice), (), {})\n",
    "star.py": "from good import *\n",
    "escape.py": "from hetseq import Task\nX = '\\d'\nclass Spirals(Task):\n    pass\n",
}
GPT2 = {"model_type": "gpt2", "vocab_size": 50, "n_positions": 64, "n_embd": 8, "n_layer": 1, "n_head": 2}
REFUSED = {
    "a file that is not there": "--task missing.py:Spirals",
    "a folder": "--task empty.py:Spirals",
    "a class that is not there": "--task good.py:Spiral",
    "a syntax error": "--task syntax.py:Spirals",
    "what only the compiler finds": "--task outside.py:Spirals",
    "a zero byte": "--task bytes.py:Spirals",
    "a class of another kind": "--task plain.py:Plain",
    "an unknown name": "--task mnsit",
    "no folder of modules": "--task mine --user-dir missing",
    "a module with a syntax error": "--task mine --user-dir modules",
    "mnist: no folder": "--task mnist --data missing",
    "mnist: no files": "--task mnist --data empty",
    "mnist: images without labels": "--task mnist --data images",
    "mnist: no such split": "--task mnist --train-subset training",
    "gpt: no --data": "--task gpt",
    "gpt: no index": "--task gpt --data empty",
    "gpt: no such split": "--task gpt --data gpt --train-subset training",
    "gpt: no such split of validation": "--task gpt --data gpt --valid-subset dev",
    "gpt: a file of the index is gone": "--task gpt --data gone",
    "gpt: no configuration": "--task gpt --data gpt --config-file missing.json",
    "gpt: no JSON": "--task gpt --data gpt --config-file good.py",
    "gpt: an unknown key": "--task gpt --data gpt --config-file key.json",
    "gpt: two networks": "--task gpt --data gpt --config-file gpt2.json --init-from empty",
    "gpt: no directory to begin with": "--task gpt --data gpt --init-from missing",
    "gpt: no weights to begin with": "--task gpt --data gpt --init-from bare",
    "bert: no --data": "--task bert",
    "bert: no folder": "--task bert --data missing",
    "bert: no configuration": "--task bert --data empty",
    "bert: an unknown key": "--task bert --data empty --config-file key.json",
    "bert: no files of the split": "--task bert --data empty --config-file bert.json",
    "bert: no directory to begin with": "--task bert --data empty --init-from missing",
    "ner: no file of the split": "--task bert_ner --data empty --config-file bert.json --dict vocab.txt",
    "ner: no --dict": "--task bert_ner --data words --config-file bert.json",
    "classify: no folder": "--task bert_classify --data missing --config-file bert.json --dict vocab.txt",
}
ACCEPTED = {
    "a class of the file": "--task good.py:Spirals",
    "the one task of a file": "--task good.py",
    "a file without a class, whose import may fail first": "--task none.py",
    "a class that comes by a star": "--task star.py:Spirals",
    "a class that is bound twice": "--task plain.py:Twice",
    "a file that Python warns of": "--task escape.py:Spirals",
    "a module": "--task package.module:Spirals",
    "a name that modules register": "--task mine --user-dir good",
    "the bundled digits": "--task mnist",
    "records": "--task gpt --data gpt",
    "records without a split of validation": "--task gpt --data trained",
    "records that a copy stands in for": "--task gpt --data gone --local-copy copies",
}
FOREIGN = {"alone": "--save-dir .", "anew": "--save-dir . --resume none", "2020": "--save-dir old"}
ACCEPTED |= {
    "a folder of others, where the head's may be meant": "--save-dir . --join tcp://127.0.0.1:9 --min-ranks 2",
    "beside checkpoints of 2020": "--save-dir old --resume none",
    "a folder that is new": "--save-dir new/run",
}
CHECKER = """
import json, sys
from hetseq.config import parse
from hetseq.errors import HetSeqError, text_of
from hetseq.launch.early_checks import check_command
answers = {}
for name, words in json.load(sys.stdin).items():
    try:
        check_command(parse(words.split()))
        answers[name] = None
    except HetSeqError as error:
        answers[name] = [error.exit_code, text_of(error)]
print(json.dumps([answers, "torch" in sys.modules]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("early")
    for name, text in TASKS.items():
        (folder / name).write_text(text)
    for name in ("empty", "empty.py", "images", "modules", "good", "bare", "words", "old"):
        (folder / name).mkdir()
    (folder / "modules" / "mine.py").write_text(TASKS["syntax.py"])
    (folder / "good" / "mine.py").write_text(TASKS["good.py"])
    (folder / "images" / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03")
    (folder / "words" / "train.txt").write_text("word O\n")
    (folder / "old" / "checkpoint_last.pt").write_bytes(b"")
    (folder / "key.json").write_text(json.dumps({"model_type": "gpt2", "hiden_size": 3}))
    (folder / "gpt2.json").write_text(json.dumps(GPT2))
    (folder / "bert.json").write_text(json.dumps({"vocab_size": 6, "hidden_size": 8, "num_attention_heads": 2}))
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nword\n")
    for name in ("gpt", "gone"):
        write_folder(folder / name, train=make_rows(9), valid=make_rows(9, seed=1))
    write_folder(folder / "trained", train=make_rows(9))
    for path in (folder / "gone").glob("*.safetensors"):
        path.unlink()
    (folder / "bare" / "config.json").write_bytes((folder / "gpt" / "config.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Any]:
    """What a launcher says of every case, all in one process; torch is not among its modules then."""
    done = subprocess.run(
        [sys.executable, "-c", CHECKER], cwd=folder, env={"PYTHONPATH": str(ROOT)}, text=True, capture_output=True,
        input=json.dumps({**REFUSED, **ACCEPTED, **FOREIGN}), timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    said, has_torch = json.loads(done.stdout)
    assert not has_torch
    return dict(said)


def worker_says(words: str) -> list[Any]:
    """What loading the task, its data and its model says on a rank."""
    try:
        config = complete(parse(words.split()))
        task = make_task(registry.find_task(config.task.task, user_dir=config.task.user_dir), config)
        load_split(task, config.data.train_subset)
        for split in config.data.valid_subsets:
            load_split(task, split)
        build_model(task)
    except HetSeqError as error:
        return [error.exit_code, text_of(error)]
    raise AssertionError(f"a worker takes {words}")


@pytest.mark.parametrize("case", REFUSED)
def test_a_launcher_refuses_in_the_words_of_a_worker(
    case: str, answers: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert answers[case] == worker_says(REFUSED[case])
    assert answers[case][0] == EXIT_USAGE


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_may_be_right_passes(case: str, answers: dict[str, Any]) -> None:
    assert answers[case] is None


@pytest.mark.parametrize("case", FOREIGN)
def test_a_folder_of_others_is_refused_before_torch_is_imported(
    case: str, answers: dict[str, Any], folder: Path
) -> None:
    code, said = answers[case]
    assert code == EXIT_USAGE
    if case == "2020":
        assert f"--save-dir {folder / 'old'} holds checkpoints of the HetSeq of 2020 (checkpoint_last.pt)" in said
    else:
        assert said.startswith(f"--save-dir {folder} is no run directory, and holds bare/, bert.json, bytes.py and")
        assert "Choose another --save-dir" in said


def test_a_file_that_goes_while_it_is_looked_at_is_for_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(task: str, config: object) -> None:
        raise FileNotFoundError("corpus.json")

    monkeypatch.setattr(registry, "check_files", gone)
    early_checks.check_command(parse(["--task", "gpt"]))


# ---------------------------------------------------------------------------------------------- where it is asked


class Launcher:
    """Takes the place of a launcher, and keeps what it was made with."""

    made: list[dict[str, Any]]

    def __init__(self, *arguments: object, **named: Any) -> None:
        self.made.append(named)

    def run(self) -> Ending:
        return Ending(EXIT_DONE)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    Launcher.made = []
    monkeypatch.setattr(launch_module, "Launcher", Launcher)
    return Launcher.made


WRONG = ["--cpu", "--task", "missing.py:Mine", "--env", "none"]


def test_a_node_alone_starts_nothing(made: list[dict[str, Any]]) -> None:
    with pytest.raises(HetSeqError, match=r"missing\.py: does not exist"):
        launch_module.launch(parse([*WRONG, "--distributed-world-size", "2"]))
    assert made == []


def test_a_debugged_rank_is_refused_before_its_devices_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "local_devices", lambda config: pytest.fail("asked for devices"))
    with pytest.raises(HetSeqError, match=r"missing\.py: does not exist"):
        launch_module.run_here(parse([*WRONG, "--distributed-no-spawn"]))


def test_one_node_of_several_says_it_at_once_and_tells_the_others(
    made: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(HetSeqError, match=r"missing\.py: does not exist") as told:
        launch_module.launch(parse([*WRONG, "--join", "tcp://127.0.0.1:9", "--min-ranks", "2"]))
    assert [named["refusal"] for named in made] == [told.value]
    assert capsys.readouterr().err == f"{text_of(told.value)}; telling the other nodes\n"


def test_ranks_that_do_not_fit_are_told_as_before(
    made: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--cpu", "--distributed-init-method", "tcp://127.0.0.1:9", "--distributed-world-size", "2"]
    with pytest.raises(ConfigError) as told:
        launch_module.launch(parse([*words, "--distributed-rank", "2", "--env", "none"]))
    assert [named["refusal"] for named in made] == [told.value]
    assert capsys.readouterr().err == f"{told.value}; telling the other nodes\n"
