"""Policies, settings that change, and steps in proportion to speed, on the hub."""

from collections.abc import Iterator

import pytest
from rounds_world import Make, Rounds, many_rounds

from ciuic.errors import UsageError
from ciuic.net import messages as m


@pytest.fixture
def rounds() -> Iterator[Make]:
    with many_rounds() as make:
        yield make


def report(world: Rounds, node: str, step_s: float) -> None:
    incarnation = world.incarnations[node]
    world.ledger.report(node, m.ReportRequest(incarnation=incarnation, step=9, samples=9, tokens=9, step_s=step_s))


def test_in_async_every_push_makes_an_entry_at_once_with_its_weight(rounds: Make) -> None:
    world = rounds(policy="async")
    world.start("a", "b", "c")
    world.train("a")
    stale = world.frame("b", *world.lease("b").ranges, base_version=0)
    assert world.version == 1
    world.ledger.push("b", stale)
    assert world.version == 2
    first, second = (world.ledger.fragments[0].store.entry(v).header for v in (1, 2))
    assert (first.why, second.why) == ("pushed", "pushed")
    assert first.contributors[0].weight == pytest.approx(1 / 3)
    assert second.contributors[0].weight == pytest.approx(2**-0.5 / 3)
    world.restart()
    assert world.version == 2


def test_a_push_on_a_base_that_the_hub_does_not_have_is_refused(rounds: Make) -> None:
    world = rounds(policy="async")
    world.start("a")
    reply = world.push("a", *world.lease("a").ranges, base_version=3)
    assert (reply.status, reply.reason) == ("rejected", "ahead")


def test_a_run_in_fragments_is_not_complete_while_a_worker_has_something_to_push(rounds: Make) -> None:
    world = rounds(fragments=2, samples=8)
    world.start("a")
    world.push("a", *world.lease("a", 8).ranges)
    waiting = m.LeaseRequest(incarnation=1, count=4, request_id=9, unpushed=True)
    assert world.ledger.lease("a", waiting).status == "wait"
    done = m.LeaseRequest(incarnation=1, count=4, request_id=10)
    assert world.ledger.lease("a", done).status == "finished"


def test_granted_samples_of_a_model_in_fragments_count_as_unpushed_until_the_worker_says_otherwise(
    rounds: Make,
) -> None:
    world = rounds(fragments=2, samples=8)
    world.start("a", "b")
    frames = [world.frame(node, *world.lease(node, 4).ranges) for node in ("a", "b")]
    for node, frame in zip(("a", "b"), frames, strict=True):
        world.ledger.push(node, frame)
    world.tick(100)
    assert world.ledger.samples.complete
    assert world.lease("a").status == "wait", "b may have progress in its second fragment"
    assert world.lease("b").status == "finished"
    assert world.lease("a").status == "finished"


def test_each_answer_tells_the_nodes_own_interval(rounds: Make) -> None:
    world = rounds(interval=8)
    world.start("a", "b", "c")
    for node, step_s in (("a", 0.5), ("b", 0.5), ("c", 2.0)):
        report(world, node, step_s)
    frame = world.frame("c", *world.lease("c").ranges)
    reply = world.ledger.push("c", frame)
    assert reply.pace == m.Pace(codec_up="int8", interval=3)
    assert {n.node_id: n.interval for n in world.ledger.info(full=False)["nodes"]} == {"a": 12, "b": 12, "c": 3}


def test_a_switch_is_durable_and_pushes_of_the_codec_before_it_still_merge(rounds: Make) -> None:
    world = rounds()
    world.settled("a", "b")
    old = world.frame("a", *world.lease("a").ranges)
    world.ledger.change(m.SyncRequest(policy="async", codec_up="1-bit", codec_down="bf16", interval=3), "ops")
    assert world.ledger.push("a", old).status == "accepted"
    assert world.ledger.fragments[0].store.entry(world.version).header.codec == "bf16"
    world.restart()
    assert world.ledger.settings.describe() == "async, 1-bit up, bf16 down, every 3 steps (changed by ops)"
    assert world.push("b", *world.lease("b").ranges, codec="int8").status == "accepted"
    assert "sync.switched" in world.kinds()


@pytest.mark.parametrize(
    "request_",
    [m.SyncRequest(codec_up="3-bit"), m.SyncRequest(codec_down="topk"), m.SyncRequest(interval=-1)],
    ids=["codec", "down", "interval"],
)
def test_a_change_that_cannot_be_is_refused_and_changes_nothing(rounds: Make, request_: m.SyncRequest) -> None:
    world = rounds()
    before = world.ledger.settings
    with pytest.raises(UsageError):
        world.ledger.change(request_, "ops")
    assert world.ledger.settings == before


@pytest.mark.parametrize(
    "request_",
    [
        m.SyncRequest(policy="async"),
        m.SyncRequest(interval=4),
        m.SyncRequest(codec_up="1-bit"),
        m.SyncRequest(codec_down="1-bit"),
    ],
    ids=["policy", "interval", "up", "down"],
)
def test_a_run_that_sends_gradients_cannot_be_changed_to_what_its_job_could_not_say(
    rounds: Make, request_: m.SyncRequest
) -> None:
    world = rounds(send="gradient", compression="int4")
    before = world.ledger.settings
    with pytest.raises(UsageError, match="sends gradients"):
        world.ledger.change(request_, "ops")
    assert world.ledger.settings == before
    world.ledger.change(m.SyncRequest(codec_up="int8", codec_down="bf16"), "ops")
    assert world.ledger.settings.codec_up == "int8"
