"""The collector: one thread that gets the records of all ranks, lets the rules look at them, and writes what was found.

It is never asked to agree to anything: a rank sends and goes on. A rank that does not answer costs patience, not time;
what could not be looked at is reported apart.
"""

import contextlib
import hmac
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog

from ciuic.doctor.case import Asked, Case, Round, Rule
from ciuic.doctor.evidence import Evidence
from ciuic.doctor.finding import Blind, Finding, Incident, Revised
from ciuic.doctor.incidents import fold, severity_of
from ciuic.doctor.record import (
    Answer,
    Beat,
    Bye,
    Facts,
    Frames,
    Hello,
    Notice,
    Question,
    Record,
    Schedule,
    from_rank,
    to_frame,
)
from ciuic.doctor.rules import all_rules
from ciuic.doctor.sampling import Pace
from ciuic.errors import FrameError, UnreachableError

TICK_S = 0.2
PATIENCE_S = 5.0
"""A round is judged without the ranks that have not sent their record after this time; so are questions."""
SETTLE_S = 1.0
"""A finding is told when nothing new came for this time: the cause may come after its symptom."""
RANKS_MAX = 4096
RECEIVE_BYTES = 1 << 16

Told = Callable[[Incident], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a collector works."""

    folder: Path
    """Gets evidence.ndjson and findings.json."""
    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""
    """Ranks that do not know it are not heard; empty: a new one."""
    every: int = 10
    """Steps from one sample to the next, after the first few."""
    adapt: bool = True
    """Sample less often where the samples would cost more than they may."""
    rules: Sequence[Rule] = ()
    """Those that look at the records; empty: all that there are."""


class _Peer:
    """One connection."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.frames = Frames()
        self.rank: int | None = None
        self.unsent = bytearray()


class Collector:
    """`start()`, then ranks may connect to `address`; `close()` gives the incidents."""

    def __init__(self, options: Options, *, told: Told | None = None) -> None:
        self.token = options.token or secrets.token_hex(16)
        self.case = Case(ask=self._ask)
        self._options = options
        self._rules: list[Rule] = list(options.rules) or all_rules()
        self._told = told
        self._already_told: set[tuple[Any, ...]] = set()
        self._peers: dict[socket.socket, _Peer] = {}
        self._asked: dict[int, tuple[Rule, Asked]] = {}
        """Questions that wait for answers."""
        self._questions = 0
        self._changed_s: float | None = None
        self._pace = Pace(every=options.every, adapt=options.adapt)
        self._selector = selectors.DefaultSelector()
        self._stop = threading.Event()
        self._evidence = Evidence(options.folder)
        self._thread = threading.Thread(target=self._serve, name="ciuic-doctor-collector", daemon=True)
        try:
            self._server = socket.create_server((options.host, options.port), backlog=128)
        except OSError as error:
            raise UnreachableError(
                f"the doctor cannot listen on {options.host}:{options.port}", cause=str(error), next="another --listen"
            ) from error

    @property
    def address(self) -> tuple[str, int]:
        """Host and port it listens on."""
        host, port = self._server.getsockname()[:2]
        return host, port

    def start(self) -> tuple[str, int]:
        """Begin to listen; the address."""
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread.start()
        return self.address

    def close(self) -> list[Incident]:
        """Judge what is there, stop, write the findings."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
        return self.incidents()

    def incidents(self) -> list[Incident]:
        """What was found so far, the most likely cause first."""
        return fold(list(self.case.findings.values()))

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._stop.is_set():
            self._turn(TICK_S)
        self._turn(0.0)
        for round_ in list(self.case.rounds.values()):
            self._judge(round_)
        self._answer_late(time.monotonic() + 2 * PATIENCE_S)
        self._each(lambda rule: rule.end(self.case))
        if self._evidence.ended is not None:
            self._add_blind(self._evidence.ended)
        self._evidence.close(self.incidents(), self.case.blind)
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._server.close()
        self._selector.close()

    def _turn(self, wait_s: float) -> None:
        for key, events in self._selector.select(wait_s):
            if key.fileobj is self._server:
                self._accept()
                continue
            peer = self._peers.get(key.fileobj)
            if peer is not None and events & selectors.EVENT_READ:
                self._read(peer)
            if peer is not None and events & selectors.EVENT_WRITE:
                self._write(peer)
        now_s = time.monotonic()
        for round_ in [each for each in self.case.rounds.values() if not each.judged]:
            if now_s - round_.began_s > PATIENCE_S:
                self._judge(round_)
        self._answer_late(now_s)
        self._release()
        self._each(lambda rule: rule.tick(self.case, now_s))
        self._tell(now_s)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            link, _ = self._server.accept()
            if len(self._peers) >= RANKS_MAX:
                link.close()
                return
            link.setblocking(False)
            self._peers[link] = _Peer(link)
            self._selector.register(link, selectors.EVENT_READ)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.link.recv(RECEIVE_BYTES)
            bodies = peer.frames.feed(data)
            messages = [from_rank(body) for body in bodies]
        except BlockingIOError:
            return
        except (OSError, FrameError) as error:
            self._evidence.note(f"a connection was ended: {error}")
            self._drop(peer)
            return
        for message in messages:
            if peer.rank is None and not self._welcome(peer, message):
                self._drop(peer)
                return
            self._hear(peer, message)
        if not data:
            self._drop(peer)

    def _welcome(self, peer: _Peer, message: Any) -> bool:
        known = isinstance(message, Hello) and hmac.compare_digest(message.token, self.token)
        if not known or not 0 <= message.rank < RANKS_MAX or not 0 < message.world <= RANKS_MAX:
            self._evidence.note("a connection without the right token, rank or world was ended")
            return False
        peer.rank = message.rank
        return True

    def _hear(self, peer: _Peer, message: Any) -> None:
        case, now_s = self.case, time.monotonic()
        rank = peer.rank if peer.rank is not None else -1
        if getattr(message, "rank", rank) != rank:
            return  # a rank speaks for itself only
        case.heard_s[rank] = now_s
        self._evidence.add(message)
        if isinstance(message, Hello):
            case.world = max(case.world, message.world)
            case.hellos[rank] = message
            case.gone.pop(rank, None)
            case.byes.pop(rank, None)
            schedule = self._pace.schedule
            self._send(peer, schedule)
            self._each(lambda rule: rule.hello(case, message))
        elif isinstance(message, Record):
            self._record(message, now_s)
        elif isinstance(message, Notice):
            self._each(lambda rule: rule.notice(case, message))
        elif isinstance(message, Beat):
            case.beats[rank] = message
            self._each(lambda rule: rule.beat(case, message))
        elif isinstance(message, Answer):
            self._answer(message)
        elif isinstance(message, Bye):
            case.byes[rank] = message
            self._leave(rank, message.how or "end")

    def _record(self, record: Record, now_s: float) -> None:
        self.case.latest[record.rank] = record
        round_ = self.case.round_of(record, now_s)
        round_.records[record.rank] = record
        if self._complete(round_):
            self._judge(round_)
        schedule = self._pace.seen(record)
        if schedule is not None:
            for peer in list(self._peers.values()):
                self._send(peer, schedule)

    def _complete(self, round_: Round) -> bool:
        here = set(self.case.present())
        return len(here | set(self.case.gone)) >= self.case.world and here <= set(round_.records)

    def _release(self) -> None:
        """Let ranks go that have said bye, when nobody has a question to them any more."""
        wanted = {rank for round_ in self.case.rounds.values() if not round_.judged for rank in round_.records}
        for _, asked in self._asked.values():
            wanted.update(asked.ranks)
        for peer in [peer for peer in self._peers.values() if peer.rank in self.case.byes and not peer.unsent]:
            if peer.rank not in wanted:
                self._drop(peer)

    def _judge(self, round_: Round) -> None:
        if round_.judged:
            return
        round_.judged = True
        self.case.looked += round_.optimizer == 0
        self._each(lambda rule: rule.round(self.case, round_))

    def _leave(self, rank: int, how: str) -> None:
        if rank not in self.case.gone:
            self.case.gone[rank] = how
            self._each(lambda rule: rule.left(self.case, rank, how))
            for round_ in [each for each in self.case.rounds.values() if not each.judged and self._complete(each)]:
                self._judge(round_)

    def _drop(self, peer: _Peer) -> None:
        if self._peers.pop(peer.link, None) is None:
            return
        self._selector.unregister(peer.link)
        peer.link.close()
        if peer.rank is not None and not any(other.rank == peer.rank for other in self._peers.values()):
            self._leave(peer.rank, "cut")

    # ---- questions -------------------------------------------------------------------------------------------------

    def _ask(self, rule: Rule, kind: str, ranks: Iterable[int], *, facts: Facts, about: Any = None) -> None:
        self._questions += 1
        wanted, number = tuple(ranks), self._questions
        connected = {peer.rank for peer in self._peers.values()}
        wanted = tuple(rank for rank in wanted if rank in connected) or wanted
        until_s = time.monotonic() + PATIENCE_S
        asked = Asked(number=number, kind=kind, facts=facts, ranks=wanted, until_s=until_s, about=about)
        self._asked[number] = rule, asked
        for peer in list(self._peers.values()):
            if peer.rank in wanted:
                self._send(peer, Question(number=number, kind=kind, facts=facts))

    def _answer(self, answer: Answer) -> None:
        rule, asked = self._asked.get(answer.question, (None, None))
        if rule is None or asked is None or answer.rank not in asked.ranks:
            return
        asked.answers[answer.rank] = answer.facts
        if asked.complete:
            self._finish(rule, asked)

    def _answer_late(self, now_s: float) -> None:
        for rule, asked in list(self._asked.values()):
            if asked.until_s < now_s:
                self._finish(rule, asked)

    def _finish(self, rule: Rule, asked: Asked) -> None:
        self._asked.pop(asked.number, None)
        self._take(lambda: rule.answered(self.case, asked))

    # ---- sending and telling -----------------------------------------------------------------------------------------

    def _send(self, peer: _Peer, message: Question | Schedule) -> None:
        peer.unsent += to_frame(message)
        self._write(peer)

    def _write(self, peer: _Peer) -> None:
        try:
            sent = peer.link.send(peer.unsent) if peer.unsent else 0
            del peer.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        if peer.link in self._peers and self._selector.get_key(peer.link).events != wanted:
            self._selector.modify(peer.link, wanted)

    def _each(self, call: Callable[[Rule], Iterable[Finding | Blind | Revised]]) -> None:
        for rule in self._rules:
            self._take(lambda rule=rule: call(rule))

    def _take(self, look: Callable[[], Iterable[Finding | Blind | Revised]]) -> None:
        try:
            for item in look():
                if isinstance(item, Blind):
                    self._add_blind(item)
                    continue
                new = item.finding if isinstance(item, Revised) else item
                known = self.case.findings.get(new.key)
                if known is None or isinstance(item, Revised) or new.confidence > known.confidence:
                    found_s = known.found_s if known is not None else time.time()
                    self.case.findings[new.key] = msgspec.structs.replace(new, found_s=found_s)
                    self._changed_s = time.monotonic()
        except Exception as error:  # noqa: BLE001 - a rule with a bug must not end the others, and must be seen
            structlog.get_logger().exception("a rule of the doctor failed")
            self._add_blind(Blind(what="a rule of the doctor failed", why=f"{type(error).__name__}: {error}"))

    def _add_blind(self, blind: Blind) -> None:
        if blind not in self.case.blind:
            self.case.blind.append(blind)

    def _tell(self, now_s: float) -> None:
        if self._changed_s is None or now_s - self._changed_s < SETTLE_S:
            return
        self._changed_s = None
        incidents = self.incidents()
        with contextlib.suppress(OSError):  # at the end it is tried again
            self._evidence.write_findings(incidents, self.case.blind)
        for incident in incidents:
            known = *incident.cause.key, severity_of(incident.cause)
            if known not in self._already_told and self._told is not None:
                self._already_told.add(known)
                self._told(incident)
