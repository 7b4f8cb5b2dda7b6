"""Every error Ciuic raises on purpose, one class per code.

    CiuicError
    ├── UsageError            what a person typed or configured        exit 2
    │   └── JobFileError          a job file with one or more problems
    ├── AccessError           who may do what                          exit 3
    ├── UnreachableError      the hub cannot be reached                exit 4
    ├── ProtocolError         bytes from outside that are not accepted exit 5
    │   └── FrameError, LayoutMismatchError, DigestMismatchError, NonFiniteError ...
    ├── StorageError          the ledger's files                       exit 6
    └── RunFailedError        a run, a node or a worker failed         exit 7

Each error carries a `code` (its docs page is docs/codes/<code>.md), a `message` (what), a `cause` (why) and a
`next` (what to do now). `render_error` prints the three lines; `error_to_dict` gives what `--json` prints.
"""

from typing import ClassVar


class CiuicError(Exception):
    """Base of the tree. Use a subclass that has its own code."""

    code: ClassVar[str] = "CIUIC-000"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, cause: str = "", next: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.cause = cause
        self.next = next

    def __str__(self) -> str:
        parts = [self.message]
        if self.cause:
            parts.append(f"cause: {self.cause}")
        if self.next:
            parts.append(f"next: {self.next}")
        return "; ".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.cause, self.next), self.__dict__)


def _rebuild(kind: type[CiuicError], message: str, cause: str, next: str) -> CiuicError:
    return kind(message, cause=cause, next=next)


# ---- 1xx: what a person typed or configured ------------------------------------------------------------------------


class UsageError(CiuicError):
    """A command was used in a way that cannot work."""

    code = "CIUIC-100"
    exit_code = 2


class JobFileError(UsageError):
    """A job has one or more problems; `problems` lists them all."""

    code = "CIUIC-101"

    def __init__(self, message: str, *, problems: tuple[str, ...] = (), cause: str = "", next: str = "") -> None:
        super().__init__(message, cause=cause, next=next)
        self.problems = problems


class ModelError(UsageError):
    """The model or its configuration cannot be loaded."""

    code = "CIUIC-102"


class DataError(UsageError):
    """The data set cannot be read or is too small."""

    code = "CIUIC-103"


class TrainingLoopError(UsageError):
    """A training loop uses `run.prepare` in a way that cannot be synchronised."""

    code = "CIUIC-104"


class NotInRunError(UsageError):
    """`ciuic.join()` was called outside a run and without a hub."""

    code = "CIUIC-105"


class CodecUnavailableError(UsageError):
    """A codec is unknown or cannot run here; full precision is never used silently instead."""

    code = "CIUIC-106"


class DoubleSyncError(UsageError):
    """The same gradients would be synchronised twice."""

    code = "CIUIC-107"


# ---- 2xx: who may do what ------------------------------------------------------------------------------------------


class AccessError(CiuicError):
    """The hub does not know the caller, or the caller may not do this."""

    code = "CIUIC-200"
    exit_code = 3


class TokenError(AccessError):
    """A join token is malformed, wrong, used up or expired."""

    code = "CIUIC-201"


class CertificateError(AccessError):
    """A certificate is missing, expired, revoked or from another authority."""

    code = "CIUIC-202"


class RoleError(AccessError):
    """The caller is known but its role does not allow this."""

    code = "CIUIC-203"


class CodeNotAllowedError(AccessError):
    """A job brings its own code and this node did not allow that."""

    code = "CIUIC-204"


# ---- 3xx: the hub cannot be reached --------------------------------------------------------------------------------


class UnreachableError(CiuicError):
    """The hub did not answer."""

    code = "CIUIC-300"
    exit_code = 4


class OverloadedError(UnreachableError):
    """The hub answers, but takes no more from this caller now: wait and ask again."""

    code = "CIUIC-301"


# ---- 4xx: bytes from outside that are not accepted -----------------------------------------------------------------


class ProtocolError(CiuicError):
    """A message does not follow the protocol."""

    code = "CIUIC-400"
    exit_code = 5


class FrameError(ProtocolError):
    """A push, entry or snapshot is truncated, bit-flipped, oversized or of another format."""

    code = "CIUIC-401"


class LayoutMismatchError(ProtocolError):
    """Two sides do not have the same parameters; the first that differs is named."""

    code = "CIUIC-402"


class DigestMismatchError(ProtocolError):
    """A base, an entry or a chain of entries does not have the digest it should have."""

    code = "CIUIC-403"


class NonFiniteError(ProtocolError):
    """A push holds an infinity or a NaN; the parameter is named."""

    code = "CIUIC-404"


class SupersededError(ProtocolError):
    """A newer process of the same node has taken over; the older one must stop."""

    code = "CIUIC-405"


class NotFoundError(ProtocolError):
    """There is no such run, node or version."""

    code = "CIUIC-406"


class ConflictError(ProtocolError):
    """The request is valid but not in the present state."""

    code = "CIUIC-407"


class MovedError(ProtocolError):
    """A fragment is served somewhere else, or will be in a moment: ask the hub where, and try again."""

    code = "CIUIC-408"


# ---- 5xx: the ledger's files ---------------------------------------------------------------------------------------


class StorageError(CiuicError):
    """The hub or a node cannot read or write its files."""

    code = "CIUIC-500"
    exit_code = 6


class LedgerDamagedError(StorageError):
    """The entry log or a snapshot is damaged in a place that a crash cannot explain."""

    code = "CIUIC-501"


# ---- 6xx: a run, a node or a worker failed -------------------------------------------------------------------------


class RunFailedError(CiuicError):
    """A run ended without success."""

    code = "CIUIC-600"
    exit_code = 7


class CannotCatchUpError(RunFailedError):
    """A node's link is slower than the ledger of its run grows; it is set aside."""

    code = "CIUIC-603"


class RankMissingError(RunFailedError):
    """A rank did not come to a decision that all ranks take together; it is named."""

    code = "CIUIC-604"


class CheckFailedError(RunFailedError):
    """A self-check (`ciuic node check`, `ciuic doctor preflight`, the demo's verdict) did not hold."""

    code = "CIUIC-602"


def all_error_classes() -> list[type[CiuicError]]:
    """Every error class, base first, each once."""
    found: list[type[CiuicError]] = [CiuicError]
    for kind in found:
        found.extend(sub for sub in kind.__subclasses__() if sub not in found)
    return found


def render_error(error: CiuicError) -> str:
    """The lines a person reads: error, cause, next (empty ones left out)."""
    lines = [f"error[{error.code}]: {error.message}"]
    if isinstance(error, JobFileError):
        lines += [f"  {problem}" for problem in error.problems]
    if error.cause:
        lines.append(f"cause: {error.cause}")
    if error.next:
        lines.append(f"next: {error.next}")
    return "\n".join(lines)


def error_to_dict(error: CiuicError) -> dict[str, object]:
    """The same for machines: {code, message, cause, next} and, for a job file, problems."""
    body: dict[str, object] = {
        "code": error.code,
        "message": error.message,
        "cause": error.cause,
        "next": error.next,
    }
    if isinstance(error, JobFileError):
        body["problems"] = list(error.problems)
    return body


def error_from_dict(body: dict[str, object]) -> CiuicError:
    """Rebuild an error that came over the wire; an unknown code becomes a plain CiuicError with the code named."""
    kinds = {kind.code: kind for kind in all_error_classes()}
    code = str(body.get("code", ""))
    kind = kinds.get(code)
    message, cause, next_ = str(body.get("message", "")), str(body.get("cause", "")), str(body.get("next", ""))
    if kind is None:
        return CiuicError(f"{message} ({code})", cause=cause, next=next_)
    if issubclass(kind, JobFileError):
        raw = body.get("problems")
        problems = tuple(str(p) for p in raw) if isinstance(raw, list) else ()
        return kind(message, problems=problems, cause=cause, next=next_)
    return kind(message, cause=cause, next=next_)
