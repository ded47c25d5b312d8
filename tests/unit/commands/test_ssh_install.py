"""`hetseq ssh --install`: the plan for a host from its facts, the wheels, the program on a host, and what is said."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetseq.cluster.membership.compatibility import source_below
from hetseq.commands.ssh import connections, host_agent, wheels
from hetseq.commands.ssh.command import COMMAND, parse_install, run
from hetseq.commands.ssh.install import DEFAULT_ENV, Installation, InstallRequest
from hetseq.commands.ssh.install_plan import Plan, Wanted, choose, plan, plan_all
from hetseq.errors import EXIT_INTERRUPTED, ConfigError
from hetseq.system.torch_builds import Choice
from tests.support.docs import ROOT
from tests.unit.commands.test_script import program

PINS = {"torch": "2.13.0+cu130", "numpy": "2.4.6", "pyyaml": "6.0.3"}
WANTED = Wanted(PINS, "hetseq-2.0-py3-none-any.whl", "0123456789ab", "pip-23.2-py3-none-any.whl")
BARE = {
    "python": "3.11.7", "executable": "/usr/bin/python3.11", "folder": "/users/ada/.hetseq/env", "has_python": False,
    "is_foreign": False, "installed": {}, "marker": {}, "free_bytes": 1 << 40, "nvidia": [], "driver": "",
    "has_amd": False, "owner": "a", "trouble": "",
}  # fmt: skip
READY = {
    **BARE, "has_python": True, "marker": {"wheel": "0123456789ab", "build": "cpu"},
    "installed": {"torch": "2.13.0+cpu", "numpy": "2.4.6", "pyyaml": "6.0.3", "pip": "23.2", "hetseq": "2.0"},
}  # fmt: skip
CPU = Choice("cpu")
INDEX = "https://download.pytorch.org/whl"
PIP = "/users/ada/.hetseq/env/bin/python -u {files}/pip-23.2-py3-none-any.whl/pip install"
QUIET = "--no-input --disable-pip-version-check --progress-bar off"


def lines(found: Plan) -> list[str]:
    return [" ".join(words) for words in found.commands]


# The plan


def test_a_bare_host_gets_everything_and_torch_alone_from_its_index() -> None:
    found = plan(WANTED, BARE, CPU)
    assert lines(found) == [
        "/usr/bin/python3.11 -m venv --without-pip /users/ada/.hetseq/env",
        f"{PIP} {QUIET} --no-deps --index-url {INDEX}/cpu torch==2.13.0",
        f"{PIP} {QUIET} torch==2.13.0 numpy==2.4.6 pyyaml==6.0.3 {{files}}/pip-23.2-py3-none-any.whl",
        f"{PIP} {QUIET} --no-deps --no-index --force-reinstall {{files}}/hetseq-2.0-py3-none-any.whl",
        "/users/ada/.hetseq/env/bin/python -m hetseq --version",
    ]
    assert found.marker == {"wheel": "0123456789ab", "build": "cpu"}
    assert found.about.endswith("with Python 3.11.7, torch 2.13.0 (cpu), numpy==2.4.6, pyyaml==6.0.3, hetseq 2.0")


def test_a_host_that_has_everything_has_nothing_to_do() -> None:
    assert plan(WANTED, READY, CPU) == Plan(
        "nothing to do: /users/ada/.hetseq/env has torch 2.13.0+cpu and the rest already"
    )


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        ({"marker": {**READY["marker"], "wheel": "other"}}, ["hetseq-2.0", "--version"]),
        ({"installed": {**READY["installed"], "numpy": "2.0.0"}}, ["numpy==2.4.6", "--version"]),
        ({"installed": {**READY["installed"], "torch": "2.12.0+cpu"}}, ["cpu torch==2.13.0", "numpy", "--version"]),
        ({"installed": {**READY["installed"], "torch": "2.13.0+cu126"}},
         ["--force-reinstall --index-url", "numpy", "--version"]),
        ({"marker": {}}, ["numpy", "hetseq-2.0", "--version"]),  # left in the middle
    ],
)  # fmt: skip
def test_only_what_is_missing_is_installed(change: dict[str, Any], steps: list[str]) -> None:
    found = lines(plan(WANTED, {**READY, **change}, CPU))
    assert len(found) == len(steps)
    assert all(step in line for step, line in zip(steps, found))


@pytest.mark.parametrize(
    ("packages", "options"),
    [("/wheels", "--no-index --find-links /wheels"), ("https://mirror/simple", "--index-url https://mirror/simple")],
)
def test_a_place_of_packages_is_used_for_torch_too(packages: str, options: str) -> None:
    wanted = Wanted(PINS, WANTED.wheel, WANTED.digest, WANTED.pip, packages)
    _, torch, rest, _, _ = lines(plan(wanted, BARE, Choice("cu126")))
    assert options in torch
    assert options in rest
    assert "pytorch.org" not in torch + rest
    plain = {**READY, "installed": {**READY["installed"], "torch": "2.13.0"}, "marker": {**READY["marker"]}}
    assert plan(wanted, plain, CPU).commands == ()  # a mirror may have torch without a build tag


def test_what_torch_needs_for_rocm_comes_from_its_index_too() -> None:
    assert "--no-deps" not in lines(plan(WANTED, BARE, Choice("rocm7.2")))[1]


@pytest.mark.parametrize(
    ("change", "choice", "refusal"),
    [
        ({"trouble": "/users cannot be written: Read-only file system"}, CPU, "name another folder with --env"),
        ({"is_foreign": True}, CPU, "exists and is no virtual environment"),
        (
            {"free_bytes": 1 << 30},
            CPU,
            "1.0 GiB are free in /users/ada/.hetseq/env, and torch with the rest takes about 2",
        ),
        ({"free_bytes": 7 << 30}, Choice("cu130"), "takes about 8"),
        ({}, Choice("", "its NVIDIA driver 470 is too old"), "driver 470 is too old"),
    ],
)
def test_a_host_where_it_cannot_be_done_is_told_why(change: dict[str, Any], choice: Choice, refusal: str) -> None:
    found = plan(WANTED, {**BARE, **change}, choice)
    assert found.commands == ()
    assert refusal in found.refusal


def test_the_build_fits_the_cards_of_a_host() -> None:
    def build(*cards: tuple[str, str], driver: str = "580.65", **more: Any) -> str:
        return choose(WANTED, [{**BARE, "nvidia": cards, "driver": driver, **more}]).build

    assert build(driver="") == "cpu"
    assert build(("RTX 4090", "8.9")) == "cu130"
    assert build(("RTX 4090", "8.9"), ("GTX 1080", "6.1")) == "cu126"
    assert build(("RTX 3090", "8.6"), driver="550.54.14") == "cu126"
    assert build(("A100", ""), driver="470.1") == ""  # too old to name the capability
    assert build(driver="", has_amd=True) == "rocm7.2"
    assert "as no build has code for its card" in plan(WANTED, {**BARE, "nvidia": [("K80", "3.7")]}, CPU).about


def test_hosts_that_share_the_folder_are_one_with_the_cards_of_all() -> None:
    old = {**BARE, "nvidia": [("GTX 1080", "6.1")], "driver": "580.1"}
    plans = plan_all(WANTED, {"a": BARE, "b": old, "c": {**BARE, "owner": "c"}})
    assert [bool(plans[name].commands) for name in "abc"] == [True, False, True]
    assert "torch 2.13.0 (cu126)" in plans["a"].about
    assert (plans["b"].owner, plans["b"].about) == ("a", "shares /users/ada/.hetseq/env with a, which installs it")
    assert "torch 2.13.0 (cpu)" in plans["c"].about
    plans = plan_all(WANTED, {"b": BARE, "c": BARE})  # the owner a has not answered
    assert (plans["b"].owner, plans["c"].owner) == ("", "b")
    new = {**BARE, "nvidia": [("RTX 5090", "12.0")], "driver": "580.1"}
    assert "give --env a folder that these hosts do not share" in plan_all(WANTED, {"a": new, "b": old})["a"].refusal


# The wheels


def test_the_wheel_of_a_checkout_is_its_source_and_the_same_each_time(tmp_path: Path) -> None:
    ours = wheels.hetseq_wheel()
    assert ours == wheels.hetseq_wheel()
    with zipfile.ZipFile(io.BytesIO(ours.content)) as archive:
        archive.extractall(tmp_path)
    assert source_below(tmp_path / "hetseq") == source_below(ROOT / "hetseq")
    info = next(tmp_path.glob("*.dist-info"))
    assert {path.name for path in tmp_path.iterdir()} == {"hetseq", info.name}
    recorded = {line.split(",")[0] for line in (info / "RECORD").read_text().splitlines()}
    assert recorded == {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert "hetseq = hetseq.cli:main" in (info / "entry_points.txt").read_text()


def test_pip_runs_from_its_wheel(tmp_path: Path) -> None:
    pip = wheels.pip_wheel()
    (tmp_path / pip.name).write_bytes(pip.content)
    words = [sys.executable, f"{tmp_path / pip.name}/pip", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"pip {pip.name.split('-')[1]} from {tmp_path}"), done.stderr


def test_the_versions_are_those_of_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    found = wheels.pinned()
    assert {"torch", "numpy", "pyyaml", "tensorboard", "safetensors", "rich", "tokenizers"} <= set(found)
    assert "mypy" not in found
    asked = wheels.importlib.metadata.version

    def version(name: str) -> str:
        if name in lacking:
            raise wheels.importlib.metadata.PackageNotFoundError(name)
        return asked(name)

    monkeypatch.setattr(wheels.importlib.metadata, "version", version)
    lacking = {"h5py", "scikit-learn"}
    assert not lacking & set(wheels.pinned())
    lacking = {"torch"}
    with pytest.raises(ConfigError, match="torch is not installed here, and the hosts are to have its version"):
        wheels.pinned()


# The program on a host

NVIDIA = """
case "$1" in
  *compute_cap*) [ -n "$OLD" ] && { echo 'Field "compute_cap" is not a valid field'; exit 2; }
    echo "580.65.06, NVIDIA GeForce GTX 1080, 6.1"; echo "580.65.06, NVIDIA RTX A6000, 8.6" ;;
  *) echo "470.1, Tesla K80" ;;
esac
"""


def test_cards_are_asked_from_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "nvidia-smi", NVIDIA)
    monkeypatch.setattr(host_agent, "_KFD", tmp_path / "nodes")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    cards = [("NVIDIA GeForce GTX 1080", "6.1"), ("NVIDIA RTX A6000", "8.6")]
    assert host_agent.cards() == {"nvidia": cards, "driver": "580.65.06", "has_amd": False}
    monkeypatch.setenv("OLD", "1")
    for number, gpu in enumerate(("0", "51236")):  # a CPU is a node of this kind, too
        (tmp_path / "nodes" / str(number)).mkdir(parents=True)
        (tmp_path / "nodes" / str(number) / "gpu_id").write_text(f"{gpu}\n")
    assert host_agent.cards() == {"nvidia": [("Tesla K80", "")], "driver": "470.1", "has_amd": True}
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'has failed: no driver'; exit 9\n")
    assert host_agent.cards()["nvidia"] == []


def test_an_environment_is_told_with_its_packages_and_a_foreign_folder_as_such(tmp_path: Path) -> None:
    folder = tmp_path / "env"
    assert not host_agent.facts_of(folder, tmp_path)["is_foreign"]
    site = folder / "lib" / "python3.11" / "site-packages"
    (site / "torch").mkdir(parents=True)
    assert host_agent.facts_of(folder, tmp_path)["is_foreign"]
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    (site / "torch" / "version.py").write_text("__version__ = '2.13.0+cu126'\n")
    for name, version in (("torch", "2.13.0"), ("Scikit_Learn", "1.9.1")):
        (site / f"{name}-{version}.dist-info").mkdir()
        (site / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    facts = host_agent.facts_of(folder, tmp_path)
    assert (facts["is_foreign"], facts["has_python"], facts["marker"]) == (False, True, {})
    assert facts["installed"] == {"torch": "2.13.0+cu126", "scikit-learn": "1.9.1"}


class Agent:
    """The program as a process, whose home is a folder."""

    def __init__(self, home: Path, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, host_agent.__file__], env={**os.environ, "HOME": str(home)}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self.tell({"env": "~/deep/env", "token": "t", "name": name})
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(host_agent.MARK)
        self.facts = json.loads(line.removeprefix(host_agent.MARK))

    def tell(self, word: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(word) + "\n")

    def end(self) -> tuple[int, str]:
        """Exit code and output once its standard input is closed."""
        out, _ = self.process.communicate(timeout=20)
        return self.process.returncode, out


def test_two_programs_in_one_home_find_out_and_leave_nothing(tmp_path: Path) -> None:
    one, other = Agent(tmp_path, "a"), Agent(tmp_path, "b")
    assert (one.facts["owner"], other.facts["owner"]) == ("a", "a")
    assert one.facts["folder"] == str(tmp_path / "deep" / "env")
    assert (other.end()[0], one.end()[0]) == (0, 0)
    assert list(tmp_path.iterdir()) == []


def test_commands_are_run_in_order_with_the_files_and_noted(tmp_path: Path) -> None:
    agent = Agent(tmp_path, "a")
    (tmp_path / "deep" / "env").mkdir(parents=True)
    commands = [["cat", "{files}/one"], ["sh", "-c", "echo two"]]
    agent.tell({"files": {"one": "b25lCg=="}, "commands": commands, "marker": {"build": "cpu"}})
    assert agent.process.wait(timeout=20) == 0
    assert agent.end() == (0, "one\ntwo\n")
    assert json.loads((tmp_path / "deep" / "env" / host_agent.MARKER).read_text()) == {"build": "cpu"}


def test_the_first_command_that_fails_is_the_last(tmp_path: Path) -> None:
    agent = Agent(tmp_path, "a")
    agent.tell({"files": {}, "commands": [["sh", "-c", "exit 7"], ["echo", "no"]], "marker": {}})
    assert agent.process.wait(timeout=20) == 7
    assert agent.end() == (7, "")
    assert list(tmp_path.rglob(host_agent.MARKER)) == []


def test_a_command_ends_with_the_connection(tmp_path: Path) -> None:
    agent = Agent(tmp_path, "a")
    agent.tell({"files": {}, "commands": [["sh", "-c", "echo $$; exec sleep 100"]], "marker": {}})
    assert agent.process.stdout is not None
    pid = int(agent.process.stdout.readline())
    assert agent.end()[0] == 1
    assert not Path(f"/proc/{pid}").exists()


# The near end

#: a host that a shell plays: what it answers follows from its name
HOST = """
while [[ "$1" == -* ]]; do [ "$1" = -o ] && shift; shift; done
[ "$1" = off ] && { echo "ssh: no route" >&2; exit 255; }
[ "$1" = mute ] && exec sleep 100
[ "$1" = bare ] && exit 3
read program; read asked
echo 'hetseq host agent: FACTS'
read order || exit 0
echo "Collecting torch"; echo "Downloading torch"
[ "$1" = slow ] && exec sleep 100
[ "$1" = broken ] && { echo "ERROR: no torch" >&2; echo "[notice] a new pip" >&2; exit 1; }
exit 0
"""


class Near:
    """Hosts that a shell plays, and what was said of them."""

    def __init__(self, folder: Path) -> None:
        self.out, self.err = list[str](), list[str]()
        self.bell, self.ring = os.pipe()
        self.ssh = folder / "ssh"

    def run(self, hosts: str, *, is_dry: bool = False, facts: dict[str, Any] = BARE, **limits: float) -> int:
        program(self.ssh, HOST.replace("FACTS", json.dumps({**facts, "owner": ""})))
        request = InstallRequest(tuple(hosts.split(",")), (str(self.ssh),), is_dry=is_dry)
        files = [wheels.Wheel(WANTED.wheel, b"x" * 300_000), wheels.Wheel(WANTED.pip, b"y")]
        installation = Installation(request, WANTED, files, bell=self.bell, say=self.out.append, **limits)
        try:
            return installation.run()
        finally:
            installation.close()

    def close(self) -> None:
        os.close(self.bell)
        os.close(self.ring)


@pytest.fixture
def near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Near]:
    found = Near(tmp_path)
    monkeypatch.setattr(Installation, "_tell", staticmethod(found.err.append))
    monkeypatch.setattr(connections, "_HANG_UP_S", 0.5)
    monkeypatch.setattr(connections, "_LOOK_S", 0.02)
    yield found
    found.close()


def test_all_hosts_are_made_ready_and_the_command_of_a_run_is_said(near: Near) -> None:
    assert near.run("a,ada@b") == 0
    assert sorted(near.out) == ["[a] Downloading torch", "[ada@b] Downloading torch"]
    assert near.err[-1] == (
        "2 of 2 hosts are ready: hetseq ssh --hosts a,ada@b --env '~/.hetseq/env' -- OPTIONS OF hetseq train"
    )


def test_a_second_time_nothing_is_sent(near: Near) -> None:
    assert near.run("a,b", facts=READY) == 0
    assert near.out == []
    assert [line.partition(":")[0] for line in near.err] == ["a", "b", "2 of 2 hosts are ready"]
    assert "nothing to do" in near.err[0]


def test_a_dry_run_prints_the_commands_and_sends_none(near: Near) -> None:
    assert near.run("a", is_dry=True) == 0
    assert [line.split()[0] for line in near.out] == ["[a]"] * 5
    assert near.out[0] == "[a] /usr/bin/python3.11 -m venv --without-pip /users/ada/.hetseq/env"
    assert "Downloading" not in "".join(near.out)


def test_a_host_that_fails_is_named_with_a_remedy_and_the_others_are_made_ready(near: Near) -> None:
    assert near.run("off,a,bare,broken") == 1
    *failures, last = [line.split(" failed: ", 1) for line in near.err if "failed: " in line]
    failed = dict(failures)
    assert last == ["1 of 4 hosts are ready;", "off, bare, broken"]
    assert failed["off"].startswith("ssh ended with 255 (ssh: no route): `")
    assert "must work without a prompt" in failed["off"]
    assert "no Python of 3.10 or newer with the module venv: name one with --python PATH" in failed["bare"]
    assert failed["broken"].startswith("a command there ended with 1 (ERROR: no torch): does it reach")
    assert "[a] Downloading torch" in near.out


@pytest.mark.parametrize(
    ("host", "limits", "why"),
    [
        ("mute", {"answer_s": 0.1}, "mute failed: it did not answer within 0.1 s over ssh: try `"),
        ("slow", {"install_s": 0.06}, "slow failed: it was not done within 0.001 minutes, and was stopped: the same"),
    ],
)
def test_a_host_that_does_not_end_is_given_up(near: Near, host: str, limits: dict[str, float], why: str) -> None:
    assert near.run(host, **limits) == 1
    assert near.err[-2].startswith(why)


def test_a_signal_stops_all_hosts(near: Near) -> None:
    os.write(near.ring, bytes([signal.SIGINT]))
    assert near.run("mute") == EXIT_INTERRUPTED
    assert near.err == ["stopped: the same command continues with what is there"]


# The command line


def test_options_of_the_installation() -> None:
    line = "--install --hosts labA:2,ada@labB --env /shared/env/ --packages /wheels --dry-run"
    request = parse_install(COMMAND.read(shlex.split(line)))
    assert request == InstallRequest(("labA", "ada@labB"), ("ssh",), "/shared/env", None, None, "/wheels", is_dry=True)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--install", "--hosts LIST is missing, as in: hetseq ssh --hosts"),
        ("--install --hosts a,a", "names a host twice"),
        ("--install --hosts a --env here", "--env here: expected a path that begins with / or ~/"),
        ("--install --hosts a --directory x", "--directory belongs to a run: leave it out beside --install"),
        ("--install --hosts a -- --task mnist", "--install runs nothing: leave out -- and what follows"),
        ("--hosts a --dry-run -- --task mnist", "--dry-run belongs to --install: leave it out, or add --install"),
        ("--hosts a --env ~/env --python py -- --task mnist", "--env and --python are both given"),
    ],
)
def test_a_line_that_cannot_be_meant_is_refused(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        run(shlex.split(line), print)
    assert said in str(refusal.value)


def test_the_search_for_a_python_prefers_the_version_of_this_one_and_the_home_is_that_of_the_host() -> None:
    request = InstallRequest(("a",), ("ssh",), env_setup="module load python")
    bell, ring = os.pipe()
    steps = Installation(request, WANTED, [], bell=bell, say=print)._steps()
    assert steps[0] == "module load python"
    assert f"for python in python{sys.version_info[0]}.{sys.version_info[1]} python3 " in steps[-1]
    request = InstallRequest(("a",), ("ssh",), python="~/my python")
    assert (
        """for python in "$HOME"/'my python'; do"""
        in Installation(request, WANTED, [], bell=bell, say=print)._steps()[-1]
    )
    os.close(bell)
    os.close(ring)
    assert DEFAULT_ENV.startswith("~/")
