"""From what was seen while the demo ran to the numbers of its report. Nothing here talks to anybody."""

import datetime
import importlib.metadata
import platform
from dataclasses import dataclass, field

from ciuic import __version__
from ciuic.errors import RunFailedError
from ciuic.lab.profiles import Profile, Site
from ciuic.lab.relay import RelayStats
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
from ciuic.net.messages import EvaluationPoint, Event, NodeInfo, NodeInRun, RoundInfo, RunInfo
from ciuic.net.probe import usable_cpus


class Seen:
    """Collects what the hub shows from time to time: the hub keeps the latest rounds only, and no history of nodes."""

    def __init__(self) -> None:
        self.rounds: dict[int, RoundInfo] = {}
        self.versions: dict[str, list[tuple[float, int | None]]] = {}
        self.events: list[Event] = []
        self._away: dict[str, int] = {}

    def look(self, run: RunInfo, now: float) -> None:
        """Take in one state of the run. `now`: seconds since 1970."""
        self.rounds.update((round_.version, round_) for round_ in run.rounds)
        for node in run.nodes:
            if node.incarnation > self._away.get(node.node_id, -1):
                self._away.pop(node.node_id, None)
                self._note(node.node_id, now, self._version(node))

    def killed(self, node_id: str, incarnation: int, now: float) -> None:
        """The node is away until a later incarnation is seen, whatever the hub still believes."""
        self._away[node_id] = incarnation
        self._note(node_id, now, None)

    @property
    def away(self) -> frozenset[str]:
        """Killed, and no later incarnation was seen."""
        return frozenset(self._away)

    def _version(self, node: NodeInRun) -> int | None:
        if node.state in ("gone", "starting"):
            return None
        was_here = any(version for _, version in self.versions.get(node.node_id, []))
        return None if node.base_version == 0 and was_here else node.base_version  # 0: it has not reported yet

    def _note(self, node_id: str, now: float, version: int | None) -> None:
        line = self.versions.setdefault(node_id, [])
        if not line or line[-1][1] != version:
            line.append((now, version))


@dataclass(frozen=True, kw_only=True)
class KillTimes:
    """Seconds since 1970."""

    node_id: str
    killed_at: float
    restarted_at: float


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything the demo has at its end."""

    run: RunInfo
    """After the run, in full."""
    nodes: list[NodeInfo]
    seen: Seen
    relays: dict[str, RelayStats]
    """By node id."""
    profile: Profile
    kill: KillTimes | None
    seed: int
    quick: bool
    demo_s: float
    own_story: list[Event] = field(default_factory=list)
    """What the demo itself did."""

    @property
    def began_at(self) -> float:
        """When the first samples were leased, seconds since 1970."""
        starts = [event.time for event in self.seen.events if event.kind == "run.training"]
        return min(starts, default=self.run.started_at or self.run.created_at)

    @property
    def back_at(self) -> float | None:
        """When the new incarnation of the killed node took its place."""
        if self.kill is None:
            return None
        node, since = self.kill.node_id, self.kill.killed_at
        returns = [e.time for e in self.seen.events if (e.kind, e.node_id) == ("worker.attached", node)]
        return min((time for time in returns if time > since), default=None)

    @property
    def merged_again_at(self) -> float | None:
        """When the first push of that incarnation was merged."""
        if self.kill is None or self.back_at is None:
            return None
        node, since = self.kill.node_id, self.back_at
        return min((r.time for r in self.seen.rounds.values() if node in r.nodes and r.time > since), default=None)


def make_report(found: Findings) -> DemoReport:
    """The report with its checks and verdict. Raises RunFailedError when the run has no held-out loss to report."""
    run, began = found.run, found.began_at
    losses = _losses(run.evaluations, began)
    if not losses:
        raise RunFailedError(f"{run.run_id} ended without a held-out loss", next="read the logs of the nodes")
    nodes = [_node(found, site) for site in found.profile.sites]
    worst = _worst_survivor(nodes, found.kill)
    samples, merged_at = run.samples, found.merged_again_at
    kill = found.kill
    return with_verdict(
        DemoReport(
            ciuic_version=__version__,
            created_at=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            seed=found.seed,
            quick=found.quick,
            profile=found.profile.name,
            model=str(run.job.get("model", {}).get("preset", "")),
            parameters=run.parameters,
            job=run.job,
            machine=machine_facts(),
            demo_s=found.demo_s,
            run_s=max((r.time for r in found.seen.rounds.values()), default=began) - began,
            nodes=nodes,
            loss_first=losses[0].loss,
            loss_last=losses[-1].loss,
            exposed_comm_share=_share(nodes),
            comm_cpu_s=sum(node.communication_cpu_s for node in nodes),
            update_wire_bytes=_wire_bytes(found, "updates"),
            snapshot_wire_bytes=_wire_bytes(found, "snapshots"),
            control_wire_bytes=_wire_bytes(found, "control"),
            ddp_fp32_ring_bytes=ddp_ring_bytes(run.parameters, [node.steps for node in nodes]),
            pushes_merged={node.node_id: node.pushes_merged for node in nodes},
            base_digests_equal=_digests_equal(run),
            loss_equal=run.loss_consistent,
            killed=None
            if kill is None
            else Kill(node_id=kill.node_id, at_s=kill.killed_at - began, restarted_at_s=kill.restarted_at - began),
            rejoined_after_s=None if kill is None or merged_at is None else merged_at - kill.killed_at,
            survivor_longest_stall_s=worst.longest_stall_s,
            survivor_step_s=worst.step_s,
            samples_total=samples.total,
            samples_leased=samples.leased,
            samples_committed=samples.committed,
            samples_duplicated=samples.duplicated,
            samples_lost=samples.total - samples.committed,
            losses=losses,
            versions=_versions(found, began),
            merges=[
                Merge(time_s=r.time - began, version=r.version, nodes=r.nodes, why=r.why)
                for _, r in sorted(found.seen.rounds.items())
            ],
            story=_story(found, began),
            checks=[],
            verdict="",
        )
    )


def ddp_ring_bytes(parameters: int, steps: list[int]) -> float:
    """What N nodes would send with DDP and a ring all-reduce in fp32 for the same steps (their mean per node)."""
    count = len(steps)
    per_node_and_step = 2 * (count - 1) / count * 4 * parameters
    return per_node_and_step * sum(steps) / count * count


def machine_facts() -> dict[str, str]:
    """What the reader of a report wants to know about where it was made."""
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": str(usable_cpus()),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }


def _losses(evaluations: list[EvaluationPoint], began: float) -> list[LossPoint]:
    """One per version, the first that was reported."""
    by_version: dict[int, EvaluationPoint] = {}
    for point in sorted(evaluations, key=lambda point: point.time):
        by_version.setdefault(point.version, point)
    return [
        LossPoint(time_s=max(0.0, p.time - began), version=p.version, loss=p.loss, node_id=p.node_id)
        for _, p in sorted(by_version.items())
    ]


def _node(found: Findings, site: Site) -> NodeReport:
    info = next((node for node in found.nodes if node.location == site.location), None)
    in_run = next((node for node in found.run.nodes if info is not None and node.node_id == info.node_id), None)
    if info is None or in_run is None:
        raise RunFailedError(f"{site.location} never took part in the run", next="read its log")
    after = _merged_after(found, info.node_id)
    total = sum(info.node_id in round_.nodes for round_ in found.seen.rounds.values())
    stats = found.relays[info.node_id]
    return NodeReport(
        location=site.location,
        node_id=info.node_id,
        claimed=info.claimed,
        emulated={
            "up_bits_per_s": site.link.up_bits_per_s,
            "down_bits_per_s": site.link.down_bits_per_s,
            "round_trip_s": site.link.round_trip_s,
        },
        measured=info.measured,
        incarnations=in_run.incarnation,
        steps=in_run.step,
        tokens=in_run.tokens,
        wall_s=in_run.wall_s,
        compute_s=in_run.compute_s,
        communication_s=in_run.communication_s,
        communication_cpu_s=in_run.communication_cpu_s,
        longest_stall_s=in_run.longest_stall_s,
        step_s=in_run.step_s,
        pushes_merged=total,
        pushes_merged_before_kill=total - after,
        pushes_merged_after_kill=after,
        wire_bytes={purpose: stats.purpose_bytes(purpose) for purpose in stats.up_by_purpose},
    )


def _merged_after(found: Findings, node_id: str) -> int:
    """Of a survivor: since the kill. Of the killed node: by its new incarnation."""
    if found.kill is None:
        return 0
    since = found.back_at if node_id == found.kill.node_id else found.kill.killed_at
    if since is None:
        return 0
    return sum(node_id in round_.nodes and round_.time > since for round_ in found.seen.rounds.values())


def _worst_survivor(nodes: list[NodeReport], kill: KillTimes | None) -> NodeReport:
    survivors = [node for node in nodes if kill is None or node.node_id != kill.node_id]
    return max(survivors, key=lambda node: node.longest_stall_s - 2 * node.step_s)


def _share(nodes: list[NodeReport]) -> float:
    return sum(node.communication_s for node in nodes) / max(1e-9, sum(node.wall_s for node in nodes))


def _wire_bytes(found: Findings, purpose: str) -> int:
    return sum(stats.purpose_bytes(purpose) for stats in found.relays.values())


def _digests_equal(run: RunInfo) -> bool:
    return bool(run.digests) and all(node.final_digests == run.digests for node in run.nodes)


def _versions(found: Findings, began: float) -> dict[str, list[VersionPoint]]:
    """The lines of the nodes, up to the last round; who has the hub's last base is at its last version."""
    last = max(found.seen.rounds, default=0)
    last_at = found.seen.rounds[last].time if last else began
    final = {node.node_id for node in found.run.nodes if node.final_digests == found.run.digests}
    lines: dict[str, list[VersionPoint]] = {}
    for node_id, seen in found.seen.versions.items():
        end = (max(last_at, seen[-1][0]), last if node_id in final else seen[-1][1])
        lines[node_id] = [VersionPoint(time_s=time - began, version=version) for time, version in [*seen, end]]
    return lines


def _story(found: Findings, began: float) -> list[StoryLine]:
    events = [*found.seen.events, *found.own_story]
    if found.kill is not None and found.merged_again_at is not None:
        node, time = found.kill.node_id, found.merged_again_at
        text = f"a push of the new incarnation of {node} was merged"
        events.append(Event(id=0, time=time, kind="demo.rejoined", node_id=node, text=text))
    return [
        StoryLine(time_s=event.time - began, kind=event.kind, node_id=event.node_id, text=event.text)
        for event in sorted(events, key=lambda event: event.time)
    ]
