"""What a node has measured, kept in its folder with the time: `nodes/<location>/measured.json`."""

import logging
from pathlib import Path

import msgspec

from ciuic.errors import StorageError
from ciuic.net.tls import write_private_file

STALE_S = 24 * 3600.0
"""After a day links and speeds are measured again."""
_LIMIT_BYTES = 64 * 1024
_FILE = "measured.json"
_log = logging.getLogger(__name__)


class Measurements(msgspec.Struct, frozen=True, kw_only=True):
    """Values and what they hold for; fields of later versions are ignored."""

    at: float = 0.0
    """Seconds since 1970 on this machine's clock."""
    values: dict[str, float] = {}
    hub_url: str = ""
    address: str = ""
    """This machine's own address on the way to the hub."""
    is_complete: bool = False
    """Also what takes long: several streams, speeds."""
    ticket: int = 0
    """The latest wish of an operator that was fulfilled."""

    def why_again(self, now: float, *, hub_url: str, address: str, ticket: int) -> str:
        """Why to measure now, in a few words; empty when these values still hold."""
        if not self.values:
            return "nothing is measured yet"
        if ticket and ticket != self.ticket:
            return "an operator asked for it"
        if hub_url != self.hub_url:
            return "the hub has another address"
        if address and address != self.address:
            return "this machine has another address"
        if not 0 <= now - self.at <= STALE_S:
            return "it was measured long ago"
        return "" if self.is_complete else "speeds are not measured yet"


def load_measurements(folder: Path) -> Measurements:
    """What is kept in the node's folder; empty when there is nothing that can be read."""
    try:
        with (folder / _FILE).open("rb") as file:
            kept = msgspec.json.decode(file.read(_LIMIT_BYTES), type=Measurements)
    except (OSError, msgspec.DecodeError):
        return Measurements()
    return kept


def keep_measurements(folder: Path, measured: Measurements) -> None:
    """Write them; a disk that refuses costs only the next start's time."""
    try:
        write_private_file(folder / _FILE, msgspec.json.format(msgspec.json.encode(measured)))
    except (OSError, StorageError) as error:
        _log.info("the measurements are not kept: %s", error)
