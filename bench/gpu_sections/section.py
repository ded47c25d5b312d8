"""The interface between a section and the script: the place to work in, the checks, and the reasons to skip."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
CORE = ("numpy", "yaml", "tensorboard", "safetensors", "rich", "tokenizers")  # without these HetSeq does not start


@dataclass(frozen=True)
class Check:
    """One check: the figure that was seen, and the expected one ("" for a figure that is only reported)."""

    name: str
    figure: str
    expected: str = ""
    passed: bool = True

    def told(self) -> str:
        """As one line, for a check that failed."""
        return one_line(f"{self.name}: {self.figure}, expected {self.expected}")


def within(name: str, value: float, most: float, *, unit: str = "") -> Check:
    """A value that must not exceed `most`; NaN fails."""
    return Check(name, f"{value:.3g}{unit}", f"at most {most:g}{unit}", value <= most)


def equal(name: str, value: object, expected: object) -> Check:
    """A value that must be the one expected."""
    return Check(name, str(value), str(expected), value == expected)


def holds(name: str, is_so: bool, *, seen: str, expected: str) -> Check:
    """A statement that must be true."""
    return Check(name, seen, expected, is_so)


class Skipped(Exception):
    """The section cannot say anything on this machine; the message is the reason."""


class NotBuilt(Exception):
    """HetSeq does not have yet what the section is about; the message says what that is."""


@dataclass(frozen=True)
class Place:
    """Where a section works: the device, an empty folder of its own, and a folder that sections share."""

    device: str  # "cpu", or "cuda:N"
    folder: Path
    shared: Path
    diary: Path  # JSON lines for the script that started the section

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device != "cpu"

    def need_gpu(self) -> None:
        """Raise Skipped where the device is a CPU."""
        if not self.is_gpu:
            raise Skipped("needs a GPU")

    def devices(self, gpus: int, cpus: int = 0) -> str:
        """As `--devices` takes it: ranks on the device, which may be the CPU, and ranks on the CPU."""
        return ",".join([self.device] * gpus + ["cpu"] * cpus)

    def say(self, **entry: Any) -> None:
        """Write a line into the diary, at once."""
        with self.diary.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def begin(self, doing: str) -> None:
        """Say what the section does next. It is told as the cause if the section ends there."""
        self.say(doing=doing)

    def tell(self, check: Check) -> None:
        """Say what a check found."""
        self.say(check=asdict(check))


def one_line(text: str, *, most: int = 300) -> str:
    """The text without line breaks, cut to `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


def figure_of(seconds: float) -> str:
    """Seconds as people read them: "0.31 ms", "12.4 s"."""
    if not math.isfinite(seconds):
        return str(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; a torn last line is left out, a file that is not there has none."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, Mapping):
            found.append(dict(entry))
    return found
