"""The one-process world with shards: views come late, reports get lost, shards and hub are killed, fragments move."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from ledger_world import RUN, TOLERANCE, Message, World

from ciuic.codec import FragmentCodec
from ciuic.errors import ConflictError, MovedError, UnreachableError, UsageError
from ciuic.hub.run.fragment_rounds import FragmentRounds
from ciuic.hub.run.rounds import RunLedger
from ciuic.hub.shards.host import ShardHost, Ties, files_to_move
from ciuic.ledger.entry import push_from_frame
from ciuic.net import shard_messages as s

NAMES = ("s1", "s2")


class Everywhere:
    """The ledger as nodes see it: each fragment where its present owner is."""

    def __init__(self, world: "ShardWorld", ledger: RunLedger) -> None:
        self.world, self.ledger = world, ledger

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ledger, name)

    def host(self, fragment: int) -> ShardHost | None:
        """Who serves it, by the hub's word; None: the hub."""
        owner = self.ledger.sharding.owners.get(fragment)
        if owner is None:
            return None
        host = self.world.hosts[owner[0]]
        if host is None:
            raise UnreachableError(f"shard {owner[0]} is dead")
        return host

    def push(self, node: str, frame: bytes) -> Any:
        host = self.host(push_from_frame(frame).header.fragment)
        return self.ledger.push(node, frame) if host is None else host.push(node, RUN, frame)

    def put_snapshot(self, node: str, fragment: int, frame: bytes) -> None:
        host = self.host(fragment)
        if host is None:
            self.ledger.put_snapshot(node, fragment, frame)
            return
        self.world.see(host.name)
        host.put_snapshot(node, RUN, fragment, frame)
        self.world.tell(host.name, is_lost=False)

    def snapshot_path(self, fragment: int, version: int) -> Path:
        host = self.host(fragment)
        if host is None:
            return self.ledger.snapshot_path(fragment, version)
        return host.snapshot_path(RUN, fragment, version)

    def entries_after(self, fragment: int, version: int, max_bytes: int) -> list[bytes]:
        host = self.host(fragment)
        if host is None:
            return self.ledger.entries_after(fragment, version, max_bytes)
        return host.entries_after(RUN, fragment, version, max_bytes)

    @property
    def fragments(self) -> list[FragmentRounds]:
        """All of them; every shard must be alive and know its fragments."""
        found = self.world.served()
        return [found[f] for f in range(self.world.layout.fragment_count)]

    def close(self) -> None:
        self.ledger.close()
        for host in self.world.hosts.values():
            if host is not None:
                host.close()


class ShardWorld(World):
    """See the module. A shard acts on the view it saw last; `see` and `tell` are events like others."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.hosts: dict[str, ShardHost | None] = dict.fromkeys(NAMES)
        self.root, self.views = folder, 0
        self.is_prompt = False
        self.wanted = options.pop("shards", NAMES)
        for name in self.wanted:
            self.hosts[name] = self._host(name)
        super().__init__(folder, **options)

    def _host(self, name: str) -> ShardHost:
        ties = Ties(clock=lambda: self.now, run_of=lambda run: self.hub.shard_run(), fetch=self._fetch, wake=_nothing)
        return ShardHost(name, self.root / name, ties)

    def _open(self) -> Any:
        ledger = super()._open()
        ledger.sharding.directory = self
        return Everywhere(self, ledger)

    # ---- the directory that the hub looks at

    def present(self) -> list[str]:
        return [name for name, host in self.hosts.items() if host is not None]

    def url(self, shard: str) -> str:
        return f"https://{shard}:1"

    # ---- events

    def see(self, name: str) -> None:
        """The hub's present view reaches a shard."""
        self.apply(name, self.hub.part_for(name))

    def apply(self, name: str, part: s.RunPart | None) -> None:
        """A view reaches a shard."""
        host = self.hosts[name]
        if host is not None:
            self.views += 1
            host.apply(s.ShardView(number=str(self.views), runs=[part] if part else []))

    def tell(self, name: str, *, is_lost: bool) -> None:
        """A shard reports; the report, or the hub's answer, may be lost."""
        host = self.hosts[name]
        if host is None:
            return
        report = host.report()
        known = [
            s.KnownVersion(run_id=RUN, fragment=one.fragment, version=self.hub.shard_report(name, one))
            for one in report.fragments
        ]
        if is_lost:
            host.not_told(report)
        else:
            host.told(s.ShardReply(known=known))

    def kill_shard(self, name: str) -> None:
        """kill -9: only its files remain."""
        host = self.hosts[name]
        if host is not None:
            host.close()
            self.hosts[name] = None

    def start_shard(self, name: str) -> None:
        if self.hosts[name] is None:
            self.hosts[name] = self._host(name)

    def move(self, fragment: int, name: str) -> None:
        """An operator moves a fragment, when that is possible now."""
        try:
            self.hub.ledger.sharding.start(fragment, name)
        except (ConflictError, UsageError):
            return

    def _fetch(self, part: s.RunPart, place: s.FragmentPlace, folder: Path) -> None:
        to = place.move_to
        if place.shard:
            source = self.hosts[place.shard]
            if source is None:
                raise UnreachableError(f"{place.shard} is dead")
            found = source.moving_folder(RUN, place.fragment, to)
        else:
            found = self.hub.ledger.moving_folder(place.fragment, to)
        for file in files_to_move(found).files:
            (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(found / file.name, folder / file.name)

    def agree(self) -> None:
        """Everybody is alive and has heard everybody."""
        for name in self.wanted:
            self.start_shard(name)
        for _ in range(4):
            for name in NAMES:
                self.see(name)
                self.tell(name, is_lost=False)

    def start(self, name: str) -> None:
        self.hub.attach(name, self._request())  # the hub may have to place the fragments first
        self.agree()
        super().start(name)

    def _request(self) -> Any:
        import msgspec

        from ciuic.net import messages as m

        return m.AttachRequest(layout=msgspec.to_builtins(self.layout), dataset_samples=0)

    def deliver(self, index: int, *, keep: bool, lose_reply: bool) -> None:
        if not self.network:
            return
        message = self.network[index % len(self.network)]
        if message.worker.dead and self._is_unheard(message):
            self.network.remove(message)
            self.hub.push(message.worker.name, message.frame)  # as if it had come before the new process
            return
        try:
            super().deliver(index, keep=keep, lose_reply=lose_reply)
        except (MovedError, UnreachableError):
            if message not in self.network and not message.worker.dead:
                self.network.append(message)  # the node tries again
        if self.is_prompt:
            self.agree()

    def _is_unheard(self, message: Message) -> bool:
        """The owner of its fragment does not know yet that the process that sent it was replaced."""
        owner, _ = self.hub.ledger.sharding.owners.get(message.fragment, ("", 0))
        host = self.hosts.get(owner)
        part, piece = (host._parts.get(RUN), host._pieces.get((RUN, message.fragment))) if host else (None, None)
        if part is None or piece is None or piece.rounds.is_frozen:
            return False
        return part.view.members.get(message.worker.name) == message.worker.machine.place.incarnation

    def pull(self, name: str, fragment: int, limit: int) -> None:
        try:
            super().pull(name, fragment, limit)
        except (MovedError, UnreachableError):
            return

    def tick(self, seconds: float) -> None:
        super().tick(seconds)
        for host in self.hosts.values():
            if host is not None:
                host.close_due()
        if self.is_prompt:
            self.agree()

    def crash_hub(self) -> None:
        committed = list(self.hub.samples.committed)
        self.hub.ledger.close()
        self.hub = self._open()
        assert list(self.hub.samples.committed) == committed

    def drain(self) -> None:
        self.is_prompt = True
        self.agree()
        super().drain()

    # ---- what must hold

    def served(self) -> dict[int, FragmentRounds]:
        """Fragments and who would act on them now, by everybody's own belief. At most one each."""
        found = {f.number: f for f in self.hub.ledger.local_fragments()}
        takers = [f.number for f in found.values() if not f.is_frozen]
        for host in self.hosts.values():
            for (_, number), piece in host._pieces.items() if host is not None else ():
                if not piece.rounds.is_frozen:
                    takers.append(number)
                owner = self.hub.ledger.sharding.owners.get(number, ("", 0))
                if owner == (host.name, piece.generation):
                    found[number] = piece.rounds
        assert len(takers) == len(set(takers)), "a fragment has two owners"
        return found

    def _check_hub(self) -> None:
        assert self.hub.info(full=False)["samples"].lost == 0, "samples are nowhere"
        for f, fragment in self.served().items():
            if fragment.snapshot_version < 0:
                continue
            aggregator, store = fragment.aggregator, fragment.store
            shape = self.layout.fragment_shape(f)
            keys: list[tuple[str, int, int]] = []
            applied = np.zeros(shape.element_count)
            for version in range(1, store.version + 1):
                entry = store.entry(version)
                applied += FragmentCodec(entry.header.codec, shape).decode(entry.payload)
                keys += [(c.node, c.incarnation, c.sequence) for c in entry.header.contributors]
                assert self.digests.setdefault((f, version), entry.header.digest) == entry.header.digest
            assert max((v for g, v in self.digests if g == f), default=0) <= store.version, "entries are lost"
            assert len(keys) == len(set(keys)), "a push merged twice"
            assert np.abs(self.base_0[f] - applied - aggregator.base).max() < TOLERANCE


def _nothing(run_id: str) -> None:
    """Nobody waits in this world."""
