"""Links that go away and come back by themselves, as a profile says (`Site.flapping`)."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ciuic.errors import CiuicError
from ciuic.lab.lab import Lab
from ciuic.lab.profiles import Site
from ciuic.lab.switch_sites import HUB


class Flapper:
    """Works from its making until `close`; does nothing in a profile without such links."""

    def __init__(self, lab: Lab, *, on_change: Callable[[str], object]) -> None:
        self._lab, self._on_change = lab, on_change
        self._ended = threading.Event()
        restless = [site for site in lab.config.profile.sites if site.flapping is not None]
        self._threads = [threading.Thread(target=self._run, args=(site,), daemon=True) for site in restless]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """The links stay as they are."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, site: Site) -> None:
        flapping = site.flapping
        if flapping is None:
            return
        due = time.monotonic() + flapping.every_s - flapping.away_s
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            self._set(site.location, away=True)
            if self._ended.wait(flapping.away_s):
                return
            self._set(site.location, away=False)
            due += flapping.every_s

    def _set(self, place: str, *, away: bool) -> None:
        network = self._lab.network
        try:
            network.set_path(HUB, place, replace(network.paths[frozenset({HUB, place})], is_cut=away))
        except CiuicError as error:  # the lab ends just now
            self._on_change(f"the link of {place} was not changed: {error.message}")
            return
        self._on_change(f"the link of {place} {'goes away' if away else 'is back'}")
