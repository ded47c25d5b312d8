"""Who owns how much, from the memory of the ranks and the options."""

from __future__ import annotations

import pytest
import torch

from hetseq.comm.group import LocalGroup
from hetseq.config.sections import DistributedConfig
from hetseq.errors import ConfigError
from hetseq.parallel.owned_gradients import OwnedGradients
from hetseq.run import owners

PARAMETERS = 1000
STATE_BYTES = 12 * PARAMETERS  # of AdamW: two moments and the gradient
PLENTY = 1 << 30


def owns_all(monkeypatch: pytest.MonkeyPatch, *, shard_model: str, own_memory: int, room: int = PLENTY) -> bool:
    """Whether the state of a rank alone has an owner; False if it is a replica. Raises ConfigError."""
    monkeypatch.setattr(owners, "_room_bytes", lambda device: room)
    model = torch.nn.Linear(PARAMETERS, 1, bias=False)
    config = DistributedConfig(shard_model=shard_model, own_memory=f"{own_memory}")
    reducer, owned = owners.make_reducer(
        model, torch.optim.AdamW(model.parameters()), LocalGroup(), config, slots=(0,), before=None, is_first=True
    )
    try:
        assert (owned is None) == (not isinstance(reducer, OwnedGradients))
        return owned is not None
    finally:
        reducer.close()


def test_all_of_own_memory_is_for_state(monkeypatch: pytest.MonkeyPatch) -> None:
    assert owns_all(monkeypatch, shard_model="state", own_memory=STATE_BYTES)
    with pytest.raises(ConfigError, match=r"12 kB, and there is room for 12 kB \(rank 0 12 kB\): 1 bytes are missing"):
        owns_all(monkeypatch, shard_model="state", own_memory=STATE_BYTES - 1)


def test_own_memory_does_not_add_to_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="there is room for"):
        owns_all(monkeypatch, shard_model="state", own_memory=PLENTY, room=STATE_BYTES)


def test_own_memory_limits_the_state_of_replicas_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not owns_all(monkeypatch, shard_model="auto", own_memory=STATE_BYTES)
    with pytest.raises(ConfigError, match="12 kB, and there is room for 12 kB"):
        owns_all(monkeypatch, shard_model="auto", own_memory=STATE_BYTES - 1)
