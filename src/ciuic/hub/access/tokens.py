"""Join tokens: made by an operator, used once or several times, kept only as the hash of their secret.

A secret is 256 random bits, so a plain SHA-256 protects it: there is nothing to guess. An unknown token and a wrong
secret look the same to the caller. A join whose answer was lost may be repeated with the same signing request: it gets
the same certificate and costs no further use.
"""

import hashlib
import hmac
import sqlite3

import msgspec

from ciuic.errors import NotFoundError, TokenError, UsageError
from ciuic.hub.keeping.database import Database
from ciuic.net.access_messages import TokenInfo
from ciuic.net.messages import CreateTokenRequest, JoinReply, JoinRequest, Role
from ciuic.net.tokens import new_token_secret

MAX_LIFETIME_S = 366 * 86400.0
MAX_USES = 10_000


class NewToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token just made; the only time its secret is known here."""

    token_id: str
    secret: str
    expires_at: float
    uses: int


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """A join request that may enter."""

    token_id: str
    role: Role
    request_sha256: bytes
    name: str = ""
    """Set, with `certificate_pem`, when this very request was granted before."""
    certificate_pem: str = ""


class TokenBook:
    """The tokens of one hub. Thread-safe as far as the database is; redeeming happens in the caller's transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, request: CreateTokenRequest, *, wall_s: float) -> NewToken:
        """Make and store a token. Raises UsageError for a senseless lifetime or number of uses."""
        if not 1.0 <= request.lifetime_s <= MAX_LIFETIME_S:
            raise UsageError(f"a token cannot live for {request.lifetime_s:.0f} s", next="choose 1 s to 366 days")
        if not 1 <= request.uses <= MAX_USES:
            raise UsageError(f"a token cannot have {request.uses} uses", next=f"choose 1 to {MAX_USES}")
        token_id, secret = new_token_secret()
        expires_at = wall_s + request.lifetime_s
        made = NewToken(token_id=token_id, secret=secret, expires_at=expires_at, uses=request.uses)
        with self._database.writing() as db:
            db.execute(
                "INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?)",
                (made.token_id, _hashed(made.secret), request.role, made.uses, wall_s, made.expires_at),
            )
        return made

    def open_tokens(self, *, wall_s: float) -> list[TokenInfo]:
        """Those with which somebody may still join, the oldest first; never their secrets."""
        rows = self._database.read(
            "SELECT * FROM tokens WHERE uses_left > 0 AND expires_at > ? ORDER BY created_at", (wall_s,)
        )
        return [
            TokenInfo(
                token_id=row["token_id"],
                role=row["role"],
                uses_left=row["uses_left"],
                created_at=row["created_at"],
                expires_at=row["expires_at"],
            )
            for row in rows
        ]

    def revoke(self, token_id: str) -> None:
        """Nobody may join with it from now on. Raises NotFoundError, StorageError."""
        with self._database.writing() as db:
            changed = db.execute("UPDATE tokens SET uses_left = 0 WHERE token_id = ? AND uses_left > 0", (token_id,))
        if changed.rowcount != 1:
            raise NotFoundError(
                f"there is no open token {token_id[:40]!r}", next="list them with: ciuic hub token list"
            )

    def check(self, request: JoinRequest, *, wall_s: float) -> Admission:
        """May this request enter? Raises TokenError; its text does not tell an unknown token from a wrong secret."""
        rows = self._database.read("SELECT * FROM tokens WHERE token_id = ?", (request.token_id,))
        known = rows[0]["secret_sha256"] if rows else bytes(32)
        if not hmac.compare_digest(known, _hashed(request.secret)) or not rows:
            raise TokenError(
                "the join token is not valid at this hub",
                cause="it is mistyped, or this hub never made it",
                next="ask the operator for a new one: ciuic hub token create",
            )
        wanted = hashlib.sha256(f"{request.location}\n{request.csr_pem}".encode()).digest()
        before = self._database.read(
            "SELECT name, certificate_pem FROM joins WHERE token_id = ? AND request_sha256 = ?",
            (request.token_id, wanted),
        )
        granted = {"name": before[0]["name"], "certificate_pem": before[0]["certificate_pem"]} if before else {}
        if not before:
            _check_open(rows[0], wall_s)
        return Admission(token_id=request.token_id, role=rows[0]["role"], request_sha256=wanted, **granted)

    def redeem(self, db: sqlite3.Connection, admission: Admission, reply: JoinReply) -> None:
        """Inside the transaction that stores the newcomer: count the use and remember the answer."""
        used = db.execute(
            "UPDATE tokens SET uses_left = uses_left - 1 WHERE token_id = ? AND uses_left > 0", (admission.token_id,)
        )
        if used.rowcount != 1:
            raise _used_up()
        db.execute(
            "INSERT INTO joins VALUES (?, ?, ?, ?)",
            (admission.token_id, admission.request_sha256, reply.node_id, reply.certificate_pem),
        )


def _check_open(row: sqlite3.Row, wall_s: float) -> None:
    if row["uses_left"] < 1:
        raise _used_up()
    if wall_s >= row["expires_at"]:
        raise TokenError(
            "the join token has expired",
            cause=f"its lifetime ended {wall_s - row['expires_at']:.0f} s ago",
            next="ask the operator for a new one: ciuic hub token create",
        )


def _used_up() -> TokenError:
    return TokenError(
        "the join token is used up",
        cause="as many nodes joined with it as it allows",
        next="ask the operator for a new one: ciuic hub token create --uses N",
    )


def _hashed(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
