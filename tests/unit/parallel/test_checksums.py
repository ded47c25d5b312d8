"""Checksums of tensors: what they see."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hetseq.parallel import checksums as module
from hetseq.parallel.checksums import checksums

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.uint8,
    torch.bool,
]  # fmt: skip


def checksum(tensor: Tensor) -> int:
    (found,) = checksums([tensor])
    return found


def flipped(tensor: Tensor, bit: int) -> Tensor:
    """A copy with one bit of its memory, counted from the first, turned over."""
    copy = tensor.clone().contiguous()
    copy.view(-1).view(torch.uint8).numpy()[bit // 8] ^= 1 << bit % 8
    return copy


# One tensor.


@pytest.mark.fault("FT-15")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_flipped_bit_shows(dtype: torch.dtype) -> None:
    tensor = torch.arange(5).to(dtype)
    bits = range(8) if dtype == torch.bool else range(5 * tensor.element_size() * 8)
    found = {checksum(flipped(tensor, bit)) for bit in bits}
    assert len(found) == len(bits)
    assert checksum(tensor) not in found
    assert checksum(tensor) == checksum(tensor.clone())


def test_a_flip_shows_in_every_piece_of_a_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 64)
    tensor = torch.randn(64 * 9 + 5)  # blocks of four pieces, a smaller block, and less than a piece
    calm = checksum(tensor)
    for element in [0, 63, 64, 255, 256, 300, 511, 512, 575, 576, 580]:
        assert checksum(flipped(tensor, 32 * element + 3)) != calm, element


def test_a_conjugate_or_a_negative_that_torch_has_yet_to_compute_has_the_checksum_of_its_values() -> None:
    tensor = torch.tensor([1.0 + 2.0j, 3.0 - 1.0j])
    for lazy, values in ((tensor.conj(), [1.0 - 2.0j, 3.0 + 1.0j]), (tensor.conj().imag, [-2.0, 1.0])):
        assert checksum(lazy) == checksum(torch.tensor(values)) != checksum(tensor)


def test_a_sign_of_zero_shows() -> None:
    assert checksum(torch.tensor([0.0, 1.0])) != checksum(torch.tensor([-0.0, 1.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_signs_do_not_cancel_in_pairs(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 101).to(dtype)
    assert checksum(-tensor) != checksum(tensor)
    words = (tensor.double().view(torch.int64), (-tensor).double().view(torch.int64))
    assert words[0].sum() == words[1].sum()  # the twin: a sum of all words sees nothing


def test_two_elements_that_change_places_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 8)
    tensor = torch.arange(40.0)
    calm, found = checksum(tensor), set()
    for first, second in [(0, 1), (3, 11), (7, 8), (0, 39), (38, 39)]:
        swapped = tensor.clone()
        swapped[[first, second]] = tensor[[second, first]]
        found.add(checksum(swapped))
    assert len(found - {calm}) == 5


def test_no_two_places_of_a_piece_have_the_same_weight() -> None:
    weights = module._Space(torch.device("cpu"))._weights
    assert len(weights.unique()) == len(weights)
    assert bool((weights % 2 == 1).all())
    assert 0 < int(weights.min()) < int(weights.max()) < 2**31


def test_the_order_of_elements_counts_and_not_how_they_lie_in_memory() -> None:
    image = torch.randn(2, 3, 4, 5)
    assert checksum(image.to(memory_format=torch.channels_last)) == checksum(image)
    assert checksum(image.permute(0, 2, 3, 1)) != checksum(image)
    numbers = torch.arange(9, dtype=torch.uint8)
    assert checksum(numbers[1:8]) == checksum(numbers[1:8].clone())  # begins at no whole word


@pytest.mark.parametrize("make", [lambda: torch.tensor(3.0), lambda: torch.empty(0), lambda: torch.zeros(3, 0)])
def test_what_has_no_dimension_or_no_element_has_a_checksum_too(make: Callable[[], Tensor]) -> None:
    assert checksums([make(), torch.ones(2), make()]) == [checksum(make()), checksum(torch.ones(2)), checksum(make())]


def test_the_size_of_a_block_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 16)
    tensors = [torch.randn(16 * count + rest) for count, rest in [(0, 3), (1, 0), (7, 5), (130, 1)]]
    calm = checksums(tensors)
    for rows in (1, 64):  # 64 is what a GPU has
        monkeypatch.setattr(module, "_PIECES_AT_ONCE", {"cpu": rows})
        assert checksums(tensors) == calm


def test_a_checksum_changes_nothing_and_asks_for_no_gradient() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    version = parameter._version
    assert checksums([parameter]) == checksums([torch.arange(6.0).view(2, 3)])
    assert (parameter._version, parameter.grad) == (version, None)


# Several.


def test_tensors_are_told_apart_by_their_order() -> None:
    one, other = torch.randn(7), torch.randn(7)
    assert checksums([one, other]) == checksums([other, one])[::-1] != checksums([other, one])
    assert checksums([]) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_same_bits_have_the_same_checksum_on_a_gpu() -> None:
    tensors = [torch.randn(300_000), torch.randn(3, 5), torch.arange(7), torch.tensor(2.0), torch.rand(9) < 0.5]
    there = [tensor.cuda() for tensor in tensors]
    mixed = [there[0], tensors[1], there[2], there[3], tensors[4]]
    assert checksums(there) == checksums(mixed) == checksums(tensors)
    there[0][12345] += 1
    assert checksums(there) != checksums(tensors)
