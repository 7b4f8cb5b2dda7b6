"""What a joiner fetches while its model is still built: connections, the snapshot, entries; through a real hub."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hub_process import Beating, HubProcess, NodeOnWire, eventually
from hub_worker import WireWorker
from msgspec import structs

from ciuic.job import parse_job
from ciuic.ledger.entry import snapshot_from_frame
from ciuic.ledger.layout import Tensor, make_layout
from ciuic.net import messages as m
from ciuic.train.ahead import Fetched, snapshot_file
from ciuic.train.approach import Approach
from ciuic.train.early import EarlyEntries, versions_in
from ciuic.train.runfile import RunFile

ROUNDS = 5
NEVER = threading.Event()


class FirstWorker(WireWorker):
    """A model of 2 MiB: its snapshot comes in chunks."""

    def __init__(self, node: NodeOnWire, run_id: str) -> None:
        super().__init__(node, run_id)
        matrix = Tensor(name="matrix", shape=(512, 1024), dtype="float32", section="coded", row_aligned=True)
        self.layout = make_layout([matrix], 1)
        self.count = self.layout.fragment_shape(0).element_count

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.round()
            self.settle()


class World:
    """A run with one worker, and another node that comes later."""

    def __init__(self, hub: HubProcess, worker: FirstWorker, joiner: NodeOnWire, folder: Path) -> None:
        self.worker, self.joiner = worker, joiner
        self.info = RunFile(
            run_id=worker.run_id,
            job=parse_job({}),
            hub_url=hub.url,
            node_id=joiner.node_id,
            authority=hub.home / "operator" / "authority.pem",
            cert=joiner.folder / "node.pem",
            key=joiner.folder / "node.key",
            ranks=1,
            folder=folder,
        )

    def state(self) -> m.FragmentState:
        with contextlib.closing(self.info.connect("control")) as client:
            (state,) = client.call("GET", f"{self.worker.path}/bases", None, m.BasesReply).fragments
        return state

    def came(self) -> list[Path]:
        return list(self.info.folder.glob("snapshot-*"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("ahead")
    with HubProcess(folder / "home") as hub:
        first, second = hub.join("us"), hub.join("eu")
        with Beating(first):
            run_id = hub.submit({"nodes": {"min": 1}, "train": {"samples": 100_000}, "sync": {"interval": 1}})
            worker = FirstWorker(first, run_id)
            eventually(lambda: hub.run(run_id).state == "running")
            worker.attach()
            worker.rounds(ROUNDS)
            with Beating(second) as beating:
                eventually(lambda: beating.replies and beating.replies[-1].assignment)
                (folder / "run").mkdir()
                yield World(hub, worker, second, folder / "run")


def fetched(approach: Approach, state: m.FragmentState) -> Fetched:
    found = eventually(lambda: approach.base(0, state, NEVER))
    assert found is not None
    return found


def test_a_base_comes_ahead_of_the_model_with_all_entries_after_it(world: World) -> None:
    state = world.state()
    assert state.version >= ROUNDS > state.snapshot_version
    assert state.chunk_bytes > 0, "the list of chunks needs no request of its own"
    approach = Approach(world.info)
    approach.begin()
    found = fetched(approach, state)
    file = snapshot_file(world.info.folder, 0, found.version)
    assert snapshot_from_frame(file.read_bytes(), world.worker.count).header.version == state.snapshot_version
    assert found.early is not None
    data = eventually(lambda: found.early.take(NEVER))  # type: ignore[union-attr]
    assert data is not None
    assert versions_in(data) == list(range(state.snapshot_version + 1, state.version + 1))
    assert found.early.take(NEVER) == b"", "there are no more now, and that needs no request"
    world.worker.rounds(1)
    assert versions_in(eventually(lambda: found.early.take(NEVER)) or b"") == [state.version + 1]  # type: ignore[union-attr]
    found.early.close()
    approach.close()
    file.unlink()
    assert not world.came()


def test_a_base_that_nobody_takes_leaves_nothing_behind(world: World) -> None:
    approach = Approach(world.info)
    approach.begin()
    eventually(world.came)
    approach.close()
    assert not world.came()
    assert not [t for t in threading.enumerate() if t.name in ("ciuic-ahead", "ciuic-early") and t.is_alive()]


def test_an_older_snapshot_serves_because_its_entries_come_by_themselves(world: World) -> None:
    approach = Approach(world.info)
    approach.begin()
    state = world.state()
    later = fetched(approach, structs.replace(state, snapshot_version=state.version))
    assert later.version == state.snapshot_version
    assert later.early is not None
    later.early.close()
    approach.close()
    snapshot_file(world.info.folder, 0, later.version).unlink()


def test_connections_are_open_before_they_are_needed_and_old_ones_are_not_trusted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    approach = Approach(world.info)
    approach.begin()
    taken = fetched(approach, world.state())
    first, pusher = approach.connect("control"), approach.connect("updates")
    assert first.sock is not None
    assert pusher.sock is not None
    assert pusher.fan.are_open(4)
    monkeypatch.setattr("ciuic.train.approach.IDLE_S", 0.0)
    assert approach.connect("updates").sock is None, "the hub may have closed it"
    assert taken.early is not None
    for one in (first, pusher, taken.early):
        one.close()
    approach.close()
    assert approach.connect("control").sock is None
    for path in world.came():
        path.unlink()


def test_entries_that_stop_coming_are_asked_for_in_the_usual_way(world: World) -> None:
    state = world.state()
    early = EarlyEntries(world.info.connect("snapshots"), world.info.run_id, 0, state)
    eventually(lambda: early.take(NEVER))
    early.close()
    while (kept := early.take(NEVER)) is not None:
        assert kept, "what came before the end is not lost; then it says that no more will come"


def test_a_hub_that_is_away_or_files_that_are_not_there_only_mean_that_nothing_is_ahead(world: World) -> None:
    for info in (replace(world.info, hub_url="https://127.0.0.1:1"), replace(world.info, authority=Path("/nowhere"))):
        approach = Approach(info)
        approach.begin()
        assert approach.base(0, world.state(), NEVER) is None
        approach.close()
