"""Memory of a LoRA run whose frozen base has 16 bits, against what base, adapters and activations need.

    python bench/lora_memory.py [--hidden 1024] [--layers 16] [--micro-batch 2] [--length 128]

The bar: a process that trains adds at most 1.05 x (2 bytes x base + 16 bytes x adapters) + activations + 100 MiB.
16 bytes are weight, gradient and both moments of AdamW in fp32. Three processes, one after the other:

    make     writes a Llama from its configuration, in bf16, and texts that fill the rows
    count    trains one micro-batch and adds up what autograd saves: each storage once, without weights and whatever has
             the shape of one (a copy of the base must not pass for an activation); and the logits of it in fp32
    train    `hetseq train --precision bf16 --lora-rank 8` in one process, some steps and a checkpoint

The process that trains first imports everything, then clears its high-water mark. What it adds is VmHWM at its end less
VmRSS before, as Linux counts: memory of its own (anonymous), mapped files (a mapped page of the cache counts), and
shared memory. A thread looks every 2 ms and keeps the parts of its largest sight, which say where a second copy lies.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import figures
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
MIB = 2**20
SLACK, ALLOWED_BYTES = 1.05, 100 * MIB
LOOK_S = 0.002
VOCABULARY = 8192
_KB = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)
#: what a run imports, so that the code of libraries is not counted
IMPORTED = ("hetseq.run.build", "hetseq.tasks.hf_causal_lm.task", "peft", "transformers.models.llama.modeling_llama",
            "tokenizers", "tensorboard")  # fmt: skip
PARTS = {"RssAnon": "own", "RssFile": "mapped files", "RssShmem": "shared"}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=1024, help="width of the model, a multiple of 64")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=2, help="rows of a micro-batch, of which a step has two")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--rank", type=int, default=8, help="of LoRA")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--part", choices=tuple(DEEDS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.hidden < 64 or arguments.hidden % 64:
        parser.error(f"--hidden {arguments.hidden}: expected a multiple of 64")
    if min(arguments.layers, arguments.micro_batch, arguments.rank, arguments.steps) < 1 or arguments.length < 16:
        parser.error("--layers, --micro-batch, --rank and --steps: expected at least 1; --length: at least 16")
    return arguments


def main() -> int:
    """Measure and print; 1 if the bar is missed."""
    arguments = parse()
    if arguments.part is not None:
        print(json.dumps(DEEDS[arguments.part](arguments)))
        return 0
    with tempfile.TemporaryDirectory(prefix="hetseq-lora-memory-") as name:
        found = dict[str, Any]()
        for part in DEEDS:
            found |= in_process(part, Path(name))
    return report(found, arguments)


def in_process(part: str, folder: Path) -> dict[str, Any]:
    """What a part has found, in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--part", part, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode != 0:
        raise SystemExit(f"lora_memory.py --part {part} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# The parts, each in its process.


def make(arguments: argparse.Namespace) -> dict[str, Any]:
    """The directory of the model, and texts of which each fills a row."""
    from tests.support.tiny_models import publish

    publish(
        arguments.folder / "model", "llama", dtype=torch.bfloat16, initializer_range=0.02, vocab_size=VOCABULARY,
        hidden_size=arguments.hidden, intermediate_size=arguments.hidden * 11 // 4, num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64, num_key_value_heads=arguments.hidden // 64,
        max_position_embeddings=arguments.length,
    )  # fmt: skip
    # each letter is a token at least, and what exceeds a row is cut into more rows
    lines = [json.dumps({"text": " ".join(f"{number:x}" for number in range(first, first + arguments.length))})
             for first in range(4 * arguments.micro_batch)]  # fmt: skip
    (arguments.folder / "texts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"stored_bytes": sum(path.stat().st_size for path in (arguments.folder / "model").glob("*.safetensors"))}


def count(arguments: argparse.Namespace) -> dict[str, Any]:
    """Elements of base and adapters, and bytes that autograd saves in the first micro-batch."""
    saved: dict[
        int, tuple[int, tuple[int, ...]]
    ] = {}  # by the address of a storage: its bytes, the shape of its tensor
    kept: list[torch.Tensor] = []  # so that no address is used twice
    is_over, targets = threading.Event(), list[int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not is_over.is_set() and storage.data_ptr() not in saved:
            saved[storage.data_ptr()] = (storage.nbytes(), tuple(tensor.shape))
            kept.append(tensor)
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        is_over.set()  # the first backward has begun
        return tensor

    models = watch_models(targets)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        train_here(arguments, "count", steps=1)
    (model,) = models
    parameters = list(model.named_parameters())
    weights = {parameter.untyped_storage().data_ptr() for _, parameter in parameters}
    shapes = {tuple(sorted(parameter.shape)) for _, parameter in parameters if parameter.ndim > 1}
    activations = [
        size for address, (size, shape) in saved.items()
        if address not in weights and tuple(sorted(shape)) not in shapes
    ]  # fmt: skip
    copies = [
        size for address, (size, shape) in saved.items() if address not in weights and tuple(sorted(shape)) in shapes
    ]
    return {
        "base": sum(parameter.numel() for _, parameter in parameters if not parameter.requires_grad),
        "adapters": sum(parameter.numel() for _, parameter in parameters if parameter.requires_grad),
        "base_types": sorted(
            {str(weight.dtype) for _, weight in parameters if not weight.requires_grad and weight.ndim}
        ),
        "saved_bytes": sum(activations),
        "copied_bytes": sum(copies),
        "logits_bytes": 4 * VOCABULARY * targets[0],
    }


def watch_models(targets: list[int]) -> list[Any]:
    """The models that the task will have built; `targets` gets the predicted tokens of each micro-batch."""
    from hetseq.tasks.hf_causal_lm.task import HfCausalLmTask

    build, loss, models = HfCausalLmTask.build_model, HfCausalLmTask.loss, list[Any]()

    def build_model(self: Any) -> Any:
        models.append(build(self))
        return models[-1]

    def counted(self: Any, model: Any, sample: Any) -> Any:
        targets.append(len(sample["target_positions"]))
        return loss(self, model, sample)

    HfCausalLmTask.build_model = build_model  # type: ignore[method-assign]
    HfCausalLmTask.loss = counted  # type: ignore[method-assign]
    return models


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Bytes that a run has added at most, and the parts of its largest sight."""
    for name in IMPORTED:
        importlib.import_module(name)
    warm_up()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = memory()
    largest: dict[str, int] = {"VmRSS": 0}
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_S):
            now = memory()
            if now["VmRSS"] > largest["VmRSS"]:
                largest.update(now)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        train_here(arguments, "train", steps=arguments.steps)
    finally:
        is_over.set()
        watcher.join()
    added = {name: largest[key] - before[key] for key, name in PARTS.items()}
    return {"before_bytes": before["VmRSS"], "added_bytes": memory()["VmHWM"] - before["VmRSS"], "parts": added}


def warm_up() -> None:
    """One product of each type, for the libraries to be in memory."""
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.ones(64, 64, dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(torch.ones(8, 64, dtype=dtype), weight).sum().backward()


def memory() -> dict[str, int]:
    """The fields of /proc/self/status, in bytes."""
    found = _KB.findall(Path("/proc/self/status").read_text())
    return {name: 1024 * int(size) for name, size in found}


def train_here(arguments: argparse.Namespace, name: str, *, steps: int) -> None:
    """`hetseq train` in this process, its messages left to stderr. Raises SystemExit unless it ends with 0."""
    from hetseq.cli import main as hetseq

    folder = arguments.folder
    options = {
        "task": "hf_causal_lm", "model": folder / "model", "data": folder / "texts.jsonl", "precision": "bf16",
        "lora-rank": arguments.rank, "max-length": arguments.length, "batch-size": arguments.micro_batch,
        "global-batch-size": 2 * arguments.micro_batch, "max-update": steps, "optimizer": "adamw", "lr": 1e-4,
        "lr-scheduler": "constant", "log-format": "none", "num-workers": 0, "noise-scale-every": 0,
        "save-dir": folder / name,
    }  # fmt: skip
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    code = hetseq(["train", "--cpu", "--distributed-no-spawn", "--disable-validation", *words])
    if code != 0:
        raise SystemExit(f"hetseq train ended with {code}")


DEEDS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"make": make, "count": count, "train": train}


# Report.


def bound(found: dict[str, Any]) -> dict[str, float]:
    """The parts of the bar, in bytes."""
    return {
        "base, 2 bytes x 1.05": SLACK * 2 * found["base"],
        "adapters, 16 bytes x 1.05": SLACK * 16 * found["adapters"],
        "activations": found["saved_bytes"],
        "logits": found["logits_bytes"],
        "allowed": ALLOWED_BYTES,
    }


def report(found: dict[str, Any], arguments: argparse.Namespace) -> int:
    """The tables, the verdict, the line of JSON; 1 if the bar is missed."""
    parts, added = bound(found), found["added_bytes"]
    most = sum(parts.values())
    millions = f"{found['base'] / 1e6:.1f} M weights in {', '.join(found['base_types'])}"
    print(f"base: {millions}; adapters of rank {arguments.rank}: {found['adapters'] / 1e6:.3f} M")
    print(figures.table(("the bar", "MiB"), [[name, f"{size / MIB:.1f}"] for name, size in parts.items()]))
    at_most = [[name, f"{size / MIB:.1f}"] for name, size in found["parts"].items()]
    print(figures.table(("the run, at its largest sight", "MiB"), at_most))
    if found["copied_bytes"]:
        print(f"(autograd saved {found['copied_bytes'] / MIB:.1f} MiB in the shapes of weights: they are not counted)")
    holds = added <= most
    print(
        f"the run added {added / MIB:.1f} MiB to {found['before_bytes'] / MIB:.1f} MiB of its imports:"
        f" {added / most:.3f} of {most / MIB:.1f} MiB (bar: 1: {'yes' if holds else 'NO'})"
    )
    row = {**found, "most_bytes": most, "ratio": added / most}
    settings = {name: value for name, value in vars(arguments).items() if name not in ("part", "folder")}
    print(figures.json_line("lora_memory", settings, [row]))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
