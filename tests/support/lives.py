"""One rank's run of a task that a test defines: command-line words in, facts after every step out."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hetseq import Task
from hetseq import config as options
from hetseq.comm.group import Group
from hetseq.errors import HetSeqError
from hetseq.run.build import RankJob, build_session
from hetseq.run.loaded_task import load_material
from hetseq.run.session import Session
from hetseq.run_directory import RunDirectory
from hetseq.task import make_task
from tests.support import toys
from tests.support.training import Recorder

WORDS = (
    "--lr-scheduler constant --clip-norm 0 --seed 7 --curriculum 1000000 --precision fp64 --lr 0.05"
    " --global-batch-size 10 --optimizer sgd"
)


def words(text: str, *, validate: bool = False) -> list[str]:
    """The words of a small exact run, and `text`."""
    return [*WORDS.split(), *(["--valid-subset", "train"] if validate else ["--disable-validation"]), *text.split()]


@dataclass
class Life:
    """Observations of one rank; lists have one element per step that it took."""

    losses: list[float | None] = field(default_factory=list)
    buffers: list[dict[str, torch.Tensor]] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)  # bytes of sums so far
    valid: list[float] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    first_step: int = 0
    parameters: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    error: HetSeqError | None = None


def live(group: Group, save_dir: str, arguments: list[str], task_class: type[Task]) -> Life:
    """Train to the end, or to the first refusal."""
    life, recorder = Life(), Recorder()
    silent = logging.NullHandler()
    logging.getLogger("hetseq").addHandler(silent)  # its warnings do not matter here
    session: Session | None = None
    try:
        session = begin(group, save_dir, arguments, task_class, recorder)
        controller = session.controller
        life.first_step = controller.state.position.step
        take = controller.step

        def watched() -> Any:
            result = yield from take()
            life.losses.append(result.loss)
            life.buffers.append({name: b.detach().clone() for name, b in controller.replica.model.named_buffers()})
            life.gathered.append(group.bytes_reduced)
            return result

        controller.step = watched  # type: ignore[method-assign]
        controller.fit()
        life.parameters = flat(controller.replica.model)
    except HetSeqError as error:
        life.error = error
    finally:
        logging.getLogger("hetseq").removeHandler(silent)
        if session is not None:
            session.close()
    life.valid = [row["valid_loss"] for row in recorder.validations]
    life.events = recorder.events
    return life


def begin(
    group: Group, save_dir: str, arguments: list[str], task_class: type[Task], recorder: Recorder | None = None
) -> Session:
    """A session in this process; the caller closes it."""
    config = options.complete(options.parse([*arguments, "--save-dir", save_dir]))
    material = load_material(config, torch.device("cpu"), make_task(task_class, config))
    return build_session(RankJob(config, RunDirectory(Path(save_dir)), group, material, metrics=recorder or Recorder()))


def flat(model: torch.nn.Module) -> torch.Tensor:
    """All parameters, one after the other."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def columns() -> toys.Batch:
    """40 points of four coordinates and their targets."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randn(40, generator=generator, dtype=torch.float64)}


class Line(toys.Toy):
    """A line through 40 points; the base of the tasks that tests make up."""

    def rows(self) -> toys.Batch:
        return columns()

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(4, 1)

    def build_optimizer(self, parameter_groups: list[dict[str, Any]]) -> Any:
        return None

    def loss(self, model: Any, sample: Any) -> dict[str, torch.Tensor]:
        return {"loss": ((model(sample["x"])[:, 0] - sample["y"]) ** 2).sum()}
