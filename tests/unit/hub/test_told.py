"""What the hub tells of its decisions: whom a round did without, half records, full disks, how long it was away."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rounds_world import Make, many_rounds

from ciuic.errors import StorageError
from ciuic.hub.membership.absence import Alive, started_line


@pytest.fixture
def make() -> Iterator[Make]:
    with many_rounds() as made:
        yield made


def test_a_round_says_whom_it_did_without_and_how_long_it_waited(make: Make) -> None:
    rounds = make(deadline=5.0, min_fraction=0.5)
    rounds.settled("n0", "n1", "n2")
    rounds.train("n0")
    rounds.train("n1")
    rounds.tick(6)
    texts = [text for kind, text, _ in rounds.events if kind == "round.closed"]
    assert texts[-1].startswith("round 2 closed by deadline without n2 (its push was not there after 5.0 s): n0, n1; ")
    assert "without" not in texts[0]


def test_a_snapshot_is_told(make: Make) -> None:
    rounds = make(samples=400)
    rounds.settled("n0")
    while "snapshot.written" not in rounds.kinds():
        rounds.train("n0")
    text = next(text for kind, text, _ in rounds.events if kind == "snapshot.written")
    assert text.startswith(f"snapshot of version {rounds.version} written (")


@pytest.mark.parametrize(("log", "said"), [("journal.bin", "journal"), ("fragment-0/log.bin", "log of fragment 0")])
def test_half_a_record_that_is_cut_off_is_told(make: Make, log: str, said: str) -> None:
    rounds = make()
    rounds.settled("n0")
    rounds.ledger.close()
    path = rounds.folder / log
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:21])
    rounds.ledger = rounds._open()
    (text,) = [text for kind, text, _ in rounds.events if kind == "ledger.torn"]
    assert text == f"21 bytes of an unfinished record were cut off the {said}; nothing announced was in it"
    assert path.read_bytes() == whole
    rounds.restart()
    assert rounds.kinds().count("ledger.torn") == 1


def test_a_push_that_finds_no_space_is_told_once_and_its_end_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = make()
    rounds.settled("n0", "n1")
    frame = rounds.frame("n0", *rounds.lease("n0", 5).ranges)
    store = rounds.ledger.fragments[0].store

    def full(*_: object) -> None:
        raise StorageError("cannot write x", cause="No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "save_push", full)
        for _ in range(3):
            with pytest.raises(StorageError):
                rounds.ledger.push("n0", frame)
    assert rounds.kinds().count("storage.failed") == 1
    assert "storage.back" not in rounds.kinds()
    assert rounds.ledger.push("n0", frame).status == "accepted"
    assert rounds.kinds().count("storage.back") == 1


def test_the_first_words_say_how_long_the_hub_was_away_and_why(tmp_path: Path) -> None:
    alive = Alive(tmp_path)
    assert alive.last_seen() is None
    assert (
        started_line("https://hub", "1", alive.last_seen(), 1000.0, "").text
        == "the hub started at https://hub (start 1)"
    )
    alive.touch(1000.0)
    os.utime(tmp_path / "alive", (1000.0, 1000.0))
    killed = started_line("https://hub", "2", alive.last_seen(), 1125.0, "round.closed")
    assert killed.text.endswith("(start 2) after 2 min 5 s away; it was not stopped: killed, or without power")
    assert killed.data == {"away_s": 125.0}
    stopped = started_line("https://hub", "2", alive.last_seen(), 1125.0, "hub.stopped")
    assert stopped.text.endswith("it had been stopped")
    backwards = started_line("https://hub", "2", alive.last_seen(), 900.0, "")
    assert "away" not in backwards.text, "a clock that was set back tells nothing"
