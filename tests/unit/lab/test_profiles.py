"""Profiles: every two places have a distance, and any number of sites can be had."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import UsageError
from ciuic.lab.profiles import MOST_SITES, PROFILES, describe, profile_named, with_sites
from ciuic.lab.switch_sites import HUB


@given(name=st.sampled_from(sorted(PROFILES)), count=st.integers(1, MOST_SITES))
def test_any_number_of_sites_has_names_and_distances_of_its_own(name: str, count: int) -> None:
    profile = with_sites(profile_named(name), count)
    places = (HUB, *profile.locations)
    assert len(set(places)) == count + 1
    far = [profile.one_way_s(a, b, hub=HUB) for a in places for b in places if a != b]
    assert all(0 <= delay_s < 1 for delay_s in far)


def test_the_first_sites_are_the_profile_s_own() -> None:
    profile = with_sites(profile_named("continents"), 5)
    assert profile.locations == ("us-west", "eu-central", "ap-southeast", "us-west-2", "eu-central-2")
    assert profile.site("us-west-2").link.up_bits_per_s == profile.site("us-west").link.up_bits_per_s
    assert profile.one_way_s("us-west", "us-west-2", hub=HUB) < profile.one_way_s("us-west", "eu-central-2", hub=HUB)


def test_homes_are_slower_up_than_down_and_some_links_lose_or_flap() -> None:
    assert {(s.link.up_bits_per_s, s.link.down_bits_per_s) for s in profile_named("home-uplink").sites} == {
        (20e6, 200e6)
    }
    assert [site.loss for site in profile_named("lossy").sites] == [0.001, 0.005, 0.01]
    (flapping,) = [site.flapping for site in profile_named("flapping").sites if site.flapping]
    assert 0 < flapping.away_s < flapping.every_s


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_says_what_it_is(name: str) -> None:
    assert 20 < len(describe(name)) < 110


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="no profile 'moon'"):
        profile_named("moon")
    for count in (0, MOST_SITES + 1):
        with pytest.raises(UsageError):
            with_sites(profile_named("continents"), count)
