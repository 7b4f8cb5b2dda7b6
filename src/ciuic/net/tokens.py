"""Join tokens: one string with everything a machine needs to join a network.

    ciuic1.<base64url of {"url", "authority_fingerprint", "id", "secret"}>

The fingerprint is what makes joining safe: the secret is sent only to a server that holds a certificate of that
authority. Treat a token like a password until its uses are spent.
"""

import base64
import binascii
import re
import secrets

import msgspec

from ciuic.errors import TokenError, UsageError
from ciuic.net.url import parse_hub_url

PREFIX = "ciuic1."
_MAX_TOKEN_CHARS = 4096
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_NEXT = "copy the whole line that `ciuic hub token create` printed, or make a new token"


class JoinToken(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The content of a join token."""

    url: str
    authority_fingerprint: str
    """SHA-256 of the authority's certificate (DER), lower-case hexadecimal."""
    id: str
    secret: str

    def __repr__(self) -> str:  # the secret must not reach a log through a traceback
        return f"JoinToken(url={self.url!r}, id={self.id!r}, secret=...)"


def new_token_secret() -> tuple[str, str]:
    """(id, secret) of a new token; the hub keeps only a hash of the secret (256 bits)."""
    return secrets.token_hex(6), secrets.token_urlsafe(32)


def make_token(*, url: str, authority_fingerprint: str, id: str, secret: str) -> str:
    """The string an operator hands over. Raises TokenError when a part is not acceptable."""
    token = JoinToken(url=url, authority_fingerprint=authority_fingerprint, id=id, secret=secret)
    _check(token)
    return PREFIX + base64.urlsafe_b64encode(msgspec.json.encode(token)).rstrip(b"=").decode("ascii")


def parse_token(text: str) -> JoinToken:
    """Read a join token. Raises TokenError when it is malformed; never shows the secret."""
    text = text.strip()
    if not text.startswith(PREFIX):
        raise TokenError("this is not a join token", cause=f"a token begins with {PREFIX}", next=_NEXT)
    if len(text) > _MAX_TOKEN_CHARS:
        raise TokenError(f"a join token of {len(text)} characters is not accepted", next=_NEXT)
    encoded = text.removeprefix(PREFIX)
    try:
        padded = encoded + "=" * (-len(encoded) % 4)
        raw = base64.b64decode(padded.encode("ascii"), altchars=b"-_", validate=True)
        token = msgspec.json.decode(raw, type=JoinToken)
    except (binascii.Error, UnicodeError, msgspec.DecodeError):
        # the cause is left out on purpose: it could quote the secret
        raise TokenError("the join token is damaged", cause="a part of it is missing or changed", next=_NEXT) from None
    _check(token)
    return token


def _check(token: JoinToken) -> None:
    try:
        parse_hub_url(token.url)
    except UsageError as error:
        raise TokenError("the join token holds no usable hub address", cause=error.message, next=_NEXT) from error
    if not _FINGERPRINT.fullmatch(token.authority_fingerprint):
        raise TokenError("the join token holds no authority fingerprint", next=_NEXT)
    if not token.id or not token.secret:
        raise TokenError("the join token holds no secret", next=_NEXT)
