"""BERT training speed on one GPU: sequences a second, and model FLOPs utilization (MFU).

    python bench/bert_gpu.py [--model base large] [--length 128 512] [--micro-batch N] [--forms full mix] [--steps 20]
        [--optimizer adamw|lamb] [--compile] [--device cuda:0] [--peak TFLOPS]
    python bench/bert_gpu.py --device cpu --model tiny --length 32 --micro-batch 4 --steps 2    # does the script work?

A step is HetSeq's on one rank, from clearing the gradients to the update: the loss of the task bert under bf16
autocast, backward, accumulation in gradient buckets, their norm, clipping, the optimizer. Data loading, the rows that
ranks exchange, and metrics are left out. The host waits only where HetSeq's step does (for the sums of the losses, for
the norm): events between the steps are read when all steps are done.

`full` means rows without padding, to which the bars apply. `mix` means rows of unequal lengths, padded and packed in
alternating steps. 5 of 32 tokens are masked. Micro-batches double until memory runs out, and the fastest size is used.
Only arithmetic that a token needs counts as useful (`useful_flops`). `--compile` is for full rows, which all have the
same shape; real data do not. Ends with a line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from figures import json_line, paired, spread, table
from gpus import H200, Device, Peak, open_device, peak_of
from made_up import Batch, made_up

from hetseq import config as options
from hetseq import registry
from hetseq.comm.group import LocalGroup
from hetseq.data.fetch import seed_everything
from hetseq.data.loader import MicroBatch, StepData, place_on
from hetseq.data.plan import MicroBatchCap, StepPlan
from hetseq.parallel.buffers import BufferKeeper
from hetseq.parallel.gradient_sync import Gradients
from hetseq.parallel.replica import Replica, trained_parameters
from hetseq.parallel.task_state import TaskState
from hetseq.system import device_memory as memory
from hetseq.task import make_task
from hetseq.tasks.bert.model import BertConfig, BertForPreTraining
from hetseq.tasks.bert.packing import pack
from hetseq.tasks.bert.task import BertTask
from hetseq.training.micro_batch_size import MicroBatchSizes
from hetseq.training.optim import parameter_groups
from hetseq.training.precision import PRECISIONS
from hetseq.training.share import ComputeDevice, ShareComputer
from hetseq.training.stopwatch import MicroBatchClock

WORDS, MASKED_SHARE, MOST_LENGTH = 30522, 5 / 32, 512
MODELS = {"tiny": (2, 128), "base": (12, 768), "large": (24, 1024)}  # layers, hidden size
TERMS = ("mlm", "nsp")  # of the task bert
BATCHES, WARM_UP, LEAST_STEPS = 4, 5, 15
FIRST_ROWS, TRIAL_WARM_UP, TRIAL_STEPS = 8, 2, 3
MOST_LOGITS = 2**31  # kernels need longer indices beyond, and so many rows have long been enough
PRECISION = PRECISIONS["bf16"]
NO_GPU = "or add `--device cpu --model tiny --length 32 --micro-batch 4 --steps 2` to try the script"
HEADS = (
    "model", "length", "rows", "micro-batch", "step, ms", "sequences/s", "real tokens/s", "useful TFLOP/s", "MFU",
    "x padded", "of the ideal", "memory, GiB", "bar on an H200", "", "n",
)  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """An H200's target with full rows: sequences a second, a higher target, and a share of its peak."""

    sequences: float
    stretch: float | None = None
    mfu: float | None = None

    def shown(self) -> str:
        """As in a table."""
        text = f">= {self.sequences:,.0f}" + ("" if self.mfu is None else f" and {self.mfu:.0%}")
        return text + ("" if self.stretch is None else f" (better {self.stretch:,.0f})")


BARS = {
    ("base", 128): Bar(6000, 7000), ("base", 512): Bar(1450),
    ("large", 128): Bar(1850, 2200, mfu=0.45), ("large", 512): Bar(440, 510),
}  # fmt: skip


class Refused(Exception):
    """A micro-batch does not fit in memory."""


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["base", "large"])
    parser.add_argument("--length", type=int, nargs="+", default=[128, 512], help="tokens of a row")
    parser.add_argument("--micro-batch", type=int, help="rows of a step (default: the fastest that fits in memory)")
    parser.add_argument("--forms", nargs="+", choices=["full", "mix"], help="default: both; with --compile full")
    parser.add_argument("--real", type=float, default=0.68, help="share of real tokens in the mix")
    parser.add_argument("--steps", type=int, default=20, help="counted steps of each")
    parser.add_argument("--optimizer", choices=["adamw", "lamb"], default="adamw")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--words", type=int, default=WORDS, help="of the vocabulary")
    parser.add_argument("--compile", action="store_true", help="the network goes through torch.compile first")
    parser.add_argument("--device", default="cuda:0", help="cuda, cuda:N or cpu")
    parser.add_argument("--peak", type=float, help="TFLOP/s of dense bf16, for a device that the script does not know")
    arguments = parser.parse_args(words)
    arguments.forms = arguments.forms or (["full"] if arguments.compile else ["full", "mix"])
    if arguments.steps < 1 or (arguments.micro_batch or 1) < 1:
        parser.error("--steps and --micro-batch: expected numbers of at least 1")
    if not all(8 <= length <= MOST_LENGTH for length in arguments.length):
        parser.error(f"--length: expected numbers from 8 to {MOST_LENGTH}")
    if not 0.52 <= arguments.real <= 1:
        parser.error("--real: expected a share from 0.52 to 1")
    if not 0 <= arguments.dropout < 1:
        parser.error("--dropout: expected a rate from 0 to below 1")
    if arguments.words < 2000:
        parser.error("--words: expected at least 2000")
    if arguments.peak is not None and not 0 < arguments.peak < math.inf:
        parser.error("--peak: expected TFLOP/s above 0, as in --peak 989")
    if arguments.device.partition(":")[0] not in ("cuda", "cpu"):
        parser.error(f"--device {arguments.device}: expected cuda, cuda:N or cpu")
    if arguments.device == "cpu" and arguments.micro_batch is None:
        parser.error(
            "--device cpu: expected --micro-batch N too, since running out of host memory affects other processes"
        )
    if arguments.compile and "mix" in arguments.forms:
        parser.error("--compile: expected --forms full; torch.compile recompiles for rows of other lengths")
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where a bar is missed."""
    arguments = parse(words)
    device = open_device(arguments.device, without=NO_GPU)
    peak = peak_of(device.name) if arguments.peak is None else Peak(arguments.peak, "--peak")
    rows: list[dict[str, Any]] = []
    for model in arguments.model:
        for length in arguments.length:
            for form in arguments.forms:
                rows += measure(model, length, form, arguments, device, peak)
                print(f"{model}, {length} tokens, {form}: {rows[-1]['sequences_per_s'].median:,.0f} sequences/s")
                gc.collect()  # modules refer to each other, and the next ones need their memory
                memory.release(device.torch)
    return report(rows, arguments, device, peak)


# Useful arithmetic


def useful_flops(config: BertConfig, lengths: Sequence[int], masked: int) -> int:
    """Floating-point operations that a step on sequences of these lengths needs, `masked` of their tokens predicted.

    With T tokens in n sequences of l each, N layers of H and I between, V words and m masked tokens, forward does

        N (6 T H^2 + sum 4 l^2 H)  +  ((N - 1) T + m + n) (2 H^2 + 4 H I)  +  m (2 H^2 + 2 H V)  +  n (2 H^2 + 4 H)

    of them in its matrix products: queries, keys and values, scores and their products with values; the output
    projection and the two dense layers, in the last layer for masked and first tokens alone; the vocabulary head; the
    pooler and sentence head. A multiply-add counts as two. Backward does each product twice, for the gradient of either
    factor, so a step does three times as much. Padding does not count, nor do unpredicted tokens in the head, work that
    a kernel repeats in backward (flash attention: scores, once), norms, dropout, activations, look-ups and the
    optimizer.
    """
    hidden, between, tokens = config.hidden_size, config.intermediate_size, sum(lengths)
    attention = tokens * 6 * hidden**2 + 4 * hidden * sum(length**2 for length in lengths)
    through = (config.num_hidden_layers - 1) * tokens + masked + len(lengths)
    dense = through * (2 * hidden**2 + 4 * hidden * between)
    heads = masked * (2 * hidden**2 + 2 * hidden * config.vocab_size) + len(lengths) * (2 * hidden**2 + 4 * hidden)
    return 3 * (config.num_hidden_layers * attention + dense + heads)


# Steps


class Training:
    """A network, its optimizer and the memory of its gradient on one device, as in a run of one rank."""

    def __init__(self, network: BertConfig, arguments: argparse.Namespace, device: torch.device) -> None:
        words = ["--task", "bert", "--precision", "bf16", "--optimizer", arguments.optimizer, "--lr", "1e-4"]
        config = options.complete(options.parse(words))
        self.task, self.clip_norm = make_task(BertTask, config), config.optimization.clip_norm
        self._place = place_on(device, PRECISION.storage)
        seed_everything(0)
        self.model = model = BertForPreTraining(network).to(device, PRECISION.storage).train()
        if arguments.compile:
            model.compile()  # its parameters and their names stay
        parameters = [parameter for _, parameter in trained_parameters(model)]
        groups = parameter_groups(model, config.optimization)
        self.optimizer = registry.find_optimizer(arguments.optimizer)(groups, config.optimization, None)
        self._reducer = Gradients(parameters)
        self._computer = ShareComputer(
            self.task,
            Replica(model, self.optimizer, self._reducer, BufferKeeper(model, LocalGroup()), TaskState(self.task)),
            terms=TERMS, on=ComputeDevice(device, PRECISION, "the benchmark"), sizes=MicroBatchSizes(MicroBatchCap()),
            seed=0,
        )  # fmt: skip

    def data(self, batch: Batch, *, is_packed: bool) -> StepData:
        """A padded batch of the host as a step of one micro-batch on the device."""
        rows = len(batch["next_sentence_labels"])
        sample = self._place(pack(batch) if is_packed else batch)
        counts = self.task.count(sample)
        assert counts is not None
        assert tuple(counts) == TERMS
        micro_batch = MicroBatch(sample, 0, rows, tuple(counts.values()), rows)
        return StepData(StepPlan(0, 1, 0, rows, (rows,), ends_epoch=False), [micro_batch], tuple(counts.values()))

    def step(self, data: StepData) -> float:
        """One step of training; both mean losses added, in nats. Raises Refused where memory runs out."""
        part, _ = self._computer.attempt(data, data.counts)
        if part is None:
            raise Refused
        self._reducer.finish()
        norm = self._reducer.norm()  # sync, as in every run
        if self.clip_norm and norm > self.clip_norm:
            self._reducer.scale_(self.clip_norm / norm)
        try:
            self.optimizer.step()
        except (RuntimeError, MemoryError) as error:
            if not memory.is_exhausted(error):
                raise
            raise Refused from None
        return sum(total / count for total, count in zip(part.sums, data.counts))

    def close(self) -> None:
        """Let go of the parameters."""
        self._reducer.close()


Forms = dict[str, list[StepData]]


@dataclass(frozen=True)
class Timed:
    """Measurements of alternating steps, by form: seconds of each counted step, and the peak memory."""

    seconds: dict[str, list[float]]
    bytes: dict[str, int]
    losses: tuple[float, float]  # of the first step of all and of the last
    first_s: float  # of the host, for the first step of all


def time_steps(training: Training, forms: Forms, device: torch.device, *, warm_up: int, steps: int) -> Timed:
    """Steps of all forms in turn, in changing order. Raises Refused, and SystemExit for a loss that is not finite."""
    losses, firsts, peaks = [], [], {}
    for name, batches in forms.items():
        began_s = time.perf_counter()
        losses.append(training.step(batches[0]))
        firsts.append(time.perf_counter() - began_s)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        losses.append(training.step(batches[0]))  # by now the optimizer has its state
        peaks[name] = memory.in_use_bytes(device)
    clock, names = MicroBatchClock(device), []
    for number in range(warm_up + steps):
        if number == warm_up:
            clock.start()
        for name, batches in list(forms.items())[:: 1 if number % 2 else -1]:
            losses.append(training.step(batches[number % len(batches)]))
            if number >= warm_up:
                clock.mark()
                names.append(name)
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for name, lap_s in zip(names, clock.laps(), strict=True):  # sync, once for all of them
        seconds[name].append(lap_s)
    if not all(map(math.isfinite, losses)):
        raise SystemExit("a loss is not finite, so the measured speed is meaningless")
    return Timed(seconds, peaks, (losses[0], losses[-1]), firsts[0])


# Sizes of micro-batches


def grow(speed_of: Callable[[int], float | None], *, first: int, most: int) -> dict[int, float]:
    """Speeds of micro-batches of first, 2 first, 4 first, ... rows, up to `most` or until memory refuses one (None)."""
    speeds: dict[int, float] = {}
    rows = min(first, most)
    while rows <= most and (speed := speed_of(rows)) is not None:
        speeds[rows] = speed
        rows *= 2
    return speeds


def or_fewer(rows: int, call: Callable[[int], Timed], device: torch.device) -> tuple[int, Timed]:
    """The rows and result of `call(rows)`, halving the rows until they fit in memory.

    Raises SystemExit if not even one row fits.
    """
    while True:
        try:
            return rows, call(rows)
        except Refused:
            pass
        memory.release(device)  # only here, when no exception holds the tensors any more
        if rows == 1:
            raise SystemExit(f"not even one row fits in the memory of {device}: choose a smaller --model or --length")
        print(f"({rows} rows do not fit in memory: trying {rows // 2})")
        rows //= 2


def measure(
    model: str, length: int, form: str, arguments: argparse.Namespace, device: Device, peak: Peak | None
) -> list[dict[str, Any]]:
    """A row of figures of full rows; of a mix one for padded and one for packed rows."""
    layers, hidden = MODELS[model]
    network = BertConfig(arguments.words, hidden, layers, hidden // 64, 4 * hidden).with_dropout(arguments.dropout)
    share = 1.0 if form == "full" else arguments.real
    training = Training(network, arguments, device.torch)

    def batch_of(rows: int, seed: int) -> Batch:
        return made_up(rows, share, seed, length=length, words=arguments.words, masked_share=MASKED_SHARE)

    def timed(rows: int, count: int, warm_up: int, steps: int) -> Timed:
        batches = [batch_of(rows, seed) for seed in range(count)]
        # packing gives full rows back as they are
        kinds = {"full": True} if form == "full" else {"padded": False, "packed": True}
        forms = {name: [training.data(batch, is_packed=packed) for batch in batches] for name, packed in kinds.items()}
        if arguments.compile:
            torch.compiler.reset()  # or a second size would be compiled for sizes unknown
        return time_steps(training, forms, device.torch, warm_up=warm_up, steps=steps)

    def speed_of(rows: int) -> float | None:
        try:
            found = timed(rows, 1, TRIAL_WARM_UP, TRIAL_STEPS)
            return rows / max(map(statistics.median, found.seconds.values()))
        except Refused:
            pass
        memory.release(device.torch)
        return None

    try:
        tried: dict[int, float] = {}
        if arguments.micro_batch is None:
            most = MOST_LOGITS // math.ceil(MASKED_SHARE * length * arguments.words)
            tried = grow(speed_of, first=FIRST_ROWS, most=most)
        start = arguments.micro_batch or max(tried, key=lambda rows: tried[rows], default=FIRST_ROWS)
        rows, found = or_fewer(start, lambda rows: timed(rows, BATCHES, WARM_UP, arguments.steps), device.torch)
    finally:
        training.close()
    batch = batch_of(rows, 0)  # of whatever seed: the lengths are the same, in another order
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    work = Work(rows, sum(lengths), rows * length, useful_flops(network, lengths, len(batch["masked_ids"])))
    is_judged = form == "full" and peak_of(device.name) is H200
    facts = {"model": model, "length": length, "tried": tried, "losses": found.losses, "first_s": found.first_s}
    return [
        {**facts, "bytes": found.bytes[row["rows"]], **row}
        for row in evaluate(found.seconds, work, peak, BARS.get((model, length)) if is_judged else None)
    ]


# From seconds to figures


@dataclass(frozen=True)
class Work:
    """The work of a step: sequences, their real tokens, these with their padding, and useful operations."""

    sequences: int
    tokens: int
    padded_tokens: int
    flops: int


def evaluate(seconds: dict[str, list[float]], work: Work, peak: Peak | None, bar: Bar | None) -> list[dict[str, Any]]:
    """A row of figures for each form; packed rows are compared with the padded ones beside them."""
    rows = []
    for form, taken_s in seconds.items():
        row: dict[str, Any] = {
            "rows": form, "micro_batch": work.sequences, "real": work.tokens / work.padded_tokens, "n": len(taken_s),
            "step_s": spread(taken_s),
            "sequences_per_s": spread([work.sequences / step_s for step_s in taken_s]),
            "tokens_per_s": spread([work.tokens / step_s for step_s in taken_s]),
            "useful_tflops": spread([work.flops / step_s / 1e12 for step_s in taken_s]),
            "mfu": None if peak is None else spread([work.flops / step_s / 1e12 / peak.tflops for step_s in taken_s]),
        }  # fmt: skip
        if form == "packed":
            ratios = paired(seconds["padded"], taken_s)
            row["x_padded"] = spread(ratios)
            row["of_ideal"] = spread([ratio * row["real"] for ratio in ratios])
        row["bar"] = None if bar is None else bar.shown()
        row["verdict"] = None if bar is None else judge(bar, row)
        rows.append(row)
    return rows


def judge(bar: Bar, row: dict[str, Any]) -> str:
    """Whether medians hold a bar: "met", "met, the better one too", or "NOT met"."""
    reached = row["sequences_per_s"].median
    if reached < bar.sequences or (bar.mfu is not None and (row["mfu"] is None or row["mfu"].median < bar.mfu)):
        return "NOT met"
    return "met, the better one too" if bar.stretch is not None and reached >= bar.stretch else "met"


def report(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace, device: Device, peak: Peak | None) -> int:
    """Print a table, caveats, and the same as one line of JSON; 1 if a bar is missed."""
    known = "its peak is not known: give --peak for MFU" if peak is None else f"peak {peak.tflops:g} ({peak.source})"
    print(
        f"{device.name}, TFLOP/s of dense bf16: {known}; bf16 autocast, {arguments.optimizer}, dropout"
        f" {arguments.dropout:g}, {arguments.words:,} words, torch {torch.__version__}; medians (quartiles)"
        + (f"; compiled, first steps took up to {max(row['first_s'] for row in rows):.0f} s" * arguments.compile)
    )
    print(table(HEADS, [cells(row) for row in rows]))
    if min(row["n"] for row in rows) < LEAST_STEPS:
        print(f"(fewer than {LEAST_STEPS} counted steps: these figures say little)")
    if device.is_shared:
        print(f"(others held {device.taken_bytes / 2**30:.1f} GiB of this GPU at the start: these figures say little)")
    facts = {"device_name": device.name, "device_bytes": device.total_bytes, "peak_tflops": peak and peak.tflops}
    print(json_line("bert_gpu", {**vars(arguments), **facts, "torch": torch.__version__}, rows))
    return 1 if any(row["verdict"] == "NOT met" for row in rows) else 0


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    rows = row["rows"] if row["rows"] == "full" else f"{row['real']:.0%} real, {row['rows']}"
    return [
        row["model"], str(row["length"]), rows, str(row["micro_batch"]), row["step_s"].shown(".1f", 1e3),
        row["sequences_per_s"].shown(",.0f"), row["tokens_per_s"].shown(",.0f"), row["useful_tflops"].shown(".1f"),
        "-" if row["mfu"] is None else row["mfu"].shown(".1%"),
        row["x_padded"].shown() if "x_padded" in row else "", row["of_ideal"].shown() if "of_ideal" in row else "",
        f"{row['bytes'] / 2**30:.1f}", row["bar"] or "-", row["verdict"] or "-", str(row["n"]),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
