"""What `ciuic node join` makes of its arguments."""

from pathlib import Path

import pytest

from ciuic.cli.leaving import leave_network
from ciuic.cli.node import parse_claims, read_token
from ciuic.errors import TokenError, UsageError


def test_claims_are_numbers_by_name() -> None:
    assert parse_claims(["gpu=8", "bandwidth_gbit_s=0.5"]) == {"gpu": 8.0, "bandwidth_gbit_s": 0.5}


@pytest.mark.parametrize("claim", ["gpu", "gpu=", "gpu=many", "=8", "gpu=-1", "gpu=nan", "gpu=inf", "a b=1"])
def test_a_claim_that_is_no_number_is_named(claim: str) -> None:
    with pytest.raises(UsageError, match="is not a claim"):
        parse_claims([claim])


def test_a_token_comes_from_the_option_then_the_file_then_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CIUIC_TOKEN", " of-environment\n")
    file = tmp_path / "token"
    file.write_text("of-file\n")
    assert read_token("", None) == "of-environment"
    assert read_token("", file) == "of-file"
    assert read_token("of-option", None) == "of-option"
    with pytest.raises(UsageError, match="both"):
        read_token("of-option", file)


def test_an_empty_or_binary_token_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    for content in (b"", b"\xff\xfe", b" \n"):
        file.write_bytes(content)
        with pytest.raises(TokenError, match="does not hold a token"):
            read_token("", file)
    with pytest.raises(UsageError, match="cannot be read"):
        read_token("", tmp_path / "none")


def test_leaving_without_any_node_says_how_to_join(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no node") as caught:
        leave_network(tmp_path, "")
    assert "ciuic node join" in caught.value.next


def test_leaving_with_several_nodes_asks_for_one(tmp_path: Path) -> None:
    for name in ("us-west", "eu-central"):
        folder = tmp_path / "nodes" / name
        folder.mkdir(parents=True)
        (folder / "identity.json").write_text("{}")
    with pytest.raises(UsageError, match="several") as caught:
        leave_network(tmp_path, "")
    assert "eu-central, us-west" in caught.value.next
    with pytest.raises(UsageError, match="not joined a network as ap"):
        leave_network(tmp_path, "ap")
