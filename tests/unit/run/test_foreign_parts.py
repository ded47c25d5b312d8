"""What a save sends to other run directories, and what that costs the rank that sends it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hetseq.checkpoint import TensorSlice
from hetseq.comm.directory_groups import DirectoryGroups
from hetseq.comm.group import LocalGroup
from hetseq.comm.slices import TaggedSlices
from hetseq.run import foreign_parts

AT_ONCE = 4096


class Recorded(TaggedSlices):
    """Sends nothing, and keeps a copy of each message."""

    def __init__(self) -> None:
        super().__init__(None, rank=0, world_size=2, deadline_s=lambda: 1.0)
        self.messages: list[torch.Tensor] = []
        self.lent: list[torch.Tensor] = []

    def memory(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.lent.append(super().memory(elements, dtype, device))
        return self.lent[-1]

    def swap(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> Any:
        self.messages += [tensor.clone() for tensor in outgoing.values()]
        return super().swap({}, {})


def test_an_owner_needs_the_memory_of_one_message_however_much_it_owns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_parts, "_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(foreign_parts, "gather_texts", lambda group, text: [text, "[]"])
    sizes = [100, 501, 230, 777, 64, 1000, 333, 812]  # elements, of 4 bytes
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in sizes]
    held = {
        f"model.{at}": [TensorSlice(tensor, 0, len(tensor), (2 * len(tensor),))] for at, tensor in enumerate(tensors)
    }
    alone = LocalGroup()
    sharing = DirectoryGroups(0, ((0,), (1,)), alone, alone)
    exchange = Recorded()
    try:
        for _ in range(2):  # two saves
            exchange.messages.clear()
            foreign_parts.with_foreign_parts(held, frozenset(), exchange, sharing)
            sent = torch.cat(exchange.messages).view(torch.float32)
            assert torch.equal(sent, torch.cat(tensors))
            assert len(exchange.messages) > 3
            assert len({tensor.data_ptr() for tensor in exchange.lent}) == 1
            assert exchange.lent[0].nbytes == AT_ONCE
    finally:
        exchange.close()
