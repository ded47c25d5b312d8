"""A stack of layers, which `--activation-checkpointing` makes keep only the inputs of its layers for backward.

`hetseq.checkpoint_activations` does that for the modules of any model; here are those of the included tasks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hetseq import checkpoint_activations


class LayerStack(nn.ModuleList):
    """Modules applied one after the other; otherwise an `nn.ModuleList`, with the same parameter names."""

    def forward(self, hidden: Tensor, context: Any, last: Any = None) -> Tensor:
        """Pass hidden states of any shape through every layer.

        `context` is the second argument of each layer; `last`, if given, replaces it for the last layer.
        """
        for at, layer in enumerate(self, 1):
            hidden = layer(hidden, context if at < len(self) or last is None else last)
        return hidden


def checkpoint_activations_(model: nn.Module) -> None:
    """Make the layers of every stack of the model keep only their inputs for backward, in training."""
    stacks = [name for name, module in model.named_modules() if isinstance(module, LayerStack)]
    checkpoint_activations(model, [f"{name}.*" for name in stacks])
