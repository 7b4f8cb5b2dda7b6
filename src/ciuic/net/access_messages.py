"""Messages about certificates and the audit log, between the hub and who holds a certificate."""

from typing import Literal

from ciuic.net.messages import Message, Role

CertificateState = Literal["valid", "new", "replaced", "revoked"]
"""new: a renewed one that was not used yet; replaced: its renewed one was used."""


class CertificateRequest(Message):
    """A new certificate under the same name; the present one is the proof."""

    csr_pem: str
    """P-256 certificate signing request; the hub chooses the subject."""
    names: tuple[str, ...] = ()
    """Of a node: host names and addresses by which other nodes may dial it; empty: nobody does."""


class CertificateReply(Message):
    certificate_pem: str
    names: tuple[str, ...] = ()
    """What the certificate is for besides the role."""


class OperatorRequest(Message):
    """A certificate for another person or program that looks at, or operates, the hub."""

    name: str
    role: Literal["viewer", "operator"]
    csr_pem: str


class OperatorReply(Message):
    name: str
    """As asked for, or with a number when that is taken."""
    serial: str
    certificate_pem: str
    url: str
    """Where the hub is reached."""


class CertificateInfo(Message):
    """One certificate that this hub issued."""

    serial: str
    name: str
    role: Role
    state: CertificateState
    issued_at: float
    """0: before the hub kept records."""
    ends_at: float
    revoked_at: float | None = None
    revoked_by: str = ""


class TokenInfo(Message):
    """A join token that is still good; its secret is known to nobody here."""

    token_id: str
    role: Role
    uses_left: int
    created_at: float
    expires_at: float


class RevokeRequest(Message):
    """From now on no certificate of this name is accepted."""

    name: str
    role: Role | None = None
    """Needed when the name belongs to several."""


class RevokeReply(Message):
    name: str
    role: Role
    serials: list[str]


class RotateRequest(Message):
    """A new certificate of the hub itself; with `clients` everybody is told to renew theirs too."""

    clients: bool = False


class RotateReply(Message):
    serial: str
    ends_at: float
    told: int = 0
    """How many certificates are to be renewed."""


class AuditPage(Message):
    """A part of the audit log."""

    lines: list[dict[str, str | int | float]]
    broken_at: int | None = None
    """The first row that was changed or taken out since it was written; None: all is as it was written."""
