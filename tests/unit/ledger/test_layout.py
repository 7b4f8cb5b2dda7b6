"""The layout: storage order, one digest for every field, and nothing hostile comes in."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_frames import tiny_layout

from ciuic.codec import FragmentCodec, FragmentShape
from ciuic.errors import LayoutMismatchError, ProtocolError
from ciuic.ledger.layout import (
    MAX_COUNTERS,
    MAX_ELEMENTS,
    MAX_TENSORS,
    Layout,
    Tensor,
    check_same_layout,
    layout_from_dict,
    make_layout,
    section_of,
)


def tensor(name: str = "w", **changes: Any) -> Tensor:
    fields: dict[str, Any] = {"name": name, "shape": (64, 64), "dtype": "float32", "section": "coded"}
    return Tensor(**fields | changes)


TENSORS = st.builds(
    tensor,
    name=st.text(min_size=1, max_size=8),
    shape=st.lists(st.integers(1, 9), max_size=4).map(tuple),
    dtype=st.sampled_from(["float32", "bfloat16", "int64"]),
    section=st.sampled_from(["coded", "small", "buffer", "counter"]),
    trainable=st.booleans(),
    row_aligned=st.booleans(),
    fragment=st.integers(0, 2),
)
LISTS = st.lists(TENSORS, min_size=1, max_size=12, unique_by=lambda t: t.name)


def made(tensors: list[Tensor]) -> Layout:
    """A layout of these tensors; every fragment gets one more, so that none is empty."""
    return make_layout([*tensors, *(tensor(f"fill-in {f}", fragment=f) for f in range(3))], 3)


@given(tensors=LISTS, seed=st.integers(0, 1000))
def test_the_order_of_the_model_does_not_matter(tensors: list[Tensor], seed: int) -> None:
    shuffled = random.Random(seed).sample(tensors, len(tensors))
    assert made(tensors) == made(shuffled)
    assert made(tensors).digest == made(shuffled).digest


@given(tensors=LISTS)
def test_storage_order_is_coded_small_buffers_each_by_name_and_no_counters(tensors: list[Tensor]) -> None:
    layout = made(tensors)
    for fragment in range(3):
        members = layout.of_fragment(fragment)
        order = ["coded", "small", "buffer"]
        assert members == sorted(members, key=lambda t: (order.index(t.section), t.name))
        assert all(t.section != "counter" and t.fragment == fragment for t in members)
        shape = layout.fragment_shape(fragment)
        assert shape.element_count == sum(t.element_count for t in members)
        assert shape.coded_count == sum(t.element_count for t in members if t.section == "coded")
    assert layout.counters() == [t for t in layout.tensors if t.section == "counter"]
    assert layout.parameter_count == sum(t.element_count for t in layout.tensors if t.trainable)


@given(tensors=LISTS)
def test_every_element_has_the_name_of_its_tensor(tensors: list[Tensor]) -> None:
    layout = made(tensors)
    index = 0
    for member in layout.of_fragment(1):
        assert layout.name_at(1, index) == f"{member.name}[0]"
        index += member.element_count
        assert layout.name_at(1, index - 1) == f"{member.name}[{member.element_count - 1}]"
    assert layout.name_at(1, index) == "past the end"


@given(tensors=LISTS)
def test_a_layout_survives_the_wire(tensors: list[Tensor]) -> None:
    layout = made(tensors)
    again = layout_from_dict(msgspec.json.decode(msgspec.json.encode(layout)))
    assert again == layout
    assert again.digest == layout.digest
    check_same_layout(layout, again)


CHANGES = [
    {"name": "w2"},
    {"shape": (64, 65)},
    {"shape": (64 * 64,)},
    {"dtype": "bfloat16"},
    {"section": "small"},
    {"trainable": False},
    {"row_aligned": True},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_the_digest_sees_every_field(change: dict[str, Any]) -> None:
    before = make_layout([tensor()])
    after = make_layout([msgspec.structs.replace(tensor(), **change)])
    assert len(before.digest) == 32
    assert before.digest != after.digest


def test_the_digest_sees_the_fragment_and_how_many_there_are() -> None:
    layouts = [
        make_layout([tensor("a"), tensor("b")]),
        make_layout([tensor("a"), tensor("b", fragment=1)], 2),
        make_layout([tensor("a", fragment=1), tensor("b")], 2),
        make_layout([tensor("a"), tensor("b", fragment=1), tensor("c", fragment=2)], 3),
    ]
    assert len({layout.digest for layout in layouts}) == 4


def test_the_digest_is_the_same_in_every_version_of_ciuic() -> None:
    assert tiny_layout().digest == make_layout(list(tiny_layout().tensors)).digest
    assert make_layout([tensor()]).digest == "fdbb802dababd34d854049acc3615967"


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_the_first_tensor_that_differs_is_named_with_what_differs(change: dict[str, Any]) -> None:
    ours = make_layout([tensor("a"), tensor("w"), tensor("z")])
    theirs = make_layout([tensor("a"), msgspec.structs.replace(tensor("w"), **change), tensor("z", dtype="other")])
    with pytest.raises(LayoutMismatchError, match="the model differs from the run's: w") as caught:
        check_same_layout(ours, theirs)
    run, node = caught.value.cause.removeprefix("the run has ").split(", this node has ", 1)
    assert run != node


def test_a_tensor_that_one_side_lacks_is_named() -> None:
    more, fewer = make_layout([tensor("a"), tensor("b")]), make_layout([tensor("a")])
    for ours, theirs in ((more, fewer), (fewer, more)):
        with pytest.raises(LayoutMismatchError, match="run's: b") as caught:
            check_same_layout(ours, theirs)
        assert "no such tensor" in caught.value.cause


def test_another_number_of_fragments_is_named() -> None:
    layout = make_layout([tensor()])
    with pytest.raises(LayoutMismatchError, match="the layout differs") as caught:
        check_same_layout(layout, msgspec.structs.replace(layout, fragment_count=2))
    assert "1 fragments here, 2 there" in caught.value.cause


# ---- sections and rows


@pytest.mark.parametrize(
    ("shape", "is_router", "section"),
    [
        ((64, 64), False, "coded"),
        ((63, 65), False, "small"),  # 4095 elements
        ((1, 4096), False, "coded"),
        ((1_000_000,), False, "small"),  # one dimension
        ((), False, "small"),
        ((256, 2048), True, "small"),
        ((4, 32, 32), False, "coded"),
    ],
)
def test_sections_follow_dimensions_size_and_routers(shape: tuple[int, ...], is_router: bool, section: str) -> None:
    assert section_of(shape, is_router=is_router) == section


@pytest.mark.parametrize(
    ("shape", "row_aligned", "rows"),
    [
        ((100, 48), True, (100, 48)),
        ((100, 48), False, (1, 4800)),
        ((8, 16, 48), True, (128, 48)),  # experts: each row of each expert
        ((5000,), True, (1, 5000)),
        ((), True, (1, 1)),
    ],
)
def test_rows_of_aligned_tensors_have_their_own_blocks(
    shape: tuple[int, ...], row_aligned: bool, rows: tuple[int, int]
) -> None:
    layout = make_layout([tensor(shape=shape, row_aligned=row_aligned)])
    assert layout.fragment_shape(0) == FragmentShape(rows=(rows,), small_count=0, buffer_count=0)


def test_one_block_never_holds_two_rows_or_two_tensors() -> None:
    layout = make_layout([tensor("a", shape=(3, 5000), row_aligned=True), tensor("b", shape=(10, 10))])
    lengths = FragmentCodec("1-bit", layout.fragment_shape(0)).blocks.lengths
    assert lengths.tolist() == [4096, 904] * 3 + [100]


# ---- what is not accepted

HOSTILE: dict[str, list[Tensor]] = {
    "negative size": [tensor(shape=(-64, 64))],
    "two negative sizes": [tensor(shape=(-64, -64))],
    "no elements": [tensor(shape=(0, 64))],
    "one huge size": [tensor(shape=(MAX_ELEMENTS + 1,))],
    "huge in all": [tensor(shape=(1 << 30, 1 << 30))],
    "far too huge": [tensor(shape=(MAX_ELEMENTS,) * 16)],
    "huge together": [tensor("a", shape=(MAX_ELEMENTS,)), tensor("b")],
    "too many dimensions": [tensor(shape=(1,) * 17)],
    "the same name twice": [tensor("a"), tensor("a", section="small")],
    "no name": [tensor("")],
    "an endless name": [tensor("n" * 513)],
    "a fragment that is not there": [tensor(fragment=1)],
    "a negative fragment": [tensor(fragment=-1)],
    "too many counters": [tensor("c", section="counter", shape=(MAX_COUNTERS + 1,)), tensor()],
    "only counters": [tensor("c", section="counter", shape=(2,))],
    "nothing": [],
}


@pytest.mark.parametrize("tensors", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_layout_that_cannot_be_is_refused_here_and_from_outside(tensors: list[Tensor]) -> None:
    with pytest.raises(ProtocolError, match="layout"):
        make_layout(tensors)
    with pytest.raises(ProtocolError):
        layout_from_dict(msgspec.to_builtins(Layout(tensors=tuple(tensors))))


@pytest.mark.parametrize("count", [0, -1, MAX_TENSORS + 1, 2])
def test_a_number_of_fragments_that_cannot_be_is_refused(count: int) -> None:
    with pytest.raises(ProtocolError, match="fragment"):
        make_layout([tensor()], count)
    with pytest.raises(ProtocolError):
        layout_from_dict(msgspec.to_builtins(Layout(tensors=(tensor(),), fragment_count=count)))


def test_a_layout_with_too_many_tensors_is_refused() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        make_layout([tensor()] * (MAX_TENSORS + 1))


def test_a_layout_from_outside_must_be_in_storage_order_and_well_formed() -> None:
    good = msgspec.to_builtins(make_layout([tensor("a"), tensor("b")]))
    layout_from_dict(good)
    backwards = {**good, "tensors": good["tensors"][::-1]}
    with pytest.raises(ProtocolError, match="storage order"):
        layout_from_dict(backwards)
    first = good["tensors"][0]
    for bad in (
        {},
        {**good, "more": 1},
        {**good, "tensors": [{**first, "colour": "red"}]},
        {**good, "tensors": [{**first, "section": "large"}]},
        {**good, "tensors": [{**first, "shape": [1.5]}]},
        {**good, "tensors": "w"},
        {**good, "fragment_count": "1"},
    ):
        with pytest.raises(ProtocolError, match="not a layout"):
            layout_from_dict(bad)
