"""One rank's training as a function: from command-line words to facts, through the same builder as the product."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetseq import config as options
from hetseq.comm.group import Group
from hetseq.config.sections import LogConfig
from hetseq.monitor.metrics import Display, Metrics, Recording
from hetseq.run.build import RankJob, build_session
from hetseq.run.loaded_task import load_material
from hetseq.run.session import Session
from hetseq.run_directory import RunDirectory
from tests.support import toys

TOYS = Path(__file__).with_name("toys.py")


@dataclass
class Facts:
    """Observations of one rank."""

    losses: list[float | None]
    terms: list[dict[str, float] | None]
    gradients: list[torch.Tensor]
    absent: list[list[bool]]
    shares: list[tuple[int, ...]]
    validations: list[dict[str, Any]]
    parameters: torch.Tensor
    has_ended: bool
    bytes_reduced: int
    noise_scales: list[float | None]


class Recorder(Metrics):
    """Keeps the rows in place of writing them."""

    def __init__(self) -> None:
        super().__init__(Recording(None), Display(LogConfig()), is_writer=False)
        self.rows: list[dict[str, Any]] = []
        self.validations: list[dict[str, Any]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def step(self, row: Any) -> None:
        self.rows.append(dict(row))

    def validation(self, row: Any) -> None:
        self.validations.append(dict(row))

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))


def toy_words(toy: str, **flags: Any) -> list[str]:
    """Command-line words for a toy: its data in their own order, nothing saved, nothing clipped."""
    words = ["--task", f"{TOYS}:{toy}", "--curriculum", "1000000", "--clip-norm", "0", "--seed", "7", "--no-save"]
    words += ["--disable-validation", "--lr-scheduler", "constant", "--lr", str(getattr(toys, toy).rate)]
    for name, value in flags.items():
        words += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    return words


def train(group: Group, save_dir: str, words: list[str]) -> Facts:
    """Train in this process as rank `group.rank`, with the run directory `save_dir` (made by the test)."""
    config = options.complete(options.parse([*words, "--save-dir", save_dir]))
    recorder = Recorder()
    material = load_material(config, torch.device("cpu"))
    session = build_session(RankJob(config, RunDirectory(Path(save_dir)), group, material, metrics=recorder))
    return facts_of(session, recorder)


def facts_of(session: Session, recorder: Recorder) -> Facts:
    """Train to the end, close the session, and tell."""
    try:
        has_ended = session.train()
        optimizer = session.controller.replica.optimizer
        model = session.controller.replica.model
        return Facts(
            losses=[row["loss"] for row in recorder.rows],
            terms=[row["terms"] for row in recorder.rows],
            gradients=getattr(optimizer, "seen", []),
            absent=getattr(optimizer, "absent", []),
            shares=[tuple(row["shares"]) for row in recorder.rows],
            validations=recorder.validations,
            parameters=torch.cat([p.detach().flatten() for p in model.parameters()]).clone(),
            has_ended=has_ended,
            bytes_reduced=session.controller.group.bytes_reduced,
            noise_scales=[row.get("noise_scale") for row in recorder.rows],
        )
    finally:
        session.close()


def prepared(path: Path) -> str:
    """A run directory for `train`."""
    RunDirectory.prepare(path, config_yaml="")
    return str(path)
