import pytest

from ciuic.doctor.catalogue import CLASSES, code_of, codes
from ciuic.errors import NotFoundError


def test_every_entry_is_whole():
    for code in codes().values():
        assert code.code.removeprefix("CIUIC-")[0] in CLASSES
        assert all((code.title, code.meaning, code.detection, code.fix)), code.code
        assert code.title == code.title[:1].lower() + code.title[1:] or code.title[:2].isupper(), code.code
        assert "\n" not in code.fix, code.code


def test_what_a_code_explains_exists():
    for code in codes().values():
        for other in code.explains:
            assert other in codes(), f"{code.code} explains {other}"
            assert other != code.code


def test_short_and_long_spelling_are_the_same():
    first = next(iter(codes()))
    assert code_of(first.removeprefix("CIUIC-").lower()) is code_of(first)


def test_an_unknown_code_is_refused_with_the_next_step():
    with pytest.raises(NotFoundError, match="explain"):
        code_of("Z99")
