"""Which node works for which run, and how runs begin and end."""

from typing import Any

import pytest
from hub_world import World

from ciuic.errors import ConflictError, NotFoundError
from ciuic.hub.membership.records import CloseRun, OpenRun
from ciuic.net.messages import WorkerReport


def running(run: str, **fields: Any) -> WorkerReport:
    return WorkerReport(run_id=run, state="running", **fields)


def ended(run: str, state: str = "finished", **fields: Any) -> WorkerReport:
    return WorkerReport(run_id=run, state=state, **fields)


def opened(world: World) -> list[str]:
    return [action.run_id for effects in world.effects for action in effects.actions if isinstance(action, OpenRun)]


def closed(world: World) -> list[str]:
    return [action.run_id for effects in world.effects for action in effects.actions if isinstance(action, CloseRun)]


def test_a_run_waits_for_its_nodes_and_says_for_whom() -> None:
    world = World()
    run = world.submit(min_nodes=3, locations=["us-west", "eu-central", "ap-southeast"])
    world.join("us-west")
    world.join("moon")
    assert world.run(run).state == "waiting"
    assert world.run(run).reason == (
        "2 more nodes of 3 needed; ready: us-west; nobody ready from eu-central, ap-southeast; "
        "not taken: moon: its location moon is not in the job's"
    )
    world.join("eu-central")
    world.join("ap-southeast")
    assert world.run(run).state == "running"
    assert world.members(run) == ["us-west", "eu-central", "ap-southeast"]
    assert world.texts()[-1] == f"{run} started with us-west, eu-central, ap-southeast"
    assert opened(world) == [run]


def test_waiting_is_told_once_not_with_every_tick() -> None:
    world = World()
    world.submit(min_nodes=1)
    world.wait(5.0)
    assert world.kinds().count("run.waiting") == 1


def test_a_node_that_joins_later_is_added_up_to_the_maximum() -> None:
    world = World()
    run = world.submit(min_nodes=1, max_nodes=2)
    first, second, third = world.join("a"), world.join("b"), world.join("c")
    assert world.members(run) == [first, second]
    assert world.run_of(third) == ""


def test_runs_start_in_order_of_submission_and_a_small_one_does_not_starve_a_large_one() -> None:
    world = World()
    large = world.submit("large", min_nodes=2)
    small = world.submit("small", min_nodes=1)
    first = world.join("a")
    assert world.run_of(first) == ""
    assert "kept for large-1" in world.run(small).reason
    world.join("b")
    assert world.run(large).state == "running"
    assert world.run(small).state == "waiting"


def test_the_next_run_gets_the_nodes_when_the_first_is_finished_and_its_workers_ended() -> None:
    world = World()
    node = world.join("a")
    first, second = world.submit(), world.submit()
    world.beat(node, worker=running(first))
    world.finish(first)
    assert world.run_of(node) == first, "the worker may still evaluate"
    assert not world.state.desired(node, "a").stop_worker
    world.beat(node, worker=ended(first))
    assert world.run_of(node) == second
    assert closed(world) == [first]


def test_workers_that_do_not_end_after_the_finish_are_stopped() -> None:
    world = World()
    node = world.join("a")
    run = world.submit()
    world.beat(node, worker=running(run))
    world.finish(run)
    world.wait(61.0, beating=(node,), step_s=2.0)
    assert world.run_of(node) == ""
    assert world.state.desired(node, "a").stop_worker
    assert closed(world) == [run]


def test_a_node_whose_worker_of_another_run_has_not_ended_is_not_taken() -> None:
    world = World()
    node = world.join("a")
    first = world.submit()
    world.beat(node, worker=running(first))
    world.finish(first)
    world.wait(61.0, beating=(node,), step_s=2.0)
    second = world.submit()
    assert world.run_of(node) == ""
    assert "has not ended yet" in world.run(second).reason
    world.beat(node, worker=ended(first, "stopped"))
    assert world.run_of(node) == second


def test_stop_waits_for_the_workers_and_resume_queues_again_with_a_new_attempt() -> None:
    world = World()
    node = world.join("a")
    run = world.submit()
    world.beat(node, worker=running(run))
    world.stop(run)
    assert world.run(run).state == "stopping"
    assert world.state.desired(node, "a").stop_worker
    with pytest.raises(ConflictError):
        world.resume(run)
    world.beat(node, worker=ended(run, "stopped"))
    assert world.run(run).state == "stopped"
    assert world.run_of(node) == ""
    world.resume(run)
    assert world.run(run).state == "running"
    assert world.run(run).attempt == 2
    assert world.members(run) == [node]


def test_reports_about_the_earlier_attempt_do_not_touch_the_resumed_run() -> None:
    world = World()
    node = world.join("a")
    run = world.submit()
    world.stop(run)
    known = world.state.nodes[node].revision
    world.beat(node, worker=ended(run, "stopped"))
    world.resume(run)
    world.beat(node, worker=ended(run, "failed", detail="of the past"), known=known)
    world.beat(node, worker=ended(run, "failed", detail="of the past", attempt=1))
    assert world.run(run).state == "running"
    assert world.run(run).failed == {}


def test_a_waiting_run_is_stopped_at_once_and_stopping_twice_is_no_error() -> None:
    world = World()
    run = world.submit()
    world.stop(run)
    world.stop(run)
    assert world.run(run).state == "stopped"
    assert world.kinds().count("run.stopped") == 1


def test_a_stop_does_not_wait_for_ever_for_a_worker() -> None:
    world = World()
    node = world.join("a")
    run = world.submit()
    world.beat(node, worker=running(run))
    world.stop(run)
    world.wait(61.0, beating=(node,), step_s=2.0)
    assert world.run(run).state == "stopped"


def test_what_cannot_be_stopped_or_resumed_is_refused() -> None:
    world = World()
    node = world.join("a")
    run = world.submit()
    with pytest.raises(ConflictError, match="cannot be resumed"):
        world.resume(run)
    world.beat(node, worker=ended(run))
    world.finish(run)
    with pytest.raises(ConflictError, match="finished already"):
        world.stop(run)
    with pytest.raises(NotFoundError):
        world.stop("nothing")


def test_a_failed_worker_costs_the_run_one_node_and_the_last_one_fails_it() -> None:
    world = World()
    first, second = world.join("a"), world.join("b")
    run = world.submit(min_nodes=2)
    world.beat(first, worker=ended(run, "failed", detail="ValueError: boom", restarts=3))
    assert world.members(run) == [second]
    assert world.run(run).state == "running"
    assert "the worker of a failed after 3 restarts: ValueError: boom" in world.texts()
    world.wait(5.0, beating=(first, second))
    assert world.members(run) == [second], "a node whose worker failed is not taken for that run again"
    world.beat(second, worker=ended(run, "failed", detail="OSError: gone"))
    assert world.run(run).state == "failed"
    assert world.run(run).reason == "the workers of all its nodes failed; first a: ValueError: boom"
    assert closed(world) == [run]


def test_a_worker_that_is_started_again_is_told_once_for_each_start_and_forgotten_at_a_resume() -> None:
    world = World()
    node = world.join("a")
    run = world.submit()
    for restarts in (1, 1, 2, 2):
        world.beat(node, worker=ended(run, "starting", detail="ValueError: boom", restarts=restarts))
    told = [text for text in world.texts() if "started again" in text]
    assert told == [
        "the worker of a failed and is started again: once, last for: ValueError: boom",
        "the worker of a failed and is started again: 2 times, last for: ValueError: boom",
    ]
    assert world.run(run).restarts == {node: "2 times, last for: ValueError: boom"}
    world.beat(node, worker=ended(run, "failed", detail="boom"))
    world.resume(run)
    assert world.run(run).restarts == {}


def test_a_failed_run_can_be_resumed_with_all_its_nodes() -> None:
    world = World()
    node = world.join("a")
    run = world.submit()
    world.beat(node, worker=ended(run, "failed", detail="boom"))
    assert world.run(run).state == "failed"
    world.resume(run)
    assert world.members(run) == [node]


def test_a_run_goes_on_with_the_nodes_it_has_and_takes_the_dead_one_back() -> None:
    world = World()
    first, second = world.join("a"), world.join("b")
    run = world.submit(min_nodes=2)
    world.wait(12.0, beating=(first,))
    assert world.members(run) == [first]
    assert world.run(run).state == "running"
    world.beat(second, worker=running(run))
    assert world.members(run) == [first, second]
    assert not world.state.desired(second, "a").stop_worker


def test_when_all_nodes_are_gone_the_run_says_so_and_goes_on_with_the_first_that_is_back() -> None:
    world = World()
    node = world.join("a")
    run = world.submit()
    world.wait(12.0)
    assert world.run(run).state == "running"
    assert world.run(run).reason == "all its nodes are gone; it goes on when one is back"
    world.beat(node, incarnation="b")
    assert world.members(run) == [node]
    assert world.run(run).reason == ""


def test_a_run_whose_workers_all_ended_without_completing_it_fails() -> None:
    world = World()
    node = world.join("a")
    run = world.submit()
    world.beat(node, worker=ended(run))
    world.wait(20.0, beating=(node,))
    assert world.run(run).state == "running"
    world.wait(12.0, beating=(node,))
    assert world.run(run).state == "failed"
    assert "before all samples were trained" in world.run(run).reason


def test_a_job_with_its_own_code_only_goes_to_nodes_that_allow_it() -> None:
    world = World()
    careful = world.join("a")
    run = world.submit(needs_code=True)
    assert "does not allow code" in world.run(run).reason
    world.beat(careful, allow_code=True)
    assert world.members(run) == [careful]


def test_assignments_survive_a_restart_of_the_hub() -> None:
    world = World()
    node = world.join("a")
    run = world.submit()
    revision = world.state.nodes[node].revision
    world.restart_hub(after_s=30.0)
    assert world.members(run) == [node]
    assert world.state.nodes[node].revision == revision


def test_a_finished_run_whose_worker_still_evaluates_survives_a_restart_of_the_hub() -> None:
    world = World()
    node = world.join("a")
    run = world.submit()
    world.beat(node, worker=running(run))
    world.finish(run)
    world.restart_hub()
    world.beat(node, worker=running(run))
    assert world.run_of(node) == run
    world.beat(node, worker=ended(run))
    assert world.run_of(node) == ""
    assert closed(world) == [run]


def test_a_run_that_loses_a_node_before_it_began_waits_and_says_for_whom() -> None:
    world = World()
    first, second = world.join("a"), world.join("b")
    run = world.submit(min_nodes=2)
    world.beat(first, worker=ended(run, "failed", detail="no such file"))
    assert world.run(run).reason == (
        "1 more node of 2 needed; ready: b; not taken: a: its worker failed in this run: no such file"
    )
    third = world.join("c")
    assert world.members(run) == [second, third]
    assert world.run(run).reason == ""


def test_a_run_that_loses_a_node_while_it_trains_just_goes_on() -> None:
    world = World()
    first, second = world.join("a"), world.join("b")
    run = world.submit(min_nodes=2)
    world.apply(lambda out: world.state.queue.has_begun(run, out))
    world.wait(12.0, beating=(first,))
    assert world.presence(second) == "dead"
    assert (world.run(run).state, world.run(run).reason) == ("running", "")


def test_what_a_worker_says_cannot_play_with_the_readers_terminal() -> None:
    world = World()
    node = world.join("a")
    run = world.submit()
    world.beat(node, worker=ended(run, "failed", detail="\x1b[31mboom\r\n" + "x" * 5000))
    reason = world.run(run).failed[node]
    assert reason.startswith("[31mboom")
    assert reason.isprintable()
    assert len(reason) <= 500
