"""Coordinator client: a launcher's channel to the coordinator, the coordinator itself on the head, and its address.

Opens all of them, and closes them in the right order. A run on one node opens no socket.
"""

from __future__ import annotations

import functools
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetseq.cluster.membership.admission import Claim
from hetseq.cluster.membership.coordinator import Coordinator
from hetseq.cluster.membership.coordinator_server import HubServer, RecordChannel, local_pair
from hetseq.cluster.membership.run_directory_discovery import lies_on_local_disk
from hetseq.cluster.rendezvous.connectivity import Doorstep, Peer, probe
from hetseq.cluster.rendezvous.file_rendezvous import MeetingAttempt
from hetseq.cluster.rendezvous.meet import Meeting, OtherNodes, meet
from hetseq.cluster.rendezvous.secret import copy_command, secret_file
from hetseq.cluster.rendezvous.sockets import ask_when_idle
from hetseq.config.sections import DistributedConfig

_CLOSE_S = 10.0


@dataclass
class Member:
    """One launcher of a run; `channel` connects it to the coordinator."""

    channel: RecordChannel
    address: str  # of this node's interface, for the ranks
    is_head: bool
    _key: bytes = field(repr=False)
    _door: Doorstep | None
    _secret_file: Path
    _closing: ExitStack = field(repr=False)
    sources: tuple[str, ...] = ()  # addresses from which the other nodes connected to the door; set when it closes

    @property
    def door(self) -> int:
        """The port that other nodes probe; 0 if it is closed or the run has one node."""
        return 0 if self._door is None else self._door.port

    def send(self, kind: str, **facts: Any) -> None:
        self.channel.send({"kind": kind, **facts})

    def key_of(self, name: str) -> bytes:
        """The key shared by the ranks of the run with this name only."""
        return hmac.digest(self._key, b"ranks\0" + name.encode(), "sha256")

    def try_peers(self, peers: list[dict[str, Any]]) -> list[str]:
        """Connect to each peer as gloo will. Returns one sentence for each peer that cannot be reached."""
        return probe([Peer(**peer) for peer in peers], self._key, secret_file=self._secret_file) if peers else []

    def become_head(self, hub: Coordinator, meeting: Meeting | None, tell: Callable[[str], None]) -> None:
        """Replace a lost coordinator with `hub`, in this process. With a `meeting` other nodes can join it."""
        if meeting is not None:
            self._closing.callback(_in_time, meeting.close)
        self.channel, self.is_head = _start(hub, meeting, self._secret_file, self._closing, tell), True

    def ask_when_idle(self) -> None:
        """Enable TCP keepalive, so that a silent head is noticed even while this launcher sends nothing."""
        if not self.is_head:
            ask_when_idle(self.channel.fileno())

    def close_door(self) -> None:
        """Close the probe port, once all nodes have tried it."""
        if self._door is not None:
            self.sources = tuple(sorted(self._door.visitors))
            self._door.close()
            self._door = None

    def close(self) -> None:
        """Leave the run; may be called twice. When the head leaves, the run ends for all."""
        self.close_door()
        self._closing.close()


def claim_of(config: DistributedConfig, workers: int) -> Claim:
    """The claim of this node, from its options."""
    host, pid = socket.gethostname(), os.getpid()
    if config.join is not None:
        return Claim(host, pid, workers, None, None, config.min_ranks, config.max_ranks, config.shadow)
    return Claim(host, pid, workers, config.distributed_rank, config.distributed_world_size or workers, None)


def join(
    config: DistributedConfig,
    *,
    others: OtherNodes,
    interface: str | None,
    pause: Callable[[float], None],
    tell: Callable[[str], None],
) -> Member:
    """Find the run and join it, as its head or as a follower; takes the same arguments as `meet`.

    Raises RendezvousError or a subclass if the other nodes cannot be found.
    """
    if config.meeting_url is None:
        closing = ExitStack()
        channel = _serve(config, others, None, closing, tell)
        return Member(channel, "127.0.0.1", True, secrets.token_bytes(32), None, Path(), closing)
    secret = secret_file(config.secret_file)
    meeting = meet(config, pause=pause, tell=tell, others=others, interface=interface)
    with ExitStack() as closing:  # closes everything opened so far if a later step fails
        closing.callback(_in_time, meeting.close)
        door = Doorstep(meeting.address, meeting.key, secret)
        closing.callback(door.close)
        if meeting.listener is not None:
            channel = _serve(config, others, meeting, closing, tell)
        else:
            assert meeting.channel is not None
            channel = meeting.channel
            closing.callback(channel.close, linger_s=0.5)
        kept = closing.pop_all()
    return Member(channel, meeting.address, meeting.is_head, meeting.key, door, secret, kept)


def _show_life(attempt: MeetingAttempt, server: HubServer, secret: Path, tell: Callable[[str], None]) -> None:
    """Write the heartbeat and report rejected nodes; the head in a shared directory does this twice a second."""
    attempt.show_life()
    for host in attempt.strangers():
        server.notes += 1
        tell(
            f"node {host} was sent away: it has another secret (here: {secret}). If it belongs to this run, type there:"
            f" {copy_command(socket.gethostname(), secret)}"
        )


def _in_time(close: Callable[[], None]) -> None:
    """Close in a thread, and wait for it at most `_CLOSE_S`: a hanging file system must not block the launcher."""
    closing = threading.Thread(target=close, name="closing", daemon=True)
    closing.start()
    closing.join(_CLOSE_S)


def _hint_of(url: str) -> str:
    """What to check if no other node appears in a directory."""
    if not url.startswith("file://"):
        return ""
    path = url.removeprefix("file://")
    if lies_on_local_disk(Path(path)):
        return f"{path} is on a local disk of {socket.gethostname()}: is it shared with the other nodes?"
    return f"{path} must be shared by all nodes: a node that waits there and is not named below sees another directory"


def _serve(
    config: DistributedConfig,
    others: OtherNodes,
    meeting: Meeting | None,
    closing: ExitStack,
    tell: Callable[[str], None],
) -> RecordChannel:
    """Start the coordinator in this process; returns this launcher's end of the channel to it."""
    hint = _hint_of(config.meeting_url or "")
    hub = Coordinator(
        join_timeout_s=config.join_timeout, paste=others.command, now_s=time.monotonic(), hint=hint,
        min_ranks=config.min_ranks or 1, quiet_s=others.patience_s,
    )  # fmt: skip
    return _start(hub, meeting, secret_file(config.secret_file), closing, tell)


def _start(
    hub: Coordinator, meeting: Meeting | None, secret: Path, closing: ExitStack, tell: Callable[[str], None]
) -> RecordChannel:
    hubs_end, own_end = local_pair()
    listener = None if meeting is None else meeting.listener
    attempt = None if meeting is None else meeting.attempt
    server = HubServer(hub, hubs_end, listener=listener)
    if attempt is not None:
        server.beat = functools.partial(_show_life, attempt, server, secret, tell)
        server.standing = attempt.standing
    server.start()
    closing.callback(own_end.close)
    closing.callback(server.close)
    return own_end
