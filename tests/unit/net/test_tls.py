"""Certificates: who may issue, who they belong to, what they may be used for."""

import datetime as dt
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ciuic.errors import CertificateError, ConflictError, StorageError
from ciuic.net.tls import (
    Authority,
    check_issued,
    client_context,
    identity_from_der,
    new_key_and_csr,
    pem_fingerprint,
    write_private_file,
)


def _der(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)


def test_an_authority_is_the_same_after_it_is_loaded_again(tmp_path: Path) -> None:
    made = Authority.create(tmp_path / "hub")
    loaded = Authority.load(tmp_path / "hub")
    assert loaded.fingerprint == made.fingerprint == pem_fingerprint(made.certificate_pem)[0]
    assert loaded.certificate_pem == made.certificate_pem


def test_an_authority_is_never_overwritten(tmp_path: Path) -> None:
    Authority.create(tmp_path)
    with pytest.raises(ConflictError):
        Authority.create(tmp_path)


def test_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    Authority.create(tmp_path / "hub")
    assert stat.S_IMODE((tmp_path / "hub" / "authority.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "hub").stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", [b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_a_damaged_authority_is_a_storage_error(tmp_path: Path, damage: bytes) -> None:
    Authority.create(tmp_path)
    (tmp_path / "authority.pem").write_bytes(damage)
    with pytest.raises(StorageError):
        Authority.load(tmp_path)


def test_a_key_of_another_authority_is_noticed(tmp_path: Path) -> None:
    Authority.create(tmp_path / "a")
    Authority.create(tmp_path / "b")
    (tmp_path / "a" / "authority.key").write_bytes((tmp_path / "b" / "authority.key").read_bytes())
    with pytest.raises(StorageError):
        Authority.load(tmp_path / "a")


def test_certificates_begin_a_day_ago_and_end_after_their_time(tmp_path: Path) -> None:
    now = 1_800_000_000.0
    moment = dt.datetime.fromtimestamp(now, tz=dt.UTC)
    authority = Authority.create(tmp_path, clock=lambda: now)
    pems = [authority.issue_server([])[0], authority.issue_client(None, common_name="a", role="viewer")[0]]
    for pem, days in [(authority.certificate_pem, 3650), *((pem, 365) for pem in pems)]:
        certificate = x509.load_pem_x509_certificate(pem)
        assert certificate.not_valid_before_utc == moment - dt.timedelta(days=1)
        assert certificate.not_valid_after_utc == moment + dt.timedelta(days=days)


def test_a_server_certificate_covers_the_names_given_and_this_machine(tmp_path: Path) -> None:
    pem, _ = Authority.create(tmp_path).issue_server(["hub.example.org", "192.0.2.7", "localhost"])
    names = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    dns = names.get_values_for_type(x509.DNSName)
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    assert {"hub.example.org", "localhost"} <= set(dns)
    assert dns.count("localhost") == 1
    assert {"192.0.2.7", "127.0.0.1", "::1"} <= set(addresses)


def test_uses_do_not_mix(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    server = x509.load_pem_x509_certificate(authority.issue_server([])[0])
    client = x509.load_pem_x509_certificate(authority.issue_client(None, common_name="us-west", role="node")[0])
    assert list(server.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.SERVER_AUTH
    ]
    assert list(client.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.CLIENT_AUTH
    ]
    for certificate in (server, client):
        assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_the_subject_is_chosen_by_the_hub_not_by_the_request(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    key_pem, csr_pem = new_key_and_csr()
    certificate_pem, no_key = authority.issue_client(csr_pem, common_name="eu-central", role="node")
    identity = identity_from_der(_der(certificate_pem))
    assert (identity.role, identity.name, no_key) == ("node", "eu-central", b"")
    assert identity.serial == f"{x509.load_pem_x509_certificate(certificate_pem).serial_number:x}"
    assert check_issued(certificate_pem, authority_pem=authority.certificate_pem, key_pem=key_pem) == identity


def test_a_certificate_for_another_key_or_of_another_authority_is_refused(tmp_path: Path) -> None:
    ours, other = Authority.create(tmp_path / "a"), Authority.create(tmp_path / "b")
    key_pem, csr_pem = new_key_and_csr()
    good, _ = ours.issue_client(csr_pem, common_name="n", role="node")
    foreign, _ = other.issue_client(csr_pem, common_name="n", role="node")
    with pytest.raises(CertificateError):
        check_issued(foreign, authority_pem=ours.certificate_pem, key_pem=key_pem)
    with pytest.raises(CertificateError, match="another key"):
        check_issued(good, authority_pem=ours.certificate_pem, key_pem=new_key_and_csr()[0])


def _request(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    "request_pem",
    [
        b"",
        b"garbage",
        b"A" * 100_000,
        _request(ec.generate_private_key(ec.SECP384R1())),
        _request(rsa.generate_private_key(65537, 2048)),
    ],
    ids=["empty", "garbage", "oversized", "p384", "rsa"],
)
def test_only_p256_requests_are_signed(tmp_path: Path, request_pem: bytes) -> None:
    with pytest.raises(CertificateError):
        Authority.create(tmp_path).issue_client(request_pem, common_name="n", role="node")


@pytest.mark.parametrize("name", ["", "n" * 65])
def test_a_name_that_does_not_fit_a_certificate_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CertificateError):
        Authority.create(tmp_path).issue_client(None, common_name=name, role="node")


def test_the_hubs_own_certificate_is_no_identity(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="role"):
        identity_from_der(_der(Authority.create(tmp_path).issue_server([])[0]))
    with pytest.raises(CertificateError):
        identity_from_der(b"garbage")


def test_a_context_that_cannot_be_built_names_the_file(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    with pytest.raises(CertificateError, match=r"gone\.pem"):
        client_context(authority.certificate_pem, tmp_path / "gone.pem", tmp_path / "gone.key", "control")
    with pytest.raises(CertificateError, match="authority"):
        client_context(b"nothing", None, None, "control")


def test_private_files_replace_in_one_step_and_leave_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "new" / "node.key"
    write_private_file(target, b"one")
    write_private_file(target, b"two")
    assert target.read_bytes() == b"two"
    assert [entry.name for entry in target.parent.iterdir()] == ["node.key"]


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError):
        write_private_file(tmp_path / "file" / "node.key", b"x")
