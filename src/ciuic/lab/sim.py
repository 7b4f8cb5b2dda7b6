"""The hub's machines against a thousand simulated nodes in virtual time: what a round costs, and whether all holds.

The hub's side is the real code: membership, run queue, ledgers (inbox, leases, pace, aggregation, files) over a tiny
vector whose digests are real. Nodes, links and failures are drawn from a profile; one seed gives one story.
"""

import contextlib
import gc
import math
import random
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from ciuic.errors import UsageError
from ciuic.job import Job, parse_job
from ciuic.lab.sim_desk import Desk
from ciuic.lab.sim_hub import SimHub
from ciuic.lab.sim_model import Common
from ciuic.lab.sim_node import Agent, SimNode
from ciuic.lab.sim_profiles import Population, population
from ciuic.lab.sim_proof import Proof, Watch, prove
from ciuic.lab.sim_time import Timeline
from ciuic.lab.sim_troubles import Trouble
from ciuic.lab.sim_worker import BATCH

RUN_ID = "simulated-1"
GRACE_S = 10.0
TICK_S = 0.25
INTERVAL = 8
WITNESSES = 4
MOST_NODES, MOST_ROUNDS = 20_000, 100_000
PATIENCE = 20.0
"""A simulation that takes so many times its expected virtual time has come to a stop."""
LAST_WORDS_S = 60.0
"""After the end of the run: workers end, the dead are noticed."""


@dataclass(frozen=True, kw_only=True)
class SimConfig:
    """One simulation."""

    nodes: int = 1000
    rounds: int = 100
    seed: int = 0
    profile: str = "continents"
    faults: bool = True

    def check(self) -> None:
        """Raises UsageError."""
        if not (1 <= self.nodes <= MOST_NODES and 1 <= self.rounds <= MOST_ROUNDS and self.seed >= 0):
            raise UsageError(
                f"{self.nodes} nodes, {self.rounds} rounds and seed {self.seed} cannot be simulated",
                next=f"1 to {MOST_NODES:,} nodes, 1 to {MOST_ROUNDS:,} rounds, a seed from 0",
            )


@dataclass(frozen=True, kw_only=True)
class SimResult:
    """What a simulation showed."""

    config: SimConfig
    versions: int
    events: int
    cpu_s: float
    """Processor time of the whole simulation, nodes included."""
    rounds_cpu_s: float
    """The part of it between the first entry and the last."""
    virtual_s: float
    story_digest: str
    story: dict[str, int]
    """Lines of each kind."""
    troubles: dict[str, int]
    proof: Proof

    @property
    def events_per_s(self) -> float:
        """Per second of processor time."""
        return self.events / max(1e-9, self.cpu_s)

    @property
    def round_s(self) -> float:
        """Processor time per round, from the first entry to the last: without joining and going home."""
        return self.rounds_cpu_s / max(1, self.versions - 1)


class Simulation:
    """One network and one run, from the first node to the end."""

    def __init__(self, config: SimConfig, folder: Path) -> None:
        config.check()
        self.config, self.population = config, population(config.profile)
        self.chance = random.Random(config.seed)
        self.timeline = Timeline()
        self.job = _job(config)
        self.hub = SimHub(folder, clock=lambda: self.timeline.now_s, grace_s=GRACE_S)
        self.common = Common(RUN_ID, config.seed)
        self.desk = Desk(self.timeline, self.hub, self.common)
        self.nodes: dict[str, SimNode] = {}
        self.people: list[SimNode] = []
        """The same, to choose from."""
        self.watch = Watch(self)
        self.trouble = Trouble(self)
        self.ended_s: float | None = None

    def run(self) -> SimResult:
        """To the end. Processor time is measured without the proof."""
        began_s = time.process_time()
        for number in range(self.config.nodes):
            self.timeline.after(self.chance.uniform(0.0, 5.0), self.newcomer, number < WITNESSES)
        self.hub.submit(self.job)
        self.timeline.after(TICK_S, self._tick)
        if self.config.faults:
            self.trouble.plan()
        self.timeline.run(until_s=PATIENCE * self._expected_s, stop=self._is_over)
        cpu_s = time.process_time() - began_s
        return SimResult(
            config=self.config,
            versions=len(self.common.entries),
            events=self.timeline.count,
            cpu_s=cpu_s,
            rounds_cpu_s=self.desk.last_entry_s - self.desk.first_entry_s,
            virtual_s=self.timeline.now_s,
            story_digest=self.hub.story.digest,
            story=dict(self.hub.story.kinds),
            troubles=dict(self.trouble.counts),
            proof=prove(self),
        )

    def newcomer(self, is_witness: bool = False) -> None:
        """A node joins: identity, line, agent."""
        if not self.hub.is_up or self.hub.is_paused:
            self.timeline.after(1.0, self.newcomer, is_witness)
            return
        chance = random.Random(self.chance.getrandbits(64))
        people: Population = self.population
        node = SimNode(
            node_id=f"n{len(self.nodes) + 1:05}",
            line=people.lines(chance),
            step_s=people.step_s * math.exp(people.spread * chance.gauss(0.0, 1.0)),
            chance=chance,
            is_witness=is_witness,
        )
        self.nodes[node.node_id] = node
        self.people.append(node)
        self.hub.enrol(node.node_id, node.node_id)
        Agent(node, self.desk).beat()

    @property
    def _expected_s(self) -> float:
        return 120.0 + self.config.rounds * INTERVAL * self.population.step_s * 2

    def _tick(self) -> None:
        self.timeline.after(TICK_S, self._tick)
        if self.hub.is_up and not self.hub.is_paused:
            self.hub.tick()

    def _is_over(self) -> bool:
        now_s = self.timeline.now_s
        run = self.hub.state.queue.runs[RUN_ID]
        if self.ended_s is None and self.hub.is_up and run.state in ("finished", "failed", "stopped"):
            self.ended_s = now_s
            self.trouble.is_over = True
        return self.ended_s is not None and now_s >= self.ended_s + LAST_WORDS_S and self.hub.is_up


def _job(config: SimConfig) -> Job:
    samples = config.rounds * config.nodes * INTERVAL * BATCH
    at_least = max(1, config.nodes // 2)
    return parse_job(
        {
            "name": "simulated",
            "fault": {"grace": GRACE_S},
            "train": {"samples": samples},
            "nodes": {"min": at_least, "max": config.nodes},
            "sync": {"compression": "int8", "interval": INTERVAL},
        }
    )


def simulate(config: SimConfig) -> SimResult:
    """Run one simulation in a folder of its own, in memory where there is such a place. Raises UsageError."""
    config.check()
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with _few_collections(), tempfile.TemporaryDirectory(prefix="ciuic-sim-", dir=root) as folder:
        simulation = Simulation(config, Path(folder))
        try:
            return simulation.run()
        finally:
            simulation.hub.kill()


@contextlib.contextmanager
def _few_collections() -> Generator[None]:
    """Python's collector looks at all that lives, again and again: a simulation only makes more of it."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def growth_sizes(nodes: int) -> list[int]:
    """Node counts at which the cost of a round is measured: two powers of ten below `nodes`, and `nodes`."""
    return sorted({max(1, nodes // 100), max(1, nodes // 10), nodes})


def growth_exponent(round_s: dict[int, float]) -> float:
    """p in: cost of a round = c x nodes^p, between the smallest and the largest count. 1 is linear."""
    small, large = min(round_s), max(round_s)
    if small == large:
        return 0.0
    return math.log(round_s[large] / round_s[small]) / math.log(large / small)
