"""Who may speak to the hub: its authority and certificate, the local operator's, and what each role may do."""

import json
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from ciuic.errors import CertificateError, CiuicError, RoleError
from ciuic.hub.membership.records import Node
from ciuic.net.messages import Role
from ciuic.net.tls import Authority, Identity, identity_from_der, write_private_file

RENEW_BEFORE_S = 30 * 86400.0
"""The operator's certificate is renewed when the hub starts in the last month of its life."""

OPERATORS: frozenset[Role] = frozenset({"operator"})
VIEWERS: frozenset[Role] = frozenset({"operator", "viewer"})
NODES: frozenset[Role] = frozenset({"node"})
SHARDS: frozenset[Role] = frozenset({"shard"})


@dataclass(frozen=True, kw_only=True)
class HubFiles:
    """The hub's own secrets on disk."""

    authority: Authority
    cert: Path
    key: Path


def prepare_folder(folder: Path, names: Iterable[str]) -> HubFiles:
    """Load the authority, or make it on the first start, and issue a fresh server certificate for these names.

    Nodes pin the authority, not the server certificate, so that may change with every start. Raises StorageError.
    """
    is_new = not (folder / "authority.pem").exists() and not (folder / "authority.key").exists()
    authority = Authority.create(folder) if is_new else Authority.load(folder)
    folder.chmod(0o700)
    return issue_server(folder, authority, names)


def issue_server(folder: Path, authority: Authority, names: Iterable[str]) -> HubFiles:
    """A fresh server certificate for these names, in the hub's folder. Raises StorageError."""
    cert_pem, key_pem = authority.issue_server(list(names))
    files = HubFiles(authority=authority, cert=folder / "hub.pem", key=folder / "hub.key")
    write_private_file(files.key, key_pem)
    write_private_file(files.cert, cert_pem)
    return files


def prepare_operator(
    folder: Path, authority: Authority, url: str, *, name: str, is_accepted: Callable[[str], bool] = lambda serial: True
) -> bytes:
    """Give the local operator a certificate when there is no good one, and the hub's present address.

    `is_accepted(serial)`: it was not revoked. Returns the certificate (PEM). Raises StorageError.
    """
    cert, key = folder / "operator.pem", folder / "operator.key"
    if not (_is_good(cert, key, authority) and is_accepted(serial_of(cert.read_bytes()))):
        cert_pem, key_pem = authority.issue_client(None, common_name=name, role="operator")
        write_private_file(key, key_pem)
        write_private_file(cert, cert_pem)
    write_private_file(folder / "authority.pem", authority.certificate_pem)
    profile = {"url": url, "authority": "authority.pem", "cert": cert.name, "key": key.name}
    write_private_file(folder / "profile.json", (json.dumps(profile, indent=2) + "\n").encode())
    return cert.read_bytes()


def _is_good(cert: Path, key: Path, authority: Authority) -> bool:
    try:
        certificate = x509.load_pem_x509_certificate(cert.read_bytes())
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.certificate_pem))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_cert_chain(cert, key)  # fails when the key is another one's
    except Exception:  # noqa: BLE001 - missing, damaged, foreign: whatever is wrong with it, a new one is issued
        return False
    return certificate.not_valid_after_utc.timestamp() - time.time() > RENEW_BEFORE_S


def serial_of(certificate_pem: str | bytes) -> str:
    """The serial number as `Identity` writes it."""
    text = certificate_pem if isinstance(certificate_pem, str) else certificate_pem.decode("ascii")
    return identity_from_der(ssl.PEM_cert_to_DER_cert(text)).serial


def check_node(identity: Identity, node: Node | None, *, is_recorded: bool) -> None:
    """A node's certificate must be one the hub has on record for it. Raises CertificateError.

    `is_recorded`: the hub's book of certificates knows it, and says by itself whether it still holds.
    """
    cause = ""
    if node is None:
        cause = "it is not in this hub's records"
    elif node.presence == "evicted":
        cause = "it was evicted"
    elif not is_recorded and node.serial != identity.serial:
        cause = "its certificate is not the one this hub issued to it last"
    if cause:
        raise CertificateError(
            f"the hub does not accept {identity.name}", cause=cause, next="ask the operator for a new join token"
        )


def check_role(identity: Identity, allowed: frozenset[Role]) -> None:
    """Raises RoleError."""
    if identity.role not in allowed:
        needed = " or ".join(_article(role) for role in sorted(allowed))
        raise RoleError(
            f"{identity.name} may not do this",
            cause=f"it is {_article(identity.role)}; this needs {needed}",
            next="use the operator's certificate" if "operator" in allowed else "only nodes do this",
        )


def no_certificate() -> CiuicError:
    """The answer to a caller who shows no certificate."""
    return CertificateError(
        "the hub does not know you",
        cause="the connection shows no certificate of this hub's authority",
        next="join first: ciuic node join URL --token TOKEN",
    )


def _article(role: Role) -> str:
    return f"an {role}" if role == "operator" else f"a {role}"
