"""A node's copy of the ledger in `gradient` mode, and the numbers of committed samples that go with a copy."""

from pathlib import Path

import pytest
from gradient_world import GradientWorld
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import DigestMismatchError
from ciuic.ledger.copy import Committed, FragmentCopy, Replayer, base_path, committed_after, newest_version
from ciuic.ledger.entry import Contributor, EntryHeader, entry_from_frame, snapshot_from_frame


@pytest.mark.parametrize("frozen", [False, True])
def test_moments_and_phase_of_gradient_mode_come_out_of_the_entries_again(tmp_path: Path, frozen: bool) -> None:
    world = GradientWorld(tmp_path / "hub", seed=3, fragments=1, frozen=frozen)
    world.play(120)
    world.finish()
    aggregator = world.hub.fragments[0].aggregator
    copy = FragmentCopy(tmp_path / "copy", world.layout, 0)
    base_path(copy.folder, 0).write_bytes(world._version_0(0, world.base_0[0]))
    copy.begin(0)
    for frame in world.hub.entries_after(0, 0, 1 << 30):
        copy.append([frame])
        if copy.wants_base:
            copy.renew_base()
    copy.renew_base()
    assert (copy.version, newest_version(tmp_path)) == (aggregator.version, -1)
    snapshot = snapshot_from_frame(base_path(copy.folder, copy.version).read_bytes(), world.count(0))
    assert (snapshot.header.digest, snapshot.header.phase) == (aggregator.digest, aggregator.phase)
    assert (snapshot.vectors["first"] == aggregator.moments.first).all()
    assert (snapshot.vectors["second"] == aggregator.moments.second).all()
    assert sorted(path.suffix for path in copy.folder.iterdir()) == [".base", ".log"]
    copy.close()
    world.hub.close()


def test_an_entry_that_does_not_follow_is_refused(tmp_path: Path) -> None:
    world = GradientWorld(tmp_path / "hub", seed=3, fragments=1, frozen=False)
    world.play(60)
    first, second = (entry_from_frame(frame) for frame in world.hub.entries_after(0, 0, 1 << 30)[:2])
    replayer = Replayer(world.layout, 0, snapshot_from_frame(world._version_0(0, world.base_0[0]), world.count(0)))
    with pytest.raises(DigestMismatchError, match="does not follow"):
        replayer.apply(second)
    replayer.apply(first)
    replayer.apply(second)
    assert replayer.version == 2
    world.hub.close()


def header(version: int, *ranges: tuple[int, int]) -> EntryHeader:
    who = Contributor(node="a", incarnation=2, sequence=version, tokens=1, ranges=ranges, weight=1.0, payload_bytes=0)
    return EntryHeader(
        run="r",
        fragment=0,
        version=version,
        codec="none",
        epoch=0,
        contributors=(who,),
        outer_lr=1.0,
        outer_momentum=0.0,
        digest="",
        previous_digest="",
    )


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 10)), max_size=20), st.data())
def test_samples_told_at_any_version_lead_to_the_same_end(spans: list[tuple[int, int]], data: st.DataObject) -> None:
    headers = [header(n, (start, start + size)) for n, (start, size) in enumerate(spans, start=1)]
    whole = committed_after(Committed(version=0, total=100), headers)
    told_at = data.draw(st.integers(0, len(headers)))
    begins = data.draw(st.integers(0, told_at))  # the copy's own entries begin before what it was told, or there
    told = committed_after(Committed(version=0, total=100), headers[:told_at])
    assert committed_after(told, headers[begins:]) == whole
    numbers = [n for start, size in spans for n in range(start, start + size)]
    assert sum(stop - start for start, stop in whole.ranges) == len(set(numbers))
    assert whole.duplicated == len(numbers) - len(set(numbers))
