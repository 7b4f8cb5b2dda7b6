"""Emulated networks by name: sites, their links to the hub, and what their operators claim to have."""

from dataclasses import dataclass

from ciuic.errors import UsageError
from ciuic.lab.links import Link

_MBIT = 1e6


@dataclass(frozen=True, kw_only=True)
class Site:
    """One place of a profile."""

    link: Link
    """From the site to the hub."""
    claimed: dict[str, float]
    """What its operator says it has: gpu (a number), bandwidth_gbit_s."""

    @property
    def location(self) -> str:
        return self.link.name


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Sites around one hub."""

    name: str
    hub_location: str
    """The site that the hub stands beside."""
    sites: tuple[Site, ...]
    round_trips_s: dict[frozenset[str], float]
    """Between each two sites."""

    def site(self, location: str) -> Site:
        for site in self.sites:
            if site.location == location:
                return site
        raise UsageError(f"profile {self.name} has no site {location!r}", next=f"one of {self.locations}")

    @property
    def locations(self) -> tuple[str, ...]:
        return tuple(site.location for site in self.sites)


def continents() -> Profile:
    """Three continents; the rates and round trips are those of ordinary office uplinks and public cloud regions."""
    return Profile(
        name="continents",
        hub_location="us-west",
        sites=(
            _site("us-west", mbit_s=100, round_trip_s=0.002, gpu=8, bandwidth_gbit_s=10),
            _site("eu-central", mbit_s=50, round_trip_s=0.140, gpu=4, bandwidth_gbit_s=5),
            _site("ap-southeast", mbit_s=80, round_trip_s=0.160, gpu=8, bandwidth_gbit_s=8),
        ),
        round_trips_s={
            frozenset({"us-west", "eu-central"}): 0.140,
            frozenset({"us-west", "ap-southeast"}): 0.160,
            frozenset({"eu-central", "ap-southeast"}): 0.220,
        },
    )


def evenly_far(*, bits_per_s: float) -> Profile:
    """Three continents with the same access rate, 45, 75 and 110 ms one way between them and to the hub."""
    far_s = {"us": 0.045, "eu": 0.075, "ap": 0.110}
    links = [
        Link(name=name, up_bits_per_s=bits_per_s, down_bits_per_s=bits_per_s, one_way_delay_s=delay_s)
        for name, delay_s in far_s.items()
    ]
    return Profile(
        name="continents",
        hub_location="a fourth place",
        sites=tuple(Site(link=link, claimed={}) for link in links),
        round_trips_s={
            frozenset({"us", "eu"}): 0.090,
            frozenset({"us", "ap"}): 0.150,
            frozenset({"eu", "ap"}): 0.220,
        },
    )


def _site(name: str, *, mbit_s: float, round_trip_s: float, gpu: float, bandwidth_gbit_s: float) -> Site:
    link = Link(
        name=name,
        up_bits_per_s=mbit_s * _MBIT,
        down_bits_per_s=mbit_s * _MBIT,
        one_way_delay_s=round_trip_s / 2,
        jitter_s=0.02 * round_trip_s,
    )
    return Site(link=link, claimed={"gpu": gpu, "bandwidth_gbit_s": bandwidth_gbit_s})
