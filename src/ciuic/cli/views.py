"""Tables and lines about nodes and runs, made from the hub's messages. Nothing here prints."""

import time
from collections.abc import Iterable

from ciuic.cli.output import Grid, clean
from ciuic.net.messages import Event, HubInfo, LogLine, NodeInRun, RunInfo, Verdict
from ciuic.units import format_bytes, format_count, format_duration

ENDED = ("finished", "stopped", "failed")
RUNS_NAMED = 3


class LogRecord(LogLine):
    """One line of `GET /v1/runs/{run}/logs`."""

    id: int
    node_id: str


def runs_grid(runs: Iterable[RunInfo], now: float) -> Grid:
    """All runs, the newest first. `now`: seconds since 1970."""
    newest_first = sorted(runs, key=lambda run: run.created_at, reverse=True)
    return Grid(
        columns=("run", "name", "state", "progress", "version", "nodes", "loss", "age"),
        rows=[_run_row(run, now) for run in newest_first],
        empty="no runs yet: submit one with `ciuic run job.toml`",
    )


def _run_row(run: RunInfo, now: float) -> tuple[str, ...]:
    return (
        run.run_id,
        run.name,
        run.state,
        f"{run.progress:.0%}",
        _versions(run),
        str(sum(node.state != "gone" for node in run.nodes)),
        _held_out_loss(run),
        format_duration(max(0.0, now - run.created_at)),
    )


def run_nodes_grid(run: RunInfo) -> Grid:
    """The nodes of one run: how far each is and where its time goes."""
    columns = ("node", "state", "step", "loss", "base", "pushes merged", "tokens/s", "communication", "longest stall")
    rows = [_run_node_row(node) for node in run.nodes]
    return Grid(columns=columns, rows=rows, empty="no node has taken this run yet", minor=("base", "tokens/s"))


def _run_node_row(node: NodeInRun) -> tuple[str, ...]:
    return (
        node.node_id,
        node.state,
        str(node.step),
        "-" if node.loss is None else f"{node.loss:.3f}",
        f"{node.base_version} (-{node.staleness})" if node.staleness else str(node.base_version),
        f"{node.pushes_merged} of {node.pushes_accepted + node.pushes_rejected}",
        format_count(node.tokens / node.wall_s) if node.wall_s > 0 else "-",
        f"{node.communication_s / node.wall_s:.1%}" if node.wall_s > 0 else "-",
        format_duration(node.longest_stall_s),
    )


def run_facts(run: RunInfo, now: float) -> list[tuple[str, str]]:
    """One run in a few lines."""
    facts = [
        ("run", f"{run.run_id} ({run.name})"),
        ("state", f"{run.state}: {run.reason}" if run.reason else run.state),
        ("progress", f"{run.progress:.0%}, {_samples(run)}"),
        ("version", _versions(run)),
        ("held-out loss", _held_out_loss(run)),
        ("updates", f"{format_bytes(run.push_bytes)} pushed, {format_bytes(run.entry_bytes)} in the ledger"),
    ]
    if run.sync:
        facts.append(("sync", run.sync))
    if run.parameters:
        facts.insert(3, ("parameters", format_count(run.parameters)))
    if run.started_at is not None:
        facts.append(("training for", format_duration(max(0.0, (run.ended_at or now) - run.started_at))))
    failed = run.verdict.node_id if run.verdict is not None else ""
    facts += [("started again", f"{node}, {text}") for node, text in run.restarts.items() if node != failed]
    if run.loss_consistent is not None:
        verdict = "equal loss and base on all nodes" if run.loss_consistent else "nodes DIFFER in loss or base"
        facts.append(("consistency", verdict))
    return facts


def hub_facts(hub: HubInfo, now: float) -> list[tuple[str, str]]:
    """A hub in a few lines."""
    return [
        ("hub", hub.url),
        ("version", hub.version),
        ("up for", format_duration(max(0.0, now - hub.started_at))),
        ("disk", f"{format_bytes(hub.disk_free_bytes)} free; {_disk_use(hub)}"),
    ]


def _disk_use(hub: HubInfo) -> str:
    """What the hub's own files take; the largest runs are named."""
    runs = sorted(hub.disk.runs.items(), key=lambda item: -item[1])
    text = f"{format_bytes(hub.disk.database_bytes + sum(hub.disk.runs.values()))} used"
    text += f": database {format_bytes(hub.disk.database_bytes)}"
    text += "".join(f", {run_id} {format_bytes(size)}" for run_id, size in runs[:RUNS_NAMED])
    rest = runs[RUNS_NAMED:]
    return text + (f", {len(rest)} more runs {format_bytes(sum(size for _, size in rest))}" if rest else "")


def progress_line(run: RunInfo) -> str:
    """One run as one line, for logs and pipes."""
    present = sum(node.state not in ("gone", "done") for node in run.nodes)
    return (
        f"{run.run_id} {run.state} {run.progress:.0%} version {_versions(run)} "
        f"held-out loss {_held_out_loss(run)} nodes {present}"
    )


def log_text(line: LogRecord) -> str:
    """One log line: `14:03:07.120 us-west/0 | text`; what the agent itself says is marked."""
    who = "agent" if line.stream == "agent" else str(line.rank)
    when = f"{time.strftime('%H:%M:%S', time.localtime(line.time))}.{int(line.time * 1000) % 1000:03d}"
    return clean(f"{when} {line.node_id}/{who} | {line.text}")


def verdict_facts(run: RunInfo) -> list[tuple[str, str]]:
    """What went wrong, first things first; nothing when nothing did."""
    verdict = run.verdict
    if verdict is None:
        return []
    facts = [("verdict", verdict_line(verdict)), ("at", verdict.where)]
    facts += [("with it", line) for line in verdict.collateral]
    facts += [("others", ", ".join(verdict.others)), ("next", verdict.next), ("log", _log_place(verdict))]
    return [(name, clean(text)) for name, text in facts if text]


def finding_facts(run: RunInfo) -> list[tuple[str, str]]:
    """What the doctor's rules find in the run, two lines each."""
    facts: list[tuple[str, str]] = []
    for finding in run.findings:
        facts += [(finding.severity, f"{finding.code}: {finding.cause}"), ("fix", finding.fix)]
    return [(name, clean(text)) for name, text in facts]


def verdict_line(verdict: Verdict) -> str:
    """Node, rank, step and exception line."""
    rank = f" rank {verdict.rank}" if verdict.rank >= 0 else ""
    step = f" at step {verdict.step}" if verdict.step else ""
    return f"{verdict.node_id}{rank}{step}: {verdict.line}"


def _log_place(verdict: Verdict) -> str:
    return f"{verdict.log} on {verdict.node_id}" if verdict.log else ""


def event_text(event: Event) -> str:
    """One event: local time, kind, what it is about, text."""
    when = time.strftime("%H:%M:%S", time.localtime(event.time))
    about = " ".join(name for name in (event.run_id, event.node_id) if name)
    return clean(f"{when} {event.kind:<18} {about:<24} {event.text}").rstrip()


def _versions(run: RunInfo) -> str:
    return "/".join(str(version) for version in run.versions) or "-"


def _held_out_loss(run: RunInfo) -> str:
    """The latest one, with the first beside it."""
    if not run.evaluations:
        return "-"
    first, last = run.evaluations[0], run.evaluations[-1]
    if first is last:
        return f"{last.loss:.3f} at version {last.version}"
    return f"{first.loss:.3f} -> {last.loss:.3f} at version {last.version}"


def _samples(run: RunInfo) -> str:
    counts = run.samples
    if not counts.total:
        return "not known before the workers start"
    line = f"{counts.committed} of {counts.total} samples"
    extras = [f"{count} {what}" for count, what in ((counts.duplicated, "twice"), (counts.lost, "lost")) if count]
    return f"{line} ({', '.join(extras)})" if extras else line
