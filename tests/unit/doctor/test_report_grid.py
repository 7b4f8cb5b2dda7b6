"""The numbers and the picture of the heat map."""

import re
from pathlib import Path

import pytest
from doctor_page import MODULES, STEPS, make_folder, moved
from hypothesis import given
from hypothesis import strategies as st

from ciuic.doctor.report.grid import COLUMNS_MAX, NO_OPTIMIZER, Cell, Grid, make_grids
from ciuic.doctor.report.heatmap import CLASSES, colour_class, heat_map, sign_of
from ciuic.doctor.report.history import History, Moment, read_history


@pytest.fixture
def grid(tmp_path: Path) -> Grid:
    return make_grids(read_history(make_folder(tmp_path)))[0]


def test_rows_are_modules_and_columns_are_steps(grid: Grid) -> None:
    assert grid.modules == tuple(MODULES)
    assert grid.steps == tuple(STEPS)


def test_flags_are_those_of_all_ranks_and_of_parameters_without_an_optimizer(grid: Grid) -> None:
    head, column = MODULES.index("head"), STEPS.index(3)
    cell = grid.at(head, column)
    assert cell is not None
    assert cell.flags == NO_OPTIMIZER
    before = grid.at(head, column - 1)
    assert before is not None
    assert before.flags == 0


def test_a_module_without_any_optimizer_has_a_row_of_its_own(tmp_path: Path) -> None:
    grid = make_grids(read_history(make_folder(tmp_path, module="forgotten")))[0]
    assert grid.modules[-1] == "forgotten"
    assert grid.at(len(MODULES), STEPS.index(2)) is None


def test_a_rank_that_moves_otherwise_is_marked_where_it_does(grid: Grid) -> None:
    assert grid.apart == {(MODULES.index("head"), STEPS.index(20))}


def test_ranks_of_shards_may_move_differently(tmp_path: Path) -> None:
    history = read_history(make_folder(tmp_path))
    history.modes = {"sharded"}
    assert make_grids(history)[0].apart == frozenset()


@given(st.integers(1, 700), st.data())
def test_many_steps_share_columns_and_no_flag_is_lost(count: int, data: st.DataObject) -> None:
    flagged = data.draw(st.integers(1, count))
    history = History()
    for step in range(1, count + 1):
        moment = Moment(step=step, modules=("m",), moved=b"\x64", grads=b"\x64", flags=bytes([4 * (step == flagged)]))
        history.moments[0][0].append(moment)
    grid = make_grids(history)[0]
    assert len(grid.steps) == min(COLUMNS_MAX, count)
    assert grid.steps[-1] == count
    assert sum(bool(cell.flags) for column in range(len(grid.steps)) if (cell := grid.at(0, column))) == 1


@given(st.integers(1, 255), st.integers(1, 255))
def test_a_longer_movement_is_never_darker(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert 0 <= colour_class(low) <= colour_class(high) < CLASSES
    assert colour_class(0) == -1


def test_colours_are_half_decades() -> None:
    assert [colour_class(moved(10.0**power)) for power in (-7, -4, -2, 0, 2)] == [0, 6, 10, 13, 13]


def test_the_most_important_sign_is_shown() -> None:
    assert sign_of(Cell(moved=0, grad=0, flags=32 | 1)) == 32
    assert sign_of(Cell(moved=0, grad=0, flags=16)) == 16
    assert sign_of(Cell(moved=100, grad=100, flags=16)) == 0, "partly frozen, and the rest moves"


def test_the_picture_says_in_words_what_it_shows(grid: Grid) -> None:
    text = heat_map(grid)
    assert "3 of 5 modules have a missing, zero or ghost gradient" in text
    assert "1 moved differently on different ranks" in text
    assert "gradient is None: at all sampled steps" in text
    assert "gets a gradient, no optimizer owns it: at 6 sampled steps from 3 to 40" in text
    assert "ranks moved differently: at step 20" in text
    assert re.search(r'role="img" aria-label="How far each module moved\.', text)
    assert text.count("<rect") == 1, "cells of one colour are one path"
