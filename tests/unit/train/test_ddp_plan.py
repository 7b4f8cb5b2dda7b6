"""Who owns what: every element once, whole blocks only, whatever the buckets are."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ciuic.codec import FragmentCodec
from ciuic.train.ddp.plan import UNIT_ELEMENTS, Parameter, chunk_of, cut, rows_between


@st.composite
def parameters(draw: st.DrawFn) -> list[Parameter]:
    found = []
    for number in range(draw(st.integers(1, 6))):
        row = draw(st.sampled_from([1, 7, 64, 100, 4096, 5000, 9001]))
        rows = draw(st.integers(1, 30))
        is_coded = draw(st.booleans())
        aligned = draw(st.booleans())
        count = row * rows
        found.append(
            Parameter(name=f"p{number}", element_count=count, row_length=row if aligned else count, is_coded=is_coded)
        )
    return found


@given(parameters(), st.integers(1, 9))
def test_every_element_has_one_owner_and_owners_are_even(found: list[Parameter], owners: int) -> None:
    parts = cut(found, owners)
    totals = [0] * owners
    for parameter, ranges in zip(found, parts, strict=True):
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert ranges[-1][1] == parameter.element_count
        for owner, (start, stop) in enumerate(ranges):
            totals[owner] += stop - start
    assert max(totals) - min(totals) <= UNIT_ELEMENTS * (len(found) + 2)


@given(parameters(), st.integers(1, 5), st.randoms(use_true_random=False))
def test_chunks_hold_the_same_blocks_as_the_whole(found: list[Parameter], owners: int, random: object) -> None:
    """A block that two owners shared would have two scales, or one over elements of different parameters."""
    parts = cut(found, owners)
    whole = chunk_of(range(len(found)), found)
    blocks = sorted(FragmentCodec("1-bit", whole.shape).blocks.lengths.tolist())
    pieces = []
    for owner in range(owners):
        chunk = chunk_of(range(len(found)), found, [ranges[owner] for ranges in parts])
        pieces += FragmentCodec("1-bit", chunk.shape).blocks.lengths.tolist()
        assert chunk.element_count == sum(span.stop - span.start for span in chunk.spans)
    assert sorted(pieces) == blocks


@given(st.integers(1, 50), st.integers(1, 20), st.data())
def test_rows_between_covers_the_range_and_never_crosses_a_row(length: int, count: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, length * count))
    stop = data.draw(st.integers(start, length * count))
    rows = rows_between(start, stop, length)
    assert sum(c * size for c, size in rows) == stop - start
    at = start
    for c, size in rows:
        for _ in range(c):
            assert at // length == (at + size - 1) // length
            at += size


def test_spans_say_where_a_part_lies_in_the_bucket_whatever_its_order() -> None:
    found = [
        Parameter(name="a", element_count=8192, row_length=8192, is_coded=True),
        Parameter(name="b", element_count=10, row_length=10, is_coded=False),
        Parameter(name="c", element_count=5000, row_length=5000, is_coded=True),
    ]
    parts = cut(found, 2)
    bucket = (2, 1, 0)
    values = torch.arange(5000 + 10 + 8192)
    seen = []
    for owner in range(2):
        chunk = chunk_of(bucket, found, [ranges[owner] for ranges in parts])
        for span in chunk.spans:
            part = values[span.at : span.at + span.stop - span.start]
            offset = {2: 0, 1: 5000, 0: 5010}[span.parameter]
            assert part[0] == offset + span.start
            seen.append(part)
    assert torch.equal(torch.cat(seen).sort().values, values)


def test_odd_units_go_to_the_owners_in_turn() -> None:
    small = [Parameter(name=str(i), element_count=5, row_length=5, is_coded=False) for i in range(6)]
    owners = [[start < stop for start, stop in ranges].index(True) for ranges in cut(small, 3)]
    assert owners == [0, 1, 2, 0, 1, 2]
