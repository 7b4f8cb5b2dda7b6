"""What a person sees while the demo runs: a live table in a terminal, plain lines elsewhere."""

import time
from dataclasses import dataclass
from typing import Protocol, Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ciuic.lab.links import Link
from ciuic.net.messages import NodeInRun, RunInfo
from ciuic.units import format_bytes, format_duration, format_rate

LINE_EVERY_S = 5.0
STATE_STYLES = {
    "training": "green",
    "gone": "bold red",
    "killed": "bold red",
    "warming": "yellow",
    "starting": "yellow",
}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One look at the run."""

    run: RunInfo
    links: dict[str, Link]
    killed: frozenset[str]
    """Nodes that the demo has killed and that are not back yet."""
    wire_bytes: int
    """Pushes and entries so far, counted by the relays."""
    elapsed_s: float


class Screen(Protocol):
    """Where the demo speaks."""

    def say(self, text: str) -> None:
        """One line that stays."""
        ...

    def show(self, scene: Scene) -> None:
        """The present state."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def open_screen(console: Console | None = None) -> Screen:
    """For this stdout."""
    console = console or Console(highlight=False)
    return LiveScreen(console) if console.is_terminal else PlainScreen(console)


class PlainScreen:
    """Lines, at most one about progress every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said_at = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def show(self, scene: Scene) -> None:
        if time.monotonic() - self._said_at >= LINE_EVERY_S:
            self._said_at = time.monotonic()
            self.say(progress_line(scene))


class LiveScreen:
    """A table that stays at the bottom; what is said scrolls above it."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._live.console.print(Text(text))

    def show(self, scene: Scene) -> None:
        self._live.update(picture(scene), refresh=True)


def progress_line(scene: Scene) -> str:
    """The run in one line."""
    run = scene.run
    nodes = ", ".join(f"{node.node_id} {_state(node, scene)} step {node.step}" for node in run.nodes)
    if not nodes:
        return f"{scene.elapsed_s:5.1f} s  the workers start (importing torch takes a while)"
    return (
        f"{scene.elapsed_s:5.1f} s  {run.progress:4.0%}  version {max(run.versions, default=0)}  "
        f"held-out loss {_loss_text(run)}  {nodes}"
    )


def picture(scene: Scene) -> Group:
    """The run as a table with a bar."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, side in _COLUMNS:
        table.add_column(name, justify="right" if side == ">" else "left", no_wrap=True)
    for node in scene.run.nodes:
        state = _state(node, scene)
        styled = Text(state, style=STATE_STYLES.get(state, ""))
        link = _link(scene.links.get(node.node_id))
        table.add_row(Text(node.node_id), Text(link), styled, *[Text(number) for number in _numbers(node)])
    facts = "   ".join(
        (
            f" {scene.run.progress:4.0%}",
            format_duration(scene.elapsed_s),
            f"version {max(scene.run.versions, default=0)}",
            f"held-out loss {_loss_text(scene.run)}",
            f"updates {format_bytes(scene.wire_bytes)}",
        )
    )
    if not scene.run.nodes:
        table.add_row(Text("the workers start (importing torch takes a while)", style="yellow"))
    bar = Table.grid()
    bar.add_row(ProgressBar(total=1.0, completed=scene.run.progress, width=28), Text(facts))
    return Group(Text(""), bar, table)


_COLUMNS = (
    ("node", "<"), ("emulated link", "<"), ("state", "<"), ("step", ">"), ("loss", ">"), ("version", ">"),
    ("merged", ">"), ("waits", ">"), ("longest stall", ">"),
)  # fmt: skip


def _loss_text(run: RunInfo) -> str:
    """Held-out loss of the newest version that was evaluated."""
    newest = max(run.evaluations, key=lambda point: point.version, default=None)
    return "-" if newest is None else f"{newest.loss:.3f}"


def _numbers(node: NodeInRun) -> list[str]:
    return [
        str(node.step),
        "-" if node.loss is None else f"{node.loss:.3f}",
        str(node.base_version),
        str(node.pushes_merged),
        f"{100 * node.communication_s / node.wall_s:.0f} %" if node.wall_s > 0 else "-",
        format_duration(node.longest_stall_s),
    ]


def _state(node: NodeInRun, scene: Scene) -> str:
    return "killed" if node.node_id in scene.killed else node.state


def _link(link: Link | None) -> str:
    if link is None:
        return "-"
    return f"{format_rate(link.up_bits_per_s)}, {format_duration(link.round_trip_s)}"
