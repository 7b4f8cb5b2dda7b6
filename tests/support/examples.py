"""How many examples hypothesis tries: few in `make test`, many in `make soak` (`--hypothesis-profile=soak`)."""

import os

from hypothesis import settings


def is_soak() -> bool:
    """Time does not matter: look further than the last time."""
    return settings.get_current_profile_name() == "soak"


def examples(few: int, many: int) -> int:
    """`many` in a soak, else `few`; CIUIC_EXAMPLES says another number."""
    return int(os.environ.get("CIUIC_EXAMPLES", many if is_soak() else few))
