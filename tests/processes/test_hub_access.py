"""Who gets in and who does not: tokens, certificates, roles, eviction. A real hub, real TLS."""

import json
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hub_process import HubProcess, eventually

from ciuic.errors import (
    CertificateError,
    CiuicError,
    ConflictError,
    NotFoundError,
    ProtocolError,
    RoleError,
    SupersededError,
    TokenError,
    UnreachableError,
    UsageError,
)
from ciuic.lab.links import Link
from ciuic.lab.relay import LinkRelay
from ciuic.net.client import HubClient, join_network
from ciuic.net.messages import (
    CreateTokenRequest,
    HubInfo,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    NodeInfo,
    Ok,
)
from ciuic.net.tls import Authority, new_key_and_csr
from ciuic.net.tokens import make_token, parse_token

Json = dict[str, object]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with HubProcess(tmp_path_factory.mktemp("access") / "home", names=("hub.example",)) as running:
        yield running


def test_the_ready_line_names_address_and_authority(hub: HubProcess) -> None:
    authority = Authority.load(hub.home / "hub")
    assert hub.ready_line == f"hub ready at https://hub.example:{hub.port}  authority {authority.fingerprint[:16]}"
    assert hub.url == f"https://127.0.0.1:{hub.port}"


def test_keys_are_only_for_their_owner(hub: HubProcess) -> None:
    for name in ("hub/authority.key", "hub/hub.key", "operator/operator.key", "operator/profile.json"):
        assert stat.S_IMODE((hub.home / name).stat().st_mode) == 0o600, name
    assert stat.S_IMODE((hub.home / "hub").stat().st_mode) == 0o700
    profile = json.loads((hub.home / "operator" / "profile.json").read_text())
    assert set(profile) == {"url", "authority", "cert", "key"}


def test_anybody_may_ask_for_health_and_the_authority(hub: HubProcess) -> None:
    health = hub.nobody().call("GET", "/health", None, dict)
    assert health["ok"] is True
    assert health["boot_id"]
    assert health["version"]
    assert hub.nobody().fetch("/ca.pem") == (hub.home / "operator" / "authority.pem").read_bytes()


@pytest.mark.parametrize("path", ["/", "/v1/hub", "/v1/nodes", "/metrics", "/api/state", "/v1/nothing", "/assets/x.js"])
def test_without_a_certificate_everything_else_is_401(hub: HubProcess, path: str) -> None:
    with pytest.raises(CertificateError, match="does not know you"):
        hub.nobody().call("GET", path, None, dict)


def test_anonymous_push_submit_and_evict_are_refused(hub: HubProcess) -> None:
    for path in ("/v1/runs/any/push", "/v1/runs", "/v1/nodes/any/evict", "/v1/node/heartbeat"):
        with pytest.raises(CertificateError):
            hub.nobody().send_frame(path, b"x" * 100_000, Ok)


def test_a_certificate_of_another_authority_does_not_even_connect(hub: HubProcess, tmp_path: Path) -> None:
    stranger = Authority.create(tmp_path / "authority")
    cert, key = stranger.issue_client(None, common_name="mallory", role="operator")
    (tmp_path / "c.pem").write_bytes(cert)
    (tmp_path / "k.pem").write_bytes(key)
    authority = (hub.home / "operator" / "authority.pem").read_bytes()
    client = HubClient(hub.url, authority, tmp_path / "c.pem", tmp_path / "k.pem")
    with pytest.raises((UnreachableError, CertificateError)):
        client.call("GET", "/v1/hub", None, HubInfo)
    client.close()


def test_the_hubs_own_certificate_is_no_client_certificate(hub: HubProcess) -> None:
    authority = (hub.home / "operator" / "authority.pem").read_bytes()
    client = HubClient(hub.url, authority, hub.home / "hub" / "hub.pem", hub.home / "hub" / "hub.key")
    with pytest.raises((UnreachableError, CertificateError)):
        client.call("GET", "/v1/hub", None, HubInfo)
    client.close()


def test_a_node_joins_with_a_token_and_shows_up(hub: HubProcess) -> None:
    node = hub.join("us-west")
    assert node.beat().epoch > 0
    info = hub.nodes()[node.node_id]
    assert (info.location, info.state, info.claimed) == ("us-west", "idle", {"gpus": 8.0})
    assert info.last_seen_s is not None
    assert info.last_seen_s < 5


def test_a_second_node_of_a_location_gets_a_name_of_its_own(hub: HubProcess) -> None:
    first, second = hub.join("Tokyo 1"), hub.join("Tokyo 1")
    assert (first.node_id, second.node_id) == ("tokyo-1", "tokyo-1-2")


def test_a_used_up_token_is_refused_but_the_same_request_may_be_repeated(hub: HubProcess) -> None:
    token = parse_token(hub.token())
    _, csr = new_key_and_csr()
    request = JoinRequest(token_id=token.id, secret=token.secret, csr_pem=csr.decode(), location="once")
    first = hub.nobody().call("POST", "/v1/join", request, JoinReply)
    again = hub.nobody().call("POST", "/v1/join", request, JoinReply)
    assert again == first, "the answer to the first may have been lost"
    with pytest.raises(TokenError, match="used up"):
        join_network(token, "twice", {}, url=hub.url)


def test_a_token_for_three_lets_three_in(hub: HubProcess) -> None:
    token = hub.token(uses=3)
    names = [join_network(token, "many", {}, url=hub.url)[0] for _ in range(3)]
    assert names == ["many", "many-2", "many-3"]
    with pytest.raises(TokenError):
        join_network(token, "many", {}, url=hub.url)


def test_twenty_at_once_with_a_token_for_five_are_five(hub: HubProcess) -> None:
    token, outcomes = hub.token(uses=5), []

    def attempt() -> None:
        try:
            outcomes.append(join_network(token, "crowd", {}, url=hub.url)[0])
        except TokenError:
            outcomes.append("")

    threads = [threading.Thread(target=attempt) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(filter(None, outcomes)) == ["crowd", "crowd-2", "crowd-3", "crowd-4", "crowd-5"]


def test_an_expired_token_is_refused(hub: HubProcess) -> None:
    token = hub.token(lifetime_s=1.0)
    time.sleep(1.1)  # the lifetime is what is tested
    with pytest.raises(TokenError, match="expired"):
        join_network(token, "late", {}, url=hub.url)


def test_a_wrong_token_does_not_say_what_is_wrong_with_it(hub: HubProcess) -> None:
    token = parse_token(hub.token())
    texts = []
    for wrong in (
        msgspec.structs.replace(token, secret=token.secret[:-2] + "xx"),
        msgspec.structs.replace(token, id="0" * 12),
    ):
        with pytest.raises(TokenError) as caught:
            join_network(wrong, "wrong", {}, url=hub.url)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert token.secret not in texts[0]
    assert token.id not in texts[0]


def test_the_secret_is_not_sent_to_a_hub_of_another_authority(hub: HubProcess) -> None:
    token = parse_token(hub.token())
    other = make_token(url=hub.url, authority_fingerprint="0" * 64, id=token.id, secret=token.secret)
    with pytest.raises(TokenError, match="not the one"):
        join_network(other, "us-west", {}, url=hub.url)
    join_network(token, "unspent", {}, url=hub.url)


def test_only_the_hash_of_a_secret_is_on_disk(hub: HubProcess) -> None:
    token = parse_token(hub.token())
    for file in (hub.home / "hub").glob("ciuic.db*"):
        assert token.secret.encode() not in file.read_bytes()


@pytest.mark.parametrize("location", ["", "   ", "ü", "x" * 65, "a\nb"])
def test_a_location_that_is_no_name_is_refused_and_costs_no_use(hub: HubProcess, location: str) -> None:
    token = hub.token()
    with pytest.raises(ProtocolError, match="not a location"):
        join_network(token, location, {}, url=hub.url)
    join_network(token, "good", {}, url=hub.url)


def test_senseless_tokens_are_not_made(hub: HubProcess) -> None:
    for request in (CreateTokenRequest(uses=0), CreateTokenRequest(lifetime_s=-1.0), CreateTokenRequest(uses=10**9)):
        with pytest.raises(UsageError):
            hub.operator().call("POST", "/v1/tokens", request, Ok)


def test_each_role_does_only_its_own_things(hub: HubProcess) -> None:
    node, viewer = hub.join("roles"), hub.join("viewer", role="viewer")
    assert viewer.client.call("GET", "/v1/hub", None, HubInfo).boot_id
    for client, method, path in (
        (node.client, "GET", "/v1/hub"),
        (node.client, "POST", "/v1/tokens"),
        (node.client, "POST", "/v1/runs"),
        (viewer.client, "POST", "/v1/tokens"),
        (viewer.client, "POST", f"/v1/nodes/{node.node_id}/evict"),
        (viewer.client, "POST", "/v1/node/heartbeat"),
        (hub.operator(), "POST", "/v1/node/heartbeat"),
    ):
        with pytest.raises(RoleError, match="may not do this"):
            client.call(method, path, CreateTokenRequest() if method == "POST" else None, Ok)


def test_a_token_can_make_a_second_operator(hub: HubProcess) -> None:
    second = hub.join("alice", role="operator")
    listed = hub.join("listed").node_id
    assert listed in {node.node_id for node in second.client.call("GET", "/v1/nodes", None, list[NodeInfo])}


def test_an_evicted_node_is_refused_everywhere_for_good(hub: HubProcess) -> None:
    node = hub.join("evil")
    node.beat()
    hub.operator().call("POST", f"/v1/nodes/{node.node_id}/evict", None, Ok)
    for client in (node.client, node.connect()):
        with pytest.raises(CertificateError, match="evicted"):
            node.beat(client=client)
    with pytest.raises(CertificateError):
        node.client.call("GET", "/v1/node/probe?bytes=1", None, Ok)
    assert hub.nodes()[node.node_id].state == "evicted"


def test_eviction_ends_a_held_heartbeat(hub: HubProcess) -> None:
    node = hub.join("held")
    node.beat()
    outcome: list[object] = []

    def hold() -> None:
        try:
            outcome.append(node.beat(wait_s=30.0, client=node.connect()))
        except CertificateError as error:
            outcome.append(error)

    thread = threading.Thread(target=hold)
    thread.start()
    eventually(lambda: node.sequence == 2)
    hub.operator().call("POST", f"/v1/nodes/{node.node_id}/evict", None, Ok)
    thread.join(timeout=10)
    assert isinstance(outcome[0], CertificateError)


def test_a_late_heartbeat_does_not_revive_an_evicted_node(hub: HubProcess) -> None:
    """It was sent before the eviction, over a slow link; one more comes afterwards, and one of a new process."""
    node = hub.join("late")
    node.beat()
    authority = (hub.home / "operator" / "authority.pem").read_bytes()
    link = Link(name="slow", up_bits_per_s=1e9, down_bits_per_s=1e9, one_way_delay_s=0.0)
    outcome: list[object] = []
    with LinkRelay(link, ("127.0.0.1", hub.port)) as relay:
        url = f"https://127.0.0.1:{relay.address[1]}"
        far = HubClient(url, authority, node.folder / "node.pem", node.folder / "node.key", "control")
        hub.clients.append(far)
        node.beat(client=far)
        relay.set_down(True)

        def beat() -> None:
            try:
                outcome.append(node.beat(client=far))
            except CiuicError as error:
                outcome.append(error)

        late = threading.Thread(target=beat)
        late.start()
        eventually(lambda: node.sequence == 3)
        hub.operator().call("POST", f"/v1/nodes/{node.node_id}/evict", None, Ok)
        relay.set_down(False)
        late.join(timeout=60)
    assert isinstance(outcome[0], CertificateError), outcome
    for incarnation in ("agent-1", "agent-2"):
        with pytest.raises(CertificateError, match="evicted"):
            node.beat(incarnation=incarnation)
    assert hub.nodes()[node.node_id].state == "evicted"
    told = [event.kind for event in hub.events() if event.node_id == node.node_id]
    assert set(told[told.index("node.evicted") :]) <= {"node.evicted", "certificate.revoked"}, told


def test_evicting_nobody_is_a_clear_error(hub: HubProcess) -> None:
    with pytest.raises(NotFoundError, match="no node 'nobody'"):
        hub.operator().call("POST", "/v1/nodes/nobody/evict", None, Ok)


def test_two_processes_with_one_identity_the_older_is_fenced(hub: HubProcess) -> None:
    node = hub.join("twins")
    node.beat(incarnation="old")
    node.beat(incarnation="new")
    with pytest.raises(SupersededError):
        node.beat(incarnation="old")
    node.beat(incarnation="new")


def test_a_node_that_left_is_gone_until_a_new_process_speaks(hub: HubProcess) -> None:
    node = hub.join("leaver")
    node.beat()
    node.client.call("POST", "/v1/node/leave", LeaveRequest(agent_incarnation="agent-1"), Ok)
    assert hub.nodes()[node.node_id].state == "left"
    with pytest.raises(SupersededError):
        node.beat()
    node.beat(incarnation="agent-2")
    assert hub.nodes()[node.node_id].state == "idle"


def test_a_second_hub_in_the_same_folder_is_refused(hub: HubProcess) -> None:
    from ciuic.hub.config import HubConfig
    from ciuic.hub.server import serve

    with pytest.raises(ConflictError, match="another hub is running"):
        serve(HubConfig(home=hub.home, host="127.0.0.1", port=0))


def test_a_port_in_use_is_a_clear_error(hub: HubProcess, tmp_path: Path) -> None:
    from ciuic.hub.config import HubConfig
    from ciuic.hub.server import serve

    with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1 port {hub.port}"):
        serve(HubConfig(home=tmp_path / "other", host="127.0.0.1", port=hub.port))


def test_plain_http_is_not_answered(hub: HubProcess) -> None:
    with socket.create_connection(("127.0.0.1", hub.port), timeout=10) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" not in plain.recv(1000)


def test_old_tls_is_not_spoken(hub: HubProcess) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", hub.port), timeout=10) as raw, pytest.raises(ssl.SSLError):
        context.wrap_socket(raw)
