"""Rendezvous of the launchers: turns a URL into a channel to the head, or into the head's own listener.

Finds out which launcher leads, retries while others are still starting, and says within seconds which problem there is
and what to type where. It knows no ranks except the number that the 2020 flags give to a node: the roster handles the
claims of nodes, and the coordinator checks that they agree.

The one idea: an address has one owner. With `tcp://` the node that can listen there is the head, and a node that finds
the port taken connects to it; with `file://` the shared directory elects a head. An unreachable head is tried again,
because its command may not have been typed yet. Errors that waiting cannot cure (another program, another secret,
another version, an unknown name) are raised at once.

Calls that may block (a name server, a silent machine) run in a thread, so the launcher can be stopped at any time.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hetseq.cluster.membership.admission import command_of_rank
from hetseq.cluster.rendezvous.channel import (
    Channel,
    ChannelTimeout,
    Listener,
    SecretMismatch,
    StrangerError,
    VersionMismatch,
    connect,
)
from hetseq.cluster.rendezvous.file_rendezvous import MeetingAttempt, Patience, find_attempt, find_place, leave_note
from hetseq.cluster.rendezvous.file_store import OtherSecret
from hetseq.cluster.rendezvous.interfaces import chosen_address, interfaces, is_loopback, outward_address
from hetseq.cluster.rendezvous.leader_election import HEAD_START_S, LeaderRecord
from hetseq.cluster.rendezvous.secret import derive_key, load_secret, secret_file
from hetseq.cluster.rendezvous.sockets import AddressError, UnreachableError, bind, host_text
from hetseq.config.sections import DistributedConfig
from hetseq.errors import RendezvousError, plain

#: how long one attempt waits for an answer; a program that is silent for longer is not a head
PATIENCE_S = 8.0
TELL_EVERY_S = 10.0
#: pause between attempts, growing, so that a node does not look like a port scanner
RETRY_S, RETRY_LONGEST_S, _RETRY_GROWTH = 0.1, 1.0, 1.2
#: how long a port may be in use and still refuse connections: another launcher may be between two steps
TAKEN_S = 5.0
#: how long to wait for a name server
NAME_S = 8.0
#: how long to wait for the answer of a head in a shared directory; its heartbeat is another sign of life
ANSWER_S = 3.0
_GLANCE_S = 0.2
_NAME_TRIES = 2

Pause = Callable[[float], None]
Tell = Callable[[str], None]
_T = TypeVar("_T")


@dataclass(frozen=True)
class OtherNodes:
    """How the other nodes of a run are started."""

    command: str = ""  # to type there, as on this node
    patience_s: float = 0.0  # another program starts them; a missing one is no news before


@dataclass
class Meeting:
    """Result of the rendezvous: `channel` to the head, or `listener` if this launcher is the head.

    `address` is this node's address for gloo, `key` the key of the run's ranks, `url` the URL for the other nodes.
    `attempt` is set with a shared directory; the head must write its heartbeat.
    """

    channel: Channel | None
    listener: Listener | None
    attempt: MeetingAttempt | None
    address: str
    key: bytes
    url: str

    @property
    def is_head(self) -> bool:
        """Whether this launcher leads."""
        return self.listener is not None

    def close(self) -> None:
        """Close all connections, and remove the own files in the shared directory; may be called twice."""
        for end in (self.channel, self.listener, self.attempt):
            if end is not None:
                end.close()


def meet(
    config: DistributedConfig,
    *,
    pause: Pause,
    tell: Tell,
    others: OtherNodes = OtherNodes(),
    interface: str | None = None,
    name: str = "run",
    is_again: bool = False,
    now: Callable[[], float] = time.monotonic,
) -> Meeting:
    """Meet the other launchers at `config.meeting_url`; called once by every launcher.

    `is_again`: the connection to the head of a training run was lost. A directory elects a new head, perhaps this
    launcher, before any newcomer (`HEAD_START_S`); at an address, the old head is tried once, and no other node can
    replace it.

    `pause(seconds)` sleeps, and raises when the launcher must stop; `meet` never blocks for more than a second without
    calling it. `tell` prints a line. `interface` is the value of
    GLOO_SOCKET_IFNAME; runs with different `name` do not meet in a directory.

    Raises RendezvousError when --join-timeout has passed. Raises at once: UnreachableError (unknown name),
    StrangerError (another program), SecretMismatch, VersionMismatch, AddressError (an address it cannot listen at, an
    unknown interface) and SecretError.
    """
    if config.meeting_url is None:
        raise ValueError("no meeting place: a run on one node has no other nodes to meet")
    search = _Search(config, config.meeting_url, _Calls(pause, tell, now), others, interface, name)
    if config.meeting_url.startswith("file://"):
        return search.in_directory(head_start_s=0.0 if is_again else HEAD_START_S)
    return search.at_address_again() if is_again else search.at_address()


def host_and_port(url: str) -> tuple[str, int]:
    """Host and port of `tcp://HOST:PORT`; an IPv6 address without its brackets."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


class _Calls:
    """The caller's functions: to wait, to print a line, to read the clock."""

    def __init__(self, pause: Pause, tell: Tell, now: Callable[[], float]) -> None:
        self.pause, self.now = pause, now
        self._tell = tell
        self._said: dict[str, float] = {}
        self._once: set[str] = set()

    def tell_often(self, kind: str, text: str) -> None:
        """Print a line when a kind of trouble begins, and again every TELL_EVERY_S."""
        if kind not in self._said or self.now() - self._said[kind] >= TELL_EVERY_S:
            self._said[kind] = self.now()
            self._tell(text)

    def tell_once(self, text: str) -> None:
        """Print a line that holds for the whole run, once."""
        if text not in self._once:
            self._once.add(text)
            self._tell(text)

    def beside(self, work: Callable[[], _T], limit_s: float | None = None) -> _T:
        """The result of `work`, run in a thread; TimeoutError after `limit_s`. A result that is late is closed."""
        outcome: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def run() -> None:
            try:
                outcome.set_result(work())
            except BaseException as error:
                outcome.set_exception(error)

        thread = threading.Thread(target=run, name="rendezvous", daemon=True)
        thread.start()
        end = None if limit_s is None else time.monotonic() + limit_s
        try:
            while not concurrent.futures.wait([outcome], timeout=_GLANCE_S).done:
                self.pause(0.0)
                if end is not None and time.monotonic() >= end:
                    raise TimeoutError
        except BaseException:
            outcome.add_done_callback(_close_result)
            raise
        thread.join()
        return outcome.result()


def _close_result(outcome: concurrent.futures.Future[_T]) -> None:
    if outcome.exception() is None:
        result = outcome.result()
        if isinstance(result, Channel | Listener):
            result.close()


class _Search:
    """The search of one launcher for its head."""

    def __init__(
        self, config: DistributedConfig, url: str, calls: _Calls, others: OtherNodes, interface: str | None, name: str
    ) -> None:
        self._here = socket.gethostname()
        self._url, self._calls, self._interface, self._name = url, calls, interface, name
        self._has_given_ranks, self._rank = config.join is None, config.distributed_rank
        head_command = others.command
        if head_command and self._has_given_ranks:
            head_command = command_of_rank(head_command, 0)
        self._remedy = f"Start it with: {head_command}" if head_command else "Start it"
        self._retry_s = RETRY_S
        self._taken_since: float | None = None
        self._timeout_s = config.join_timeout
        self._deadline = calls.now() + config.join_timeout
        self._quiet_until = min(calls.now() + others.patience_s, self._deadline)
        chosen_address(outward_address(), interface, tell=lambda _: None)  # report a mistyped interface before all else
        # the default folder is created, a folder named by the user is not
        named = None if config.secret_file == DistributedConfig().secret_file else config.secret_file
        secret = load_secret(named, sleep=calls.pause)
        self._secret_file = secret_file(named)
        self._control_key = derive_key(secret, "control")
        self._directory_key = derive_key(secret, "directory")
        self._ranks_key = derive_key(secret, "ranks")

    # tcp://HOST:PORT

    def at_address(self) -> Meeting:
        """Listen at the address if it is free and local (with fixed ranks: only as rank 0), else connect to it."""
        host, port = host_and_port(self._url)
        self._refuse_unspecified(host, port)
        target = self._target(host)
        place = f"{host_text(host)}:{port}"
        misses = 0
        while True:
            taken = None
            try:
                if not self._has_given_ranks or self._rank == 0:
                    listener, taken = self._try_to_listen(target, port)
                    if listener is not None:
                        return self._as_head(listener, None)
                return self._as_follower(self._connect(target, port), None)
            except UnreachableError as error:
                misses += error.reason == "name"
                if misses >= _NAME_TRIES:
                    raise
                if error.reason != "name":
                    self._raise_if_ours(place, taken)
                    self._complain(place, host, error)
            except (StrangerError, ChannelTimeout) as error:
                raise self._with_holder(error, target, port, taken) from error
            self._wait()

    def at_address_again(self) -> Meeting:
        """Connect to the head that listened there, if it still does."""
        host, port = host_and_port(self._url)
        return self._as_follower(self._connect(self._target(host), port), None)

    def _try_to_listen(self, host: str, port: int) -> tuple[Listener | None, AddressError | None]:
        """The listener, or the error: the port is in use, or the address is another machine's."""
        try:
            return self._calls.beside(
                lambda: Listener(host, port, key=self._control_key, secret_file=self._secret_file)
            ), None
        except AddressError as error:
            if _number(error) in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                return None, error
            raise

    def _raise_if_ours(self, place: str, taken: AddressError | None) -> None:
        """Raise if no other node can help: rank 0 is on the wrong node, or the port is in use but never answers."""
        if taken is None or _number(taken) != errno.EADDRINUSE:
            self._taken_since = None
        elif self._taken_since is None:
            self._taken_since = self._calls.now()
        elif self._calls.now() - self._taken_since >= TAKEN_S:
            raise taken
        if taken is not None and self._has_given_ranks and _number(taken) == errno.EADDRNOTAVAIL:
            addresses = ", ".join(dict.fromkeys(one.address for one in interfaces()))
            raise AddressError(
                f"{self._here} has --distributed-rank 0, which listens at {place}, but that is not an address of"
                f" {self._here} (it has {addresses}): correct the address on all nodes, or the rank here"
            ) from taken

    def _complain(self, place: str, host: str, error: UnreachableError) -> None:
        """Tell the user the problem and the command to type; raise when the time is over."""
        if self._calls.now() < self._quiet_until:
            return
        hint = ""
        if is_loopback(host) or host == "localhost":
            hint = f" ({host} is {self._here} itself; for a head on another machine give an address of that machine)"
        self._again_or_raise(
            error.reason,
            f"Node {self._here} cannot reach the head {place} ({_cause(error, place.rpartition(':')[2])}). Is it"
            f" started? [head-unreachable]{hint} {self._remedy}",  # the code comes before the command to paste
            error,
        )

    def _again_or_raise(self, kind: str, text: str, error: Exception) -> None:
        if self._calls.now() >= self._deadline:
            raise RendezvousError(
                f"{text}. {self._here} gave up after {self._timeout_s:g} s (--join-timeout)"
            ) from error
        self._calls.tell_often(kind, text)

    def _with_holder(
        self, error: StrangerError | ChannelTimeout, host: str, port: int, taken: AddressError | None
    ) -> RendezvousError:
        """The error, with the name of the program on the port if it runs on this machine."""
        if isinstance(error, SecretMismatch | VersionMismatch):
            return error
        if taken is None:
            taken = self._calls.beside(lambda: _why_taken(host, port))
        if taken is None or _number(taken) != errno.EADDRINUSE:
            return error
        return AddressError(f"{plain(str(taken))}. (The program there is not a HetSeq of this run: {error})")

    def _refuse_unspecified(self, host: str, port: int) -> None:
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host).is_unspecified:
                raise AddressError(
                    f"the nodes cannot meet at tcp://{host_text(host)}:{port}: {host} means every interface of each"
                    " machine. Give the address of the head"
                )

    def _target(self, host: str) -> str:
        """The host to dial or listen at; a name that means 127.0.1.1 on its own machine is replaced there.

        Debian writes such a line into /etc/hosts. No other machine could reach a head that listens there, and other
        launchers on this machine must use the same address as the head.
        """
        if host == "localhost" or _is_numeric(host):
            return host
        try:
            found = self._calls.beside(lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM), NAME_S)
        except TimeoutError as error:
            raise UnreachableError(
                f"{host} is not known on {self._here} (the name server does not answer): use its IP address"
                " [head-unknown]",
                reason="name",
            ) from error
        except OSError:
            return host  # dialing it will report the error
        addresses = [str(address[0]) for *_, address in found]
        outside = [address for address in addresses if not is_loopback(address)]
        if outside:
            return host if len(outside) == len(addresses) else outside[0]
        outward = chosen_address(outward_address(), self._interface, tell=lambda _: None)
        if is_loopback(outward):
            return host
        self._calls.tell_once(
            f"{host} means {addresses[0]} on {self._here}, which no other machine reaches: {outward} is used instead."
            " If the others cannot reach that, give an IP address in place of the name [loopback-name]"
        )
        return outward

    # file://PATH

    def in_directory(self, *, head_start_s: float) -> Meeting:
        """Lead or follow according to the directory; look again if the head that it names does not answer."""
        path = Path(self._url.removeprefix("file://"))
        while True:
            call = _Answering(self)
            attempt = None
            try:
                attempt = find_attempt(
                    path,
                    self._directory_key,
                    listen=call.listen,
                    name=self._name,
                    answers=call.answers,
                    patience=Patience(max(0.0, self._deadline - self._calls.now()), head_start_s),
                    now=self._calls.now,
                    sleep=self._calls.pause,
                )
                if attempt.is_head:
                    return self._as_head(call.take_listener(), attempt)
                channel = call.take_channel(attempt.head) or self._reach(attempt.head)
                if channel is not None:
                    return self._as_follower(channel, attempt)
                attempt.close()
            except OtherSecret:
                leave_note(find_place(path))
                raise
            except BaseException:
                if attempt is not None:
                    attempt.close()
                raise
            finally:
                call.close()
            self._wait()

    def _reach(self, head: LeaderRecord) -> Channel | None:
        """The channel to an elected head; None to look again, since a head that is just ending does not answer."""
        try:
            return self._connect(head.address, head.port)
        except (SecretMismatch, VersionMismatch):
            raise
        except UnreachableError as error:
            trouble: RendezvousError = error
            kind, cause = error.reason, _cause(error, str(head.port))
        except (StrangerError, ChannelTimeout) as error:
            trouble = error
            kind, cause = "stranger", f"another program may have its port by now: {error}"
        hint = ""
        if is_loopback(head.address) and head.host != self._here:
            hint = f"; only {head.host} itself reaches {head.address}, set GLOO_SOCKET_IFNAME there"
        place = f"{head.host} (pid {head.process.pid}, {host_text(head.address)}:{head.port})"
        self._again_or_raise(kind, f"Node {self._here} cannot reach the head {place}: {cause}{hint}", trouble)
        return None

    # both

    def _connect(self, host: str, port: int, patience_s: float | None = None) -> Channel:
        left_s = max(1.0, self._deadline - self._calls.now())
        deadline = time.monotonic() + min(PATIENCE_S if patience_s is None else patience_s, left_s)
        return self._calls.beside(
            lambda: connect(host, port, self._control_key, deadline=deadline, secret_file=self._secret_file)
        )

    def _wait(self) -> None:
        self._calls.pause(self._retry_s)
        self._retry_s = min(RETRY_LONGEST_S, self._retry_s * _RETRY_GROWTH)

    def _as_head(self, listener: Listener, attempt: MeetingAttempt | None) -> Meeting:
        return self._meeting(None, listener, attempt, str(listener.host))

    def _as_follower(self, channel: Channel, attempt: MeetingAttempt | None) -> Meeting:
        return self._meeting(channel, None, attempt, channel.host)

    def _meeting(
        self, channel: Channel | None, listener: Listener | None, attempt: MeetingAttempt | None, way: str
    ) -> Meeting:
        meeting = Meeting(channel, listener, attempt, way, self._ranks_key, self._url)
        try:
            meeting.address = chosen_address(way, self._interface, tell=self._calls.tell_once)
        except BaseException:
            meeting.close()
            raise
        return meeting


class _Answering:
    """Callbacks of `find_attempt`: opens a port, and checks whether a head answers. Keeps the open sockets."""

    def __init__(self, search: _Search) -> None:
        self._search = search
        self._listener: Listener | None = None
        self._channels: dict[str, Channel] = {}  # nonce of a head -> the channel by which it answered

    def listen(self) -> tuple[str, int]:
        search = self._search
        address = chosen_address(outward_address(), search._interface, tell=lambda _: None)
        self._listener = Listener(address, 0, key=search._control_key, secret_file=search._secret_file)
        return str(self._listener.host), self._listener.port

    def answers(self, record: LeaderRecord) -> bool:
        """Whether a head proves itself at its port; a silent port or another program is not a head."""
        if record.nonce not in self._channels:
            try:
                self._channels[record.nonce] = self._search._connect(record.address, record.port, ANSWER_S)
            except (SecretMismatch, VersionMismatch):
                raise
            except RendezvousError:
                return False
        return True

    def take_listener(self) -> Listener:
        listener, self._listener = self._listener, None
        if listener is None:
            raise RuntimeError("the head has not opened a port")
        return listener

    def take_channel(self, head: LeaderRecord) -> Channel | None:
        return self._channels.pop(head.nonce, None)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for channel in self._channels.values():
            channel.close()


def _why_taken(host: str, port: int) -> AddressError | None:
    """The error of listening at an address of this machine, which names the program there; None if the port is free."""
    try:
        bind(host, port).close()
    except AddressError as error:
        return error
    except UnreachableError:
        pass
    return None


def _number(error: AddressError) -> int | None:
    return error.__cause__.errno if isinstance(error.__cause__, OSError) else None


def _cause(error: UnreachableError, port: str) -> str:
    if error.reason == "refused":
        return "connection refused"
    if error.reason == "timeout":
        return f"no answer: the machine is off, or a firewall drops packets to port {port}"
    return f"{_strerror(error)}: no route leads there, or a firewall refuses"


def _strerror(error: UnreachableError) -> str:
    cause = error.__cause__
    return cause.strerror or str(cause) if isinstance(cause, OSError) else str(error)


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
