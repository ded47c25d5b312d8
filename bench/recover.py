"""The same kill under HetSeq and under torchrun: the time until the next good step, and the repeated work.

    python bench/recover.py [--rounds 5] [--ranks 3] [--every 10] [--sample-ms 2.5]

The script kills one rank of a running group with SIGKILL. HetSeq's survivors regroup in their processes and repeat the
step; its launcher starts a new worker, which receives the state. `torchrun --standalone --max-restarts` ends all ranks
and restarts them from the newest file that `torch.save` has written.

Both sides are measured alike. On every rank an optimizer hook appends a line to one file after each of its steps:
number, process, CLOCK_MONOTONIC (one clock for all processes of a machine). The script takes the time just before it
sends the signal. A step is good if no rank had made it before the signal.

    next good step   from the signal to the first line of the first good step
    done again       steps that were made once more, although they had been made before the signal
    rank back        from the signal to the first line of a process that was started since
    new process      from the signal to its first instruction in Python, and until it had imported torch

The toy is the same: model, data, AdamW, time per sample (so the survivors' steps take longer), a checkpoint
every N steps, files in the same folder. Choices that could favour HetSeq go the other way. torchrun's script imports
torch and nothing else; DDP itself makes torch import its compiler too. The agent polls every 0.1 s and has no other
agent to meet. The state is tiny and in the page cache, and so is torch, thanks to an uncounted first round. Steps are
short, so repeated steps cost next to nothing. The kills of the rounds are spread evenly over the steps between two
checkpoints, and both sides of a round get the same kill. The order of the sides alternates.

With torchrun's defaults (torch 2.13, gloo) the new ranks find the addresses of the dead ones in the store that they
share with the agent, cannot connect, and use up all restarts (pytorch issue 135712). So each start gets its own store:
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import figures

from hetseq.checkpoint.arena import SHARED_MEMORY, Arena
from hetseq.run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[1]
BAR = 20.0  # times as fast
SAMPLES_PER_RANK = 8
PATIENCE_S, GRACE_S = 180.0, 20.0
LOOK_S = 0.01  # seldom, so that polling takes no time from the recovery
AFTER_BACK_STEPS = 3
HEADS = ("", "next good step, s", "× HetSeq", "done again", "rank back, s", "new process, s", "has torch, s")

TOY = '''
"""The model that both sides train."""
import os
import time
BEGAN_NS = time.monotonic_ns()
import torch
IMPORTED_NS = time.monotonic_ns()

STEPS, SAMPLE_S = {steps!r}, {sample_s!r}
SAMPLES = 3 * 2**10


def note(optimizer, *others):
    """After a step of the optimizer."""
    step = int(next(iter(optimizer.state.values()))["step"])
    line = f"{{step}} {{os.getpid()}} {{time.monotonic_ns()}} {{BEGAN_NS}} {{IMPORTED_NS}}\\n"
    file = os.open(STEPS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, line.encode())
    os.close(file)


def optimizer_of(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=0.001)
    optimizer.register_step_post_hook(note)
    return optimizer


def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def data():
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return x, x.sin().sum(1)


def squares(model, x, y):
    time.sleep(SAMPLE_S * len(x))
    return (model(x).squeeze(1) - y) ** 2
'''

TASK = """
from hetseq import Task


class Toy(Task):
    def load_dataset(self, split):
        return torch.utils.data.TensorDataset(*data())

    def build_model(self):
        return build()

    def build_optimizer(self, parameter_groups):
        return optimizer_of(parameter_groups)

    def loss(self, model, sample):
        return {"loss": squares(model, *sample).sum()}
"""

SCRIPT = """
import torch.distributed as dist

CHECKPOINT, EVERY, PER_RANK = {checkpoint!r}, {every!r}, {per_rank!r}


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(build())
    optimizer = optimizer_of(model.parameters())
    step, (x, y) = 0, data()
    if os.path.exists(CHECKPOINT):
        saved = torch.load(CHECKPOINT, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while True:
        begin = (step * world + rank) * PER_RANK % SAMPLES
        optimizer.zero_grad()
        squares(model, x[begin : begin + PER_RANK], y[begin : begin + PER_RANK]).mean().backward()
        optimizer.step()
        step += 1
        if step % EVERY == 0 and rank == 0:
            state = {{"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}}
            torch.save(state, CHECKPOINT + ".new")
            os.replace(CHECKPOINT + ".new", CHECKPOINT)


main()
"""


class Line(NamedTuple):
    """A process has made a step; all times on the same clock; `began` and `imported` are per process."""

    step: int
    pid: int
    made_ns: int
    began_ns: int
    imported_ns: int


@dataclass(frozen=True)
class Kill:
    """Where a round kills: how long after the first line of `step`, and which of the processes by their number."""

    step: int
    after_s: float
    victim: int


@dataclass(frozen=True)
class Recovery:
    """The cost of a kill; seconds since the signal."""

    next_s: float
    again: int
    back_s: float
    last_before: int  # the newest step of which there was a line before the signal
    began_s: float  # of the first process that was started after the signal
    imported_s: float


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="counted kills of each side")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--sample-ms", type=float, default=2.5, help=f"of a sample; a rank has {SAMPLES_PER_RANK}")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    arguments = parser.parse_args(words)
    if arguments.rounds < 1 or arguments.every < 1 or arguments.ranks < 2 or not 0 <= arguments.sample_ms <= 1000:
        parser.error("--rounds, --every: expected at least 1; --ranks: at least 2; --sample-ms: 0 to 1000")
    return arguments


def main() -> int:
    """Measure and print; 1 if the bar is missed."""
    arguments = parse()
    kills = kills_of(arguments)
    sides: dict[str, Callable[[Path, argparse.Namespace], list[str]]] = {"HetSeq": hetseq, "torchrun": torchrun}
    rounds: list[dict[str, Recovery]] = []
    with tempfile.TemporaryDirectory(prefix="hetseq-recover-") as name:
        for number, kill in enumerate([kills[0], *kills]):  # the first one warms the page cache
            found = {}
            for side in sorted(sides, reverse=number % 2 == 0):
                folder = Path(name, f"{number}-{side}")
                (folder / "tmp").mkdir(parents=True)
                found[side] = one_kill(sides[side](folder, arguments), folder, kill, arguments.ranks)
            told = ", ".join(f"{side} {recovery.next_s:.3f} s" for side, recovery in sorted(found.items()))
            print(f"{'warm-up' if number == 0 else f'round {number}'}: {told}", file=sys.stderr, flush=True)
            rounds += [found] * (number > 0)
    return report(rounds, arguments)


def kills_of(arguments: argparse.Namespace) -> list[Kill]:
    """One kill for each round: spread over the steps between two checkpoints, each rank in turn."""
    chance = random.Random(arguments.seed)
    offsets = [1 + (place * arguments.every) // arguments.rounds for place in range(arguments.rounds)]
    chance.shuffle(offsets)
    step_s = arguments.sample_ms * SAMPLES_PER_RANK / 1e3
    before = max(arguments.every, 20 // arguments.every * arguments.every)  # steps, and at least one checkpoint
    return [
        Kill(before + offset, chance.uniform(0, step_s), number % arguments.ranks)
        for number, offset in enumerate(offsets)
    ]


def hetseq(folder: Path, arguments: argparse.Namespace) -> list[str]:
    """The command of HetSeq's side, its task written."""
    task = folder / "toy.py"
    task.write_text(toy(folder, arguments) + TASK)
    options = {
        "task": f"{task}:Toy", "distributed-world-size": arguments.ranks, "balance": "equal",
        "global-batch-size": SAMPLES_PER_RANK * arguments.ranks, "max-update": 1_000_000, "lr": 0.001,
        "lr-scheduler": "constant", "num-workers": 0, "log-format": "none", "save-dir": folder / "run",
        "save-interval-updates": arguments.every, "keep-interval-updates": 2,
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, str(ROOT / "train.py"), "--cpu", "--disable-validation", *words]


def torchrun(folder: Path, arguments: argparse.Namespace, *, restarts: int = 3) -> list[str]:
    """The command of torchrun's side, its script written."""
    script = folder / "toy.py"
    told = {"checkpoint": str(folder / "state.pt"), "every": arguments.every, "per_rank": SAMPLES_PER_RANK}
    script.write_text(toy(folder, arguments) + SCRIPT.format(**told))
    words = ["--standalone", "--nnodes=1", f"--nproc-per-node={arguments.ranks}", f"--max-restarts={restarts}"]
    return [sys.executable, "-m", "torch.distributed.run", *words, "--monitor-interval=0.1", str(script)]


def toy(folder: Path, arguments: argparse.Namespace) -> str:
    """The source that both sides begin with."""
    return TOY.format(steps=str(folder / "steps"), sample_s=arguments.sample_ms / 1e3)


def one_kill(command: Sequence[str], folder: Path, kill: Kill, ranks: int) -> Recovery:
    """Start, kill one rank, wait until it is back, end everything."""
    steps = folder / "steps"
    with (folder / "said").open("w+b") as said:
        process = started(command, folder, said)
        try:
            await_(process, said, lambda: newest(steps) >= kill.step, f"step {kill.step}")
            time.sleep(kill.after_s)
            victim = pids(read_lines(steps))[kill.victim % ranks]
            killed_ns = time.monotonic_ns()
            os.kill(victim, signal.SIGKILL)
            await_(process, said, lambda: is_over(read_lines(steps), killed_ns, ranks), "all ranks after the kill")
        finally:
            end(process)
            sweep(folder / "run")
    return measure(read_lines(steps), killed_ns)


def started(command: Sequence[str], folder: Path, said: IO[bytes]) -> subprocess.Popen[bytes]:
    """The process of a command, which has a home and a folder for temporary files of its own."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"TMPDIR": str(folder / "tmp"), "HOME": str(folder), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment, cwd=folder,
        start_new_session=True,
    )  # fmt: skip


def await_(process: subprocess.Popen[bytes], said: IO[bytes], look: Callable[[], bool], what: str) -> None:
    """Return once `look` is true; end the script in words if the command ends before, or it takes too long."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not look():
        if process.poll() is not None or time.monotonic() > deadline_s:
            words = os.pread(said.fileno(), 1 << 20, 0).decode(errors="replace")[-4000:]
            state = "runs" if process.poll() is None else f"ended with {process.returncode}"
            raise SystemExit(f"{what} has not come, and the command {state}: {process.args!r}\n{words}")
        time.sleep(LOOK_S)


def read_lines(path: Path) -> list[Line]:
    """All whole lines, in the order in which they were written."""
    if not path.exists():
        return []
    *lines, _torn = path.read_text().split("\n")
    return [Line(*map(int, line.split())) for line in lines]


def newest(path: Path) -> int:
    """The newest step of which there is a line; 0: none."""
    return max((line.step for line in read_lines(path)), default=0)


def pids(lines: Sequence[Line]) -> list[int]:
    """The processes that have made a step, in the order of their numbers, and so of their start."""
    return sorted({line.pid for line in lines})


def is_over(lines: Sequence[Line], killed_ns: int, ranks: int) -> bool:
    """As many ranks as before have together made some steps that no rank had made before the signal."""
    before = [line for line in lines if line.made_ns <= killed_ns]
    good = [line for line in lines if line.made_ns > killed_ns and line.step > max(one.step for one in before)]
    by_step = [{line.pid for line in some} for _, some in itertools.groupby(sorted(good), lambda line: line.step)]
    return sum(len(made) == ranks for made in by_step) >= AFTER_BACK_STEPS


def measure(lines: Sequence[Line], killed_ns: int) -> Recovery:
    """The cost of a kill at that time. Raises ValueError if no good step and no new process have come since."""
    before = [line for line in lines if line.made_ns <= killed_ns]
    after = sorted((line for line in lines if line.made_ns > killed_ns), key=lambda line: line.made_ns)
    last, old = max(line.step for line in before), {line.pid for line in before}
    made_by = {(line.pid, line.step) for line in before}
    # a survivor may make the step of the others a little after the signal: that is no repetition
    again = {line.step for line in after if line.step <= last and (line.pid not in old or line[1::-1] in made_by)}
    good = [line for line in after if line.step > last]
    new = [line for line in after if line.pid not in old]
    if not good or not new:
        raise ValueError(f"after step {last} there was {'no new process' if good else 'no good step'}")
    times_ns = (good[0].made_ns, new[0].made_ns, new[0].began_ns, new[0].imported_ns)
    next_s, back_s, began_s, imported_s = ((time_ns - killed_ns) / 1e9 for time_ns in times_ns)
    return Recovery(next_s, len(again), back_s, last, began_s, imported_s)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask the launcher to end; kill its remaining processes one by one."""
    started = {pid: start_time(pid) for pid in below(process.pid)}
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    if process.poll() is None:
        started |= {pid: start_time(pid) for pid in below(process.pid)}
        process.kill()
    process.wait()
    ended_s = time.monotonic()
    while left := [pid for pid, began in started.items() if began and start_time(pid) == began]:
        since_s = time.monotonic() - ended_s
        if since_s > 2 * GRACE_S:
            raise SystemExit(f"processes {left} cannot be ended")
        for pid in left if since_s > GRACE_S else []:  # a writer may still have work to finish
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)


def sweep(run: Path) -> None:
    """Free shared memory that a run has left, and report it: it should leave none."""
    if RunDirectory(run).config_file.exists():
        for path in SHARED_MEMORY.glob(f"{Arena.prefix(RunDirectory(run).run_id)}*"):
            print(f"left behind: {path}", file=sys.stderr)
            path.unlink(missing_ok=True)


def below(pid: int) -> set[int]:
    """The processes that descend from one."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _stat(int(name))):
            children.setdefault(int(stat[1]), []).append(int(name))
    found: set[int] = set()
    to_visit = [pid]
    while to_visit:
        under = children.get(to_visit.pop(), [])
        found.update(under)
        to_visit += under
    return found


def start_time(pid: int) -> str:
    """When a living process was started, as the kernel prints it; "" if it is gone or a zombie."""
    stat = _stat(pid)
    return "" if not stat or stat[0] in "ZX" else stat[19]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def evaluate(rounds: Sequence[Mapping[str, Recovery]]) -> list[dict[str, Any]]:
    """A row of figures for each side; the ratio is taken in each round."""
    ours = [found["HetSeq"] for found in rounds]
    rows = []
    for side in ("HetSeq", "torchrun"):
        seen = [found[side] for found in rounds]
        row: dict[str, Any] = {"what": side}
        for name in ("next_s", "again", "back_s", "began_s", "imported_s"):
            row[name] = figures.spread([getattr(recovery, name) for recovery in seen])
        row["times"] = figures.spread(figures.paired([one.next_s for one in seen], [one.next_s for one in ours]))
        row["rounds"] = [asdict(recovery) for recovery in seen]
        rows.append(row)
    return rows


def report(rounds: Sequence[Mapping[str, Recovery]], arguments: argparse.Namespace) -> int:
    """The table, the verdict, the line of JSON; 1 if the bar is missed."""
    rows = evaluate(rounds)
    cells = []
    for row in rows:
        is_ours = row["what"] == "HetSeq"
        times = "1" if is_ours else row["times"].shown(".1f")
        # HetSeq's new process is a fork of one that has torch
        birth = ["", ""] if is_ours else [row["began_s"].shown(), row["imported_s"].shown()]
        shown = [row["next_s"].shown(".3f"), times, row["again"].shown("g"), row["back_s"].shown()]
        cells.append([row["what"], *shown, *birth])
    print(f"{arguments.ranks} ranks, {len(rounds)} kills of each side, a checkpoint every {arguments.every} steps")
    print(figures.table(HEADS, cells))
    ratio = rows[1]["times"].median
    holds = ratio >= BAR
    print(f"{ratio:.1f} times as fast to the next good step (bar: at least {BAR:g}: {'yes' if holds else 'NO'})")
    print(figures.json_line("recover", vars(arguments), rows))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
