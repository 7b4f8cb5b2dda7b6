"""The live page of a real hub while two real nodes train, through `ciuic dash`, in a real Chromium."""

import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from support.cli_world import command, program_environment
from support.hub_process import HubProcess
from support.page_world import Browser, Dash, browser_at, needs_browser

from ciuic.net.messages import LeaveRequest, Ok

pytestmark = needs_browser

MARKUP = "<img src=x onerror=alert(1)>"
JOB: dict[str, object] = {
    "name": "page",
    "model": {"overrides": {"num_hidden_layers": 2}},
    "nodes": {"min": 2},
    "data": {"sequence_length": 64},
    "sync": {"interval": 4},
    "train": {"samples": 4000, "evaluate_every": 3, "evaluate_samples": 16},
    "fault": {"grace": "20 s"},
}


@contextmanager
def node(hub: HubProcess, location: str, *claims: str) -> Iterator[subprocess.Popen[bytes]]:
    """A node as a person starts it."""
    arguments = command("node", "join", hub.url, "--location", location, *(f"--claim={claim}" for claim in claims))
    environment = program_environment(
        CIUIC_TOKEN=hub.token(), CIUIC_HOME=str(hub.home.parent / f"node-{len(claims)}"), OMP_NUM_THREADS="1"
    )
    log = (hub.home.parent / f"node-{len(claims)}.log").open("wb")
    with log:
        process = subprocess.Popen(arguments, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def visit(hub: HubProcess, location: str) -> None:
    """A node that calls its place by a strange name (an agent of ours would not), and leaves again."""
    visitor = hub.join(location)
    visitor.beat()
    visitor.client.call("POST", "/v1/node/leave", LeaveRequest(agent_incarnation="agent-1"), Ok)


def state_of(dash: Dash) -> Any:
    """What the API says, past the page."""
    with urllib.request.urlopen(f"{dash.url}api/state", timeout=30) as answer:
        return json.load(answer)


def test_the_live_page_shows_a_real_run_and_outlives_its_hub(tmp_path: Path) -> None:
    with ExitStack() as stack:
        hub = stack.enter_context(HubProcess(tmp_path / "home"))
        dash = Dash(hub.home)
        stack.callback(dash.end, signal.SIGKILL)
        browser = stack.enter_context(browser_at(tmp_path))
        browser.open(dash.url)
        browser.wait_for("#verdict", "the hub runs, no node has joined yet")
        visit(hub, MARKUP)
        stack.enter_context(node(hub, "us-west", "gpu=8", "bandwidth_gbit_s=10"))
        stack.enter_context(node(hub, "eu-central", "bandwidth_gbit_s=5"))
        browser.wait_for("#verdict", "3 nodes, no run yet", within_s=60)
        run_id = hub.submit(JOB)
        browser.wait_for("#verdict", f"all well: 2 nodes train {run_id}", within_s=120)
        look_at_the_overview(browser, dash)
        look_at_the_other_views(browser, dash)
        assert browser.complaints() == []
        lose_the_hub_and_find_it_again(browser, hub)
        browser.wait_for("#verdict", f"{run_id} has finished; all nodes agree", within_s=180)
        look_at_the_end(browser, dash)
        assert browser.strangers() == []
        assert dash.end(signal.SIGINT) == 0


def look_at_the_overview(browser: Browser, dash: Dash) -> None:
    """Links with what was measured, curves that grow, numbers of the API."""
    browser.wait_for("#map", "claimed 10 Gbit/s")
    browser.wait_for("#map", "claimed 5 Gbit/s")
    browser.wait(lambda: re.search(r"↑ [\d.]+( [MG]bit/s)? ↓ [\d.]+ [MG]bit/s", browser.text("#map")), within_s=60)
    browser.wait(lambda: points_of(browser, "chart-training") >= 3, within_s=60)
    browser.wait(lambda: points_of(browser, "chart-heldout") >= 2, within_s=90)
    browser.wait(lambda: points_of(browser, "chart-throughput") >= 3, within_s=60)
    drawn = browser.js("return document.querySelectorAll('#chart-training .scatterlayer .js-line').length")
    assert drawn == 2  # a line per node is really on the screen
    browser.wait_for("#time", "us-west")
    state = state_of(dash)
    run = state["runs"][-1]
    browser.wait(lambda: number_after(browser.text("#run-facts"), "version") >= run["versions"][0])
    assert f"of {run['samples']['total']:,}" in browser.text("#run-facts")
    assert f"{run['evaluations'][0]['loss']:.3f}" in browser.text("#run-facts")
    assert "duplicated\n0" in browser.text("#run-facts")
    assert re.search(r"latest message: [\d.]+ k?B, built in [\d.]+ m?s", browser.text("#cost"))
    assert re.search(r"up to date|behind|done", browser.text("#ledger"))


def points_of(browser: Browser, chart: str) -> int:
    """How many points the longest of a chart's lines has."""
    script = """const data = document.getElementById(arguments[0]).data ?? [];
        return Math.max(0, ...data.map((trace) => trace.y.filter((value) => value != null).length))"""
    return int(browser.js(script, chart))


def number_after(text: str, word: str) -> int:
    found = re.search(rf"^{word}\n([\d,]+)", text, flags=re.MULTILINE)
    return int(found[1].replace(",", "")) if found else -1


def look_at_the_other_views(browser: Browser, dash: Dash) -> None:
    browser.click("#tab-nodes")
    browser.wait_for("#table-nodes", MARKUP)  # a location is a text, whatever is in it
    assert browser.js("return document.images.length") == 1
    for info in state_of(dash)["hub"]["nodes"]:
        assert info["node_id"] in browser.text("#table-nodes")
        assert info["facts"].get("torch", "") in browser.text("#table-nodes")
    assert browser.text("#table-members").count("training") == 2
    browser.click("#tab-rounds")
    first = state_of(dash)["runs"][-1]["rounds"][0]
    browser.wait_for("#table-rounds", f"{first['tokens']:,}")
    assert "complete" in browser.text("#table-rounds")
    browser.click("#tab-events")
    browser.wait_for("#table-events", "run.training")
    browser.one("#event-filter").send_keys("joined us-west")
    browser.wait_for("#event-count", "1 of ")
    assert "us-west joined" in browser.text("#table-events")
    browser.click("#tab-overview")


def lose_the_hub_and_find_it_again(browser: Browser, hub: HubProcess) -> None:
    version = number_after(browser.text("#run-facts"), "version")
    hub.kill()
    browser.wait_for("#banner", "connection lost, last data ")
    browser.wait_for("#banner", "does not answer")
    assert number_after(browser.text("#run-facts"), "version") >= version  # what was known stays
    hub.start()
    browser.wait(lambda: not browser.one("#banner").is_displayed())
    browser.wait_for("#pulse", "live")


def look_at_the_end(browser: Browser, dash: Dash) -> None:
    run = state_of(dash)["runs"][-1]
    facts = browser.text("#run-facts")
    assert number_after(facts, "version") == run["versions"][0]
    assert f"{run['samples']['total']:,} of {run['samples']['total']:,}" in facts
    assert "duplicated\n0" in facts
    assert "lost\n0" in facts
    losses = {point["version"]: point["loss"] for point in run["evaluations"]}
    assert f"{losses[min(losses)]:.3f} → {losses[max(losses)]:.3f}" in facts
    assert browser.text("#run-percent") == "100 %"
