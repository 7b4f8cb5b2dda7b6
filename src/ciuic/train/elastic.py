"""`torchrun --rdzv-backend=ciuic --rdzv-id=JOB`: the agents of torchrun meet at the hub.

torch finds `handler` through the entry point group `torchrun.handlers`. The hub forms the generations, so this is not
torch's DynamicRendezvousHandler, whose shared state is a pickle that every agent loads: a member of the group could run
code on all hosts.
"""

import os
import socket
from datetime import timedelta
from typing import cast

from torch.distributed import DistNetworkError, DistStoreError, Store, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from ciuic.errors import CiuicError, ConflictError, UnreachableError
from ciuic.net.credentials import Credentials
from ciuic.net.route import address_towards, host_name_is_reachable
from ciuic.net.store_messages import GroupAsk
from ciuic.train.hub_store import Membership
from ciuic.train.rendezvous import choose_interface, credentials_here

GROUP = "torchrun"
"""Agents meet in the group JOB/torchrun; their workers may use other groups of the same job."""
JOIN_S = 600
LAST_CALL_S = 30
GRACE_S = 60
"""Agents that are alive first stop their workers, which may take half a minute."""


def handler() -> RendezvousHandlerCreator:
    """What torch loads: a function that makes the handler."""
    return create


def create(params: RendezvousParameters) -> RendezvousHandler:
    """The handler of one agent. Raises UsageError, CertificateError, StorageError."""
    found, _ = credentials_here()
    if params.endpoint:
        url = params.endpoint if "://" in params.endpoint else f"https://{params.endpoint}"
        found = Credentials(url=url, name=found.name, authority=found.authority, cert=found.cert, key=found.key)
    return HubRendezvous(Membership(found, f"{params.run_id}/{GROUP}"), params)


class HubRendezvous(RendezvousHandler):
    """One agent's side. `--rdzv-conf` knows join_timeout, last_call_timeout and grace, in whole seconds."""

    def __init__(self, membership: Membership, params: RendezvousParameters) -> None:
        self._membership = membership
        self._run_id = params.run_id
        self._local_addr = params.local_addr
        self._join_s = cast("int", params.get_as_int("join_timeout", JOIN_S))
        self._wish = GroupAsk(
            member=membership.member,
            min_size=params.min_nodes,
            max_size=params.max_nodes,
            last_call_s=cast("int", params.get_as_int("last_call_timeout", LAST_CALL_S)),
            grace_s=cast("int", params.get_as_int("grace", GRACE_S)),
        )
        self._server: TCPStore | None = None

    def get_backend(self) -> str:
        return "ciuic"

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Workers with env:// use a TCPStore in the agent of rank 0, as with torch's own c10d backend."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other agents: at first, and again after a failure or for newcomers. Raises RendezvousError."""
        try:
            store = self._membership.enter(self._wish, within_s=self._join_s)
        except UnreachableError as error:
            raise RendezvousConnectionError(str(error)) from error
        except ConflictError as error:
            if self.is_closed() or "is closed" in error.message:
                raise RendezvousClosedError(str(error)) from error
            raise RendezvousStateError(str(error)) from error
        except CiuicError as error:
            raise RendezvousStateError(str(error)) from error
        except DistStoreError as error:
            raise RendezvousTimeoutError(str(error)) from error
        place = self._membership.place
        if place is None:
            raise RendezvousStateError("the hub gave no place")
        store.set_timeout(timedelta(seconds=self._join_s))
        try:
            meeting = self._meeting_point(store, place.rank)
        except (DistStoreError, DistNetworkError) as error:
            raise RendezvousConnectionError(str(error)) from error
        return RendezvousInfo(store, place.rank, place.size, meeting)

    def is_closed(self) -> bool:
        return self._membership.news.closed

    def set_closed(self) -> None:
        self._membership.leave(closes=True)

    def num_nodes_waiting(self) -> int:
        """Agents that a new rendezvous would let in or back; torchrun restarts the workers for them."""
        return self._membership.news.waiting

    def shutdown(self) -> bool:
        """The job is over, for all agents."""
        self._membership.leave(closes=True)
        self._server = None
        return True

    def _meeting_point(self, store: Store, rank: int) -> RendezvousStoreInfo:
        """MASTER_ADDR and MASTER_PORT of the workers of this generation."""
        self._server = None
        port = 0
        choose_interface(self._membership.hub_url)  # the workers have it in their environment
        local = self._local_addr or self._address()
        if rank == 0 and self.use_agent_store:
            host = local or socket.getfqdn()
            self._server = TCPStore(host_name=host, port=0, is_master=True, multi_tenant=True, wait_for_workers=False)
            port = self._server.port
        return RendezvousStoreInfo.build(rank, store, local, port)

    def _address(self) -> str | None:
        """What to tell the others instead of a host name that leads nowhere."""
        url = self._membership.hub_url
        return None if host_name_is_reachable(url) else address_towards(url) or None
