"""`--optimizer sign`: steps of one length, along the sign of an average gradient."""

from dataclasses import dataclass

import torch

from hetseq import register_optimizer


@dataclass
class SignOptions:
    """Flags that come along with the optimizer."""

    sign_beta: float = 0.9


class Sign(torch.optim.Optimizer):
    """An optimizer of torch's kind, with its state in tensors."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["beta"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * average.sign())


@register_optimizer("sign", options=SignOptions)
def sign(parameter_groups, config, options):
    """What `--optimizer sign` builds."""
    return Sign(parameter_groups, {"lr": 0.0, "weight_decay": config.weight_decay, "beta": options.sign_beta})
