"""How a shard is set up, and who it is: its certificate serves nodes and calls the hub."""

import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from ciuic.errors import StorageError, TokenError, UnreachableError, UsageError
from ciuic.hub.run.checks import slug
from ciuic.net.client import HubClient, join_network
from ciuic.net.shard_messages import RenewReply, RenewRequest, ShardReply, ShardReport
from ciuic.net.tls import certificate_ends_at, check_issued, new_key_and_csr, pem_fingerprint, write_private_file
from ciuic.net.tokens import parse_token
from ciuic.net.url import parse_hub_url

_FILES = ("identity.json", "authority.pem", "shard.pem")
RENEW_BEFORE_S = 30 * 86400.0
"""A shard that starts in the last month of its certificate asks for a new one."""
_MAX_FILE_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """Everything `serve_shard` needs."""

    home: Path
    """CIUIC_HOME: the shard keeps `shards/<name>/` in it."""
    name: str
    """Unique in the network; the hub may add a number."""
    join: str = ""
    """A token for a shard, needed once; later empty or the hub's address when that has changed."""
    host: str = "0.0.0.0"  # noqa: S104 - nodes come from other machines; everything needs a certificate
    port: int = 0
    """0: any free port."""
    url: str = ""
    """Where nodes and other shards reach this one. Empty: the host listened on, with the port chosen."""

    @property
    def folder(self) -> Path:
        return self.home / "shards" / self.name


class _Stored(msgspec.Struct, kw_only=True):
    """identity.json; fields of later versions are ignored."""

    name: str
    url: str
    authority_fingerprint: str
    names: list[str]
    joined_at: float


@dataclass(frozen=True, kw_only=True)
class ShardIdentity:
    """A shard's name in the network and where its certificate lies."""

    name: str
    hub_url: str
    folder: Path

    @property
    def authority(self) -> Path:
        return self.folder / "authority.pem"

    @property
    def cert(self) -> Path:
        """Certificate and key in one file, so that both are replaced in one step."""
        return self.folder / "shard.pem"

    @property
    def key(self) -> Path:
        return self.cert


def settle_identity(config: ShardConfig, reached_at: str) -> ShardIdentity:
    """The stored identity, else a new one from the token. `reached_at`: host name in the shard's URL.

    Raises UsageError, TokenError, StorageError and what joining raises.
    """
    if slug(config.name) != config.name or not 1 <= len(config.name) <= 48:
        raise UsageError(
            f"{config.name[:64]!r} is not a name for a shard", next="use small letters and digits, like s1"
        )
    folder, hub_url = config.folder, "" if _is_token(config.join) else config.join
    stored = _load(folder)
    if stored is not None:
        identity = ShardIdentity(name=stored.name, hub_url=hub_url or stored.url, folder=folder)
        _keep_fresh(identity, stored, reached_at)
        return identity
    if not _is_token(config.join):
        raise TokenError(
            f"shard {config.name} has not joined a network",
            cause=f"there is no identity in {folder}",
            next="make one on the hub with `ciuic hub token create --role shard` and give it with --join",
        )
    return _join(config, reached_at)


def _is_token(text: str) -> bool:
    return bool(text) and not text.startswith("https://")


def _names(reached_at: str) -> list[str]:
    return list(dict.fromkeys([reached_at, "localhost", "127.0.0.1", "::1"]))


def _keep_fresh(identity: ShardIdentity, stored: _Stored, reached_at: str) -> None:
    """Renew the certificate when it does not name this address (then it must work) or ends soon."""
    try:
        ends_at = certificate_ends_at(identity.cert.read_bytes())
    except OSError as error:
        raise StorageError(
            f"{identity.cert} cannot be read", cause=str(error), next="restore it from a backup"
        ) from error
    is_named = reached_at in stored.names
    if is_named and ends_at - time.time() >= RENEW_BEFORE_S:
        return
    try:
        _renew(identity, stored, _names(reached_at))
    except UnreachableError:
        if not is_named:
            raise


def renew_identity(identity: ShardIdentity) -> None:
    """A new certificate for the same addresses, used once. Raises StorageError and what asking the hub raises."""
    stored = _load(identity.folder)
    if stored is None:
        raise StorageError(f"there is no identity in {identity.folder}")
    _renew(identity, stored, stored.names)
    client = HubClient(identity.hub_url, identity.authority.read_bytes(), identity.cert, identity.key, "control")
    try:
        client.call("POST", "/v1/shard/report", ShardReport(fragments=[]), ShardReply)
    finally:
        client.close()


def _renew(identity: ShardIdentity, stored: _Stored, names: list[str]) -> None:
    """A new certificate, with the old one as proof. identity.json, which names its addresses, is written last."""
    authority = identity.authority.read_bytes()
    key_pem, csr_pem = new_key_and_csr()
    client = HubClient(identity.hub_url, authority, identity.cert, identity.key, "control")
    try:
        request = RenewRequest(csr_pem=csr_pem.decode("ascii"), names=names)
        reply = client.call("POST", "/v1/shard/renew", request, RenewReply)
    finally:
        client.close()
    check_issued(reply.certificate_pem.encode(), authority_pem=authority, key_pem=key_pem)
    write_private_file(identity.cert, reply.certificate_pem.encode() + key_pem)
    write_private_file(
        identity.folder / "identity.json", msgspec.json.encode(msgspec.structs.replace(stored, names=names))
    )


def _join(config: ShardConfig, reached_at: str) -> ShardIdentity:
    token = parse_token(config.join)
    names = _names(reached_at)
    name, key_pem, cert_pem, authority_pem = join_network(token, config.name, {}, names=names)
    fingerprint, _ = pem_fingerprint(authority_pem)
    url = parse_hub_url(token.url).url
    stored = _Stored(name=name, url=url, authority_fingerprint=fingerprint, names=names, joined_at=time.time())
    contents = (msgspec.json.encode(stored), authority_pem, cert_pem + key_pem)
    for file, data in reversed(list(zip(_FILES, contents, strict=True))):
        write_private_file(config.folder / file, data)
    return ShardIdentity(name=name, hub_url=url, folder=config.folder)


def _load(folder: Path) -> _Stored | None:
    path = folder / "identity.json"
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_FILE_BYTES), type=_Stored)
    except (OSError, msgspec.DecodeError) as error:
        raise StorageError(f"{path} cannot be read", cause=str(error), next="join again with a new token") from error


def host_of(url: str) -> str:
    """The host name in a URL. Raises UsageError."""
    parse_hub_url(url)
    return urlsplit(url).hostname or ""
