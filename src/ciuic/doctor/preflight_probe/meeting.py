"""All nodes over a store of their own: who is there, who reaches whom, what differs. Rank 0 composes, all report it.

    place/R   the token of the process that is node rank R        links/R  whom R reaches, and its clock
    facts/R   what R found on its machine                         go       rank 0: try the group, tell the lines
    roll      rank 0: who is there                                group/R, lines/R   what came of it
    report    rank 0: all checks                                  done/R   R has it

Each wait has an end, and every end has a line in the report.
"""

import contextlib
import errno
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import msgspec
from torch.distributed import DistError, TCPStore

from ciuic.doctor.preflight import compare
from ciuic.doctor.preflight.dialing import TRY_S, Link, Listener, dial
from ciuic.doctor.preflight.master import reach_master
from ciuic.doctor.preflight.records import Check, Facts, Settings, fail, unknown
from ciuic.doctor.preflight_probe import trials
from ciuic.doctor.preflight_probe.forked import Child
from ciuic.units import format_duration

T = TypeVar("T")

ALL_PAIRS = 32
"""With more nodes each dials rank 0 and its next eight."""
NEIGHBOURS = 8
MARGIN_S = 15.0
LINES_LIMIT = 8 * 1024**2
_GOODBYE_S = 5.0


class Go(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's word on what else is worth trying."""

    group: bool
    lines: bool


class MeetingError(Exception):
    """The meeting ended early; `check` says why."""

    def __init__(self, check: Check) -> None:
        super().__init__(check.detail)
        self.check = check


class Meeting:
    """One node's part. `with Meeting(...) as meeting: checks, met = meeting.hold(...)`."""

    def __init__(self, settings: Settings, group: Child) -> None:
        """`group`: waits for the order to form a group of all (`trials.together`)."""
        self._settings, self._group = settings, group
        self._rank = settings.node_rank
        self._store: TCPStore | None = None
        self._listener: Listener | None = None
        self._began: list[Check] = []

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(self, *_: object) -> None:
        if self._listener is not None:
            self._listener.close()
        self._group.close()

    def hold(self, facts: Facts, lines: Sequence[str]) -> tuple[list[Check], int]:
        """(all checks of all nodes, how many came). Own checks and the reason, when the meeting fails."""
        try:
            self._store = self._open()
            facts = self._arrive(facts)
            nodes = self._roll(facts)
            self._put(f"links/{self._rank}", self._dial(nodes))
            if self._rank == 0:
                checks = self._preside(nodes, lines)
                self._put("report", checks)
                self._wait_for_readers(nodes)
            else:
                self._obey(self._get("go", Go, len(nodes) * TRY_S + MARGIN_S), len(nodes), lines)
                checks = self._get("report", list[Check], trials.GROUP_LIMIT_S + 2 * MARGIN_S)
                self._put(f"done/{self._rank}", True)
            return checks, len(nodes)
        except MeetingError as error:
            return [*_of(facts), *self._began, error.check], 1
        except DistError as error:
            said = (str(error).strip().splitlines() or ["no message"])[0][:200]
            remedy = "look at the preflight of rank 0: it may have been ended"
            return [*_of(facts), *self._began, fail("meeting", f"the store of rank 0 is gone: {said}", next=remedy)], 1

    # ---- coming together

    def _open(self) -> TCPStore:
        settings, limit = self._settings, timedelta(seconds=self._settings.wait_s)
        if self._rank:
            answers = reach_master(settings.host, settings.port, settings.wait_s)
            if answers.result != "ok":
                raise MeetingError(answers)
            self._began.append(answers)
            try:
                return TCPStore(settings.host, settings.port, None, False, limit, wait_for_workers=False)
            except DistError as error:
                where = f"{settings.host}:{settings.port}"
                detail = f"{where} answers, but is no torch store: another program has the port"
                check = fail("store", detail, next="choose another port for --master")
                raise MeetingError(check) from error
        listening = _listen(settings.host, settings.port)
        return TCPStore(
            settings.host,
            settings.port,
            None,
            True,
            limit,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    def _arrive(self, facts: Facts) -> Facts:
        if facts.address:  # without one the check of the interface says why; others see that this node has no port
            with contextlib.suppress(OSError):
                self._listener = Listener(facts.address)
        if self._listener is not None:
            facts = msgspec.structs.replace(facts, port=self._listener.port, token=self._listener.token)
        mine = facts.token or f"{facts.host} {time.time_ns()}"
        held = self._open_store.compare_set(f"place/{self._rank}", "", mine)
        if bytes(held).decode(errors="replace") != mine:
            remedy = "give each node its own --node-rank"
            raise MeetingError(fail("meeting", f"another process is node rank {self._rank} already", next=remedy))
        self._put(f"facts/{self._rank}", facts)
        return facts

    def _roll(self, facts: Facts) -> list[Facts]:
        """Everybody's facts, in the order of ranks: of those that rank 0 saw in time."""
        if self._rank == 0:
            until = time.monotonic() + self._settings.wait_s
            present = [0, *(r for r in range(1, self._settings.nnodes) if self._is_there(f"facts/{r}", until))]
            self._put("roll", present)
        else:
            present = self._get("roll", list[int], self._settings.wait_s + MARGIN_S)
            if self._rank not in present:
                detail = f"rank 0 went on without rank {self._rank}, which came too late"
                raise MeetingError(fail("meeting", detail, next="start all nodes together, or raise --wait"))
        return [facts if rank == self._rank else self._get(f"facts/{rank}", Facts, MARGIN_S) for rank in present]

    def _dial(self, nodes: Sequence[Facts]) -> list[Link]:
        others = [node for node in nodes if node.rank != self._rank]
        if len(nodes) > ALL_PAIRS:
            following = sorted(others, key=lambda node: (node.rank - self._rank) % self._settings.nnodes)
            others = list({node.rank: node for node in [*following[:NEIGHBOURS], *nodes[:1]]}.values())
        with ThreadPoolExecutor(NEIGHBOURS) as pool:
            return list(pool.map(_dial_node, others))

    # ---- rank 0

    def _preside(self, nodes: Sequence[Facts], lines: Sequence[str]) -> list[Check]:
        links = self._collect("links", list[Link], nodes, len(nodes) * TRY_S + MARGIN_S / 2)
        compared = compare.compare_facts(nodes, self._settings.nnodes)
        reached = compare.compare_links(nodes, links)
        differ = len({node.layout.digest for node in nodes if node.layout}) > 1
        fine = len(nodes) > 1 and all(check.result == "ok" for check in reached if check.name == "every pair")
        go = Go(group=fine, lines=differ)
        self._put("go", go)
        self._obey(go, len(nodes), lines)
        if differ:
            first = compare.first_difference(self._collect("lines", list[str], nodes, MARGIN_S))
            compared = compare.with_difference(compared, first)
        checks = [check for node in nodes for check in _of(node)]
        checks += [*self._missing(nodes), *compared, *reached]
        if fine:
            answers = self._collect("group", dict[str, object], nodes, trials.GROUP_LIMIT_S + MARGIN_S)
            checks.append(trials.judge_together(answers, len(nodes)))
        elif len(nodes) > 1:
            checks.append(unknown("gloo group of all", "not tried: not every pair of nodes reaches each other"))
        return checks

    def _missing(self, nodes: Sequence[Facts]) -> list[Check]:
        here = {node.rank for node in nodes}
        missing = [rank for rank in range(self._settings.nnodes) if rank not in here]
        if not missing:
            return []
        waited = format_duration(self._settings.wait_s)
        where = f"{self._settings.host}:{self._settings.port}"
        remedy = f"start `ciuic doctor preflight` there too; can it reach {where}?"
        return [fail("meeting", f"{compare.ranks_text(missing)} did not come within {waited}", next=remedy)]

    def _collect(self, what: str, kind: type[T], nodes: Sequence[Facts], limit_s: float) -> dict[int, T]:
        """What each rank put there in time."""
        until, found = time.monotonic() + limit_s, {}
        for node in nodes:
            if self._is_there(f"{what}/{node.rank}", until):
                found[node.rank] = self._get(f"{what}/{node.rank}", kind, MARGIN_S)
        return found

    def _wait_for_readers(self, nodes: Sequence[Facts]) -> None:
        until = time.monotonic() + _GOODBYE_S
        for node in nodes[1:]:
            with contextlib.suppress(DistError):
                self._is_there(f"done/{node.rank}", until)

    # ---- all

    def _obey(self, go: Go, size: int, lines: Sequence[str]) -> None:
        settings = self._settings
        if go.lines:
            self._put(f"lines/{self._rank}", list(lines))
        if go.group:
            nodes = self._get("roll", list[int], MARGIN_S)
            self._group.order(
                {"host": settings.host, "port": settings.port, "rank": nodes.index(self._rank), "size": size}
            )
            self._put(f"group/{self._rank}", self._group.answer(trials.GROUP_LIMIT_S + MARGIN_S / 2))

    @property
    def _open_store(self) -> TCPStore:
        if self._store is None:
            raise MeetingError(unknown("store", "it was not opened"))
        return self._store

    def _put(self, key: str, value: object) -> None:
        self._open_store.set(key, msgspec.json.encode(value).decode())

    def _is_there(self, key: str, until: float) -> bool:
        """Whether a key appears until then (monotonic seconds)."""
        while True:
            left_s = until - time.monotonic()
            if self._open_store.check([key]):
                return True
            if left_s <= 0:
                return False
            time.sleep(min(0.05, left_s))

    def _get(self, key: str, kind: type[T], limit_s: float) -> T:
        """A value that another node put there; it is from outside, so it is checked."""
        if not self._is_there(key, time.monotonic() + limit_s):
            remedy = "look at the preflight of rank 0"
            raise MeetingError(fail("meeting", f"{key} did not come within {limit_s:.0f} s", next=remedy))
        data = bytes(self._open_store.get(key))
        try:
            if len(data) > LINES_LIMIT:
                raise ValueError(f"{len(data)} bytes")
            return msgspec.json.decode(data, type=kind)
        except ValueError as error:
            detail = f"{key} cannot be read ({error}): the nodes have different versions of ciuic"
            raise MeetingError(fail("meeting", detail, next="install the same ciuic everywhere")) from error


def _dial_node(node: Facts) -> Link:
    if not node.port:
        return Link(to=node.rank, address=node.address or "an unknown address", problem="it could not listen")
    return dial(node.rank, node.address, node.port, node.token)


def _of(node: Facts) -> list[Check]:
    """A node's own checks, with its rank."""
    return [msgspec.structs.replace(check, rank=node.rank) for check in node.checks]


def _listen(host: str, port: int) -> socket.socket:
    """At the master's address; at all of this machine when it has no such address (behind NAT). Raises MeetingError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        try:
            return socket.create_server((str(address[0]), port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return socket.create_server(("", port), family=family)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        remedy = "end what listens there, or choose another port"
        raise MeetingError(fail("store", f"cannot listen at {host}:{port}: {reason}", next=remedy)) from error
