"""Messages of the rendezvous: how processes become a group, stay one, and use the group's key-value store.

All are JSON over HTTPS like the others in net/messages; values are bytes (base64 on the wire).
"""

from typing import Literal

from ciuic.net.messages import Message

StoreOperation = Literal["set", "get", "wait", "check", "add", "append", "compare_set", "delete", "count"]


class GroupAsk(Message):
    """A process wants a place in the next generation of a group; asked again until it is `formed`."""

    member: str
    """Random name of this process, 16 to 64 characters; it stays the same when the group is re-formed."""
    min_size: int = 1
    max_size: int = 0
    """0: no limit. A world of known size has min_size = max_size."""
    rank: int = -1
    """The rank this process was told to have; -1: the hub chooses. Of a survivor: its last rank."""
    local_rank: int = 0
    """Its number among the processes of its node: those get neighbouring ranks."""
    after: str = ""
    """Tag of the generation that this process survived; empty for a newcomer."""
    expected: int = 0
    """Of a survivor: how many members that generation had (for a hub that was restarted)."""
    last_call_s: float = 0.0
    """How long to wait for more than min_size."""
    grace_s: float = 5.0
    """Of a survivor: how long to wait for members that are alive but do not ask."""
    wait_s: float = 0.0


class GroupPlace(Message):
    status: Literal["formed", "waiting"]
    generation: int = 0
    tag: str = ""
    """Names this generation; store calls carry it."""
    rank: int = 0
    size: int = 0
    present: int = 0
    """How many ask now."""
    holdouts: int = 0
    """Members of the present generation that are alive and have not asked."""


class GroupHold(Message):
    """Sign of life of a member; held until something changes in the group."""

    member: str
    tag: str
    rank: int
    size: int
    seen: int = 0
    wait_s: float = 0.0


class GroupNews(Message):
    is_current: bool
    """False: the group was formed again without this process."""
    revision: int = 0
    waiting: int = 0
    """Processes that a re-formation would let in or bring back."""
    alive: int = 0
    closed: bool = False
    """The job has ended: nobody is let in any more."""


class GroupLeave(Message):
    member: str
    closes: bool = False
    """End the job for everybody: no generation is formed after this one."""


class StoreCall(Message):
    """One operation on the store of a generation."""

    member: str
    tag: str
    request: int
    """Grows by one per call of a member; the same number again gets the same answer (lost replies)."""
    operation: StoreOperation
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    """set: one per key; append: one; compare_set: expected and desired."""
    amount: int = 0
    """add: what is added."""
    wait_s: float = 0.0


class StoreReply(Message):
    status: Literal["done", "missing"] = "done"
    values: tuple[bytes, ...] = ()
    number: int = 0
    """add: the sum; check and delete: 0 or 1; count: the keys."""
    missing: tuple[str, ...] = ()
    """With `missing`: the first keys that are not there yet."""
