"""Who this machine is in the network: `nodes/<location>/` under CIUIC_HOME, held by at most one agent at a time.

A stored identity is used again without a token, and also when a token of the same network is given: the token keeps
its uses.
"""

import contextlib
import fcntl
import logging
import os
import re
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ciuic.errors import ConflictError, StorageError, TokenError, UsageError
from ciuic.net.client import join_network
from ciuic.net.tls import pem_fingerprint, write_private_file
from ciuic.net.tokens import parse_token
from ciuic.net.url import parse_hub_url

_LOCATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
_FILES = ("identity.json", "authority.pem", "node.pem", "node.key")
_MAX_FILE_BYTES = 64 * 1024
_log = logging.getLogger(__name__)


class _Stored(msgspec.Struct, kw_only=True):
    """identity.json; fields of later versions are ignored."""

    node_id: str
    url: str
    location: str
    authority_fingerprint: str
    joined_at: float


@dataclass(frozen=True, kw_only=True)
class NodeIdentity:
    """A node's name and where its certificate lies."""

    node_id: str
    url: str
    """Where the hub was last dialled."""
    authority_fingerprint: str
    folder: Path
    fresh: bool = False
    """Joined just now rather than found on disk."""

    @property
    def authority(self) -> Path:
        return self.folder / "authority.pem"

    @property
    def cert(self) -> Path:
        return self.folder / "node.pem"

    @property
    def key(self) -> Path:
        return self.folder / "node.key"


def node_folder(home: Path, location: str) -> Path:
    """The folder of the node at `location`. Raises UsageError when the name cannot be one."""
    if not _LOCATION.fullmatch(location):
        raise UsageError(
            f"{location!r} is not a location",
            cause="letters, digits, dot, dash and underscore are allowed, at most 48",
            next="write for example --location us-west",
        )
    return home / "nodes" / location


@contextlib.contextmanager
def held(folder: Path) -> Generator[None]:
    """Hold the folder for this process; the lock goes with the process, however it ends.

    Raises ConflictError naming the process that holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be used", cause=str(error), next="set CIUIC_HOME to a folder of yours"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            raise ConflictError(
                f"node {folder.name} already runs on this machine",
                cause=f"process {holder} holds {folder}",
                next="stop that one, or join with another --location (or another CIUIC_HOME)",
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def load_identity(folder: Path) -> NodeIdentity | None:
    """The identity kept in `folder`; None when there is none. Raises StorageError when it is damaged."""
    path = folder / "identity.json"
    if not path.exists():
        return None
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise StorageError(f"{path} is too large to be an identity")
        stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
        missing = [name for name in _FILES if not (folder / name).is_file()]
    except (OSError, msgspec.DecodeError) as error:
        raise StorageError(
            f"{path} cannot be read", cause=str(error), next=f"remove {folder} and join again with a new token"
        ) from error
    if missing:
        raise StorageError(f"{folder} lacks {', '.join(missing)}", next="remove it and join again with a new token")
    return NodeIdentity(
        node_id=stored.node_id, url=stored.url, authority_fingerprint=stored.authority_fingerprint, folder=folder
    )


def settle_identity(
    folder: Path, *, url: str, location: str, token: str | None, claimed: dict[str, float], names: Sequence[str] = ()
) -> NodeIdentity:
    """The stored identity when it fits, else a new one from the token. The folder must be held.

    `names`: by which other nodes may dial a new one.

    Raises TokenError when there is no identity and no (good) token, and what joining raises.
    """
    stored = load_identity(folder)
    if stored is not None and (
        token is None or parse_token(token).authority_fingerprint == stored.authority_fingerprint
    ):
        return stored
    if token is None:
        raise TokenError(
            f"this machine has not joined a network as '{location}'",
            cause=f"there is no identity in {folder}",
            next="make a token on the hub with `ciuic hub token create` and give it in CIUIC_TOKEN",
        )
    if stored is not None:
        set_aside(stored)
    return join(folder, url=url, location=location, token=token, claimed=claimed, names=names)


def join(
    folder: Path, *, url: str, location: str, token: str, claimed: dict[str, float], names: Sequence[str] = ()
) -> NodeIdentity:
    """Use the token, and keep what comes back; identity.json is written last, so a half-written one never counts."""
    node_id, key_pem, cert_pem, authority_pem = join_network(token, location, claimed, url=url, names=names)
    fingerprint, _ = pem_fingerprint(authority_pem)
    stored = _Stored(
        node_id=node_id,
        url=parse_hub_url(url).url,
        location=location,
        authority_fingerprint=fingerprint,
        joined_at=time.time(),
    )
    contents = (msgspec.json.encode(stored), authority_pem, cert_pem, key_pem)
    for name, data in reversed(list(zip(_FILES, contents, strict=True))):
        write_private_file(folder / name, data)
    return NodeIdentity(node_id=node_id, url=stored.url, authority_fingerprint=fingerprint, folder=folder, fresh=True)


def set_aside(identity: NodeIdentity) -> None:
    """Move an identity that is no longer of use into a folder beside the new one; nothing is deleted."""
    aside = identity.folder / f"former-{identity.authority_fingerprint[:8]}-{time.time_ns()}"
    try:
        aside.mkdir(mode=0o700)
        for name in _FILES:
            os.replace(identity.folder / name, aside / name)
    except OSError as error:
        raise StorageError(f"the identity in {identity.folder} cannot be moved aside", cause=str(error)) from error
    _log.warning("the identity %s of this machine was moved to %s", identity.node_id, aside)
