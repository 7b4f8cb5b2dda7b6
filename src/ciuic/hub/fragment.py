"""One fragment of a run on the hub: its machines and its files together."""

from dataclasses import dataclass

from ciuic.ledger.aggregate import Aggregator
from ciuic.ledger.inbox import Inbox
from ciuic.ledger.store import FragmentStore


@dataclass(kw_only=True)
class Fragment:
    """One fragment's machines and files."""

    aggregator: Aggregator
    inbox: Inbox
    store: FragmentStore
    snapshot_version: int = -1
    """-1: no version 0 yet."""
