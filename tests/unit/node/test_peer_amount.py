"""How much a node moves for another that measures the way to it."""

import pytest

from ciuic.net.probe import LARGEST_BYTES
from ciuic.node.peer_server import _is_amount


def test_amounts_up_to_the_limit_are_moved() -> None:
    assert all(_is_amount(text) for text in ("0", "1", str(LARGEST_BYTES)))


@pytest.mark.parametrize("text", ["", "-1", "1.5", "\u00b2", str(LARGEST_BYTES + 1), "0" * 12 + "9" * 20])
def test_more_or_no_number_is_refused(text: str) -> None:
    assert not _is_amount(text)
