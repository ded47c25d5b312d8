"""Fast reader for HDF5 files of BERT pre-training rows.

Responsible for the layout: a file holds six data sets, `input_ids`, `input_mask`, `segment_ids` [N, L],
`masked_lm_positions`, `masked_lm_ids` [N, P] and `next_sentence_labels` [N], of any integer types. It does not check
the numbers; `hdf5_dataset` does.

The one idea: a data set that is one plain block of bytes in its file is memory-mapped, and a batch is one gather. A
chunked data set is unpacked by h5py a block of rows at a time, and recent blocks are cached, up to `CACHE_BYTES` per
process. Files are opened on first use and never shared between processes, and the least recently used one is closed
before too many are open: a folder may hold more files than a process may open.

Measured by `bench/rows.py`: CPU time per sample in random batches of 64, L = 128, one core, page cache warm:

| 20,000 rows            | here   | opened for every sample, as in 2020 |
|------------------------|--------|-------------------------------------|
| plain                  | 2.8 us | 0.9 ms                              |
| gzip, fits the cache   | 7.8 us | 4.6 ms                              |
| gzip of 400,000 rows   | 17 ms  | 25 ms                               |

If the data do not fit the cache, a random row costs the unpacking of its chunks, and h5py chooses larger chunks for
larger files; `h5repack -f NONE -l CONTI` makes such a file plain.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetseq import DataError
from hetseq.tasks.rows.mapped_files import Indices, Maps, NotMapped, Views, check_size, most_open, refusal

logger = logging.getLogger(__name__)

Numbers = npt.NDArray[Any]  # of a stored integer type

TOKENS = ("input_ids", "input_mask", "segment_ids")  # (N, L)
PREDICTIONS = ("masked_lm_positions", "masked_lm_ids")  # (N, P)
LABEL = "next_sentence_labels"  # (N,)
NAMES = (*TOKENS, *PREDICTIONS, LABEL)

#: unpacked rows of one split that a process caches at most
CACHE_BYTES = 128 << 20
#: the remedy if there are no such files
MAKE = "`python -m hetseq.preprocessing.bert_corpus --help` says how to make such files from text"
_BLOCK_BYTES = 16 << 20  # of rows unpacked together: a chunk may hold a column of all rows
_BLOCK_ROWS = 128  # read together if the file has no chunks
_OPEN_FILES = 32  # maximum number of open h5py files in a process


@dataclass(frozen=True)
class Column:
    """The location of the rows of one data set."""

    width: int  # numbers per row
    dtype: np.dtype[Any]
    offset: int | None  # of the first byte in the file, if all rows are stored one after another
    block_rows: int  # rows to read together

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Table:
    """A file with rows, as found at the start."""

    path: Path
    size: int  # bytes
    rows: int
    columns: dict[str, Column]


def shown(names: Sequence[str]) -> str:
    """At most six names, for a message."""
    return f"{', '.join(names[:6])}{f' and {len(names) - 6} more' if len(names) > 6 else ''}" if names else "nothing"


def open_table(path: Path) -> Table:
    """The layout of a file, from its metadata. Raises DataError unless it is the 2020 layout."""
    with _reading(path), _open_hdf5(path) as file:
        size = path.stat().st_size
        datasets = {name: _member(file, name, path) for name in NAMES}
        rows = {name: int(dataset.shape[0]) for name, dataset in datasets.items()}
        if len(set(rows.values())) > 1:
            found = ", ".join(f"{name} {count:,}" for name, count in rows.items())
            raise DataError(f"{path}: numbers of rows differ ({found}), expected one number; make the file again")
        if not rows[LABEL]:
            return Table(path, size, 0, {})
        columns = {name: _column(dataset, name, path, size) for name, dataset in datasets.items()}
        for names in (TOKENS, PREDICTIONS):
            if len({columns[name].width for name in names}) > 1:
                found = ", ".join(f"{name} {columns[name].width}" for name in names)
                raise DataError(f"{path}: numbers of columns differ ({found}), expected one; make the file again")
        length, listed = columns["input_ids"].width, columns["masked_lm_positions"].width
        if not length:
            raise DataError(f"{path}: input_ids has rows of 0 tokens, expected at least one; make the file again")
        if listed > length:  # a file of a few kilobytes may claim gigabytes that were never written
            raise DataError(
                f"{path}: masked_lm_positions has room for {listed:,} tokens per row, but input_ids has {length:,}:"
                " expected at most as many; make the file again"
            )
        return Table(path, size, rows[LABEL], columns)


def _member(file: Any, name: str, path: Path) -> Any:
    """A data set in the file itself. Links are not followed, since they could name any file on this machine."""
    h5py = _h5py()
    link = file.get(name, getlink=True)
    why = ""
    if isinstance(link, h5py.ExternalLink):
        why = f" (it is a link into another file, {_printable(link.filename)}, and such links are not followed)"
    elif isinstance(link, h5py.SoftLink):
        why = f" (it is a link to {_printable(link.path)}, and links are not followed)"
    elif link is not None:
        dataset = file[name]
        if not isinstance(dataset, h5py.Dataset):
            why = f" (it is a {type(dataset).__name__.lower()})"
        elif dataset.is_virtual or dataset.external:
            why = " (its numbers are in another file, and such files are not opened)"
        elif not dataset.shape:
            why = f" (its shape is {dataset.shape})"
        else:
            return dataset
    there = shown(sorted(_printable(member) for member in itertools.islice(file, 100)))
    raise DataError(
        f"{path} has no data set {name!r}{why}: expected {', '.join(NAMES)}, found {there}; give --data files of BERT"
        f" pre-training; {MAKE}"
    )


def _printable(name: Any) -> str:
    """A name in a file, escaped if it is not printable."""
    return str(name) if str(name).isprintable() else repr(name)


def _column(dataset: Any, name: str, path: Path, size: int) -> Column:
    dimensions = 1 if name == LABEL else 2
    if dataset.ndim != dimensions:
        expected = "one number per row" if name == LABEL else "rows and columns"
        raise DataError(f"{path}: {name} has the shape {dataset.shape}, expected {expected}; make the file again")
    try:
        dtype = dataset.dtype
    except TypeError as error:
        raise DataError(f"{path}: {name} has a type that NumPy does not know ({error}), expected integers") from error
    if dtype.kind not in "iub":
        raise DataError(f"{path}: {name} holds {dtype}, expected integers; make the file again")
    is_plain = dataset.chunks is None and _is_plain(dataset.id.get_type(), dtype)
    offset = dataset.id.get_offset() if is_plain else None
    if dtype == np.bool_:
        dtype = np.dtype(np.uint8)  # a mapped byte may hold any value
    elif dtype == np.uint64:
        dtype = np.dtype(np.int64)
    width = 1 if name == LABEL else int(dataset.shape[1])
    row_bytes = width * dtype.itemsize
    if offset is not None and offset + dataset.shape[0] * row_bytes > size:
        raise DataError(
            f"{path} ends within {name}: {size:,} bytes, expected {offset + dataset.shape[0] * row_bytes:,} or more;"
            " the file is incomplete: copy or make it again"
        )
    together = _BLOCK_ROWS if dataset.chunks is None else dataset.chunks[0]
    return Column(width, dtype, offset, max(1, min(together, _BLOCK_BYTES // max(1, row_bytes))))


def _is_plain(kind: Any, dtype: np.dtype[Any]) -> bool:
    """Whether the bytes in the file can be read as a NumPy array of integers that fit into int64."""
    types = _h5py().h5t
    kind = kind.get_super() if isinstance(kind, types.TypeEnumID) else kind  # a bool is an enumeration
    if not isinstance(kind, types.TypeIntegerID) or dtype == np.uint64:
        return False
    return bool(kind.get_size() == dtype.itemsize and kind.get_precision() == 8 * dtype.itemsize)  # not 12 bits of 16


def _open_hdf5(path: Path) -> Any:
    """An h5py file for reading. Raises DataError for a file that is not HDF5, OSError for an unreadable one."""
    h5py = _h5py()
    with path.open("rb") as raw:
        begin = raw.read(8)
    if not h5py.is_hdf5(path):
        found = f"begins with {begin.hex(' ')}" if begin else "is empty (0 bytes)"
        raise DataError(f"{path} {found}: expected an HDF5 file; copy or make it again, or move it out of the folder")
    # no cache in h5py: it would add to ours, for every data set of every file
    return h5py.File(path, "r", locking="best-effort", rdcc_nbytes=0)


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise DataError(
            f"reading HDF5 files needs h5py, which cannot be imported ({error}): pip install h5py, or"
            " pip install 'hetseq[hdf5]'"
        ) from error
    return h5py


@contextlib.contextmanager
def _reading(path: Path, what: str = "") -> Iterator[None]:
    """Context that raises DataError for errors in a file."""
    try:
        yield
    except OSError as error:
        # an error without errno comes from HDF5
        told = refusal(error) or f"is incomplete or damaged ({error}): copy or make it again"
        raise DataError(f"{path}{what} {told}") from error
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        # measured: the exceptions of h5py for files with a few changed bytes
        raise DataError(f"{path}{what} is damaged ({error}): expected an HDF5 file; copy or make it again") from error


class Reader:
    """The open state of one process: maps, h5py files and blocks of unpacked rows, the most recent last."""

    def __init__(self, tables: Sequence[Table], cache_bytes: int) -> None:
        self._tables, self._cache_bytes = tables, cache_bytes
        self._maps = Maps([(table.path, table.size) for table in tables], self._plain)
        self._without_map: set[int] = set()  # files that this process could not map
        self._files: OrderedDict[int, Any] = OrderedDict()
        self._most_files = most_open(_OPEN_FILES)
        self._blocks: OrderedDict[tuple[int, str, int], Numbers] = OrderedDict()
        self._block_bytes = 0
        self._lock = threading.Lock()  # a step loader's thread and others may call

    def take(self, at: int, name: str, rows: Indices) -> Numbers:
        """Rows (n,), ascending, of a data set of file `at`: (n, width), as a new array."""
        column = self._tables[at].columns[name]
        view = None if column.offset is None else self._views(at).get(name)
        if view is not None:
            # as bytes: NumPy would first copy the whole data set if numbers are not aligned
            return view.take(rows, axis=0).view(column.dtype)
        numbers = np.empty((len(rows), column.width), column.dtype)
        blocks = rows // column.block_rows
        cuts = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(rows)]
        with self._lock:
            for start, stop in itertools.pairwise(cuts) if len(rows) else []:
                block = int(blocks[start])
                numbers[start:stop] = self._block(at, name, block)[rows[start:stop] - block * column.block_rows]
        return numbers

    def _views(self, at: int) -> Views:
        """The plain data sets of a file as bytes; empty if it cannot be mapped."""
        if at in self._without_map:
            return {}
        try:
            return self._maps.views(at)
        except NotMapped as error:
            logger.info("%s cannot be mapped (%s): reading it with h5py, which is slower", error.path, error.why)
            self._without_map.add(at)
            return {}

    def _plain(self, at: int, mapped: mmap.mmap) -> Views:
        """The bytes of each plain data set in the file, (rows, bytes per row)."""
        table = self._tables[at]
        return {
            name: np.ndarray((table.rows, column.row_bytes), np.uint8, mapped, column.offset)
            for name, column in table.columns.items()
            if column.offset is not None
        }

    def _block(self, at: int, name: str, block: int) -> Numbers:
        """A block of unpacked rows (at most block_rows, width)."""
        key = at, name, block
        kept = self._blocks.get(key)
        if kept is not None:
            self._blocks.move_to_end(key)
            return kept
        table, column = self._tables[at], self._tables[at].columns[name]
        start = block * column.block_rows
        with _reading(table.path, f", {name}"):
            read = self._file(at)[name][start : start + column.block_rows]
            if read.dtype == np.uint64:
                read = np.minimum(read, np.iinfo(np.int64).max)  # no valid number is that large
            numbers: Numbers = read.astype(column.dtype, copy=False).reshape(len(read), column.width)
        self._block_bytes += numbers.nbytes
        while self._blocks and self._block_bytes > self._cache_bytes:
            _, oldest = self._blocks.popitem(last=False)
            self._block_bytes -= oldest.nbytes
        self._blocks[key] = numbers
        return numbers

    def _file(self, at: int) -> Any:
        """The open h5py file."""
        if at in self._files:
            self._files.move_to_end(at)
        else:
            while len(self._files) >= self._most_files:
                _, oldest = self._files.popitem(last=False)
                oldest.close()
            check_size(self._tables[at].path, self._tables[at].size)
            self._files[at] = _open_hdf5(self._tables[at].path)
        return self._files[at]
