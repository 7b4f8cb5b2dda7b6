"""The part of a run's ledger that knows shards: who serves which fragment, what they report, and moves between them.

Fragment 0 always stays at the hub: it carries the samples, and one place decides about samples. A move of a fragment:

    freeze    its owner takes no pushes and closes no rounds; it reports version and digest
    fetch     the other shard copies the files, replays them (which checks every digest) and reports the same
    placed    the hub writes `Placed`, durable: from then on the new owner serves, the old one drops its files

Before that record the old owner is the one owner, after it the new one; a move that stops half way is forgotten.
"""

import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from ciuic.errors import ConflictError, MovedError, StorageError, UsageError
from ciuic.hub.run.fragment_rounds import FragmentRounds
from ciuic.hub.shards.elsewhere import Elsewhere
from ciuic.hub.shards.placement import Rates, loads, place, rebalance
from ciuic.ledger.entry import EntryHeader
from ciuic.ledger.journal import Placed
from ciuic.ledger.layout import Layout
from ciuic.net import shard_messages as s

if TYPE_CHECKING:
    from ciuic.hub.run.rounds import RunLedger

HUB = ""
"""The hub's name among the places of fragments."""


class Directory(Protocol):
    """The shards of the network."""

    def present(self) -> list[str]:
        """Names of those that spoke lately."""
        ...

    def url(self, shard: str) -> str:
        """Where nodes reach it; empty when it never said."""
        ...


@dataclass(kw_only=True)
class Move:
    """A fragment on its way."""

    to: str
    attempt: str
    frozen: tuple[int, str] | None = None
    """(version, digest) at its owner, which closes no more rounds."""
    fetched: s.FragmentReport | None = None


class Sharding:
    """Works on its ledger, whose lock the caller holds."""

    def __init__(self, ledger: "RunLedger") -> None:
        self._ledger = ledger
        self.directory: Directory | None = None
        self.owners: dict[int, tuple[str, int]] = {}
        """(shard, generation) of the fragments that are not at the hub."""
        self.moves: dict[int, Move] = {}

    # ---- the beginning

    def first_places(self, layout: Layout) -> dict[int, str]:
        """Which shards should serve a new run's fragments, by their size; {} without shards."""
        names = self.directory.present() if self.directory else []
        if not names or layout.fragment_count < 2:
            return {}
        sizes = {f: float(layout.fragment_shape(f).element_count) for f in range(layout.fragment_count)}
        owners = place(sizes, {0: HUB}, names)
        return {fragment: name for fragment, name in owners.items() if name != HUB}

    def settle(self, places: Mapping[int, str]) -> None:
        """Make first places durable. Raises StorageError."""
        for fragment, name in sorted(places.items()):
            record = Placed(fragment=fragment, shard=name, generation=1)
            self._ledger.journal.append(record)
            self.restore(record)

    def restore(self, record: Placed) -> None:
        """Repeat from the journal."""
        self.owners[record.fragment] = (record.shard, record.generation)

    def make(self, number: int) -> Elsewhere | None:
        """The mirror of a fragment that a shard serves; None when it is the hub's."""
        if number not in self.owners:
            return None
        name, generation = self.owners[number]
        return Elsewhere(number=number, shard=name, generation=generation)

    # ---- what nodes and shards ask

    def url_of(self, number: int) -> str:
        """Where nodes reach a fragment; empty: at the hub. Raises MovedError while its shard has not said."""
        if number not in self.owners:
            return ""
        name, _ = self.owners[number]
        url = self.directory.url(name) if self.directory else ""
        if not url:
            raise MovedError(f"fragment {number} is at shard {name}, which has not said where it is", next="try again")
        return url

    def part_for(self, shard: str) -> s.RunPart | None:
        """The run as this shard must see it; None when no fragment of it is, or goes, to a shard."""
        ledger = self._ledger
        if ledger.layout is None or not (self.owners or self.moves):
            return None
        directory = self.directory
        places = []
        for number in range(ledger.layout.fragment_count):
            name, generation = self.owners.get(number, (HUB, 0))
            move = self.moves.get(number)
            url = directory.url(name) if directory and name != HUB else ""
            one = s.FragmentPlace(fragment=number, shard=name, generation=generation, url=url)
            if move is not None:
                is_frozen = name == HUB or move.frozen is not None
                one = replace(one, move_to=move.to, attempt=move.attempt, is_frozen=is_frozen)
            places.append(one)
        return s.RunPart(run_id=ledger.run_id, view=ledger.view(sealed=ledger.sealed), places=places)

    # ---- reports

    def report(self, shard: str, report: s.FragmentReport) -> int:
        """Take what a shard says of a fragment; returns the version up to which its entries are known, -1: not its."""
        owner, generation = self.owners.get(report.fragment, (HUB, 0))
        move = self.moves.get(report.fragment)
        if (shard, report.generation) == (owner, generation):
            mirror = self._mirror(report.fragment)
            self._follow(mirror, report)
            if move and (report.state, report.attempt) == ("frozen", move.attempt) and mirror.version == report.version:
                if move.frozen is None:
                    move.frozen = (report.version, report.digest)
                    self._ledger.wake()
                self._finish(report.fragment, move)
            return self._mirror(report.fragment).version
        if move and (shard, report.attempt, report.generation) == (move.to, move.attempt, generation + 1):
            move.fetched = report
            self._finish(report.fragment, move)
        return -1

    def _mirror(self, number: int) -> Elsewhere:
        fragment = self._ledger.fragments[number]
        if not isinstance(fragment, Elsewhere):
            raise ConflictError(f"fragment {number} is at the hub")
        return fragment

    def _follow(self, mirror: Elsewhere, report: s.FragmentReport) -> None:
        ledger = self._ledger
        if not mirror.is_heard:
            mirror.silent_until = report.version
        before = (mirror.version, mirror.is_quiet, mirror.is_heard, mirror.snapshot_version)
        for header, entry_bytes in report.headers:
            if header.fragment == mirror.number and header.version == mirror.version + 1:
                self._entry(mirror, header, entry_bytes)
        mirror.hear(report)
        for line in report.lines:
            ledger.tell(line.kind, line.text, node=line.node_id)
        for node in report.spoke:
            ledger.spoke(node)
        if before != (mirror.version, mirror.is_quiet, mirror.is_heard, mirror.snapshot_version):
            ledger.wake()

    def _entry(self, mirror: Elsewhere, header: EntryHeader, entry_bytes: int) -> None:
        ledger = self._ledger
        mirror.version, mirror.digest = header.version, header.digest
        for contributor in header.contributors:
            ledger.member(contributor.node).pushes_accepted += 1
            ledger.closing.count_merged(contributor, mirror.number)
        for rejection in header.rejected:
            member = ledger.member(rejection.node)
            member.pushes_accepted += 1
            member.pushes_rejected += 1
        ledger.closing.tell_round(
            ledger.history.closed(header, entry_bytes), silent=header.version <= mirror.silent_until
        )

    # ---- moves

    def start(self, number: int, to: str) -> None:
        """Begin to move a fragment. Raises UsageError, ConflictError."""
        ledger = self._ledger
        owner, _ = self.owners.get(number, (HUB, 0))
        if number == 0 or not 0 < number < len(ledger.fragments):
            raise UsageError(
                f"fragment {number} cannot be moved", cause="fragment 0 carries the samples: it stays at the hub"
            )
        if number in self.moves or to == owner:
            raise ConflictError(f"fragment {number} is at {to}, or on its way", next="look again in a moment")
        if not ledger.started:
            raise ConflictError("the run has not started yet", next="try again when its nodes train")
        self.moves[number] = Move(to=to, attempt=secrets.token_hex(6))
        fragment = ledger.fragments[number]
        if isinstance(fragment, FragmentRounds):
            fragment.is_frozen = True
        ledger.wake()

    def cancel(self, number: int, why: str) -> None:
        """A move does not happen; the fragment goes on where it is."""
        move = self.moves.pop(number)
        fragment = self._ledger.fragments[number]
        if isinstance(fragment, FragmentRounds):
            fragment.is_frozen = False
        self._ledger.tell("fragment.stayed", f"fragment {number} was not moved to {move.to}: {why}")
        self._ledger.wake()

    def tick(self) -> None:
        """Give up moves whose shards are gone."""
        present = set(self.directory.present() if self.directory else ()) | {HUB}
        for number, move in list(self.moves.items()):
            owner, _ = self.owners.get(number, (HUB, 0))
            for name in (owner, move.to):
                if name not in present and number in self.moves:
                    self.cancel(number, f"shard {name} does not answer")

    def _finish(self, number: int, move: Move) -> None:
        """Both sides are ready: write down the new owner."""
        ledger, fragment = self._ledger, self._ledger.fragments[number]
        report = move.fetched
        at_owner = (fragment.version, fragment.digest) if isinstance(fragment, FragmentRounds) else move.frozen
        if report is None or at_owner is None:
            return
        if (report.version, report.digest) != at_owner:
            self.cancel(number, f"the copy has version {report.version}, the fragment {at_owner[0]}")
            return
        owner, generation = self.owners.get(number, (HUB, 0))
        record = Placed(fragment=number, shard=move.to, generation=generation + 1)
        try:
            ledger.journal.append(record)
        except StorageError as error:
            self.cancel(number, str(error))
            return
        self.restore(record)
        del self.moves[number]
        mirror = Elsewhere(number=number, shard=move.to, generation=record.generation, version=report.version)
        mirror.digest = report.digest
        mirror.hear(report)
        ledger.fragments[number] = mirror
        if isinstance(fragment, FragmentRounds):
            fragment.close()
            drop_folder(fragment.folder)
        ledger.tell("fragment.moved", f"fragment {number} moved from {owner or 'the hub'} to {move.to}")
        ledger.wake()

    def folder_for(self, number: int, shard: str) -> Path:
        """The hub's files of a fragment that is going to this shard. Raises ConflictError."""
        fragment, move = self._ledger.fragments[number], self.moves.get(number)
        if not isinstance(fragment, FragmentRounds) or move is None or move.to != shard:
            raise ConflictError(f"fragment {number} is not on its way from here to {shard}")
        return fragment.folder

    # ---- load

    def info(self, *, start: bool) -> s.ShardsInfo:
        """Measured load of each place, and as it would be after the best moves; `start` begins them."""
        ledger, now_s = self._ledger, time.time()
        numbers = range(len(ledger.fragments))
        owners = {f: self.owners.get(f, (HUB, 0))[0] for f in numbers}
        present = sorted(self.directory.present() if self.directory else ())
        rates = {f: ledger.history.traffic.rates(f, now_s) for f in numbers}
        readers = len(ledger.present())
        weights = {f: rate.weight(readers) for f, rate in rates.items()}
        absent = set(owners.values()) - {HUB, *present}
        fixed = {0, *self.moves} | {f for f, name in owners.items() if name in absent}
        moves = rebalance(weights, owners, present, fixed) if present else {}
        if start:
            for fragment, to in moves.items():
                self.start(fragment, to)
        names = [HUB, *sorted({*present, *absent})]
        after = owners | moves | {f: move.to for f, move in self.moves.items()}
        return s.ShardsInfo(
            run_id=ledger.run_id,
            places=[self._load(name, owners, rates, readers, present) for name in names],
            planned=[self._load(name, after, rates, readers, present) for name in names],
            moves=sorted(moves.items()),
            fragments=[
                replace(self._fragment_load(f, owners[f], rates[f], readers), planned_shard=after[f]) for f in numbers
            ],
        )

    def _load(
        self, name: str, owners: Mapping[int, str], rates: Mapping[int, Rates], readers: int, present: list[str]
    ) -> s.ShardLoad:
        mine = [f for f, owner in owners.items() if owner == name]
        moved = {f: rates[f].push_bytes_per_s + readers * rates[f].entry_bytes_per_s for f in mine}
        return s.ShardLoad(
            name=name,
            url=self.directory.url(name) if self.directory and name != HUB else "",
            is_present=name in (HUB, *present),
            fragments=mine,
            pushes_per_s=sum(rates[f].pushes_per_s for f in mine),
            bytes_per_s=loads(moved, dict.fromkeys(mine, name), [name])[name],
        )

    def _fragment_load(self, number: int, owner: str, rate: Rates, readers: int) -> s.FragmentLoad:
        layout, access, move = self._ledger.layout, self._ledger.access, self.moves.get(number)
        return s.FragmentLoad(
            fragment=number,
            shard=owner,
            elements=layout.fragment_shape(number).element_count if layout else 0,
            pushes_per_s=rate.pushes_per_s,
            push_bytes_per_s=rate.push_bytes_per_s,
            entry_bytes_per_s=readers * rate.entry_bytes_per_s,
            touched=self._ledger.fragments[number].touched,
            moving_to=move.to if move else "",
            experts=access.describe(number) if access else "",
            access_share=access.share(number) if access else None,
            stretch=access.stretch_of(number) if access else 1,
        )


def drop_folder(folder: Path) -> None:
    """Files that another place has now; what cannot be removed is no harm."""
    shutil.rmtree(folder, ignore_errors=True)
