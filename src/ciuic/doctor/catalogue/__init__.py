"""Every code the doctor can name, by class; the pages of docs/codes are made from these entries."""

import functools
import importlib

from ciuic.doctor.catalogue.code import Code
from ciuic.errors import NotFoundError

CLASSES = {
    "A": "gradients are not synchronised",
    "B": "the optimizer does not own the model",
    "C": "the graph is cut, gradients are missing",
    "D": "replicas or buffers diverge",
    "E": "the scale of gradients or loss is wrong",
    "F": "clipping, precision, loss scaling",
    "G": "learning rate and time step",
    "H": "data order, shards, seeds",
    "I": "checkpoint and resume",
    "J": "hang, order of calls",
    "K": "network, launch, clock",
    "L": "stragglers and slow links",
    "M": "a ledger run of Ciuic",
}


@functools.cache
def codes() -> dict[str, Code]:
    """All entries, in order."""
    found: dict[str, Code] = {}
    for letter in CLASSES:
        module = importlib.import_module(f"ciuic.doctor.catalogue.class_{letter.lower()}")
        found.update({code.code: code for code in module.CODES})
    return found


def code_of(code: str) -> Code:
    """An entry; `a1` and `CIUIC-A1` are the same. Raises NotFoundError."""
    wanted = code.upper() if code.upper().startswith("CIUIC-") else f"CIUIC-{code.upper()}"
    try:
        return codes()[wanted]
    except KeyError:
        raise NotFoundError(
            f"there is no code {code}",
            cause=f"the doctor's codes are {min(codes())} to {max(codes())}",
            next="`ciuic doctor explain` lists them all",
        ) from None
