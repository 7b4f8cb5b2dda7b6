"""Populations for the simulator: how fast nodes are, how they are connected, and what goes wrong how often."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ciuic.errors import UsageError
from ciuic.lab.profiles import continents
from ciuic.lab.sim_time import Line

MBIT = 1e6


@dataclass(frozen=True, kw_only=True)
class Troubles:
    """What happens to each node, as means per hour of its life, and to the hub."""

    kill: float = 0.0
    """kill -9 of agent and worker; the node comes back later."""
    worker: float = 0.0
    """Only the worker dies; the agent starts another one."""
    stop: float = 0.0
    """SIGSTOP for a while."""
    cut: float = 0.0
    """Its link is down for a while."""
    twin: float = 0.0
    """A second agent with the same identity starts; the first goes on speaking."""
    drain: float = 0.0
    """The operator drains it; it comes back later."""
    evict: float = 0.0
    """It is evicted; its owner joins again under a new identity."""
    hub_kill: float = 0.0
    """Of the hub, per hour: kill -9, away for a while."""
    hub_pause: float = 0.0
    """Of the hub, per hour: its process stands still for a while."""
    wall_jump: float = 0.0
    """Of the hub, per hour: its wall clock jumps by up to an hour."""

    @property
    def of_nodes(self) -> dict[str, float]:
        """Rates of what happens to one node."""
        return {name: getattr(self, name) for name in ("kill", "worker", "stop", "cut", "twin", "drain", "evict")}

    @property
    def of_hub(self) -> dict[str, float]:
        """Rates of what happens to the hub."""
        return {name: getattr(self, name) for name in ("hub_kill", "hub_pause", "wall_jump")}


@dataclass(frozen=True, kw_only=True)
class Population:
    """One profile."""

    about: str
    step_s: float
    """Median seconds per step."""
    spread: float
    """Of the nodes' speeds: standard deviation of the logarithm."""
    lines: Callable[[random.Random], Line]
    troubles: Troubles


ORDINARY = Troubles(
    kill=1.0,
    worker=1.0,
    stop=1.0,
    cut=1.0,
    twin=0.2,
    drain=0.5,
    evict=0.1,
    hub_kill=12.0,
    hub_pause=12.0,
    wall_jump=6.0,
)
RESTLESS = Troubles(
    kill=3.0,
    worker=3.0,
    stop=4.0,
    cut=20.0,
    twin=0.5,
    drain=1.0,
    evict=0.2,
    hub_kill=20.0,
    hub_pause=20.0,
    wall_jump=6.0,
)


def _near(chance: random.Random) -> Line:
    return Line(
        up_bits_per_s=1000 * MBIT,
        down_bits_per_s=1000 * MBIT,
        one_way_s=0.001,
        jitter_s=0.0002,
        loss=0.0,
        chance=chance,
    )


def _far(chance: random.Random, loss: float = 0.001) -> Line:
    """One of the three continents of `ciuic demo`; access rates vary by half around theirs."""
    link = chance.choice(continents().sites).link
    factor = chance.uniform(0.5, 1.5)
    return Line(
        up_bits_per_s=link.up_bits_per_s * factor,
        down_bits_per_s=link.down_bits_per_s * factor,
        one_way_s=link.one_way_delay_s,
        jitter_s=0.2 * link.one_way_delay_s,
        loss=loss,
        chance=chance,
    )


POPULATIONS: Mapping[str, Population] = {
    "homogeneous": Population(
        about="equal nodes beside the hub", step_s=0.5, spread=0.0, lines=_near, troubles=ORDINARY
    ),
    "continents": Population(
        about="three continents, speeds spread by a quarter", step_s=0.5, spread=0.25, lines=_far, troubles=ORDINARY
    ),
    "flapping": Population(
        about="three continents, links that come and go",
        step_s=0.5,
        spread=0.25,
        lines=lambda chance: _far(chance, 0.02),
        troubles=RESTLESS,
    ),
}


def population(name: str) -> Population:
    """Raises UsageError naming the ones that there are."""
    if name not in POPULATIONS:
        raise UsageError(f"there is no profile {name!r}", next=f"one of {', '.join(POPULATIONS)}")
    return POPULATIONS[name]
