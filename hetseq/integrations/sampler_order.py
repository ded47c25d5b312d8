"""The samples of a `DataLoader` by their place in the order of its sampler, so that HetSeq trains in that order."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import hetseq


class SamplerOrder(torch.utils.data.Dataset[Any]):
    """A view of the loader's data set whose sample i is the i-th that the loader's sampler gives in the epoch.

    A sampler that draws from torch's default generator is given `seed` + the epoch, so all ranks have one order.
    Raises TaskError for data without an index, and for batches of several sizes.
    """

    def __init__(self, loader: Any, *, batch_size: int, seed: int) -> None:
        if getattr(loader, "batch_sampler", None) is None or isinstance(
            loader.dataset, torch.utils.data.IterableDataset
        ):
            raise hetseq.TaskError(
                f"HetSeqTrainer got a {type(loader.dataset).__name__} as its data, which has no index: expected a data"
                " set with __len__ and __getitem__, since a sample is named by its number on every rank"
            )
        self._loader, self._batch_size, self._seed = loader, batch_size, seed
        self._orders: dict[int, npt.NDArray[np.int64]] = {}
        self.set_epoch(1)

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch, from 1."""
        if epoch not in self._orders:
            # a step that is repeated may still need the epoch before
            self._orders = {old: order for old, order in self._orders.items() if old == epoch - 1}
            self._orders[epoch] = self._listed(epoch - 1)
        self._order = self._orders[epoch]
        if hasattr(self._loader.dataset, "set_epoch"):
            self._loader.dataset.set_epoch(epoch - 1)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, place: int) -> Any:
        return self._loader.dataset[int(self._order[place])]

    def _listed(self, epoch: int) -> npt.NDArray[np.int64]:
        """All indices of one epoch, from 0, in the sampler's order."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._seed + epoch)
            if hasattr(self._loader, "set_epoch"):
                self._loader.set_epoch(epoch)
            batches = [list(batch) for batch in self._loader.batch_sampler]
        if any(len(batch) != self._batch_size for batch in batches[:-1]):
            raise hetseq.TaskError(
                "the batches of the training data's loader have several sizes: expected"
                f" per_device_train_batch_size = {self._batch_size} samples in each but the last, since HetSeq divides"
                " a step by samples"
            )
        return np.fromiter(chain.from_iterable(batches), np.int64)
