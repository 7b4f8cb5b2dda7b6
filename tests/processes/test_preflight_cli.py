"""`ciuic doctor preflight` as a person starts it: on one machine, and on two nodes at once."""

import json
import subprocess
from typing import Any

import pytest
import torch
from cli_world import command, program_environment
from preflight_world import CLEAN, free_port

from ciuic.errors import CheckFailedError


def started(*options: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command("doctor", "preflight", *options),
        env=program_environment(**(CLEAN | environment)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


def test_a_debug_level_that_crashes_ddp_is_found_before_the_run() -> None:
    """torch 2.13 over gloo; a torch in which it works warns about the price instead."""
    code, out, err = ended(started(TORCH_DISTRIBUTED_DEBUG="DETAIL"))
    (line,) = [line for line in out.splitlines() if line.startswith("ddp debug level")]
    assert "TORCH_DISTRIBUTED_DEBUG=INFO" in line
    if torch.__version__.startswith("2.13."):
        assert "ended by SIGSEGV" in line
        assert code == CheckFailedError.exit_code
        assert "error[CIUIC-602]: not ready for a run: ddp debug level" in err
    assert "gloo group " in out


def test_a_debug_level_that_torch_refuses_does_not_hide_the_rest() -> None:
    code, out, _ = ended(started(TORCH_DISTRIBUTED_DEBUG=""))
    failed = [line for line in out.splitlines() if "FAILED" in line]
    assert len(failed) == 1
    assert failed[0].startswith("variables")
    assert "a group of one process was made" in out
    assert code == CheckFailedError.exit_code


@pytest.mark.parametrize("wrong", ["", "nope0"], ids=["fine", "wrong-interface"])
def test_both_nodes_say_the_same_and_end_with_the_same_code(wrong: str) -> None:
    place = f"127.0.0.1:{free_port()}"
    options = ("--nnodes", "2", "--master", place, "--json", "--wait", "90 s")
    first = started(*options, "--node-rank", "0")
    second = started(*options, "--node-rank", "1", **({"GLOO_SOCKET_IFNAME": wrong} if wrong else {}))
    told = [ended(process) for process in (first, second)]
    reports: list[dict[str, Any]] = [json.loads(out) for _, out, _ in told]
    assert reports[0] == reports[1]
    assert reports[0]["met"] == 2
    failed = {(check["name"], check["rank"]) for check in reports[0]["checks"] if check["result"] == "fail"}
    assert failed == ({("gloo interface", 1), ("every pair", 0)} if wrong else set())
    assert [code for code, _, _ in told] == [7 if wrong else 0] * 2


def test_several_nodes_without_a_place_to_meet_are_refused_at_once() -> None:
    code, out, err = ended(started("--nnodes", "2"))
    assert (code, out) == (2, "")
    assert "give --master HOST:PORT" in err


def test_the_command_line_loads_no_torch() -> None:
    program = (
        "import sys; from ciuic.doctor.preflight import run, local; import ciuic.cli.doctor_preflight; "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [*command()[:2], "-c", program], env=program_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
