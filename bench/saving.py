"""A training loop that saves, and ways to save its state: HetSeq's to disk and to memory, torch.save, DCP's async.

Responsible for: every saver does the same work for the same state, at the same points of the same loop. Reads no
clock except to time the wait before an update, and computes no figures. The one idea: a saver has the methods that
HetSeq's trainer calls: `begin`, then `settle` before the next update of the optimizer, `poll` once a step, and
`finish`; torch.save does everything in `begin`. Memory-only states are compared with no saves, not with saves to disk.

The loop trains a transformer of the shape of GPT-2 on synthetic tokens with AdamW (fused), in one thread. DCP runs in
the fastest way that its documentation describes: a separate process, an asynchronous stager that keeps its shared
memory from save to save, files flushed to the disk.
"""

from __future__ import annotations

import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from hetseq.checkpoint import CheckpointManager, CheckpointOptions, Identity, Retention
from hetseq.checkpoint.history import HISTORY_NAME
from hetseq.comm.group import LocalGroup

CHUNK_BYTES = 8 << 20  # of a plain write
_REST_S = 10.0  # seconds for a writer to clean up after a commit
_LINEAGE = "00112233445566aa"


@dataclass(frozen=True)
class Shape:
    """Of a transformer; its state with AdamW takes 12 bytes for each parameter."""

    layers: int
    width: int
    heads: int
    words: int
    positions: int


SHAPES = {
    "tiny": Shape(2, 64, 2, 1000, 64),  # 2 MB of state, to try the script
    "small": Shape(8, 512, 8, 30522, 512),  # 0.49 GB
    "gpt2": Shape(12, 768, 12, 50257, 1024),  # 124M parameters, 1.5 GB
}


class Network(nn.Module):
    """Embeddings, encoder layers that look back only, and a head tied to the embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words, self.positions = (nn.Embedding(n, shape.width) for n in (shape.words, shape.positions))
        layer = nn.TransformerEncoderLayer(
            shape.width, shape.heads, 4 * shape.width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, shape.layers, nn.LayerNorm(shape.width), enable_nested_tensor=False
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, (rows, tokens, words), of tokens, (rows, tokens)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.words(tokens) + self.positions(torch.arange(length))
        return F.linear(self.layers(hidden, mask=mask, is_causal=True), self.words.weight)


class Loop:
    """The training loop: `step` is one update, `waited_s` the total wait in `before_update`."""

    def __init__(self, shape: Shape, *, rows: int, length: int) -> None:
        torch.manual_seed(0)
        self.model = Network(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.before_update: Callable[[], None] = lambda: None
        self.waited_s = 0.0
        self._tokens = torch.randint(shape.words, (64, rows, length + 1))
        self._steps = 0
        self.optimizer.register_step_pre_hook(self._await)
        self.step()  # the optimizer's state is made by its first step

    def step(self) -> None:
        """Forward, backward, update."""
        tokens = self._tokens[self._steps % len(self._tokens)]
        self._steps += 1
        self.optimizer.zero_grad(set_to_none=False)
        logits = self.model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """As a script hands it to torch.save or DCP."""
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def tensors(self) -> dict[str, Tensor]:
        """As HetSeq's trainer names it, all of it live."""
        tensors = {f"model.{name}": value.detach() for name, value in self.model.state_dict(keep_vars=True).items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"optim.{name}.{key}"] = value.detach()
        return tensors

    def bytes(self) -> int:
        """Of the state."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def _await(self, *_: Any) -> None:  # returns None: torch would take anything else as arguments of the update
        began = time.perf_counter()
        self.before_update()
        self.waited_s += time.perf_counter() - began


class Saver(ABC):
    """Saves the state of a loop into `folder`, which no other saver uses; a failed save ends the script."""

    name: str

    def __init__(self, loop: Loop, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.loop, self.folder = loop, folder
        self.saves = 0

    @abstractmethod
    def begin(self) -> None:
        """Save, or begin to."""

    def settle(self) -> None:  # noqa: B027
        """Return when the optimizer may change the state."""

    def poll(self) -> None:  # noqa: B027
        """Called once a step while a save is under way."""

    @property
    def is_underway(self) -> bool:
        """Whether a save has begun that is not over."""
        return False

    def finish(self) -> None:  # noqa: B027
        """Return when it is over."""

    def clear(self) -> None:
        """Remove what has been saved; nothing is under way."""
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def close(self) -> None:  # noqa: B027
        """Give everything back."""


class HetSeq(Saver):
    """`CheckpointManager` as the trainer drives it, for one rank."""

    name = "HetSeq"

    def __init__(self, loop: Loop, folder: Path, *, is_polite: bool = True, keeps_states: bool = False) -> None:
        super().__init__(loop, folder)
        self._manager = CheckpointManager(
            folder, run_id=f"bench-{os.getpid()}", group=LocalGroup(), retention=Retention(),
            keeps_states=keeps_states, options=CheckpointOptions(is_polite=is_polite),
        )  # fmt: skip
        refusal = self._manager.prepare(loop.tensors())
        if refusal is not None:
            raise SystemExit(f"no memory for a background save: {refusal}")

    def begin(self) -> None:
        """The copy begins, and the writer."""
        self.saves += 1
        result = self._manager.begin(
            self.loop.tensors(), {"step": self.saves}, identity=Identity(self.saves, 0, _LINEAGE),
            nonce=self.saves, kinds=["time"], at_once=[],
        )  # fmt: skip
        self._check(result, is_early=True)

    def settle(self) -> None:
        """The end of the copy."""
        self._manager.settle()

    def poll(self) -> None:
        """The next event of the save, if its writer is at rest."""
        if self._manager.is_underway and not self._manager.is_busy:
            self._check(self._manager.go_on())

    @property
    def is_underway(self) -> bool:
        """Until the commit."""
        return self._manager.is_underway

    def finish(self) -> None:
        """The commit."""
        self._check(self._manager.finish())

    def clear(self) -> None:
        """The checkpoints, once the writer has noted the last of them and so is at rest."""
        history, deadline = self.folder / HISTORY_NAME, time.monotonic() + _REST_S
        while _lines(history) < 1 + self.saves:
            if time.monotonic() > deadline:
                raise SystemExit(f"{history} has no line for save {self.saves}")
            time.sleep(0.01)
        for path in (self.folder / "checkpoints").glob("step-*"):
            shutil.rmtree(path)

    def close(self) -> None:
        """Memory and process."""
        self._manager.close()

    def _check(self, result: Any, *, is_early: bool = False) -> None:
        if is_early and result is not None:
            raise SystemExit("the save did not continue in the background")
        if result is not None and not result.ok:
            raise SystemExit(f"a save failed: {result.error}")


class InMemory(HetSeq):
    """The same manager, whose states stay in shared memory; `saves` counts those that did.

    `begin` keeps the state only if the last one was sealed when `settle` was called, since the trainer asks before the
    update and acts after it.
    """

    name = "in memory"

    def __init__(self, loop: Loop, folder: Path) -> None:
        super().__init__(loop, folder, keeps_states=True)
        if not self._manager.keeps_states:
            self._manager.close()
            raise SystemExit("a second state does not fit in memory")
        self._was_sealed = True

    def begin(self) -> None:
        """Begin the copy, or skip the state of this step."""
        if not self._was_sealed:
            return
        self.saves += 1
        is_kept = self._manager.keep(
            self.loop.tensors(), {"step": self.saves}, identity=Identity(self.saves, 0, _LINEAGE), nonce=self.saves,
            at_once=[],
        )  # fmt: skip
        if not is_kept:
            raise SystemExit("the state did not stay in memory")

    def settle(self) -> None:
        """The ranks' exchange before the update, and the end of the copy."""
        self._was_sealed = self._manager.is_sealed
        super().settle()

    def poll(self) -> None:
        """Nothing: no writer takes part."""

    @property
    def is_underway(self) -> bool:
        """Until the newest state is sealed."""
        return not self._manager.is_sealed

    def finish(self) -> None:
        """The seal."""
        deadline = time.monotonic() + _REST_S
        while self.is_underway:
            if time.monotonic() > deadline:
                raise SystemExit("a state in memory was not sealed")
            time.sleep(0.001)
        self._was_sealed = True

    def clear(self) -> None:
        """Nothing: no file is written."""


class TorchSave(Saver):
    """torch.save into a new file, flushed, renamed; training waits."""

    name = "torch.save"

    def begin(self) -> None:
        """All of it."""
        self.saves += 1
        beside = self.folder / "state.pt.tmp"
        with open(beside, "wb") as file:
            torch.save(self.loop.state(), file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(beside, self.folder / "state.pt")


class Dcp(Saver):
    """`torch.distributed.checkpoint.async_save` with its best stager."""

    name = "DCP async"

    def __init__(self, loop: Loop, folder: Path) -> None:
        super().__init__(loop, folder)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # its process connects to this one by the full host name
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options)
        self._staged: Future[None] | None = None
        self._uploaded: Future[Any] | None = None
        with _silent():  # the process that begins here logs every step of every save
            self.begin()
            self.finish()

    def begin(self) -> None:
        """The staging begins, and the upload after it."""
        self.saves += 1
        writer = dcp.FileSystemWriter(self.folder / f"step-{self.saves}", sync_files=True)
        response: Any = dcp.async_save(
            self.loop.state(), storage_writer=writer, async_stager=self._stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )  # fmt: skip
        self._staged, self._uploaded = response.staging_completion, response.upload_completion

    def settle(self) -> None:
        """The end of the staging."""
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def poll(self) -> None:
        """Whether it is over."""
        if self._uploaded is not None and self._uploaded.done():
            self.finish()

    @property
    def is_underway(self) -> bool:
        """Until the upload is over."""
        return self._uploaded is not None

    def finish(self) -> None:
        """The end of the upload."""
        self.settle()
        if self._uploaded is not None:
            self._uploaded.result()
            self._uploaded = None

    def close(self) -> None:
        """The stager; its process ends with this one."""
        self.finish()
        self._stager.close()
        if dist.is_initialized():
            dist.destroy_process_group()


SAVERS: dict[str, Callable[[Loop, Path], Saver]] = {saver.name: saver for saver in (HetSeq, TorchSave, Dcp)}


def write_plain(path: Path, data: memoryview) -> None:
    """Write these bytes to a new file and flush it: the limit of the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for begin in range(0, len(data), CHUNK_BYTES):
            rest = data[begin : begin + CHUNK_BYTES]
            while len(rest):
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_system(folder: Path) -> str:
    """The kind of file system that `folder` is on, as the kernel names it."""
    folder, found, kind = folder.resolve(), "", "unknown"
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, mount, name = line.split(" ")[:3]
        if folder.is_relative_to(mount) and len(mount) >= len(found):
            found, kind = mount, name
    return kind


@contextmanager
def _silent() -> Iterator[None]:
    """Discard standard error, also of processes started meanwhile, for as long as they live."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
