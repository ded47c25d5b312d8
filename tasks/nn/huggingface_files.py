"""Reads the tensors of a Hugging Face directory by name, from any of its file formats.

Responsible for finding the files, reading one tensor at a time, and errors that name directory, file and tensor; knows
no network. Never unpickles objects: a `pytorch_model.bin` is opened with `weights_only=True`, which loads tensors only.
The one idea: an index maps each tensor to its file; without an index, a single file lists its own tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hetseq import DataError
from hetseq.tasks.nn.init_from import find_weights
from hetseq.tasks.nn.model_config import read_object, wrong

_INDEX = 'an index such as {"weight_map": {"TENSOR": "model-00001-of-00002.safetensors", ...}}'


class TensorFiles:
    """The tensors of a directory. `names` maps each tensor to its file."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self.folder = folder
        self._opened = opened
        self._safe: dict[Path, Any] = {}
        self._last: tuple[Path, Mapping[str, Tensor]] | None = None  # the last of the files that are read whole
        self.names = self._find()

    def read(self, name: str) -> Tensor:
        """The tensor of that name, on the CPU. Raises DataError if it is unreadable or not floating-point."""
        path = self.names[name]
        try:
            tensor = self._open(path).get_tensor(name) if _is_safe(path) else self._load(path)[name]
        except (SafetensorError, KeyError) as error:
            raise DataError(f"{path}: the tensor {name} cannot be read: {error}; copy the file again") from error
        if not tensor.is_floating_point():
            raise DataError(
                f"{path}: the tensor {name} is {tensor.dtype}: expected floats of 16, 32 or 64 bits; dequantise the"
                " weights first"
            )
        return tensor

    def _find(self) -> dict[str, Path]:
        found = find_weights(self.folder)
        if found.suffix != ".json":
            return dict.fromkeys(self._names_in(found), found)
        files = _files_of(found)
        inside = {path: self._names_in(path) for path in sorted(set(files.values()))}
        for name, path in files.items():
            if name not in inside[path]:
                raise DataError(f"{path} has no tensor {name}, although {found.name} lists it there")
        return files

    def _names_in(self, path: Path) -> set[str]:
        if not path.is_file():
            raise DataError(f"{path} does not exist, but the index of {self.folder} names it: copy all files")
        return set(self._open(path).keys() if _is_safe(path) else self._load(path))

    def _open(self, path: Path) -> Any:
        if path not in self._safe:
            try:
                self._safe[path] = self._opened.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise DataError(f"{path} is not a safetensors file: {error}; copy it again") from error
        return self._safe[path]

    def _load(self, path: Path) -> Mapping[str, Tensor]:
        if self._last is not None and self._last[0] == path:
            return self._last[1]
        self._last = None
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged bytes can make it raise almost anything
            raise DataError(
                f"{path} cannot be read as tensors alone ({str(error).partition('. ')[0] or 'it ends too early'}):"
                " expected the state_dict of a model; nothing else is unpickled, since it could run any code"
            ) from error
        if not isinstance(found, Mapping) or not all(isinstance(each, Tensor) for each in found.values()):
            raise DataError(f"{path} does not hold named tensors: expected the state_dict of a model")
        self._last = path, found
        return found


def _is_safe(path: Path) -> bool:
    return path.suffix == ".safetensors"


def _files_of(index: Path) -> dict[str, Path]:
    """The file of each tensor, from an index file. Raises DataError."""
    try:
        found = read_object(index, _INDEX).get("weight_map")
        if not isinstance(found, dict) or not found:
            raise DataError(wrong("weight_map", found, _INDEX))
        for name, file in found.items():
            # a path could lead out of the directory
            if (
                not isinstance(file, str)
                or Path(file).name != file
                or Path(file).suffix not in (".safetensors", ".bin")
            ):
                raise DataError(wrong(f"the file of {name}", file, "the name of a file of weights beside the index"))
    except DataError as error:
        raise DataError(f"{index}: {error}") from error
    return {name: index.parent / file for name, file in found.items()}


@contextmanager
def tensor_files(folder: Path) -> Iterator[TensorFiles]:
    """The tensors of a directory, open until the end of the block. Raises DataError."""
    with ExitStack() as opened:
        yield TensorFiles(folder, opened)
