"""Layers that run one after the other, and whose activations need not wait for backward: activation checkpointing.

Responsible for what of a stack is kept between forward and backward; what a layer computes is its own affair. The one
idea (Chen et al. 2016, arXiv 1604.06174): a layer can be computed again from its input, so only the inputs are kept,
and backward computes the layers again, one at a time, each just before its gradient.

It is computed again with the random numbers and the autocast of the first time, so losses and gradients are the same
to the bit, and nodes of one run may differ in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class LayerStack(nn.ModuleList):
    """Modules that each take what the one before gave; a list of them in all else, also in the parameters' names."""

    keeps_only_inputs = False

    def forward(self, hidden: Tensor, context: Any, last: Any = None) -> Tensor:
        """Hidden states of any shape through every layer.

        `context` is the second argument of each, but of the last one if that has a context of its own.
        """
        keeps_all = not (self.keeps_only_inputs and self.training and torch.is_grad_enabled())
        for at, layer in enumerate(self, 1):
            given = context if at < len(self) or last is None else last
            hidden = layer(hidden, given) if keeps_all else checkpoint(layer, hidden, given, use_reentrant=False)
        return hidden


def checkpoint_activations_(model: nn.Module) -> None:
    """Have every stack of the model keep its layers' inputs alone for backward, in training."""
    for module in model.modules():
        if isinstance(module, LayerStack):
            module.keeps_only_inputs = True
