"""What operators and hub tell each other about backups, rebuilt runs, retention and disk use."""

import msgspec


class Message(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Base of these messages."""


class Collected(Message):
    """POST /v1/gc: what was forgotten."""

    events: int = 0
    log_lines: int = 0
    ledgers: list[str] = []
    """Finished runs of which only the last snapshot is left."""
    freed_bytes: int = 0


class Removed(Message):
    """DELETE /v1/runs/{run}."""

    run_id: str
    freed_bytes: int


class DiskUse(Message):
    """What the hub's files take."""

    database_bytes: int = 0
    runs: dict[str, int] = {}
    """Bytes by run."""


class RebuiltReply(Message):
    """PUT /v1/rebuild: a run made from a node's copy of its ledger."""

    run_id: str
    node_id: str
    """Whose copy."""
    versions: list[int]
    digests: list[str]
    committed: int
    total: int
    samples_known: bool
    """False: which samples were committed was not in the copy; all are trained again."""
    lost: list[str]
    """What could not be rebuilt, one sentence each."""
