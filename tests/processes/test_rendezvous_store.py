"""The hub's store as torch sees it: over real TLS, from threads, through PrefixStore, across a restart of the hub."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from hub_process import HubProcess

import ciuic
from ciuic.errors import CertificateError, ConflictError, RoleError
from ciuic.net.credentials import find_credentials
from ciuic.net.messages import Ok
from ciuic.net.store_messages import GroupAsk, GroupLeave, GroupPlace
from ciuic.train.hub_store import HubStore, Membership

SOURCES = Path(ciuic.__file__).parents[1]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with HubProcess(tmp_path_factory.mktemp("store") / "home") as running:
        yield running


class Pair:
    """Two members of one group in this process."""

    def __init__(self, hub: HubProcess, name: str) -> None:
        credentials = find_credentials(hub.home)
        self.members = [Membership(credentials, name) for _ in range(2)]
        self.stores: list[HubStore] = []
        wish = GroupAsk(member="", min_size=2, max_size=2)
        entering = threading.Thread(target=self._enter, args=(0, wish))
        entering.start()
        self._enter(1, wish)
        entering.join()
        self.stores.sort(key=lambda store: store.place.rank)

    def _enter(self, number: int, wish: GroupAsk) -> None:
        self.stores.append(self.members[number].enter(wish, within_s=30))

    def __enter__(self) -> list[HubStore]:
        return self.stores

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.leave()


def later(delay_s: float, work: object, *arguments: object) -> threading.Timer:
    timer = threading.Timer(delay_s, work, arguments)  # type: ignore[arg-type]
    timer.start()
    return timer


def test_torchs_own_operations_work_directly_and_behind_a_prefix(hub: HubProcess) -> None:
    with Pair(hub, "ops/global-sync") as (one, two):
        for mine, theirs in ((one, two), (dist.PrefixStore("p", one), dist.PrefixStore("p", two))):
            mine.set("key", "value")
            assert theirs.get("key") == b"value"
            assert (mine.add("n", 2), theirs.add("n", 3)) == (2, 5)
            assert theirs.check(["key", "n"])
            assert not theirs.check(["key", "absent"])
            assert mine.compare_set("c", "", "first") == b"first"
            assert theirs.compare_set("c", "other", "second") == b"first"
            mine.append("a", "x")
            theirs.append("a", "y")
            mine.multi_set(["m1", "m2"], ["1", "2"])
            assert theirs.multi_get(["m2", "m1", "a"]) == [b"2", b"1", b"xy"]
            assert mine.delete_key("a")
            assert not mine.delete_key("a")
            assert mine.has_extended_api()
            assert mine.clone().get("key") == b"value"
            theirs.wait(["key", "m1"], timedelta(seconds=5))
        assert one.num_keys() == two.num_keys() == 10


def test_a_wait_ends_when_the_key_comes_and_bytes_of_any_kind_come_back(hub: HubProcess) -> None:
    payload = bytes(range(256)) * 100
    with Pair(hub, "wait/global-sync") as (one, two):
        timer = later(0.2, one.set, "late", payload)
        began = time.monotonic()
        assert two.get("late") == payload
        assert 0.1 < time.monotonic() - began < 5
        timer.join()


def test_a_wait_in_vain_raises_torchs_error_with_the_key_after_the_time_out(hub: HubProcess) -> None:
    with Pair(hub, "vain/global-sync") as (one, _):
        began = time.monotonic()
        with pytest.raises(dist.DistStoreError, match=r"wait timeout after 300ms, keys: p/never"):
            dist.PrefixStore("p", one).wait(["never"], timedelta(milliseconds=300))
        one.set_timeout(timedelta(milliseconds=200))
        with pytest.raises(dist.DistStoreError, match=r"after 200ms, keys: never"):
            one.get("never")
        assert 0.5 <= time.monotonic() - began < 5


def test_many_threads_may_use_one_store_while_one_waits(hub: HubProcess) -> None:
    with Pair(hub, "threads/global-sync") as (one, two):
        got: list[bytes] = []
        waiter = threading.Thread(target=lambda: got.append(two.get("end")), daemon=True)
        waiter.start()
        threads = [
            threading.Thread(target=lambda s=store: [s.add("n", 1) for _ in range(25)])
            for store in (one, two)
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert one.add("n", 0) == 200
        one.set("end", b"1")
        waiter.join(10)
        assert got == [b"1"]


def test_too_large_a_value_is_a_clear_error_and_the_store_goes_on(hub: HubProcess) -> None:
    with Pair(hub, "large/global-sync") as (one, two):
        with pytest.raises(dist.DistStoreError, match="too large for the store"):
            one.set("big", b"x" * (512 * 1024 + 1))
        one.set("big", b"x" * 512 * 1024)
        assert len(two.get("big")) == 512 * 1024


def test_a_left_out_member_cannot_reach_the_new_store(hub: HubProcess) -> None:
    pair = Pair(hub, "left/global-sync")
    with pair as (one, two):
        survivor = next(member for member in pair.members if member.place == one.place)
        assert survivor.enter(GroupAsk(member="", grace_s=0.2), within_s=30).place.size == 1
        with pytest.raises(dist.DistStoreError, match="formed again"):
            two.get("key")


def test_without_a_certificate_or_as_a_viewer_there_is_no_store(hub: HubProcess) -> None:
    ask, path = GroupAsk(member="0" * 32), "/v1/rendezvous/job/group/ask"
    with pytest.raises(CertificateError, match="does not know you"):
        hub.nobody().call("POST", path, ask, Ok)
    with pytest.raises(RoleError, match="may not do this"):
        hub.join("watcher", role="viewer").client.call("POST", path, ask, Ok)


def test_another_node_cannot_end_a_membership(hub: HubProcess) -> None:
    with Pair(hub, "theft/global-sync") as (one, _):
        other = hub.join("mallory").client
        leave = GroupLeave(member=one._membership.member, closes=True)
        with pytest.raises(ciuic.AccessError, match="is not one of mallory"):
            other.call("POST", "/v1/rendezvous/theft/global-sync/leave", leave, Ok)


def test_the_group_outlives_a_kill_of_the_hub(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "home") as hub, Pair(hub, "restart/global-sync") as (one, two):
        got: list[bytes] = []
        waiter = threading.Thread(target=lambda: got.append(two.get("after")), daemon=True)
        waiter.start()
        hub.kill()
        hub.start()
        one.set("after", b"1")
        waiter.join(30)
        assert got == [b"1"]
        newcomer = Membership(find_credentials(hub.home), "restart/global-sync")
        with pytest.raises(dist.DistStoreError, match="already train"):
            newcomer.enter(GroupAsk(member=""), within_s=1.0)
        newcomer.leave()


def test_a_hub_that_stays_away_is_a_network_error(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "home") as hub, Pair(hub, "away/global-sync") as (one, _):
        hub.kill()
        one.set_timeout(timedelta(seconds=0.5))
        with pytest.raises(dist.DistNetworkError, match="hub at"):
            one.set("key", b"1")


def test_a_world_of_another_size_is_refused_over_the_wire(hub: HubProcess) -> None:
    client, path = hub.operator(), "/v1/rendezvous/size/global-sync/ask"
    first = GroupAsk(member="1" * 32, min_size=3, max_size=3)
    assert client.call("POST", path, first, GroupPlace).status == "waiting"
    with pytest.raises(ConflictError, match="do not agree"):
        client.call("POST", path, GroupAsk(member="2" * 32, min_size=4, max_size=4), GroupPlace)


def test_a_process_that_ends_in_peace_is_not_waited_for(hub: HubProcess) -> None:
    program = (
        "import torch.distributed as dist, ciuic.torch\n"
        "dist.init_process_group('gloo', init_method='ciuic://global-sync?job=peace&nodes=1')\n"
        "print(dist.get_rank(), dist.get_world_size())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "CIUIC_HOME": str(hub.home), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error:::ciuic", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "0 1"), done.stderr
    again = Membership(find_credentials(hub.home), "peace/global-sync")
    assert again.enter(GroupAsk(member=""), within_s=0.5).place.generation == 2
    again.leave()
