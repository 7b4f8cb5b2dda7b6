"""Where a node keeps what belongs to a run: `nodes/<location>/runs/<run>/` with run.json, log and torchrun's files."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ciuic.errors import ProtocolError, StorageError
from ciuic.job import Job
from ciuic.net.messages import Assignment
from ciuic.net.tls import write_private_file
from ciuic.node.identity import NodeIdentity

RUNS_KEPT = 20
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The files of one run on this node."""

    folder: Path

    @property
    def run_file(self) -> Path:
        """What the worker reads to find its run."""
        return self.folder / "run.json"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def torchrun(self) -> Path:
        """Where torchrun keeps the output of the ranks before it passes it on."""
        return self.folder / "torchrun"


def prepare_run(identity: NodeIdentity, hub_url: str, assignment: Assignment, job: Job) -> RunFiles:
    """Make the folder and write run.json in one step.

    Raises ProtocolError for a run id that cannot be a folder name, StorageError when the disk refuses.
    """
    if not _RUN_ID.fullmatch(assignment.run_id):
        raise ProtocolError(f"{assignment.run_id[:80]!r} is not a run id")
    runs = identity.folder / "runs"
    files = RunFiles(folder=runs / assignment.run_id)
    content = {
        "run_id": assignment.run_id,
        "job": assignment.job,
        "hub_url": hub_url,
        "node_id": identity.node_id,
        "authority": str(identity.authority.resolve()),
        "cert": str(identity.cert.resolve()),
        "key": str(identity.key.resolve()),
        "ranks": job.nodes.ranks,
        "attempt": assignment.attempt,
    }
    write_private_file(files.run_file, msgspec.json.format(msgspec.json.encode(content)))
    try:
        shutil.rmtree(files.torchrun, ignore_errors=True)
        _forget_old_runs(runs, keep=files.folder)
    except OSError as error:
        raise StorageError(f"{runs} cannot be used", cause=str(error)) from error
    return files


def _forget_old_runs(runs: Path, *, keep: Path) -> None:
    folders = sorted(
        (folder for folder in runs.iterdir() if folder.is_dir()), key=lambda folder: folder.stat().st_mtime
    )
    for folder in folders[:-RUNS_KEPT]:
        if folder != keep:
            shutil.rmtree(folder, ignore_errors=True)
