"""Orders for a lab: what cannot be asked for is refused before anything happens."""

import pytest

from ciuic.errors import UsageError
from ciuic.lab.faults import KINDS, VALUED, Order, parse_share, path_text, rate_text
from ciuic.lab.network import PathNow


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_is_needed_by_some_kinds_and_refused_by_the_others(kind: str) -> None:
    wrong = "" if kind in VALUED else "1"
    with pytest.raises(UsageError, match="value"):
        Order(where="us-west", kind=kind, value=wrong)
    assert kind in Order(where="us-west", kind=kind, value="" if wrong else "1", for_s=2.0).text


@pytest.mark.parametrize("for_s", [0.0, -1.0, 1e6, float("nan")])
def test_a_fault_lasts_for_a_time_that_can_be(for_s: float) -> None:
    with pytest.raises(UsageError, match="cannot last"):
        Order(where="us-west", kind="cut", for_s=for_s)


@pytest.mark.parametrize(("text", "share"), [("1%", 0.01), ("0.5 %", 0.005), ("100", 1.0), ("0", 0.0)])
def test_loss_is_a_share_of_the_packets(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["101%", "-1", "much", "", "nan"])
def test_a_share_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_share(text)


def test_links_in_words() -> None:
    assert path_text(PathNow(delay_s=0.07, loss=0.005, is_cut=True)) == "70 ms one way, 0.50% loss, CUT"
    assert rate_text(5e6, 5e6) == "5 Mbit/s"
    assert rate_text(20e6, 200e6) == "20 Mbit/s up, 200 Mbit/s down"
