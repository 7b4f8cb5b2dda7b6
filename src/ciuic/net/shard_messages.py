"""What hub and shards tell each other: which fragments are served where, what a run is like now, which entries exist.

A shard asks the hub for its view by long poll and reports what it did; both may be repeated, by either side, after any
restart. Frames (pushes, entries, snapshots) go between nodes and shards as between nodes and the hub.
"""

from typing import Any, Literal

import msgspec

from ciuic.ledger.entry import EntryHeader
from ciuic.ledger.settings import Settings


class ShardMessage(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Base of the messages between hub and shards."""


class RunView(ShardMessage):
    """What a fragment must know of its run to accept pushes and close rounds, wherever it is served."""

    members: dict[str, int] = {}
    """Present incarnation of every node that ever took its place."""
    away: list[str] = []
    """Those of them that left: they push no more before they attach again."""
    expected: list[str] = []
    """Nodes whose push a round waits for."""
    behind: dict[str, list[int]] = {}
    """Nodes without samples that have not pushed all they trained: the fragments whose rounds wait for them too."""
    at_work: int = 0
    """How many nodes train."""
    settings: Settings = Settings()
    intervals: dict[str, int] = {}
    """Steps per push of each node."""
    stretches: list[int] = []
    """Of each fragment: intervals between two pushes of it; empty: 1."""
    epoch: int = 0
    total_samples: int = 0
    samples_committed: int = 0
    uploaders: list[str] = []
    """Nodes that were told to upload version 0."""
    sealed: bool = False
    """Every sample is committed and nobody has progress left: what waits is merged, nothing more is accepted."""

    @property
    def fewest(self) -> int:
        """At least so many nodes push before a round is complete."""
        return len(self.expected)


class FragmentPlace(ShardMessage):
    """Who serves a fragment."""

    fragment: int
    shard: str
    """Empty: the hub itself."""
    generation: int
    """Grows with each move."""
    url: str = ""
    move_to: str = ""
    """The shard that fetches it now; its owner takes no pushes and closes no rounds meanwhile."""
    attempt: str = ""
    """Names this move."""
    is_frozen: bool = False
    """Its owner has said that it stands still: it may be fetched."""


class RunPart(ShardMessage):
    """One run as a shard sees it."""

    run_id: str
    view: RunView
    places: list[FragmentPlace]


class RenewRequest(ShardMessage):
    """A shard wants a new certificate: its old one ends soon, or nodes reach it at another address."""

    csr_pem: str
    names: list[str]


class RenewReply(ShardMessage):
    certificate_pem: str


class ShardPoll(ShardMessage):
    """A shard asks for what it should do; the hub holds the answer while nothing changes, for up to `wait_s`."""

    url: str
    """Where nodes reach this shard."""
    known: str = ""
    """`number` of the view it has."""
    wait_s: float = 0.0


class ShardView(ShardMessage):
    """All that a shard has to know."""

    number: str
    """Names this content."""
    runs: list[RunPart] = []
    serials: dict[str, list[str]] = {}
    """Serial numbers of the certificates with which nodes may speak; two while one is being renewed."""
    revoked: list[str] = []
    """Serial numbers of certificates that nobody may use any more."""
    renew: bool = False
    """This shard should renew its certificate now."""


class ShardLine(ShardMessage):
    """One line for the story of a run."""

    kind: str
    text: str
    node_id: str = ""


class FragmentReport(ShardMessage):
    """What a shard did with a fragment. `fetched`: the copy is whole and durable, not served yet."""

    run_id: str
    fragment: int
    generation: int
    state: Literal["serving", "frozen", "fetched"]
    version: int
    digest: str
    snapshot_version: int
    snapshot_bytes: int
    waiting: int
    """Accepted pushes that wait for their round."""
    attempt: str = ""
    """Of the move that it is part of."""
    touched: float = 1.0
    """Share of the fragment that a push moves."""
    access: float | None = None
    """How many experts of the fragment a token reaches; None: not known."""
    sealed: bool = False
    """It has seen that the run is complete, and nothing waits any more."""
    headers: list[tuple[EntryHeader, int]] = []
    """Of the next entries that the hub does not know, with the bytes of their frames."""
    lines: list[ShardLine] = []
    spoke: list[str] = []
    """Nodes that pushed since the last report."""


class ShardReport(ShardMessage):
    fragments: list[FragmentReport]


class KnownVersion(ShardMessage):
    """How far the hub knows the entries of a fragment; -1: it knows nothing of this fragment here."""

    run_id: str
    fragment: int
    version: int


class ShardReply(ShardMessage):
    known: list[KnownVersion]


class ShardRun(ShardMessage):
    """What a shard needs once to serve fragments of a run."""

    job: dict[str, Any]
    layout: dict[str, Any]


class MovedFile(ShardMessage):
    name: str
    """Relative to the fragment's folder."""
    size_bytes: int


class MovedFiles(ShardMessage):
    """What there is to copy of a frozen fragment."""

    files: list[MovedFile]


class PlacesReply(ShardMessage):
    """Where nodes reach the fragments of a run, in order; empty: at the hub."""

    urls: list[str]


class FragmentLoad(ShardMessage):
    """Measured traffic of one fragment."""

    fragment: int
    shard: str
    elements: int
    pushes_per_s: float
    push_bytes_per_s: float
    entry_bytes_per_s: float
    """Of entries as they leave: once for each node at work."""
    touched: float = 1.0
    """Share of the fragment that a push moves, averaged over the latest ones: rows and experts in use."""
    moving_to: str = ""
    planned_shard: str = ""
    """Where it is after the moves; empty: the hub."""
    experts: str = ""
    """Which experts it holds, like `experts 0-3`."""
    access_share: float | None = None
    """Of all accesses of tokens to experts, those to its experts; None: not known."""
    stretch: int = 1
    """Intervals between two pushes of it."""


class ShardLoad(ShardMessage):
    """One place and what it carries."""

    name: str
    """Empty: the hub."""
    url: str = ""
    is_present: bool = True
    fragments: list[int] = []
    pushes_per_s: float = 0.0
    bytes_per_s: float = 0.0


class ShardsInfo(ShardMessage):
    """Load per place, as it is and as it would be after the moves."""

    run_id: str
    places: list[ShardLoad]
    planned: list[ShardLoad] = []
    moves: list[tuple[int, str]] = []
    """(fragment, to which shard)."""
    fragments: list[FragmentLoad] = []
