"""One fragment at a shard: its rounds, and what the hub has not heard of them yet."""

import threading
from dataclasses import dataclass, field
from typing import Literal

from ciuic.errors import CiuicError
from ciuic.hub.run.fragment_rounds import Closed, FragmentRounds
from ciuic.hub.run.quarantine import clipped_lines
from ciuic.net import shard_messages as s

HEADERS_PER_REPORT = 200
Key = tuple[str, int]
"""(run, fragment)."""


@dataclass(kw_only=True)
class Piece:
    """A fragment that is served here, or (`attempt`) was fetched and waits to be."""

    rounds: FragmentRounds
    generation: int
    attempt: str = ""
    known: int = 0
    """Entries that the hub has."""
    is_sealed: bool = False
    problem: str = ""
    """Told last."""
    lines: list[s.ShardLine] = field(default_factory=list)
    spoke: set[str] = field(default_factory=set)
    lock: "threading.RLock" = field(default_factory=threading.RLock)

    def close_due(self, view: s.RunView, shard: str) -> bool:
        """Close the rounds that are due; True when there are new entries."""
        before = self.rounds.version
        with self.lock:
            try:
                while closed := self.rounds.close_next(view, lambda _: view.samples_committed):
                    self._closed(closed, shard)
                    if closed.header.why != "pushed":
                        break
            except CiuicError as error:
                self._complain(f"{shard}: round not closed: {error}")
            self.is_sealed = view.sealed and self.rounds.is_quiet
        return self.rounds.version != before

    def _closed(self, closed: Closed, shard: str) -> None:
        for rejection, _ in closed.rejected:
            text = f"a push of {rejection.node} was rejected ({rejection.reason})"
            self.lines.append(s.ShardLine(kind="push.rejected", text=text, node_id=rejection.node))
        for node, text in clipped_lines(closed.header):
            self.lines.append(s.ShardLine(kind="push.clipped", text=text, node_id=node))
        self.problem = ""
        if closed.snapshot_problem:
            self._complain(f"{shard}: snapshot not written: {closed.snapshot_problem}")

    def _complain(self, text: str) -> None:
        """Once per problem, however often it is met."""
        if text != self.problem:
            self.problem = text
            self.lines.append(s.ShardLine(kind="storage.failed", text=text))

    def report(self, key: Key, state: Literal["serving", "frozen", "fetched"]) -> s.FragmentReport:
        """State and what the hub does not know yet. Lines and nodes that spoke are handed over."""
        with self.lock:
            rounds = self.rounds
            headers = [] if state == "fetched" else rounds.headers_after(self.known, HEADERS_PER_REPORT)
            lines, self.lines = self.lines, []
            spoke, self.spoke = self.spoke, set()
            return s.FragmentReport(
                run_id=key[0],
                fragment=key[1],
                generation=self.generation,
                state=state,
                attempt=self.attempt,
                version=rounds.version,
                digest=rounds.digest,
                snapshot_version=rounds.snapshot_version,
                snapshot_bytes=rounds.snapshot_bytes,
                waiting=len(rounds.inbox.waiting),
                touched=rounds.touched,
                access=rounds.access,
                sealed=self.is_sealed,
                headers=headers,
                lines=lines,
                spoke=sorted(spoke),
            )

    def close(self) -> None:
        """Serve it no more; a push that waits for the lock meanwhile is sent elsewhere."""
        with self.lock:
            self.rounds.is_frozen = True
            self.rounds.close()


def failure(key: Key, generation: int, attempt: str) -> s.FragmentReport:
    """The report of a fragment that could not be fetched."""
    return s.FragmentReport(
        run_id=key[0],
        fragment=key[1],
        generation=generation,
        attempt=attempt,
        state="fetched",
        version=-1,
        digest="",
        snapshot_version=-1,
        snapshot_bytes=0,
        waiting=0,
    )
