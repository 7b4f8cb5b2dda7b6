"""The hub without its port: what is answered is on disk, also when the disk was full for a while."""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hub_world import eventually

from ciuic.errors import ConflictError, LedgerDamagedError, StorageError, TokenError
from ciuic.hub.config import HubConfig
from ciuic.hub.core import STRAY_S, Clocks, Hub
from ciuic.hub.keeping.store import Store
from ciuic.hub.run.shelf import Ledger
from ciuic.job import Job
from ciuic.net import messages as m
from ciuic.net.tls import Authority, new_key_and_csr

JOB = {"name": "tiny", "nodes": {"min": 1}}


class FakeLedger:
    """Counts what it is asked; `finished`, `problem` and `returned` are set by the test."""

    layout = None

    def __init__(self, emit: Callable[[str, str, str, dict[str, Any]], None]) -> None:
        self.emit = emit
        self.is_finished = False
        self.is_closed = False
        self.problem: Exception | None = None
        self.gone: list[str] = []
        self.returned: int | None = None
        self.members: list[str] = []

    def tick(self) -> float:
        if self.problem is not None:
            raise self.problem
        return 0.5

    @property
    def finished(self) -> bool:
        return self.is_finished

    def node_gone(self, node: str) -> int | None:
        self.gone.append(node)
        self.emit("samples.returned", f"samples of {node}", node, {})
        return self.returned

    def info(self, *, full: bool) -> dict[str, Any]:
        nodes = [m.NodeInRun(node_id=node, state="training") for node in self.members]
        return {"versions": [4], "digests": ["d"], "nodes": nodes, "samples": m.SampleCounts(total=8, committed=8)}

    def present(self) -> list[str]:
        return [node for node in self.members if node not in self.gone]

    def close(self) -> None:
        self.is_closed = True


class Bench:
    """A hub on a folder, with a clock moved by hand, that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 100.0
        self.folder = folder
        (folder / "hub").mkdir()
        self.authority = Authority.create(folder / "hub")
        self.ledgers: dict[str, FakeLedger] = {}
        self.open_problem: Exception | None = None
        self.start()

    def start(self) -> None:
        self.store = Store(self.folder / "hub" / "ciuic.db")
        clocks = Clocks(mono_s=lambda: self.now_s, wall_s=lambda: 1e9 + self.now_s)
        self.hub = Hub(HubConfig(home=self.folder), self.store, self.authority, self.open, clocks=clocks)

    def kill(self) -> None:
        """Nothing is closed in order; only what was committed stays."""
        self.hub._errands.shutdown(wait=True)
        self.store.close()

    def restart(self) -> None:
        self.kill()
        self.start()

    def open(self, folder: Path, job: Job, *, run_id: str, **callbacks: Any) -> Any:
        if self.open_problem is not None:
            raise self.open_problem
        return self.ledgers.setdefault(run_id, FakeLedger(callbacks["emit"]))

    def fill_disk(self) -> None:
        """From now on SQLite refuses to write (a truly full disk: test_store)."""
        self.store.database._writer.execute("PRAGMA query_only = 1")

    def free_disk(self) -> None:
        self.store.database._writer.execute("PRAGMA query_only = 0")

    def token(self, uses: int = 1) -> Any:
        return self.hub.create_token(m.CreateTokenRequest(uses=uses), "alice")

    def join_request(self, token: Any, location: str = "us-west") -> m.JoinRequest:
        _, csr = new_key_and_csr()
        return m.JoinRequest(token_id=token.token_id, secret=token.secret, csr_pem=csr.decode(), location=location)

    def join(self, location: str = "us-west") -> str:
        node_id = self.hub.join(self.join_request(self.token(), location)).node_id
        self.beat(node_id)
        return node_id

    def beat(self, node_id: str, **fields: Any) -> None:
        self.now_s += 0.01
        request = m.HeartbeatRequest(
            agent_incarnation="a", sequence=int(self.now_s * 100), known_revision=fields.pop("known", 99), **fields
        )
        self.hub.beat(node_id, request)

    def submit(self, token: str = "") -> str:
        return self.hub.submit(m.SubmitRequest(job=JOB, submit_token=token)).run_id

    def pass_time(self, seconds: float) -> None:
        until = self.now_s + seconds
        while self.now_s < until:
            self.now_s += 0.5
            self.hub.tick()

    def presence(self, node_id: str) -> str:
        node = self.hub.node(node_id)
        return node.presence if node is not None else ""

    def texts(self) -> list[str]:
        return [event.text for event in self.store.events_after(0)]

    def ledger(self, run_id: str) -> FakeLedger:
        return eventually(lambda: self.ledgers.get(run_id))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.hub.stop()


def test_boot_ids_differ_and_epochs_grow_over_restarts(bench: Bench) -> None:
    first = (bench.hub.boot_id, bench.hub._state.epoch)
    node = bench.join()
    bench.restart()
    assert bench.hub.boot_id != first[0]
    assert bench.hub.desired(node, "a")[1] > first[1]


def test_a_death_is_told_with_the_samples_that_went_back(bench: Bench) -> None:
    bench.join()
    run_id = bench.submit()
    bench.ledger(run_id).returned = 64
    bench.pass_time(12.0)
    text = "us-west is dead after 10 s of silence; its 64 leased samples went back"
    eventually(lambda: text in bench.texts())


def test_a_crash_between_a_death_and_telling_the_ledger_is_made_good_at_the_next_start(bench: Bench) -> None:
    bench.join()
    run_id = bench.submit()
    bench.ledger(run_id).members = ["us-west", "ghost"]
    bench.kill()
    bench.ledgers[run_id].gone.clear()
    bench.start()
    bench.hub.tick_run(run_id)
    assert bench.ledgers[run_id].gone == ["ghost"]


def test_a_late_word_of_a_node_that_is_not_in_the_run_does_not_hold_the_run_up_for_ever(bench: Bench) -> None:
    bench.join()
    run_id = bench.submit()
    bench.ledger(run_id).members = ["us-west", "ghost"]
    bench.hub.tick_run(run_id)
    assert bench.ledgers[run_id].gone == []
    bench.now_s += STRAY_S + 1
    bench.hub.tick_run(run_id)
    assert bench.ledgers[run_id].gone == ["ghost"]


def test_a_finished_ledger_finishes_the_run_and_is_closed_when_its_workers_ended(bench: Bench) -> None:
    node = bench.join()
    run_id = bench.submit()
    ledger = bench.ledger(run_id)
    bench.beat(node, worker=m.WorkerReport(run_id=run_id, state="running"))
    ledger.is_finished = True
    bench.hub.tick_run(run_id)
    assert bench.hub.run(run_id).state == "finished"
    assert not ledger.is_closed
    bench.beat(node, worker=m.WorkerReport(run_id=run_id, state="finished"))
    eventually(lambda: ledger.is_closed)
    bench.restart()
    assert bench.hub.run_info(bench.hub.run(run_id), full=True).versions == [4]
    with pytest.raises(ConflictError, match="is finished"):
        bench.hub.ledger(run_id)
    assert any(text.startswith(f"{run_id} finished: 8 samples in version 4") for text in bench.texts())


def test_a_damaged_ledger_fails_its_run_with_the_reason(bench: Bench) -> None:
    bench.join()
    run_id = bench.submit()
    bench.ledger(run_id).problem = LedgerDamagedError("entry 3 is damaged")
    bench.hub.tick_run(run_id)
    assert bench.hub.run(run_id).state == "failed"
    assert "entry 3 is damaged" in bench.hub.run(run_id).reason


def test_a_ledger_that_finds_no_space_does_not_fail_its_run(bench: Bench) -> None:
    bench.join()
    run_id = bench.submit()
    bench.ledger(run_id).problem = StorageError("the disk is full")
    assert bench.hub.tick_run(run_id) == 1.0
    assert bench.hub.run(run_id).state == "running"


def test_a_full_disk_refuses_a_join_and_costs_no_use_of_the_token(bench: Bench) -> None:
    token = bench.token()
    bench.fill_disk()
    with pytest.raises(StorageError):
        bench.hub.join(bench.join_request(token))
    assert bench.hub.node("us-west") is None
    bench.free_disk()
    assert bench.hub.join(bench.join_request(token)).node_id == "us-west"
    with pytest.raises(TokenError):
        bench.hub.join(bench.join_request(token))


def test_a_full_disk_kills_nobody_and_everything_is_stored_when_there_is_space(bench: Bench) -> None:
    first, second = bench.join("us-west"), bench.join("eu-central")
    bench.fill_disk()
    for _ in range(24):
        with suppress(StorageError):
            bench.beat(first)
        bench.pass_time(0.5)
    assert bench.presence(second) == "dead"
    with pytest.raises(StorageError):
        bench.beat(first)  # not answered while the death of the other is not stored
    bench.free_disk()
    bench.beat(first)
    bench.restart()
    assert bench.presence(second) == "dead"
    assert bench.presence(first) == "here"
    assert "eu-central is dead after 10 s of silence" in bench.texts()


def test_a_submission_that_found_no_space_may_be_repeated_with_its_token(bench: Bench) -> None:
    bench.fill_disk()
    for _ in range(2):
        with pytest.raises(StorageError):
            bench.submit("once")
    bench.free_disk()
    run_id = bench.submit("once")
    bench.restart()
    assert [run.run_id for run in bench.hub.runs(10)] == [run_id]


def test_a_ledger_may_tell_its_story_from_any_thread_while_the_hub_changes(bench: Bench) -> None:
    node = bench.join()
    run_id = bench.submit()
    ledger = bench.ledger(run_id)

    def chatter() -> None:
        for number in range(50):
            ledger.emit("round.closed", f"round {number}", "", {})

    threads = [threading.Thread(target=chatter) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        bench.beat(node)
    for thread in threads:
        thread.join(timeout=30)
    assert len([text for text in bench.texts() if text.startswith("round ")]) == 100


def test_stopping_a_run_whose_ledger_cannot_be_opened_works(bench: Bench) -> None:
    bench.open_problem = StorageError("no space")
    bench.join()
    run_id = bench.submit()
    bench.hub.stop_run(run_id)
    bench.beat("us-west")
    assert bench.hub.run(run_id).state == "stopped"


def test_the_ledger_protocol_is_what_the_real_one_offers() -> None:
    from ciuic.hub.run.rounds import RunLedger

    wanted = {name for name in vars(Ledger) if not name.startswith("_")} - {"layout", "settings"}
    assert wanted <= set(dir(RunLedger))
