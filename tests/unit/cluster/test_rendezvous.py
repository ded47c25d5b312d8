"""Launchers meet at an address or in a directory: one leads, the others reach it, and whoever cannot is told why."""

from __future__ import annotations

import contextlib
import errno
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetseq.cluster.membership.admission import command_of_rank
from hetseq.cluster.rendezvous import channel as channel_module
from hetseq.cluster.rendezvous import meet as rendezvous
from hetseq.cluster.rendezvous.channel import (
    Channel,
    ChannelClosed,
    ChannelTimeout,
    SecretMismatch,
    StrangerError,
    VersionMismatch,
)
from hetseq.cluster.rendezvous.meet import Meeting, OtherNodes, host_and_port, meet
from hetseq.cluster.rendezvous.sockets import AddressError, UnreachableError
from hetseq.config.sections import DistributedConfig
from hetseq.errors import EXIT_DISAGREE, EXIT_FAILED, EXIT_USAGE, RendezvousError

HERE = socket.gethostname()
LINE = "hetseq train --distributed-rank 1 --lr 0.1"


class Stopped(Exception):
    """The user stops the launcher."""


class Launcher:
    """A launcher whose clock only moves when it pauses; it remembers what it told."""

    def __init__(self, secret: Path, *, stop_after: int = 10**9) -> None:
        self.secret, self.passed_s, self.pauses_left = secret, 0.0, stop_after
        self.told: list[str] = []

    def pause(self, seconds: float) -> None:
        self.passed_s += seconds
        self.pauses_left -= 1
        if self.pauses_left < 0:
            raise Stopped

    def meet(self, url: str, rank: int | None = None, *, timeout_s: float = 60.0, **options: Any) -> Meeting:
        """With --join, or as the node of a given rank."""
        common: dict[str, Any] = {"secret_file": str(self.secret), "join_timeout": timeout_s}
        config = (
            DistributedConfig(join=url, min_ranks=2, **common)
            if rank is None
            else DistributedConfig(
                distributed_init_method=url, distributed_world_size=2, distributed_rank=rank, **common
            )
        )
        return meet(
            config, pause=self.pause, tell=self.told.append, now=lambda: 1000 + self.passed_s,
            **{"others": OtherNodes(LINE), "interface": "lo", **options},
        )  # fmt: skip


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    return tmp_path / "secret"


@pytest.fixture
def launcher(secret: Path) -> Launcher:
    return Launcher(secret)


@pytest.fixture
def port() -> int:
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        return int(asking.getsockname()[1])


@contextlib.contextmanager
def welcoming(head: Meeting) -> Iterator[queue.Queue[Channel]]:
    """The head's hub: lets peers in, and closes the meeting in the end."""
    came: queue.Queue[Channel] = queue.Queue()

    def let_in() -> None:
        assert head.listener is not None
        with contextlib.suppress(ChannelClosed):
            while True:
                with contextlib.suppress(ChannelTimeout):
                    came.put(head.listener.accept(60))

    thread = threading.Thread(target=let_in)
    thread.start()
    try:
        yield came
    finally:
        head.close()
        thread.join()
        while not came.empty():
            came.get().close()


@contextlib.contextmanager
def foreign(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Another program at a port of this machine."""
    listening = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connections.append(listening.accept()[0])
                answer(connections[-1])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in (*connections, listening):
            connection.close()


def as_http(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def as_silent(connection: socket.socket) -> None:
    pass


def tcp(port: int, host: str = "127.0.0.1") -> str:
    return f"tcp://{host}:{port}"


# tcp://


def test_with_given_ranks_rank_zero_leads_and_the_other_reaches_it(port: int, secret: Path) -> None:
    head = Launcher(secret).meet(tcp(port), 0)
    assert head.is_head
    assert head.channel is None
    with welcoming(head), contextlib.closing(Launcher(secret).meet(tcp(port), 1)) as follower:
        assert follower.channel is not None
        assert follower.listener is None
        assert not follower.is_head
        assert follower.channel.peer == f"127.0.0.1:{port}"
        assert follower.key == head.key
        assert len(head.key) == 32
        assert (head.address, follower.address) == ("127.0.0.1", "127.0.0.1")
        assert head.url == follower.url == tcp(port)
        assert head.attempt is None
        assert follower.attempt is None


def test_with_join_whoever_is_first_leads_and_the_next_two_join_it(port: int, secret: Path) -> None:
    head = Launcher(secret).meet(tcp(port))
    with welcoming(head) as came:
        followers = [Launcher(secret).meet(tcp(port)) for _ in range(2)]
        for at, follower in enumerate(followers):
            assert follower.channel is not None
            follower.channel.send({"at": at})
        for at, follower in enumerate(followers):
            with came.get(timeout=10) as channel:
                assert channel.receive(10) == {"at": at}
            follower.close()


def test_another_secret_gives_another_key(port: int, tmp_path: Path, secret: Path) -> None:
    keys = []
    for file in (secret, secret, tmp_path / "other"):
        with contextlib.closing(Launcher(file).meet(tcp(port))) as head:
            keys.append(head.key)
    assert keys[0] == keys[1] != keys[2]


def test_of_eight_launchers_that_join_in_one_moment_one_leads(port: int, secret: Path) -> None:
    meetings: list[Meeting] = []
    gate, led = threading.Barrier(8), threading.Event()

    def launch() -> None:
        gate.wait()
        meeting = Launcher(secret).meet(tcp(port))
        meetings.append(meeting)
        if meeting.is_head:
            with welcoming(meeting):
                led.wait()

    threads = [threading.Thread(target=launch) for _ in range(8)]
    for thread in threads:
        thread.start()
    deadline = threading.Event()
    for _ in range(400):
        if len(meetings) == 8:
            break
        deadline.wait(0.02)
    led.set()
    for thread in threads:
        thread.join()
    assert [meeting.is_head for meeting in meetings].count(True) == 1
    assert len(meetings) == 8
    for meeting in meetings:
        meeting.close()


def test_two_launchers_with_rank_zero_meet_so_that_the_roster_can_name_both(port: int, secret: Path) -> None:
    head = Launcher(secret).meet(tcp(port), 0)
    with welcoming(head), contextlib.closing(Launcher(secret).meet(tcp(port), 0)) as second:
        assert second.channel is not None


def test_a_head_that_was_lost_and_still_answers_leads(port: int, secret: Path) -> None:
    head = Launcher(secret).meet(tcp(port), 0)
    with welcoming(head):
        for rank in (None, 1):
            with contextlib.closing(Launcher(secret).meet(tcp(port), rank, is_again=True)) as again:
                assert again.channel is not None
                assert not again.is_head


@pytest.mark.parametrize("rank", [None, 1], ids=["join", "rank 1"])
def test_a_head_that_was_lost_and_does_not_answer_gets_one_try_and_nobody_takes_its_place(
    port: int, launcher: Launcher, rank: int | None
) -> None:
    """Who finds no head with --join leads, at a start: the port is free, and so is this machine's address."""
    with pytest.raises(UnreachableError, match="connection refused"):
        launcher.meet(tcp(port), rank, is_again=True)
    assert launcher.passed_s == 0.0
    assert launcher.told == []
    with contextlib.closing(launcher.meet(tcp(port))) as first:
        assert first.is_head


def test_a_head_that_is_not_started_yet_is_said_at_once_and_every_ten_seconds(port: int, launcher: Launcher) -> None:
    with pytest.raises(RendezvousError, match=r"gave up after 35 s \(--join-timeout\)") as refusal:
        launcher.meet(tcp(port), 1, timeout_s=35)
    assert refusal.value.exit_code == EXIT_FAILED
    assert 35 <= launcher.passed_s < 37
    assert len(launcher.told) == 4  # at 0, 10, 20 and 30 s
    assert launcher.told[0].startswith(
        f"Node {HERE} cannot reach the head 127.0.0.1:{port} (connection refused). Is it started?"
    )
    assert launcher.told[0].endswith("Start it with: hetseq train --distributed-rank 0 --lr 0.1")
    assert f"127.0.0.1 is {HERE} itself" in launcher.told[0]


def test_a_head_that_another_program_starts_is_no_news_for_half_a_minute(port: int, launcher: Launcher) -> None:
    with pytest.raises(RendezvousError, match="Is it started"):
        launcher.meet(tcp(port), 1, timeout_s=45, others=OtherNodes(LINE, 30.0))
    assert len(launcher.told) == 2  # at 30 and 40 s
    assert launcher.told[0].endswith("Start it with: hetseq train --distributed-rank 0 --lr 0.1")


def test_the_reason_is_said_at_the_end_of_a_join_timeout_that_is_shorter(port: int, launcher: Launcher) -> None:
    with pytest.raises(RendezvousError, match=r"Is it started.* Start it\. .* gave up after 12 s"):
        launcher.meet(tcp(port), 1, timeout_s=12, others=OtherNodes("", 30.0))
    assert launcher.told == []


def test_a_head_that_is_started_later_is_reached(port: int, secret: Path) -> None:
    with contextlib.ExitStack() as stack:
        follower = Launcher(secret)
        plain_pause = follower.pause
        heads: list[Meeting] = []

        def pause(seconds: float) -> None:
            plain_pause(seconds)
            if follower.passed_s > 25 and not heads:
                heads.append(Launcher(secret).meet(tcp(port), 0))
                stack.enter_context(welcoming(heads[0]))

        follower.pause = pause  # type: ignore[method-assign]
        with contextlib.closing(follower.meet(tcp(port), 1)) as meeting:
            assert meeting.channel is not None
    assert len(follower.told) == 3  # at 0, 10 and 20 s


def test_a_user_who_stops_the_launcher_is_heard_while_it_waits(port: int, secret: Path) -> None:
    with pytest.raises(Stopped):
        Launcher(secret, stop_after=5).meet(tcp(port), 1)


def test_a_user_who_stops_the_launcher_is_heard_while_somebody_is_silent(
    secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "PATIENCE_S", 0.5)  # only for the thread that is left behind
    with foreign(as_silent) as port, pytest.raises(Stopped):
        Launcher(secret, stop_after=0).meet(tcp(port), 1)


def test_a_program_that_is_no_hetseq_is_named_at_once_to_who_listens_and_to_who_dials(secret: Path) -> None:
    with foreign(as_http) as port:
        for rank in (None, 0, 1):
            launcher = Launcher(secret)
            with pytest.raises(AddressError, match="uses it: choose another port") as refusal:
                launcher.meet(tcp(port), rank)
            assert refusal.value.exit_code == EXIT_USAGE
            assert str(refusal.value).startswith(f"{HERE} cannot listen at 127.0.0.1:{port}: ")
            assert "HTTP/1.1 400" in str(refusal.value)
            assert launcher.passed_s == 0


def test_a_program_elsewhere_that_is_no_hetseq_is_called_one(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "bind", refuse_to_bind(errno.EADDRNOTAVAIL))  # as for another machine's address
    with foreign(as_http) as port, pytest.raises(StrangerError, match="is not HetSeq: another program uses this port"):
        launcher.meet(tcp(port), 1)


def test_a_silent_program_is_given_up(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rendezvous.PATIENCE_S < 10
    monkeypatch.setattr(rendezvous, "PATIENCE_S", 0.3)
    with foreign(as_silent) as port, pytest.raises(RendezvousError, match="was silent for"):
        launcher.meet(tcp(port), 1)


def test_a_port_that_is_held_and_answers_nobody_is_given_up(launcher: Launcher, port: int) -> None:
    with socket.socket() as holding:
        holding.bind(("127.0.0.1", port))  # and never listens
        with pytest.raises(AddressError, match="uses it: choose another port"):
            launcher.meet(tcp(port))
    assert launcher.passed_s <= 10


def test_another_secret_is_refused_at_once_with_the_line_that_copies_it(
    port: int, secret: Path, tmp_path: Path
) -> None:
    with welcoming(Launcher(secret).meet(tcp(port))):
        for rank in (None, 1):
            launcher = Launcher(tmp_path / "other")
            with pytest.raises(SecretMismatch, match="scp ") as refusal:
                launcher.meet(tcp(port), rank)
            assert refusal.value.exit_code == EXIT_DISAGREE
            assert launcher.passed_s == 0


def test_another_version_is_refused_at_once(port: int, secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def newer(connection: socket.socket) -> None:
        connection.sendall(channel_module.HEAD.pack(channel_module.MAGIC, 99, bytes(32)))

    with foreign(newer) as port:
        for rank in (None, 1):
            with pytest.raises(VersionMismatch, match="version 99"):
                Launcher(secret).meet(tcp(port), rank)


def test_a_name_that_nobody_knows_is_raised_after_a_second_try(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = resolve_by(monkeypatch, {})
    with pytest.raises(UnreachableError, match=f"labX is not known on {HERE} .*: use its IP address"):
        launcher.meet("tcp://labX:29400", 1)
    assert asked.count("labX") >= 2
    assert launcher.passed_s < 1


def test_a_name_server_that_is_silent_is_left_behind(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine, answered = socket.getaddrinfo, threading.Event()

    def resolve(host: str, *arguments: Any, **options: Any) -> Any:
        if host == "labX":
            answered.wait(10)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return genuine(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert rendezvous.NAME_S < 10
    monkeypatch.setattr(rendezvous, "NAME_S", 0.3)
    with pytest.raises(UnreachableError, match="the name server does not answer"):
        launcher.meet("tcp://labX:29400", 1)
    answered.set()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EHOSTUNREACH, "No route to host: no route leads there, or a firewall refuses"),
        (errno.ETIMEDOUT, "no answer: the machine is off, or a firewall drops packets to port 29400"),
    ],
)
def test_a_head_behind_a_firewall_is_told_from_one_that_is_not_started(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def dial(host: str, port: int, deadline: float) -> socket.socket:
        cause = OSError(number, "No route to host")
        raise UnreachableError("", reason="timeout" if number == errno.ETIMEDOUT else "route") from cause

    monkeypatch.setattr(channel_module, "dial", dial)
    with pytest.raises(RendezvousError, match="gave up after 3 s"):
        launcher.meet("tcp://192.0.2.77:29400", 1, timeout_s=3)
    assert len(launcher.told) == 1
    assert words in launcher.told[0]
    assert "refused)" not in launcher.told[0]


def test_rank_zero_on_a_machine_that_does_not_own_the_address_is_refused_at_once(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "dial", refuse_to_dial)
    with pytest.raises(AddressError, match=f"{HERE} has --distributed-rank 0, .* not an address of {HERE}") as refusal:
        launcher.meet("tcp://198.51.100.7:29400", 0)
    assert refusal.value.exit_code == EXIT_USAGE
    assert launcher.passed_s == 0


def test_with_join_a_machine_that_does_not_own_the_address_waits_for_the_one_that_does(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "dial", refuse_to_dial)
    with pytest.raises(RendezvousError, match="gave up after 12 s"):
        launcher.meet("tcp://198.51.100.7:29400", timeout_s=12, others=OtherNodes("hetseq train --join X"))
    assert len(launcher.told) == 2
    assert launcher.told[0].endswith(
        "(connection refused). Is it started? [head-unreachable] Start it with: hetseq train --join X"
    )


def test_every_interface_is_no_place_to_meet(launcher: Launcher) -> None:
    for host in ("0.0.0.0", "[::]"):
        with pytest.raises(AddressError, match="means every interface of each machine"):
            launcher.meet(tcp(29400, host), 1)


def test_a_name_that_means_the_loopback_address_on_its_own_machine_is_replaced_once(
    secret: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's 127.0.1.1: 127.0.0.1 stands for the address that others reach."""
    resolve_by(monkeypatch, {"labA": "127.0.1.1"})
    monkeypatch.setattr(rendezvous, "is_loopback", lambda address: address == "127.0.1.1")
    monkeypatch.setattr(rendezvous, "outward_address", lambda: "127.0.0.1")
    first, second = Launcher(secret), Launcher(secret)
    head = first.meet(tcp(port, "labA"), 0, interface=None)
    assert head.listener is not None
    assert head.listener.host == "127.0.0.1"
    with welcoming(head), contextlib.closing(second.meet(tcp(port, "labA"), 1, interface=None)) as follower:
        assert follower.address == "127.0.0.1"
    for launcher in (first, second):
        assert len(launcher.told) == 1
        assert f"labA means 127.0.1.1 on {HERE}, which no other machine reaches: 127.0.0.1 is used" in launcher.told[0]


def test_localhost_is_what_it_says(launcher: Launcher, port: int) -> None:
    with contextlib.closing(launcher.meet(tcp(port, "localhost"), 0)) as head:
        assert head.listener is not None
        assert head.listener.host in ("127.0.0.1", "::1")
    assert launcher.told == []


# file://


def test_in_a_directory_the_first_leads_the_second_reaches_it_and_nothing_is_left(tmp_path: Path, secret: Path) -> None:
    url = f"file://{tmp_path}/meeting"
    for rank in (None, 1):  # given ranks do not say who leads
        head = Launcher(secret).meet(url, rank)
        assert head.is_head
        assert head.attempt is not None
        assert head.attempt.heart is not None
        assert head.address == "127.0.0.1"
        with welcoming(head), contextlib.closing(Launcher(secret).meet(url, 0 if rank else None)) as follower:
            assert follower.channel is not None
            assert follower.attempt is not None
            assert follower.attempt.heart is None
            assert follower.key == head.key
        assert not (tmp_path / "meeting").exists()


def test_a_head_on_another_machine_that_answers_is_reached_by_one_channel(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/meeting"
    head = Launcher(secret).meet(url)
    with welcoming(head) as came:
        monkeypatch.setattr(
            "hetseq.cluster.rendezvous.file_rendezvous.is_alive", lambda process: None
        )  # as for another machine
        with contextlib.closing(Launcher(secret).meet(url)) as follower:
            assert follower.channel is not None
            follower.channel.send({"hello": 1})
            with came.get(timeout=10) as channel:
                assert channel.receive(10) == {"hello": 1}
        assert came.empty()


def test_a_head_in_a_directory_that_cannot_be_reached_is_named_and_looked_for_again(
    tmp_path: Path, secret: Path, launcher: Launcher
) -> None:
    url = f"file://{tmp_path}/meeting"
    with contextlib.closing(Launcher(secret).meet(url)) as head:
        assert head.listener is not None
        head.listener.close()  # its process lives on
        with pytest.raises(RendezvousError, match="gave up after 12 s"):
            launcher.meet(url, timeout_s=12)
    assert f"Node {HERE} cannot reach the head {HERE} (pid " in launcher.told[0]
    assert "connection refused" in launcher.told[0]
    assert len(launcher.told) == 2


def test_a_head_elsewhere_that_gives_no_sign_of_life_is_not_awaited_longer_than_the_user_said(
    tmp_path: Path, secret: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/meeting"
    with contextlib.closing(Launcher(secret).meet(url)) as head:
        assert head.listener is not None
        head.listener.close()
        monkeypatch.setattr(
            "hetseq.cluster.rendezvous.file_rendezvous.is_alive", lambda process: None
        )  # as for another machine
        with pytest.raises(RendezvousError, match="neither continued nor ended in time"):
            launcher.meet(url, timeout_s=5)
        assert 4.9 < launcher.passed_s < 6


def test_a_head_that_ends_while_one_comes_leaves_the_lead_to_who_comes(tmp_path: Path, secret: Path) -> None:
    url = f"file://{tmp_path}/meeting"
    head, follower = Launcher(secret).meet(url), Launcher(secret)
    assert head.listener is not None
    head.listener.close()
    plain_pause = follower.pause

    def pause(seconds: float) -> None:
        plain_pause(seconds)
        if follower.told:
            head.close()

    follower.pause = pause  # type: ignore[method-assign]
    with contextlib.closing(follower.meet(url)) as meeting:
        assert meeting.is_head
    assert not (tmp_path / "meeting").exists()


def test_runs_of_two_names_do_not_meet(tmp_path: Path, secret: Path) -> None:
    url, meetings = f"file://{tmp_path}", []
    for name in ("one", "two"):
        meetings.append(Launcher(secret).meet(url, name=name))
    for meeting in meetings:
        assert meeting.is_head
        meeting.close()


def test_a_missing_parent_is_named_at_once(tmp_path: Path, launcher: Launcher) -> None:
    with pytest.raises(RendezvousError, match=r"does not exist on .* not shared"):
        launcher.meet(f"file://{tmp_path}/none/meeting")
    assert launcher.passed_s == 0


# both


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_an_unknown_interface_is_refused_before_all_else(
    tmp_path: Path, launcher: Launcher, port: int, scheme: str
) -> None:
    url = tcp(port) if scheme == "tcp" else f"file://{tmp_path}/meeting"
    with pytest.raises(AddressError, match="GLOO_SOCKET_IFNAME eth9"):
        launcher.meet(url, 0, interface="eth9")
    assert list(tmp_path.iterdir()) == []


def test_an_interface_in_the_manner_of_nccl_is_explained_once(launcher: Launcher, port: int) -> None:
    with contextlib.closing(launcher.meet(tcp(port), 0, interface="^docker0")) as head:
        assert head.address == "127.0.0.1"
    assert [line.partition(":")[0] for line in launcher.told] == ["GLOO_SOCKET_IFNAME ^docker0"]


def test_a_run_on_one_node_meets_nobody() -> None:
    with pytest.raises(ValueError, match="no meeting place"):
        meet(DistributedConfig(), pause=lambda seconds: None, tell=lambda line: None)


def test_a_meeting_may_be_closed_twice(launcher: Launcher, port: int, tmp_path: Path) -> None:
    for url in (tcp(port), f"file://{tmp_path}/meeting"):
        meeting = launcher.meet(url)
        meeting.close()
        meeting.close()


def test_the_heads_command_line_has_its_rank() -> None:
    assert command_of_rank("train.py --distributed-rank 12 --lr 1", 0) == "train.py --distributed-rank 0 --lr 1"
    assert command_of_rank("train.py --distributed-rank=1", 3) == "train.py --distributed-rank=3"
    assert command_of_rank("train.py --join tcp://a:1", 0) == "train.py --join tcp://a:1"
    assert command_of_rank("train.py --join-timeout 9", 3) == "train.py --join-timeout 9 --distributed-rank 3"


def test_an_address_is_host_and_port() -> None:
    assert host_and_port("tcp://labA:29400") == ("labA", 29400)
    assert host_and_port("tcp://[fd00::5]:29400") == ("fd00::5", 29400)


def refuse_to_dial(host: str, port: int, deadline: float) -> socket.socket:
    raise UnreachableError("", reason="refused")


def refuse_to_bind(number: int) -> Callable[[str, int], socket.socket]:
    def bind(host: str, port: int) -> socket.socket:
        raise AddressError("") from OSError(number, "")

    return bind


def resolve_by(monkeypatch: pytest.MonkeyPatch, names: dict[str, str]) -> list[str]:
    """Names are known by this table alone; gives the list of those that were asked for."""
    genuine, asked = socket.getaddrinfo, []

    def resolve(host: str, *arguments: Any, **options: Any) -> Any:
        asked.append(host)
        if host.replace(".", "").isdigit():
            return genuine(host, *arguments, **options)
        if host not in names or options.get("flags"):  # a numeric host was asked for
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return genuine(names[host], *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return asked
