"""How workers take their places in a run: the first uploads version 0, all wait for the least number of nodes."""

from typing import TYPE_CHECKING, Literal

import msgspec

from ciuic.errors import DataError, LayoutMismatchError, MovedError
from ciuic.hub.run.admission import check_memory
from ciuic.hub.run.fragment_rounds import FragmentRounds
from ciuic.hub.run.gathering import Gathering
from ciuic.ledger.files import write_durable
from ciuic.ledger.journal import Attached, Started
from ciuic.ledger.layout import check_same_layout, layout_from_dict
from ciuic.ledger.samples import SampleLedger
from ciuic.net import messages as m

if TYPE_CHECKING:
    from ciuic.hub.run.rounds import RunLedger


class Attaching:
    """Works on its ledger, whose lock the caller holds."""

    def __init__(self, ledger: "RunLedger") -> None:
        self._ledger = ledger
        self.gathering = Gathering()
        self._ground: tuple[str, str] | None = None
        """(frozen digest, data digest) of the first worker."""

    def attach(self, node: str, request: m.AttachRequest, now_s: float) -> m.AttachReply:
        """See RunLedger.attach."""
        ledger = self._ledger
        layout = layout_from_dict(request.layout)
        self._check_same_ground(node, request)
        if ledger.layout is None:
            places = ledger.sharding.first_places(layout)
            check_memory(layout, ledger.job.sync, places)
            write_durable(ledger.folder / "layout.json", msgspec.json.encode(layout))
            ledger.sharding.settle(places)
            ledger.set_layout(layout)
        else:
            check_same_layout(ledger.layout, layout)
        self.gathering.arrive(node, now_s)
        if not all(isinstance(f, FragmentRounds) or f.is_heard for f in ledger.fragments):
            return self._reply("wait")  # a shard has not said yet what it has
        if not self._has_base:
            first = self.gathering.should_initialize(node, now_s)
            return self._reply("initialize" if first else "wait")
        if not ledger.started and not self._start(request, now_s):
            return self._reply("wait")
        return self._take_place(node, request)

    @property
    def _has_base(self) -> bool:
        fragments = self._ledger.fragments
        return bool(fragments) and all(f.snapshot_version >= 0 for f in fragments)

    def _check_same_ground(self, node: str, request: m.AttachRequest) -> None:
        """The first worker's frozen parameters and data are the measure for the others."""
        if self._ground is None:
            self._ground = (request.frozen_digest, request.data_digest)
        elif request.frozen_digest != self._ground[0]:
            raise LayoutMismatchError(
                f"the parameters of {node} that are not trained differ from the first node's",
                cause=f"digest {request.frozen_digest[:12]} there, {self._ground[0][:12]} here",
                next="load the same pretrained model on every node",
            )

    def _start(self, request: m.AttachRequest, now_s: float) -> bool:
        ledger = self._ledger
        present = self.gathering.present(now_s)
        if len(present) < ledger.job.nodes.min:
            return False
        train = ledger.job.train
        total = train.samples or int((train.epochs or 1.0) * request.dataset_samples)
        if total < 1:
            raise DataError(
                "the run has no samples",
                cause=f"the data set has {request.dataset_samples} samples",
                next="set [train] samples, or give more data",
            )
        ledger.journal.append(Started(total_samples=total))
        ledger.started, ledger.samples = True, SampleLedger(total)
        ledger.tell(
            "run.training",
            f"{len(present)} node{'s start' if len(present) > 1 else ' starts'}: {total:,} samples",
            data={"nodes": present},
        )
        return True

    def _take_place(self, node: str, request: m.AttachRequest) -> m.AttachReply:
        ledger = self._ledger
        self._tell_other_data(node, request)
        member = ledger.member(node)
        incarnation = member.incarnation + 1
        returned = tuple(ledger.samples.give_back(node))
        ledger.journal.append(Attached(node=node, incarnation=incarnation, returned=returned, totals=member.summed()))
        again = member.incarnation > 0
        member.attach(incarnation)
        ledger.heard(member)
        ledger.epoch += 1
        back = sum(b - a for a, b in returned)
        text = f"{node} is back (incarnation {incarnation})" if again else f"{node} trains"
        facts = {"torch": request.torch_version[:64], "device": request.device[:64]}
        ledger.tell(
            "worker.attached", text + (f"; {back} leased samples went back" if back else ""), node=node, data=facts
        )
        ledger.wake()
        return self._reply("ready", incarnation, node)

    def _tell_other_data(self, node: str, request: m.AttachRequest) -> None:
        first = self._ground[1] if self._ground else ""
        if first and request.data_digest and request.data_digest != first:
            self._ledger.tell(
                "data.differs",
                f"{node} reads other training data than the first node; sample numbers mean other texts there",
                node=node,
                data={"here": request.data_digest[:64], "first": first[:64]},
            )

    def _reply(
        self, state: Literal["initialize", "wait", "ready"], incarnation: int = 0, node: str = ""
    ) -> m.AttachReply:
        ledger = self._ledger
        return m.AttachReply(
            incarnation=incarnation,
            epoch=ledger.epoch,
            boot_id="",
            state=state,
            fragments=self.states(),
            total_samples=ledger.samples.total,
            samples_committed=len(ledger.samples.committed),
            pace=ledger.pace(node),
        )

    def states(self) -> list[m.FragmentState]:
        """What a joiner must know of the fragments' bases. Raises MovedError while one's place is not known."""
        ledger = self._ledger
        return [
            m.FragmentState(
                version=f.version,
                digest=f.digest,
                snapshot_version=f.snapshot_version,
                snapshot_bytes=f.snapshot_bytes,
                url=ledger.sharding.url_of(f.number),
            )
            for f in ledger.fragments
        ]

    def put_snapshot(self, node: str, fragment: int, frame: bytes) -> None:
        """See RunLedger.put_snapshot."""
        ledger = self._ledger
        place = ledger.fragment(fragment)
        if not isinstance(place, FragmentRounds):
            raise MovedError(f"fragment {fragment} is served by shard {place.shard}", next="ask the hub where")
        if place.put_version_0(node, frame, self.gathering.uploaders()):
            ledger.tell("base.uploaded", f"{node} uploaded version 0 of fragment {fragment}", node=node)
            ledger.wake()
