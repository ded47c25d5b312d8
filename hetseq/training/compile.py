"""`--compile`: sends a network through torch.compile before it trains.

Responsible for finishing all compilation before this rank meets the others, which would otherwise wait for it in a
step. What a kernel computes is left to torch; it rounds differently from eager mode, and draws other random numbers.

The one idea: shares change, so sizes are left dynamic. But torch compiles separate kernels for one sample and for a
size that happens to equal another number; so micro-batches of several sizes go through forward, backward and
validation, and the results are thrown away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from hetseq.data.fetch import seed_everything
from hetseq.errors import ConfigError
from hetseq.task import Task, counts_of

logger = logging.getLogger(__name__)

_BACKEND: Any = "inductor"
_MOST_KERNELS = 64  # of one network: sizes of 0, of 1 and others, with gradients and without


def compile_(model: torch.nn.Module) -> None:
    """Make the first call of `model(...)` compile it; its parameters, their names and its class stay."""
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    dynamo.recompile_limit = _MOST_KERNELS  # beyond it the network would silently run uncompiled
    dynamo.wrap_top_frame = True  # otherwise a model whose class belongs to torch would be skipped
    dynamo.skip_nnmodule_hook_guards = False  # a layer whose parameters come and go gets its hooks after `warm_up`
    inductor.compile_threads = 1  # in this process: other processes would outlive it if it were killed
    model.compile(backend=_BACKEND, dynamic=True)


def warm_up(
    task: Task, model: torch.nn.Module, batches: Sequence[tuple[Any, int]], *, validates: bool,
    computing: Callable[[], AbstractContextManager[object]],
) -> None:  # fmt: skip
    """Compile the parts of `model` that training needs, and validation if it `validates`, on these batches and sizes.

    Leaves no gradients, and the buffers as they were. Raises ConfigError if torch.compile fails.
    """
    from torch._dynamo.exc import TorchDynamoException  # slow to import, and rarely needed
    from torch._dynamo.utils import counters

    began_s, was_training, graphs = time.monotonic(), model.training, counters["stats"]["unique_graphs"]
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
            f"--compile: torch.compile fails for {type(model).__name__} ({_begin_of(error)}); it needs a C++ compiler"
            " for a CPU and Triton for a GPU; install the missing one, or leave --compile out"
        ) from error
    finally:
        model.train(was_training)
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in before:
                    buffer.copy_(before[name])
    if counters["stats"]["unique_graphs"] > graphs:
        logger.info("compiled %s in %.0f s", type(model).__name__, time.monotonic() - began_s)
    else:
        logger.warning(
            "--compile: nothing of %s was compiled; only calls of model(...) are compiled, not calls of its parts"
            " by themselves", type(model).__name__,
        )  # fmt: skip


def _begin_of(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] or type(error).__name__
