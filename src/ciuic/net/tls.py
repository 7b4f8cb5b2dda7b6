"""The network's own certificate authority, identities, and TLS contexts.

Everything is P-256 (browsers refuse Ed25519). The authority lives at the hub and signs one server certificate for the
hub (server use only) and one client certificate per node, operator or viewer (client use only). A shard serves nodes
and calls the hub: its certificate is for both uses, and so is that of a node that others may dial directly. Clients
look at the role of what answers (net.pinned), so that a stolen node key cannot play the hub.
The subject of a client certificate is who the caller is: CN = name, O = role.
"""

import datetime as dt
import hashlib
import ipaddress
import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ciuic.errors import CertificateError, ConflictError, StorageError
from ciuic.net.messages import Role
from ciuic.net.names import check_direct_names
from ciuic.net.pinned import NODE_SIDE, PinnedContext

Purpose = Literal["control", "updates", "snapshots", "operator", "peer"]
"""Names what a connection is for in the plain-text part of the TLS hello (ALPN), so that a relay can count it."""

AUTHORITY_LIFETIME = dt.timedelta(days=3650)
LEAF_LIFETIME = dt.timedelta(days=365)
BACKDATING = dt.timedelta(days=1)
"""Certificates begin one day ago: a node whose clock is an hour behind must still accept them."""

MAX_NAMES = 32
_BOTH_USAGES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
_MAX_PEM_BYTES = 64 * 1024
_PAIR_ATTEMPTS, _PAIR_PAUSE_S = 20, 0.02
_UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion, x509.DuplicateExtension)
"""What reading a certificate or a request may raise besides (InvalidVersion and the like are no ValueErrors)."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who is at the other end of a connection, read from its verified client certificate."""

    role: Role
    name: str
    serial: str
    """Serial number of the certificate, lower-case hexadecimal."""


class Authority:
    """The certificate authority of one network: `authority.pem` and `authority.key` in the hub's folder."""

    def __init__(
        self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey, clock: Callable[[], float]
    ) -> None:
        self._certificate = certificate
        self._key = key
        self._clock = clock

    @classmethod
    def create(cls, folder: Path, *, clock: Callable[[], float] = time.time) -> "Authority":
        """Make a new authority in `folder`. Raises ConflictError when there is one already."""
        certificate_path, key_path = folder / "authority.pem", folder / "authority.key"
        if certificate_path.exists() or key_path.exists():
            raise ConflictError(f"{folder} already holds an authority", next="load it, or choose another folder")
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _self_signed(key, clock())
        write_private_file(key_path, _key_pem(key))
        write_private_file(certificate_path, _certificate_pem(certificate))
        return cls(certificate, key, clock)

    @classmethod
    def load(cls, folder: Path, *, clock: Callable[[], float] = time.time) -> "Authority":
        """Read the authority of `folder`. Raises StorageError when its files are missing or damaged."""
        try:
            certificate = x509.load_pem_x509_certificate((folder / "authority.pem").read_bytes())
            key = serialization.load_pem_private_key((folder / "authority.key").read_bytes(), password=None)
        except (OSError, ValueError) as error:
            raise StorageError(
                f"the authority in {folder} cannot be read",
                cause=str(error),
                next="restore authority.pem and authority.key from a copy; a new authority would lock out every node",
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise StorageError(f"the key in {folder} does not belong to the authority's certificate")
        return cls(certificate, key, clock)

    @property
    def certificate_pem(self) -> bytes:
        """The authority's certificate; public."""
        return _certificate_pem(self._certificate)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate's DER bytes, lower-case hexadecimal."""
        return self._certificate.fingerprint(hashes.SHA256()).hex()

    def issue_server(self, names: list[str]) -> tuple[bytes, bytes]:
        """The hub's certificate and key (PEM) for these DNS names and IP addresses.

        localhost, 127.0.0.1, ::1 and this machine's host name are always included.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        wanted = [*names, "localhost", "127.0.0.1", "::1", socket.gethostname()]
        alternatives = [_general_name(name) for name in dict.fromkeys(wanted) if name]
        subject = _subject("ciuic hub", "hub")
        builder = self._leaf(subject, key.public_key(), ExtendedKeyUsageOID.SERVER_AUTH)
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        return _certificate_pem(builder.sign(self._key, hashes.SHA256())), _key_pem(key)

    def issue_client(self, csr_pem: bytes | str | None, *, common_name: str, role: Role) -> tuple[bytes, bytes]:
        """A client certificate (PEM) for `common_name` in `role`, and its key (PEM).

        With a signing request the key stays with the requester and the second value is empty. Of the request only
        the public key is used; the subject is chosen here. Raises CertificateError when it is not acceptable.
        """
        if role not in get_args(Role):
            raise CertificateError(f"there is no role {role!r}", next="use node, operator or viewer")
        if not 1 <= len(common_name) <= 64:
            raise CertificateError(f"a certificate needs a name of 1 to 64 characters, not {common_name!r}")
        if csr_pem is None:
            key = ec.generate_private_key(ec.SECP256R1())
            public_key, key_pem = key.public_key(), _key_pem(key)
        else:
            public_key, key_pem = _public_key_of_request(csr_pem), b""
        builder = self._leaf(_subject(common_name, role), public_key, ExtendedKeyUsageOID.CLIENT_AUTH)
        return _certificate_pem(builder.sign(self._key, hashes.SHA256())), key_pem

    def issue_shard(self, csr_pem: bytes | str, *, common_name: str, names: list[str]) -> bytes:
        """A certificate (PEM) for a shard, with which it serves at `names` and calls hub and shards.

        Raises CertificateError when the request or a name is not acceptable.
        """
        if not 1 <= len(common_name) <= 64 or not 1 <= len(names) <= MAX_NAMES or any(len(n) > 253 for n in names):
            raise CertificateError(f"a shard needs a name and 1 to {MAX_NAMES} addresses by which nodes reach it")
        return self._issue_serving(csr_pem, _subject(common_name, "shard"), names)

    def issue_member(self, csr_pem: bytes | str, *, common_name: str, role: Role, names: Sequence[str] = ()) -> bytes:
        """The certificate (PEM) of whoever joins or renews; `names`: where it is dialled (a shard, or a node).

        Raises CertificateError when the request or a name is not acceptable.
        """
        if role == "shard":
            return self.issue_shard(csr_pem, common_name=common_name, names=list(names))
        if not names:
            return self.issue_client(csr_pem, common_name=common_name, role=role)[0]
        if role != "node":
            raise CertificateError(f"a certificate for a {role} carries no addresses", next="leave the names out")
        check_direct_names(names)
        return self._issue_serving(csr_pem, _subject(common_name, role), names)

    def _issue_serving(self, csr_pem: bytes | str, subject: x509.Name, names: Sequence[str]) -> bytes:
        try:
            alternatives = [_general_name(name) for name in dict.fromkeys(names) if name]
        except UnicodeError as error:
            raise CertificateError("an address in this request is no host name", cause=str(error)) from error
        builder = self._leaf(subject, _public_key_of_request(csr_pem), *_BOTH_USAGES)
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        return _certificate_pem(builder.sign(self._key, hashes.SHA256()))

    def _leaf(
        self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey, *usages: x509.ObjectIdentifier
    ) -> x509.CertificateBuilder:
        builder = _builder(subject, self._certificate.subject, public_key, self._clock(), LEAF_LIFETIME)
        authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(sign_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(authority_key, critical=False)
        )


# ---- what the other side may ask -----------------------------------------------------------------------------------


def identity_from_der(der: bytes) -> Identity:
    """Who a client certificate (already verified by TLS) belongs to. Raises CertificateError when it names no role."""
    try:
        certificate = x509.load_der_x509_certificate(der)
        name = _attribute(certificate.subject, NameOID.COMMON_NAME)
        role = _attribute(certificate.subject, NameOID.ORGANIZATION_NAME)
    except _UNREADABLE as error:
        raise CertificateError("the client certificate cannot be read", cause=str(error)) from error
    if role == "node" or role == "operator" or role == "viewer" or role == "shard":
        return Identity(role=role, name=name, serial=f"{certificate.serial_number:x}")
    raise CertificateError(
        f"the client certificate of {name!r} has no role of this network",
        cause=f"its organisation is {role!r}",
        next="join again with a token from `ciuic hub token create`",
    )


def pem_to_der(certificate_pem: bytes) -> bytes:
    """The first certificate of a PEM text as DER. Raises CertificateError."""
    try:
        return x509.load_pem_x509_certificate(certificate_pem).public_bytes(serialization.Encoding.DER)
    except _UNREADABLE as error:
        raise CertificateError("this is not a certificate", cause=str(error)) from error


def new_key_and_csr() -> tuple[bytes, bytes]:
    """A fresh P-256 key and a signing request for it (both PEM). The key never leaves the machine."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(_subject("ciuic", "request"))
    return _key_pem(key), request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def pem_fingerprint(certificate_pem: bytes) -> tuple[str, bytes]:
    """(SHA-256 of the DER bytes, the same single certificate as clean PEM). Raises CertificateError."""
    if len(certificate_pem) > _MAX_PEM_BYTES:
        raise CertificateError(f"a certificate of {len(certificate_pem)} bytes is not accepted")
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
    except _UNREADABLE as error:
        raise CertificateError("this is not a certificate", cause=str(error)) from error
    der = certificate.public_bytes(serialization.Encoding.DER)
    return hashlib.sha256(der).hexdigest(), _certificate_pem(certificate)


def check_issued(certificate_pem: bytes, *, authority_pem: bytes, key_pem: bytes) -> Identity:
    """The identity in a certificate that the authority just issued for our key. Raises CertificateError otherwise."""
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        key = serialization.load_pem_private_key(key_pem, password=None)
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority_pem))
    except (*_UNREADABLE, InvalidSignature) as error:
        raise CertificateError("the hub issued a certificate that does not verify", cause=str(error)) from error
    if certificate.public_key() != key.public_key():
        raise CertificateError("the hub issued a certificate for another key than ours")
    return identity_from_der(certificate.public_bytes(serialization.Encoding.DER))


def certificate_serial(certificate_pem: bytes) -> str:
    """Serial number as `Identity` writes it, whoever it belongs to. Raises CertificateError."""
    try:
        return f"{x509.load_pem_x509_certificate(certificate_pem).serial_number:x}"
    except _UNREADABLE as error:
        raise CertificateError("this is not a certificate", cause=str(error)) from error


def certificate_ends_at(certificate_pem: bytes) -> float:
    """When a certificate stops being valid (seconds since 1970). Raises CertificateError."""
    try:
        return x509.load_pem_x509_certificate(certificate_pem).not_valid_after_utc.timestamp()
    except _UNREADABLE as error:
        raise CertificateError("this is not a certificate", cause=str(error)) from error


def certificate_names(certificate_pem: bytes) -> tuple[str, ...]:
    """Host names and addresses in a certificate, sorted; empty for a client's. Raises CertificateError."""
    try:
        found = x509.load_pem_x509_certificate(certificate_pem).extensions
        names = found.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    except _UNREADABLE as error:
        raise CertificateError("this is not a certificate", cause=str(error)) from error
    return tuple(sorted(str(name.value) for name in names))


# ---- contexts ------------------------------------------------------------------------------------------------------


def client_context(
    authority_pem: bytes, cert_path: Path | None, key_path: Path | None, purpose: Purpose
) -> ssl.SSLContext:
    """TLS 1.2 or newer towards the hub, verified against this authority only (never the system's).

    Raises CertificateError when the authority, the certificate or the key cannot be loaded.
    """
    context = PinnedContext(ssl.PROTOCOL_TLS_CLIENT)
    if purpose == "peer":
        context.serving = NODE_SIDE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([f"ciuic-{purpose}", "http/1.1"])
    try:
        context.load_verify_locations(cadata=authority_pem.decode("ascii"))
        if cert_path is not None:
            _load_pair(context, cert_path, key_path)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        what = "the authority's certificate" if cert_path is None else f"{cert_path} or its key"
        raise CertificateError(
            f"{what} cannot be loaded", cause=str(error), next="join again with a token from `ciuic hub token create`"
        ) from error
    return context


def _load_pair(context: ssl.SSLContext, cert_path: Path, key_path: Path | None) -> None:
    """Certificate and key; while they are being renewed they fit together only a moment later."""
    for _ in range(_PAIR_ATTEMPTS - 1):
        try:
            context.load_cert_chain(cert_path, key_path)
        except ssl.SSLError as error:
            if error.reason != "KEY_VALUES_MISMATCH":
                raise
            time.sleep(_PAIR_PAUSE_S)
        else:
            return
    context.load_cert_chain(cert_path, key_path)


def unverified_context() -> ssl.SSLContext:
    """TLS that proves nothing about the other side: only to fetch an authority whose fingerprint is then checked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["ciuic-control", "http/1.1"])
    return context


def server_context(cert_path: Path, key_path: Path, authority_pem: bytes) -> ssl.SSLContext:
    """The hub's side: asks for a client certificate of this authority, accepts callers without one (role none)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert_path, key_path)
    context.load_verify_locations(cadata=authority_pem.decode("ascii"))
    context.verify_mode = ssl.CERT_OPTIONAL
    context.set_alpn_protocols(["http/1.1"])
    return context


def peer_context(cert_path: Path, key_path: Path, authority_pem: bytes) -> ssl.SSLContext:
    """A node's side of a direct connection: nobody without a certificate of this authority. Raises CertificateError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        _load_pair(context, cert_path, key_path)
        context.load_verify_locations(cadata=authority_pem.decode("ascii"))
    except (OSError, ValueError) as error:
        raise CertificateError(f"{cert_path} or its key cannot be loaded", cause=str(error)) from error
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["http/1.1"])
    return context


def write_private_file(path: Path, data: bytes) -> None:
    """Write `path` in one step with mode 0600 (its folder is made with 0700). Raises StorageError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise StorageError(f"{path} cannot be written", cause=str(error)) from error


# ---- pieces --------------------------------------------------------------------------------------------------------


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, now: float, lifetime: dt.timedelta
) -> x509.CertificateBuilder:
    moment = dt.datetime.fromtimestamp(now, tz=dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(moment - BACKDATING)
        .not_valid_after(moment + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _self_signed(key: ec.EllipticCurvePrivateKey, now: float) -> x509.Certificate:
    name = _subject(f"ciuic authority {secrets.token_hex(4)}", "authority")
    return (
        _builder(name, name, key.public_key(), now, AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(sign_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )


def _key_usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _public_key_of_request(csr_pem: bytes | str) -> ec.EllipticCurvePublicKey:
    raw = csr_pem.encode() if isinstance(csr_pem, str) else csr_pem
    if len(raw) > _MAX_PEM_BYTES:
        raise CertificateError(f"a signing request of {len(raw)} bytes is not accepted")
    try:
        request = x509.load_pem_x509_csr(raw)
        valid, public_key = request.is_signature_valid, request.public_key()
    except _UNREADABLE as error:
        raise CertificateError("the signing request cannot be read", cause=str(error)) from error
    if not valid:
        raise CertificateError("the signing request is not signed with its own key")
    if not isinstance(public_key, ec.EllipticCurvePublicKey) or not isinstance(public_key.curve, ec.SECP256R1):
        raise CertificateError("the signing request does not hold a P-256 key")
    return public_key


def _subject(common_name: str, organisation: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, organisation),
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
        ]
    )


def _attribute(name: x509.Name, oid: x509.ObjectIdentifier) -> str:
    values = name.get_attributes_for_oid(oid)
    return str(values[0].value) if len(values) == 1 else ""


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name.encode("idna").decode("ascii"))


def _certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
