"""Which nodes a joiner may take a snapshot from, and what it says about them afterwards."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from ciuic.errors import FrameError, NotFoundError, StorageError
from ciuic.hub.membership.peers import Peers, check_outcomes
from ciuic.hub.membership.records import Announce
from ciuic.hub.run.shelf import Ledger
from ciuic.ledger.content import snapshot_facts
from ciuic.net.chunks import LARGE_BYTES
from ciuic.net.messages import AttachReply, FragmentState, SourcesReport
from ciuic.units import format_bytes

KNOWN = 64


class Sources:
    """Asked with each attachment; reads the two ends of a snapshot's file once. Its owner calls it from any thread."""

    def __init__(self, peers: Peers, is_here: Callable[[str], bool]) -> None:
        self._peers, self._is_here = peers, is_here
        self._contents: OrderedDict[tuple[Path, int, int], str] = OrderedDict()

    def fill(self, answer: AttachReply, ledger: Ledger, joiner: str) -> AttachReply:
        """The answer to an attachment, with the nodes that hold exactly the snapshots in it."""
        if answer.state != "ready":
            return answer
        return replace(answer, fragments=self.filled(answer.fragments, ledger, joiner))

    def filled(self, states: list[FragmentState], ledger: Ledger, joiner: str) -> list[FragmentState]:
        """The same of fragments."""
        return [self._filled(state, number, ledger, joiner) for number, state in enumerate(states)]

    def _filled(self, state: FragmentState, number: int, ledger: Ledger, joiner: str) -> FragmentState:
        if state.url or state.snapshot_bytes < LARGE_BYTES:  # at a shard; or not worth another connection
            return state
        try:
            content = self._content(ledger.snapshot_path(number, state.snapshot_version))
        except (
            NotFoundError,
            FrameError,
            StorageError,
            OSError,
        ):  # it was replaced this moment: the hub's answers hold
            return state
        found = self._peers.holders(content, joiner=joiner, is_here=self._is_here)
        return replace(state, sources=found, content=content)

    def _content(self, path: Path) -> str:
        status = path.stat()
        key = (path, status.st_mtime_ns, status.st_size)
        found = self._contents.get(key) or snapshot_facts(path).content
        self._contents[key] = found
        while len(self._contents) > KNOWN:
            self._contents.popitem(last=False)
        return found

    def report(self, run_id: str, joiner: str, report: SourcesReport) -> list[Announce]:
        """What a joiner says about its sources, as lines of the story. Raises ProtocolError."""
        check_outcomes(report.sources)
        lines: list[Announce] = []
        for one in report.sources:
            node = self._peers.name_of(one.url)
            if not node:
                continue
            what = f"of the snapshot of fragment {report.fragment} at version {report.version}"
            taken = format_bytes(one.taken_bytes)
            data = {"from": node, "bytes": one.taken_bytes, "version": report.version, "problem": one.problem}
            if one.problem == "wrong":
                self._peers.avoid(joiner, node)
                text, kind = f"{node} sent {joiner} other bytes {what}; they were dropped", "snapshot.refused"
            elif one.problem == "away":
                text = f"{joiner} took {taken} {what} from {node}, which then did not answer; the rest came from others"
                kind = "snapshot.fetched"
            else:
                text, kind = f"{joiner} took {taken} {what} from {node}", "snapshot.fetched"
            lines.append(Announce(kind=kind, text=text, run_id=run_id, node_id=joiner, data=data))
        return lines
