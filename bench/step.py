"""The cost of a HetSeq step over a bare loop, and of other libraries' steps: one process, step by step in turn.

    python bench/step.py [--model mnist|bert] [--batch 256] [--rounds 40] [--peers all|none|"HF Trainer" ...]
        [--precision fp32|bf16] [--network transformers] [--products same] [--device cuda:0 --peers none]

A bare loop fetches a batch, zeroes the gradients, runs forward and backward, clips and updates. HetSeq's step does the
same and also plans, seeds, counts, reduces, commits, and writes its row of metrics. Peers are Accelerate,
Lightning Fabric, HF Trainer and Lightning Trainer, where installed, with the same model, data and optimizer.
With `--network transformers` all but HetSeq train that library's BERT of the same sizes, as their users do.
All run in one process. After each step of a peer, in its own hook where it owns its loop, HetSeq and the bare loop do
one as well, so that the noise of the machine affects all alike; ratios are taken between neighbours. All profit from
memory that is kept between steps, as in a HetSeq worker; otherwise page faults would dominate. Each uses its default
library for fp32 products: HetSeq's workers choose the faster one, the peers use torch's choice;
`--products same` gives all of them a worker's. Process CPU time is listed beside wall time: a run whose wall time
exceeds its CPU time by more than a tenth shared its core. On a GPU every step ends with a synchronization before the
clock is read, which neither loop does by itself. The other peers are set up for a CPU and are left out there.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import figures
import settings
import torch
import workloads
from gpus import open_device
from peers import PEERS, Peer
from workloads import Workload

from hetseq import config as options
from hetseq.comm.group import LocalGroup
from hetseq.monitor.metrics import Display, Metrics, Recording
from hetseq.run.build import RankJob, build_session
from hetseq.run.loaded_task import load_material
from hetseq.run_directory import RunDirectory
from hetseq.system.processes import keep_freed_memory

WARM_UPS = {"mnist": 15, "bert-tiny": 15, "bert": 5, "bert-base": 3}
BATCHES = {"mnist": 256, "bert-tiny": 64, "bert": 8, "bert-base": 4}
ROUNDS = {"mnist": 40, "bert-tiny": 40, "bert": 20, "bert-base": 15}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=workloads.MODELS, default="mnist", help="the model that all of them train")
    parser.add_argument("--batch", type=int, help="samples of a step (default: by the model)")
    parser.add_argument("--rounds", type=int, help="counted steps of each (default: by the model)")
    parser.add_argument(
        "--peers", nargs="+", choices=["all", "none", *PEERS], default=["all"], help="beside the bare loop"
    )
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of all of them")
    parser.add_argument("--network", choices=["ours", "transformers"], default="ours", help="of all but HetSeq")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument("--products", choices=["own", "same"], default="own", help="fp32 library of the peers")
    arguments = parser.parse_args(words)
    arguments.batch = arguments.batch or BATCHES[arguments.model]
    arguments.rounds = arguments.rounds or ROUNDS[arguments.model]
    arguments.warm_up = WARM_UPS[arguments.model]
    if min(arguments.batch, arguments.rounds) < 1:
        parser.error("--batch and --rounds: expected numbers of at least 1")
    if arguments.network != "ours" and arguments.model not in workloads.BERTS:
        parser.error(f"--network {arguments.network}: expected a BERT, and --model {arguments.model} is none")
    if arguments.device != "cpu" and arguments.peers != ["none"]:
        parser.error(f"--device {arguments.device}: expected --peers none, since the others are set up for a CPU")
    if "all" in arguments.peers or "none" in arguments.peers:
        arguments.peers = list(PEERS) if "all" in arguments.peers else []
    return arguments


def main() -> None:
    """Measure and print."""
    arguments = parse()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
        keep_freed_memory()
    else:
        torch.cuda.set_device(open_device(arguments.device, without="or leave --device out").torch)
    if arguments.products == "same":
        settings.as_a_worker()
    rows = []
    with tempfile.TemporaryDirectory(prefix="hetseq-step-") as name, ExitStack() as closing:
        folder = Path(name)
        work = workloads.prepare(arguments.model, folder / "data", 64 * arguments.batch)
        work = dataclasses.replace(work, precision=arguments.precision, device=arguments.device)
        train_step = hetseq_loop(work, folder, arguments.batch, closing)
        is_set_alike = arguments.products == "same" or arguments.device != "cpu"
        ours = train_step if is_set_alike else settings.products_of_a_worker()(train_step)
        work = work if arguments.network == "ours" else workloads.with_transformers(work)
        bare = workloads.bare_loop(work, arguments.batch)
        alone_bare = alone(synchronized(bare, work.device))
        times = beside({"HetSeq": synchronized(ours, work.device)}, alone_bare, work, arguments)
        rows.append(evaluate("bare loop", times, of=["HetSeq"]))
        for peer in arguments.peers:
            try:
                times = beside({"HetSeq": ours, "bare loop": bare}, PEERS[peer], work, arguments)
            except ImportError as error:
                print(f"(without {peer}: {error})")
                continue
            rows.append(evaluate(peer, times, of=["HetSeq", "bare loop"]))
    report(rows, arguments)


def hetseq_loop(work: Workload, folder: Path, batch: int, closing: ExitStack) -> Callable[[], Any]:
    """One step of HetSeq, with everything a real run does; `closing` ends its threads, which write into the folder."""
    words = [*workloads.hetseq_words(work, batch), "--save-dir", str(folder / "run")]
    config = options.complete(options.parse(words))
    directory = RunDirectory.prepare(folder / "run", config_yaml=options.dump_yaml(config))
    metrics = closing.enter_context(Metrics(Recording(directory), Display(config.log), is_writer=True))
    material = load_material(config, torch.device(work.device))
    session = build_session(RankJob(config, directory, LocalGroup(), material, metrics=metrics))
    closing.callback(session.close)
    session.controller.replica.model.train()
    return session.controller.train_step


def synchronized(step: Callable[[], Any], device: str) -> Callable[[], Any]:
    """The step, over when the device has done all of it; on a CPU the step itself."""
    if device == "cpu":
        return step

    def whole() -> None:
        step()
        torch.cuda.synchronize(device)  # sync

    return whole


def alone(step: Callable[[], Any]) -> Peer:
    """A step as a peer: called over and over."""

    def train(work: Workload, batch: int, between: Callable[[], bool]) -> None:
        step()
        while between():
            step()

    return train


Times = dict[str, list[tuple[float, float]]]  # by loop and step: seconds of CPU, seconds


def beside(rivals: dict[str, Callable[[], Any]], peer: Peer, work: Workload, arguments: argparse.Namespace) -> Times:
    """Seconds of a peer, as "peer", and of rivals that do a step after each of its own, in changing order."""
    times: Times = {"peer": [], **{name: [] for name in rivals}}
    mark, steps = [0.0, 0.0], int(arguments.warm_up + arguments.rounds)

    def between() -> bool:
        times["peer"].append((time.process_time() - mark[0], time.perf_counter() - mark[1]))
        order = list(rivals.items())
        for name, step in order if len(times["peer"]) % 2 else reversed(order):
            cpu, wall = time.process_time(), time.perf_counter()
            step()
            times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
        mark[:] = time.process_time(), time.perf_counter()
        return len(times["peer"]) < steps

    mark[:] = time.process_time(), time.perf_counter()
    peer(work, arguments.batch, between)
    return {name: seconds[arguments.warm_up :] for name, seconds in times.items()}


def evaluate(peer: str, times: Times, *, of: Sequence[str]) -> dict[str, Any]:
    """The figures of a peer and of its rivals beside it; ratios above 1 where the peer takes longer."""
    row: dict[str, Any] = {"what": peer, "n": len(times["peer"])}
    for number, kind in enumerate(("cpu", "wall")):
        seconds = {name: [step[number] for step in steps] for name, steps in times.items()}
        row[f"{kind}_s"] = figures.spread(seconds["peer"])
        for rival in of:
            row[f"{rival} {kind}_s"] = figures.spread(seconds[rival])
            row[f"{kind} of {rival}"] = figures.spread(figures.paired(seconds["peer"], seconds[rival]))
    all_steps = [step for steps in times.values() for step in steps]
    row["wall_to_cpu"] = figures.stretch(sum(wall for _, wall in all_steps), sum(cpu for cpu, _ in all_steps))
    return row


def report(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print a table, caveats, and the same as one line of JSON."""
    print(
        f"one process, one thread, {arguments.model} in {arguments.precision}, {arguments.batch} samples a step, AdamW,"
        f" torch {torch.__version__}"
        + ("" if arguments.network == "ours" else f"; all but HetSeq train the network of {arguments.network}")
        + ("; all with the products of a worker" if arguments.products == "same" else "")
    )
    heads = [
        "", "step, CPU ms", "HetSeq beside it", "x HetSeq, CPU", "x HetSeq, wall", "x bare loop, CPU", "wall / CPU", "n"
    ]  # fmt: skip
    cells = [
        [
            row["what"], f"{row['cpu_s'].median * 1e3:.1f}", f"{row['HetSeq cpu_s'].median * 1e3:.1f}",
            row["cpu of HetSeq"].shown(".3f"), row["wall of HetSeq"].shown(".3f"),
            row["cpu of bare loop"].shown(".3f") if "cpu of bare loop" in row else "1", f"{row['wall_to_cpu']:.2f}",
            str(row["n"]),
        ]
        for row in rows
    ]  # fmt: skip
    print(figures.table(heads, cells))
    bare = rows[0]
    print(
        f"HetSeq over the bare loop: {1 / bare['cpu of HetSeq'].median:.4f} x its CPU time,"
        f" {1 / bare['wall of HetSeq'].median:.4f} x its wall time (medians of {bare['n']} pairs)"
    )
    if mark := figures.busy_mark(max(row["wall_to_cpu"] for row in rows)):
        print(f"({mark}; CPU time suffers less)")
    print(figures.json_line("step", vars(arguments), rows))


if __name__ == "__main__":
    main()
