"""Which address others can use: a host name that leads nowhere is noticed."""

import socket

import pytest

from ciuic.net import route

HERE = "https://127.0.0.1:8443"


def named(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """This machine's host name stands for these addresses."""

    def look_up(*_: object, **__: object) -> list[tuple[object, ...]]:
        if not addresses:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(route.socket, "getaddrinfo", look_up)


def test_the_way_to_this_machine_is_its_loopback() -> None:
    assert route.address_towards(HERE) == "127.0.0.1"
    assert route.interface_of("127.0.0.1").startswith("lo")
    assert route.interface_of("203.0.113.7") == ""


def test_a_name_that_does_not_resolve_is_not_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch)
    assert not route.host_name_is_reachable(HERE)
    assert route.address_towards("https://hub.example:1") == ""


def test_a_name_for_an_address_of_another_machine_is_not_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "203.0.113.7")
    monkeypatch.setattr(route, "address_towards", lambda url: "192.0.2.5")
    assert not route.host_name_is_reachable("https://192.0.2.9:8443")


def test_a_name_for_loopback_will_do_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "127.0.0.1")
    for towards, reachable in (("127.0.0.1", True), ("192.0.2.5", False), ("", False)):
        monkeypatch.setattr(route, "address_towards", lambda url, towards=towards: towards)
        assert route.host_name_is_reachable(HERE) is reachable


def test_a_machine_without_a_name_is_called_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "own_addresses", lambda: ["192.0.2.5", "2001:db8::5"])
    monkeypatch.setattr(route.socket, "gethostname", lambda: "rented-17")
    named(monkeypatch)
    assert route.advertised_host() == "192.0.2.5"
    named(monkeypatch, "203.0.113.7")
    assert route.advertised_host() == "rented-17"


def test_own_addresses_count_beyond_the_machine() -> None:
    assert not {"127.0.0.1", "::1"} & set(route.own_addresses())
