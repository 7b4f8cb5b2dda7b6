"""Join tokens: what comes out is what went in; nothing malformed gets through; the secret never shows."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import TokenError, UsageError
from ciuic.net.tokens import PREFIX, make_token, new_token_secret, parse_token
from ciuic.net.url import parse_hub_url

FINGERPRINT = "ab" * 32


def _token(**changes: object) -> str:
    parts = {"url": "https://hub:8443", "authority_fingerprint": FINGERPRINT, "id": "t1", "secret": "s3cret", **changes}
    return PREFIX + base64.urlsafe_b64encode(json.dumps(parts).encode()).decode()


@given(secret=st.text(min_size=1, max_size=80), token_id=st.text(min_size=1, max_size=20))
def test_a_token_survives_the_round_trip(secret: str, token_id: str) -> None:
    text = make_token(url="https://hub:8443", authority_fingerprint=FINGERPRINT, id=token_id, secret=secret)
    token = parse_token(f"  {text}\n")
    assert (token.id, token.secret, token.url) == (token_id, secret, "https://hub:8443")
    assert token.authority_fingerprint == FINGERPRINT
    assert not set(text) & set("+/= \n")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "ciuic2.abc",
        PREFIX,
        PREFIX + "!!!!",
        PREFIX + "é",
        PREFIX + "YWJj",
        PREFIX + "A" * 5000,
        _token(url="http://hub:8443"),
        _token(url="https://"),
        _token(authority_fingerprint="abc"),
        _token(authority_fingerprint="AB" * 32),
        _token(id=""),
        _token(secret=""),
        _token(secret=7),
        _token(extra="x"),
    ],
)
def test_a_malformed_token_is_a_token_error(text: str) -> None:
    with pytest.raises(TokenError):
        parse_token(text)


@given(cut=st.integers(min_value=1, max_value=60))
def test_a_token_that_was_not_copied_whole_is_refused(cut: int) -> None:
    with pytest.raises(TokenError):
        parse_token(_token().rstrip("=")[:-cut])


def test_the_secret_shows_neither_in_errors_nor_in_the_repr() -> None:
    assert "s3cret" not in repr(parse_token(_token()))
    with pytest.raises(TokenError) as caught:
        parse_token(_token(extra="s3cret"))
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_secrets_are_long_and_never_the_same() -> None:
    made = [new_token_secret() for _ in range(50)]
    assert len({token_id for token_id, _ in made}) == len({secret for _, secret in made}) == 50
    assert all(len(secret) >= 43 for _, secret in made)


@pytest.mark.parametrize(
    ("text", "host", "port", "url"),
    [
        ("https://hub.example.org:8443", "hub.example.org", 8443, "https://hub.example.org:8443"),
        ("https://hub/", "hub", 443, "https://hub:443"),
        (" https://127.0.0.1:1 ", "127.0.0.1", 1, "https://127.0.0.1:1"),
        ("https://[::1]:8443", "::1", 8443, "https://[::1]:8443"),
    ],
)
def test_a_hub_address_is_host_and_port(text: str, host: str, port: int, url: str) -> None:
    address = parse_hub_url(text)
    assert (address.host, address.port, address.url) == (host, port, url)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hub:8443",
        "http://hub",
        "https://",
        "https://hub:99999",
        "https://hub/path",
        "https://hub?x=1",
        "https://[::1",
    ],
)
def test_anything_else_is_not_a_hub_address(text: str) -> None:
    with pytest.raises(UsageError):
        parse_hub_url(text)


def test_an_address_with_a_password_is_refused_without_repeating_it() -> None:
    with pytest.raises(UsageError) as caught:
        parse_hub_url("https://me:hunter2@hub")
    assert "hunter2" not in str(caught.value)
