"""The whole preflight of one node: this machine here, torch and the other nodes in a process of their own."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ciuic.doctor.preflight.local import look_here
from ciuic.doctor.preflight.records import Check, Errand, Report, Settings, fail, unknown
from ciuic.doctor.preflight.variables import DEBUG, is_level
from ciuic.errors import UsageError
from ciuic.net.child import ask_child

PROBE = "ciuic.doctor.preflight_probe"
ANSWER_LIMIT = 16 * 1024**2
TORCH_LIMIT_S = 240.0
"""torch's import, the trials and the model; waiting for other nodes comes on top."""
MOST_NODES = 4096


def run_preflight(settings: Settings, environment: Mapping[str, str], folder: Path) -> Report:
    """Look at this machine and, with several nodes, meet them. Raises UsageError for settings that cannot work.

    Takes some seconds (torch is imported), up to `wait_s` more for nodes that do not come.
    """
    check_settings(settings)
    facts = look_here(settings, environment, folder)
    question = msgspec.json.encode(Errand(settings=settings, facts=facts)).decode()
    limit_s = TORCH_LIMIT_S + (300.0 if settings.count else 0.0) + 3 * settings.wait_s * (settings.nnodes > 1)
    more = {} if is_level(environment) else {DEBUG: "OFF"}  # has its own line: the rest shall be looked at all the same
    answer = ask_child(PROBE, limit_s=limit_s, more=more, question=question, answer_limit=ANSWER_LIMIT)
    if "problem" not in answer:
        try:
            return msgspec.convert(answer, Report)
        except msgspec.ValidationError as error:
            answer = {"problem": str(error)}
    checks: list[Check] = [*facts.checks, _no_torch(str(answer["problem"]))]
    if settings.nnodes > 1:
        checks.append(unknown("meeting", "the other nodes were not met: that needs torch"))
    return Report(checks=tuple(checks), nnodes=settings.nnodes)


def _no_torch(problem: str) -> Check:
    remedy = "install torch into the environment that runs ciuic; try: python -c 'import torch'"
    return fail("torch", f"the process with torch gave no answer: {problem}", next=remedy)


def check_settings(settings: Settings) -> None:
    """Raises UsageError for what cannot work."""
    if not 1 <= settings.nnodes <= MOST_NODES:
        raise UsageError(f"--nnodes {settings.nnodes} is out of range", next=f"1 to {MOST_NODES}")
    if not 0 <= settings.node_rank < settings.nnodes:
        raise UsageError(
            f"--node-rank {settings.node_rank} does not exist among {settings.nnodes} nodes",
            next=f"0 to {settings.nnodes - 1}",
        )
    if settings.nproc < 1:
        raise UsageError(f"--nproc {settings.nproc} is out of range", next="at least 1 process per node")
    if settings.nnodes > 1 and not settings.host:
        raise UsageError(
            f"{settings.nnodes} nodes need a place to meet",
            next="give --master HOST:PORT, an address of the machine with --node-rank 0",
        )
    if settings.host and not 0 < settings.port < 65536:
        raise UsageError(f"port {settings.port} does not exist", next="give --master HOST:PORT")
    if not 0 < settings.wait_s <= 3600.0:
        raise UsageError("--wait is out of range", next="give up to an hour")


def parse_place(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[IPV6]:PORT`. Raises UsageError."""
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isascii() or not port.isdigit():
        raise UsageError(f"{text!r} is not HOST:PORT", next="write for example 10.0.0.1:29500")
    return host, int(port)
