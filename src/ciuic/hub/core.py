"""The hub without its port: state machine, store, ledgers and notice board tied together. Synchronous, thread-safe.

One lock guards the state. What an event changes is committed before the lock is given back, so nothing is announced
that a crash could take away; when the disk is full the caller is told so, and everything is stored with the next event
that finds space. Effects on ledgers run afterwards, in order, on a thread of their own (see hub/runs).
"""

import copy
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import structlog
import xxhash

from ciuic.errors import CiuicError, ConflictError, LedgerDamagedError, StorageError
from ciuic.hub.access.auth import serial_of
from ciuic.hub.access.gatekeeper import Gatekeeper
from ciuic.hub.access.tokens import Admission, NewToken, TokenBook
from ciuic.hub.api.events import ANYTHING, EVENTS, SHARDS, Board, logs_topic, node_topic, run_topic
from ciuic.hub.config import HubConfig
from ciuic.hub.keeping.store import Store
from ciuic.hub.membership.absence import Alive, started_line
from ciuic.hub.membership.peers import Peers
from ciuic.hub.membership.records import (
    OPEN_RUN,
    Action,
    Announce,
    CloseRun,
    Effects,
    Moment,
    Node,
    NodeGone,
    OpenRun,
    Run,
    WorkerEnded,
)
from ciuic.hub.membership.state import Desired, HubState
from ciuic.hub.run.checks import check_beat, check_fields, check_log_lines, free_name, new_run, node_stem
from ciuic.hub.run.choosing import Chooser
from ciuic.hub.run.shelf import Ledger, OpenLedger, Sharded, Shelf, finish_line, run_info
from ciuic.hub.run.strays import STRAY_S, Strays
from ciuic.hub.shards.book import ShardBook
from ciuic.job import parse_job
from ciuic.net.messages import (
    CreateTokenRequest,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LogLine,
    NodeInfo,
    Role,
    RunInfo,
    SubmitReply,
    SubmitRequest,
    SyncRequest,
)
from ciuic.net.shard_messages import KnownVersion, RenewReply, RenewRequest, ShardReply, ShardReport, ShardView
from ciuic.net.tls import Authority, Identity

T = TypeVar("T")

TRAINING_BEGAN = "run.training"
"""The line with which a ledger tells that enough workers are there."""
RUNS_LOOKED_AT = 1000
_log = structlog.get_logger("ciuic.hub")


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """The hub's clocks, replaceable in tests."""

    mono_s: Callable[[], float] = time.monotonic
    wall_s: Callable[[], float] = time.time

    def now(self) -> Moment:
        """Both, read together."""
        return Moment(mono_s=self.mono_s(), wall_s=self.wall_s())


class Hub:
    """One hub. Every method may be called from any thread, but not from a ledger's callbacks (except `say`)."""

    def __init__(
        self,
        config: HubConfig,
        store: Store,
        authority: Authority,
        open_ledger: OpenLedger,
        *,
        clocks: Clocks | None = None,
    ) -> None:
        """Take up what the store holds. Raises StorageError."""
        self.config, self.store, self.authority = config, store, authority
        self.tokens = TokenBook(store.database)
        self.board = Board()
        self.peers = Peers()
        self._clocks = clocks or Clocks()
        self.started_at = self._clocks.wall_s()
        self.boot_id = f"{store.count_boot()}-{secrets.token_hex(4)}"
        folder = config.folder / "runs"
        self.shards = ShardBook(config.folder / "shards.json", clock=self._clocks.mono_s)
        self.shelf = Shelf(folder, open_ledger, say=self.say, wake=self._wake_run, opened=self._opened)
        self._state = HubState(epoch=store.epoch(), nodes=store.nodes(), runs=store.runs(), grace_s=config.grace_s)
        self.gatekeeper = Gatekeeper(store.database, authority, say=self.say, wall_s=self._clocks.wall_s)
        known = {node.node_id: node.serial for node in self._state.nodes.values() if node.presence != "evicted"}
        self.gatekeeper.note_known(known)
        self._lock = threading.RLock()
        self._pending = Effects()
        self._complaints: dict[str, str] = {}
        self._chooser = Chooser()
        self._alive = Alive(config.folder)
        before = store.latest_events(1)
        self._before = (self._alive.last_seen(), before[0].kind if before else "")
        """When a hub last worked in this folder, and what it said last."""
        self._strays = Strays()
        self._errands = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hub-errands")
        self._change(self._state.start)
        for run_id in store.runs_without_info():
            self._errands.submit(self._do, CloseRun(run_id=run_id))

    # ---- operators -------------------------------------------------------------------------------------------------

    def create_token(self, request: CreateTokenRequest, by: str) -> NewToken:
        """Raises UsageError, StorageError."""
        made = self.tokens.create(request, wall_s=self._clocks.wall_s())
        what = f"{request.uses} {request.role}s" if request.uses > 1 else f"one {request.role}"
        data = {"token_id": made.token_id, "expires_at": made.expires_at}
        self.say(Announce(kind="token.created", text=f"{by} made a join token for {what}", data=data))
        return made

    # ---- nodes -----------------------------------------------------------------------------------------------------

    def join(self, request: JoinRequest) -> JoinReply:
        """Let a newcomer in. Raises TokenError, CertificateError, ProtocolError, StorageError."""
        stem = node_stem(request.location)
        check_fields(request.claimed)
        with self._lock:
            now = self._clocks.now()
            admission = self.tokens.check(request, wall_s=now.wall_s)
            if admission.certificate_pem:
                return JoinReply(node_id=admission.name, certificate_pem=admission.certificate_pem)
            name = self._free_name(stem, admission.role)
            names, role = request.names, admission.role
            pem = self.authority.issue_member(request.csr_pem, common_name=name, role=role, names=names)
            reply = JoinReply(node_id=name, certificate_pem=pem.decode("ascii"), names=names)
            self._settle(now, Effects())  # what waits for space goes first, so that only the join can fail below
            self._enrol(now, request, admission, reply)
            return reply

    def _free_name(self, stem: str, role: Role) -> str:
        if role == "shard":
            return self.shards.take_name(stem)
        return free_name(stem, self._state.nodes) if role == "node" else self.gatekeeper.free_operator_name(stem)

    def _enrol(self, now: Moment, request: JoinRequest, admission: Admission, reply: JoinReply) -> None:
        name, out = reply.node_id, Effects()
        if admission.role == "node":
            node = Node(
                node_id=name,
                serial=serial_of(reply.certificate_pem),
                number=1 + max((node.number for node in self._state.nodes.values()), default=0),
                location=request.location.strip(),
                claimed=request.claimed,
            )
            self._state.enrol(now, node, out)
        else:
            out.add(Announce(kind=f"{admission.role}.joined", text=f"{name} joined as {admission.role}"))
        try:
            self._settle(now, out, admission=(admission, reply))
        except CiuicError:
            if admission.role == "node":
                self._state.forget(name)
            self._pending = Effects(epoch=self._state.epoch)
            raise

    def beat(self, node_id: str, request: HeartbeatRequest) -> None:
        """One heartbeat. Raises CertificateError, SupersededError, ProtocolError, StorageError."""
        check_beat(request)
        self._change(lambda now, out: self._state.beat(now, node_id, request, out))

    def desired(self, node_id: str, incarnation: str) -> tuple[Desired, int]:
        """What to answer to this agent, and the epoch. Raises CertificateError, SupersededError."""
        with self._lock:
            return self._state.desired(node_id, incarnation), self._state.epoch

    def is_here(self, node_id: str) -> bool:
        """The node is in the network and was heard of late."""
        node = self._state.nodes.get(node_id)
        return node is not None and node.presence == "here"

    def leave(self, node_id: str, incarnation: str) -> None:
        """Raises CertificateError, SupersededError, StorageError."""
        self._change(lambda now, out: self._state.leave(now, node_id, incarnation, out))

    def evict(self, node_id: str, by: str) -> None:
        """Raises NotFoundError, StorageError."""
        self._change(lambda now, out: self._state.evict(now, node_id, by, out))
        self.gatekeeper.revoke(node_id, "node", by)

    def ask_measure(self, node_id: str) -> int:
        """Let the node measure itself; the ticket. Raises NotFoundError, ConflictError, StorageError."""
        return self._change(lambda now, out: self._state.ask_measure(now, node_id, out))

    def node(self, node_id: str) -> Node | None:
        """The node's row, for checking a certificate. Without the lock: the event loop must not wait for a disk."""
        return self._state.nodes.get(node_id)

    def node_infos(self) -> list[NodeInfo]:
        """Every node, in order of joining."""
        with self._lock:
            now_s = self._clocks.mono_s()
            found = [self._state.node_info(node, now_s) for node in self._state.nodes.values()]
        return [self.peers.shown(info) for info in found]

    def add_log_lines(self, node_id: str, run_id: str, lines: list[LogLine]) -> None:
        """Raises NotFoundError, ProtocolError, StorageError."""
        self.run(run_id)
        check_log_lines(lines)
        self.store.add_lines(run_id, node_id, lines)
        self.board.notify(logs_topic(run_id))

    # ---- runs ------------------------------------------------------------------------------------------------------

    def submit(self, request: SubmitRequest) -> SubmitReply:
        """Queue a run. Raises JobFileError, ProtocolError, StorageError."""
        job = parse_job(request.job)
        with self._lock:
            runs = self._state.queue.runs
            for run in runs.values():
                if request.submit_token and run.submit_token == request.submit_token:
                    self._settle(self._clocks.now(), Effects())  # it may have found no space the first time
                    return SubmitReply(run_id=run.run_id, created=False)
            number = self._next_number()
            token = request.submit_token
            run = new_run(job, number=number, submit_token=token, wall_s=self._clocks.wall_s())
            self._change(lambda now, out: self._state.queue.submit(now, run, out))
            return SubmitReply(run_id=run.run_id, created=True)

    def _next_number(self) -> int:
        numbers = (run.number for run in self._state.queue.runs.values())
        return 1 + max(self.store.last_number(), max(numbers, default=0))

    def adopt_run(self, run: Run, line: Announce) -> None:
        """A run whose ledger is in its folder already; it may be resumed. Raises StorageError."""
        with self._lock:
            known = self._state.queue.runs.get(run.run_id)
            run.number = known.number if known is not None else self._next_number()
            self._state.queue.runs[run.run_id] = run

            def event(now: Moment, out: Effects) -> None:
                out.save_run(run)
                out.add(line)
                out.add(CloseRun(run_id=run.run_id))

            self._change(event)

    def remove_run(self, run_id: str, line: Announce) -> None:
        """Forget a run that is over; its files are gone already. Raises NotFoundError, StorageError."""
        with self._lock:
            run = self._state.queue.get(run_id)
            self.store.remove_run(run, line, self._clocks.wall_s())
            del self._state.queue.runs[run_id]
        self.board.notify(ANYTHING, EVENTS)

    def stop_run(self, run_id: str) -> None:
        """Raises NotFoundError, ConflictError, StorageError."""
        self._change(lambda now, out: self._state.queue.stop(now, run_id, out))

    def resume_run(self, run_id: str) -> None:
        """Raises NotFoundError, ConflictError, StorageError."""
        self._change(lambda now, out: self._state.queue.resume(now, run_id, out))

    def change_sync(self, run_id: str, request: SyncRequest, by: str) -> None:
        """Other settings from the next round on. Raises NotFoundError, ConflictError, UsageError, StorageError."""
        self.ledger(run_id).change(request, by)

    def run(self, run_id: str) -> Run:
        """A picture of the run's row. Raises NotFoundError."""
        with self._lock:
            return copy.copy(self._state.queue.get(run_id))

    def runs(self, latest: int) -> list[Run]:
        """Pictures of the rows of the runs submitted last, oldest first."""
        with self._lock:
            return [copy.copy(run) for run in list(self._state.queue.runs.values())[-latest:]]

    def run_info(self, run: Run, *, full: bool) -> RunInfo:
        """What people see of a run; rounds and evaluations only when `full`."""
        ledger = self.shelf.peek(run.run_id)
        known = ledger.info(full=full) if ledger is not None else self.store.last_info(run.run_id)
        return run_info(run, known, full=full)

    def members(self, run_id: str) -> frozenset[str]:
        """The nodes assigned to the run."""
        with self._lock:
            return self._state.queue.names(run_id)

    def has_ended(self, run_id: str) -> bool:
        """The run has ended and none of its workers is left."""
        with self._lock:
            return self._state.queue.get(run_id).state not in OPEN_RUN and not self._state.queue.names(run_id)

    def ledger(self, run_id: str) -> Ledger:
        """The ledger of a run at work. Raises NotFoundError, ConflictError, StorageError."""
        run = self.run(run_id)
        return self.shelf.get(run, has_members=run.state == "finished" and bool(self.members(run_id)))

    # ---- shards ----------------------------------------------------------------------------------------------------

    def sharded(self, run_id: str) -> Sharded:
        """The ledger of a run at work. Raises NotFoundError, ConflictError, StorageError."""
        ledger = self.ledger(run_id)
        if not isinstance(ledger, Sharded):
            raise ConflictError(f"{run_id} has no shards")
        return ledger

    def renew_shard(self, shard: Identity, request: RenewRequest) -> RenewReply:
        """A new certificate under the same name. Raises CertificateError, OverloadedError, StorageError."""
        pem, names = self.gatekeeper.renew(shard, request.csr_pem, request.names), ", ".join(request.names)
        self.say(Announce(kind="shard.renewed", text=f"{shard.name} has a new certificate for {names}"))
        return RenewReply(certificate_pem=pem.decode("ascii"))

    def shard_view(self, shard: str) -> ShardView:
        """All that a shard has to know now."""
        parts = [part for x in self.shelf.ledgers() if isinstance(x, Sharded) and (part := x.part_for(shard))]
        members = [n.node_id for n in list(self._state.nodes.values()) if parts and n.presence != "evicted"]
        serials, revoked = self.gatekeeper.serials(members), self.gatekeeper.revoked_serials()
        renew = self.gatekeeper.shard_should_renew(shard)
        view = ShardView(number="", runs=parts, serials=serials, revoked=revoked, renew=renew)
        return msgspec.structs.replace(view, number=xxhash.xxh3_64_hexdigest(msgspec.json.encode(view)))

    def shard_report(self, shard: str, report: ShardReport) -> ShardReply:
        """A shard tells what it did. Raises StorageError."""
        known: list[KnownVersion] = []
        for one in report.fragments:
            ledger = self.shelf.peek(one.run_id)
            version = ledger.shard_report(shard, one) if isinstance(ledger, Sharded) else -1
            known.append(KnownVersion(run_id=one.run_id, fragment=one.fragment, version=version))
        return ShardReply(known=known)

    # ---- time ------------------------------------------------------------------------------------------------------

    def first_words(self, url: str) -> Announce:
        """That the hub has started, and how long it was away."""
        last_seen, last_kind = self._before
        return started_line(url, self.boot_id.split("-")[0], last_seen, self.started_at, last_kind)

    def tick(self) -> list[str]:
        """Let time pass for nodes and queue; returns the runs whose ledgers want a tick."""
        self._alive.touch(self._clocks.wall_s())
        try:
            self._change(self._state.tick)
            self.gatekeeper.tick()
            if self._complaints.pop("", None) is not None:
                text = "the hub's database can be written again; nothing that was acknowledged was lost"
                self.say(Announce(kind="storage.back", text=text))
        except StorageError as error:
            self._complain("the state is not stored yet", error)
        with self._lock:
            return [run.run_id for run in self._state.queue.runs.values() if run.state in ("running", "stopping")]

    def open_ledgers(self) -> None:
        """Read the ledgers of the runs at work, before anybody is answered: versions never seem to go back."""
        for run in self.runs(latest=RUNS_LOOKED_AT):
            if run.state in ("running", "stopping"):
                self.tick_run(run.run_id)

    def tick_run(self, run_id: str) -> float:
        """Let time pass in one ledger and notice its end; seconds until the next call is wanted."""
        try:
            ledger = self.ledger(run_id)
            self._reconcile(run_id, ledger, after_s=STRAY_S)
            wait_s = ledger.tick()
            self._choose(run_id, ledger)
            if ledger.finished:
                self._finish(run_id)
            self._complaints.pop(run_id, None)
            return wait_s
        except LedgerDamagedError as error:
            reason = str(error)
            self._change(lambda now, out: self._state.queue.fail(now, run_id, reason, out))
        except CiuicError as error:
            if self.run(run_id).state in ("running", "stopping"):
                self._complain("a ledger cannot go on; trying again", error, run_id)
        return 1.0

    def _choose(self, run_id: str, ledger: Ledger) -> None:
        """Where the job says "auto", settings follow what is measured."""
        if ledger.layout is None or not self._chooser.is_due(run_id, self._clocks.mono_s()):
            return
        with self._lock:
            measured = {name: node.measured for name, node in self._state.nodes.items()}
        job, nodes = parse_job(self.run(run_id).job), ledger.info(full=False)["nodes"]
        seen = ledger.settings
        better = self._chooser.choose(job, ledger.layout, seen, nodes, measured)
        if better is not None:
            ledger.switch(better, instead_of=seen)

    def stop(self) -> None:
        """Close what is open; the runs go on with the next start."""
        self._errands.shutdown(wait=True)
        self.shelf.close_all()
        self.store.close()

    def say(self, line: Announce) -> None:
        """One line for the story; when it cannot be stored now it is stored with the next event that can."""

        def event(now: Moment, out: Effects) -> None:
            out.add(line)
            if line.kind == TRAINING_BEGAN:
                self._state.queue.has_begun(line.run_id, out)

        try:
            self._change(event)
        except StorageError as error:
            self._complain("an event is not stored yet", error)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _change(self, event: Callable[[Moment, Effects], T]) -> T:
        """Apply one event to the state and make it durable."""
        with self._lock:
            now, out = self._clocks.now(), Effects()
            result = event(now, out)
            self._settle(now, out)
            return result

    def _settle(self, now: Moment, out: Effects, *, admission: tuple[Admission, JoinReply] | None = None) -> None:
        """Under the lock: store, then tell. What cannot be stored now waits in `_pending`."""
        self._pending.then(out).carry_out(
            store=lambda all_of_it: self._store(now, all_of_it, admission),
            tell=lambda line: None,  # who wants to know reads what was stored
            wake=lambda node_id: self.board.notify(node_topic(node_id)),
            errand=lambda action: self._errands.submit(self._do, action),
        )

    def _store(self, now: Moment, out: Effects, admission: tuple[Admission, JoinReply] | None) -> None:
        if not out.needs_store:
            return
        self._pending = out
        self.store.commit(
            wall_s=now.wall_s,
            nodes=out.nodes.values(),
            runs=out.runs.values(),
            epoch=out.epoch,
            lines=out.announced,
            also=lambda db: self._let_in(db, *admission) if admission else None,
        )
        self._pending = Effects()
        self.board.notify(ANYTHING, *([EVENTS] if out.announced else []))

    def _let_in(self, db: sqlite3.Connection, admission: Admission, reply: JoinReply) -> None:
        """In the transaction that stores a newcomer: the token's use, and its certificate."""
        self.tokens.redeem(db, admission, reply)
        self.gatekeeper.book.put(self.gatekeeper.certificate(reply.certificate_pem), db=db)

    def _do(self, action: Action) -> None:
        """On the errands' thread: what the state machine wants of ledgers."""
        try:
            if isinstance(action, OpenRun):
                self.ledger(action.run_id)
            elif isinstance(action, CloseRun):
                self._close(action.run_id)
            elif isinstance(action, NodeGone):
                self._node_gone(action)
            elif isinstance(action, WorkerEnded):
                self._worker_ended(action)
        except CiuicError as error:
            _log.warning("errand failed", errand=type(action).__name__, error=str(error))
        except Exception:  # noqa: BLE001 - a bug in one errand must not end the thread that does all of them
            _log.exception("errand crashed", errand=type(action).__name__)

    def _worker_ended(self, action: WorkerEnded) -> None:
        returned = self.ledger(action.run_id).node_gone(action.node_id)
        if returned:
            text = f"the worker of {action.node_id} has ended; its {returned:,} leased samples went back"
            data = {"samples": returned}
            self.say(Announce(kind="worker.ended", run_id=action.run_id, node_id=action.node_id, text=text, data=data))

    def _node_gone(self, action: NodeGone) -> None:
        ledger = self.shelf.peek(action.run_id)  # one that is not open is reconciled when it is opened
        line = action.line_with(ledger.node_gone(action.node_id) if ledger is not None else None)
        if line is not None:
            self.say(line)

    def _opened(self, run_id: str, ledger: Ledger) -> None:
        if isinstance(ledger, Sharded):
            ledger.sharding.directory = self.shards
        self._reconcile(run_id, ledger)

    def _reconcile(self, run_id: str, ledger: Ledger, *, after_s: float = 0.0) -> None:
        """Nodes that the ledger counts on but that are not in the run are gone (after a crash, or a late word).

        `after_s`: only those that were so for that long: the errand that tells a death is faster as a rule.
        """
        members, now_s = self.members(run_id), self._clocks.mono_s()
        for node in self._strays.gone(run_id, ledger.present(), members, now_s=now_s, after_s=after_s):
            ledger.node_gone(node)

    def _close(self, run_id: str) -> None:
        if self.has_ended(run_id):  # not resumed meanwhile
            self.shelf.close(self.run(run_id), lambda info: self.store.save_info(run_id, msgspec.json.encode(info)))
        self.board.notify(run_topic(run_id), logs_topic(run_id), ANYTHING)

    def _finish(self, run_id: str) -> None:
        info = self.run_info(self.run(run_id), full=True)
        self.store.save_info(run_id, msgspec.json.encode(info))
        line = Announce(kind="run.finished", run_id=run_id, text=finish_line(info))
        self._change(lambda now, out: self._state.queue.finish(now, run_id, line, out))

    def _complain(self, what: str, error: CiuicError, about: str = "") -> None:
        """Log a problem that is met again and again only when it is a new one."""
        if self._complaints.get(about) != str(error):
            self._complaints[about] = str(error)
            _log.error(what, about=about or "hub", error=str(error))

    def _wake_run(self, run_id: str) -> None:
        self.board.notify(run_topic(run_id), SHARDS, ANYTHING)
