"""Who a shard is: refused names, missing tokens, damaged files."""

from pathlib import Path

import pytest

from ciuic.errors import StorageError, TokenError, UsageError
from ciuic.hub.shards.config import ShardConfig, host_of, settle_identity


@pytest.mark.parametrize("name", ["", "S1", "a/b", "..", "x" * 49])
def test_a_name_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="name for a shard"):
        settle_identity(ShardConfig(home=tmp_path, name=name), "127.0.0.1")


@pytest.mark.parametrize("join", ["", "https://hub.example:8443"])
def test_the_first_start_needs_a_token(tmp_path: Path, join: str) -> None:
    with pytest.raises(TokenError, match="has not joined"):
        settle_identity(ShardConfig(home=tmp_path, name="s1", join=join), "127.0.0.1")
    with pytest.raises(TokenError):
        settle_identity(ShardConfig(home=tmp_path, name="s1", join="ciuic1.nonsense"), "127.0.0.1")


def test_a_damaged_identity_is_told(tmp_path: Path) -> None:
    config = ShardConfig(home=tmp_path, name="s1")
    config.folder.mkdir(parents=True)
    (config.folder / "identity.json").write_text("{")
    with pytest.raises(StorageError, match="identity"):
        settle_identity(config, "127.0.0.1")


def test_the_host_of_a_url_goes_into_the_certificate() -> None:
    assert host_of("https://shard.example:8444") == "shard.example"
    assert host_of("https://[::1]:8444") == "::1"
    with pytest.raises(UsageError):
        host_of("http://shard.example")
