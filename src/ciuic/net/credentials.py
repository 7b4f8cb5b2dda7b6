"""With which certificate a program on this machine speaks to the hub, when no agent told it.

Reads what `ciuic node join` and `ciuic hub start` have written under CIUIC_HOME:

    nodes/<location>/   identity.json (url, node_id), authority.pem, node.pem, node.key
    operator/           profile.json  (url, authority, cert, key; paths relative to it)
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from ciuic.errors import CertificateError, StorageError, UsageError
from ciuic.net.client import HubClient
from ciuic.net.tls import Purpose

T = TypeVar("T")

_MAX_FILE_BYTES = 64 * 1024
_NODE_FILES = ("authority.pem", "node.pem", "node.key")


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """An identity, and the hub that knows it."""

    url: str
    name: str
    authority: Path
    cert: Path
    key: Path

    def connect(self, purpose: Purpose = "control", *, timeout_s: float = 30.0) -> HubClient:
        """A connection with this certificate. Raises CertificateError, StorageError, UsageError."""
        try:
            authority = self.authority.read_bytes()
        except OSError as error:
            raise StorageError(f"{self.authority} cannot be read", cause=error.strerror or str(error)) from error
        return HubClient(self.url, authority, self.cert, self.key, purpose, timeout_s=timeout_s)


class _Identity(msgspec.Struct):
    """The part of identity.json that matters here."""

    url: str
    node_id: str


class _Profile(msgspec.Struct):
    url: str
    authority: str
    cert: str
    key: str


def find_credentials(home: Path | None = None) -> Credentials:
    """The node of this machine that CIUIC_NODE names, else its only node, else its operator.

    Raises UsageError when there are several nodes and none is named, or the named one is not there; CertificateError
    when there is no identity at all; StorageError when its files are damaged.
    """
    home = home or _home()
    nodes = sorted(path.parent for path in (home / "nodes").glob("*/identity.json"))
    named = os.environ.get("CIUIC_NODE", "")
    names = [folder.name for folder in nodes]
    if named:
        if named not in names:
            raise UsageError(
                f"CIUIC_NODE names {named!r}, and this machine has no such node",
                cause=f"{home / 'nodes'} has {', '.join(names) or 'none'}",
                next="name one that has joined here",
            )
        return _node(home / "nodes" / named)
    if len(nodes) > 1:
        raise UsageError(
            "this machine has several nodes, and none is named",
            cause=f"{home / 'nodes'} has {', '.join(names)}",
            next="set CIUIC_NODE to the one to use",
        )
    if nodes:
        return _node(nodes[0])
    profile = home / "operator" / "profile.json"
    if profile.exists():
        return _operator(profile)
    raise CertificateError(
        "this machine has no identity for a hub",
        cause=f"there is neither {home / 'nodes'} with a node nor {profile}",
        next="join first (ciuic node join URL --token TOKEN), or set CIUIC_HOME to the folder of a node that has",
    )


def _home() -> Path:
    from_environment = os.environ.get("CIUIC_HOME", "")
    if from_environment:
        return Path(from_environment).expanduser().resolve()
    import platformdirs

    return Path(platformdirs.user_data_dir("ciuic"))


def _node(folder: Path) -> Credentials:
    identity = _read(folder / "identity.json", _Identity)
    authority, cert, key = (_there(folder / name) for name in _NODE_FILES)
    return Credentials(url=identity.url, name=identity.node_id, authority=authority, cert=cert, key=key)


def _operator(path: Path) -> Credentials:
    profile = _read(path, _Profile)
    authority, cert, key = (_there(path.parent / name) for name in (profile.authority, profile.cert, profile.key))
    return Credentials(url=profile.url, name="operator", authority=authority, cert=cert, key=key)


def _read(path: Path, kind: type[T]) -> T:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_FILE_BYTES), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise StorageError(
            f"{path} cannot be read", cause=str(error), next="join again with a new token, or run as its owner"
        ) from error


def _there(path: Path) -> Path:
    if not path.is_file():
        raise StorageError(f"{path} is missing", next=f"remove {path.parent} and join again with a new token")
    return path
