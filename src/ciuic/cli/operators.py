"""Operator profiles, made for others and renewed: a folder `operator/` with certificate, key and address."""

import json
from contextlib import suppress
from pathlib import Path

from ciuic.cli.profile import ClientProfile, load_operator_profile, operator_client
from ciuic.errors import CiuicError, StorageError, UsageError
from ciuic.net.access_messages import CertificateReply, CertificateRequest, OperatorReply, OperatorRequest
from ciuic.net.client import HubClient
from ciuic.net.tls import certificate_ends_at, check_issued, new_key_and_csr, write_private_file

FILES = {"authority": "authority.pem", "cert": "operator.pem", "key": "operator.key"}


def write_profile(name: str, role: str, home: Path) -> tuple[OperatorReply, Path]:
    """Get a certificate for `name`, and write a profile below `home`; (what the hub said, the folder).

    The key is made here and leaves this machine only with the folder. Raises UsageError when there is a profile.
    """
    folder = home.expanduser().resolve() / "operator"
    if folder.exists():
        raise UsageError(f"{folder} is there already", next="choose another folder with --folder")
    key_pem, csr_pem = new_key_and_csr()
    wanted = "operator" if role == "operator" else "viewer"
    request = OperatorRequest(name=name, role=wanted, csr_pem=csr_pem.decode("ascii"))
    authority = load_operator_profile().authority.read_bytes()
    made = operator_client().call("POST", "/v1/operators", request, OperatorReply)
    certificate = made.certificate_pem.encode()
    check_issued(certificate, authority_pem=authority, key_pem=key_pem)
    profile = json.dumps({"url": made.url, **FILES}, indent=2) + "\n"
    contents = {
        FILES["key"]: key_pem,
        FILES["cert"]: certificate,
        FILES["authority"]: authority,
        "profile.json": profile.encode(),
    }
    for file, data in contents.items():
        write_private_file(folder / file, data)
    return made, folder.parent


def renew_profile() -> float:
    """A new certificate for the profile in use; when it ends (seconds since 1970)."""
    profile = load_operator_profile()
    return _renew(profile, operator_client())


def renew_quietly(profile: ClientProfile, client: HubClient) -> None:
    """On the way to something else: when it does not work, the command that was given says why."""
    with suppress(CiuicError, OSError):
        _renew(profile, client)


def _renew(profile: ClientProfile, client: HubClient) -> float:
    authority = profile.authority.read_bytes()
    key_pem, csr_pem = new_key_and_csr()
    request = CertificateRequest(csr_pem=csr_pem.decode("ascii"))
    issued = client.call("POST", "/v1/operator/renew", request, CertificateReply).certificate_pem.encode()
    check_issued(issued, authority_pem=authority, key_pem=key_pem)
    if profile.cert == profile.key:
        raise StorageError(f"{profile.cert} holds certificate and key in one file", next="renew it by hand")
    write_private_file(profile.key, key_pem)
    write_private_file(profile.cert, issued)
    return certificate_ends_at(issued)
