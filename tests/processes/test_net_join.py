"""Joining over real TLS: the secret goes to the right hub only, and what comes back is checked."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from net_server import SmallHub, answer

from ciuic.errors import CertificateError, ProtocolError, TokenError, UnreachableError
from ciuic.net.client import HubClient, join_network
from ciuic.net.messages import JoinReply, LogRequest, Ok, encode
from ciuic.net.tls import new_key_and_csr, write_private_file


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[SmallHub]:
    server = SmallHub(tmp_path / "hub").start()
    yield server
    server.stop()


def _sent_secrets(hub: SmallHub) -> list[str]:
    return [path for _, path in hub.requests if path == "/v1/join"]


def test_a_joined_machine_can_speak_as_its_node(hub: SmallHub, tmp_path: Path) -> None:
    node_id, key_pem, cert_pem, authority_pem = join_network(hub.token(), "us-west", {"gpu": 8})
    write_private_file(tmp_path / "node.pem", cert_pem)
    write_private_file(tmp_path / "node.key", key_pem)
    client = HubClient(hub.url, authority_pem, tmp_path / "node.pem", tmp_path / "node.key", purpose="control")
    assert client.call("POST", "/v1/node/logs", LogRequest(run_id="r", lines=[]), Ok).ok
    client.close()
    identity = hub.identities[-1]
    assert identity is not None
    assert (node_id, identity.name, identity.role) == ("us-west", "us-west", "node")


def test_a_token_of_another_hub_never_sends_its_secret(hub: SmallHub, tmp_path: Path) -> None:
    other = SmallHub(tmp_path / "other")
    other.port = hub.port
    with pytest.raises(TokenError, match="not the one this token was made for"):
        join_network(other.token(), "us-west", {})
    assert _sent_secrets(hub) == []


def test_a_server_that_only_shows_the_right_authority_never_gets_the_secret(hub: SmallHub, tmp_path: Path) -> None:
    """It replays the public certificate of the authority, but its own server certificate is of another one."""
    impostor = SmallHub(tmp_path / "impostor").start()
    impostor.misbehave = lambda handler: (
        handler.path == "/ca.pem" and (answer(handler, hub.authority.certificate_pem) is None)
    )
    with pytest.raises(CertificateError):
        join_network(hub.token(), "us-west", {}, url=impostor.url)
    assert _sent_secrets(impostor) == []
    impostor.stop()


def test_a_used_token_is_refused(hub: SmallHub) -> None:
    token = hub.token()
    join_network(token, "us-west", {})
    with pytest.raises(TokenError, match="not valid"):
        join_network(token, "us-west", {})


def test_another_address_of_the_same_hub_can_be_dialled(hub: SmallHub) -> None:
    assert join_network(hub.token(), "eu", {}, url=f"https://localhost:{hub.port}")[0] == "eu"


@pytest.mark.parametrize("content", [b"", b"garbage", b"A" * 100_000])
def test_garbage_instead_of_an_authority_is_refused(hub: SmallHub, content: bytes) -> None:
    hub.misbehave = lambda handler: answer(handler, content) is None
    with pytest.raises((CertificateError, ProtocolError)):
        join_network(hub.token(), "us-west", {})


def test_a_certificate_for_another_key_is_not_accepted(hub: SmallHub) -> None:
    def swap(handler: BaseHTTPRequestHandler) -> bool:
        if handler.path != "/v1/join":
            return False
        _, csr_pem = new_key_and_csr()
        cert_pem, _ = hub.authority.issue_client(csr_pem, common_name="us-west", role="node")
        answer(handler, encode(JoinReply(node_id="us-west", certificate_pem=cert_pem.decode())))
        return True

    hub.misbehave = swap
    with pytest.raises(CertificateError, match="another key"):
        join_network(hub.token(), "us-west", {})


def test_joining_a_hub_that_is_not_there_is_unreachable(hub: SmallHub) -> None:
    token = hub.token()
    hub.stop()
    with pytest.raises(UnreachableError):
        join_network(token, "us-west", {})
