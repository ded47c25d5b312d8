"""`hetseq script`: what scripts ask for and start, with stand-ins for the schedulers, and what is refused."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from hetseq.commands.script import command as script
from hetseq.errors import ConfigError

RUN = shlex.split("--task mnist --cpu --global-batch-size 64")
ASK = {
    "slurm": ["--queue", "gpu", "--time", "24:00:00"],
    "sge": ["--queue", "gpu", "--time", "24:00:00", "--parallel-environment", "mpi"],
    "pbs": ["--queue", "gpu", "--time", "24:00:00"],
    "lsf": ["--queue", "gpu", "--time", "24:00:00"],
    "condor": [],
}
BASH = ("slurm", "sge", "pbs", "lsf")
#: how each scheduler calls the program that starts a command on another node: what stands before the command
REACH = {"sge": ("qrsh", 3), "pbs": ("pbs_tmrsh", 1), "lsf": ("blaunch", 1)}


def script_of(system: str, save_dir: Path | str, *asked: str, nodes: int = 2, run: Sequence[str] = RUN) -> str:
    lines: list[str] = []
    words = [system, "--nodes", str(nodes), *ASK[system], *asked, "--", *run, "--save-dir", str(save_dir)]
    assert script.run(words, lines.append) == 0
    return "\n".join(lines) + "\n"


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def execute(folder: Path, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script as its scheduler would run it, with the stand-ins of folder/bin; `python` there is what trains."""
    path = folder / "job.sh"
    path.write_text(text.replace("sleep 1\n", "sleep 0.05\n"))
    assert subprocess.run(["bash", "-n", str(path)], timeout=30).returncode == 0
    env = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **environment}
    return subprocess.run(["bash", str(path)], env=env, cwd=folder, capture_output=True, text=True, timeout=30)


def nodes_of(folder: Path, system: str, code: int = 0) -> dict[str, str]:
    """Stand-ins for a job on the nodes here and there, where what trains writes its words and ends with `code`."""
    (folder / "bin").mkdir()
    program(folder / "bin" / "trainer", f'echo "${{NODE:-here}}: $*" >> {folder}/words\nexit {code}')
    if system == "slurm":
        program(
            folder / "bin" / "srun",
            'while [ "$1" != bash ]; do shift; done\nNODE=here "$@" & first=$!\n'
            'NODE=there "$@" &\nwait "$first"; code=$?; wait; exit "$code"',
        )
        program(folder / "bin" / "scontrol", f'echo "$*" > {folder}/requeued')
        return {"SLURM_JOB_ID": "17"}
    name, before = REACH[system]
    program(folder / "bin" / name, f'echo "$*" >> {folder}/reached\nshift {before}\nNODE=there "$@"')
    program(folder / "bin" / "qsub", f'echo "$*" > {folder}/requeued')
    hosts = folder / "hosts"
    hosts.write_text(
        "here 4 q@here <NULL>\nthere 4 q@there <NULL>\n" if system == "sge" else "here\nhere\nthere\nthere\n"
    )
    return {
        "sge": {"JOB_ID": "17", "PE_HOSTFILE": str(hosts)},
        "pbs": {"PBS_JOBID": "17.server", "PBS_NODEFILE": str(hosts)},
        "lsf": {"LSB_JOBID": "17", "LSB_DJOB_HOSTFILE": str(hosts)},
    }[system]


@pytest.mark.parametrize("system", BASH)
def test_each_node_gets_the_command_once_and_all_meet_in_one_place(tmp_path: Path, system: str) -> None:
    environment = nodes_of(tmp_path, system)
    setup = "export GREETING='good day'"
    text = script_of(system, tmp_path / "runs" / "a", "--python", "trainer", "--setup", setup)
    done = execute(tmp_path, text, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    here, there = sorted((tmp_path / "words").read_text().splitlines())
    assert here.removeprefix("here: ") == there.removeprefix("there: ")
    meeting = "meeting-17-0" if system == "slurm" else "meeting-17"
    assert here.endswith(f"--join file://{tmp_path}/runs/{meeting} --min-ranks 2")
    assert list((tmp_path / "runs").iterdir()) == [], "nothing of the script is left"


@pytest.mark.parametrize("system", BASH)
@pytest.mark.parametrize("is_requeued", [True, False])
def test_75_goes_back_into_the_queue_only_if_that_was_asked_for(tmp_path: Path, system: str, is_requeued: bool) -> None:
    environment = nodes_of(tmp_path, system, code=75)
    asked = ["--python", "trainer", *(["--requeue"] if is_requeued else [])]
    done = execute(tmp_path, script_of(system, tmp_path / "runs" / "a", *asked), **environment)
    assert done.returncode == (99 if system == "sge" and is_requeued else 75)
    assert (tmp_path / "requeued").exists() == (is_requeued and system in ("slurm", "pbs"))


@pytest.mark.parametrize("system", ["sge", "pbs", "lsf"])
def test_a_signal_to_the_first_node_reaches_the_others_once(tmp_path: Path, system: str) -> None:
    environment = nodes_of(tmp_path, system)
    heard = f"trap 'echo \"${{NODE:-here}} USR1\" >> {tmp_path}/heard; left=9' USR1\nleft=200\n"
    signal = f'[ "${{NODE:-here}}" = there ] && kill -TERM "$(cat {tmp_path}/job)"\n'
    program(tmp_path / "bin" / "trainer", heard + signal + "for ((; left > 0; left--)); do sleep 0.05; done\nexit 75")
    text = script_of(system, tmp_path / "runs" / "a", "--python", "trainer")
    text = text.replace("#!/bin/bash\n", f"#!/bin/bash\necho $$ > {tmp_path}/job\n", 1)
    assert execute(tmp_path, text, **environment).returncode == 75
    assert sorted((tmp_path / "heard").read_text().splitlines()) == ["here USR1", "there USR1"]


def test_the_scripts_ask_for_what_was_asked() -> None:
    asked = ["--gpus-per-node", "2", "--cpus-per-node", "8", "--memory", "64G", "--account", "ada"]
    gpu_run = shlex.split("--task mnist --global-batch-size 64")
    for system, wants in {
        "slurm": ["--nodes=2", "--gpus-per-node=2", "--cpus-per-task=8", "--mem=64G", "--time=24:00:00",
                  "--partition=gpu", "--account=ada", "--signal=USR1@120", "--no-requeue", "--job-name=digits"],
        "sge": ["-pe mpi 16", "-l gpu=2", "-l mem_free=64G", "-l h_rt=24:00:00", "-q gpu", "-P ada", "-r n"],
        "pbs": ["-l select=2:ncpus=8:ngpus=2:mem=64G", "-l place=scatter", "-l walltime=24:00:00", "-q gpu", "-A ada"],
        "lsf": ["-n 16", '-R "span[ptile=8] rusage[mem=64G]"', '-gpu "num=2"', "-W 24:00", "-q gpu", "-P ada"],
        "condor": ["request_gpus = 2", "request_cpus = 8", "request_memory = 64G", "accounting_group = ada", "queue 2"],
    }.items():  # fmt: skip
        text = script_of(system, "runs/digits", *asked, run=gpu_run)
        assert [want for want in wants if want not in text] == [], system
        assert "--min-ranks 4" in text
        assert "--ranks 2" in text


@pytest.mark.parametrize("system", BASH)
def test_a_script_of_ones_own_stands_behind_all_options(
    tmp_path: Path, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = nodes_of(tmp_path, system)
    monkeypatch.chdir(tmp_path)
    Path("mine.py").touch()
    lines: list[str] = []
    mine = ["run", "--cpu", "mine.py", "--data", "a b"]
    words = [system, "--nodes", "2", *ASK[system], "--python", "trainer", "--", *mine]
    assert script.run(words, lines.append) == 0
    done = execute(tmp_path, "\n".join(lines) + "\n", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    here, there = sorted((tmp_path / "words").read_text().splitlines())
    assert here.removeprefix("here: ") == there.removeprefix("there: ")
    assert here.startswith("here: -m hetseq run --cpu --join file://")
    assert here.endswith(" --min-ranks 2 mine.py --data a b")
    Path("mine.py").unlink()
    with pytest.raises(ConfigError, match=r"there is no script mine\.py"):
        script.run(words, lines.append)


def test_one_node_needs_no_meeting_place(tmp_path: Path) -> None:
    for system in BASH:
        folder = tmp_path / system
        folder.mkdir()
        environment = nodes_of(folder, system)
        if system == "slurm":
            program(folder / "bin" / "srun", 'while [ "$1" != bash ]; do shift; done\nNODE=here "$@"')
        text = script_of(system, folder / "runs" / "a", "--python", "trainer", nodes=1, run=["--task", "mnist"])
        assert execute(folder, text, **environment).returncode == 0
        assert "--join" not in text
        assert len((folder / "words").read_text().splitlines()) == 1


def test_a_run_may_go_on_with_fewer_and_meet_elsewhere() -> None:
    assert "--min-ranks 1 " in script_of("slurm", "runs/a", run=[*RUN, "--min-ranks", "1"])
    assert "--min-ranks 2" not in script_of("slurm", "runs/a", run=[*RUN, "--min-ranks", "1"])
    elsewhere = script_of("slurm", "runs/a", run=[*RUN, "--min-ranks", "5", "--join", "file:///shared/here"])
    assert elsewhere.count("--join") == 1


def test_words_come_through_the_shell_as_they_are(tmp_path: Path) -> None:
    odd = ["--optimizer-overrides", "{'eps': 1e-6}", "--data", "a $HOME `b` \"c\" 'd'"]
    for system in BASH:
        folder = tmp_path / system
        folder.mkdir()
        environment = nodes_of(folder, system)
        program(folder / "bin" / "trainer", f"printf '%s\\n' \"$@\" > {folder}/words")
        text = script_of(system, folder / "runs" / "a", "--python", "trainer", run=[*RUN, *odd])
        assert execute(folder, text, **environment).returncode == 0
        words = (folder / "words").read_text().splitlines()
        assert [word for word in odd if word not in words] == []


def test_condor_s_arguments_say_the_command() -> None:
    """Read back by HTCondor's rules: "" is a quote, '' within '' too, and $(NAME) is replaced."""
    odd = ["--data", "a $HOME \"c\" 'd'"]
    text = script_of("condor", "runs/a", "--python", "trainer", "--requeue", run=[*RUN, *odd])
    (line,) = [line for line in text.splitlines() if line.startswith("arguments = ")]
    inside = line.removeprefix('arguments = "').removesuffix('"').replace('""', '"')
    assert inside.startswith("-c '")
    shell = inside[4:-1].replace("''", "'").replace("$(DOLLAR)", "$").replace("$(ClusterId)", "17")
    words = shlex.split(shell)
    assert words[words.index("exec") + 1 :][:4] == ["trainer", "-m", "hetseq", "train"]
    assert words[words.index("--data") + 1] == odd[1]
    assert words[words.index("--join") + 1] == f"file://{os.getcwd()}/runs/meeting-17"
    assert "\non_exit_remove = (ExitBySignal == True) || (ExitCode != 75)\n" in text  # ExitCode is none after a signal


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-- --task mnist", "expected one of slurm, sge, pbs, lsf, condor, found none"),
        ("slurn -- --task mnist", "SYSTEM slurn: did you mean slurm?"),
        ("slurm --task mnist", "hetseq script: expected the options of hetseq train after --"),
        ("slurm --nodes 0 -- --task mnist", "--nodes 0: expected a whole number of 1 or more"),
        ("slurm --node 2 -- --task mnist", "unknown option --node: did you mean --nodes?"),
        ("slurm --time 24h -- --task mnist", "--time 24h: expected HH:MM:SS"),
        ("slurm -- --task mnist --learning-rat 1", "--learning-rat"),
        ("slurm --nodes 2 -- --task mnist", "--nodes 2 needs --global-batch-size N"),
        ("slurm --nodes 2 -- --task mnist --distributed-world-size 4", "leave out --distributed-init-method"),
        ("slurm --name 'a b' -- --task mnist", "--name a b: expected a letter"),
        ("slurm --queue 'a b' -- --task mnist", "--queue a b: expected letters"),
        ("condor --time 1:00:00 -- --task mnist", "--time does not apply to condor"),
        ("slurm --parallel-environment mpi -- --task mnist", "--parallel-environment does not apply to slurm"),
        ("sge --nodes 2 -- --task mnist --global-batch-size 8", "needs --parallel-environment NAME"),
        ("sge -- --task mnist --save-dir 'a b/c'", "choose a folder with only letters"),
    ],
)
def test_what_no_queue_could_mend_is_refused_before_it(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        script.run(shlex.split(words), lambda line: None)
    assert said in str(refusal.value)
