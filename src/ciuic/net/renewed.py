"""TLS contexts of clients whose certificate may be renewed while they live.

A process reads its certificate once. When the hub refuses it, and the files on disk are other ones by now, the client
takes those up and asks again: a renewal by the agent reaches its workers that way.
"""

import ssl
import threading
from pathlib import Path

from ciuic.errors import CertificateError
from ciuic.net.tls import Purpose, client_context

Stamp = tuple[int, int, int]


class RenewableContext:
    """The context for connections that are made one after the other. For several threads."""

    def __init__(self, authority_pem: bytes, cert: Path | None, key: Path | None, purpose: Purpose) -> None:
        """Raises CertificateError when the files cannot be used."""
        self._authority_pem, self._cert, self._key, self._purpose = authority_pem, cert, key, purpose
        self._lock = threading.Lock()
        self._stamp = self._look()
        self.context = client_context(authority_pem, cert, key, purpose)

    def renewed(self, in_use: ssl.SSLContext) -> ssl.SSLContext | None:
        """A context of the files as they are now; None when `in_use` is that already, or they cannot be used."""
        with self._lock:
            stamp = self._look()
            if stamp is not None and stamp != self._stamp:
                try:
                    self.context = client_context(self._authority_pem, self._cert, self._key, self._purpose)
                except CertificateError:
                    return None  # gone: what the hub said stands
                self._stamp = stamp
            return None if self.context is in_use else self.context

    def for_peers(self) -> ssl.SSLContext:
        """The same certificate towards nodes that are dialled directly. Raises CertificateError."""
        return client_context(self._authority_pem, self._cert, self._key, "peer")

    def _look(self) -> Stamp | None:
        """What changes when the certificate's file is replaced."""
        try:
            found = self._cert.stat() if self._cert is not None else None
        except OSError:
            return None
        return None if found is None else (found.st_ino, found.st_mtime_ns, found.st_size)
