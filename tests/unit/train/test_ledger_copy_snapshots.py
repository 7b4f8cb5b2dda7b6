"""A node's copy writes its snapshots when the hub does, with the same bytes: others can take them from there."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rounds_world import RUN, many_rounds

from ciuic.ledger.content import snapshot_facts
from ciuic.ledger.copy import CopyAbout, base_path, newest_base, newest_version
from ciuic.ledger.entry import snapshot_from_frame
from ciuic.train.ledger_copy import LedgerRecorder


@pytest.mark.parametrize("at_once", [1, 7])
def test_a_copy_has_the_snapshots_of_the_hub_bit_by_bit(
    tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ciuic.ledger.snapshots.SNAPSHOT_SHARE", 5.0)  # the model is small, its entries are not
    with many_rounds() as make:
        rounds = make(samples=4000, compression="int4")
        rounds.settled("n0")
        layout = rounds.layout
        about = CopyAbout(
            run_id=RUN, node_id="n0", job=rounds.job.to_dict(), layout=msgspec.to_builtins(layout), total_samples=0
        )
        copy = LedgerRecorder(tmp_path, about, layout, rounds.ledger.committed)
        count = layout.fragment_shape(0).element_count
        copy.began(0, snapshot_from_frame(rounds.version_0(), count).vectors["base"], (0,))
        copy.caught_up(4000)
        version, seen = 0, set()
        while len(seen) < 3:
            for _ in range(at_once):
                rounds.train("n0")
            for frame in rounds.ledger.entries_after(0, version, 1 << 30):
                copy.entry(0, frame)
                version += 1
            newest, part = rounds.ledger.fragments[0].snapshot_version, copy.folder / "fragment-0"
            _await(lambda v=version, n=newest, p=part: newest_version(p.parent) == v and newest_base(p) == n)
            mine, hubs = base_path(part, newest), rounds.ledger.snapshot_path(0, newest)
            assert mine.read_bytes() == hubs.read_bytes()
            assert snapshot_facts(mine) == snapshot_facts(hubs)
            seen.add(newest)
        assert version > 2 * len(seen)
        copy.close()


def _await(what: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not what():
        assert time.monotonic() < until
        time.sleep(0.005)
