"""Gradients that are missing, stale or without effect, and optimizers that do not own the model."""

from replica_cases import Ranks

from ciuic.doctor.finding import Severity
from ciuic.doctor.rules.buffers import Buffers
from ciuic.doctor.rules.cuts import Cuts
from ciuic.doctor.rules.gradients import Gradients
from ciuic.doctor.rules.ownership import Ownership

A, B = b"aaaaaaaa", b"bbbbbbbb"


def tell_all(ranks: Ranks, what: str, names: list[str], **facts) -> None:
    for rank in range(ranks.world):
        ranks.tell(rank, what, names, **facts)


def test_a_called_module_without_gradient_is_c1_at_its_second_sample():
    ranks = Ranks(rule=Gradients())
    tell_all(ranks, "cut_names", ["adapter.weight"])
    ranks.step(1, cut=[1, 0, 0])
    assert ranks.findings == []
    ranks.step(2, cut=[1, 0, 0])
    assert ranks.end() == ["C1"]
    assert ranks.findings[0].modules == ("adapter.weight",)


def test_layers_that_are_skipped_in_turn_are_no_finding():
    ranks = Ranks(rule=Gradients())
    for step in (1, 2, 3, 4):
        tell_all(ranks, "idle_names", [f"blocks.{step % 2}.weight"])
        ranks.step(step, cut=[0, 0, 1])
    assert ranks.end() == []


def test_passes_that_are_thrown_away_in_each_step_are_c6():
    ranks = Ranks(rule=Gradients())
    for step in (1, 2, 3, 4, 10):
        ranks.step(step, thrown=[3, "train.py:9 in main", 0])
    assert ranks.end() == ["C6"]
    assert "3 of 4 backward passes" in ranks.findings[0].cause


def test_gradients_that_are_cleared_before_the_step_are_critical():
    ranks = Ranks(rule=Gradients())
    for step in (2, 3, 4):
        ranks.step(step, thrown=[1, "train.py:9 in main", 1])
    assert ranks.end() == ["C6"]
    assert ranks.findings[0].severity is Severity.CRITICAL
    assert "the backward pass of each step is lost" in ranks.findings[0].cause


def test_another_number_of_thrown_passes_each_time_is_no_finding():
    ranks = Ranks(rule=Gradients())
    for step in (1, 2, 3, 4, 10):
        ranks.step(step, thrown=[step, "train.py:9 in main", 0])
    assert ranks.end() == []


def test_a_frozen_parameter_that_moves_is_b5_once():
    ranks = Ranks(rule=Ownership())
    tell_all(ranks, "frozen", ["stem.weight"])
    for step in (20, 30):
        ranks.step(step, frozen=1)
    assert ranks.end() == ["B5"]
    assert ranks.findings[0].modules == ("stem.weight",)


def test_a_layer_that_is_never_called_is_a_note():
    ranks = Ranks(rule=Gradients())
    tell_all(ranks, "idle_names", ["aux.weight"])
    for step in (1, 2, 3):
        ranks.step(step, cut=[0, 0, 1])
    assert ranks.end() == ["C1"]
    assert ranks.findings[0].severity is Severity.NOTE


def test_gradients_used_twice_are_c5():
    ranks = Ranks(rule=Gradients())
    ranks.step(1)
    for step in (2, 3):
        ranks.step(step, stale=[1, 0, -1])
    assert ranks.end() == ["C5"]
    assert ranks.findings[0].step == 2


def test_an_optimizer_that_steps_rarely_accumulates_on_purpose():
    ranks = Ranks(rule=Gradients())
    for step in range(1, 21):
        ranks.step(step, optimizer=0)
    for step in (2, 3, 4):
        ranks.step(step, optimizer=1, stale=[0, 1, 0])
    assert ranks.end() == []


def test_learning_rate_zero_counts_only_after_the_warm_up():
    ranks = Ranks(rule=Gradients())
    tell_all(ranks, "still_rate", ["head.weight"], rate=0.0)
    for step in (1, 2, 3, 4):
        ranks.step(step, still=[1, 0, 0])
    assert ranks.findings == []
    ranks.step(10, still=[1, 0, 0])
    assert ranks.end() == ["B4"]
    assert "learning rate of its group is 0" in ranks.findings[0].cause


def test_updates_that_round_to_nothing_name_type_and_sizes():
    ranks = Ranks(rule=Gradients())
    tell_all(ranks, "still_rounding", ["w"], rate=1e-5, dtype="bfloat16", spacing=2e-4, of=1)
    for step in (2, 3, 4):
        ranks.step(step, still=[0, 1, 0])
    assert ranks.end() == ["B4"]
    assert "bfloat16" in ranks.findings[0].cause
    assert "2.0e-04" in ranks.findings[0].cause


def test_half_precision_without_scale_is_c3_only_when_much_is_lost():
    ranks = Ranks(rule=Gradients())
    for step in (1, 2):
        ranks.step(step, half=[0.1, 0.4])
    assert ranks.findings == []
    for step in (3, 4):
        ranks.step(step, half=[1.0, 0.0])
    assert ranks.end() == ["C3"]


def test_parameters_that_nobody_owns_are_b1():
    ranks = Ranks(rule=Ownership())
    tell_all(ranks, "unowned", ["head.weight"])
    ranks.step(1, owned=[3, 0, 0, 1, 0, 0])
    assert ranks.findings == []
    ranks.step(2, owned=[3, 0, 0, 1, 0, 0])
    assert ranks.end() == ["B1"]
    assert ranks.findings[0].modules == ("head.weight",)


def test_an_optimizer_of_strangers_is_b2():
    ranks = Ranks(rule=Ownership())
    tell_all(ranks, "unowned", ["body.weight", "head.weight"])
    tell_all(ranks, "strangers", ["head.weight"])
    for step in (1, 2):
        ranks.step(step, owned=[3, 1, 0, 2, 1, 0])
    assert ranks.end() == ["B2"]
    assert ranks.findings[0].modules == ("head.weight", "body.weight")


def test_shared_parameters_are_b3_once():
    ranks = Ranks(rule=Ownership())
    tell_all(ranks, "shared", ["w"], optimizer=1, other=0, same=1)
    tell_all(ranks, "shared", ["w"], optimizer=0, other=1, same=0)
    assert ranks.end() == ["B3"]


def test_a_collective_without_gradient_needs_two_sightings():
    ranks = Ranks(rule=Cuts())
    facts = {
        "call": "all_gather",
        "site": "train.py:3 in loss",
        "shape": [8, 4],
        "how": "unreachable",
        "module": "text",
    }
    ranks.notice(0, "cut_call", at=0, **facts)
    assert ranks.findings == []
    ranks.notice(1, "cut_call", at=0, **facts)
    assert ranks.end() == ["C2"]
    assert ranks.findings[0].modules == ("text",)


def test_no_sync_without_effect_is_a7_and_with_effect_is_not():
    ranks = Ranks(rule=Cuts())
    for step in (1, 2, 3):
        ranks.step(step, flow=[4, 4, 4, 1, 1, 3])
    assert ranks.findings == []
    for step in (4, 5):
        ranks.step(step, flow=[4, 4, 4, 4, 1, 3])
    assert ranks.end() == ["A7"]


def test_buffers_of_an_evaluation_count_only_without_a_broadcast():
    for synced, codes in ((1, []), (0, ["D3"])):
        ranks = Ranks(rule=Buffers())
        for rank in (0, 1):
            ranks.notice(rank, "model", index=0, name="Net", model_kind="ddp", forward_sync_buffers=synced)
        ranks.hold("grads", 1, w=A)
        ranks.hold("params", 1, w=A)
        ranks.step(1)
        ranks.hold("evaluated", 1, bn__running_mean=(A, B))
        for rank, digest in ((0, A), (1, B)):
            ranks.notice(rank, "evaluated", at=5, model=0, count=1, buffers=digest)
        assert ranks.end() == codes


def test_buffers_that_training_uses_must_be_equal():
    ranks = Ranks(rule=Buffers())
    for step in (1, 2, 3):
        ranks.hold("grads", step, w=A)
        ranks.hold("params", step, w=A)
        ranks.hold("buffers", step, moe__bias=A if step == 1 else (A, B))
        ranks.step(step)
    assert ranks.end() == ["D3"]
    assert ranks.findings[0].modules == ("moe.bias",)


def test_averages_of_equal_weights_must_be_equal():
    ranks = Ranks(rule=Buffers())
    for step in (1, 2, 3):
        ranks.hold("grads", step, w=A)
        ranks.hold("params", step, w=A)
        ranks.hold("averages", step, Average__w=(A, B))
        ranks.step(step)
    assert ranks.end() == ["D3"]
