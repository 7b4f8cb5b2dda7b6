"""Rendezvous: processes ask for a place, become a generation with ranks and a store, are formed again after a death.

Pure: no sockets; the clock and the random tags are passed in. One caller at a time (the event loop).

A group is named `job/group`. Its life:

    newcomers ask            -> generation 1 as soon as as many have asked as the world is to have
    a member dies            -> it is silent for PATIENCE_S, or its connection ended and it was not heard for LOST_S
    survivors ask (`after`)  -> generation 2 as soon as every living member has asked or the grace of the first is over;
                                ranks are dense, in the order of the old ones; newcomers come behind
    newcomers meanwhile      -> wait for the next re-formation; they never form a second world beside a living one

After a restart of the hub the members that still hold make their generation known again; its store is empty then.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ciuic.errors import AccessError, ConflictError, NotFoundError, ProtocolError, SupersededError
from ciuic.hub.meeting.group import Asking, Group, Member, number_of
from ciuic.hub.meeting.keyspace import SpaceLimits
from ciuic.net.store_messages import GroupAsk, GroupHold, GroupLeave, GroupNews, GroupPlace, StoreCall, StoreReply

PATIENCE_S = 10.0
"""A member that was not heard for so long is dead; it makes itself heard every three seconds."""
LOST_S = 1.0
"""After the end of its connection a member has this long to come back."""
LONGEST_GRACE_S = 600.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}/[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MEMBER = re.compile(r"[0-9a-f]{16,64}")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What all groups together may take."""

    groups: int = 256
    groups_of_one: int = 32
    """Groups that one identity may have begun."""
    members: int = 1024
    """Per group, those that ask included."""
    idle_s: float = 600.0
    """A group without a living member is forgotten after this long."""
    total_bytes: int = 128 * 1024 * 1024
    space: SpaceLimits = field(default_factory=SpaceLimits)


class Rendezvous:
    """All groups of a hub. Every method takes the present time (monotonic seconds) and the caller's certified name."""

    def __init__(self, limits: Limits | None = None, *, new_tag: Callable[[], str]) -> None:
        """`new_tag` gives a text that was never given before, also not by an earlier start of the hub."""
        self._limits = limits or Limits()
        self._new_tag = new_tag
        self._groups: dict[str, Group] = {}

    def ask(self, now_s: float, name: str, caller: str, ask: GroupAsk) -> GroupPlace:
        """One more (or the same) wish for a place.

        Raises ProtocolError for a malformed one, AccessError for another's member name, ConflictError when it cannot
        be granted: a limit, a rank that is taken, a world of another size, a job that is over.
        """
        _check_ask(ask)
        group = self._group_for(now_s, name, caller)
        group.forget_dead(now_s)
        _check_owner(group, ask.member, caller)
        member = group.members.get(ask.member)
        if member is not None and ask.after != group.tag:
            member.heard(now_s, PATIENCE_S)
            return group.place_of(member)  # its place was given, but the answer was lost
        if group.closed and not ask.after and not group.has_life(now_s):
            group.closed = False  # a new job under the name of an old one
        if group.closed:
            raise ConflictError(
                f"{name} is closed", cause="one of its members has ended the job", next="start it under another name"
            )
        if ask.member not in group.asks:
            self._check_members(group)
            group.asks[ask.member] = Asking(ask=ask, caller=caller, asked_s=now_s, number=group.next_number())
            group.revision += 1
        group.asks[ask.member].renew(ask, now_s, PATIENCE_S)
        _check_fit(now_s, group, group.asks[ask.member])
        if member is not None:
            member.heard(now_s, PATIENCE_S)
        self.settle(now_s, name)
        member = group.members.get(ask.member)
        if member is not None and group.tag != ask.after:
            return group.place_of(member)
        return GroupPlace(status="waiting", present=len(group.asks), holdouts=len(group.holdouts(now_s)))

    def settle(self, now_s: float, name: str) -> bool:
        """Form the next generation if it is time. True when it was."""
        group = self._groups.get(name)
        chosen = group.next_generation(now_s) if group is not None else None
        if group is None or chosen is None:
            return False
        group.form(chosen, self._new_tag(), now_s, PATIENCE_S)
        return True

    def wait_s(self, now_s: float, name: str) -> float:
        """Seconds until time alone may change something for those who ask."""
        group = self._groups.get(name)
        return group.wait_s(now_s) if group is not None else PATIENCE_S

    def changes(self, name: str) -> int:
        """Grows with every change in the group or its store."""
        group = self._groups.get(name)
        return group.revision + group.writes if group is not None else 0

    def hold(self, now_s: float, name: str, caller: str, hold: GroupHold) -> GroupNews:
        """A member's sign of life, and what has changed. Raises ConflictError, AccessError, ProtocolError."""
        if not (_MEMBER.fullmatch(hold.member) and 0 <= hold.rank < hold.size and 1 <= len(hold.tag) <= 64):
            raise ProtocolError("this is not a member of a group")
        group = self._group_for(now_s, name, caller)
        group.forget_dead(now_s)
        _check_owner(group, hold.member, caller)
        self._take_back(now_s, group, caller, hold)
        member = group.members.get(hold.member)
        if member is None or group.tag != hold.tag:
            return GroupNews(is_current=False, revision=group.revision, closed=group.closed)
        member.heard(now_s, PATIENCE_S)
        return GroupNews(
            is_current=True,
            revision=group.revision,
            waiting=group.waiting(now_s),
            alive=sum(one.is_alive(now_s) for one in group.members.values()),
            closed=group.closed,
        )

    def leave(self, now_s: float, name: str, caller: str, leave: GroupLeave) -> None:
        """A process goes on purpose. Nothing happens when it is not there. Raises AccessError."""
        group = self._groups.get(name)
        if group is None:
            return
        _check_owner(group, leave.member, caller)
        if leave.closes and (leave.member in group.members or leave.member in group.asks):
            group.closed = True
        group.members.pop(leave.member, None)
        group.asks.pop(leave.member, None)
        group.touched_s = now_s
        group.revision += 1

    def lost(self, now_s: float, name: str, member: str) -> None:
        """The connection on which a process waited has ended: it may be dead."""
        group = self._groups.get(name)
        if group is not None:
            for one in (group.members.get(member), group.asks.get(member)):
                if one is not None:
                    one.until_s = min(one.until_s, now_s + LOST_S)
            group.revision += 1

    def call(self, now_s: float, name: str, caller: str, call: StoreCall) -> StoreReply:
        """One store operation of a member.

        Raises NotFoundError when the hub does not know the caller yet (it was restarted), SupersededError when the
        group was formed again without the caller, and what Keyspace.apply raises.
        """
        group = self._groups.get(name)
        unheard = group is not None and group.is_taken_back and call.tag == group.tag
        if group is None or not group.tag or (unheard and call.member not in group.members):
            raise NotFoundError(
                f"the hub does not know this process in {name}",
                cause="it was restarted, or the group was idle for too long",
                next="members make themselves known again within seconds",
            )
        _check_owner(group, call.member, caller)
        member = group.members.get(call.member)
        if member is None or group.tag != call.tag:
            raise SupersededError(
                f"{name} was formed again, and this process is not in it",
                cause=f"generation {group.number} has begun",
                next="ask for a place in the next one: ciuic.torch.reform()",
            )
        member.heard(now_s, PATIENCE_S)
        if call.operation in ("set", "add", "append", "compare_set"):
            self._check_total(sum(len(value) for value in call.values))
        reply = group.space.apply(call)
        if call.operation not in ("get", "wait", "check", "count"):
            group.writes += 1
        return reply

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _group_for(self, now_s: float, name: str, caller: str) -> Group:
        """The group, made when there is none. Raises ProtocolError, ConflictError."""
        group = self._groups.get(name)
        if group is None:
            if not _NAME.fullmatch(name):
                raise ProtocolError(f"{name[:140]!r} is not the name of a group", next="write letters, digits, ._-")
            self._expire(now_s)
            self._check_room(caller)
            group = self._groups[name] = Group(name=name, begun_by=caller, touched_s=now_s, limits=self._limits.space)
        group.touched_s = now_s
        return group

    def _expire(self, now_s: float) -> None:
        idle = [
            name
            for name, group in self._groups.items()
            if not group.has_life(now_s) and now_s - group.touched_s >= self._limits.idle_s
        ]
        for name in idle:
            del self._groups[name]

    def _check_room(self, caller: str) -> None:
        limits = self._limits
        mine = sum(group.begun_by == caller for group in self._groups.values())
        if len(self._groups) >= limits.groups or mine >= limits.groups_of_one:
            raise ConflictError(
                "the hub takes no more groups",
                cause=f"it has {len(self._groups)} of {limits.groups}; {caller} began {mine} of {limits.groups_of_one}",
                next=f"end one; a group without members is forgotten after {limits.idle_s:.0f} s",
            )

    def _check_total(self, more_bytes: int) -> None:
        total = sum(group.space.size_bytes for group in self._groups.values())
        if total + more_bytes > self._limits.total_bytes:
            raise ConflictError(
                "the stores of all groups together are full",
                cause=f"they hold {total} bytes, the limit is {self._limits.total_bytes}",
                next="end a group that is not needed any more",
            )

    def _check_members(self, group: Group) -> None:
        if len(group.asks.keys() | group.members.keys()) >= self._limits.members:
            raise ConflictError(f"{group.name} is full", cause=f"it may have {self._limits.members} members")

    def _take_back(self, now_s: float, group: Group, caller: str, hold: GroupHold) -> None:
        """After a restart of the hub: a generation is what its members say, as long as nobody says otherwise."""
        if not group.tag and not group.asks:
            group.number = number_of(hold.tag)
            group.tag, group.is_taken_back, group.max_size = hold.tag, True, hold.size
        if group.is_taken_back and group.tag == hold.tag and hold.member not in group.members:
            member = Member(member=hold.member, caller=caller, rank=hold.rank, size=hold.size, until_s=now_s)
            group.members[hold.member] = member
            group.revision += 1


def _check_ask(ask: GroupAsk) -> None:
    sizes_ok = 1 <= ask.min_size <= 100_000 and (ask.max_size == 0 or ask.min_size <= ask.max_size <= 100_000)
    rank_ok = -1 <= ask.rank < 100_000 and (ask.after or ask.rank < max(1, ask.max_size))
    waits_ok = 0 <= ask.last_call_s <= LONGEST_GRACE_S and 0 <= ask.grace_s <= LONGEST_GRACE_S
    small_ok = 0 <= ask.local_rank < 100_000 and 0 <= ask.expected <= 100_000 and len(ask.after) <= 64
    if not (_MEMBER.fullmatch(ask.member) and sizes_ok and rank_ok and waits_ok and small_ok):
        raise ProtocolError(
            "this is not a wish for a place in a group",
            cause=f"rank {ask.rank}, size {_sizes(ask)}",
            next="a rank is at least 0 and below the world size",
        )


def _check_fit(now_s: float, group: Group, mine: Asking) -> None:
    """Whether a newcomer's wish can be granted beside those that came before; if not, it is forgotten.

    Beside a living world nothing is said yet: sizes and ranks will be others when there is room. Raises ConflictError.
    """
    ask = mine.ask
    if ask.after or group.has_living_members(now_s):
        return
    for key, other in list(group.asks.items()):
        if other.ask.after or other.number >= mine.number:
            continue
        is_twin = ask.rank >= 0 and other.ask.rank == ask.rank
        if is_twin and other.until_s <= now_s + LOST_S:  # it lost its connection: this is its successor
            del group.asks[key]
        elif is_twin:
            del group.asks[ask.member]
            raise ConflictError(
                f"rank {ask.rank} of {group.name} is taken",
                cause=f"another process of {other.caller} asks for it",
                next="give each process its own rank, or none; a killed one is forgotten after a few seconds",
            )
        elif (other.ask.min_size, other.ask.max_size) != (ask.min_size, ask.max_size):
            del group.asks[ask.member]
            raise ConflictError(
                f"the processes of {group.name} do not agree on its size",
                cause=f"{other.caller} asks for {_sizes(other.ask)}, this one for {_sizes(ask)}",
                next="give all of them the same world size, or another job name",
            )


def _check_owner(group: Group, member: str, caller: str) -> None:
    for one in (group.members.get(member), group.asks.get(member)):
        if one is not None and one.caller != caller:
            raise AccessError(f"this process of {group.name} is not one of {caller}")


def _sizes(ask: GroupAsk) -> str:
    return str(ask.min_size) if ask.min_size == ask.max_size else f"{ask.min_size} to {ask.max_size or 'any'}"
