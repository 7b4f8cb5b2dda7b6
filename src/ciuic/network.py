"""A network of nodes, from Python: who is in it, what was measured of it, and a run on the nodes that suit.

    network = CiuicNodeNetwork()                                       # the hub of this machine's operator profile
    network.add_node("us-west", {"gpu": 8, "bandwidth": 10})           # what is claimed; prints nothing, starts nothing
    network.measure()                                                  # what is so
    run = network.schedule_training("deepseek-v3-tiny", "corpus/*.txt")
    run.wait()

It starts neither a hub nor agents: those are programs on the machines they are for.
"""

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ciuic.cli.measuring import ABSENT, measure_nodes
from ciuic.cli.profile import operator_client
from ciuic.cli.views import ENDED
from ciuic.errors import CertificateError, ConflictError, NotFoundError, RunFailedError, UnreachableError, UsageError
from ciuic.job import Job, load_job, parse_job
from ciuic.net.client import HubClient
from ciuic.net.messages import (
    CreateTokenReply,
    CreateTokenRequest,
    HubInfo,
    NodeInfo,
    Ok,
    RunInfo,
    SubmitReply,
    SubmitRequest,
)
from ciuic.net.tokens import parse_token
from ciuic.network_handles import ControlPlane, DataPlane, NetworkNode, claims_of

POLL_S = 0.5
TOKEN_LIFETIME_S = 24 * 3600.0


class CiuicNodeNetwork:
    """The nodes of one hub. Confined to one thread."""

    def __init__(self, home: Path | None = None) -> None:
        """Use the operator profile in `home` (default: CIUIC_HOME). The hub is asked at once.

        Raises CertificateError where there is no profile, UnreachableError when the hub does not answer.
        """
        try:
            self._client = operator_client(home)
        except CertificateError as error:
            raise CertificateError(
                error.message,
                cause=error.cause,
                next="start a hub here with `ciuic hub start`, or set CIUIC_HOME to a folder with an operator profile",
            ) from error
        self.nodes: dict[str, NetworkNode] = {}
        """By location: the nodes that are in the network or expected; `refresh` brings them up to date."""
        self.control_plane = ControlPlane(self._client)
        self.refresh()

    @property
    def data_planes(self) -> dict[str, DataPlane]:
        """By location: the node's way to the hub as it was measured."""
        return {location: node.link for location, node in self.nodes.items()}

    def refresh(self) -> None:
        """Ask the hub again. Where several nodes have one location, the first that is here stands for it."""
        known: dict[str, list[NodeInfo]] = {}
        for info in self._client.call("GET", "/v1/nodes", None, list[NodeInfo]):
            known.setdefault(info.location, []).append(info)
        for location, infos in known.items():
            infos.sort(key=lambda info: info.state in ABSENT)
            self.nodes.setdefault(location, NetworkNode(location=location)).infos = infos

    def add_node(self, location: str, specs: Mapping[str, float] | None = None) -> NetworkNode:
        """Expect a node at `location`; when it has not joined yet, a token and the command to join with are made.

        `specs` is what is claimed: `gpu`, `bandwidth` (Gbit/s), or any name of `ciuic node join --claim`. It is shown
        beside what is measured and decides nothing. The machine itself runs `node.join_command`, with `node.token` in
        CIUIC_TOKEN; `wait_for` waits until it has. Raises UsageError for specs that are no numbers, RoleError.
        """
        claims = claims_of(specs or {})
        self.refresh()
        node = self.nodes.setdefault(location, NetworkNode(location=location))
        node.specs = claims
        if not node.is_here and not node.token:
            request = CreateTokenRequest(lifetime_s=TOKEN_LIFETIME_S, uses=1, role="node")
            node.token = self._client.call("POST", "/v1/tokens", request, CreateTokenReply).token
            node.hub_url = parse_token(node.token).url
        return node

    def wait_for(self, location: str, timeout_s: float = 300.0) -> NetworkNode:
        """Wait until the node at `location` is here. Raises UnreachableError after `timeout_s`."""
        until = time.monotonic() + timeout_s
        while True:
            self.refresh()
            node = self.nodes.get(location)
            if node is not None and node.is_here:
                return node
            if time.monotonic() >= until:
                raise UnreachableError(
                    f"no node from {location} is here after {timeout_s:.0f} s",
                    next="run the node's join_command on that machine; `ciuic node check` there says what is wrong",
                )
            time.sleep(POLL_S)

    def measure(self, *locations: str, timeout_s: float = 180.0) -> dict[str, dict[str, float]]:
        """Let the nodes (all that are here, or those of these locations) measure themselves; values by location.

        Names and units: `ciuic.net.measured.QUANTITIES`. A node that trains measures only its round trip and what is
        free. Raises ConflictError when nobody is there, NotFoundError for an unknown location.
        """
        self.refresh()
        names = [self._known(location).node_id for location in locations]
        measure_nodes(self._client, names, limit_s=timeout_s)
        self.refresh()
        wanted = locations or [location for location, node in self.nodes.items() if node.is_here]
        return {location: dict(self.nodes[location].measured) for location in wanted}

    def schedule_training(
        self,
        model: str | Path | Mapping[str, Any] | Job | object,
        dataset: str | Path | None = None,
        *,
        requirements: Mapping[str, float] | None = None,
        min_nodes: int | None = None,
        submit_token: str = "",
    ) -> "ScheduledRun":
        """Submit a run on the nodes of this network that suit; its handle.

        `model`: the name of a preset, a folder of a pretrained model, a job file (`*.toml`), a job, or an object with
        attributes `preset` or `from_pretrained` and, as it likes, `requirements`. `dataset`: files or a pattern, found
        on each node. `requirements`: as [nodes] require of a job file, compared with what was measured. The run waits
        until `min_nodes` (default: those that suit and are here, at least 1) are free. Raises JobFileError, UsageError.
        """
        wanted = requirements if requirements is not None else getattr(model, "requirements", None)
        raw = job_of(model, dataset)
        self.refresh()
        nodes = dict(raw.get("nodes", {}))
        if wanted:
            nodes["require"] = dict(wanted)
        if self.nodes and not nodes.get("locations"):
            nodes["locations"] = list(self.nodes)
        if min_nodes is not None:
            nodes["min"] = min_nodes
        elif "min" not in nodes:
            nodes["min"] = self.control_plane.count_suited(parse_job({**raw, "nodes": nodes}))
        job = parse_job({**raw, "nodes": nodes})
        request = SubmitRequest(job=job.to_dict(), submit_token=submit_token or secrets.token_hex(16))
        reply = self._client.call("POST", "/v1/runs", request, SubmitReply)
        return ScheduledRun(self._client, reply.run_id)

    def close(self) -> None:
        """Close the connection to the hub; the next call opens a new one."""
        self._client.close()

    def _known(self, location: str) -> NetworkNode:
        node = self.nodes.get(location)
        if node is None or not node.infos:
            raise NotFoundError(
                f"no node from {location} has joined", next=f"one of: {', '.join(self.nodes) or 'none'}"
            )
        return node

    def __repr__(self) -> str:
        states = ", ".join(f"{location} {node.status}" for location, node in self.nodes.items())
        return f"CiuicNodeNetwork({self._client.address.url}: {states or 'no nodes'})"


def job_of(model: object, dataset: str | Path | None) -> dict[str, Any]:
    """The job as a dict, with the data set filled in. Raises UsageError, JobFileError."""
    if isinstance(model, Job):
        raw = model.model_dump(mode="json", exclude_unset=True)
    elif isinstance(model, Mapping):
        raw = {str(key): value for key, value in model.items()}
    elif isinstance(model, str | Path) and str(model).endswith(".toml"):
        raw = load_job(Path(model)).model_dump(mode="json", exclude_unset=True)
    elif isinstance(model, str | Path):
        is_path = isinstance(model, Path) or "/" in model
        raw = {"model": {"from_pretrained" if is_path else "preset": str(model)}}
    else:
        found = {name: getattr(model, name, None) for name in ("preset", "from_pretrained")}
        given = {name: str(value) for name, value in found.items() if isinstance(value, str | Path)}
        if len(given) != 1:
            raise UsageError(
                f"a {type(model).__name__} cannot be sent to other machines",
                cause="a run needs a recipe that each node can follow: a preset, a folder or a program",
                next="give a preset's name, a job, or write your program with ciuic.join() and give [model] command",
            )
        raw = {"model": given}
    if dataset is not None:
        if raw.get("data", {}).get("path") or raw.get("data", {}).get("hf"):
            raise UsageError("the data set was given twice", cause="the job has one in [data]", next="give one of them")
        raw = {**raw, "data": {**raw.get("data", {}), "path": str(dataset)}}
    return raw


class ScheduledRun:
    """One run on the hub."""

    def __init__(self, client: HubClient, run_id: str) -> None:
        self._client = client
        self.run_id = run_id

    @property
    def nodes(self) -> list[str]:
        """The nodes that work on it now."""
        info = self._client.call("GET", "/v1/hub", None, HubInfo)
        return [node.node_id for node in info.nodes if node.run_id == self.run_id]

    def status(self) -> RunInfo:
        """What the hub knows of it: `state`, `reason` (whom it waits for), `progress`, `nodes`, `evaluations` ..."""
        return self._client.call("GET", self._path(), None, RunInfo)

    def wait(self, timeout_s: float | None = None) -> RunInfo:
        """Wait for the end; a hub that is away is waited for, too. Without a time-out: as long as it takes.

        Raises RunFailedError when it did not finish, ConflictError when it is not over after `timeout_s`.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                info = self.status()
            except UnreachableError:
                info = None
            if info is not None and info.state in ENDED:
                break
            if until is not None and time.monotonic() >= until:
                state = "the hub does not answer" if info is None else f"it is {info.state} {info.reason}".strip()
                raise ConflictError(f"{self.run_id} is not over after {timeout_s:.0f} s", cause=state)
            time.sleep(POLL_S)
        if info.state != "finished":
            raise RunFailedError(
                f"{self.run_id} {'was stopped' if info.state == 'stopped' else 'failed'}",
                cause=info.reason,
                next=f"`ciuic logs {self.run_id}` says more; `ciuic resume {self.run_id}` goes on",
            )
        return info

    def stop(self) -> None:
        """Let the nodes push what they have and leave; `ciuic resume` goes on from there. Raises ConflictError."""
        self._client.call("POST", f"{self._path()}/stop", None, Ok)

    def _path(self) -> str:
        return f"/v1/runs/{quote(self.run_id, safe='')}"

    def __repr__(self) -> str:
        return f"ScheduledRun({self.run_id})"
