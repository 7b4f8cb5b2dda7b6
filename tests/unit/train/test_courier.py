"""Threads of the courier: none of them may end unnoticed, and nothing is retried for ever that cannot pass."""

import threading
from typing import Any

import pytest

from ciuic.errors import FrameError, RunFailedError, StorageError, SupersededError
from ciuic.train import courier as courier_module
from ciuic.train.courier import DAMAGED_LIMIT, Courier, Failed, persistently


class NoConnection:
    """A client for loops that never send."""

    def close(self) -> None: ...

    def interrupt(self) -> None: ...


def run_loop(error: Exception) -> Failed:
    courier = Courier(connect=lambda purpose: NoConnection(), run_id="r")  # ty: ignore[invalid-argument-type]

    def loop(client: Any) -> None:
        raise error

    courier.control("leases", loop)
    item = courier.arrivals.get(timeout=10)
    courier.close()
    assert isinstance(item, Failed)
    return item


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_crashes_fails_the_worker() -> None:
    failed = run_loop(ValueError("a bug"))
    assert isinstance(failed.error, RunFailedError)
    assert "leases thread crashed" in failed.error.message
    assert "a bug" in failed.error.cause


def test_a_superseded_worker_is_told() -> None:
    assert isinstance(run_loop(SupersededError("a newer process took over")).error, SupersededError)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier_module, "backoff_s", lambda failures: 0.0)


def test_bytes_that_are_refused_again_and_again_are_given_up() -> None:
    calls: list[int] = []

    def send() -> None:
        calls.append(1)
        raise FrameError("the push has another size")

    with pytest.raises(FrameError):
        persistently(send, stop=threading.Event(), what="sending")
    assert len(calls) == DAMAGED_LIMIT


def test_a_full_disk_on_the_hub_is_waited_for() -> None:
    calls: list[int] = []

    def send() -> str:
        calls.append(1)
        if len(calls) < 3 * DAMAGED_LIMIT:
            raise StorageError("no space left")
        return "stored"

    assert persistently(send, stop=threading.Event(), what="sending") == "stored"


def test_waiting_ends_when_the_worker_stops() -> None:
    stop = threading.Event()
    stop.set()

    def send() -> None:
        raise StorageError("no space left")

    with pytest.raises(StorageError):
        persistently(send, stop=stop, what="sending")
