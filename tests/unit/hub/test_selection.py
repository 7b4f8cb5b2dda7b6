"""Which nodes a job takes: requirements against what was measured, and the better ones first."""

from dataclasses import dataclass, field

import pytest
from hub_world import World
from hypothesis import given
from hypothesis import strategies as st

from ciuic.hub.membership.selection import (
    best_first,
    expected_share,
    mismatch,
    requirements_of,
    setting_of,
    unmet,
    wants_of,
)
from ciuic.job import parse_job
from ciuic.plan.predict import Setting

SETTING = Setting(codec_up="1-bit", codec_down="1-bit", interval=8)
GOOD = {"up_bits_per_s": 100e6, "down_bits_per_s": 100e6, "rtt_s": 0.05}
RICH = {
    **GOOD,
    "gpu_count": 8.0,
    "cpu_count": 64.0,
    "memory_free_bytes": 100e9,
    "gpu_memory_bytes": 80e9,
    "disk_free_bytes": 1e12,
}
ALL = {
    "gpus": 8,
    "cpus": 64,
    "mem_gb": 100,
    "gpu_mem_gb": 80,
    "disk_gb": 1000,
    "up_mbit": 100,
    "down_mbit": 100,
    "max_rtt_ms": 50,
}


@dataclass
class Place:
    location: str = "us-west"
    measured: dict[str, float] = field(default_factory=dict)
    allow_code: bool = False


def link(mbit: float, rtt_s: float = 0.05) -> dict[str, float]:
    return {"up_bits_per_s": mbit * 1e6, "down_bits_per_s": mbit * 1e6, "rtt_s": rtt_s}


def test_a_node_that_has_exactly_what_is_required_is_taken() -> None:
    job = parse_job({"nodes": {"require": ALL}})
    assert set(requirements_of(job)) == set(ALL)
    assert mismatch(Place(measured=RICH), wants_of(job)) == ""


@pytest.mark.parametrize("key", sorted(ALL))
def test_every_requirement_can_refuse_and_says_what_was_measured(key: str) -> None:
    needed = ALL[key] * (0.5 if key == "max_rtt_ms" else 2)
    (why,) = unmet({key: needed}, RICH)
    assert why.startswith(f"{key} ")
    assert f"{needed:g}, measured" in why
    assert unmet({key: ALL[key]}, {}) == [f"{key} is not measured yet"]


def test_claims_decide_nothing() -> None:
    world = World()
    run = world.submit(require={"gpus": 1.0})
    node = world.enrol("us-west")
    world.beat(node, claimed={"gpu": 8.0}, measured={"gpu_count": 0.0})
    assert world.members(run) == []
    assert "us-west: gpus must be 1, measured 0" in world.run(run).reason
    world.beat(node, claimed={"gpu": 8.0}, measured={"gpu_count": 1.0})
    world.pass_time(1.0)
    assert world.members(run) == [node]


def test_all_unmet_requirements_are_named_at_once() -> None:
    job = parse_job({"nodes": {"require": {"gpus": 1, "up_mbit": 20}}})
    why = mismatch(Place(measured={"gpu_count": 0.0, "up_bits_per_s": 12e6}), wants_of(job))
    assert why == "gpus must be 1, measured 0, up_mbit must be 20, measured 12"


def test_code_and_location_are_refused_as_before() -> None:
    assert "location moon" in mismatch(Place("moon"), wants_of(parse_job({"nodes": {"locations": ["us-west"]}})))
    program = wants_of(parse_job({"model": {"entry": "train:main"}}))
    assert mismatch(Place(), program) == "does not allow code from jobs"
    assert mismatch(Place(allow_code=True), program) == ""


def test_with_more_nodes_than_places_the_better_links_are_taken() -> None:
    world = World()
    for name, mbit in (("slow", 5.0), ("fast", 500.0), ("middle", 50.0)):
        world.beat(world.enrol(name), measured=link(mbit))
    unmeasured = world.join("unmeasured")
    run = world.submit(min_nodes=2, max_nodes=2)
    assert world.members(run) == ["fast", "middle"]
    assert world.run_of(unmeasured) == ""


def test_equally_good_nodes_are_taken_in_order_of_joining() -> None:
    world = World()
    for number in range(4):
        world.beat(world.enrol(f"n{number}"), measured=link(100.0 + number * 0.01))
    run = world.submit(min_nodes=1, max_nodes=2)
    assert world.members(run) == ["n0", "n1"]


def test_the_better_link_is_not_a_reason_to_send_a_member_home() -> None:
    world = World()
    world.beat(world.enrol("slow"), measured=link(5.0))
    run = world.submit(max_nodes=1)
    world.beat(world.enrol("fast"), measured=link(500.0))
    world.wait(3.0, beating=("slow", "fast"))
    assert world.members(run) == ["slow"]


rates = st.floats(1e4, 1e11)


@given(rates, rates, st.floats(0.0, 2.0), st.floats(1.01, 10.0), st.booleans())
def test_a_faster_or_nearer_node_never_has_the_larger_share(
    up: float, down: float, rtt_s: float, factor: float, nearer: bool
) -> None:
    here = {"up_bits_per_s": up, "down_bits_per_s": down, "rtt_s": rtt_s}
    better = here | ({"rtt_s": rtt_s / factor} if nearer else {"up_bits_per_s": up * factor})
    assert expected_share(better, SETTING) <= expected_share(here, SETTING) * (1 + 1e-9)
    assert 0 <= expected_share(here, SETTING) < 1


@given(st.lists(st.one_of(st.just({}), st.builds(link, st.floats(0.1, 1e4), st.floats(0, 1))), max_size=8))
def test_the_order_keeps_all_nodes_and_puts_unmeasured_ones_last(measured: list[dict[str, float]]) -> None:
    order = best_first(list(range(len(measured))), measured, SETTING)
    assert sorted(order) == list(range(len(measured)))
    known = [bool(measured[index]) for index in order]
    assert known == sorted(known, reverse=True)
    unknown = [index for index in order if not measured[index]]
    assert unknown == sorted(unknown)


def test_the_jobs_own_codec_and_interval_are_compared() -> None:
    found = setting_of({"sync": {"compression": "int8", "interval": 100}})
    assert (found.codec_up, found.interval) == ("int8", 100)
    assert setting_of({"no such": 1}) == setting_of({})


def test_measured_values_that_change_are_shown_but_not_told_again_and_again() -> None:
    world = World()
    node = world.enrol("us-west")
    run = world.submit(require={"mem_gb": 20.0})
    for free_gb in (11.0, 12.5, 13.25):
        world.beat(node, measured={"memory_free_bytes": free_gb * 1e9})
        world.pass_time(1.0)
    assert "mem_gb must be 20, measured 13.2" in world.run(run).reason
    told = [line.text for line in world.story if line.kind == "run.waiting" and "measured" in line.text]
    assert len([text for text in told if "mem_gb must be" in text]) == 1


@given(st.dictionaries(st.sampled_from(sorted(RICH)), st.floats(allow_nan=False)))
def test_whatever_a_node_says_it_measured_it_can_be_judged(measured: dict[str, float]) -> None:
    share = expected_share(measured, SETTING)
    assert 0 <= share <= 1 or share == float("inf")
    assert all(isinstance(why, str) for why in unmet(ALL, measured))
