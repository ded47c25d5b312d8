"""MNIST task: the 2020 network on the MNIST files, or a small one on the digits bundled with scikit-learn.

Responsible for reading and checking the files that `mnist_files` finds under `--data`, for the two networks and for the
summed loss; knows no ranks, batches or devices. Nothing is written into `--data`.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from hetseq import DataError, Task, register_task
from hetseq.tasks.mnist_files import find_files, half_of, reading

logger = logging.getLogger(__name__)

Batch = tuple[Tensor, Tensor]  # images: (n, 1, h, w) float, labels: (n,) int64


@register_task("mnist")
class MNISTTask(Task):
    """`--task mnist`: MNIST from `--data`, or the bundled 8x8 digits where `--data` is not given."""

    def load_dataset(self, split: str) -> ImageDataset:
        """Split "train" is the training half; "test" and "valid" are both the test half. Raises DataError."""
        half = half_of(split)
        data = self.config.data.data
        if data is None:
            dataset = load_digits(half)
            logger.info("%s: %d bundled digits of 8x8 pixels, because --data is not given", split, len(dataset))
        else:
            dataset = load_mnist(Path(data).expanduser(), half)
            logger.info("%s: %d images of 28x28 pixels from %s", split, len(dataset), data)
        return dataset

    def build_model(self) -> nn.Module:
        """The network for the size of the images; `--dropout P` sets both of its dropout rates."""
        rate = self.config.task.dropout
        dropout = None if rate is None else (rate, rate)
        return DigitsNet(dropout) if self.config.data.data is None else MNISTNet(dropout)

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, Tensor]:
        """Cross entropy in nats, summed over the images."""
        images, labels = sample
        return {"loss": F.cross_entropy(model(images), labels, reduction="sum")}

    def metrics(self, model: nn.Module, sample: Batch) -> dict[str, tuple[float, float]]:
        """`accuracy`: number of correctly classified images, and number of images."""
        images, labels = sample
        correct = (model(images).argmax(dim=1) == labels).sum().item()  # sync, in validation only
        return {"accuracy": (float(correct), float(len(labels)))}

    def predictions(self, model: nn.Module, sample: Batch) -> list[str]:
        """The digit of each image."""
        images, _ = sample
        return [str(digit) for digit in model(images).argmax(dim=1).tolist()]  # sync, after training


class MNISTNet(nn.Module):
    """The 2020 network, 1,199,882 parameters: images (n, 1, 28, 28) to logits (n, 10).

    `dropout`: rates after the convolutions (whole channels) and after the hidden layer; None: 0.25 and 0.5.
    """

    side = 28

    def __init__(self, dropout: tuple[float, float] | None = None) -> None:
        super().__init__()
        after_convolutions, after_hidden = (0.25, 0.5) if dropout is None else dropout
        # two convolutions without padding take 4 off each side, pooling halves the rest
        pooled = (self.side - 4) // 2
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout2d(after_convolutions)
        # the 2020 code had Dropout2d here too; on (n, 128) it equals Dropout, and torch now warns about it
        self.dropout2 = nn.Dropout(after_hidden)
        self.fc1 = nn.Linear(64 * pooled * pooled, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.conv1(images))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return cast(Tensor, self.fc2(self.dropout2(x)))


class DigitsNet(MNISTNet):
    """The same network for images (n, 1, 8, 8): 53,002 parameters.

    Measured with plain SGD, rate 0.05, momentum 0.9, batches of 64: 98.1 to 98.9 % of the test digits after 12 epochs
    (five seeds), in 0.6 s on one thread.
    """

    side = 8


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """Images in memory as bytes, normalised when they are fetched.

    images: (n, h, w) uint8, from 0 to `peak`; labels: (n,) int64; `mean` and `std`: of images scaled to 0..1;
    `files`: the files that were read, for the nodes of a run to compare.
    """

    def __init__(
        self, images: Tensor, labels: Tensor, *, peak: float, mean: float, std: float, files: Sequence[Path] = ()
    ) -> None:
        self.images, self.labels, self.files = images, labels, tuple(files)
        self.peak, self.mean, self.std = peak, mean, std

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """One image, (1, h, w) float, and its label."""
        return self._normalised(self.images[index]), int(self.labels[index])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Several images as a finished batch: 31 us for 64 MNIST images, against 0.9 ms one by one and collated."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        return self._normalised(self.images.index_select(0, rows)).unsqueeze(1), self.labels.index_select(0, rows)

    def collater(self, samples: Batch | list[tuple[Tensor, int]]) -> Batch:
        """A batch from the results of `__getitem__`, or of `__getitems__` unchanged."""
        if isinstance(samples, tuple):
            return samples
        images, labels = default_collate(samples)
        return images, labels

    def _normalised(self, images: Tensor) -> Tensor:
        # a single image gets its channel here, a batch in __getitems__; scaled first, for the same bits as in 2020
        scaled = images.float().div_(self.peak).sub_(self.mean).div_(self.std)
        return scaled.unsqueeze(0) if scaled.ndim == 2 else scaled


def load_digits(half: str) -> ImageDataset:
    """The 8x8 digits in scikit-learn's package: every fifth is "test" (360), the others "train" (1,437).

    Reads the file without importing the package. Raises DataError if it is missing or damaged.
    """
    spec = importlib.util.find_spec("sklearn")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    if not folders:
        raise DataError(
            "without --data, the task mnist uses the digits that scikit-learn bundles, but scikit-learn is not"
            " installed: pip install scikit-learn, or give --data"
        )
    path = Path(folders[0], "datasets", "data", "digits.csv.gz")
    with reading(path) as file:
        try:
            table = np.loadtxt(file, delimiter=",", dtype=np.uint8, ndmin=2)  # (1797, 64 pixels + label)
        except ValueError as error:
            raise DataError(f"{path}: expected rows of 65 numbers, {error}; install scikit-learn again") from error
    if table.shape != (1797, 65) or table[:, :64].max() > 16 or table[:, 64].max() > 9:
        raise DataError(
            f"{path}: found a table of {table.shape}, expected 1797 digits of 64 pixels; install scikit-learn again"
        )
    rows = table[(np.arange(len(table)) % 5 == 0) == (half == "test")]
    images = torch.from_numpy(rows[:, :64].reshape(-1, 8, 8).copy())
    labels = torch.from_numpy(rows[:, 64].astype(np.int64))
    # mean and deviation of the training half: 0.30521, 0.37632
    return ImageDataset(images, labels, peak=16, mean=0.3052, std=0.3763)


def load_mnist(path: Path, half: str) -> ImageDataset:
    """The "train" or "test" half of MNIST under `path`, a folder or one of the files in it.

    Raises MissingSplitError if no file of that half is found, and DataError for an invalid file.
    """
    files = find_files(path, half)
    images, labels = _read_pt(files[0]) if len(files) == 1 else _read_idx_pair(*files)
    return ImageDataset(images, labels, peak=255, mean=0.1307, std=0.3081, files=files)


def _read_idx_pair(images_file: Path, labels_file: Path) -> Batch:
    images, labels = _read_idx(images_file), _read_idx(labels_file).long()
    _check_pair(images, labels, f"{images_file} and {labels_file.name}")
    return images, labels


def _read_idx(path: Path) -> Tensor:
    """The array of an idx file of bytes: (n, 28, 28) or (n,) uint8."""
    with reading(path) as file:
        magic = file.read(4)
        if magic[2] != 8:
            raise DataError(
                f"{path}: its elements have type code 0x{magic[2]:02x}, expected 0x08 (unsigned bytes): this is not"
                " MNIST as it was published; fetch it again"
            )
        head = file.read(4 * magic[3])
        if len(head) < 4 * magic[3]:
            raise DataError(f"{path} ends within its header: expected {4 + 4 * magic[3]} bytes of it; fetch it again")
        shape = struct.unpack(f">{magic[3]}I", head)
        if shape[1:] not in ((), (28, 28)):
            raise DataError(f"{path} holds images of {shape[1]}x{shape[2]} pixels: expected 28x28, as MNIST has")
        if shape[0] == 0:
            raise DataError(f"{path} is empty: its header says 0 items, expected at least one; fetch it again")
        size = math.prod(shape)
        content = _read_at_most(file, size + 1)
    if len(content) != size:
        found = f"only {len(content):,} bytes" if len(content) < size else "more bytes"
        raise DataError(
            f"{path}: {found} follow the header, which says {' x '.join(map(str, shape))} = {size:,}: the file is"
            " incomplete or not MNIST; copy or fetch it again"
        )
    return torch.frombuffer(content, dtype=torch.uint8).view(shape)


def _read_at_most(file: IO[bytes], size: int) -> bytearray:
    # piece by piece: a damaged header may claim terabytes, and only bytes in the file may be allocated
    content = bytearray()
    while len(content) < size:
        piece = file.read(min(1 << 20, size - len(content)))
        if not piece:
            break
        content += piece
    return content


def _read_pt(path: Path) -> Batch:
    """The pair of tensors in a file that torchvision wrote until 2021."""
    expected = "expected a pair of tensors, uint8 (n, 28, 28) and int64 (n,), as torchvision wrote until 2021"
    try:
        pair: Any = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; {expected}") from error
    except Exception as error:  # measured: damage of 8,000 kinds makes torch.load raise twelve classes of exceptions
        raise DataError(
            f"{path} is damaged, or holds more than tensors and is not loaded for safety ({type(error).__name__}):"
            f" {expected}; copy it again, or use the idx files of MNIST instead"
        ) from error
    is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(part, Tensor) for part in pair)
    if not is_pair:
        raise DataError(f"{path} holds a {type(pair).__name__}: {expected}; use the idx files of MNIST instead")
    images, labels = pair
    is_typed = images.dtype == torch.uint8 and labels.dtype == torch.int64
    if not is_typed or images.ndim != 3 or images.shape[1:] != (28, 28) or labels.ndim != 1:
        found = " and ".join(f"{str(part.dtype).removeprefix('torch.')} {tuple(part.shape)}" for part in pair)
        raise DataError(f"{path} holds {found}: {expected}; use the idx files of MNIST instead")
    if len(images) == 0:
        raise DataError(f"{path} holds no images: {expected}; use the idx files of MNIST instead")
    _check_pair(images, labels, str(path))
    return images.contiguous(), labels.contiguous()


def _check_pair(images: Tensor, labels: Tensor, files: str) -> None:
    if len(images) != len(labels):
        raise DataError(
            f"{files}: {len(images):,} images but {len(labels):,} labels, expected one label per image:"
            " the files belong to different data; fetch both again"
        )
    wrong = ((labels < 0) | (labels > 9)).nonzero()
    if len(wrong) > 0:
        row = int(wrong[0])
        raise DataError(
            f"{files}: label {int(labels[row])} at row {row}, expected 0 to 9: this is not MNIST; fetch the files again"
        )
