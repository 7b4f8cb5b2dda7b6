from typing import Any

import pytest
from doctor_rounds import Room

from ciuic.doctor.case import REPLICAS
from ciuic.doctor.facts_model import LEFT_IN_EVALUATION, MANNER, MODE
from ciuic.doctor.facts_training import FORM
from ciuic.doctor.finding import Severity
from ciuic.doctor.rules.manner import Manner

STEPS = (1, 2, 3, 4, 10, 20)
SAME = b"same"


def _told(*modules: tuple[str, str, str], context: str = "autocast off") -> dict[str, Any]:
    return {"modules": {path: [text, mode] for path, text, mode in modules}, "context": context}


def _run(*digests: bytes, mode: str = "ddp", structure: bytes = SAME, steps: int = 2) -> Room:
    room = Room(Manner(), world=len(digests))
    for step in STEPS[:steps]:
        room.step(step, {rank: {MODE: mode, MANNER: [[0, structure, each]]} for rank, each in enumerate(digests)})
    return room


def test_a_rank_that_stayed_in_evaluation_mode_is_named_also_when_it_is_the_first():
    room = _run(b"a", b"b")
    train = _told(("", "Net", "training"), ("drop", "Dropout(p=0.1)", "training"))
    evaluate = _told(("", "Net", "evaluation"), ("drop", "Dropout(p=0.1)", "evaluation"))
    (found,) = room.answer({0: evaluate, 1: train})
    assert (found.code, found.ranks, found.modules) == ("CIUIC-D6", (0,), ())
    assert "the whole model is in evaluation mode" in found.cause


@pytest.mark.parametrize(("ranks", "times", "codes"), [(2, 2, ["CIUIC-D7"]), (1, 5, []), (2, 1, [])])
def test_training_that_goes_on_in_evaluation_mode_on_all_ranks_is_d7(ranks: int, times: int, codes: list[str]):
    room = Room(Manner())
    for step in STEPS[:times]:
        room.step(step, {rank: {LEFT_IN_EVALUATION: 3} if rank < ranks else {} for rank in (0, 1)})
    assert [finding.code for finding in room.found] == codes


def test_a_layer_that_one_of_three_ranks_froze_is_named():
    room = _run(b"a", b"b", b"a")
    usual = _told(("", "Net", "training"), ("norm", "BatchNorm1d(4)", "training"))
    frozen = _told(("", "Net", "training"), ("norm", "BatchNorm1d(4)", "evaluation"))
    (found,) = room.answer({0: usual, 1: frozen, 2: usual})
    assert (found.ranks, found.modules) == ((1,), ("norm",))


def test_of_another_setting_only_what_differs_is_told():
    room = _run(b"a", b"b")
    (found,) = room.answer(
        {
            0: _told(("drop", "Dropout(p=0.1, inplace=False)", "training")),
            1: _told(("drop", "Dropout(p=0.5, inplace=False)", "training")),
        }
    )
    assert "drop is Dropout(p=0.5), not Dropout(p=0.1)" in found.cause
    assert found.modules == ("drop",)


def test_autocast_on_one_rank():
    room = _run(b"a", b"b")
    (found,) = room.answer({0: _told(context="autocast off"), 1: _told(context="autocast bfloat16")})
    assert "autocast bfloat16" in found.cause


def test_an_answer_that_does_not_come_is_no_finding():
    room = _run(b"a", b"b")
    assert room.answer({0: _told(("", "Net", "training"))}) == []


def test_one_sample_or_equal_digests_ask_nobody():
    assert not _run(b"a", b"b", steps=1).asked
    assert not _run(b"a", b"a", steps=6).asked
    room = Room(Manner())
    for step, second in zip(STEPS, (b"b", b"a", b"b", b"a"), strict=False):
        room.step(step, {0: {MODE: "ddp", MANNER: [[0, SAME, b"a"]]}, 1: {MODE: "ddp", MANNER: [[0, SAME, second]]}})
    assert not room.asked, "it went back"


def test_stages_of_a_pipeline_and_models_that_nobody_synchronises_are_left_alone():
    room = Room(Manner())
    for step in STEPS:
        room.step(step, {rank: {MODE: "ddp", MANNER: [[0, bytes([rank]) * 4, bytes([rank]) * 4]]} for rank in (0, 1)})
    assert not room.asked
    assert not _run(b"a", b"b", mode="plain", steps=6).asked


def test_ranks_that_share_out_one_model_are_compared_and_shards_of_uneven_size_are_not():
    assert _run(b"a", b"b", mode="sharded").asked
    room = Room(Manner())
    for step in STEPS:
        room.step(step, {r: {MODE: "ddp", REPLICAS: [r], MANNER: [[0, SAME, bytes([r]) * 4]]} for r in (0, 1)})
    assert not room.asked


def _form(product: float, kind: str = "mean", labels: int = 0, micro: int = 1) -> list[Any]:
    return [micro, product, kind, labels, -1]


def _losses(first: Any, second: Any, steps: int = 4) -> Room:
    room = Room(Manner())
    for at, step in enumerate(STEPS[:steps]):
        forms = [each(at) if callable(each) else each for each in (first, second)]
        room.step(step, {rank: {MODE: "ddp", FORM: form} for rank, form in enumerate(forms)})
    return room


@pytest.mark.parametrize(
    ("second", "severity"),
    [(_form(0.1), None), (_form(1.0, "sum"), None), (_form(0.0), Severity.CRITICAL)],
)
def test_a_loss_that_one_rank_makes_in_another_way(second: Any, severity: Severity | None):
    found = _losses(_form(1.0), second).found[0]
    assert (found.code, found.ranks, found.severity) == ("CIUIC-E5", (1,), severity)


def test_factors_that_are_computed_or_make_up_for_other_numbers_of_labels_are_right():
    assert not _losses(_form(1.0), lambda at: _form(0.5 + 0.01 * at), steps=6).found
    assert not _losses(_form(4 / 3, labels=32), _form(2 / 3, labels=16), steps=6).found
    assert not _losses(_form(1.0), _form(1.0), steps=6).found
    assert not _losses(_form(1 / 30, "sum"), _form(1 / 4, "sum"), steps=6).found, "divided by the labels of each rank"
    assert not _losses(_form(1.0), _form(0.5, micro=2), steps=6).found
    assert not _losses(_form(1.0), _form(0.1, kind=""), steps=6).found
