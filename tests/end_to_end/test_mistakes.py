"""Fifty mistakes that people make, and the first line of each answer: what was found, what was expected, the remedy.

`python -m pytest -s tests/end_to_end/test_mistakes.py` prints all of them. A row is a `Mistake`: the words after
`hetseq`, the code and the exit code of the answer, and three patterns. What is refused before torch is needed runs in a
process that can tell whether torch was imported; what needs workers runs in the warm launcher.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetseq.checkpoint.leftover_memory import Remains
from hetseq.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE, HetSeqError, codes_in
from hetseq.launch.visible_gpus import cpu_build
from hetseq.run_directory import RunDirectory
from tests.end_to_end.test_bad_input import mounted
from tests.support.commands import HETSEQ, ROOT, WarmLauncher, start_command
from tests.support.places import free_port
from tests.support.without_torch import Answer, Commands
from tests.unit.commands.test_script import program

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_imports")]

Values = dict[str, str]  # what a row's words hold in braces
Around = Callable[[Path], AbstractContextManager[Values]]
_REASON = r"hetseq(?: [a-z]+)?: "


@dataclass(frozen=True)
class Mistake:
    """`words` follow `hetseq`; the patterns are looked for in the first line of the answer, which begins as `begins`.

    With `is_warm` workers are needed, and so is torch. The folder `at` of the ground is the current one. `around` is
    what else there is while the command runs.
    """

    number: int
    words: str
    code: str
    found: str
    expected: str
    remedy: str
    exit: int = EXIT_USAGE
    begins: str = _REASON
    is_warm: bool = False
    at: str = "."
    around: Around | None = None


# ------------------------------------------------------------------------------------------ the ground, and the rows

TASK = """from hetseq import Task
import torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        row = {"x": torch.full((4,), index / 32), "y": torch.tensor(index / 32)}
        return {"x": row["x"], "y": row["y"]}

class Mine(Task):
    def load_dataset(self, split):
        return Data()
    def build_model(self):
        return torch.nn.Linear(4, 1)
    def loss(self, model, sample):
        return {"loss": ((model(sample["x"]).squeeze(1) - sample["y"]) ** 2).sum()}

class Helper:
    pass
"""
#: file -> what of the task is written otherwise
TASKS = {
    "good": ("", ""),
    "mean": (".sum()", ".mean()"),
    "shape": ("Linear(4, 1)", "Linear(5, 2)"),
    "sample": ('row["y"]}', 'row["label" if index == 13 else "y"]}'),
    "key": ('sample["x"]', 'sample["label"]'),
    "syntax": ("Mine(Task):", "Mine(Task)"),
    "absent": ("import torch\n", "import torch, notamodule\n"),
    "nan": (".sum()", '.sum() * float("nan")'),
    "number": (".sum()}", ".sum().item()}"),
    "modle": ("build_model", "build_modle"),
    "stream": ("return Data()", "return iter([])"),
    "wide": ("Linear(4, 1)", "Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))"),
}
SSH = 'echo "ssh: Could not resolve hostname nosuchhost: Name or service not known" >&2; exit 255'


@contextmanager
def taken_port(ground: Path) -> Iterator[Values]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {"port": str(server.getsockname()[1])}


@contextmanager
def other_secret(ground: Path) -> Iterator[Values]:
    """A head that waits for a second rank, and whose secret is another one."""
    url = f"tcp://127.0.0.1:{free_port()}"
    words = f"train --cpu --global-batch-size 8 --join {url} --min-ranks 2 --secret-file theirs --save-dir theirs-run"
    head = {"HOME": str(ground / "home"), "GLOO_SOCKET_IFNAME": "lo"}
    with start_command(shlex.split(words), cwd=ground, env=head, program=HETSEQ, is_cold=False) as command:
        wait_for("waiting: 1 of 2 ranks", command.said)
        yield {"url": url}


@contextmanager
def small_disk(ground: Path) -> Iterator[Values]:
    """A file system in which one checkpoint of the digits has room, and a second one has not."""
    (ground / "disk").mkdir()
    with mounted("-t", "tmpfs", "-o", "size=1m", "tmpfs", at=ground / "disk"):
        yield {}
        forget_memory(ground / "disk")


def forget_memory(folder: Path) -> None:
    """Remove what stopped and failed runs keep in shared memory for their next start."""
    for config in folder.rglob("config.yaml"):
        with suppress(HetSeqError):
            Remains(RunDirectory(config.parent).run_id, config.parent).close(remove=True)


def wait_for(words: str, said: Callable[[], str], *, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while words not in said():
        assert time.monotonic() < deadline, f"no {words!r} within {within_s:g} s: {said()}"
        time.sleep(0.02)


RUN = "train --cpu --batch-size 8 --max-update 4"
#: of the words that follow a sentence of the task's own
FAILED = r"your task failed: "
MISTAKES = [
    # the words of a command
    Mistake(1, "trian", "command-unknown", "'trian'", "unknown command", r"did you mean 'train'\?"),
    Mistake(2, "--verison", "command-unknown", "'--verison'", "unknown command", r"did you mean '--version'\?"),
    Mistake(3, "train --bach-size 4", "option-refused", "--bach-size", "unknown option",
            r"did you mean --batch-size\?"),
    Mistake(4, "train --optimizer admw", "option-refused", "--optimizer admw", "expected adam, adamw",
            r"did you mean adamw\?"),
    Mistake(5, "train --lr abc", "option-refused", "--lr abc", "expected numbers", "as in 0.1"),
    Mistake(6, "train --precision fp8", "option-refused", "--precision fp8", "expected one of", "bf16, fp16"),
    Mistake(7, "train mnist", "option-refused", "'mnist'", "after its flag", r"did you mean --task mnist\?"),
    Mistake(47, "train --lr -0.1", "option-refused", "--lr -0.1", "expected numbers above 0", "as in 0.1"),
    # paths and names, found by the launcher
    Mistake(8, f"{RUN} --task mnist --data /data/imagnet", "data-unreadable", "--data /data/imagnet does not exist",
            "expected a folder", "fetch them with"),
    Mistake(9, f"{RUN} --task mnsit", "option-refused", "--task mnsit", "expected bert", r"did you mean mnist\?"),
    Mistake(10, f"{RUN} --task goood.py:Mine", "file-missing", r"goood\.py: does not exist", "expected a Python file",
            r"did you mean good.py\?"),
    Mistake(11, f"{RUN} --task good.py:Mien", "task-broken", "Mien", "good.py has no", r"did you mean Mine\?"),
    Mistake(12, "train --batch-size 8 --ranks 3 --task good.py:Mine --balance 5,2", "option-refused",
            "2 weights", "for 3 ranks", "give one weight per rank"),
    Mistake(13, "train --batch-size 8 --task good.py:Mine --devices cuda:77", "device-missing",
            "asks for cuda:77", "this node shows", r"name (cpu|devices)", is_warm=cpu_build() is None),
    Mistake(14, "train --cpu --global-batch-size 8 --task good.py:Mine --join tcp://127.0.0.1:29411", "option-refused",
            "--join tcp://127.0.0.1:29411", "needs --min-ranks N", "as soon as N ranks"),
    Mistake(15, f"{RUN} --join 127.0.0.1:29411 --min-ranks 1", "option-refused", "--join 127.0.0.1:29411", "expected",
            "tcp://HOST:PORT or file:///PATH"),
    Mistake(44, f"{RUN} --task good.py:Helper", "task-broken", "Helper is not a task", "expected a class",
            "inherits from Task"),
    # the task, found on a worker
    Mistake(16, f"{RUN} --task mean.py:Mine", "task-broken", "the mean of 'loss'", "expected 0", r"reduction='sum'",
            is_warm=True),
    Mistake(17, f"{RUN} --task shape.py:Mine", "worker-raised", "shapes cannot be multiplied", FAILED,
            r"shape\.py:\d+ in loss", EXIT_FAILED, is_warm=True),
    Mistake(18, f"{RUN} --task sample.py:Mine", "worker-raised", "KeyError: 'label'", FAILED,
            r"sample\.py:\d+ in __getitem__.*sample 13", EXIT_FAILED, is_warm=True),
    Mistake(19, f"{RUN} --task key.py:Mine", "worker-raised", "KeyError: 'label'", FAILED, r"key\.py:\d+ in loss",
            EXIT_FAILED, is_warm=True),
    Mistake(20, f"{RUN} --task syntax.py:Mine", "task-broken", r"class Mine\(Task\)", "expected ':'", "line 11"),
    Mistake(21, f"{RUN} --task absent.py:Mine", "task-broken", "notamodule", "there is no module", "install it",
            is_warm=True),
    Mistake(22, f"{RUN} --task nan.py:Mine", "loss-not-finite", "its gradient is not finite", "--max-skipped-steps",
            "lower --lr", EXIT_FAILED, is_warm=True),
    Mistake(23, f"{RUN} --task number.py:Mine", "task-broken", "gave float for 'loss'", "expected the sum, a tensor",
            r"without \.item\(\)", is_warm=True),
    Mistake(24, f"{RUN} --task modle.py:Mine", "task-broken", "build_modle", r"has no build_model\(\)",
            r"did you mean that\?|rename", is_warm=True),
    Mistake(25, f"{RUN} --task stream.py:Mine", "task-broken", "list_iterator", "expected __len__ and __getitem__",
            "read it into a list", is_warm=True),
    Mistake(26, "train --cpu --batch-size 8 --max-update 20 --task good.py:Mine --lr 1e30", "loss-not-finite",
            "the loss is not finite", "10 steps in a row", "lower --lr", EXIT_FAILED, is_warm=True),
    Mistake(27, "train --cpu --batch-size 8 --task good.py:Mine", "", "no end", "--max-update",
            "Ctrl-C or SIGTERM ends it", EXIT_STOPPED, "(?=this run has no end)", is_warm=True),
    Mistake(43, f"{RUN} --task tasks.mine:Mine", "task-broken", "tasks.mine", "hides",
            r"--task tasks/mine\.py:Mine", is_warm=True, at="own"),
    # files of options
    Mistake(28, "train --config nope.yaml", "file-missing", "--config nope.yaml", "expected a YAML file",
            r"did you mean note\.yaml\?|seen from"),
    Mistake(29, "train --config key.yaml", "option-refused", "max_sentance", "line 2: unknown option",
            r"did you mean max_sentences\?"),
    Mistake(30, "train --config broken.yaml", "option-refused", "line 2: not YAML: mapping values",
            "expected one `option: value` per line", "quotes"),
    Mistake(46, "train --config list.yaml", "option-refused", "found a list", "expected one `option: value` per line",
            "as in `"),
    # the run directory
    Mistake(31, f"{RUN} --task good.py:Mine --save-dir checkout", "save-dir-unusable", "--save-dir .*checkout",
            r"holds|no run|not a run", "another|choose"),
    Mistake(32, f"{RUN} --task good.py:Mine --save-dir /proc/hetseq", "save-dir-unusable",
            "--save-dir /proc/hetseq cannot be used", "would have to be made in", "choose another --save-dir"),
    Mistake(33, "train --cpu --batch-size 8 --max-update 3 --save-interval-updates 1 --save-dir disk/run",
            "save-failed", "ENOSPC", "the newest checkpoint is of step 1", "check --save-dir", EXIT_FAILED,
            is_warm=True, around=small_disk),
    Mistake(34, f"{RUN} --task good.py:Mine --save-dir trained --global-batch-size 12", "checkpoint-refused",
            "--global-batch-size 12", "8 samples", "leave it out", is_warm=True),
    Mistake(35, f"{RUN} --task good.py:Mine --save-dir resumed --max-update 6 --lr 0.5", "", "--lr 0.001 -> 0.5",
            "changed since step 4", "", EXIT_DONE, "(?=changed since)", is_warm=True),
    Mistake(45, f"{RUN} --task wide.py:Mine --save-dir trained --max-update 6", "checkpoint-refused", "another model",
            r"model\.", "choose another --save-dir", is_warm=True),
    Mistake(48, f"{RUN} --task good.py:Mine --save-dir good.py", "save-dir-unusable", "good.py is a file",
            "choose a directory", "such as .*good.py-run"),
    # the other commands
    Mistake(36, "top trianed", "run-missing", "trianed does not exist", "expected the --save-dir of a run",
            r"did you mean trained\?"),
    Mistake(37, "checkpoints", "option-refused", "the action is missing", "expected list, show", "as in: hetseq"),
    Mistake(38, "checkpoints show trained --step 99", "checkpoint-refused", "no usable checkpoint of step 99",
            "the newest steps are 4", "hetseq checkpoints list"),
    Mistake(39, "top prepared --once", "run-not-training", "prepared has not started", "expected a run that has",
            "hetseq train --config prepared/config.yaml"),
    Mistake(40, "script slurm --nodes 2 -- --task mnist", "option-refused", "--nodes 2", "needs --global-batch-size N",
            "after --"),
    Mistake(41, "ssh --hosts nosuchhost:2 --ssh {ssh} -- --task mnist --global-batch-size 8", "",
            r"ended with 255 \(ssh: Could not resolve hostname", "must work without a prompt",
            "check the name, that the machine is on", 1, "(?=nosuchhost cannot take part)"),
    Mistake(42, "drop trained {node}", "run-not-training", "trained has ended", "expected a run in progress",
            "hetseq top trained"),
    # several nodes
    Mistake(49, "train --cpu --global-batch-size 8 --task good.py:Mine --distributed-init-method"
            " tcp://127.0.0.1:{port} --distributed-world-size 2 --distributed-rank 0", "port-taken",
            r"cannot listen at 127\.0\.0\.1", "uses it", "choose another port", around=taken_port),
    Mistake(50, "train --cpu --global-batch-size 8 --task good.py:Mine --join {url} --min-ranks 2 --secret-file mine",
            "secret-differs", "hold different secrets", r"here: \S*mine", "Copy the head's secret", 78,
            around=other_secret),
]  # fmt: skip
#: rows whose first line need not have all three, and why
EXCEPTIONS = {35: "another --lr is meant as often as not: it is told, and there is nothing to mend"}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, warm: WarmLauncher) -> Path:
    """The current folder of all rows."""
    ground = tmp_path_factory.mktemp("mistakes")
    for name, (written, instead) in TASKS.items():
        (ground / f"{name}.py").write_text(TASK.replace(written, instead) if written else TASK)
    for folder in ("own/tasks", "checkout/.git", "home"):
        (ground / folder).mkdir(parents=True)
    (ground / "own" / "tasks" / "mine.py").write_text(TASK)
    (ground / "checkout" / "README.md").write_text("# mine\n")
    (ground / "checkout" / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (ground / "key.yaml").write_text("lr: 0.1\nmax_sentance: 3\n")
    (ground / "note.yaml").write_text("lr: 0.1\n")
    (ground / "broken.yaml").write_text("lr: 0.1\ntask: good.py: Mine\n")
    (ground / "list.yaml").write_text("- lr: 0.1\n- max_update: 3\n")
    for name in ("mine", "theirs"):
        (ground / name).write_text(name[0].encode().hex() * 32)
        (ground / name).chmod(0o600)
    program(ground / "bin" / "ssh", SSH)
    trained = warm.run(shlex.split(f"{RUN} --task good.py:Mine --save-dir trained"), cwd=ground)
    assert trained.code == 0, trained.err
    shutil.copytree(ground / "trained", ground / "resumed")
    shutil.copytree(ground / "trained", ground / "prepared")
    shutil.rmtree(ground / "prepared" / "status")
    return ground


# ------------------------------------------------------------------------------------------------------ the answers


class Answers:
    """What came of each row: each is asked once."""

    def __init__(self, ground: Path, warm: WarmLauncher, cold: Commands) -> None:
        self._ground, self._warm, self._cold = ground, warm, cold
        self._known: dict[int, Answer | pytest.skip.Exception] = {}

    def of(self, mistake: Mistake) -> Answer:
        """Its answer; the test is skipped if it cannot be provoked here."""
        if mistake.number not in self._known:
            try:
                self._known[mistake.number] = self._ask(mistake)
            except pytest.skip.Exception as skipped:
                self._known[mistake.number] = skipped
        answer = self._known[mistake.number]
        if isinstance(answer, pytest.skip.Exception):
            raise answer
        return answer

    def _ask(self, mistake: Mistake) -> Answer:
        try:
            return self._provoke(mistake)
        finally:
            forget_memory(self._ground)

    def _provoke(self, mistake: Mistake) -> Answer:
        values = {"node": socket.gethostname(), "ssh": str(self._ground / "bin" / "ssh")}
        words, cwd = mistake.words, self._ground / mistake.at
        if words.startswith("train ") and "--save-dir" not in words:
            words += f" --save-dir run-{mistake.number}"
        if mistake.around is None:
            return self._run(mistake, shlex.split(words.format(**values)), cwd)
        with mistake.around(self._ground) as more:
            return self._run(mistake, shlex.split(words.format(**values, **more)), cwd)

    def _run(self, mistake: Mistake, words: list[str], cwd: Path) -> Answer:
        if mistake.exit == EXIT_STOPPED:
            return self._interrupt(words, cwd)
        if not mistake.is_warm:
            return self._cold.run(words, cwd=cwd)
        finished = self._warm.run(words, cwd=cwd)
        return Answer(finished.code, finished.out, finished.err, has_torch=True)

    def _interrupt(self, words: list[str], cwd: Path) -> Answer:
        """A command that has no end of its own: Ctrl-C after its first step."""
        with start_command(words, cwd=cwd, program=HETSEQ, is_cold=False) as command:
            command.wait_for_step(cwd / words[words.index("--save-dir") + 1], 1)
            command.send_signal(signal.SIGINT)
            finished = command.finish()
        return Answer(finished.code, finished.out, finished.err, has_torch=True)


@pytest.fixture(scope="module")
def answers(ground: Path, warm: WarmLauncher) -> Iterator[Answers]:
    commands = Commands({"HOME": str(ground / "home"), "GLOO_SOCKET_IFNAME": "lo"})
    try:
        yield Answers(ground, warm, commands)
    finally:
        commands.close()


def answer_in(mistake: Mistake, text: str) -> str:
    """The answer in what was written on standard error, from its first line on."""
    found = re.search(rf"^{mistake.begins}", text, re.MULTILINE)
    return "" if found is None else text[found.end() :]


def lacking(mistake: Mistake, answer: Answer) -> list[str]:
    """The patterns that the first line lacks."""
    line = answer_in(mistake, answer.err).partition("\n")[0]
    return [wanted for wanted in (mistake.found, mistake.expected, mistake.remedy) if not re.search(wanted, line)]


# -------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.number}")
def test_a_mistake_is_answered_with_a_code_and_no_traceback_of_ours(answers: Answers, mistake: Mistake) -> None:
    answer = answers.of(mistake)
    everything = answer.out + answer.err
    assert answer.code == mistake.exit, everything
    assert answer_in(mistake, answer.err), f"no answer: {everything}"
    assert codes_in(answer_in(mistake, answer.err))[:1] == [mistake.code][: bool(mistake.code)], everything
    assert not re.search(rf'File "{re.escape(str(ROOT))}/hetseq/', everything), everything
    assert answer.has_torch == mistake.is_warm, everything


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.number}")
def test_the_first_line_says_what_was_found_what_was_expected_and_the_remedy(
    answers: Answers, mistake: Mistake
) -> None:
    if mistake.number in EXCEPTIONS:
        pytest.skip(EXCEPTIONS[mistake.number])
    answer = answers.of(mistake)
    assert lacking(mistake, answer) == [], answer.err


@pytest.mark.timeout(300)  # by itself it asks all of them
def test_of_fifty_mistakes_at_least_48_are_answered_in_full(answers: Answers) -> None:
    assert sorted(mistake.number for mistake in MISTAKES) == list(range(1, 51))
    assert len(EXCEPTIONS) <= 2
    full = []
    for mistake in sorted(MISTAKES, key=lambda mistake: mistake.number):
        try:
            answer = answers.of(mistake)
        except pytest.skip.Exception as skipped:
            print(f"{mistake.number:>3}  not tried here: {skipped}")
            continue
        missing = lacking(mistake, answer)
        line = answer_in(mistake, answer.err).partition("\n")[0]
        print(f"{mistake.number:>3}  {answer.code:>3}  {f'lacks {missing}: ' if missing else ''}{line[:200]}")
        full += [] if missing or mistake.number in EXCEPTIONS else [mistake.number]
    print(f"{len(full)} of {len(MISTAKES)} say what was found, what was expected and the remedy")
    assert len(full) >= 48
