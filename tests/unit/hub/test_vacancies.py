"""Who gets the place of a node that is gone: spare, wait, never."""

import pytest
from hub_world import World
from hypothesis import given, settings
from hypothesis import strategies as st

from ciuic.net.messages import WorkerReport

NODES = ("a", "b", "c")


def three(**fields: object) -> tuple[World, str]:
    """Two work, c is free."""
    world = World()
    run = world.submit(min_nodes=2, max_nodes=2, **fields)
    for name in NODES:
        world.join(name)
    assert world.members(run) == ["a", "b"]
    return world, run


def test_a_spare_takes_the_place_of_a_dead_node_at_once() -> None:
    world, run = three()
    world.wait(12.0, beating=("b", "c"))
    assert world.members(run) == ["b", "c"]
    assert f"c takes the place of a in {run}" in world.texts()


def test_the_dead_node_is_a_spare_itself_when_it_comes_back() -> None:
    world, run = three()
    world.wait(12.0, beating=("b", "c"))
    world.wait(3.0, beating=NODES)
    assert world.members(run) == ["b", "c"]
    world.wait(12.0, beating=("a", "c"))
    assert world.members(run) == ["a", "c"]


def test_without_a_spare_the_run_goes_on_and_says_so_once() -> None:
    world, run = three()
    world.evict("c")
    world.wait(20.0, beating=("b",))
    assert world.members(run) == ["b"]
    assert world.kinds().count("run.no_spare") == 1
    assert any("no free node can take the place of a" in text for text in world.texts())
    world.wait(1.0, beating=("a", "b"))
    assert world.members(run) == ["a", "b"]
    assert f"a is back in {run}" in world.texts()


def test_wait_keeps_the_place_of_a_dead_node_which_comes_back_into_it() -> None:
    world, run = three(replace="wait", replace_after_s=30.0)
    world.wait(20.0, beating=("b", "c"))
    assert world.members(run) == ["b"]
    assert f"the place of a in {run} is kept for it for 30.0 s" in world.texts()
    world.wait(1.0, beating=NODES)
    assert world.members(run) == ["a", "b"]
    assert world.run(run).away == []


def test_wait_gives_the_place_to_a_spare_when_the_time_is_over() -> None:
    world, run = three(replace="wait", replace_after_s=30.0)
    world.wait(45.0, beating=("b", "c"))
    assert world.members(run) == ["b", "c"]
    assert "a did not come back within 30.0 s: its place is free" in world.texts()
    assert f"c takes the place of a in {run}" in world.texts()


def test_a_restart_of_the_hub_begins_the_wait_anew() -> None:
    world, run = three(replace="wait", replace_after_s=30.0)
    world.wait(30.0, beating=("b", "c"))
    world.restart_hub(after_s=3600.0)
    world.wait(20.0, beating=("b", "c"))
    assert world.members(run) == ["b"]
    world.wait(15.0, beating=("b", "c"))
    assert world.members(run) == ["b", "c"]


def test_never_leaves_the_place_to_its_own_node() -> None:
    world, run = three(replace="never")
    world.wait(600.0, beating=("b", "c"), step_s=2.0)
    assert world.members(run) == ["b"]
    world.wait(1.0, beating=NODES)
    assert world.members(run) == ["a", "b"]


def leaves(world: World, run: str) -> None:
    world.leave("a")


def is_evicted(world: World, run: str) -> None:
    world.evict("a")


def fails_for_good(world: World, run: str) -> None:
    world.beat("a", worker=WorkerReport(run_id=run, state="failed", detail="boom", restarts=3))


def drains(world: World, run: str) -> None:
    world.beat("a", draining=True, worker=WorkerReport(run_id=run, state="running"))
    world.beat("a", draining=True, worker=WorkerReport(run_id=run, state="stopped"))


@pytest.mark.parametrize("goes", [leaves, is_evicted, fails_for_good, drains])
def test_a_node_that_does_not_come_back_is_not_waited_for(goes: object) -> None:
    world, run = three(replace="wait", replace_after_s=30.0)
    goes(world, run)
    assert world.members(run) == ["b", "c"]
    assert f"c takes the place of a in {run}" in world.texts()


def test_a_spare_must_suit_like_any_other() -> None:
    world = World()
    run = world.submit(max_nodes=1, require={"gpus": 1.0})
    for name, gpus in (("a", 1.0), ("b", 0.0), ("c", 2.0)):
        world.beat(world.enrol(name), measured={"gpu_count": gpus})
    world.wait(12.0, beating=("b", "c"))
    assert world.members(run) == ["c"]


def test_a_resumed_run_begins_without_kept_places() -> None:
    world, run = three(replace="never")
    world.wait(12.0, beating=("b", "c"))
    world.stop(run)
    world.beat("b", worker=WorkerReport(run_id=run, state="stopped"))
    world.resume(run)
    assert world.members(run) == ["b", "c"]
    assert world.run(run).away == []


steps = st.lists(
    st.tuples(st.sampled_from(["beat", "silence", "fail", "leave", "restart"]), st.sampled_from(["a", "b", "c", "d"])),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(steps, st.sampled_from(["spare", "wait", "never"]), st.integers(1, 3))
def test_members_and_kept_places_are_never_more_than_the_places(
    script: list[tuple[str, str]], policy: str, most: int
) -> None:
    world = World()
    run_id = world.submit(max_nodes=most, replace=policy, replace_after_s=15.0)
    incarnations = dict.fromkeys(("a", "b", "c", "d"), "a")
    for name in incarnations:
        world.join(name)
    ever = set(world.members(run_id))
    for what, name in script:
        incarnation, worker = incarnations[name], WorkerReport(run_id=run_id, state="failed")
        if what == "beat":
            world.beat(name, incarnation=incarnation)
        elif what == "silence":
            for _ in range(7):
                world.pass_time(1.0)
                for other in incarnations.keys() - {name}:
                    world.beat(other, incarnation=incarnations[other])
        elif what == "fail" and world.run_of(name) == run_id:
            world.beat(name, incarnation=incarnation, worker=worker)
        elif what == "leave":
            world.leave(name, incarnation)
            incarnations[name] += "x"
        elif what == "restart":
            world.restart_hub()
        run, members = world.run(run_id), set(world.members(run_id))
        ever |= members
        if run.state == "running":
            assert len(members) + len(run.away) <= most
            assert not members & {*run.away, *run.gaps}
            assert policy != "never" or len(ever) <= most
            assert policy != "spare" or not run.away
