"""Options of a BERT corpus: their checks, and the values that are recorded in the corpus.

Responsible for refusing impossible values before any work. `bert_corpus` parses the command line.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetseq import ConfigError

from ..corpus import sentences as plain_text
from ..corpus.text_chunks import PIECE_BYTES
from .pairs import Recipe

#: the output formats
RECORDS, HDF5 = OUTPUT_FORMATS = ("records", "hdf5")


@dataclass(frozen=True)
class Options:
    """The options of a corpus. Raises ConfigError for impossible values."""

    inputs: tuple[Path, ...] = ()  # none: the text that ships with Python
    form: str = "paragraphs"
    output_format: str = RECORDS
    vocab_file: Path | None = None
    vocab_size: int = 4096
    is_lower_case: bool = True
    max_seq_length: int = 128
    max_predictions: int | None = None  # this and the next apply to HDF5: records are masked when they are read
    masked_share: float | None = None
    short_sequence_share: float = 0.1
    duplicate: int = 5
    test_share: float = 0.05
    files: int | None = None
    seed: int = 19940802
    piece_bytes: int = PIECE_BYTES  # of text; not a flag, since it decides where an endless line is cut

    def __post_init__(self) -> None:
        share = self.recipe.masked_share
        checks = (
            ("--max-seq-length", self.max_seq_length, 8 <= self.max_seq_length < 2**16, "at least 8, less than 65536"),
            ("--masked-share", share, 0 < share < 1, "more than 0 and less than 1"),
            ("--short-sequence-share", self.short_sequence_share, 0 <= self.short_sequence_share <= 1, "0 to 1"),
            ("--test-share", self.test_share, 0 <= self.test_share <= 0.5, "0 (nothing is held out) to 0.5"),
            ("--duplicate", self.duplicate, self.duplicate >= 1, "at least 1"),
            ("--files", self.files, self.files is None or self.files >= 1, "at least 1"),
            ("--seed", self.seed, self.seed >= 0, "0 or more"),
            ("--vocab-size", self.vocab_size, self.vocab_size >= 1, "at least 1"),
            (
                "--max-predictions",
                self.max_predictions,
                self.max_predictions is None or 1 <= self.max_predictions <= self.max_seq_length,
                f"1 to --max-seq-length, {self.max_seq_length}",
            ),
        )
        for flag, value, is_right, expected in checks:
            if not is_right:
                raise ConfigError(f"{flag} {value}: expected {expected}")
        for flag, chosen, known in (
            ("--format", self.form, tuple(plain_text.FORMATS)), ("--output-format", self.output_format, OUTPUT_FORMATS),
        ):  # fmt: skip
            if chosen not in known:
                raise ConfigError(f"{flag} {chosen}: expected one of {', '.join(known)}")
        for flag, given in (("--masked-share", self.masked_share), ("--max-predictions", self.max_predictions)):
            if self.output_format == RECORDS and given is not None:
                raise ConfigError(
                    f"{flag} {given} applies to masks, and records have none, since training draws them; leave it out"
                    f" or give --output-format {HDF5}"
                )

    @property
    def recipe(self) -> Recipe:
        """The recipe of a row; by default it has room for the masked tokens of the longest row (20 of 128)."""
        share = Recipe.masked_share if self.masked_share is None else self.masked_share
        # an invalid share is refused by its own check
        predictions = self.max_predictions or (math.ceil(self.max_seq_length * share) if 0 < share < 1 else 1)
        return Recipe(self.max_seq_length, predictions, share, self.short_sequence_share)

    @property
    def named(self) -> str:
        """The name of the input, for messages."""
        return ", ".join(map(str, self.inputs)) or "the text of this Python"

    def stated(self) -> dict[str, Any]:
        """Options by flag name, without those that the corpus records as its sources and vocabulary."""
        recipe = asdict(self.recipe)
        if self.output_format == RECORDS:
            recipe = {name: value for name, value in recipe.items() if name not in ("max_predictions", "masked_share")}
        return {
            "format": self.form if self.inputs else None,
            "vocab_size": self.vocab_size if self.vocab_file is None else None,
            **recipe,
            "duplicate": self.duplicate,
            "test_share": self.test_share,
            "files": self.files,
            "seed": self.seed,
        }
