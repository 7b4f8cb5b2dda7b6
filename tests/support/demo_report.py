"""A realistic demo report for tests: numbers like those of a real run, made up here and nowhere else."""

import math

from ciuic.lab.profiles import continents
from ciuic.lab.report import (
    DemoReport,
    Kill,
    LossPoint,
    Merge,
    NodeReport,
    StoryLine,
    VersionPoint,
    with_verdict,
)

NODES = ("us-west", "eu-central", "ap-southeast")
ROUND_S = 1.4
ROUNDS = 42
KILLED_AT_S, RESTARTED_AT_S, BACK_S = 23.6, 26.7, 36.9


def make_report() -> DemoReport:
    """Every check holds."""
    return with_verdict(
        DemoReport(
            ciuic_version="0.1.0",
            created_at="2026-11-30T12:00:00Z",
            seed=0,
            quick=False,
            profile="continents",
            model="deepseek-v3-tiny",
            parameters=690_000,
            job={"name": "demo", "sync": {"interval": 10, "compression": "1-bit"}},
            machine={"platform": "Linux x86_64", "cpu": "2 cores", "python": "3.11.7", "torch": "2.13.0"},
            demo_s=88.4,
            run_s=ROUNDS * ROUND_S,
            nodes=[_node(number) for number in range(3)],
            loss_first=5.547,
            loss_last=2.312,
            exposed_comm_share=0.068,
            comm_cpu_s=2.9,
            update_wire_bytes=22_400_000,
            snapshot_wire_bytes=5_600_000,
            control_wire_bytes=410_000,
            ddp_fp32_ring_bytes=4_410_000_000.0,
            pushes_merged={"us-west": 42, "eu-central": 42, "ap-southeast": 33},
            base_digests_equal=True,
            loss_equal=True,
            killed=Kill(node_id="ap-southeast", at_s=KILLED_AT_S, restarted_at_s=RESTARTED_AT_S),
            rejoined_after_s=BACK_S - KILLED_AT_S,
            survivor_longest_stall_s=0.74,
            survivor_step_s=0.121,
            samples_total=9600,
            samples_leased=9600,
            samples_committed=9600,
            samples_duplicated=0,
            samples_lost=0,
            losses=[_loss(version) for version in [0, *range(3, ROUNDS + 1, 3)]],
            versions={name: _versions(name) for name in NODES},
            merges=[_merge(version) for version in range(1, ROUNDS + 1)],
            story=_story(),
            checks=[],
            verdict="",
        )
    )


def _node(number: int) -> NodeReport:
    site = continents().sites[number]
    was_killed = site.location == "ap-southeast"
    link = site.link
    wall_s = 46.0 if was_killed else 58.8
    exposed_s = (0.6, 4.9, 5.4)[number]
    return NodeReport(
        location=site.location,
        node_id=site.location,
        claimed=site.claimed,
        emulated={
            "up_bits_per_s": link.up_bits_per_s,
            "down_bits_per_s": link.down_bits_per_s,
            "round_trip_s": link.round_trip_s,
        },
        measured={
            "up_bits_per_s": 0.93 * link.up_bits_per_s,
            "down_bits_per_s": 0.96 * link.down_bits_per_s,
            "rtt_s": link.round_trip_s + 0.004,
            "cpu_count": 2.0,
            "gpu_count": 0.0,
            "memory_free_bytes": 21.5e9,
        },
        incarnations=2 if was_killed else 1,
        steps=330 if was_killed else 420,
        tokens=(330 if was_killed else 420) * 1024,
        wall_s=wall_s,
        compute_s=wall_s - exposed_s - 1.9,
        communication_s=exposed_s,
        communication_cpu_s=0.97,
        longest_stall_s=(0.21, 0.74, 0.66)[number],
        step_s=(0.118, 0.121, 0.12)[number],
        pushes_merged=33 if was_killed else 42,
        pushes_merged_before_kill=16,
        pushes_merged_after_kill=17 if was_killed else 26,
        wire_bytes={
            "control": 136_000,
            "updates": 7_466_000,
            "snapshots": 5_600_000 if was_killed else 0,
            "operator": 0,
            "other": 4_000,
        },
    )


def _loss(version: int) -> LossPoint:
    loss = 2.3 + 3.247 * math.exp(-version / 7)
    return LossPoint(time_s=version * ROUND_S, version=version, loss=loss, node_id=NODES[version % 2])


def _gone(name: str, time_s: float) -> bool:
    return name == "ap-southeast" and KILLED_AT_S < time_s < BACK_S - 2.5


def _versions(name: str) -> list[VersionPoint]:
    points = []
    for version in range(ROUNDS + 1):
        time_s = version * ROUND_S + 0.1 * NODES.index(name)
        points.append(VersionPoint(time_s=time_s, version=None if _gone(name, time_s) else version))
    return points


def _merge(version: int) -> Merge:
    time_s = version * ROUND_S
    present = [name for name in NODES if not (name == "ap-southeast" and KILLED_AT_S < time_s < BACK_S)]
    return Merge(time_s=time_s, version=version, nodes=present, why="complete")


def _story() -> list[StoryLine]:
    lines = [
        (-12.0, "hub.started", "", "hub is ready on port 43115"),
        (-9.1, "node.joined", "us-west", "us-west joined"),
        (-8.8, "node.joined", "eu-central", "eu-central joined"),
        (-8.7, "node.joined", "ap-southeast", "ap-southeast joined"),
        (0.0, "run.training", "", "3 nodes start: 9,600 samples"),
        (KILLED_AT_S, "demo.killed", "ap-southeast", "kill -9 of ap-southeast: its agent and its worker"),
        (KILLED_AT_S + 4.1, "node.dead", "ap-southeast", "ap-southeast is silent; its 80 leased samples went back"),
        (RESTARTED_AT_S, "demo.restarted", "ap-southeast", "ap-southeast starts again with the identity it had"),
        (BACK_S - 2.4, "worker.attached", "ap-southeast", "ap-southeast is back (incarnation 2)"),
        (BACK_S, "demo.rejoined", "ap-southeast", "a push of its new incarnation was merged"),
        (ROUNDS * ROUND_S, "run.finished", "", "finished: 9,600 samples, 42 versions, loss <2.31>"),
    ]
    return [StoryLine(time_s=time_s, kind=kind, node_id=node, text=text) for time_s, kind, node, text in lines]
