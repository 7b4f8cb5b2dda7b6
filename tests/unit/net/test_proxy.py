"""Which proxy the environment names, and that its password stays there."""

import pytest

from ciuic.errors import UsageError
from ciuic.net.proxy import parse_proxy, proxy_for
from ciuic.net.url import HubAddress

HUB = HubAddress(host="hub.example.org", port=8443)


@pytest.fixture(autouse=True)
def no_proxy_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_variable_there_is_no_proxy() -> None:
    assert proxy_for(HUB) is None


def test_the_proxy_of_the_environment_is_used_for_far_hubs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.org:3128")
    found = proxy_for(HUB)
    assert found is not None
    assert (found.host, found.port) == ("proxy.example.org", 3128)
    for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1"):
        assert proxy_for(HubAddress(host=host, port=8443)) is None


@pytest.mark.parametrize("listed", ["hub.example.org", ".example.org", "a,example.org", "*", "hub.example.org:8443"])
def test_no_proxy_lists_hosts_that_are_reached_directly(monkeypatch: pytest.MonkeyPatch, listed: str) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.org:3128")
    monkeypatch.setenv("NO_PROXY", listed)
    assert proxy_for(HUB) is None


def test_the_password_is_in_the_header_and_in_no_text() -> None:
    found = parse_proxy("http://ann:s%40cret@proxy:3128")
    assert found.authorization == "Basic YW5uOnNAY3JldA=="
    assert "cret" not in repr(found) + found.url
    assert "YW5u" not in repr(found) + found.url


@pytest.mark.parametrize("text", ["socks5://ann:secret@proxy:1080", "https://ann:secret@proxy", "http://ann:secret@:x"])
def test_a_proxy_of_another_kind_is_refused_without_telling_its_password(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_proxy(text)
    assert "secret" not in str(refused.value)
