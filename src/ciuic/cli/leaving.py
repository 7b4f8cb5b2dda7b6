"""This machine's node takes no more work, or leaves: the running agent drains, or we say goodbye in its place."""

import os
import secrets
import signal
import time
from pathlib import Path

from ciuic.errors import AccessError, ConflictError, UsageError
from ciuic.net.client import HubClient
from ciuic.net.messages import LeaveRequest, Ok
from ciuic.node.identity import NodeIdentity, held, load_identity, node_folder

DEADLINE_S = 120.0
"""A worker may finish its step and push (the agent's drain takes up to 60 s), and the hub must be told."""
POLL_S = 0.2


def leave_network(home: Path, location: str) -> NodeIdentity:
    """Let the node leave; who it was. Its identity stays, so it can come back with `ciuic node join`.

    Raises UsageError when it is not clear which node, UnreachableError when the hub cannot be told.
    """
    identity = _find(home, location)
    holder = _signal_agent(identity.folder)
    if holder:
        _wait_for_end(identity, holder)
        return identity
    with held(identity.folder):
        client = HubClient(
            identity.url, identity.authority.read_bytes(), identity.cert, identity.key, purpose="control"
        )
        try:
            request = LeaveRequest(agent_incarnation=secrets.token_hex(8))
            client.call("POST", "/v1/node/leave", request, Ok)
        finally:
            client.close()
    return identity


def drain_agent(home: Path, location: str, *, undo: bool) -> NodeIdentity:
    """Tell the running agent to take no new work, or to take work again; who it is.

    Raises UsageError when it is not clear which node, ConflictError when no agent runs.
    """
    identity = _find(home, location)
    if not _signal_agent(identity.folder, signal.SIGUSR2 if undo else signal.SIGUSR1):
        raise ConflictError(
            f"no agent of {identity.node_id} runs on this machine", next="start it with: ciuic node join URL --location"
        )
    return identity


def _find(home: Path, location: str) -> NodeIdentity:
    names = [location] if location else _locations(home)
    identity = load_identity(node_folder(home, names[0])) if len(names) == 1 else None
    if identity is not None:
        return identity
    if location:
        raise UsageError(f"this machine has not joined a network as {location}", next=_known(home))
    count = "several nodes" if names else "no node"
    raise UsageError(f"this machine has {count}", cause=f"looked in {home / 'nodes'}", next=_known(home))


def _locations(home: Path) -> list[str]:
    return [path.parent.name for path in sorted(home.glob("nodes/*/identity.json"))]


def _known(home: Path) -> str:
    names = _locations(home)
    return f"name one with --location: {', '.join(names)}" if names else "join first with `ciuic node join`"


def _signal_agent(folder: Path, number: signal.Signals = signal.SIGTERM) -> int:
    """Tell the agent that holds `folder` to leave (or another signal); its process id, 0 when no agent runs."""
    try:
        with held(folder):
            return 0
    except ConflictError:
        text = (folder / "lock").read_text().strip()
    if not text.isdecimal():
        raise ConflictError("the agent of this node is just starting", next="try again in a moment")
    try:
        os.kill(int(text), number)
    except ProcessLookupError:
        return 0
    except PermissionError:
        raise AccessError(
            f"process {text} runs this node and belongs to somebody else", next="run this as the user who joined"
        ) from None
    return int(text)


def _wait_for_end(identity: NodeIdentity, holder: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            with held(identity.folder):
                return
        except ConflictError:
            time.sleep(POLL_S)
    raise ConflictError(
        f"{identity.node_id} is still draining after {DEADLINE_S:.0f} s",
        cause=f"process {holder} has not ended",
        next=f"wait, or end it at once: kill {holder}",
    )
