"""Order of calls, stacks and times as a rank sees them."""

import threading
import time

import torch
from hypothesis import given
from hypothesis import strategies as st

from ciuic.doctor.facts_waiting import TIMES
from ciuic.doctor.probe import stack
from ciuic.doctor.probe.part import Call
from ciuic.doctor.probe.sequence import Made, Sequence, detail_of
from ciuic.doctor.probe.timers import summary


def _sequence(count: int, changed: int = 0) -> Sequence:
    sequence = Sequence(ranks=(0, 1))
    for number in range(1, count + 1):
        name = "other" if number == changed else "all_reduce"
        sequence.add(Made(group="0", number=0, name=name, detail="", site=f"x:{number}", step=0, ranks=(0, 1)))
    return sequence


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_two_ranks_that_are_near_each_other_have_a_number_in_common(one: int, other: int):
    marks = [dict(map(tuple, _sequence(count).marks())) for count in (one, other)]
    low, high = sorted((one, other))
    power = max((p for p in range(12) if low >> p and low >> p == high >> p), default=None)
    if power is not None:  # both have passed the same multiple of a power of two and not the next one
        assert marks[0].keys() & marks[1].keys()
    assert all(marks[0][number] == marks[1][number] for number in marks[0].keys() & marks[1].keys())


@given(st.integers(2, 400), st.data())
def test_one_other_call_changes_every_later_mark_and_no_earlier_one(count: int, data: st.DataObject):
    changed = data.draw(st.integers(1, count))
    usual, odd = (dict(map(tuple, _sequence(count, at).marks())) for at in (0, changed))
    assert all((usual[number] == odd[number]) == (number < changed) for number in usual)


def test_marks_stay_few():
    assert len(_sequence(3000).marks()) <= 20


def _call(name: str, *tensors: torch.Tensor, backend: str = "gloo") -> Call:
    return Call(name=name, number=1, ranks=(0, 1), site="x", tensors=tensors, operation="SUM", backend=backend)


def test_shapes_count_where_all_ranks_must_agree_on_them():
    assert detail_of(_call("all_reduce", torch.zeros(2, 3))) == "float32[2,3] SUM"
    assert detail_of(_call("all_to_all_single", torch.zeros(2), torch.zeros(5))) == ""
    assert detail_of(_call("gather", torch.zeros(2))) == ""


def test_ranks_may_gather_different_sizes_over_nccl_only():
    assert detail_of(_call("all_gather", torch.zeros(9), torch.zeros(4))) == "float32[4]"
    assert detail_of(_call("all_gather", torch.zeros(9), torch.zeros(4), backend="nccl")) == ""


def test_the_stack_of_another_thread_begins_with_the_programs_own_line():
    ready, go = threading.Event(), threading.Event()

    def save_all() -> None:
        ready.set()
        go.wait()

    thread = threading.Thread(target=save_all)
    thread.start()
    ready.wait()
    try:
        while "wait" not in [frame.f_code.co_name for frame in stack.frames_of(thread.ident or 0)]:
            time.sleep(0.001)
        frames = stack.frames_of(thread.ident or 0)
        assert "in save_all" in stack.described(frames)[0]
        assert stack.is_saving(frames)
    finally:
        go.set()
        thread.join()
    assert stack.frames_of(thread.ident or 0) == []


def test_a_thread_that_computes_is_told_from_one_that_sleeps():
    processor = stack.Processor()
    thread = threading.get_ident()
    assert processor.share(thread) is None
    time.sleep(0.05)
    slept = processor.share(thread)
    until_s = time.thread_time() + 0.05
    while time.thread_time() < until_s:
        pass
    computed = processor.share(thread)
    assert slept is not None
    assert computed is not None
    assert slept < 0.5
    assert computed > slept


@given(st.lists(st.floats(0, 10), min_size=4, max_size=64))
def test_one_disturbed_step_in_four_does_not_count(seconds: list[float]):
    quartile, least = summary([dict.fromkeys(TIMES, value) for value in seconds])
    assert min(seconds) <= quartile[0] / 1e6 + 1e-6
    assert least[0] == round(1e6 * min(seconds))
    assert sum(value < quartile[0] / 1e6 - 1e-6 for value in seconds) <= len(seconds) // 4
