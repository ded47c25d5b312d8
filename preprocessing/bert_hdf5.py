"""Rows of BERT's pre-training as HDF5 files: six data sets, as NVIDIA laid them out and the 2020 HetSeq read them.

The same rows give the same bytes: no times are kept, and the versions of the format are fixed, whatever the library.
h5py is imported where it is used, for it is an extra.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from hetseq import ConfigError

from .bert_pairs import Rows

#: the first of the numbers of tokens that need four bytes a token
_WIDE = 65_536


def id_type(vocab_size: int) -> type[np.integer]:
    """The smallest type that is in use for the ids of so many tokens."""
    return np.uint16 if vocab_size < _WIDE else np.uint32


@contextlib.contextmanager
def writing(path: Path, *, count: int, vocab_size: int) -> Iterator[Callable[[Rows], None]]:
    """A new file for `count` rows; what is given appends some of them."""
    import h5py

    with h5py.File(path, "w", libver=("earliest", "v108")) as file:
        written = 0

        def append(rows: Rows) -> None:
            nonlocal written
            for name, values in vars(rows).items():
                kind = id_type(vocab_size) if name in ("input_ids", "masked_lm_ids") else values.dtype
                if name not in file:
                    # contiguous and not compressed, so that any row is one short read
                    file.create_dataset(name, (count, *values.shape[1:]), kind, track_times=False)
                file[name][written : written + len(values)] = values.astype(kind)
            written += len(rows.next_sentence_labels)

        yield append


def require_h5py() -> None:
    """Raises ConfigError, with what to install, where files cannot be written."""
    try:
        import h5py  # noqa: F401
    except ImportError:
        raise ConfigError(
            "HDF5 files are written by h5py, which is not installed: pip install 'hetseq[hdf5]'"
        ) from None
