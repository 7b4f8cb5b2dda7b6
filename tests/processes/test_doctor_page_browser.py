"""The doctor's report page in a real Chromium."""

from pathlib import Path

from doctor_page import make_folder
from page_world import Browser, browser_at, needs_browser

from ciuic.doctor.report.page import write_page

pytestmark = needs_browser
ASKED_FOR = "return performance.getEntriesByType('resource').filter((each) => each.name.startsWith('http'))"
SIDEWAYS = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


def test_the_report_is_read_without_a_network_on_wide_and_narrow_screens(tmp_path: Path) -> None:
    page = write_page(make_folder(tmp_path / "run"))
    with browser_at(tmp_path) as browser:
        browser.open(page.as_uri())
        assert browser.text("h1") == "Steps are skipped again and again: gradients of a rank are not finite."
        assert "rank 1; head; since step 4" in browser.text(".finding.critical")
        look_at_the_folds(browser)
        look_at_a_cell(browser)
        for width, scheme in ((1280, "dark"), (420, "light")):
            browser.resize(width, 900, scheme=scheme)
            assert browser.js(SIDEWAYS) == 0, "only the pictures scroll sideways"
        assert browser.complaints() == []
        assert browser.js(ASKED_FOR) == []


def look_at_the_folds(browser: Browser) -> None:
    assert "the loss of rank 1 is nan" not in browser.text(".finding.critical")
    browser.click(".finding.critical summary")
    assert "the loss of rank 1 is nan" in browser.text(".finding.critical")


def look_at_a_cell(browser: Browser) -> None:
    """The readout says what lies under the pointer."""
    assert "3 of 5 modules" in browser.text("#map-0-readout")
    script = """const map = document.getElementById("map-0"), box = map.getBoundingClientRect();
        const data = JSON.parse(document.querySelector("script.cells").textContent);
        const x = box.left + data.left + data.cell[0] * (arguments[1] + 0.5);
        const y = box.top + data.top + data.cell[1] * (arguments[0] + 0.5);
        map.dispatchEvent(new PointerEvent("pointermove", {clientX: x, clientY: y}))"""
    browser.js(script, 1, 2)
    said = browser.text("#map-0-readout")
    assert said == "blocks.0.attention.query, step 3: all ranks: did not move, gradient is None"
    browser.js(script, 4, 5)
    said = browser.text("#map-0-readout")
    assert "head, step 20: rank 0: moved 1.0e-2 of its length" in said
    assert "rank 1: moved 1.0e-1 of its length" in said
