"""Batch scripts for Slurm, Grid Engine, PBS, LSF and HTCondor, as text.

Makes scripts that a person can read, change and keep, and nothing else: it writes no file, calls no program of a
scheduler, and reads no list of nodes before the job runs. `command` checks the options of the run.

The one idea: `hetseq train` is the same command on every node, so a script writes it once into a small file beside the
run (a file, because some schedulers pass a command through two shells), and runs that once per node by the scheduler's
own means. The nodes meet in a directory named after the job, which takes no port. Slurm signals all nodes itself.
Elsewhere only the first node is sure to get a signal, so it leaves a file that the others look for.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from hetseq.commands.run_script import Program

#: before the end of the job's time, for the current step and the checkpoint
WARNING_S = 120
_WIDTH = 100
_END = "END_OF_NODE"


@dataclass(frozen=True)
class Job:
    """The resources that a script asks a queue for, and the command it runs.

    If `meets`, the script adds --join; `min_ranks` is None if it is among the options of `program`. `setup` are lines
    of shell. `shared` is an existing or future folder that all nodes see.
    """

    name: str
    nodes: int
    cpus: int
    gpus: int
    directory: str
    shared: str
    python: str
    program: Program
    meets: bool
    min_ranks: int | None
    setup: tuple[str, ...] = ()
    time_s: int | None = None
    queue: str | None = None
    account: str | None = None
    memory: str | None = None
    parallel_environment: str | None = None
    gpu_resource: str = "gpu"
    is_requeued: bool = False


def clock(seconds: int) -> str:
    """Seconds as HH:MM:SS."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def slurm(job: Job) -> str:
    """For `sbatch`: a step of one task per node. `srun` handles signals, exit codes and lost nodes."""
    wants = [
        f"--job-name={job.name}", f"--nodes={job.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={job.cpus}",
        job.gpus and f"--gpus-per-node={job.gpus}", job.memory and f"--mem={job.memory}",
        job.time_s and f"--time={clock(job.time_s)}", job.queue and f"--partition={job.queue}",
        job.account and f"--account={job.account}", f"--output={job.name}-%j.log", "--open-mode=append",
        f"--signal=USR1@{WARNING_S}", "--requeue" if job.is_requeued else "--no-requeue",
        "--no-kill",
    ]  # fmt: skip
    again = (
        "# 75: stopped before the end, with a checkpoint to resume from\n"
        'if [ "$code" -eq 75 ]; then\n    scontrol requeue "$SLURM_JOB_ID"\nfi\n'
    )
    return (
        _head(job, "sbatch", [f"#SBATCH {want}" for want in wants if want])
        + f"\n# USR1 comes {WARNING_S} s before the time limit: every node finishes its step and saves.\n"
        + "# The run continues without a node that fails or leaves (--no-kill, --wait, --kill-on-bad-exit).\n"
        + _prologue(job, "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}", _node(job, is_watched=False))
        + f"srun --ntasks-per-node=1 --cpus-per-task={job.cpus} --kill-on-bad-exit=0 --wait=0 --no-kill \\\n"
        + '    bash "$node" "$meeting"\ncode=$?\nrm -f "$node"\n'
        + (again if job.is_requeued else "")
        + 'exit "$code"\n'
    )


def sge(job: Job) -> str:
    """For `qsub` of Grid Engine: the hosts of PE_HOSTFILE, reached by `qrsh -inherit`."""
    wants = [
        f"-N {job.name}", "-S /bin/bash", "-cwd", "-j y", f"-o {job.name}-$JOB_ID.log",
        f"-pe {job.parallel_environment or 'smp'} {job.nodes * job.cpus}",
        job.gpus and f"-l {job.gpu_resource}={job.gpus}", job.memory and f"-l mem_free={job.memory}",
        job.time_s and f"-l h_rt={clock(job.time_s)}", job.queue and f"-q {job.queue}",
        job.account and f"-P {job.account}", "-r y" if job.is_requeued else "-r n",
    ]  # fmt: skip
    note = "# Whether GPUs and memory count per slot or per host depends on the site: qconf -sc\n"
    again = (
        "# 75: stopped before the end, with a checkpoint to resume from; a job that ends with 99 is queued again\n"
        'if [ "$code" -eq 75 ]; then\n    exit 99\nfi\n'
    )
    return (
        _head(job, "qsub", [f"#$ {want}" for want in wants if want])
        + (note if job.gpus or job.memory else "")
        + _fan_out(job, "$JOB_ID", "awk '{print $1}' \"$PE_HOSTFILE\"", 'qrsh -inherit -nostdin "$host"', again)
    )


def pbs(job: Job) -> str:
    """For `qsub` of PBS: the hosts of PBS_NODEFILE, reached by `pbs_tmrsh` (OpenPBS, PBS Pro) or `pbsdsh` (Torque)."""
    chunk = f"{job.nodes}:ncpus={job.cpus}"
    chunk += (f":ngpus={job.gpus}" if job.gpus else "") + (f":mem={job.memory}" if job.memory else "")
    wants = [
        f"-N {job.name}", "-S /bin/bash", "-j oe", f"-l select={chunk}", "-l place=scatter",
        job.time_s and f"-l walltime={clock(job.time_s)}", job.queue and f"-q {job.queue}",
        job.account and f"-A {job.account}", "-r n",
    ]  # fmt: skip
    torque = f"nodes={job.nodes}:ppn={job.cpus}" + (f":gpus={job.gpus}" if job.gpus else "")
    note = f"# On Torque, replace the lines with select and place by: #PBS -l {torque}\n"
    again = (
        "# 75: stopped before the end, with a checkpoint to resume from; PBS has no code for that, so the script\n"
        "# submits itself again (by hand, if nodes may not submit)\n"
        f'if [ "$code" -eq 75 ]; then\n    cd {shlex.quote(job.directory)} && qsub {file_name("pbs", job)}\nfi\n'
    )
    reach = '"${reach[@]}" "$host"'
    chosen = (
        "reach=(pbs_tmrsh)\ncommand -v pbs_tmrsh > /dev/null || reach=(pbsdsh -h)  # OpenPBS and PBS Pro, or Torque\n"
    )
    return (
        _head(job, "qsub", [f"#PBS {want}" for want in wants if want])
        + note
        + _fan_out(job, "${PBS_JOBID%%.*}", 'cat "$PBS_NODEFILE"', reach, again, before=chosen if job.nodes > 1 else "")
    )


def lsf(job: Job) -> str:
    """For `bsub`: the hosts of LSB_DJOB_HOSTFILE, reached by `blaunch`."""
    needs = f"span[ptile={job.cpus}]" + (f" rusage[mem={job.memory}]" if job.memory else "")
    wants = [
        f"-J {job.name}", "-L /bin/bash", f"-n {job.nodes * job.cpus}", f'-R "{needs}"',
        job.gpus and f'-gpu "num={job.gpus}"', job.time_s and f"-W {clock(job.time_s + 59)[:-3]}",
        job.queue and f"-q {job.queue}", job.account and f"-P {job.account}", f"-o {job.name}-%J.log",
        job.is_requeued and '-Q "75"',
    ]  # fmt: skip
    again = "# 75: stopped before the end, with a checkpoint to resume from; with -Q, LSF queues such a job again\n"
    note = "# Whether memory counts per host or per slot depends on the site: bparams -a\n"
    return (
        _head(job, "bsub <", [f"#BSUB {want}" for want in wants if want])
        + (note if job.memory else "")
        + _fan_out(job, "$LSB_JOBID", 'cat "$LSB_DJOB_HOSTFILE"', 'blaunch "$host"', again)
    )


def condor(job: Job) -> str:
    """For `condor_submit`: one job of the vanilla universe per node; they meet, and may come and go."""
    steps = [f"mkdir -p {shlex.quote(job.shared)}", f"cd {shlex.quote(job.directory)}", *job.setup]
    join = ["--join", f"file://{job.shared}/meeting-\0"] if job.meets else []
    join += ["--min-ranks", str(job.min_ranks)] if job.min_ranks else []
    train = shlex.join(["exec", job.python, "-m", "hetseq", *job.program.words(join)])
    shell = " && ".join([*steps, train])
    log = f"{job.directory}/{job.name}-$(ClusterId)"
    lines = [
        "universe = vanilla",
        "executable = /bin/bash",
        "transfer_executable = false",
        f'arguments = "-c {_condor_quoted(shell)}"',
        f"initialdir = {_condor_text(job.directory)}",
        "# all nodes must see the folder of the run",
        "should_transfer_files = NO",
        f"request_cpus = {job.cpus}",
        *([f"request_gpus = {job.gpus}"] if job.gpus else []),
        *([f"request_memory = {job.memory}"] if job.memory else []),
        *([f"accounting_group = {job.account}"] if job.account else []),
        "# an evicted job finishes its step first, and saves",
        "kill_sig = SIGTERM",
        f"job_max_vacate_time = {WARNING_S}",
    ]
    if job.is_requeued:
        lines += [
            "# 75: stopped before the end, or taken out of a run that continues: back into the queue",
            "on_exit_remove = (ExitBySignal == True) || (ExitCode != 75)",
        ]
    lines += [f"{kind} = {log}-$(Process).{kind[:3]}" for kind in ("output", "error")]
    lines += [f"log = {log}.log", f"queue {job.nodes}"]
    begin = f"# Written by `hetseq script`. Save it as {file_name('condor', job)}; {submit_line('condor', job)}\n"
    return begin + "\n".join(lines) + "\n"


#: by name of the scheduler
SYSTEMS: dict[str, Callable[[Job], str]] = {"slurm": slurm, "sge": sge, "pbs": pbs, "lsf": lsf, "condor": condor}
_SUBMIT = {"slurm": "sbatch", "sge": "qsub", "pbs": "qsub", "lsf": "bsub <", "condor": "condor_submit"}


def file_name(system: str, job: Job) -> str:
    """The file name for the script."""
    return f"{job.name}.{'sub' if system == 'condor' else 'sh'}"


def submit_line(system: str, job: Job) -> str:
    """The line that submits the saved script."""
    return f"submit it: {_SUBMIT[system]} {file_name(system, job)}"


def _head(job: Job, submit: str, directives: list[str]) -> str:
    begin = f"# Written by `hetseq script`. Save it as {job.name}.sh; submit it: {submit} {job.name}.sh"
    return "\n".join(["#!/bin/bash", begin, *directives]) + "\n"


def _train(job: Job) -> str:
    """The command of a node, with one or more options per line; `$1` is where the nodes meet."""
    lines = [shlex.join([job.python, "-m", "hetseq", job.program.name])]
    groups: list[list[str]] = []
    for word in job.program.options:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    line = ""
    for text in map(shlex.join, groups):
        if line and len(line) + len(text) > _WIDTH:
            lines.append(line)
            line = ""
        line += f" {text}" if line else text
    lines += [line] if line else []
    least = f" --min-ranks {job.min_ranks}" if job.min_ranks else ""
    lines += [f'--join "file://$1"{least}'] if job.meets else []
    lines += [shlex.join(job.program.script)] if job.program.script else []
    return " \\\n    ".join(lines)


def _node(job: Job, *, is_watched: bool) -> str:
    """The script of each node. If signals do not reach it, it looks for the file that the first node leaves."""
    lines = [f"cd {shlex.quote(job.directory)} || exit", *(f"{line} || exit" for line in job.setup)]
    if not is_watched:
        return "\n".join([*lines, f"exec {_train(job)}"])
    return "\n".join(
        [
            *lines,
            "heard=no",
            "trap 'heard=yes' USR1 TERM INT  # then the command below gets the signal as well",
            f"{_train(job)} < /dev/null &",
            "train=$!",
            'while kill -0 "$train" 2> /dev/null; do',
            '    if [ "$heard" = no ] && [ -e "$1.stop" ]; then',
            '        heard=yes; kill -USR1 "$train"  # it finishes its step and saves',
            "    fi",
            "    sleep 1",
            "done",
            'wait "$train"',
        ]
    )


def _prologue(job: Job, number: str, node: str) -> str:
    shared = shlex.quote(job.shared)
    return (
        f"mkdir -p {shared} || exit\nmeeting={shared}/meeting-{number}\nnode=$meeting.sh  # what runs on each node\n"
        f"cat > \"$node\" << '{_END}'\n{node}\n{_END}\n"
    )


def _fan_out(job: Job, number: str, hosts: str, reach: str, again: str, *, before: str = "") -> str:
    """The body of a script that starts the other nodes itself: their commands, and this node's own."""
    lines = [
        'rm -f "$meeting.stop"',
        "trap 'touch \"$meeting.stop\"' USR1 USR2 TERM INT",
    ]
    if job.nodes > 1:
        lines += [
            *([before.rstrip("\n")] if before else []),
            f"for host in $({hosts} | awk '!seen[$1]++' | tail -n +2); do  # the first one is this node",
            f'    {reach} /bin/bash "$node" "$meeting" < /dev/null &',
            "done",
        ]
    lines += ['/bin/bash "$node" "$meeting" &', "first=$!", 'while kill -0 "$first" 2> /dev/null; do']
    if job.time_s:
        left = max(job.time_s - WARNING_S, job.time_s // 2)
        lines += [f'    [ "$SECONDS" -lt {left} ] || touch "$meeting.stop"  # the time is nearly over']
    lines += ["    sleep 1", "done", 'wait "$first"', "code=$?  # of the run: all nodes end with the same one"]
    if job.nodes > 1:
        lines += [
            'case "$code" in 1 | 2 | 78) touch "$meeting.stop" ;; esac  # the others must not wait for a failed node',
            "wait",
        ]
    lines += ['rm -f "$meeting.stop" "$node"']
    return (
        "\n"
        + _prologue(job, number, _node(job, is_watched=True))
        + "\n".join(lines)
        + "\n"
        + (again if job.is_requeued else "")
        + 'exit "$code"\n'
    )


def _condor_text(text: str) -> str:
    """Text in which HTCondor expands no macro."""
    return text.replace("$", "$(DOLLAR)")


def _condor_quoted(shell: str) -> str:
    """One argument in HTCondor's newer syntax: in '' and in "", each doubled; \\0 becomes the cluster's id."""
    return "'" + _condor_text(shell).replace('"', '""').replace("'", "''").replace("\0", "$(ClusterId)") + "'"
