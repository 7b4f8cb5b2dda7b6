"""Files after kill -9, at every write point and at any moment; and on a disk that is full."""

import pytest
from kill_cases import run_case


def test_a_log_keeps_all_that_was_acknowledged_when_killed_at_any_write_point() -> None:
    run_case("log_at_every_write_point")


def test_a_log_keeps_all_that_was_acknowledged_when_killed_at_any_moment() -> None:
    run_case("log_at_any_moment")


def test_a_file_is_the_old_or_the_new_one_when_killed_at_any_write_point() -> None:
    run_case("file_at_every_write_point")


def test_a_file_is_the_old_or_the_new_one_when_killed_at_any_moment() -> None:
    run_case("file_at_any_moment")


@pytest.mark.parametrize("case", ["disk_is_full", "files_are_limited"])
def test_a_full_disk_leaves_the_log_as_it_was_and_it_goes_on_when_there_is_space(case: str) -> None:
    run_case(case)


def test_a_full_disk_leaves_the_old_file_and_no_temporary_one() -> None:
    run_case("disk_is_full_when_a_file_is_replaced")
