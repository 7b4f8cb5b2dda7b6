"""The protocol of hub and nodes under random schedules: every invariant, whatever is lost, doubled, late or killed."""

import shutil
import tempfile
from pathlib import Path

import pytest
from examples import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.ledger_world import World

from ciuic.errors import CiuicError

DOWN = st.sampled_from(["1-bit", "2-bit", "int4", "int8", "bf16", "none"])
UP = st.one_of(DOWN, st.just("topk"))
NODES = st.sampled_from(["n0", "n1", "n2"])


class Protocol(RuleBasedStateMachine):
    """Events in any order; `World.check` after each."""

    world: World | None = None

    @initialize(
        fragments=st.integers(1, 3),
        codec=DOWN,
        max_staleness=st.integers(0, 3),
    )
    def begin(self, fragments: int, codec: str, max_staleness: int) -> None:
        root = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self.folder = Path(tempfile.mkdtemp(dir=root))
        self.world = World(
            self.folder, nodes=3, fragments=fragments, codec=codec, total=60, max_staleness=max_staleness
        )

    @rule(name=NODES, count=st.integers(1, 6))
    def lease(self, name: str, count: int) -> None:
        self.world.lease(name, count)

    @rule(name=NODES, steps=st.integers(1, 4))
    def step(self, name: str, steps: int) -> None:
        self.world.lease(name, steps)
        for _ in range(steps):
            self.world.step(name)

    @rule(name=NODES, fragment=st.integers(0, 2))
    def push(self, name: str, fragment: int) -> None:
        self.world.push(name, fragment % self.world.layout.fragment_count)

    @rule(index=st.integers(0, 50), keep=st.booleans(), lose_reply=st.booleans())
    def deliver(self, index: int, keep: bool, lose_reply: bool) -> None:
        self.world.deliver(index, keep=keep, lose_reply=lose_reply)

    @rule(name=NODES, fragment=st.integers(0, 2), limit=st.integers(1, 3))
    def pull(self, name: str, fragment: int, limit: int) -> None:
        self.world.pull(name, fragment % self.world.layout.fragment_count, limit)

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(name=NODES)
    def node_restarts(self, name: str) -> None:
        self.world.start(name)

    @rule(name=NODES)
    def hub_thinks_node_is_dead(self, name: str) -> None:
        self.world.forget(name)

    @rule(names=st.sets(NODES, min_size=1))
    def whole_round(self, names: set[str]) -> None:
        self.world.whole_round(names)

    @rule(policy=st.sampled_from(["sync", "async"]), up=UP, down=DOWN)
    def settings_are_switched(self, policy: str, up: str, down: str) -> None:
        self.world.switch(policy, up, down)

    @rule()
    def hub_is_killed(self) -> None:
        self.world.crash_hub()

    @precondition(lambda self: self.world and self.world.network)
    @rule(name=NODES, bit=st.integers(0, 5000))
    def a_bit_flips_on_the_way(self, name: str, bit: int) -> None:
        data = self.world.corrupted(name, bit)
        if data is not None:
            with pytest.raises(CiuicError):
                self.world.hub.push(name, data)

    @invariant()
    def everything_holds(self) -> None:
        if self.world is not None:
            self.world.check()

    def teardown(self) -> None:
        if self.world is None:
            return
        try:
            self.world.drain()
            self.world.check()
            self.world.check_hub_residual()
            self.world.resend_everything()
            samples = self.world.hub.samples
            assert samples.complete, "samples were lost"
            if not self.world.lossy_departures:
                assert samples.duplicated == 0, "a sample was trained twice"
            replicas = [w.machine.replicas for w in self.world.workers.values()]
            assert len({tuple(r.digest for r in mine) for mine in replicas}) == 1
            assert not any(r.progress.tokens or r.in_flight for mine in replicas for r in mine), "work was left behind"
        finally:
            self.world.hub.close()
            shutil.rmtree(self.folder)


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(
    max_examples=examples(30, 1000),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
