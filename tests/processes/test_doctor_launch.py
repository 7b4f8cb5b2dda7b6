"""`ciuic doctor run` around a program: signals, output, exit codes, and hooks in a process without a process group."""

import signal
import sys
from pathlib import Path

import pytest

from ciuic.doctor.finding import Finding, Incident
from ciuic.doctor.launch import Launch, Outcome, check, launch
from ciuic.errors import RunFailedError


def run(folder: Path, program: str, stdout_is_taken: bool = False) -> Outcome:
    command = [sys.executable, "-c", program]
    return launch(
        Launch(command=command, folder=folder, stdout_is_taken=stdout_is_taken),
        told=lambda _: None,
        begun=lambda *_: None,
    )


def test_a_signal_for_the_doctor_reaches_the_program(tmp_path):
    program = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(60)\n"
    )
    before = signal.getsignal(signal.SIGTERM)
    assert run(tmp_path, program).exit_code == 9
    assert signal.getsignal(signal.SIGTERM) is before


def test_stdout_is_kept_free_when_it_is_taken(tmp_path, capfd):
    run(tmp_path, "print('loss 1')", stdout_is_taken=True)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "loss 1\n")


def test_a_program_that_never_trained_is_told_as_unseen(tmp_path):
    assert [blind.what for blind in run(tmp_path, "pass").blind] == ["the program"]


def test_a_program_that_was_ended_for_a_finding_has_failed_whatever_it_says():
    incident = Incident(cause=Finding(code="CIUIC-A5", cause="nobody reduces", step=1))
    with pytest.raises(RunFailedError, match="ended because of CIUIC-A5"):
        check(Outcome(exit_code=143, incidents=[incident], blind=[], stopped_for=incident, ranks=2))


def test_the_first_step_of_a_process_attaches_beside_other_hooks_on_steps(tmp_path):
    program = (
        "import torch\n"
        "from torch.optim.optimizer import register_optimizer_step_pre_hook as hook\n"
        "for _ in range(2): hook(lambda *_: None)\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    outcome = run(tmp_path, program)
    assert (outcome.exit_code, outcome.ranks, outcome.blind) == (0, 1, [])
