"""When the hub chooses settings, and when it leaves them alone."""

from typing import Any

import msgspec
import pytest
from ledger_frames import tiny_layout

from ciuic.hub.run.choosing import Chooser
from ciuic.hub.run.settings_source import changed, settings_of
from ciuic.job import parse_job
from ciuic.ledger.layout import Tensor, make_layout
from ciuic.net.messages import NodeInRun, SyncRequest
from ciuic.plan.facts import CodecSpeed, CodecSpeeds

SPEEDS = CodecSpeeds(
    by_name={
        name: CodecSpeed(encode_bytes_per_s=1.5e9, decode_bytes_per_s=3e9)
        for name in ("none", "bf16", "int8", "int4", "2-bit", "1-bit", "topk")
    }
)
LARGE = make_layout([Tensor(name="w", shape=(2500, 2000), dtype="float32", section="coded")])


def nodes(step: int = 10, step_s: float = 0.6) -> list[NodeInRun]:
    return [NodeInRun(node_id=name, state="training", step=step, step_s=step_s) for name in "abc"]


def links(bits_per_s: float, rtt_s: float = 0.2) -> dict[str, dict[str, float]]:
    one = {"up_bits_per_s": bits_per_s, "down_bits_per_s": bits_per_s, "rtt_s": rtt_s}
    return dict.fromkeys("abc", one)


def job(**sync: Any) -> Any:
    return parse_job({"sync": sync})


@pytest.fixture
def chooser() -> Chooser:
    return Chooser(lambda: SPEEDS)


def test_before_the_nodes_have_made_some_steps_nothing_is_chosen(chooser: Chooser) -> None:
    start = settings_of(job())
    assert chooser.choose(job(), LARGE, start, nodes(step=2), links(20e6)) is None
    assert chooser.choose(job(), LARGE, start, [], links(20e6)) is None


def test_a_fast_link_is_not_compressed_to_bits_and_a_slow_one_is(chooser: Chooser) -> None:
    start = settings_of(job())
    fast = chooser.choose(job(), LARGE, start, nodes(step_s=2.0), links(10e9, 0.001))
    slow = chooser.choose(job(), LARGE, start, nodes(), links(5e6))
    assert fast is not None
    assert slow is not None
    bits = {"none": 32, "bf16": 16, "int8": 8, "int4": 4, "2-bit": 2, "1-bit": 1}
    assert bits[fast.codec_up] > bits[slow.codec_up]
    assert fast.interval <= slow.interval
    assert slow.why.startswith("measured")


def test_what_was_chosen_stays_when_nothing_new_is_measured(chooser: Chooser) -> None:
    first = chooser.choose(job(), LARGE, settings_of(job()), nodes(), links(20e6))
    assert first is not None
    assert chooser.choose(job(), LARGE, first, nodes(), links(20e6)) is None
    assert chooser.choose(job(), LARGE, first, nodes(step_s=0.61), links(20.4e6)) is None


def test_given_values_stay_and_only_the_rest_is_chosen(chooser: Chooser) -> None:
    fixed = job(compression="int8")
    found = chooser.choose(fixed, LARGE, settings_of(fixed), nodes(), links(20e6))
    assert found is not None
    assert (found.codec_up, found.codec_down) == ("int8", "int8")
    both = job(compression="int8", interval=4)
    assert chooser.choose(both, LARGE, settings_of(both), nodes(), links(20e6)) is None


def test_nothing_is_chosen_over_an_operators_hand(chooser: Chooser) -> None:
    by_hand = changed(settings_of(job()), SyncRequest(interval=33), "ops", job())
    assert chooser.choose(job(), LARGE, by_hand, nodes(), links(20e6)) is None
    assert msgspec.structs.replace(by_hand, by_hand=False).interval == 33


def test_without_a_measured_link_the_default_stays(chooser: Chooser) -> None:
    found = chooser.choose(job(), tiny_layout(), settings_of(job()), nodes(), {})
    assert found is None or (found.codec_up, found.interval) == ("1-bit", 8)


def test_a_run_is_looked_at_now_and_then(chooser: Chooser) -> None:
    assert chooser.is_due("r", 100.0)
    assert not chooser.is_due("r", 104.0)
    assert chooser.is_due("other", 104.0)
    assert chooser.is_due("r", 105.5)
