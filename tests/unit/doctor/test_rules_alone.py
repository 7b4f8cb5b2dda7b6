"""Wrappers whose process group holds one rank."""

from typing import Any

from doctor_rounds import Room

from ciuic.doctor.facts import GRADIENTS, PARAMETERS
from ciuic.doctor.facts_model import ALONE
from ciuic.doctor.rules.alone import Alone

STEPS = (1, 2, 3, 4, 10, 20)


def _run(*, began: tuple[bytes, bytes] = (b"a", b"a"), calls: int = 0, equal_gradients: bool = False) -> Room:
    room = Room(Alone())
    for step in STEPS:
        facts: dict[int, dict[str, Any]] = {}
        for rank in (0, 1):
            own = bytes([rank])
            parameters = began[rank] if step == 1 else own
            facts[rank] = {ALONE: calls, PARAMETERS: parameters, GRADIENTS: b"g" if equal_gradients else own}
        room.step(step, facts)
    return room


def test_ranks_that_began_equal_and_exchange_nothing_are_found_once():
    (found,) = _run().found
    assert (found.code, found.ranks) == ("CIUIC-A5", ())
    assert "in 20 steps" in found.cause


def test_ranks_that_exchange_began_apart_or_stay_equal_are_not():
    assert not _run(calls=3).found
    assert not _run(began=(b"a", b"b")).found
    assert not _run(equal_gradients=True).found
