"""What is started for a job, what the worker finds, and where identities live."""

import json
import sys
from pathlib import Path

import pytest

from ciuic.errors import CodeNotAllowedError, ConflictError, ProtocolError, StorageError, TokenError, UsageError
from ciuic.job import parse_job
from ciuic.net.messages import Assignment, LogLine
from ciuic.node.identity import NodeIdentity, held, load_identity, node_folder, settle_identity
from ciuic.node.launch import check_code_allowed, describe_exit, plan_launch
from ciuic.node.logs import LogFile
from ciuic.node.workspace import RUNS_KEPT, RunFiles, prepare_run


def _identity(folder: Path) -> NodeIdentity:
    return NodeIdentity(node_id="us-west", url="https://hub:1", authority_fingerprint="ab" * 32, folder=folder)


def test_one_rank_is_started_directly(tmp_path: Path) -> None:
    launch = plan_launch(RunFiles(folder=tmp_path), parse_job({}), home=tmp_path)
    assert launch.command == [sys.executable, "-m", "ciuic.train.worker", "--run-file", str(tmp_path / "run.json")]
    assert launch.environment["CIUIC_RUN_FILE"] == str(tmp_path / "run.json")
    assert launch.ranks == 1


def test_more_ranks_go_through_torchrun_on_loopback(tmp_path: Path) -> None:
    launch = plan_launch(RunFiles(folder=tmp_path), parse_job({"nodes": {"ranks": 2}}), home=tmp_path)
    assert launch.command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert launch.command[-4:] == ["-m", "ciuic.train.worker", "--run-file", str(tmp_path / "run.json")]
    assert launch.command[launch.command.index("--nproc-per-node") + 1] == "2"
    assert launch.command[launch.command.index("--rdzv-endpoint") + 1] == "127.0.0.1:0"
    assert int(launch.environment["OMP_NUM_THREADS"]) >= 1


def test_the_workers_environment_holds_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CIUIC_TOKEN", "ciuic1.secret")
    launch = plan_launch(RunFiles(folder=tmp_path), parse_job({}), home=tmp_path)
    assert "CIUIC_TOKEN" not in launch.environment


@pytest.mark.parametrize("model", [{"entry": "train:main"}, {"command": ["python", "train.py"]}])
def test_code_from_a_job_needs_the_owners_consent(model: dict[str, object]) -> None:
    job = parse_job({"model": model})
    check_code_allowed(job, allow_code=True)
    with pytest.raises(CodeNotAllowedError, match="does not run code"):
        check_code_allowed(job, allow_code=False)


def test_the_built_in_trainer_needs_no_consent() -> None:
    check_code_allowed(parse_job({}), allow_code=False)


def test_run_json_holds_what_the_worker_needs_and_is_private(tmp_path: Path) -> None:
    assignment = Assignment(run_id="ds-mini-1", job={"name": "ds-mini", "nodes": {"ranks": 2}}, attempt=3)
    files = prepare_run(_identity(tmp_path), "https://relay:2", assignment, parse_job(assignment.job))
    content = json.loads(files.run_file.read_text())
    assert files.folder == tmp_path / "runs" / "ds-mini-1"
    assert content == {
        "run_id": "ds-mini-1",
        "job": assignment.job,
        "hub_url": "https://relay:2",
        "node_id": "us-west",
        "authority": str(tmp_path / "authority.pem"),
        "cert": str(tmp_path / "node.pem"),
        "key": str(tmp_path / "node.key"),
        "ranks": 2,
        "attempt": 3,
    }
    assert files.run_file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("run_id", ["", ".", "..", "../../etc", "a/b", "/tmp", "a\x00", ".hidden", "x" * 200])
def test_a_run_id_cannot_leave_the_folder(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(ProtocolError):
        prepare_run(_identity(tmp_path), "https://hub:1", Assignment(run_id=run_id, job={}), parse_job({}))


def test_old_runs_are_forgotten(tmp_path: Path) -> None:
    for number in range(RUNS_KEPT + 5):
        prepare_run(_identity(tmp_path), "https://h:1", Assignment(run_id=f"run-{number}", job={}), parse_job({}))
    kept = {folder.name for folder in (tmp_path / "runs").iterdir()}
    assert len(kept) == RUNS_KEPT
    assert f"run-{RUNS_KEPT + 4}" in kept


@pytest.mark.parametrize(
    ("code", "line", "text"),
    [
        (1, "ValueError: x", "ValueError: x"),
        (1, "", "exit code 1"),
        (137, "", "killed by SIGKILL (perhaps out of memory)"),
        (139, "", "killed by SIGSEGV"),
        (139, "Fatal Python error: Segmentation fault", "Fatal Python error: Segmentation fault"),
        (0, "", "exit code 0"),
    ],
)
def test_an_exit_is_described_in_one_line(code: int, line: str, text: str) -> None:
    assert describe_exit(code, line) == text


def test_the_log_file_rotates(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log", limit_bytes=1000)
    for number in range(100):
        log.write(LogLine(time=float(number), rank=0, stream="out", text="x" * 50))
    log.close()
    assert (tmp_path / "log").stat().st_size <= 1000
    assert (tmp_path / "log.1").stat().st_size <= 1000
    assert (tmp_path / "log").read_text().splitlines()[-1].startswith("99.000 0 out xxx")


def test_a_log_that_cannot_be_written_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = LogFile(tmp_path / "missing" / "log")
    for _ in range(3):
        log.write(LogLine(time=0.0, rank=0, stream="out", text="x"))
    assert len(caplog.records) == 1


@pytest.mark.parametrize("location", ["", "..", "a/b", "-x", "x" * 49, "a b", "é"])
def test_a_location_is_a_plain_name(tmp_path: Path, location: str) -> None:
    with pytest.raises(UsageError):
        node_folder(tmp_path, location)


def test_a_folder_is_held_once_and_the_holder_is_named(tmp_path: Path) -> None:
    with held(tmp_path / "us-west"), pytest.raises(ConflictError, match="us-west already runs") as caught:
        held(tmp_path / "us-west").__enter__()
    assert "process " in caught.value.cause
    with held(tmp_path / "us-west"):
        pass


def test_without_identity_and_token_the_next_step_is_said(tmp_path: Path) -> None:
    with pytest.raises(TokenError) as caught:
        settle_identity(tmp_path, url="https://hub:1", location="us-west", token=None, claimed={})
    assert "ciuic hub token create" in caught.value.next


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"node_id": 7}'])
def test_a_damaged_identity_is_a_storage_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "identity.json").write_bytes(content)
    with pytest.raises(StorageError, match=r"identity\.json"):
        load_identity(tmp_path)


def test_an_identity_without_its_key_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "identity.json").write_text(
        '{"node_id": "a", "url": "https://h", "location": "a", "authority_fingerprint": "f", "joined_at": 0}'
    )
    with pytest.raises(StorageError, match=r"node\.key"):
        load_identity(tmp_path)
