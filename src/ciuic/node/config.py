"""How a machine takes part in a network."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Everything `run_agent` needs."""

    url: str
    """Address of the hub; may differ from the token's (a relay, a second name)."""
    location: str
    home: Path
    """CIUIC_HOME; the node's files are in nodes/<location>/ below it."""
    token: str | None = field(default=None, repr=False)
    """Needed the first time only."""
    claimed: dict[str, float] = field(default_factory=dict)
    """What the operator claims: gpu, bandwidth_gbit_s, memory_gb ..."""
    allow_code: bool = False
    """Whether jobs may bring code of their own."""
    direct: tuple[str, int] | None = None
    """Address and port to listen on for other nodes; None: nothing listens."""
    direct_name: str = ""
    """Host name or address by which they dial; empty: the address listened on."""
    heartbeat_s: float = 2.0
    """Longest time between two beats; the hub may ask for a shorter one."""
    grace_s: float = 20.0
    """From SIGTERM to SIGKILL of a worker that is to stop."""
    drain_s: float = 60.0
    """The same when the agent itself is told to stop."""
    settle_s: float = 5.0
    """How long the node must have had nothing to do before it measures what takes long."""
    worker_command: list[str] | None = None
    """Another program than the built-in worker; `--run-file PATH` is added."""

    @property
    def direct_names(self) -> tuple[str, ...]:
        """What this node's certificate must be for so that others can dial it."""
        if self.direct is None:
            return ()
        return (self.direct_name or self.direct[0],)
