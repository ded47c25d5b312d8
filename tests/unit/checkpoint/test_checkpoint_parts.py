"""One part: safetensors for everyone, and no header that can do harm."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from hetseq.checkpoint import part_format
from hetseq.checkpoint import part_io as parts
from hetseq.checkpoint.layout import divide
from hetseq.checkpoint.part_format import check_sums, read_header
from hetseq.checkpoint.part_io import allocate, read_part, spec_of, write_part
from hetseq.checkpoint.records import DamagedError


def odd_state() -> dict[str, torch.Tensor]:
    """Every type that a part can hold, and the shapes that break careless code."""
    torch.manual_seed(1)
    state = {f"of.{str(dtype)[6:]}": torch.randn(5, 3).to(dtype) for dtype in parts._SPELLING if not dtype.is_complex}
    base = torch.randn(6, 8)
    state |= {
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "flag": torch.tensor(True),
        "empty": torch.empty(0, 4),
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.tensor([1.0]).expand(4, 4),
        "needs_grad": torch.nn.Parameter(torch.randn(3)),
        "odd/name@1:2": torch.arange(3, dtype=torch.int8),
        "large": torch.randn(300, 7),
    }
    return state


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write(folder: Path, state: dict[str, torch.Tensor], weights: list[float]) -> list[tuple[Path, tuple[int, ...]]]:
    written = []
    for index, pieces in enumerate(divide([spec_of(name, tensor) for name, tensor in state.items()], weights)):
        path = folder / f"part-{index}.safetensors"
        size, crc32 = write_part(path, pieces, state)
        assert path.stat().st_size == size
        written.append((path, crc32))
    return written


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0], [5.0, 0.0, 1.0]])
def test_every_type_and_shape_comes_back_bit_for_bit(tmp_path: Path, weights: list[float]) -> None:
    state = odd_state()
    written = write(tmp_path, state, weights)
    headers = [read_header(path) for path, _ in written]
    found = allocate({piece.spec.name: piece.spec for header in headers for piece in header.pieces}.values())
    for header, (path, crc32) in zip(headers, written):
        check_sums(path, crc32)
        read_part(path, header, crc32, found)
    assert {name: (one.dtype, one.shape) for name, one in found.items()} == {
        name: (one.dtype, one.shape) for name, one in state.items()
    }
    assert all(bits(found[name]) == bits(state[name]) for name in state)
    assert bits(state["large"]) != bits(state["large"] + 1e-6)  # the comparison sees the last bit


def test_the_safetensors_library_opens_every_part(tmp_path: Path) -> None:
    state = odd_state()
    seen: dict[str, torch.Tensor] = {}
    for path, _ in write(tmp_path, state, [2, 1, 1]):
        with safetensors.safe_open(path, framework="pt") as part:
            metadata = part.metadata()
        for name, tensor in safetensors.torch.load_file(path).items():
            seen[name] = tensor
            if "@" in name:
                full = json.loads(metadata[name])
                assert full == {"dtype": "F32", "shape": [300, 7]}
    slices = sorted((name for name in seen if name.startswith("large@")), key=lambda name: int(name[6:].split(":")[0]))
    assert len(slices) >= 2
    assert torch.equal(torch.cat([seen.pop(name) for name in slices]).view(300, 7), state["large"])
    assert torch.equal(seen.pop("odd%2Fname%401:2"), state["odd/name@1:2"])
    assert all(bits(tensor) == bits(state[name]) for name, tensor in seen.items())
    assert seen.keys() == state.keys() - {"large", "odd/name@1:2"}


def test_a_part_without_tensors_is_a_part(tmp_path: Path) -> None:
    ((path, _),) = write(tmp_path, {}, [1])
    assert read_header(path).pieces == ()
    assert safetensors.torch.load_file(path) == {}


def test_checksums_go_from_chunk_to_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (part_format, parts):
        monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    state = {"a": torch.arange(2000), "b": torch.arange(500)}
    ((path, crc32),) = write(tmp_path, state, [1])
    assert len(crc32) == -(-path.stat().st_size // 1000)
    header, found = read_header(path), allocate([spec_of(name, tensor) for name, tensor in state.items()])
    read_part(path, header, crc32, found)
    assert torch.equal(found["a"], state["a"])
    content = bytearray(path.read_bytes())
    content[7777] ^= 4
    path.write_bytes(content)
    for check in (lambda: check_sums(path, crc32), lambda: read_part(path, header, crc32, found)):
        with pytest.raises(DamagedError, match="byte 7000 "):
            check()


@pytest.mark.parametrize("tensor", [torch.randn(2, 2).to_sparse(), torch.zeros(2, dtype=torch.complex128)])
def test_a_tensor_that_no_part_can_hold_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="is torch"):
        spec_of("model.w", tensor)


def test_a_part_is_never_written_over_anything(tmp_path: Path) -> None:
    target = tmp_path / "theirs"
    target.write_text("precious")
    for path in (target, tmp_path / "link"):
        if path != target:
            path.symlink_to(target)
        with pytest.raises(FileExistsError):
            write_part(path, [], {})
    assert target.read_text() == "precious"


def crafted(path: Path, header: Any, payload: bytes = b"\0" * 16, *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + payload)
    return path


def entry(begin: int, end: int, *shape: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


GOOD = {"__metadata__": {"format": "pt"}, "a": entry(0, 8, 2), "b": entry(8, 16, 2)}
HOSTILE: dict[str, Any] = {
    "negative offset": {"a": entry(-8, 0, 2), "b": entry(0, 16, 4)},
    "end before begin": {"a": entry(8, 0, 2), "b": entry(8, 16, 2)},
    "overlap": {"a": entry(0, 12, 3), "b": entry(8, 16, 2)},
    "hole": {"a": entry(0, 4, 1), "b": entry(8, 16, 2)},
    "behind the end": {"a": entry(0, 8, 2), "b": entry(8, 24, 4)},
    "bytes left over": {"a": entry(0, 8, 2)},
    "2^33 elements in 1.5 kB": {"a": entry(0, 2**35, 2**33)},
    "shape larger than its bytes": {"a": entry(0, 16, 2**33)},
    "huge times zero": {"a": entry(0, 0, 0, 2**62, 2**62), "b": entry(0, 16, 4)},
    "product that overflows": {"a": entry(0, 16, 2**32, 2**32, 2**32)},
    "negative size": {"a": entry(0, 16, -2, -2)},
    "size that is true": {"a": entry(0, 16, True, 4)},
    "too many dimensions": {"a": entry(0, 16, 4, *[1] * 100)},
    "unknown type": {"a": entry(0, 16, 4, dtype="F128")},
    "type that is a list": {"a": {"dtype": [], "shape": [4], "data_offsets": [0, 16]}},
    "no offsets": {"a": {"dtype": "F32", "shape": [4]}},
    "entry that is a list": {"a": [0, 16]},
    "path as a name": {"../a": entry(0, 16, 4)},
    "slash in a name": {"a/b": entry(0, 16, 4)},
    "slice without its shape": {"a@0:4": entry(0, 16, 4)},
    "slice behind its tensor": {"__metadata__": {"a@4:8": '{"dtype": "F32", "shape": [6]}'}, "a@4:8": entry(0, 16, 4)},
    "slice of another size": {"__metadata__": {"a@0:3": '{"dtype": "F32", "shape": [6]}'}, "a@0:3": entry(0, 16, 4)},
    "slice of two types": {"__metadata__": {"a@0:4": '{"dtype": "I32", "shape": [6]}'}, "a@0:4": entry(0, 16, 4)},
    "slice that is whole": {"__metadata__": {"a@0:4": '{"dtype": "F32", "shape": [4]}'}, "a@0:4": entry(0, 16, 4)},
    "slice with a broken shape": {"__metadata__": {"a@0:4": "[[["}, "a@0:4": entry(0, 16, 4)},
    "metadata that is a list": {"__metadata__": [], "a": entry(0, 16, 4)},
    "a list": [1, 2],
    "a name twice": b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{}}',
    "deep nesting": b"[" * 100_000,
    "no json": b"\xff\xfe{}",
    "a number without end": b'{"a":' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_and_costs_nothing(tmp_path: Path, name: str) -> None:
    assert len(read_header(crafted(tmp_path / "good", GOOD)).pieces) == 2
    path = crafted(tmp_path / "hostile", HOSTILE[name])
    tracemalloc.start()
    with pytest.raises(DamagedError, match="hostile"):
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 4e6
    tracemalloc.stop()


@pytest.mark.parametrize("length", [0, 2**62, 2**64 - 1, 10**8 + 1, 10**6])
def test_a_header_of_impossible_length_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(DamagedError):
        read_header(crafted(tmp_path / "part", GOOD, length=length))


@pytest.mark.parametrize("content", [b"", b"\1\0\0", b"\2\0\0\0\0\0\0\0"])
def test_a_file_that_is_too_short_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "part"
    path.write_bytes(content)
    with pytest.raises(DamagedError):
        read_header(path)
