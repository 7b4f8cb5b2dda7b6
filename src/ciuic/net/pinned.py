"""Which kind of member may answer at the other end of a connection: the hub and its shards, or a node dialled directly.

A certificate of this network's authority is not enough: nodes may have one for servers, too, with the names that they
chose. None of them can play the hub, whatever its names are.
"""

import ssl
from typing import Any

from ciuic.errors import CertificateError

HUB_SIDE: frozenset[str] = frozenset({"hub", "shard"})
NODE_SIDE: frozenset[str] = frozenset({"node"})


class PinnedContext(ssl.SSLContext):
    """A client's context that knows who may answer."""

    serving: frozenset[str] = HUB_SIDE


def check_serving(connected: "ssl.SSLSocket | ssl.SSLObject") -> None:
    """After the handshake. Raises CertificateError when what answers has another role than the context allows."""
    context = connected.context
    if not isinstance(context, PinnedContext) or context.verify_mode == ssl.CERT_NONE:
        return
    roles = _organisations(connected.getpeercert() or {})
    if len(roles) != 1 or roles[0] not in context.serving:
        found = ", ".join(roles) or "nobody"
        raise CertificateError(
            "what answers is not what was dialled",
            cause=f"its certificate is for {found}, expected: {' or '.join(sorted(context.serving))}",
            next="check the address; if it is right, something between here and there answers in its place",
        ) from ssl.SSLError(f"a certificate for {found}")


def _organisations(certificate: Any) -> list[str]:
    pairs = [pair for part in certificate.get("subject", ()) for pair in part]
    return [value for name, value in pairs if name == "organizationName"]
