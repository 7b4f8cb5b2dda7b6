"""One group of a rendezvous: who is in it, who asks, and when and how its next generation is formed. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ciuic.hub.meeting.keyspace import Keyspace, SpaceLimits
from ciuic.net.store_messages import GroupAsk, GroupPlace


@dataclass(kw_only=True)
class Member:
    """One process of the present generation."""

    member: str
    caller: str
    rank: int
    size: int
    until_s: float
    """It counts as alive until then."""

    def is_alive(self, now_s: float) -> bool:
        return now_s < self.until_s

    def heard(self, now_s: float, patience_s: float) -> None:
        self.until_s = now_s + patience_s


@dataclass(kw_only=True)
class Asking:
    """One process that wants a place in the next generation."""

    ask: GroupAsk
    caller: str
    asked_s: float
    number: int
    """Order of arrival."""
    until_s: float = 0.0

    def is_alive(self, now_s: float) -> bool:
        return now_s < self.until_s

    def renew(self, ask: GroupAsk, now_s: float, patience_s: float) -> None:
        self.ask, self.until_s = ask, now_s + patience_s


@dataclass(kw_only=True)
class Group:
    """See the module."""

    name: str
    begun_by: str
    touched_s: float
    limits: SpaceLimits
    number: int = 0
    """Generations so far."""
    tag: str = ""
    max_size: int = 0
    """What the present generation was formed with; 0: no limit."""
    closed: bool = False
    is_taken_back: bool = False
    """Known from its members only, after a restart of the hub."""
    revision: int = 1
    """Changes of who is in it or asks."""
    writes: int = 0
    """Changes of the store."""
    arrivals: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    asks: dict[str, Asking] = field(default_factory=dict)
    space: Keyspace = field(init=False)

    def __post_init__(self) -> None:
        self.space = Keyspace(self.limits)

    def next_number(self) -> int:
        """Order of arrival of the next who asks."""
        self.arrivals += 1
        return self.arrivals

    # ---- who is there

    def forget_dead(self, now_s: float) -> None:
        """Those who asked and died ask no more; members stay on record, dead, until the next generation."""
        dead = [key for key, one in self.asks.items() if not one.is_alive(now_s)]
        for key in dead:
            del self.asks[key]
            self.revision += 1

    def has_living_members(self, now_s: float) -> bool:
        return any(one.is_alive(now_s) for one in self.members.values())

    def has_life(self, now_s: float) -> bool:
        return self.has_living_members(now_s) or any(one.is_alive(now_s) for one in self.asks.values())

    def holdouts(self, now_s: float) -> list[Member]:
        """Living members that have not asked for a place in the next generation."""
        return [one for key, one in self.members.items() if one.is_alive(now_s) and key not in self.asks]

    def place_of(self, member: Member) -> GroupPlace:
        return GroupPlace(status="formed", generation=self.number, tag=self.tag, rank=member.rank, size=member.size)

    def waiting(self, now_s: float) -> int:
        """Processes that a re-formation would let in: survivors that ask, and newcomers as far as there is room."""
        living = [one for one in self.asks.values() if one.is_alive(now_s)]
        survivors = sum(1 for one in living if one.ask.after)
        newcomers = len(living) - survivors
        if self.max_size:
            alive = sum(one.is_alive(now_s) for one in self.members.values())
            newcomers = min(newcomers, max(0, self.max_size - alive))
        return survivors + newcomers

    # ---- the next generation

    def next_generation(self, now_s: float) -> list[tuple[int, Asking]] | None:
        """(rank, who) of the next generation; None while it is not time."""
        if self.closed:
            return None
        asks = sorted((one for one in self.asks.values() if one.is_alive(now_s)), key=lambda one: one.number)
        survivors = [one for one in asks if self._survived(one, now_s)]
        newcomers = [one for one in asks if one not in survivors]
        if survivors:
            return self._formed_again(now_s, survivors, newcomers)
        if self.has_living_members(now_s):
            return None
        return _formed_first(now_s, newcomers)

    def _survived(self, one: Asking, now_s: float) -> bool:
        """Of the present generation; or of one that a restarted hub does not know, while there is no other."""
        if one.ask.after == self.tag:
            return bool(self.tag)
        return bool(one.ask.after) and not self.has_living_members(now_s)

    def _formed_again(
        self, now_s: float, survivors: list[Asking], newcomers: list[Asking]
    ) -> list[tuple[int, Asking]] | None:
        over = now_s >= self._grace_ends_s(survivors)
        known = all(one.ask.after == self.tag for one in survivors)
        complete = not self.holdouts(now_s) and (known or len(survivors) >= max(one.ask.expected for one in survivors))
        if not (complete or over):
            return None
        smallest = max(one.ask.min_size for one in survivors)
        largest = min(one.ask.max_size or 100_000 for one in survivors)
        survivors = sorted(survivors, key=self._old_rank)[:largest]
        free = [one for one in newcomers if one.ask.rank < 0][: largest - len(survivors)]
        told = [one for one in newcomers if one.ask.rank >= 0]
        size = len(survivors) + len(free) + len(told)
        ranks = {one.ask.rank for one in told}
        if size > largest or len(ranks) < len(told) or any(one.ask.max_size != size for one in told):
            told = []  # who was told its rank is let in only where that rank and that size come out
        if len(survivors) + len(free) + len(told) < smallest:
            return None
        return _ranked(told, [*survivors, *free])

    def _old_rank(self, one: Asking) -> tuple[int, int]:
        member = self.members.get(one.ask.member)
        return (member.rank if member is not None else max(0, one.ask.rank), one.number)

    def _grace_ends_s(self, survivors: Iterable[Asking]) -> float:
        return min(one.asked_s + one.ask.grace_s for one in survivors)

    def form(self, chosen: list[tuple[int, Asking]], tag: str, now_s: float, patience_s: float) -> None:
        """Begin the next generation with an empty store; who is not in it is out."""
        self.number = 1 + max(self.number, *(number_of(one.ask.after) for _, one in chosen))
        self.tag = f"{self.number}-{tag}"
        self.is_taken_back = False
        self.max_size = min((one.ask.max_size for _, one in chosen if one.ask.max_size), default=0)
        self.members = {
            one.ask.member: Member(
                member=one.ask.member, caller=one.caller, rank=rank, size=len(chosen), until_s=now_s + patience_s
            )
            for rank, one in chosen
        }
        for key in self.members:
            self.asks.pop(key, None)
        self.space = Keyspace(self.limits)
        self.revision += 1

    def wait_s(self, now_s: float) -> float:
        """Seconds until time alone may change something: a death, the end of a grace or of a last call."""
        times = [one.until_s for one in (*self.members.values(), *self.asks.values())]
        times += [one.asked_s + one.ask.grace_s for one in self.asks.values() if one.ask.after]
        times += [one.asked_s + one.ask.last_call_s for one in self.asks.values() if one.ask.last_call_s]
        return min((time - now_s for time in times if time > now_s), default=60.0)


def number_of(tag: str) -> int:
    """Which generation a tag names; 0 when it is none."""
    text = tag.partition("-")[0]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _formed_first(now_s: float, newcomers: list[Asking]) -> list[tuple[int, Asking]] | None:
    """A world from nothing: all that agree with the first, as soon as they are enough."""
    if not newcomers:
        return None
    first = newcomers[0].ask
    agreed = [one for one in newcomers if (one.ask.min_size, one.ask.max_size) == (first.min_size, first.max_size)]
    firsts = {one.ask.rank: one for one in reversed(agreed)}
    agreed = [one for one in agreed if one.ask.rank < 0 or firsts[one.ask.rank] is one]  # a rank twice is not agreed
    if len(agreed) < first.min_size:
        return None
    enough_s = agreed[first.min_size - 1].asked_s
    if (not first.max_size or len(agreed) < first.max_size) and now_s < enough_s + first.last_call_s:
        return None
    chosen = agreed[: first.max_size or len(agreed)]
    told = [one for one in chosen if one.ask.rank >= 0]
    free = [one for one in chosen if one.ask.rank < 0]
    arrived: dict[str, int] = {}
    for one in free:
        arrived.setdefault(one.caller, one.number)
    free.sort(key=lambda one: (arrived[one.caller], one.ask.local_rank, one.number))
    return _ranked(told, free)


def _ranked(told: list[Asking], free: list[Asking]) -> list[tuple[int, Asking]]:
    """Those that were told their rank have it; the others fill the rest in their order."""
    placed = {one.ask.rank: one for one in told}
    rest = iter(free)
    size = len(told) + len(free)
    return [(rank, placed[rank] if rank in placed else next(rest)) for rank in range(size)]
