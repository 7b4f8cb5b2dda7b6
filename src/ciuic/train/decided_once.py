"""A decision that all ranks of a group take together: everybody says something, rank 0 decides, everybody gets that.

Over the group's store, not by a collective: each wait has an end, the error names the ranks that did not come, and it
is the same error on all that did. Costs a few hundred bytes per rank, so it is for once per evaluation, not per step.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ciuic.errors import RankMissingError, TrainingLoopError, UsageError
from ciuic.units import format_duration

MARGIN_S = 5.0
"""Ranks wait so much longer for rank 0 than it waits for them: its answer names who is missing."""
_MOST_NAMES = 8
_SHORTEST_S, _LONGEST_S = 0.001, 0.05

Said = Mapping[str, Any]
Decide = Callable[[Sequence[Said]], Said]
"""From what the ranks said, in their order, to what holds for all; it may raise TrainingLoopError."""


class _Words(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank puts there."""

    call: str
    """Which decision it is about."""
    said: dict[str, Any]


class _Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 puts there."""

    decided: dict[str, Any] = {}
    missing: tuple[int, ...] = ()
    error: tuple[str, str, str] | None = None
    """Message, cause, next."""


class DecidedOnce:
    """One place where a group decides, again and again. All ranks make it, in the same order."""

    def __init__(
        self, name: str, *, group: Any = None, store: "dist.Store | None" = None, timeout_s: float = 300.0
    ) -> None:
        """`group`: of torch.distributed, by default the world; without one (not initialised) this process is alone.

        `store`: by default that of the group. Raises UsageError.
        """
        if not name or "/" in name:
            raise UsageError(f"{name!r} is not a name", next="give a short text without /")
        if not timeout_s > 0:
            raise UsageError(f"timeout_s={timeout_s} is out of range", next="give the seconds that a rank may be late")
        self.name, self.timeout_s = name, timeout_s
        self.rank, self.size = 0, 1
        self._round = 0
        self._store: dist.Store | None = None
        if group is None and not (dist.is_available() and dist.is_initialized()):
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise UsageError("this rank is not in the group", next="make it on the ranks of the group only")
        if self.size == 1:
            return
        place = f"ciuic/{_group_name(group)}/{name}"
        given = dist.PrefixStore(place, store or _store_of(group))
        number = given.add(f"made/{self.rank}", 1)  # several of one name do not meet
        self._store = dist.PrefixStore(str(number), given)

    def decide(self, call: str, said: Said, decide: Decide) -> Said:
        """Rank 0's decision, on every rank. `call` names what is asked: all ranks must ask the same.

        Raises RankMissingError when a rank does not come in time, TrainingLoopError when ranks ask different things,
        and what `decide` raises: on all ranks alike.
        """
        store, self._round = self._store, self._round + 1
        if store is None:
            return decide([said])
        words = _Words(call=call, said=dict(said))
        store.set(f"{self._round}/{self.rank}", msgspec.json.encode(words).decode())
        if self.rank == 0:
            decision = self._decision(store, call, decide)
            store.set(f"{self._round}/decision", msgspec.json.encode(decision).decode())
            self._forget(store)
        else:
            decision = self._read_decision(store)
        if decision.missing:
            raise self._missing(call, decision.missing)
        if decision.error is not None:
            message, cause, next_ = decision.error
            raise TrainingLoopError(message, cause=cause, next=next_)
        return decision.decided

    def _decision(self, store: dist.Store, call: str, decide: Decide) -> _Decision:
        until, missing, words = time.monotonic() + self.timeout_s, [], []
        for rank in range(self.size):
            key = f"{self._round}/{rank}"
            if _appears(store, key, until):
                words.append(msgspec.json.decode(bytes(store.get(key)), type=_Words))
            else:
                missing.append(rank)
        if missing:
            return _Decision(missing=tuple(missing))
        try:
            self._check_same(call, words)
            return _Decision(decided=dict(decide([one.said for one in words])))
        except TrainingLoopError as error:
            return _Decision(error=(error.message, error.cause, error.next))
        except (KeyError, TypeError, ValueError) as error:
            return _Decision(error=(f"rank 0 cannot read what was said to {self.name}.{call}", str(error), ""))

    def _check_same(self, call: str, words: Sequence[_Words]) -> None:
        other = [rank for rank, one in enumerate(words) if one.call != call]
        if other:
            raise TrainingLoopError(
                f"the ranks of {self.name} do not call the same: rank 0 {call}, rank {other[0]} {words[other[0]].call}",
                cause="they do not take the same way through the program",
                next="call it on all ranks at the same places, outside of `if rank == 0`",
            )

    def _read_decision(self, store: dist.Store) -> _Decision:
        key = f"{self._round}/decision"
        if not _appears(store, key, time.monotonic() + self.timeout_s + MARGIN_S):
            return _Decision(missing=(0,))
        return msgspec.json.decode(bytes(store.get(key)), type=_Decision)

    def _forget(self, store: dist.Store) -> None:
        """The round before: everybody has said something in this one, so everybody has read that one."""
        for key in ("decision", *range(self.size)):
            if self._round > 1:
                store.delete_key(f"{self._round - 1}/{key}")

    def _missing(self, call: str, ranks: Sequence[int]) -> RankMissingError:
        shown = ", ".join(map(str, ranks[:_MOST_NAMES])) + (", ..." if len(ranks) > _MOST_NAMES else "")
        name = f"{len(ranks)} ranks ({shown})" if len(ranks) > 1 else f"rank {shown}"
        return RankMissingError(
            f"{name} did not come to {self.name}.{call} within {format_duration(self.timeout_s)}",
            cause="it ended, hangs elsewhere, or does not call it",
            next="look at its log; call it on all ranks; raise timeout_s when a rank may be that late",
        )


def _appears(store: dist.Store, key: str, until: float) -> bool:
    """Whether a key is there by then (monotonic seconds)."""
    pause_s = _SHORTEST_S
    while not store.check([key]):  # not `wait`: it would hold the store's lock, which torch's own threads need
        left_s = until - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(_LONGEST_S, 1.5 * pause_s)
    return True


def _group_name(group: Any) -> str:
    found: Any = dist.group.WORLD if group is None else group
    return str(found.group_name)


def _store_of(group: Any) -> dist.Store:
    """The store in which a group met. Raises UsageError for a torch that does not tell."""
    find = getattr(dist.distributed_c10d, "_get_process_group_store", None)  # private, but there is no public way
    if find is None:
        raise UsageError(f"torch {torch.__version__} does not tell the store of a group", next="give store=...")
    return find(dist.group.WORLD if group is None else group)
