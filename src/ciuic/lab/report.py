"""The demo's report: what report.json holds, and what must hold.

`DemoReport` mirrors report.json field by field. Bytes are those of TCP streams (TLS included), counted by the relays;
times are seconds since the run began, unless a name says otherwise.
"""

from pathlib import Path
from typing import Any

import msgspec

from ciuic.units import format_bytes, format_duration

LOSS_BAR = 0.65
BYTES_BAR = 100
EXPOSED_BAR = 0.15
STALL_STEPS, STALL_S = 2, 1.0


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Base of everything in the report."""


class NodeReport(Part):
    """One node over all its incarnations."""

    location: str
    node_id: str
    claimed: dict[str, float]
    """What its operator says it has: gpu, bandwidth_gbit_s."""
    emulated: dict[str, float]
    """What its relay was set to: up_bits_per_s, down_bits_per_s, round_trip_s."""
    measured: dict[str, float]
    """What the node measured through its relay: up_bits_per_s, down_bits_per_s, rtt_s, cpu_count, gpu_count ..."""
    incarnations: int
    steps: int
    tokens: int
    wall_s: float
    compute_s: float
    communication_s: float
    """Time in which its training thread waited for or worked on communication."""
    communication_cpu_s: float
    longest_stall_s: float
    step_s: float
    """Median."""
    pushes_merged: int
    pushes_merged_before_kill: int
    pushes_merged_after_kill: int
    """Merged after the kill; for the killed node itself, after its return."""
    wire_bytes: dict[str, int]
    """By purpose, both directions: updates, snapshots, control, operator, other."""

    @property
    def other_s(self) -> float:
        """Data, evaluation and everything else that is neither computing nor exposed communication."""
        return max(0.0, self.wall_s - self.compute_s - self.communication_s)


class Kill(Part):
    """The node that was killed (kill -9 of its agent and its worker) and started again."""

    node_id: str
    at_s: float
    restarted_at_s: float


class LossPoint(Part):
    """Held-out loss of the base at a version."""

    time_s: float
    version: int
    loss: float
    node_id: str


class VersionPoint(Part):
    """The version a node's base had when the demo looked; None while the node was gone."""

    time_s: float
    version: int | None


class Merge(Part):
    """One round: whose pushes went into this version."""

    time_s: float
    version: int
    nodes: list[str]
    why: str


class StoryLine(Part):
    """One event of the hub or of the demo itself."""

    time_s: float
    kind: str
    node_id: str
    text: str


class Check(Part):
    """One thing that must hold."""

    name: str
    holds: bool
    measured: str
    bar: str


class DemoReport(Part):
    """Everything the demo found. The first block is the run, the second its numbers, the third its curves."""

    ciuic_version: str
    created_at: str
    """UTC, ISO 8601."""
    seed: int
    quick: bool
    profile: str
    model: str
    parameters: int
    job: dict[str, Any]
    machine: dict[str, str]
    demo_s: float
    """The whole demo, from the first process to the verdict."""
    run_s: float
    """From the first step to the last."""

    nodes: list[NodeReport]
    loss_first: float
    loss_last: float
    exposed_comm_share: float
    """sum(communication_s) / sum(wall_s) over the nodes and all their incarnations."""
    comm_cpu_s: float
    update_wire_bytes: int
    """Pushes and entries, both directions, all nodes."""
    snapshot_wire_bytes: int
    control_wire_bytes: int
    ddp_fp32_ring_bytes: float
    """What DDP would have sent for the same steps: 2 (N-1)/N x 4 bytes x parameters x mean steps per node x N."""
    pushes_merged: dict[str, int]
    base_digests_equal: bool
    """Every node ended with the base that the hub has, bit for bit."""
    loss_equal: bool | None
    """Every node found the same held-out loss for the last version."""
    killed: Kill | None
    rejoined_after_s: float | None
    """From the kill to the first merged push of the new incarnation."""
    survivor_longest_stall_s: float
    """The longest time in which a step of a survivor was blocked on the hub."""
    survivor_step_s: float
    """That survivor's median step."""
    samples_total: int
    samples_leased: int
    samples_committed: int
    samples_duplicated: int
    samples_lost: int

    losses: list[LossPoint]
    versions: dict[str, list[VersionPoint]]
    merges: list[Merge]
    story: list[StoryLine]
    checks: list[Check]
    verdict: str

    @property
    def holds(self) -> bool:
        """Every check holds."""
        return all(check.holds for check in self.checks)

    @property
    def times_less(self) -> float:
        """How many times fewer bytes than DDP."""
        return self.ddp_fp32_ring_bytes / max(1, self.update_wire_bytes)


def with_verdict(report: DemoReport) -> DemoReport:
    """The same report with its checks and the sentence that sums them up."""
    checked = msgspec.structs.replace(report, checks=make_checks(report))
    return msgspec.structs.replace(checked, verdict=_verdict(checked))


def write_json(report: DemoReport, path: Path) -> None:
    """report.json, indented."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def make_checks(report: DemoReport) -> list[Check]:
    """What the demo claims, each beside what was measured."""
    return [
        Check(
            name="every node ends with the hub's base, bit for bit",
            holds=report.base_digests_equal and report.loss_equal is not False,
            measured="equal" if report.base_digests_equal else "different",
            bar="equal digests",
        ),
        Check(
            name="held-out loss falls",
            holds=report.loss_last < LOSS_BAR * report.loss_first,
            measured=f"{report.loss_first:.3f} to {report.loss_last:.3f}",
            bar=f"below {LOSS_BAR * report.loss_first:.3f} ({LOSS_BAR:g} of the first)",
        ),
        Check(
            name="updates need little of the links",
            holds=report.update_wire_bytes <= report.ddp_fp32_ring_bytes / BYTES_BAR,
            measured=f"{format_bytes(report.update_wire_bytes)}, 1/{report.times_less:.0f} of DDP",
            bar=f"at most {format_bytes(report.ddp_fp32_ring_bytes / BYTES_BAR)} (1/{BYTES_BAR} of DDP)",
        ),
        Check(
            name="training hardly waits for the links",
            holds=report.exposed_comm_share <= EXPOSED_BAR,
            measured=f"{100 * report.exposed_comm_share:.1f} % of the time",
            bar=f"at most {100 * EXPOSED_BAR:.0f} %",
        ),
        _check_merges(report),
        _check_return(report),
        Check(
            name="survivors hardly notice the kill",
            holds=report.survivor_longest_stall_s <= _stall_bar_s(report),
            measured=f"longest stall {format_duration(report.survivor_longest_stall_s)}",
            bar=f"at most {format_duration(_stall_bar_s(report))} (two steps and a second)",
        ),
        _check_samples(report),
    ]


def _check_merges(report: DemoReport) -> Check:
    before = [node.pushes_merged_before_kill for node in report.nodes]
    after = [node.pushes_merged_after_kill for node in report.nodes]
    return Check(
        name="every node's work counts, before and after the kill",
        holds=bool(report.nodes) and min(before) > 0 and min(after) > 0,
        measured="pushes merged: "
        + ", ".join(
            f"{node.location} {node.pushes_merged_before_kill}+{node.pushes_merged_after_kill}" for node in report.nodes
        ),
        bar="at least one each",
    )


def _check_return(report: DemoReport) -> Check:
    back = report.rejoined_after_s
    return Check(
        name="the killed node comes back",
        holds=report.killed is not None and back is not None,
        measured="not seen" if back is None else f"its next push merged {format_duration(back)} after the kill",
        bar="a push of its next incarnation merged",
    )


def _check_samples(report: DemoReport) -> Check:
    lost, duplicated = report.samples_lost, report.samples_duplicated
    return Check(
        name="each sample is trained exactly once",
        holds=lost == 0 and duplicated == 0 and 0 < report.samples_total == report.samples_committed,
        measured=f"{report.samples_committed:,} of {report.samples_total:,}; {lost} lost, {duplicated} twice",
        bar="all; 0 lost, 0 twice",
    )


def _stall_bar_s(report: DemoReport) -> float:
    return STALL_STEPS * report.survivor_step_s + STALL_S


def _verdict(report: DemoReport) -> str:
    failing = [check.name for check in report.checks if not check.holds]
    if failing:
        count = f"{len(failing)} of {len(report.checks)} checks do" if len(failing) > 1 else "One check does"
        return f"{count} not hold on this machine: {'; '.join(failing)}."
    words = {2: "Two", 3: "Three", 4: "Four"}
    nodes = words.get(len(report.nodes), str(len(report.nodes)))
    sentence = (
        f"{nodes} nodes on emulated intercontinental links trained one model to a held-out loss of "
        f"{report.loss_last:.2f} (from {report.loss_first:.2f}) with 1/{report.times_less:.0f} of DDP's traffic"
    )
    if report.killed is not None and report.rejoined_after_s is not None:
        sentence += (
            f"; {report.killed.node_id} was killed and its work counted again after "
            f"{format_duration(report.rejoined_after_s)}"
        )
    return sentence + "."
