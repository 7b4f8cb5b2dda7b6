"""Where state lives on this machine, and with which certificate the operator commands speak to the hub.

`ciuic hub start` writes `operator/profile.json` under CIUIC_HOME:
{"url": ..., "authority": path, "cert": path, "key": path}; relative paths are relative to the profile's folder.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ciuic.errors import CertificateError, UsageError

if TYPE_CHECKING:
    from ciuic.net.client import HubClient

MAX_PROFILE_BYTES = 65536
RENEW_BEFORE_S = 30 * 86400.0
_REWRITE = "start the hub again to rewrite it"


@dataclass(frozen=True, kw_only=True)
class ClientProfile:
    """How to reach one hub as one identity."""

    url: str
    authority: Path
    """Certificate of the hub's authority (PEM)."""
    cert: Path
    key: Path


def ciuic_home(given: Path | None = None) -> Path:
    """The folder for everything Ciuic keeps: `given`, else $CIUIC_HOME, else the platform's data folder."""
    if given is not None:
        return given.expanduser().resolve()
    from_environment = os.environ.get("CIUIC_HOME", "")
    if from_environment:
        return Path(from_environment).expanduser().resolve()
    import platformdirs

    return Path(platformdirs.user_data_dir("ciuic"))


def load_operator_profile(home: Path | None = None) -> ClientProfile:
    """The profile of the local operator.

    Raises CertificateError when this machine has none or its files are gone, UsageError when the file is not a profile.
    """
    path = ciuic_home(home) / "operator" / "profile.json"
    try:
        with path.open("rb") as file:
            raw = json.loads(file.read(MAX_PROFILE_BYTES))
    except FileNotFoundError:
        raise CertificateError(
            "this machine has no operator certificate",
            cause=f"there is no {path}",
            next="run this where `ciuic hub start` was run, or set CIUIC_HOME to a folder with an operator profile",
        ) from None
    except OSError as error:
        raise CertificateError(f"{path} cannot be read", cause=str(error.strerror), next="run as its owner") from error
    except ValueError as error:
        raise UsageError(f"{path} is not a profile", cause=str(error), next=_REWRITE) from None
    return _check_profile(raw, path)


def _check_profile(raw: object, path: Path) -> ClientProfile:
    keys = ("url", "authority", "cert", "key")
    if not isinstance(raw, dict) or not all(isinstance(raw.get(key), str) and raw[key] for key in keys):
        raise UsageError(
            f"{path} is not a profile",
            cause=f"it must hold {', '.join(keys)} as texts",
            next=_REWRITE,
        )
    files = {key: path.parent / str(raw[key]) for key in keys[1:]}
    for file in files.values():
        if not file.is_file():
            raise CertificateError(
                "the operator certificate is not complete",
                cause=f"{path} names {file}, which is not there",
                next=_REWRITE,
            )
    return ClientProfile(url=str(raw["url"]).rstrip("/"), **files)


def operator_client(home: Path | None = None) -> "HubClient":
    """A client that speaks to the operator's hub."""
    from ciuic.net.client import HubClient

    profile = load_operator_profile(home)
    client = HubClient(profile.url, profile.authority.read_bytes(), profile.cert, profile.key, purpose="operator")
    if _ends_soon(profile.cert):
        from ciuic.cli.operators import renew_quietly

        renew_quietly(profile, client)
    return client


def _ends_soon(cert: Path) -> bool:
    """Its last month has begun."""
    from ciuic.net.tls import certificate_ends_at

    return certificate_ends_at(cert.read_bytes()) - time.time() < RENEW_BEFORE_S
