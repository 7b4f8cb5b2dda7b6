"""Nodes that a ledger counts on although they are not in the run, and the one order of an event's effects."""

from typing import Any

import pytest

from ciuic.hub.membership.records import Announce, Effects, Node, NodeGone, OpenRun, Wake
from ciuic.hub.run.strays import Strays


def test_a_stray_is_gone_only_after_its_time() -> None:
    strays = Strays()
    assert strays.gone("run", ["a", "b"], {"a"}, now_s=10.0, after_s=5.0) == []
    assert strays.gone("run", ["a", "b"], {"a"}, now_s=14.9, after_s=5.0) == []
    assert strays.gone("run", ["a", "b"], {"a"}, now_s=15.0, after_s=5.0) == ["b"]


def test_at_once_when_no_time_is_given_and_in_order_of_names() -> None:
    assert Strays().gone("run", ["c", "a", "b"], {"b"}, now_s=0.0) == ["a", "c"]


def test_who_was_a_member_in_between_begins_anew() -> None:
    strays = Strays()
    strays.gone("run", ["a"], set(), now_s=0.0, after_s=5.0)
    strays.gone("run", ["a"], {"a"}, now_s=4.0, after_s=5.0)
    assert strays.gone("run", ["a"], set(), now_s=6.0, after_s=5.0) == []
    assert strays.gone("run", ["a"], set(), now_s=11.0, after_s=5.0) == ["a"]


def test_runs_do_not_disturb_each_other() -> None:
    strays = Strays()
    strays.gone("one", ["a"], set(), now_s=0.0, after_s=5.0)
    strays.gone("two", ["a"], {"a"}, now_s=3.0, after_s=5.0)
    assert strays.gone("one", ["a"], set(), now_s=5.0, after_s=5.0) == ["a"]


def effects() -> Effects:
    out = Effects()
    out.add(NodeGone(run_id="run", node_id="a"))
    out.add(Announce(kind="x", text="told"))
    out.add(Wake(node_id="b"))
    out.add(OpenRun(run_id="run"))
    out.save_node(Node(node_id="a", serial="1", number=1, location="us"))
    return out


def test_all_is_stored_before_any_of_it_is_told() -> None:
    seen: list[Any] = []
    effects().carry_out(
        store=lambda out: seen.append(("store", list(out.nodes))),
        tell=lambda line: seen.append(("tell", line.text)),
        wake=lambda node_id: seen.append(("wake", node_id)),
        errand=lambda action: seen.append(("errand", type(action).__name__)),
    )
    assert seen == [("store", ["a"]), ("errand", "NodeGone"), ("tell", "told"), ("wake", "b"), ("errand", "OpenRun")]


def test_nothing_is_told_when_it_cannot_be_stored() -> None:
    told: list[Any] = []

    def store(_: Effects) -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        effects().carry_out(store=store, tell=told.append, wake=told.append, errand=told.append)
    assert told == []


@pytest.mark.parametrize(("returned", "text"), [(0, "gone"), (1200, "gone; its 1,200 leased samples went back")])
def test_the_line_of_a_node_that_is_gone_says_what_went_back(returned: int, text: str) -> None:
    line = NodeGone(run_id="r", node_id="a", line=Announce(kind="x", text="gone", run_id="r")).line_with(returned)
    assert line is not None
    assert (line.text, line.run_id) == (text, "r")
    assert NodeGone(run_id="r", node_id="a").line_with(returned) is None
