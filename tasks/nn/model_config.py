"""Reading and checking the JSON configuration of a network.

Responsible for reading such a file, for refusing keys that ask for a different network, and for the error messages;
knows no network, and imports no torch. The one idea: any setting that HetSeq does not implement is an error that names
file, key and remedy, because training the wrong network for a week costs that week.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hetseq import DataError

#: keys that ask for a different network unless they have one of these values -> the network they ask for
OtherModels = Mapping[str, tuple[tuple[object, ...], str]]


#: Hugging Face names of the activations, whose functions are in `activations`
ACTIVATION_NAMES = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish")

LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 10_000  # ten times the deepest ever trained
MOST_PARAMETERS = 2**36  # in fp32 with gradients and Adam's averages: 1 TiB
#: bytes; a file with names for a hundred thousand labels has a few million
LARGEST_FILE = 1 << 24

#: patterns of keys in Google, NVIDIA and Hugging Face files that have no effect on any network
WITHOUT_EFFECT = (
    "_*",
    "architectures",
    "auto_map",
    "chunk_size_feed_forward",
    "dtype",
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "label2id",
    "name_or_path",
    "num_labels",
    "output_*",
    "problem_type",
    "return_dict",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "use_cache",
)


def wrong(key: str, value: object, expected: str) -> str:
    """The message `KEY is VALUE: expected ...`, with a long value truncated."""
    shown = json.dumps(value, default=repr)
    return f"{key} is {shown if len(shown) <= 60 else shown[:60] + '...'}: expected {expected}"


def check_whole(key: str, value: object, low: int, high: int) -> None:
    """Raise DataError unless the value is a whole number from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:
        raise DataError(wrong(key, value, f"a whole number from {low} to {high}, without quotes"))


def check_fraction(key: str, value: object, *, may_be_zero: bool) -> None:
    """Raise DataError unless the value is a number below 1 and above 0, or at least 0 if `may_be_zero`."""
    # NaN is in no interval; a range or an epsilon of 1 usually lacks the minus sign of its exponent
    if type(value) not in (int, float) or not (0 <= value < 1 if may_be_zero else 0 < value < 1):  # type: ignore[operator]
        low = "from 0" if may_be_zero else "above 0"
        raise DataError(wrong(key, value, f"a number {low} and below 1, without quotes"))


def check_positive(key: str, value: object) -> None:
    """Raise DataError unless the value is a finite number above 0."""
    if type(value) not in (int, float) or not 0 < value < math.inf:  # type: ignore[operator]
        raise DataError(wrong(key, value, "a number above 0, without quotes"))


def check_activation(key: str, value: object) -> None:
    """Raise DataError unless the value is one of `ACTIVATION_NAMES`."""
    if value not in ACTIVATION_NAMES:
        raise DataError(wrong(key, value, f"one of {', '.join(ACTIVATION_NAMES)}"))


def check_divides(parts_key: str, parts: int, whole_key: str, whole: int, hint: str) -> None:
    """Raise DataError unless `whole` is a multiple of `parts`."""
    if whole % parts:
        raise DataError(
            f"{whole_key} {whole} cannot be divided among {parts_key} {parts}: expected a multiple; change one of them"
            f" ({hint})"
        )


def own_keys(
    values: Mapping[str, Any], fields: Sequence[str], *, other_models: OtherModels, without_effect: Sequence[str]
) -> dict[str, Any]:
    """The keys of a file that are in `fields`. Raises DataError unless all others have no effect."""
    for key, (harmless, meaning) in other_models.items():
        if key in values and values[key] not in harmless:
            expected = f"{json.dumps(harmless[0])}, or no such key"
            raise DataError(wrong(key, values[key], f"{expected}, because it asks for {meaning}"))
    for key in values:
        if key in fields or key in other_models or any(fnmatchcase(key, pattern) for pattern in without_effect):
            continue
        nearest = difflib.get_close_matches(key.casefold(), fields, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "remove it if the model is the same without it."
        raise DataError(f"the key {key!r} is unknown: {hint} Expected keys: {', '.join(fields)}")
    return {key: value for key, value in values.items() if key in fields}


def read_object(path: Path, example: str, *, largest_bytes: int = LARGEST_FILE) -> dict[str, Any]:
    """The JSON object in a file. Otherwise raises DataError, without the path but with the `example`."""
    try:
        with path.open("rb") as file:
            content = file.read(largest_bytes + 1)
    except FileNotFoundError as error:
        raise DataError(f"does not exist: expected {example}; check the path, or write the file") from error
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}; expected a file you may read") from error
    if len(content) > largest_bytes:
        raise DataError(f"is longer than {largest_bytes >> 20} MiB: expected {example}; are these weights or data?")
    try:
        text = content.decode("utf-8-sig")  # editors on Windows write a byte order mark
    except UnicodeDecodeError as error:
        raise DataError(
            f"is not UTF-8 (byte {error.start} is 0x{content[error.start]:02x}): expected {example}; save it as UTF-8,"
            " for example with iconv -t UTF-8"
        ) from error
    try:
        found = json.loads(text, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON ({error}): expected {example}; correct it there") from error
    if not isinstance(found, dict):
        raise DataError(f"holds {wrong('the JSON value', found, example)}")
    return found


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DataError(f"the key {twice!r} occurs more than once: expected it once; remove the wrong one")
    return values
