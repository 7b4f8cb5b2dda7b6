"""Far places on this machine: a network namespace per site and one for the hub, joined by the switch. Needs root.

    with Sites(evenly_far(bits_per_s=100e6)) as sites:
        server = sites.popen("hub", ["python", "server.py", sites.address("hub")])
        sites.set_path("us", "eu", loss=0.001)
        sites.cut("ap")
        print(sum(t.sent_bytes for t in sites.traffic()))

Real kernel TCP from end to end. What an address is to one site it is to all: 10.77.0.1 is the hub.
"""

import contextlib
import math
import os
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from ciuic.errors import UsageError
from ciuic.lab.links import check_rate
from ciuic.lab.namespaces import MTU_BYTES, Namespace
from ciuic.lab.profiles import Profile
from ciuic.lab.switch_process import HostPlan, PathPlan, SwitchProcess, Traffic

HUB = "hub"
DATACENTRE_BITS_PER_S = 10e9
END_S = 10.0
_NETWORK = "10.77.0."


class Sites:
    """The hosts of a profile. Leaving the `with` block ends the processes started by `popen` and removes the hosts.

    Raises UsageError where namespaces cannot be made, and for places that the profile does not have.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        hub_bits_per_s: float = DATACENTRE_BITS_PER_S,
        seed: int = 0,
        nice: int = 0,
        host_names: bool = False,
        mtu_bytes: int = MTU_BYTES,
    ) -> None:
        """`hub_bits_per_s`: the hub's own access link, each way, shared by all sites. `nice`: of what runs there.

        `host_names`: each place is a machine whose host name is the place's, and nothing resolves it.
        """
        check_rate(HUB, hub_bits_per_s)
        self.profile = profile
        self.places = (HUB, *profile.locations)
        self._hub_bits_per_s = hub_bits_per_s
        self._seed = seed
        self._nice = nice
        self._host_names, self._mtu_bytes = host_names, mtu_bytes
        self._stack = contextlib.ExitStack()
        self._spaces: dict[str, Namespace] = {}
        self._processes: list[subprocess.Popen[Any]] = []
        self._switch: SwitchProcess | None = None

    def __enter__(self) -> Self:
        try:
            for number, place in enumerate(self.places, start=1):
                name = place if self._host_names else ""
                space = Namespace(f"{_NETWORK}{number}", mtu_bytes=self._mtu_bytes, host_name=name)
                self._spaces[place] = self._stack.enter_context(space)
            plans = [self._host(place) for place in self.places]
            self._switch = SwitchProcess(plans, self._paths(), seed=self._seed)
            self._stack.callback(self._switch.close)
            self._stack.callback(self._end_processes)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def switch_pid(self) -> int:
        """The process that moves the packets."""
        if self._switch is None:
            raise UsageError("the sites are not up")
        return self._switch.pid

    # ---- hosts

    def address(self, place: str) -> str:
        """The host's IPv4 address, the same from everywhere."""
        return self._space(place).address

    def command(self, place: str, argv: Sequence[str]) -> list[str]:
        """A command line that runs `argv` at this place; works while this process holds the sites."""
        return self._space(place).command(argv, nice=self._nice)

    def popen(
        self, place: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process there (`env` is added to this process's environment); `options` go to subprocess.Popen."""
        environment = {**os.environ, **(env or {})}
        process = subprocess.Popen(self.command(place, argv), env=environment, **options)
        self._processes.append(process)
        return process

    @contextmanager
    def inside(self, place: str) -> Generator[None]:
        """Sockets that this thread opens meanwhile belong to that host."""
        with self._space(place).inside():
            yield

    # ---- the network

    def set_link(self, place: str, *, up_bits_per_s: float | None = None, down_bits_per_s: float | None = None) -> None:
        """Change the access link; what is queued keeps its time."""
        rates = {"up_bits_per_s": up_bits_per_s, "down_bits_per_s": down_bits_per_s}
        changed = {name: rate for name, rate in rates.items() if rate is not None}
        for rate in changed.values():
            check_rate(place, rate)
        self._space(place)
        self._ask(do="link", host=place, **changed)

    def set_path(
        self, one: str, other: str, *, delay_s: float | None = None, loss: float | None = None, both_ways: bool = True
    ) -> None:
        """Change the path between two places. Raises UsageError for a delay or loss that no path has."""
        if not (0 <= (delay_s or 0.0) < 60 and 0 <= (loss or 0.0) <= 1):
            raise UsageError(f"no path has {delay_s} s and {loss} loss", cause="0 to 60 s, and a fraction of 0 to 1")
        changed = {name: value for name, value in (("delay_s", delay_s), ("loss", loss)) if value is not None}
        self._change(one, other, changed, both_ways=both_ways)

    def cut(self, place: str, *others: str) -> None:
        """Nothing passes between this place and the others (all when none is named) until `mend`."""
        for other in others or self._all_but(place):
            self._change(place, other, {"is_cut": True})

    def mend(self, place: str, *others: str) -> None:
        """Undo `cut`."""
        for other in others or self._all_but(place):
            self._change(place, other, {"is_cut": False})

    def traffic(self) -> list[Traffic]:
        """Counters of every direction between two places, as of now."""
        if self._switch is None:
            raise UsageError("the sites are not up")
        return self._switch.traffic()

    # ---- inside

    def _space(self, place: str) -> Namespace:
        if place not in self._spaces:
            raise UsageError(f"there is no place {place!r}", next=f"one of {', '.join(self.places)}")
        return self._spaces[place]

    def _all_but(self, place: str) -> list[str]:
        return [other for other in self.places if other != place]

    def _change(self, one: str, other: str, changed: dict[str, Any], *, both_ways: bool = True) -> None:
        self._space(one), self._space(other)
        for source, target in ((one, other), (other, one)) if both_ways else ((one, other),):
            self._ask(do="path", source=source, target=target, **changed)

    def _ask(self, **request: Any) -> Any:
        if self._switch is None:
            raise UsageError("the sites are not up")
        return self._switch.ask(**request)

    def _host(self, place: str) -> HostPlan:
        space = self._spaces[place]
        up = down = self._hub_bits_per_s
        if place != HUB:
            link = self.profile.site(place).link
            up, down = link.up_bits_per_s, link.down_bits_per_s
        return HostPlan(name=place, address=space.address, tun_fd=space.tun_fd, up_bits_per_s=up, down_bits_per_s=down)

    def _paths(self) -> list[PathPlan]:
        pairs = [(one, other) for one in self.places for other in self.places if one != other]
        return [self._path(one, other) for one, other in pairs]

    def _path(self, one: str, other: str) -> PathPlan:
        """The way to the hub has the loss and jitter of the site's link; between two sites both links count."""
        sites = [self.profile.site(place) for place in (one, other) if place != HUB]
        arrives = math.prod(1 - site.loss for site in sites)
        jitter_s = sum(site.link.jitter_s for site in sites)
        return PathPlan(
            source=one,
            target=other,
            delay_s=self.profile.one_way_s(one, other, hub=HUB),
            loss=1 - arrives,
            jitter_s=jitter_s,
        )

    def _end_processes(self) -> None:
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            process.kill()
        for process in running:
            process.wait(END_S)
