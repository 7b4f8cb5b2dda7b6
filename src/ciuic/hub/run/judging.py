"""Nodes whose pushes are outliers again and again are set aside: they take no more part in the run."""

from typing import TYPE_CHECKING

from ciuic.errors import ConflictError
from ciuic.hub.run.quarantine import SetAside, clipped_lines
from ciuic.ledger.entry import Contributor, EntryHeader

if TYPE_CHECKING:
    from ciuic.hub.run.rounds import RunLedger


class Judging:
    """Works on its ledger, whose lock the caller holds. What was clipped is in the entries, so a restart knows it."""

    def __init__(self, ledger: "RunLedger") -> None:
        self._ledger = ledger
        self._limit = ledger.job.security.set_aside_after
        self._aside = SetAside(self._limit)
        self._leaving: list[str] = []

    def merged(self, contributor: Contributor) -> None:
        """A push is in an entry, perhaps clipped."""
        self._count(contributor.node, is_outlier=contributor.clip < 1)

    def refused(self, node: str, reason: str) -> None:
        """A push was not accepted."""
        if reason == "quarantined":
            self._count(node, is_outlier=True)

    def _count(self, node: str, *, is_outlier: bool) -> None:
        if self._aside.saw(node, is_outlier=is_outlier):
            self._leaving.append(node)

    def is_aside(self, node: str) -> bool:
        """It takes no more part."""
        return node in self._aside.nodes

    def check(self, node: str) -> None:
        """May this node take part? Raises ConflictError."""
        if self.is_aside(node):
            raise ConflictError(
                f"{node} is set aside in {self._ledger.run_id}",
                cause=f"its last {self._limit} pushes moved the model much further than those of others",
                next="look at its data and its loss; the job's [security] says when this happens",
            )

    def settle(self) -> None:
        """Take those who were set aside out of the run."""
        while self._leaving:
            node = self._leaving.pop()
            if self._ledger.member(node).is_present:
                self._ledger.node_gone(node)
                text = f"{node} is set aside: its last {self._limit} pushes moved the model much further than others'"
                self._ledger.tell("node.set_aside", text, node=node)

    def tell(self, header: EntryHeader) -> None:
        """Report what an entry has clipped."""
        for node, text in clipped_lines(header):
            self._ledger.tell("push.clipped", text, node=node, data={"version": header.version})
