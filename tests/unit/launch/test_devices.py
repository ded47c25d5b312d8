"""Which devices a node's workers get, and what is said where one of them is not there."""

from __future__ import annotations

import pytest
import torch

from hetseq.config import parse
from hetseq.config.sections import DistributedConfig
from hetseq.errors import EXIT_USAGE, ConfigError
from hetseq.launch import launch
from hetseq.launch.launch import local_devices


@pytest.fixture
def shows(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A node with two GPUs, and a torch that could use them."""
    monkeypatch.setattr(launch, "visible_gpus", lambda: 2)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return monkeypatch


def devices(*words: str) -> list[str]:
    return local_devices(parse(words).distributed)


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        devices(*words)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--devices", "cuda:0,cuda:0"], ["cuda:0", "cuda:0"]),
        (["--devices", "cuda:1,cpu,cuda:0"], ["cuda:1", "cpu", "cuda:0"]),
        (["--devices", "cuda"], ["cuda:0"]),
        (["--devices", "cuda:01"], ["cuda:1"]),  # which torch would not read
        (["--devices", "cpu,cpu", "--cpu"], ["cpu", "cpu"]),
        (["--devices", "cuda:0,cuda:0,cpu", "--ranks", "3"], ["cuda:0", "cuda:0", "cpu"]),
        (["--devices", "cpu", "--ranks", "0"], ["cpu"]),
        (["--cpu", "--ranks", "3"], ["cpu"] * 3),
        (["--device-id", "1", "--ranks", "1"], ["cuda:1"]),
        ([], ["cuda:0", "cuda:1"]),
    ],
    ids=" ".join,
)
def test_workers_get_the_devices_that_were_named(
    shows: pytest.MonkeyPatch, words: list[str], expected: list[str]
) -> None:
    assert devices(*words) == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--devices", "cuda:1,cuda:2"], "--devices cuda:1,cuda:2 asks for cuda:2, but this node shows only cuda:0 to"),
        (["--devices", "cuda:7,cpu,cuda:3"], "--devices cuda:7,cpu,cuda:3 asks for cuda:3 and cuda:7, but"),
        (["--device-id", "2", "--ranks", "1"], "--device-id 2 asks for cuda:2, but this node shows only"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_gpu_that_is_not_there_is_named_with_those_that_are(
    shows: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    message = refusal(*words)
    assert message.startswith(said)
    assert "only cuda:0 to cuda:1" in message
    assert "name devices that it shows" in message
    assert "--cpu" in message


def test_where_there_is_one_gpu_or_none_the_words_are_others(shows: pytest.MonkeyPatch) -> None:
    shows.setattr(launch, "visible_gpus", lambda: 1)
    assert "this node shows only cuda:0 (nvidia-smi" in refusal("--devices", "cuda:7")
    shows.setattr(launch, "visible_gpus", lambda: 0)
    assert "this node shows no GPU (nvidia-smi" in refusal("--devices", "cuda")
    shows.setattr(torch.version, "cuda", None)
    shows.setattr(torch.version, "hip", None)
    message = refusal("--devices", "cuda")
    assert f"its torch {torch.__version__} is built for CPUs" in message
    assert "name cpu instead" in message
    assert devices("--devices", "cpu") == ["cpu"]


def test_options_that_speak_of_other_devices_contradict_each_other(shows: pytest.MonkeyPatch) -> None:
    assert refusal("--devices", "cpu,cuda:0", "--cpu").startswith("--devices cpu,cuda:0 contradicts --cpu: leave")
    said = refusal("--devices", "cpu,cuda:0", "--ranks", "3")
    assert said.startswith("--devices cpu,cuda:0 names 2 workers, --ranks 3 another number: leave one")


@pytest.mark.parametrize("device", ["tpu", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "cuda:²", "CUDA:0", ""])
def test_what_is_no_name_of_a_device_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="expected cpu, cuda or cuda:N"):
        DistributedConfig(devices=(device,))
