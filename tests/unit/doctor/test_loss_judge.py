"""The verdict on what ranks replayed, from records made by hand."""

import struct
from typing import Any

import msgspec
import pytest

from ciuic.doctor.loss.judge import judge
from ciuic.doctor.loss.records import BINS, GRADIENT, INPUT, OUTPUT, Held, Replayed, Seen


def seen(path: str, what: str, value: float, *, inside: str = "", **more: Any) -> Seen:
    """A tensor whose only number is the value."""
    sketch = struct.pack(f"<{BINS}d", value, *[0.0] * (BINS - 1))
    direction = "backward" if what == GRADIENT else "forward"
    base: dict[str, Any] = {"direction": direction, "path": path, "what": what, "call": 0, "index": 0}
    base |= {"digest": struct.pack("<d", value), "dtype": "float32", "shape": (1,), "norm": abs(value)}
    return Seen(**{**base, "sketch": sketch, "inside": inside, **more})


def record(rank: int, *path: Seen, **more: Any) -> Replayed:
    base: dict[str, Any] = {"model": "Net", "settings": {"torch": "2"}, "parameters": {}, "buffers": {}}
    base |= {"evaluating": (), "code": {}, "batch": b"b", "random_before": b"r", "random_after": b"r"}
    return Replayed(rank=rank, seen=path, **{**base, **more})


def way(value: float) -> list[Seen]:
    return [seen("", INPUT, 1.0), seen("a", INPUT, 1.0), seen("a", OUTPUT, value), seen("", OUTPUT, value)]


def test_the_rank_that_differs_from_two_others_is_named_even_when_it_is_rank_0():
    found = judge({0: record(0, *way(3.0)), 1: record(1, *way(2.0)), 2: record(2, *way(2.0))}, 3)
    assert (found.result, found.module, found.ranks) == ("differs", "a", (0,))
    assert found.distance == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("dtype", "by", "result"),
    [("float32", 1e-3, "differs"), ("float32", 1e-6, "close"), ("bfloat16", 1e-3, "close"), ("int64", 1e-6, "differs")],
)
def test_the_tolerance_is_that_of_the_type(dtype: str, by: float, result: str):
    records = {rank: record(rank, seen("a", OUTPUT, 1.0 + by * rank, dtype=dtype)) for rank in range(2)}
    assert judge(records, 2).result == result


def test_what_is_computed_from_a_coarse_type_has_its_tolerance():
    records = {
        rank: record(rank, seen("a", OUTPUT, 1.0, dtype="bfloat16"), seen("b", OUTPUT, 1.0 + 1e-3 * rank))
        for rank in range(2)
    }
    assert judge(records, 2).result == "close"


def test_a_number_that_is_not_finite_on_one_rank_is_a_difference():
    records = {0: record(0, *way(1.0)), 1: record(1, *way(float("nan")))}
    found = judge(records, 2)
    assert (found.result, found.module, found.distance) == ("differs", "a", float("inf"))


def test_not_a_number_on_all_ranks_is_no_difference():
    assert judge({rank: record(rank, *way(float("nan"))) for rank in range(2)}, 2).result == "equal"


def test_a_difference_in_what_a_module_gets_is_its_parents():
    records = {rank: record(rank, seen("block.in", INPUT, 1.0 + rank, inside="block")) for rank in range(2)}
    assert judge(records, 2).module == "block"


def test_in_backward_the_module_that_took_the_tensor_is_named():
    def one(rank: int) -> Replayed:
        taken = seen("b", INPUT, 1.0, source=("a", 0, 0))
        return record(rank, seen("a", OUTPUT, 1.0), taken, seen("b", OUTPUT, 1.0), seen("a", GRADIENT, 1.0 + rank))

    found = judge({0: one(0), 1: one(1)}, 2)
    assert (found.direction, found.module) == ("backward", "b")


def test_gradients_may_arrive_in_another_order():
    one = record(0, seen("a", GRADIENT, 1.0), seen("b", GRADIENT, 2.0))
    other = record(1, seen("b", GRADIENT, 2.0), seen("a", GRADIENT, 1.0))
    assert judge({0: one, 1: other}, 2).result == "equal"


def test_a_rank_that_ends_with_an_error_is_told_with_the_error():
    found = judge({0: record(0, *way(1.0)), 1: record(1, *way(1.0)[:2], error="RuntimeError: no")}, 2)
    assert (found.result, found.ranks) == ("differs", (1,))
    assert "RuntimeError: no" in found.cause


def test_missing_ranks_make_agreement_unknown():
    found = judge({0: record(0, *way(1.0)), 2: record(2, *way(1.0))}, 3)
    assert (found.result, found.missing) == ("unknown", (1,))


def test_a_parameter_that_differed_before_is_the_reason_only_where_it_is_used():
    held = [{"a.weight": Held(digest=bytes([rank]), dtype="float32")} for rank in range(2)]
    there = judge({rank: record(rank, *way(1.0 + rank), parameters=held[rank]) for rank in range(2)}, 2)
    assert "parameters a.weight" in there.cause
    held = [{"z.weight": Held(digest=bytes([rank]), dtype="float32")} for rank in range(2)]
    elsewhere = judge({rank: record(rank, *way(1.0 + rank), parameters=held[rank]) for rank in range(2)}, 2)
    assert "parameters" not in elsewhere.cause
    assert elsewhere.already[0].names == ("z.weight",)


def test_a_record_comes_back_from_its_bytes():
    one = record(0, *way(1.0), loss=1.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=Replayed) == one
