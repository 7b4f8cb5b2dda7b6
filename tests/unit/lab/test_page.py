"""The report as a page and as a picture: one file without the network, nothing from outside unescaped."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from support.demo_report import make_report

from ciuic.lab.charts import make_charts
from ciuic.lab.page import render_page, write_page
from ciuic.lab.plots import draw_png, segments
from ciuic.lab.report import DemoReport, StoryLine, VersionPoint, with_verdict


class Reader(HTMLParser):
    """Collects what a browser would show, and what it would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.shown = ""
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["script"]:
            self.scripts.append(data)
        elif self.tags[-1:] != ["style"]:
            self.shown += data


def bad_report() -> DemoReport:
    return with_verdict(msgspec.structs.replace(make_report(), samples_lost=3, killed=None, rejoined_after_s=None))


def test_the_page_is_one_file_that_fetches_nothing(tmp_path: Path) -> None:
    write_page(make_report(), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert Reader(page).fetched == ["data:,"]
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


def test_the_verdict_comes_first_and_every_check_is_there() -> None:
    report = make_report()
    shown = Reader(render_page(report)).shown
    for check in report.checks:
        assert check.name in shown
        assert check.bar in shown
    order = [
        shown.index(text) for text in (report.verdict, "What must hold", "Charts", "Nodes: claimed", "What happened")
    ]
    assert order == sorted(order)
    assert "What is emulated here and what is real" in shown


def test_a_failed_report_says_so() -> None:
    page = render_page(bad_report())
    assert "not all checks hold" in Reader(page).shown
    assert page.count('<tr class="bad">') == 2


def test_every_chart_has_its_place_and_its_data_is_json() -> None:
    report = make_report()
    page = Reader(render_page(report))
    charts = json.loads(page.scripts[0])
    assert set(charts) == set(make_charts(report)) == {name for name in page.ids if name.startswith("chart-")}
    assert charts["chart-loss"]["data"][0]["y"][0] == report.losses[0].loss
    assert json.loads(json.dumps(make_charts(bad_report())))


def test_text_from_outside_cannot_become_markup() -> None:
    evil = "</script><script>alert(1)</script><img src=x>"
    report = make_report()
    story = [*report.story, StoryLine(time_s=1, kind=evil, node_id=evil, text=evil)]
    losses = [msgspec.structs.replace(point, node_id=evil) for point in report.losses]
    nodes = [msgspec.structs.replace(node, location=evil) for node in report.nodes]
    page = render_page(
        msgspec.structs.replace(report, verdict=evil, model=evil, story=story, losses=losses, nodes=nodes)
    )
    plain = render_page(report)
    assert Reader(page).tags.count("script") == Reader(plain).tags.count("script")
    assert "img" not in Reader(page).tags
    assert "alert(1)" in Reader(page).shown


def test_the_page_knows_both_themes() -> None:
    page = render_page(make_report())
    assert "prefers-color-scheme: dark" in page
    assert re.search(r'name="viewport"', page)


def test_the_picture_is_drawn_in_full(tmp_path: Path) -> None:
    for name, report in (("good", make_report()), ("bad", bad_report())):
        draw_png(report, tmp_path / f"{name}.png")
        picture = imread(tmp_path / f"{name}.png")
        assert picture.shape[:2] == (1160, 1760)
        assert len(np.unique(picture[::3, ::3, :3].sum(axis=2))) > 50


@given(versions=st.lists(st.none() | st.integers(0, 50), max_size=30))
def test_a_version_line_is_cut_where_the_node_was_gone(versions: list[int | None]) -> None:
    points = [VersionPoint(time_s=float(time), version=version) for time, version in enumerate(versions)]
    pieces = segments(points)
    assert [version for _, piece in pieces for version in piece] == [v for v in versions if v is not None]
    for seconds, _ in pieces:
        assert seconds == [seconds[0] + step for step in range(len(seconds))], "no piece spans a gap"
