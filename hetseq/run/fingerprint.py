"""The facts about a run that no option states: the task's code, the model's parameters, the content of the data.

Responsible for texts by which two ranks notice that they would train different things; `cluster.contract` compares
the texts and knows their forms. It refuses to move data or to judge: it reads a few samples, twice each, and leaves
every random number generator as it was.

The one idea: exact facts (integers, text, bytes, files) become a digest. Floating-point numbers are not exact between
unequal machines, so they become three numbers: two sums with random signs, and the norm. Rounding errors add up in such
a sum like a random walk, to about 1e-7 of the norm for any number of values, while one value that changed enters it
undiminished: a pixel of MNIST that differs by 1 of 255 moves the sums by 5e-4 of the norm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hetseq.cluster.membership.compatibility import (
    BASE,
    DIGEST_DIGITS,
    LOSS,
    NOT_COMPARED,
    PART,
    SCRIPT,
    TENSORS,
    Fields,
    digest,
    file_state,
    is_same_sample,
    listed,
    listed_files,
    option_fields,
    printable,
)
from hetseq.config.sections import Config
from hetseq.data.fetch import TRAINING_DATA, base_order, samples_in_words, seed_everything
from hetseq.data.lanes import lanes_of
from hetseq.data.plan import derive_seed, epoch_order
from hetseq.errors import DataError
from hetseq.parallel.delayed_init import is_absent
from hetseq.system.task_failure import noted
from hetseq.task import lengths_of
from hetseq.training.optim import learning_rates
from hetseq.training.task_checks import LossTrial

_SAMPLES = 32
_PATIENCE_S = 3.0  # for the samples of all splits; a data set on a slow disk presents fewer of them
_BLOCK_BYTES, _MOST_BLOCKS, _LEAST_BLOCKS = 4096, 512, 2
_MOST_FILES, _MOST_PARAMETERS, _MOST_VALUES, _MOST_GROUPS = 128, 512, 4096, 64
# 8 units in the last place of a number of 32 bits, coarser where the data are: arithmetic of single precision rounds a
# few times, and rarely all in one direction
_UNITS, _EPS = 8, 2.0**-23
_INITIAL = 1e-4  # of parameters, whose initialisation may take more steps: different weights differ by far more
_SIGNS = 1 << 16
_DEEPEST = 32
_UNREADABLE = "cannot be read"
_OF_THIS_PROCESS = re.compile(r" at 0x[0-9a-f]+|,? ?device=[^,)]*")  # removed from a module's extra_repr
_KNOWN = (sys.stdlib_module_names | {"hetseq", "torch"}) - {"__main__"}

Numbers = npt.NDArray[np.float64]


class TaskToCompare(Protocol):
    """The part of `hetseq.run.loaded_task.LoadedTask` used here; `part` only with --data-by-host."""

    @property
    def task(self) -> Any: ...
    @property
    def train(self) -> Any: ...
    @property
    def valid(self) -> dict[str, Any]: ...
    @property
    def model(self) -> torch.nn.Module: ...
    @property
    def described(self) -> Mapping[str, str] | None: ...
    @property
    def trial(self) -> LossTrial: ...
    @property
    def part(self) -> str: ...
    @property
    def base(self) -> str | None: ...
    @property
    def own_loop(self) -> object | None: ...


def rank_fields(config: Config, material: TaskToCompare, *, now: Callable[[], float] = time.monotonic) -> Fields:
    """The facts that this rank presents before it meets its peers; `config` includes the user's own options.

    Raises the data set's error for a sample it cannot read, and TaskFileError for a wrong `ordered_indices`.
    """
    train, seed = material.train, config.task.seed
    fields = {
        "--lr": ",".join(repr(float(rate)).removesuffix(".0") for rate in learning_rates(config.optimization)),
        **option_fields(config.extras.values()),
        **(_task_fields(material) if material.own_loop is None else _script_fields(material)),
        **(model_fields(material.model) if material.described is None else material.described),
    }
    if material.base is not None:
        fields[BASE] = material.base
    if material.described is not None:
        fields[TENSORS] = "+".join(map(str, config.distributed.tensor_sizes()))
    deadline_s = now() + _PATIENCE_S
    with _random_numbers_kept():
        splits = dict(material.valid)
        if config.data.data_by_host:  # then each host is meant to have another part
            fields[PART] = material.part
        else:
            is_divided = material.described is not None
            fields[LOSS] = _DIVIDED if is_divided else _losses(material.trial, material.model)
            fields.update(_order_fields(train, config))
            splits[config.data.train_subset] = train
        if (vocabulary := getattr(train, "vocabulary_digest", None)) is not None:
            fields[f"vocabulary of {config.data.train_subset}"] = str(vocabulary)
        for split, dataset in splits.items():
            name = TRAINING_DATA if dataset is train else split
            fields[f"length of {split}"] = f"{len(dataset)} samples"
            if (lanes := lanes_of(dataset)) is not None:
                fields[f"own order of {split}"] = lanes.in_words()
            fields[f"samples of {split}"] = _content(dataset, seed, lambda: now() > deadline_s, name)
            if hasattr(dataset, "files"):
                fields[f"files of {split}"] = _data_files(dataset)
    return fields


def data_digest(dataset: Any, seed: int) -> str:
    """Equal on two ranks of one host that read the same data, and different otherwise.

    Covers the files that the data set names, or else a few samples to the last bit. Raises DataError if neither is
    possible, and for a path that is not a file, such as a folder; and any error that the data set raises for a sample.
    """
    if lanes_of(dataset) is not None:
        raise DataError(
            "--data-by-host divides data by their index, and Lanes are read in an order of their own: leave the option"
            " out; every rank opens the lanes of its share alone"
        )
    base = base_order(dataset)
    entries = [str(len(dataset)), "" if base is None else digest(base.astype("<i8").tobytes())]
    files = _data_files(dataset) if hasattr(dataset, "files") else "none"
    if files == "none" or files.startswith(NOT_COMPARED):
        with _random_numbers_kept():
            files = _exact_content(dataset, seed)
    for entry in files.split("\n"):
        name, _, state = entry.rpartition(": ")
        if state.startswith(_UNREADABLE):  # another file of that name would give the same digest
            raise DataError(
                f"--data-by-host must know which ranks read the same data: `files` of {type(dataset).__name__} names"
                f" {name}, which {state}: expected the paths of the files it reads, no folders"
            )
    return digest("\0".join([*entries, files]).encode())


# Code


def _script_fields(material: TaskToCompare) -> Fields:
    """The script with a loop of its own, and the modules beside it that it has imported."""
    path, modules = _file_of("__main__"), {"__main__", *_modules_of(material.train, *material.model.modules())}
    return {
        SCRIPT: NOT_COMPARED if path is None else listed_files([(path.name, file_state(path))]),
        "modules of the script": listed_files(_modules_beside(modules)),
        "packages of the script": listed_files(_packages(modules)),
    }


def _task_fields(material: TaskToCompare) -> Fields:
    """The files of the task's class and of its bases, and the user's other code in a run."""
    modules = _modules_of(material.task, material.train, *material.model.modules())
    own = [kind for kind in type(material.task).__mro__ if not _is_known(kind.__module__)]
    return {
        "task": type(material.task).__qualname__,
        "source of the task": listed_files({_place_of(kind) for kind in own}),
        "modules of the task": listed_files(_modules_beside(modules)),
        "packages of the task": listed_files(_packages(modules)),
    }


def _modules_of(*used: Any) -> set[str]:
    """The names of the user's modules that define the classes of these objects."""
    return {kind.__module__ for thing in used for kind in type(thing).__mro__ if not _is_known(kind.__module__)}


def _is_known(module: str) -> bool:
    """Whether a version or a digest of its own identifies its content."""
    return module.partition(".")[0] in _KNOWN


def _place_of(kind: type) -> tuple[str, str]:
    path = _file_of(kind.__module__)
    return (kind.__qualname__, "defined in no file") if path is None else (path.name, file_state(path))


def _file_of(module: str) -> Path | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return None if file is None else Path(os.path.abspath(file))


def _is_installed(path: Path) -> bool:
    """Whether it belongs to an installed package, identified by its version."""
    return "site-packages" in path.parts or "dist-packages" in path.parts


def _modules_beside(names: Iterable[str]) -> set[tuple[str, str]]:
    """Every module that was imported from the folders of these, by its path there, with its state.

    A helper beside the task's file belongs to the task, whether one of its classes is in use or not.
    """
    roots = set()
    main = getattr(sys.modules["__main__"], "__spec__", None)  # of a script that was started by -m
    for name in names:
        path, name = _file_of(name), main.name if name == "__main__" and main is not None else name
        if path is not None and not _is_installed(path):
            top = _file_of(name.partition(".")[0]) if "." in name else None
            roots.add((top or path).parent)
    found = set()
    # the main module is the started program, which may differ from rank to rank
    for name in [
        name for name in tuple(sys.modules) if not _is_known(name) and name not in ("__main__", "__mp_main__")
    ]:
        path = _file_of(name)
        if path is not None and path.suffix == ".py" and not _is_installed(path):
            found |= {(path.relative_to(root).as_posix(), path) for root in roots & set(path.parents)}
    return {(name, file_state(path)) for name, path in found}


def _packages(names: Iterable[str]) -> set[tuple[str, str]]:
    """Versions of installed packages that define classes of the task, its data and its model."""
    found = set()
    for name in {name.partition(".")[0] for name in names}:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found.add((name, version.partition("+")[0]))
    return found


# The model


def model_fields(model: torch.nn.Module) -> Fields:
    """The facts about a model that ranks compare."""
    named = list(model.named_parameters())
    step = max(1, -(-len(named) // _MOST_PARAMETERS))
    return {
        "parameters": listed(
            f"{_described(name, tensor)}{'' if tensor.requires_grad else ', frozen'}" for name, tensor in named
        ),
        "buffers": listed(_described(name, tensor) for name, tensor in model.named_buffers()) or "none",
        "modules": listed(f"{name or 'the model'}: {_settings(module)}" for name, module in model.named_modules()),
        "initial values": listed(
            f"{name}: {'drawn later' if is_absent(tensor) else _initial(tensor)}" for name, tensor in named[::step]
        ),
    }


def _settings(module: torch.nn.Module) -> str:
    """A module's type and settings, such as a dropout rate, without its address in memory and its device."""
    try:
        words = module.extra_repr()
    except Exception:  # the user's code may raise anything
        words = ""
    return f"{type(module).__name__}({_OF_THIS_PROCESS.sub('', words)})"


def _described(name: str, tensor: torch.Tensor) -> str:
    return f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _initial(*tensors: torch.Tensor) -> str:
    reading = _Reading()
    for number, tensor in enumerate(tensors):
        flat = tensor.detach().reshape(-1)
        reading.take(flat[:: max(1, -(-flat.numel() // _MOST_VALUES))], str(number or ""))
    return reading.text(at_least=_INITIAL)


#: the model is tried when its ranks have met
_DIVIDED = f"{NOT_COMPARED}: ranks divide the model, and each has a part"


def _losses(trial: LossTrial, model: torch.nn.Module) -> str:
    """The loss of each term; and the buffers, which all ranks take from rank zero before the first step."""
    if not trial.means:
        return f"{NOT_COMPARED}: of the first two samples no term of the loss was the same alone and together"
    relative, absolute = trial.tolerance
    terms = (f"{term}: {relative:.3g} {absolute:.3g} {mean:.10g}" for term, mean in trial.means.items())
    buffers = [buffer for buffer in model.buffers() if buffer.layout == torch.strided and not buffer.is_quantized]
    return listed([f"buffers: {_initial(*buffers)}", *terms])


# The data


def _order_fields(train: Any, config: Config) -> Fields:
    """Which samples training takes first, by their indices in the data set, and the lengths of some."""
    split, count = config.data.train_subset, len(train)
    base, is_shuffled = base_order(train), config.data.curriculum < 1 and lanes_of(train) is None
    order = epoch_order(count, seed=config.task.seed, epoch=1, shuffle=is_shuffled, block=config.data.shuffle_block)
    first = order.take(0, min(_SAMPLES, count))
    fields = {f"order of {split}": listed(str(index) for index in (first if base is None else base[first]))}
    fields[f"own order of {split}"] = "0, 1, 2, ..." if base is None else digest(base.astype("<i8").tobytes())
    indices = np.array(sorted(_spread(count)), np.int64)
    # only --max-tokens needs the lengths, and then the session reports errors in them
    with contextlib.suppress(Exception):
        lengths = lengths_of(train)
        if lengths is not None:
            told = lengths(indices).tolist()
            fields[f"lengths of {split}"] = listed(f"sample {i} has {n}" for i, n in zip(indices.tolist(), told))
    return fields


def _content(dataset: Any, seed: int, is_late: Callable[[], bool], name: str) -> str:
    """A few samples, an entry each, or the reason why they cannot be compared; `name` is that of the data in errors."""
    entries: list[str] = []
    skipped, told = set[str](), 0
    lanes = lanes_of(dataset)  # of a stream only beginnings
    copies = (dataset, dataset) if lanes is None else (lanes.apart(), lanes.apart())
    for index in _spread(len(dataset)) if lanes is None else lanes.indices_to_compare():
        if len(entries) > 1 and is_late():
            break
        first, second = (_read(copy, index, seed, name) for copy in copies)
        entry = f"sample {index}: {first.text()}"
        if not is_same_sample(entry, f"sample {index}: {second.text()}"):
            return f"{NOT_COMPARED}: sample {index} differed when it was read again with the same seed"
        entries.append(entry)
        skipped |= first.skipped
        told += first.leaves
    if not told:
        return f"{NOT_COMPARED}: samples are made of {printable(', '.join(sorted(skipped))) or 'nothing'}"
    return listed(entries)


def _read(dataset: Any, index: int, seed: int, name: str) -> _Reading:
    seed_everything(derive_seed(seed, 1, index))
    read = functools.partial(_sample, dataset)
    sample = noted(read, samples_in_words([index], name))(index)
    reading = _Reading()
    reading.take(sample, "")
    return reading


def _sample(dataset: Any, index: int) -> Any:
    return dataset.__getitems__([index]) if hasattr(dataset, "__getitems__") else dataset[index]


def _exact_content(dataset: Any, seed: int) -> str:
    """A digest of a few samples to the last bit, which only the same kind of machine reproduces."""
    whole = hashlib.sha256()
    for index in _spread(len(dataset)):
        first, second = (_read(dataset, index, seed, TRAINING_DATA) for _ in range(2))
        if not first.leaves or first.exact() != second.exact():
            why = "differed when it was read again" if first.leaves else "is made of objects of unknown kinds"
            raise DataError(
                f"--data-by-host must know which ranks read the same data: {type(dataset).__name__} names no `files`,"
                f" and its sample {index} {why}: give it `files`, the list of paths it reads"
            )
        whole.update(first.exact())
    return whole.hexdigest()[:DIGEST_DIGITS]


def _spread(count: int) -> list[int]:
    """Up to 32 indices from the first to the last, ordered so that any beginning of the list is evenly spread too."""
    indices = np.unique(np.linspace(0, count - 1, min(count, _SAMPLES)).round().astype(np.int64)).tolist()
    inner = sorted(range(1, len(indices) - 1), key=lambda at: f"{at:05b}"[::-1])
    return [indices[at] for at in dict.fromkeys([0, len(indices) - 1, *inner])]


@contextlib.contextmanager
def _random_numbers_kept() -> Iterator[None]:
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)


class _Reading:
    """One sample as text. `leaves` counts the values understood, `skipped` names the types of the others."""

    def __init__(self) -> None:
        self.leaves = 0
        self.skipped: set[str] = set()
        self._exact = hashlib.sha256()
        self._numbers: list[tuple[float, Numbers]] = []  # tolerance, (n,)

    def take(self, item: Any, path: str, depth: int = 0) -> None:
        """Add a part of a sample; `path` is its place in the sample."""
        children = _children(item)
        if children is not None and depth < _DEEPEST:
            self._add(path, f"{len(children)} parts", b"")
            for key, child in children:
                self.take(child, f"{path}/{key}", depth + 1)
            return
        leaf = _leaf(item) if children is None else None
        if leaf is None:
            self.skipped.add(type(item).__qualname__)
            return
        self.leaves += 1
        kind, content, eps = leaf
        if isinstance(content, bytes):
            self._add(path, kind, content)
        else:
            wrong = ~np.isfinite(content)
            self._add(path, kind, repr([(int(i), str(content[i])) for i in wrong.nonzero()[0]]).encode())
            self._numbers.append((_UNITS * max(eps, _EPS), np.where(wrong, 0.0, content)))

    def text(self, *, at_least: float = 0.0) -> str:
        """`DIGEST | TOLERANCE NUMBER NUMBER NORM | ...`, with the tolerance at least this."""
        groups = self._numbers
        if len(groups) > _MOST_GROUPS:
            rest = groups[_MOST_GROUPS - 1 :]
            merged = max(tolerance for tolerance, _ in rest), np.concatenate([values for _, values in rest])
            groups = [*groups[: _MOST_GROUPS - 1], merged]
        sums = [(max(tolerance, at_least), *_sums(values)) for tolerance, values in groups]
        texts = [" ".join([f"{tolerance:.3g}", *(f"{value:.10g}" for value in values)]) for tolerance, *values in sums]
        return " | ".join([self._exact.hexdigest()[:DIGEST_DIGITS], *texts])

    def exact(self) -> bytes:
        """A digest to the last bit."""
        whole = self._exact.copy()
        for _, values in self._numbers:
            whole.update(values.tobytes())
        return whole.digest()

    def _add(self, path: str, kind: str, content: bytes) -> None:
        self._exact.update(f"{path}\0{kind}\0{len(content)}\0".encode("utf-8", "surrogateescape"))
        self._exact.update(content)


def _children(item: Any) -> list[tuple[str, Any]] | None:
    """The parts of a container, with their names; None for a leaf."""
    if isinstance(item, Mapping):
        return sorted(((str(key), value) for key, value in item.items()), key=lambda entry: entry[0])
    if isinstance(item, (list, tuple)):
        plain = {type(entry) for entry in item}
        if item and (plain <= {int, bool, str, type(None)} or plain == {float}):
            return None
        return [(str(at), entry) for at, entry in enumerate(item)]
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [(field.name, getattr(item, field.name, None)) for field in dataclasses.fields(item)]
    if isinstance(item, np.ndarray) and item.dtype == object:
        return _children(item.tolist()) if item.ndim else [("0", item.item())]
    return None


#: its kind; its bytes, or its finite and other numbers (n,) as they are compared; the size of their last unit
Leaf = tuple[str, "bytes | Numbers", float]


def _leaf(item: Any) -> Leaf | None:
    """The content of a leaf; None for objects of an unknown kind."""
    if item is None or isinstance(item, (bool, int, str)):
        return "plain", f"{type(item).__name__} {item}".encode("utf-8", "surrogatepass"), 0.0
    if isinstance(item, (list, tuple)) and not isinstance(item[0], float):
        return "list", repr(list(item)).encode("utf-8", "surrogatepass"), 0.0
    if isinstance(item, (list, tuple)):
        return f"{len(item)} numbers", np.array(item, np.float64), 0.0
    if isinstance(item, Set):
        return _leaf(sorted(item)) if item and {type(entry) for entry in item} in ({int}, {str}) else None
    if isinstance(item, (bytes, bytearray, memoryview)):
        return "bytes", bytes(item), 0.0
    try:
        if isinstance(item, torch.Tensor):
            return _tensor_leaf(item.detach())
        if isinstance(item, (float, complex, np.ndarray, np.generic)) or _is_array_like(item):
            return _array_leaf(np.asarray(item))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        pass  # a tensor or array that does not expose its numbers
    return None


def _is_array_like(item: Any) -> bool:
    return hasattr(item, "__array__") or hasattr(item, "__array_interface__")


def _tensor_leaf(tensor: torch.Tensor) -> Leaf | None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point():
        values = tensor.cpu().double().numpy().reshape(-1)
        return f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch."), values, torch.finfo(tensor.dtype).eps
    return _array_leaf(tensor.cpu().numpy())


def _array_leaf(array: npt.NDArray[Any]) -> Leaf | None:
    if array.dtype.hasobject:
        return None
    kind = f"{array.dtype.name} {list(array.shape)}"
    if np.issubdtype(array.dtype, np.inexact):
        eps = float(np.finfo(array.dtype).eps)
        parts = [array.real, array.imag] if np.iscomplexobj(array) else [array]
        return kind, np.concatenate([np.asarray(part, np.float64).reshape(-1) for part in parts]), eps
    return kind, np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes(), 0.0


def _sums(values: Numbers) -> tuple[float, float, float]:
    """Two sums with random signs, and the norm."""
    sums = np.zeros(2)
    for block, start in enumerate(range(0, len(values), _SIGNS)):
        piece = values[start : start + _SIGNS]
        sums += _signs(block)[:, : len(piece)] @ piece
    return float(sums[0]), float(sums[1]), float(np.sqrt(values @ values))


@functools.lru_cache(maxsize=8)
def _signs(block: int) -> Numbers:
    """Signs (2, 65536) for the numbers of this block, the same on every machine."""
    noise = hashlib.shake_256(b"hetseq signs %d" % block).digest(2 * _SIGNS // 8)
    bits = np.unpackbits(np.frombuffer(noise, np.uint8))
    return (bits.astype(np.float64) * 2 - 1).reshape(2, _SIGNS)


# Files


def _data_files(dataset: Any) -> str:
    """Name, size and a digest of some blocks of each file that the data set names in `files`."""
    files = dataset.files
    if not isinstance(files, (list, tuple, Set)) or not all(isinstance(file, (str, os.PathLike)) for file in files):
        return f"{NOT_COMPARED}: {type(dataset).__name__}.files is no list of paths"
    paths = sorted((Path(os.fsdecode(file)).expanduser() for file in files), key=lambda path: (path.name, str(path)))
    if not paths:
        return "none"
    step = -(-len(paths) // _MOST_FILES)
    blocks = max(_LEAST_BLOCKS, _MOST_BLOCKS // min(len(paths), _MOST_FILES))
    entries = [(path.name, _file_text(path, blocks)) for path in paths[::step]]
    if step > 1:
        entries.append((f"all {len(paths)} names", digest("\0".join(path.name for path in paths).encode())))
    return listed_files(entries)


def _file_text(path: Path, blocks: int) -> str:
    try:
        if not path.is_file():
            return f"{_UNREADABLE} (no such file)"
        size = path.stat().st_size
        sampled = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            for block in _block_numbers(-(-size // _BLOCK_BYTES), blocks):
                file.seek(block * _BLOCK_BYTES)
                sampled.update(file.read(_BLOCK_BYTES))
    except OSError as error:
        return f"{_UNREADABLE} ({error.strerror or type(error).__name__})"
    return f"{size} bytes, {sampled.hexdigest()[:DIGEST_DIGITS]}"


def _block_numbers(count: int, most: int) -> list[int]:
    """The first block, the last, and others evenly between."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)).tolist() if count else []
