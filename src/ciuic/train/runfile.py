"""run.json: how the agent tells its workers what to run."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from ciuic.errors import NotInRunError
from ciuic.job import Job, parse_job
from ciuic.net.client import HubClient
from ciuic.net.tls import Purpose

DRAINED = 75
"""Exit code of a worker that left before the run was complete: whoever did not ask for that starts it again."""


class Connect(Protocol):
    """How a connection is made; `url`: of a shard, empty for the hub."""

    def __call__(self, purpose: Purpose, url: str = "") -> HubClient: ...


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """What a worker knows of its run before it speaks to the hub."""

    run_id: str
    job: Job
    hub_url: str
    node_id: str
    authority: Path
    cert: Path
    key: Path
    ranks: int
    folder: Path
    """The run's workspace on this node."""

    def connect(self, purpose: Purpose, url: str = "") -> HubClient:
        """A connection with the node's certificate, to the hub or to a shard at `url`."""
        return HubClient(url or self.hub_url, self.authority.read_bytes(), self.cert, self.key, purpose)


def read_run_file(path: Path | None = None) -> RunFile:
    """Read the run file given, or the one the agent named in CIUIC_RUN_FILE. Raises NotInRunError."""
    named = str(path) if path else os.environ.get("CIUIC_RUN_FILE", "")
    if not named:
        raise NotInRunError(
            "this process is not part of a run",
            cause="ciuic.join() works in programs that a node's agent has started (CIUIC_RUN_FILE is not set)",
            next='write the program into a job: [model] command = ["python", "train.py"], then `ciuic run job.toml`',
        )
    try:
        body = msgspec.json.decode(Path(named).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise NotInRunError(f"the run file {named} cannot be read", cause=str(error)) from error
    return RunFile(
        run_id=body["run_id"],
        job=parse_job(body["job"]),
        hub_url=body["hub_url"],
        node_id=body["node_id"],
        authority=Path(body["authority"]),
        cert=Path(body["cert"]),
        key=Path(body["key"]),
        ranks=int(body["ranks"]),
        folder=Path(named).parent,
    )
