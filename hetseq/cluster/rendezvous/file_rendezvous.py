"""File rendezvous: how launchers that share only a directory (`file://PATH`) elect one of them as head.

Elects one head per attempt, tells the others where it listens, replaces an attempt whose head has died, and leaves no
files behind. It opens no connections: the caller checks whether a head answers, and the nodes then talk over the
control channel.

The one idea: attempts are the versions of one key, `attempt-NAME.1`, `.2`, and so on (`file_store`). A launcher that
publishes the next number becomes head if a second look shows that number as the newest; all others follow it
(`leader_election`). A head that ends publishes one more number, its last record. While that exists no other launcher
acts, so the head can remove the whole chain, lowest number first, and finally the last record itself.

Why lowest first: numbers are counted upwards by name, so the chain looks complete or empty, never like an older
attempt. A launcher that claims number 1 meanwhile looks again, sees the last record above it, and waits.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import logging
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hetseq.cluster.rendezvous.file_store import POLL_S, DirectoryGone, PlaceError, SharedDirectory, Version, trouble
from hetseq.cluster.rendezvous.heartbeat import Heart, read_pulse
from hetseq.cluster.rendezvous.leader_election import (
    BEAT_S,
    LEASE_S,
    NOTHING,
    UNKNOWN,
    Action,
    Kind,
    LeaderRecord,
    Sight,
    Standing,
    Watch,
    decide,
    standing_of,
)
from hetseq.cluster.rendezvous.process_identity import is_alive, this_process
from hetseq.errors import RendezvousError
from hetseq.run_directory import open_private

logger = logging.getLogger(__name__)

ASK_EVERY_S = 5.0
_NOTE = ".other-secret-"
_MADE = "made-by-hetseq"  # marks a directory that a launcher made; it is removed with the last run in it

#: opens the control port, and returns its address and port for other nodes
Listen = Callable[[], tuple[str, int]]
Sleep = Callable[[float], None]
#: whether the head of a record answers, within a few seconds
Answers = Callable[[LeaderRecord], bool]


@dataclass(frozen=True)
class Top:
    """A number of a chain, its record and the record below it; None for a number that is taken but empty."""

    number: int = 0
    record: LeaderRecord | None = None
    below: LeaderRecord | None = None

    @property
    def is_void(self) -> bool:
        """Whether its writer will withdraw it, because it was meant to replace another attempt than the one below."""
        return self.record is not None and self.record.kind is Kind.HEAD and not self.record.stands_on(self.below)


@dataclass
class MeetingAttempt:
    """One attempt to start a run: its head, and a private store for its members.

    `heart` is the heartbeat of the head, None on all other launchers. Every launcher calls `close` at the end.
    """

    number: int
    head: LeaderRecord
    is_head: bool
    directory: SharedDirectory
    heart: Heart | None
    _chain: _Chain
    _sleep: Sleep
    _is_closed: bool = False
    _has_successor: bool = False  # as of the last check

    def show_life(self) -> None:
        """Write the heartbeat and check whether this head was replaced; the head calls this about twice a second.

        May hang as long as the file system does; `standing` does not wait for it.
        """
        if self.heart is not None:
            self.heart.beat()
            with contextlib.suppress(OSError, RendezvousError):
                self._has_successor = self.is_superseded()

    def standing(self) -> Standing:
        """How sure this head can be that it still leads."""
        assert self.heart is not None
        return standing_of(self.heart.silence_s, is_superseded=self._has_successor)

    def is_superseded(self) -> bool:
        """Whether another launcher considered this attempt dead and replaced it; the head checks regularly."""
        return self._chain.is_superseded(self.number, self.head)

    def strangers(self) -> list[str]:
        """Hosts of nodes with another secret that used the directory since the last call; called by the head."""
        return take_notes(self._chain.store.path)

    def close(self) -> None:
        """Remove the files of the attempt, if this is its head; may be called twice. Never raises."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self.is_head:
                self._chain.retire(self.number, self.head, self._sleep)
                remove_place(self._chain.store.path)
        except DirectoryGone:
            pass
        except (OSError, RendezvousError) as error:
            if not isinstance(error, OSError) or error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                logger.warning("some files are left in %s: %s", self._chain.store.path, error)


@dataclass(frozen=True)
class Patience:
    """How long a launcher searches, and how much later than possible it replaces a dead head (`decide`)."""

    timeout_s: float = 120.0
    head_start_s: float = 0.0


def find_attempt(
    path: Path,
    key: bytes,
    *,
    listen: Listen,
    name: str = "run",
    answers: Answers | None = None,
    patience: Patience = Patience(),
    now: Callable[[], float] = time.monotonic,
    sleep: Sleep = time.sleep,
) -> MeetingAttempt:
    """The attempt of run `name` in `file://PATH`: the live one, or else a new one. Every launcher calls this.

    `listen` is called at most once, only when this launcher tries to become head; if another one wins (`is_head` is
    false), the caller closes that port. `answers` saves waiting for the heartbeat of a head on another machine.
    Attempts with different names are independent. Raises RendezvousError if the directory
    cannot be used, or after `patience.timeout_s` without a result.
    """
    deadline_s = now() + patience.timeout_s
    endpoint: list[tuple[str, int]] = []

    def listen_once() -> tuple[str, int]:
        if not endpoint:
            endpoint.append(listen())
        return endpoint[0]

    while True:
        try:
            place = find_place(path)
            chain = _Chain(SharedDirectory.open(place, key), key, f"attempt-{name}", now)
            return _DirectorySearch(chain, listen_once, answers, patience.head_start_s).run(deadline_s, sleep)
        except DirectoryGone:  # a run that ends removes an empty directory that it made
            if now() >= deadline_s:
                raise
            sleep(POLL_S)


def find_place(path: Path) -> Path:
    """The directory for `file://PATH`; if it is missing, it is created with a marker file in it.

    If PATH is a file, such as one left by HetSeq in 2020, it is left alone and `PATH.hetseq` is used instead. Raises
    RendezvousError if the parent is missing or the directory cannot be created.
    """
    place = Path(os.path.abspath(path))
    found = _what_is(place)
    if found == "file":
        place = place.with_name(place.name + ".hetseq")
        logger.warning("%s is a file and stays as it is: the nodes meet in %s [old-file]", path, place)
        found = _what_is(place)
        if found == "file":
            raise PlaceError(f"{path} and {place} are files, a directory was expected: name another path")
    if found == "directory":
        return place
    if not place.parent.is_dir():
        missing = next(parent for parent in reversed(place.parents) if not parent.is_dir())
        raise PlaceError(
            f"the directory {missing} does not exist on {socket.gethostname()}, so the nodes cannot meet in {place}."
            " If it exists on another node, it is not shared: mount it here, or use tcp://HOST:PORT"
            " [directory-missing]"
        )
    try:
        os.mkdir(place, 0o700)
        os.close(open_private(place / _MADE, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        pass  # another node was first
    except OSError as error:
        raise trouble(place, error) from error
    return place


def leave_note(place: Path) -> None:
    """Let the head know that this node was here with another secret; of this note the head trusts only the name."""
    with contextlib.suppress(OSError):
        host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())[:64]
        os.close(open_private(place / f"{_NOTE}{host}", os.O_WRONLY | os.O_CREAT))


def take_notes(place: Path) -> list[str]:
    """The hosts of nodes with another secret that left a note since the last call; called by the head."""
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(place) if re.fullmatch(re.escape(_NOTE) + r"[A-Za-z0-9._-]{1,64}", name)]
        for name in names:
            os.unlink(place / name)
        return [name.removeprefix(_NOTE) for name in names]
    return []


def remove_place(place: Path) -> None:
    """Remove a directory that `find_place` made, on any node, if it is otherwise empty."""
    take_notes(place)
    with contextlib.suppress(OSError):
        if os.listdir(place) != [_MADE]:
            return
        os.unlink(place / _MADE)
        try:
            os.rmdir(place)
        except OSError:  # another launcher has come in the meantime, and will remove it at its end
            os.close(open_private(place / _MADE, os.O_WRONLY | os.O_CREAT | os.O_EXCL))


class _Chain:
    """The attempts of one name, as records; `key` as for the store."""

    def __init__(self, store: SharedDirectory, key: bytes, name: str, now: Callable[[], float]) -> None:
        self.store = store
        self.name = name
        self.now = now
        self._key = key

    def top(self) -> Top:
        """The newest number of the chain and its record."""
        top = Top()
        for version in self.store.versions(self.name):
            top = Top(version.number, self.record_of(version), top.record)
        return top

    def at(self, number: int) -> Top:
        """One number of the chain; `Top()` if the chain does not reach it."""
        below: LeaderRecord | None = None
        for version in self.store.versions(self.name):
            record = self.record_of(version)
            if version.number == number:
                return Top(number, record, below)
            below = record
        return Top()

    def record_of(self, version: Version) -> LeaderRecord | None:
        """The record in a version, None if it is empty. Raises RendezvousError if another HetSeq version wrote it."""
        try:
            return None if version.content is None else LeaderRecord.decode(version.content)
        except ValueError as error:
            raise RendezvousError(
                f"{self.store.file(self.name, version.number)} was written by another version of HetSeq ({error}): use"
                " one version on all nodes, or another directory"
            ) from None

    def key_of(self, nonce: str) -> bytes:
        """The key of one attempt; values written for another attempt do not verify."""
        return hmac.new(self._key, b"hetseq attempt\0" + nonce.encode(), hashlib.sha256).digest()

    def directory_of(self, nonce: str) -> SharedDirectory:
        """The store of one attempt."""
        return self.store.folder(f"{self.name}-{nonce}", self.key_of(nonce))

    def heart_of(self, nonce: str) -> Path:
        """The heartbeat file of an attempt's head."""
        return self.directory_of(nonce).path / "heart"

    def is_superseded(self, number: int, head: LeaderRecord) -> bool:
        """Whether an attempt was replaced, not just the next number claimed by mistake for a moment."""
        above = self.at(number + 1).record
        return above is not None and above.after == head.nonce and above.nonce != head.nonce

    def retire(self, number: int, head: LeaderRecord, sleep: Sleep) -> None:
        """Publish the last record and remove the chain; if there is a newer head, remove only the own directory.

        Newcomers wait for SILENCE_S after the last record before they continue; the head stops well before that.
        """
        own_number, last = number, replace(head, kind=Kind.ENDED)
        asked_s = self.now()
        while True:
            began_s = self.now()
            if self.store.publish(self.name, last.encode(), version=number + 1):
                top = self.top()
                if top.record == last:
                    number = top.number
                    break
                if top.record is None or is_alive(top.record.process) is not False:
                    return
                # The last record closed a gap; above it are leftovers of a head that died while removing its chain.
                number = top.number
            elif self.is_superseded(own_number, head) or began_s - asked_s > 3 * BEAT_S:
                self.directory_of(head.nonce).clear()
                return
            else:
                sleep(POLL_S)  # the number was claimed by mistake, and is withdrawn at once
        for version in self.store.versions(self.name):  # dead heads left their directories
            record = self.record_of(version)
            if record is not None:
                self.directory_of(record.nonce).clear()
        above = [left for left in self.store.listed(self.name) if left > number]  # beyond another gap
        for left in [*above, *range(1, number + 1)]:
            if self.now() - began_s > LEASE_S:
                return
            self.store.remove(self.name, left)
        self.store.sweep()


class _DirectorySearch:
    """Executes the election: looks, calls `decide`, and acts, until this launcher leads or follows."""

    def __init__(self, chain: _Chain, listen: Listen, answers: Answers | None, head_start_s: float) -> None:
        self._chain = chain
        self._listen = listen
        self._answers, self._head_start_s = answers, head_start_s
        self._hearts: dict[str, Heart] = {}  # nonce -> heartbeat of a number that this launcher has won
        self._next_ask_s = -1.0
        self._asked = ""

    def run(self, deadline_s: float, sleep: Sleep) -> MeetingAttempt:
        watch = Watch()
        try:
            while True:
                top = self._chain.top()
                watch, action = decide(watch, self._sight(top), self._chain.now(), head_start_s=self._head_start_s)
                if action in (Action.LEAD, Action.FOLLOW):
                    # Look again: while a chain is being removed, the first look may have seen only its beginning.
                    if self._chain.top() == top and top.record is not None:
                        return self._attempt(top.number, top.record, sleep)
                elif action is Action.CLAIM and self._claim(top):
                    continue
                if self._chain.now() >= deadline_s:
                    raise RendezvousError(_late(self._chain.store.path, top.number, top.record))
                sleep(POLL_S)
        except BaseException:
            self._withdraw_all(sleep)
            raise

    def _sight(self, top: Top) -> Sight:
        number, record = top.number, top.record
        if record is None:
            return Sight(Kind.EMPTY if number else Kind.NONE, number)
        kind = Kind.EMPTY if top.is_void else record.kind
        sight = Sight(kind, number, record.nonce, record.nonce in self._hearts, is_alive(record.process))
        if sight.kind is not Kind.HEAD or sight.life is not None:
            return sight
        pulse = read_pulse(self._chain.heart_of(record.nonce), self._chain.key_of(record.nonce))
        return replace(sight, pulse=pulse, has_answered=self._ask(record))

    def _ask(self, record: LeaderRecord) -> bool:
        now_s = self._chain.now()
        if self._answers is None or (self._asked == record.nonce and now_s < self._next_ask_s):
            return False
        self._asked, self._next_ask_s = record.nonce, now_s + ASK_EVERY_S
        return self._answers(record)

    def _claim(self, top: Top) -> bool:
        """Try to win the number above `top`; True if this launcher won it and it is not void."""
        address, port = self._listen()
        nonce = secrets.token_hex(8)
        after = top.record.nonce if top.record is not None else UNKNOWN if top.number else NOTHING
        mine = LeaderRecord(Kind.HEAD, nonce, socket.gethostname(), address, port, this_process(), after)
        chain, number = self._chain, top.number + 1
        if not chain.store.publish(chain.name, mine.encode(), version=number):
            return False
        # The dead attempt may have been removed meanwhile, so that this number is above another launcher's.
        if top.number and chain.at(number) != Top(number, mine, top.record):
            chain.store.remove(chain.name, number)
            return False
        directory = chain.directory_of(nonce)
        directory.make()
        self._hearts[nonce] = Heart(chain.heart_of(nonce), chain.key_of(nonce), now=chain.now)
        self._hearts[nonce].beat()
        return True

    def _attempt(self, number: int, record: LeaderRecord, sleep: Sleep) -> MeetingAttempt:
        heart = self._hearts.get(record.nonce)
        directory = self._chain.directory_of(record.nonce)
        return MeetingAttempt(number, record, heart is not None, directory, heart, self._chain, sleep)

    def _withdraw_all(self, sleep: Sleep) -> None:
        """Remove all own files when the search ends with an error; files left over look like those of a dead head."""
        with contextlib.suppress(OSError, RendezvousError):
            top = self._chain.top()
            if top.record is not None and top.record.nonce in self._hearts:
                self._chain.retire(top.number, top.record, sleep)
            remove_place(self._chain.store.path)


def _late(place: Path, number: int, record: LeaderRecord | None) -> str:
    if record is None:
        return f"no attempt could start in {place}: number {number} is taken but empty; remove the files left there"
    return (
        f"attempt {number} in {place}, of {record.host} (pid {record.process.pid}), neither continued nor ended in"
        f" time: look at {record.host}, or name another shared directory"
    )


def _what_is(place: Path) -> str:
    """`directory`, `file` or `missing`; anything else is refused."""
    try:
        found = os.lstat(place)
        if stat.S_ISLNK(found.st_mode):
            target = os.stat(place)
            # the kernel's rule for links in world-writable folders, where any user can place one
            if found.st_uid not in (0, target.st_uid):
                raise PlaceError(
                    f"{place} is a link of user id {found.st_uid} to a target of user id {target.st_uid}: name the"
                    " directory itself"
                )
            found = target
    except FileNotFoundError:
        if os.path.islink(place):
            raise PlaceError(f"{place} is a link to nothing: remove it, or name another path") from None
        return "missing"
    except NotADirectoryError:
        raise PlaceError(f"one of the parents of {place} is a file: name another path") from None
    except OSError as error:
        raise trouble(place, error) from error
    if stat.S_ISDIR(found.st_mode):
        return "directory"
    if stat.S_ISREG(found.st_mode):
        return "file"
    raise PlaceError(f"{place} is neither a directory nor a file: name another path")
