"""Ranks that left: from hand-made last words."""

import time
from typing import Any

import pytest

from ciuic.doctor.case import Case
from ciuic.doctor.facts import LEFT_IN
from ciuic.doctor.facts_waiting import OPEN, WAITS
from ciuic.doctor.finding import Finding
from ciuic.doctor.record import Beat, Bye, Hello
from ciuic.doctor.rules.departures import CUT, Departures

CLOSED = "RuntimeError: Connection closed by peer [127.0.0.1]:1234"


class World:
    """A case in which ranks leave."""

    def __init__(self, world: int = 2) -> None:
        self.case = Case(ask=lambda *_, **__: None, world=world)
        self.rule = Departures()
        for rank in range(world):
            self.case.hellos[rank] = Hello(token="", rank=rank, world=world, host="h", pid=rank)
            self.case.beats[rank] = Beat(rank=rank, step=6, time_s=0, phase="other", phase_s=0, facts={})
            self.case.heard_s[rank] = time.monotonic()

    def leaves(self, rank: int, how: str, left_in: str = "other", step: int = 6) -> None:
        if how != CUT:
            facts: dict[str, Any] = {LEFT_IN: left_in}
            if left_in in ("collective", "backward"):
                facts[OPEN] = {"name": "all_reduce", "site": "train.py:9 in main"}
            self.case.byes[rank] = Bye(rank=rank, step=step, how=how, facts=facts)
        self.case.gone[rank] = how
        assert not list(self.rule.left(self.case, rank, how))

    def later(self, seconds: float) -> list[Finding]:
        return list(self.rule.tick(self.case, time.monotonic() + seconds))

    def end(self) -> list[Finding]:
        return list(self.rule.end(self.case))


def test_a_rank_that_ends_while_another_fails_in_a_call_is_named_with_its_steps():
    world = World()
    world.leaves(1, "end", step=9)
    world.leaves(0, CLOSED, "backward", step=9)
    (found,) = world.later(0.0)
    assert (found.code, found.ranks) == ("CIUIC-J1", (1,))
    assert "9 steps" in found.cause
    assert "train.py:9" in found.cause


def test_an_error_that_nobody_told_counts_when_it_ended_a_call():
    world = World()
    world.leaves(1, "end")
    world.leaves(0, "end", "collective")
    assert [found.ranks for found in world.later(0.0)] == [(1,)]


def test_a_rank_that_waits_for_one_that_has_ended_is_enough():
    world = World()
    world.leaves(1, "end")
    world.case.beats[0] = Beat(rank=0, step=6, time_s=0, phase="collective", phase_s=2.0, facts={WAITS: True})
    world.case.heard_s[0] = time.monotonic() + 2.0
    assert [found.code for found in world.later(2.0)] == ["CIUIC-J1"]


def test_ranks_that_end_in_order_give_no_finding():
    world = World()
    world.leaves(1, "end")
    world.leaves(0, "end")
    assert not world.later(10.0)
    assert not world.end()


def test_the_own_exception_of_a_rank_is_told():
    world = World()
    world.leaves(1, "ValueError: sample 48 is broken")
    assert not world.later(0.1)
    (found,) = world.later(2.0)
    assert (found.code, found.ranks) == ("CIUIC-J1", (1,))
    assert "sample 48" in found.cause


def test_one_exception_on_all_ranks_is_the_programs_own_affair():
    world = World(3)
    for rank in range(3):
        world.leaves(rank, f"ValueError: bad option {rank}")
    assert not world.later(2.0)
    assert not world.end()


def test_a_killed_process_is_named_when_another_fails_because_of_it():
    world = World()
    world.leaves(1, CUT)
    world.leaves(0, CLOSED, "backward")
    (found,) = world.later(1.0)
    assert (found.code, found.ranks) == ("CIUIC-J5", (1,))


def test_processes_that_go_at_once_without_an_error_give_no_finding():
    world = World()
    world.leaves(1, CUT)
    world.leaves(0, CUT)
    assert not world.later(5.0)
    assert not world.end()


def test_the_exit_code_of_the_command_tells_that_a_cut_rank_was_killed():
    world = World()
    world.leaves(1, CUT)
    world.leaves(0, CUT)
    world.case.exit_code = 1
    assert [found.code for found in world.end()] == ["CIUIC-J5"]


def test_a_connection_that_comes_back_was_no_death():
    world = World()
    world.leaves(1, CUT)
    list(world.rule.hello(world.case, world.case.hellos[1]))
    world.leaves(0, CLOSED, "backward")
    assert "CIUIC-J5" not in {found.code for found in world.later(1.0)}


def test_failed_connections_without_a_rank_that_left_before_are_the_links():
    world = World()
    world.leaves(0, CLOSED, "collective")
    assert not world.later(0.5)
    assert [found.code for found in world.later(3.0)] == ["CIUIC-J7"]


@pytest.mark.parametrize("how", ["KeyboardInterrupt: ", "end"])
def test_a_person_who_ends_the_run_is_no_fault(how: str):
    world = World()
    world.leaves(0, how)
    world.leaves(1, how)
    assert not world.end()


@pytest.mark.parametrize(
    ("how", "left_in"),
    [
        ("TypeError: the hook required CUDA 11+ and NCCL 2.10+", "start"),
        ("RuntimeError: Distributed package doesn't have NCCL built in", "start"),
    ],
)
def test_an_error_of_the_programs_own_that_names_a_library_is_no_broken_connection(how, left_in):
    world = World()
    for rank in (0, 1):
        world.leaves(rank, how, left_in, step=0)
    assert world.later(10.0) == []
    assert world.end() == []
