"""The page's files: what may not be in them, and how they are sent."""

import gzip
import re
from pathlib import Path

import pytest

from ciuic.errors import NotFoundError
from ciuic.hub.page import routes
from ciuic.hub.page.routes import CHARTS, FOLDER, SECURITY_HEADERS, PageFiles, find_charts

SCRIPTS = sorted(FOLDER.glob("*.js"))
HTML = (FOLDER / "index.html").read_text()


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) > 5


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_has_no_way_to_turn_text_into_markup_or_code(path: Path) -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|srcdoc|setHTML"
    assert re.findall(forbidden, path.read_text()) == []


@pytest.mark.parametrize("path", [*SCRIPTS, FOLDER / "index.html", FOLDER / "style.css"], ids=lambda path: path.name)
def test_a_file_names_no_other_server(path: Path) -> None:
    addresses = re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s\"']*", path.read_text())
    assert [address for address in addresses if not address.startswith("http://www.w3.org/")] == []


def test_the_page_has_no_inline_scripts_styles_or_handlers() -> None:
    assert re.findall(r"<script(?![^>]*\bsrc=)[^>]*>", HTML) == []
    assert re.findall(r"<style|\sstyle=|\son[a-z]+=|javascript:", HTML) == []


def test_every_import_and_link_is_a_file_of_the_page() -> None:
    there = set(PageFiles().names)
    linked = set(re.findall(r"/assets/([\w.-]+)", HTML))
    imported = {name for path in SCRIPTS for name in re.findall(r'from "\./([\w.-]+)"', path.read_text())}
    fetched = {name for path in SCRIPTS for name in re.findall(r'"/assets/([\w.-]+)"', path.read_text())}
    assert linked | imported | fetched <= there
    assert {path.name for path in SCRIPTS} <= linked | imported


def test_every_element_that_a_script_looks_up_is_in_the_page() -> None:
    ids = set(re.findall(r'\bid="([\w.-]+)"', HTML))
    looked_up = {name for path in SCRIPTS for name in re.findall(r'(?:byId|new Chart)\("([\w-]+)"', path.read_text())}
    assert looked_up
    assert looked_up <= ids


def test_the_files_are_small() -> None:
    assert all(len(path.read_text().splitlines()) < 300 for path in SCRIPTS)
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.suffix in routes.MEDIA_TYPES) < 100_000


def test_the_policy_allows_only_the_hub_itself() -> None:
    policy = SECURITY_HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "*" not in policy
    assert "http" not in policy


@pytest.mark.parametrize("name", ["../config.py", "routes.py", "__init__.py", "", ".", "/etc/passwd", "index.html/"])
def test_nothing_else_can_be_asked_for(name: str) -> None:
    with pytest.raises(NotFoundError, match="no file"):
        PageFiles().get(name)


def test_the_chart_library_is_the_one_of_the_installed_package() -> None:
    charts = find_charts()
    assert charts is not None
    asset = PageFiles().get(CHARTS)
    assert asset.body == charts.read_bytes()
    assert asset.answer().headers["cache-control"] == "private, max-age=86400"


def test_without_the_chart_library_the_rest_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "find_charts", lambda: None)
    files = PageFiles()
    assert files.get("index.html").body == HTML.encode()
    with pytest.raises(NotFoundError, match="not installed"):
        files.get(CHARTS)


def test_a_file_is_sent_packed_when_the_browser_can_unpack_it() -> None:
    asset = PageFiles().get("style.css")
    packed = asset.answer(encodings="gzip, deflate, br")
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == asset.body
    plain = asset.answer()
    assert "content-encoding" not in plain.headers
    assert plain.body == asset.body


def test_a_file_that_the_browser_has_is_not_sent_again() -> None:
    asset = PageFiles().get("main.js")
    assert asset.answer(etags=asset.etag).status_code == 304
    assert asset.answer(etags=f'"other", W/{asset.etag}').status_code == 304
    assert asset.answer(etags='"other"').status_code == 200


def test_every_answer_has_the_security_headers() -> None:
    asset = PageFiles().get("index.html")
    for answer in (asset.answer(), asset.answer(etags=asset.etag), asset.answer(encodings="gzip")):
        assert SECURITY_HEADERS.items() <= dict(answer.headers).items()
