"""What `ciuic plan` starts from: the job, the nodes, the size of the model."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ciuic.cli.output import print_note
from ciuic.cli.profile import operator_client
from ciuic.codec import FragmentShape
from ciuic.errors import CertificateError, ModelError, UsageError, error_from_dict
from ciuic.hub.membership.selection import best_first, mismatch, setting_of, wants_of
from ciuic.job import Job, load_job
from ciuic.net.messages import NodeInfo, RunInfo
from ciuic.plan.facts import NodeFacts
from ciuic.units import parse_duration_s, parse_rate

LARGEST_COUNT = 10**15
_COUNT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(k|M|G|B|T)?\s*")
_SCALE = {None: 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_ABSENT = ("left", "dead", "evicted", "draining", "suspect")


@dataclass(frozen=True, kw_only=True)
class GivenJob:
    """A job and what its file says."""

    job: Job
    given: frozenset[str]
    """Keys that the file has, as `section.key`."""


@dataclass(frozen=True, kw_only=True)
class PlannedNode:
    """A node, and whether it would take part."""

    facts: NodeFacts
    takes_part: bool = True
    remark: str = ""
    """Why not, or what else there is to say."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What is exchanged per interval."""

    shape: FragmentShape
    parameters: int
    source: str
    """Where the size comes from: given, counted."""


def given_job(path: Path | None) -> GivenJob:
    """The job of a file, or an empty one. Raises JobFileError."""
    if path is None:
        return GivenJob(job=Job(), given=frozenset())
    job = load_job(path)
    raw: dict[str, Any] = tomllib.loads(path.read_text().replace("\r\n", "\n"))
    keys = {f"{section}.{key}" for section, table in raw.items() if isinstance(table, dict) for key in table}
    return GivenJob(job=job, given=frozenset(keys | {key for key in raw if not isinstance(raw[key], dict)}))


def imagined_nodes(link: str, rtt: str, count: int, step_s: float | None) -> list[PlannedNode]:
    """Equal nodes behind one kind of link: what if. Raises UsageError."""
    rates = [parse_rate(part) for part in link.split(",")]
    if len(rates) > 2:
        raise UsageError(f"{link!r} is not a link", next="write one rate, or two for up,down: 20Mbit/s,100Mbit/s")
    facts = [
        NodeFacts(
            node=f"node-{number + 1}",
            up_bits_per_s=rates[0],
            down_bits_per_s=rates[-1],
            rtt_s=parse_duration_s(rtt),
            step_s=_step(step_s),
        )
        for number in range(count)
    ]
    return [PlannedNode(facts=each) for each in facts]


def nodes_of_hub(job: Job, names: Sequence[str], step_s: float | None) -> list[PlannedNode]:
    """The hub's nodes as they were measured; step times from the newest run of the same model and batch."""
    try:
        client = operator_client()
    except CertificateError as error:
        raise CertificateError(
            error.message,
            cause=error.cause,
            next="run this where the hub was started, or give --link, --rtt and --count",
        ) from error
    found = client.call("GET", "/v1/nodes", None, list[NodeInfo])
    if unknown := [name for name in names if all(node.node_id != name for node in found)]:
        known = ", ".join(node.node_id for node in found) or "none"
        raise UsageError(f"the hub has no node {unknown[0]!r}", next=f"one of: {known}")
    known_step_s = {} if step_s else _measured_steps(job, client.call("GET", "/v1/runs", None, list[RunInfo]))
    refusals = _refusals(job, found, names)
    steps = {node.node_id: _step(step_s) or known_step_s.get(node.node_id) for node in found}
    return [_planned(node, refusals[node.node_id], steps[node.node_id]) for node in found]


def _refusals(job: Job, nodes: Sequence[NodeInfo], names: Sequence[str]) -> dict[str, str]:
    """Why the hub would not take each node; empty for those it would. Busy nodes count as if they were free soon."""
    wants, found = wants_of(job), {}
    for node in nodes:
        if node.state in _ABSENT:
            found[node.node_id] = node.state
        elif names and node.node_id not in names:
            found[node.node_id] = "not in --nodes"
        else:
            found[node.node_id] = mismatch(node, wants)
    suited = [node for node in nodes if not found[node.node_id]]
    most = job.nodes.max
    if most is not None and len(suited) > most:
        setting = setting_of(job.to_dict())
        ordered = best_first(suited, [node.measured for node in suited], setting)
        ordered.sort(key=lambda node: bool(node.run_id))
        text = f"the job takes {most}, and others are better"
        found |= {node.node_id: text for node in ordered[most:]}
    return found


def _planned(node: NodeInfo, refusal: str, step_s: float | None) -> PlannedNode:
    busy = f"busy with {node.run_id} now" if node.run_id else ""
    facts = NodeFacts(
        node=node.node_id,
        up_bits_per_s=node.measured.get("up_bits_per_s"),
        down_bits_per_s=node.measured.get("down_bits_per_s"),
        rtt_s=node.measured.get("rtt_s"),
        step_s=step_s,
    )
    unknown = "" if facts.has_link else "not measured yet"
    return PlannedNode(facts=facts, takes_part=not refusal, remark=refusal or busy or unknown)


def _measured_steps(job: Job, runs: Sequence[RunInfo]) -> dict[str, float]:
    """Seconds per step by node, the newest first."""
    steps: dict[str, float] = {}
    for run in sorted(runs, key=lambda run: run.created_at, reverse=True):
        if _work(run.job) == _work(job.to_dict()):
            for node in run.nodes:
                if node.step_s > 0:
                    steps.setdefault(node.node_id, node.step_s)
    return steps


def _work(job: dict[str, Any]) -> tuple[object, ...]:
    """What decides how long a step takes."""
    optim, data, nodes = (job.get(section, {}) for section in ("optim", "data", "nodes"))
    batch = [optim.get(key) for key in ("batch_size", "gradient_accumulation", "amp", "optimizer")]
    return (job.get("model"), data.get("sequence_length"), nodes.get("ranks"), *batch)


def shape_of_job(job: Job, parameters: str) -> ModelShape:
    """The size given, or counted by a process that builds the model without memory. Raises what that process says."""
    if parameters:
        count = parse_count(parameters)
        return ModelShape(shape=FragmentShape(rows=((1, count),), small_count=0, buffer_count=0),
                          parameters=count, source="given")  # fmt: skip
    if job.model.preset is None and job.model.from_pretrained is None:
        raise ModelError(
            "the size of your own model is not known before it runs",
            cause="model.entry and model.command bring their own training program",
            next="say it: `ciuic plan JOB.toml --parameters 5M`",
        )
    if sys.stderr.isatty():
        print_note("counting the model's parameters; --parameters 5M would save these seconds")
    command = [sys.executable, "-P", "-m", "ciuic.train.shapes"]
    done = subprocess.run(command, input=json.dumps(job.to_dict()), capture_output=True, text=True, check=False)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ModelError(
            "the model's parameters cannot be counted", cause=last[:300], next="say how many: --parameters 5M"
        ) from None
    if "error" in answer:
        raise error_from_dict(answer["error"])
    shape = answer["shape"]
    rows = tuple((int(rows), int(length)) for rows, length in shape["rows"])
    return ModelShape(
        shape=FragmentShape(rows=rows, small_count=shape["small_count"], buffer_count=shape["buffer_count"]),
        parameters=answer["parameters"],
        source="counted",
    )


def parse_count(text: str) -> int:
    """`5M` as 5000000. Raises UsageError."""
    match = _COUNT.fullmatch(text)
    count = round(float(match.group(1)) * _SCALE[match.group(2)]) if match else 0
    if not 1 <= count <= LARGEST_COUNT:
        raise UsageError(f"{text!r} is not a number of parameters", next="write for example 5M or 1.3B")
    return count


def _step(step_s: float | None) -> float | None:
    if step_s is not None and not 0 < step_s < float("inf"):
        raise UsageError(f"{step_s} is not a step time", next="give seconds per optimizer step, like 0.6")
    return step_s
