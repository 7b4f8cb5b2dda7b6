"""Which nodes a job takes: what it requires against what was measured, and which are better when there are too many.

Pure. The hub's queue uses it to assign nodes, `ciuic plan` to say beforehand what the hub would do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Protocol, TypeVar

from ciuic.codec import FragmentShape
from ciuic.errors import JobFileError
from ciuic.job import Job, parse_job
from ciuic.plan.facts import CodecSpeed, CodecSpeeds, Facts, Link
from ciuic.plan.predict import Setting, predict
from ciuic.plan.settings import default_settings, wishes_of

REFERENCE_ELEMENTS = 50_000_000
REFERENCE_STEP_S = 1.0
"""Nodes are compared before model and step time are known, so links are compared at these."""
SHARE_DIGITS = 2
"""Nodes whose expected shares differ by less than one percent are equally good: the one that joined first is taken."""

_SPEEDS = CodecSpeeds(by_name={"any": CodecSpeed(encode_bytes_per_s=1e9, decode_bytes_per_s=1e9)})

# Key of the job -> the measured value and its size in the key's unit.
_MEASURED: dict[str, tuple[str, float]] = {
    "gpus": ("gpu_count", 1.0),
    "cpus": ("cpu_count", 1.0),
    "mem_gb": ("memory_free_bytes", 1e9),
    "gpu_mem_gb": ("gpu_memory_bytes", 1e9),
    "disk_gb": ("disk_free_bytes", 1e9),
    "up_mbit": ("up_bits_per_s", 1e6),
    "down_mbit": ("down_bits_per_s", 1e6),
    "max_rtt_ms": ("rtt_s", 1e-3),
}


class Offer(Protocol):
    """What is read of a node: the hub's row or the message about it."""

    @property
    def location(self) -> str: ...
    @property
    def measured(self) -> Mapping[str, float]: ...
    @property
    def allow_code(self) -> bool: ...


class Wanted(Protocol):
    """What is read of a run."""

    @property
    def locations(self) -> Sequence[str]: ...
    @property
    def needs_code(self) -> bool: ...
    @property
    def require(self) -> Mapping[str, float]: ...


T = TypeVar("T")


# ---- eligible or not -----------------------------------------------------------------------------------------------


def mismatch(node: Offer, wanted: Wanted) -> str:
    """Why the node does not suit, whatever it does now; empty when it does. All unmet requirements are named."""
    if wanted.locations and node.location not in wanted.locations:
        return f"its location {node.location} is not in the job's"
    if wanted.needs_code and not node.allow_code:
        return "does not allow code from jobs"
    return ", ".join(unmet(wanted.require, node.measured)) if wanted.require else ""


def unmet(require: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
    """One phrase per requirement that the measured values do not meet; what is not measured does not meet any."""
    found = []
    for key, needed in require.items():
        name, unit = _MEASURED.get(key, ("", 1.0))
        if name not in measured:
            found.append(f"{key} is not measured yet")
            continue
        value = measured[name] / unit
        if key.startswith("max_"):
            if value > needed:
                found.append(f"{key} is {needed:g}, measured {value:.3g}")
        elif value < needed:
            found.append(f"{key} must be {needed:g}, measured {value:.3g}")
    return found


@dataclass(frozen=True, kw_only=True)
class JobWants:
    """What a job that was not submitted yet wants of a node."""

    locations: Sequence[str]
    needs_code: bool
    require: Mapping[str, float]


def wants_of(job: Job) -> JobWants:
    """The same that the hub would keep with its run."""
    return JobWants(locations=job.nodes.locations, needs_code=needs_code(job), require=requirements_of(job))


def needs_code(job: Job) -> bool:
    """Whether the job brings its own program, which a node must allow."""
    return job.model.entry is not None or job.model.command is not None


def requirements_of(job: Job) -> dict[str, float]:
    """The job's [nodes] require as numbers by key."""
    return {} if job.nodes.require is None else job.nodes.require.model_dump(exclude_none=True)


# ---- better or worse -----------------------------------------------------------------------------------------------


def expected_share(measured: Mapping[str, float], setting: Setting) -> float:
    """Communication's share of the time of a node alone with the hub that waits for each entry; inf: not measured.

    For a model of REFERENCE_ELEMENTS and steps of REFERENCE_STEP_S.
    """
    up, down, rtt_s = (measured.get(name) for name in ("up_bits_per_s", "down_bits_per_s", "rtt_s"))
    if not up or not down or rtt_s is None or up < 0 or down < 0 or rtt_s < 0:
        return inf
    facts = Facts(
        shape=FragmentShape(rows=((1, REFERENCE_ELEMENTS),), small_count=0, buffer_count=0),
        nodes=1,
        link=Link(up_bits_per_s=up, down_bits_per_s=down, rtt_s=rtt_s),
        step_s=REFERENCE_STEP_S,
        speeds=_SPEEDS,
    )
    share = predict(facts, setting, overlap=False).exposed_share
    return share if isfinite(share) else inf


def setting_of(job: Mapping[str, Any]) -> Setting:
    """The codec and interval with which nodes are compared: the job's, or the defaults where it says auto."""
    try:
        wishes = wishes_of(parse_job(job).sync)
    except JobFileError:  # of a version with other keys: the order of nodes may be a little worse
        wishes = wishes_of(Job().sync)
    found = default_settings(wishes)
    return Setting(
        codec_up=found.codec_up, codec_down=found.codec_down, interval=found.interval, gradients=wishes.gradients
    )


def best_first(nodes: Sequence[T], measured: Sequence[Mapping[str, float]], setting: Setting) -> list[T]:
    """`nodes` by expected share of communication, the least first; equally good ones keep their order."""
    shares = [round(share, SHARE_DIGITS) for share in (expected_share(each, setting) for each in measured)]
    return [nodes[index] for index in sorted(range(len(nodes)), key=shares.__getitem__)]
