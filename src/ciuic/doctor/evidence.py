"""The doctor's folder: everything that was heard, line by line, and what was found."""

import contextlib
import time
from pathlib import Path
from typing import Any

import msgspec

from ciuic.doctor.finding import Blind, Incident
from ciuic.errors import NotFoundError, StorageError

EVIDENCE = "evidence.ndjson"
FINDINGS = "findings.json"
EVIDENCE_BYTES_MAX = 64 << 20
"""More is not kept: a run of weeks must not fill a disk."""


class Evidence:
    """Written by the collector, read by `ciuic doctor report`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / EVIDENCE).open("wb")
            self.write_findings([], [])  # not those of an earlier run; and there is something to show at once
        except OSError as error:
            raise StorageError(
                f"the doctor cannot write to {folder}", cause=str(error), next="another --folder"
            ) from error
        self._written_bytes = 0
        self._encoder = msgspec.json.Encoder()
        self.ended: Blind | None = None
        """Why nothing more is kept: there is enough, or the disk is full."""

    def add(self, message: Any) -> None:
        """One message of a rank; the token of a hello is not kept."""
        if hasattr(message, "token"):
            message = msgspec.structs.replace(message, token="")
        self._line(type(message).__name__.lower(), message)

    def note(self, text: str) -> None:
        """Something about the collector itself."""
        self._line("note", text)

    def write_findings(self, incidents: list[Incident], blind: list[Blind]) -> None:
        """Replace findings.json at once. Raises OSError."""
        body = {"incidents": incidents, "could_not_look": blind}
        new = self.folder / f"{FINDINGS}.new"
        new.write_bytes(msgspec.json.format(msgspec.json.encode(body)))
        new.replace(self.folder / FINDINGS)

    def close(self, incidents: list[Incident], blind: list[Blind]) -> None:
        """The last findings; the evidence ends."""
        with contextlib.suppress(OSError):  # the command prints them all the same
            self.write_findings(incidents, blind)
        with contextlib.suppress(OSError):  # what is left in the buffer of a full disk
            self._file.close()

    def _line(self, kind: str, message: Any) -> None:
        if self.ended is not None:
            return
        line = self._encoder.encode([kind, message]) + b"\n"
        self._written_bytes += len(line)
        if self._written_bytes > EVIDENCE_BYTES_MAX:
            self.ended = _ended(f"{EVIDENCE} has {EVIDENCE_BYTES_MAX >> 20} MiB, its limit")
            return
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            self.ended = _ended(f"{EVIDENCE} cannot be written: {error.strerror or error}")


def _ended(why: str) -> Blind:
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    return Blind(what=f"the course of the run after {when}, in pictures and `ciuic doctor overhead`", why=why)


class _Findings(msgspec.Struct, frozen=True):
    incidents: list[Incident]
    could_not_look: list[Blind]


def read_findings(folder: Path) -> tuple[list[Incident], list[Blind]]:
    """What was found. Raises NotFoundError when the folder is not a doctor's, StorageError when it cannot be read."""
    path = folder / FINDINGS
    if not path.is_file():
        raise NotFoundError(
            f"{folder} has no findings of the doctor",
            cause=f"there is no {FINDINGS} in it",
            next="give the folder that `ciuic doctor run` named",
        )
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Findings)
    except (OSError, msgspec.DecodeError) as error:
        raise StorageError(f"{path} cannot be read", cause=str(error)) from error
    return found.incidents, found.could_not_look


def read_evidence(folder: Path) -> list[tuple[str, Any]]:
    """Kind and message (as plain lists: see `record`) of each line that is whole."""
    path = folder / EVIDENCE
    lines = path.read_bytes().splitlines() if path.is_file() else []
    found = []
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):
            kind, message = msgspec.json.decode(line, type=tuple[str, Any])
            found.append((kind, message))
    return found
