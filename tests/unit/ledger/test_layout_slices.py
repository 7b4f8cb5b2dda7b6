"""Slices of a parameter in a layout: together they are the parameter, and nothing else is taken from outside."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ciuic.errors import LayoutMismatchError, ProtocolError
from ciuic.ledger.layout import Slice, Tensor, check_same_layout, layout_from_dict, make_layout

NAME = "layers.1.experts.up"


def rows(start: int, stop: int, total: int = 8, **changes: Any) -> Tensor:
    part = Slice(of=NAME, start=start, stop=stop, rows=total)
    fields = {"name": part.name, "shape": (stop - start, 4, 3), "dtype": "float32", "section": "coded", "part": part}
    return Tensor(**fields | changes)


def whole(name: str = NAME, fragment: int = 0) -> Tensor:
    return Tensor(name=name, shape=(8, 4, 3), dtype="float32", section="coded", fragment=fragment)


@given(cuts=st.sets(st.integers(1, 7)))
def test_slices_that_cover_a_parameter_are_a_layout_and_survive_the_wire(cuts: set[int]) -> None:
    borders = [0, *sorted(cuts), 8]
    layout = make_layout([rows(*pair) for pair in pairwise(borders)])
    assert sum(t.element_count for t in layout.tensors) == whole().element_count
    assert {t.source for t in layout.tensors} == {NAME}
    again = layout_from_dict(msgspec.json.decode(msgspec.json.encode(layout)))
    assert again == layout
    assert again.digest == layout.digest


REFUSED: list[tuple[str, Sequence[Tensor]]] = [
    ("missing", [rows(0, 3), rows(4, 8)]),
    ("missing", [rows(1, 8)]),
    ("end at row 7 of 8", [rows(0, 7)]),
    ("end at row 8 of 7", [rows(0, 8, 7)]),
    ("there twice", [rows(0, 5), rows(4, 8)]),
    ("a whole too", [whole(), rows(0, 8)]),
    ("of one parameter", [rows(0, 4), rows(4, 8, dtype="bfloat16")]),
    ("of one parameter", [rows(0, 4), rows(4, 8, 9)]),
    ("of one parameter", [rows(0, 4), rows(4, 8, shape=(4, 12))]),
    ("shape", [rows(0, 4), rows(4, 8, shape=(3, 4, 3))]),
    ("shape", [rows(0, 8, shape=())]),
    ("not trained", [rows(0, 8, trainable=False)]),
    ("are named", [rows(0, 8, name="layers.1.experts.up")]),
    ("shape", [rows(5, 5, shape=(1, 4, 3)), rows(0, 8)]),
]


@pytest.mark.parametrize(("why", "tensors"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_slices_that_are_not_the_whole_parameter_once_are_refused(why: str, tensors: Sequence[Tensor]) -> None:
    with pytest.raises(ProtocolError, match=f"slices of '{NAME}'") as caught:
        make_layout(tensors)
    assert why in caught.value.cause


def test_another_cut_is_another_layout_and_the_first_slice_that_differs_is_named() -> None:
    ours, theirs = make_layout([rows(0, 4), rows(4, 8)]), make_layout([rows(0, 5), rows(5, 8)])
    assert ours.digest != theirs.digest
    with pytest.raises(LayoutMismatchError, match=r"experts\.up\[0:4\]"):
        check_same_layout(ours, theirs)


def test_the_digest_sees_of_what_a_slice_is() -> None:
    one = make_layout([rows(0, 8)])
    other = make_layout([replace(one.tensors[0], part=msgspec.UNSET)])
    assert one.digest != other.digest
