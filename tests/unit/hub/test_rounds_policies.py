"""Policies, settings that change, and steps in proportion to speed, on the hub."""

from collections.abc import Iterator

import msgspec
import pytest
from rounds_world import Make, Rounds, many_rounds

from ciuic.errors import UsageError
from ciuic.ledger.entry import push_from_frame
from ciuic.ledger.layout import StepRule, make_layout
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


def test_the_last_round_of_every_fragment_is_a_mean_of_all_that_have_progress_in_it(rounds: Make) -> None:
    names = ["a", "b", "c", "d"]
    world = rounds(fragments=2, samples=44, compression="none")
    world.start(*names)
    for node in names:  # one round of all, so that rounds wait for each
        for fragment in (1, 0):
            world.push(node, *(world.lease(node, 1).ranges if not fragment else ()), fragment=fragment)
    world.tick(100)
    leases = {node: world.lease(node, 10).ranges for node in names}
    for frame in [world.frame(node, *leases[node], tokens=10) for node in names]:
        world.ledger.push(frame_node(frame), frame)
    second = world.ledger.fragments[1]
    before, version = second.aggregator.base.copy(), second.version
    for frame in [world.frame(node, fragment=1, tokens=10) for node in names]:
        world.ledger.push(frame_node(frame), frame)
    world.tick(100)
    assert second.version == version + 1, "each push closed a round of its own"
    assert float((before - second.aggregator.base).max()) == pytest.approx(0.01)


def frame_node(frame: bytes) -> str:
    return push_from_frame(frame).header.node


def test_nobody_waits_for_a_node_that_says_it_has_pushed_all(rounds: Make) -> None:
    world = rounds(fragments=2, samples=8)
    world.settled("a", "b")
    for node in ("a", "b"):
        world.push(node, *world.lease(node, 2).ranges)
    world.push("a", fragment=1)
    waiting = world.ledger.fragments[1].version
    incarnation, request_id = world.incarnations["b"], world.request_ids["b"] + 1
    nothing_left = m.LeaseRequest(incarnation=incarnation, count=4, request_id=request_id, behind=[])
    world.ledger.lease("b", nothing_left)
    world.tick()
    assert world.ledger.fragments[1].version == waiting + 1


def test_a_choice_made_meanwhile_does_not_overwrite_an_operators_change(rounds: Make) -> None:
    world = rounds()
    seen = world.ledger.settings
    world.ledger.change(m.SyncRequest(interval=17), "ops")
    world.ledger.switch(msgspec.structs.replace(seen, interval=3, why="measured"), instead_of=seen)
    assert world.ledger.settings.interval == 17


def test_in_gradient_mode_every_node_pushes_every_step_however_slow(rounds: Make) -> None:
    world = rounds(send="gradient", compression="int4")
    plain = world.layout
    rule = StepRule(beta1=0.9, beta2=0.99, eps=1e-8)
    world.layout = make_layout(plain.tensors, plain.fragment_count, rule)
    world.start("a", "b")
    report(world, "a", 0.1)
    report(world, "b", 0.4)
    assert {n.node_id: n.interval for n in world.ledger.info(full=False)["nodes"]} == {"a": 1, "b": 1}
