"""Any interleaving of what can happen to nodes, runs and the hub keeps the promises of the network.

Joins, heartbeats that are copied, late or reordered, new agents, second processes with the same identity, deaths,
stopped processes, partitions, drains, goodbyes, evictions, runs that are submitted, stopped and resumed, failing
workers, a hub that is killed, stands still, or whose wall clock jumps; with ledgers on real files.
"""

from collections import Counter
from typing import Any

import msgspec
from examples import examples, is_soak
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from network_world import JOB_GRACE, Agent, Network

from ciuic.hub.membership.records import Announce, Effects, Node, NodeGone, Run
from ciuic.net.messages import WorkerReport

PICK = st.integers(0, 1000)
PLACES = st.sampled_from(["us", "eu", "ap"])
MOST_NODES = 6
MOST_RUNS = 5
SETTLED_S = 10.0
"""After so long without other events a ledger has heard of every departure."""
TROUBLES = (
    "an_agent_dies_and_a_new_one_starts",
    "a_second_process_starts_with_the_same_identity",
    "an_agent_stops_or_goes_on",
    "a_link_is_cut_or_mended",
    "a_node_is_drained",
    "an_agent_says_goodbye",
    "a_node_is_evicted",
    "a_worker_fails",
    "a_worker_process_is_replaced",
    "a_run_is_stopped_and_one_of_its_nodes_dies",
)
LONG_S = 400.0
"""Time after which every run has ended or says for whom it waits: patience for workers that do not end is 60 s."""


class NetworkMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = Network()
        self.epoch = 0
        self.revisions: dict[str, int] = {}
        self.versions: dict[str, tuple[int, str]] = {}
        self.belongs: dict[str, str] = {}
        """node -> run, as the effects tell it"""
        self.deaths: Counter[str] = Counter()
        """How often each node was declared dead."""
        self.presences: dict[str, str] = {}
        self.world.hub.watcher = self.watch

    # ---- picking

    def agent(self, number: int) -> Agent | None:
        living = [agent for agents in self.world.agents.values() for agent in agents]
        return living[number % len(living)] if living else None

    def node(self, number: int) -> str | None:
        names = sorted(self.world.agents)
        return names[number % len(names)] if names else None

    def run_id(self, number: int) -> str | None:
        names = list(self.world.hub.state.queue.runs)
        return names[number % len(names)] if names else None

    # ---- nodes

    @precondition(lambda self: len(self.world.agents) < MOST_NODES)
    @rule(place=PLACES)
    def a_node_joins(self, place: str) -> None:
        self.world.join(place)

    @initialize(places=st.lists(PLACES, max_size=4), low=st.integers(0, 3), seconds=st.integers(0, 12))
    def it_begins(self, places: list[str], low: int, seconds: int) -> None:
        """Most networks have nodes and a run at work: what is rare comes by itself."""
        for place in places:
            self.world.join(place)
        if low:
            self.world.submit(low, None, JOB_GRACE[0], "")
        self.world.pass_time(float(seconds), working=True)

    @rule(which=PICK, what=st.sampled_from(TROUBLES))
    def something_happens_to_a_node(self, which: int, what: str) -> None:
        getattr(self, what)(which)

    @rule(which=PICK, keep=st.booleans())
    def a_heartbeat_is_sent_and_stays_on_its_way(self, which: int, keep: bool) -> None:
        agent = self.agent(which)
        if agent is not None and not agent.is_stopped:
            request = self.world.compose(agent)
            self.world.wire.append((agent, request))
            if keep:
                self.world.deliver(agent, request)

    @precondition(lambda self: self.world.wire)
    @rule(which=PICK, keep=st.booleans())
    def a_heartbeat_arrives_late_or_again(self, which: int, keep: bool) -> None:
        agent, request = self.world.wire[which % len(self.world.wire)]
        if not keep:
            self.world.wire.remove((agent, request))
        state = self.world.hub.state
        node, pulse = state.nodes[agent.node], state.pulses[agent.node]
        is_old = request.agent_incarnation == node.incarnation and request.sequence <= pulse.sequence
        before = (msgspec.json.encode(node), pulse.heard_s, pulse.sequence)
        self.world.deliver(agent, request)
        if is_old or agent.is_refused:
            assert (msgspec.json.encode(node), pulse.heard_s, pulse.sequence) == before, "an old beat proved something"

    def an_agent_dies_and_a_new_one_starts(self, which: int) -> None:
        agent = self.agent(which)
        if agent is not None:
            self.world.kill(agent)
            self.world.start_agent(agent.node)

    def a_second_process_starts_with_the_same_identity(self, which: int) -> None:
        node = self.node(which)
        if node is not None:
            self.world.start_agent(node)

    @rule(which=PICK)
    def an_agent_is_killed(self, which: int) -> None:
        agent = self.agent(which)
        if agent is not None:
            self.world.kill(agent)

    @rule(which=PICK, working=st.booleans())
    def an_agent_is_killed_and_found_dead(self, which: int, working: bool) -> None:
        self.an_agent_is_killed(which)
        self.time_passes(12.0, working)

    def an_agent_stops_or_goes_on(self, which: int) -> None:
        agent = self.agent(which)
        if agent is not None:
            agent.is_stopped = not agent.is_stopped

    def a_link_is_cut_or_mended(self, which: int) -> None:
        node = self.node(which)
        if node is not None:
            self.world.cut ^= {node}
            for agent in list(self.world.agents[node]):
                self.world.beat(agent)

    def a_node_is_drained(self, which: int) -> None:
        agent = self.agent(which)
        if agent is not None:
            agent.is_draining = True
            self.world.beat(agent)

    def an_agent_says_goodbye(self, which: int) -> None:
        agent = self.agent(which)
        if agent is not None and self.world.is_well(agent):
            self.world.leave(agent)

    def a_node_is_evicted(self, which: int) -> None:
        node = self.node(which)
        if node is not None and len(self.world.evicted) < 2:
            self.world.evict(node)

    # ---- runs

    @precondition(lambda self: len(self.world.commons) < MOST_RUNS)
    @rule(low=st.integers(1, 3), more=st.none() | st.integers(0, 1), grace=st.sampled_from(JOB_GRACE), data=st.data())
    def a_run_is_submitted(self, low: int, more: int | None, grace: str, data: st.DataObject) -> None:
        place = data.draw(PLACES) if low == 1 and data.draw(st.booleans()) else ""
        self.world.submit(low, None if more is None else low + more, grace, place)

    @rule(which=PICK, stop=st.booleans())
    def a_run_is_stopped_or_resumed(self, which: int, stop: bool) -> None:
        run_id = self.run_id(which)
        if run_id is not None:
            (self.world.stop_run if stop else self.world.resume_run)(run_id)

    def a_run_is_stopped_and_one_of_its_nodes_dies(self, which: int) -> None:
        run_id = self.run_id(which)
        if run_id is not None:
            self.world.stop_run(run_id)
            for node in self.world.hub.state.queue.members(run_id)[:1]:
                for agent in list(self.world.agents[node.node_id]):
                    self.world.kill(agent)

    @rule(which=PICK, turns=st.integers(1, 12))
    def workers_work(self, which: int, turns: int) -> None:
        for turn in range(turns):
            agent = self.agent(which + turn)
            if agent is not None:
                self.world.work(agent)

    def a_worker_fails(self, which: int) -> None:
        agent = self.agent(which)
        if agent is not None and agent.worker is not None:
            self.world.ended(agent, "failed")
            self.world.beat(agent)

    def a_worker_process_is_replaced(self, which: int) -> None:
        agent = self.agent(which)
        if agent is not None and agent.worker is not None:
            agent.worker.model = None

    @rule(wait=st.booleans())
    def the_errands_are_behind_or_done(self, wait: bool) -> None:
        self.world.hub.errands_wait = wait
        if not wait:
            self.world.hub.run_errands()

    # ---- time

    @rule(seconds=st.sampled_from([0.5, 4.0, 12.0]), working=st.booleans())
    def time_passes(self, seconds: float, working: bool) -> None:
        self.world.pass_time(seconds, working=working)
        if seconds > SETTLED_S and not self.world.hub.errands_wait:
            for run_id, ledger in self.world.hub.ledgers.items():
                members = {node.node_id for node in self.world.hub.state.queue.members(run_id)}
                assert set(ledger.present()) <= members, "a ledger counts on nodes that are not in its run"

    @rule(seconds=st.sampled_from([0.6, 3.0, 60.0, 3600.0]), tick_first=st.booleans())
    def the_hub_stands_still(self, seconds: float, tick_first: bool) -> None:
        before = self.well()
        self.world.pause_hub(seconds, tick_first=tick_first)
        self.nobody_of_these_fell(before)

    @rule(outage_s=st.sampled_from([0.0, 20.0, 3600.0]))
    def the_hub_is_killed(self, outage_s: float) -> None:
        before = self.well()
        self.world.restart_hub(outage_s)
        self.world.pass_time(4.0)
        self.nobody_of_these_fell(before)

    @rule(hours=st.integers(-2, 2))
    def the_wall_clock_jumps(self, hours: int) -> None:
        self.world.hub.wall_shift_s += 3600.0 * hours

    # ---- promises

    def watch(self, out: Effects) -> None:
        """After each event, when it is stored and before anything is told."""
        hub = self.world.hub
        if out.epoch is not None:
            assert out.epoch > self.epoch, "the epoch went back"
            self.epoch = out.epoch
        for name, node in hub.state.nodes.items():
            assert msgspec.json.decode(hub.rows.nodes[name], type=Node) == node, "something was told and not stored"
        for name, run in hub.state.queue.runs.items():
            stored = msgspec.json.decode(hub.rows.runs[name], type=Run)
            assert msgspec.to_builtins(stored) == msgspec.to_builtins(run), "something was told and not stored"
        assert hub.rows.epoch == hub.state.epoch
        for name, node in out.nodes.items():
            self.deaths[name] += node.presence == "dead" and self.presences.get(name) != "dead"
            self.presences[name] = node.presence
        self.follow(out)

    def follow(self, out: Effects) -> None:
        """Whoever leaves a run was in it; nobody changes runs without leaving the first; runs are served in order."""
        state = self.world.hub.state
        for action in out.actions:
            line = action if isinstance(action, Announce) else getattr(action, "line", None)
            if isinstance(action, NodeGone):
                assert self.belongs.pop(action.node_id) == action.run_id
            if line is not None and line.kind == "node.dead":
                assert self.deaths[line.node_id], "a death was told that had not happened"
        for node in state.nodes.values():
            if node.run_id and node.node_id not in self.belongs:
                self.in_order(node)
                self.belongs[node.node_id] = node.run_id
        assert self.belongs == {n.node_id: n.run_id for n in state.nodes.values() if n.run_id}

    def in_order(self, node: Node) -> None:
        """The node was given to a run: no run that was submitted earlier waits for it."""
        runs = self.world.hub.state.queue.runs
        taken = runs[node.run_id]
        for run in runs.values():
            if run.number < taken.number and run.state == "waiting" and run.attempt == taken.attempt == 1:
                fits = not run.locations or node.location in run.locations
                assert not fits or node.node_id in run.failed, f"{node.node_id} went to a later run than {run.run_id}"

    def well(self) -> dict[str, tuple[str, int]]:
        """Nodes with which nothing is wrong: their runs, and how often they died so far."""
        nodes, found = self.world.hub.state.nodes, {}
        for name in self.world.agents:
            agent, node = self.world.newest(name), nodes[name]
            if agent is None or not self.world.is_well(agent) or node.incarnation != agent.incarnation:
                continue
            if node.presence == "here" and self.world.now_s - agent.beaten_s <= agent.beat_every_s:
                found[name] = (node.run_id, self.deaths[name])
        return found

    def nobody_of_these_fell(self, before: dict[str, tuple[str, int]]) -> None:
        state = self.world.hub.state
        for name, (run_id, deaths) in before.items():
            node = state.nodes[name]
            assert self.deaths[name] == deaths, "an absence of the hub killed a healthy node"
            assert node.presence in ("here", "suspect"), "an absence of the hub took a healthy node"
            if run_id and not node.draining and state.queue.runs[run_id].state == "running":
                report: WorkerReport = state.pulses[name].worker
                assert node.run_id == run_id or report.state in ("failed", "finished", "stopped")

    @invariant()
    def evicted_nodes_stay_evicted(self) -> None:
        for name in self.world.evicted:
            node = self.world.hub.state.nodes[name]
            assert (node.presence, node.run_id) == ("evicted", "")

    @invariant()
    def revisions_never_go_back(self) -> None:
        for name, node in self.world.hub.state.nodes.items():
            assert node.revision >= self.revisions.get(name, 0)
            self.revisions[name] = node.revision

    @invariant()
    def runs_have_living_nodes_and_not_too_many(self) -> None:
        state = self.world.hub.state
        for run in state.queue.runs.values():
            members = state.queue.members(run.run_id)
            assert members == [node for node in state.nodes.values() if node.run_id == run.run_id]
            assert state.queue.names(run.run_id) == {node.node_id for node in members}
            assert run.max_nodes is None or len(members) <= run.max_nodes
            assert run.state in ("running", "stopping", "finished") or not members
            assert all(node.presence in ("here", "suspect") for node in members)

    @invariant()
    def what_is_shown_agrees(self) -> None:
        state = self.world.hub.state
        for node in state.nodes.values():
            info = state.node_info(node, self.world.now_s)
            assert info.run_id == node.run_id
            assert info.state == node.presence or node.presence == "here"
            assert info.state != "idle" or not node.run_id
            if info.state in ("assigned", "training"):
                assert node.run_id in state.queue.runs

    @invariant()
    def samples_are_somewhere_and_versions_only_grow(self) -> None:
        hub = self.world.hub
        for run_id, ledger in hub.ledgers.items():
            counts = ledger.info(full=False)["samples"]
            assert counts.lost == 0
            present = set(ledger.present())
            assert present == {member.node for member in ledger.members.values() if member.is_present}
            assert all(not held or name in present for name, held in ledger.samples.leased.items()), (
                "samples of the dead"
            )
            assert counts.total == counts.committed + len(ledger.samples.free) + ledger.samples.held
            if ledger.fragments:
                version, digest = ledger.fragments[0].version, ledger.fragments[0].digest
                known, known_digest = self.versions.get(run_id, (0, digest))
                assert version >= known, "a version went back"
                assert version > known or digest == known_digest or known == 0
                self.versions[run_id] = (version, digest)

    def teardown(self) -> None:
        try:
            self.come_to_rest()
        finally:
            self.world.close()

    def come_to_rest(self) -> None:
        """When troubles end, every run ends or says for whom it waits, and each sample was trained."""
        world, state = self.world, self.world.hub.state
        world.cut.clear()
        world.hub.errands_wait = False
        world.hub.run_errands()
        for agents in world.agents.values():
            for agent in agents:
                agent.is_stopped = False
        until_s = world.now_s + LONG_S
        while world.now_s < until_s and not self.at_rest():
            world.pass_time(10.0, working=True)
        state = world.hub.state
        for run in state.queue.runs.values():
            if run.state in ("finished", "failed", "stopped"):
                assert not state.queue.members(run.run_id), "a run that has ended keeps its nodes"
            else:
                assert run.state in ("waiting", "running"), f"{run.run_id} is {run.state} for ever"
                assert run.reason, f"{run.run_id} is {run.state} and does not say for whom it waits"
        for name in world.agents:
            agent = world.newest(name)
            if agent is not None and name not in world.evicted:
                assert state.nodes[name].presence in ("here", "suspect"), f"{name} speaks and is not here"

    def at_rest(self) -> bool:
        state = self.world.hub.state
        return all(
            run.state not in ("running", "stopping") and (run.state == "waiting" or not state.queue.members(run.run_id))
            for run in state.queue.runs.values()
        ) and all(not self._is_wrong(name) for name in self.world.agents)

    def _is_wrong(self, name: str) -> bool:
        agent, node = self.world.newest(name), self.world.hub.state.nodes[name]
        return agent is not None and name not in self.world.evicted and node.presence not in ("here", "suspect")


TestNetworkMachine: Any = NetworkMachine.TestCase
TestNetworkMachine.settings = settings(
    max_examples=examples(30, 600),
    stateful_step_count=40,
    deadline=None,
    derandomize=not is_soak(),  # the soak looks further each time
    suppress_health_check=list(HealthCheck),
)
