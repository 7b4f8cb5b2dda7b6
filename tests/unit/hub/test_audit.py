"""The audit log: append-only, whole, and not to be filled up by strangers. Real SQLite."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from ciuic.errors import StorageError
from ciuic.hub.access.audit import ADDRESSES_COUNTED, OTHERS, SUMMARY_S, AuditRow, AuditTrail
from ciuic.hub.access.recorded import NAMED_ACTIONS, action_of
from ciuic.hub.keeping.database import Database


class Clock:
    now_s = 1000.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(tmp_path / "hub.db")
    yield made
    made.close()


@pytest.fixture
def trail(database: Database, clock: Clock) -> AuditTrail:
    return AuditTrail(database, wall_s=lambda: clock.now_s)


def test_rows_come_back_in_order_and_since_a_moment(trail: AuditTrail, clock: Clock) -> None:
    for number in range(5):
        clock.now_s = 1000.0 + number
        trail.record(AuditRow(action="run.stop", who="alice", target=f"r{number}"))
    assert [line.target for line in trail.lines()] == ["r0", "r1", "r2", "r3", "r4"]
    assert [line.target for line in trail.lines(since_s=1003.0)] == ["r3", "r4"]
    assert [line.target for line in trail.lines(after=2, limit=2)] == ["r2", "r3"]
    assert trail.first_broken() is None


def test_rows_cannot_be_changed_or_deleted(trail: AuditTrail, database: Database) -> None:
    trail.record(AuditRow(action="revoke", who="alice"))
    for statement in ("UPDATE audit SET who = 'bob'", "DELETE FROM audit"):
        with pytest.raises(StorageError, match="append-only"), database.writing() as db:
            db.execute(statement)
    assert [line.who for line in trail.lines()] == ["alice"]


@pytest.mark.parametrize("statement", ["UPDATE audit SET who = 'bob' WHERE id = 2", "DELETE FROM audit WHERE id = 2"])
def test_a_row_that_was_changed_behind_the_hubs_back_is_found(
    trail: AuditTrail, database: Database, statement: str
) -> None:
    for number in range(4):
        trail.record(AuditRow(action="run.stop", who="alice", target=f"r{number}"))
    with sqlite3.connect(database.path) as raw:
        raw.execute("DROP TRIGGER audit_is_not_changed")
        raw.execute("DROP TRIGGER audit_is_not_deleted")
        raw.execute(statement)
    raw.close()
    assert trail.first_broken() in (2, 3)


def test_the_chain_goes_on_after_a_restart(trail: AuditTrail, database: Database) -> None:
    trail.record(AuditRow(action="join", who="us-west"))
    again = AuditTrail(database)
    again.record(AuditRow(action="join", who="us-east"))
    assert again.first_broken() is None
    assert [line.who for line in again.lines()] == ["us-west", "us-east"]


def test_a_million_refused_requests_are_one_row(trail: AuditTrail, clock: Clock) -> None:
    for number in range(100_000):
        trail.refused(f"10.0.{number % 5000 // 250}.{number % 250}", 401)
    trail.sum_up()
    assert trail.lines() == [], "not before its time"
    clock.now_s += SUMMARY_S
    trail.sum_up()
    (line,) = trail.lines()
    assert line.action == "requests.refused"
    assert "100000 x 401" in line.detail
    assert OTHERS in line.detail
    assert len(line.detail) < 300
    trail.sum_up(now=True)
    assert len(trail.lines()) == 1, "nothing new, no row"


def test_only_so_many_addresses_are_kept_in_memory(trail: AuditTrail) -> None:
    for number in range(3 * ADDRESSES_COUNTED):
        trail.refused(f"host-{number}", 401)
    assert len(trail._refused) <= ADDRESSES_COUNTED + 1


def test_what_only_operators_may_do_is_kept_under_a_name_of_its_own() -> None:
    operators, nodes = frozenset({"operator"}), frozenset({"node"})
    assert action_of("POST", "/v1/runs/{run}/stop", operators) == "run.stop"
    assert action_of("POST", "/v1/nodes/{node}/evict", operators) == "node.evict"
    assert action_of("POST", "/v1/hub/backup", operators) == "hub.backup"
    assert action_of("GET", "/v1/audit", operators) == ""
    assert action_of("POST", "/v1/node/heartbeat", nodes) == ""
    assert action_of("POST", "/v1/join", None) == "join"
    assert len(set(NAMED_ACTIONS.values())) == len(NAMED_ACTIONS)
