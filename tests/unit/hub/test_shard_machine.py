"""Shards under random schedules: late views, lost reports, deaths of hub and shards, moves at any moment."""

import shutil
import tempfile
from pathlib import Path

from examples import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from shard_world import NAMES, ShardWorld

NODES = st.sampled_from(["n0", "n1", "n2"])
SHARDS = st.sampled_from(NAMES)


class Shards(RuleBasedStateMachine):
    """Events in any order; `ShardWorld.check` after each."""

    world: ShardWorld | None = None

    @initialize(fragments=st.integers(2, 4), max_staleness=st.integers(0, 3))
    def begin(self, fragments: int, max_staleness: int) -> None:
        root = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self.folder = Path(tempfile.mkdtemp(dir=root))
        options = {"nodes": 3, "fragments": fragments, "codec": "1-bit", "total": 60, "max_staleness": max_staleness}
        self.world = ShardWorld(self.folder, **options)

    @rule(name=NODES, steps=st.integers(1, 4))
    def step(self, name: str, steps: int) -> None:
        self.world.lease(name, steps)
        for _ in range(steps):
            self.world.step(name)

    @rule(name=NODES, fragment=st.integers(0, 3))
    def push(self, name: str, fragment: int) -> None:
        self.world.push(name, fragment % self.world.layout.fragment_count)

    @rule(index=st.integers(0, 50), keep=st.booleans(), lose_reply=st.booleans())
    def deliver(self, index: int, keep: bool, lose_reply: bool) -> None:
        self.world.deliver(index, keep=keep, lose_reply=lose_reply)

    @rule(name=NODES, fragment=st.integers(0, 3), limit=st.integers(1, 3))
    def pull(self, name: str, fragment: int, limit: int) -> None:
        self.world.pull(name, fragment % self.world.layout.fragment_count, limit)

    @rule(seconds=st.sampled_from([0.1, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(names=st.sets(NODES, min_size=1))
    def whole_round(self, names: set[str]) -> None:
        self.world.whole_round(names)

    @rule(name=SHARDS)
    def shard_sees_the_view(self, name: str) -> None:
        self.world.see(name)

    @rule(name=SHARDS, is_lost=st.booleans())
    def shard_reports(self, name: str, is_lost: bool) -> None:
        self.world.tell(name, is_lost=is_lost)

    @rule()
    def all_agree(self) -> None:
        self.world.agree()

    @rule(name=SHARDS)
    def shard_is_killed(self, name: str) -> None:
        self.world.kill_shard(name)

    @rule(name=SHARDS)
    def shard_starts_again(self, name: str) -> None:
        self.world.start_shard(name)

    @rule(fragment=st.integers(1, 3), name=SHARDS)
    def fragment_is_moved(self, fragment: int, name: str) -> None:
        self.world.move(fragment, name)

    @rule(fragment=st.integers(1, 3), name=SHARDS)
    def fragment_is_moved_at_once(self, fragment: int, name: str) -> None:
        self.world.agree()
        self.world.move(fragment, name)
        self.world.agree()

    @rule()
    def hub_is_killed(self) -> None:
        self.world.crash_hub()

    @rule(name=NODES)
    def hub_thinks_node_is_dead(self, name: str) -> None:
        self.world.forget(name)

    @rule(name=NODES)
    def node_restarts(self, name: str) -> None:
        self.world.start(name)

    @rule(policy=st.sampled_from(["sync", "async"]), up=st.sampled_from(["1-bit", "int8"]))
    def settings_are_switched(self, policy: str, up: str) -> None:
        self.world.switch(policy, up, "1-bit")

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
            info = self.world.hub.info(full=False)
            assert info["digests"] == [f.aggregator.digest for f in self.world.hub.fragments]
            replicas = [w.machine.replicas for w in self.world.workers.values()]
            assert {tuple(r.digest for r in mine) for mine in replicas} == {tuple(info["digests"])}
            assert not any(r.progress.tokens or r.in_flight for mine in replicas for r in mine), "work was left behind"
        finally:
            self.world.hub.close()
            shutil.rmtree(self.folder)


TestShards = Shards.TestCase
TestShards.settings = settings(
    max_examples=examples(8, 200),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
