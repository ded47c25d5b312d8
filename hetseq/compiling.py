"""`--compile`: a network that goes through torch.compile before it trains.

Responsible for having all that compiling takes done before this rank meets the others, who would wait for it in a step
otherwise. What a kernel computes is torch's affair; it rounds otherwise than without, and draws other random numbers.

The one idea: shares change, so sizes are left open. A kernel for one sample is still another one to torch, and so is
one for a size that happened to equal another number; so micro-batches of several sizes go through forward and backward,
and through validation, with the numbers thrown away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from hetseq.errors import ConfigError
from hetseq.fetching import seed_everything
from hetseq.task import Task, counts_of

logger = logging.getLogger(__name__)


def compile_(model: torch.nn.Module) -> None:
    """Have `model(...)` compiled when it is called first; its parameters, their names and its class stay."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # in this process: others would outlive it if it were killed
    model.compile(dynamic=True)


def warm_up(
    task: Task, model: torch.nn.Module, batches: Sequence[tuple[Any, int]], *, validates: bool,
    computing: Callable[[], AbstractContextManager[object]],
) -> None:  # fmt: skip
    """Compile what training needs of `model`, and validation if it `validates`, on batches and their sizes.

    Leaves no gradients and the buffers as they were. Raises ConfigError where torch.compile fails.
    """
    from torch._dynamo.exc import TorchDynamoException  # slow to import, and few ask for it

    began_s, was_training = time.monotonic(), model.training
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        for batch, size in batches:
            counts = counts_of(task, batch, size)
            seed_everything(0)
            model.train()
            with computing():
                sums = list(task.micro_step(model, batch, counts).values())
            if live := [total for total in sums if total.requires_grad]:
                torch.stack(live).sum().backward()
            if validates:
                model.eval()
                with torch.set_grad_enabled(task.needs_gradients_in_validation), computing():
                    task.micro_step(model, batch, counts)
                    task.metrics(model, batch)
    except TorchDynamoException as error:
        raise ConfigError(
            f"--compile: torch.compile fails for {type(model).__name__} ({_first_line(error)}); it needs a C++ compiler"
            " for a CPU and Triton for a GPU; install what is missing, or leave --compile out"
        ) from error
    finally:
        model.train(was_training)
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in before:
                    buffer.copy_(before[name])
    logger.info("compiled %s in %.0f s", type(model).__name__, time.monotonic() - began_s)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
