"""A shard's certificate serves nodes and calls the hub, and holds nothing but checked names."""

from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from ciuic.errors import CertificateError
from ciuic.net.tls import Authority, identity_from_der, new_key_and_csr


def test_the_certificate_of_a_shard_is_for_both_uses_and_names_its_addresses(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    _, csr = new_key_and_csr()
    pem = authority.issue_shard(csr, common_name="s1", names=["shard.example.org", "127.0.0.1"])
    certificate = x509.load_pem_x509_certificate(pem)
    usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usages) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["shard.example.org"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    identity = identity_from_der(certificate.public_bytes(serialization.Encoding.DER))
    assert (identity.role, identity.name) == ("shard", "s1")


@pytest.mark.parametrize("names", [[], ["x" * 254], ["n"] * 33, ["a b.\u2028"]])
def test_addresses_that_cannot_be_are_refused(tmp_path: Path, names: list[str]) -> None:
    authority = Authority.create(tmp_path)
    _, csr = new_key_and_csr()
    with pytest.raises(CertificateError):
        authority.issue_shard(csr, common_name="s1", names=names)
