"""Announcements: what a user is told when a run begins: task, ranks, shares, learning rate, layers to beware of."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from hetseq.config.sections import OptimizationConfig
from hetseq.data.plan import GlobalBatch
from hetseq.errors import few
from hetseq.parallel.replica import batch_norms, trained_parameters
from hetseq.run.checkpointing import saved_batch
from hetseq.run.loaded_task import LoadedTask
from hetseq.run.resume import Beginning
from hetseq.training.controller import Controller
from hetseq.training.lr_scaling import Course, advice, scale_in_words

logger = logging.getLogger(__name__)


def devices_in_words(names: Sequence[str]) -> str:
    """`cpu`, or `1 cuda, 2 cpu` where the ranks differ; `names` are `node/device`."""
    kinds = Counter(name.rpartition("/")[2].partition(":")[0] for name in names)
    return ", ".join(kind if len(kinds) == 1 else f"{number} {kind}" for kind, number in kinds.items())


def say_what_runs(controller: Controller, material: LoadedTask, names: Sequence[str]) -> None:
    """Log the task and the ranks; `names` are `node/device`."""
    parameters = sum(parameter.numel() for parameter in material.model.parameters())
    trained = sum(parameter.numel() for _, parameter in trained_parameters(material.model))
    if material.divided is not None:
        here, trained = trained, sum(parameter.numel() for parameter in material.divided.named.values())
        parameters += trained - here
    plan = controller.planner.plan(controller.state.position)
    logger.info(
        "task %s: %s training samples, %s parameters%s", type(material.task).__name__, f"{controller.planner.n:,}",
        f"{parameters:,}", "" if trained == parameters else f", {trained:,} of them trained",
    )  # fmt: skip
    logger.info(
        "%d rank%s (%s); the next step has %d samples, shares %s", controller.group.world_size,
        "" if controller.group.world_size == 1 else "s", devices_in_words(names), plan.size,
        "+".join(map(str, plan.shares)),
    )  # fmt: skip
    work = controller.planner.work(plan.epoch, plan.start, plan.stop)
    if work < len(plan.shares) and controller.group.rank == 0:
        logger.warning(
            "a step has %d piece%s of work for %d ranks, so some have nothing to do: make the global batch larger%s",
            work, "" if work == 1 else "s", len(plan.shares),
            ", or --unit-size smaller" if controller.planner.unit > 1 else "",
        )  # fmt: skip


def say_what_the_batch_means(
    config: OptimizationConfig, batch: GlobalBatch, course: Course, beginning: Beginning | None
) -> None:
    """Log how --scale-lr changed the learning rate, or would change it if steps had another size before."""
    said = None
    if config.scale_lr != "none":
        said = scale_in_words(config, batch, course.epoch)
    elif beginning is not None:
        saved = beginning.loaded.state
        said = advice(config, batch, course, before=saved_batch(saved), epoch_before=saved["epoch"])
    if said is not None:
        logger.info(said)


def warn_of_batch_norm(controller: Controller) -> None:
    """The one common layer whose result depends on how a step is cut into micro-batches."""
    kinds = batch_norms(controller.replica.model)
    if kinds and controller.group.rank == 0:
        logger.warning(
            "%s normalises over each micro-batch, so the curve depends on ranks, shares and --batch-size: LayerNorm"
            " or GroupNorm keep the promise of one curve on any machines, and --unit-size N does for any layer",
            ", ".join(sorted(kinds)),
        )


def warn_of_carried_state(carried: Sequence[str]) -> None:
    """Warn of state that forward carries from one batch to the next."""
    logger.warning(
        "forward reads what the forward before left in %s, so the loss of a sample depends on the samples that its rank"
        " had before, and the curve on the shares: keep the state in the batch, or begin each forward without it; a"
        " fixed --balance keeps the curve until a rank is lost or the run resumes; hetseq selftest says more",
        few(carried),
    )
