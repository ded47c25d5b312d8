"""Downloads or verifies the four MNIST files: `python -m hetseq.preprocessing.mnist --output DIR`.

Responsible for names, checksums and mirrors of the published files, and for complete downloads; `tasks/mnist.py` reads
their content. The one idea: a file gets its name only once its md5 is right. Until then it is `.NAME.part`, from which
an interrupted download resumes.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from hetseq import ConfigError, DataError, HetSeqError

from .corpus.folders import flush, locked

#: name -> (md5, bytes) as published
FILES = {
    "train-images-idx3-ubyte.gz": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
    "train-labels-idx1-ubyte.gz": ("d53e105ee54ea40749a09fcbcd1e9432", 28_881),
    "t10k-images-idx3-ubyte.gz": ("9fb629c4189551a2d022fa330f9573f3", 1_648_877),
    "t10k-labels-idx1-ubyte.gz": ("ec29112dd5afa0611ce80d1b7f02629c", 4_542),
}
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)

#: seconds without a byte after which a mirror counts as silent
_TIMEOUT_S = 30.0
#: connections per file and mirror, as long as each one makes progress
_ATTEMPTS = 5
_PIECE_BYTES = 1 << 16

Advance = Callable[[int], None]  # bytes of the file so far


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Exit codes: 0 all four files are right, 1 --verify found a wrong one, 2 failed."""
    parser = argparse.ArgumentParser(
        prog="python -m hetseq.preprocessing.mnist", description="Fetch or verify MNIST (11.6 MB)."
    )
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="folder for the four files; pass it to --data afterwards"
    )
    parser.add_argument("--verify", action="store_true", help="only compare the existing files with their md5")
    parser.add_argument("--mirror", metavar="URL", help="fetch from here instead of the known mirrors")
    options = parser.parse_args(argv)
    console = Console(highlight=False, soft_wrap=True)
    folder = Path(options.output).expanduser()
    try:
        if options.verify:
            return _verify(folder, console)
        mirrors = MIRRORS if options.mirror is None else (_checked_mirror(options.mirror),)
        with _progress(console) as progress:
            for name in FILES:
                console.print(f"{name}: {_fetch_with_bar(name, folder, mirrors, progress)}", markup=False)
    except HetSeqError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {error}", markup=False)
        return error.exit_code
    console.print(f"MNIST is complete: hetseq train --task mnist --data {folder}", markup=False)
    return 0


def verify(folder: Path) -> dict[str, str]:
    """Problems of the four files in `folder`, by name: "missing", or the md5 found; empty if all are right.

    Raises DataError for a file that cannot be read.
    """
    problems = {}
    for name, (expected, _) in FILES.items():
        found = _md5(folder / name)
        if found is None:
            problems[name] = "missing"
        elif found != expected:
            problems[name] = f"md5 {found}, expected {expected}"
    return problems


def fetch(name: str, folder: Path, mirrors: Sequence[str], advance: Advance) -> str:
    """Make `folder/name` the published file and return its origin, a mirror or "already there".

    A file with another md5 is replaced, but only by the right one. An interrupted download is resumed. Raises
    DataError with every mirror's answer if none has the file, and if the folder cannot be written.
    """
    md5, size = FILES[name]
    if _md5(folder / name) == md5:
        advance(size)
        return "already there"
    answers = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # two writers of one .part could spoil a finished file; if folders cannot be locked, the checksums must suffice
        with locked(folder, "another download into it is running"):
            part = folder / f".{name}.part"
            for mirror in mirrors:
                answer = _download(mirror + name, part, name=name, advance=advance)
                if answer is None:
                    flush(part)
                    os.replace(part, folder / name)
                    flush(folder)
                    return mirror
                answers.append(f"  {mirror + name}: {answer}")
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written: {error.strerror or error}; expected a folder with room"
        ) from error
    raise DataError(_nothing_fetched(name, folder, answers))


def _download(url: str, part: Path, *, name: str, advance: Advance) -> str | None:
    """Bring `part` to the published content; None if that worked, else what went wrong."""
    answer = "no answer"
    for _ in range(_ATTEMPTS):
        before = _size(part)
        if before >= FILES[name][1]:
            # complete but not verified yet: the check below decides
            answer = "complete"
        else:
            answer = _continue(url, part, before, FILES[name][1], advance)
        if _size(part) >= FILES[name][1]:
            if _md5(part) == FILES[name][0]:
                return None
            part.unlink()
            if before == 0:
                return f"sent a file with another md5 than {FILES[name][0]}"
            continue  # the beginning may have come from another mirror: start again from this one
        if _size(part) <= before:
            return answer
    return answer


def _continue(url: str, part: Path, start: int, size: int, advance: Advance) -> str:
    """Append the server's bytes to `part` from byte `start` on, at most to `size` + 1; returns how it ended."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        answer = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        with error:
            return f"HTTP {error.code} {error.reason}"
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return str(getattr(reason, "strerror", None) or reason)
    with answer:
        # a server without range support answers 200 and sends the whole file
        return _append(answer, part, start if answer.status == 206 else 0, size, advance)


def _append(answer: http.client.HTTPResponse, part: Path, start: int, size: int, advance: Advance) -> str:
    with part.open("r+b" if start else "wb") as file:
        file.seek(start)
        file.truncate()
        while file.tell() <= size:
            try:
                piece = answer.read1(_PIECE_BYTES)
            except (OSError, http.client.HTTPException) as error:
                return f"broke off after {file.tell():,} bytes ({error})"
            if not piece:
                break
            file.write(piece)
            advance(file.tell())
        return f"ended after {file.tell():,} of {size:,} bytes"


def _nothing_fetched(name: str, folder: Path, answers: list[str]) -> str:
    table = "\n".join(f"  {name}  md5 {md5}" for name, (md5, _) in FILES.items())
    return (
        f"{name} could not be fetched. Tried:\n" + "\n".join(answers) + "\nIf this machine is offline, copy these four"
        f" files by hand to {folder} and run the same command with --verify, or name a mirror that it can reach with"
        f" --mirror URL:\n{table}"
    )


def _verify(folder: Path, console: Console) -> int:
    problems = verify(folder)
    for name in FILES:
        console.print(f"{name}: {problems.get(name, 'right')}", markup=False)
    if problems:
        console.print(
            f"fetch missing or wrong files: python -m hetseq.preprocessing.mnist --output {folder}", markup=False
        )
    return 1 if problems else 0


def _fetch_with_bar(name: str, folder: Path, mirrors: Sequence[str], progress: Progress) -> str:
    bar = progress.add_task(name, total=FILES[name][1])
    return fetch(name, folder, mirrors, lambda completed: progress.update(bar, completed=completed))


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    # only on a terminal: in a log, one line per file is enough
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _checked_mirror(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--mirror {url}: expected the address of a folder, as in {MIRRORS[0]}")
    return url if url.endswith("/") else f"{url}/"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _md5(path: Path) -> str | None:
    """The md5 of a file; None if it does not exist. Raises DataError if it cannot be read."""
    sums = hashlib.md5(usedforsecurity=False)
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                sums.update(piece)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; expected a file you may read") from error
    return sums.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
