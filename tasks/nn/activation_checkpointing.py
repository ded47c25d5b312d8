"""Activation checkpointing: a stack of layers that can discard its activations and recompute them in backward.

Responsible for the tensors that a stack keeps between forward and backward; layers define the computation. The one idea
(Chen et al. 2016, arXiv 1604.06174): a layer can be recomputed from its input, so only the inputs are kept, and
backward recomputes the layers one at a time, each just before its gradient.

Recomputation uses the same random numbers and autocast as the first forward, so losses and gradients are bitwise equal,
and nodes of one run may differ in this setting.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class LayerStack(nn.ModuleList):
    """Modules applied one after the other; otherwise an `nn.ModuleList`, with the same parameter names."""

    keeps_only_inputs = False

    def forward(self, hidden: Tensor, context: Any, last: Any = None) -> Tensor:
        """Pass hidden states of any shape through every layer.

        `context` is the second argument of each layer; `last`, if given, replaces it for the last layer.
        """
        keeps_all = not (self.keeps_only_inputs and self.training and torch.is_grad_enabled())
        for at, layer in enumerate(self, 1):
            given = context if at < len(self) or last is None else last
            hidden = layer(hidden, given) if keeps_all else checkpoint(layer, hidden, given, use_reentrant=False)
        return hidden


def checkpoint_activations_(model: nn.Module) -> None:
    """Make every stack of the model keep only its layers' inputs for backward, in training."""
    for module in model.modules():
        if isinstance(module, LayerStack):
            module.keeps_only_inputs = True
