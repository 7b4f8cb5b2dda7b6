"""From what the hub showed to the numbers of the report."""

from typing import Any

import msgspec
import pytest

from ciuic.errors import RunFailedError
from ciuic.job import parse_job
from ciuic.lab.hello import PURPOSES
from ciuic.lab.profiles import continents
from ciuic.lab.relay import RelayStats
from ciuic.lab.tally import Findings, KillTimes, Seen, ddp_ring_bytes, make_report
from ciuic.net.messages import EvaluationPoint, Event, NodeInfo, NodeInRun, RoundInfo, RunInfo, SampleCounts

NODES = ("us-west", "eu-central", "ap-southeast")
KILLED = "ap-southeast"
START, KILL, BACK, END = 1000.0, 1010.0, 1024.5, 1040.0


def node_in_run(name: str, **fields: Any) -> NodeInRun:
    values: dict[str, Any] = {
        "state": "training", "incarnation": 1, "step": 100, "tokens": 100_000, "base_version": 3, "wall_s": 40.0,
        "compute_s": 35.0, "communication_s": 3.0, "communication_cpu_s": 0.5, "longest_stall_s": 0.2, "step_s": 0.1,
        "final_digests": ["d"],
    }  # fmt: skip
    return NodeInRun(node_id=name, **{**values, **fields})


def round_info(version: int, time: float, nodes: tuple[str, ...] = NODES) -> RoundInfo:
    return RoundInfo(
        version=version, fragment=0, time=time, nodes=list(nodes), staleness=[0] * len(nodes), tokens=1, push_bytes=1,
        entry_bytes=1, duration_s=1.0, why="complete",
    )  # fmt: skip


def run_info(**fields: Any) -> RunInfo:
    values: dict[str, Any] = {
        "state": "finished",
        "created_at": 990.0,
        "started_at": 991.0,
        "job": parse_job({}).to_dict(),
        "digests": ["d"],
        "parameters": 1000,
        "nodes": [node_in_run(name) for name in NODES],
        "evaluations": [evaluation(0, 5.5, 1001.0), evaluation(10, 2.5, END, "us-west"), evaluation(10, 2.5, END + 1)],
        "samples": SampleCounts(total=800, leased=800, committed=800),
        "loss_consistent": True,
    }
    return RunInfo(run_id="demo-1", name="demo", **{**values, **fields})


def evaluation(version: int, loss: float, time: float, node: str = "eu-central") -> EvaluationPoint:
    return EvaluationPoint(version=version, loss=loss, node_id=node, time=time, samples_committed=0)


def event(kind: str, time: float, node: str = "") -> Event:
    return Event(id=int(time), time=time, kind=kind, node_id=node, text=f"{kind} {node}")


def seen_rounds() -> Seen:
    """Ten rounds, two seconds apart; the killed node is missing in four, then one old push, then back."""
    seen = Seen()
    survivors = ("us-west", "eu-central")
    rounds = [round_info(version, START + 2 * version) for version in range(1, 6)]
    rounds += [round_info(version, START + 2 * version, survivors) for version in (6, 7, 8)]
    rounds += [round_info(9, KILL + 1.0)]  # a push accepted before the kill, merged after it
    rounds += [round_info(10, BACK + 3.0), round_info(11, END)]
    seen.rounds.update((round_.version, round_) for round_ in rounds)
    seen.events = [event("run.training", START), event("worker.attached", START, KILLED)]
    seen.events += [event("worker.attached", BACK, KILLED), event("worker.attached", BACK, "us-west")]
    return seen


def relay_stats(name: str) -> RelayStats:
    up = {purpose: 10 ** PURPOSES.index(purpose) for purpose in PURPOSES}
    return RelayStats(
        name=name, up_bytes=0, down_bytes=0, up_by_purpose=up, down_by_purpose=up, connections_open=0,
        connections_total=3, is_down=False,
    )  # fmt: skip


def findings(**fields: Any) -> Findings:
    values: dict[str, Any] = {
        "run": run_info(),
        "nodes": [NodeInfo(node_id=name, location=name, state="left", measured={"rtt_s": 0.1}) for name in NODES],
        "seen": seen_rounds(),
        "relays": {name: relay_stats(name) for name in NODES},
        "profile": continents(),
        "kill": KillTimes(node_id=KILLED, killed_at=KILL, restarted_at=KILL + 3),
        "seed": 0,
        "quick": False,
        "demo_s": 60.0,
    }
    return Findings(**{**values, **fields})


def test_the_return_is_counted_from_the_kill_to_the_first_push_of_the_new_incarnation() -> None:
    report = make_report(findings())
    assert report.rejoined_after_s == BACK + 3 - KILL, "not the old push that was merged one second after the kill"
    assert report.killed is not None
    assert (report.killed.at_s, report.killed.restarted_at_s) == (10.0, 13.0)


def test_pushes_are_split_at_the_kill_and_for_the_killed_node_at_its_return() -> None:
    nodes = {node.node_id: node for node in make_report(findings()).nodes}
    assert (nodes["us-west"].pushes_merged_before_kill, nodes["us-west"].pushes_merged_after_kill) == (5, 6)
    assert (nodes[KILLED].pushes_merged_before_kill, nodes[KILLED].pushes_merged_after_kill) == (6, 2)
    assert nodes[KILLED].pushes_merged == 8


def test_a_node_that_never_came_back_is_not_counted_as_back() -> None:
    seen = seen_rounds()
    seen.events = [event("run.training", START)]
    report = make_report(findings(seen=seen))
    assert report.rejoined_after_s is None
    assert not report.holds


def test_shares_and_bytes_are_sums_over_nodes() -> None:
    nodes = [
        node_in_run(name, communication_s=c, wall_s=w)
        for name, c, w in zip(NODES, (1, 2, 3), (10, 20, 30), strict=True)
    ]
    report = make_report(findings(run=run_info(nodes=nodes)))
    assert report.exposed_comm_share == pytest.approx(6 / 60)
    assert report.comm_cpu_s == pytest.approx(1.5)
    assert report.update_wire_bytes == 3 * 2 * 10
    assert report.snapshot_wire_bytes == 3 * 2 * 100
    assert report.nodes[0].wire_bytes["control"] == 2


def test_ddp_bytes_follow_the_ring_formula() -> None:
    assert ddp_ring_bytes(1000, [100, 100, 100]) == pytest.approx(2 * 2 / 3 * 4 * 1000 * 100 * 3)
    assert ddp_ring_bytes(1000, [90, 100, 110]) == pytest.approx(ddp_ring_bytes(1000, [100, 100, 100]))


def test_losses_are_one_per_version_in_order() -> None:
    report = make_report(findings())
    assert [(point.version, point.loss) for point in report.losses] == [(0, 5.5), (10, 2.5)]
    assert (report.loss_first, report.loss_last) == (5.5, 2.5)
    with pytest.raises(RunFailedError, match="without a held-out loss"):
        make_report(findings(run=run_info(evaluations=[])))


def test_the_survivor_with_the_longest_stall_beyond_its_steps_is_named() -> None:
    stalls = {"us-west": (0.9, 0.1), "eu-central": (1.0, 0.4), KILLED: (30.0, 0.1)}
    nodes = [node_in_run(name, longest_stall_s=stall, step_s=step) for name, (stall, step) in stalls.items()]
    report = make_report(findings(run=run_info(nodes=nodes)))
    assert (report.survivor_longest_stall_s, report.survivor_step_s) == (0.9, 0.1)


@pytest.mark.parametrize("digests", [[], ["other"]])
def test_a_node_without_the_hubs_digest_is_not_equal(digests: list[str]) -> None:
    nodes = [node_in_run("us-west"), node_in_run("eu-central"), node_in_run(KILLED, final_digests=digests)]
    assert make_report(findings()).base_digests_equal
    assert not make_report(findings(run=run_info(nodes=nodes))).base_digests_equal


def test_a_node_that_never_took_part_is_an_error() -> None:
    with pytest.raises(RunFailedError, match="eu-central never took part"):
        make_report(findings(run=run_info(nodes=[node_in_run("us-west"), node_in_run(KILLED)])))


def look(seen: Seen, now: float, **fields: Any) -> None:
    seen.look(run_info(nodes=[node_in_run(KILLED, **fields)]), now)


def test_the_version_line_has_a_gap_from_the_kill_to_the_first_report_of_the_next_incarnation() -> None:
    seen = Seen()
    look(seen, 1.0, base_version=0)
    look(seen, 2.0, base_version=5)
    look(seen, 2.5, base_version=5)
    seen.killed(KILLED, 1, 3.0)
    assert seen.away == {KILLED}
    look(seen, 4.0, base_version=5)  # the hub has not noticed yet
    look(seen, 5.0, base_version=5, state="gone")
    look(seen, 6.0, base_version=0, state="warming", incarnation=2)  # attached, but it has not reported yet
    assert seen.away == frozenset()
    look(seen, 7.0, base_version=9, state="training", incarnation=2)
    assert seen.versions[KILLED] == [(1.0, 0), (2.0, 5), (3.0, None), (7.0, 9)]


def test_rounds_that_the_hub_has_forgotten_stay_known() -> None:
    seen = Seen()
    seen.look(run_info(rounds=[round_info(1, 1.0), round_info(2, 2.0)]), 2.0)
    seen.look(run_info(rounds=[round_info(2, 2.0), round_info(3, 3.0)]), 3.0)
    assert sorted(seen.rounds) == [1, 2, 3]


def test_the_story_holds_the_events_of_hub_and_demo_in_order() -> None:
    own = [event("demo.killed", KILL, KILLED)]
    story = make_report(findings(own_story=own)).story
    assert [line.kind for line in story] == [
        "run.training",
        "worker.attached",
        "demo.killed",
        "worker.attached",
        "worker.attached",
        "demo.rejoined",
    ]
    assert [line.time_s for line in story] == [0.0, 0.0, 10.0, 24.5, 24.5, 27.5]
    assert msgspec.json.encode(story)
