"""What is wrong with a job, said to a person: one sentence per problem, with line numbers and did-you-mean."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from ciuic.job_lines import KeyPath, line_of


class Problem(NamedTuple):
    """One mistake: where (`("sync", "interval")`) and the sentence about it, which names the place itself."""

    path: KeyPath
    text: str


def explain(errors: Iterable[ErrorDetails], raw: Mapping[str, Any], root: type[BaseModel]) -> list[Problem]:
    """Pydantic's errors as problems, one per key (a union's alternatives are folded into one sentence)."""
    by_key: dict[KeyPath, list[tuple[KeyPath, ErrorDetails]]] = {}
    for error in errors:
        path = _path_in(raw, error)
        group = path if error["type"] == "extra_forbidden" else path[:2]
        by_key.setdefault(group, []).append((path, error))
    problems: list[Problem] = []
    for found in by_key.values():
        deepest = max(len(path) for path, _ in found)
        kept = [(path, error) for path, error in found if len(path) == deepest]
        for path in dict.fromkeys(path for path, _ in kept):
            sentences = [_sentence(path, error, root) for other, error in kept if other == path]
            problems.append(Problem(path, _fold(sentences)))
    return problems


def describe(problems: Iterable[Problem], lines: dict[KeyPath, int]) -> tuple[str, ...]:
    """The problems in the order of the file, each with its line where one is known."""
    numbered = [(line_of(path, lines), text) for path, text in problems]
    numbered.sort(key=lambda problem: problem[0] or float("inf"))
    return tuple(f"line {line}: {text}" if line else text for line, text in numbered)


def name_of(path: KeyPath) -> str:
    """`("data", "path", 0)` as `data.path[0]`."""
    name = ""
    for part in path:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean x?` for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _path_in(raw: Any, error: ErrorDetails) -> KeyPath:
    """The error's place without the names of union members and the like, which pydantic mixes in."""
    path: KeyPath = ()
    for part in error["loc"]:
        is_key = isinstance(raw, Mapping) and part in raw
        is_index = isinstance(raw, list) and isinstance(part, int) and part < len(raw)
        if is_key or is_index:
            raw = raw[part]
            path = (*path, part)
    return (*path, error["loc"][-1]) if error["type"] == "missing" else path


def _sentence(path: KeyPath, error: ErrorDetails, root: type[BaseModel]) -> tuple[str, str]:
    """What comes before and after the requirement: (name + requirement, what was there)."""
    kind, context, name = error["type"], error.get("ctx", {}), name_of(path)
    if kind == "extra_forbidden":
        return _unknown_key(path, root), ""
    if kind == "conflict":
        return str(error["msg"]), ""
    if kind == "missing":
        return f"{name} is missing", ""
    there = _show(error["input"])
    if kind == "literal_error":
        choices = str(context.get("expected", ""))
        words = [word.strip(" '") for word in choices.replace(" or ", ", ").split(", ")]
        near = did_you_mean(error["input"], words) if isinstance(error["input"], str) and len(words) > 1 else ""
        return f"{name} must be {choices.replace('True', 'true').replace('False', 'false')}", f"not {there}{near}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{name} must be a table", f"not {there}"
    return f"{name} {_requirement(kind, context, str(error['msg']))}", f"not {there}"


_REQUIREMENTS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text in quotes",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "finite_number": "must be a finite number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must have at least {min_length} character",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} entry",
    "too_long": "must have at most {max_length} entries",
    "requirement": "{must}",
}


def _requirement(kind: str, context: Mapping[str, Any], message: str) -> str:
    template = _REQUIREMENTS.get(kind)
    if template is None:
        return f"is wrong: {message[:1].lower()}{message[1:]}"
    return template.format(**{key: _plain(value) for key, value in context.items()})


def _plain(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _show(value: object) -> str:
    """What the person wrote, short, as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "a table"
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."


def _fold(sentences: list[tuple[str, str]]) -> str:
    """Alternatives of one key as one sentence: `x must be text in quotes or a list, not 5`."""
    first, there = sentences[0]
    others = [requirement.partition(" must be ")[2] for requirement, _ in sentences[1:]]
    whole = " or ".join([first, *dict.fromkeys(other for other in others if other)])
    return f"{whole}, {there}" if there else whole


def _unknown_key(path: KeyPath, root: type[BaseModel]) -> str:
    name, parents = str(path[-1]), path[:-1]
    sections = _sections(root)
    if not parents:
        owner = _owner(name, sections)
        near = f"; it belongs in [{owner}]" if owner else did_you_mean(name, root.model_fields)
        return f"unknown key {name}{near}"
    known = _fields_at(root, parents)
    near = did_you_mean(name, known)
    owner = _owner(name, sections)
    if not near and owner:
        near = f"; it belongs in [{owner}]"
    return f"unknown key {name} in [{name_of(parents)}]{near}"


def _fields_at(root: type[BaseModel], parents: KeyPath) -> list[str]:
    """The keys that a table has; empty when it has no class of its own."""
    kind: type[BaseModel] | None = root
    for part in parents:
        field = kind.model_fields.get(str(part)) if kind is not None else None
        kind = _model_in(field.annotation) if field is not None else None
    return list(kind.model_fields) if kind is not None else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model of `Model` or `Model | None`; None for anything else."""
    kinds = [kind for kind in (get_args(annotation) or (annotation,)) if kind is not type(None)]
    is_one = len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel)
    return kinds[0] if is_one else None


def _owner(name: str, sections: Mapping[str, type[BaseModel]]) -> str:
    owners = [section for section, model in sections.items() if name in model.model_fields]
    return owners[0] if len(owners) == 1 else ""


def _sections(root: type[BaseModel]) -> dict[str, type[BaseModel]]:
    found = {}
    for name, field in root.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found[name] = kind
    return found


_PLACE = re.compile(r"\s*\(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")


def syntax_problem(error: ValueError, body: bytes) -> str:
    """The one problem of a text that is not TOML (or not UTF-8), with its line."""
    if isinstance(error, UnicodeDecodeError):
        line = body.count(b"\n", 0, error.start) + 1
        return f"line {line}: byte {body[error.start]:#04x} is not UTF-8 text"
    message = str(error)
    place = _PLACE.search(message)
    what = message[: place.start()] if place else message
    last_line = body.rstrip().count(b"\n") + 1
    line = int(place["line"]) if place and place["line"] else last_line
    return f"line {line}: this is not TOML: {what[:1].lower()}{what[1:]}"
