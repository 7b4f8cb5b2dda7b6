"""Who did what is on record, whatever the result, and no secret is anywhere. Real hub, real agent, real program."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_process import HubProcess, eventually
from security_world import ask, dial

from ciuic.errors import CiuicError, ConflictError, RoleError, TokenError
from ciuic.net.access_messages import AuditPage, RevokeRequest
from ciuic.net.client import join_network
from ciuic.net.messages import CreateTokenRequest, Ok, SyncRequest
from ciuic.net.tokens import parse_token


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with HubProcess(tmp_path_factory.mktemp("audit") / "home") as running:
        yield running


def log(hub: HubProcess, after: int = 0) -> list[dict[str, object]]:
    page = hub.operator().call("GET", f"/v1/audit?after={after}", None, AuditPage)
    assert page.broken_at is None
    return page.lines


def test_what_operators_do_is_on_record_with_who_from_where_and_result(hub: HubProcess) -> None:
    after = max((int(str(line["id"])) for line in log(hub)), default=0)
    node = hub.join("us-west")
    run_id = hub.submit({"name": "waits", "nodes": {"min": 64}})
    operator = hub.operator()
    operator.call("POST", f"/v1/runs/{run_id}/stop", None, Ok)
    with pytest.raises(ConflictError):
        operator.call("POST", f"/v1/runs/{run_id}/sync", SyncRequest(interval=4), Ok)
    operator.call("POST", f"/v1/nodes/{node.node_id}/evict", None, Ok)
    found = {str(line["action"]): line for line in log(hub, after)}
    assert found["join"]["who"] == "us-west"
    assert found["token.create"]["result"] == "done"
    assert "token_id=" in str(found["token.create"]["detail"])
    assert f"run_id={run_id}" in str(found["run.submit"]["detail"])
    assert found["run.stop"]["target"] == run_id
    assert found["run.sync"]["result"] == "CIUIC-407"
    evict = found["node.evict"]
    assert (evict["role"], evict["target"], evict["address"]) == ("operator", node.node_id, "127.0.0.1")
    assert evict["serial"]


def test_refused_requests_are_counted_not_listed(hub: HubProcess) -> None:
    viewer = hub.join("looker", role="viewer")
    before = len(log(hub))
    with dial(hub) as stream:
        for _ in range(50):
            assert ask(stream, "GET", "/v1/hub")[0] == 401
    for _ in range(3):
        with pytest.raises(RoleError):
            viewer.client.call("POST", "/v1/tokens", CreateTokenRequest(), Ok)
    lines = log(hub)[before:]
    assert [line["action"] for line in lines] == ["requests.refused"]
    assert "50 x 401" in str(lines[0]["detail"])
    assert "3 x 403" in str(lines[0]["detail"])


def test_the_log_survives_kill_9(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "home") as own:
        own.join("a")
        before = log(own)
        own.kill()
        own.start()
        assert log(own)[: len(before)] == before


def test_revocation_is_on_record_also_when_nobody_is_hit(hub: HubProcess) -> None:
    request = RevokeRequest(name="no-such-one")
    with pytest.raises(CiuicError):
        hub.operator().call("POST", "/v1/certificates/revoke", request, Ok)
    assert (log(hub)[-1]["action"], log(hub)[-1]["result"]) == ("revoke", "CIUIC-406")


# ---- secrets -------------------------------------------------------------------------------------------------------


def test_no_secret_is_in_a_log_a_url_an_event_or_a_process_list(tmp_path: Path) -> None:
    """A real join with the token in the environment, a real run with a worker; then everything that is written."""
    with HubProcess(tmp_path / "hub-home") as hub:
        token = hub.token()
        home = tmp_path / "node-home"
        environment = {**os.environ, "CIUIC_TOKEN": token, "CIUIC_HOME": str(home), "PYTHONWARNINGS": "default"}
        command = [sys.executable, "-m", "ciuic.cli.main", "node", "join", hub.url, "--location", "w", "--allow-code"]
        arguments: set[str] = set()
        with (tmp_path / "agent.log").open("w") as log_file:
            agent = subprocess.Popen(command, env=environment, stderr=log_file, stdout=log_file)
        try:
            eventually(lambda: "w" in hub.nodes(), within_s=60)
            with pytest.raises(TokenError, match="used up"):
                join_network(token, "again", {}, url=hub.url)
            program = "import os, sys; print('worker', sorted(os.environ), os.environ.get('CIUIC_TOKEN')); sys.exit(0)"
            run_id = hub.submit({"name": "r", "model": {"command": [sys.executable, "-c", program]}})
            stop = threading.Event()
            watcher = threading.Thread(target=lambda: _watch(arguments, stop))
            watcher.start()
            eventually(lambda: b"worker [" in _logs(hub, run_id), within_s=60)
            stop.set()
            watcher.join()
        finally:
            agent.terminate()
            agent.wait(timeout=60)
        secrets = _secrets(token, home, hub.home)
        assert len(secrets) >= 6
        assert any("node" in line and "join" in line for line in arguments), "the agent was not seen"
        seen: dict[str, bytes] = {
            "arguments": "\n".join(arguments).encode(),
            "agent log": (tmp_path / "agent.log").read_bytes(),
            "hub's stderr": hub.stderr.read_bytes(),
            "events": json.dumps([str(event) for event in hub.events()]).encode(),
            "audit": json.dumps(log(hub)).encode(),
            "run's logs": _logs(hub, run_id),
            "state": hub.operator().fetch("/api/state"),
            "metrics": hub.operator().fetch("/metrics"),
        }
        for folder in (hub.home, home):
            for path in folder.rglob("*"):
                if path.is_file() and path.suffix != ".key":
                    seen[str(path.relative_to(tmp_path))] = path.read_bytes()
        found = [(where, what) for where, body in seen.items() for what, secret in secrets.items() if secret in body]
        assert found == []
        assert b"None" in _logs(hub, run_id), "the worker must not inherit the token"


def _watch(arguments: set[str], stop: threading.Event) -> None:
    """Every command line on this machine, for as long as the run goes."""
    while not stop.wait(0.02):
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                arguments.add(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue


def _logs(hub: HubProcess, run_id: str) -> bytes:
    return b"\n".join(hub.operator().stream_lines(f"/v1/runs/{run_id}/logs"))


def _secrets(token: str, node_home: Path, hub_home: Path) -> dict[str, bytes]:
    """By name: the token, its secret, and a line out of the middle of every private key."""
    found = {"token": token.encode(), "secret": parse_token(token).secret.encode()}
    for folder in (node_home, hub_home):
        for path in folder.rglob("*.key"):
            found[str(path)] = path.read_bytes().splitlines()[1]
    return found
