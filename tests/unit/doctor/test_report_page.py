"""report.html: the verdict first, everything escaped, nothing from the network."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from doctor_page import MARKUP, make_folder

from ciuic.doctor.evidence import EVIDENCE
from ciuic.doctor.finding import Finding, Incident, Severity
from ciuic.doctor.report.axes import Axis, axis_of, number_text, seconds_text
from ciuic.doctor.report.curves import alike, by_rank, merged
from ciuic.doctor.report.history import History
from ciuic.doctor.report.page import render_page, try_to_write, write_page
from ciuic.errors import NotFoundError, StorageError

VOID = {"meta", "link", "circle", "rect", "path", "br"}


class Tags(HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID or tag in ("rect", "path"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


@pytest.fixture
def text(tmp_path: Path) -> str:
    return write_page(make_folder(tmp_path / "run")).read_text()


def test_the_page_is_well_formed(text: str) -> None:
    tags = Tags(text)
    assert (tags.open, tags.wrong) == ([], [])


def test_the_verdict_comes_first_with_rank_module_step_evidence_and_fix(text: str) -> None:
    body = text[text.index("<main>") :]
    order = ["Steps are skipped again and again", "the input of rank 1 is not finite", "rank 1; head; since step 4"]
    order += [
        "skipped 3, loss_scale 8192",
        "check its inputs with torch.isfinite",
        "What follows from it: 1 more finding",
    ]
    order += [
        "Worth knowing",
        "What could not be looked at",
        "Ranks over time",
        "Did each module move",
        "Loss of each rank",
    ]
    places = [body.find(words) for words in order]
    assert -1 not in places
    assert places == sorted(places)


def test_text_of_the_run_is_escaped(text: str) -> None:
    assert MARKUP not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text


def test_nothing_comes_from_the_network(text: str) -> None:
    assert re.findall(r"""(?:src|href)=["'](?!data:)""", text.replace(MARKUP, "")) == []
    assert "http" not in text
    assert "@import" not in text


def test_pictures_have_text_beside_them(text: str) -> None:
    pictures = re.findall(r"<svg[^>]*>", text)
    assert len(pictures) >= 6
    assert all('role="img"' in picture and 'aria-label="' in picture for picture in pictures)


def test_a_run_without_findings_is_called_so() -> None:
    history = History(world=2, hosts={0: "here", 1: "here"})
    assert "Nothing found." in render_page([], [], history)


def test_a_run_that_nobody_looked_at_is_not_called_healthy() -> None:
    text = render_page([], [], History())
    assert "The doctor has seen no rank." in text
    assert "seal good" not in text


def test_notes_alone_are_no_alarm() -> None:
    note = Incident(cause=Finding(code="CIUIC-C1", cause="x took no part", step=1, severity=Severity.NOTE))
    text = render_page([note], [], History(world=1, hosts={0: "here"}))
    assert "no alarm" in text
    assert "What is wrong" not in text


def test_a_folder_that_is_not_the_doctors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        write_page(tmp_path)


def test_a_page_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    with pytest.raises(StorageError, match="nowhere"):
        write_page(folder, tmp_path / "nowhere" / "page.html")


def test_at_the_end_of_a_run_a_page_that_fails_is_no_error(tmp_path: Path) -> None:
    assert try_to_write(tmp_path) is None


def test_findings_without_evidence_still_make_a_page(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    (folder / EVIDENCE).unlink()
    assert "Steps are skipped" in write_page(folder).read_text()


def test_ranks_with_the_same_curve_are_one_line() -> None:
    curves = {0: [(1.0, 0.1), (2.0, 0.2)], 1: [(1.0, 0.1), (2.0, 0.2)], 2: [(1.0, 0.1), (2.0, 0.4)]}
    assert [line.name for line in alike(curves, "", 0)] == ["ranks 0, 1", "rank 2"]
    assert [line.name for line in alike({0: curves[0]}, "", 0)] == ["all ranks"]


def test_lines_on_each_other_are_drawn_once_under_both_names() -> None:
    lines = alike({0: [(1.0, 0.1)]}, "group 0", 0) + alike({0: [(1.0, 0.1)]}, "group 1", 1)
    assert [line.name for line in merged(lines)] == ["group 0, group 1"]


def test_ranks_of_findings_get_a_colour_before_others() -> None:
    curves = {rank: [(1.0, 1.0)] for rank in range(100)}
    lines = by_rank(curves, first=[90])
    assert [line.name for line in lines if line.colour < 8][-1] == "rank 90"
    assert len(lines) == 64


@pytest.mark.parametrize("base", [0.0, 2.0, 10.0])
def test_ticks_are_inside_and_round(base: float) -> None:
    axis = Axis(low=0.003, high=70_000.0, begin=0.0, end=100.0, base=base)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 7
    assert all(0.003 * 0.999 <= tick <= 70_000 for tick in ticks)


def test_an_axis_of_one_value_puts_it_in_the_middle() -> None:
    assert axis_of([3.0], begin=0.0, end=100.0).at(3.0) == 50.0
    assert axis_of([0.0], begin=0.0, end=100.0).at(0.0) == 50.0
    assert axis_of([], begin=0.0, end=100.0, base=2.0).at(1.0) == 50.0


def test_numbers_and_times_are_short() -> None:
    assert [number_text(value) for value in (0.0, 65536.0, 1e-7, 0.25)] == ["0", "65536", "1e-07", "0.25"]
    assert [seconds_text(value) for value in (1.5, 600, 9000)] == ["1.5 s", "10 min", "2.5 h"]
