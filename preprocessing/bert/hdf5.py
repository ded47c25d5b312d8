"""HDF5 output of BERT pre-training rows: six data sets, in NVIDIA's layout, which the 2020 HetSeq reads.

The same rows give the same bytes: no timestamps are stored, and the format versions are fixed, whatever the library.
HDF5 only creates the outline of a file, in memory; outline and rows are written here. HDF5 itself would write late, on
closing the file, and a full disk then causes a segmentation fault (HDF5 2.0) instead of an error. h5py is imported
where it is used because it is an extra.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from hetseq import ConfigError

from .pairs import Integers, Rows

#: vocabularies of this size or more need four bytes per token
_WIDE = 65_536


def id_type(vocab_size: int) -> type[np.integer]:
    """The id type of the files for a vocabulary of this size."""
    return np.uint16 if vocab_size < _WIDE else np.uint32


@contextlib.contextmanager
def writing(path: Path, *, count: int, vocab_size: int) -> Iterator[Callable[[Rows], None]]:
    """A new file for `count` rows, at least one; yields the function that appends some of them.

    Only the rows of one call are held in memory. Raises OSError if the disk is full.
    """
    with open(path, "xb") as file:
        written = 0
        places: dict[str, int] = {}

        def append(rows: Rows) -> None:
            nonlocal written
            fields = {
                name: values.astype(id_type(vocab_size) if name in ("input_ids", "masked_lm_ids") else values.dtype)
                for name, values in vars(rows).items()
            }
            if not places:
                outline = _Outline()
                places.update(_lay_out(outline, fields, count))
                file.truncate(outline.size)
                for place, part in outline.parts:
                    file.seek(place)
                    file.write(part)
            for name, values in fields.items():
                file.seek(places[name] + written * values[0].nbytes)
                file.write(values.tobytes())
            written += len(rows.next_sentence_labels)

        yield append


def require_h5py() -> None:
    """Raise ConfigError, naming the package to install, if h5py is missing."""
    try:
        import h5py  # noqa: F401
    except ImportError:
        raise ConfigError(
            "HDF5 files are written by h5py, which is not installed: pip install 'hetseq[hdf5]'"
        ) from None


def _lay_out(outline: _Outline, fields: Mapping[str, Integers], count: int) -> dict[str, int]:
    """Write a file without its rows; returns the byte offset of each data set."""
    import h5py

    # contiguous and uncompressed, so that any row is one short read; allocated early, so that the offset is known
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_layout(h5py.h5d.CONTIGUOUS)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    layout.set_obj_track_times(False)
    places: dict[str, int] = {}
    with h5py.File(outline, "w", libver=("earliest", "v108")) as file:
        for name, values in fields.items():
            space = h5py.h5s.create_simple((count, *values.shape[1:]))
            kind = h5py.h5t.py_create(values.dtype, logical=True)
            places[name] = h5py.h5d.create(file.id, name.encode(), kind, space, layout).get_offset()
    return places


class _Outline:
    """A sparse file in memory, for h5py: it holds the parts that were written and not the gaps."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, bytes]] = []  # offset and content; later parts override earlier ones
        self.size = 0
        self._place = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self.size}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def write(self, content: bytes | memoryview) -> int:
        part = bytes(content)
        self.parts.append((self._place, part))
        self._place += len(part)
        self.size = max(self.size, self._place)
        return len(part)

    def read(self, count: int) -> bytes:
        begin, end = self._place, min(self._place + count, self.size)
        found = bytearray(max(0, end - begin))
        for place, part in self.parts:
            first, last = max(place, begin), min(place + len(part), end)
            if first < last:
                found[first - begin : last - begin] = part[first - place : last - place]
        self._place += len(found)
        return bytes(found)

    def truncate(self, size: int) -> int:
        self.size = size
        return size

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""
