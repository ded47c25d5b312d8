"""Lightning saves through `hetseq.nebula`: a CheckpointIO plugin, and Nebula's callback.

Responsible for: what Lightning calls a checkpoint's file being a tag: `last.ckpt` is the tag "last". Refuses to decide
when to save. The one idea: Lightning removes an older file as soon as `save_checkpoint` has returned, but here the new
one may not be on the disk by then; so a tag that Lightning removes goes once a newer one is there.

    Trainer(plugins=[NebulaCheckpointIO()], callbacks=[NebulaCallback(every_n_train_steps=100)])

Import it with `lightning` or `pytorch_lightning` installed; whichever is imported already is the one that is meant.
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
    """`lightning.pytorch`, or the package of the older name if that is the one in use."""
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

NAME = "checkpoint"  # under which a tag holds all that Lightning saves


class NebulaCheckpointIO(_CheckpointIO):  # type: ignore[misc]
    """Saves the dictionary of Lightning's Trainer as a tag, in the background; rank zero alone saves.

    Tags go to the place of `hetseq.nebula.init`, or without it to the folder that Lightning names. In
    `trainer.save_checkpoint(file, storage_options={...})` "is_best" sends a tag to the disk whatever the interval, and
    "persist_path" names another place.
    """

    _chosen: Path | None = None  # the place of the last `init` that no user has called

    def __init__(self) -> None:
        self._removed: set[tuple[Path, str]] = set()  # places and tags that Lightning wants no more

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Copy the state and have it written as the tag that `path` is named after."""
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

        `path` may also be the directory of a tag, or one with tags, of which the newest is meant. Nothing is ever
        unpickled, so `weights_only` makes no difference. Tensors come to the CPU unless `map_location` is a device.
        FileNotFoundError for no such tag.
        """
        device = map_location if isinstance(map_location, (str, torch.device)) else None
        found = self._find(Path(path))
        if not found.tag:
            raise FileNotFoundError(f"{path}: no complete tag {tag_of_file(path)!r} there or in the place of init")
        state: dict[str, Any] = found.load(NAME, device)
        return state

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a tag, as soon as a newer one is on the disk."""
        is_chosen = facade.place() in (None, NebulaCheckpointIO._chosen)
        root = Path(path).absolute().parent if is_chosen else facade.place()
        self._removed.add((root or Path(), tag_of_file(path)))
        self._remove()

    def teardown(self) -> None:
        """Wait until everything is on the disk."""
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
                    except FileNotFoundError:  # the writer was faster: it tidies up what has no COMMIT.json
                        continue
                    except OSError as error:
                        logger.warning("%s could not be deleted: %s", commit.path, error)
            if mine and mine[0] is not commits[0]:
                self._removed.discard((root, tag))


class NebulaCallback(_ModelCheckpoint):  # type: ignore[misc]
    """ModelCheckpoint, whose arguments it takes; `config_params` are those of `hetseq.nebula.init`.

    With a `monitor` every tag goes to the disk, since the best one may be any of them.
    """

    def __init__(self, *args: Any, config_params: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._config_params = dict(config_params or {})

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Say where tags go; and see that the plugin is there that puts them there."""
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
    """The tag that Lightning's name of a file stands for: epoch=3-step=500 for .../epoch=3-step=500.ckpt."""
    return Path(path).name.removesuffix(".ckpt")
