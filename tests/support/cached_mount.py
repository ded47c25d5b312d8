"""A folder as a network file system shows it: names, attributes and content may be seconds old, locks are local.

`cached_mount(backing, point)` mounts the folder `backing` at `point` in a separate mount namespace, by a small FUSE
server that passes everything on (`fuse_server`); two of them over one backing folder are two hosts with one directory.
The kernel caches names (also missing ones), attributes, listings and content for `cache_s`; an NFS client does the
same, but checks content when a file is opened. Locks stay within a mount, as with `local_lock` or `nolock`. A test is
skipped where there is no /dev/fuse or no right to mount.

A request that the server reads and never answers (`unanswered`) holds its caller in the kernel, even against SIGKILL,
until `let_go` ends the server; a hung network mount does the same.

Written against /dev/fuse because the libfuse that comes in a wheel keeps one inode per path, and answers everything.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import fuse_server

_ROOT = Path(__file__).resolve().parents[2]
_WITHIN_S = 20.0


@dataclass(frozen=True)
class CachedMount:
    """A mount, as long as its server lives; `enter` is the prefix of a command that sees it."""

    server: subprocess.Popen[bytes]
    point: Path
    enter: tuple[str, ...]

    def run(self, *command: object) -> subprocess.CompletedProcess[str]:
        """A command where the mount is seen."""
        return subprocess.run(
            [*self.enter, *map(str, command)], capture_output=True, text=True, timeout=_WITHIN_S
        )  # fmt: skip

    def start(self, *command: object) -> subprocess.Popen[bytes]:
        """A command that runs there, with pipes to and from it."""
        return subprocess.Popen([*self.enter, *map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def let_go(self) -> None:
        """End the server: every waiting process, killed or not, gets an error; may be called twice."""
        self.server.kill()
        self.server.wait()


@contextmanager
def cached_mount(
    backing: Path, point: Path, *, enter: Sequence[str] = (), cache_s: float = 3.0, unanswered: str = ""
) -> Iterator[CachedMount]:
    """Show `backing` at `point`, an existing directory, to processes entered by `enter` (default: a new namespace).

    Opening, making or syncing a file whose path below `backing` fits the pattern `unanswered` never ends.
    """
    into = tuple(enter) or ("unshare", "-rm")
    with tempfile.TemporaryFile() as complaints:
        server = subprocess.Popen(
            [*into, sys.executable, "-m", fuse_server.__name__, str(backing), str(point), str(cache_s), unanswered],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaints, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
        )  # fmt: skip
        try:
            _await_mount(server, complaints.fileno())
            own = ("nsenter", "-t", str(server.pid), "-U", "-m", "--preserve-credentials")
            mount = CachedMount(server, point, tuple(enter) or own)
            try:
                yield mount
            finally:
                if server.poll() is None or enter:
                    mount.run("umount", "-l", point)
        finally:
            server.kill()
            server.wait()
            assert server.stdout is not None
            server.stdout.close()


def _await_mount(server: subprocess.Popen[bytes], complaints: int) -> None:
    assert server.stdout is not None
    ready, _, _ = select.select([server.stdout], [], [], _WITHIN_S)
    if ready and os.read(server.stdout.fileno(), 1):
        return
    server.kill()
    code, said = server.wait(), os.pread(complaints, 4096, 0).decode(errors="replace")
    if code == fuse_server.NOT_PERMITTED or "Operation not permitted" in said:
        pytest.skip(f"FUSE may not be used here: {said.strip()}")
    raise AssertionError(f"no mount (exit code {code}): {said}")
