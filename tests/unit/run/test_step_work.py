"""What a step does besides the task's own work, counted: looks at numbers of a device, and passes over the gradient."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetseq import config as options
from hetseq.comm.group import LocalGroup
from hetseq.run.build import RankJob, build_session
from hetseq.run.loaded_task import load_material
from hetseq.run_directory import RunDirectory
from tests.support.training import Recorder, prepared, toy_words

#: what waits for a device, where there is one
LOOKS = ("tolist", "item", "numpy", "cpu", "__float__", "__int__", "__bool__", "__array__")
STEPS = 10


class Operations(TorchDispatchMode):
    """How often torch computes what."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts[function.__name__.partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))


def counted(monkeypatch: pytest.MonkeyPatch, save_dir: Path, *words: str) -> tuple[int, Counter[str]]:
    """Looks at numbers and operations of ten steps, after two."""
    given = [*toy_words("Integers", global_batch_size=4, max_update=60, noise_scale_every=0), *words]
    config = options.complete(options.parse([*given, "--save-dir", str(save_dir)]))
    directory, material = RunDirectory(Path(prepared(save_dir))), load_material(config, torch.device("cpu"))
    session = build_session(RankJob(config, directory, LocalGroup(), material, metrics=Recorder()))
    looks: list[str] = []

    def count(name: str) -> None:
        look = getattr(torch.Tensor, name)

        def noted(self: torch.Tensor, *args: Any) -> Any:
            looks.append(name)
            return look(self, *args)

        monkeypatch.setattr(torch.Tensor, name, noted)

    try:
        for _ in range(2):
            session.controller.train_step()
        for name in LOOKS:
            count(name)
        with Operations() as operations:
            for _ in range(STEPS):
                session.controller.train_step()
        return len(looks), operations.counts
    finally:
        monkeypatch.undo()
        session.close()


def test_a_step_looks_at_the_sums_of_its_losses_and_at_its_norm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looks, operations = counted(monkeypatch, tmp_path)
    assert looks == 2 * STEPS
    assert operations["_foreach_norm"] == STEPS
    assert operations["_foreach_mul_"] == 0, "nothing is clipped"
    assert operations["mm"] + operations["addmm"] > STEPS, "the twin: what the task computes is seen"


def test_clipping_goes_over_the_gradient_once_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    looks, operations = counted(monkeypatch, tmp_path, "--clip-norm", "1e-3")
    assert looks == 2 * STEPS
    assert (operations["_foreach_norm"], operations["_foreach_mul_"]) == (STEPS, STEPS)
