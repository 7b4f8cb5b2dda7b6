"""Which packages are installed, without importing them."""

import importlib.metadata


def installed_version(package: str) -> str:
    """The installed version of a package, empty when it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
