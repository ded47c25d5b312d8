"""Checksums of states in memory: what they are, and that they find what has to be found."""

from __future__ import annotations

import os
import random
import zlib

import pytest

from hetseq.checkpoint.memory_checksums import chunk_sum, image_sums
from hetseq.checkpoint.records import CHUNK_BYTES

ROW = 8192  # bytes


def slow_sum(chunk: bytes) -> int:
    """The same in plain Python, from its description."""
    whole = len(chunk) // ROW * ROW
    sums = b""
    for begin in range(0, whole, ROW):
        words = [int.from_bytes(chunk[at : at + 8], "little") for at in range(begin, begin + ROW, 8)]
        sums += (sum(words) % 2**64).to_bytes(8, "little")
    return zlib.crc32(sums + chunk[whole:])


@pytest.mark.parametrize("size", [0, 1, 7, 8, ROW - 1, ROW, ROW + 1, 3 * ROW, 3 * ROW + 4099])
def test_the_sum_of_a_chunk_is_what_its_description_says(size: int) -> None:
    chunk = os.urandom(size)
    assert chunk_sum(memoryview(chunk)) == slow_sum(chunk)
    shifted = memoryview(b"xyz" + chunk)[3:]  # words that no processor likes
    assert chunk_sum(shifted) == slow_sum(chunk)
    assert 0 <= chunk_sum(shifted) < 2**32


def test_sums_wrap_around() -> None:
    chunk = b"\xff" * (2 * ROW)
    assert chunk_sum(memoryview(chunk)) == slow_sum(chunk)
    assert chunk_sum(memoryview(chunk)) != chunk_sum(memoryview(b"\xff" * ROW + b"\0" * ROW))


def test_each_flipped_bit_is_found() -> None:
    generator, chunk = random.Random(0), bytearray(os.urandom(20 * ROW + 1000))
    right = chunk_sum(memoryview(chunk))
    places = {0, len(chunk) - 1, 20 * ROW - 1, 20 * ROW, *(generator.randrange(len(chunk)) for _ in range(1000))}
    for place in places:
        bit = 1 << generator.randrange(8)
        chunk[place] ^= bit
        assert chunk_sum(memoryview(chunk)) != right, place
        chunk[place] ^= bit
    assert chunk_sum(memoryview(chunk)) == right


def test_a_copy_that_was_cut_short_is_found_wherever_it_was_cut() -> None:
    after, before = os.urandom(4 * ROW + 100), os.urandom(4 * ROW + 100)
    right = chunk_sum(memoryview(after))
    for end in range(0, len(after), 1000):
        assert chunk_sum(memoryview(after[:end] + before[end:])) != right
        assert chunk_sum(memoryview(after[:end] + bytes(len(after) - end))) != right


def test_rows_that_have_changed_places_are_found() -> None:
    rows = [os.urandom(ROW) for _ in range(3)]
    right = chunk_sum(memoryview(b"".join(rows)))
    assert chunk_sum(memoryview(b"".join([rows[1], rows[0], rows[2]]))) != right
    assert chunk_sum(memoryview(b"".join(rows[:2]))) != right


@pytest.mark.parametrize("rest", [0, 1, ROW, CHUNK_BYTES - 1])
def test_an_image_has_one_sum_for_each_chunk(rest: int) -> None:
    image = memoryview(os.urandom(2 * CHUNK_BYTES + rest))
    sums = image_sums(image)
    assert len(sums) == (2 if rest == 0 else 3)
    assert sums == [chunk_sum(image[begin : begin + CHUNK_BYTES]) for begin in range(0, len(image), CHUNK_BYTES)]
    assert len(set(sums)) == len(sums)
    assert image_sums(memoryview(b"")) == []
