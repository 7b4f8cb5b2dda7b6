"""A fragment that a shard serves, as the hub knows it: the entries' headers so far, and where the shard is."""

from dataclasses import dataclass

from ciuic.net.shard_messages import FragmentReport


@dataclass(kw_only=True)
class Elsewhere:
    """Filled from the shard's reports; everything is asked for again after a restart of the hub."""

    number: int
    shard: str
    generation: int
    version: int = 0
    """Entries whose headers the hub has."""
    digest: str = ""
    snapshot_version: int = -1
    snapshot_bytes: int = 0
    touched: float = 1.0
    """Share of the fragment that a push moves."""
    access: float | None = None
    """How many experts of it a token reaches; None: not known."""
    is_heard: bool = False
    """The shard has spoken of it since the hub started."""
    silent_until: int = 0
    """Entries up to this version were told to people before the hub's last start."""
    is_quiet: bool = False
    """The run is complete and nothing waits there."""

    def hear(self, report: FragmentReport) -> None:
        """Take what a report says besides the headers."""
        if not self.is_heard:
            self.is_heard, self.silent_until = True, report.version
        if self.version == 0 == report.version:
            self.digest = report.digest
        self.touched, self.access = report.touched, report.access
        self.snapshot_version, self.snapshot_bytes = report.snapshot_version, report.snapshot_bytes
        self.is_quiet = report.sealed and report.version == self.version
