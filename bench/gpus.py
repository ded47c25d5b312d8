"""The device that a benchmark runs on: whether it exists, its name, and its peak speed.

Peaks are the makers' figures for dense bf16 products with fp32 accumulation. Where a data sheet gives only the figure
with sparsity, which no training reaches, the table has half of it. For a device that is not in the table the user must
give the peak.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Peak:
    """The peak of a device in TFLOP/s, and its source."""

    tflops: float
    source: str


H200 = Peak(989, "NVIDIA H200 data sheet, SXM: 1,979 with sparsity")

#: patterns of torch's device names -> peak; the first match counts
PEAKS: tuple[tuple[str, Peak], ...] = (
    (r"\bB200\b", Peak(2250, "NVIDIA HGX B200 data sheet: 4,500 with sparsity")),
    (r"\bH200 NVL\b", Peak(835, "NVIDIA H200 data sheet, NVL: 1,671 with sparsity")),
    (r"\bH200\b", H200),
    (r"\bGH200\b", Peak(989, "NVIDIA GH200 data sheet: 1,979 with sparsity")),
    (r"\bH100 NVL\b", Peak(835, "NVIDIA H100 data sheet, NVL: 1,671 with sparsity")),
    (r"\bH100 PCIe\b", Peak(756, "NVIDIA H100 data sheet, PCIe: 1,513 with sparsity")),
    (r"\bH100\b", Peak(989, "NVIDIA H100 data sheet, SXM: 1,979 with sparsity")),
    (r"\bA100\b", Peak(312, "NVIDIA A100 data sheet")),
    (r"\bL40S\b", Peak(362, "NVIDIA L40S data sheet")),
    (r"\bRTX 4090$", Peak(165, "NVIDIA Ada architecture paper, GeForce RTX 4090")),
    (r"\bRTX 3090$", Peak(71, "NVIDIA GA102 architecture paper, GeForce RTX 3090")),
    (r"\bRTX A6000\b", Peak(155, "NVIDIA RTX A6000 data sheet: 310 with sparsity")),
    (r"\bRTX A5000\b", Peak(111, "NVIDIA RTX A5000 data sheet: 222 with sparsity")),
    (r"\bA40\b", Peak(150, "NVIDIA A40 data sheet")),
    (r"\bA10\b", Peak(125, "NVIDIA A10 data sheet")),
    (r"\bL4\b", Peak(121, "NVIDIA L4 data sheet: 242 with sparsity")),
)


def peak_of(name: str) -> Peak | None:
    """The peak of the device that torch calls `name`; None for one that is unknown, and for a slice of one (MIG)."""
    if re.search(r"\bMIG\b", name):
        return None
    return next((peak for pattern, peak in PEAKS if re.search(pattern, name)), None)


@dataclass(frozen=True)
class Device:
    """An available device."""

    torch: torch.device
    name: str
    total_bytes: int  # of its memory; 0 for a CPU
    taken_bytes: int  # by others, and by CUDA itself, when it was opened

    @property
    def is_shared(self) -> bool:
        """Whether others hold so much of its memory that they probably compute on it too."""
        return self.taken_bytes > 0.05 * self.total_bytes


def open_device(text: str, *, without: str) -> Device:
    """The device that `text` names, as "cuda", "cuda:1" or "cpu"; a GPU becomes the current one.

    Raises SystemExit, with `without` as a remedy, where there is no such GPU or it has no products of bf16.
    """
    device = torch.device(text)
    if device.type == "cpu":
        return Device(device, "CPU", 0, 0)
    if not torch.cuda.is_available():
        why = "was built without CUDA" if torch.version.cuda is None else "sees none (nvidia-smi tells why)"
        raise SystemExit(
            f"there is no GPU to measure: torch {torch.__version__} {why}. Run this where there is one, with a torch"
            f" built for it, {without}"
        )
    count, number = torch.cuda.device_count(), device.index or 0
    if number >= count:
        raise SystemExit(f"--device {text}: expected cuda:0 to cuda:{count - 1}, since torch sees {count} GPUs here")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise SystemExit(f"{properties.name} has no products of bf16: choose another --device, {without}")
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return Device(device, properties.name, total_bytes, total_bytes - free_bytes)
