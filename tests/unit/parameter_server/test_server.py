"""The parameter server in one process: every push counts once, and what nodes pull adds up to what the server has."""

import asyncio
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ciuic
from ciuic import AsyncParameterServer
from ciuic.errors import ConflictError, NonFiniteError, UsageError
from ciuic.ledger.entry import base_digest


def parameters() -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    return {"b": random.normal(size=3).astype(np.float32), "a": random.normal(size=(4, 5)).astype(np.float32)}


def update(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {"a": random.normal(size=(4, 5)).astype(np.float32), "b": random.normal(size=3).astype(np.float32)}


def flat(params: Any) -> bytes:
    return b"".join(params[name].tobytes() for name in sorted(params))


async def loaded(server: AsyncParameterServer) -> dict[str, np.ndarray]:
    return {name: values.copy() for name, values in server.params.items()}


def test_one_node_moves_the_parameters_by_its_updates() -> None:
    async def story() -> None:
        start = parameters()
        server = AsyncParameterServer(start)
        assert (server.version, server.node_versions) == (0, {})
        assert await server.pull_update("n") is None
        assert await server.push_update("n", update(1)) == 1
        assert np.array_equal(server.params["a"], start["a"] - update(1)["a"])
        delta = await server.pull_update("n")
        assert delta is not None
        assert np.array_equal(delta["b"], update(1)["b"])
        assert server.node_versions == {"n": 1}
        assert await server.pull_update("n") is None

    asyncio.run(story())


@settings(max_examples=40, deadline=None)
@given(
    schedule=st.lists(st.tuples(st.sampled_from(["push", "pull", "again"]), st.integers(0, 3)), max_size=40),
    momentum=st.sampled_from([0.0, 0.9]),
    delay=st.integers(1, 3),
)
def test_pulled_deltas_make_every_replica_the_server_s_parameters_bit_for_bit(
    schedule: list[tuple[str, int]], momentum: float, delay: int
) -> None:
    async def story() -> None:
        server = AsyncParameterServer(parameters(), momentum=momentum, delay=delay, max_staleness=100)
        replicas = [parameters() for _ in range(4)]
        sequences = [0] * 4

        async def turn(what: str, node: int) -> None:
            name = f"n{node}"
            if what == "pull":
                delta = await server.pull_update(name)
                if delta is not None:
                    delta.apply(replicas[node])
            elif what == "push":
                sequences[node] += 1
                await server.push_update(name, update(sequences[node]), sequence=sequences[node])
            elif sequences[node]:
                before = server.version, server.digest
                await server.push_update(name, update(9), sequence=sequences[node])
                assert (server.version, server.digest) == before, "a push was counted twice"

        for what, node in schedule:
            await turn(what, node)
        assert server.version == sum(sequences)
        for node, replica in enumerate(replicas):
            delta = await server.pull_update(f"n{node}")
            if delta is not None:
                delta.apply(replica)
            assert flat(replica) == flat(server.params)
        whole = await server.get_delta(0)
        fresh = parameters()
        whole.apply(fresh)
        assert flat(fresh) == flat(server.params)
        assert (whole.digest or server.digest) == server.digest
        for name, values in whole.items():
            assert np.allclose(parameters()[name] - values, server.params[name], atol=1e-3)

    asyncio.run(story())


def test_pushes_of_many_coroutines_at_once_are_each_counted_once() -> None:
    async def story() -> None:
        server = AsyncParameterServer(parameters(), max_staleness=1000)

        async def node(name: str) -> None:
            replica = parameters()
            for number in range(1, 26):
                await server.push_update(name, update(number), sequence=number)
                await server.push_update(name, update(number), sequence=number)  # its answer was lost
                delta = await server.pull_update(name)
                if delta is not None:
                    delta.apply(replica)
            delta = await server.pull_update(name)
            if delta is not None:
                delta.apply(replica)

        await asyncio.gather(*(node(f"n{i}") for i in range(8)))
        assert server.version == 200
        entries = (await server.get_delta(0)).entries
        keys = [(c.node, c.sequence) for entry in entries for c in entry.header.contributors]
        assert len(set(keys)) == len(keys) == 200
        assert [entry.header.version for entry in entries] == list(range(1, 201))
        replica = parameters()
        (await server.get_delta(0)).apply(replica)
        assert flat(replica) == flat(server.params)
        ordered = np.concatenate([replica["a"].reshape(-1), replica["b"]])
        assert base_digest(ordered) == server.digest

    asyncio.run(story())


def test_staler_updates_weigh_less_and_too_stale_ones_are_refused() -> None:
    async def story() -> None:
        server = AsyncParameterServer(parameters(), max_staleness=1)
        for number in range(3):
            await server.push_update("a", update(1), base_version=number)
        weights = [e.header.contributors[0].weight for e in (await server.get_delta(0)).entries]
        assert weights == [1.0, 1.0, 1.0]
        await server.push_update("b", update(2), base_version=1)
        newest = (await server.get_delta(3)).entries[0].header.contributors[0]
        assert (newest.staleness, newest.weight) == (2, pytest.approx(3**-0.5 / 2))
        before = server.digest
        with pytest.raises(ConflictError, match="4 versions behind"):
            await server.push_update("b", update(2), base_version=0)
        with pytest.raises(ConflictError, match="there is only 4"):
            await server.push_update("b", update(2), base_version=5)
        assert (server.version, server.digest) == (4, before)

    asyncio.run(story())


def test_an_update_that_is_not_finite_is_refused_with_the_parameter_s_name() -> None:
    async def story() -> None:
        server = AsyncParameterServer(parameters())
        bad = update(1)
        bad["b"][1] = np.nan
        with pytest.raises(NonFiniteError, match=r"b\[1\]"):
            await server.push_update("n", bad)
        assert server.version == 0
        assert await server.push_update("n", update(1)) == 1

    asyncio.run(story())


def test_an_update_that_does_not_fit_is_refused_and_a_part_of_the_parameters_is_enough() -> None:
    async def story() -> None:
        server = AsyncParameterServer(parameters())
        with pytest.raises(UsageError, match="c"):
            await server.push_update("n", {"c": np.zeros(3, np.float32)})
        with pytest.raises(UsageError, match="shape"):
            await server.push_update("n", {"a": np.zeros(3, np.float32)})
        await server.push_update("n", {"b": np.ones(3, np.float32)})
        assert np.array_equal(server.params["a"], parameters()["a"])

    asyncio.run(story())


def test_delayed_nesterov_moves_its_momentum_once_per_delay() -> None:
    async def story() -> None:
        server = AsyncParameterServer({"x": np.zeros(1, np.float32)}, momentum=0.5, delay=2)
        for number in range(4):
            await server.push_update("n", {"x": np.ones(1, np.float32)}, base_version=number)
        moves = [float(e["x"][0]) for e in [(await server.get_delta(v)) for v in range(4)]]
        steps = [a - b for a, b in zip(moves, [*moves[1:], 0.0], strict=True)]
        assert steps == [1.0, 2.0, 1.0, 2.5]  # mom = 2, then 0.5 * 2 + 2 = 3

    asyncio.run(story())


def test_entries_that_are_not_kept_are_refused_and_rules_that_cannot_be_too() -> None:
    async def story() -> None:
        server = AsyncParameterServer({"x": np.zeros(1, np.float32)})
        with pytest.raises(ConflictError, match="no delta"):
            await server.get_delta(1)

    asyncio.run(story())
    with pytest.raises(UsageError):
        AsyncParameterServer(parameters(), momentum=1.0)
    with pytest.raises(UsageError):
        AsyncParameterServer(object())


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, ciuic; ciuic.AsyncParameterServer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert "AsyncParameterServer" in dir(ciuic)
