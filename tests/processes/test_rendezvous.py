"""`ciuic://` with stock torch.distributed over gloo: real processes, a real hub, kill -9."""

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hub_process import HubProcess
from rendezvous_world import Process, Talk, first_of, join_node

import ciuic.torch
from ciuic.errors import ConflictError, UsageError

PATIENCE = timedelta(seconds=40)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with HubProcess(tmp_path_factory.mktemp("rendezvous") / "home") as running:
        yield running


@pytest.fixture
def as_operator(hub: HubProcess) -> dict[str, str]:
    return {"CIUIC_HOME": str(hub.home)}


def total(rank: int) -> float:
    """The sum of all ranks + 1, by gloo."""
    tensor = torch.full((4,), float(rank + 1))
    dist.all_reduce(tensor)
    assert len(set(tensor.tolist())) == 1
    return tensor[0].item()


def meet(url: str, **options: int) -> tuple[int, int]:
    dist.init_process_group("gloo", init_method=url, timeout=PATIENCE, **options)
    return dist.get_rank(), dist.get_world_size()


def test_one_of_three_is_killed_the_others_go_on_and_a_new_one_comes_in(as_operator: dict[str, str]) -> None:
    url = f"ciuic://global-sync?job=kill-{os.urandom(4).hex()}&nodes=3"

    def member(pipe: Connection) -> None:
        talk = Talk(pipe)
        talk.say((*meet(url), total(dist.get_rank())))
        while (order := talk.wait()) != "end":
            if order == "collective":
                with pytest.raises(RuntimeError):
                    total(dist.get_rank())
            if order == "await newcomer":
                while ciuic.torch.waiting() == 0:
                    time.sleep(0.01)
            world = ciuic.torch.reform()
            talk.say((world.rank, world.size, total(world.rank), world.generation, dist.get_backend()))
        dist.destroy_process_group()

    crew = [Process(member, as_operator) for _ in range(3)]
    met = {process.hear(): process for process in crew}
    assert sorted(met) == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]
    first, victim, last = (met[key] for key in sorted(met))

    victim.kill()
    for process in (first, last):
        process.tell("collective")
    assert [process.hear() for process in (first, last)] == [(0, 2, 3.0, 2, "gloo"), (1, 2, 3.0, 2, "gloo")]

    newcomer = Process(member, as_operator)
    for process in (first, last):
        process.tell("await newcomer")
    assert [process.hear()[:4] for process in (first, last)] == [(0, 3, 6.0, 3), (1, 3, 6.0, 3)]
    assert newcomer.hear() == (2, 3, 6.0)
    for process in (first, last, newcomer):
        process.tell("end")
        assert process.end() == 0


def test_ranks_as_arguments_of_the_environment_and_by_nodes_of_their_own(hub: HubProcess, tmp_path: Path) -> None:
    for location in ("us-west", "tokyo"):
        join_node(hub, tmp_path / "home", location)

    def by_argument(pipe: Connection) -> None:
        rank = int(os.environ["MY_RANK"])
        Talk(pipe).say((*meet("ciuric://global-sync", world_size=2, rank=rank), total(rank)))

    def by_environment(pipe: Connection) -> None:
        rank, size = meet("ciuic://global-sync?job=environment")
        Talk(pipe).say((rank, size, total(rank)))

    home = {"CIUIC_HOME": str(tmp_path / "home")}
    argued = [
        Process(by_argument, {**home, "CIUIC_NODE": node, "MY_RANK": str(rank)})
        for rank, node in ((1, "us-west"), (0, "tokyo"))
    ]
    surrounded = [
        Process(by_environment, {**home, "CIUIC_NODE": "tokyo", "RANK": str(rank), "WORLD_SIZE": "2"})
        for rank in (1, 0)
    ]
    assert [process.hear() for process in (*argued, *surrounded)] == [(1, 2, 3.0), (0, 2, 3.0)] * 2


def test_new_groups_and_objects_work_on_the_store_and_the_same_job_can_begin_again(
    as_operator: dict[str, str],
) -> None:
    def body(pipe: Connection) -> None:
        for _ in range(2):
            rank, _ = meet("ciuic://global-sync?job=again&world_size=2")
            dist.barrier()
            alone = dist.new_group([rank], use_local_synchronization=True)
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=alone)
            both = dist.new_group([0, 1])
            gathered: list[object] = [None, None]
            dist.all_gather_object(gathered, f"rank {rank}", group=both)
            Talk(pipe).say((tensor.item(), gathered))
            dist.destroy_process_group()

    crew = [Process(body, as_operator) for _ in range(2)]
    for _ in range(2):
        assert [process.hear() for process in crew] == [(1.0, ["rank 0", "rank 1"])] * 2
    assert [process.end() for process in crew] == [0, 0]


def test_who_waits_in_vain_is_told_how_many_have_come(as_operator: dict[str, str]) -> None:
    def body(pipe: Connection) -> None:
        with pytest.raises(dist.DistStoreError) as caught:
            dist.init_process_group(
                "gloo", init_method="ciuic://global-sync?job=vain&nodes=2", timeout=timedelta(seconds=0.5)
            )
        Talk(pipe).say(str(caught.value))

    assert "1 of 2 processes asked" in Process(body, as_operator).hear()


def test_an_unknown_size_and_no_group_are_clear_errors(as_operator: dict[str, str]) -> None:
    def body(pipe: Connection) -> None:
        talk = Talk(pipe)
        with pytest.raises(UsageError, match="not known how many"):
            dist.init_process_group("gloo", init_method="ciuic://global-sync?job=unknown")
        with pytest.raises(ConflictError, match="in no group"):
            ciuic.torch.reform()
        talk.say(meet("ciuic://global-sync?job=only-one&nodes=1"))
        with pytest.raises(ConflictError, match="in no such group"):
            ciuic.torch.reform("another/group")
        talk.say("done")

    process = Process(body, as_operator)
    assert [process.hear(), process.hear()] == [(0, 1), "done"]


def test_a_rank_twice_is_refused(as_operator: dict[str, str]) -> None:
    def body(pipe: Connection) -> None:
        talk = Talk(pipe)
        try:
            meet("ciuic://global-sync?job=taken&world_size=2&rank=0")
        except ConflictError as error:
            talk.say(error.message)
        talk.wait()

    crew = [Process(body, as_operator) for _ in range(2)]
    assert first_of(crew).hear() == "rank 0 of taken/global-sync is taken"
    for process in crew:
        process.kill()


def test_the_member_of_a_running_world_is_told_what_a_third_one_waits_for(as_operator: dict[str, str]) -> None:
    url = "ciuic://global-sync?job=running&nodes=1"

    def member(pipe: Connection) -> None:
        talk = Talk(pipe)
        talk.say(meet(url))
        talk.wait()

    def late(pipe: Connection) -> None:
        with pytest.raises(dist.DistStoreError) as caught:
            dist.init_process_group("gloo", init_method=url, timeout=timedelta(seconds=0.5))
        Talk(pipe).say(str(caught.value))

    running = Process(member, as_operator)
    assert running.hear() == (0, 1)
    assert "1 processes already train under this name" in Process(late, as_operator).hear()
    running.tell("end")
