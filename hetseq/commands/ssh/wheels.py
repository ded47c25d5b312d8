"""Wheels of packages of this environment, made again from their installed files: HetSeq itself, and pip.

`hetseq ssh --install` copies them to hosts, which therefore need no checkout, no build tools and no pip of their own.
The format is that of PEP 427: a zip of the files, with METADATA, WHEEL and RECORD.

The one idea: equal files give an equal wheel, byte for byte, so its digest tells whether a host has this very source.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import hetseq
from hetseq.errors import ConfigError

_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip can hold
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)[^;]*(?:;\s*extra == ['\"](\w+)['\"])?")
_EXTRAS = ("hdf5", "demo")  # what included tasks need, if this environment has it


@dataclass(frozen=True)
class Wheel:
    """A file that pip installs."""

    name: str
    content: bytes

    @property
    def digest(self) -> str:
        """12 hexadecimal digits of SHA-256."""
        return hashlib.sha256(self.content).hexdigest()[:12]


def hetseq_wheel() -> Wheel:
    """The wheel of the HetSeq that runs, an installed one or a checkout. Raises ConfigError without its metadata."""
    folder = Path(hetseq.__file__).resolve().parent
    return _wheel("hetseq", hetseq.__version__, dict(_files_below(folder, "hetseq")))


def pip_wheel() -> Wheel:
    """The wheel of this environment's pip, which installs the rest. Raises ConfigError if there is none."""
    package = next(
        (path for path in map(Path, _found("pip").files or ()) if path.as_posix() == "pip/__init__.py"), None
    )
    if package is None:
        raise ConfigError(
            "the pip of this Python cannot be copied to the hosts: run this command in a virtual environment"
        )
    folder = Path(str(_found("pip").locate_file(package))).resolve().parent
    return _wheel("pip", _found("pip").version, dict(_files_below(folder, "pip")))


def pinned() -> dict[str, str]:
    """The packages that HetSeq needs, with the versions of this environment, torch's with its build tag."""
    versions = {}
    for text in _found("hetseq").requires or ():
        found = _REQUIREMENT.match(text)
        if found is None or found[1] == "hetseq" or (found[2] is not None and found[2] not in _EXTRAS):
            continue
        try:
            versions[found[1].lower()] = importlib.metadata.version(found[1])
        except importlib.metadata.PackageNotFoundError:
            if found[2] is None:
                raise ConfigError(f"{found[1]} is not installed here, and the hosts are to have its version") from None
    return versions


def _found(name: str) -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"{name} is not installed in this environment, only importable or absent: run `python -m pip install"
            f" {'-e .' if name == 'hetseq' else name}` (with uv: `uv pip install`), and then this command again"
        ) from None


def _files_below(folder: Path, name: str) -> Iterator[tuple[str, bytes]]:
    """Name and content of the files of a package; follows links to folders."""
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(one for one in folders if one != "__pycache__" and not one.startswith("."))
        for file in sorted(files):
            if not file.startswith(".") and not file.endswith((".pyc", ".pyo")):
                path = Path(place, file)
                yield f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes()


def _wheel(name: str, version: str, files: Mapping[str, bytes]) -> Wheel:
    distribution = _found(name)
    info = f"{name}-{version}.dist-info"
    metadata = re.sub(
        r"^Version: .*$", f"Version: {version}", distribution.read_text("METADATA") or "", count=1, flags=re.M
    )
    about = {
        "METADATA": metadata,
        "WHEEL": "Wheel-Version: 1.0\nGenerator: hetseq\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": distribution.read_text("entry_points.txt") or "",
    }
    whole = {**files, **{f"{info}/{file}": text.encode() for file, text in about.items()}}
    record = [f"{file},{_hash(content)},{len(content)}\n" for file, content in whole.items()]
    whole[f"{info}/RECORD"] = "".join([*record, f"{info}/RECORD,,\n"]).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, content in whole.items():
            entry = zipfile.ZipInfo(file, _TIME)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return Wheel(f"{name}-{version}-py3-none-any.whl", packed.getvalue())


def _hash(content: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
