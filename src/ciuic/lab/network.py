"""The two networks on which a lab can stand: network namespaces with a switch (root), or relays (everywhere).

Both know places: `hub` and the sites of a profile. Changes to a link are remembered, so that they can be shown and
taken back.
"""

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

from ciuic.errors import UsageError
from ciuic.lab.gateway import Gateway
from ciuic.lab.links import check_rate
from ciuic.lab.profiles import Profile
from ciuic.lab.relay import LinkRelay
from ciuic.lab.switch_sites import DATACENTRE_BITS_PER_S, HUB, Sites

HUB_PORT = 8443
"""In a namespace, where no other program has it."""
LOCAL = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class PathNow:
    """How the way between two places is at the moment."""

    delay_s: float
    """One way."""
    loss: float = 0.0
    is_cut: bool = False


@dataclass(frozen=True, kw_only=True)
class LinkNow:
    """How a place's access link is at the moment."""

    up_bits_per_s: float
    down_bits_per_s: float


class Network(Protocol):
    """What a lab needs of its network. Methods raise UsageError for places and values that cannot be."""

    kind: str
    places: tuple[str, ...]
    links: dict[str, LinkNow]
    paths: dict[frozenset[str], PathNow]
    first_links: dict[str, LinkNow]
    """As the profile says."""
    first_paths: dict[frozenset[str], PathNow]

    def __enter__(self) -> "Network": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def hub_listens_at(self) -> tuple[str, int]:
        """Address and port on which the hub must listen."""
        ...

    @property
    def operator_url(self) -> str:
        """The hub's address for programs of this machine."""
        ...

    def hub_url(self, place: str) -> str:
        """The hub's address for programs at a place."""
        ...

    def command(self, place: str, argv: Sequence[str]) -> list[str]:
        """A command line that runs `argv` at this place."""
        ...

    def set_link(self, place: str, up_bits_per_s: float, down_bits_per_s: float) -> None:
        """Change the rates of an access link."""
        ...

    def set_path(self, one: str, other: str, path: PathNow) -> None:
        """Change the way between two places."""
        ...


def check_place(network: Network, place: str) -> None:
    """Raises UsageError for a place that the lab does not have."""
    if place not in network.places:
        raise UsageError(f"the lab has no place {place!r}", next=f"one of {', '.join(network.places)}")


def _hub_paths(profile: Profile) -> dict[frozenset[str], PathNow]:
    """Between the hub and each site, as the profile says."""
    return {
        frozenset({HUB, site.location}): PathNow(delay_s=site.link.one_way_delay_s, loss=site.loss)
        for site in profile.sites
    }


def _site_links(profile: Profile) -> dict[str, LinkNow]:
    """Of all sites, as the profile says."""
    return {
        site.location: LinkNow(up_bits_per_s=site.link.up_bits_per_s, down_bits_per_s=site.link.down_bits_per_s)
        for site in profile.sites
    }


class SiteNetwork:
    """Namespaces: every place is a host of its own, whose host name nothing resolves. Needs root."""

    kind: str = "namespaces"

    def __init__(
        self, profile: Profile, *, hub_bits_per_s: float = DATACENTRE_BITS_PER_S, seed: int = 0, nice: int = 0
    ) -> None:
        self._sites = Sites(profile, hub_bits_per_s=hub_bits_per_s, seed=seed, nice=nice, host_names=True)
        self._stack = contextlib.ExitStack()
        self._gateway: Gateway | None = None
        self.places: tuple[str, ...] = (HUB, *profile.locations)
        self.links = {HUB: LinkNow(up_bits_per_s=hub_bits_per_s, down_bits_per_s=hub_bits_per_s)}
        self.links |= _site_links(profile)
        self.paths = _hub_paths(profile)
        self.paths |= {pair: PathNow(delay_s=trip_s / 2) for pair, trip_s in profile.round_trips_s.items()}
        for one, other in (pair for pair in self.paths if HUB not in pair):
            arrives = (1 - profile.site(one).loss) * (1 - profile.site(other).loss)
            pair = frozenset({one, other})
            self.paths[pair] = replace(self.paths[pair], loss=1 - arrives)
        self.first_links, self.first_paths = dict(self.links), dict(self.paths)

    def __enter__(self) -> Self:
        self._stack.enter_context(self._sites)
        try:
            gateway = Gateway(self._sites.inside(HUB), (self._sites.address(HUB), HUB_PORT))
            self._gateway = self._stack.enter_context(gateway)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def hub_listens_at(self) -> tuple[str, int]:
        return self._sites.address(HUB), HUB_PORT

    @property
    def operator_url(self) -> str:
        if self._gateway is None:
            raise UsageError("the lab's network is not up")
        host, port = self._gateway.address
        return f"https://{host}:{port}"

    def hub_url(self, place: str) -> str:
        check_place(self, place)
        return f"https://{self._sites.address(HUB)}:{HUB_PORT}"

    def command(self, place: str, argv: Sequence[str]) -> list[str]:
        check_place(self, place)
        return self._sites.command(place, argv)

    def set_link(self, place: str, up_bits_per_s: float, down_bits_per_s: float) -> None:
        check_place(self, place)
        self._sites.set_link(place, up_bits_per_s=up_bits_per_s, down_bits_per_s=down_bits_per_s)
        self.links[place] = LinkNow(up_bits_per_s=up_bits_per_s, down_bits_per_s=down_bits_per_s)

    def set_path(self, one: str, other: str, path: PathNow) -> None:
        pair = frozenset({one, other})
        if pair not in self.paths:
            raise UsageError(f"there is no way between {one} and {other}", next=f"name two of {', '.join(self.places)}")
        self._sites.set_path(one, other, delay_s=path.delay_s, loss=path.loss)
        (self._sites.cut if path.is_cut else self._sites.mend)(one, other)
        self.paths[pair] = path


class RelayNetwork:
    """Relays: every site reaches the hub through one of its own; all programs run on this machine's own loopback."""

    kind: str = "relay"

    def __init__(self, profile: Profile, *, seed: int = 0) -> None:
        self._profile, self._seed = profile, seed
        self._stack = contextlib.ExitStack()
        self._relays: dict[str, LinkRelay] = {}
        self._port = 0
        self.places: tuple[str, ...] = (HUB, *profile.locations)
        self.links = _site_links(profile)
        self.paths = {pair: replace(path, loss=0.0) for pair, path in _hub_paths(profile).items()}
        self.first_links, self.first_paths = dict(self.links), dict(self.paths)

    def __enter__(self) -> Self:
        with socket.create_server((LOCAL, 0)) as free:
            self._port = free.getsockname()[1]
        try:
            for number, site in enumerate(self._profile.sites):
                relay = LinkRelay(site.link, (LOCAL, self._port), seed=100 * self._seed + number)
                self._relays[site.location] = self._stack.enter_context(relay)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def hub_listens_at(self) -> tuple[str, int]:
        return LOCAL, self._port

    @property
    def operator_url(self) -> str:
        return f"https://{LOCAL}:{self._port}"

    def hub_url(self, place: str) -> str:
        check_place(self, place)
        if place == HUB:
            return self.operator_url
        host, port = self._relays[place].address
        return f"https://{host}:{port}"

    def command(self, place: str, argv: Sequence[str]) -> list[str]:
        check_place(self, place)
        return list(argv)

    def set_link(self, place: str, up_bits_per_s: float, down_bits_per_s: float) -> None:
        check_place(self, place)
        check_rate(place, up_bits_per_s)
        check_rate(place, down_bits_per_s)
        if place == HUB:
            raise UsageError("a relay has no link of the hub's own", next="slow down the places, or use namespaces")
        self._relays[place].set_rate(up_bits_per_s, down_bits_per_s)
        self.links[place] = LinkNow(up_bits_per_s=up_bits_per_s, down_bits_per_s=down_bits_per_s)

    def set_path(self, one: str, other: str, path: PathNow) -> None:
        pair = frozenset({one, other})
        if pair not in self.paths:
            raise UsageError(
                f"there is no way between {one} and {other}",
                cause="over relays every place knows the hub only",
                next="run as root on Linux, where the lab stands on network namespaces",
            )
        if path.loss:
            raise UsageError(
                "a relay loses nothing",
                cause="it works on streams, not on packets",
                next="run as root on Linux, where the lab stands on network namespaces",
            )
        relay = self._relays[next(place for place in pair if place != HUB)]
        if path.delay_s != self.paths[pair].delay_s:
            relay.set_delay(path.delay_s)
        relay.set_down(path.is_cut)
        self.paths[pair] = path
