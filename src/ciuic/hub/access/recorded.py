"""Which requests go into the audit log, under which name, and what of them: names and numbers, never a secret."""

from dataclasses import dataclass

import msgspec

from ciuic.hub.access.audit import AuditRow
from ciuic.hub.access.auth import OPERATORS
from ciuic.net.messages import Role
from ciuic.net.tls import Identity

NAMED_ACTIONS = {
    ("POST", "/v1/join"): "join",
    ("GET", "/v1/backup"): "hub.backup",
    ("POST", "/v1/tokens"): "token.create",
    ("POST", "/v1/runs"): "run.submit",
    ("POST", "/v1/runs/{run}/rebalance"): "shards.move",
    ("POST", "/v1/node/renew"): "node.renew",
    ("POST", "/v1/operator/renew"): "operator.renew",
    ("POST", "/v1/shard/renew"): "shard.renew",
    ("POST", "/v1/operators"): "operator.create",
    ("POST", "/v1/certificates/revoke"): "revoke",
}
_TOLD = ("run_id", "node_id", "token_id", "name", "serial", "role", "uses", "created", "serials", "names")
"""Of the answer."""
_SILENT = frozenset({"run.submit", "node.renew", "operator.renew", "shard.renew", "operator.create"})
"""Their body is long, or a signing request: only the answer is told."""
_MOST_DETAIL = 300
_MOST_PARSED_BYTES = 65_536
_PLURALS = ("runs", "nodes", "operators", "tokens")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request for something that is kept."""

    action: str
    caller: Identity | None
    address: str
    target: str
    """What the path names."""
    wish: bytes
    """The body."""


def action_of(method: str, path: str, roles: frozenset[Role] | None) -> str:
    """What the audit log calls a request to this endpoint; empty: it is not kept.

    Everything that only operators may do and that is no question is kept, under a name made from its path.
    """
    named = NAMED_ACTIONS.get((method, path))
    if named is not None:
        return named
    if method == "GET" or roles != OPERATORS:
        return ""
    words = [word for word in path.split("/") if word and word not in ("v1", "api") and not word.startswith("{")]
    return ".".join(word[:-1] if word in _PLURALS else word for word in words)


def audit_row(asked: Asked, status: int, body: bytes) -> AuditRow:
    """Who did what, with what result. Of a body only what cannot be a secret: a stranger's (a join) is not told."""
    caller, answer, is_done = asked.caller, _parsed(body), status < 400
    error = answer.get("error")
    told = {key: answer[key] for key in _TOLD if is_done and answer.get(key) not in (None, [], ())}
    if is_done or not isinstance(error, dict):
        wish = "" if caller is None or asked.action in _SILENT else asked.wish.decode(errors="replace")
        detail = " ".join([wish[:_MOST_DETAIL], *(f"{key}={value}" for key, value in told.items())]).strip()
        result = "done" if is_done else "failed"
    else:
        detail, result = str(error.get("message", "")), str(error.get("code", ""))
    return AuditRow(
        who=caller.name if caller else str(told.get("node_id", "")),
        role=caller.role if caller else "",
        serial=caller.serial if caller else "",
        address=asked.address,
        action=asked.action,
        target=asked.target[:_MOST_DETAIL],
        result=result,
        detail=detail[: 2 * _MOST_DETAIL],
    )


def _parsed(body: bytes) -> dict[str, object]:
    if not body or len(body) > _MOST_PARSED_BYTES:
        return {}
    try:
        return msgspec.json.decode(body, type=dict[str, object])
    except msgspec.DecodeError:
        return {}
