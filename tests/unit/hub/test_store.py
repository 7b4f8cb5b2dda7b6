"""What is in SQLite survives; what does not fit is refused with a reason; nothing grows for ever."""

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ciuic.errors import StorageError
from ciuic.hub.keeping import store as store_module
from ciuic.hub.keeping.store import Store, Wanted
from ciuic.hub.membership.records import Announce, Node, Run
from ciuic.net.messages import LogLine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ciuic.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    made = Store(path, events_kept=300, log_lines_kept=100)
    yield made
    made.close()


def line(text: str, run_id: str = "") -> Announce:
    return Announce(kind="test", text=text, run_id=run_id, data={"n": 1})


def log_line(text: str) -> LogLine:
    return LogLine(time=1.0, rank=0, stream="out", text=text)


def reopened(store: Store, path: Path) -> Store:
    store.close()
    return Store(path)


def test_nodes_runs_and_epoch_come_back_as_they_were(store: Store, path: Path) -> None:
    node = Node(node_id="us-west", serial="1f", number=1, location="us-west", claimed={"gpus": 8.0}, superseded=["a"])
    run = Run(run_id="r-1", number=1, name="r", job={"nodes": {"min": 2}}, submit_token="t", failed={"x": "boom"})
    store.commit(wall_s=5.0, nodes=[node], runs=[run], epoch=7, lines=[line("hello")])
    again = reopened(store, path)
    assert again.nodes() == [node]
    assert again.runs() == [run]
    assert again.epoch() == 7
    assert [(event.id, event.time, event.text, event.data) for event in again.events_after(0)] == [
        (1, 5.0, "hello", {"n": 1})
    ]
    again.close()


def test_every_start_is_counted(store: Store, path: Path) -> None:
    assert store.count_boot() == 1
    again = reopened(store, path)
    assert again.count_boot() == 2
    again.close()


def test_a_commit_that_fails_in_the_middle_leaves_nothing(store: Store) -> None:
    first = Run(run_id="r-1", number=1, name="r", job={}, submit_token="same")
    second = Run(run_id="r-2", number=2, name="r", job={}, submit_token="same")
    store.commit(wall_s=0.0, runs=[first])
    with pytest.raises(StorageError, match="UNIQUE"):
        store.commit(wall_s=0.0, runs=[second], epoch=9, lines=[line("never")])
    assert (store.runs(), store.epoch(), store.events_after(0)) == ([first], 0, [])


def test_a_full_disk_is_a_clear_error_and_works_again_when_there_is_space(store: Store) -> None:
    writer = store.database._writer
    writer.execute("PRAGMA max_page_count = 1")  # SQLite takes the present size as the least

    def fill() -> None:
        while True:
            store.commit(wall_s=0.0, lines=[line("x" * 1000)])

    with pytest.raises(StorageError, match="full") as caught:
        fill()
    assert "free some space" in caught.value.next
    writer.execute("PRAGMA max_page_count = 100000")
    store.commit(wall_s=0.0, lines=[line("again")])
    assert store.latest_events(1)[0].text == "again"


def test_the_oldest_events_go_beyond_the_cap_and_ids_are_not_used_again(store: Store) -> None:
    for start in range(0, 600, 50):
        store.commit(wall_s=0.0, lines=[line(str(number)) for number in range(start, start + 50)])
    kept = store.events_after(0, limit=10_000)
    assert 300 <= len(kept) <= 300 + store_module.PRUNE_EVERY
    assert [event.id for event in kept] == list(range(kept[0].id, 601))


def told(store: Store, **wanted: object) -> list[str]:
    return [event.text for event in store.events_after(0, wanted=Wanted(**wanted))]  # type: ignore[arg-type]


def test_events_are_found_by_kind_node_and_time(store: Store) -> None:
    lines = [("node.dead", "a"), ("node.back", "a"), ("nodes", "b"), ("round.closed", "")]
    for wall_s, (kind, node) in enumerate(lines):
        store.commit(wall_s=float(wall_s), lines=[Announce(kind=kind, node_id=node, text=str(wall_s))])
    assert told(store, kinds=("node",)) == ["0", "1"]
    assert told(store, kinds=("node.dead", "round")) == ["0", "3"]
    assert told(store, kinds=("*",)) == []
    assert told(store, node_id="a", since=1.0) == ["1"]


def test_the_story_of_a_run_has_what_happened_to_the_hub_meanwhile_and_not_later(store: Store) -> None:
    run = Run(run_id="r-1", number=1, name="r", job={}, state="running")
    before, during, after = (Announce(kind="hub.started", text=text) for text in ("before", "during", "after"))
    other = Announce(kind="token.created", text="not about the run")
    store.commit(
        wall_s=0.0, runs=[run], lines=[before, line("first", "r-1"), during, other, line("last", "r-1"), after]
    )
    assert told(store, run_id="r-1", with_hub=True) == ["first", "during", "last", "after"]
    run.state = "finished"
    store.commit(wall_s=1.0, runs=[run])
    assert told(store, run_id="r-1", with_hub=True) == ["first", "during", "last"]


def test_events_of_one_run_can_be_asked_for(store: Store) -> None:
    store.commit(wall_s=0.0, lines=[line("a", "r-1"), line("b", "r-2"), line("c", "r-1")])
    assert [event.text for event in store.events_after(0, wanted=Wanted(run_id="r-1"))] == ["a", "c"]
    assert [event.text for event in store.events_after(1, wanted=Wanted(run_id="r-1"))] == ["c"]
    assert [event.text for event in store.latest_events(2)] == ["b", "c"]


def test_logs_are_kept_per_run_up_to_their_cap(store: Store) -> None:
    for number in range(0, 900, 100):
        store.add_lines("r-1", "us-west", [log_line(str(n)) for n in range(number, number + 100)])
    store.add_lines("r-2", "us-west", [log_line("other")])
    kept = store.lines_after("r-1", 0, limit=10_000)
    assert len(kept) <= 100 + store_module.PRUNE_EVERY
    assert kept[-1].text == "899"
    assert [row.text for row in store.lines_after("r-2", 0)] == ["other"]


def test_logs_of_one_node_can_be_asked_for(store: Store) -> None:
    store.add_lines("r", "a", [log_line("1")])
    store.add_lines("r", "b", [log_line("2"), log_line("3")])
    assert [row.text for row in store.lines_after("r", 0, node_id="b")] == ["2", "3"]
    assert [row.text for row in store.lines_after("r", 2)] == ["3"]


def test_what_a_run_reported_last_is_kept_until_it_reports_again(store: Store) -> None:
    store.commit(wall_s=0.0, runs=[Run(run_id="r", number=1, name="r", job={}, state="finished")])
    assert store.runs_without_info() == ["r"]
    store.save_info("r", b'{"versions":[3]}')
    store.commit(wall_s=0.0, runs=[Run(run_id="r", number=1, name="r", job={}, state="finished", reason="x")])
    assert store.last_info("r") == {"versions": [3]}
    assert store.last_info("unknown") == {}
    assert store.runs_without_info() == []


def test_threads_may_write_at_the_same_time(store: Store) -> None:
    def write(name: str) -> None:
        for number in range(20):
            store.commit(wall_s=0.0, lines=[line(f"{name}{number}")])
            store.events_after(0)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.events_after(0)) == 80


def test_a_file_of_a_newer_version_is_not_touched(store: Store, path: Path) -> None:
    store.close()
    with sqlite3.connect(path) as raw:
        raw.execute("PRAGMA user_version = 99")
    raw.close()
    with pytest.raises(StorageError, match="newer version"):
        Store(path)


def test_a_file_that_is_no_database_is_a_clear_error(path: Path) -> None:
    path.write_bytes(b"this is not a database, it is a text of some length" * 100)
    with pytest.raises(StorageError, match="not a database"):
        Store(path)
