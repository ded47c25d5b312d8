"""Activations that leave the device between forward and backward: memory on the device, and the time of backward.

    python bench/offload.py [--device cpu|cuda:N] [--rounds 7] [--rows 8] [--horizons 0 1 2 4 8]

All ways train the same network in turns, layers checkpointed: with everything on the device (`none`), offloaded with
each horizon, and on a GPU with torch's `save_on_cpu` too. Ratios are of a round, to `none`. Before, one step of each
way must have the gradients of `none`, bit for bit.

`cpu`: 16 layers. A layer takes 6 ms forward and 12 ms backward, sleeps included, and runs forward once more in
backward. The link is played: one tensor at a time in each direction, as long as a layer takes in backward.
Bars: at most (horizon + 2) / tensors of the bytes are on the device at a time; from horizon 1 on, where a transfer is
not longer than the layers before it, backward takes at most 1.10 times as long.

`cuda`: a GPT of 1.3 billion parameters in bf16, `--rows` rows of 2,048 tokens, page-locked host memory. Bars: at some
horizon backward takes at most 1.05 times as long with at most a quarter of the bytes on the device, and the whole step
is at least 1.5 times as fast as with `save_on_cpu`.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import figures
import torch
from random_tokens import RandomTokens, summed_loss
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from hetseq import checkpoint_activations
from hetseq.parallel.activation_offload import ActivationOffload
from hetseq.parallel.offload_tiers import HostTier, Parcel, Wait
from hetseq.tasks.gpt.model import GptConfig, GptForCausalLM

LAYERS, WIDTH, ROWS = 16, 256, 64
FORWARD_S, BACKWARD_S = 0.006, 0.012
BACKWARD_BAR, CUDA_BAR, LIVE_BAR, SPEED_BAR = 1.10, 1.05, 0.25, 1.5
WORDS, LENGTH = 32_000, 2048

Way = Callable[[], AbstractContextManager[Any]]


class _Pause(torch.autograd.Function):
    """The identity, which lasts a while in both directions."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(BACKWARD_S)
        return gradients[0]


class SlowLayer(nn.Module):
    """A layer that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        # first, since torch ends a second forward as soon as it has what backward needs
        waited: Tensor = _Pause.apply(hidden)  # type: ignore[no-untyped-call]
        return torch.tanh(self.linear(waited))


class SlowLink:
    """A tier behind a link that takes `latency_s` for a tensor, one at a time in each direction."""

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s
        self._out, self._back = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def put(self, tensor: Tensor) -> Parcel:
        return _Sent(self, tensor.clone(), self._out.submit(time.sleep, self._latency_s))

    def bring(self) -> Future[None]:
        """Begin a transfer back."""
        return self._back.submit(time.sleep, self._latency_s)

    def close(self) -> None:
        self._out.shutdown()
        self._back.shutdown()


class _Sent:
    def __init__(self, link: SlowLink, copy: Tensor, sent: Future[None]) -> None:
        self._link, self._copy, self._sent = link, copy, sent

    def has_left(self) -> None:
        self._sent.result()

    def fetch(self) -> Wait:
        arrived = self._link.bring()

        def wait() -> Tensor:
            arrived.result()
            return self._copy.clone()

        return wait

    def free(self) -> None:
        pass


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=8, help="of the GPU's micro-batch")
    parser.add_argument("--horizons", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    arguments = parser.parse_args(words)
    if min(arguments.rounds, arguments.rows) < 1 or min(arguments.horizons) < 0:
        parser.error("--rounds, --rows: expected at least 1; --horizons: expected 0 or more")
    device = torch.device("cuda:0" if arguments.device == "cuda" else arguments.device)
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and device.index >= torch.cuda.device_count()):
        parser.error(f"--device {arguments.device}: this machine has no such device")
    arguments.device = str(device)
    return arguments


def main() -> int:
    """Measure and print; 1 if a bar is missed."""
    arguments = parse()
    torch.manual_seed(0)
    if arguments.device == "cpu":
        torch.set_num_threads(1)
        model: nn.Module = nn.Sequential(*(SlowLayer() for _ in range(LAYERS)))
        inputs = torch.randn(ROWS, WIDTH, requires_grad=True)
        loss_of: Callable[[], Tensor] = lambda: model(inputs).square().sum()  # noqa: E731
        checkpoint_activations(model, "*")
        tier: Any = SlowLink(FORWARD_S + BACKWARD_S)
        least, ways = 1, dict[str, Way]()
    else:
        device = torch.device(arguments.device)
        torch.cuda.set_device(device)
        shape = GptConfig(
            WORDS, 2048, 24, 16, 16, 128, 8192, LENGTH,
            embedding_dropout=0.0, residual_dropout=0.0, attention_dropout=0.0,
        )  # fmt: skip
        with device:
            model = GptForCausalLM(shape).to(torch.bfloat16)
        rows = RandomTokens(WORDS, LENGTH).rows[: arguments.rows].to(device)
        loss_of = lambda: summed_loss(model, rows)  # noqa: E731
        checkpoint_activations(model)
        tier, least = HostTier(device), 1 << 20
        ways = {"save_on_cpu": lambda: save_on_cpu(pin_memory=True)}
    offloads = {
        f"horizon {one}": ActivationOffload(model, tier, horizon=one, least_bytes=least) for one in arguments.horizons
    }
    found = measure(model, loss_of, {"none": nullcontext, **ways, **{n: o.forward for n, o in offloads.items()}},
                    arguments.rounds)  # fmt: skip
    for offload in offloads.values():
        offload.close()
    rows_, is_met = judge(arguments, found, offloads)
    print(figures.json_line("offload", vars(arguments), rows_))
    return 0 if is_met else 1


def measure(
    model: nn.Module, loss_of: Callable[[], Tensor], ways: Mapping[str, Way], rounds: int
) -> dict[str, list[tuple[float, float, int]]]:
    """Seconds of forward and of backward, and the most bytes on a GPU, of each way in each round."""
    expected: list[Tensor] = []
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in ways}
    for number in range(rounds + 1):  # the first one compares the gradients, and warms up
        for name, way in ways.items():
            model.zero_grad()
            gc.collect()
            seconds = step(loss_of, way)
            if number:
                found[name].append(seconds)
                continue
            gradients = [one.grad.cpu() for one in model.parameters() if one.grad is not None]
            expected = expected or gradients
            same = all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
            if not same and name != "save_on_cpu":  # whose copies have other strides
                raise SystemExit(f"{name}: the gradients differ from `none`")
    return found


def step(loss_of: Callable[[], Tensor], way: Way) -> tuple[float, float, int]:
    """Forward and backward."""
    is_gpu = torch.cuda.is_available()
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    began_s = now()
    with way():
        loss = loss_of()
    middle_s = now()
    loss.backward()
    end_s = now()
    return middle_s - began_s, end_s - middle_s, torch.cuda.max_memory_allocated() if is_gpu else 0


def now() -> float:
    """Seconds, once the GPU has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def judge(
    arguments: argparse.Namespace, found: Mapping[str, list[tuple[float, float, int]]],
    offloads: Mapping[str, ActivationOffload],
) -> tuple[list[dict[str, Any]], bool]:  # fmt: skip
    """Print the table; the rows, and whether the bars are met."""
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {arguments.device}, {arguments.rounds} rounds")
    print(f"{'way':>12}  backward / none      step / none          on the device  waited")
    rows, met = list[dict[str, Any]](), list[bool]()
    for name, times in found.items():
        backward = figures.spread([one[1] / none[1] for one, none in zip(times, found["none"])])
        whole = figures.spread([sum(one[:2]) / sum(none[:2]) for one, none in zip(times, found["none"])])
        row: dict[str, Any] = {"way": name, "backward": backward.median, "step": whole.median}
        row["peak_bytes"] = statistics.median(one[2] for one in times)
        words = ""
        if name in offloads:
            facts = offloads[name].facts
            row |= {"live": facts.most_live_bytes / facts.bytes, "tensors": facts.tensors, "waited_s": facts.waited_s}
            words = f"{row['live']:>13.0%}  {facts.waited_s:.3f} s"
        print(f"{name:>12}  {backward.shown():<19}  {whole.shown():<19}  {words}")
        rows.append(row)
        if arguments.device == "cpu" and name in offloads:
            horizon = int(name.split()[1])
            met.append(row["live"] <= (horizon + 2) / row["tensors"])
            met.append(horizon < 1 or backward.median <= BACKWARD_BAR)
    if arguments.device != "cpu":
        small = [row for row in rows if "live" in row and row["live"] <= LIVE_BAR and row["backward"] <= CUDA_BAR]
        (torch_own,) = (row for row in rows if row["way"] == "save_on_cpu")
        met += [bool(small), any(torch_own["step"] / row["step"] >= SPEED_BAR for row in small)]
    print("all bars are met" if all(met) else "a bar is missed")
    return rows, all(met)


if __name__ == "__main__":
    sys.exit(main())
