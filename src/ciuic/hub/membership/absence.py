"""How long the hub was away, as it can tell itself: a file whose time says when it was last seen alive."""

import os
from pathlib import Path

from ciuic.hub.membership.records import Announce
from ciuic.units import format_duration

ALIVE = "alive"
EVERY_S = 2.0
"""How often the file's time is set; an absence is known about as well as that."""


class Alive:
    """Touches its file while the hub works."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ALIVE
        self._touched_s = 0.0

    def last_seen(self) -> float | None:
        """When a hub last worked in this folder (seconds since 1970); None: never, as far as is known."""
        try:
            return self._path.stat().st_mtime
        except OSError:
            return None

    def touch(self, wall_s: float) -> None:
        """The hub works. A disk that refuses is told elsewhere."""
        if abs(wall_s - self._touched_s) < EVERY_S:
            return
        self._touched_s = wall_s
        try:
            self._path.touch(mode=0o600)
            os.utime(self._path, (wall_s, wall_s))
        except OSError:
            return


def started_line(url: str, start: str, last_seen: float | None, now: float, last_kind: str) -> Announce:
    """The hub's first words. `last_kind`: of the latest event before them."""
    text = f"the hub started at {url} (start {start})"
    if last_seen is None or now < last_seen:
        return Announce(kind="hub.started", text=text)
    away_s = now - last_seen
    how = "it had been stopped" if last_kind == "hub.stopped" else "it was not stopped: killed, or without power"
    text += f" after {format_duration(away_s)} away; {how}"
    return Announce(kind="hub.started", text=text, data={"away_s": round(away_s, 1)})
