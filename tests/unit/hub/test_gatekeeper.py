"""Certificates over the hub's own clock: when a renewal is asked for, and what is accepted meanwhile."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ciuic.errors import CertificateError, UsageError
from ciuic.hub.access.gatekeeper import RENEW_BEFORE_S, Gatekeeper
from ciuic.hub.keeping.database import Database
from ciuic.net.access_messages import OperatorRequest
from ciuic.net.tls import LEAF_LIFETIME, Authority, Identity, identity_from_der, new_key_and_csr, pem_to_der


class World:
    """A gatekeeper whose clock is moved by hand."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 1_800_000_000.0
        self.authority = Authority.create(folder / "authority", clock=lambda: self.now_s)
        self.database = Database(folder / "hub.db")
        self.story: list[str] = []
        self.cuts = 0
        self.keeper = self.open()

    def open(self) -> Gatekeeper:
        made = Gatekeeper(
            self.database,
            self.authority,
            say=lambda line: self.story.append(line.text),
            wall_s=lambda: self.now_s,
        )
        made.on_revoked = self._cut
        return made

    def _cut(self) -> None:
        self.cuts += 1

    def enrol(self, name: str) -> Identity:
        pem, _ = self.authority.issue_client(None, common_name=name, role="node")
        self.keeper.note(pem)
        return identity_from_der(pem_to_der(pem))

    def renew(self, identity: Identity) -> Identity:
        _, csr = new_key_and_csr()
        return identity_from_der(pem_to_der(self.keeper.renew(identity, csr.decode())))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.database.close()


def test_a_renewal_is_asked_for_in_the_last_month_until_there_is_one(world: World) -> None:
    node = world.enrol("a")
    life_s = LEAF_LIFETIME.total_seconds()
    assert not world.keeper.wants_renewal(node.serial)
    world.now_s += life_s - RENEW_BEFORE_S - 60
    assert not world.keeper.wants_renewal(node.serial)
    world.now_s += 120
    assert world.keeper.wants_renewal(node.serial)
    new = world.renew(node)
    assert not world.keeper.wants_renewal(node.serial), "it is on its way"
    world.keeper.meet(new)
    assert not world.keeper.wants_renewal(new.serial)


def test_a_renewal_that_was_asked_for_is_asked_for_only_once(world: World) -> None:
    node = world.enrol("a")
    assert world.keeper.want_renewals() == 1
    assert world.keeper.wants_renewal(node.serial)
    world.keeper.meet(world.renew(node))
    assert world.keeper.want_renewals() == 1
    assert not world.keeper.wants_renewal(node.serial), "it is a replaced one"


def test_states_survive_a_restart_of_the_hub(world: World) -> None:
    node, other, eve = world.enrol("a"), world.enrol("b"), world.enrol("eve")
    new = world.renew(node)
    pending = world.renew(other)
    world.keeper.meet(new)
    world.keeper.revoke("eve", "node", "alice")
    world.keeper = world.open()
    assert world.keeper.check(new) == "good"
    assert world.keeper.check(other) == "good"
    assert world.keeper.check(pending) == "new"
    for refused in (node, eve):
        with pytest.raises(CertificateError, match="does not accept"):
            world.keeper.check(refused)
    assert world.keeper.revoked_serials() == [eve.serial]


def test_revoking_refuses_a_renewed_one_that_was_not_used_yet_too(world: World) -> None:
    node = world.enrol("a")
    new = world.renew(node)
    assert set(world.keeper.revoke("a", "node", "alice").serials) == {node.serial, new.serial}
    assert world.cuts == 1
    for refused in (node, new):
        with pytest.raises(CertificateError, match="revoked by alice"):
            world.keeper.check(refused)


def test_a_renewal_that_meets_a_revocation_on_its_way_is_worth_nothing(world: World) -> None:
    node = world.enrol("a")
    world.keeper.revoke("a", "node", "alice")  # after the hub has let the request in, before it has issued
    with pytest.raises(CertificateError, match="it has was revoked"):
        world.renew(node)
    assert not world.keeper.book.of("a")


def test_certificates_from_before_there_were_records_are_accepted_and_soon_renewed(world: World) -> None:
    pem, _ = world.authority.issue_client(None, common_name="old", role="node")
    old = identity_from_der(pem_to_der(pem))
    assert world.keeper.check(old) == "unknown"
    world.keeper.note_known({"old": old.serial})
    assert world.keeper.check(old) == "good"
    assert world.keeper.wants_renewal(old.serial)
    world.keeper.note_known({"old": old.serial})
    assert len(world.keeper.certificates()) == 1


def test_what_ended_long_ago_is_forgotten(world: World) -> None:
    world.enrol("a")
    world.now_s += LEAF_LIFETIME.total_seconds() + 31 * 86400
    world.keeper.tick()
    assert world.keeper.certificates() == []


def test_two_operators_of_one_name_get_two_names(world: World) -> None:
    _, csr = new_key_and_csr()
    wanted = [OperatorRequest(name="Alice", role="viewer", csr_pem=csr.decode()) for _ in range(2)]
    assert [world.keeper.create_operator(one, "root")[0].name for one in wanted] == ["alice", "alice-2"]
    with pytest.raises(UsageError, match="not a name"):
        world.keeper.create_operator(OperatorRequest(name="..", role="viewer", csr_pem=csr.decode()), "root")
