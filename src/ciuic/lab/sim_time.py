"""Virtual time for the simulator: an event queue, processes that stop or die, and lines that lose things."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

from ciuic.errors import CiuicError

if TYPE_CHECKING:
    from ciuic.lab.sim_hub import SimHub

Event = tuple[float, int, Callable[..., None], tuple[Any, ...]]
"""Time, order of planning, what to call and with what."""
SLOTS_PER_S = 64.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
"""Between two tries of a request that was not answered, as the real client waits."""
SMALL_BYTES = 2_000
"""A control message with what TLS and HTTP add."""


class Timeline:
    """Events in order of their times; those of one time in the order in which they were planned.

    Time is cut into slots: only the events of the present slot are kept in order, the others lie in theirs.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.count = 0
        """Events so far."""
        self._planned = 0
        self._slot = -1
        """The present one."""
        self._heap: list[Event] = []
        """Its events."""
        self._later: dict[int, list[Event]] = {}
        """By slot."""
        self._slots: list[int] = []
        """A heap of the slots in `_later`."""

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Plan `call(*arguments)`."""
        self._planned = number = self._planned + 1
        time_s = self.now_s + delay_s
        slot = int(time_s * SLOTS_PER_S)
        if slot <= self._slot:
            heappush(self._heap, (time_s, number, call, arguments))
            return
        events = self._later.get(slot)
        if events is None:
            events = self._later[slot] = []
            heappush(self._slots, slot)
        events.append((time_s, number, call, arguments))

    def run(self, *, until_s: float, stop: Callable[[], bool]) -> None:
        """Let time pass until `stop()` holds, which is asked once per virtual second, or until that time."""
        ask_s = self.now_s
        while self._has_next():
            heap = self._heap
            while heap and heap[0][0] <= until_s:
                time_s, _, call, arguments = heappop(heap)
                self.now_s = time_s
                self.count += 1
                call(*arguments)
                if time_s >= ask_s:
                    if stop():
                        return
                    ask_s = time_s + 1.0
            if heap:
                return

    def _has_next(self) -> bool:
        """Go to the next slot when the present one is over; False when nothing is planned."""
        if not self._heap and self._slots:
            self._slot = heappop(self._slots)
            self._heap = self._later.pop(self._slot)
            heapify(self._heap)
        return bool(self._heap)


@dataclass(kw_only=True, slots=True)
class Line:
    """A node's access to the network."""

    up_bits_per_s: float
    down_bits_per_s: float
    one_way_s: float
    jitter_s: float
    loss: float
    """Probability that a message or its answer is lost as a whole, so that it is sent again."""
    chance: random.Random
    is_cut: bool = False

    def up_s(self, size_bytes: int) -> float:
        """How long a message takes to the hub; -1: it gets lost."""
        draw = self.chance.random
        if self.is_cut or (self.loss > 0 and draw() < self.loss):
            return -1.0
        return self.one_way_s + self.jitter_s * draw() + 8 * size_bytes / self.up_bits_per_s

    def down_s(self, size_bytes: int) -> float:
        """How long an answer takes from the hub; -1: it gets lost."""
        draw = self.chance.random
        if self.is_cut or (self.loss > 0 and draw() < self.loss):
            return -1.0
        return self.one_way_s + self.jitter_s * draw() + 8 * size_bytes / self.down_bits_per_s


class Process:
    """Something that runs on a node: it can be killed for good, or stopped for a while."""

    def __init__(self, timeline: Timeline, line: Line, hub: "SimHub") -> None:
        self.timeline, self.line, self.hub = timeline, line, hub
        self.is_alive = True
        self.stopped_until_s = 0.0

    def kill(self) -> None:
        """kill -9."""
        self.is_alive = False

    def stop(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        self.stopped_until_s = self.timeline.now_s + seconds

    def later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Do this after a while, if the process still runs then."""
        self.timeline.after(delay_s, self.now, call, *arguments)

    def now(self, call: Callable[..., None], *arguments: Any) -> None:
        """Do this when the process runs."""
        if not self.is_alive:
            return
        if self.stopped_until_s > self.timeline.now_s:
            self.timeline.after(self.stopped_until_s - self.timeline.now_s, self.now, call, *arguments)
        else:
            call(*arguments)


Ask = Callable[["Call"], Any]


def _nothing(call: "Call") -> None:
    """Renewed before it is sent."""


class Call:
    """One request to the hub, sent again until it is answered. `ask` may raise: the error is the answer."""

    __slots__ = ("_ask", "_down_bytes", "_process", "_renew", "_then", "_tries", "_up_bytes")

    def __init__(
        self,
        process: Process,
        ask: Ask | None,
        then: Callable[[Any], None],
        *,
        up_bytes: int = SMALL_BYTES,
        down_bytes: int = SMALL_BYTES,
        renew: Callable[[], Ask] | None = None,
    ) -> None:
        """`ask(call)` gives the answer, or `HELD` when the hub answers later by `call.answer`.

        `renew` makes a new `ask` for each try.
        """
        self._process, self._then, self._renew = process, then, renew
        self._ask: Ask = ask or _nothing
        self._up_bytes, self._down_bytes = up_bytes, down_bytes
        self._tries = 0

    def send(self) -> None:
        """On its way."""
        process = self._process
        if self._renew is not None:
            self._ask = self._renew()
        delay_s = process.line.up_s(self._up_bytes)
        if delay_s < 0:
            self.again()
        else:
            process.timeline.after(delay_s, self._arrive, self._ask)

    def again(self) -> None:
        """It, or its answer, was lost."""
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**self._tries)
        self._tries += 1
        self._process.later(pause_s * (0.5 + self._process.line.chance.random()), self.send)

    def _arrive(self, ask: Ask) -> None:
        process = self._process
        hub = process.hub
        if process.line.is_cut or not hub.is_up:
            self.again()
            return
        if hub.is_paused:
            hub.backlog.append(lambda: self._arrive(ask))
            return
        try:
            answer = ask(self)
        except CiuicError as error:
            answer = error
        if answer is not HELD:
            self.answer(answer)

    def answer(self, value: Any, size_bytes: int = 0) -> None:
        """The hub's answer is on its way."""
        process = self._process
        delay_s = process.line.down_s(size_bytes or self._down_bytes)
        if delay_s < 0:
            self.again()
        else:
            process.timeline.after(delay_s, process.now, self._then, value)


HELD = object()
"""The hub holds this request for now."""
