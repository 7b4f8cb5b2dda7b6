"""What can be done to a lab on purpose, in words, and how each is taken back.

Order(where="us-west", kind="delay", value="200 ms", for_s=30)
Order(where="us-west-eu-central", kind="cut")
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ciuic.errors import CiuicError, UsageError
from ciuic.lab.lab import Lab
from ciuic.lab.network import PathNow, check_place
from ciuic.lab.switch_sites import HUB
from ciuic.units import format_duration, format_rate, parse_duration_s, parse_rate

KINDS = {
    "delay": "DURATION: one way, on the way to the hub (PLACE) or between two places (A-B)",
    "rate": "RATE or UP/DOWN: of the place's access link",
    "loss": "PERCENT of the packets, like 1% (namespaces only)",
    "cut": "nothing passes: between the place and all others, or between A and B",
    "mend": "undo delay, rate, loss and cut",
    "kill": "kill -9 of everything at the place",
    "kill-agent": "kill -9 of the agent alone",
    "kill-worker": "kill -9 of the training processes; the agent starts them again",
    "stop": "SIGSTOP to everything at the place",
    "cont": "SIGCONT",
    "drain": "SIGTERM to the agent: finish the step, push, leave",
    "start": "start the agent again, as the node that it was",
    "hub-kill": "kill -9 of the hub",
    "hub-restart": "start the hub again (after a kill, when it still runs)",
}
VALUED = ("delay", "rate", "loss")
DRAIN_S = 90.0
LONGEST_S = 86_400.0
Undo = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Order:
    """One fault as a person asks for it. Raises UsageError for what cannot be asked for."""

    where: str
    """A place, or two with a dash between them; `hub` for the kinds of the hub."""
    kind: str
    value: str = ""
    for_s: float | None = None
    """Undo it after so long."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"there is no fault {self.kind!r}", next=f"one of {', '.join(KINDS)}")
        if (self.kind in VALUED) != bool(self.value):
            needs = f"needs a value: {KINDS[self.kind]}" if self.kind in VALUED else "takes no value"
            raise UsageError(f"{self.kind} {needs}")
        if self.for_s is not None and not 0 < self.for_s <= LONGEST_S:
            raise UsageError(f"a fault cannot last for {self.for_s:g} s", next="choose up to 24 h")

    @property
    def text(self) -> str:
        words = [self.kind, "of" if self.kind in VALUED else "", self.where, self.value and f"= {self.value}"]
        lasting = f"for {format_duration(self.for_s)}" if self.for_s else ""
        return " ".join(word for word in (*words, lasting) if word)


@dataclass(frozen=True, kw_only=True)
class Active:
    """A fault that will be undone by itself."""

    text: str
    until: float
    """Of time.monotonic."""


class Faults:
    """Carries out orders on a lab, and undoes those that were for a while only."""

    def __init__(self, lab: Lab, *, on_undone: Callable[[str], object] | None = None) -> None:
        """`on_undone` is told what has been undone, or why that did not work; from a thread of its own."""
        self._lab = lab
        self._tell = on_undone or (lambda _: None)
        self._lock = threading.Lock()
        self._timers: dict[int, tuple[Active, threading.Timer, Undo]] = {}
        self._count = 0
        self._closed = False

    def apply(self, order: Order) -> str:
        """Do it; what was done, in words. Raises UsageError for places and values that cannot be."""
        undo = self._do(order)
        if order.for_s is not None:
            if undo is None:
                raise UsageError(f"{order.kind} cannot be undone, so it has no --for")
            self._later(order, order.for_s, undo)
        return order.text

    def active(self) -> list[Active]:
        """What will still be undone."""
        with self._lock:
            return [entry[0] for entry in self._timers.values()]

    def close(self) -> None:
        """Nothing is undone any more."""
        with self._lock:
            self._closed = True
            timers = [entry[1] for entry in self._timers.values()]
            self._timers.clear()
        for timer in timers:
            timer.cancel()
        for timer in timers:
            if timer is not threading.current_thread():
                timer.join()

    # ---- time

    def _later(self, order: Order, for_s: float, undo: Undo) -> None:
        with self._lock:
            self._count += 1
            number = self._count
            timer = threading.Timer(for_s, self._undo, (number,))
            timer.daemon = True
            self._timers[number] = (Active(text=order.text, until=time.monotonic() + for_s), timer, undo)
        timer.start()

    def _undo(self, number: int) -> None:
        with self._lock:
            entry = self._timers.pop(number, None)
            if entry is None or self._closed:
                return
        active, _, undo = entry
        try:
            undo()
            self._tell(f"over: {active.text}")
        except CiuicError as error:  # somebody has done something else in the meantime
            self._tell(f"not undone: {active.text}: {error.message}")

    # ---- what is done

    def _do(self, order: Order) -> Undo | None:
        lab, kind = self._lab, order.kind
        if kind.startswith("hub-"):
            return self._hub(kind)
        if kind in ("delay", "loss", "cut", "mend"):
            return self._path(order)
        if kind == "rate":
            return self._rate(order)
        place = order.where
        check_place(lab.network, place)
        if place == HUB and kind in ("start", "drain", "kill-agent", "kill-worker"):
            raise UsageError(f"{kind} is for agents; the hub has hub-kill and hub-restart")
        if place == HUB and kind == "kill":
            return self._hub("hub-kill")
        return self._process(kind, place)

    def _process(self, kind: str, place: str) -> Undo | None:
        lab = self._lab
        again = lambda: lab.start_node(place)  # noqa: E731 - one line says it
        if kind == "kill":
            lab.kill(place)
            return again
        if kind == "kill-agent":
            lab.kill_agent(place)
            return again
        if kind == "drain":
            lab.drain(place, DRAIN_S)
            return again
        if kind == "stop":
            lab.suspend(place)
            return lambda: lab.resume(place)
        if kind == "cont":
            lab.resume(place)
        elif kind == "start":
            lab.start_node(place)
            return lambda: lab.kill(place)
        elif not lab.kill_workers(place):
            raise UsageError(f"no worker runs at {place}")
        return None

    def _hub(self, kind: str) -> Undo | None:
        lab = self._lab
        if kind == "hub-kill" or lab.runs(HUB):
            lab.kill(HUB)
        if kind == "hub-kill":
            return lab.start_hub
        lab.start_hub()
        return None

    def _rate(self, order: Order) -> Undo:
        network, place = self._lab.network, order.where
        check_place(network, place)
        up, _, down = order.value.partition("/")
        before = network.links.get(place)
        network.set_link(place, parse_rate(up), parse_rate(down or up))
        if before is None:
            raise UsageError(f"{place} has no link of its own")
        return lambda: network.set_link(place, before.up_bits_per_s, before.down_bits_per_s)

    def _path(self, order: Order) -> Undo | None:
        network = self._lab.network
        pairs = self._pairs(order)
        before = {pair: network.paths[pair] for pair in pairs if pair in network.paths}
        for one, other in pairs:
            network.set_path(one, other, self._changed(order, one, other))
        if order.kind == "mend":
            self._mend_link(order.where)
            return None

        def undo() -> None:
            for (one, other), path in before.items():
                network.set_path(one, other, path)

        return undo

    def _changed(self, order: Order, one: str, other: str) -> PathNow:
        network, pair = self._lab.network, frozenset({one, other})
        now = network.paths.get(pair, PathNow(delay_s=0.0))
        if order.kind == "delay":
            return replace(now, delay_s=parse_duration_s(order.value))
        if order.kind == "loss":
            return replace(now, loss=parse_share(order.value))
        if order.kind == "cut":
            return replace(now, is_cut=True)
        return network.first_paths.get(pair, now)

    def _mend_link(self, place: str) -> None:
        first = self._lab.network.first_links.get(place)
        if first is not None and first != self._lab.network.links.get(place):
            self._lab.network.set_link(place, first.up_bits_per_s, first.down_bits_per_s)

    def _pairs(self, order: Order) -> list[frozenset[str]]:
        """The ways that are meant. A place's name may have dashes, so every way to read A-B is tried."""
        network, where = self._lab.network, order.where
        if where in network.places:
            everywhere = order.kind in ("cut", "mend") or where == HUB
            return [pair for pair in network.paths if where in pair and (everywhere or HUB in pair)]
        words = where.split("-")
        for count in range(1, len(words)):
            one, other = "-".join(words[:count]), "-".join(words[count:])
            if one in network.places and other in network.places and one != other:
                return [frozenset({one, other})]
        raise UsageError(
            f"{where!r} is neither a place nor two places A-B", next=f"places are {', '.join(network.places)}"
        )


def parse_share(text: str) -> float:
    """`"1%"` or `"0.5 %"` as a fraction. Raises UsageError."""
    number = text.strip().removesuffix("%").strip()
    try:
        share = float(number) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"{text!r} is not a share of packets", next="write for example 0.5%")
    return share


def path_text(path: PathNow) -> str:
    """A way between two places in a few words."""
    words = [f"{format_duration(path.delay_s)} one way"]
    words += [f"{path.loss:.2%} loss"] if path.loss else []
    words += ["CUT"] if path.is_cut else []
    return ", ".join(words)


def rate_text(up_bits_per_s: float, down_bits_per_s: float) -> str:
    """Rates of a link in a few words."""
    if up_bits_per_s == down_bits_per_s:
        return format_rate(up_bits_per_s)
    return f"{format_rate(up_bits_per_s)} up, {format_rate(down_bits_per_s)} down"
