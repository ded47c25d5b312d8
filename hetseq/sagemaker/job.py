"""`init` and `transform`: what a script asked for, held for the calls that follow.

Responsible for the order of calls. The one idea: `init` is called once in a process, before the model is wrapped.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hetseq.errors import ConfigError
from hetseq.launch.environments import Look
from hetseq.parallel.tensor_parallel import tensor_parallel_
from hetseq.sagemaker.configuration import Configuration, configuration_of
from hetseq.sagemaker.ranks import Meshes, build_meshes, ensure_process_group

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """The configuration of this process and its meshes."""

    configuration: Configuration
    meshes: Meshes


_jobs: list[Job] = []  # none or one


def init(config: Mapping[str, Any] | str | Path | None = None) -> None:
    """Read the configuration and arrange the ranks: collective, once, before the model is wrapped.

    `config`: SMP's keys as a dictionary, or the path of a JSON or YAML file; None: the hyperparameters of the SageMaker
    job, else the defaults. The default process group is used, and made if there is none. Raises ConfigError.
    """
    look = Look(os.environ, _text_of, socket.gethostname())
    configuration = configuration_of(config, look)
    if _jobs:
        raise ConfigError("hetseq.sagemaker.init was called before: call it once, at the beginning of the script")
    ensure_process_group(look)
    _jobs.append(Job(configuration, build_meshes(configuration)))
    atexit.register(_jobs[0].meshes.forget_groups)
    if configuration.unused:
        logger.warning("these keys have no effect here: %s", ", ".join(configuration.unused))


def transform(model: nn.Module) -> nn.Module:
    """The model, each layer divided among `tensor_parallel_degree` ranks, changed in place; call it before FSDP.

    The plan is the model's own. Collective. Raises ConfigError before `init`, for a model without a plan, and for sizes
    that the degree does not divide.
    """
    one = job("transform")
    if one.meshes.tensor is not None:
        tensor_parallel_(model, one.meshes.tensor, seed=one.configuration.seed)
    return model


def job(caller: str) -> Job:
    """The job of this process. Raises ConfigError before `init`."""
    if not _jobs:
        raise ConfigError(f"{caller} needs the configuration: call hetseq.sagemaker.init() before it")
    return _jobs[0]


def _text_of(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return None
