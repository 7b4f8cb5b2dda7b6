"""Replicas that differ: which code, rank and parameter the records of two ranks lead to."""

import pytest
from replica_cases import NOBODY, Ranks, sketch

from ciuic.doctor.finding import Severity
from ciuic.doctor.rules.replicas import Replicas

A, B = b"aaaaaaaa", b"bbbbbbbb"


def make(mode: str = "ddp") -> Ranks:
    return Ranks(rule=Replicas(), mode=mode)


def apart(ranks: Ranks, *, until: int = 2, **names) -> Ranks:
    """Gradients that differ at step 1 and parameters that therefore differ at step 2."""
    ranks.hold("params", 1, w=A, b=A)
    ranks.hold("grads", 1, **(names or {"w": (A, B), "b": (A, B)}))
    ranks.hold("params", 2, w=(A, B), b=(A, B))
    ranks.hold("grads", 2, **(names or {"w": (A, B), "b": (A, B)}))
    return ranks


def test_equal_replicas_are_healthy():
    ranks = make()
    for step in (1, 2, 3):
        ranks.hold("params", step, w=A)
        ranks.hold("grads", step, w=A)
        ranks.step(step)
    assert ranks.end() == []


def test_a_run_of_many_steps_is_not_remembered_whole():
    ranks = make()
    for step in range(1, 400):
        ranks.hold("params", step, w=A)
        ranks.hold("grads", step, w=A)
        ranks.step(step)
    (track,) = ranks.rule._tracks.values()
    steps = [view.step for view in track.views]
    assert len(steps) < 100
    assert (steps[:16], steps[-32:]) == (list(range(1, 17)), list(range(368, 400)))
    assert ranks.end() == []


def test_a_forward_pass_around_the_wrapper_is_a1():
    ranks = apart(make())
    for step in (1, 2):
        ranks.step(step, flow=[1, 1, 0, 0, 1, 0])
    assert ranks.end() == ["A1"]
    assert ranks.findings[0].step == 1
    assert ranks.findings[0].modules == ("b", "w")


def test_gradients_that_differ_without_harm_are_no_finding():
    ranks = make()
    for step in (1, 2, 3):
        ranks.hold("params", step, w=A)
        ranks.hold("grads", step, w=(A, B))
        ranks.step(step, flow=[1, 1, 0, 0, 1, 0])
    assert ranks.end()[:1] in ([], ["A1"])
    assert not [f for f in ranks.findings if f.step < 3]


def test_an_unused_parameter_is_a2_and_named():
    ranks = apart(make(), w=(A, B), aux=NOBODY)
    for rank in (0, 1):
        ranks.tell(rank, "without_gradient", ["aux"])
    ranks.step(1)
    assert ranks.end() == ["A2"]
    assert ranks.findings[0].modules == ("aux",)


def test_unfrozen_after_the_wrap_is_a3():
    ranks = apart(make(), w=(A, B), b=A)
    for rank in (0, 1):
        ranks.tell(rank, "unregistered", ["w"], how=["unfrozen"])
    for step in (1, 2):
        ranks.step(step)
    assert ranks.end() == ["A3"]
    assert ranks.findings[0].modules == ("w",)


def test_the_last_micro_batch_under_no_sync_is_a4():
    ranks = apart(make())
    for step in (1, 2):
        ranks.step(step, flow=[2, 2, 2, 1, 0, 1])
    assert ranks.end() == ["A4"]


def test_never_synchronised_but_averaged_is_local_training():
    ranks = make()
    for step, same in ((1, True), (2, False), (3, False), (5, True)):
        ranks.hold("params", step, w=A if same else (A, B))
        ranks.hold("grads", step, w=(A, B))
        ranks.step(step, flow=[1, 1, 1, 0, 0, 1], exchange=[0, 0, int(step == 5), int(step == 5)])
    assert ranks.end() == []


def test_experts_that_ddp_ignores_and_that_began_apart_are_healthy():
    ranks = make()
    for rank in (0, 1):
        ranks.tell(rank, "unregistered", ["expert"], how=["ignored"])
    for step in (1, 2, 3):
        ranks.hold("params", step, w=A, expert=(A, B))
        ranks.hold("grads", step, w=A, expert=(A, B))
        ranks.step(step)
    assert ranks.end() == []


def test_one_zero_gradient_after_the_reduction_is_a6_with_its_rank():
    ranks = apart(make(), w=(A, B), b=A)
    ranks.tell(1, "zero_gradient", ["w"])
    for step in (1, 2):
        ranks.step(step)
    assert ranks.end() == ["A6"]
    assert ranks.findings[0].ranks == (1,)


def test_a_few_wrong_blocks_are_a_damaged_collective():
    ranks = apart(make(), w=(A, B), b=A)
    ranks.sketches = {0: {"w": sketch([1, 2])}, 1: {"w": sketch([1, 2.5], block=9)}}
    for step in (1, 2):
        ranks.step(step)
    assert ranks.end() == ["D5"]


def test_gradients_an_ulp_apart_are_a_note():
    ranks = apart(make())
    ranks.sketches = {0: {"w": sketch([1, 2])}, 1: {"w": sketch([1, 2 + 2e-7], block=9)}}
    for step in (1, 2):
        ranks.step(step)
    ranks.end()
    assert {finding.severity for finding in ranks.findings} == {Severity.NOTE}


@pytest.mark.parametrize("mode", ["ddp", "plain"])
def test_parameters_that_began_apart_are_d1(mode):
    ranks = make(mode)
    for step in (1, 2):
        ranks.hold("params", step, w=(A, B), b=A)
        ranks.hold("grads", step, w=A, b=A)
        ranks.step(step, exchange=[1, 0, 0, 0])
    assert ranks.end() == ["D1"]
    assert ranks.findings[0].modules == ("w",)


def diverge(ranks: Ranks, **facts) -> list[str]:
    for step, same in ((1, True), (2, False)):
        ranks.hold("params", step, w=A if same else (A, B), b=A)
        ranks.hold("grads", step, w=A, b=A)
        ranks.step(step, **facts)
    return ranks.end()


def test_another_state_of_the_optimizer_is_d2_on_its_rank():
    ranks = make()
    assert diverge(ranks, state={0: A, 1: B}) == ["D2"]
    assert ranks.findings[0].ranks == (1,)


def test_another_number_of_steps_is_d2():
    assert diverge(make(), taken={0: 3, 1: 4}) == ["D2"]


def test_a_write_on_one_rank_is_d4_with_step_and_rank():
    ranks = make()
    ranks.tell(1, "written", ["w"], number=2)
    assert diverge(ranks) == ["D4"]
    assert (ranks.findings[0].ranks, ranks.findings[0].step) == ((1,), 2)


def test_a_write_on_all_ranks_that_stay_equal_is_healthy():
    ranks = make()
    for rank in (0, 1):
        ranks.tell(rank, "written", ["w"], number=2)
    for step in (1, 2, 3):
        ranks.hold("params", step, w=A)
        ranks.hold("grads", step, w=A)
        ranks.step(step)
    assert ranks.end() == []


def test_a_second_step_on_the_same_gradient_is_d2_and_ends_the_comparison():
    ranks = apart(make())
    ranks.hold("grads", 1, w=A, b=A)
    for step in (1, 2):
        ranks.step(step, flow={0: [1, 1, 1, 1, 1, 0], 1: [1 if step == 1 else 0, 1, 1, 1, 1, 0]})
    assert ranks.end() == ["D2"]
    assert ranks.findings[0].ranks == (1,)


def test_a_reduction_that_leaves_a_layer_out_is_a5():
    ranks = apart(make("plain"), w=A, b=(A, B))
    for step in (1, 2):
        ranks.step(step, exchange=[1, 0, 0, 0], owned=[2, 0, 0, 0, 0, 0])
    assert ranks.end() == ["A5"]
    assert ranks.findings[0].modules == ("b",)


def test_gradients_that_are_reduced_after_the_step_are_a5_with_the_place():
    ranks = apart(make("plain"))
    ranks.step(1)
    ranks.step(2, after_step=[640, "train.py:7 in main"])
    assert ranks.end() == ["A5"]
    assert "train.py:7 in main after the optimizer's step" in ranks.findings[0].cause


def test_what_replaced_a_layer_after_the_wrap_is_a3_though_all_gradients_differ():
    ranks = apart(make(), w=(A, B), b=(A, B))
    for rank in (0, 1):
        ranks.tell(rank, "unregistered", ["w"], how=["added"])
    for step in (1, 2):
        ranks.step(step, flow=[1, 1, 1, 1, 1, 0])
    assert ranks.end() == ["A3"]
    assert ranks.findings[0].modules == ("w",)


def test_an_average_that_leaves_a_layer_out_is_a5():
    ranks = make("plain")
    for step in (1, 2, 5):
        ranks.hold("params", step, w=A if step != 2 else (A, B), b=A if step == 1 else (A, B))
        ranks.hold("grads", step, w=(A, B), b=(A, B))
        ranks.step(step, exchange=[0, 0, int(step == 5), int(step == 5)])
    assert ranks.end() == ["A5"]
    assert ranks.findings[0].modules == ("b",)


def test_models_that_never_exchange_and_began_apart_are_independent():
    ranks = make("plain")
    for step in (1, 2, 3, 4, 10, 20):
        ranks.hold("params", step, w=(A, B))
        ranks.hold("grads", step, w=(A, B))
        ranks.step(step)
    assert ranks.end() == []


def test_models_that_began_equal_and_never_exchange_are_told_late_and_unsurely():
    ranks = make("plain")
    for step in (1, 2, 3, 4, 10):
        ranks.hold("params", step, w=A if step == 1 else (A, B))
        ranks.hold("grads", step, w=(A, B))
        ranks.step(step)
        assert ranks.findings == []
    ranks.hold("params", 20, w=(A, B))
    ranks.hold("grads", 20, w=(A, B))
    ranks.step(20)
    assert ranks.end() == ["A5"]
    assert ranks.findings[0].severity is Severity.WARNING


def test_a_gradient_that_one_rank_lacks_is_c4():
    ranks = apart(make("plain"), w=A, style=(NOBODY, A))
    for step in (1, 2):
        ranks.step(step, exchange=[1, 0, 0, 0])
    assert ranks.end() == ["C4"]
    assert ranks.findings[0].ranks == (0,)


def test_ranks_without_comparable_parameters_are_left_alone():
    ranks = make("sharded")
    for step in (1, 2):
        ranks.step(step)
    assert ranks.end() == []


def test_what_is_trained_beside_the_wrapper_is_a2_when_it_began_equal():
    ranks = apart(make(), w=(A, B), b=A)
    for rank in (0, 1):
        ranks.tell(rank, "unregistered", ["w"], how=["beside"])
    for step in (1, 2):
        ranks.step(step)
    assert ranks.end() == ["A2"]
    assert "in no DistributedDataParallel" in ranks.findings[0].cause


def test_what_is_trained_beside_the_wrapper_and_began_apart_is_each_ranks_own():
    ranks = make()
    for rank in (0, 1):
        ranks.tell(rank, "unregistered", ["head"], how=["beside"])
    for step in (1, 2, 3):
        ranks.hold("params", step, w=A, head=(A, B))
        ranks.hold("grads", step, w=A, head=(A, B))
        ranks.step(step)
    assert ranks.end() == []


def test_gradients_and_parameters_that_differ_from_one_sample_on_are_the_gradients_fault():
    ranks = make()
    for step, same in ((1, True), (4, True), (10, False), (20, False)):
        ranks.hold("params", step, w=A if same else (A, B), b=A if same else (A, B))
        ranks.hold("grads", step, w=A if same else (A, B), b=A)
        ranks.step(step)
    assert ranks.end() == ["A6"]
    assert ranks.findings[0].step == 10
