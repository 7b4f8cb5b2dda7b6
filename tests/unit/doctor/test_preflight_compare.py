"""What nodes must have in common: who differs is named, and a difference that does no harm is no failure."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.doctor.preflight import compare
from ciuic.doctor.preflight.dialing import Link
from ciuic.doctor.preflight.records import Check, Facts, Layout
from ciuic.errors import UsageError

VERSIONS = {"torch": "2.13.0+cpu", "ciuic": "0.1.0", "python": "3.11.7", "numpy": "2.4.0"}


def node(rank: int, **changes: Any) -> Facts:
    usual: dict[str, Any] = {
        "host": f"host{rank}",
        "machine": f"machine{rank}",
        "address": f"10.0.0.{rank + 1}",
        "nnodes": 3,
        "versions": VERSIONS,
    }
    return Facts(rank=rank, **(usual | changes))


def layout(parameters: int = 10, trainable: int = 10, digest: str = "a" * 64) -> Layout:
    return Layout(parameters=parameters, trainable=trainable, tensors=2, buffers=0, digest=digest)


def worst(checks: list[Check], name: str) -> Check:
    return min(
        (check for check in checks if check.name == name),
        key=lambda c: ("fail", "warn", "could-not-look", "ok").index(c.result),
    )


def compared(*nodes: Facts) -> list[Check]:
    return compare.compare_facts(nodes, 3)


def test_equal_nodes_have_nothing_to_tell() -> None:
    checks = compared(*(node(rank, layout=layout()) for rank in range(3)))
    assert {check.result for check in checks} == {"ok"}
    assert {check.name for check in checks} == {
        "launch",
        "versions",
        "equal variables",
        "equal gpus",
        "model",
        "addresses",
    }


@pytest.mark.parametrize(
    ("package", "version", "result"),
    [
        ("torch", "2.12.1+cpu", "fail"),
        ("torch", "2.13.0+cu130", "warn"),
        ("ciuic", "0.2.0", "fail"),
        ("python", "3.12.1", "warn"),
        ("numpy", "2.3.0", "warn"),
        ("nccl", "2.28.3", "fail"),
    ],
)
def test_a_version_that_differs_names_the_node(package: str, version: str, result: str) -> None:
    check = worst(compared(node(0), node(1), node(2, versions=VERSIONS | {package: version})), "versions")
    assert check.result == result
    assert check.rank == 2
    assert f"{version} on rank 2" in check.detail


def test_variables_of_which_collectives_hang_are_a_failure_and_others_are_not() -> None:
    check = worst(compared(node(0), node(1, variables={"NCCL_ALGO": "Ring"}), node(2)), "equal variables")
    assert (check.result, check.rank) == ("fail", 1)
    assert "nothing on ranks 0, 2; Ring on rank 1" in check.detail
    check = worst(compared(node(0), node(1, variables={"NCCL_DEBUG": "INFO"}), node(2)), "equal variables")
    assert check.result == "warn"


def test_a_node_without_gpus_among_others_is_a_failure_and_another_model_is_not() -> None:
    h100 = ("H100",) * 2
    assert worst(compared(node(0, gpus=h100), node(1), node(2, gpus=h100)), "equal gpus").result == "fail"
    check = worst(compared(node(0, gpus=h100), node(1, gpus=("A100",)), node(2, gpus=h100)), "equal gpus")
    assert (check.result, check.rank) == ("warn", 1)
    assert "2 x H100 on ranks 0, 2; 1 x A100 on rank 1" in check.detail


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (layout(parameters=11), "11 parameters on rank 1"),
        (layout(trainable=4), "4 trainable parameters on rank 1"),
        (layout(digest="b" * 64), "names, shapes or order differ"),
    ],
)
def test_models_are_compared_by_count_trainable_part_and_layout(other: Layout, said: str) -> None:
    checks = compared(node(0, layout=layout()), node(1, layout=other), node(2, layout=layout()))
    check = worst(checks, "model")
    assert (check.result, check.rank) == ("fail", 1)
    assert said in check.detail
    (again,) = [c for c in compare.with_difference(checks, "tensor 0: x") if c.name == "model"]
    assert again.detail.endswith("; tensor 0: x")


def test_a_node_that_built_no_model_could_not_be_compared() -> None:
    assert worst(compared(node(0, layout=layout()), node(1), node(2)), "model").result == "could-not-look"
    assert not [check for check in compared(node(0), node(1), node(2)) if check.name == "model"]


@given(lines=st.lists(st.text(max_size=3), max_size=6), change=st.integers(0, 6), text=st.text(max_size=3))
def test_the_first_tensor_that_differs_is_named(lines: list[str], change: int, text: str) -> None:
    other = [*lines[:change], text, *lines[change + 1 :]] if change <= len(lines) else lines
    found = compare.first_difference({0: lines, 1: other})
    if lines == other:
        assert found == ""
    else:
        assert found.startswith(f"tensor {change}: rank 0 has ")


@given(values=st.dictionaries(st.integers(0, 9), st.sampled_from("abc"), min_size=1))
def test_groups_hold_each_rank_once_the_most_common_first(values: dict[int, str]) -> None:
    groups = compare.grouped(values)
    assert {rank: value for value, ranks in groups.items() for rank in ranks} == values
    sizes = [len(ranks) for ranks in groups.values()]
    assert sizes == sorted(sizes, reverse=True)
    odd = compare.odd_rank(groups)
    if odd is not None:
        assert list(values.values()).count(values[odd]) == 1


def test_loopback_is_announced_to_other_machines() -> None:
    check = worst(compared(node(0), node(1, address="127.0.1.1"), node(2)), "addresses")
    assert (check.result, check.rank) == ("fail", 1)
    alone = [node(rank, machine="one", address="127.0.0.1") for rank in range(3)]
    assert worst(compared(*alone), "addresses").result == "ok"
    assert worst(compared(node(0), node(1, address="10.0.0.1"), node(2)), "addresses").result == "fail"


def test_nodes_that_were_started_for_different_jobs_are_told() -> None:
    assert compare.compare_launch([node(0), node(1, nnodes=4), node(2)], 3).result == "fail"
    assert compare.compare_launch([node(0), node(1, nproc=2), node(2)], 3).result == "warn"
    assert compare.compare_launch([node(0), node(1)], 3).result == "could-not-look"


def links(change: Callable[[int, int], dict[str, Any]]) -> dict[int, list[Link]]:
    return {
        rank: [Link(to=to, address="a:1", rtt_s=0.02, **change(rank, to)) for to in range(3) if to != rank]
        for rank in range(3)
    }


def test_a_pair_that_does_not_reach_each_other_is_named() -> None:
    nodes = [node(rank) for rank in range(3)]
    broken = links(lambda rank, to: {"problem": "refused"} if (rank, to) == (2, 1) else {})
    check = worst(compare.compare_links(nodes, broken), "every pair")
    assert (check.result, check.rank) == ("fail", 2)
    assert "rank 2 does not reach rank 1 at a:1: refused" in check.detail
    fine = links(lambda rank, to: {})
    assert worst(compare.compare_links(nodes, fine), "every pair").values["ways"] == 6
    del fine[1]
    assert worst(compare.compare_links(nodes, fine), "every pair").result == "could-not-look"


@pytest.mark.parametrize(
    ("offset_s", "result", "said"),
    [
        (0.2, "ok", "200 ms behind"),
        (-3.0, "warn", "3.0 s ahead of"),
        (3600.0, "fail", "1 h 0 min behind"),
        (0.9, "ok", "900 ms"),
    ],
)
def test_a_clock_is_compared_with_rank_0s(offset_s: float, result: str, said: str) -> None:
    found = links(lambda rank, to: {"offset_s": offset_s} if (rank, to) == (2, 0) else {})
    check = worst(compare.compare_links([node(rank) for rank in range(3)], found), "clocks")
    assert check.result == result
    assert said in check.detail
    assert "known to 10 ms" in check.detail


def test_without_a_way_to_rank_0_clocks_could_not_be_looked_at() -> None:
    found = links(lambda rank, to: {"problem": "refused"} if to == 0 else {})
    assert worst(compare.compare_links([node(rank) for rank in range(3)], found), "clocks").result == "could-not-look"


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:port", "host:१"])
def test_a_place_without_host_and_port_is_refused(text: str) -> None:
    from ciuic.doctor.preflight.run import parse_place

    with pytest.raises(UsageError, match="not HOST:PORT"):
        parse_place(text)
    assert parse_place("[fd00::1]:29500") == ("fd00::1", 29500)
