"""The agent: one per node. Keeps in touch with the hub and keeps its one worker where the hub wants it.

One thread owns all decisions (`Agent.run`); the heartbeat, the worker's end and signals only put events into its inbox.
"""

import contextlib
import logging
import queue
import secrets
import signal
import threading
import time
from collections.abc import Generator
from types import FrameType

from ciuic.errors import AccessError, CiuicError
from ciuic.net.client import HubClient
from ciuic.net.messages import HeartbeatReply, HeartbeatRequest, LeaveRequest, Ok, WorkerReport
from ciuic.node.config import AgentConfig
from ciuic.node.direct import Direct
from ciuic.node.heartbeat import Heartbeat
from ciuic.node.identity import NodeIdentity, held, join, node_folder, set_aside, settle_identity
from ciuic.node.logs import LogShipper
from ciuic.node.renewal import Renewal, finish_renewal
from ciuic.node.seat import WorkerExit, WorkerSeat
from ciuic.node.vitals import Vitals, machine_facts

__all__ = ["Agent", "AgentConfig", "run_agent"]

CONTROL_TIMEOUT_S = 10.0
LEAVE_S = 5.0
"""Longest wait for the hub at the end, once for the last log lines and once for the goodbye."""
FORCED_EXIT = 130
DRAIN, UNDRAIN = signal.SIGUSR1, signal.SIGUSR2
Event = HeartbeatReply | WorkerExit | signal.Signals | Exception
Inbox = queue.SimpleQueue[Event]
_log = logging.getLogger(__name__)


def run_agent(config: AgentConfig) -> int:
    """Be a node until told to stop: 0 after a drain, 130 after a second signal.

    SIGTERM or SIGINT drains: the worker may finish its step and push, then the node leaves. A second one kills the
    worker's whole process tree at once. SIGUSR1 (`ciuic node drain`): the same, but the node stays and takes no new
    work until SIGUSR2. Outages of the hub are survived without limit. Raises CiuicError when the node cannot join, is
    evicted or is superseded by a newer agent.
    """
    folder = node_folder(config.home, config.location)
    with held(folder):
        finish_renewal(folder)
        names = config.direct_names
        identity = settle_identity(
            folder, url=config.url, location=config.location, token=config.token, claimed=config.claimed, names=names
        )
        inbox: Inbox = queue.SimpleQueue()
        with _signals_into(inbox):
            agent = Agent(config, identity, inbox)
            try:
                return agent.run()
            except AccessError:
                if identity.fresh or config.token is None or agent.heard:
                    raise
            _log.warning("the hub does not accept the stored identity %s any more; using the token", identity.node_id)
            set_aside(identity)
            fresh = join(
                folder,
                url=config.url,
                location=config.location,
                token=config.token,
                claimed=config.claimed,
                names=names,
            )
            return Agent(config, fresh, inbox).run()


@contextlib.contextmanager
def _signals_into(inbox: Inbox) -> Generator[None]:
    """The signals of `run_agent` become events.

    Python delivers signals to the main thread only: elsewhere nothing changes.
    """

    def put(number: int, frame: FrameType | None) -> None:
        inbox.put(signal.Signals(number))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = (signal.SIGTERM, signal.SIGINT, DRAIN, UNDRAIN)
    previous = {number: signal.signal(number, put) for number in heeded}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Agent:
    """One agent process of a node that has joined."""

    def __init__(self, config: AgentConfig, identity: NodeIdentity, inbox: Inbox) -> None:
        self.heard = False
        """Whether the hub has answered a heartbeat."""
        self._config, self._identity, self._inbox = config, identity, inbox
        self._incarnation = secrets.token_hex(8)
        self._facts = machine_facts()
        self._status_lock = threading.Lock()
        self._status: tuple[WorkerReport, bool] = (WorkerReport(), False)
        self._shipper = LogShipper(self._client())
        self._seat = WorkerSeat(config, identity, self._shipper, on_exit=self._inbox.put)
        self._direct = Direct(config, identity, is_busy=self._has_work)
        self._vitals = Vitals(
            self._client,
            identity.folder,
            measure_peers=self._direct.measure,
            is_busy=self._has_work,
            on_measured=lambda: self._heartbeat.poke(),
            settle_s=config.settle_s,
        )
        self._heartbeat = Heartbeat(
            self._client(),
            compose=self._compose,
            on_reply=self._inbox.put,
            on_fatal=self._inbox.put,
            wait_s=config.heartbeat_s,
        )
        self._renewal = Renewal(identity, config.url, config.direct_names)
        self._signals: list[signal.Signals] = []
        self._is_drained = False
        self._fatal: Exception | None = None

    def run(self) -> int:
        """See run_agent."""
        _log.info("node %s speaks to the hub at %s", self._identity.node_id, self._config.url)
        self._shipper.start()
        self._heartbeat.start()
        try:
            while not (self._is_ending and self._seat.is_empty):
                self._handle(self._next_event())
                self._seat.work()
                self._publish()
            return self._say_goodbye()
        finally:
            self._close()

    # ---- events ----

    def _next_event(self) -> Event | None:
        due = self._seat.next_due
        try:
            return self._inbox.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
        except queue.Empty:
            return None

    def _handle(self, event: Event | None) -> None:
        if isinstance(event, HeartbeatReply):
            self._obey(event)
        elif isinstance(event, WorkerExit):
            self._seat.ended(event)
            self._publish()
            self._vitals.refresh()
            self._heartbeat.poke()
        elif isinstance(event, signal.Signals):
            self._on_signal(event)
        elif isinstance(event, Exception):
            _log.error("this agent must stop: %s", event)
            self._fatal = event
            self._seat.vacate(grace_s=self._config.grace_s)

    def _obey(self, reply: HeartbeatReply) -> None:
        if self._renewal.is_wanted:
            self._renewal.ask()
        else:
            self._direct.open()
            if reply.renew:
                self._renewal.ask()
        self._direct.refuse(reply.revoked)
        self._vitals.hub_said_time(reply.hub_time)
        self._vitals.ask(reply.measure_ticket, reply.peers)
        if not self.heard:
            self.heard = True
            self._vitals.start()
        if not self._is_ending:
            self._seat.want(reply.assignment, stop=reply.stop_worker)

    def _on_signal(self, number: signal.Signals) -> None:
        if number in (DRAIN, UNDRAIN):
            self._is_drained = number == DRAIN
            _log.info("%s: %s", number.name, "taking no new work" if self._is_drained else "taking work again")
            self._publish()
            self._heartbeat.poke()
            return
        self._signals.append(number)
        if len(self._signals) > 1:
            _log.warning("%s again: not waiting for the worker any more", number.name)
            self._seat.vacate(grace_s=0.0)
            return
        patience = f"{self._config.drain_s:.0f} s"
        _log.info("%s: draining: the worker has %s to push and leave; once more ends it now", number.name, patience)
        self._seat.vacate(grace_s=self._config.drain_s)
        self._publish()
        self._heartbeat.poke()

    # ---- the heartbeat's view ----

    @property
    def _is_ending(self) -> bool:
        return bool(self._signals) or self._fatal is not None

    def _publish(self) -> None:
        with self._status_lock:
            self._status = (self._seat.report, self._is_ending or self._is_drained)

    def _has_work(self) -> bool:
        """A worker runs or is about to: nothing may disturb it."""
        with self._status_lock:
            return self._status[0].state in ("starting", "running")

    def _compose(self, sequence: int, known_revision: int, wait_s: float) -> HeartbeatRequest:
        with self._status_lock:
            worker, draining = self._status
        told = self._vitals.told
        return HeartbeatRequest(
            agent_incarnation=self._incarnation,
            sequence=sequence,
            known_revision=known_revision,
            wait_s=wait_s,
            location=self._config.location,
            claimed=self._config.claimed,
            measured=told.measured,
            measured_age_s=told.age_s,
            measure_ticket=told.ticket,
            facts=self._facts,
            worker=worker,
            draining=draining,
            allow_code=self._config.allow_code,
            offer=self._direct.offer(),
            links=self._direct.links(),
        )

    # ---- the end ----

    def _say_goodbye(self) -> int:
        self._heartbeat.stop()
        if self._fatal is not None:
            raise self._fatal
        self._shipper.close(deadline_s=LEAVE_S)
        client = self._client(LEAVE_S)
        try:
            client.call("POST", "/v1/node/leave", LeaveRequest(agent_incarnation=self._incarnation), Ok)
            _log.info("node %s has left", self._identity.node_id)
        except CiuicError as error:  # the hub will notice the silence
            _log.warning("the hub could not be told that this node leaves: %s", error.message)
        finally:
            client.close()
        return 0 if len(self._signals) == 1 else FORCED_EXIT

    def _close(self) -> None:
        """Also after an unexpected error: no process and no thread stays behind."""
        self._seat.close()
        self._heartbeat.stop()
        self._vitals.stop()
        self._renewal.stop()
        self._direct.close()
        self._shipper.close(deadline_s=LEAVE_S)

    def _client(self, timeout_s: float = CONTROL_TIMEOUT_S) -> HubClient:
        identity = self._identity
        authority_pem = identity.authority.read_bytes()
        return HubClient(self._config.url, authority_pem, identity.cert, identity.key, "control", timeout_s)
