"""`offload_wrapper` of torch, with HetSeq's offload behind it: activations come back ahead of backward.

Responsible for which engine a wrapped model gets. The one idea: numbers of parameters stay on the device, also those
that FSDP gathers for a while, whose memory is not theirs when backward begins.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from hetseq.errors import ConfigError
from hetseq.parallel.activation_offload import ActivationOffload
from hetseq.parallel.offload_tiers import DiskTier, HostTier
from hetseq.sagemaker.job import job

logger = logging.getLogger(__name__)


def offload_wrapper(module: nn.Module) -> nn.Module:
    """The model, whose activations leave the device in forward; call it last, after FSDP and checkpointing.

    With `sm_activation_offloading` they come back as many tensors ahead of backward as `activation_loading_horizon`
    says, equal to the bit; tensors under 1 MiB stay. Without it this is torch's own wrapper. Raises ConfigError before
    `init`, and for a model of `fully_shard`.
    """
    one = job("offload_wrapper")
    if not one.configuration.sm_activation_offloading:
        return checkpoint_wrapper.offload_wrapper(module)
    if any(isinstance(inner, fsdp.FSDPModule) for inner in module.modules()):
        raise ConfigError(
            "offload_wrapper: the model is of fully_shard, whose gathered parameters cannot be told from activations:"
            " take FSDP from hetseq.sagemaker"
        )
    return OffloadWrapper(module, one.meshes.device, one.configuration.activation_loading_horizon)


class OffloadWrapper(ActivationWrapper):
    """A model in whose forward activations leave `device`; names in its state dictionary stay as they are."""

    def __init__(self, module: nn.Module, device: torch.device, horizon: int) -> None:
        super().__init__(module)  # type: ignore[no-untyped-call]
        if device.type == "cuda":
            tier: HostTier | DiskTier = HostTier(device)
        else:
            folder = tempfile.gettempdir()
            logger.warning("without a GPU activations go to a file in %s; TMPDIR names another folder", folder)
            tier = DiskTier(folder, device)
        self.offload = ActivationOffload(module, tier, horizon=horizon, gathered=self._gathered)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.offload.forward():
            return self._checkpoint_wrapped_module(*args, **kwargs)

    def _gathered(self) -> Iterator[Tensor]:
        for unit in fsdp.FullyShardedDataParallel.fsdp_modules(self):
            if unit._handle is not None:
                yield unit._handle.flat_param
