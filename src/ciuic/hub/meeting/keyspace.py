"""The key-value store of one generation of a group: what torch.distributed.TCPStore would hold, with limits.

Pure: no sockets, no clock. Semantics are those of TCPStore (counters are decimal texts, an expected value of b"" means
"not there").
"""

from collections import OrderedDict
from dataclasses import dataclass

from ciuic.errors import ConflictError, ProtocolError
from ciuic.net.store_messages import StoreCall, StoreReply
from ciuic.units import format_bytes

REPLIES_KEPT = 32
"""Per member; a process has at most a few calls on their way."""
MISSING_SHOWN = 3
_ONCE = ("add", "append", "compare_set", "delete")
"""Operations that must not be done twice when their answer was lost."""
_INT64 = 2**63
_ONE_KEY = {"add": 0, "append": 1, "compare_set": 2, "delete": 0}
"""Operations on one key, and how many values they take."""


@dataclass(frozen=True, kw_only=True)
class SpaceLimits:
    """What one generation may hold."""

    keys: int = 50_000
    key_bytes: int = 1024
    value_bytes: int = 512 * 1024
    total_bytes: int = 16 * 1024 * 1024


class Keyspace:
    """Keys and values; one caller at a time."""

    def __init__(self, limits: SpaceLimits) -> None:
        self._limits = limits
        self._values: dict[str, bytes] = {}
        self._replies: dict[str, OrderedDict[int, StoreReply]] = {}
        self.size_bytes = 0
        """Keys and values together."""

    def apply(self, call: StoreCall) -> StoreReply:
        """Do one operation; status `missing` when keys that it needs are not there yet.

        Raises ProtocolError for a malformed call and ConflictError when a limit would be passed; nothing changes then.
        """
        self._check(call)
        known = self._replies.get(call.member)
        if known is not None and call.request in known:
            return known[call.request]
        reply = self._apply(call)
        if call.operation in _ONCE:
            kept = self._replies.setdefault(call.member, OrderedDict())
            kept[call.request] = reply
            while len(kept) > REPLIES_KEPT:
                kept.popitem(last=False)
        return reply

    def _apply(self, call: StoreCall) -> StoreReply:
        values = self._values
        match call.operation:
            case "set":
                self._store(dict(zip(call.keys, call.values, strict=True)))
                return StoreReply()
            case "get" | "wait":
                missing = [key for key in call.keys if key not in values]
                if missing:
                    return StoreReply(status="missing", missing=tuple(missing[:MISSING_SHOWN]))
                return StoreReply(values=tuple(values[key] for key in call.keys) if call.operation == "get" else ())
            case "check":
                return StoreReply(number=int(all(key in values for key in call.keys)))
            case "count":
                return StoreReply(number=len(values))
            case "delete":
                return StoreReply(number=int(self._delete(call.keys[0])))
            case "add":
                return StoreReply(number=self._add(call.keys[0], call.amount))
            case "append":
                self._store({call.keys[0]: values.get(call.keys[0], b"") + call.values[0]})
                return StoreReply()
            case "compare_set":
                return StoreReply(values=(self._compare_set(call.keys[0], *call.values),))

    def _add(self, key: str, amount: int) -> int:
        text = self._values.get(key, b"0")
        try:
            total = int(text) + amount
        except ValueError as error:
            raise ProtocolError(f"{key!r} does not hold a number", cause=f"it holds {text[:40]!r}") from error
        if not -_INT64 <= total < _INT64:
            raise ProtocolError(f"{key!r} would not fit into 64 bits")
        self._store({key: str(total).encode()})
        return total

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """As TCPStore: a missing key is set when nothing is expected, and otherwise the expected value comes back."""
        present = self._values.get(key)
        if present is None and expected:
            return expected
        if present is not None and present != expected:
            return present
        self._store({key: desired})
        return desired

    def _delete(self, key: str) -> bool:
        value = self._values.pop(key, None)
        if value is None:
            return False
        self.size_bytes -= _size(key, value)
        return True

    def _store(self, changes: dict[str, bytes]) -> None:
        limits, growth, added = self._limits, 0, 0
        for key, value in changes.items():
            if len(value) > limits.value_bytes:
                raise ConflictError(
                    f"the value of {key!r} is too large for the store",
                    cause=f"it has {format_bytes(len(value))}, the limit is {format_bytes(limits.value_bytes)}",
                    next="the store is for addresses and counters; move data with collectives",
                )
            before = self._values.get(key)
            growth += _size(key, value) - (_size(key, before) if before is not None else 0)
            added += before is None
        if len(self._values) + added > limits.keys:
            raise _full(f"it may hold {limits.keys} keys")
        if growth > 0 and self.size_bytes + growth > limits.total_bytes:
            raise _full(f"it may hold {format_bytes(limits.total_bytes)}")
        self._values.update(changes)
        self.size_bytes += growth

    def _check(self, call: StoreCall) -> None:
        expected = _ONE_KEY.get(call.operation)
        shape_ok = (
            len(call.keys) == 1 and len(call.values) == expected
            if expected is not None
            else len(call.values) == (len(call.keys) if call.operation == "set" else 0)
        )
        if not shape_ok:
            raise ProtocolError(
                f"{call.operation} does not take {len(call.keys)} keys and {len(call.values)} values",
                next="use the same version of ciuic on both sides",
            )
        for key in call.keys:
            if len(key.encode()) > self._limits.key_bytes:
                raise ProtocolError(
                    f"a key of {len(key.encode())} bytes is not accepted", cause=f"at most {self._limits.key_bytes} are"
                )


def _size(key: str, value: bytes) -> int:
    return len(key.encode()) + len(value)


def _full(cause: str) -> ConflictError:
    return ConflictError("the store of this group is full", cause=cause, next="delete keys that are done with")
