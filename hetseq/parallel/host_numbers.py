"""Numbers of a model that stay in host memory until its parameters get memory on a device, part by part.

For a model that was built whole on the host and fits no device. A number is given once, and its memory is free then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from hetseq.parallel.delayed_init import make_absent_


class HostNumbers:
    """Keeps the numbers of `parameters`, which are on `device` from now on, without memory."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        device: torch.device,
        storage: torch.dtype,
        *,
        unchanged: Collection[torch.nn.Parameter] = (),
    ) -> None:
        """They have the type `storage`, but for those that are `unchanged`."""
        kept = {id(one) for one in unchanged}
        self._numbers = {id(one): one.data if id(one) in kept else one.data.to(storage) for one in parameters}
        for one in parameters:
            one.data = self._numbers[id(one)]
        make_absent_(parameters, device)

    def fill(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Write their numbers to parameters that have memory by now."""
        with torch.no_grad():
            for one in parameters:
                one.data.copy_(self._numbers.pop(id(one)))
