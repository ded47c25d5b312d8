"""What two ranks would train differently is named before the first step: code, model, data; last bits are let be."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import random
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hetseq import Task, registry
from hetseq.cluster.membership.compatibility import PART, Fields, difference
from hetseq.config.sections import Config, DataConfig, OptimizationConfig, TaskConfig
from hetseq.errors import DataError, TaskFileError
from hetseq.parallel.base_parameters import base_digest
from hetseq.run import fingerprint
from hetseq.run.fingerprint import data_digest, rank_fields
from hetseq.system.task_failure import summary
from hetseq.task import make_task
from hetseq.tasks.mnist import load_mnist
from hetseq.training.task_checks import LossTrial
from tests.support.base_tasks import OverBase

ROWS = 50


class Plain(Task):
    """A task whose model and data are given by the test."""


class Listed(list):  # type: ignore[type-arg]
    """A data set that may have attributes."""


def material(
    data: Any = None, model: nn.Module | None = None, *, valid: Any = None, task: Any = None,
    trial: LossTrial | None = None,
) -> Any:  # fmt: skip
    torch.manual_seed(1)
    return SimpleNamespace(
        described=None,
        task=task or make_task(Plain, Config()),
        train=rows() if data is None else data,
        valid={} if valid is None else {"valid": valid},
        model=model or nn.Linear(3, 2),
        trial=trial or LossTrial(),
        own_loop=None,
        base=None if model is None else base_digest(model),
    )


def rows(count: int = ROWS) -> Any:
    table = torch.arange(count * 3).reshape(count, 3)
    return Listed({"x": table[index] / 7, "y": index % 3} for index in range(count))


def presented(
    data: Any = None,
    model: nn.Module | None = None,
    config: Config | None = None,
    *,
    has_code: bool = False,
    **more: Any,
) -> Fields:
    """What a rank presents; the modules beside its task only with `has_code`.

    To find those takes a look at all that is imported, which in a run of the tests is as long as all the rest together.
    """
    made = material(data, model, **more)
    if config is BY_HOST:
        made.part = data_digest(made.train, 1)
    with pytest.MonkeyPatch.context() as patch:
        if not has_code:
            patch.setattr(fingerprint, "_modules_beside", lambda names: set())
        return rank_fields(config or Config(), made)


def lines(one: Fields, other: Fields) -> list[str]:
    text = difference([("labA", one), ("labB", other)])
    return [] if text is None else [line.strip() for line in text.splitlines()[1:-1]]


def test_ranks_that_train_the_same_agree() -> None:
    one, same = presented(has_code=True), presented(has_code=True)
    assert lines(one, same) == []
    assert Path(__file__).name in one["modules of the task"]


# Options that only a rank knows


def test_the_rate_at_its_default_is_the_rate_said_aloud() -> None:
    def of(**options: Any) -> Fields:
        return presented(config=Config(optimization=OptimizationConfig(optimizer="sgd", **options)))

    assert lines(of(), of(lr=(0.1,))) == []
    assert lines(of(), of(lr=(0.2,))) == ["--lr: 0.1 on labA; 0.2 on labB"]


@dataclasses.dataclass(frozen=True)
class Options:
    depth: int = 3


def test_options_of_the_users_own_are_presented() -> None:
    one, other = (presented(config=Config(extras={"task": Options(depth)})) for depth in (3, 4))
    assert lines(one, other) == ["--depth: 3 on labA; 4 on labB"]


# The model


class Two(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(2, 3)))


def test_two_parameters_of_equal_shape_in_another_order_are_named() -> None:
    one, other = presented(model=Two("query", "key", "value")), presented(model=Two("query", "value", "key"))
    assert lines(one, other) == [
        "parameters: number 2 of 3: key float32 [2, 3] on labA; number 2 of 3: value float32 [2, 3] on labB"
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda model: model.double(), "number 1 of 2: weight float64 [2, 3] on labB"),
        (lambda model: model.weight.requires_grad_(False), "number 1 of 2: weight float32 [2, 3], frozen on labB"),
        (lambda model: setattr(model, "bias", None), "only 1 of them on labB"),
        (lambda model: model.register_buffer("mean", torch.ones(2)), "buffers: none on labA; mean float32 [2] on labB"),
        (lambda model: model.weight.data.mul_(1.01), "initial values: weight: checksums "),
    ],
    ids=["dtype", "frozen", "missing", "buffer", "other values"],
)
def test_another_model_is_named(change: Callable[[Any], Any], expected: str) -> None:
    model = material().model
    change(model)
    said = lines(presented(), presented(model=model))
    assert any(expected in line for line in said), said


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (
            nn.Dropout(0.1),
            nn.Dropout(0.2),
            "modules: number 3 of 3: 1: Dropout(p=0.1, inplace=False) on labA; number 3 of 3: 1: Dropout(p=0.2, ",
        ),
        (nn.Dropout(0.1), nn.Identity(), "number 3 of 3: 1: Identity() on labB"),
        (nn.LayerNorm(2, eps=1e-5), nn.LayerNorm(2, eps=1e-6), "number 3 of 3: 1: LayerNorm((2,), eps=1e-06, "),
    ],
)
def test_a_setting_that_is_no_parameter_is_named_with_its_module(
    one: nn.Module, other: nn.Module, expected: str
) -> None:
    """Each node reads the rate of dropout from its own environment, say."""
    here, there = (nn.Sequential(nn.Linear(2, 2), module) for module in (one, other))
    there.load_state_dict(here.state_dict(), strict=False)
    assert any(expected in line for line in lines(presented(model=here), presented(model=there)))


class Placed(nn.Module):
    """Says where it is, which differs from process to process."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.kept = device, object()

    def extra_repr(self) -> str:
        return f"size=3, device={self.device}, kept={self.kept}"


def test_where_a_module_lies_is_no_difference() -> None:
    here, there = (nn.Sequential(nn.Linear(2, 2), Placed(device)) for device in ("cpu", "cuda:1"))
    there.load_state_dict(here.state_dict())
    assert lines(presented(model=here), presented(model=there)) == []


def test_initial_values_that_were_rounded_otherwise_agree() -> None:
    model = material().model
    with torch.no_grad():
        model.weight.copy_(torch.nextafter(model.weight, torch.tensor(9.0)))
    assert lines(presented(), presented(model=model)) == []


def test_frozen_weights_that_no_checkpoint_holds_are_compared_to_the_last_bit() -> None:
    bases = []
    for _ in range(3):
        torch.manual_seed(1)  # of the trained layer
        bases.append(OverBase.build_model(SimpleNamespace(seed=5)))  # type: ignore[arg-type]
    with torch.no_grad():
        bases[2][0].weight.copy_(torch.nextafter(bases[2][0].weight, torch.tensor(9.0)))
    one, same, other = (presented(model=base) for base in bases)
    assert lines(one, same) == []
    (said,) = lines(one, other)
    assert said == f"frozen weights: {base_digest(bases[0])} on labA; {base_digest(bases[2])} on labB"


# Length and order of the data


def test_another_length_is_named_with_both() -> None:
    said = lines(presented(rows(1000)), presented(rows(990)))
    assert said[0] == "length of train: 1000 samples on labA; 990 samples on labB"


def test_a_split_that_only_one_has_is_named() -> None:
    said = lines(presented(valid=rows(5)), presented())
    assert "length of valid: 5 samples on labA; (nothing) on labB" in said
    assert lines(presented(valid=rows(5)), presented(valid=rows(5))) == []


class Reversed(Listed):
    def ordered_indices(self) -> list[int]:
        return list(reversed(range(len(self))))


class LateSwap(Listed):
    """An order of its own that the first samples of the plan need not show."""

    def __init__(self, samples: Any, at: int) -> None:
        super().__init__(samples)
        self.at = at

    def ordered_indices(self) -> list[int]:
        order = list(range(len(self)))
        order[0], order[self.at] = order[self.at], order[0]
        return order


def test_another_order_of_the_samples_is_named() -> None:
    said = lines(presented(), presented(Reversed(rows())))
    assert any(line.startswith("order of train: number 1 of 32: ") for line in said), said
    said = lines(presented(LateSwap(rows(900), 400)), presented(LateSwap(rows(900), 401)))
    assert any(line.startswith("own order of train: ") for line in said), said


def test_a_seed_or_a_curriculum_shows_in_the_order() -> None:
    for config in (Config(task=TaskConfig(seed=1)), Config(data=DataConfig(curriculum=1))):
        assert any(line.startswith("order of train: ") for line in lines(presented(), presented(config=config)))
    first = presented(config=Config(data=DataConfig(curriculum=1)))["order of train"]
    assert first.split("\n") == [str(index) for index in range(32)]


def test_an_order_that_leaves_samples_out_is_refused_here_too() -> None:
    data = Reversed(rows())
    data.ordered_indices = lambda: [0, 1]  # type: ignore[method-assign]
    with pytest.raises(TaskFileError, match="each of its 50 samples once"):
        presented(data)


def test_other_lengths_of_samples_are_named_and_wrong_ones_left_to_others() -> None:
    one, other, wrong = rows(), rows(), rows()
    one.lengths, other.lengths, wrong.lengths = [7] * ROWS, [7] * (ROWS - 1) + [8], [1]
    (line,) = lines(presented(one), presented(other))
    assert line.endswith("number 32 of 32: sample 49 has 7 on labA; number 32 of 32: sample 49 has 8 on labB")
    assert "lengths of train" not in presented(wrong)


# Content


Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Graph:
    nodes: Any
    edges: Any


class Kind(enum.IntEnum):
    CAT = 1
    DOG = 2


class Unknown:
    def __init__(self, number: int = 0) -> None:
        self.number = number


class Picture:
    """Gives its numbers away as images of Pillow do."""

    def __init__(self, number: int) -> None:
        self.pixels = np.array([number])

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.pixels.__array_interface__


NESTED: dict[str, Callable[[Any], Any]] = {
    "int": lambda v: v,
    "float": lambda v: v / 7,
    "str": lambda v: f"word {v}",
    "bytes": lambda v: bytes([v]),
    "bool": lambda v: v == 1,
    "enum": lambda v: Kind(v),
    "complex": lambda v: complex(3, v),
    "set": lambda v: {"a", "b", str(v)},
    "list": lambda v: [5, v, "x", None],
    "floats": lambda v: [0.5, float(v)],
    "dict": lambda v: {"deep": ({"deeper": [v]}, "same")},
    "dataclass": lambda v: Graph(np.ones(3), [(0, 1), (1, v)]),
    "namedtuple": lambda v: Pair(1, torch.tensor([v])),
    "uint8": lambda v: torch.tensor([9, v], dtype=torch.uint8),
    "float tensor": lambda v: torch.tensor([9.0, v]),
    "half tensor": lambda v: torch.tensor([9, v], dtype=torch.bfloat16),
    "complex tensor": lambda v: torch.tensor([9 + 1j, 1j * v]),
    "int array": lambda v: np.array([9, v]),
    "float array": lambda v: np.array([[9.0, v]]),
    "numpy scalar": lambda v: np.float32(v),
    "text array": lambda v: np.array(["a", str(v)]),
    "array of objects": lambda v: np.array(["a", {"b": v}], dtype=object),
    "something like an array": lambda v: Picture(v),
    "shape": lambda v: torch.zeros(v, 3 - v),
    "type": lambda v: torch.zeros(2, dtype=[torch.int32, torch.int64][v - 1]),
    "not a number": lambda v: torch.tensor([float("nan"), 1.0, float("inf") * (3 - 2 * v)]),
    "keys": lambda v: {f"k{v}": 1},
    "beside an unknown": lambda v: (Unknown(v), v),
}


@pytest.mark.parametrize("kind", NESTED)
def test_one_sample_that_differs_is_named_whatever_it_is_made_of(kind: str) -> None:
    def data(value: int) -> Any:
        return Listed([*([NESTED[kind](1)] * 9), NESTED[kind](value)])

    assert lines(presented(data(1)), presented(data(1))) == []
    (line,) = lines(presented(data(1)), presented(data(2)))
    assert line.startswith("samples of train: sample 9: "), line
    assert " on labA; sample 9: " in line


def test_samples_of_unknown_objects_are_not_compared_and_that_is_said() -> None:
    one = presented(Listed([Unknown()] * 9))
    assert one["samples of train"] == "not compared: samples are made of Unknown"
    assert lines(one, presented()) != []
    assert not any("samples of" in line for line in lines(one, presented(rows(9))))


def test_a_sample_that_holds_itself_ends() -> None:
    loop: list[Any] = [1.5, 2]
    loop.append(loop)
    assert presented(Listed([loop] * 3))["samples of train"].startswith("sample 0: ")


def test_many_leaves_stay_small() -> None:
    def data(last: float) -> Any:
        return Listed([[torch.tensor(float(i)) for i in range(1, 200)] + [torch.tensor(last)]] * 5)

    one = presented(data(1.0))
    assert len(one["samples of train"].split("\n")[0]) < 4000
    assert len(lines(one, presented(data(2.0)))) == 1


def images(count: int, *, change: Callable[[Any], Any] = lambda x: x) -> Any:
    """Normalised as MNIST is, before `change`."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8)
    pixels[:, :, :14] = 0
    return Listed(change((torch.from_numpy(image).float() / 255 - 0.1307) / 0.3081) for image in pixels)


def test_numbers_that_another_processor_rounded_otherwise_agree() -> None:
    far, tensor = torch.tensor(1e9), torch.Tensor
    changes: list[Callable[[tensor], tensor]] = [
        lambda image: torch.nextafter(image, far),  # all in one direction, which is worse than any rounding
        lambda image: torch.nextafter(torch.nextafter(image, far), far),
        lambda image: image * (1 + (torch.rand_like(image) - 0.5) * 4e-7),
    ]
    for change in changes:
        assert lines(presented(images(40)), presented(images(40, change=change))) == []


def test_one_pixel_that_differs_by_one_step_of_255_does_not() -> None:
    def brighter(image: Any) -> Any:
        image[20, 20] += 1 / 255 / 0.3081
        return image

    (line,) = lines(presented(images(40)), presented(images(40, change=brighter)))
    assert line.startswith("samples of train: sample 0: checksums ")


def test_a_step_of_255_is_seen_in_a_large_image_too_and_rounding_is_not() -> None:
    def large(change: float = 0.0, rounding: float = 0.0) -> Any:
        generator = torch.Generator().manual_seed(0)
        image = torch.randn(3, 512, 512, generator=generator)
        image[1, 300, 300] += change
        return Listed([image * (1 + (torch.rand(image.shape, generator=generator) - 0.5) * rounding)])

    assert lines(presented(large()), presented(large(rounding=4e-7))) == []
    assert len(lines(presented(large()), presented(large(change=1 / 255 / 0.22)))) == 1


def test_two_numbers_that_changed_places_are_seen() -> None:
    x = torch.arange(100_000) / 7.0
    swapped = x.clone()
    for one, other in itertools.pairwise(range(5, 40)):
        swapped[[one, other]] = swapped[[other, one]]
    assert len(lines(presented(Listed([x])), presented(Listed([swapped])))) == 1


class Augmented(Listed):
    """Noise from the generators that are seeded for each sample."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)["x"] + torch.rand(3) + np.random.rand() + random.random()


class Unseeded(Listed):
    """Noise from a generator of its own."""

    def __getitem__(self, index: Any) -> Any:
        self.generator = getattr(self, "generator", None) or np.random.default_rng()
        return self.generator.random(3)


def test_seeded_noise_is_compared_and_other_noise_is_left_out() -> None:
    assert lines(presented(Augmented(rows())), presented(Augmented(rows()))) == []
    other = rows()
    other[0]["x"] = other[0]["x"] + 1
    assert len(lines(presented(Augmented(rows())), presented(Augmented(other)))) == 1
    one = presented(Unseeded(rows()))
    assert one["samples of train"].startswith("not compared: sample 0 differed when it was read again")
    assert lines(one, presented(Unseeded(rows()))) == []


def test_the_generators_are_left_as_they_were() -> None:
    def drawn() -> tuple[Any, ...]:
        return torch.rand(1).item(), np.random.rand(), random.random()

    def seed() -> None:
        torch.manual_seed(7), np.random.seed(7), random.seed(7)

    made = material(Augmented(rows()))
    seed()
    expected = drawn()
    seed()
    rank_fields(Config(), made)
    assert drawn() == expected
    assert drawn() != expected


class Batched(Listed):
    """Answers whole batches; one by one it is never asked."""

    def __getitems__(self, indices: list[int]) -> Any:
        return torch.tensor([list.__getitem__(self, index) for index in indices])

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("asked one by one")


def test_a_data_set_that_answers_batches_is_asked_for_batches() -> None:
    assert lines(presented(Batched(range(9))), presented(Batched(range(9)))) == []
    assert len(lines(presented(Batched(range(9))), presented(Batched([*range(8), 99])))) == 1


class Counting(Listed):
    def __getitem__(self, index: Any) -> Any:
        self.asked = [*getattr(self, "asked", []), index]
        return super().__getitem__(index)


@pytest.mark.parametrize("count", [1, 2, 3, 31, 32, 33, 1000])
def test_few_samples_are_read_the_first_and_the_last_among_them(count: int) -> None:
    data = Counting(rows(count))
    presented(data)
    asked = data.asked[::2]
    assert asked == data.asked[1::2], "each twice"
    assert len(asked) == len(set(asked)) == min(count, 32)
    assert {0, count - 1} <= set(asked)
    quarter = sorted(asked[:9])
    assert count < 32 or max(b - a for a, b in itertools.pairwise(quarter)) <= count / 5, "any beginning is spread"


def clock(*times: float) -> Callable[[], float]:
    ticks: Iterator[float] = itertools.chain(times, itertools.repeat(1e9))
    return lambda: next(ticks)


def test_a_slow_data_set_is_asked_less_and_still_compared() -> None:
    slow, other = Counting(rows(1000)), rows(1000)
    few = rank_fields(Config(), material(slow), now=clock(0.0, 1.0, 2.0))
    assert len(slow.asked) // 2 == 4
    assert lines(few, presented(rows(1000))) == []
    other[999]["y"] += 1
    assert len(lines(few, presented(other))) == 1


# Files of the data


def written(folder: Path, content: bytes, name: str = "shard.bin") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


def with_files(*files: Any) -> Any:
    data = rows()
    data.files = list(files)
    return data


@pytest.mark.parametrize("at", [0, 4095, 20_000, 49_999])
def test_one_changed_byte_of_a_file_is_named_with_the_file(tmp_path: Path, at: int) -> None:
    content = bytes(50_000)
    changed = content[:at] + b"\1" + content[at + 1 :]
    one, same = written(tmp_path / "a", content), written(tmp_path / "b", content)
    other = written(tmp_path / "c", changed)
    assert lines(presented(with_files(one)), presented(with_files(str(same)))) == []
    (line,) = lines(presented(with_files(one)), presented(with_files(other)))
    assert line.startswith("files of train: shard.bin 50000 bytes, ")
    assert "; shard.bin 50000 bytes, " in line


def test_of_a_large_file_blocks_are_read_the_first_and_the_last_among_them(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(1 << 33)  # without content on the disk
    before = presented(with_files(path))
    for at in ((1 << 33) - 1, 0):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"\1")
        after = presented(with_files(path))
        assert len(lines(before, after)) == 1
        before = after


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("shard.bin", bytes(9), "shard.bin 10 bytes, 01d448afd928 on labA; shard.bin 9 bytes, "),
        ("other.bin", bytes(10), "shard.bin 10 bytes, 01d448afd928 on labA; other.bin 10 bytes, 01d448afd928 on labB"),
    ],
    ids=["size", "name"],
)
def test_size_and_name_of_a_file_count(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    one, other = written(tmp_path / "a", bytes(10)), written(tmp_path / "b", content, name)
    (line,) = lines(presented(with_files(one)), presented(with_files(other)))
    assert expected in line


def test_a_file_that_one_lacks_and_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    one, other = written(tmp_path / "a", b"1"), written(tmp_path / "b", b"2")
    text = presented(with_files(other, one))["files of train"]
    assert [line.partition(": ")[0] for line in text.split("\n")] == ["shard.bin", "shard.bin (2)"]
    assert text == presented(with_files(one, other))["files of train"]
    (line,) = lines(presented(with_files(one)), presented(with_files(tmp_path / "gone/shard.bin")))
    assert line.endswith("; shard.bin cannot be read (no such file) on labB")


def test_of_a_thousand_files_some_are_read(tmp_path: Path) -> None:
    names = [tmp_path / f"{number:05}.bin" for number in range(1000)]
    text = presented(with_files(*names))["files of train"]
    assert len(text.split("\n")) <= 129
    other = presented(with_files(*names[:-1], tmp_path / "stranger.bin"))["files of train"]
    assert text.split("\n")[-1] != other.split("\n")[-1]


@pytest.mark.parametrize("files", [lambda: [], "a.bin", 7, [7], {"a": "b"}])
def test_files_that_mean_something_else_are_not_compared(files: Any) -> None:
    data = rows()
    data.files = files
    text = presented(data)["files of train"]
    assert text == "not compared: Listed.files is no list of paths"


# Code

CODE = """
from helper import RATE
from hetseq import Task
from tests.support.base_tasks import OverBase

class Base(Task):
    pass

class Mine(Base):
    rate = RATE
"""


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch, *, code: str = CODE, helper: str = "RATE = 1\n") -> Fields:
    """What a rank presents whose task lies in `folder`, with a module beside it."""
    file = written(folder, code.encode(), "mine.py")
    written(folder, helper.encode(), "helper.py")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(sys, "dont_write_bytecode", True)
        before = set(sys.modules)
        try:
            kind = registry.find_task(f"{file}:Mine")
            return presented(task=make_task(kind, Config()), has_code=True)
        finally:
            for name in set(sys.modules) - before:
                del sys.modules[name]


def test_one_changed_byte_of_the_task_is_named_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = loaded(tmp_path / "a", monkeypatch)
    assert one["task"] == "Mine"
    assert lines(one, loaded(tmp_path / "b", monkeypatch)) == [], "the path may differ"
    said = lines(one, loaded(tmp_path / "c", monkeypatch, code=CODE + "# \n"))
    assert said[0].startswith("source of the task: mine.py ")
    assert "; mine.py " in said[0]


def test_a_helper_beside_the_task_belongs_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = loaded(tmp_path / "a", monkeypatch)
    (line,) = lines(one, loaded(tmp_path / "b", monkeypatch, helper="RATE = 2\n"))
    assert line.startswith("modules of the task: helper.py ")


def test_another_task_is_named_and_a_class_without_a_file_is_said_to_have_none() -> None:
    nowhere = type("Nowhere", (Plain,), {"__module__": "typed_in"})
    fields = presented(task=make_task(nowhere, Config()), has_code=True)
    assert "Nowhere: defined in no file" in fields["source of the task"]
    said = lines(presented(has_code=True), fields)
    assert said[0] == "task: Plain on labA; Nowhere on labB"


def test_another_version_of_a_package_that_the_model_comes_from_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_version(version: str) -> Fields:
        monkeypatch.setitem(sys.modules, "somebodys", SimpleNamespace(__version__=version))
        net = type("Net", (nn.Linear,), {"__module__": "somebodys.net"})(3, 2)
        net.load_state_dict(material().model.state_dict())
        return presented(model=net, has_code=True)

    one = with_version("1.0+cpu")
    assert lines(one, with_version("1.0+cu126")) == []
    assert lines(one, with_version("1.1")) == ["packages of the task: somebodys 1.0 on labA; somebodys 1.1 on labB"]


# MNIST


def test_mnist_names_its_files_and_a_changed_byte_of_them(tmp_path: Path, mnist_data: Path) -> None:
    """Real data; the copies are links to the bytes but for one file."""
    genuine = presented(valid=load_mnist(mnist_data, "test"))
    assert lines(genuine, genuine) == []
    for path in mnist_data.iterdir():
        (tmp_path / path.name).symlink_to(path)
    labels = tmp_path / "t10k-labels-idx1-ubyte.gz"
    content = bytearray(labels.read_bytes())
    labels.unlink()
    content[4] ^= 1  # the time in gzip's header: the labels are the same
    labels.write_bytes(content)
    (line,) = lines(genuine, presented(valid=load_mnist(tmp_path, "test")))
    assert line.startswith("files of valid: t10k-labels-idx1-ubyte.gz 4542 bytes, ")


def test_mnist_sees_one_changed_byte_of_a_pixel_in_a_sample(mnist_data: Path) -> None:
    one, other = load_mnist(mnist_data, "test"), load_mnist(mnist_data, "test")
    other.images[9999, 14, 14] ^= 1
    (line,) = lines(presented(one), presented(other))
    assert line.startswith("samples of train: sample 9999: checksums ")


# Data in parts.


def named(files: list[Any], count: int = ROWS) -> Any:
    data = rows(count)
    data.files = files
    return data


BY_HOST = Config(data=DataConfig(data_by_host=True, global_batch_size=8))


def test_with_data_by_host_other_training_data_are_no_disagreement_and_other_validation_data_are() -> None:
    one, other = presented(rows(50), config=BY_HOST), presented(rows(40), config=BY_HOST)
    assert one[PART] != other[PART]
    assert lines(one, other) == []
    assert lines(presented(rows(50)), presented(rows(40)))[0].startswith("length of train")  # the twin
    one, other = (presented(valid=rows(count), config=BY_HOST) for count in (50, 40))
    assert lines(one, other)[0].startswith("length of valid")


def test_a_vocabulary_that_differs_is_named_in_any_case() -> None:
    def with_vocabulary(digest: str) -> Any:
        data = rows()
        data.vocabulary_digest = digest
        return data

    one, other = (presented(with_vocabulary(digest), config=BY_HOST) for digest in ("aa", "bb"))
    assert lines(one, other) == ["vocabulary of train: aa on labA; bb on labB"]


def test_parts_are_told_by_their_files_else_by_their_samples(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "part", tmp_path / "b" / "part"
    for path, text in ((first, "one"), (second, "two")):
        path.parent.mkdir()
        path.write_text(text)
    digests = [data_digest(data, 7) for data in (rows(), rows(), rows(40), named([first]), named([second]), named([]))]
    assert digests[0] == digests[1] == digests[5]
    assert len(set(digests)) == 4
    second.write_text("one")
    assert data_digest(named([first]), 7) == data_digest(named([second]), 7), "the same file elsewhere"


def test_a_folder_in_files_does_not_make_two_parts_one(tmp_path: Path) -> None:
    (tmp_path / "measured").mkdir()
    for path in (tmp_path / "measured", tmp_path / "gone"):
        with pytest.raises(DataError, match=f"`files` of Listed names {path.name}, which cannot be read .*no folders"):
            data_digest(named([path]), 7)


def test_a_number_that_differs_in_its_last_bit_is_another_part() -> None:
    data = rows()
    data[0] = {**data[0], "x": torch.nextafter(data[0]["x"], torch.tensor(9.0))}
    assert data_digest(data, 7) != data_digest(rows(), 7)


def test_data_that_cannot_be_told_from_others_are_refused_with_data_by_host() -> None:
    class Fresh(Listed):
        def __getitem__(self, index: Any) -> Any:
            return {"x": torch.tensor(next(numbers))}

    numbers = itertools.count()
    with pytest.raises(DataError, match="Fresh names no `files`, and its sample 0 differed when it was read"):
        data_digest(Fresh([1, 2]), 7)
    with pytest.raises(
        DataError, match="Listed names no `files`, and its sample 0 is made of objects of unknown kinds"
    ):
        data_digest(Listed([object()]), 7)


class Broken(list):  # type: ignore[type-arg]
    """A data set whose last sample cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        if index == len(self) - 1:
            raise KeyError("label")
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("parts", "name"),
    [({"data": Broken(rows())}, "the training data"), ({"valid": Broken(rows(9))}, "valid")],
)
def test_a_sample_that_cannot_be_read_is_named_with_its_split(parts: dict[str, Any], name: str) -> None:
    with pytest.raises(KeyError) as caught:
        presented(**parts)
    count = len(next(iter(parts.values())))
    assert f"sample {count - 1} of {name}: KeyError: 'label'" in (summary(caught.value) or "")
