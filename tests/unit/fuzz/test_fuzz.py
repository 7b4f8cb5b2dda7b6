"""Whatever comes from outside is something valid or a CiuicError: 20,000 cases here, as many as you like by hand.

python tests/support/fuzz_run.py --cases 1000000
"""

import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_run import fuzz
from fuzz_targets import Targets

from ciuic.errors import CiuicError, FrameError, JobFileError
from ciuic.job import load_job
from ciuic.ledger.entry import push_from_frame
from ciuic.ledger.frame import build_frame
from ciuic.net import messages as m
from ciuic.net.tls import Authority, new_key_and_csr

CASES = 20_000
RUNNER = Path(__file__).parents[2] / "support" / "fuzz_run.py"


def test_20000_cases_end_in_something_valid_or_in_a_clear_refusal(tmp_path: Path) -> None:
    report = fuzz(CASES, 20261201, tmp_path)
    assert report.faults == []
    assert report.cases == CASES
    assert report.valid["frames"] == 0, "a changed frame was accepted"
    assert report.refused["frames"] > 2000
    for name in ("messages", "headers", "layouts", "chunks", "jobs", "certificates", "tokens", "urls", "records"):
        assert report.refused[name] > 50, name
    assert report.valid["messages"] > 500, "the seeds are not near enough to real messages"


def test_every_target_can_be_reached(tmp_path: Path) -> None:
    targets = Targets(tmp_path, 1)
    assert {targets.case(name) for name in targets.weights} <= {"valid", "refused"}


def test_the_runner_says_what_it_did_and_fails_with_a_fault(tmp_path: Path) -> None:
    command = [sys.executable, str(RUNNER), "--cases", "200", "--seed", "7", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert '"cases": 200' in done.stdout


# ---- faults that were found this way -------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [5000, 100_000])
def test_json_that_is_nested_very_deeply_is_refused(depth: int) -> None:
    body = b'{"job": {"a": ' + b"[" * depth + b"]" * depth + b"}}"
    with pytest.raises(CiuicError, match="not a valid SubmitRequest"):
        m.decode(body, m.SubmitRequest)


def test_a_job_file_that_is_nested_very_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("a = " + "[" * 3000)
    with pytest.raises(JobFileError, match="not a job file"):
        load_job(tmp_path / "job.toml")


def test_a_signing_request_of_another_version_is_refused(tmp_path: Path) -> None:
    import base64

    authority = Authority.create(tmp_path)
    _, csr = new_key_and_csr()
    lines = csr.split(b"\n")
    der = bytearray(base64.b64decode(b"".join(lines[1:-2])))
    at = der.index(b"\x02\x01\x00")
    der[at + 2] = 1
    pem = b"\n".join([lines[0], base64.encodebytes(bytes(der)).strip(), lines[-2], b""])
    with pytest.raises(CiuicError, match="signing request"):
        authority.issue_client(pem, common_name="x", role="node")


def test_a_push_whose_header_is_a_tower_of_lists_is_refused() -> None:
    with pytest.raises(FrameError):
        push_from_frame(build_frame("push", b"\x91" * 100_000))
