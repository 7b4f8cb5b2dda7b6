"""`gradient` mode: hub and nodes make the same step, and it is the step that torch makes."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ciuic.codec import NumpyVectors
from ciuic.errors import ConflictError, NonFiniteError, ProtocolError
from ciuic.ledger.aggregate import Aggregator, Facts
from ciuic.ledger.entry import Entry, Push, Rejection, Snapshot, StepFacts
from ciuic.ledger.gradient import GradientReplica
from ciuic.ledger.layout import Layout, StepRule, Tensor, make_layout
from ciuic.ledger.node import NodeMachine, Place
from ciuic.ledger.outer import OuterOptimizer
from ciuic.ledger.stepping import power

RATES = (4e-3, 2e-3, 1e-3, 3e-3, 5e-3, 0.0, 2e-3, 1e-3)


def layout(*, feedback: bool = False, freeze_at: float = 1.0) -> Layout:
    matrix = Tensor(name="matrix", shape=(40, 30), dtype="float32", section="coded", weight_decay=0.1)
    embed = Tensor(name="embed", shape=(9, 20), dtype="float32", section="coded", row_aligned=True, lr_scale=0.5)
    norm = Tensor(name="norm", shape=(7,), dtype="float32", section="small")
    mean = Tensor(name="mean", shape=(3,), dtype="float32", section="buffer", trainable=False)
    rule = StepRule(beta1=0.9, beta2=0.99, eps=1e-8, feedback=feedback, freeze_at=freeze_at)
    return make_layout([matrix, embed, norm, mean], 1, rule)


class World:
    """One hub and some nodes, without a network."""

    def __init__(self, layout: Layout, codec: str, nodes: int = 2) -> None:
        self.layout, self.random = layout, np.random.default_rng(3)
        self.hub = Aggregator(layout, 0, (codec, codec), OuterOptimizer())
        self.count = self.hub.element_count
        self.base = self.random.normal(size=self.count).astype(np.float32)
        self.hub.initialize(self.base)
        self.machines = [self.machine(f"n{i}", codec) for i in range(nodes)]
        self.thetas = [machine.load(0, self.base, 0) for machine in self.machines]
        self.sequence = 0

    def machine(self, name: str, codec: str) -> NodeMachine:
        machine = NodeMachine(self.layout, NumpyVectors(), codec, Place(run="r", node=name, incarnation=1))
        machine.lr = RATES[0]
        return machine

    def gradient(self) -> np.ndarray:
        values = self.random.normal(size=self.count).astype(np.float32)
        values[1200:1240] = 0  # two rows of the embedding
        return values

    def push(self, index: int, gradient: np.ndarray) -> Push:
        self.machines[index].stepped(4, [])
        return self.machines[index].push(0, gradient)

    def close(self, pushes: list[Push], rejected: tuple[Rejection, ...] = (), **facts: object) -> Entry:
        for push in pushes:
            self.hub.check(push)
        step = StepFacts(lr=RATES[self.hub.version % len(RATES)], phase=self.hub.phase, **facts)  # type: ignore[arg-type]
        candidate = self.hub.close(pushes, rejected, Facts(run="r", step=step))
        self.hub.commit(candidate)
        for machine, theta in zip(self.machines, self.thetas, strict=True):
            machine.merge(candidate.entry, theta)
        return candidate.entry

    def replica(self, index: int) -> GradientReplica:
        replica = self.machines[index].replicas[0]
        assert isinstance(replica, GradientReplica)
        return replica


def test_the_step_is_that_of_torch_adamw() -> None:
    world = World(layout(), "none")
    parts = [
        torch.from_numpy(world.base[a:b].copy()).requires_grad_() for a, b in ((0, 180), (180, 1380), (1380, 1387))
    ]
    embed, matrix, norm = parts  # storage order: by name within a section
    groups = [
        {"params": [matrix], "lr": 1.0, "weight_decay": 0.1, "scale": 1.0},
        {"params": [embed], "lr": 1.0, "weight_decay": 0.0, "scale": 0.5},
        {"params": [norm], "lr": 1.0, "weight_decay": 0.0, "scale": 1.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-8, foreach=False)
    for rate in RATES:
        both = [world.gradient(), world.gradient()]
        mean = torch.from_numpy(both[0] * np.float32(0.5) + both[1] * np.float32(0.5))
        for part, (a, b) in zip(parts, ((0, 180), (180, 1380), (1380, 1387)), strict=True):
            part.grad = mean[a:b].clone()
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        optimizer.step()
        world.close([world.push(0, both[0]), world.push(1, both[1])])
        expected = torch.cat([p.detach() for p in parts]).numpy()
        assert np.allclose(world.hub.base[:1387], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4"])
def test_hub_and_nodes_stay_bit_identical_and_theta_is_the_base(codec: str) -> None:
    world = World(layout(), codec, nodes=3)
    for _ in range(12):
        world.close([world.push(i, world.gradient()) for i in range(3)])
        for i in range(3):
            assert world.replica(i).base.tobytes() == world.hub.base.tobytes()
            assert world.thetas[i].tobytes() == world.hub.base.tobytes()
            assert world.hub.moments is not None
            assert world.replica(i).moments.second.tobytes() == world.hub.moments.second.tobytes()


def test_stochastic_rounding_loses_nothing_on_average() -> None:
    world = World(layout(), "int4", nodes=1)
    codec = world.hub._codec("int4")
    values = world.gradient()
    mean = np.mean([codec.decode(codec.encode(values, dither=seed)) for seed in range(400)], axis=0)
    once = codec.decode(codec.encode(values))
    assert np.abs(mean - values)[:1380].max() < 0.25 * np.abs(once - values)[:1380].max()


def test_buffers_are_averaged_not_stepped() -> None:
    world = World(layout(), "int4")
    moved = [world.gradient(), world.gradient()]
    before = world.hub.base[-3:].copy()
    world.close([world.push(0, moved[0]), world.push(1, moved[1])])
    expected = before - (moved[0][-3:] * np.float32(0.5) + moved[1][-3:] * np.float32(0.5))
    assert np.array_equal(world.hub.base[-3:], expected)


def test_one_bit_adam_freezes_the_second_moment_and_sends_bits() -> None:
    world = World(layout(feedback=True, freeze_at=0.2), "int4", nodes=3)
    for _ in range(6):
        world.close([world.push(i, world.gradient()) for i in range(3)])
    assert float(np.abs(world.replica(0).e).max()) > 0
    world.close([world.push(i, world.gradient()) for i in range(3)], next_phase="frozen")
    assert not world.replica(0).e.any(), "the residual of another unit was kept"
    assert not world.hub.residual.any()
    assert world.hub.moments is not None
    frozen = world.hub.moments.second.copy()
    assert frozen[:1387].min() >= np.float32(1e-5)
    for _ in range(5):
        pushes = [world.push(i, world.gradient()) for i in range(3)]
        assert {p.header.codec for p in pushes} == {"1-bit"}
        entry = world.close(pushes, next_phase="frozen")
        assert entry.header.codec == "1-bit"
        assert world.hub.moments.second.tobytes() == frozen.tobytes()
        for i in range(3):
            assert world.thetas[i].tobytes() == world.hub.base.tobytes()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["merged", "rejected", "refused", "late"]), min_size=1, max_size=12), st.booleans())
def test_whatever_becomes_of_a_push_bases_agree_and_a_refused_one_leaves_no_trace(
    fates: list[str], feedback: bool
) -> None:
    world = World(layout(feedback=feedback), "int4")
    late: list[Push] = []
    for fate in fates:
        residual, gradient = world.replica(0).e.copy(), world.gradient()
        mine = [] if late else [world.push(0, gradient)]
        others = [world.push(1, world.gradient())]
        if fate == "late" and mine:
            late = mine
            world.close(others)
        elif fate == "refused" and mine:
            world.machines[0].rejected(0, mine[0].header.sequence)
            world.close(others)
        elif fate == "rejected" and mine:
            header = mine[0].header
            gone = Rejection(node="n0", incarnation=1, sequence=header.sequence, reason="stale")
            world.close(others, (gone,))
        else:
            world.close([*(mine or late), *others])
            late = []
        if fate in ("refused", "rejected") and mine:
            assert world.replica(0).e.tobytes() == residual.tobytes()
        assert world.replica(0).digest == world.replica(1).digest == world.hub.digest


def test_a_gradient_that_is_not_finite_is_refused_with_its_parameter_and_changes_nothing() -> None:
    world = World(layout(feedback=True), "int4")
    gradient = world.gradient()
    gradient[200] = np.nan
    with pytest.raises(NonFiniteError, match=r"matrix\[20\]"):
        world.push(0, gradient)
    assert world.replica(0).in_flight is None
    assert not world.replica(0).e.any()
    assert world.push(0, world.gradient()).header.tokens == 8


def test_a_joiner_gets_moments_and_phase_with_the_snapshot() -> None:
    world = World(layout(feedback=True, freeze_at=0.2), "int4")
    world.close([world.push(i, world.gradient()) for i in range(2)])
    world.close([world.push(i, world.gradient()) for i in range(2)], next_phase="frozen")
    whole = world.hub.snapshot("r")
    header = msgspec.structs.replace(whole.header, parts=("base", "first", "second"))
    joiner = world.machine("late", "int4")
    theta = joiner.load_snapshot(0, Snapshot(header=header, vectors=whole.vectors))
    world.machines.append(joiner)
    world.thetas.append(theta)
    pushes = [world.push(i, world.gradient()) for i in range(3)]
    assert pushes[2].header.phase == "frozen"
    world.close(pushes, next_phase="frozen")
    assert theta.tobytes() == world.hub.base.tobytes()


def test_an_aggregator_restored_from_its_snapshot_goes_on_bit_for_bit() -> None:
    world = World(layout(feedback=True, freeze_at=0.2), "int4")
    world.close([world.push(i, world.gradient()) for i in range(2)])
    again = Aggregator(world.layout, 0, ("int4", "int4"), OuterOptimizer())
    again.restore(world.hub.snapshot("r"))
    pushes = [world.push(i, world.gradient()) for i in range(2)]
    facts = Facts(run="r", step=StepFacts(lr=1e-3, next_phase="frozen"))
    first, second = world.hub.close(pushes, (), facts), again.close(pushes, (), facts)
    assert first.entry.to_frame() == second.entry.to_frame()


@given(base=st.floats(0, 0.999999), exponent=st.integers(0, 10**6))
def test_powers_are_right_and_made_by_multiplication_only(base: float, exponent: int) -> None:
    assert power(base, exponent) == pytest.approx(base**exponent, rel=1e-9, abs=1e-300)


def test_nothing_is_pushed_twice_or_without_progress() -> None:
    world = World(layout(), "int4")
    with pytest.raises(ConflictError):
        world.machines[0].push(0, world.gradient())
    world.push(0, world.gradient())
    with pytest.raises(ConflictError):
        world.push(0, world.gradient())


@pytest.mark.parametrize(
    "bad", [{"beta1": 1.0}, {"eps": 0.0}, {"eps": 1e-50}, {"freeze_at": 0.1}, {"beta2": float("nan")}]
)
def test_a_rule_that_cannot_be_is_refused(bad: dict[str, float]) -> None:
    rule = StepRule(**{"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, **bad})
    with pytest.raises(ProtocolError, match="step rule"):
        make_layout([Tensor(name="w", shape=(3,), dtype="float32", section="small")], 1, rule)
