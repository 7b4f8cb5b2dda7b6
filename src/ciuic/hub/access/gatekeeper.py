"""Who is let in, over time: certificates issued, renewed and revoked, and the audit log. Thread-safe.

`check` is asked with every request and only looks into memory; what must be written happens in `meet`, off the loop.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from msgspec.structs import replace

from ciuic.errors import CertificateError, ConflictError, NotFoundError, OverloadedError, UsageError
from ciuic.hub.access.audit import AuditTrail
from ciuic.hub.access.certificates import Certificate, CertificateBook
from ciuic.hub.access.limits import Buckets
from ciuic.hub.keeping.database import Database
from ciuic.hub.membership.records import Announce
from ciuic.hub.run.checks import free_name, slug
from ciuic.net.access_messages import CertificateInfo, OperatorRequest, RevokeReply, RevokeRequest
from ciuic.net.messages import Role
from ciuic.net.tls import (
    Authority,
    Identity,
    certificate_ends_at,
    certificate_names,
    identity_from_der,
    pem_to_der,
)

RENEW_BEFORE_S = 30 * 86400.0
"""Holders are asked to renew in the last month."""
RENEWALS_PER_S, RENEWALS_AT_ONCE = 1 / 360, 20
"""Of one name: each takes a row in the hub's records."""
LONGEST_NAME = 48
FORGET_EVERY_S = 86400.0

Standing = Literal["good", "new", "unknown"]


class Gatekeeper:
    """See the module. `say` tells the story; `on_revoked` is called after certificates were revoked."""

    def __init__(
        self,
        database: Database,
        authority: Authority,
        *,
        say: Callable[[Announce], None],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """Raises StorageError."""
        self._authority, self._say, self._wall_s = authority, say, wall_s
        self.book = CertificateBook(database)
        self.trail = AuditTrail(database, wall_s=wall_s)
        self.on_revoked: Callable[[], None] = lambda: None
        self._renewals = Buckets(RENEWALS_PER_S, RENEWALS_AT_ONCE)
        self._lock = threading.Lock()
        self._forget_at_s = 0.0

    # ---- with every request

    def knows(self, identity: Identity) -> bool:
        """Whether this certificate is in the hub's records."""
        return self.book.get(identity.serial) is not None

    def check(self, identity: Identity) -> Standing:
        """May this certificate still be used? Raises CertificateError."""
        one = self.book.get(identity.serial)
        if one is None:
            return "unknown"
        if one.state == "revoked":
            raise _refused(identity, f"its certificate was revoked by {one.revoked_by}")
        if one.state == "replaced":
            raise _refused(
                identity,
                "its certificate was renewed, and the new one has been used",
                next="use the new one; if nobody renewed it here its key was stolen: ciuic hub revoke",
            )
        return "new" if one.state == "new" else "good"

    def meet(self, identity: Identity) -> None:
        """The first request with a certificate: note it. Raises StorageError."""
        if not self.knows(identity):
            self.book.put(Certificate(serial=identity.serial, name=identity.name, role=identity.role))
        elif self.book.used(identity.serial) is not None:
            text = f"{identity.name} uses its new certificate; the old one is refused from now on"
            self._say(Announce(kind="certificate.renewed", node_id=_node(identity), text=text))

    def accepts(self, serial: str) -> bool:
        """It was neither revoked nor replaced; also when it is not known."""
        one = self.book.get(serial)
        return one is None or one.state in ("valid", "new")

    def is_revoked(self, identity: Identity) -> bool:
        """Its certificate was revoked."""
        one = self.book.get(identity.serial)
        return one is not None and one.state == "revoked"

    # ---- issuing

    def certificate(self, certificate_pem: str | bytes, *, replaces: str = "") -> Certificate:
        """The record of a certificate that was just issued."""
        body = certificate_pem.encode() if isinstance(certificate_pem, str) else certificate_pem
        identity = identity_from_der(pem_to_der(body))
        return Certificate(
            serial=identity.serial,
            name=identity.name,
            role=identity.role,
            issued_at=self._wall_s(),
            ends_at=certificate_ends_at(body),
            names=certificate_names(body) if identity.role == "node" else (),
            replaces=replaces,
            state="new" if replaces else "valid",
        )

    def note_known(self, serials: Mapping[str, str]) -> None:
        """Nodes that joined before records were kept, by name: their certificates are accepted, and soon renewed."""
        known = self.book.names(["node"])
        old = [Certificate(serial=s, name=n, role="node") for n, s in serials.items() if n not in known]
        if old:
            self.book.put(*old)

    def note(self, certificate_pem: bytes) -> None:
        """A certificate that was issued outside (the local operator's), unless it is known."""
        one = self.certificate(certificate_pem)
        if self.book.get(one.serial) is None:
            self.book.put(one)

    def renew(self, identity: Identity, csr_pem: str, names: Iterable[str] = ()) -> bytes:
        """A new certificate (PEM) under the same name; `names`: where a shard, or a node, is dialled.

        Raises CertificateError for a bad request, OverloadedError when there were too many, StorageError.
        """
        with self._lock:
            if not self._renewals.take(f"{identity.role}/{identity.name}", self._wall_s()):
                raise OverloadedError(
                    f"{identity.name} renews its certificate too often", next="wait some minutes; the old one holds"
                )
        given = list(names)
        pem = self._authority.issue_member(csr_pem, common_name=identity.name, role=identity.role, names=given)
        self.book.renewed(self.certificate(pem, replaces=identity.serial))
        return pem

    def free_operator_name(self, stem: str) -> str:
        """`alice`, or `alice-2` when that is taken."""
        return free_name(stem, self.book.names(["operator", "viewer"]))

    def create_operator(self, request: OperatorRequest, by: str) -> tuple[Certificate, bytes]:
        """A certificate for another operator or viewer. Raises UsageError, CertificateError, StorageError."""
        stem = slug(request.name)
        if not 1 <= len(stem) <= LONGEST_NAME:
            raise UsageError(
                f"{request.name[:80]!r} is not a name for an operator", next="use letters and digits, like alice"
            )
        with self._lock:
            name = self.free_operator_name(stem)
            pem, _ = self._authority.issue_client(request.csr_pem, common_name=name, role=request.role)
            one = self.certificate(pem)
            self.book.put(one)
        self._say(Announce(kind=f"{request.role}.created", text=f"{by} gave {name} a certificate as {request.role}"))
        return one, pem

    # ---- ending

    def find(self, request: RevokeRequest) -> tuple[str, Role]:
        """Whose certificates are meant. Raises NotFoundError, ConflictError."""
        roles = sorted({one.role for one in self.book.of(request.name, request.role)})
        if not roles:
            raise NotFoundError(
                f"nobody named {request.name[:80]!r} has a certificate that is accepted",
                next="list them with: ciuic hub certs",
            )
        if len(roles) > 1:
            raise ConflictError(
                f"{request.name} is the name of a {' and of a '.join(roles)}", next="say which one with --role"
            )
        return request.name, roles[0]

    def revoke(self, name: str, role: Role, by: str) -> RevokeReply:
        """Refuse every certificate of this name from now on, also on open connections. Raises StorageError."""
        serials = self.book.revoke(name, role, by=by, wall_s=self._wall_s())
        if serials:
            text = f"{by} revoked the certificate of {name} ({role})"
            self._say(Announce(kind="certificate.revoked", node_id=name if role == "node" else "", text=text))
            self.on_revoked()
        return RevokeReply(name=name, role=role, serials=serials)

    # ---- asking for renewal

    def wants_renewal(self, serial: str) -> bool:
        """Whether its holder should renew this certificate now: by the hub's clock, which is the one that counts."""
        one = self.book.get(serial)
        if one is None or one.state != "valid":
            return False
        is_time = one.wants_renewal or one.ends_at - self._wall_s() < RENEW_BEFORE_S
        return is_time and not any(c.replaces == one.serial for c in self.book.of(one.name, one.role))

    def shard_should_renew(self, name: str) -> bool:
        """The same for the shard of this name."""
        return any(self.wants_renewal(one.serial) for one in self.book.of(name, "shard"))

    def want_renewals(self) -> int:
        """Ask every node and shard to renew; how many."""
        asked = [one for one in self.book.all() if one.state == "valid" and one.role in ("node", "shard")]
        if asked:
            self.book.put(*[replace(one, wants_renewal=True) for one in asked])
        return len(asked)

    def tick(self) -> None:
        """Let time pass: the summary of what was refused; what ended long ago is forgotten. Raises StorageError."""
        self.trail.sum_up()
        if self._wall_s() >= self._forget_at_s:
            self._forget_at_s = self._wall_s() + FORGET_EVERY_S
            self.book.forget_old(self._wall_s())

    # ---- reading

    def certificates(self) -> list[CertificateInfo]:
        """All that are known."""
        return [one.info() for one in self.book.all()]

    def names_of(self, serial: str) -> tuple[str, ...]:
        """Where the holder of this certificate may be dialled; empty: nowhere."""
        one = self.book.get(serial)
        return () if one is None else one.names

    def serials(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Serial numbers with which these nodes may speak."""
        return {name: sorted(one.serial for one in self.book.of(name, "node")) for name in names}

    def revoked_serials(self) -> list[str]:
        """Of certificates that have not ended yet."""
        now_s = self._wall_s()
        return sorted(c.serial for c in self.book.all() if c.state == "revoked" and not 0 < c.ends_at < now_s)


def _node(identity: Identity) -> str:
    return identity.name if identity.role == "node" else ""


def _refused(identity: Identity, cause: str, *, next: str = "") -> CertificateError:
    next = next or "ask the operator for a new join token"
    return CertificateError(f"the hub does not accept {identity.name}", cause=cause, next=next)
