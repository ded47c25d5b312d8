"""Our checkpoints read by torch.distributed.checkpoint in one process: every bit, or a CheckpointError."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

from hetseq.checkpoint import Commit, holdings, layout, records
from hetseq.checkpoint import dcp as ours
from hetseq.checkpoint import tensor_reader as spans
from hetseq.checkpoint.dcp import HetSeqReader
from hetseq.checkpoint.verification import Inspected
from hetseq.errors import CheckpointError, CheckpointRefused
from tests.support.checkpoints import contents, folder
from tests.support.elsewhere import UNEQUAL, as_empty, differing, odd_state, save_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one checkpoint of three unequal parts."""
    save_state(tmp_path, 1, odd_state(), UNEQUAL)
    return tmp_path


def load(path: Path, state: dict[str, Tensor], *, prefix: str = "", **settings: object) -> dict[str, Tensor]:
    """What dcp.load makes of empty tensors like those of `state`."""
    empty = as_empty(state)
    dcp.load(empty, storage_reader=HetSeqReader(path, prefix=prefix), no_dist=True, **settings)  # type: ignore[arg-type]
    return empty


def failure(load: Callable[[], object]) -> BaseException:
    """The exception that torch has wrapped."""
    with pytest.raises(dcp.CheckpointException) as caught:
        load()
    return caught.value.failures[0][0]


def flip(path: Path, at: int) -> None:
    """One bit of a file is another one, and its size is not."""
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


# What is read.


@pytest.mark.parametrize("weights", [[1], UNEQUAL, [1, 0, 1]])
def test_every_type_and_shape_comes_back_bit_for_bit(tmp_path: Path, weights: list[float]) -> None:
    state = odd_state()
    save_state(tmp_path, 1, state, weights)
    loaded = load(tmp_path, state)
    assert differing(loaded, state) == []
    assert differing(as_empty(state), state) == [name for name in state if state[name].numel()]
    loaded["model.large"][299, 6].mul_(-1)
    assert differing(loaded, state) == ["model.large"]


def test_a_tensor_that_was_cut_over_three_parts_is_whole(run: Path) -> None:
    slices = [
        index
        for index in range(3)
        if b"model.large@" in (folder(run, 1) / f"part-0000{index}.safetensors").read_bytes()
    ]
    assert slices == [0, 1, 2]
    state = {"model.large": odd_state()["model.large"]}
    assert differing(load(run, state), state) == []


@pytest.mark.parametrize("block_bytes", [1, 5, 64, 1000])
def test_what_is_read_in_small_blocks_is_the_same(run: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(ours, "BLOCK_BYTES", block_bytes)
    sizes = []
    real = spans.Spans.read

    def read(self: spans.Spans, name: str, begin: int, end: int) -> Tensor:
        sizes.append((end - begin) * self.specs[name].itemsize)
        return real(self, name, begin, end)

    monkeypatch.setattr(spans.Spans, "read", read)
    state = {name: tensor for name, tensor in odd_state().items() if name != "model.large"}
    assert differing(load(run, state), state) == []
    assert max(sizes) <= max(block_bytes, 8)  # bytes of one element at least


def test_a_long_row_of_blocks_is_halved_and_not_peeled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "BLOCK_BYTES", 64)
    state = {"model.long": torch.arange(3000)}
    save_state(tmp_path, 1, state, UNEQUAL)
    assert differing(load(tmp_path, state), state) == []


def test_slices_may_lie_in_the_parts_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "divide", lambda specs, weights: layout.divide(specs, weights)[::-1])
    state = odd_state()
    save_state(tmp_path, 1, state, UNEQUAL)
    assert differing(load(tmp_path, state), state) == []


def test_the_library_is_told_the_types_and_shapes(run: Path) -> None:
    found = HetSeqReader(run).read_metadata().state_dict_metadata
    told = {name: (each.properties.dtype, each.size) for name, each in found.items()}
    assert told == {name: (tensor.dtype, tensor.shape) for name, tensor in odd_state().items()}


def test_a_part_of_several_chunks_is_read_once_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {
        f"model.{name}": torch.arange(2_500_000, dtype=torch.float32) * factor for factor, name in enumerate("cba", 1)
    }
    save_state(tmp_path, 1, state, [1])
    reads = []
    real = spans.reading
    monkeypatch.setattr(spans, "reading", lambda path: reads.append(path) or real(path))
    assert differing(load(tmp_path, state), state) == []
    chunks = -(-(folder(tmp_path, 1) / "part-00000.safetensors").stat().st_size // records.CHUNK_BYTES)
    assert (chunks, len(reads)) == (4, 4)


def test_only_the_chunks_that_are_needed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"model.{name}": torch.full((2_500_000,), float(factor)) for factor, name in enumerate("abc")}
    save_state(tmp_path, 1, state, [1])
    reader = HetSeqReader(tmp_path)
    reads = []
    real = spans.reading
    monkeypatch.setattr(spans, "reading", lambda path: reads.append(path) or real(path))
    target = {"model.c": torch.empty(2_500_000)}
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert differing(target, {"model.c": state["model.c"]}) == []
    assert len(reads) == 2


def test_a_folder_of_a_checkpoint_and_its_run_are_the_same(run: Path) -> None:
    assert HetSeqReader(run).checkpoint_id == HetSeqReader(folder(run, 1)).checkpoint_id == folder(run, 1)
    assert HetSeqReader(str(run / "checkpoints")).checkpoint_id == folder(run, 1)


def test_a_folder_called_latest_is_a_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    shutil.copytree(folder(run, 1), "latest")
    assert HetSeqReader("latest").checkpoint_id == run / "latest"


def test_another_path_may_be_given_to_load(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    state = odd_state(seed=2)
    save_state(other, 5, state, [1])
    loaded = as_empty(state)
    dcp.load(loaded, checkpoint_id=str(other), storage_reader=HetSeqReader(run), no_dist=True)
    assert differing(loaded, state) == []
    assert differing(loaded, odd_state()) != []


# Names.


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def save_net(run: Path, model: nn.Module) -> None:
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    save_state(run, 1, state | {"optim.0.weight.exp_avg": torch.ones(4, 5)}, UNEQUAL)


def test_a_bare_state_dict_loads_without_the_prefix(tmp_path: Path) -> None:
    saved, other = net(1), net(2)
    save_net(tmp_path, saved)
    state = other.state_dict()
    assert differing(state, saved.state_dict()) != []
    dcp.load(state, storage_reader=HetSeqReader(tmp_path, prefix="model."), no_dist=True)
    other.load_state_dict(state, strict=True)
    assert differing(other.state_dict(), saved.state_dict()) == []


def test_a_nested_state_dict_loads_as_it_is(tmp_path: Path) -> None:
    saved, other = net(1), net(2)
    save_net(tmp_path, saved)
    state = {"model": other.state_dict()}
    dcp.load(state, storage_reader=HetSeqReader(tmp_path), no_dist=True)
    assert differing(state["model"], saved.state_dict()) == []


def test_a_prefix_hides_all_other_names(tmp_path: Path) -> None:
    save_net(tmp_path, net(1))
    assert list(HetSeqReader(tmp_path, prefix="optim.").read_metadata().state_dict_metadata) == ["0.weight.exp_avg"]
    assert len(HetSeqReader(tmp_path).read_metadata().state_dict_metadata) == 10


def test_a_prefix_that_nothing_has_is_refused(run: Path) -> None:
    with pytest.raises(CheckpointRefused, match=r"no tensor of .* begins with 'module\.': the names are model\."):
        HetSeqReader(run, prefix="module.")


def test_a_missing_name_is_an_error_unless_part_of_it_will_do(run: Path) -> None:
    state = {"model.flag": odd_state()["model.flag"], "model.nowhere": torch.zeros(3)}
    assert "Missing key in checkpoint state_dict: model.nowhere" in str(failure(lambda: load(run, state)))
    loaded = load(run, state, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert differing({"model.flag": loaded["model.flag"]}, {"model.flag": state["model.flag"]}) == []


def test_another_shape_is_an_error(run: Path) -> None:
    message = str(failure(lambda: load(run, {"model.large": torch.zeros(7, 300)})))
    assert "Size mismatch" in message
    assert "model.large" in message


# What is refused.


@pytest.mark.parametrize("name", ["COMMIT.json", "state.json", "part-00001.json"])
def test_a_flipped_bit_in_a_small_file_is_named(run: Path, name: str) -> None:
    size = (folder(run, 1) / name).stat().st_size
    for at in range(0, size, size // 12):
        flip(folder(run, 1) / name, at)
        with pytest.raises(CheckpointError) as caught:
            HetSeqReader(folder(run, 1))
        assert name in str(caught.value)
        flip(folder(run, 1) / name, at)
    HetSeqReader(folder(run, 1))


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_flipped_bit_anywhere_in_a_part_is_named(run: Path, part: int) -> None:
    path = folder(run, 1) / f"part-0000{part}.safetensors"
    size = path.stat().st_size
    for at in range(0, size, size // 25):
        flip(path, at)
        with pytest.raises(CheckpointError) as caught:
            HetSeqReader(folder(run, 1))
        assert str(caught.value).startswith(f"checkpoint {folder(run, 1)} cannot be used: {path.name}: ")
        flip(path, at)
    HetSeqReader(folder(run, 1))


def test_a_bit_that_flips_behind_the_first_chunk_is_found_by_the_load(tmp_path: Path) -> None:
    state = {"model.large": torch.arange(5_000_000, dtype=torch.float32)}
    save_state(tmp_path, 1, state, [1])
    path = folder(tmp_path, 1) / "part-00000.safetensors"
    flip(path, 19_000_000)
    error = failure(lambda: load(tmp_path, state))
    assert isinstance(error, CheckpointError)
    assert f"{folder(tmp_path, 1)} cannot be used: part-00000.safetensors" in str(error)
    flip(path, 19_000_000)
    assert differing(load(tmp_path, state), state) == []


def test_a_damaged_chunk_does_not_pass_for_the_one_before(tmp_path: Path) -> None:
    state = {"model.large": torch.arange(5_000_000, dtype=torch.float32)}
    opened = spans.Spans(save_state(tmp_path, 1, state, [1]))
    flip(folder(tmp_path, 1) / "part-00000.safetensors", 9_000_000)
    assert opened.read("model.large", 0, 100).tolist() == list(range(100))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="from byte 8388608 on do not match their checksum"):
            opened.read("model.large", 2_200_000, 2_200_100)
    assert opened.read("model.large", 0, 100).tolist() == list(range(100))


def test_a_header_that_is_not_the_one_in_the_file_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = spans.inspect

    def inspect(commit: Commit) -> Inspected:  # as when the file is replaced between two looks
        seen = real(commit)
        other = replace(seen.headers[1], raw=seen.headers[1].raw.replace(b"F32", b"I32"))
        return replace(seen, headers=(seen.headers[0], other, seen.headers[2]))

    monkeypatch.setattr(spans, "inspect", inspect)
    with pytest.raises(CheckpointError, match=r"part-00001\.safetensors: its header changed"):
        HetSeqReader(folder(run, 1))


def test_a_part_that_changes_after_it_was_opened_is_found_by_the_load(run: Path) -> None:
    reader, state = HetSeqReader(run), odd_state()
    path = folder(run, 1) / "part-00002.safetensors"
    flip(path, path.stat().st_size - 1)
    error = failure(lambda: dcp.load(as_empty(state), storage_reader=reader, no_dist=True))
    assert isinstance(error, CheckpointError)
    assert path.name in str(error)


@pytest.mark.parametrize("spoil", [lambda path: os.truncate(path, 9), Path.unlink], ids=["shrinks", "vanishes"])
def test_a_part_that_shrinks_or_vanishes_after_it_was_opened_is_named(run: Path, spoil: Callable[[Path], None]) -> None:
    reader, state = HetSeqReader(run), odd_state()
    path = folder(run, 1) / "part-00001.safetensors"
    spoil(path)
    error = failure(lambda: dcp.load(as_empty(state), storage_reader=reader, no_dist=True))
    assert isinstance(error, CheckpointError)
    assert path.name in str(error)


def test_a_run_whose_newest_checkpoint_is_damaged_gives_the_one_before(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = odd_state(seed=2)
    save_state(run, 2, state, [1])
    assert differing(load(run, state), state) == []
    flip(folder(run, 2) / "part-00000.safetensors", 100)
    assert differing(load(run, state), odd_state()) == []
    assert "step 2 is damaged (part-00000.safetensors: " in caplog.text
    assert "): step 1 is used instead" in caplog.text
    flip(folder(run, 1) / "part-00000.json", 100)
    with pytest.raises(CheckpointRefused) as caught:
        HetSeqReader(run)
    assert f"no checkpoint in {run} can be used" in str(caught.value)
    assert str(folder(run, 1)) in str(caught.value)
    assert str(folder(run, 2)) in str(caught.value)


def test_a_commit_that_cannot_be_read_is_named_among_those_passed_over(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_state(run, 2, odd_state(seed=2), [1])
    flip(folder(run, 2) / "COMMIT.json", 100)
    assert HetSeqReader(run).checkpoint_id == folder(run, 1)
    assert "step 2 is damaged (COMMIT.json: " in caplog.text


def test_what_is_no_checkpoint_is_refused(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    for path in (empty, empty / "nowhere"):
        with pytest.raises(CheckpointRefused, match=str(path)):
            HetSeqReader(path)
    (empty / "model.pt").write_bytes(pickle.dumps({}))
    with pytest.raises(CheckpointRefused, match="pickle"):
        HetSeqReader(empty / "model.pt")
    (folder(run, 1) / "COMMIT.json").unlink()
    with pytest.raises(CheckpointRefused, match="never committed"):
        HetSeqReader(folder(run, 1))


# A directory that means harm.


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_no_pickle_is_opened_and_no_file_that_the_commit_does_not_name(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = pickle.dumps(Payload(run / "harm"))
    for name in (".metadata", "__0.metadata", "__0_0.distcp", "part-00003.safetensors"):
        (folder(run, 1) / name).write_bytes(payload)
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: opened.append(Path(path)) or real(path, *rest, **more))
    state = odd_state()
    assert differing(load(folder(run, 1), state), state) == []
    parts = {f"part-0000{index}.{suffix}" for index in range(3) for suffix in ("json", "safetensors")}
    assert {path.name for path in opened} == {"COMMIT.json", "state.json", *parts}
    assert {path.parent for path in opened} == {folder(run, 1)}
    assert not (run / "harm").exists()
    pickle.loads(payload)
    assert (run / "harm").exists()


@pytest.mark.parametrize("name", ["part-00001.safetensors", "part-00001.json", "state.json", "COMMIT.json"])
def test_a_link_to_somewhere_else_is_not_followed(
    run: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / name
    (folder(run, 1) / name).rename(elsewhere)
    (folder(run, 1) / name).symlink_to(elsewhere)
    with pytest.raises(CheckpointError) as caught:
        HetSeqReader(folder(run, 1))
    assert name in str(caught.value)


def test_a_pipe_in_place_of_a_part_is_refused_at_once(run: Path) -> None:
    path = folder(run, 1) / "part-00001.safetensors"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=path.name):
        HetSeqReader(run)


def test_a_part_of_another_checkpoint_is_refused(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    save_state(other, 1, odd_state(seed=2), UNEQUAL)
    assert contents(run) == contents(other)
    shutil.copy(folder(other, 1) / "part-00001.safetensors", folder(run, 1) / "part-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"part-00001\.safetensors"):
        HetSeqReader(run)
    shutil.copy(folder(other, 1) / "part-00001.json", folder(run, 1) / "part-00001.json")
    with pytest.raises(CheckpointError, match=r"part-00001\.json"):
        HetSeqReader(run)
