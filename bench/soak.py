"""The same training under HetSeq, torchrun and torchft for a quarter of an hour each, a rank killed every 15 s.

    python bench/soak.py [--minutes 15] [--kill-every 15] [--ranks 2] [--systems hetseq,torchrun,torchft]
                         [--torchft PYTHON]

The systems take turns of a few minutes, so that a busy machine hits all alike; each continues its own run. At the end
of a turn it is told to stop (SIGTERM), and saves. Time counts from the moment in a turn at which all ranks have made a
step to the stop. All get the same kills: the same times since that moment, and the same choice among the processes by
age. A kill waits until all ranks train.

    samples/s      samples that are in the final state, per second
    done again     samples that were computed and are not in the final state: work that was lost
    missing        samples that the order of the data has up to the end, and that are not in the final state
    doubled        samples that are in it more often than the order has them
    a step         samples in the final state over its steps; the global batch, or fewer where steps lacked a rank
    off the curve  largest difference of a step's loss to the same step on one device without kills, in fp64
    at the end     the same of the loss over all samples of the final state

The figures come from the saved state itself: a parameter of the model counts how often each sample went into it.

The model, its first weights, the data, SGD with momentum, the batch of a rank and the time that a sample takes are the
same. These differ:

    HetSeq    Its survivors continue in their processes, its launcher replaces the rank. It saves as it does by
              default. The order of the data is its own. A rank that starts tries its loss on a few samples, which are
              in `done again`.
    torchrun  DDP over gloo, `--max-restarts`. A kill ends all ranks, and they resume from the newest file that
              `torch.save` wrote. Files are written at the interval of Young and Daly for the measured cost of a save,
              and replace the older ones by atomic rename. The order is DistributedSampler's, its position is saved.
              Each start gets its own store (`bench/recover.py` says why).
    torchft   Each rank is a replica group under its own torchrun. The others continue without it, with a smaller
              global batch, and it gets the state from them when it is back. Each group keeps the position in its
              shard of DistributedSampler's order, so `missing` and `doubled` are taken against the positions at the
              end. After a kill its steps have other samples than one device takes, so their losses differ anyway.
              Its lighthouse waits 0.5 s for a group instead of its default of 5 s, so that the others continue sooner.

torchft needs its own environment, which the script makes and removes: `pip install -c requirements.txt
torchft-nightly`, so with the same torch. `--torchft` names the interpreter of one that is there. If torchft cannot be
installed, the script says why and leaves it out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import figures  # noqa: E402
import recover  # noqa: E402
import torch  # noqa: E402
from soak_runs import toy  # noqa: E402

SCRIPTS = ROOT / "bench" / "soak_runs"
SYSTEMS = {"hetseq": "HetSeq", "torchrun": "torchrun --max-restarts", "torchft": "torchft"}
TURN_S, TURNS = 180.0, 2  # the longest turn; at least so many turns
BATCH = 8
INSTALL_S, ALONE_S = 600.0, 1800.0
WHOLE = 1e-6  # a count of uses may be so far from a whole number, by rounding
HEADS = ("", "samples/s", "kills", "done again", "missing", "doubled", "steps", "a step", "off the curve", "at the end")


@dataclass(frozen=True)
class Final:
    """A saved state."""

    step: int
    model: Mapping[str, torch.Tensor]

    @property
    def uses(self) -> torch.Tensor:
        """(toy.SAMPLES,), how often each sample went into it."""
        return self.model["uses"]

    @property
    def loss(self) -> float:
        """The mean over all samples."""
        model = toy.build()
        model.load_state_dict(dict(self.model))
        x, y, number = toy.data().tensors
        with torch.no_grad():
            return float(((model(x, number)[0] - y) ** 2).mean())


@dataclass(frozen=True)
class Side:
    """How a system is started, and what its files say."""

    command: Callable[[toy.Settings, int], list[str]]  # of so many processes
    final: Callable[[Path], Final]
    curve: Callable[[Path], dict[int, float]]  # the loss of each step
    one_device: Callable[[toy.Settings, int], list[str]]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Run:
    """The run of a system, and what it has done so far."""

    name: str
    side: Side
    settings: toy.Settings
    rates: list[float] = field(default_factory=list)  # of the turns: samples per second
    seconds: float = 0.0
    samples: int = 0  # in the final state, and made while time counted
    kills: int = 0
    starts_s: list[float] = field(default_factory=list)  # of the turns: until all ranks had made a step

    @property
    def folder(self) -> Path:
        """All its files."""
        return Path(self.settings.folder)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0, help="of each system")
    parser.add_argument("--kill-every", type=float, default=15.0, help="seconds; 0: never")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sample-ms", type=float, default=12.0, help=f"of a sample; a rank has {BATCH}")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which, in the order of their turns")
    parser.add_argument("--torchft", type=Path, help="an interpreter that can import torchft; default: a new one")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    arguments = parser.parse_args(words)
    if not 0 < arguments.minutes <= 1440 or arguments.ranks < 2 or not 0 <= arguments.sample_ms <= 1000:
        parser.error("--minutes: expected more than 0; --ranks: at least 2; --sample-ms: 0 to 1000")
    if arguments.kill_every and arguments.kill_every < 2:
        parser.error("--kill-every: expected 0, or at least 2 s")
    arguments.systems = arguments.systems.split(",")
    if unknown := [name for name in arguments.systems if name not in SYSTEMS]:
        parser.error(f"--systems: no {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    if toy.SAMPLES % (arguments.ranks * BATCH):
        parser.error(f"--ranks: an epoch of {toy.SAMPLES} samples has no whole number of such steps")
    return arguments


def main() -> int:
    """Train, kill and print."""
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="hetseq-soak-") as name:
        runs = begin(Path(name), arguments)
        going, rows = list(runs), list[dict[str, Any]]()
        try:
            take_turns(going, arguments)
            for run in list(going):
                with left_out_if_it_fails(going, run):
                    rows.append(row_of(run))
        finally:
            for run in runs:
                recover.sweep(run.folder / "run")
                recover.sweep(run.folder / "one" / "run")
    report(rows, arguments)
    return 0 if len(going) == len(runs) else 1


@contextmanager
def left_out_if_it_fails(going: list[Run], run: Run) -> Iterator[None]:
    """A failure of a run is told and removes it from `going`: it costs the figures of no other run."""
    try:
        yield
    except (SystemExit, OSError) as error:
        print(f"{SYSTEMS[run.name]} is left out: {error}", flush=True)
        going.remove(run)


def begin(folder: Path, arguments: argparse.Namespace) -> list[Run]:
    """The runs of the systems that can run here."""
    runs: list[Run] = []
    for name in arguments.systems:
        python = sys.executable
        if name == "torchft":
            python, why_not = torchft_python(folder / "environment", arguments.torchft)
            if why_not:
                print(f"torchft is left out: {why_not}", flush=True)
                continue
        (folder / name).mkdir()
        sample_s, between_s = arguments.sample_ms / 1e3, arguments.kill_every or 1e9
        settings = toy.Settings(str(folder / name), "", arguments.ranks, BATCH, sample_s, between_s)
        runs.append(Run(name, sides(python)[name], settings))
    return runs


def torchft_python(environment: Path, given: Path | None) -> tuple[str, str]:
    """An interpreter that can import torchft with this torch, or why there is none."""
    python = str(given or environment / "bin" / "python")
    if given is None:
        print("making an environment for torchft", file=sys.stderr, flush=True)
        install = [python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "requirements.txt"), "torchft-nightly"]
        for words in ([sys.executable, "-m", "venv", str(environment)], install):
            if why_not := said(words)[1]:
                return "", why_not
    look = (
        "import importlib.metadata as m, torch, torchft; "
        "names = [d.metadata['Name'] + ' ' + d.version for d in m.distributions()]; "
        "print(torch.__version__, *[name for name in names if 'torchft' in name])"
    )
    versions, why_not = said([python, "-W", "ignore", "-c", look])
    if not why_not and versions.split()[0] != torch.__version__:
        why_not = f"its torch is {versions.split()[0]}, and HetSeq has {torch.__version__}"
    if not why_not:
        print(f"torchft: torch {versions}", flush=True)
    return python, why_not


def said(words: Sequence[str]) -> tuple[str, str]:
    """The output of a command, and why it failed in its own last line, "" if it did not."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    lines = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
    return done.stdout.strip(), lines[-1] if done.returncode else ""


# The systems.


def sides(torchft: str) -> dict[str, Side]:
    """By the names of the command line; `torchft` is the interpreter that has it."""
    return {
        "hetseq": Side(hetseq, hetseq_final, hetseq_curve, hetseq),
        "torchrun": Side(torchrun, saved_final, logged_curve, torchrun, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
        "torchft": Side(
            lambda settings, ranks: [torchft, "-m", "soak_runs.groups", str(ranks)],
            saved_final, logged_curve, torchrun, {"RUST_LOG": "error"},  # else ten lines a step
        ),
    }  # fmt: skip


def hetseq(settings: toy.Settings, ranks: int) -> list[str]:
    """The command of HetSeq."""
    options = {
        "task": f"{SCRIPTS / 'with_hetseq.py'}:Soak", "distributed-world-size": ranks, "balance": "equal",
        "global-batch-size": settings.global_batch, "max-update": settings.last_step, "lr": toy.RATE,
        "lr-scheduler": "constant", "clip-norm": 0, "precision": "fp64", "num-workers": 0, "max-restarts": 100_000,
        "log-format": "none", "save-dir": Path(settings.folder, "run"),
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, str(ROOT / "train.py"), "--cpu", "--disable-validation", *words]


def hetseq_final(folder: Path) -> Final:
    """The newest checkpoint."""
    from tests.support.trials import last_state

    tensors = last_state(folder / "run").tensors
    model = {name.removeprefix("model."): tensors[name] for name in tensors if name.startswith("model.")}
    return Final(max(hetseq_curve(folder)), model)


def hetseq_curve(folder: Path) -> dict[int, float]:
    """The rows of the steps."""
    from tests.support.trials import curve

    return {step: row["loss"] for step, row in curve(folder / "run").items()}


def torchrun(settings: toy.Settings, ranks: int) -> list[str]:
    """The command of torchrun."""
    words = ["--standalone", "--nnodes=1", f"--nproc-per-node={ranks}", "--max-restarts=100000"]
    script = str(SCRIPTS / "with_torchrun.py")
    return [sys.executable, "-m", "torch.distributed.run", *words, "--monitor-interval=0.1", script]


def saved_final(folder: Path) -> Final:
    """What a script has saved."""
    state = torch.load(folder / "state.pt", weights_only=True)
    return Final(state["step"], state["model"])


def logged_curve(folder: Path) -> dict[int, float]:
    """What a script has logged."""
    lines = [line.split() for line in (folder / "losses").read_text().splitlines()]
    return {int(step): float(loss) for step, loss in lines}


def environment_of(side: Side, settings: toy.Settings) -> dict[str, str]:
    """For the processes of a run."""
    folder = Path(settings.folder)
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    ours = {
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'bench'}",
        "TMPDIR": str(folder / "tmp"), "HOME": str(folder), toy.SETTINGS: json.dumps(asdict(settings)),
    }  # fmt: skip
    return {**os.environ, **ours, **side.environment}


# Turns and kills.


def take_turns(going: list[Run], arguments: argparse.Namespace) -> None:
    """Each system trains for the given time, in turns; one that fails is removed."""
    count = max(TURNS, math.ceil(arguments.minutes * 60 / TURN_S))
    turn_s = arguments.minutes * 60 / count
    for turn in range(count):
        kills = kills_of(turn, turn_s, arguments)
        for run in list(going):
            with left_out_if_it_fails(going, run):
                take_turn(run, turn, turn_s, kills)
                told = f"{run.rates[-1]:.1f} samples/s, {run.kills} kills, started in {run.starts_s[-1]:.1f} s"
                print(f"turn {turn + 1} of {count}, {run.name}: {told}", file=sys.stderr, flush=True)


def kills_of(turn: int, turn_s: float, arguments: argparse.Namespace) -> list[tuple[float, int]]:
    """The seconds since the start of a turn at which to kill, and the victim's place among the ranks by age.

    None is near the start or the end of a turn, so that its cost falls into it.
    """
    if not arguments.kill_every:
        return []
    chance, every_s = random.Random(f"{arguments.seed} {turn}"), arguments.kill_every
    return [
        ((number + chance.uniform(0.4, 0.6)) * every_s, chance.randrange(arguments.ranks))
        for number in range(int(turn_s / every_s + 1e-9))
    ]


def take_turn(run: Run, turn: int, turn_s: float, kills: Sequence[tuple[float, int]]) -> None:
    """Start, kill ranks, tell it to stop, and see what it has saved."""
    steps, ranks = run.folder / f"steps-{turn}", run.settings.ranks
    settings = replace(run.settings, steps_file=str(steps))
    with (run.folder / "said").open("w+b") as heard:
        started_s = time.monotonic()
        process = start(run.side, run.side.command(settings, ranks), settings, heard)
        try:
            recover.await_(process, heard, lambda: len(training(steps)) == ranks, f"{run.name}: a step of all ranks")
            began_s = time.monotonic()
            first = max(line.step for line in recover.read_lines(steps))  # samples in the state
            for at_s, victim in kills:
                while (left_s := began_s + at_s - time.monotonic()) > 0:
                    check(process, heard)
                    time.sleep(min(left_s, 1.0))
                while len(living := training(steps)) < ranks and time.monotonic() < began_s + turn_s:
                    check(process, heard)
                    time.sleep(recover.LOOK_S)
                if len(living) == ranks:
                    os.kill(living[victim], signal.SIGKILL)
                    run.kills += 1
            while (left_s := began_s + turn_s - time.monotonic()) > 0:
                check(process, heard)
                time.sleep(min(left_s, 1.0))
            stopped_s = time.monotonic()
        finally:
            recover.end(process)
    # a last step may end a little after the signal
    ended_s = max(stopped_s, max(line.made_ns for line in recover.read_lines(steps)) / 1e9)
    samples = in_state(run.side.final(run.folder)) - first
    run.starts_s.append(began_s - started_s)
    run.rates.append(samples / (ended_s - began_s))
    run.samples += samples
    run.seconds += ended_s - began_s


def start(
    side: Side, command: Sequence[str], settings: toy.Settings, heard: IO[bytes]
) -> subprocess.Popen[bytes]:  # fmt: skip
    """A command in a session of its own."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=heard, stderr=heard, env=environment_of(side, settings),
        cwd=settings.folder, start_new_session=True,
    )  # fmt: skip


def check(process: subprocess.Popen[bytes], heard: IO[bytes]) -> None:
    """End the script in words if a command has ended by itself."""
    if process.poll() is not None:
        words = os.pread(heard.fileno(), 1 << 20, 0).decode(errors="replace")[-4000:]
        raise SystemExit(f"the command ended with {process.returncode}: {process.args!r}\n{words}")


def training(steps: Path) -> list[int]:
    """The living processes that have made a step, by age."""
    born = {line.pid: line.began_ns for line in recover.read_lines(steps)}
    return [pid for pid in sorted(born, key=lambda pid: born[pid]) if recover.start_time(pid)]


# The figures.


def in_state(final: Final) -> int:
    """The samples in a state, each as often as it was used. A count that is not whole ends the script."""
    if (final.uses - final.uses.round()).abs().max() > WHOLE:
        raise SystemExit("a sample is in the state with a part of its weight")
    return round(final.uses.sum().item())


def row_of(run: Run) -> dict[str, Any]:
    """The figures of a run, some of them from the run on one device that is made here."""
    final, curve = run.side.final(run.folder), run.side.curve(run.folder)
    one = replace(
        run.settings, folder=str(run.folder / "one"), steps_file=os.devnull, sample_s=0.0, last_step=final.step
    )  # fmt: skip
    train_alone(run, one)
    right = run.side.curve(Path(one.folder))
    alone = run.side.final(Path(one.folder))
    expected = alone.uses
    places = [run.folder / f"position-{group}" for group in range(run.settings.ranks)]
    if places[0].exists():
        expected = toy.uses_after([int(place.read_text()) for place in places], run.settings.batch)
    differing = (final.uses - expected).round()
    computed = sum(map(int, (run.folder / "computed").read_text().split()))
    total, both = in_state(final), sorted(curve.keys() & right.keys())
    return {
        "what": SYSTEMS[run.name],
        "samples_per_s": run.samples / run.seconds,
        "turns": figures.spread(run.rates),
        "seconds": run.seconds,
        "kills": run.kills,
        "done_again": computed - total,
        "computed": computed,
        "missing": round(-differing.clamp(max=0).sum().item()),
        "doubled": round(differing.clamp(min=0).sum().item()),
        "steps": final.step,
        "samples": total,
        "off_the_curve": figures.largest_gap([[of[step] for step in both] for of in (right, curve)]),
        "final_loss_off": abs(final.loss - alone.loss),
        "steps_without_loss": final.step - len(both),
        "start_s": figures.spread(run.starts_s),
        "save_every_s": save_every_s(run.folder),
    }


def save_every_s(folder: Path) -> float | None:
    """Seconds between two saves of torchrun's script, as it found them at the end."""
    path = folder / "state.pt"
    state = torch.load(path, weights_only=True) if path.exists() else {}
    return state.get("interval_s")


def train_alone(run: Run, settings: toy.Settings) -> None:
    """The same steps in one process, without kills and pauses."""
    Path(settings.folder).mkdir()
    with (run.folder / "said").open("w+b") as heard:
        process = start(run.side, run.side.one_device(settings, 1), settings, heard)
        try:
            process.wait(ALONE_S)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{run.name}: the run on one device takes longer than {ALONE_S:g} s") from None
        finally:
            recover.end(process)
        if process.returncode:
            check(process, heard)


def report(rows: Sequence[Mapping[str, Any]], arguments: argparse.Namespace) -> None:
    """The table and the line of JSON."""
    cells = [
        [
            row["what"],
            f"{row['samples_per_s']:.1f}, turns {row['turns'].shown('.1f')}",
            str(row["kills"]),
            f"{row['done_again']:,} ({row['done_again'] / row['computed']:.2%})",
            f"{row['missing']:,}",
            f"{row['doubled']:,}",
            f"{row['steps']:,}",
            f"{row['samples'] / row['steps']:.2f}",
            f"{row['off_the_curve']:.1e}",
            f"{row['final_loss_off']:.1e}",
        ]
        for row in rows
    ]
    most = 1e3 * arguments.ranks / arguments.sample_ms if arguments.sample_ms else math.inf
    kills = f"a kill every {arguments.kill_every:g} s" if arguments.kill_every else "no kills"
    print(f"{arguments.ranks} ranks, {arguments.minutes:g} minutes each, {kills}, at most {most:.1f} samples/s")
    print(figures.table(HEADS, cells))
    for row in rows:
        if row["steps_without_loss"]:
            print(f"{row['what']}: no loss was logged for {row['steps_without_loss']} steps")
        if row["save_every_s"] is not None:
            print(f"{row['what']}: a save every {row['save_every_s']:.2f} s")
    print(figures.json_line("soak", vars(arguments), rows))


if __name__ == "__main__":
    sys.exit(main())
