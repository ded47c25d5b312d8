"""Rows of BERT's pre-training as HDF5 files: six data sets, as NVIDIA laid them out and the 2020 HetSeq read them.

The same rows give the same bytes: no times are kept, and the versions of the format are fixed, whatever the library.
HDF5 is asked for the outline of a file alone, in memory; outline and rows are written here. For HDF5 writes late, when
it closes the file, and a disk that is full by then ends in a segmentation fault (HDF5 2.0), not in an error.
h5py is imported where it is used, for it is an extra.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from hetseq import ConfigError

from .pairs import Integers, Rows

#: the first of the numbers of tokens that need four bytes a token
_WIDE = 65_536


def id_type(vocab_size: int) -> type[np.integer]:
    """The smallest type that is in use for the ids of so many tokens."""
    return np.uint16 if vocab_size < _WIDE else np.uint32


@contextlib.contextmanager
def writing(path: Path, *, count: int, vocab_size: int) -> Iterator[Callable[[Rows], None]]:
    """A new file for `count` rows, at least one; what is given appends some of them.

    No more is held in memory than the rows of one call. Raises OSError where they find no room.
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
    """Raises ConfigError, with what to install, where files cannot be written."""
    try:
        import h5py  # noqa: F401
    except ImportError:
        raise ConfigError(
            "HDF5 files are written by h5py, which is not installed: pip install 'hetseq[hdf5]'"
        ) from None


def _lay_out(outline: _Outline, fields: Mapping[str, Integers], count: int) -> dict[str, int]:
    """Write a file without its rows; where the rows of each data set begin, in bytes."""
    import h5py

    # contiguous and not compressed, so that any row is one short read; there from the start, so that the place is known
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
    """A file in memory, for h5py, that holds what is written into it and not the space between."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, bytes]] = []  # where and what, the later ones over the earlier ones
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
        """Nothing is kept back."""
