"""Lightning saves through `hetseq.nebula`: a CheckpointIO plugin, and Nebula's callback.

Responsible for: mapping Lightning's checkpoint files to tags: `last.ckpt` is the tag "last". Does not decide
when to save. The one idea: Lightning removes an older file as soon as `save_checkpoint` has returned, but the new
one may not be on disk by then; so a tag that Lightning removes is deleted once a newer one is on disk.

    Trainer(plugins=[NebulaCheckpointIO()], callbacks=[NebulaCallback(every_n_train_steps=100)])

Needs `lightning` or `pytorch_lightning`; if one of them is imported already, that one is used.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import hetseq.nebula as nm
from hetseq.errors import CheckpointRefused
from hetseq.nebula import api as facade
from hetseq.nebula.tags import read_commit, scan
from hetseq.system.files import COMMIT_NAME, remove_attempt

logger = logging.getLogger(__name__)


def _package() -> Any:
    """`lightning.pytorch`, or the package of the older name if that one is in use."""
    is_older = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
    for name in ("pytorch_lightning", "lightning.pytorch") if is_older else ("lightning.pytorch", "pytorch_lightning"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError("neither lightning nor pytorch_lightning is installed: pip install lightning")


_pl = _package()
_CheckpointIO: Any = importlib.import_module(f"{_pl.__name__}.plugins.io").CheckpointIO
_ModelCheckpoint: Any = importlib.import_module(f"{_pl.__name__}.callbacks").ModelCheckpoint

NAME = "checkpoint"  # the name in a tag for everything that Lightning saves


class NebulaCheckpointIO(_CheckpointIO):  # type: ignore[misc]
    """Saves the dictionary of Lightning's Trainer as a tag, in the background; rank zero alone saves.

    Tags go to the place of `hetseq.nebula.init`, or without it to the folder that Lightning names. In
    `trainer.save_checkpoint(file, storage_options={...})` "is_best" sends a tag to the disk whatever the interval, and
    "persist_path" names another place.
    """

    _chosen: Path | None = None  # the place of the last `init` that this class called itself

    def __init__(self) -> None:
        self._removed: set[tuple[Path, str]] = set()  # places and tags that Lightning has removed

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Copy the state and have it written, as the tag named after `path`."""
        options: Any = storage_options or {}
        if not isinstance(options, Mapping) or options.keys() - {"is_best", "persist_path"}:
            raise TypeError(
                f"storage_options is {storage_options!r}: expected a dictionary of is_best and persist_path"
            )
        root = self._begin(path, options.get("persist_path"))
        tag = tag_of_file(path)
        self._removed.discard((root, tag))
        nm.Checkpoint(tag, 1, is_best=bool(options.get("is_best"))).save(NAME, checkpoint)
        self._remove()

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The dictionary that was saved under this path, verified.

        `path` may also be the directory of a tag, or one with tags, whose newest is then loaded. Nothing is ever
        unpickled, so `weights_only` makes no difference. Tensors are on the CPU unless `map_location` is a device.
        FileNotFoundError if there is no such tag.
        """
        device = map_location if isinstance(map_location, (str, torch.device)) else None
        found = self._find(Path(path))
        if not found.tag:
            raise FileNotFoundError(f"{path}: no complete tag {tag_of_file(path)!r} there or in the place of init")
        state: dict[str, Any] = found.load(NAME, device)
        return state

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a tag as soon as a newer one is on disk."""
        is_chosen = facade.place() in (None, NebulaCheckpointIO._chosen)
        root = Path(path).absolute().parent if is_chosen else facade.place()
        self._removed.add((root or Path(), tag_of_file(path)))
        self._remove()

    def teardown(self) -> None:
        """Wait until everything is on disk."""
        nm.flush_persistence()
        self._remove()

    def _begin(self, path: str | os.PathLike[str], persist_path: str | os.PathLike[str] | None) -> Path:
        """The place to save to; rank zero saves by itself."""
        wanted = Path(persist_path).absolute() if persist_path is not None else None
        is_ours_to_choose = facade.place() in (None, NebulaCheckpointIO._chosen)
        if wanted is None and is_ours_to_choose:
            wanted = Path(path).absolute().parent
        if wanted is not None and wanted != facade.place():
            nm.init(wanted, together=False)
            NebulaCheckpointIO._chosen = wanted
        facade.save_alone()
        root = facade.place()
        assert root is not None
        return root

    def _find(self, path: Path) -> nm.Checkpoint:
        if path.is_file():
            raise CheckpointRefused(f"{path} is a file, and may be a pickle, which is never opened: name a tag")
        if (path / COMMIT_NAME).exists():
            return nm.Checkpoint.found(read_commit(path))
        if path.is_dir():
            return nm.get_latest_checkpoint(path)
        places = [place for place in (path.absolute().parent, facade.place()) if place is not None and place.is_dir()]
        found = [nm.get_checkpoint(tag_of_file(path), place) for place in places]
        return next((checkpoint for checkpoint in found if checkpoint.tag), nm.Checkpoint())

    def _remove(self) -> None:
        for root, tag in sorted(self._removed):
            commits = scan(root).commits
            mine = [commit for commit in commits if commit.tag == tag]
            for commit in mine:
                if commit is not commits[0]:
                    try:
                        remove_attempt(commit.path)
                    except FileNotFoundError:  # the writer was faster: it removes folders without COMMIT.json
                        continue
                    except OSError as error:
                        logger.warning("%s could not be deleted: %s", commit.path, error)
            if mine and mine[0] is not commits[0]:
                self._removed.discard((root, tag))


class NebulaCallback(_ModelCheckpoint):  # type: ignore[misc]
    """ModelCheckpoint, with the same arguments; `config_params` are the arguments of `hetseq.nebula.init`.

    With a `monitor` every tag is written to disk, since any of them may be the best one.
    """

    def __init__(self, *args: Any, config_params: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._config_params = dict(config_params or {})

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Set where tags go, and check that the plugin is there."""
        super().setup(trainer, pl_module, stage)
        if not isinstance(trainer.strategy.checkpoint_io, NebulaCheckpointIO):
            raise TypeError("NebulaCallback saves through NebulaCheckpointIO: Trainer(plugins=[NebulaCheckpointIO()])")
        if self._config_params and stage == "fit" and trainer.is_global_zero:
            nm.init(**{"together": False, "persistent_storage_path": self.dirpath, **self._config_params})

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        save = trainer.save_checkpoint
        is_best = self.monitor is not None

        def save_as_best(path: str, weights_only: bool | None = None, storage_options: Any | None = None) -> None:
            save(path, weights_only, {"is_best": is_best, **(storage_options or {})})

        trainer.save_checkpoint = save_as_best
        try:
            super()._save_checkpoint(trainer, filepath)
        finally:
            del trainer.save_checkpoint


def tag_of_file(path: str | os.PathLike[str]) -> str:
    """The tag for a file name from Lightning: epoch=3-step=500 for .../epoch=3-step=500.ckpt."""
    return Path(path).name.removesuffix(".ckpt")
