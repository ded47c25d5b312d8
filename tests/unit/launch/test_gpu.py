"""A GPU that cannot be used is named before anything is loaded, with what to do about it."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetseq import config as options
from hetseq.cluster.membership.assignment import Assignment
from hetseq.errors import EXIT_FAILED, EXIT_USAGE, ConfigError, codes_in
from hetseq.launch import rank_life, worker
from hetseq.launch.launcher_link import NoLauncher
from hetseq.launch.stop_request import StopRequest
from hetseq.run_directory import RunDirectory
from hetseq.system import gpu
from tests.support import cuda_errors

DEVICE = torch.device("cuda:1")
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


class Card:
    """Stands in for torch.cuda: one card, and what opening it raises."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capability: tuple[int, int],
        *,
        built: list[str] = CU130,
        cuda: str | None = "13.0",
        trouble: Exception | None = None,
    ) -> None:
        about = SimpleNamespace(name="GTX 1080 Ti", major=capability[0], minor=capability[1])
        self.opened: list[torch.device] = []
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
        monkeypatch.setattr(torch.cuda, "set_device", self.opened.append)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
        zeros = torch.zeros

        def first_kernel(*shape: int, device: Any = None) -> torch.Tensor:
            if trouble is not None:
                raise trouble
            return zeros(*shape)

        monkeypatch.setattr(torch, "zeros", first_kernel)


@pytest.mark.parametrize(
    ("capability", "built", "remedy"),
    [
        ((6, 1), CU130, "https://download.pytorch.org/whl/cu126"),
        ((7, 0), CU130, "https://download.pytorch.org/whl/cu126"),
        ((12, 0), ["sm_50", "sm_80", "sm_90"], "a newer torch"),
    ],
)
def test_a_card_for_which_torch_has_no_code_is_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], built: list[str], remedy: str
) -> None:
    Card(monkeypatch, capability, built=built, trouble=AssertionError("nothing runs on it"))
    with pytest.raises(ConfigError) as raised:
        gpu.open_device(DEVICE, "rank 2 on labB")
    message = str(raised.value)
    number = ".".join(map(str, capability))
    assert message.startswith(f"rank 2 on labB: cuda:1 is a GTX 1080 Ti of compute capability {number}, and torch 2.13")
    assert ", ".join(built) in message
    assert remedy in message
    assert "leave this device out of --devices" in message
    assert codes_in(message) == ["device-unusable"]
    assert raised.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("capability", "built", "cuda"),
    [((8, 9), CU130, "13.0"), ((13, 0), [*CU130, "compute_120"], "13.0"), ((9, 0), ["gfx90a"], None)],
    ids=["a later minor number", "PTX", "ROCm names its cards otherwise"],
)
def test_a_card_that_torch_has_code_for_is_opened(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], built: list[str], cuda: str | None
) -> None:
    card = Card(monkeypatch, capability, built=built, cuda=cuda)
    gpu.open_device(DEVICE, "rank 2 on labB")
    assert card.opened == [DEVICE]


def test_a_card_that_another_process_has_for_itself_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, (8, 0), trouble=cuda_errors.accelerator_error(cuda_errors.BUSY_DEVICE))
    with pytest.raises(ConfigError) as raised:
        gpu.open_device(DEVICE, "rank 2 on labB")
    message = str(raised.value)
    assert message.startswith("rank 2 on labB: cuda:1 is busy or unavailable")
    assert "exclusive" in message
    assert "nvidia-smi -i 1 -c 0" in message
    assert codes_in(message) == ["device-unusable"]


def test_a_driver_that_is_too_old_is_told_in_the_words_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"
    Card(monkeypatch, (8, 0), trouble=RuntimeError(text))
    with pytest.raises(ConfigError, match="rank 2 on labB: cuda:1 cannot be used: The NVIDIA driver on your system is"):
        gpu.open_device(DEVICE, "rank 2 on labB")


@pytest.mark.parametrize("trouble", [cuda_errors.out_of_memory(), RuntimeError("something else")])
def test_another_trouble_with_a_card_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, trouble: Exception) -> None:
    Card(monkeypatch, (8, 0), trouble=trouble)
    with pytest.raises(RuntimeError) as raised:
        gpu.open_device(DEVICE, "rank 2 on labB")
    assert raised.value is trouble


def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """The report of a rank on the card that ends where it would load."""
    directory = RunDirectory.prepare(tmp_path / "run", config_yaml="")
    config = options.complete(options.parse([*words, "--save-dir", str(directory.path)]))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)

    def load(*_: Any, **__: Any) -> None:
        raise KeyError("it loads")

    monkeypatch.setattr(rank_life, "load_material", load)
    placement, stop = Assignment(slot=0, device="cuda:1", threads=1), StopRequest()
    return worker.run_worker(config, directory, placement, stop, line=NoLauncher(lambda: None))


def test_a_worker_names_the_card_before_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, (6, 1))
    report = start(tmp_path, monkeypatch, "--batch-size", "4")
    assert report["code"] == EXIT_USAGE
    assert report["message"].startswith(f"rank 0 on {socket.gethostname()}: cuda:1 is a GTX 1080 Ti of compute")


@pytest.mark.parametrize(
    ("capability", "precision", "is_told"),
    [((7, 5), "bf16", True), ((8, 0), "bf16", False), ((7, 5), "fp16", False), ((7, 5), "fp32", False)],
)
def test_bf16_on_a_card_without_it_is_told_once(
    capability: tuple[int, int], precision: str, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    Card(monkeypatch, capability)
    with caplog.at_level(logging.WARNING):
        report = start(tmp_path, monkeypatch, "--batch-size", "4", "--precision", precision)
    assert report["code"] == EXIT_FAILED
    assert "it loads" in report["message"]
    told = [record.getMessage() for record in caplog.records if "bf16" in record.getMessage()]
    assert len(told) == is_told
    assert all("several times slower than --precision fp16" in text for text in told)


@pytest.mark.parametrize(("precision", "is_allowed"), [("fp32", False), ("bf16", False), ("tf32", True)])
def test_a_worker_takes_tf32_where_it_was_asked_for_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, is_allowed: bool
) -> None:
    """cuDNN's TF32, which torch allows by default, rounds the factors of every product to 10 bits."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = not is_allowed
    Card(monkeypatch, (8, 6))
    try:
        start(tmp_path, monkeypatch, "--batch-size", "4", "--precision", precision)  # fails later: there is no GPU
        found = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
    assert found == (is_allowed, is_allowed)
