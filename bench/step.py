"""What a step of HetSeq costs over a bare loop: the same model, data and optimizer, step by step in turn, one process.

    python bench/step.py [--batch 256] [--rounds 40]

A bare loop fetches a batch, zeroes the gradients, runs forward and backward, clips and updates. HetSeq's step does the
same and also plans, seeds, counts, reduces, commits, and writes its row of metrics. Both run in one process in
alternation, so that the noise of the machine hits both alike; the ratio is taken pair by pair. Both profit from
memory that is kept between steps, as in a HetSeq worker; without it page faults would decide. Process CPU time stands
beside wall time: a run whose wall time exceeds its CPU time by more than a tenth shared its core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from hetseq import options
from hetseq.comm import LocalGroup
from hetseq.metrics import Metrics
from hetseq.processes import keep_freed_memory
from hetseq.run_directory import RunDirectory
from hetseq.session import Session, build_session, load_material

TASK = Path(__file__).with_name("random_images.py")
WARM_UP = 15


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=256, help="samples of a step")
    parser.add_argument("--rounds", type=int, default=40, help="counted pairs of steps")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        hetseq_step, session = hetseq_loop(Path(folder), arguments.batch)
        ratios = measure(hetseq_step, bare_loop(arguments.batch), arguments.rounds)
        session.close()
    report(arguments.batch, ratios)


def hetseq_loop(folder: Path, batch: int) -> tuple[Callable[[], None], Session]:
    """One step of HetSeq, with all it does in a real run."""
    words = ["--task", str(TASK), "--global-batch-size", str(batch), "--save-dir", str(folder / "run"), "--cpu"]
    words += ["--disable-validation", "--lr", "1e-3", "--clip-norm", "25", "--persistent-time-interval", "0"]
    config = options.complete(options.parse([*words, "--no-save", "--log-format", "none"]))
    directory = RunDirectory.prepare(folder / "run", config_yaml=options.dump_yaml(config))
    metrics = Metrics(directory, config.log, is_writer=True, total_steps=None)
    material = load_material(config, torch.device("cpu"))
    session = build_session(config, directory, LocalGroup(), material, metrics=metrics)
    session.controller.replica.model.train()
    return lambda: session.controller.train_step() and None, session


def bare_loop(batch: int) -> Callable[[], None]:
    """One step of the loop anybody would write."""
    import random_images

    dataset, model = random_images.RandomImages(), random_images.build_model()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0, fused=True)
    order = torch.randperm(len(dataset))
    position = 0

    def step() -> None:
        nonlocal position
        indices = order[position : position + batch]
        position = (position + batch) % (len(dataset) - batch)
        images, labels = dataset.images[indices], dataset.labels[indices]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 25.0)
        optimizer.step()
        loss.item()

    return step


def measure(ours: Callable[[], None], bare: Callable[[], None], rounds: int) -> dict[str, list[float]]:
    """Seconds of both, step by step, each pair in alternating order."""
    times: dict[str, list[float]] = {"ours_cpu": [], "bare_cpu": [], "ours_wall": [], "bare_wall": []}
    for number in range(WARM_UP + rounds):
        pair = [("ours", ours), ("bare", bare)]
        for name, step in pair if number % 2 else reversed(pair):
            cpu, wall = time.process_time(), time.perf_counter()
            step()
            if number >= WARM_UP:
                times[f"{name}_cpu"].append(time.process_time() - cpu)
                times[f"{name}_wall"].append(time.perf_counter() - wall)
    return times


def report(batch: int, times: dict[str, list[float]]) -> None:
    """A table, and the same as one line of JSON."""
    figures: dict[str, float] = {"batch": batch, "n": len(times["ours_cpu"])}
    print(f"one process, one thread, MNIST net, batch {batch}, AdamW; {figures['n']} pairs of steps")
    for kind in ("cpu", "wall"):
        ours, bare = times[f"ours_{kind}"], times[f"bare_{kind}"]
        ratios = sorted(one / other for one, other in zip(ours, bare))
        quarter = len(ratios) // 4
        figures[f"{kind}_ratio"] = statistics.median(ratios)
        print(
            f"{kind:>5}: HetSeq {statistics.median(ours) * 1e3:7.1f} ms   bare {statistics.median(bare) * 1e3:7.1f} ms"
            f"   ratio {statistics.median(ratios):.4f}   quartiles {ratios[quarter]:.4f} to {ratios[-1 - quarter]:.4f}"
        )
    busy = sum(times["ours_wall"]) / sum(times["ours_cpu"])
    if busy > 1.1:
        print(f"(the machine was busy: wall time is {busy:.2f} x CPU time)")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
