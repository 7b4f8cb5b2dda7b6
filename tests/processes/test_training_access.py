"""Strangers, forgers and doubles against a live run over real TLS: refused with their codes, the run is unharmed."""

import http.client
import json
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
from cluster import Cluster, Node, wait_for
from training_jobs import each_once, entries, hurry, layout, script_job, trained, without_gaps

from ciuic.codec import FragmentCodec
from ciuic.errors import CiuicError, FrameError, ProtocolError, RoleError, SupersededError, TokenError
from ciuic.ledger.entry import Push, PushHeader
from ciuic.net.client import HubClient, join_network
from ciuic.net.messages import CreateTokenReply, CreateTokenRequest, PushReply
from ciuic.net.tls import client_context
from ciuic.net.tokens import make_token, parse_token

TOTAL = 4_000
SLOWLY = ("--batch", 4, "--step-s", 0.08, "--hold")
OPEN_TO_ALL = {"/health": 200, "/ca.pem": 200}
CLOSED = (
    ("GET", "/"),
    ("GET", "/metrics"),
    ("GET", "/v1/nodes"),
    ("GET", "/v1/events?after=0"),
    ("GET", "/v1/nothing/of/the/kind"),
    ("POST", "/v1/tokens"),
    ("POST", "/v1/runs"),
    ("POST", "/v1/runs/RUN/stop"),
    ("POST", "/v1/runs/RUN/attach"),
    ("POST", "/v1/runs/RUN/push"),
    ("GET", "/v1/runs/RUN/entries?fragment=0&after=0&wait_s=0"),
    ("GET", "/v1/runs/RUN/snapshot?fragment=0&version=0"),
    ("PUT", "/v1/runs/RUN/snapshot?fragment=0&version=0"),
    ("POST", "/v1/node/heartbeat"),
)


def test_strangers_and_forgers_are_refused_and_the_run_is_unharmed(tmp_path: Path) -> None:
    records = tmp_path / "records"
    with Cluster(tmp_path) as cluster:
        nodes = cluster.add_nodes("a", "b")
        run = cluster.submit(script_job(records, *SLOWLY, nodes=2, samples=TOTAL))
        wait_for(lambda: cluster.member(run, "b").pushes_merged > 1, "merged pushes of b")
        _tokens_are_refused(cluster)
        _without_certificate_nothing_is_answered(cluster, run)
        refused = _pushes_are_refused(cluster, run, nodes[1])
        _pushes_of_others_are_refused(cluster, run, nodes[0])
        hurry(records)
        info = cluster.finished(run)
        by_node = {node.node_id: node for node in info.nodes}
        assert (by_node["a"].pushes_rejected, by_node["b"].pushes_rejected) == (0, refused)
        assert len(cluster.events("push.rejected")) == refused
        assert [node.incarnation for node in info.nodes] == [1, 1]
        assert without_gaps(entries(cluster, run))
        assert info.samples.duplicated == 0
        assert info.loss_consistent is True
        assert {node.name for node in nodes} == {node.node_id for node in info.nodes}
        assert each_once(records, TOTAL)


# ---- tokens


def _tokens_are_refused(cluster: Cluster) -> None:
    good = parse_token(cluster.token(uses=1))
    wrong = make_token(url=good.url, authority_fingerprint=good.authority_fingerprint, id=good.id, secret="guess" * 8)
    _cannot_join(wrong)
    other_hub = make_token(url=good.url, authority_fingerprint="0" * 64, id=good.id, secret=good.secret)
    _cannot_join(other_hub)
    request = CreateTokenRequest(lifetime_s=1.0)
    brief = cluster.operator.call("POST", "/v1/tokens", request, CreateTokenReply)
    wait_for(lambda: time.time() > brief.expires_at, "the end of a token's life")
    _cannot_join(brief.token)
    once = cluster.token(uses=1)
    join_network(once, "visitor", {})
    _cannot_join(once)


def _cannot_join(token: str) -> None:
    with pytest.raises(TokenError) as refused:
        join_network(token, "intruder", {})
    assert refused.value.code == "CIUIC-201"


# ---- certificates


def _without_certificate_nothing_is_answered(cluster: Cluster, run: str) -> None:
    authority = (cluster.home / "operator" / "authority.pem").read_bytes()
    address = urlsplit(cluster.url)
    context = client_context(authority, None, None, "control")
    connection = http.client.HTTPSConnection(str(address.hostname), address.port, context=context, timeout=30)

    def ask(method: str, path: str) -> tuple[int, bytes]:
        connection.request(method, path.replace("RUN", run), body=b"{}" if method != "GET" else None)
        response = connection.getresponse()
        return response.status, response.read()

    for path, status in OPEN_TO_ALL.items():
        assert ask("GET", path)[0] == status
    assert ask("POST", "/v1/join")[0] == 400  # let in, and told that this is no request
    for method, path in CLOSED:
        status, body = ask(method, path)
        assert (method, path, status) == (method, path, 401)
        assert json.loads(body)["error"]["code"] == "CIUIC-202"
    connection.close()


# ---- pushes


class Forger:
    """Sends pushes with a node's certificate while the node's own worker trains."""

    def __init__(self, cluster: Cluster, run: str, node: Node) -> None:
        self.client: HubClient = node.client()
        self.path = f"/v1/runs/{run}/push"
        model = layout(cluster, run)
        self.codec = FragmentCodec("1-bit", model.fragment_shape(0))
        self.header = PushHeader(
            run=run,
            node=node.name,
            incarnation=cluster.member(run, node.name).incarnation,
            sequence=1_000_000,
            fragment=0,
            base_version=cluster.version(run),
            epoch=0,
            tokens=1,
            codec="1-bit",
            layout_digest=model.digest,
        )
        self.payload = self.codec.encode(np.zeros(self.codec.shape.element_count, np.float32))

    def frame(self, payload: np.ndarray | None = None, **changed: object) -> bytes:
        header = msgspec.structs.replace(self.header, **changed)
        return Push(header=header, payload=self.payload if payload is None else payload).to_frame()

    def send(self, frame: bytes) -> PushReply:
        return self.client.send_frame(self.path, frame, PushReply)

    def raises(self, kind: type[CiuicError], frame: bytes) -> str:
        with pytest.raises(kind) as refused:
            self.send(frame)
        return refused.value.code

    def rejected(self, frame: bytes) -> tuple[str, str]:
        reply = self.send(frame)
        assert reply.status == "rejected"
        return reply.reason, reply.detail


def _pushes_are_refused(cluster: Cluster, run: str, node: Node) -> int:
    """Returns how many of them were well-formed and rejected for what they say."""
    forger = Forger(cluster, run, node)
    good = forger.frame()
    for cut in (0, 5, len(good) // 2, len(good) - 1):
        assert forger.raises(FrameError, good[:cut]) == "CIUIC-401"
    for place in (0, 6, 30, len(good) // 2, len(good) - 1):
        flipped = bytearray(good)
        flipped[place] ^= 0x10
        assert forger.raises(FrameError, bytes(flipped)) == "CIUIC-401"
    assert forger.raises(FrameError, forger.frame(forger.payload[:-1])) == "CIUIC-401"
    assert forger.raises(ProtocolError, bytes(8 << 20)) == "CIUIC-401"  # more than any push of this model
    assert forger.raises(SupersededError, forger.frame(incarnation=forger.header.incarnation + 1)) == "CIUIC-405"

    not_finite = np.full_like(forger.payload, 0xFF)
    assert forger.rejected(forger.frame(layout_digest="0" * 32))[0] == "wrong-layout"
    assert forger.rejected(forger.frame(codec="int8"))[0] == "wrong-layout"
    assert forger.rejected(forger.frame(ranges=((0, TOTAL + 1),)))[0] == "wrong-layout"
    assert forger.rejected(forger.frame(base_version=forger.header.base_version + 1_000))[0] == "ahead"
    reason, detail = forger.rejected(forger.frame(not_finite))
    assert reason == "not-finite"
    assert "holds a non-finite value in embed.weight" in detail
    assert forger.send(forger.frame(sequence=1)).status == "duplicate"
    return 5


def _pushes_of_others_are_refused(cluster: Cluster, run: str, node: Node) -> None:
    """a has a certificate and speaks for b, or for another run."""
    forger = Forger(cluster, run, node)
    assert forger.raises(RoleError, forger.frame(node="b")) == "CIUIC-203"
    assert forger.raises(RoleError, forger.frame(run="another")) == "CIUIC-203"


# ---- doubles


def test_second_worker_of_one_identity_fences_the_first_and_the_newest_goes_on(tmp_path: Path) -> None:
    records = tmp_path / "records"
    with Cluster(tmp_path) as cluster:
        nodes = cluster.add_nodes("a", "b")
        run = cluster.submit(script_job(records, *SLOWLY, nodes=2, samples=TOTAL))
        wait_for(lambda: cluster.member(run, "b").pushes_merged > 1, "merged pushes of b")
        run_file = nodes[1].folder / "runs" / run / "run.json"
        double = subprocess.Popen(
            [sys.executable, "-P", "-m", "ciuic.train.worker", "--run-file", str(run_file)],
            env=cluster.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        # the double takes the place of b's worker (2); the agent starts a new one, which takes the place of the double
        wait_for(lambda: cluster.member(run, "b").incarnation == 3, "the third worker of b")
        _, said = double.communicate(timeout=60)
        assert double.returncode != 0
        assert "incarnation 2 of b is not the present one (3)" in said
        assert "incarnation 1 of b is not the present one (2)" in nodes[1].said()
        merged = cluster.member(run, "b").pushes_merged
        wait_for(lambda: cluster.member(run, "b").pushes_merged > merged, "work of the third worker")
        hurry(records)
        info = cluster.finished(run)
        assert info.samples.duplicated == 0
        assert "Exception ignored" not in said
        assert len(trained(records)) == TOTAL
