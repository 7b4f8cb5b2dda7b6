"""Any interleaving of joins, beats, silence, deaths, evictions, runs and restarts of the hub keeps the promises."""

from examples import examples
from hub_world import World
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from ciuic.errors import CertificateError, ConflictError, SupersededError
from ciuic.hub.membership.records import Effects, NodeGone, OpenRun
from ciuic.net.messages import WorkerReport

PLACES = st.sampled_from(["us-west", "eu-central", "ap-southeast", "moon"])
WORKERS = st.sampled_from(["none", "starting", "running", "finished", "failed", "stopped"])


class Membership(RuleBasedStateMachine):
    nodes = Bundle("nodes")
    runs = Bundle("runs")

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.epoch = self.world.state.epoch
        self.current: dict[str, str] = {}
        """node -> incarnation that may speak"""
        self.fenced: set[tuple[str, str]] = set()
        self.evicted: set[str] = set()
        self.fresh = 0
        self.belongs: dict[str, str] = {}
        """node -> run, as the ledgers of the runs see it"""
        self.world.watcher = self.follow

    # ---- nodes ----

    @rule(target=nodes, place=PLACES)
    def join(self, place: str) -> str:
        node = self.world.enrol(place)
        self.new_agent(node)
        return node

    @rule(node=nodes, worker=WORKERS, run=st.one_of(st.just(""), runs), lag=st.integers(0, 2), draining=st.booleans())
    def beat(self, node: str, worker: str, run: str, lag: int, draining: bool) -> None:
        known = max(0, self.world.state.nodes[node].revision - lag)
        report = WorkerReport(run_id=run, state=worker)
        incarnation = self.current.get(node, "never")
        draining = draining and self.world.state.nodes[node].draining
        try:
            self.world.beat(node, incarnation=incarnation, worker=report, known=known, draining=draining)
        except CertificateError:
            assert node in self.evicted
        except SupersededError:
            assert (node, incarnation) in self.fenced
        else:
            assert node not in self.evicted
            assert self.world.presence(node) == "here"

    @rule(node=nodes)
    def drain(self, node: str) -> None:
        if node not in self.evicted and node in self.current and (node, self.current[node]) not in self.fenced:
            self.world.beat(node, incarnation=self.current[node], draining=True)

    @rule(node=nodes)
    def new_agent(self, node: str) -> None:
        if node in self.evicted:
            return
        self.fresh += 1
        if node in self.current:
            self.fenced.add((node, self.current[node]))
        self.current[node] = f"i{self.fresh}"
        self.world.beat(node, incarnation=self.current[node])

    @rule(data=st.data())
    def fenced_processes_change_nothing(self, data: st.DataObject) -> None:
        if not self.fenced:
            return
        node, incarnation = data.draw(st.sampled_from(sorted(self.fenced)))
        before = self.picture()
        try:
            self.world.beat(node, incarnation=incarnation, location="elsewhere", sequence=10**6)
        except (SupersededError, CertificateError):
            pass
        else:
            raise AssertionError("a superseded process was accepted")
        assert self.picture() == before

    @rule(node=nodes)
    def leave(self, node: str) -> None:
        incarnation = self.current.get(node, "")
        if node in self.evicted or (node, incarnation) in self.fenced:
            return
        self.world.leave(node, incarnation)
        self.fenced.add((node, incarnation))
        assert self.world.presence(node) == "left"

    @rule(node=nodes)
    def evict(self, node: str) -> None:
        self.world.evict(node)
        self.evicted.add(node)

    # ---- runs ----

    @rule(
        target=runs,
        low=st.integers(1, 3),
        high=st.one_of(st.none(), st.integers(3, 4)),
        grace_s=st.sampled_from([3.0, 10.0]),
    )
    def submit(self, low: int, high: int | None, grace_s: float) -> str:
        return self.world.submit(min_nodes=low, max_nodes=high, grace_s=grace_s)

    @rule(run=runs)
    def stop(self, run: str) -> None:
        try:
            self.world.stop(run)
        except ConflictError:
            assert self.world.run(run).state in ("finished", "failed")

    @rule(run=runs)
    def resume(self, run: str) -> None:
        try:
            self.world.resume(run)
        except ConflictError:
            assert self.world.run(run).state not in ("stopped", "failed")

    @rule(run=consumes(runs))
    def finish(self, run: str) -> None:
        self.world.finish(run)

    # ---- time ----

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0, 11.0, 70.0]))
    def silence(self, seconds: float) -> None:
        self.world.wait(seconds, step_s=seconds / 2)

    @rule(outage_s=st.sampled_from([0.0, 5.0, 3600.0]))
    def restart_hub(self, outage_s: float) -> None:
        before = self.picture()
        self.world.restart_hub(after_s=outage_s)
        self.world.wait(9.0, step_s=3.0)
        after = self.picture()
        for node, (presence, run, *_) in before.items():
            alive = presence in ("here", "suspect")
            assert (after[node][0] in ("here", "suspect")) == alive, "a restart killed or revived somebody"
            assert not alive or not run or after[node][1] == run, "a restart took a healthy node out of its run"

    # ---- promises ----

    @invariant()
    def evicted_nodes_stay_evicted(self) -> None:
        assert all(self.world.presence(node) == "evicted" and not self.world.run_of(node) for node in self.evicted)

    @invariant()
    def the_epoch_never_decreases(self) -> None:
        assert self.world.state.epoch >= self.epoch
        self.epoch = self.world.state.epoch

    def follow(self, effects: Effects) -> None:
        """After each event: whoever left a run was in it, and nobody changed runs without leaving the first."""
        for action in effects.actions:
            if isinstance(action, NodeGone):
                assert self.belongs.pop(action.node_id) == action.run_id
        for node in self.world.state.nodes.values():
            if node.run_id:
                assert self.belongs.setdefault(node.node_id, node.run_id) == node.run_id
        assert self.belongs == {n.node_id: n.run_id for n in self.world.state.nodes.values() if n.run_id}

    @invariant()
    def only_living_nodes_work_and_only_in_open_or_just_finished_runs(self) -> None:
        for node in self.world.state.nodes.values():
            if node.run_id:
                assert node.presence in ("here", "suspect")
                assert self.world.run(node.run_id).state in ("running", "stopping", "finished")

    @invariant()
    def no_run_has_more_nodes_than_it_wants(self) -> None:
        for run in self.world.state.queue.runs.values():
            count = len(self.world.members(run.run_id))
            assert run.max_nodes is None or count <= run.max_nodes
            assert run.state in ("running", "stopping", "finished") or count == 0

    def picture(self) -> dict[str, tuple[object, ...]]:
        return {
            node.node_id: (node.presence, node.run_id, node.location, node.incarnation, node.revision)
            for node in self.world.state.nodes.values()
        }


class TestMembership(Membership.TestCase):
    settings = settings(max_examples=examples(60, 600), stateful_step_count=40, deadline=None)


def test_a_started_run_is_opened_before_its_nodes_are_woken() -> None:
    world = World()
    world.join("us-west")
    world.submit()
    kinds = [type(action).__name__ for action in world.effects[-1].actions]
    assert kinds.index(OpenRun.__name__) < kinds.index("Wake")
