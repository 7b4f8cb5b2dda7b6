"""What a `CiuicNodeNetwork` holds: a node as it is claimed and measured, its way to the hub, the hub itself."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ciuic.cli.measuring import ABSENT
from ciuic.errors import UsageError
from ciuic.hub.membership.selection import mismatch, wants_of
from ciuic.job import Job
from ciuic.net.client import HubClient
from ciuic.net.messages import HubInfo, NodeInfo

_CLAIMS = {"bandwidth": "bandwidth_gbit_s"}
"""Short names of claims: a bandwidth is in Gbit/s."""


def claims_of(specs: Mapping[str, float]) -> dict[str, float]:
    """Claims under the names that `ciuic node join --claim` has. Raises UsageError naming what is no number."""
    claims = {}
    for name, value in specs.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise UsageError(f"{name} = {value!r} is not a claim", next='write for example {"gpu": 8, "bandwidth": 10}')
        claims[_CLAIMS.get(name, name)] = float(value)
    return claims


@dataclass(frozen=True, kw_only=True)
class DataPlane:
    """A node's way to the hub, as it was measured; None is not measured yet."""

    up_bits_per_s: float | None
    down_bits_per_s: float | None
    rtt_s: float | None
    loss_share: float | None
    streams: int | None
    """Connections side by side that pay, to the hub."""


@dataclass(kw_only=True)
class NetworkNode:
    """The nodes of one location. Also a mapping with gpu_capacity, bandwidth (both claimed), measured and status."""

    location: str
    infos: list[NodeInfo] = field(default_factory=list)
    """What the hub knows; empty before the node has joined. Mostly one."""
    specs: dict[str, float] = field(default_factory=dict)
    """What was claimed in `add_node`."""
    token: str = field(default="", repr=False)
    """To join with, when it has not yet. Treat it like a password."""
    hub_url: str = ""

    @property
    def node_id(self) -> str:
        """The name the hub gave it; empty before it has joined."""
        return self.infos[0].node_id if self.infos else ""

    @property
    def status(self) -> str:
        """`expected` before it has joined; else as `ciuic nodes` shows it: idle, training, dead ..."""
        return self.infos[0].state if self.infos else "expected"

    @property
    def is_here(self) -> bool:
        """It has joined, and is neither silent nor gone."""
        return bool(self.infos) and self.status not in ABSENT

    @property
    def claimed(self) -> dict[str, float]:
        """What the node claims, or what was claimed for it here."""
        return dict(self.infos[0].claimed if self.infos and self.infos[0].claimed else self.specs)

    @property
    def measured(self) -> dict[str, float]:
        """What was measured; empty before."""
        return dict(self.infos[0].measured) if self.infos else {}

    @property
    def link(self) -> DataPlane:
        """Its way to the hub."""
        found = self.measured
        streams = found.get("up_streams")
        return DataPlane(
            up_bits_per_s=found.get("up_bits_per_s"),
            down_bits_per_s=found.get("down_bits_per_s"),
            rtt_s=found.get("rtt_s"),
            loss_share=found.get("loss_share"),
            streams=None if streams is None else int(streams),
        )

    @property
    def join_command(self) -> str:
        """What the machine at this location runs, with the token in CIUIC_TOKEN; empty when it is here already."""
        if self.is_here or not self.hub_url:
            return ""
        claims = "".join(f" --claim {name}={value:g}" for name, value in self.specs.items())
        return f"ciuic node join {self.hub_url} --location {self.location}{claims}"

    def __repr__(self) -> str:
        claims = "".join(f", {name}={value:g}" for name, value in self.claimed.items())
        return f"NetworkNode({self.location!r}, {self.status}{claims})"

    def __getitem__(self, key: str) -> object:
        return self._as_dict()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._as_dict())

    def keys(self) -> list[str]:
        """So that `dict(node)` works."""
        return list(self._as_dict())

    def _as_dict(self) -> dict[str, object]:
        claimed = self.claimed
        return {
            "gpu_capacity": claimed.get("gpu"),
            "bandwidth": claimed.get("bandwidth_gbit_s", claimed.get("bandwidth")),
            "measured": self.measured,
            "status": self.status,
        }


class ControlPlane:
    """The hub."""

    def __init__(self, client: HubClient) -> None:
        self._client = client

    @property
    def url(self) -> str:
        """Where it is."""
        return self._client.address.url

    def info(self) -> HubInfo:
        """Its nodes and its latest runs now."""
        return self._client.call("GET", "/v1/hub", None, HubInfo)

    def refusals(self, job: Job) -> dict[str, str]:
        """By node: why it would not be taken for this job; empty when it would."""
        wants = wants_of(job)
        nodes = self._client.call("GET", "/v1/nodes", None, list[NodeInfo])
        return {
            node.node_id: node.state if node.state in (*ABSENT, "draining") else mismatch(node, wants) for node in nodes
        }

    def count_suited(self, job: Job) -> int:
        """How many nodes suit the job, at least 1 and at most its largest number."""
        count = sum(not why for why in self.refusals(job).values())
        return max(1, count if job.nodes.max is None else min(count, job.nodes.max))
