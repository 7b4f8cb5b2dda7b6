import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.doctor import record
from ciuic.doctor.record import Beat, Bye, Frames, Hello, Question, Record, from_rank, to_frame, to_rank
from ciuic.errors import FrameError

FACTS = st.dictionaries(
    st.text(max_size=8),
    st.one_of(st.integers(-(2**60), 2**60), st.floats(allow_nan=False), st.binary(max_size=16)),
    max_size=6,
)
MESSAGES = st.one_of(
    st.builds(
        Record, rank=st.integers(0, 9), optimizer=st.just(0), step=st.integers(1, 9), time_s=st.just(1.0), facts=FACTS
    ),
    st.builds(Bye, rank=st.integers(0, 9), step=st.integers(0, 9), how=st.text(max_size=20), facts=FACTS),
    st.builds(
        Hello,
        token=st.text(max_size=9),
        rank=st.just(0),
        world=st.just(1),
        host=st.just("h"),
        pid=st.just(1),
        facts=FACTS,
    ),
)


@given(st.lists(MESSAGES, max_size=6), st.lists(st.integers(0, 400), max_size=8))
def test_a_stream_cut_anywhere_gives_the_same_messages(messages, cuts):
    stream = b"".join(to_frame(message) for message in messages)
    frames, found, at = Frames(), [], 0
    for cut in [*sorted(cuts), len(stream)]:
        found += frames.feed(stream[at:cut]) if cut > at else []
        at = max(at, cut)
    assert [from_rank(body) for body in found] == messages


def test_a_frame_that_claims_to_be_long_is_refused_before_it_is_read():
    with pytest.raises(FrameError, match="claims"):
        Frames().feed((record.MAX_FRAME_BYTES + 1).to_bytes(4, "big"))


def test_a_message_that_is_too_long_is_not_sent():
    with pytest.raises(FrameError, match="too long"):
        to_frame(Bye(rank=0, step=0, how="x" * (record.MAX_FRAME_BYTES + 1)))


@pytest.mark.parametrize("facts", [{"x": object()}, {"x": 1 << 70}])
def test_a_message_that_holds_what_cannot_be_sent_is_an_error(facts):
    with pytest.raises(FrameError, match="cannot be sent"):
        to_frame(record.Notice(rank=0, step=0, kind="x", facts=facts))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_frame_error(body):
    for decode in (from_rank, to_rank):
        try:
            decode(body)
        except FrameError:
            continue


def test_a_question_is_no_message_of_a_rank():
    body = to_frame(Question(number=1, kind="children", facts={}))[4:]
    assert to_rank(body).kind == "children"
    with pytest.raises(FrameError):
        from_rank(body)


def test_a_beat_keeps_its_numbers():
    beat = Beat(rank=1, step=3, time_s=2.5, phase="backward", phase_s=0.25, facts={"cpu_s": 0.1})
    assert from_rank(to_frame(beat)[4:]) == beat
