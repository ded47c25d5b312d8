"""Checksums of tensors, computed where the tensors are, from all their bits.

Responsible for one number per tensor that is the same on a CPU and on a GPU. It tells faults and mistakes apart, not
forgeries.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
import torch

_PIECE = 1 << 16  # words of 32 bits that are added up into one number
# Pieces at a time, of 512 KiB scratch each: few for the cache of a CPU core (measured: 4 GB/s with 4, 0.8 with 256,
# for which each call allocates fresh memory), many for a GPU, which pays for each launch.
_PIECES_AT_ONCE = {"cpu": 4, "cuda": 64}


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """A signed 64-bit number for each tensor, from all its bits and their order; the same on CPU and CUDA.

    A change of one element and a swap of two always show, as does a sign of zero. The tensors stay where they are; a
    device is waited for once.
    """
    pieces: list[torch.Tensor] = []  # for each tensor: (number of pieces,) int64, on its device
    spaces: dict[torch.device, _Space] = {}
    for tensor in tensors:
        if tensor.device not in spaces:
            spaces[tensor.device] = _Space(tensor.device)
        pieces.append(spaces[tensor.device].sums(tensor))
    found: dict[int, bytes] = {}
    for device in spaces:
        places = [place for place, sums in enumerate(pieces) if sums.device == device]
        flat = torch.cat([pieces[place] for place in places]).cpu().numpy()  # sync
        ends = np.cumsum([len(pieces[place]) for place in places])
        for place, part in zip(places, np.split(flat, ends[:-1])):
            found[place] = part.tobytes()
    return [hash_of(found[place]) for place in range(len(pieces))]


class _Space:
    """Weights, and memory for one block of products, on one device."""

    def __init__(self, device: torch.device) -> None:
        places = torch.arange(_PIECE, dtype=torch.int64, device=device)
        # Odd, below 2^31, all different: a word of 32 bits times a weight never overflows, so no single change and no
        # swap of two words cancels. Flipped signs would, in pairs, in a plain sum of words of 64 bits.
        self._weights = (places * 0x9E3779B1).bitwise_and_(0x7FFFFFFF).bitwise_or_(1)  # (_PIECE,)
        rows = _PIECES_AT_ONCE.get(device.type, 4)
        self._products = torch.empty((rows, _PIECE), dtype=torch.int64, device=device)

    def sums(self, tensor: torch.Tensor) -> torch.Tensor:
        """One int64 for each piece of the tensor, modulo 2^64."""
        words = _words(tensor)
        whole = words.numel() // _PIECE
        found = []
        for block in words[: whole * _PIECE].view(whole, _PIECE).split(len(self._products)):
            products = self._products[: len(block)].copy_(block).mul_(self._weights)
            found.append(products.sum(1))
        rest = words[whole * _PIECE :]
        if rest.numel():
            found.append((rest * self._weights[: rest.numel()]).sum(0, keepdim=True))
        return torch.cat(found) if found else words.new_empty(0, dtype=torch.int64)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor in its logical order as (words,) int32, padded with zeros; a view if possible."""
    raw = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if raw.numel() % 4 or raw.storage_offset() % 4:
        raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 4))
    return raw.view(torch.int32)


def hash_of(data: bytes) -> int:
    """A signed 64-bit number from all bytes."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)
