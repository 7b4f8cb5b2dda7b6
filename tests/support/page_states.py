"""States as the hub tells them to its live page, made from the real message types."""

from typing import Any

import msgspec

from ciuic.hub.api.news import Cost, State
from ciuic.net.messages import (
    EvaluationPoint,
    Event,
    HubInfo,
    NodeInfo,
    NodeInRun,
    RoundInfo,
    RunInfo,
    RunState,
    SampleCounts,
    WorkerReport,
)

NOW = 1_796_000_000.0
NODES = ("us-west", "eu-central", "ap-southeast")


def node(node_id: str, **changes: Any) -> NodeInfo:
    known: dict[str, Any] = {
        "node_id": node_id,
        "location": node_id,
        "state": "training",
        "claimed": {"gpu": 8.0, "bandwidth_gbit_s": 10.0},
        "measured": {"up_bits_per_s": 47.2e6, "down_bits_per_s": 49.3e6, "rtt_s": 0.144, "gpu_count": 0.0},
        "facts": {"host": "here", "torch": "2.13.0"},
        "run_id": "demo-1",
        "worker": WorkerReport(run_id="demo-1", state="running"),
        "last_seen_s": 0.4,
    }
    return NodeInfo(**{**known, **changes})


def member(node_id: str, **changes: Any) -> NodeInRun:
    known: dict[str, Any] = {
        "node_id": node_id,
        "state": "training",
        "incarnation": 1,
        "step": 120,
        "samples": 960,
        "tokens": 122_880,
        "loss": 2.345,
        "base_version": 12,
        "pushes_accepted": 12,
        "pushes_merged": 12,
        "wall_s": 30.0,
        "compute_s": 26.0,
        "communication_s": 2.4,
        "data_s": 0.6,
        "step_s": 0.2,
    }
    return NodeInRun(**{**known, **changes})


def closed_round(version: int, **changes: Any) -> RoundInfo:
    known: dict[str, Any] = {
        "version": version,
        "fragment": 0,
        "time": NOW - 2.0 * (12 - version) - 1.0,
        "nodes": list(NODES),
        "staleness": [0] * len(NODES),
        "tokens": 30_720,
        "push_bytes": 319_296,
        "entry_bytes": 106_973,
        "duration_s": 2.0,
        "why": "complete",
    }
    return RoundInfo(**{**known, **changes})


def run(run_id: str = "demo-1", *, state: RunState = "running", **changes: Any) -> RunInfo:
    known: dict[str, Any] = {
        "run_id": run_id,
        "name": "demo",
        "state": state,
        "created_at": NOW - 40.0,
        "started_at": NOW - 35.0,
        "job": {"name": "demo"},
        "versions": [12],
        "digests": ["be28"],
        "parameters": 732_272,
        "epoch": 3,
        "nodes": [member(name) for name in NODES],
        "evaluations": [held_out(0, 5.5177), held_out(8, 2.6116)],
        "rounds": [closed_round(version) for version in range(1, 13)],
        "samples": SampleCounts(total=9600, leased=3000, committed=2880),
        "push_bytes": 3_831_552,
        "entry_bytes": 1_283_676,
        "progress": 0.3,
    }
    return RunInfo(**{**known, **changes})


def held_out(version: int, loss: float, **changes: Any) -> EvaluationPoint:
    known: dict[str, Any] = {"node_id": "us-west", "time": NOW - 30 + version, "samples_committed": 240 * version}
    return EvaluationPoint(version=version, loss=loss, **{**known, **changes})


def event(number: int, kind: str, text: str, *, age_s: float = 5.0, **changes: Any) -> Event:
    known: dict[str, Any] = {"run_id": "demo-1", "node_id": ""}
    return Event(id=number, time=NOW - age_s, kind=kind, text=text, **{**known, **changes})


def state(
    *,
    nodes: list[NodeInfo] | None = None,
    runs: list[RunInfo] | None = None,
    briefs: list[RunInfo] | None = None,
    events: list[Event] | None = None,
    **hub: Any,
) -> State:
    """A healthy run on three nodes, unless told otherwise. `briefs`: further runs that come without their rounds."""
    full = [run()] if runs is None else runs
    told = [msgspec.structs.replace(item, rounds=[], evaluations=[]) for item in [*(briefs or []), *full]]
    known: dict[str, Any] = {
        "url": "https://hub.example:8443",
        "version": "0.1.0",
        "boot_id": "1-abc",
        "started_at": NOW - 100.0,
        "nodes": [node(name) for name in NODES] if nodes is None else nodes,
        "runs": told,
        "disk_free_bytes": 80_000_000_000,
    }
    some = [event(1, "run.training", "3 nodes start: 9,600 samples", age_s=34.0)]
    return State(
        time=NOW,
        hub=HubInfo(**{**known, **hub}),
        runs=full,
        events=some if events is None else events,
        cost=Cost(build_s=0.0021, build_cpu_s=0.0017, message_bytes=3120, messages=50, viewers=1),
    )


def plain(message: Any) -> Any:
    """As the page receives it."""
    return msgspec.json.decode(msgspec.json.encode(message))
