"""The preflight of two nodes that are real processes, and each way in which they do not come together."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from preflight_world import at, both, failing, free_port, of, pretend_installed, report_of, start, wrong_clock

from ciuic.doctor.preflight import dialing, master
from ciuic.doctor.preflight.master import check_free_port, judge_port, reach_master, way_to
from ciuic.doctor.preflight_probe.forked import Child

MODEL = """
import os
import torch

def build():
    print("a model may print")
    width = int(os.environ["WIDTH"])
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 2))

def broken():
    raise ValueError("no such file: vocabulary")
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model_of_test.py").write_text(MODEL)
    return str(tmp_path / "model_of_test.py")


# ---- together


def test_two_equal_nodes_meet_reach_each_other_and_sum_over_gloo(model: str) -> None:
    port = free_port()
    nodes = [start(at(port, rank, count=f"{model}:build"), WIDTH="8") for rank in (1, 0)]
    report = both(*nodes)
    assert report.met == 2
    assert failing(report) == set()
    assert of(report, "launch").values == {"nnodes": 2, "world_size": 2}
    assert of(report, "every pair").values["ways"] == 2
    assert of(report, "gloo group of all").result == "ok"
    assert abs(float(of(report, "clocks").values["offset_s"])) < 0.5
    assert of(report, "model").values == {"parameters": 58, "trainable": 58, "tensors": 4}
    assert "torch 2." in of(report, "versions").detail
    assert of(report, "master port", 0).result == "ok"
    assert of(report, "gloo group", 1).result == "ok"


def test_what_differs_is_named_with_both_values(model: str, tmp_path: Path) -> None:
    port = free_port()
    first = start(at(port, 0, count=f"{model}:build"), WIDTH="8")
    older = pretend_installed(tmp_path / "older", "numpy", "1.0.7")
    second = start(at(port, 1, count=f"{model}:build"), older, WIDTH="9", NCCL_ALGO="Ring")
    report = both(first, second)
    assert failing(report) == {"model", "equal variables"}
    assert "58 parameters on rank 0; 65 parameters on rank 1" in of(report, "model").detail
    assert "tensor 0: rank 0 has parameter 0.weight 8x4 float32, rank 1 has" in of(report, "model").detail
    numpy = of(report, "versions")
    assert numpy.result == "warn"
    assert "1.0.7 on rank 1" in numpy.detail
    assert "NCCL_ALGO: nothing on rank 0; Ring on rank 1" in of(report, "equal variables").detail


def test_an_exclusion_for_gloo_on_one_node_is_told_on_both_and_no_group_is_tried() -> None:
    port = free_port()
    report = both(start(at(port, 0)), start(at(port, 1), GLOO_SOCKET_IFNAME="^lo,docker0"))
    assert failing(report) == {"gloo interface", "every pair"}
    assert "neither ^ nor =" in of(report, "gloo interface", 1).detail
    assert of(report, "gloo group", 1).result == "could-not-look"
    assert (
        "rank 0 does not reach rank 1 at an unknown address: it could not listen" in of(report, "every pair", 0).detail
    )
    assert of(report, "gloo group of all").result == "could-not-look"


def test_a_clock_that_is_ahead_is_measured() -> None:
    port = free_port()
    report = both(start(at(port, 0)), start(at(port, 1), wrong_clock(5.0)))
    clocks = of(report, "clocks", 1)
    assert clocks.result == "warn"
    assert float(clocks.values["offset_s"]) == pytest.approx(-5.0, abs=0.5)
    assert "ahead of rank 0" in clocks.detail


def test_a_model_that_cannot_be_built_is_told_with_its_error(model: str) -> None:
    settings = at(free_port(), 0, nnodes=1, count=f"{model}:broken")
    report = report_of(start(settings, WIDTH="8"))
    assert "ValueError: no such file: vocabulary" in of(report, "model").detail


# ---- not together


def test_a_node_that_does_not_come_is_named_after_the_wait() -> None:
    report = report_of(start(at(free_port(), 0, wait_s=1.0)))
    assert report.met == 1
    assert "rank 1 did not come within 1.0 s" in of(report, "meeting").detail
    assert "meeting" in failing(report)


def test_a_master_where_nobody_listens_is_told_after_the_wait() -> None:
    report = report_of(start(at(free_port(), 1, wait_s=1.0)))
    check = of(report, "master answers")
    assert check.result == "fail"
    assert "connection refused" in check.detail
    assert "--node-rank 0" in check.next


@contextmanager
def other_program() -> Iterator[int]:
    """A port of a program that hangs up on everybody."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        try:
            yield int(server.getsockname()[1])
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def test_another_program_at_the_masters_port_is_told_on_both_sides() -> None:
    with other_program() as port:
        nodes = [start(at(port, rank, wait_s=2.0)) for rank in (0, 1)]
        first, second = map(report_of, nodes)
        mine = judge_port(port)
    assert f"cannot listen at 127.0.0.1:{port}: address already in use" in of(first, "store").detail
    assert of(first, "master port", 0).result == "fail"
    assert f"(pid {os.getpid()})" in mine.detail
    assert "is no torch store" in of(second, "store").detail


def test_two_processes_of_one_node_rank_are_told() -> None:
    port = free_port()
    nodes = [start(at(port, rank, nnodes=3, wait_s=4.0)) for rank in (0, 1, 1)]
    reports = [report_of(process) for process in nodes]
    details = [check.detail for report in reports for check in report.checks if check.name == "meeting"]
    assert details.count("another process is node rank 1 already") == 1
    assert any("rank 2 did not come" in detail for detail in details)


# ---- one machine


def test_a_port_is_free_or_taken_and_the_way_to_loopback_is_lo() -> None:
    assert check_free_port().result == "ok"
    assert judge_port(free_port()).result == "ok"
    assert way_to("127.0.0.1", []).interface == "lo"


def test_a_firewall_that_swallows_everything_is_told_apart_from_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def swallowed(*_: object, **__: object) -> socket.socket:
        raise TimeoutError

    monkeypatch.setattr(master.socket, "create_connection", swallowed)
    check = reach_master("127.0.0.1", 9, 0.2)
    assert "no answer" in check.detail
    assert "firewall" in check.next


def test_a_listener_answers_only_who_knows_its_token() -> None:
    here = dialing.Listener("127.0.0.1")
    try:
        assert dialing.dial(1, "127.0.0.1", here.port, here.token).problem == ""
        assert dialing.dial(1, "127.0.0.1", here.port, "0" * 32).problem == "another program answers there"
    finally:
        here.close()
    assert "refused" in dialing.dial(1, "127.0.0.1", here.port, here.token).problem


@pytest.mark.parametrize(
    ("work", "answer"),
    [
        (lambda _: {"a": 1}, {"a": 1}),
        (lambda _: {}["b"], {"problem": "KeyError: 'b'"}),
        (lambda _: os.kill(os.getpid(), signal.SIGKILL), {"problem": "ended by SIGKILL", "signal": "SIGKILL"}),
        (lambda _: os._exit(3), {"problem": "ended with code 3"}),
        (lambda _: time.sleep(60), {"problem": "no answer within 0 s"}),
    ],
    ids=["answers", "raises", "crashes", "exits", "hangs"],
)
def test_whatever_a_forked_child_does_is_an_answer(work: Callable[..., dict[str, object]], answer: object) -> None:
    limit_s = 0.3 if "no answer" in str(answer) else 30.0
    assert Child(work).answer(limit_s) == answer


def test_a_child_that_waits_begins_when_it_is_told_and_ends_when_it_is_closed() -> None:
    first, second = (Child(lambda order: {"got": order}, waits=True) for _ in range(2))
    second.order({"a": 1})
    assert second.answer(30.0) == {"got": {"a": 1}}
    first.close()
    first.close()
