"""Turning what nodes and operators send into rows, after a look at it."""

import re
from collections.abc import Container, Mapping, Sequence

from ciuic.errors import ProtocolError
from ciuic.hub.membership.peers import check_offer
from ciuic.hub.membership.records import Run
from ciuic.hub.membership.selection import needs_code, requirements_of
from ciuic.job import Job
from ciuic.net.messages import HeartbeatRequest, LogLine

MAX_FIELDS = 64
MAX_KEY = 64
MAX_VALUE = 1000
MAX_LOCATION = 64
MAX_NAME = 48
MAX_LOG_LINE = 16_384
MAX_LOG_LINES = 5_000
LEAST_GRACE_S = 1.0


def slug(text: str) -> str:
    """`US West` as `us-west`: lower-case letters and digits joined by single hyphens; may be empty."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def node_stem(location: str) -> str:
    """The node id that a location asks for. Raises ProtocolError when the location is no name."""
    stem = slug(location)
    if len(location) > MAX_LOCATION or not 1 <= len(stem) <= MAX_NAME or not location.isprintable():
        raise ProtocolError(
            f"{location[:MAX_LOCATION]!r} is not a location",
            next=f"use a short name of letters and digits, like us-west (at most {MAX_NAME} characters)",
        )
    return stem


def free_name(stem: str, taken: Container[str]) -> str:
    """`us-west`, or `us-west-2` when that is taken, and so on."""
    name, number = stem, 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    return name


def check_fields(fields: Mapping[str, float | str]) -> None:
    """What a node claims, measures or tells: bounded in number and length. Raises ProtocolError."""
    too_long = any(len(key) > MAX_KEY or len(str(value)) > MAX_VALUE for key, value in fields.items())
    if len(fields) > MAX_FIELDS or too_long:
        raise ProtocolError(
            f"a node says too much about itself: {len(fields)} fields",
            cause=f"at most {MAX_FIELDS} are kept, with names up to {MAX_KEY} and values up to {MAX_VALUE} characters",
        )


def check_beat(request: HeartbeatRequest) -> None:
    """Raises ProtocolError."""
    if not 1 <= len(request.agent_incarnation) <= 100:
        raise ProtocolError("an agent incarnation has 1 to 100 characters")
    if request.location:
        node_stem(request.location)
    check_fields(request.claimed)
    check_fields(request.measured)
    check_fields(request.facts)
    check_offer(request)


def check_log_lines(lines: Sequence[LogLine]) -> None:
    """Raises ProtocolError."""
    if len(lines) > MAX_LOG_LINES or any(len(line.text) > MAX_LOG_LINE for line in lines):
        raise ProtocolError(
            f"{len(lines)} log lines are not accepted at once",
            cause=f"at most {MAX_LOG_LINES} with up to {MAX_LOG_LINE} characters each are",
            next="send less at once, and cut long lines",
        )


def new_run(job: Job, *, number: int, submit_token: str, wall_s: float) -> Run:
    """The row of a run that was just submitted. Raises ProtocolError."""
    if len(submit_token) > 200:
        raise ProtocolError("a submit token has at most 200 characters")
    stem = slug(job.name)[:40].strip("-") or "run"
    return Run(
        run_id=f"{stem}-{number}",
        number=number,
        name=job.name,
        job=job.to_dict(),
        min_nodes=job.nodes.min,
        max_nodes=job.nodes.max,
        locations=list(job.nodes.locations),
        require=requirements_of(job),
        replace=job.nodes.replace,
        replace_after_s=job.nodes.replace_after_s,
        grace_s=max(LEAST_GRACE_S, job.fault.grace_s),
        needs_code=needs_code(job),
        submit_token=submit_token,
        created_at=wall_s,
    )
