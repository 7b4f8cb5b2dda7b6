"""Where namespaces cannot be made, the error says why and what to do instead."""

import os

import pytest

from ciuic.errors import UsageError
from ciuic.lab import namespaces
from ciuic.lab.profiles import evenly_far
from ciuic.lab.switch_sites import HUB, Sites


def test_without_root_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert namespaces.why_not_here() == "this process is not root"


def test_a_kernel_that_refuses_a_namespace_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "_CLONE_NEWNET", 1)  # no such flag: EINVAL for root, too
    before = os.listdir("/proc/self/fd")
    with (
        pytest.raises(UsageError, match="network namespaces cannot be made") as caught,
        Sites(evenly_far(bits_per_s=1e6)),
    ):
        pass
    assert caught.value.cause
    assert "relay" in caught.value.next
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_sites_that_are_not_up_refuse_to_be_used() -> None:
    sites = Sites(evenly_far(bits_per_s=1e6))
    for use in (sites.traffic, lambda: sites.address(HUB), lambda: sites.switch_pid):
        with pytest.raises(UsageError):
            use()


def test_a_hub_without_a_rate_is_refused() -> None:
    with pytest.raises(UsageError):
        Sites(evenly_far(bits_per_s=1e6), hub_bits_per_s=0)


def test_the_profile_is_as_far_and_as_fast_everywhere() -> None:
    profile = evenly_far(bits_per_s=20e6)
    assert {site.link.up_bits_per_s for site in profile.sites} == {20e6}
    assert sorted(profile.round_trips_s.values()) == [0.090, 0.150, 0.220]
    assert [site.link.one_way_delay_s for site in profile.sites] == [0.045, 0.075, 0.110]
