"""The membership, event by event: what a node is after each thing that can happen to it."""

import pytest
from hub_world import World

from ciuic.errors import CertificateError, NotFoundError, SupersededError
from ciuic.hub.membership.records import NodeGone, Wake


def test_a_joined_node_is_idle_after_its_first_beat() -> None:
    world = World()
    node = world.join("us-west")
    assert world.state.shown_state(world.state.nodes[node]) == "idle"
    assert world.texts() == ["us-west joined"]


def test_silence_makes_a_node_suspect_and_then_dead_and_a_beat_revives_it() -> None:
    world = World()
    node = world.join("ap-southeast")
    world.wait(3.0)
    assert world.presence(node) == "suspect"
    world.wait(7.0)
    assert world.presence(node) == "dead"
    world.wait(20.0)
    world.beat(node)
    assert world.presence(node) == "here"
    assert world.texts()[1:] == [
        "ap-southeast is silent for 3.0 s: suspect",
        "ap-southeast is dead after 10 s of silence",
        "ap-southeast is back from the dead after 30 s of silence",
    ]


def test_a_node_that_beats_in_time_is_never_suspect() -> None:
    world = World()
    node = world.join("us-west")
    world.wait(60.0, beating=(node,), step_s=2.0)
    assert world.kinds() == ["node.joined"]


def test_a_copy_of_an_old_beat_does_not_keep_a_silent_node_alive() -> None:
    world = World()
    node = world.join("us-west")
    for _ in range(12):
        world.wait(1.0)
        world.beat(node, sequence=1)
    assert world.presence(node) == "dead"


def test_a_late_heartbeat_does_not_revive_an_evicted_node() -> None:
    world = World()
    node = world.join("us-west")
    world.evict(node)
    for incarnation in ("a", "b"):
        with pytest.raises(CertificateError, match="evicted"):
            world.beat(node, incarnation=incarnation)
    world.wait(30.0)
    assert world.presence(node) == "evicted"


def test_two_processes_with_one_identity_the_older_is_fenced() -> None:
    world = World()
    node = world.join("us-west")
    world.beat(node, incarnation="b", location="us-west")
    with pytest.raises(SupersededError):
        world.beat(node, incarnation="a", location="moon")
    with pytest.raises(SupersededError):
        world.leave(node, "a")
    assert world.state.nodes[node].location == "us-west"
    assert world.presence(node) == "here"


def test_the_older_process_stays_fenced_after_a_restart_of_the_hub() -> None:
    world = World()
    node = world.join("us-west")
    world.beat(node, incarnation="b")
    world.restart_hub()
    with pytest.raises(SupersededError):
        world.beat(node, incarnation="a")


def test_an_old_process_stays_fenced_after_more_restarts_than_the_hub_remembers() -> None:
    world = World()
    node = world.join("us-west")
    known = world.state.desired(node, "a").revision
    for number in range(40):
        world.beat(node, incarnation=f"b{number}", known=0)
    assert "a" not in world.state.nodes[node].superseded
    with pytest.raises(SupersededError):
        world.beat(node, incarnation="a", known=known)
    world.beat(node, incarnation="new", known=0)
    assert world.state.nodes[node].incarnation == "new"


def test_a_node_that_left_gets_work_again_with_a_new_process() -> None:
    world = World()
    node = world.join("us-west")
    world.leave(node)
    assert world.presence(node) == "left"
    with pytest.raises(SupersededError):
        world.beat(node, incarnation="a")
    run = world.submit()
    assert world.run(run).state == "waiting"
    world.beat(node, incarnation="b")
    assert world.members(run) == [node]


def test_a_repeated_goodbye_is_answered_again() -> None:
    world = World()
    node = world.join("us-west")
    world.leave(node)
    world.leave(node)
    assert world.kinds().count("node.left") == 1


def test_leaving_unknown_and_evicting_unknown_nodes_is_refused() -> None:
    world = World()
    with pytest.raises(CertificateError):
        world.leave("nobody")
    with pytest.raises(NotFoundError):
        world.evict("nobody")


def test_an_outage_of_the_hub_of_an_hour_kills_nobody() -> None:
    world = World()
    nodes = [world.join(place) for place in ("us-west", "eu-central")]
    run = world.submit(min_nodes=2)
    world.restart_hub(after_s=3600.0)
    world.wait(9.0)
    for node in nodes:
        world.beat(node)
    world.wait(20.0, beating=tuple(nodes))
    assert world.members(run) == nodes
    assert "node.dead" not in world.kinds()


def test_a_short_grace_does_not_kill_agents_that_are_still_reconnecting_after_a_restart() -> None:
    world = World()
    node = world.join("us-west")
    run = world.submit(grace_s=2.0)
    world.restart_hub(after_s=60.0)
    world.wait(8.0)
    world.beat(node)
    assert world.members(run) == [node]
    assert "node.dead" not in world.kinds()


def test_a_node_that_really_died_during_the_outage_is_found() -> None:
    world = World()
    node = world.join("us-west")
    world.restart_hub(after_s=60.0)
    world.wait(16.0)
    assert world.presence(node) == "dead"


def test_the_grace_of_the_job_holds_inside_its_run() -> None:
    world = World()
    node = world.join("us-west")
    run = world.submit(grace_s=3.0)
    assert world.members(run) == [node]
    assert world.state.heartbeat_s(world.state.nodes[node]) == pytest.approx(0.6)
    world.beat(node)
    world.wait(3.0)
    assert world.presence(node) == "dead"


def test_death_in_a_run_gives_the_samples_back_and_tells_the_line_after_that() -> None:
    world = World()
    node = world.join("us-west")
    run = world.submit()
    world.wait(10.0)
    gone = [action for effects in world.effects for action in effects.actions if isinstance(action, NodeGone)]
    assert [(action.run_id, action.node_id) for action in gone] == [(run, node)]
    assert gone[0].line is not None
    assert gone[0].line.text == "us-west is dead after 10 s of silence"


def test_a_draining_node_takes_no_new_run_and_is_told_to_stop_its_worker() -> None:
    world = World()
    node = world.join("us-west")
    first = world.submit()
    world.beat(node, draining=True)
    assert world.state.desired(node, "a").stop_worker
    assert world.state.shown_state(world.state.nodes[node]) == "draining"
    world.beat(node, draining=True)
    assert world.run_of(node) == ""
    assert world.members(first) == []


def test_what_a_beat_tells_is_kept_and_values_that_change_all_the_time_are_stored_once_a_minute() -> None:
    world = World()
    node = world.join("us-west")
    assert world.beat(node, measured={"rtt_s": 0.1}, facts={"host": "h"}).needs_store
    assert not world.beat(node, measured={"rtt_s": 0.2}, facts={"host": "h"}).needs_store
    assert world.state.nodes[node].measured == {"rtt_s": 0.2}
    world.wait(61.0, beating=(node,), step_s=2.0)
    assert world.beat(node, measured={"rtt_s": 0.3}, facts={"host": "h"}).needs_store


def test_a_beat_that_changes_nothing_writes_nothing() -> None:
    world = World()
    node = world.join("us-west")
    assert not world.beat(node).needs_store


def test_the_epoch_grows_when_the_membership_changes_and_across_restarts() -> None:
    world = World()
    epochs = [world.state.epoch]
    node = world.join("us-west")
    epochs.append(world.state.epoch)
    world.wait(10.0)
    epochs.append(world.state.epoch)
    world.beat(node)
    epochs.append(world.state.epoch)
    world.restart_hub()
    epochs.append(world.state.epoch)
    assert epochs == sorted(set(epochs))


def test_eviction_wakes_the_held_heartbeat() -> None:
    world = World()
    node = world.join("us-west")
    world.evict(node)
    assert Wake(node_id=node) in world.effects[-1].actions


def test_a_hub_that_stood_still_blames_nobody_for_it() -> None:
    """A stopped process, a stalled disk: the first tick afterwards comes before the beats that waited meanwhile."""
    world = World()
    node = world.join("us-west")
    world.wait(1.0)
    world.now_s += 3600.0
    world.pass_time(0.5)
    assert world.presence(node) == "here"
    world.wait(9.0)
    assert world.presence(node) == "dead", "silence of its own is still noticed"
