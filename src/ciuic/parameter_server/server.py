"""`AsyncParameterServer(master_node)`: nodes push updates whenever they have one and pull what the others did.

    server = ciuic.AsyncParameterServer(model)                         # in this process
    await server.push_update("us-west", {"weight": base - theta})
    delta = await server.pull_update("eu-central")                     # None when nothing is new
    delta.apply(replica)                                               # bit for bit what the server did

With the address of a hub the same four coroutines speak to the ledger of the run that this program is a worker of.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from ciuic.ledger.layout import Layout
from ciuic.net.client import HubClient
from ciuic.parameter_server.arrays import Delta, Float
from ciuic.parameter_server.local import LocalLedger, Rule


class Backing(Protocol):
    """Where the parameters are."""

    layout: Layout

    @property
    def version(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def node_versions(self) -> dict[str, int]: ...
    @property
    def params(self) -> dict[str, Float]: ...
    def push(self, node: str, update: Any, sequence: int | None, base_version: int | None, tokens: int) -> int: ...
    def pull(self, node: str) -> Delta | None: ...
    def delta(self, from_version: int) -> Delta: ...
    def close(self) -> None: ...


class AsyncParameterServer:
    """Versioned parameters. Coroutines may be called from any number of tasks; each push is one version."""

    def __init__(
        self,
        master_node: Any,
        params: Mapping[str, Any] | None = None,
        *,
        outer_lr: float = 1.0,
        momentum: float = 0.0,
        delay: int = 1,
        max_staleness: int = 4,
    ) -> None:
        """Serve the parameters of `master_node`: a model, a dict of name to array, or anything with get_model_state().

        With W nodes an update s versions behind weighs 1 / W (1 + s)^-1/2; one more than W `max_staleness` behind is
        refused. `momentum` is Nesterov's; with `delay` N it moves once per N pushes. For a hub, `master_node` is its
        https address or a HubClient, or "hub" for the one of this program's run; `params` are the parameters to start
        from, and the run's job decides the rest. Raises UsageError.
        """
        self._ledger: Backing
        if isinstance(master_node, HubClient):
            master_node = master_node.address.url
        if isinstance(master_node, str):
            from ciuic.parameter_server.remote import RunLedgerClient

            self._ledger = RunLedgerClient(master_node, params or {})
        else:
            rule = Rule(outer_lr=outer_lr, momentum=momentum, delay=delay, max_staleness=max_staleness)
            self._ledger = LocalLedger(master_node, rule)

    async def push_update(
        self,
        node_id: str,
        update: Mapping[str, Any],
        *,
        sequence: int | None = None,
        base_version: int | None = None,
        tokens: int = 1,
    ) -> int:
        """Merge an update: name -> how far the parameter should go down (base - theta, or rate x gradient).

        `sequence` grows by push of a node: the same one again is counted once. `base_version`: what it was computed at,
        the version that the node pulled last unless given. Returns the version. Raises NonFiniteError with the
        parameter's name, ConflictError when it is too stale or ahead, UsageError when it does not fit.
        """
        return await asyncio.to_thread(self._ledger.push, node_id, update, sequence, base_version, tokens)

    async def pull_update(self, node_id: str) -> Delta | None:
        """The entries since this node's version, which it then has; None when there is nothing new."""
        return await asyncio.to_thread(self._ledger.pull, node_id)

    async def get_delta(self, from_version: int) -> Delta:
        """The entries after a version; no node's version changes. Raises ConflictError when they are not kept."""
        return await asyncio.to_thread(self._ledger.delta, from_version)

    @property
    def version(self) -> int:
        """How many updates were merged."""
        return self._ledger.version

    @property
    def digest(self) -> str:
        """Of the parameters at `version`."""
        return self._ledger.digest

    @property
    def node_versions(self) -> dict[str, int]:
        """The version that each node has pulled."""
        return self._ledger.node_versions

    @property
    def params(self) -> dict[str, Float]:
        """A copy of the parameters at `version`, fp32."""
        return self._ledger.params

    async def close(self) -> None:
        """Leave the run; nothing to do in one process."""
        await asyncio.to_thread(self._ledger.close)

    async def __aenter__(self) -> "AsyncParameterServer":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
