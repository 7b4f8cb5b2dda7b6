"""What a node has to say to a fragment reaches it, wherever it is by then."""

import threading
from typing import Any

import pytest

from ciuic.errors import CiuicError, ConflictError, FrameError, MovedError, UnreachableError
from ciuic.net.places import DAMAGED_LIMIT, Line, Places
from ciuic.net.shard_messages import PlacesReply


class Network:
    """Places that answer or fail as told; the hub says where the fragment is."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.closed = 0
        self.where = "new"

    def connect(self, purpose: str, url: str) -> Any:
        return Connection(self, url)


class Connection:
    def __init__(self, network: Network, url: str) -> None:
        self.network, self.url = network, url

    def call(self, method: str, path: str, message: object, kind: object) -> PlacesReply:
        assert path == "/v1/runs/r/places"
        if not self.network.where:
            raise UnreachableError("the hub is away")
        return PlacesReply(urls=["", self.network.where])

    def say(self) -> str:
        self.network.asked.append(self.url)
        answer = self.network.answers[self.url or "hub"]
        if isinstance(answer, CiuicError):
            raise answer
        return answer

    def close(self) -> None:
        self.network.closed += 1


def a_line(network: Network, stop: threading.Event) -> Any:
    places = Places(run_id="r", connect=network.connect, urls=["", "old"])  # ty: ignore[invalid-argument-type]
    line = Line(places, "updates")
    return lambda fragment: line.say(fragment, lambda client: client.say(), stop=stop, what="saying")


@pytest.mark.parametrize("failure", [MovedError("moved"), UnreachableError("killed")])
def test_a_fragment_that_moved_or_died_is_found_again(failure: CiuicError) -> None:
    network = Network(old=failure, new="heard")
    assert a_line(network, threading.Event())(1) == "heard"
    assert network.asked == ["old", "new"]


def test_the_known_place_is_asked_again_while_the_hub_is_away() -> None:
    network = Network(old=UnreachableError("killed"), new="heard")
    network.where = ""
    say = a_line(network, threading.Event())
    threading.Timer(0.3, lambda: setattr(network, "where", "new")).start()
    assert say(1) == "heard"
    assert set(network.asked[:-1]) == {"old"}


def test_refusals_of_another_kind_and_bytes_that_are_refused_again_and_again_end_it() -> None:
    network = Network(old=ConflictError("not now"), new="heard")
    with pytest.raises(ConflictError):
        a_line(network, threading.Event())(1)
    network = Network(old=FrameError("damaged"))
    network.where = "old"
    with pytest.raises(FrameError):
        a_line(network, threading.Event())(1)
    assert len(network.asked) == DAMAGED_LIMIT


def test_a_worker_that_stops_does_not_try_for_ever() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(UnreachableError):
        a_line(Network(old=UnreachableError("killed")), stop)(1)
