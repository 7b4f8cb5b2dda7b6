"""How commands find the lab that is up: its folder with a lock, a state file and a socket.

The lock is held by the process that keeps the lab (`ciuic.lab.keeper`), so it goes with that process however it ends.
The socket answers one line of JSON with one: {"do": ..., ...} -> {"ok": ...} or {"error": ...}.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ciuic.errors import NotFoundError, ProtocolError, StorageError, UnreachableError, UsageError, error_from_dict

STATE = "lab.json"
SOCKET = "lab.sock"
LOCK = "lab.lock"
LOG = "lab.log"
MAX_LINE_BYTES = 1 << 20
_LOOKERS_S = 1.0
"""A command that only looks holds the lock for a moment, too."""
ANSWER_S = 180.0
"""A hub that starts again, or an agent that drains, takes its time."""


@dataclass(frozen=True, kw_only=True)
class LabState:
    """What the state file says."""

    pid: int
    """Of the process that keeps the lab."""
    profile: str
    network: str
    """`namespaces` or `relay`."""
    bare: bool
    places: tuple[str, ...]
    namespaces: dict[str, str]
    """By place: paths that name its namespaces, for `switch_enter`; empty with relays."""
    environment: dict[str, dict[str, str]]
    """By place: what a command there finds in its environment."""
    operator_url: str


def folder_of_lab(given: Path | None) -> Path:
    """The folder meant: the given one, else CIUIC_HOME when a lab has made it, else ./lab."""
    if given is not None:
        return given.expanduser().resolve()
    home = os.environ.get("CIUIC_HOME", "")
    if home and (Path(home).expanduser() / LOCK).exists():
        return Path(home).expanduser().resolve()
    return Path("lab").resolve()


@contextlib.contextmanager
def held(folder: Path) -> Generator[None]:
    """Hold the folder for a lab. Raises UsageError when one is up in it."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not _lock(descriptor, _LOOKERS_S):
            raise already_up(folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, patience_s: float) -> bool:
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)
        else:
            return True


def already_up(folder: Path) -> UsageError:
    """The error for a second lab in a folder."""
    state = _read(folder)
    who = f"process {state.pid} keeps it, profile {state.profile}" if state else "it is just starting"
    return UsageError(
        f"a lab is up in {folder} already", cause=who, next="end it with `ciuic lab down`, or use another --folder"
    )


def is_up(folder: Path) -> bool:
    """Whether a process keeps a lab in this folder."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _lock(descriptor, 0.0)
    finally:
        os.close(descriptor)


def find_lab(folder: Path) -> LabState:
    """The lab that is up in this folder. Raises NotFoundError when there is none."""
    state = _read(folder)
    if is_up(folder):
        if state is None:
            raise NotFoundError(f"the lab in {folder} is just starting", next="try again in a moment")
        return state
    gone = f"process {state.pid} kept one and has ended without `ciuic lab down`" if state else ""
    raise NotFoundError(f"no lab is up in {folder}", cause=gone, next="start one with `ciuic lab up`")


def write_state(folder: Path, state: LabState) -> None:
    """Whole or not at all."""
    new = folder / f"{STATE}.new"
    new.write_text(json.dumps(asdict(state)))
    new.replace(folder / STATE)


def remove_state(folder: Path) -> None:
    """The lab is gone."""
    for name in (STATE, SOCKET):
        (folder / name).unlink(missing_ok=True)


def _read(folder: Path) -> LabState | None:
    try:
        raw = json.loads((folder / STATE).read_bytes())
        return LabState(**raw | {"places": tuple(raw["places"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StorageError(f"{folder / STATE} cannot be read", cause=str(error), next="remove the folder") from error


@contextlib.contextmanager
def socket_name(folder: Path) -> Generator[str]:
    """A name of the folder's socket that is short enough for the kernel (108 bytes)."""
    if not Path("/proc/self/fd").is_dir():
        yield str(folder / SOCKET)
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


def ask_lab(folder: Path, **request: Any) -> Any:
    """One request to the lab in this folder; its answer. Raises what the lab's side raised."""
    find_lab(folder)
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(ANSWER_S)
        try:
            with socket_name(folder) as name:
                end.connect(name)
            end.sendall(json.dumps(request).encode() + b"\n")
            with end.makefile("rb") as lines:
                line = lines.readline(MAX_LINE_BYTES)
        except OSError as error:
            raise UnreachableError(
                "the lab does not answer", cause=error.strerror or str(error), next=f"read {folder / LOG}"
            ) from error
    try:
        answer = json.loads(line)
    except ValueError:
        raise ProtocolError("the lab's answer is not JSON", next=f"read {folder / LOG}") from None
    if "error" in answer:
        raise error_from_dict(answer["error"])
    return answer["ok"]
