"""How much of a long link a push uses, beside one plain TCP stream on the same link in the same run. Needs root.

A node 150 ms from the hub pushes 32 MB again and again through the real hub: announced, sent over the node's warm
connections, checked, stored and acknowledged. Link use is the push's bits over the link's rate and the time from the
call to its answer. Beside it: one CUBIC stream and one BBR stream, plain TCP without TLS, with one byte as the answer.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from ciuic.bench import Table
from ciuic.bench.links_far import PlainStream, PushingNode
from ciuic.bench.links_hub import LinkHub
from ciuic.bench.links_plot import draw
from ciuic.bench.sync_far import PORT
from ciuic.bench.work import work_folder
from ciuic.errors import UsageError
from ciuic.lab.crew import Crew
from ciuic.lab.links import Link
from ciuic.lab.namespaces import refuse, why_not_here
from ciuic.lab.profiles import Profile, Site
from ciuic.lab.switch_sites import HUB, Sites

FAR = "far"
NICE = -10
"""What else the machine does should not decide the result."""
MTU_BYTES = 1500
LIMITS = {0.0: 0.85, 0.001: 0.66}
"""By loss: what a push should reach; with loss the best of several hand-made transfers."""
COUNTED_FROM = 2
"""The third push and those after it: connections are warm then."""
PLAIN_S = 6.0
"""A plain stream that is slower than this per transfer is cut there; its rate is known."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its own options."""
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s of the node's access link, each way")
    parser.add_argument("--round-trip", type=float, default=0.15, help="seconds")
    parser.add_argument("--size", type=float, default=32.0, help="MB of a push")
    parser.add_argument("--losses", default="0,0.1", help="percent of packets that vanish, one or several")
    parser.add_argument("--pushes", type=int, default=5, help="per loss; the third and later ones count")
    parser.add_argument("--seed", type=int, default=0)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Push at every loss. Raises UsageError without root, RunFailedError when a process dies."""
    if reason := why_not_here():
        raise refuse(reason)
    losses, size_bytes = _losses(options), round(options.size * 1e6)
    if options.pushes <= COUNTED_FROM or size_bytes < 1e6 or options.rate <= 0 or options.round_trip <= 0:
        raise UsageError(f"--pushes is more than {COUNTED_FROM}, --size at least 1, --rate and --round-trip above 0")
    found: dict[str, Any] = {"mbit_per_s": options.rate, "round_trip_s": options.round_trip, "size_mb": options.size}
    found["losses"] = {}
    with work_folder(options.folder / "links.work") as folder:
        sites = Sites(_profile(options), seed=options.seed, nice=NICE, mtu_bytes=MTU_BYTES)
        with sites, Crew(folder / "logs", owner="benchmark") as crew, LinkHub(sites, crew, folder, PORT) as hub:
            far = PushingNode(sites, FAR, hub, size_bytes)
            near = PushingNode(sites, HUB, hub, size_bytes)
            for node in (far, near):
                node.begin_to_attach()
            for node in (far, near):
                node.attached()
            for loss in losses:
                sites.set_path(FAR, HUB, loss=loss)
                numbers = _plain(sites, size_bytes) | _pushes(far, near, options.pushes)
                found["losses"][f"{100 * loss:g}"] = _as_link_use(numbers, options)
                sys.stderr.write(
                    f"loss {100 * loss:g} %: {found['losses'][f'{100 * loss:g}']['push']:.3f} of the link\n"
                )
    return _headline(found, losses) | found


def _pushes(far: PushingNode, near: PushingNode, count: int) -> dict[str, Any]:
    """(bits per second of every push, connections) of the far node; the near one closes each round after it."""
    rates, streams, repeated = [], [], []
    near.push()  # the first round closes with the far node's push, all others with the near one's
    for number in range(count):
        told = far.push()
        rates.append(told["bits_per_s"])
        streams.append(told["streams"])
        repeated.append(told["repeated_share"])
        if number:
            near.push()
        far.pull()
        near.pull()
    return {"pushes": rates, "streams": streams, "repeated_share": repeated}


def _plain(sites: Sites, size_bytes: int) -> dict[str, Any]:
    found = {}
    for algorithm in ("cubic", "bbr"):
        with PlainStream(sites, FAR, algorithm) as stream:
            found[algorithm] = [stream.send(size_bytes, PLAIN_S) for _ in range(COUNTED_FROM + 1)][-1]
    return found


def _as_link_use(numbers: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    rate = options.rate * 1e6
    uses = [round(bits_per_s / rate, 4) for bits_per_s in numbers["pushes"]]
    return {
        "push": statistics.median(uses[COUNTED_FROM:]),
        "third_push": uses[COUNTED_FROM],
        "cubic": round(numbers["cubic"] / rate, 4),
        "bbr": round(numbers["bbr"] / rate, 4),
        "pushes": uses,
        "streams": numbers["streams"],
        "repeated_share": numbers["repeated_share"],
    }


def _headline(found: dict[str, Any], losses: list[float]) -> dict[str, Any]:
    headline: dict[str, Any] = {}
    for loss in losses:
        name = "no_loss" if loss == 0 else f"loss_{100 * loss:g}"
        numbers = found["losses"][f"{100 * loss:g}"]
        headline[f"link_use_{name}"] = numbers["push"]
        headline |= {f"link_use_{name}_{one}": numbers[one] for one in ("cubic", "bbr")}
    headline["limits"] = {f"{100 * loss:g}": limit for loss, limit in LIMITS.items() if loss in losses}
    return headline


def _losses(options: argparse.Namespace) -> list[float]:
    try:
        losses = [float(text) / 100 for text in options.losses.split(",")]
    except ValueError:
        losses = [-1.0]
    if any(not 0 <= loss < 1 for loss in losses):
        raise UsageError(f"--losses {options.losses} is not a list of percentages", next="for example --losses 0,0.1")
    return losses


def _profile(options: argparse.Namespace) -> Profile:
    rate = options.rate * 1e6
    link = Link(name=FAR, up_bits_per_s=rate, down_bits_per_s=rate, one_way_delay_s=options.round_trip / 2)
    return Profile(
        name="one long link", hub_location="elsewhere", sites=(Site(link=link, claimed={}),), round_trips_s={}
    )


def tables(result: dict[str, Any]) -> list[Table]:
    """One row per loss."""
    rows: list[tuple[str, ...]] = [
        (
            f"{loss} %",
            f"{numbers['push']:.3f}",
            f"{result['limits'][loss]:g}" if loss in result["limits"] else "-",
            f"{numbers['cubic']:.3f}",
            f"{numbers['bbr']:.3f}",
            " ".join(f"{use:.2f}" for use in numbers["pushes"]),
            " ".join(map(str, numbers["streams"])),
        )
        for loss, numbers in result["losses"].items()
    ]
    title = (
        f"{result['size_mb']:g} MB at {result['mbit_per_s']:g} Mbit/s, {1000 * result['round_trip_s']:g} ms round trip"
    )
    columns = ("loss", "push", "wanted", "1 x CUBIC", "1 x BBR", "every push", "connections")
    note = "share of the link's rate; push: median from the third on; plain streams: the third transfer, no TLS"
    return [Table(title=title, columns=columns, rows=rows, note=note)]


def picture(result: dict[str, Any], folder: Path) -> Path:
    """links.png."""
    return draw(result, folder / "links.png")
