"""The live page in a real Chromium, fed with states that a healthy hub seldom has."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.page_states import (
    NODES,
    NOW,
    closed_round,
    event,
    held_out,
    member,
    node,
    plain,
    run,
    state,
)
from support.page_world import Browser, CannedHub, browser_at, needs_browser

from ciuic.hub.api.news import State
from ciuic.net.messages import NodeInfo, NodeState, RunFinding, SampleCounts, WorkerReport

pytestmark = needs_browser

MARKUP = "<img src=x onerror=alert(1)>"
TABS = ("overview", "nodes", "rounds", "events")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser_at(tmp_path_factory.mktemp("page-rules")) as browser:
        yield browser


@pytest.fixture(scope="module")
def canned() -> Iterator[CannedHub]:
    hub = CannedHub()
    yield hub
    hub.close()


@pytest.fixture
def hub(browser: Browser, canned: CannedHub) -> Iterator[CannedHub]:
    browser.resize(1280, 900)
    yield canned
    browser.open("about:blank")
    browser.complaints()
    canned.reset()


@pytest.fixture
def modules(browser: Browser, canned: CannedHub) -> Browser:
    """A page of the same server that loads nothing by itself."""
    address = f"{canned.url}assets/icon.svg"
    if browser.driver.current_url != address:
        browser.open(address)
    return browser


def show(browser: Browser, hub: CannedHub, what: State, tab: str = "overview") -> None:
    hub.say(plain(what))
    browser.open(f"{hub.url}#{tab}")
    browser.wait_for("#pulse", "live")


JUDGE = """const {Model} = await import("/assets/model.js");
    const model = new Model();
    model.take(a[0], true, 100, 0);
    const {hub, events} = model;
    const view = {hub, events, run: model.latestRun(), now: model.now(0), sinceS: 0, rateOf: () => null};
    const found = m.findings(view);
    return {found, verdict: m.verdict(view, found)};"""


# ---- what is wrong now ---------------------------------------------------------------------------------------------


def nodes_with(name: str, **changes: Any) -> list[NodeInfo]:
    return [node(other, **(changes if other == name else {})) for other in NODES]


def dead(age_s: float | None = 14.0, **changes: Any) -> list[NodeInfo]:
    return nodes_with("ap-southeast", state="dead", last_seen_s=age_s, run_id="", **changes)


def after_a_closed_round(*, is_written: bool) -> list[Any]:
    failed = event(7, "storage.failed", "round not closed: no space left on device", age_s=9.0)
    return [failed, event(8, "round.closed", "round 13 closed by complete", age_s=3.0)] if is_written else [failed]


gone = [member("us-west"), member("eu-central"), member("ap-southeast", state="gone")]
finished = run(state="finished", ended_at=NOW - 5.0, progress=1.0, loss_consistent=True)
quiet = [closed_round(version, time=NOW - 100.0 + version) for version in range(1, 13)]
late = [closed_round(version, nodes=["us-west", "eu-central"], staleness=[0, 0]) for version in range(1, 21)]

other_base = RunFinding(
    code="CIUIC-M1",
    severity="critical",
    cause="the base of node us-west at version 12 is 9f2a, the hub's is 07be",
    fix="take it out of the run",
    nodes=["us-west"],
)

SITUATIONS: dict[str, tuple[State, str, str, str]] = {
    "healthy": (state(), "ok", "all well: 3 nodes train demo-1", ""),
    "no node yet": (state(nodes=[], runs=[], events=[]), "ok", "no node has joined yet", ""),
    "no run yet": (state(runs=[], events=[]), "ok", "3 nodes, no run yet; submit one with ciuic run job.toml", ""),
    "finished": (state(runs=[finished]), "ok", "demo-1 has finished; all nodes agree", ""),
    "starting": (state(runs=[run(nodes=[], rounds=[])]), "ok", "the workers of demo-1 are starting", ""),
    "waiting": (
        state(runs=[run(state="waiting", reason="2 more nodes of 3 needed", nodes=[])]),
        "warn",
        "demo-1 waits: 2 more nodes of 3 needed",
        "ciuic node join",
    ),
    "failed": (
        state(runs=[run(state="failed", reason="us-west: CUDA out of memory")]),
        "bad",
        "demo-1 failed: us-west: CUDA out of memory",
        "ciuic logs demo-1, then ciuic resume demo-1",
    ),
    "the doctor has found another base": (
        state(runs=[run(findings=[other_base])]),
        "bad",
        "CIUIC-M1: the base of node us-west at version 12 is 9f2a, the hub's is 07be",
        "take it out of the run",
    ),
    "a node is dead": (
        state(nodes=dead(), runs=[run(nodes=gone)]),
        "bad",
        "ap-southeast is dead: not heard for 14 s; the others train on without it",
        "ciuic node join https://hub.example:8443 --location ap-southeast",
    ),
    "a node that is in no run is dead": (state(nodes=dead(), runs=[finished]), "warn", "ap-southeast is dead", "join"),
    "a node has been dead since before the hub started": (
        state(nodes=dead(None), runs=[finished]),
        "ok",
        "all well",
        "",
    ),
    "a node is silent": (
        state(nodes=nodes_with("eu-central", state="suspect", last_seen_s=4.0)),
        "warn",
        "eu-central is silent for 4",
        "its link",
    ),
    "a worker failed": (
        state(
            nodes=nodes_with("us-west", worker=WorkerReport(run_id="demo-1", state="failed", detail="KeyError: 'x'"))
        ),
        "bad",
        "the worker on us-west failed: KeyError: 'x'",
        "ciuic logs demo-1 --node us-west",
    ),
    "a push was rejected": (
        state(events=[event(9, "push.rejected", "a push of us-west was rejected (stale)", age_s=12.0)]),
        "warn",
        "1 push was rejected in the last minute: a push of us-west was rejected (stale)",
        "interval",
    ),
    "a push was rejected long ago": (state(events=[event(9, "push.rejected", "x", age_s=600.0)]), "ok", "all well", ""),
    "the hub cannot write": (
        state(events=after_a_closed_round(is_written=False)),
        "bad",
        "the hub cannot write: round not closed: no space left on device",
        "free space",
    ),
    "the hub can write again": (state(events=after_a_closed_round(is_written=True)), "ok", "all well", ""),
    "the disk is nearly full": (state(disk_free_bytes=400_000_000), "warn", "the hub's disk has 400.0 MB left", "free"),
    "the disk is full": (state(disk_free_bytes=20_000_000), "bad", "the hub's disk has 20.0 MB left", "free"),
    "the loss is not a number": (
        state(runs=[run(evaluations=[held_out(0, 5.5), held_out(8, float("nan"))])]),
        "bad",
        "the held-out loss is not a number any more",
        "[optim] lr",
    ),
    "the nodes do not agree": (
        state(runs=[msgspec.structs.replace(finished, loss_consistent=False)]),
        "bad",
        "the nodes do not agree on the final loss or base",
        "report this",
    ),
    "a sample counted twice": (
        state(runs=[run(samples=SampleCounts(total=9600, leased=3000, committed=2880, duplicated=1))]),
        "bad",
        "1 sample counted twice, 0 lost",
        "report this",
    ),
    "rounds have stopped": (
        state(runs=[run(rounds=quiet)]),
        "warn",
        "no round has closed for 1 min 28 s; usually it takes 2.0 s",
        "ciuic logs demo-1 -f",
    ),
    "other data on one node": (
        state(events=[event(9, "data.differs", "us-west reads other training data than the first node")]),
        "warn",
        "us-west reads other training data",
        "same files",
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_verdict_says_what_is_wrong_and_what_to_do(modules: Browser, name: str) -> None:
    what, level, title, following = SITUATIONS[name]
    verdict = modules.call("findings.js", JUDGE, plain(what))["verdict"]
    assert title in verdict["title"].replace("`", "")
    assert following in verdict["next"].replace("`", "")
    assert verdict["level"] == level


HINTS: dict[str, tuple[State, str]] = {
    "late in rounds": (state(runs=[run(rounds=late)]), "ap-southeast is not in 100 % of the latest 20 rounds"),
    "waits for communication": (
        state(runs=[run(nodes=[member("us-west", communication_s=12.0, compute_s=16.0), member("eu-central")])]),
        "us-west spends 40 % of its time on communication",
    ),
    "slow links": (state(), "measured links are far below their claims: us-west 47.2 Mbit/s of 10 Gbit/s"),
    "restarted": (
        state(nodes=nodes_with("us-west", worker=WorkerReport(run_id="demo-1", state="running", restarts=2))),
        "the worker on us-west was restarted 2 times",
    ),
    "draining": (state(nodes=nodes_with("us-west", state="draining")), "us-west is draining: it takes no new work"),
    "a clock is off": (
        state(nodes=nodes_with("us-west", measured={"clock_offset_s": -7.0})),
        "the clock of us-west is off by 7.0 s",
    ),
}


@pytest.mark.parametrize("name", HINTS)
def test_a_finding_that_is_no_alarm_leaves_the_verdict_well(modules: Browser, name: str) -> None:
    what, title = HINTS[name]
    judged = modules.call("findings.js", JUDGE, plain(what))
    assert any(title in finding["title"] and finding["next"] for finding in judged["found"])
    assert judged["verdict"]["title"].startswith("all well")


def test_several_problems_are_counted_and_the_worst_is_first(browser: Browser, hub: CannedHub) -> None:
    rejected = [event(9, "push.rejected", "a push of us-west was rejected (stale)")]
    show(browser, hub, state(nodes=dead(), runs=[run(nodes=gone)], events=rejected))
    browser.wait_for("#verdict .title", "ap-southeast is dead")
    assert browser.text("#verdict .title").endswith("(and 1 more below)")
    assert browser.text("#verdict code") == "ciuic node join https://hub.example:8443 --location ap-southeast"
    assert browser.one("#verdict").get_attribute("data-level") == "bad"
    levels = [item.get_attribute("data-level") for item in browser.all("#findings li")]
    assert levels == ["bad", "warn", "info"]
    assert browser.complaints() == []


# ---- links ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("presence", "line", "sign"),
    [("training", "solid", "●"), ("suspect", "dashed", "?"), ("dead", "dotted", "✕"), ("draining", "long", "◑")],
)
def test_a_link_shows_its_state_by_line_and_sign(
    browser: Browser, hub: CannedHub, presence: NodeState, line: str, sign: str
) -> None:
    show(browser, hub, state(nodes=nodes_with("us-west", state=presence)))
    browser.wait_for("#map", "us-west")
    links = browser.all("#map .link")
    assert [link.get_attribute("data-line") for link in links] == [line, "solid", "solid"]
    assert f"{sign} {presence}" in browser.text("#map")


def test_a_link_has_what_was_measured_beside_what_is_claimed(browser: Browser, hub: CannedHub) -> None:
    show(browser, hub, state(nodes=[node("us-west"), node("eu-central", measured={}, claimed={})]))
    browser.wait_for("#map", "us-west")
    words = browser.text("#map")
    for part in (
        "↑ 47.2 ↓ 49.3 Mbit/s",
        "round trip 144 ms",
        "claimed 10 Gbit/s",
        "not measured yet",
        "nothing claimed",
    ):
        assert part in words


def test_many_nodes_have_room_and_those_that_left_give_it(browser: Browser, hub: CannedHub) -> None:
    many = [node(f"node-{number}", state="left" if number % 2 else "training") for number in range(24)]
    show(browser, hub, state(nodes=many))
    browser.wait_for("#map", "node-22")
    assert "node-23" not in browser.text("#map")
    places = [card.rect for card in browser.all("#map .node rect")]
    assert not any(overlap(a, b) for i, a in enumerate(places) for b in places[i + 1 :])
    browser.click("#tab-nodes")
    browser.wait_for("#table-nodes", "node-23")


def overlap(a: dict[str, float], b: dict[str, float]) -> bool:
    return all(a[x] < b[x] + b[size] and b[x] < a[x] + a[size] for x, size in (("x", "width"), ("y", "height")))


# ---- what comes from other machines stays text ---------------------------------------------------------------------


def test_markup_in_names_and_texts_is_shown_and_not_obeyed(browser: Browser, hub: CannedHub) -> None:
    worker = WorkerReport(run_id=MARKUP, state="failed", detail=MARKUP)
    strange = node(MARKUP, location=MARKUP, run_id=MARKUP, worker=worker, facts={"host": MARKUP, "torch": MARKUP})
    closed = closed_round(13, nodes=[MARKUP], staleness=[1], why=MARKUP)
    evaluations = [held_out(0, 5.0, node_id=MARKUP), held_out(4, 3.0, node_id=MARKUP)]
    one = run(MARKUP, name=MARKUP, reason=MARKUP, nodes=[member(MARKUP)], rounds=[closed], evaluations=evaluations)
    events = [event(1, MARKUP, MARKUP, run_id=MARKUP, node_id=MARKUP)]
    what = state(nodes=[strange], runs=[one], briefs=[run("old-1", state="finished")], events=events, url=MARKUP)
    for tab, place in zip(TABS, ("#map", "#table-nodes", "#table-rounds", "#table-events"), strict=True):
        show(browser, hub, what, tab)
        browser.wait_for(place, "<img src")
        assert browser.js("return document.images.length") == 1  # our own icon
        assert browser.js("return document.querySelectorAll('[onerror]').length") == 0
    assert MARKUP in browser.text("#verdict")
    show(browser, hub, what)
    browser.wait(lambda: browser.all("#chart-heldout .scatterlayer .point"))
    assert browser.js("return document.images.length") == 1
    assert browser.complaints() == []


# ---- connection ----------------------------------------------------------------------------------------------------


def test_a_lost_connection_is_said_with_the_age_of_the_data(browser: Browser, hub: CannedHub) -> None:
    show(browser, hub, state())
    assert not browser.one("#banner").is_displayed()
    hub.go_away()
    browser.wait_for("#banner", "connection lost, last data 2 s old; what you see below is from then. Trying again")
    browser.wait_for("#banner", "(the hub does not answer: connection refused)")
    assert browser.text("#pulse") == "connection lost"
    assert "demo" in browser.text("#run")
    hub.first = plain(state(runs=[run(versions=[13])]))
    hub.come_back()
    browser.wait(lambda: not browser.one("#banner").is_displayed())
    browser.wait_for("#run-facts", "version\n13")
    assert browser.text("#pulse").startswith("live")


def test_a_stream_that_falls_silent_counts_as_lost(browser: Browser, hub: CannedHub) -> None:
    hub.answers["/v1/hub"] = {}
    show(browser, hub, state())
    hub.first = {}
    browser.wait_for("#banner", "(the hub is silent)", within_s=25.0)


def test_a_proxy_that_has_ended_is_named(browser: Browser) -> None:
    proxy = CannedHub()
    show(browser, proxy, state())
    proxy.close()
    browser.wait_for("#banner", "the proxy on this machine does not answer; start it again with: ciuic dash")
    browser.open("about:blank")
    browser.complaints()


# ---- runs ----------------------------------------------------------------------------------------------------------


def test_the_open_run_is_shown_and_another_one_can_be_chosen(browser: Browser, hub: CannedHub) -> None:
    old = run("old-1", name="old", state="finished", progress=1.0, rounds=[closed_round(77)], versions=[77])
    ended = run("later-1", name="later", state="stopped")
    hub.answers["/v1/runs/old-1"] = plain(old)
    show(browser, hub, state(briefs=[old], runs=[run(), ended]))
    browser.wait_for("#run-title", "demo")
    browser.js(
        "const s = document.getElementById('run-select'); s.value = 'old-1'; s.dispatchEvent(new Event('change'))"
    )
    browser.wait_for("#run-title", "old")
    browser.click("#tab-rounds")
    browser.wait_for("#table-rounds", "77")  # fetched: the stream does not bring it
    hub.say(plain(state(runs=[run(versions=[14])], events=[])))
    time.sleep(0.5)
    assert browser.text("#run-title") == "old"


def test_only_one_run_needs_no_choice(browser: Browser, hub: CannedHub) -> None:
    show(browser, hub, state())
    assert not browser.one("#run-choice").is_displayed()


def test_news_are_added_to_what_is_known(browser: Browser, hub: CannedHub) -> None:
    show(browser, hub, state(), "rounds")
    browser.wait_for("#table-rounds", "12")
    news = run(versions=[13], rounds=[closed_round(13, time=NOW + 1, tokens=777)], evaluations=[], job={})
    hub.say(plain(state(runs=[news], events=[event(2, "round.closed", "round 13 closed")])))
    browser.wait_for("#table-rounds", "777")
    versions = browser.js("return [...document.querySelectorAll('#table-rounds tbody th')].map((x) => x.innerText)")
    assert versions == [str(version) for version in range(13, 0, -1)]
    browser.click("#tab-events")
    assert "3 nodes start" in browser.text("#table-events")
    assert browser.text("#run-facts").count("5.518 → 2.612") == 1


# ---- looks and hands -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_window(browser: Browser, hub: CannedHub, width: int, scheme: str) -> None:
    browser.resize(width, 900, scheme=scheme)
    long = "a-node-with-a-name-of-the-greatest-length-allowed"
    what = state(
        nodes=[*nodes_with("us-west"), node(long, location=long)],
        briefs=[run("old-1", state="finished")],
        events=[event(1, "node.joined", f"{long} joined", node_id=long), event(2, "node.joined", "us-west joined")],
    )
    for tab in TABS:
        show(browser, hub, what, tab)
        browser.wait_for(f"#{tab}", "us-west")
        assert browser.js("return document.documentElement.scrollWidth") <= width, tab


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(browser: Browser, hub: CannedHub, scheme: str) -> None:
    browser.resize(1280, 900, scheme=scheme)
    show(browser, hub, state(nodes=dead(), runs=[run(nodes=gone)]))
    colours = browser.js(
        """const style = getComputedStyle(document.documentElement);
        const probe = document.body.appendChild(document.createElement("i"));
        const rgb = (name) => { probe.style.color = style.getPropertyValue("--" + name);
            return getComputedStyle(probe).color.match(/[0-9.]+/g).slice(0, 3).map(Number); };
        return Object.fromEntries(arguments[0].map((name) => [name, rgb(name)]));""",
        [*PAIRS_TEXT, *PAIRS_GROUND, *PAIRS_BARS, "on-bar"],
    )
    for text in PAIRS_TEXT:
        for ground in PAIRS_GROUND:
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for bar in PAIRS_BARS:
        assert contrast(colours["on-bar"], colours[bar]) >= 3.0, bar


PAIRS_TEXT = ("ink", "muted", "ok", "warn", "bad", "accent")
PAIRS_GROUND = ("bg", "panel", "raised")
PAIRS_BARS = ("part-compute", "part-communication", "part-data", "part-other")


def contrast(one: list[float], other: list[float]) -> float:
    """Of two sRGB colours, 1 to 21 (WCAG 2)."""

    def luminance(colour: list[float]) -> float:
        linear = [(c / 255 / 12.92) if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_keyboard_reaches_every_view(browser: Browser, hub: CannedHub) -> None:
    show(browser, hub, state())
    press = """document.activeElement.dispatchEvent(
        new KeyboardEvent("keydown", {key: arguments[0], bubbles: true, cancelable: true}))"""
    browser.js("document.getElementById('tab-overview').focus()")
    for key, tab in [("ArrowRight", "nodes"), ("ArrowRight", "rounds"), ("End", "events"), ("ArrowRight", "overview")]:
        browser.js(press, key)
        assert browser.js("return document.activeElement.id") == f"tab-{tab}"
        assert browser.js("return location.hash") == f"#{tab}"
        shown = browser.js(
            "return [...document.querySelectorAll('[role=tabpanel]')].filter((x) => !x.hidden).map((x) => x.id)"
        )
        assert shown == [tab]


def test_events_are_filtered_by_words(browser: Browser, hub: CannedHub) -> None:
    events = [
        event(1, "node.dead", "ap-southeast is dead", node_id="ap-southeast"),
        event(2, "run.evaluated", "loss 2"),
    ]
    show(browser, hub, state(events=events), "events")
    browser.wait_for("#table-events", "loss 2")
    browser.one("#event-filter").send_keys("DEAD ap-")
    browser.wait_for("#event-count", "1 of 2")
    assert "loss 2" not in browser.text("#table-events")
    browser.one("#event-filter").send_keys(" nothing")
    browser.wait_for("#table-events", "no event has these words")


def test_a_selection_survives_new_data(browser: Browser, hub: CannedHub) -> None:
    show(browser, hub, state(), "nodes")
    browser.wait_for("#table-nodes", "us-west")
    browser.js("getSelection().selectAllChildren(document.querySelector('#table-nodes tbody th'))")
    for tokens in (200_000, 300_000):
        hub.say(plain(state(runs=[run(nodes=[member("us-west", tokens=tokens)])])))
        time.sleep(0.3)
    assert browser.js("return getSelection().toString().trim()") == "us-west"


def test_without_the_chart_library_the_tables_still_tell(browser: Browser) -> None:
    hub = CannedHub(with_charts=False)
    show(browser, hub, state())
    browser.wait_for("#chart-heldout", "the chart library could not be loaded; the tables have the numbers")
    assert "2.612 at version 8" in browser.text("#overview")
    browser.wait_for("#map", "us-west")
    browser.open("about:blank")
    hub.close()
    browser.complaints()


def test_curves_are_kept_short_on_a_long_run(modules: Browser) -> None:
    counted = modules.call(
        "model.js",
        """const model = new m.Model();
        for (let i = 0; i < 5000; i += 1) {
          const run = a[0].runs[0];
          run.nodes.forEach((node) => { node.step = i; node.tokens = 1000 * i; });
          model.take({...a[0], time: a[0].time + i}, i === 0, 100, i * 1000);
        }
        const own = model.curvesOf("demo-1").nodes.get("us-west");
        return [own.loss.times.length, own.rate.last(), own.rate.times.at(-1) - a[0].time];""",
        plain(state()),
    )
    points, rate, last = counted
    assert points <= 1201
    assert rate == pytest.approx(1000.0)
    assert last == 4999


def test_the_tokens_per_second_of_a_node_that_stops_fall_to_nothing(modules: Browser) -> None:
    rates = modules.call(
        "model.js",
        """const curves = new m.Curves();
        return a[0].map(([time, tokens, state]) => {
          curves.add({nodes: [{node_id: "us-west", state, loss: 2, step: time, tokens}]}, time);
          return curves.rateOf("us-west");
        });""",
        [[0, 0, "training"], [1, 100, "training"], [4, 400, "training"], [20, 400, "training"], [21, 400, "gone"]],
    )
    assert rates[:3] == [None, None, 100]
    assert rates[3] < 20
    assert rates[4] is None


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        ("bytes", 1536, "1.5 kB"),
        ("bytes", 999, "999 B"),
        ("bytes", 999_960, "1.0 MB"),
        ("rate", 47.24e6, "47.2 Mbit/s"),
        ("rate", 5e9, "5 Gbit/s"),
        ("duration", 0.144, "144 ms"),
        ("duration", 0.0021, "2.1 ms"),
        ("duration", 12.3, "12 s"),
        ("duration", 75, "1 min 15 s"),
        ("duration", 119.7, "2 min 0 s"),
        ("duration", 7260, "2 h 1 min"),
        ("count", 732_272, "732.3k"),
        ("percent", 0.317, "32 %"),
        ("loss", None, "–"),
    ],
)
def test_numbers_are_written_as_the_command_line_writes_them(
    modules: Browser, function: str, value: float | None, text: str
) -> None:
    assert modules.call("format.js", "return m[a[0]](a[1])", function, value) == text
