"""`tasks.X` and `preprocessing.X`, the short names of `hetseq.tasks.X` and `hetseq.preprocessing.X`.

Responsible for one module object under both names, so that nothing is registered or compiled twice. A module or package
of that name from elsewhere is left alone: HetSeq itself never uses the short names. A checkout has both folders at its
top, where Python may find them before HetSeq is imported; their `__init__` then substitutes the long name.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import cast

_SHORT = ("tasks", "preprocessing")


def install() -> None:
    """Let the short names be imported from now on; may be called twice."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # before the finder that would load a file a second time


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        top, _, rest = name.partition(".")
        if top not in _SHORT:
            return None
        if rest and sys.modules.get(top) is not sys.modules.get(f"hetseq.{top}"):
            return None
        ours = importlib.util.find_spec(f"hetseq.{name}")
        if ours is None:
            return None
        if not rest:
            others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            other = next((spec for spec in others if spec is not None), None)
            if other is not None and not _is_same_file(other.origin, ours.origin):
                return other
        return ModuleSpec(name, _Loader(ours), origin=ours.origin, is_package=_is_package(ours))


class _Loader(InspectLoader):
    """Returns the module with the long name."""

    def __init__(self, found: ModuleSpec) -> None:
        self._found = found

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._found.name)
        self._own = module.__spec__  # importlib gives the module the spec of the short name
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m`."""
        return cast(InspectLoader, self._found.loader).get_code(self._found.name)

    def get_source(self, fullname: str) -> str | None:
        return cast(InspectLoader, self._found.loader).get_source(self._found.name)

    def is_package(self, fullname: str) -> bool:
        return _is_package(self._found)


def _is_package(spec: ModuleSpec) -> bool:
    return spec.submodule_search_locations is not None


def _is_same_file(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and os.path.realpath(one) == os.path.realpath(other)
