"""The base of a model, built again from the files of this rank: for what a lost rank owned of it.

A base is in no image and in no checkpoint. Each rank has the files that it comes from. So they are read once more, as
at the start, and the digest of all bits shows whether they are still the same.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

import torch

from hetseq.config.sections import Config
from hetseq.data.fetch import seed_everything
from hetseq.errors import HetSeqError
from hetseq.parallel.base_parameters import base_digest, base_parameters
from hetseq.parallel.owned_parameters import Fill
from hetseq.run.loaded_task import LoadedTask, built_without_memory
from hetseq.run.start_notes import kept_back
from hetseq.system import rank_phase as whereabouts
from hetseq.system.rank_phase import Phase
from hetseq.task import build_model, load_split, make_task

logger = logging.getLogger(__name__)


def base_again(config: Config, material: LoadedTask) -> Fill:
    """Writes the numbers of the base to parameters of the model. Builds a second model; not collective.

    Raises HetSeqError if this rank cannot build the base that the run began with.
    """
    with whereabouts.amid(Phase.MODEL, Phase.BUILDING), kept_back():
        task = make_task(type(material.task), config)  # the run's own one keeps what it has learned
        load_split(task, config.data.train_subset)  # build_model may need it
        seed_everything(material.seed)
        if config.distributed.delayed_init:
            model, drawn = built_without_memory(task, material.seed)
        else:
            model, drawn = build_model(task), None
        base = base_parameters(model)
        found = base_digest(model, None if drawn is None else drawn.in_turn(list(base.values())))
    if found != material.base:
        raise HetSeqError(
            f"a rank is lost that owned a part of the frozen weights {material.base}, and {socket.gethostname()} builds"
            f" {found} in their place now: bring back the files of the start, such as --model DIR, and start"
            " again; the run continues from its newest checkpoint"
        )
    names = {id(parameter): name for name, parameter in base_parameters(material.model).items()}
    logger.info("the frozen weights %s are built again, for what a lost rank owned of them", found)

    @torch.no_grad()
    def fill(parameters: Sequence[torch.nn.Parameter]) -> None:
        for one in parameters:
            source = base[names[id(one)]]
            for numbers in (source.data,) if drawn is None else drawn.in_turn([source]):
                one.data.copy_(numbers)

    return fill
