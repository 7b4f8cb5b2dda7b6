"""A run's entries counted again: doubles are found, and what cannot be is an error."""

from pathlib import Path

import numpy as np
import pytest

from ciuic.errors import CheckFailedError
from ciuic.lab.soak_ledger import count_ledger
from ciuic.ledger.entry import Contributor, Entry, EntryHeader

Ranges = tuple[tuple[int, int], ...]


def push(node: str, sequence: int, *ranges: tuple[int, int]) -> Contributor:
    return Contributor(
        node=node, incarnation=1, sequence=sequence, tokens=1, ranges=ranges, weight=1.0, payload_bytes=0
    )


def write(folder: Path, *entries: tuple[Contributor, ...], skip: int = 0, broken_at: int = 0) -> Path:
    (folder / "fragment-0").mkdir()
    frames = b""
    for version, contributors in enumerate(entries, start=1):
        header = EntryHeader(
            run="r",
            fragment=0,
            version=version + (version > skip > 0),
            codec="none",
            epoch=1,
            contributors=contributors,
            outer_lr=1.0,
            outer_momentum=0.0,
            digest=f"d{version}",
            previous_digest="other" if version == broken_at else f"d{version - 1}",
        )
        frames += Entry(header=header, payload=np.zeros(8, np.uint8)).to_frame()
    (folder / "fragment-0" / "log.bin").write_bytes(frames)
    return folder


def test_each_sample_once(tmp_path: Path) -> None:
    run = write(tmp_path, (push("a", 1, (0, 10)), push("b", 1, (10, 15))), (push("a", 2, (15, 20)),))
    counted = count_ledger(run, 20)
    assert (counted.versions, counted.digests, counted.pushes) == ([2], ["d2"], 3)
    assert (counted.distinct_samples, counted.duplicated_samples, counted.doubles_by) == (20, 0, [])


def test_doubles_are_counted_and_their_nodes_named(tmp_path: Path) -> None:
    run = write(
        tmp_path, (push("a", 1, (0, 10)), push("b", 1, (8, 12))), (push("c", 1, (12, 20)), push("b", 2, (9, 10)))
    )
    counted = count_ledger(run, 20)
    assert (counted.distinct_samples, counted.duplicated_samples) == (20, 3)  # 8 twice, 9 three times
    assert counted.doubles_by == ["a", "b"]


def test_a_sample_that_nobody_trained_is_missed(tmp_path: Path) -> None:
    assert count_ledger(write(tmp_path, (push("a", 1, (0, 9)),)), 10).distinct_samples == 9


def test_what_cannot_be_is_an_error(tmp_path: Path) -> None:
    one, two = (push("a", 1, (0, 5)),), (push("a", 2, (5, 10)),)
    cases = {
        "versions are without gaps": {"entries": (one, two), "skip": 1},
        "each entry follows from the one before": {"entries": (one, two), "broken_at": 2},
        "no push is merged twice": {"entries": (one, one)},
        "samples lie within the run": {"entries": ((push("a", 1, (5, 11)),),)},
    }
    for number, (said, options) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder, *options.pop("entries"), **options)
        with pytest.raises(CheckFailedError, match=said):
            count_ledger(folder, 10)
