"""What differed between the ranks before the replay began."""

from collections.abc import Mapping
from typing import Any

from ciuic.doctor.case import odd_ones
from ciuic.doctor.loss.records import Already, Held, Replayed


def differed_before(records: Mapping[int, Replayed]) -> tuple[Already, ...]:
    """All that differed, with all names."""
    found: list[Already | None] = [
        _named("parameters", {rank: record.parameters for rank, record in records.items()}),
        _named("buffers", {rank: record.buffers for rank, record in records.items()}),
        _named("mode", {rank: dict.fromkeys(record.evaluating, "eval") for rank, record in records.items()}),
        _named("code", {rank: record.code for rank, record in records.items()}),
        _named("settings", {rank: record.settings for rank, record in records.items()}),
        _named("batch", {rank: {"batch": record.batch} for rank, record in records.items()}),
        _named("random state", {rank: {"random state": record.random_before} for rank, record in records.items()}),
    ]
    return tuple(each for each in found if each is not None)


def _named(what: str, values: Mapping[int, Mapping[str, Any]]) -> Already | None:
    names = sorted({name for each in values.values() for name in each})
    odd: dict[str, tuple[int, ...]] = {}
    for name in names:
        ranks = odd_ones({rank: _plain(each.get(name)) for rank, each in sorted(values.items())})
        if ranks:
            odd[name] = ranks
    if not odd:
        return None
    ranks = tuple(sorted({rank for each in odd.values() for rank in each}))
    details: list[str] = []
    for name in list(odd)[: 3 if what == "settings" else 1]:
        usual = next(each.get(name) for rank, each in sorted(values.items()) if rank not in odd[name])
        details.append(_detail(what, name, values[odd[name][0]].get(name), usual))
    return Already(what=what, names=tuple(odd), count=len(odd), ranks=ranks, detail="; ".join(details))


def _plain(value: Any) -> Any:
    return (value.digest, value.dtype) if isinstance(value, Held) else value


def _detail(what: str, name: str, unusual: Any, usual: Any) -> str:
    if what == "settings":
        return f"{name} {unusual}, not {usual}"
    if what == "mode":
        return "eval, not train" if unusual else "train, not eval"
    if isinstance(unusual, Held) and isinstance(usual, Held) and unusual.dtype != usual.dtype:
        return f"{unusual.dtype}, not {usual.dtype}"
    return ""
