"""Which library multiplies fp32 on a CPU: the faster one where MKL misjudges the processor, and never a coarser one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hetseq.system import matmul_backend as products

AMD, INTEL = "vendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\n", "vendor_id\t: GenuineIntel\n"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a processor of AMD with vectors of 512 bits; whether this machine has one does not matter."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(products, "_has_both", lambda: True)
    path = tmp_path / "cpuinfo"
    path.write_text(AMD)
    return path


def test_products_are_as_exact_as_before() -> None:
    before = products._error()
    chosen = products.multiply_by_the_faster_library()
    assert torch.get_float32_matmul_precision() == ("medium" if chosen else "highest")
    assert before < 2e-6
    assert products._error() < 2e-6
    rounded = products._error(lambda a, b: a.bfloat16().float() @ b.bfloat16().float())
    assert rounded > 16 * products._LARGEST_ERROR  # the twin: factors of 16 bits would be seen
    half = products._error(lambda a, b: a.half().float() @ b.half().float())
    assert half > products._LARGEST_ERROR


def test_a_processor_that_takes_16_bits_where_it_may_is_not_allowed_to(
    cpuinfo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_error", lambda: 1e-3)
    assert not products.multiply_by_the_faster_library(cpuinfo)
    assert torch.get_float32_matmul_precision() == "highest"


def test_one_of_amd_with_wide_vectors_is_what_mkl_misjudges(cpuinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_error", lambda: 1e-7)
    assert products.multiply_by_the_faster_library(cpuinfo)
    torch.set_float32_matmul_precision("highest")
    cpuinfo.write_text(INTEL)
    assert not products.multiply_by_the_faster_library(cpuinfo)
    assert not products.multiply_by_the_faster_library(cpuinfo.parent / "absent")
    cpuinfo.write_text(AMD)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not products.multiply_by_the_faster_library(cpuinfo)
    assert torch.get_float32_matmul_precision() == "highest"


def test_what_somebody_has_chosen_stays(cpuinfo: Path) -> None:
    torch.set_float32_matmul_precision("high")
    assert not products.multiply_by_the_faster_library(cpuinfo)
    assert torch.get_float32_matmul_precision() == "high"


def test_nobodys_random_numbers_are_touched(cpuinfo: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    products.multiply_by_the_faster_library(cpuinfo)
    assert torch.equal(torch.rand(1), expected)
