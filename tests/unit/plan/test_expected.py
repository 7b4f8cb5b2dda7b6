"""What is expected of each node of a run."""

import pytest
from plan_cases import FIVE_MILLION, SPEEDS, nodes_at

from ciuic.plan.expected import Work, expect
from ciuic.plan.facts import NodeFacts, gather_facts
from ciuic.plan.predict import Setting, predict

SETTING = Setting(codec_up="int8", codec_down="int8", interval=4)
WORK = Work(shape=FIVE_MILLION, nodes=3, setting=SETTING, overlap=False, speeds=SPEEDS, tokens_per_step=1024)


def test_a_node_is_predicted_with_its_own_link() -> None:
    slow, fast = nodes_at(5e6)[0], nodes_at(500e6)[0]
    of_slow, of_fast = expect(slow, WORK), expect(fast, WORK)
    assert of_slow is not None
    assert of_fast is not None
    assert of_slow.communication_share > of_fast.communication_share + 0.1
    assert of_slow.tokens_per_s < of_fast.tokens_per_s < 1024 / 0.6


def test_equal_nodes_are_expected_to_do_what_the_round_predicts() -> None:
    nodes = nodes_at(20e6)
    facts = gather_facts(FIVE_MILLION, nodes, SPEEDS)
    found = expect(nodes[0], WORK)
    assert facts is not None
    assert found is not None
    round_ = predict(facts, SETTING, overlap=False)
    assert found.communication_share == pytest.approx(round_.exposed_share)
    assert found.tokens_per_s == pytest.approx(1024 / 0.6 * (1 - round_.exposed_share))


def test_nothing_is_expected_of_what_is_not_measured() -> None:
    assert expect(NodeFacts(node="a", step_s=0.6), WORK) is None
    assert expect(nodes_at(20e6, step_s=None)[0], WORK) is None
