"""Which identity a program uses that no agent has started."""

import json
from pathlib import Path

import pytest

from ciuic.errors import CertificateError, StorageError, UsageError
from ciuic.net.credentials import find_credentials


def add_node(home: Path, location: str) -> Path:
    folder = home / "nodes" / location
    folder.mkdir(parents=True)
    identity = {"node_id": f"{location}-2", "url": "https://hub:1", "location": location, "joined_at": 1.0}
    (folder / "identity.json").write_text(json.dumps(identity))
    for name in ("authority.pem", "node.pem", "node.key"):
        (folder / name).write_text("x")
    return folder


def add_operator(home: Path) -> Path:
    folder = home / "operator"
    folder.mkdir(parents=True)
    profile = {"url": "https://hub:2", "authority": "authority.pem", "cert": "operator.pem", "key": "operator.key"}
    (folder / "profile.json").write_text(json.dumps(profile))
    for name in ("authority.pem", "operator.pem", "operator.key"):
        (folder / name).write_text("x")
    return folder


def test_the_only_node_comes_before_the_operator(tmp_path: Path) -> None:
    add_operator(tmp_path)
    assert find_credentials(tmp_path).cert == tmp_path / "operator" / "operator.pem"
    folder = add_node(tmp_path, "us-west")
    found = find_credentials(tmp_path)
    assert (found.url, found.name, found.key) == ("https://hub:1", "us-west-2", folder / "node.key")


def test_among_several_nodes_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for location in ("tokyo", "us-west"):
        add_node(tmp_path, location)
    with pytest.raises(UsageError, match="several nodes") as caught:
        find_credentials(tmp_path)
    assert "tokyo, us-west" in caught.value.cause
    monkeypatch.setenv("CIUIC_NODE", "tokyo")
    assert find_credentials(tmp_path).name == "tokyo-2"
    monkeypatch.setenv("CIUIC_NODE", "../tokyo")
    with pytest.raises(UsageError, match="no such node"):
        find_credentials(tmp_path)


def test_the_home_of_the_environment_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_node(tmp_path, "us-west")
    monkeypatch.setenv("CIUIC_HOME", str(tmp_path))
    assert find_credentials().name == "us-west-2"


def test_no_identity_and_a_damaged_one_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="no identity") as caught:
        find_credentials(tmp_path)
    assert "ciuic node join" in caught.value.next
    folder = add_node(tmp_path, "us-west")
    (folder / "node.key").unlink()
    with pytest.raises(StorageError, match=r"node\.key is missing"):
        find_credentials(tmp_path)
    (folder / "identity.json").write_text("{")
    with pytest.raises(StorageError, match="cannot be read"):
        find_credentials(tmp_path)
