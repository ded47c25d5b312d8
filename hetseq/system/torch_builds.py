"""Which build of torch fits the cards of a machine, and the pip command that installs it. Pure.

The table of docs/start/install.md as a function. It asks no driver and imports no torch: the callers give it the facts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

INDEX = "https://download.pytorch.org/whl"
CPU, CUDA, OLD_CUDA, ROCM = "cpu", "cu130", "cu126", "rocm7.2"

_OLDEST_CUDA = (7, 5)  # Turing: builds for CUDA 13 begin there
_OLDEST, _NEWEST_OLD_CUDA = (5, 0), (9, 0)  # Maxwell to Hopper: what builds for CUDA 12.6 have code for
_DRIVER_CUDA, _DRIVER_OLD_CUDA = 580, 525
_LAST_OLD_CUDA = (2, 14)  # the last torch with builds for CUDA 12.6
_RELEASE, _BUILD = re.compile(r"[0-9]+(\.[0-9a-z]+)+"), re.compile(r"cpu|cu[0-9]+|rocm[0-9.]+|xpu")


@dataclass(frozen=True)
class Choice:
    """A build of torch, or "" and the `trouble` that leaves none, with its remedy."""

    build: str
    trouble: str = ""


def build_for(
    capabilities: Sequence[tuple[int, int]], release: str, *, driver: int | None = None, has_amd: bool = False
) -> Choice:
    """The build for a machine whose NVIDIA cards have these compute capabilities, and whose driver is that major one.

    A card older than Maxwell counts for nothing, since no build has code for it.
    """
    known = [capability for capability in capabilities if capability >= _OLDEST]
    if not known:
        return Choice(ROCM if has_amd else CPU)
    if driver is not None and driver < _DRIVER_OLD_CUDA:
        return Choice("", f"its NVIDIA driver {driver} is too old: update it to {_DRIVER_OLD_CUDA} or newer")
    is_old = min(known) < _OLDEST_CUDA
    if not is_old and (driver is None or driver >= _DRIVER_CUDA):
        return Choice(CUDA)
    if max(known) > _NEWEST_OLD_CUDA:
        if not is_old:
            return Choice(
                "", f"its card needs an NVIDIA driver of {_DRIVER_CUDA} or newer, and it has {driver}: update it"
            )
        return Choice(
            "",
            f"no build of torch has code for capability {_named(min(known))} and for {_named(max(known))}: start two"
            " launchers, each with an environment of its own, and give each its cards by CUDA_VISIBLE_DEVICES",
        )
    if is_old and _numbers(release) > _LAST_OLD_CUDA:
        return Choice(
            "",
            f"torch {release} has no build for capability {_named(min(known))}: use torch {_named(_LAST_OLD_CUDA)} or"
            " older on all nodes",
        )
    return Choice(OLD_CUDA)


def pip_line(release: str, build: str) -> str:
    """The command that installs this torch; without a build that an index is named after, from the ordinary index."""
    index = f" --index-url {index_of(build)}" if _BUILD.fullmatch(build) else ""
    return f"pip install torch=={release}{index}"


def index_of(build: str) -> str:
    """The package index that has a build of torch."""
    return f"{INDEX}/{build}"


def release_for(versions: Sequence[str]) -> str:
    """The release for nodes that have these versions of torch, such as 2.13.0+cu126, so that few have to change theirs.

    The one that most of them have; of two, the older. A newer one than a build for CUDA 12.6 can have is left out.
    "" if none is a release.
    """
    releases = [release_of(version) for version in versions if _RELEASE.fullmatch(release_of(version))]
    is_old = any(tag_of(version) == OLD_CUDA for version in versions)
    fits = [release for release in releases if not is_old or _numbers(release) <= _LAST_OLD_CUDA]
    counted = sorted(set(fits or releases), key=lambda release: (-releases.count(release), _numbers(release)))
    return counted[0] if counted else ""


def release_of(version: str) -> str:
    """2.13.0 of 2.13.0+cu126."""
    return version.partition("+")[0]


def tag_of(version: str) -> str:
    """cu126 of 2.13.0+cu126; "" without one."""
    return version.partition("+")[2]


def capability_of(text: str) -> tuple[int, int]:
    """(8, 6) of 8.6; (0, 0) for another text."""
    major, _, minor = text.strip().partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in release.split(".")[:2])


def _named(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]}.{numbers[1]}"
