"""What rank 0 tells the other ranks of its node."""

from pathlib import Path

import sharded_cases as cases
from ranks import on_ranks

from ciuic.train.gang import Decision, Gang, Order


def test_the_other_ranks_get_each_order_and_then_the_decision(tmp_path: Path) -> None:
    decided = Decision(status="work", changed=True, void_moments=True, progress=0.75)
    first, second = on_ranks(cases.orders, tmp_path)
    assert first == [decided, "again"]
    assert second[:4] == [
        Order(task="gather", fragment=3),
        Order(task="scatter"),
        Order(task="hold"),
        Order(task="restore"),
    ]
    assert second[4] == decided
    assert "evaluate" in second[5]  # an order where none is expected is an error, not a deadlock


def test_a_rank_alone_decides_for_itself_and_sends_nothing() -> None:
    gang = Gang("cpu", 1)
    gang.order(Order(task="gather"))
    mine = Decision(status="end", progress=1 / 3)
    assert gang.decision(mine) is mine
