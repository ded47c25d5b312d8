"""Messages beside the steps: whole and in order whatever their size, and both ranks give way to the step."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from hetseq.comm import messages as module
from hetseq.comm.group import GlooGroup, Group
from hetseq.errors import PeerLostError
from tests.support.ranks import run_ranks

PIECE = module._PIECE_BYTES
SIZES = [1, PIECE - 1, PIECE, 5 * PIECE + 5, 0, 7]
CPU = torch.device("cpu")


def content(rank: int, number: int) -> bytearray:
    values = torch.randint(0, 256, (SIZES[number],), generator=torch.Generator().manual_seed(10 * rank + number))
    return bytearray(values.to(torch.uint8).numpy().tobytes())


def chain(group: Group) -> dict[str, Any]:
    """Messages from rank zero to rank one; each rank counts its transfers under way whenever it gives way."""
    assert isinstance(group, GlooGroup)
    asked, transfers = [], []
    right_of_way = group._right_of_way
    right_of_way.give_way = lambda at_most_s: asked.append(right_of_way._under_way)  # type: ignore[method-assign]
    messages, exchange = group.messages(), group.slices(CPU)
    is_right = True
    for number, size in enumerate(SIZES):
        # a transfer of the step: begun by this rank, and by the other one only after the message
        total = torch.empty(50)
        if group.rank == 1:
            transfers.append(exchange.sum_to_owners(torch.ones(100), total, bounds=(0, 50, 100), givers=(0, 1)))
            arrived = bytearray(size)
            messages.receive(memoryview(arrived), 0, channel=1, channels=3, timeout_s=20.0)
            is_right &= arrived == content(0, number)
        else:
            messages.send(memoryview(content(0, number)), 1, channel=1, channels=3, timeout_s=20.0)
            transfers.append(exchange.sum_to_owners(torch.ones(100), total, bounds=(0, 50, 100), givers=(0, 1)))
        transfers.pop().wait()
        is_right &= bool((total == 2).all())
    under_way = right_of_way._under_way
    exchange.close()
    return {"is_right": is_right, "asked": asked, "under_way": under_way}


def test_messages_of_any_size_arrive_and_both_ranks_give_way_before_all_but_their_first_pieces() -> None:
    sender, receiver = run_ranks(chain, 2)
    later = sum(max(0, -(-size // PIECE) - module._POSTED) for size in SIZES)
    assert later == 4
    assert sender == {"is_right": True, "asked": [0] * later, "under_way": 0}
    assert receiver == {"is_right": True, "asked": [1] * later, "under_way": 0}


def lost(group: Group) -> str:
    """Rank zero cuts the connections while rank one waits for the second of four pieces."""
    assert isinstance(group, GlooGroup)
    messages = group.messages()
    if group.rank == 0:
        messages.send(memoryview(bytearray(PIECE)), 1, channel=0, channels=1, timeout_s=20.0)
        before_s = messages.end_s()
        messages.sever()
        first_s = messages.end_s()
        time.sleep(0.4)
        messages.sever()  # which changes nothing
        return f"{before_s} {0 < first_s <= 0.3} {messages.end_s()}"
    with pytest.raises(PeerLostError) as caught:
        messages.receive(memoryview(bytearray(4 * PIECE)), 0, channel=0, channels=1, timeout_s=20.0)
    return str(caught.value)


def test_a_cut_in_the_middle_of_a_message_is_a_lost_peer() -> None:
    waits, said = run_ranks(lost, 2)
    assert waits == "2.0 True 0.0", "all that waits for an end waits for the same 0.3 s"
    assert said.startswith("lost a peer while waiting up to 20 s for a message (")
