"""Renewing a node's certificate when the hub asks for it: by the hub's clock, long before the old one ends.

The new key and certificate are first written to one file, `renewed.pem`, so that a crash at any moment leaves a pair
that fits: what it holds is put in its place at the next start. The old certificate is accepted until the new one was
used once; connections with the old one then take up the new files by themselves (net/renewed).
"""

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ciuic.errors import CertificateError, CiuicError, StorageError
from ciuic.net.access_messages import CertificateReply, CertificateRequest
from ciuic.net.client import HubClient
from ciuic.net.names import plain_name
from ciuic.net.tls import certificate_names, check_issued, new_key_and_csr, write_private_file
from ciuic.node.identity import NodeIdentity

PAUSE_S = 60.0
"""Between two attempts."""
TIMEOUT_S = 20.0
PENDING = "renewed.pem"
_KEY_BEGINS = b"-----BEGIN PRIVATE KEY-----"
_log = logging.getLogger(__name__)


def renew_identity(identity: NodeIdentity, url: str, names: Sequence[str] = ()) -> None:
    """Get, keep and use a new certificate; `names`: by which other nodes may dial this one.

    Raises CertificateError, UnreachableError, StorageError.
    """
    authority = identity.authority.read_bytes()
    key_pem, csr_pem = new_key_and_csr()
    client = HubClient(url, authority, identity.cert, identity.key, "control", TIMEOUT_S)
    try:
        request = CertificateRequest(csr_pem=csr_pem.decode("ascii"), names=tuple(names))
        issued = client.call("POST", "/v1/node/renew", request, CertificateReply).certificate_pem.encode()
    finally:
        client.close()
    found = check_issued(issued, authority_pem=authority, key_pem=key_pem)
    if found.name != identity.node_id:
        raise CertificateError(f"the hub calls us {identity.node_id} but issued a certificate for {found.name}")
    write_private_file(identity.folder / PENDING, issued + key_pem)
    finish_renewal(identity.folder)
    fresh = HubClient(url, authority, identity.cert, identity.key, "control", TIMEOUT_S)
    try:
        fresh.fetch("/v1/node/probe?bytes=0")  # used once: from now on nobody else can use the old one
    finally:
        fresh.close()


def finish_renewal(folder: Path) -> bool:
    """Put what a renewal has written in its place, also after a crash; whether there was any. Raises StorageError."""
    pending = folder / PENDING
    try:
        body = pending.read_bytes() if pending.exists() else b""
        certificate, begins, rest = body.partition(_KEY_BEGINS)
        if begins:
            write_private_file(folder / "node.key", begins + rest)
            write_private_file(folder / "node.pem", certificate)
        pending.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{pending} cannot be read", cause=str(error), next="check the disk") from error
    return bool(body)


class Renewal:
    """One attempt at a time, in a thread of its own; the agent's other work goes on."""

    def __init__(self, identity: NodeIdentity, url: str, names: Sequence[str] = ()) -> None:
        self._identity, self._url, self._names = identity, url, names
        self._thread: threading.Thread | None = None
        self._next_s = 0.0

    def ask(self) -> None:
        """The hub wants the certificate renewed. Called with every beat for as long as it does."""
        is_running = self._thread is not None and self._thread.is_alive()
        if is_running or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + PAUSE_S
        self._thread = threading.Thread(target=self._renew, name="ciuic-renewal", daemon=True)
        self._thread.start()

    @property
    def is_wanted(self) -> bool:
        """The certificate is for other names than this node is to be dialled by."""
        try:
            names = certificate_names(self._identity.cert.read_bytes())
        except (OSError, CertificateError):
            return False  # whatever is wrong with it is told where it is used
        return set(names) != {plain_name(name) for name in self._names}

    def stop(self) -> None:
        """Wait for an attempt that is on its way: it must not be cut between two files."""
        if self._thread is not None:
            self._thread.join()

    def _renew(self) -> None:
        try:
            renew_identity(self._identity, self._url, self._names)
            _log.info("node %s has a new certificate", self._identity.node_id)
        except CiuicError as error:
            _log.warning("the certificate cannot be renewed now: %s; trying again, the old one holds", error.message)
        except OSError as error:
            _log.warning("the certificate cannot be renewed now: %s; trying again, the old one holds", error)
