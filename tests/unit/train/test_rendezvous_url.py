"""Rendezvous URLs, and how many processes there are: what is read, what is refused and why."""

import pytest
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

import ciuic.torch
from ciuic.errors import UsageError
from ciuic.train.rendezvous import GroupUrl, parse_group_url, register, size_and_rank


def test_all_parts_are_read() -> None:
    url = parse_group_url("ciuic://global-sync?job=abc&nodes=3&world_size=6&rank=5")
    assert url == GroupUrl(group="global-sync", job="abc", nodes=3, world_size=6, rank=5)
    assert parse_group_url("ciuric://global-sync") == GroupUrl(group="global-sync")


@pytest.mark.parametrize("key", ["token", "secret", "password", "key", "api_key", "Authorization", "client_cert"])
def test_a_secret_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(UsageError, match=f"carries no {key}") as caught:
        parse_group_url(f"ciuic://global-sync?job=abc&{key}=hunter2")
    assert "hunter2" not in str(caught.value)
    assert "logs" in caught.value.cause


def test_a_user_and_a_password_are_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError, match="no user name or password") as caught:
        parse_group_url("ciuic://ada:hunter2@global-sync")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "ciuic://",
        "ciuic://hub.example:8443",
        "ciuic://hub.example:port",
        "ciuic://global-sync/path",
        "ciuic://global-sync#part",
        "ciuic://global%20sync",
        "ciuic://global-sync?job",
        "ciuic://global-sync?job=",
        "ciuic://global-sync?job=a=b",
        "ciuic://global-sync?job=a%20b",
        "ciuic://global-sync?job=a&job=b",
        "ciuic://global-sync?jobb=a",
        "ciuic://global-sync?job=" + "x" * 65,
        "ciuic://global-sync?nodes=0",
        "ciuic://global-sync?nodes=three",
        "ciuic://global-sync?rank=-1",
        "ciuic://global-sync?world_size=1000000",
    ],
)
def test_what_torch_would_cut_or_misread_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        parse_group_url(url)


@pytest.mark.parametrize(
    ("url", "environment", "expected"),
    [
        ("?world_size=4&rank=2", {}, (4, 2)),
        ("?world_size=4&rank=2", {"WORLD_SIZE": "8", "RANK": "7"}, (4, 2)),
        ("?world_size=4", {"RANK": "1"}, (4, -1)),
        ("?nodes=3", {}, (3, -1)),
        ("?nodes=3", {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "RANK": "1"}, (6, -1)),
        ("", {"WORLD_SIZE": "8", "RANK": "7"}, (8, 7)),
        ("", {"WORLD_SIZE": "8"}, (8, -1)),
    ],
)
def test_the_size_and_the_rank_come_from_the_nearest_source(
    url: str, environment: dict[str, str], expected: tuple[int, int]
) -> None:
    assert size_and_rank(parse_group_url(f"ciuic://global-sync{url}"), environment) == expected


@pytest.mark.parametrize(
    ("url", "environment"),
    [
        ("", {}),
        ("", {"RANK": "0"}),
        ("", {"WORLD_SIZE": "2", "RANK": "0", "CIUIC_RUN_FILE": "run.json"}),
        ("?rank=0", {}),
        ("?world_size=2&rank=2", {}),
        ("", {"WORLD_SIZE": "two"}),
    ],
)
def test_an_unknown_size_or_a_rank_outside_is_refused(url: str, environment: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        size_and_rank(parse_group_url(f"ciuic://global-sync{url}"), environment)


@pytest.mark.parametrize("scheme", ["ciuic", "ciuric"])
def test_torch_knows_the_scheme_and_registering_twice_is_no_error(scheme: str) -> None:
    register()
    register.__wrapped__()
    assert ciuic.torch.reform
    with pytest.raises(UsageError, match="no user name"):
        next(torch_rendezvous(f"{scheme}://ada@global-sync", 0, 1))
    with pytest.raises(UsageError, match="carries no token"):
        dist.init_process_group("gloo", init_method=f"{scheme}://global-sync?token=x", rank=0, world_size=1)
