"""Interfaces: the address that others reach, and what is said of a name that leads nowhere."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from hetseq.cluster.rendezvous import interfaces as interfaces_module
from hetseq.cluster.rendezvous.interfaces import (
    Interface,
    chosen_address,
    interfaces,
    is_loopback,
    outward_address,
    route_address,
)
from hetseq.cluster.rendezvous.sockets import AddressError, UnreachableError
from hetseq.errors import EXIT_USAGE

TWO = [Interface("lo", "127.0.0.1"), Interface("eno1", "10.0.0.5"), Interface("ib0", "10.1.0.5")]
HERE = socket.gethostname()


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two networks."""
    monkeypatch.setattr(interfaces_module, "interfaces", lambda: TWO)


def wished(wish: str | None, default: str = "10.0.0.5") -> tuple[str, list[str]]:
    told: list[str] = []
    return chosen_address(default, wish, tell=told.append), told


def test_this_machine_has_a_loopback_interface_and_one_can_listen_at_every_address() -> None:
    found = interfaces()
    assert Interface("lo", "127.0.0.1") in found
    for one in found:
        family = socket.AF_INET6 if ":" in one.address else socket.AF_INET
        with socket.socket(family) as listening:
            listening.bind((one.address, 0))


def test_the_way_to_oneself_is_the_loopback_address() -> None:
    assert route_address("127.0.0.1") == "127.0.0.1"
    assert route_address("localhost") in ("127.0.0.1", "::1")


def test_the_outward_address_is_one_of_this_machine() -> None:
    assert outward_address() in [one.address for one in interfaces()]


def test_a_machine_without_a_way_out_uses_any_address_and_at_last_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(host: str) -> str:
        raise UnreachableError(host, reason="route")

    monkeypatch.setattr(interfaces_module, "route_address", lost)
    monkeypatch.setattr(interfaces_module, "interfaces", lambda: TWO)
    assert outward_address() == "10.0.0.5"
    monkeypatch.setattr(interfaces_module, "interfaces", lambda: TWO[:1])
    assert outward_address() == "127.0.0.1"


def test_an_unknown_name_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UnreachableError, match=f"labX is not known on {HERE} .* use its IP address") as refusal:
        route_address("labX")
    assert refusal.value.reason == "name"


def test_loopback_is_told_from_all_else() -> None:
    assert is_loopback("127.0.1.1")
    assert is_loopback("::1")
    assert not is_loopback("10.0.0.5")
    assert not is_loopback("fe80::1%eth0")
    assert not is_loopback("localhost")  # a name: nobody has been asked


@pytest.mark.usefixtures("two")
def test_without_a_wish_the_way_to_the_head_counts() -> None:
    for wish in (None, "", "  ", ","):
        assert wished(wish) == ("10.0.0.5", [])


@pytest.mark.usefixtures("two")
def test_the_interface_that_was_named_counts() -> None:
    assert wished("ib0") == ("10.1.0.5", [])
    assert wished("lo") == ("127.0.0.1", [])


@pytest.mark.usefixtures("two")
def test_a_list_in_the_manner_of_nccl_is_explained_and_the_way_to_the_head_used() -> None:
    address, told = wished("^lo,docker0")
    assert address == "10.0.0.5"
    assert told == [
        "GLOO_SOCKET_IFNAME ^lo,docker0: it takes one name, and only NCCL supports lists with ^; eno1 (10.0.0.5) is"
        " used instead [interface-list]"
    ]


@pytest.mark.usefixtures("two")
def test_of_several_names_the_first_counts_and_that_is_said() -> None:
    assert wished("ib0,eno1") == (
        "10.1.0.5",
        ["GLOO_SOCKET_IFNAME ib0,eno1: HetSeq uses one interface, ib0 (10.1.0.5)"],
    )


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("wish", ["eth9", "eno1,eth9"])
def test_an_unknown_interface_is_refused_with_the_known_ones_and_the_one_that_leads_to_the_head(wish: str) -> None:
    with pytest.raises(AddressError) as refusal:
        wished(wish)
    assert str(refusal.value) == (
        f"GLOO_SOCKET_IFNAME eth9: {HERE} has no such interface with an address. It has lo 127.0.0.1, eno1 10.0.0.5"
        " (the way to the head), ib0 10.1.0.5: set it to eno1, or leave it out [interface-unknown]"
    )
    assert refusal.value.exit_code == EXIT_USAGE


def test_of_several_addresses_of_an_interface_the_kind_of_the_default_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [Interface("eno1", "10.0.0.5"), Interface("eno1", "10.0.0.6"), Interface("eno1", "fd00::5")]
    monkeypatch.setattr(interfaces_module, "interfaces", lambda: both)
    assert wished("eno1", "192.168.0.1")[0] == "10.0.0.5"
    assert wished("eno1", "10.0.0.6")[0] == "10.0.0.6"
    assert ipaddress.ip_address(wished("eno1", "fd00::9")[0]).version == 6
