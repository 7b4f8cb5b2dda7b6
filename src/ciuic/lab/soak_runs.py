"""The runs of a soak: one after the other, so that something always trains; each is checked at its end."""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ciuic.errors import CheckFailedError, CiuicError, NotFoundError, RunFailedError, UnreachableError
from ciuic.lab.lab import Lab
from ciuic.lab.soak_ledger import LedgerCount, count_ledger
from ciuic.lab.soak_report import FaultDone, RunDone
from ciuic.lab.switch_sites import HUB
from ciuic.net.client import HubClient
from ciuic.net.messages import RunInfo, SubmitReply, SubmitRequest

POLL_S = 0.5
STILL_S = 420.0
"""A run in which nothing at all moves for so long has stopped for ever: faults are healed after seconds."""
FIRST_SAMPLES, LEAST_SAMPLES, MOST_SAMPLES = 400, 200, 500_000
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
MODES: dict[str, dict[str, Any]] = {
    "sync": {"interval": 5, "compression": "1-bit"},
    "async": {"policy": "async", "interval": 5, "compression": "int4"},
    "fragments": {"fragments": 3, "interval": 6, "compression": "1-bit"},
}
"""By turns."""


def make_job(mode: str, *, samples: int, seed: int, least_nodes: int) -> dict[str, Any]:
    """A DeepSeek that is small enough to train beside others on a laptop."""
    return {
        "name": f"soak-{mode}",
        "model": {"preset": "deepseek-v3-tiny", "overrides": SMALL},
        "data": {"sequence_length": 48},
        "nodes": {"min": least_nodes},
        "sync": MODES[mode],
        "optim": {"lr": 4e-3, "batch_size": 4},
        "train": {"samples": samples, "seed": seed, "evaluate_every": 8, "evaluate_samples": 16},
        "fault": {"grace": "5 s", "restarts": 1000},
    }


@dataclass(frozen=True, kw_only=True)
class Pacing:
    """How large the runs are."""

    seed: int
    least_nodes: int
    run_s: float
    """About how long a run should last; its samples follow from how fast the one before was."""


class Runs:
    """A thread of its own between `start` and `finish`. Watches the versions all the time."""

    def __init__(self, lab: Lab, pacing: Pacing, faults: Callable[[], list[FaultDone]], tell: Callable[[str], None]):
        self._lab, self._pacing, self._faults, self._tell = lab, pacing, faults, tell
        self._last = threading.Event()
        self.done: list[RunDone] = []
        self.failure: CiuicError | None = None
        """The first thing that did not hold."""
        self.looks = 0
        """How often versions were compared with those before."""
        self.first_moved = threading.Event()
        """The first run has a version, or there will be none."""
        self._samples = FIRST_SAMPLES
        self._thread = threading.Thread(target=self._run, name="soak-runs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """Let the run at work come to its end and begin no other; returns when it has ended or failed."""
        self._last.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with contextlib.closing(self._lab.client()) as client:
                while not self._last.is_set():
                    self._one(client, len(self.done))
        except CiuicError as error:
            self.failure = error
        except Exception as error:  # noqa: BLE001 - a thread that ends silently would prove nothing
            self.failure = RunFailedError("the soak itself has no bug", cause=repr(error))
        finally:
            self.first_moved.set()

    def _one(self, client: HubClient, number: int) -> None:
        mode = list(MODES)[number % len(MODES)]
        job = make_job(mode, samples=self._samples, seed=number, least_nodes=self._pacing.least_nodes)
        request = SubmitRequest(job=job, submit_token=f"soak-{self._pacing.seed}-{number}")
        run_id = _patiently(lambda: client.call("POST", "/v1/runs", request, SubmitReply)).run_id
        began, faults_before = time.monotonic(), len(self._faults())
        info, trained_s = self._watch(client, run_id)
        counted = check_run(info, self._lab.home(HUB) / "hub" / "runs" / run_id)
        meanwhile = self._faults()[max(0, faults_before - 1) :]
        _check_told(info, meanwhile)
        _check_doubles(info, counted, meanwhile)
        self.done.append(_summary(info, counted, mode, time.monotonic() - began, meanwhile))
        self._tell(self.done[-1].line)
        fitting = self._samples * self._pacing.run_s / max(1.0, trained_s)
        self._samples = round(min(MOST_SAMPLES, max(LEAST_SAMPLES, fitting)))

    def _watch(self, client: HubClient, run_id: str) -> tuple[RunInfo, float]:
        """Until the run has ended: its last state, and the seconds since its first version.

        Raises CheckFailedError when its versions or committed samples go back, or when nothing moves any more.
        """
        before: RunInfo | None = None
        moved_at = first_at = time.monotonic()
        while True:
            info = _patiently(lambda: client.call("GET", f"/v1/runs/{run_id}", None, RunInfo))
            now = time.monotonic()
            if before is None or _state(info) != _state(before):
                moved_at = now
            if before is not None:
                _check_forward(before, info)
                self.looks += 1
            if max(info.versions, default=0) <= 0:
                first_at = now
            else:
                self.first_moved.set()
            if info.state in ("finished", "failed", "stopped"):
                return info, now - first_at
            if now - moved_at > STILL_S:
                raise CheckFailedError(
                    "every run goes on", cause=f"{run_id} has not moved for {STILL_S:.0f} s: {_state(info)}"
                )
            before = info
            time.sleep(POLL_S)


def _patiently(call: Callable[[], Any]) -> Any:
    """A hub that was killed is away for a while. Raises CheckFailedError when it stays away."""
    until = time.monotonic() + STILL_S
    while True:
        try:
            return call()
        except UnreachableError as error:
            if time.monotonic() > until:
                raise CheckFailedError("the hub comes back", cause=str(error)) from error
        except NotFoundError as error:
            raise CheckFailedError("no run is forgotten", cause=str(error)) from error
        time.sleep(POLL_S)


def _state(info: RunInfo) -> tuple[Any, ...]:
    steps = tuple((node.node_id, node.state, node.incarnation, node.step) for node in info.nodes)
    return info.state, tuple(info.versions), info.samples.committed, steps


def _check_forward(before: RunInfo, after: RunInfo) -> None:
    backwards = len(after.versions) < len(before.versions) or any(
        now < then for then, now in zip(before.versions, after.versions, strict=False)
    )
    if backwards:
        raise CheckFailedError("versions never go back", cause=f"{after.run_id}: {before.versions} -> {after.versions}")
    if after.samples.committed < before.samples.committed:
        counts = f"{before.samples.committed} -> {after.samples.committed}"
        raise CheckFailedError("committed samples stay committed", cause=f"{after.run_id}: {counts}")
    if after.samples.lost:
        raise CheckFailedError("no sample is lost", cause=f"{after.run_id}: {after.samples.lost} lost")


def check_run(info: RunInfo, run_folder: Path) -> LedgerCount:
    """A run that has ended. Raises CheckFailedError naming the first property that does not hold."""
    name, samples = info.run_id, info.samples
    if info.state != "finished":
        raise CheckFailedError("every run finishes", cause=f"{name} is {info.state}: {info.reason}")
    if samples.committed != samples.total or samples.lost:
        raise CheckFailedError("every sample is committed", cause=f"{name}: {samples}")
    told = {node.node_id: tuple(node.final_digests) for node in info.nodes if node.final_digests}
    others = {node: digests for node, digests in told.items() if digests != tuple(info.digests)}
    if others or info.loss_consistent is False:
        cause = f"{name}: the hub has {info.digests}, others {others}, held-out losses equal: {info.loss_consistent}"
        raise CheckFailedError("digests are equal on all nodes at the end", cause=cause)
    counted = count_ledger(run_folder, samples.total)
    if counted.versions != info.versions or counted.digests != info.digests:
        raise CheckFailedError(
            "the log holds what the hub says",
            cause=f"{name}: versions {counted.versions} and {info.versions}, or other digests",
        )
    if (counted.distinct_samples, counted.duplicated_samples) != (samples.total, samples.duplicated):
        cause = (
            f"{name}: the entries hold {counted.distinct_samples} different samples and {counted.duplicated_samples} "
            f"doubles; the hub counts {samples.committed} and {samples.duplicated}"
        )
        raise CheckFailedError("each sample is trained once, and doubles are counted", cause=cause)
    return counted


def _check_told(info: RunInfo, faults: list[FaultDone]) -> None:
    """Nodes tell their digests at the end; a hub that is killed just then has not kept them."""
    if not any(node.final_digests for node in info.nodes) and HUB not in {fault.place for fault in faults}:
        raise CheckFailedError("digests are equal on all nodes at the end", cause=f"{info.run_id}: nobody told theirs")


def _check_doubles(info: RunInfo, counted: LedgerCount, faults: list[FaultDone]) -> None:
    """A sample is trained twice only when a lease went back from a node that was not dead after all: one of the nodes
    that pushed it, or the hub, was hit by a fault.
    """
    hit = {fault.place for fault in faults}
    reasons = [node for node in counted.doubles_by if any(node.startswith(place) for place in hit)]
    if counted.duplicated_samples and not reasons and HUB not in hit:
        cause = (
            f"{info.run_id}: {counted.duplicated_samples} doubles by {counted.doubles_by}, and faults hit "
            f"{', '.join(sorted(hit)) or 'nobody'}"
        )
        raise CheckFailedError("samples trained twice have a reason", cause=cause)


def _summary(info: RunInfo, counted: LedgerCount, mode: str, wall_s: float, faults: list[FaultDone]) -> RunDone:
    points = sorted(info.evaluations, key=lambda point: point.version)
    return RunDone(
        run_id=info.run_id,
        mode=mode,
        state=info.state,
        wall_s=round(wall_s, 1),
        versions=info.versions,
        samples=info.samples.total,
        duplicated=info.samples.duplicated,
        lost=info.samples.lost,
        incarnations=sum(node.incarnation for node in info.nodes),
        pushes=counted.pushes,
        agreeing=sum(node.final_digests == info.digests for node in info.nodes),
        doubles_by=counted.doubles_by,
        faults=[fault.number for fault in faults],
        loss_first=points[0].loss if points else 0.0,
        loss_last=points[-1].loss if points else 0.0,
    )
