"""What the evidence of a run says, read back."""

from pathlib import Path

from doctor_page import BEGAN_S, MODULES, STEPS, make_folder

from ciuic.doctor.evidence import EVIDENCE
from ciuic.doctor.report.history import read_history


def test_curves_have_a_point_for_each_sampled_step(tmp_path: Path) -> None:
    history = read_history(make_folder(tmp_path))
    assert history.world == 2
    assert [step for step, _ in history.losses[0]] == STEPS
    assert history.rates[0, 0][1][0] == (1, 1e-3 * (1 - 1 / 50))
    assert history.scales[0][0] == (1, 65536.0)
    assert history.skipped[1] == [10, 20, 30, 40]


def test_a_loss_that_is_not_finite_is_told_and_not_drawn(tmp_path: Path) -> None:
    history = read_history(make_folder(tmp_path))
    assert [step for step, _ in history.losses[1]] == [1, 2, 3, 4]
    assert history.not_finite[1] == [10, 20, 30, 40]


def test_modules_are_remembered_from_the_first_notice(tmp_path: Path) -> None:
    moments = read_history(make_folder(tmp_path)).moments[0][1]
    assert [moment.step for moment in moments] == STEPS
    assert {moment.modules for moment in moments} == {tuple(MODULES)}


def test_how_ranks_ended_and_how_far_they_came(tmp_path: Path) -> None:
    history = read_history(make_folder(tmp_path))
    assert history.ends[0] == (BEGAN_S + len(STEPS) - 1, "end")
    assert history.ends[1][1].startswith("RuntimeError")
    assert history.steps == {0: 44, 1: 44}


def test_a_clock_that_is_ahead_is_moved_back_and_told(tmp_path: Path) -> None:
    history = read_history(make_folder(tmp_path, ahead_s=900.0))
    assert history.shifts_s == {1: -900.0}
    assert [sign.time_s for sign in history.signs[1]] == [sign.time_s for sign in history.signs[0]]
    assert history.ended_s - history.began_s < 10


def test_lines_that_are_torn_or_strange_are_left_out(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    path = folder / EVIDENCE
    strange = b'["notice",["notice",0,1,"movement",{"optimizer":"x"}]]\n["beat",[1]]\n["what",{}]\n["record",["rec'
    path.write_bytes(path.read_bytes() + strange)
    assert len(read_history(folder).moments[0][0]) == len(STEPS)


def test_a_folder_without_evidence_has_an_empty_history(tmp_path: Path) -> None:
    history = read_history(tmp_path)
    assert (history.world, history.began_s, history.ended_s) == (0, 0.0, 0.0)
