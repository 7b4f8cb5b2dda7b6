"""A shard without its port: the fragments it serves, as its hub's view says. No sockets; thread-safe.

Nothing is served before the first view since the start, so a shard that was away never acts on an old one. What is on
disk is replayed, like a ledger of the hub. A process of a node that was replaced is refused from the view on that says
so; what it pushed a moment before that merges, as if it had come before its replacement.
"""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from ciuic.errors import CiuicError, ConflictError, LedgerDamagedError, MovedError, RoleError, SupersededError
from ciuic.hub.run.admission import check_memory
from ciuic.hub.run.fragment_rounds import FragmentRounds, Ground
from ciuic.hub.shards.piece import Key, Piece, failure
from ciuic.hub.shards.sharding import drop_folder
from ciuic.job import parse_job
from ciuic.ledger.entry import PushHeader, push_from_frame
from ciuic.ledger.files import Spooled
from ciuic.ledger.layout import layout_from_dict
from ciuic.net import messages as m
from ciuic.net import shard_messages as s

FETCHED = re.compile(r"log\.bin|origin\.json|snapshots/\d{10}\.(base|hub)|pushes/[A-Za-z0-9-]+\.\d+\.\d+")
"""Files that a fragment's folder may hold; nothing else is asked for or given away."""
Fetch = Callable[[s.RunPart, s.FragmentPlace, Path], None]
_log = structlog.get_logger("ciuic.shard")


@dataclass(frozen=True, kw_only=True)
class Ties:
    """What a host needs of the world."""

    clock: Callable[[], float]
    run_of: Callable[[str], s.ShardRun]
    """Asks the hub for a run's job and layout."""
    fetch: Fetch
    """(part, place, folder): copies the files of a fragment from its owner."""
    wake: Callable[[str], None]
    """Entries of this run changed, or there is something to report."""
    spawn: Callable[[Callable[[], None]], None] = lambda work: work()
    """Does work that takes long, best on another thread."""


class ShardHost:
    """See the module."""

    def __init__(self, name: str, folder: Path, ties: Ties) -> None:
        """`folder`: where the files of all runs are."""
        self.name, self.folder, self._ties = name, folder, ties
        self._fetching: dict[Key, str] = {}
        """Moves whose files are on the way."""
        self._lock = threading.RLock()
        self._view: s.ShardView | None = None
        self._parts: dict[str, s.RunPart] = {}
        self._grounds: dict[str, Ground] = {}
        self._pieces: dict[Key, Piece] = {}
        self._arrived: dict[Key, Piece] = {}
        """Fetched, not served yet."""
        self._failed: dict[Key, s.FragmentReport] = {}

    # ---- the view

    @property
    def known(self) -> str:
        """Which view it has."""
        return self._view.number if self._view else ""

    def serials_of(self, node: str) -> list[str] | None:
        """The certificates with which a node may speak."""
        view = self._view
        return view.serials.get(node) if view else None

    def is_revoked(self, serial: str) -> bool:
        """Nobody may use this certificate any more."""
        view = self._view
        return view is not None and serial in view.revoked

    def apply(self, view: s.ShardView) -> None:
        """Do what the hub says: serve, freeze, fetch, drop."""
        with self._lock:
            self._view = view
            parts = {part.run_id: part for part in view.runs}
            ended = [self._pieces.pop(key) for key in list(self._pieces) if key[0] not in parts]
            self._parts = parts
            self._grounds = {run_id: ground for run_id, ground in self._grounds.items() if run_id in parts}
        for piece in ended:
            piece.close()  # its files stay
        for part in view.runs:
            for place in part.places:
                try:
                    self._settle(part, place)
                except CiuicError as error:
                    _log.error("fragment not served", run=part.run_id, fragment=place.fragment, error=str(error))
        self.close_due()

    def _settle(self, part: s.RunPart, place: s.FragmentPlace) -> None:
        key = (part.run_id, place.fragment)
        if place.shard == self.name:
            self._serve(part, place)
            return
        with self._lock:
            piece = self._pieces.pop(key, None)
        if piece is not None:
            piece.close()
        if place.move_to == self.name:
            if place.is_frozen:
                self._fetch_new(part, place)
            return
        if key in self._fetching:
            return
        self._drop_arrived(key)
        for folder in self.folder.glob(f"{part.run_id}/fragment-{place.fragment}-*"):
            drop_folder(folder)

    def _serve(self, part: s.RunPart, place: s.FragmentPlace) -> None:
        key = (part.run_id, place.fragment)
        piece = self._pieces.get(key)
        if piece is None or piece.generation != place.generation:
            arrived = self._arrived.pop(key, None)
            if piece is not None:
                piece.close()
            if arrived is not None and arrived.generation == place.generation:
                piece = arrived
                piece.attempt = ""
            else:
                piece = self._open(part, place)
            with self._lock:
                self._pieces[key] = piece
        with piece.lock:
            piece.rounds.use(part.view.settings)
            piece.rounds.is_frozen = bool(place.move_to)
            piece.attempt = place.attempt

    def _open(self, part: s.RunPart, place: s.FragmentPlace) -> Piece:
        folder = self._folder_of(part.run_id, place.fragment, place.generation)
        if place.generation > 1 and not folder.exists():
            raise LedgerDamagedError(f"{folder} is missing", next="restore it from a backup of this shard")
        return Piece(rounds=self._replayed(part, place, folder), generation=place.generation)

    def _replayed(self, part: s.RunPart, place: s.FragmentPlace, folder: Path) -> FragmentRounds:
        """Raises ModelError when this machine has not the memory, LedgerDamagedError."""
        ground = self._ground(part.run_id)
        others = set(range(ground.layout.fragment_count)) - {place.fragment}
        check_memory(ground.layout, ground.job.sync, others)
        rounds = FragmentRounds(ground, place.fragment, part.view.settings, folder)
        try:
            rounds.reopen()
        except CiuicError:
            rounds.close()
            raise
        return rounds

    def _folder_of(self, run_id: str, fragment: int, generation: int) -> Path:
        return self.folder / run_id / f"fragment-{fragment}-{generation}"

    def _ground(self, run_id: str) -> Ground:
        ground = self._grounds.get(run_id)
        if ground is None:
            run = self._ties.run_of(run_id)
            layout = layout_from_dict(run.layout)
            ground = Ground(run_id=run_id, job=parse_job(run.job), layout=layout, clock=self._ties.clock)
            self._grounds[run_id] = ground
        return ground

    # ---- moving

    def _fetch_new(self, part: s.RunPart, place: s.FragmentPlace) -> None:
        """Copy a fragment from its frozen owner and replay it; a report tells the hub."""
        key = (part.run_id, place.fragment)
        arrived, failed = self._arrived.get(key), self._failed.get(key)
        tried = {self._fetching.get(key), arrived.attempt if arrived else "", failed.attempt if failed else ""}
        if place.attempt in tried or key in self._fetching:
            return
        self._drop_arrived(key)
        self._fetching[key] = place.attempt
        self._ties.spawn(lambda: self._fetch_now(part, place))

    def _fetch_now(self, part: s.RunPart, place: s.FragmentPlace) -> None:
        key, generation = (part.run_id, place.fragment), place.generation + 1
        folder = self._folder_of(*key, generation)
        drop_folder(folder)
        try:
            self._ties.fetch(part, place, folder)
            rounds = self._replayed(part, place, folder)
        except CiuicError as error:
            _log.warning("fragment not fetched", run=part.run_id, fragment=place.fragment, error=str(error))
            self._failed[key] = failure(key, generation, place.attempt)
        else:
            self._arrived[key] = Piece(rounds=rounds, generation=generation, attempt=place.attempt)
        finally:
            self._fetching.pop(key, None)
        if not self._is_wanted(key, place.attempt):
            self._drop_arrived(key)  # the move was given up meanwhile
        self._ties.wake(part.run_id)

    def _is_wanted(self, key: Key, attempt: str) -> bool:
        part = self._parts.get(key[0])
        return part is not None and any(p.fragment == key[1] and p.attempt == attempt for p in part.places)

    def _drop_arrived(self, key: Key) -> None:
        self._failed.pop(key, None)
        arrived = self._arrived.pop(key, None)
        if arrived is not None:
            arrived.rounds.close()
            drop_folder(arrived.rounds.folder)

    def moving_folder(self, run_id: str, fragment: int, shard: str) -> Path:
        """Files of a frozen fragment that goes to this shard. Raises ConflictError."""
        part, piece = self._parts.get(run_id), self._pieces.get((run_id, fragment))
        goes = part is not None and any(p.fragment == fragment and p.move_to == shard for p in part.places)
        if piece is None or not goes or not piece.rounds.is_frozen:
            raise ConflictError(f"fragment {fragment} is not on its way from {self.name} to {shard}")
        return piece.rounds.folder

    # ---- what nodes do

    def _piece(self, run_id: str, fragment: int) -> tuple[Piece, s.RunView]:
        with self._lock:
            piece, part = self._pieces.get((run_id, fragment)), self._parts.get(run_id)
        if piece is None or part is None:
            raise MovedError(
                f"fragment {fragment} of {run_id} is not served by {self.name} now", next="ask the hub where it is"
            )
        return piece, part.view

    def check_serves(self, run_id: str, fragment: int) -> None:
        """Raises MovedError when the fragment is not served here now."""
        self._piece(run_id, fragment)

    def frame_elements(self, run_id: str) -> int:
        """Elements of the run's model, which bound a frame. Raises MovedError."""
        with self._lock:
            ground = self._grounds.get(run_id)
        if ground is None:
            raise MovedError(f"{self.name} serves nothing of {run_id} now", next="ask the hub")
        return sum(tensor.element_count for tensor in ground.layout.tensors)

    def push(self, node: str, run_id: str, frame: bytes, spooled: Spooled | None = None) -> m.PushReply:
        """As RunLedger.push, for the fragments served here. Raises MovedError and what that raises."""
        push = push_from_frame(frame)
        header = push.header
        if header.node != node or header.run != run_id:
            raise RoleError(
                f"{node} sent a push of {header.node} for run {header.run}", cause="a node pushes only for itself"
            )
        piece, view = self._piece(run_id, header.fragment)
        _check_present(view, header)
        with piece.lock:
            verdict = piece.rounds.push(push, frame, view, spooled)
            piece.spoke.add(node)
            if verdict.status == "rejected":
                text = f"a push of {node} was rejected ({verdict.reason}): {verdict.detail}"
                piece.lines.append(s.ShardLine(kind="push.rejected", text=text, node_id=node))
            version = piece.rounds.version
        if verdict.status == "accepted":
            self._close(piece)
            version = piece.rounds.version
        interval = view.intervals.get(node, view.settings.interval)
        return m.PushReply(
            status=verdict.status,
            reason=verdict.reason,
            detail=verdict.detail,
            epoch=view.epoch,
            hub_version=version,
            pace=m.Pace(codec_up=view.settings.codec_up, interval=interval),
        )

    def put_snapshot(self, node: str, run_id: str, fragment: int, frame: bytes) -> None:
        """Version 0, as RunLedger.put_snapshot."""
        piece, view = self._piece(run_id, fragment)
        if node not in view.uploaders:
            raise MovedError(f"{self.name} was not told that {node} uploads version 0", next="try again in a moment")
        with piece.lock:
            if piece.rounds.put_version_0(node, frame, view.uploaders):
                text = f"{node} uploaded version 0 of fragment {fragment} to {self.name}"
                piece.lines.append(s.ShardLine(kind="base.uploaded", text=text, node_id=node))
        self._ties.wake(run_id)

    def entries_after(self, run_id: str, fragment: int, version: int, max_bytes: int) -> list[bytes]:
        """As RunLedger.entries_after."""
        piece, _ = self._piece(run_id, fragment)
        with piece.lock:
            return piece.rounds.entries_after(version, max_bytes)

    def snapshot_path(self, run_id: str, fragment: int, version: int) -> Path:
        """As RunLedger.snapshot_path."""
        piece, _ = self._piece(run_id, fragment)
        return piece.rounds.snapshot_path(version)

    # ---- rounds

    def close_due(self) -> float:
        """Close the rounds that are due; seconds until the next call is wanted."""
        wait_s = 1.0
        for piece in list(self._pieces.values()):
            self._close(piece)
            due_s = piece.rounds.due_in_s()
            wait_s = min(wait_s, max(0.02, due_s)) if due_s is not None else wait_s
        return wait_s

    def _close(self, piece: Piece) -> None:
        run_id = piece.rounds.ground.run_id
        part = self._parts.get(run_id)
        if part is not None and piece.close_due(part.view, self.name):
            self._ties.wake(run_id)

    # ---- reports

    def report(self) -> s.ShardReport:
        """What the hub does not know yet, and the state of every fragment."""
        with self._lock:
            pieces, arrived = list(self._pieces.items()), list(self._arrived.items())
            failed = list(self._failed.values())
        told = [p.report(key, "frozen" if p.rounds.is_frozen else "serving") for key, p in pieces]
        return s.ShardReport(fragments=told + [p.report(key, "fetched") for key, p in arrived] + failed)

    def told(self, reply: s.ShardReply) -> bool:
        """The hub has taken a report; True when it wants more at once."""
        wants_more = False
        for known in reply.known:
            piece = self._pieces.get((known.run_id, known.fragment))
            if piece is not None and known.version >= 0:
                piece.known = known.version
                wants_more = wants_more or piece.known < piece.rounds.version
        return wants_more

    def not_told(self, report: s.ShardReport) -> None:
        """A report did not reach the hub: its lines are told again."""
        for one in report.fragments:
            piece = self._pieces.get((one.run_id, one.fragment))
            if piece is not None:
                piece.lines[:0] = one.lines
                piece.spoke.update(one.spoke)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for piece in [*self._pieces.values(), *self._arrived.values()]:
                piece.rounds.close()
            self._pieces, self._arrived = {}, {}


def _check_present(view: s.RunView, header: PushHeader) -> None:
    """Raises SupersededError, ConflictError, or MovedError when the view is older than the node's attachment."""
    present = view.members.get(header.node)
    if present is None or header.incarnation > present:
        raise MovedError(f"this shard has not heard of {header.node} yet", next="try again in a moment")
    if header.incarnation < present:
        raise SupersededError(
            f"incarnation {header.incarnation} of {header.node} is not the present one ({present})",
            cause="a newer process of this node has taken its place",
            next="this process stops; nothing is lost",
        )
    if header.node in view.away:
        raise ConflictError(
            f"{header.node} has left the run", cause="its worker said goodbye", next="attach again to take part"
        )


def files_to_move(folder: Path) -> s.MovedFiles:
    """What there is to copy of a frozen fragment."""
    files = []
    for path in sorted(folder.glob("**/*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and FETCHED.fullmatch(name):
            files.append(s.MovedFile(name=name, size_bytes=path.stat().st_size))
    return s.MovedFiles(files=files)
