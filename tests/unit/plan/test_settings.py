"""What a run uses: given, default or measured; and when it changes."""

from typing import Any

import pytest
from support.plan_cases import FIVE_MILLION, SPEEDS, nodes_at

from ciuic.job import Job, parse_job
from ciuic.ledger.layout import Tensor, make_layout
from ciuic.plan.facts import HubLink, NodeFacts, Wishes, gather_facts
from ciuic.plan.predict import Setting
from ciuic.plan.settings import Resolved, default_settings, resolve, shape_of, wishes_of
from ciuic.plan.words import explain, summary


def resolved(wishes: Wishes, nodes: list[NodeFacts], **more: Any) -> Resolved:
    return resolve(wishes, FIVE_MILLION, nodes, SPEEDS, **more)


def test_before_anything_is_measured_the_default_is_used_and_named_so() -> None:
    found = resolved(Wishes(), [])
    assert (found.codec_up, found.codec_down, found.interval) == ("1-bit", "1-bit", 8)
    assert set(found.sources.values()) == {"default"}
    assert found.choice is None


def test_without_step_times_the_default_is_used() -> None:
    assert resolved(Wishes(), nodes_at(20e6, step_s=None)).sources["interval"] == "default"


def test_measured_links_and_steps_give_a_choice() -> None:
    found = resolved(Wishes(), nodes_at(20e6, 0.22))
    assert set(found.sources.values()) == {"measured"}
    assert found.choice is not None
    assert found.setting == found.choice.setting
    assert found.why.startswith("measured: 20 Mbit/s up")


def test_what_the_job_gives_stays_and_is_named_so() -> None:
    found = resolved(Wishes(codec_up="int8", interval=12), nodes_at(20e6))
    assert (found.codec_up, found.interval) == ("int8", 12)
    assert found.sources == {"codec_up": "given", "codec_down": "measured", "interval": "given"}
    assert default_settings(Wishes(codec_up="int8", interval=12)).sources["codec_up"] == "given"


def test_a_job_that_gives_everything_still_gets_a_prediction() -> None:
    found = resolved(Wishes(codec_up="none", codec_down="none", interval=8), nodes_at(20e6))
    assert found.why == "job"
    assert found.choice is not None
    assert found.choice.round.exposed_share > 0.5


def test_a_small_gain_changes_nothing() -> None:
    best = resolved(Wishes(), nodes_at(20e6, 0.22)).setting
    near = Setting(codec_up="1-bit", codec_down="1-bit", interval=best.interval + 1)
    assert resolved(Wishes(), nodes_at(20e6, 0.22), current=near).setting == near


def test_a_large_gain_changes_the_settings() -> None:
    best = resolved(Wishes(), nodes_at(20e6, 0.22)).setting
    bad = Setting(codec_up="none", codec_down="none", interval=2)
    assert resolved(Wishes(), nodes_at(20e6, 0.22), current=bad).setting == best


def test_settings_that_the_job_does_not_allow_are_left_whatever_they_gain() -> None:
    current = Setting(codec_up="1-bit", codec_down="1-bit", interval=5)
    assert resolved(Wishes(codec_up="int8"), nodes_at(20e6), current=current).codec_up == "int8"


def test_repeated_measurements_that_waver_do_not_flip_the_settings() -> None:
    current = resolved(Wishes(), nodes_at(20e6, 0.2)).setting
    for rate in (18e6, 22e6, 19e6, 21e6):
        current = (found := resolved(Wishes(), nodes_at(rate, 0.2), current=current)).setting
        assert found.setting == current


def test_when_measurements_are_lost_the_settings_in_force_stay() -> None:
    current = Setting(codec_up="int4", codec_down="int4", interval=3)
    assert resolved(Wishes(), [], current=current).setting == current


def test_the_slowest_direction_and_the_longest_way_limit_a_round() -> None:
    nodes = [
        NodeFacts(node="near", up_bits_per_s=5e6, down_bits_per_s=1e9, rtt_s=0.01, step_s=1.0),
        NodeFacts(node="far", up_bits_per_s=1e9, down_bits_per_s=1e8, rtt_s=0.3, step_s=3.0),
        NodeFacts(node="unknown"),
    ]
    facts = gather_facts(FIVE_MILLION, nodes, SPEEDS)
    assert facts is not None
    assert (facts.link.up_bits_per_s, facts.link.down_bits_per_s, facts.link.rtt_s) == (5e6, 1e8, 0.3)
    assert facts.link.slowest == "near"
    assert facts.nodes == 3
    assert facts.step_s == pytest.approx(1.5)


def test_the_hubs_own_link_is_shared_by_all() -> None:
    facts = gather_facts(FIVE_MILLION, nodes_at(1e9), SPEEDS, HubLink(up_bits_per_s=300e6, down_bits_per_s=600e6))
    assert facts is not None
    assert (facts.link.up_bits_per_s, facts.link.down_bits_per_s) == (200e6, 100e6)
    assert facts.link.slowest == "the hub"


def test_wishes_are_read_from_the_job() -> None:
    assert wishes_of(Job().sync) == Wishes()
    table = parse_job({"sync": {"compression": {"up": "int8", "down": "auto"}, "interval": 4, "overlap": True}})
    assert wishes_of(table.sync) == Wishes(codec_up="int8", interval=4, overlap=True)
    assert wishes_of(parse_job({"sync": {"send": "gradient"}}).sync).gradients


def test_gradients_are_sent_every_step_with_four_bits_before_links_are_known() -> None:
    found = resolved(Wishes(gradients=True), [])
    assert (found.codec_up, found.codec_down, found.interval) == ("int4", "int4", 1)


def test_all_fragments_count() -> None:
    tensors = [
        Tensor(name=f"w{i}", shape=(64, 100), dtype="float32", section="coded", fragment=i % 2) for i in range(4)
    ]
    assert shape_of(make_layout(tensors, 2)).coded_count == 4 * 6400


def test_the_explanation_names_link_bytes_time_and_loss() -> None:
    choice = resolved(Wishes(), nodes_at(20e6, 0.22)).choice
    assert choice is not None
    text = "\n".join(explain(choice))
    for part in (
        "20 Mbit/s",
        "220 ms",
        "kB each way",
        "bf16 would need",
        "of the time goes into steps",
        "held-out loss",
    ):
        assert part in text
    assert summary(choice) in text
