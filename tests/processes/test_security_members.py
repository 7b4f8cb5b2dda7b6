"""Members that send garbage, NaN, a replay, or far too much: refused or clipped, reported, and the run goes on."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hub_process import Beating, HubProcess, NodeOnWire, eventually
from hub_worker import WireWorker

from ciuic.errors import ConflictError, FrameError, RoleError
from ciuic.ledger.entry import Push
from ciuic.net.messages import PushReply, WorkerReport


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with HubProcess(tmp_path_factory.mktemp("members") / "home") as running:
        yield running


class Pair:
    """A run of two nodes whose agents beat by themselves."""

    def __init__(self, hub: HubProcess, name: str, **security: object) -> None:
        self.hub = hub
        self.nodes: list[NodeOnWire] = [hub.join(f"{name}-{letter}") for letter in "ab"]
        job = {
            "name": name,
            "nodes": {"min": 2, "max": 2, "locations": [node.location for node in self.nodes]},
            "train": {"samples": 20_000},
            "sync": {"compression": "1-bit", "policy": "sync"},
            "security": security,
        }
        self.run_id = hub.submit(job)
        self.beating = [Beating(node, self._report) for node in self.nodes]

    def _report(self) -> WorkerReport:
        return WorkerReport(run_id=self.run_id, state="running", attempt=1)

    def __enter__(self) -> "Pair":
        for one in self.beating:
            one.__enter__()
        eventually(lambda: self.hub.run(self.run_id).state == "running", within_s=60)
        self.workers = [WireWorker(node, self.run_id, seed=number) for number, node in enumerate(self.nodes)]
        replies = []
        import threading

        threads = [threading.Thread(target=lambda one=one: replies.append(one.attach())) for one in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(replies) == 2
        return self

    def __exit__(self, *args: object) -> None:
        for one in self.beating:
            one.__exit__()

    def round(self) -> None:
        for worker in self.workers:
            assert worker.round().status == "granted"
        for worker in self.workers:
            worker.settle(within_s=60)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.hub.events() if event.run_id == self.run_id]


def test_a_node_that_sends_garbage_nan_or_a_replay_harms_nobody(hub: HubProcess) -> None:
    with Pair(hub, "garbage") as pair:
        good, bad = pair.workers
        pair.round()
        digest = bad.digest
        for body in (b"", b"garbage" * 100, bytes(1 << 20)):
            with pytest.raises(FrameError):
                bad.client.send_frame(f"{bad.path}/push", body, PushReply)
        replay = bad.last_push
        assert replay is not None
        flipped = bytearray(replay.to_frame())
        flipped[len(flipped) // 2] ^= 1
        with pytest.raises(FrameError, match="checksum"):
            bad.client.send_frame(f"{bad.path}/push", bytes(flipped), PushReply)
        assert bad.send(replay).status == "duplicate"
        bad.train(bad.lease())
        wild = bad.machine.push(0, bad.theta)
        poison = np.full_like(wild.payload, 0xFF)  # scales of bfloat16 NaN
        answer = bad.send(Push(header=wild.header, payload=poison))
        assert (answer.status, answer.reason) == ("rejected", "not-finite")
        with pytest.raises(RoleError, match="pushes only for itself"):
            good.client.send_frame(f"{bad.path}/push", wild.to_frame(), PushReply)
        assert good.pull(wait_s=0) == 0
        assert good.digest == digest, "nothing of all this is in the base"
        assert bad.send(wild).status == "accepted"
        assert good.round().status == "granted"
        for worker in pair.workers:
            worker.settle(within_s=60)
        assert good.digest == bad.digest


def test_a_push_far_too_long_is_clipped_and_reported_and_in_the_end_its_node_is_set_aside(hub: HubProcess) -> None:
    with Pair(hub, "outlier", set_aside_after=2) as pair:
        good, evil = pair.workers
        for _ in range(5):
            pair.round()
        assert "push.clipped" not in pair.kinds()
        evil.train(evil.lease())
        evil.theta += np.float32(50.0)
        assert evil.push().status == "accepted"
        assert good.round().status == "granted"
        for worker in pair.workers:
            worker.settle(within_s=60)
        assert good.digest == evil.digest
        assert np.abs(good.theta).max() < 10.0, "it has moved the base by what it sent"
        (line,) = [e.text for e in hub.events() if e.run_id == pair.run_id and e.kind == "push.clipped"]
        assert "outlier-b was clipped" in line
        evil.train(evil.lease())
        evil.theta -= np.float32(50.0)
        evil.push()
        good.round()
        good.settle(within_s=60)
        eventually(lambda: "node.set_aside" in pair.kinds(), within_s=30)
        with pytest.raises(ConflictError, match="set aside"):
            evil.lease()
        for _ in range(2):
            assert good.round().status == "granted"
            good.settle(within_s=60)


def test_oversize_requests_are_refused_before_they_are_read(hub: HubProcess) -> None:
    """A payload of 1 GiB that nobody has room for: announced, refused, never sent."""
    from security_world import ask, dial

    node = hub.join("oversize")
    with Pair(hub, "big") as pair:
        for path, expected in ((f"/v1/runs/{pair.run_id}/push", (413, 409)), ("/v1/node/heartbeat", (413,))):
            for who in (node, pair.nodes[0]):
                with dial(hub, who) as stream:
                    status, _ = ask(stream, "POST", path, f"Content-Length: {1 << 30}")
                assert status in expected
        assert Path(hub.home / "hub").exists()
