"""DeepSpeed saves through `hetseq.nebula`: a checkpoint engine.

Responsible for: mapping the files of a DeepSpeed checkpoint to names in a tag, none of them a pickle.
Does not know what DeepSpeed saves, except that a few kinds of objects are turned into plain values. The one
idea: DeepSpeed finds the files to load by listing a folder, so there is a small file for each name that says where
its content is.

    engine, *_ = deepspeed.initialize(...)
    attach(engine, persistent_time_interval=100)
    engine.save_checkpoint("runs/a")
    load_latest(engine, "runs/a")

`latest`, a file of DeepSpeed's own, is written before a tag is on disk; after a kill it may name an incomplete tag.
`load_latest` uses the newest complete one.
"""

from __future__ import annotations

import enum
import importlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hetseq.nebula as nm
from hetseq.errors import CheckpointRefused
from hetseq.nebula import api as facade
from hetseq.system.files import publish, read_bounded

_module = importlib.import_module("deepspeed.runtime.checkpoint_engine.checkpoint_engine")
_CheckpointEngine: Any = _module.CheckpointEngine

_STANDS_FOR = "hetseq.nebula"  # key of the small files
_SMALL_FILE_LIMIT = 1 << 16  # bytes
#: objects in DeepSpeed's states that consist of their attributes alone
_KNOWN = {
    "LossScaler": "deepspeed.runtime.fp16.loss_scaler",
    "DynamicLossScaler": "deepspeed.runtime.fp16.loss_scaler",
    "fragment_address": "deepspeed.utils.tensor_fragment",
}
_OBJECT = "hetseq.nebula.object"
_PLAIN = (bool, int, float, str, type(None), torch.Tensor, torch.dtype)


class NebulaCheckpointEngine(_CheckpointEngine):  # type: ignore[misc]
    """Saves what DeepSpeed saves as a tag, in the background; every rank saves its own names.

    Tags go to the place of `hetseq.nebula.init`, or without it to the folder of `save_checkpoint`, with `options` for
    `init`. Every rank makes the same calls, as DeepSpeed does.
    """

    def __init__(self, config_params: Any | None = None, **options: Any) -> None:
        super().__init__(config_params)
        self.name = "NebulaCheckpointEngine"
        self._options = options
        self._folder = Path()
        self._checkpoint: nm.Checkpoint | None = None

    def create(self, info: Any) -> None:
        """Create the tag of a `CheckpointCommitInfo`; collective."""
        root = Path(info.save_dir).absolute()
        if facade.place() is None:
            nm.init(root, **self._options)
        self._folder = root / str(info.tag)
        self._checkpoint = nm.Checkpoint(str(info.tag), -2)

    def save(self, state_dict: Any, path: str) -> None:
        """Copy what DeepSpeed would write to `path`. TypeError names the path of a value that cannot be saved."""
        assert self._checkpoint is not None, "DeepSpeed creates a checkpoint before it saves"
        name = os.path.relpath(Path(path).absolute(), self._folder)
        self._checkpoint.save(name, plain(state_dict))
        stands_for = {_STANDS_FOR: {"place": str(facade.place()), "tag": self._checkpoint.tag, "name": name}}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        publish(Path(path), json.dumps(stands_for).encode() + b"\n")

    def load(self, path: str, map_location: Any | None = None) -> Any:
        """The state that was saved for `path`, verified. CheckpointRefused for a file not written by this engine."""
        about = _read_small(Path(path))
        device = map_location if isinstance(map_location, (str, torch.device)) else None
        moved = Path(path).absolute().parent.parent  # a run that was copied elsewhere
        for place in (Path(about["place"]), moved):
            found = nm.get_checkpoint(about["tag"], place)
            if found.tag:
                return revived(found.load(about["name"], device))
        raise CheckpointRefused(f"{path}: the tag {about['tag']!r} is not complete in {about['place']}: load_latest")

    def commit(self, info: Any) -> bool:
        """Complete this rank's names; returns True. Does not wait for the disk."""
        assert self._checkpoint is not None, "DeepSpeed creates a checkpoint before it commits"
        if self._checkpoint.names or facade.service().is_shared:
            self._checkpoint.commit()
        return True

    def cleanup(self) -> None:
        """Wait until everything is on disk."""
        nm.flush_persistence()

    def preserves_storage_sharing(self) -> bool:
        """False: a view takes only its own bytes here, so DeepSpeed need not clone it first."""
        return False


def attach(engine: Any, **options: Any) -> NebulaCheckpointEngine:
    """Have a DeepSpeedEngine save and load through `hetseq.nebula`; `options` are those of `init`."""
    engine.checkpoint_engine = NebulaCheckpointEngine(None, **options)
    return engine.checkpoint_engine  # type: ignore[no-any-return]


def load_latest(engine: Any, load_dir: str | os.PathLike[str], **options: Any) -> Any:
    """`engine.load_checkpoint` of the newest tag that is complete and verifies; (None, None) if there is none."""
    place = facade.place()
    latest = nm.get_latest_checkpoint(place if place is not None else load_dir)
    if not latest.tag:
        return None, None
    return engine.load_checkpoint(os.fspath(load_dir), tag=latest.tag, **options)


def plain(value: Any) -> Any:
    """A state as plain values: enumerations by value, NumPy numbers as Python numbers, known objects by attributes.

    Subclasses of dictionaries and lists become Python's own. `save` accepts or refuses the result.
    """
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if type(value) in (torch.Size, set):
        return value
    if isinstance(value, OrderedDict):
        items = OrderedDict((key, plain(item)) for key, item in value.items())
        items.__dict__.update(getattr(value, "__dict__", {}))  # the versions of a module's layers
        return items
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if _KNOWN.get(type(value).__name__) == type(value).__module__:
        return {_OBJECT: type(value).__name__, "attributes": plain(dict(vars(value)))}
    item: Callable[[], Any] | None = getattr(value, "item", None)  # NumPy's scalars
    return item() if item is not None and getattr(value, "ndim", None) == 0 else value


def revived(value: Any) -> Any:
    """The inverse of `plain`, except for values that became Python's own types."""
    if isinstance(value, dict) and value.get(_OBJECT) in _KNOWN:
        name = value[_OBJECT]
        kind = getattr(importlib.import_module(_KNOWN[name]), name)
        known = object.__new__(kind)
        known.__dict__.update(revived(value["attributes"]))
        return known
    if type(value) is OrderedDict:
        revived_items = OrderedDict((key, revived(item)) for key, item in value.items())
        revived_items.__dict__.update(value.__dict__)
        return revived_items
    if type(value) is dict:
        return {key: revived(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(revived(item) for item in value)
    return value


def _read_small(path: Path) -> dict[str, str]:
    """The tag and name that a small file refers to."""
    try:
        about = json.loads(read_bounded(path, _SMALL_FILE_LIMIT))[_STANDS_FOR]
        if all(isinstance(about[key], str) for key in ("place", "tag", "name")):
            return dict(about)
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        pass
    raise CheckpointRefused(f"{path} was not saved by this engine; it may be a pickle, which is never opened")
