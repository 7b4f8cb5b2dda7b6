"""Class G."""

from ciuic.doctor.catalogue.code import Code

CODES: tuple[Code, ...] = ()
