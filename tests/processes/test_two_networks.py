"""Two networks instead of one: where one was meant, a second one is impossible, or everybody is told. Real hubs."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_process import HubProcess, eventually
from net_processes import AgentProcess

from ciuic.errors import CertificateError, ConflictError, TokenError, UnreachableError
from ciuic.hub.config import HubConfig
from ciuic.hub.server import serve
from ciuic.net.client import HubClient, join_network


@pytest.fixture
def one(tmp_path: Path) -> Iterator[HubProcess]:
    with HubProcess(tmp_path / "one") as hub:
        yield hub


@pytest.fixture
def other(tmp_path: Path) -> Iterator[HubProcess]:
    """What an operator gets who starts the hub again without its folder: another authority."""
    hub = HubProcess(tmp_path / "other")
    yield hub
    hub.__exit__(None, None, None)


def test_a_second_hub_on_the_same_folder_does_not_start(one: HubProcess) -> None:
    with pytest.raises(ConflictError, match="another hub is running"):
        serve(HubConfig(home=one.home, host="127.0.0.1", port=0))
    assert one.nobody().call("GET", "/health", None, dict)["ok"] is True


def test_nodes_do_not_follow_a_new_hub_at_the_old_address_and_say_so(
    one: HubProcess, other: HubProcess, tmp_path: Path
) -> None:
    agent = AgentProcess(one, tmp_path / "home", token=one.token())
    try:
        eventually(lambda: [node for node in one.nodes().values() if node.last_seen_s is not None])
        one.kill()
        other.port = one.port
        other.start()
        eventually(lambda: "another hub" in agent.said() or "authority" in agent.said(), within_s=60)
        assert agent.process.poll() is None, "the right hub may come back"
        assert other.nodes() == {}
        other.kill()
        one.start()
        eventually(lambda: [node for node in one.nodes().values() if node.last_seen_s is not None], within_s=60)
        agent.send(signal.SIGTERM)
        assert agent.wait() == 0
    finally:
        agent.close()


def test_tokens_and_certificates_of_one_network_are_nothing_to_another(one: HubProcess, other: HubProcess) -> None:
    other.start()
    with pytest.raises(TokenError, match="not the one this token was made for"):
        join_network(one.token(), "us", {}, url=other.url)
    node = one.join("us")
    theirs = (other.home / "operator" / "authority.pem").read_bytes()
    client = HubClient(other.url, theirs, node.folder / "node.pem", node.folder / "node.key", "control")
    other.clients.append(client)
    with pytest.raises((CertificateError, UnreachableError)):
        node.beat(client=client)
    assert other.nodes() == {}
