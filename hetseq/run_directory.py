"""The run directory (`--save-dir`): the names of its files, whether it may be used, and which run uses it now.

Responsible for refusing a directory before the first step, with its path, what was found there and a remedy; for the
marker and the run id in `config.yaml`; for the lock that keeps two runs apart; for `status/rank-N.json`. It knows
nothing of the content that other modules write: rows belong to `metrics`, checkpoints to `checkpoint`.

The one idea: a directory is ours if the first line of its `config.yaml` says so. That line also carries the run id, so
marker, id and configuration appear in one rename and an id survives every resume. A start that is refused leaves the
`config.yaml` of an earlier one as it was: `adopt_config` replaces it once every rank is ready. A lock is `flock` on
`.lock`: the kernel frees it however the launcher ends, so there are no stale locks to judge.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import fnmatch
import json
import logging
import math
import os
import pwd
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from hetseq.errors import RunDirectoryError
from hetseq.system.files import write_all

logger = logging.getLogger(__name__)

_HOLDER_S = 1.0  # to say who holds a lock that was taken a moment ago
MARKER = "# HetSeq run configuration"
_RUN_ID = re.compile(re.escape(MARKER) + r".*\brun id ([0-9a-f]{16})\b")
_SUBDIRECTORIES = ("checkpoints", "log", "status", "tensorboard")
_OUR_FILES = ("config.yaml", "metrics.jsonl", "events.jsonl", "checkpointHistories.csv", "report.html")
#: names that give a folder no other purpose: output and scripts of jobs, notes of file systems, checkpoints of 2020
_BY_THE_WAY = (
    "*.out", "*.err", "*.log", "*.[oe][0-9]*", "*.p[oe][0-9]*", "*.OU", "*.ER", "log", "logs", "core", "core.[0-9]*",
    "*.sh", "*.sbatch", "*.slurm", "*.sge", "*.pbs", "*.lsf", "*.sub", "*.yaml", "*.yml",
    ".nfs*", ".fuse_hidden*", ".snapshot", ".snapshots", "lost+found", ".DS_Store",
    "checkpoint*.pt", "checkpoint*.pt.tmp", ".lock", ".probe-*", ".mark-*", ".config.yaml.*",
)  # fmt: skip
_PROBE_BYTES = 8192
_STATUS_INTERVAL_S = 1.0

#: errno -> (meaning in words, remedy); `{path}` is the run directory
_TROUBLES = {
    errno.EACCES: ("you may not write there", "choose another --save-dir, or ask for permission to write"),
    errno.EPERM: ("you may not write there", "choose another --save-dir, or ask for permission to write"),
    errno.EROFS: ("its file system is read-only", "choose a --save-dir on a file system that can be written"),
    errno.ENOSPC: ("no space is left on its file system", "free some space (df -h), or choose another --save-dir"),
    errno.EDQUOT: ("your disk quota is used up", "free some space (quota -s), or choose another --save-dir"),
    errno.EIO: ("its disk or network mount fails (input/output error)", "have it looked at, choose another --save-dir"),
    errno.ESTALE: ("its network mount is stale", "have it mounted anew, or choose another --save-dir"),
    errno.ENOTDIR: ("one of the parents in this path is a file", "choose another --save-dir"),
    errno.EEXIST: ("a file or a broken link of that name is in the way", "move it away, or choose another --save-dir"),
    errno.ELOOP: ("a link is in the way", "remove the link, or choose another --save-dir"),
    errno.ENAMETOOLONG: ("the name is too long", "choose a shorter --save-dir"),
}


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run. `RunDirectory(path)` only names them; the launcher makes them with `prepare`."""

    path: Path
    #: `config.yaml` as `prepare` left it, so that `lock` notices another run that prepared it at the same time
    _prepared: bytes | None = field(default=None, repr=False, compare=False)
    #: the content that `adopt_config` writes
    _adopted: bytes | None = field(default=None, repr=False, compare=False)
    #: the deepest folder of the path that existed before `prepare` made the others
    _standing: Path | None = field(default=None, repr=False, compare=False)

    @property
    def config_file(self) -> Path:
        """The resolved configuration; its first line is the marker and holds the run id."""
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def history(self) -> Path:
        """The table of all saves."""
        return self.path / "checkpointHistories.csv"

    @property
    def metrics(self) -> Path:
        """One JSON object per step and per validation."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """One JSON object per join, death, retry, rebalance or save."""
        return self.path / "events.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The directory for `tensorboard --logdir`."""
        return self.path / "tensorboard"

    @property
    def logs(self) -> Path:
        """The directory of `rank-N.txt`, the log of each rank."""
        return self.path / "log"

    @property
    def stacks(self) -> Path:
        """The directory of `rank-N-step-S.txt`, the stacks of a stalled rank's threads; made for the first one."""
        return self.path / "stacks"

    @property
    def status(self) -> Path:
        """The directory of `rank-N.json`, the present status of each rank."""
        return self.path / "status"

    @property
    def report(self) -> Path:
        """The report on the finished run."""
        return self.path / "report.html"

    @property
    def run_id(self) -> str:
        """16 hexadecimal digits, drawn when the directory was first prepared and kept on resume.

        Raises RunDirectoryError if `config.yaml` cannot be read or carries no run id.
        """
        found = _RUN_ID.match(_first_line(self.config_file))
        if found is None:
            raise RunDirectoryError(
                f"{self.config_file} has no run id in its first line: prepare the directory with `hetseq train` first"
            )
        return found.group(1)

    @property
    def standing(self) -> Path:
        """The deepest folder of this path that is older than this start, as far as known."""
        return self._standing or Path(self.path.anchor)

    @staticmethod
    def prepare(path: str | os.PathLike[str], *, config_yaml: str) -> RunDirectory:
        """Check or create the run directory; called once, by the launcher, before `lock`.

        A new directory gets its `config.yaml` here and mode 0700; an existing one keeps its mode, and its `config.yaml`
        until `adopt_config`. Every new file has mode 0600 (folders 0700). `config_yaml` may begin with a marker line,
        which is replaced by one with the run id. Raises RunDirectoryError if the path cannot be used, holds files that
        are not ours, or is in use by another run.
        """
        root = Path(os.path.abspath(path))
        standing = next((folder for folder in (root, *root.parents) if os.path.isdir(folder)), None)
        _make_root(root)
        owner_uid = _probe(root)
        if root.stat().st_uid != owner_uid:
            # Compared with a new file, not with the user id, so that mounts that squash or map ids stay usable.
            raise RunDirectoryError(
                f"--save-dir {root} belongs to {_user_name(root.stat().st_uid)}, not to you: choose a directory of your"
                f" own, such as {root / 'my-run'}"
            )
        first_line = _first_line(root / "config.yaml")
        if not first_line.startswith(MARKER):
            _refuse_foreign(root)
        known = _RUN_ID.match(first_line)
        text = _with_header(config_yaml, known.group(1) if known else secrets.token_hex(8)).encode()
        # Held only for this moment: the directory of a run in progress must not be changed.
        with RunDirectory(root).lock():
            try:
                if known is None:
                    replace_file(root / "config.yaml", text, is_durable=True)
                for name in _SUBDIRECTORIES:
                    (root / name).mkdir(mode=0o700, exist_ok=True)
                return RunDirectory(root, (root / "config.yaml").read_bytes(), text, standing)
            except OSError as error:
                raise _trouble(root, error) from error

    def adopt_run_id(self, run_id: str) -> RunDirectory:
        """The same directory, with `run_id` as its run id, in `config.yaml` too.

        Called by the launcher that prepared it, while it holds the lock and before any rank reads the id; only for a
        directory without a commit, since a checkpoint carries the id of its run. Raises RunDirectoryError if
        `config.yaml` cannot be written.
        """
        if run_id == self.run_id:
            return self
        before = self.config_file.read_bytes() if self._prepared is None else self._prepared
        prepared = _with_header(before.decode(), run_id).encode()
        adopted = None if self._adopted is None else _with_header(self._adopted.decode(), run_id).encode()
        try:
            replace_file(self.config_file, prepared, is_durable=True)
        except OSError as error:
            raise _trouble(self.path, error) from error
        return replace(self, _prepared=prepared, _adopted=adopted)

    def adopt_config(self) -> None:
        """Replace the `config.yaml` of an earlier start by this one's, once every rank has accepted the run.

        Called by the launcher while it holds the lock; changes nothing if the launcher shares the directory of another
        launcher and made it as `RunDirectory(path)`. Raises RunDirectoryError if it cannot be written.
        """
        if self._adopted is None or self._adopted == self._prepared:
            return
        try:
            replace_file(self.config_file, self._adopted, is_durable=True)
        except OSError as error:
            raise _trouble(self.path, error) from error

    @contextlib.contextmanager
    def restore(self, config_yaml: bytes) -> Iterator[None]:
        """Recreate the deleted files of `prepare` and `lock`; locked as long as the block lasts.

        Called by the launcher that had made it. Raises RunDirectoryError if that fails or another run has the path now.
        """
        _make_root(self.path)
        with RunDirectory(self.path).lock():
            first_line = _first_line(self.config_file)
            if first_line and first_line != _first_line_of(config_yaml):
                raise RunDirectoryError(f"{self.path} belongs to another run now: stop one of the two")
            try:
                for name in _SUBDIRECTORIES:
                    (self.path / name).mkdir(mode=0o700, exist_ok=True)
                if not first_line:
                    replace_file(self.config_file, config_yaml, is_durable=True)
            except OSError as error:
                raise _trouble(self.path, error) from error
            yield

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other runs out; held by the launcher for its life, and freed by the kernel however it ends.

        Children that exec do not inherit it; a child made by a bare fork would hold it as long as it lives. Raises
        RunDirectoryError naming host and pid of the run that holds it. If the file system has no locks a warning is
        logged and the run continues.
        """
        try:
            descriptor = open_private(self.path / ".lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise _trouble(self.path, error) from error
        try:
            self._take(descriptor)
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, 0)  # no holder is named once the run has ended
        finally:
            os.close(descriptor)

    def _take(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirectoryError(
                f"--save-dir {self.path} is in use by another run ({_holder(descriptor)}): wait for it, stop it, or"
                " choose another --save-dir [run-in-use]"
            ) from None
        except OSError as error:
            logger.warning(
                "cannot lock %s (%s): make sure yourself that no other run uses this directory",
                self.path,
                error.strerror,
            )
        if os.pread(descriptor, 1, 0) not in (b"", b"{"):
            raise RunDirectoryError(
                f"--save-dir {self.path} holds a .lock that is not HetSeq's: choose another --save-dir, or move it away"
            )
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": utc_now()}
        try:
            if self._prepared is not None and self.config_file.read_bytes() != self._prepared:
                raise RunDirectoryError(
                    f"--save-dir {self.path} was taken by another run in the same moment: choose another --save-dir"
                )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json_line(holder), 0)
        except OSError as error:
            raise _trouble(self.path, error) from error


class StatusFile:
    """`status/rank-N.json`: the present state of one rank, for people and for `hetseq top`; written by that rank."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._next_s = -math.inf
        self._has_warned = False

    def is_due(self, now_s: float) -> bool:
        """Whether a second has passed since the last write."""
        return now_s >= self._next_s

    def write(self, now_s: float, *, force: bool = False, **fields: Any) -> None:
        """Replace the file by `fields`, at most once a second unless `force`; `now_s` is the caller's monotonic clock.

        A reader sees the old content or the new one, never a part. Logs one warning if the file cannot be written.
        """
        if not self.is_due(now_s) and not force:
            return
        self._next_s = now_s + _STATUS_INTERVAL_S
        try:
            # Not durable: after a crash of the machine this status is not needed, and an fsync takes time.
            replace_file(self.path, json_line(fields), is_durable=False)
        except OSError as error:
            if not self._has_warned:
                logger.warning("cannot write %s (%s): the run continues without it", self.path, error.strerror)
            self._has_warned = True


def open_private(path: Path, flags: int) -> int:
    """A file descriptor of `path`, new files with mode 0600; a link in its place raises OSError (ELOOP)."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def open_appending(path: Path) -> TextIO:
    """A text file to append lines to, with mode 0600; a link in its place raises OSError (ELOOP)."""
    return os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", buffering=1, encoding="utf-8")


def replace_file(path: Path, data: bytes, *, is_durable: bool) -> None:
    """Make `data` the content of `path`, complete or not at all, with mode 0600."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = open_private(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        try:
            write_all(descriptor, data)
            if is_durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    if is_durable:
        with contextlib.suppress(OSError):  # some file systems refuse to fsync a folder; the content is already safe
            folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def json_line(row: Mapping[str, Any]) -> bytes:
    """One line of strict JSON: floats at full precision, NaN and infinity as null, NumPy and tensors as numbers."""
    return json.dumps(jsonable(row), allow_nan=False).encode() + b"\n"


def utc_now() -> str:
    """This moment for a file that people read, as in 2026-01-31T12:00:00.000Z; no decision is made from it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def jsonable(value: Any) -> Any:
    """The value as strict JSON: NaN and infinity as null, NumPy and tensors as numbers, anything else as text."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy and torch, neither of which is imported here
        return jsonable(value.tolist())
    return str(value)


def _make_root(root: Path) -> None:
    if os.path.exists(root) and not os.path.isdir(root):
        raise RunDirectoryError(f"--save-dir {root} is a file: choose a directory, such as {root}-run")
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
    except OSError as error:
        raise _trouble(root, error) from error


def _probe(root: Path) -> int:
    """Write a few kB, since only a real write shows a full disk or a quota; returns the user id of the new file."""
    name = root / f".probe-{secrets.token_hex(8)}"
    try:
        descriptor = open_private(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            try:
                write_all(descriptor, bytes(_PROBE_BYTES))
                os.fsync(descriptor)
                return os.fstat(descriptor).st_uid
            finally:
                os.close(descriptor)
        finally:
            os.unlink(name)
    except OSError as error:
        raise _trouble(root, error) from error


def check_unused(path: str | os.PathLike[str], *, begins_anew: bool) -> None:
    """Raise RunDirectoryError for a folder that is not of a run and holds files; reads only, takes no time.

    `begins_anew`: the run loads no checkpoint (--resume none), and may begin beside checkpoints of 2020.
    """
    root = Path(os.path.abspath(path))
    if not os.path.isdir(root) or _first_line(root / "config.yaml").startswith(MARKER):
        return
    _refuse_foreign(root)
    pickles = sorted(file.name for file in root.glob("checkpoint*.pt"))
    if pickles and not begins_anew:
        raise RunDirectoryError(
            f"--save-dir {root} holds checkpoints of the HetSeq of 2020 ({_some(pickles)}): they are pickles, which can"
            " run any code when loaded, so this HetSeq cannot resume from them. Choose another --save-dir, or begin"
            " anew beside them with --resume none"
        )


def _refuse_foreign(root: Path) -> None:
    """Raise RunDirectoryError if something here could be overwritten, or if the folder has another purpose."""
    # An empty folder is accepted: a job script may have run `mkdir -p RUN/log`.
    foreign = [name for name in _OUR_FILES if os.path.lexists(root / name)]
    foreign += [f"{name}/" for name in _SUBDIRECTORIES if os.path.lexists(root / name) and not _is_unused(root / name)]
    if foreign:
        raise RunDirectoryError(
            f"--save-dir {root} holds {_some(foreign)}, but no config.yaml that begins with `{MARKER}`: files of"
            " another program would be overwritten. Choose another --save-dir, or move them away"
        )
    others = [name for name in sorted(_names_in(root)) if not _is_by_the_way(name) and not _is_unused(root / name)]
    if others:
        shown = [f"{name}/" if os.path.isdir(root / name) else name for name in others]
        raise RunDirectoryError(
            f"--save-dir {root} is no run directory, and holds {_some(shown)}: a run needs a folder of its own. Choose"
            f" another --save-dir, such as {root / 'runs' / 'first'}"
        )


def _is_by_the_way(name: str) -> bool:
    """Whether a file is one that queues, shells and file systems leave where a job runs, or our own of this moment."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _BY_THE_WAY)


def _is_unused(path: Path) -> bool:
    """Whether this is a folder without files of interest."""
    return os.path.isdir(path) and not path.is_symlink() and all(map(_is_by_the_way, _names_in(path, ["?"])))


def _names_in(folder: Path, otherwise: Sequence[str] = ()) -> Sequence[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return otherwise


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _trouble(path: Path, error: OSError) -> RunDirectoryError:
    words, remedy = _TROUBLES.get(error.errno or 0, (error.strerror or str(error), "choose another --save-dir"))
    where = f"--save-dir {path} cannot be used: {words}"
    existing = next((parent for parent in (path, *path.parents) if os.path.exists(parent)), path)
    if existing != path:
        where += f"; it would have to be made in {existing}"
    if error.errno in (errno.EACCES, errno.EPERM):
        with contextlib.suppress(OSError):
            found = existing.stat()
            where += f" ({existing}: owner {_user_name(found.st_uid)}, mode {stat.S_IMODE(found.st_mode):04o})"
    return RunDirectoryError(f"{where}. Please {remedy}")


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user id {uid}"


def _first_line(config_file: Path) -> str:
    """The first line of `config.yaml`; empty if there is none that can be read."""
    try:
        with config_file.open("rb") as file:
            return _first_line_of(file.read(200))
    except OSError:
        return ""


def _first_line_of(config_yaml: bytes) -> str:
    return config_yaml[:200].partition(b"\n")[0].decode(errors="replace")


def _with_header(config_yaml: str, run_id: str) -> str:
    header = f"{MARKER}, run id {run_id}; repeat the run with --config\n"
    if config_yaml.startswith(MARKER):
        _, _, config_yaml = config_yaml.partition("\n")
    return header + config_yaml


def _holder(descriptor: int) -> str:
    """The writer of `.lock`: host, pid and start time, in words. It writes them just after it has the lock."""
    until_s = time.monotonic() + _HOLDER_S
    while True:
        try:
            holder = json.loads(os.pread(descriptor, 4096, 0))
            return f"pid {holder['pid']} on {holder['host']}, started {holder['started']}"
        except (OSError, ValueError, KeyError, TypeError):
            if time.monotonic() > until_s:
                return "which is unknown"
        time.sleep(0.02)
