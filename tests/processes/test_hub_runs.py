"""Whole runs over the wire: a real hub with its ledger, real TLS, workers that speak the protocol without torch."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import cast

import msgspec
import pytest
from hub_process import Beating, HubProcess, eventually
from hub_worker import WireWorker, small_layout

from ciuic.errors import ConflictError, FrameError, JobFileError, LayoutMismatchError, NotFoundError, SupersededError
from ciuic.net.client import HubClient, retrying
from ciuic.net.messages import AttachReply, AttachRequest, LeaveRequest, Ok, RunInfo, SubmitRequest, WorkerReport

PLACES = ("us-west", "eu-central", "ap-southeast")


def job(*, nodes: int = 1, samples: int = 96, grace: str = "10 s", **sync: object) -> dict[str, object]:
    return {
        "name": "tiny",
        "nodes": {"min": nodes},
        "train": {"samples": samples},
        "fault": {"grace": grace},
        "sync": {"deadline": 3.0, **sync},
    }


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    with HubProcess(tmp_path / "home") as running:
        yield running


class Site:
    """A node with its agent's heartbeat and a worker that follows the hub's orders."""

    def __init__(self, hub: HubProcess, location: str) -> None:
        self.node = hub.join(location)
        self.report = WorkerReport()
        self.beating = Beating(self.node, lambda: self.report)
        self.worker: WireWorker | None = None

    def assigned_run(self) -> str:
        reply = self.beating.replies[-1] if self.beating.replies else None
        return reply.assignment.run_id if reply is not None and reply.assignment is not None else ""

    def begin(self, run_id: str, *, seed: int = 0) -> WireWorker:
        eventually(lambda: self.assigned_run() == run_id)
        self.report = WorkerReport(run_id=run_id, state="running", attempt=1)
        self.worker = WireWorker(self.node, run_id, seed=seed)
        return self.worker

    def ended(self, state: str = "finished") -> None:
        self.report = msgspec.structs.replace(self.report, state=state)


def sites(hub: HubProcess, stack: ExitStack, places: tuple[str, ...] = PLACES) -> list[Site]:
    made = [Site(hub, place) for place in places]
    for site in made:
        stack.enter_context(site.beating)
    return made


def in_parallel(*works: Callable[[], object]) -> None:
    with ThreadPoolExecutor(len(works)) as pool:
        for outcome in [pool.submit(work) for work in works]:
            outcome.result(timeout=120)


def finished(hub: HubProcess, run_id: str) -> RunInfo:
    """The run when it is finished."""
    eventually(lambda: hub.run(run_id).state == "finished")
    return hub.run(run_id)


def test_three_nodes_train_a_run_to_its_end_and_every_sample_once(hub: HubProcess) -> None:
    with ExitStack() as stack:
        places = sites(hub, stack)
        run_id = hub.submit(job(nodes=3, samples=120))
        workers = [site.begin(run_id, seed=number) for number, site in enumerate(places)]
        in_parallel(*[worker.attach for worker in workers])
        in_parallel(*[worker.run_to_end for worker in workers])
        for site in places:
            site.ended()
        info = finished(hub, run_id)
        assert (info.samples.total, info.samples.committed, info.samples.duplicated, info.samples.lost) == (
            120,
        ) * 2 + (0,) * 2
        assert {worker.digest for worker in workers} == set(info.digests)
        assert info.loss_consistent is True
        assert sorted(chain.from_iterable(worker.trained for worker in workers)) == list(range(120))
        eventually(lambda: {node.state for node in hub.nodes().values()} == {"idle"})
        texts = [event.text for event in hub.events()]
        assert f"{run_id} started with us-west, eu-central, ap-southeast" in texts
        assert any(text.startswith(f"{run_id} finished: 120 samples in version") for text in texts)
        assert any(event.kind == "round.closed" for event in hub.events())


def test_kill_9_of_the_hub_in_the_middle_and_the_run_goes_on(hub: HubProcess) -> None:
    with ExitStack() as stack:
        places = sites(hub, stack, PLACES[:2])
        run_id = hub.submit(job(nodes=2, samples=160))
        workers = [site.begin(run_id, seed=number) for number, site in enumerate(places)]
        in_parallel(*[worker.attach for worker in workers])
        for _ in range(3):
            in_parallel(*[worker.round for worker in workers])
            in_parallel(*[worker.settle for worker in workers])
        before = hub.run(run_id)
        workers[0].train(workers[0].lease())
        push = workers[0].machine.push(0, workers[0].theta)
        workers[0].send(push)
        hub.kill()
        time.sleep(0.5)  # agents notice and begin to retry
        hub.start()
        after = hub.run(run_id)
        assert after.state == "running"
        assert after.versions >= before.versions
        assert workers[0].send(push).status == "duplicate", "an acknowledged push survives"
        in_parallel(*[worker.run_to_end for worker in workers])
        for site in places:
            site.ended()
        done = finished(hub, run_id)
        assert (done.samples.committed, done.samples.duplicated, done.samples.lost) == (160, 0, 0)
        assert {worker.digest for worker in workers} == set(done.digests)
        assert not [event for event in hub.events() if event.kind in ("node.dead", "worker.superseded")]
        eventually(lambda: len({reply.boot_id for reply in places[0].beating.replies}) == 2)
        epochs = [reply.epoch for reply in places[0].beating.replies]
        assert epochs == sorted(epochs)


def test_kill_9_again_and_again_while_pushes_are_under_way_loses_nothing(hub: HubProcess) -> None:
    with ExitStack() as stack:
        (site,) = sites(hub, stack, PLACES[:1])
        run_id = hub.submit(job(samples=240))
        worker = site.begin(run_id)
        worker.attach()
        stop = threading.Event()

        def murderer() -> None:
            for pause_s in (0.35, 0.15, 0.5, 0.05):
                if stop.wait(pause_s):
                    return
                hub.kill()
                hub.start()

        killing = threading.Thread(target=murderer)
        killing.start()
        try:
            worker.client = cast("HubClient", Patient(worker.client))
            worker.run_to_end()
        finally:
            stop.set()
            killing.join(timeout=120)
        site.ended()
        done = finished(hub, run_id)
        assert (done.samples.committed, done.samples.duplicated, done.samples.lost) == (240, 0, 0)
        assert done.digests == [worker.digest]


class Patient:
    """A client whose every request is repeated while the hub is away, as the real worker's are."""

    def __init__(self, client: HubClient) -> None:
        self._client = client
        self._never = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., object]:
        method = getattr(self._client, name)
        return lambda *args, **kwargs: retrying(lambda: method(*args, **kwargs), stop=self._never, what=name)


def test_a_node_that_dies_gives_its_samples_back_and_may_come_back(hub: HubProcess) -> None:
    with ExitStack() as stack:
        survivor, victim = sites(hub, stack, PLACES[:2])
        run_id = hub.submit(job(nodes=2, samples=200, grace="3 s"))
        workers = [survivor.begin(run_id), victim.begin(run_id, seed=1)]
        in_parallel(*[worker.attach for worker in workers])
        in_parallel(*[worker.round for worker in workers])
        in_parallel(*[worker.settle for worker in workers])
        workers[1].lease(40)
        victim.beating.__exit__()
        name = victim.node.node_id
        story = eventually(lambda: [e.text for e in hub.events() if e.kind == "node.dead" and e.node_id == name])
        assert story[0].startswith(f"{name} is dead after ")
        eventually(lambda: any("40 " in e.text and "went back" in e.text for e in hub.events()))
        assert hub.nodes()[victim.node.node_id].state == "dead"
        in_parallel(workers[0].round)
        workers[0].settle()

        again = Beating(victim.node, lambda: victim.report)
        victim.report = WorkerReport()
        victim.beating = again
        stack.enter_context(again)
        eventually(lambda: hub.nodes()[victim.node.node_id].state == "assigned")
        reborn = victim.begin(run_id, seed=2)
        assert reborn.attach().incarnation == 2
        with pytest.raises(SupersededError):
            workers[1].lease()
        in_parallel(workers[0].run_to_end, reborn.run_to_end)
        survivor.ended()
        victim.ended()
        done = finished(hub, run_id)
        assert (done.samples.committed, done.samples.duplicated, done.samples.lost) == (200, 0, 0)


def test_stop_and_resume_go_on_where_the_run_was(hub: HubProcess) -> None:
    with ExitStack() as stack:
        (site,) = sites(hub, stack, PLACES[:1])
        run_id = hub.submit(job(samples=64))
        worker = site.begin(run_id)
        worker.attach()
        worker.round()
        worker.settle()
        operator = hub.operator()
        operator.call("POST", f"/v1/runs/{run_id}/stop", None, Ok)
        eventually(lambda: site.beating.replies[-1].stop_worker)
        site.ended("stopped")
        eventually(lambda: hub.run(run_id).state == "stopped")
        stopped = hub.run(run_id)
        assert stopped.versions == [1], "what the ledger knew is still shown"
        with pytest.raises(ConflictError, match="is stopped"):
            worker.lease()
        operator.call("POST", f"/v1/runs/{run_id}/resume", None, Ok)
        eventually(lambda: site.beating.replies[-1].assignment is not None)
        assignment = site.beating.replies[-1].assignment
        assert assignment is not None
        assert assignment.attempt == 2
        site.report = WorkerReport(run_id=run_id, state="running", attempt=2)
        second = WireWorker(site.node, run_id, seed=5)
        second.attach()
        assert second.version == 1
        second.run_to_end()
        site.ended()
        assert finished(hub, run_id).samples.committed == 64


def test_a_finished_run_is_still_told_after_a_restart(hub: HubProcess) -> None:
    with ExitStack() as stack:
        (site,) = sites(hub, stack, PLACES[:1])
        run_id = hub.submit(job(samples=16))
        worker = site.begin(run_id)
        worker.attach()
        worker.run_to_end()
        site.ended()
        eventually(lambda: hub.run(run_id).state == "finished" and hub.nodes()["us-west"].state == "idle")
    before = hub.run(run_id)
    hub.kill()
    hub.start()
    after = hub.run(run_id)
    assert (after.digests, after.samples, after.evaluations) == (before.digests, before.samples, before.evaluations)


def test_a_worker_whose_node_is_not_assigned_cannot_attach(hub: HubProcess) -> None:
    node = hub.join("outsider")
    run_id = hub.submit(job(nodes=3))
    with pytest.raises(ConflictError, match="not assigned"):
        WireWorker(node, run_id).try_attach()
    with pytest.raises(NotFoundError):
        WireWorker(node, "no-such-run").try_attach()


def test_another_model_a_flipped_bit_a_cut_and_an_oversized_push_leave_the_run_unharmed(hub: HubProcess) -> None:
    with ExitStack() as stack:
        (site,) = sites(hub, stack, PLACES[:1])
        run_id = hub.submit(job(samples=32))
        worker = site.begin(run_id)
        worker.attach()
        other = small_layout()
        changed = msgspec.structs.replace(other, tensors=other.tensors[:-1])
        request = AttachRequest(layout=msgspec.to_builtins(changed))
        with pytest.raises(LayoutMismatchError, match="norm"):
            worker.client.call("POST", f"{worker.path}/attach", request, AttachReply)
        worker.train(worker.lease())
        push = worker.machine.push(0, worker.theta)
        frame = bytearray(push.to_frame())
        frame[len(frame) // 2] ^= 1
        for bad in (bytes(frame), push.to_frame()[:-5], b"", b"garbage" * 100):
            with pytest.raises(FrameError):
                worker.client.send_frame(f"{worker.path}/push", bad, Ok)
        with pytest.raises(FrameError, match="not accepted here"):
            worker.client.send_frame(f"{worker.path}/push", bytes(8 << 20), Ok)
        assert worker.send(push).status == "accepted"
        worker.settle()
        worker.run_to_end()
        site.ended()
        assert finished(hub, run_id).samples.committed == 32


def test_a_push_in_another_nodes_name_is_refused(hub: HubProcess) -> None:
    with ExitStack() as stack:
        first, second = sites(hub, stack, PLACES[:2])
        run_id = hub.submit(job(nodes=2, samples=64))
        workers = [first.begin(run_id), second.begin(run_id)]
        in_parallel(*[worker.attach for worker in workers])
        workers[0].train(workers[0].lease())
        stolen = workers[0].machine.push(0, workers[0].theta)
        with pytest.raises(Exception, match="pushes only for itself"):
            workers[1].send(stolen)


def test_entries_are_held_until_there_is_one(hub: HubProcess) -> None:
    with ExitStack() as stack:
        (site,) = sites(hub, stack, PLACES[:1])
        run_id = hub.submit(job(samples=64))
        worker = site.begin(run_id)
        worker.attach()
        began = time.monotonic()
        assert worker.pull(wait_s=0.4) == 0
        assert 0.4 <= time.monotonic() - began < 5
        arrived: list[float] = []
        listener = WireWorker(site.node, run_id)

        def listen() -> None:
            body = listener.client.fetch(f"{listener.path}/entries?fragment=0&after=0&wait_s=30")
            arrived.append(time.monotonic() if body else 0.0)

        thread = threading.Thread(target=listen)
        thread.start()
        time.sleep(0.3)  # so that the request is held when the round closes
        worker.round()
        closed = time.monotonic()
        thread.join(timeout=20)
        assert arrived
        assert arrived[0] - closed < 2


def test_a_snapshot_can_be_fetched_in_parts(hub: HubProcess, tmp_path: Path) -> None:
    with ExitStack() as stack:
        (site,) = sites(hub, stack, PLACES[:1])
        run_id = hub.submit(job(samples=64))
        worker = site.begin(run_id)
        reply = worker.attach()
        path = f"{worker.path}/snapshot?fragment=0&version=0"
        whole = worker.client.fetch(path)
        target = tmp_path / "snapshot"
        (tmp_path / "snapshot.part").write_bytes(whole[:1000])
        worker.client.download(path, target, reply.fragments[0].snapshot_bytes)
        assert target.read_bytes() == whole
        with pytest.raises(NotFoundError):
            worker.client.fetch(f"{worker.path}/snapshot?fragment=0&version=77")


def test_a_worker_that_ends_without_goodbye_does_not_keep_a_complete_run_open(hub: HubProcess) -> None:
    with ExitStack() as stack:
        (site,) = sites(hub, stack, PLACES[:1])
        run_id = hub.submit(job(samples=8))
        worker = site.begin(run_id)
        worker.attach()
        worker.round()
        worker.settle()
        assert worker.lease().status == "finished"
        site.ended()
        finished(hub, run_id)


def test_a_run_that_fails_on_all_nodes_says_why(hub: HubProcess) -> None:
    with ExitStack() as stack:
        (site,) = sites(hub, stack, PLACES[:1])
        run_id = hub.submit(job())
        site.begin(run_id)
        site.report = WorkerReport(
            run_id=run_id, state="failed", attempt=1, restarts=3, exit_code=1, detail="ValueError: no data"
        )
        eventually(lambda: hub.run(run_id).state == "failed")
        assert "us-west: ValueError: no data" in hub.run(run_id).reason
        assert eventually(lambda: [e.text for e in hub.events() if e.kind == "worker.failed"]) == [
            "the worker of us-west failed after 3 restarts: ValueError: no data"
        ]


def test_the_same_submit_token_gives_the_same_run_also_after_a_kill(hub: HubProcess) -> None:
    first = hub.submit(job(nodes=5), submit_token="once")
    assert hub.submit(job(nodes=5), submit_token="once") == first
    hub.kill()
    hub.start()
    assert hub.submit(job(nodes=5), submit_token="once") == first
    assert hub.submit(job(nodes=5), submit_token="other") != first


def test_a_job_with_mistakes_is_refused_with_all_of_them(hub: HubProcess) -> None:
    with pytest.raises(JobFileError) as caught:
        hub.operator().call("POST", "/v1/runs", SubmitRequest(job={"nodes": {"min": 0}, "sync": {"intervall": 3}}), Ok)
    assert len(caught.value.problems) == 2
    assert hub.operator().call("GET", "/v1/runs", None, list[RunInfo]) == []


def test_a_stopped_process_is_waited_for_only_for_its_grace(hub: HubProcess) -> None:
    """SIGSTOP of the hub itself: whoever comes back within the grace afterwards is not dead."""
    with ExitStack() as stack:
        places = sites(hub, stack, PLACES[:2])
        run_id = hub.submit(job(nodes=2, grace="3 s"))
        eventually(lambda: all(site.assigned_run() == run_id for site in places))
        os.kill(hub.pid, signal.SIGSTOP)
        time.sleep(5.0)  # longer than the grace: what is tested
        os.kill(hub.pid, signal.SIGCONT)
        eventually(lambda: all(site.assigned_run() == run_id for site in places))
        time.sleep(1.0)  # a wrong verdict would come with the next ticks
        assert not [event for event in hub.events() if event.kind == "node.dead"]


def test_leaving_in_the_middle_gives_the_samples_back(hub: HubProcess) -> None:
    with ExitStack() as stack:
        first, second = sites(hub, stack, PLACES[:2])
        run_id = hub.submit(job(nodes=2, samples=64))
        workers = [first.begin(run_id), second.begin(run_id, seed=1)]
        in_parallel(*[worker.attach for worker in workers])
        workers[1].lease(16)
        second.beating.__exit__()
        second.node.client.call("POST", "/v1/node/leave", LeaveRequest(agent_incarnation="agent-1"), Ok)
        workers[0].run_to_end()
        first.ended()
        assert finished(hub, run_id).samples.committed == 64


def test_metrics_and_state_tell_of_the_run(hub: HubProcess) -> None:
    with ExitStack() as stack:
        (site,) = sites(hub, stack, PLACES[:1])
        run_id = hub.submit(job(samples=64))
        worker = site.begin(run_id)
        worker.attach()
        worker.round()
        worker.settle()
        worker.report(loss=3.25)
        eventually(lambda: hub.nodes()["us-west"].state == "training")
        text = hub.operator().fetch("/metrics").decode()
        for line in (
            'ciuic_nodes{state="training"} 1.0',
            'ciuic_runs{state="running"} 1.0',
            f'ciuic_run_version{{fragment="0",run="{run_id}"}} 1.0',
            f'ciuic_run_samples_committed_total{{run="{run_id}"}} 8.0',
            f'ciuic_run_rounds_total{{run="{run_id}"}} 1.0',
            f'ciuic_node_training_loss{{node="us-west",run="{run_id}"}} 3.25',
            'ciuic_hub_requests_total{path="/v1/runs/{run}/push",status="200"} 1.0',
        ):
            assert line in text, line
        state = json.loads(hub.operator().fetch("/api/state"))
        assert state["runs"][0]["rounds"][0]["version"] == 1
        assert state["hub"]["nodes"][0]["node_id"] == "us-west"
        assert state["events"]
