"""What gloo and NCCL would take, from variables and interfaces; the syntax of one is a mistake for the other."""

import pytest

from ciuic.doctor.preflight.interfaces import (
    GLOO,
    NCCL,
    Interface,
    check_interfaces,
    gloo_choice,
    list_interfaces,
    nccl_choice,
)

LO = Interface(name="lo", addresses=("127.0.0.1", "::1"))
ETH = Interface(name="eth0", addresses=("10.0.0.5",))
DOCKER = Interface(name="docker0", addresses=("172.17.0.1",))
IB = Interface(name="ib0", addresses=("10.9.0.5",))
DOWN = Interface(name="eth1", addresses=("10.0.1.5",), up=False)
ALL = [LO, DOCKER, ETH, DOWN]


def results(environment: dict[str, str], resolved: list[str], *, nnodes: int = 2, gpus: int = 0) -> dict[str, str]:
    checks = check_interfaces(environment, ALL, resolved, nnodes=nnodes, gpus=gpus)
    return {check.name: check.result for check in checks}


def test_gloo_takes_the_named_interface_and_the_first_of_several() -> None:
    assert gloo_choice({GLOO: "eth0"}, ALL, ["127.0.0.1"]).address == "10.0.0.5"
    assert gloo_choice({GLOO: "docker0,eth0"}, ALL, []).interface == "docker0"


@pytest.mark.parametrize(
    ("wish", "problem", "remedy"),
    [
        ("^lo,docker0", "neither ^ nor =", "lo, docker0, eth0"),
        ("=eth0", "neither ^ nor =", "one of"),
        ("eth", "no interface 'eth'", f"{GLOO}=eth0"),
        ("eth9", "no interface 'eth9'", "one of: lo, docker0, eth0"),
        ("eth0, lo", "no interface ' lo'", f"{GLOO}=lo"),
        ("eth1", "down or has no address", "one of"),
        (",", "no interface ''", "one of"),
    ],
)
def test_a_wish_that_gloo_cannot_meet_is_a_failure_with_a_remedy(wish: str, problem: str, remedy: str) -> None:
    choice = gloo_choice({GLOO: wish}, ALL, ["10.0.0.5"])
    assert problem in choice.problem
    assert remedy in choice.next
    assert results({GLOO: wish}, ["10.0.0.5"], nnodes=1)["gloo interface"] == "fail"


def test_without_a_wish_gloo_takes_what_the_host_name_resolves_to() -> None:
    assert gloo_choice({}, ALL, ["10.0.0.5"]).interface == "eth0"
    assert gloo_choice({}, ALL, ["127.0.1.1"]).interface == "lo"
    assert gloo_choice({}, ALL, ["192.0.2.99", "10.0.0.5"]).interface == "eth0"
    assert gloo_choice({}, ALL, ["192.0.2.99"]).address == "127.0.0.1"
    assert gloo_choice({}, ALL, []).address == "127.0.0.1"


def test_a_host_name_that_is_loopback_is_a_trap_only_with_several_nodes() -> None:
    assert set(results({}, ["127.0.1.1"], nnodes=1).values()) == {"ok"}
    assert results({}, ["127.0.1.1"]) == {"host name": "warn", "gloo interface": "warn"}
    assert results({GLOO: "eth0"}, ["127.0.1.1"]) == {"host name": "ok", "gloo interface": "ok"}


def test_a_bridge_of_containers_is_told_apart_from_the_network() -> None:
    assert results({}, ["172.17.0.1"])["gloo interface"] == "warn"
    assert results({}, ["10.0.0.5"])["gloo interface"] == "ok"


def test_a_host_name_without_an_address_could_not_be_looked_at_on_one_node() -> None:
    assert results({}, [], nnodes=1)["host name"] == "could-not-look"
    assert results({}, [])["host name"] == "warn"


@pytest.mark.parametrize(
    ("wish", "interface"),
    [
        ("", "eth0"),
        ("^eth0", "lo"),
        ("^lo,docker", "eth0"),
        ("eth", "eth0"),
        ("=eth", ""),
        ("=docker0", "docker0"),
        ("^=docker0,lo", "eth0"),
        ("ens", ""),
    ],
)
def test_nccl_has_prefixes_whole_names_and_exclusion(wish: str, interface: str) -> None:
    choice = nccl_choice({NCCL: wish}, ALL)
    assert choice.interface == interface
    assert bool(choice.problem) is not bool(interface)


def test_nccl_prefers_infiniband_and_takes_docker_and_loopback_last() -> None:
    assert nccl_choice({}, [*ALL, IB]).interface == "ib0"
    assert nccl_choice({}, [LO, DOCKER]).interface == "lo"


def test_nccl_is_looked_at_where_there_are_gpus_or_somebody_set_its_variable() -> None:
    assert "nccl interface" not in results({}, ["10.0.0.5"])
    assert results({}, ["10.0.0.5"], gpus=1)["nccl interface"] == "ok"
    assert results({NCCL: "ens"}, ["10.0.0.5"])["nccl interface"] == "fail"


def test_this_machine_has_loopback() -> None:
    assert any("127.0.0.1" in one.addresses and one.usable for one in list_interfaces())
