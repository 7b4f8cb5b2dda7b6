"""One verdict on a failed run: the cause first, the rest folded."""

from ciuic.hub.run.verdict import judge
from ciuic.net.messages import NodeInRun, WorkerFault


def node(name: str, state: str = "training", step: int = 0) -> NodeInRun:
    return NodeInRun(node_id=name, state=state, step=step)  # ty: ignore[invalid-argument-type] - the tests say which


def test_a_run_without_failed_workers_has_no_verdict() -> None:
    assert judge("tiny-1", {}, {}, [node("us")]) is None


def test_node_rank_step_line_place_log_and_what_the_others_did() -> None:
    fault = WorkerFault(rank=1, where="train.py:40 in main", collateral=[0, 2], log="/home/me/log")
    nodes = [node("us", "gone", 120), node("eu", "training", 118), node("ap", "idle", 121)]
    found = judge("tiny-1", {"us": "ValueError: boom"}, {"us": fault}, nodes)
    assert found is not None
    assert (found.node_id, found.rank, found.step, found.line) == ("us", 1, 120, "ValueError: boom")
    assert (found.where, found.log) == ("train.py:40 in main", "/home/me/log")
    assert found.others == ["eu trains at step 118", "ap waits for samples at step 121"]
    assert found.collateral == ["ranks 0, 2 of us fell with it"]
    assert "`ciuic logs tiny-1 --node us --rank 1`" in found.next


def test_who_lost_a_peer_is_not_the_cause_also_when_it_failed_first() -> None:
    failed = {"eu": "RuntimeError: Connection closed by peer [10.0.0.1]:4711", "us": "TypeError: the cause"}
    found = judge("tiny-1", failed, {}, [])
    assert found is not None
    assert found.node_id == "us"
    assert found.collateral == ["eu: RuntimeError: Connection closed by peer [10.0.0.1]:4711"]


def test_the_same_trouble_on_several_nodes_is_told_once() -> None:
    failed = {"us": "IndexError: index 7 is out of range", "eu": "IndexError: index 9 is out of range"}
    found = judge("tiny-1", failed, {}, [])
    assert found is not None
    assert found.node_id == "us"
    assert found.collateral == ["the same on eu"]


def test_memory_and_our_own_errors_have_a_next_step_of_their_own() -> None:
    others = judge("tiny-1", {"us": "ValueError: boom"}, {}, [node("us")], goes_on=True)
    assert others is not None
    assert "`ciuic stop tiny-1`, then `ciuic resume tiny-1` take it back" in others.next
    killed = judge("tiny-1", {"us": "killed by SIGKILL (perhaps out of memory)"}, {}, [])
    layout = judge("tiny-1", {"us": "error[CIUIC-402]: the model differs"}, {}, [])
    assert "more memory" in (killed.next if killed else "")
    assert "docs/codes/CIUIC-402.md" in (layout.next if layout else "")
