"""Every certificate the hub has issued: whose it is, until when, whether it is accepted. Durable, thread-safe.

A renewed certificate is `new` until it is used for the first time; from then on the one that it replaces is refused.
So a renewal whose answer was lost, or that was not stored, locks nobody out.
"""

import sqlite3
import threading
from collections.abc import Iterable
from contextlib import ExitStack

import msgspec
from msgspec.structs import replace

from ciuic.errors import CertificateError, StorageError
from ciuic.hub.keeping.database import Database
from ciuic.net.access_messages import CertificateInfo, CertificateState
from ciuic.net.messages import Role

KEPT_S = 30 * 86400.0
"""So long after its end a certificate is forgotten: TLS itself has refused it since."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS certificates (
    serial TEXT PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL, row TEXT NOT NULL
) WITHOUT ROWID
"""


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of one."""

    serial: str
    name: str
    role: Role
    issued_at: float = 0.0
    """0: before records were kept."""
    ends_at: float = 0.0
    """0: not known."""
    names: tuple[str, ...] = ()
    """Host names and addresses in it: its holder may be dialled there."""
    replaces: str = ""
    """Serial of the one that was the proof when this one was asked for."""
    state: CertificateState = "valid"
    wants_renewal: bool = False
    """Its holder is asked to renew it, whenever it ends."""
    revoked_at: float | None = None
    revoked_by: str = ""

    def info(self) -> CertificateInfo:
        """For people."""
        return CertificateInfo(
            serial=self.serial,
            name=self.name,
            role=self.role,
            state=self.state,
            issued_at=self.issued_at,
            ends_at=self.ends_at,
            revoked_at=self.revoked_at,
            revoked_by=self.revoked_by,
        )


class CertificateBook:
    """All in memory; what changes is written before it counts."""

    def __init__(self, database: Database) -> None:
        """Raises StorageError."""
        self._database = database
        self._lock = threading.RLock()
        with database.writing() as db:
            db.execute(_SCHEMA)
        self._known: dict[str, Certificate] = {}
        for row in database.read("SELECT row FROM certificates"):
            one = _decoded(row["row"], database)
            self._known[one.serial] = one

    def get(self, serial: str) -> Certificate | None:
        """Without a lock: the event loop asks with every request."""
        return self._known.get(serial)

    def all(self) -> list[Certificate]:
        """By role and name, the oldest first."""
        with self._lock:
            return sorted(self._known.values(), key=lambda one: (one.role, one.name, one.issued_at))

    def names(self, roles: Iterable[Role]) -> set[str]:
        """Names that ever belonged to one of these roles."""
        wanted = set(roles)
        with self._lock:
            return {one.name for one in self._known.values() if one.role in wanted}

    def of(self, name: str, role: Role | None = None) -> list[Certificate]:
        """Of one name, those that are accepted."""
        with self._lock:
            return [
                one
                for one in self._known.values()
                if one.name == name and (role is None or one.role == role) and one.state in ("valid", "new")
            ]

    def put(self, *changed: Certificate, drop: Iterable[str] = (), db: sqlite3.Connection | None = None) -> None:
        """Write rows, in the caller's transaction when there is one (then it must succeed). Raises StorageError."""
        gone = list(drop)
        with self._lock, ExitStack() as stack:
            target = stack.enter_context(self._database.writing()) if db is None else db
            for one in changed:
                body = msgspec.json.encode(one).decode()
                target.execute(
                    "INSERT OR REPLACE INTO certificates VALUES (?, ?, ?, ?)", (one.serial, one.name, one.role, body)
                )
            target.executemany("DELETE FROM certificates WHERE serial = ?", [(serial,) for serial in gone])
            stack.close()  # committed: from here on it counts
            for one in changed:
                self._known[one.serial] = one
            for serial in gone:
                self._known.pop(serial, None)

    def renewed(self, new: Certificate) -> None:
        """A certificate was issued in the place of another; unused ones for the same place are forgotten.

        Raises CertificateError when the other was revoked or replaced in the meantime: the new one counts for nothing.
        """
        with self._lock:
            old = self._known.get(new.replaces)
            if old is not None and old.state not in ("valid", "new"):
                raise CertificateError(
                    f"the certificate of {new.name} is not renewed", cause=f"the one it has was {old.state}"
                )
            unused = [c.serial for c in self._known.values() if c.replaces == new.replaces and c.state == "new"]
            self.put(new, drop=unused)

    def used(self, serial: str) -> Certificate | None:
        """A `new` one was used: it is valid now, and what it replaces is not. None when it is not `new` (any more)."""
        with self._lock:
            one = self._known.get(serial)
            if one is None or one.state != "new":
                return None
            old = self._known.get(one.replaces)
            changed = [replace(one, state="valid")]
            if old is not None and old.state == "valid":
                changed.append(replace(old, state="replaced"))
            self.put(*changed)
            return changed[0]

    def revoke(self, name: str, role: Role, *, by: str, wall_s: float) -> list[str]:
        """From now on all of this name are refused, also one whose renewal is on its way; their serials."""
        with self._lock:
            found = self.of(name, role)
            changed = [replace(one, state="revoked", revoked_at=wall_s, revoked_by=by) for one in found]
            if changed:
                self.put(*changed)
            return [one.serial for one in changed]

    def forget_old(self, wall_s: float) -> None:
        """Drop what ended long ago. Raises StorageError."""
        with self._lock:
            old = [one.serial for one in self._known.values() if one.ends_at and wall_s - one.ends_at > KEPT_S]
            if old:
                self.put(drop=old)


def _decoded(text: str, database: Database) -> Certificate:
    try:
        return msgspec.json.decode(text, type=Certificate)
    except msgspec.DecodeError as error:
        raise StorageError(f"{database.path} holds a certificate that cannot be read", cause=str(error)) from error
