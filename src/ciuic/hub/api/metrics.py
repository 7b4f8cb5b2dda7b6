"""Prometheus text, made from the hub's state when somebody asks; nothing is counted twice."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ciuic.hub.core import Hub
from ciuic.net.messages import NodeState, RunInfo, RunState

RUNS_MEASURED = 20


def metrics_text(hub: Hub, answered: Mapping[tuple[str, int], int]) -> bytes:
    """All metrics of this moment."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(HubCollector(hub, answered))
    return generate_latest(registry)


class HubCollector(Collector):
    """Reads one hub."""

    def __init__(self, hub: Hub, answered: Mapping[tuple[str, int], int]) -> None:
        self._hub = hub
        self._answered = answered

    def collect(self) -> Iterator[Metric]:
        """Every family once."""
        yield self._nodes()
        runs = [self._hub.run_info(run, full=True) for run in self._hub.runs(RUNS_MEASURED)]
        yield _by_state("ciuic_runs", "Runs by state", get_args(RunState), Counter(run.state for run in runs))
        yield from _run_families(runs)
        yield from self._process()
        yield self._requests()

    def _nodes(self) -> Metric:
        counts = Counter(node.state for node in self._hub.node_infos())
        return _by_state("ciuic_nodes", "Nodes by state", get_args(NodeState), counts)

    def _process(self) -> Iterator[Metric]:
        process = psutil.Process()
        times = process.cpu_times()
        cpu = CounterMetricFamily("ciuic_hub_cpu_seconds", "Processor time of the hub")
        cpu.add_metric([], times.user + times.system)
        yield cpu
        yield GaugeMetricFamily(
            "ciuic_hub_resident_bytes", "Resident memory of the hub", value=process.memory_info().rss
        )
        yield GaugeMetricFamily("ciuic_hub_start_time_seconds", "When the hub started", value=self._hub.started_at)

    def _requests(self) -> Metric:
        family = CounterMetricFamily("ciuic_hub_requests", "Answered requests", labels=["path", "status"])
        for (path, status), count in sorted(self._answered.items()):
            family.add_metric([path, str(status)], count)
        return family


def _by_state(name: str, text: str, states: tuple[str, ...], counts: Mapping[Any, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["state"])
    for state in states:
        family.add_metric([state], counts.get(state, 0))
    return family


def _run_families(runs: list[RunInfo]) -> Iterator[Metric]:
    counters: dict[str, tuple[str, dict[str, float]]] = {
        "ciuic_run_samples_committed": ("Samples merged", {run.run_id: run.samples.committed for run in runs}),
        "ciuic_run_samples_duplicated": ("Samples merged twice", {run.run_id: run.samples.duplicated for run in runs}),
        "ciuic_run_push_bytes": ("Bytes of merged pushes", {run.run_id: run.push_bytes for run in runs}),
        "ciuic_run_entry_bytes": ("Bytes of entries", {run.run_id: run.entry_bytes for run in runs}),
        "ciuic_run_rounds": ("Closed rounds", {run.run_id: max(run.versions, default=0) for run in runs}),
    }
    gauges: dict[str, tuple[str, dict[str, float]]] = {
        "ciuic_run_samples": ("Samples of the whole run", {run.run_id: run.samples.total for run in runs}),
        "ciuic_run_progress": ("Share of samples merged", {run.run_id: run.progress for run in runs}),
        "ciuic_run_parameters": ("Parameters of the model", {run.run_id: run.parameters for run in runs}),
        "ciuic_run_held_out_loss": (
            "Held-out loss of the base",
            {run.run_id: run.evaluations[-1].loss for run in runs if run.evaluations},
        ),
        "ciuic_run_loss_consistent": (
            "1: all nodes agree on the final loss",
            {run.run_id: float(run.loss_consistent) for run in runs if run.loss_consistent is not None},
        ),
    }
    for kind, families in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
        for name, (text, values) in families.items():
            family = kind(name, text, labels=["run"])
            for run_id, value in values.items():
                family.add_metric([run_id], value)
            yield family
    yield from _per_fragment_and_node(runs)


def _per_fragment_and_node(runs: list[RunInfo]) -> Iterator[Metric]:
    version = GaugeMetricFamily("ciuic_run_version", "Version of the base", labels=["run", "fragment"])
    loss = GaugeMetricFamily("ciuic_node_training_loss", "Training loss a node reports", labels=["run", "node"])
    step = GaugeMetricFamily("ciuic_node_steps", "Inner steps of a node", labels=["run", "node"])
    for run in runs:
        for fragment, number in enumerate(run.versions):
            version.add_metric([run.run_id, str(fragment)], number)
        for node in run.nodes:
            step.add_metric([run.run_id, node.node_id], node.step)
            if node.loss is not None:
                loss.add_metric([run.run_id, node.node_id], node.loss)
    yield from (version, loss, step)
