"""The worker's output: bytes into lines, lines into ranks, and the one line that says why."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.node.lines import LAUNCHER_RANK, LINE_LIMIT_BYTES, ExceptionFinder, LineSplitter, split_rank

TRACEBACK = "Traceback (most recent call last):"


def _split(pieces: list[bytes]) -> list[str]:
    splitter = LineSplitter()
    lines = [line for piece in pieces for line in splitter.feed(piece)]
    return lines + splitter.close()


@given(
    text=st.text(alphabet=st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=200).map(
        lambda text: f"{text}\n{text}\n\nlast"
    ),
    cuts=st.lists(st.integers(min_value=0, max_value=400), max_size=8),
)
def test_lines_do_not_depend_on_how_the_bytes_arrive(text: str, cuts: list[int]) -> None:
    data = text.encode()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assert _split([data[a:b] for a, b in itertools.pairwise(edges)]) == text.split("\n")


def test_a_progress_bar_is_one_line() -> None:
    bar = b"".join(b"\r%3d%%" % percent for percent in range(101))
    assert _split([bar + b"\nnext\r\n"]) == ["100%", "next"]


def test_a_progress_bar_without_end_does_not_pile_up() -> None:
    splitter = LineSplitter()
    for step in range(20_000):
        assert splitter.feed(b"\rstep %d" % step) == []
    assert splitter.close() == ["step 19999"]


def test_a_line_without_end_comes_in_parts() -> None:
    lines = _split([b"x" * (3 * LINE_LIMIT_BYTES + 10)])
    assert all(len(line) <= LINE_LIMIT_BYTES for line in lines)
    assert sum(map(len, lines)) == 3 * LINE_LIMIT_BYTES + 10


def test_bytes_that_are_no_text_do_not_stop_anything() -> None:
    assert _split([b"\xff\xfe ok\n"]) == ["�� ok"]


def test_torchruns_prefix_names_the_rank() -> None:
    assert split_rank("[rank1]:Traceback") == (1, "Traceback")
    assert split_rank("W1130 run.py:851] hello") == (LAUNCHER_RANK, "W1130 run.py:851] hello")


def _find(*lines: tuple[int, str]) -> str:
    finder = ExceptionFinder()
    for rank, text in lines:
        finder.see(rank, "err", text)
    return finder.fault().line


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        ([], ""),
        (["starting", "cannot open the file"], "cannot open the file"),
        ([TRACEBACK, '  File "x.py", line 1', "    f()", "ValueError: bad value", "bye"], "ValueError: bad value"),
        ([TRACEBACK, "  File", "KeyError: 1", "", "During handling ...", "", TRACEBACK, "  F", "a.b.E: 2"], "a.b.E: 2"),
        ([TRACEBACK, "  File", "AssertionError"], "AssertionError"),
        (["error[CIUIC-402]: other layout", "cause: b differs"], "error[CIUIC-402]: other layout; cause: b differs"),
        (["Fatal Python error: Segmentation fault", "", "Thread 0x1"], "Fatal Python error: Segmentation fault"),
        ([TRACEBACK, "  File", "ValueError: " + "x" * 5000], "ValueError: " + "x" * 988),
    ],
)
def test_the_line_that_says_why_is_found(lines: list[str], verdict: str) -> None:
    assert _find(*((0, line) for line in lines)) == verdict


def test_the_rank_that_failed_first_counts_and_not_the_launcher() -> None:
    assert (
        _find(
            (1, TRACEBACK),
            (1, "  File"),
            (1, "RuntimeError: the cause"),
            (0, TRACEBACK),
            (0, "  File"),
            (0, "RuntimeError: Connection closed by peer"),
            (LAUNCHER_RANK, TRACEBACK),
            (LAUNCHER_RANK, "  File"),
            (LAUNCHER_RANK, "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "),
        )
        == "RuntimeError: the cause"
    )


def test_a_rank_that_lost_its_peer_is_not_the_cause_also_when_it_speaks_first() -> None:
    assert (
        _find(
            (1, TRACEBACK),
            (1, "  File"),
            (1, "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.1]:4711"),
            (0, TRACEBACK),
            (0, "  File"),
            (0, "TypeError: the cause"),
        )
        == "TypeError: the cause"
    )


def test_a_rank_killed_by_a_signal_is_found_in_the_launchers_words() -> None:
    assert (
        _find((0, "training"), (LAUNCHER_RANK, "  traceback : Signal 9 (SIGKILL) received by PID 4711"))
        == "a rank was killed by SIGKILL"
    )


def test_interleaved_tracebacks_of_two_ranks_are_kept_apart() -> None:
    assert (
        _find((0, TRACEBACK), (1, TRACEBACK), (0, "  File"), (1, "  File"), (1, "IndexError: one"), (0, "KeyError: 2"))
        == "IndexError: one"
    )


def test_the_programs_own_frame_and_the_ranks_that_fell_with_it_are_named() -> None:
    finder = ExceptionFinder()
    for rank, text in [
        (1, TRACEBACK),
        (1, '  File "/home/me/train.py", line 40, in main'),
        (1, "    loss = step(batch)"),
        (1, '  File "/home/me/.venv/lib/python3.12/site-packages/torch/nn/functional.py", line 7, in embedding'),
        (1, "IndexError: index out of range in self"),
        (0, TRACEBACK),
        (0, "RuntimeError: Connection closed by peer"),
        (2, TRACEBACK),
        (2, "RuntimeError: Broken pipe"),
    ]:
        finder.see(rank, "err", text)
    fault = finder.fault()
    assert (fault.rank, fault.line) == (1, "IndexError: index out of range in self")
    assert fault.where == "/home/me/train.py:40 in main"
    assert fault.collateral == (0, 2)
