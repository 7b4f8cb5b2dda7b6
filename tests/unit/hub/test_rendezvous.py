"""Groups at the hub: how generations are formed, who is alive, what is refused. No sockets, a hand-moved clock."""

import itertools

import msgspec
import pytest
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ciuic.errors import AccessError, ConflictError, NotFoundError, ProtocolError, SupersededError
from ciuic.hub.meeting.rendezvous import LOST_S, PATIENCE_S, Limits, Rendezvous
from ciuic.net.store_messages import GroupAsk, GroupHold, GroupLeave, GroupPlace, StoreCall, StoreReply

NAME = "job/global-sync"


def member_name(number: int) -> str:
    return f"{number:032x}"


class World:
    """A rendezvous, its clock, and processes that speak to it."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.now_s = 100.0
        self.limits = limits
        self.requests = itertools.count(1)
        self.tags = itertools.count(1)
        self.places: dict[int, GroupPlace] = {}
        self.restart()

    def restart(self) -> None:
        """The hub is started anew and has forgotten everything."""
        self.rendezvous = Rendezvous(self.limits, new_tag=lambda: f"t{next(self.tags)}")

    def ask(
        self, number: int, *, size: int = 3, name: str = NAME, caller: str = "", **fields: int | float
    ) -> GroupPlace:
        sizes = {"min_size": size, "max_size": size} | fields
        ask = msgspec.convert({"member": member_name(number), **sizes}, GroupAsk)
        return self._asked(number, name, caller, ask)

    def reform(self, number: int, **fields: int | float) -> GroupPlace:
        place = self.places[number]
        stated = {"after": place.tag, "rank": place.rank, "expected": place.size, **fields}
        return self._asked(number, NAME, "", msgspec.convert({"member": member_name(number), **stated}, GroupAsk))

    def _asked(self, number: int, name: str, caller: str, ask: GroupAsk) -> GroupPlace:
        place = self.rendezvous.ask(self.now_s, name, caller or f"node-{number}", ask)
        if place.status == "formed":
            self.places[number] = place
        return place

    def form(self, count: int) -> None:
        for number in range(count):
            self.ask(number, size=count)
        for number in range(count):
            assert self.ask(number, size=count).status == "formed"

    def hold(self, number: int) -> bool:
        place = self.places[number]
        hold = GroupHold(member=member_name(number), tag=place.tag, rank=place.rank, size=place.size)
        self.news = self.rendezvous.hold(self.now_s, NAME, f"node-{number}", hold)
        return self.news.is_current

    def leave(self, number: int, *, closes: bool = False) -> None:
        self.rendezvous.leave(self.now_s, NAME, f"node-{number}", GroupLeave(member=member_name(number), closes=closes))

    def call(self, number: int, operation: str, *keys: str, values: tuple[bytes, ...] = (), **more: int) -> StoreReply:
        call = StoreCall(
            member=member_name(number),
            tag=self.places[number].tag,
            request=more.get("request", next(self.requests)),
            operation=msgspec.convert(operation, StoreCall.__annotations__["operation"]),
            keys=keys,
            values=values,
            amount=more.get("amount", 0),
        )
        return self.rendezvous.call(self.now_s, NAME, f"node-{number}", call)

    def set(self, number: int, key: str, value: bytes) -> None:
        self.call(number, "set", key, values=(value,))

    def ranks(self, *numbers: int) -> list[tuple[int, int]]:
        return [(self.places[number].rank, self.places[number].size) for number in numbers]


# ---- forming -------------------------------------------------------------------------------------------------------


def test_ranks_are_handed_out_in_order_of_arrival_when_all_are_there() -> None:
    world = World()
    assert world.ask(0).status == "waiting"
    assert world.ask(1).present == 2
    assert world.ask(2).status == "formed"
    world.ask(0)
    world.ask(1)
    assert world.ranks(0, 1, 2) == [(0, 3), (1, 3), (2, 3)]
    assert len({place.tag for place in world.places.values()}) == 1


def test_a_lost_answer_is_given_again() -> None:
    world = World()
    world.form(2)
    assert world.ask(0, size=2) == world.places[0]


def test_ranks_that_were_told_are_kept_and_the_others_fill_the_rest() -> None:
    world = World()
    world.ask(0, rank=2)
    world.ask(1)
    world.ask(2, rank=0)
    world.ask(0, rank=2)
    world.ask(1)
    assert world.ranks(0, 1, 2) == [(2, 3), (1, 3), (0, 3)]


def test_processes_of_one_node_get_neighbouring_ranks() -> None:
    world = World()
    for number, caller, local in ((0, "a", 1), (1, "b", 0), (2, "a", 0), (3, "b", 1)):
        world.ask(number, size=4, caller=caller, local_rank=local)
    for number, caller, local in ((0, "a", 1), (1, "b", 0), (2, "a", 0), (3, "b", 1)):
        world.ask(number, size=4, caller=caller, local_rank=local)
    assert world.ranks(2, 0, 1, 3) == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_a_rank_twice_is_refused_and_the_first_keeps_it() -> None:
    world = World()
    world.ask(0, rank=1)
    with pytest.raises(ConflictError, match=r"rank 1 .* is taken"):
        world.ask(1, rank=1)
    assert world.ask(0, rank=1).status == "waiting"


def test_a_rank_twice_beside_a_dying_world_is_refused_when_that_has_gone() -> None:
    world = World()
    world.form(1)
    for number in (1, 2):
        assert world.ask(number, size=2, rank=0).status == "waiting"
    world.leave(0)
    assert world.ask(1, size=2, rank=0).present == 2
    with pytest.raises(ConflictError, match="is taken"):
        world.ask(2, size=2, rank=0)
    world.ask(3, size=2, rank=1)
    assert world.ask(1, size=2, rank=0).size == 2


def test_a_killed_process_gives_its_rank_to_its_successor() -> None:
    world = World()
    world.ask(0, rank=1)
    world.rendezvous.lost(world.now_s, NAME, member_name(0))
    assert world.ask(1, rank=1).present == 1


def test_processes_that_disagree_on_the_size_are_told_so() -> None:
    world = World()
    world.ask(0, size=3)
    with pytest.raises(ConflictError, match="do not agree"):
        world.ask(1, size=4)


def test_a_range_of_sizes_waits_for_the_last_call() -> None:
    world = World()
    wish = {"min_size": 2, "max_size": 4, "last_call_s": 30.0}
    for number in range(2):
        world.ask(number, **wish)
    for _ in range(4):
        world.now_s += 6
        assert world.ask(0, **wish).status == "waiting"
        world.ask(1, **wish)
    world.now_s += 7
    assert world.ask(0, **wish).size == 2


def test_who_dies_while_asking_is_not_counted() -> None:
    world = World()
    world.ask(0)
    world.ask(1)
    world.now_s += PATIENCE_S
    assert world.ask(2).present == 1


def test_jobs_and_groups_are_separate() -> None:
    world = World()
    for name in ("job/a", "job/b", "other/a"):
        assert world.ask(0, size=1, name=name).rank == 0
    world.form(2)


# ---- forming again -------------------------------------------------------------------------------------------------


def test_survivors_of_a_death_go_on_with_dense_ranks_in_their_order() -> None:
    world = World()
    world.form(3)
    world.rendezvous.lost(world.now_s, NAME, member_name(1))
    world.now_s += LOST_S
    assert world.reform(2).status == "waiting"
    assert world.reform(0).status == "formed"
    world.reform(2)
    assert world.ranks(0, 2) == [(0, 2), (1, 2)]
    assert world.places[0].generation == 2


def test_a_member_that_comes_back_after_a_lost_connection_is_waited_for() -> None:
    world = World()
    world.form(3)
    world.rendezvous.lost(world.now_s, NAME, member_name(1))
    assert world.hold(1)
    world.now_s += LOST_S
    world.reform(0)
    assert world.reform(2).holdouts == 1
    world.reform(1)
    world.reform(0)
    assert world.places[0].size == 3


def test_a_silent_member_is_dead_after_the_patience() -> None:
    world = World()
    world.form(2)
    world.now_s += PATIENCE_S - 0.1
    assert world.reform(0).holdouts == 1
    world.now_s += 0.2
    assert world.reform(0).size == 1


def test_a_member_that_lives_but_does_not_ask_is_left_out_after_the_grace() -> None:
    world = World()
    world.form(3)
    world.reform(0, grace_s=5.0)
    world.reform(1, grace_s=5.0)
    world.now_s += 5
    assert world.hold(2)
    assert world.reform(0).size == 2
    assert not world.hold(2)
    with pytest.raises(SupersededError, match="formed again"):
        world.call(2, "count")
    assert world.reform(2).status == "waiting", "it waits for the next one as a newcomer does"


def test_a_newcomer_waits_for_the_next_re_formation_and_comes_last() -> None:
    world = World()
    world.form(2)
    assert world.ask(9, size=3).holdouts == 2
    for number in (1, 0):
        world.reform(number)
    world.reform(1)
    world.ask(9, size=3)
    assert world.ranks(0, 1, 9) == [(0, 3), (1, 3), (2, 3)]


def test_a_newcomer_that_was_told_its_rank_is_let_in_only_where_it_fits() -> None:
    world = World()
    world.form(3)
    world.leave(1)
    world.ask(9, size=3, rank=1)
    world.reform(0)
    world.reform(2)
    world.reform(0)
    assert world.ask(9, size=3, rank=1).status == "formed"
    assert world.ranks(0, 9, 2) == [(0, 3), (1, 3), (2, 3)]
    assert world.ask(8, size=5, rank=4).status == "waiting"
    for number in (0, 2, 9, 0, 2):
        world.reform(number)
    assert world.places[0].size == 3
    assert 8 not in world.places


def test_a_minimum_is_waited_for_until_newcomers_fill_it() -> None:
    world = World()
    world.form(2)
    world.leave(1)
    assert world.reform(0, min_size=2).status == "waiting"
    world.ask(5, size=2)
    assert world.reform(0, min_size=2).size == 2


def test_no_more_than_the_maximum_are_let_in() -> None:
    world = World()
    world.form(2)
    world.ask(7, size=2)
    world.reform(0, max_size=2)
    world.reform(1, max_size=2)
    world.reform(0, max_size=2)
    assert world.ranks(0, 1) == [(0, 2), (1, 2)]
    assert world.ask(7, size=2).status == "waiting"


def test_members_hear_how_many_wait_as_far_as_there_is_room() -> None:
    world = World()
    world.form(2)
    world.ask(7, size=2)
    assert world.hold(0)
    assert (world.news.waiting, world.news.alive) == (0, 2)
    world.leave(1)
    assert world.hold(0)
    assert (world.news.waiting, world.news.alive) == (1, 1)


def test_a_job_whose_members_are_all_gone_begins_anew_under_its_name() -> None:
    world = World()
    world.form(2)
    world.set(0, "key", b"old")
    for number in (0, 1):
        world.rendezvous.lost(world.now_s, NAME, member_name(number))
    world.now_s += LOST_S
    for number in (5, 6, 5):
        world.ask(number, size=2)
    assert world.places[5].generation == 2
    assert world.call(5, "get", "key").status == "missing"


def test_a_closed_job_lets_nobody_in_until_it_is_over() -> None:
    world = World()
    world.form(2)
    world.leave(0, closes=True)
    assert world.hold(1)
    assert world.news.closed
    for attempt in (lambda: world.reform(1), lambda: world.ask(7, size=2)):
        with pytest.raises(ConflictError, match="is closed"):
            attempt()
    world.leave(1)
    assert world.ask(7, size=1).status == "formed"


def test_after_a_restart_of_the_hub_the_members_make_the_group_known_again() -> None:
    world = World()
    world.form(2)
    world.restart()
    with pytest.raises(NotFoundError):
        world.call(0, "count")
    assert world.hold(0)
    assert world.hold(1)
    world.set(0, "key", b"new")
    assert world.call(1, "get", "key").values == (b"new",)
    assert world.ask(7, size=1).status == "waiting", "no second world beside the living one"
    world.leave(1)
    world.reform(0)
    assert world.places[0].generation == 2


def test_survivors_of_a_hub_that_knows_nothing_wait_for_each_other() -> None:
    world = World()
    world.form(3)
    world.restart()
    world.reform(2)
    assert world.reform(1).status == "waiting"
    world.now_s += 5
    for number in (2, 1):
        world.reform(number)
    assert world.ranks(1, 2) == [(0, 2), (1, 2)]


# ---- the store -----------------------------------------------------------------------------------------------------


def test_the_store_does_what_a_tcp_store_does() -> None:
    world = World()
    world.form(2)
    assert world.call(0, "add", "n", amount=5).number == 5
    assert world.call(1, "add", "n", amount=-2).number == 3
    assert world.call(0, "get", "n").values == (b"3",)
    assert world.call(0, "get", "n", "x", "y").missing == ("x", "y")
    assert world.call(0, "compare_set", "c", values=(b"", b"1")).values == (b"1",)
    assert world.call(0, "compare_set", "c", values=(b"2", b"3")).values == (b"1",)
    assert world.call(0, "compare_set", "c", values=(b"1", b"3")).values == (b"3",)
    assert world.call(0, "compare_set", "absent", values=(b"2", b"3")).values == (b"2",)
    world.call(0, "append", "a", values=(b"x",))
    world.call(0, "append", "a", values=(b"y",))
    assert world.call(1, "get", "a").values == (b"xy",)
    assert world.call(1, "check", "a", "n").number == 1
    assert world.call(1, "check", "a", "absent").number == 0
    assert world.call(1, "count").number == 3
    assert (world.call(1, "delete", "a").number, world.call(1, "delete", "a").number) == (1, 0)
    world.call(0, "set", "p", "q", values=(b"1", b"2"))
    assert world.call(1, "get", "q", "p").values == (b"2", b"1")


def test_a_repeated_call_is_not_done_twice() -> None:
    world = World()
    world.form(2)
    for _ in range(3):
        assert world.call(0, "add", "n", amount=1, request=77).number == 1
    assert world.call(1, "add", "n", amount=1, request=77).number == 2, "numbers are per member"


def test_a_new_generation_has_an_empty_store() -> None:
    world = World()
    world.form(2)
    world.set(0, "key", b"1")
    world.leave(1)
    world.reform(0)
    assert world.call(0, "count").number == 0


@pytest.mark.parametrize(
    ("operation", "keys", "values"),
    [("set", ("a",), ()), ("append", ("a", "b"), (b"",)), ("add", (), ()), ("compare_set", ("a",), (b"",))],
)
def test_malformed_calls_are_refused(operation: str, keys: tuple[str, ...], values: tuple[bytes, ...]) -> None:
    world = World()
    world.form(1)
    with pytest.raises(ProtocolError, match="does not take"):
        world.call(0, operation, *keys, values=values)


def test_counting_in_a_key_that_is_no_number_is_an_error() -> None:
    world = World()
    world.form(1)
    world.set(0, "key", b"text")
    with pytest.raises(ProtocolError, match="does not hold a number"):
        world.call(0, "add", "key", amount=1)


# ---- limits and strangers ------------------------------------------------------------------------------------------


def test_values_keys_and_stores_have_limits_and_a_refused_call_changes_nothing() -> None:
    limits = msgspec.convert(
        {"space": {"keys": 3, "key_bytes": 8, "value_bytes": 10, "total_bytes": 24}, "total_bytes": 1000}, Limits
    )
    world = World(limits)
    world.form(1)
    with pytest.raises(ConflictError, match="too large"):
        world.set(0, "a", b"x" * 11)
    with pytest.raises(ProtocolError, match="a key of 9 bytes"):
        world.set(0, "k" * 9, b"")
    with pytest.raises(ConflictError, match="may hold 3 keys"):
        world.call(0, "set", "a", "b", "c", "d", values=(b"",) * 4)
    world.set(0, "a", b"x" * 10)
    world.set(0, "b", b"x" * 10)
    with pytest.raises(ConflictError, match="full"):
        world.set(0, "c", b"x" * 10)
    with pytest.raises(ConflictError, match="too large"):
        world.call(0, "append", "a", values=(b"y",))
    assert world.call(0, "count").number == 2
    world.call(0, "delete", "a")
    world.set(0, "c", b"x" * 10)


def test_all_stores_together_have_a_limit() -> None:
    world = World(Limits(total_bytes=100))
    world.form(1)
    world.set(0, "a", b"x" * 90)
    with pytest.raises(ConflictError, match="all groups together"):
        world.set(0, "b", b"x" * 20)


def test_one_identity_begins_so_many_groups_and_idle_ones_are_forgotten() -> None:
    world = World(Limits(groups_of_one=2, idle_s=60.0))
    for number in range(2):
        world.ask(0, size=2, name=f"job{number}/a", caller="node")
    with pytest.raises(ConflictError, match="takes no more groups"):
        world.ask(0, size=2, name="job2/a", caller="node")
    world.ask(0, size=2, name="job2/a", caller="another")
    world.now_s += 61
    world.ask(0, size=2, name="job3/a", caller="node")


def test_a_group_has_a_most_of_members() -> None:
    world = World(Limits(members=2))
    world.ask(0)
    world.ask(1)
    with pytest.raises(ConflictError, match="is full"):
        world.ask(2)


@pytest.mark.parametrize("name", ["job", "job/", "/a", "a/b/c", "job/ä", "job/" + "x" * 65, "../x"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError, match="not the name of a group"):
        World().ask(0, name=name)


@pytest.mark.parametrize(
    "fields", [{"rank": 3}, {"rank": -2}, {"min_size": 0}, {"min_size": 4}, {"last_call_s": -1.0}, {"grace_s": 1e9}]
)
def test_senseless_wishes_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ProtocolError, match="not a wish"):
        World().ask(0, **fields)


def test_nobody_speaks_for_a_process_of_another_node() -> None:
    world = World()
    world.form(2)
    with pytest.raises(AccessError):
        world.ask(0, caller="mallory")
    with pytest.raises(AccessError):
        world.rendezvous.leave(world.now_s, NAME, "mallory", GroupLeave(member=member_name(0)))
    call = StoreCall(member=member_name(66), tag=world.places[0].tag, request=1, operation="count")
    with pytest.raises(SupersededError):
        world.rendezvous.call(world.now_s, NAME, "mallory", call)


# ---- any order of events -------------------------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Processes come, die, come back, ask and ask again: places of one generation are always a whole world."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.alive: set[int] = set()
        self.by_tag: dict[str, dict[int, GroupPlace]] = {}

    def note(self, number: int, place: GroupPlace) -> None:
        if place.status == "formed":
            self.by_tag.setdefault(place.tag, {})[number] = place

    @rule(number=st.integers(0, 5))
    def newcomer(self, number: int) -> None:
        if number not in self.world.places:
            self.alive.add(number)
            self.note(number, self.world.ask(number, min_size=2, max_size=4, last_call_s=3.0))

    @rule(number=st.integers(0, 5))
    def survivor(self, number: int) -> None:
        if number in self.world.places and number in self.alive:
            self.note(number, self.world.reform(number))

    @rule(number=st.integers(0, 5))
    def dies(self, number: int) -> None:
        self.alive.discard(number)
        self.world.rendezvous.lost(self.world.now_s, NAME, member_name(number))

    @rule(number=st.integers(0, 5))
    def holds(self, number: int) -> None:
        if number in self.world.places and number in self.alive:
            self.world.hold(number)

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now_s += seconds

    @rule()
    def hub_restarts(self) -> None:
        self.world.restart()

    @invariant()
    def ranks_of_a_generation_are_distinct_and_below_its_size(self) -> None:
        for places in self.by_tag.values():
            ranks = [place.rank for place in places.values()]
            sizes = {place.size for place in places.values()}
            assert len(set(ranks)) == len(ranks)
            assert len(sizes) == 1
            assert max(ranks) < sizes.pop()

    @invariant()
    def generations_do_not_go_back_for_a_process(self) -> None:
        for number, place in self.world.places.items():
            seen = [places[number].generation for places in self.by_tag.values() if number in places]
            assert place.generation == max(seen, default=place.generation)


AnyOrder.TestCase.settings = settings(max_examples=examples(60, 600), stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
