"""How a hub is set up."""

from dataclasses import dataclass, field
from pathlib import Path

from ciuic.hub.access.limits import LimitSettings


@dataclass(frozen=True, kw_only=True)
class HubConfig:
    """Everything `serve` needs; all of it can be left at its default but the folder."""

    home: Path
    """CIUIC_HOME: the hub keeps `hub/` in it and writes `operator/` for the local operator."""
    host: str = "0.0.0.0"  # noqa: S104 - nodes come from other machines; everything but joining needs a certificate
    """Address to listen on."""
    port: int = 8443
    """0: any free port; the one chosen is printed and written to hub/address."""
    names: tuple[str, ...] = ()
    """More host names and IP addresses by which nodes reach this hub; they go into its certificate."""
    public_url: str = ""
    """URL in join tokens. Empty: https://<first name, else host name>:<port>."""
    limits: LimitSettings = field(default_factory=LimitSettings)
    """How much one caller may ask."""
    grace_s: float = 10.0
    """Silence after which a node outside any run is dead (inside a run, the job's [fault] grace holds)."""
    keep_events_s: float = 90 * 86400.0
    """Events that are older are forgotten; never those of a run that is not over."""
    keep_logs_s: float = 30 * 86400.0
    """The same for log lines."""
    keep_ledgers_s: float = 30 * 86400.0
    """So long after its end, only the last snapshot of a finished run stays."""
    events_kept: int = 20_000
    log_lines_kept: int = 50_000
    """Per run."""

    @property
    def folder(self) -> Path:
        """Where the hub keeps its own files."""
        return self.home / "hub"
