"""Emulated networks by name: sites, their links to the hub, and what their operators claim to have."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

from ciuic.errors import UsageError
from ciuic.lab.links import Link

_MBIT = 1e6
MOST_SITES = 64
_NEXT_DOOR_S = 0.002
"""Round trip between two sites of one place."""


@dataclass(frozen=True, kw_only=True)
class Flapping:
    """A link that goes away and comes back."""

    every_s: float
    away_s: float


@dataclass(frozen=True, kw_only=True)
class Site:
    """One place of a profile."""

    link: Link
    """From the site to the hub."""
    claimed: dict[str, float]
    """What its operator says it has: gpu (a number), bandwidth_gbit_s."""
    loss: float = 0.0
    """Probability that a packet of its link vanishes; only network namespaces have packets."""
    flapping: Flapping | None = None

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

    def one_way_s(self, one: str, other: str, *, hub: str) -> float:
        """Delay between two places; `hub` is the name of the hub's."""
        if hub in (one, other):
            return self.site(other if one == hub else one).link.one_way_delay_s
        return self.round_trips_s[frozenset({one, other})] / 2


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


def home_uplink() -> Profile:
    """Three homes with cable or fibre lines: slower up than down, with jitter; the hub is in a data centre."""
    links = [
        Link(
            name=f"home-{number}",
            up_bits_per_s=20 * _MBIT,
            down_bits_per_s=200 * _MBIT,
            one_way_delay_s=0.012 + 0.003 * number,
            jitter_s=0.008,
        )
        for number in (1, 2, 3)
    ]
    return _star("home-uplink", "a data centre", [Site(link=link, claimed={"gpu": 1}) for link in links])


def datacentre_pair() -> Profile:
    """Two data centres 30 ms apart, the hub in the first; 1 Gbit/s is what emulation in user space can carry."""
    near = _site("dc-1", mbit_s=1000, round_trip_s=0.001, gpu=8, bandwidth_gbit_s=1)
    far = _site("dc-2", mbit_s=1000, round_trip_s=0.030, gpu=8, bandwidth_gbit_s=1)
    return _star("datacentre-pair", "dc-1", [near, far])


def lossy() -> Profile:
    """Three sites 80 ms away whose links lose 0.1 %, 0.5 % and 1 % of the packets."""
    sites = [
        replace(_site(name, mbit_s=50, round_trip_s=0.080, gpu=1, bandwidth_gbit_s=0.05), loss=loss)
        for name, loss in (("loss-0.1", 0.001), ("loss-0.5", 0.005), ("loss-1", 0.010))
    ]
    return _star("lossy", "a data centre", sites)


def flapping() -> Profile:
    """Three sites 40 ms away; the link of the last is away for 6 s in every 30 s."""
    sites = [_site(name, mbit_s=50, round_trip_s=0.040, gpu=1, bandwidth_gbit_s=0.05) for name in ("firm-1", "firm-2")]
    restless = _site("flaps", mbit_s=50, round_trip_s=0.040, gpu=1, bandwidth_gbit_s=0.05)
    sites.append(replace(restless, flapping=Flapping(every_s=30.0, away_s=6.0)))
    return _star("flapping", "a data centre", sites)


PROFILES: dict[str, Callable[[], Profile]] = {
    "continents": continents,
    "home-uplink": home_uplink,
    "datacentre-pair": datacentre_pair,
    "lossy": lossy,
    "flapping": flapping,
}


def profile_named(name: str) -> Profile:
    """Raises UsageError naming the ones that there are."""
    if name not in PROFILES:
        raise UsageError(f"there is no profile {name!r}", next=f"one of {', '.join(PROFILES)}")
    return PROFILES[name]()


def describe(name: str) -> str:
    """What a profile is, in one line."""
    return (PROFILES[name].__doc__ or "").partition("\n")[0].rstrip(".")


def with_sites(profile: Profile, count: int) -> Profile:
    """The profile with its first `count` sites; where it has fewer, more of them, each beside one that is there.

    Raises UsageError for a count that no lab can have.
    """
    if not 1 <= count <= MOST_SITES:
        raise UsageError(f"a lab cannot have {count} nodes", next=f"choose 1 to {MOST_SITES}")
    old = profile.sites
    origin: dict[str, str] = {}
    sites: list[Site] = []
    for number in range(count):
        site, copy = old[number % len(old)], number // len(old)
        name = site.location if copy == 0 else f"{site.location}-{copy + 1}"
        origin[name] = site.location
        sites.append(replace(site, link=replace(site.link, name=name)))
    pairs = {
        frozenset({one, other}): _NEXT_DOOR_S
        if origin[one] == origin[other]
        else profile.round_trips_s[frozenset({origin[one], origin[other]})]
        for one, other in combinations(origin, 2)
    }
    return replace(profile, sites=tuple(sites), round_trips_s=pairs)


def _star(name: str, hub_location: str, sites: list[Site]) -> Profile:
    """Two sites are as far from each other as by way of the hub."""
    pairs = {
        frozenset({one.location, other.location}): one.link.round_trip_s + other.link.round_trip_s
        for one, other in combinations(sites, 2)
    }
    return Profile(name=name, hub_location=hub_location, sites=tuple(sites), round_trips_s=pairs)


def _site(name: str, *, mbit_s: float, round_trip_s: float, gpu: float, bandwidth_gbit_s: float) -> Site:
    link = Link(
        name=name,
        up_bits_per_s=mbit_s * _MBIT,
        down_bits_per_s=mbit_s * _MBIT,
        one_way_delay_s=round_trip_s / 2,
        jitter_s=0.02 * round_trip_s,
    )
    return Site(link=link, claimed={"gpu": gpu, "bandwidth_gbit_s": bandwidth_gbit_s})
