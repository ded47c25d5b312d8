"""Our checkpoints in the formats of others: opened by the real libraries, every bit of them; or nothing is there."""

from __future__ import annotations

import errno
import json
import os
import resource
import shlex
import tracemalloc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

from hetseq.checkpoint import Commit
from hetseq.checkpoint.export import export
from hetseq.errors import CheckpointError, ConfigError
from hetseq.tasks.mnist import DigitsNet
from tests.support.checkpoints import Disk
from tests.support.docs import ROOT, blocks
from tests.support.elsewhere import UNEQUAL, as_empty, differing, odd_state, save_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FORMS = ("safetensors", "torch", "dcp")
STATE = {"step": 1, "task": "toy", "best": None, "rate": 0.125, "long": 2**70, "list": [1, {"deep": True}]}


@pytest.fixture
def commit(tmp_path: Path) -> Commit:
    """A checkpoint of three unequal parts."""
    return save_state(tmp_path / "run", 1, odd_state(), UNEQUAL)


def open_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors by their names in the checkpoint, and the state."""
    tensors = {}
    for group, prefix in (("model", "model."), ("optimizer", "optim."), ("other", "")):
        if group == "model" or (path / f"{group}.safetensors").exists():
            found = safetensors.torch.load_file(path / f"{group}.safetensors")
            tensors |= {prefix + name: tensor for name, tensor in found.items()}
    return tensors, json.loads((path / "config.json").read_text())


def open_torch(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    content = torch.load(path, weights_only=True)
    tensors = {}
    for group, prefix in (("model", "model."), ("optimizer", "optim."), ("other", "")):
        tensors |= {prefix + name: tensor for name, tensor in content.get(group, {}).items()}
    return tensors, content["state"]


def open_dcp(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    reader = dcp.FileSystemReader(path)
    sizes = reader.read_metadata().state_dict_metadata
    tensors = as_empty({name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in sizes.items()})
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors, json.loads((path / "config.json").read_text())


OPEN: dict[str, Callable[[Path], tuple[dict[str, Tensor], dict[str, Any]]]] = {
    "safetensors": open_safetensors,
    "torch": open_torch,
    "dcp": open_dcp,
}


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# What is written.


@pytest.mark.parametrize("form", FORMS)
def test_the_real_library_finds_every_bit_of_a_state(commit: Commit, tmp_path: Path, form: str) -> None:
    assert export(commit, tmp_path / "out", form=form) == tmp_path / "out"
    tensors, state = OPEN[form](tmp_path / "out")
    assert differing(tensors, odd_state()) == []
    assert len(differing(tensors, odd_state(seed=2))) > 10
    assert state.pop("checkpoint") == commit.attempt.to_json()
    assert state == STATE
    assert left_in(tmp_path) == ["out", "run"]


@pytest.mark.parametrize("weights", [[1], [1, 0, 5, 1]])
@pytest.mark.parametrize("form", FORMS)
def test_it_does_not_depend_on_the_parts(commit: Commit, tmp_path: Path, form: str, weights: list[float]) -> None:
    other = save_state(tmp_path / "other", 1, odd_state(), weights)
    export(other, tmp_path / "out", form=form)
    assert differing(OPEN[form](tmp_path / "out")[0], odd_state()) == []


def test_a_safetensors_folder_has_bare_names_and_says_its_format(commit: Commit, tmp_path: Path) -> None:
    export(commit, tmp_path / "out", form="safetensors")
    assert left_in(tmp_path / "out") == ["config.json", "model.safetensors", "optimizer.safetensors"]
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as model:
        assert model.metadata() == {"format": "pt"}
        assert set(model.keys()) == {name[6:] for name in odd_state() if name.startswith("model.")}
    with safetensors.safe_open(tmp_path / "out" / "optimizer.safetensors", "pt") as optimizer:
        assert set(optimizer.keys()) == {"large.exp_avg", "large.step"}


def test_every_tensor_of_a_safetensors_file_is_aligned_to_its_elements(commit: Commit, tmp_path: Path) -> None:
    export(commit, tmp_path / "out", form="safetensors")
    content = (tmp_path / "out" / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    itemsize = {name[6:]: tensor.itemsize for name, tensor in odd_state().items()}
    for name, entry in json.loads(content[8:begin]).items():
        if name != "__metadata__":
            assert (begin + entry["data_offsets"][0]) % itemsize[name] == 0


def test_an_export_warns_of_nothing(commit: Commit, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(commit, tmp_path / "out", form="dcp")


def test_a_model_takes_its_export_strictly(tmp_path: Path) -> None:
    torch.manual_seed(1)
    saved, fresh = (nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)) for _ in range(2))
    state = {f"model.{name}": tensor for name, tensor in saved.state_dict().items()}
    commit = save_state(tmp_path / "run", 1, state, UNEQUAL)
    export(commit, tmp_path / "folder", form="safetensors")
    export(commit, tmp_path / "model.pt", form="torch")
    assert left_in(tmp_path / "folder") == ["config.json", "model.safetensors"]
    assert differing(fresh.state_dict(), saved.state_dict()) != []
    safetensors.torch.load_model(fresh, tmp_path / "folder" / "model.safetensors", strict=True)
    assert differing(fresh.state_dict(), saved.state_dict()) == []
    with torch.no_grad():
        fresh[0].weight.zero_()
    fresh.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True)["model"], strict=True)
    assert differing(fresh.state_dict(), saved.state_dict()) == []


@pytest.mark.parametrize("form", FORMS)
def test_names_of_a_script_of_its_own_come_as_they_are(tmp_path: Path, form: str) -> None:
    state = {"ema.w": torch.arange(5.0), "model.__metadata__": torch.ones(2), "model.": torch.ones(3)}
    export(save_state(tmp_path / "run", 1, state, [1]), tmp_path / "out", form=form)
    assert differing(OPEN[form](tmp_path / "out")[0], state) == []


@pytest.mark.parametrize("form", FORMS)
def test_nobody_else_may_read_it(commit: Commit, tmp_path: Path, form: str) -> None:
    export(commit, tmp_path / "out", form=form)
    assert (tmp_path / "out").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("form", "copies"), [("safetensors", 0.0), ("torch", 1.0), ("dcp", 0.25)])
def test_memory_is_what_the_docstring_says(tmp_path: Path, form: str, copies: float) -> None:
    state = {f"model.{index}": torch.full((1_000_000,), float(index)) for index in range(8)}
    commit = save_state(tmp_path / "run", 1, state, [1])
    peak = peak_bytes(lambda: export(commit, tmp_path / "out", form=form))
    assert peak <= copies * 32_000_000 + (12 << 20)


def peak_bytes(job: Callable[[], object]) -> int:
    """How much memory of tensors and of Python was in use at once, at most, beyond what was before."""
    live, peak = [0], [0]
    real = torch.empty

    def noting(*args: Any, **settings: Any) -> Tensor:
        made = real(*args, **settings)
        if made.device.type == "cpu":
            live[0] += made.nbytes
            peak[0] = max(peak[0], live[0])
            weakref.finalize(made.untyped_storage(), lambda size=made.nbytes: live.__setitem__(0, live[0] - size))
        return made

    tracemalloc.start()
    torch.empty = noting  # type: ignore[assignment]
    try:
        job()
        return peak[0] + tracemalloc.get_traced_memory()[1]
    finally:
        torch.empty = real
        tracemalloc.stop()


# What is refused.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")], ids=["folder", "file", "link"]
)
def test_a_target_that_exists_is_refused_and_stays(
    commit: Commit, tmp_path: Path, form: str, make: Callable[[Path], None]
) -> None:
    target = tmp_path / "out"
    make(target)
    before = target.lstat()
    with pytest.raises(ConfigError, match=r"export to .*out: it exists, and an export never overwrites"):
        export(commit, target, form=form)
    assert target.lstat() == before
    assert left_in(tmp_path) == ["out", "run"]


def test_targets_that_cannot_be_are_refused(commit: Commit, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'onnx': expected one of safetensors, torch, dcp"):
        export(commit, tmp_path / "out", form="onnx")
    with pytest.raises(ConfigError, match=r"the folder .*nowhere does not exist"):
        export(commit, tmp_path / "nowhere" / "out", form="dcp")
    with pytest.raises(ConfigError, match="inside the checkpoint"):
        export(commit, commit.path / "out", form="torch")
    (tmp_path / "out.v1.tmp").mkdir()
    with pytest.raises(ConfigError, match=r"export to .*/out.v1: .*/out.v1.tmp exists: either a killed export left it"):
        export(commit, tmp_path / "out.v1", form="torch")
    assert left_in(tmp_path) == ["out.v1.tmp", "run"]


def test_what_appears_meanwhile_is_not_replaced(
    commit: Commit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.save
    monkeypatch.setattr(torch, "save", lambda *words: (real(*words), (tmp_path / "out").write_text("mine")))
    with pytest.raises(ConfigError, match="it exists"):
        export(commit, tmp_path / "out", form="torch")
    assert (tmp_path / "out").read_text() == "mine"
    assert left_in(tmp_path) == ["out", "run"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["COMMIT.json", "state.json", "part-00001.json", "part-00002.safetensors"])
def test_a_damaged_checkpoint_is_named_and_nothing_is_left(
    commit: Commit, tmp_path: Path, form: str, name: str
) -> None:
    content = bytearray((commit.path / name).read_bytes())
    content[-9] ^= 1
    (commit.path / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        export(commit, tmp_path / "out", form=form)
    assert f"{commit.path} cannot be used: {name}" in str(caught.value)
    assert left_in(tmp_path) == ["run"]


@pytest.mark.parametrize("form", FORMS)
def test_a_damage_far_behind_in_a_part_leaves_nothing_of_the_files_before(tmp_path: Path, form: str) -> None:
    state = {f"model.{index}": torch.full((1_500_000,), float(index)) for index in range(2)}
    commit = save_state(tmp_path / "run", 1, state, [1])
    with open(commit.path / "part-00000.safetensors", "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\x01")
    with pytest.raises(CheckpointError, match=r"part-00000\.safetensors: the \d+ bytes from byte 8388608 on"):
        export(commit, tmp_path / "out", form=form)
    assert left_in(tmp_path) == ["run"]


# The disk.


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_whatever_call_the_disk_refuses_nothing_is_left(tmp_path: Path, form: str) -> None:
    state = {name: tensor for name, tensor in odd_state().items() if name[6:] in ("large", "flag", "large.step")}
    commit = save_state(tmp_path / "run", 1, state, [1])
    out = tmp_path / "place"
    out.mkdir()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk = Disk(out, lambda number, name: False, full)
    with disk.between():
        export(commit, out / "calm", form=form)
    calls = list(disk.calls)
    files = {"safetensors": 3, "torch": 1}[form]
    assert calls.count("fsync") == files + 3  # their folder, and twice the one beside which it lies
    assert {"mkdir", "write", "close", "rename"} <= set(calls)
    for hit in range(1, calls.index("rename") + 3):
        broken = Disk(out, lambda number, name, hit=hit: number == hit, full)
        with broken.between(), pytest.raises(CheckpointError, match="No space left on device"):
            export(commit, out / "hurt", form=form)
        assert left_in(out) == ["calm"], (hit, calls[hit - 1])
    assert differing(OPEN[form](out / "calm")[0], state) == []


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """No file grows beyond this: what a full disk is to somebody who writes it through C."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("form", FORMS)
def test_a_disk_that_takes_no_more_leaves_nothing(tmp_path: Path, form: str) -> None:
    state = {f"model.{index}": torch.full((50_000 + index,), float(index)) for index in range(3)}
    commit = save_state(tmp_path / "run", 1, state, UNEQUAL)
    for size_bytes in (0, 100, 150_000):
        with largest_file(size_bytes), pytest.raises(CheckpointError, match=r"export to .*/out: the disk refused it"):
            export(commit, tmp_path / "out", form=form)
        assert left_in(tmp_path) == ["run"]
    export(commit, tmp_path / "out", form=form)
    assert differing(OPEN[form](tmp_path / "out")[0], state) == []


@pytest.mark.parametrize("form", FORMS)
def test_an_interrupt_leaves_nothing(
    commit: Commit, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hetseq.checkpoint.export.sync_directory", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export(commit, tmp_path / "out", form=form)
    assert left_in(tmp_path) == ["run"]


# The page of the manual.


def trained_digits(seed: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A net after a step of AdamW, and its state under the names of a run."""
    torch.manual_seed(seed)
    model = DigitsNet()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 1, 8, 8)).square().sum().backward()
    optimizer.step()
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state |= {f"optim.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return model, state


def test_the_page_on_other_programs_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved, state = trained_digits(1)
    commit = save_state(tmp_path / "runs" / "exported", 1, state, UNEQUAL)
    names: dict[str, Any] = {}
    exports, loads = [], 0
    for block in blocks((ROOT / "docs" / "guides" / "export.md").read_text()):
        text = "\n".join(block.lines)
        if block.language == "console":
            for words in map(shlex.split, block.commands()):
                if words[:5] == ["hetseq", "checkpoints", "export", "runs/exported", "--format"]:
                    exports.append(export(commit, Path(words[7]), form=words[5]).name)
        elif "model.load_state_dict" in text:
            if "model" in names:  # the weights are those that this block has brought
                names["model"].load_state_dict(trained_digits(2)[0].state_dict())
                assert differing(names["model"].state_dict(), saved.state_dict()) != []
            exec(compile(text, f"line {block.line}", "exec"), names)
            assert differing(names["model"].state_dict(), saved.state_dict()) == [], f"line {block.line}"
            loads += 1
        else:
            exec(compile(text, f"line {block.line}", "exec"), names)
    assert (exports, loads) == (["digits", "digits.pt", "digits.dcp"], 4)
    found = {
        f"optim.{name}.{key}": value
        for name, parameter in names["model"].named_parameters()
        for key, value in names["optimizer"].state[parameter].items()
    }
    assert differing(found, {name: tensor for name, tensor in state.items() if name.startswith("optim.")}) == []
    assert len(found) == 3 * len(list(saved.parameters()))
