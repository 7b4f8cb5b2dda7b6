"""The parameter server inside one process: an aggregator, an inbox with the `async` policy, and the entries so far."""

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from ciuic.codec import FragmentCodec
from ciuic.errors import ConflictError, UsageError
from ciuic.ledger.aggregate import Aggregator, Facts
from ciuic.ledger.entry import Entry, Push, PushHeader
from ciuic.ledger.inbox import Inbox, Policy
from ciuic.ledger.outer import OuterOptimizer
from ciuic.parameter_server.arrays import Delta, Float, flatten, layout_of, model_state, split

KEPT_ENTRIES = 1024
"""Nodes further behind than this many versions load all parameters again."""
CODEC = "none"
"""Nothing travels in one process: fp32."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How pushes move the parameters."""

    outer_lr: float = 1.0
    momentum: float = 0.0
    delay: int = 1
    """Pushes between two steps of the momentum (Delayed Nesterov, arXiv 2401.09135)."""
    max_staleness: int = 4
    """An update whose base is older than so many rounds is refused; W nodes make W versions in a round."""

    def __post_init__(self) -> None:
        if not (self.outer_lr > 0 and 0 <= self.momentum < 1 and self.delay >= 1 and self.max_staleness >= 0):
            raise UsageError(
                "this parameter server cannot be",
                cause=f"outer_lr {self.outer_lr}, momentum {self.momentum}, delay {self.delay}, "
                f"max_staleness {self.max_staleness}",
                next="outer_lr > 0, momentum in [0, 1), delay >= 1, max_staleness >= 0",
            )


class LocalLedger:
    """Thread-safe; every method returns when it is done."""

    def __init__(self, source: Any, rule: Rule) -> None:
        """Raises UsageError, NonFiniteError."""
        state = model_state(source)
        self.layout = layout_of(state)
        outer = OuterOptimizer(lr=rule.outer_lr, momentum=rule.momentum, delay=rule.delay)
        self._aggregator = Aggregator(self.layout, 0, (CODEC, CODEC), outer)
        base = flatten(self.layout, state, whole=True)
        self._aggregator.check_finite(base, "the model")
        self._aggregator.initialize(base)
        self._codec = FragmentCodec(CODEC, self.layout.fragment_shape(0))
        self._inbox = Inbox(Policy(kind="async", max_staleness=rule.max_staleness))
        self._entries: deque[Entry] = deque(maxlen=KEPT_ENTRIES)
        self._sequences: dict[str, int] = {}
        self._pulled: dict[str, int] = {}
        self._nodes: set[str] = set()
        self._digest = self.layout.digest
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        return self._aggregator.version

    @property
    def digest(self) -> str:
        """Of the present parameters."""
        return self._aggregator.digest

    @property
    def node_versions(self) -> dict[str, int]:
        with self._lock:
            return dict(self._pulled)

    @property
    def params(self) -> dict[str, Float]:
        """A copy of the present parameters."""
        with self._lock:
            return split(self.layout, self._aggregator.base.copy())

    def push(self, node: str, update: Any, sequence: int | None, base_version: int | None, tokens: int) -> int:
        """Merge an update; returns the version. Raises ConflictError, NonFiniteError, UsageError."""
        flat = flatten(self.layout, update, whole=False)
        with self._lock:
            self._nodes.add(node)
            newest = self._sequences.get(node, 0)
            if sequence is not None and sequence <= newest:
                return self.version  # it was sent again
            header = PushHeader(
                run="parameter-server",
                node=node,
                incarnation=1,
                sequence=newest + 1 if sequence is None else sequence,
                fragment=0,
                base_version=self._pulled.get(node, 0) if base_version is None else base_version,
                epoch=0,
                tokens=tokens,
                codec=CODEC,
                layout_digest=self._digest,
            )
            push = Push(header=header, payload=self._codec.encode(flat))
            self._check(push)
            self._merge(push)
            return self.version

    def _check(self, push: Push) -> None:
        header, version = push.header, self.version
        if header.base_version > version:
            raise ConflictError(
                f"the update of {header.node} is based on version {header.base_version}, there is only {version}",
                cause="the server was restored from an older copy, or base_version is wrong",
                next="load the parameters again",
            )
        limit = self._inbox.policy.staleness_limit(len(self._nodes))
        if version - header.base_version > limit:
            raise ConflictError(
                f"the update of {header.node} is {version - header.base_version} versions behind",
                cause=f"at most {limit} are accepted; nothing was merged",
                next="pull_update first, then push again",
            )
        self._aggregator.check(push)

    def _merge(self, push: Push) -> None:
        aggregator, inbox, version = self._aggregator, self._inbox, self.version
        inbox.add(push, time.monotonic(), late=False)
        try:
            pushes, rejected = inbox.select(version, len(self._nodes))
            facts = Facts(
                run=push.header.run,
                time=time.time(),
                why="pushed",
                weights=inbox.weights(pushes, version, len(self._nodes)),
            )
            candidate = aggregator.close(pushes, rejected, facts)
        finally:
            inbox.settle([push.key])
        aggregator.commit(candidate)
        self._entries.append(candidate.entry)
        self._sequences[push.header.node] = push.header.sequence

    def pull(self, node: str) -> Delta | None:
        """What is new for this node, which then has it; None when nothing is."""
        with self._lock:
            self._nodes.add(node)
            have = self._pulled.get(node, 0)
            if have == self.version:
                self._pulled[node] = have
                return None
            delta = self._delta(have)
            self._pulled[node] = delta.to_version
            return delta

    def delta(self, from_version: int) -> Delta:
        """The entries after a version. Raises ConflictError."""
        with self._lock:
            return self._delta(from_version)

    def _delta(self, from_version: int) -> Delta:
        first = self.version - len(self._entries)
        if not first <= from_version <= self.version:
            raise ConflictError(
                f"there is no delta from version {from_version}",
                cause=f"the server is at version {self.version} and keeps entries since version {first}",
                next="load the parameters again (server.params)",
            )
        return Delta(self.layout, list(self._entries)[from_version - first :], from_version)

    def close(self) -> None:
        """Nothing is open."""
