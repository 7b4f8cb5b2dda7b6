"""Errors say what, why and what now; they survive pickling, the wire and printing."""

import inspect
import json
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic import errors
from ciuic.errors import (
    CiuicError,
    FrameError,
    JobFileError,
    ProtocolError,
    StorageError,
    UsageError,
    all_error_classes,
    error_from_dict,
    error_to_dict,
    render_error,
)

KINDS = all_error_classes()
TEXT = st.text(max_size=30)


def made(kind: type[CiuicError], message: str = "m", cause: str = "c", next_step: str = "n") -> CiuicError:
    if kind is JobFileError:
        return JobFileError(message, problems=("line 1: a", "line 2: b"), cause=cause, next=next_step)
    return kind(message, cause=cause, next=next_step)


def test_every_class_has_a_code_of_its_own_in_the_hundreds_of_its_branch() -> None:
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"CIUIC-[0-6]\d\d", code) for code in codes)
    for kind in KINDS[1:]:
        branch = next(k for k in kind.__mro__ if CiuicError in k.__bases__)
        assert branch.code.endswith("00")
        assert kind.code[:7] == branch.code[:7]
        assert kind.exit_code == branch.exit_code
        assert inspect.getdoc(kind)


def test_exit_codes_tell_the_branches_apart() -> None:
    branches = CiuicError.__subclasses__()
    assert sorted(kind.exit_code for kind in branches) == [2, 3, 4, 5, 6, 7]
    assert CiuicError.exit_code == 1


def test_the_list_is_complete_starts_with_the_base_and_has_each_once() -> None:
    defined = {x for _, x in inspect.getmembers(errors, inspect.isclass) if issubclass(x, CiuicError)}
    assert set(KINDS) == defined
    assert KINDS[0] is CiuicError
    assert len(KINDS) == len(set(KINDS))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_survives_the_wire_and_pickling(kind: type[CiuicError]) -> None:
    error = made(kind)
    wire = error_from_dict(json.loads(json.dumps(error_to_dict(error))))
    pickled = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes: results of worker processes
    for again in (wire, pickled):
        assert type(again) is kind
        assert error_to_dict(again) == error_to_dict(error)
        assert str(again) == str(error)


@given(message=TEXT, cause=TEXT, next_step=TEXT)
def test_the_three_lines_are_printed_and_empty_ones_left_out(message: str, cause: str, next_step: str) -> None:
    error = FrameError(message, cause=cause, next=next_step)
    expected = [f"error[CIUIC-401]: {message}"]
    expected += [f"cause: {cause}"] if cause else []
    expected += [f"next: {next_step}"] if next_step else []
    assert render_error(error) == "\n".join(expected)
    assert str(error).startswith(message)


def test_an_error_of_a_few_words_is_one_line() -> None:
    assert render_error(StorageError("cannot write x")) == "error[CIUIC-500]: cannot write x"
    assert str(StorageError("cannot write x")) == "cannot write x"
    assert str(StorageError("a", cause="b", next="c")) == "a; cause: b; next: c"


def test_a_job_file_error_prints_all_its_problems() -> None:
    lines = render_error(made(JobFileError)).splitlines()
    assert lines == ["error[CIUIC-101]: m", "  line 1: a", "  line 2: b", "cause: c", "next: n"]
    assert error_to_dict(made(JobFileError))["problems"] == ["line 1: a", "line 2: b"]
    assert "problems" not in error_to_dict(made(UsageError))


def test_an_error_of_a_later_version_keeps_its_code_in_the_text() -> None:
    error = error_from_dict({"code": "CIUIC-999", "message": "the sun went out", "next": "wait"})
    assert type(error) is CiuicError
    assert error.message == "the sun went out (CIUIC-999)"
    assert error.next == "wait"


@given(
    body=st.dictionaries(
        st.sampled_from(["code", "message", "cause", "next", "problems", "x"]),
        st.none() | st.integers() | TEXT | st.lists(TEXT) | st.sampled_from([k.code for k in KINDS]),
    )
)
def test_any_body_from_outside_becomes_an_error_that_can_be_printed(body: dict[str, object]) -> None:
    error = error_from_dict(body)
    assert isinstance(error, CiuicError)
    assert render_error(error).startswith("error[CIUIC-")
    json.dumps(error_to_dict(error))


def test_catching_a_branch_catches_its_leaves() -> None:
    with pytest.raises(ProtocolError):
        raise FrameError("cut")
