"""What goes wrong in a simulation: drawn from the profile's rates, one seed gives one series of troubles."""

import math
import random
from collections import Counter
from typing import TYPE_CHECKING

from ciuic.lab.sim_node import Agent, SimNode

if TYPE_CHECKING:
    from ciuic.lab.sim import Simulation

HOUR_S = 3600.0
EXCUSE_S = 25.0
"""After a trouble a node may count as silent for so much longer: its grace, its backoff, a lost message or two."""
TRIES = 20
"""To find a living node."""
SAME_IDENTITY = 0.7
"""Of the nodes that come back after a kill: the others have lost their disk and join anew."""


class Trouble:
    """Draws troubles and carries them out."""

    def __init__(self, simulation: "Simulation") -> None:
        self._sim = simulation
        self._chance = random.Random(simulation.config.seed + 1)
        self.counts: Counter[str] = Counter()
        self.is_over = False
        """The run has ended: no new troubles, so that everybody can come home."""

    def plan(self) -> None:
        """Begin."""
        troubles = self._sim.population.troubles
        for name, per_hour in troubles.of_nodes.items():
            if per_hour > 0:
                self._plan(name, per_hour * self._sim.config.nodes)
        for name, per_hour in troubles.of_hub.items():
            if per_hour > 0:
                self._plan(name, per_hour)

    def _plan(self, name: str, per_hour: float) -> None:
        pause_s = -math.log(1.0 - self._chance.random()) * HOUR_S / per_hour
        self._sim.timeline.after(pause_s, self._strike, name, per_hour)

    def _strike(self, name: str, per_hour: float) -> None:
        if self.is_over:
            return
        self._plan(name, per_hour)
        if name.startswith(("hub", "wall")):
            getattr(self, f"_{name}")()
            return
        everybody = self._sim.people
        for _ in range(TRIES if everybody else 0):
            node = self._chance.choice(everybody)
            if node.agents and not node.is_over:
                self.counts[name] += 1
                getattr(self, f"_{name}")(node, node.agents[-1])
                return

    def _hurt(self, node: SimNode, seconds: float) -> None:
        until_s = self._sim.timeline.now_s + seconds + EXCUSE_S
        node.hurt_until_s = max(node.hurt_until_s, until_s)

    # ---- nodes

    def _kill(self, node: SimNode, agent: Agent) -> None:
        away_s = self._chance.uniform(3.0, 60.0)
        self._hurt(node, away_s)
        for one in list(node.agents):
            one.end()
        if self._chance.random() < SAME_IDENTITY:
            self._sim.timeline.after(away_s, self._back, node)
        else:
            node.hurt_until_s = math.inf
            self._sim.timeline.after(away_s, self._sim.newcomer)

    def _back(self, node: SimNode) -> None:
        if not node.agents and not node.is_over:
            Agent(node, self._sim.desk).beat()

    def _worker(self, node: SimNode, agent: Agent) -> None:
        agent.worker_dies()

    def _stop(self, node: SimNode, agent: Agent) -> None:
        seconds = self._chance.uniform(2.0, 40.0)
        self._hurt(node, seconds)
        agent.stop(seconds)

    def _cut(self, node: SimNode, agent: Agent) -> None:
        seconds = self._chance.uniform(2.0, 40.0)
        self._hurt(node, seconds)
        node.line.is_cut = True
        self._sim.timeline.after(seconds, self._mend, node)

    def _mend(self, node: SimNode) -> None:
        node.line.is_cut = False

    def _twin(self, node: SimNode, agent: Agent) -> None:
        """The older one is fenced; its worker may go on until it hears so."""
        Agent(node, self._sim.desk).beat()

    def _drain(self, node: SimNode, agent: Agent) -> None:
        away_s = self._chance.uniform(5.0, 60.0)
        node.hurt_until_s = math.inf
        agent.drain()
        self._sim.timeline.after(away_s, self._back_from_drain, node)

    def _back_from_drain(self, node: SimNode) -> None:
        if node.agents:
            self._sim.timeline.after(5.0, self._back_from_drain, node)
            return
        node.hurt_until_s = 0.0
        self._hurt(node, 0.0)
        self._back(node)

    def _evict(self, node: SimNode, agent: Agent) -> None:
        hub = self._sim.hub
        if not hub.is_up or hub.is_paused:
            return
        node.is_over, node.hurt_until_s = True, math.inf
        hub.change(lambda now, out: hub.state.evict(now, node.node_id, "operator", out))
        self._sim.timeline.after(self._chance.uniform(5.0, 30.0), self._sim.newcomer)

    # ---- hub

    def _hub_kill(self) -> None:
        hub = self._sim.hub
        if not hub.is_up or hub.is_paused:
            return
        self.counts["hub_kill"] += 1
        hub.kill()
        self._sim.desk.hub_died()
        self._sim.timeline.after(self._chance.uniform(1.0, 120.0), hub.restart)

    def _hub_pause(self) -> None:
        hub = self._sim.hub
        if not hub.is_up or hub.is_paused:
            return
        self.counts["hub_pause"] += 1
        hub.is_paused = True
        self._sim.timeline.after(self._chance.uniform(0.5, 30.0), self._resume)

    def _resume(self) -> None:
        hub = self._sim.hub
        if self._chance.random() < 0.5:  # the ticker may run before the requests that waited, or after them
            hub.is_paused = False
            hub.tick()
        hub.resume()

    def _wall_jump(self) -> None:
        self.counts["wall_jump"] += 1
        self._sim.hub.wall_shift_s += self._chance.uniform(-3600.0, 3600.0)
